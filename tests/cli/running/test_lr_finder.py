"""Tests of dbrdist.cli.running.lr_finder."""

from __future__ import annotations

import csv
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.cli.running import lr_finder
from dbrdist.cli.running.lr_finder import RangeTest, smoothed, suggestion
from tests.each import each


def read(path="result/lr_finder.csv"):
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return {key: np.array([float(row[key]) for row in rows]) for key in rows[0]}


def test_means_are_those_of_the_losses_weighted_by_their_age():
    losses = np.random.default_rng(0).standard_normal(30)
    for k, found in enumerate(smoothed(list(losses))):
        weights = 0.9 ** np.arange(k, -1, -1)
        assert found == pytest.approx((weights * losses[: k + 1]).sum() / weights.sum())


def test_the_suggestion_is_where_the_loss_falls_fastest():
    rates = np.geomspace(1e-5, 1, 101)
    x = np.log10(rates)
    curve = 2 - 1 / (1 + np.exp(-4 * (x + 2))) + np.where(x > -1, 5 * (x + 1) ** 2, 0)  # steepest at 10 ** -2
    assert suggestion(rates, curve) == pytest.approx(1e-2, rel=0.13)


@each(
    means=[
        np.linspace(1, 9, 50),
        np.full(50, 2.0),
        np.linspace(9, 1, 9),
        np.empty(0),
        np.array([1.0, 0.5] + [3.0] * 20),
    ]
)
def test_where_the_loss_does_not_fall_there_is_no_suggestion(means):
    assert suggestion(np.geomspace(1e-5, 1, max(len(means), 2))[: len(means)], means) is None


RATES = np.geomspace(1e-5, 1.0, 40)
EDGES = {
    "higher": "the loss still fell at the highest rate: higher ones may be better; try a higher lr_finder.highest",
    "lower": "that is where the test began: lower rates may be better; try a lower lr_finder.lowest",
}


