"""Reporter and summaries."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

import dbrdist
from dbrdist import DictSummary, Reporter, Summary, Variable, report, report_scope
from dbrdist.core.files.serializer import DictionarySerializer, NpzDeserializer
from dbrdist.core.model import reporter
from tests.each import each


def test_values_stand_under_their_observer():
    reporter, model = Reporter(), dbrdist.ChainList(dbrdist.Link())
    reporter.add_observer("main", model)
    reporter.add_observers("main", model.namedlinks(skipself=True))
    with reporter:
        assert dbrdist.get_current_reporter() is reporter
        report({"loss": 1.5}, model)
        report({"norm": 2}, model[0])
        report({"plain": 3})
    assert reporter.observation == {"main/loss": 1.5, "main/0/norm": 2, "plain": 3}


def test_no_graph_is_kept():
    reporter = Reporter()
    gc.disable()
    try:
        loss = Variable(np.array(2.0)) * 3.0
        graph = weakref.ref(loss.creator)
        with reporter:
            report({"loss": loss})
        del loss
        assert graph() is None
        assert not isinstance(reporter.observation["loss"], Variable) and reporter.observation["loss"] == 6.0
    finally:
        gc.enable()


def test_without_a_reporter_nothing_happens_and_asking_says_so():
    report({"loss": 1})
    with pytest.raises(RuntimeError, match="no reporter is current"):
        dbrdist.get_current_reporter()
    with pytest.raises(RuntimeError, match="no reporter is current"), report_scope({}):
        pass


def test_unknown_observers_are_refused():
    with Reporter(), pytest.raises(KeyError, match="add it with add_observer"):
        report({"x": 1}, object())


def test_scopes_nest_and_are_restored_after_errors():
    reporter, inner = Reporter(), {}
    with reporter:
        with report_scope(inner):
            report({"a": 1})
        with pytest.raises(ZeroDivisionError), report_scope({}):
            report({"lost": 1})
            _ = 1 / 0
        report({"b": 2})
    mine = {}
    with reporter.scope(mine):
        report({"c": 3})
    assert (inner, reporter.observation, mine) == ({"a": 1}, {"b": 2}, {"c": 3})


def test_reporters_are_per_thread():
    seen = []

    def other():
        report({"x": 1})
        with Reporter() as mine:
            report({"y": 2})
        seen.append(mine.observation)

    with Reporter() as reporter:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert reporter.observation == {} and seen == [{"y": 2}]


def test_summary_is_the_weighted_mean_and_deviation():
    random = np.random.default_rng(0)
    values, weights = random.normal(1e6, 1, 50), random.integers(1, 5, 50)
    summary = Summary()
    for v, w in zip(values, weights):
        summary.add(v, w)
    mean = np.average(values, weights=weights)
    np.testing.assert_allclose(summary.compute_mean(), mean, rtol=1e-14)
    deviation = math.sqrt(np.average((values - mean) ** 2, weights=weights))
    np.testing.assert_allclose(summary.make_statistics(), (mean, deviation), rtol=1e-9)
    assert isinstance(summary.compute_mean(), float)


def test_summary_of_nothing_and_of_weight_zero():
    summary = Summary()
    assert math.isnan(summary.compute_mean()) and all(map(math.isnan, summary.make_statistics()))
    summary.add(3.0)
    summary.add(float("nan"), 0)  # a rank without examples
    summary.add(np.array(5.0, np.float32))
    assert summary.compute_mean() == 4.0


def test_dict_summary():
    summary = DictSummary()
    summary.add({"loss": 1.0, "acc": (0.5, 3), "text": "left out", "list": [1], "v": Variable(np.array(2.0))})
    summary.add({"loss": np.float32(2.0), "acc": (1.0, 1), "array": np.ones(3)})
    assert summary.compute_mean() == {"loss": 1.5, "acc": 0.625, "v": 2.0}
    statistics = summary.make_statistics()
    assert statistics["loss.std"] == 0.5 and set(statistics) == {
        "loss", "loss.std", "acc", "acc.std", "v", "v.std",
    }  # fmt: skip


def test_dict_summary_of_many_rows_has_the_bits_of_one_value_at_a_time():
    random, together, one_by_one = np.random.default_rng(0), DictSummary(), DictSummary()
    rows = [{"a": v, "b": v * 3} if v > -0.5 else {"b": v, "c": -v} for v in random.normal(1e3, 1e3, 150).tolist()]
    rows += [{"a": np.float32(0.1), "c": (2.5, 3)}, *map(dict, rows[:70]), {"late": 1.0}]
    for row in rows:
        together.add(row)
        one_by_one.add(row)
        one_by_one.compute_mean()
        row.clear()  # what becomes of a row afterwards does not count
    assert together.make_statistics() == one_by_one.make_statistics()
    assert list(together.compute_mean()) == ["a", "b", "c", "late"]


def test_dict_summary_of_many_rows_has_their_mean_and_deviation():
    summary, rows = DictSummary(), np.random.default_rng(1).normal(1e6, 1, (131, 2))
    for a, b in rows.tolist():
        summary.add({"a": a, "b": b})
    got = summary.make_statistics()
    np.testing.assert_allclose([got["a"], got["b"]], rows.mean(0), rtol=1e-14)
    np.testing.assert_allclose([got["a.std"], got["b.std"]], rows.std(0), rtol=1e-9)


def test_summaries_resume():
    straight, first = DictSummary(), DictSummary()
    for x in (1.0, 4.0):
        straight.add({"a": x, "b/c": (x, 2)})
        first.add({"a": x, "b/c": (x, 2)})
    saved = DictionarySerializer()
    first.serialize(saved)
    second = DictSummary()
    second.serialize(NpzDeserializer(saved.target))
    for s in (straight, second):
        s.add({"a": 10.0, "b/c": (3.0, 1)})
    assert second.make_statistics() == straight.make_statistics()


def test_a_summary_goes_on_from_chainers_sums():
    values, later = [1.5, 4.0, -1.0], 7.0
    summary = Summary()
    summary.serialize(NpzDeserializer({"_x": np.sum(values), "_x2": np.sum(np.square(values)), "_n": np.array(3)}))
    assert summary.make_statistics() == pytest.approx((np.mean(values), np.std(values)), rel=1e-14)
    summary.add(later)
    assert summary.make_statistics() == pytest.approx((np.mean([*values, later]), np.std([*values, later])), rel=1e-14)


def test_sums_tell_names_in_another_order_apart():
    """Rows of floats wait under their names, and are added when others come."""
    rows = [{"a": 1.0, "b": 10.0}, {"b": 20.0, "a": 2.0}, {"a": 4.0}, {"c": 7.0, "a": 5.0}, {}, {"a": 8.0, "b": 30.0}]
    summary = DictSummary()
    for row in rows:
        summary.add(row)
        row.clear()  # the caller's dictionary is its own
    assert summary.compute_mean() == pytest.approx({"a": 4.0, "b": 20.0, "c": 7.0}, rel=1e-15)


def test_names_of_each_report_anew_are_not_kept():
    reporter = Reporter()
    observer = object()
    reporter.add_observer("main", observer)
    with reporter:
        for k in range(3000):
            report({f"loss{k}": 1.0, "loss": float(k)}, observer)
    assert len(reporter.observation) == 3001 and reporter.observation["main/loss2999"] == 1.0
    assert reporter.observation["main/loss"] == 2999.0
    assert len(reporter._names[id(observer)]) <= 1001


def test_a_thousand_names_of_an_observer_are_kept():
    names = reporter._Names("main/")
    for i in range(1000):
        assert names[str(i)] == f"main/{i}"
    assert names["999"] is names["999"] and len(names) == 1000
    assert names["more"] == "main/more" and len(names) == 1000 and "more" not in names


@each(
    values=[(1e308, -1e308, 1e308, 1e308), (-1e308, 1e308, 0.0), (1.7e308, 1.7e308, -1.7e308, -1.7e308)], first=[0, 1]
)
def test_means_of_numbers_whose_differences_are_too_large(values, first):
    summary = Summary()
    for value in values[:first]:
        summary.add(value)
    summary.add_each(values[first:])
    assert summary.compute_mean() == pytest.approx(math.fsum(v / len(values) for v in values), abs=1e294)


@each(
    **{
        "value, words": [
            ((np.zeros((2, 3)), 4), "an array of shape (2, 3)"),
            (np.zeros(1), "an array of shape (1,)"),
            (("x", 2), "of type str"),
            ((), "of type tuple"),
            (None, "of type NoneType"),
            (np.datetime64("2026-11-30"), "of type datetime64"),
            (1j, "of type complex"),
            (np.complex64(1), "of type complex64"),
            (np.array("x"), "of type ndarray"),
            (Fraction(1, 3), None),
            (Decimal("1.5"), None),
            (True, None),
            (Variable(np.array(2.0)), None),
            (Variable(np.ones(2, np.float32)), "an array of shape (2,)"),
            ((2, np.zeros(3)), None),
            (np.float32(3), None),
            (np.zeros(()), None),
            (2.5, None),
        ]
    }
)
def test_what_has_no_mean_is_named(value, words, monkeypatch):
    said = []
    monkeypatch.setattr(reporter, "warn", said.append)
    reporter.warn_of_no_numbers({"key": value})
    assert (
        said
        == [f"report: 'key' is {words} and has no mean, so logs leave it out; report a number, such as its mean"][
            : words is not None
        ]
    )


@each(
    value=[3, 3.0, np.float32(3), np.array(3), np.array([3.0]), np.full((1, 1), 3, np.float16), Fraction(3), True + 2]
)
def test_a_number_or_an_array_of_one_element_is_a_float(value):
    for given in (value, Variable(value)) if isinstance(value, np.ndarray) and value.dtype.kind == "f" else (value,):
        found = reporter.as_number(given)
        assert type(found) is float and found == 3.0
    summary = Summary()
    summary.add(value)
    assert summary.compute_mean() == 3.0


def test_what_has_no_mean_is_left_out_of_means():
    summary = reporter.DictSummary()
    summary.add(
        {"a": 1.0, "day": np.datetime64("2026-11-30"), "word": np.str_("x"), "none": None, "z": np.complex64(1)}
    )
    assert summary.compute_mean() == {"a": 1.0}
