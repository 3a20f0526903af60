"""Tests of dbrdist.cli.inspection.curves."""

from __future__ import annotations

import math

import pytest

from dbrdist.cli.inspection import curves
from dbrdist.cli.inspection.records import LogLines
from tests.cli.inspection.records_helpers import record
from tests.each import each


@each(n=[0, 1, 2, 999, 1000, 1001, 1002, 2000, 2001, 2002, 2999, 3000, 3001])
def test_a_line_has_about_a_thousand_points_with_all_extremes_and_ends_at_its_end(n):
    values = [math.sin(k) + 900 * (k == n // 3) - 700 * (k == n // 2) for k in range(n)]
    log = [{"epoch_detail": float(k), "loss": v} for k, v in enumerate(values)] + [{"epoch": 3}, {"loss": "text"}]
    log += [{"loss": None}, {"loss": math.nan}, {"loss": math.inf}, {"loss": True}]
    points = curves.points(log, "loss")
    ends = [(float(k), values[k]) for k in ([0, n - 1] if n else [])]
    assert len(points) <= 1002 and points == sorted(points) and points[:1] + points[-1:] == ends
    assert set(points) <= set(enumerate(values)) and (n > 1000 or len(points) == n)
    assert [f(v for _, v in points) for f in (min, max) if n] == [f(values) for f in (min, max) if n]


@pytest.mark.slow
def test_between_two_epochs_all_points_come_back_and_one_on_each_side():
    log = LogLines({"epoch_detail": k / 1000, "loss": math.cos(k)} for k in range(100_000))
    found = curves.points(log, "loss", 50.0, 50.5)
    assert found == [(k / 1000, math.cos(k)) for k in range(49_999, 50_502)]
    assert curves.points(log, "loss", 200.0, 300.0) == []
    assert len(curves.points(log, "loss", 10.0, 60.0)) <= 1002
    assert curves.points(log, "loss", -5.0, 0.0) == [(0.0, 1.0), (0.001, math.cos(1))]


def test_one_chart_by_its_name():
    log = [{"epoch": k, "main/loss": k, "main/own": -k} for k in range(5)]
    runs = [record("a", log)]
    assert [name for _, name, _ in curves.curves(runs)] == ["loss", "own"]
    ((title, _, (line,)),) = curves.curves(runs, "own", 1.5, 2.5)
    assert title == "own" and line.points == [(1.0, -1.0), (2.0, -2.0), (3.0, -3.0)]
    assert list(curves.curves(runs, "nothing")) == []


def test_a_log_of_many_keys_gives_as_many_charts_as_one_can_read():
    log = [{f"main/{k}": 1.0 for k in range(5000)}]
    assert len(list(curves.curves([record("a", log)]))) == 24


def test_each_of_many_charts_has_its_line_of_the_test():
    log = [{f"main/{k}": 1.0 for k in range(30)} | {f"validation/main/{k}": 2.0 for k in range(30)}]
    found = list(curves.curves([record("a", log)]))
    assert [[line.name for line in lines] for _, _, lines in found] == [["training", "test"]] * 24


@each(n=[1001, 1500, 2003])
def test_the_points_of_many_are_the_extremes_of_each_stretch(n):
    """Of rounded up 2 n / 1000 values; the last stretch may be shorter."""
    values = [math.sin(k * k) for k in range(n)]
    length = math.ceil(2 * n / 1000)
    kept = {0, n - 1}
    for begin in range(0, n, length):
        part = range(begin, min(begin + length, n))
        kept |= {min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    found = curves.points([{"epoch_detail": float(k), "loss": v} for k, v in enumerate(values)], "loss")
    assert found == [(float(k), values[k]) for k in sorted(kept)]


@each(
    case=[
        ("main/loss", "training"), ("validation/main/f1", "test"), ("lr", ""), ("mainly", ""), ("validation", ""),
        ("validation/own", "test"),
    ]
)  # fmt: skip
def test_what_a_key_is_called_in_a_chart_of_one_run(case):
    assert curves._role(case[0]) == case[1]


def test_names_of_files_of_charts_are_taken_once():
    log = [{"main/a b": 1.0, "a/b": 1.0, "main/loss.": 1.0, "main/loss": 1.0, "validation/main/a b": 2.0, "epoch": 1}]
    charts = curves.own_charts([record("a", log)])
    assert charts == [
        ("a b", "a_b", (("main/a b", "training"), ("validation/main/a b", "test"))), ("a/b", "a_b_", (("a/b", ""),)),
        ("loss.", "loss.", (("main/loss.", "training"),)),
    ]  # fmt: skip
    assert curves.own_charts([record("a", [{"main/loss?": 1.0}])]) == [
        ("loss?", "loss_", (("main/loss?", "training"),))
    ]


def test_lines_of_several_runs_have_their_colours_and_dashes():
    log = [{"epoch": k, "main/loss": k, "validation/main/loss": -k, "lr": 0.5} for k in range(3)]
    runs = [record(name, log) for name in "abcd"]
    (alone, *_), (several, *_) = (list(curves.curves(given)) for given in (runs[:1], runs[:2]))
    assert [(line.name, line.colour, line.dashed) for line in alone[2]] == [
        ("training", curves.colour(0), False), ("test", curves.colour(1), False),
    ]  # fmt: skip
    assert [(line.name, line.colour, line.dashed) for line in several[2]] == [
        ("a training", curves.colour(0), True), ("a test", curves.colour(0), False),
        ("b training", curves.colour(1), True), ("b test", curves.colour(1), False),
    ]  # fmt: skip
    rates = list(curves.curves(runs[:2], "learning_rate"))
    assert [(line.name, line.dashed) for line in rates[0][2]] == [("a", False), ("b", False)]
    assert curves.legend(runs[:1], alone[2]) is None
    names = [curves.Key("a", curves.colour(0)), curves.Key("b", curves.colour(1))]
    dashes = [curves.Key("training", None, dashed=True), curves.Key("test", None)]
    assert curves.legend(runs[:2], several[2]) == names + dashes
    assert curves.legend(runs[:2], several[2][:2]) == names[:1] + dashes
    assert curves.legend(runs[:2], rates[0][2]) == names
    three, four = (next(curves.curves(runs[:n]))[2] for n in (3, 4))
    assert len(curves.legend(runs[:3], three)) == 5 and curves.legend(runs, four) == dashes