@each(
    **{
        "losses, step, edge": [
            (2.0 ** -np.arange(40.0), 0, "lower"),
            ([8.0, 7.81, 7.09, 7.43, *[7.6] * 36], 1, "lower"),
            ([8.0, 7.9, 7.0, *[6.9] * 7, *[7.5] * 30], 2, None),
            (np.concatenate([np.full(30, 2.0), np.linspace(1.9, 1, 10)]), 39, "higher"),
            (np.concatenate([np.full(30, 2.0), np.linspace(1.9, 1, 9), [9.0]]), 38, None),
            (np.concatenate([np.full(30, 2.0), np.linspace(1.9, 1, 9)]), 38, None),  # it was over before
        ]
    }
)
def test_all_that_a_range_test_says_and_writes(losses, step, edge, tmp_path, monkeypatch):
    """The steepest place and the lowest one, by means and slopes that are worked out here."""
    rates = RATES[: len(losses)]
    weights = [0.9 ** np.arange(k, -1, -1) for k in range(len(losses))]
    means = np.array([(w * losses[: len(w)]).sum() / w.sum() for w in weights])
    end = means.argmin() + 1
    slopes = np.gradient(means[:end], np.log(rates[:end]))
    assert slopes.argmin() == step
    found, lowest = rates[step], rates[end - 1]
    figures, said, test = [], [], RangeTest(1e-5, 1.0, 40, "optimizer.alpha")
    monkeypatch.setattr(lr_finder.plotting, "save_figure", lambda figure, path: figures.append((figure, path)))
    test.losses = list(losses)
    test.finish(str(tmp_path), said.append)
    best = (
        f"the loss fell fastest at {found:.2g} and was lowest at {lowest:.2g}; begin with optimizer.alpha={found:.2g}"
    )
    assert said == [f"learning-rate finder: {words}" for words in (best, EDGES.get(edge)) if words]
    table = (tmp_path / "lr_finder.csv").read_text().splitlines()
    assert table[0] == "learning_rate,loss,smoothed_loss" and len(table) == len(losses) + 1
    rows = np.array([[float(word) for word in line.split(",")] for line in table[1:]])
    np.testing.assert_allclose(rows, np.stack([rates, losses, means], 1), rtol=1e-12)
    ((figure, path),) = figures
    (axes,) = figure.axes
    assert path == str(tmp_path / "lr_finder.png") and list(figure.get_size_inches()) == [7, 4]
    names = (axes.get_title(), axes.get_xlabel(), axes.get_ylabel(), axes.get_xscale(), axes.get_yscale())
    assert names == ("Learning-rate finder", "learning rate", "loss", "log", "linear")
    assert axes.get_xgridlines()[0].get_visible()
    labels = ["loss of a step", "smoothed", f"suggestion: {found:.2g}"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == labels
    for line, y in zip(axes.lines, (losses, means)):
        np.testing.assert_allclose(line.get_xydata(), np.stack([rates, y], 1), rtol=1e-12)
    assert list(axes.lines[2].get_xdata()) == pytest.approx([found, found])


def test_a_loss_that_falls_at_no_rate_has_no_suggestion(tmp_path, monkeypatch):
    figures, said, test = [], [], RangeTest(1e-5, 1.0, 40)
    monkeypatch.setattr(lr_finder.plotting, "save_figure", lambda figure, path: figures.append(figure))
    test.losses = list(np.linspace(1, 9, 12))
    test.finish(str(tmp_path), said.append)
    words = "the loss fell at no rate; try a lower lr_finder.lowest, or more steps"
    assert said == [f"learning-rate finder: {words}"] and len(figures[0].axes[0].lines) == 2
    assert len((tmp_path / "lr_finder.csv").read_text().splitlines()) == 13
    monkeypatch.setattr(lr_finder.plotting, "is_installed", lambda: False)
    test.finish(str(tmp_path), said.append)
    assert len(figures) == 1


def test_a_test_is_over_where_the_mean_is_four_times_the_least():
    """Not before the eleventh step; a mean of negative losses counts by its size."""

    def ends(losses):
        test = RangeTest(1e-5, 1.0, 100)
        for k, loss in enumerate(losses, 1):
            test.losses.append(loss)
            if test.is_over():
                return k
        return None

    assert ends([1.0] * 3 + [1e6] * 20) == 11
    means = [(1 - 0.9**k + (9.0 - 1) * (1 - 0.9 ** max(k - 20, 0))) / (1 - 0.9**k) for k in range(1, 60)]
    expected = next(k for k, mean in enumerate(means, 1) if mean > 4.0)
    assert ends([1.0] * 20 + [9.0] * 40) == expected == 25
    assert ends([-1.0] * 20 + [-9.0] * 40) is None and ends([-1.0] * 20 + [9.0] * 40) is not None
    assert ends([1.0] * 50) is None


def test_a_suggestion_needs_ten_steps_of_which_three_fall():
    rates = np.geomspace(1e-5, 1, 20)
    assert suggestion(rates[:9], np.linspace(9, 1, 9)) is None
    assert suggestion(rates[:10], np.array([9, 8, 5, *np.linspace(4.9, 4.3, 7)])) == pytest.approx(rates[1])
    assert suggestion(rates[:10], np.array([3, 2.9, 2, *[4] * 7])) == pytest.approx(rates[2])
    assert suggestion(rates[:10], np.array([3, 2, *[4] * 8])) is None
    assert (RangeTest.trigger, RangeTest.priority) == ((1, "iteration"), -99)


def test_a_test_that_was_stopped_goes_on_at_the_rate_that_comes_next():
    def trainer_of(optimizer, loss):
        return SimpleNamespace(
            updater=SimpleNamespace(get_optimizer=lambda name: optimizer), observation={"main/loss": loss}
        )

    stored, optimizer = {}, SimpleNamespace(lr=None)
    before, after = RangeTest(1e-4, 1.0, 5), RangeTest(1e-4, 1.0, 5)
    before.initialize(trainer_of(optimizer, None))
    for loss in (2.5, 0.1):
        before(trainer_of(optimizer, loss))
    before.serialize(lambda key, value: stored.setdefault(key, value))
    after.serialize(lambda key, value: stored[key])
    optimizer.lr = None
    after.initialize(trainer_of(optimizer, None))
    assert after.losses == [2.5, 0.1] and optimizer.lr == pytest.approx(1e-2)


def test_the_rate_is_named_as_in_configurations(run):
    words = ("run.yaml", "model=mlp", "transforms.train=[]", "lr_finder={lowest: 1e-4, steps: 40}")
    code, out, err = run(*words, "optimizer={name: adam}", "snapshot.best=validation/main/loss")
    assert code == 0, err
    assert "; begin with optimizer.alpha=0.0" in out and "snapshot_best" not in out
    code, _, err = run(*words, "optimizer={name: ada_delta}", "out=other")
    assert code == 2 and "lr_finder: AdaDelta has no learning rate to find" in err


@pytest.mark.slow
def test_a_range_test_raises_the_rate_step_by_step_and_suggests_one(run):
    code, out, err = run(
        "run.yaml", "model=mlp", "transforms.train=[]", "iterations=null", "log.every=1 iteration",
        "lr_finder={lowest: 1e-4, highest: 0.5, steps: 40}",
    )  # fmt: skip
    assert code == 0, err
    found = read()
    n = len(found["loss"])
    assert found["learning_rate"] == pytest.approx(np.geomspace(1e-4, 0.5, 40)[:n]) and n > 20
    log = [json.loads(line) for line in Path("result/log.jsonl").read_text().splitlines()]
    assert [entry["main/loss"] for entry in log] == pytest.approx(found["loss"])
    assert found["smoothed_loss"] == pytest.approx(smoothed(list(found["loss"])))
    rate = float(re.search(r"begin with optimizer.lr=(\S+)", out)[1])
    assert rate == pytest.approx(suggestion(found["learning_rate"], found["smoothed_loss"]), rel=0.05)
    assert not [name for name in os.listdir("result") if name.startswith("snapshot")]
    assert "validation/main/loss" not in log[-1]


@pytest.mark.slow
def test_a_loss_that_explodes_ends_the_test_and_not_the_run(run):
    code, out, err = run("run.yaml", "model=mlp", "transforms.train=[]", "lr_finder={highest: 1e9, steps: 60}")
    assert code == 0, err
    assert "learning-rate finder: the loss fell fastest at" in out
    assert 10 < len(read()["loss"]) < 60


@pytest.mark.slow
@each(
    case=[("{lowest: 0.1, highest: 0.1}", "lr_finder.highest: expected more than lowest, 0.1, got 0.1"),
          ("{steps: 3}", "lr_finder.steps"), ("{lowest: 0}", "lr_finder.lowest"),
          ("{highest: .inf}", "lr_finder.highest"), ("true", "lr_finder")]
)  # fmt: skip
def test_what_makes_no_test_is_refused(run, case):
    code, _, err = run("run.yaml", f"lr_finder={case[0]}")
    assert code == 2 and case[1] in err


@pytest.mark.mpiexec
@pytest.mark.programs
@pytest.mark.slow
def test_ranks_raise_the_same_rates_and_suggest_the_same(started):
    words = ("-m", "dbrdist.cli.train", "run.yaml", "model=mlp", "transforms.train=[]", "lr_finder={steps: 30}")
    for n in (0, 2):
        out, err = started(n, *words, f"out=of{n}").communicate(timeout=100)
        assert "learning-rate finder: " in out, err
    one, two = (read(f"of{n}/lr_finder.csv") for n in (0, 2))
    assert one["learning_rate"] == pytest.approx(two["learning_rate"])
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-3)
