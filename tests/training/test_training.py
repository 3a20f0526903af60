"""Tests of dbrdist.training.training."""

from __future__ import annotations

import inspect
import re

import pytest

from dbrdist import iterators, optimizers, training
from dbrdist.training import extensions, triggers
from dbrdist.training.extensions import variable_statistics_plot
from tests.each import each
from tests.training.training_helpers import Line, made


def refuse(name, **options):
    return lambda: getattr(extensions, name)(**options)


REFUSED = {
    "make_extension() got unknown arguments: triger": lambda: training.make_extension(triger=1),
    "expected an extension, got the class LogReport; write LogReport()": lambda: made().extend(extensions.LogReport),
    "expected an extension or a function of the trainer, got int": lambda: made().extend(3),
    "extend() got unknown arguments: triger": lambda: made().extend(print, triger=1),
    "expected another name for an extension: 'training' is the loop itself": lambda: made().extend(print, "training"),
    "expected the name of an extension (none), got 'print'": lambda: made().get_extension("print"),
    "Evaluator() got unknown arguments: devise": lambda: extensions.Evaluator([], Line(), devise=0),
    "LogReport() got unknown arguments: log_name": refuse("LogReport", log_name="x"),
    "Snapshot: n_retains: expected an integer of 1 or more, or -1 for all, got 0": refuse("snapshot", n_retains=0),
    "Snapshot: n_retains: expected an integer of 1 or more, or -1 for all, got -2": refuse("snapshot", n_retains=-2),
    "n_retains and autoload must know earlier files": refuse("snapshot", filename=str, n_retains=1),
    "n_retains and autoload must know earlier": refuse("snapshot", filename=str, autoload=True),
    "snapshot: expected savefun or writer, got both": refuse("snapshot", savefun=print, writer=print),
    "ExponentialShift: rate: expected a number of 0 or more, got -0.1": lambda: extensions.ExponentialShift("lr", -0.1),
    "ExponentialShift has no start value yet": lambda: extensions.ExponentialShift("lr", 0.5).init,
    "Reservoir: size: expected at least 1, got 0": lambda: variable_statistics_plot.Reservoir(0, (1,)),
    "WeightAverage: decay: expected a number from 0 to below 1, got 1": lambda: extensions.WeightAverage(Line(), 1),
    "WeightAverage: decay: expected a number from 0 to below 1, got -": lambda: extensions.WeightAverage(Line(), -0.1),
    "expected a period above 0 seconds, got 0": lambda: triggers.TimeTrigger(0),
    "EarlyStoppingTrigger() got unknown arguments: patient": lambda: triggers.EarlyStoppingTrigger(patient=1),
    "expected mode 'auto', 'min' or 'max', got 'mean'": lambda: triggers.EarlyStoppingTrigger(mode="mean"),
    "expected a trigger, (period, unit) or None, got 3": lambda: triggers.get_trigger(3),
    "expected a trigger, (period, unit) or None, got (1, 'epoch', 2)": lambda: triggers.get_trigger((1, "epoch", 2)),
    "StandardUpdater() got unknown arguments: loss_fn": lambda: made(loss_fn=1),
    "the optimizer has no target; call optimizer.setup(model) before the updater is made": (
        lambda: training.StandardUpdater(iterators.SerialIterator([1], 1), optimizers.SGD())),
    "Extension must define __call__(self, trainer)": lambda: training.Extension()(None),
}  # fmt: skip


@pytest.mark.parametrize("block", range(3))
@each(words=lambda block: list(REFUSED)[block::3])
def test_refused(block, words):
    with pytest.raises((ValueError, TypeError, NotImplementedError, RuntimeError), match=f"^{re.escape(words)}"):
        REFUSED[words]()


SIGMAS = (0, 0.13, 2.28, 15.87, 50, 84.13, 97.72, 99.87, 100)
EPOCH = {"trigger": (1, "epoch")}
DEFAULTS = {
    training.StandardUpdater: {"auto_new_epoch": True},
    training.ParallelUpdater: {"auto_new_epoch": True},
    training.Trainer: {"out": "result"},
    training.Trainer.run: {"show_loop_exception_msg": True},
    training.Trainer.extend: {"call_before_training": False},
    extensions.FailOnNonNumber.complaint: {"check_parameters": False},
    extensions.LogReport: EPOCH,
    extensions.MicroAverage: EPOCH,
    extensions.ParameterStatistics: {"report_params": True, "report_grads": True, "skip_nan_params": False, **EPOCH},
    extensions.PlotReport: {"grid": True, **EPOCH},
    extensions.ProgressBar: {"update_interval": 100, "bar_length": 50, "min_seconds": 0.0},
    extensions.Snapshot: {"snapshot_on_error": False, "n_retains": -1, "autoload": False},
    extensions.VariableStatisticsPlot: {
        "max_sample_size": 1000, "report_data": True, "report_grad": True, "plot_mean": True, "plot_std": True,
        "percentile_sigmas": SIGMAS, "grid": True, **EPOCH,
    },
    extensions.WeightAverage: {"warmup": True},
    variable_statistics_plot.Statistician: {"collect_mean": True, "collect_std": True, "percentile_sigmas": SIGMAS},
    variable_statistics_plot.Statistician.__call__: {"axis": 0},
    triggers.BestValueTrigger: EPOCH,
    triggers.MaxValueTrigger: EPOCH,
    triggers.MinValueTrigger: EPOCH,
    triggers.EarlyStoppingTrigger: {"check_trigger": (1, "epoch"), "verbose": False, "max_trigger": (100, "epoch")},
    triggers.OnceTrigger: {"call_on_resume": False},
}  # fmt: skip


@pytest.mark.parametrize("thing", DEFAULTS, ids=lambda thing: thing.__qualname__)
def test_documented_defaults(thing):
    parameters = inspect.signature(thing).parameters
    assert {name: parameters[name].default for name in DEFAULTS[thing]} == DEFAULTS[thing]
