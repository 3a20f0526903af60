"""What trainers, triggers and extensions do where nobody says otherwise: the values that are documented."""

import inspect

import pytest

from dbrdist import training
from dbrdist.training import extensions, triggers
from dbrdist.training.extensions import snapshots, tensorboard, variable_statistics_plot

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


def test_extensions_run_before_or_after_each_other():
    """Writers, editors, readers, then snapshots, which hold what the others have set."""
    order = [training.PRIORITY_WRITER, training.PRIORITY_EDITOR, training.PRIORITY_READER]
    assert order == [300, 200, 100]
    assert (tensorboard.PRIORITY_AFTER_THE_LOG, extensions.unchain_variables().priority) == (-1, -1)
    assert (snapshots.PRIORITY_SNAPSHOT, extensions.Snapshot(None, "a").priority) == (-100, -100)
    assert extensions.FollowSchedule(abs).priority == -99


STEP, EPOCHS = (1, "iteration"), (1, "epoch")
CALLED = {
    training.Extension: (STEP, 100),
    extensions.DumpGraph: (None, 100),
    extensions.Evaluator: (EPOCHS, 300),
    extensions.ExponentialShift: (STEP, 100),
    extensions.FailOnNonNumber: (STEP, 100),
    extensions.FollowSchedule: (STEP, -99),
    extensions.LogReport: (STEP, 100),
    extensions.MicroAverage: (STEP, 200),
    extensions.ParameterStatistics: (STEP, 300),
    extensions.PlotReport: (STEP, 100),
    extensions.PrintReport: (STEP, 100),
    extensions.ProgressBar: (STEP, 100),
    extensions.Snapshot: (EPOCHS, -100),
    extensions.TensorBoard: (STEP, -1),
    extensions.VariableStatisticsPlot: (STEP, 100),
    extensions.WeightAverage: (STEP, 400),
    extensions.unchain_variables: (STEP, -1),
}


@pytest.mark.parametrize("kind", CALLED, ids=lambda kind: kind.__name__)
def test_when_and_in_which_order_extensions_are_called(kind):
    trigger, priority = CALLED[kind]
    assert kind.priority == priority and (kind.trigger == trigger or (trigger is None and callable(kind.trigger)))
    assert kind.name is None


def test_values_are_observed_once_per_epoch_before_they_are_read():
    for extension in (extensions.observe_lr(), extensions.observe_value("a", len)):
        assert (extension.trigger, extension.priority) == (EPOCHS, 300)
