"""Tests of dbrdist.training.extension."""

from __future__ import annotations

import pytest

from dbrdist import training
from dbrdist.training import extensions
from dbrdist.training.extensions import snapshots, tensorboard
from tests.training.training_helpers import made


def refuse(name, **options):
    return lambda: getattr(extensions, name)(**options)


def test_functions_become_extensions_with_what_they_say():
    @training.make_extension(trigger=(2, "iteration"), default_name="mine", priority=7)
    def first(trainer): ...

    @training.make_extension()
    def second(trainer): ...

    assert (first.trigger, first.default_name, first.priority) == ((2, "iteration"), "mine", 7)
    assert (second.trigger, second.default_name, second.priority) == (
        (1, "iteration"),
        "second",
        training.PRIORITY_READER,
    )
    trainer = made()
    for extension, name in ((first, "mine"), (second, "second"), (second, "second_1"), (second, "second_2")):
        trainer.extend(extension)
        assert trainer.get_extension(name).name == name
    trainer.extend(extensions.LogReport(), name="log")
    assert type(trainer.get_extension("log")) is extensions.LogReport
    with pytest.raises(ValueError, match=r"\(mine, second, second_1, second_2, log\), got 'third'"):
        trainer.get_extension("third")


def test_functions_of_an_extension_are_called_at_the_start_at_an_error_and_at_the_end():
    said = []

    @training.make_extension(
        initializer=lambda trainer: said.append("start"),
        finalizer=lambda: said.append("end"),
        on_error=lambda trainer, error, traceback: said.append((trainer, str(error), traceback is not None)),
    )
    def fail(trainer):
        raise OSError("no power")

    trainer = made()
    trainer.extend(fail)
    with pytest.raises(OSError, match="no power"):
        trainer.run()
    assert said == ["start", (trainer, "no power", True), "end"]


def test_extensions_are_called_as_python_calls_them():
    """Of the class that they have now, whatever hangs on the object itself."""

    class Once(training.Extension):
        trigger = (1, "iteration")
        count = 0

        def __call__(self, trainer):
            self.count += 1

    class Tenfold(Once):
        def __call__(self, trainer):
            self.count += 10

    trainer, extension = made(stop=(4, "iteration")), Once()
    extension.__call__ = refuse("LogReport")

    def change(trainer):
        if trainer.updater.iteration == 3:
            extension.__class__ = Tenfold

    trainer.extend(extension)
    trainer.extend(change, trigger=(1, "iteration"), priority=1000)
    trainer.run()
    assert extension.count == 1 + 1 + 10 + 10


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
