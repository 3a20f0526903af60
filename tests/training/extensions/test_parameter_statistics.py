"""Tests of dbrdist.training.extensions.parameter_statistics."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
from dbrdist import Reporter, report_scope
from dbrdist.training import extensions
from tests.training.training_helpers import Clock, Line, make_trainer, restore, saved


def observed(extension, clock):
    """What the extension reports at one step."""
    observation = {}
    with Reporter(), report_scope(observation):
        extension(clock.tick())
    return observation


def test_statistics_are_numpys():
    link = dbrdist.Link(W=(3, 4))
    x, g = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    x[0] = 0
    link.W.array[...] = x
    link.W.grad = g
    link.name = "net"
    found = observed(extensions.ParameterStatistics(link, prefix="p", trigger=(1, "iteration")), Clock())
    for attribute, a in (("data", x), ("grad", g)):
        flat = a.ravel().astype(np.float64)
        percentiles = np.percentile(flat, [0.13, 2.28, 15.87, 50, 84.13, 97.72, 99.87])
        expected = {"mean": flat.mean(), "std": flat.std(), "min": flat.min(), "max": flat.max()}
        expected |= {"zeros": 4 if attribute == "data" else 0}
        expected |= {f"percentile/{i}": v for i, v in enumerate(percentiles)}
        for name, value in expected.items():
            assert found.pop(f"p/net/W/{attribute}/{name}") == pytest.approx(value, rel=1e-5, abs=1e-7), name
    assert found == {}


def test_means_over_an_interval_are_reported():
    functions = {"first": lambda x: x[0], "both": lambda x: np.array([x[0], 1.0])}
    options = {"report_grads": False, "trigger": (2, "iteration")}
    model, clock = Line(), Clock()
    extension = extensions.ParameterStatistics([model], functions, **options)
    extension.register_statistics("size", lambda x: x.size)
    model.w.array[...] = 1
    assert observed(extension, clock) == {}
    resumed = restore(saved(extension), extensions.ParameterStatistics(model, functions, **options))
    model.w.array[...] = 4
    found = observed(extension, clock)
    assert found["None/w/data/first"] == 2.5 and found["None/w/data/size"] == 1
    assert (found["None/w/data/both/0"], found["None/w/data/both/1"]) == (2.5, 1)
    observation = {}
    with Reporter(), report_scope(observation):
        resumed(clock)
    assert observation["None/w/data/first"] == 2.5
    model.w.array[...] = 9
    observed(extension, clock)
    assert observed(extension, clock)["None/w/data/first"] == 9  # begun anew


def test_parameters_without_values_or_gradients_are_left_out():
    link = dbrdist.Link()
    link.add_param("late")
    link.add_param("empty", (0, 3))
    link.add_param("there", (2,), initializer=1)
    found = observed(extensions.ParameterStatistics(link, {"sum": np.sum}, trigger=(1, "iteration")), Clock())
    assert found == {"None/there/data/sum": 2}


def test_functions_need_not_see_nan():
    link = dbrdist.Link(W=(2,))  # NaN until something is assigned
    options = {"report_grads": False, "trigger": (1, "iteration")}
    found = observed(
        extensions.ParameterStatistics(link, {"f": lambda x: 1 / 0}, skip_nan_params=True, **options), Clock()
    )
    assert np.isnan(found["None/W/data/f"])
    there = dbrdist.Link(W=(2,))
    there.W.array[...] = 3
    for skips, link_, values in ((True, there, 6), (False, there, 6), (False, link, 7)):
        functions = {"f": lambda x: 7 if np.isnan(x).any() else x.sum()}
        statistics = extensions.ParameterStatistics(link_, functions, skip_nan_params=skips, **options)
        assert observed(statistics, Clock()) == {"None/W/data/f": values}
    assert observed(extensions.ParameterStatistics(link, None, **options), Clock()) == {}
    with pytest.raises(ValueError, match="statistics: expected 'default' or functions, got 'mean'"):
        extensions.ParameterStatistics(link, "mean")


def test_statistics_are_there_for_the_log(tmp_path):
    trainer = make_trainer(tmp_path, stop=(2, "epoch"))
    model = trainer.updater.get_optimizer("main").target
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.ParameterStatistics(model))
    trainer.run()
    assert "parameter_statistics" in trainer._extensions
    entry = trainer.get_extension("LogReport").log[1]
    assert entry["None/w/data/max"] >= entry["None/w/data/mean"] == entry["None/w/data/min"]
