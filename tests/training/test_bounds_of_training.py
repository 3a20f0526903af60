"""What lies just within and just outside of the conditions in which trainers, triggers and extensions choose."""

from __future__ import annotations

import io
import os
import re

import numpy as np
import pytest
from training_helpers import Clock, Line, examples

import dbrdist
from dbrdist import iterators, optimizers, training
from dbrdist.training import extensions, triggers
from dbrdist.training.extensions import observe, shifts, snapshots, tensorboard, variable_statistics_plot
from tests.each import each


def made(out=".", stop=(1, "epoch"), n=4, **options):
    model = Line()
    optimizer = optimizers.SGD(0.1).setup(model)
    iterator = iterators.SerialIterator(examples(n), 2, shuffle=False)
    updater = training.StandardUpdater(iterator, optimizer, **options)
    return training.Trainer(updater, stop, out=str(out))


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
    "expected n_retains of 1 or more, or -1 to keep all, got 0": refuse("snapshot", n_retains=0),
    "expected n_retains of 1 or more, or -1 to keep all, got -2": refuse("snapshot", n_retains=-2),
    "n_retains and autoload must know earlier files": refuse("snapshot", filename=str, n_retains=1),
    "n_retains and autoload must know earlier": refuse("snapshot", filename=str, autoload=True),
    "snapshot: expected savefun or writer, got both": refuse("snapshot", savefun=print, writer=print),
    "expected a rate of 0 or more, got -0.1": lambda: extensions.ExponentialShift("lr", -0.1),
    "ExponentialShift has no start value yet": lambda: extensions.ExponentialShift("lr", 0.5).init,
    "Reservoir: size: expected at least 1, got 0": lambda: variable_statistics_plot.Reservoir(0, (1,)),
    "expected a decay from 0 to less than 1, got 1": lambda: extensions.WeightAverage(Line(), 1),
    "expected a decay from 0 to less than 1, got -0.1": lambda: extensions.WeightAverage(Line(), -0.1),
    "expected a period above 0 seconds, got 0": lambda: triggers.TimeTrigger(0),
    "EarlyStoppingTrigger() got unknown arguments: patients": lambda: triggers.EarlyStoppingTrigger(patients=1),
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


@each(name=["get_optimizer", "get_all_optimizers", "update", "serialize"])
def test_an_updater_defines_all_of_its_members(name):
    member = getattr(training.Updater(), name)
    with pytest.raises(NotImplementedError):
        member(*["main"] * (name in ("get_optimizer", "serialize")))


# ---- extensions -----------------------------------------------------------------------------------------------------


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


def test_an_evaluator_has_its_parts_by_name():
    model, calls = Line(), []
    data = iterators.SerialIterator(examples(4), 2, repeat=False, shuffle=False)
    for iterator, target in ((data, model), ({"main": data}, {"main": model})):
        evaluator = extensions.Evaluator(iterator, target, eval_hook=calls.append)
        assert evaluator.get_iterator("main") is data and evaluator.get_all_iterators() == {"main": data}
        assert evaluator.get_target("main") is model and evaluator.get_all_targets() == {"main": model}
        evaluator.name = None
        first = evaluator()
        assert first == evaluator() and list(first) == ["main/loss"]
        expected = np.mean([(0.5 * x - t) ** 2 for x, t in examples(4)])
        np.testing.assert_allclose(first["main/loss"], expected, rtol=1e-12)
        assert calls == [evaluator] * 2
        calls.clear()


def test_an_evaluator_without_reset_goes_over_a_copy():
    class Once:
        epoch = 0

        def __init__(self):
            self.left = [examples(2)]

        def __copy__(self):
            return Once()

        def __iter__(self):
            return iter(self.left)

    evaluator = extensions.Evaluator(Once(), Line(), eval_func=None)
    assert evaluator() == evaluator() != {}


def test_losses_are_known_by_their_last_word():
    for key, is_one in (
        ("loss", True),
        ("main/loss", True),
        ("lossy", False),
        ("main/glass", False),
        ("loss/x", False),
    ):
        assert observe.is_loss(key) is is_one


def test_a_log_keeps_chosen_values(tmp_path):
    trainer = made(tmp_path)
    seen = []
    trainer.extend(
        extensions.LogReport(["main/loss", "nothing"], (1, "iteration"), postprocess=seen.append),
        call_before_training=True,
    )
    trainer.extend(lambda trainer: {"other": 3.0}, name="other", trigger=(1, "iteration"), priority=400)
    trainer.run()
    log = trainer.get_extension("LogReport").log
    assert [set(entry) for entry in log] == [{"epoch", "iteration", "elapsed_time"}] + [
        {"epoch", "iteration", "elapsed_time", "main/loss"}
    ] * 2
    assert seen == log and [entry["iteration"] for entry in log] == [0, 1, 2]


@each(total=[(4, "iteration"), (2, "epoch"), None])
def test_progress_in_either_unit(total):
    out = io.StringIO()
    bar = extensions.ProgressBar(total, 1, out=out, live=False, min_seconds=0.0, details=lambda trainer: "more")
    clock = Clock(2.0)
    clock.stop_trigger = None
    bar.initialize(clock)
    bar(clock)
    for _ in range(3):
        bar(clock.tick())
    lines = out.getvalue().splitlines()
    of = {"iteration": ("", " of 4"), "epoch": (" of 2", ""), "": ("", "")}[total[1] if total else ""]
    assert len(lines) == 4 and [line.split(" steps/s")[0].rsplit(", ", 1)[0] for line in lines] == [
        f"epoch {n / 2:.2f}{of[0]}, step {n}{of[1]}" for n in range(4)
    ]
    assert all(", more" in line for line in lines)
    assert [line.endswith(" left") for line in lines] == [False] + [total is not None] * 3


def test_progress_takes_its_length_from_the_trigger_and_writes_now_and_then():
    out = io.StringIO()
    bar = extensions.ProgressBar(None, 2, out=out, live=False, min_seconds=0.0)
    clock = Clock(2.0)
    clock.stop_trigger = triggers.IntervalTrigger(3, "epoch")
    bar.initialize(clock)
    for _ in range(4):
        bar(clock.tick())
    assert [line.split(",")[0] for line in out.getvalue().splitlines()] == ["epoch 1.00 of 3", "epoch 2.00 of 3"]
    seldom = extensions.ProgressBar((3, "epoch"), 1, out=out, live=False, min_seconds=1e6)
    seldom.initialize(clock)
    seldom(clock.tick())
    assert len(out.getvalue().splitlines()) == 2


def test_shifts_end_at_their_target_from_either_side():
    for rate, target, values in (
        (0.5, 0.25, [1, 0.5, 0.25, 0.25]), (2.0, 4.0, [1, 2, 4, 4]), (0.5, None, [1, 0.5, 0.25, 0.125]),
        (1.0, 3.0, [3, 3, 3, 3]), (1.0, 0.5, [1, 1, 1, 1]),
    ):  # fmt: skip
        shift = extensions.ExponentialShift("lr", rate, 1.0, target)
        assert [shift.value(t) for t in range(4)] == values
    down, up, still = (
        extensions.StepShift("lr", gamma, 2, 1.0, target) for gamma, target in ((0.5, 0.3), (2, 3), (1, 2))
    )
    assert [down.value(t) for t in range(6)] == [1, 1, 0.5, 0.5, 0.3, 0.3]
    assert [up.value(t) for t in range(6)] == [1, 1, 2, 2, 3, 3]
    assert [still.value(t) for t in (0, 5)] == [2, 2]
    assert extensions.ExponentialShift("lr", 0, 1.0).value(3) == 0
    own, clock = optimizers.SGD(0.5), Clock()
    shift = extensions.ExponentialShift("lr", 0.5, optimizer=own)
    shift.initialize(clock)
    assert shift.init == 0.5 == own.lr
    shift(clock)
    assert own.lr == 0.25
    assert isinstance(shift, shifts.ExponentialShift)


def test_snapshots_under_a_condition_and_by_a_function(tmp_path):
    trainer = made(tmp_path)
    allowed = [False]
    conditional = extensions.snapshot(filename=lambda t: f"at{t.updater.iteration}", condition=lambda: allowed[0])
    conditional(trainer)
    assert os.listdir(tmp_path) == []
    conditional.on_error(trainer, None, None)
    allowed[0] = True
    conditional.on_error(trainer, None, None)
    assert os.listdir(tmp_path) == []
    conditional(trainer)
    assert os.listdir(tmp_path) == ["at0"] and conditional.find_newest(trainer) is None
    os.remove(tmp_path / "at0")
    extensions.snapshot(filename="error", snapshot_on_error=True).on_error(trainer, None, None)
    assert os.listdir(tmp_path) == ["error"]
    for name in ("s_1", "s_10", "s_9", "s_x", "s_", "t_3", "s_2.tmp-1"):
        (tmp_path / name).touch()
    names = [os.path.basename(p) for p in snapshots.find(str(tmp_path), "s_{.updater.iteration}")]
    assert names == ["s_x", "s_1", "s_9", "s_10"]
    assert snapshots.find(str(tmp_path / "nowhere")) == []


def test_the_newest_snapshots_are_kept(tmp_path):
    trainer = made(tmp_path)
    keep = extensions.snapshot(n_retains=1)
    for n in (1, 2, 10):
        trainer.updater.iteration = n
        keep(trainer)
        assert os.listdir(tmp_path) == [f"snapshot_iter_{n}"]
    again = extensions.snapshot(autoload=True)
    assert os.path.basename(again.find_newest(trainer)) == "snapshot_iter_10"
    assert keep.find_newest(trainer) is None
    trainer.updater.iteration = 0
    keep.resume(trainer)
    assert trainer.updater.iteration == 0
    again.resume(trainer)
    assert trainer.updater.iteration == 10
    model = Line()
    extensions.snapshot_object(model, "model_{.updater.iteration}", autoload=True).resume(trainer)


@each(size=[0, 1, 71, 72, 73])
def test_files_without_a_seal_are_of_other_programs(size):
    assert snapshots._seal_holds(io.BytesIO(b"x" * size)) is None


def test_numbers_of_protocol_buffers():
    for n, expected in ((0, [0]), (1, [1]), (127, [127]), (128, [128, 1]), (300, [172, 2]), (16384, [128, 128, 1])):
        assert list(tensorboard._varint(n)) == expected
    assert len(tensorboard._varint(-1)) == 10


def test_a_reservoir_of_one():
    kept = variable_statistics_plot.Reservoir(1, (2,))
    assert kept.get_data()[0].tolist() == []
    for n in range(5):
        kept.add(np.full(2, n), idx=10 + n)
    places, data = kept.get_data()
    assert data.shape == (1, 2) and places[0] == 10 + data[0, 0]
    other = variable_statistics_plot.Reservoir(3, ())
    for n in (4, 2, 3):
        other.add(n, idx=n)
    assert [a.tolist() for a in other.get_data()] == [[2, 3, 4], [2, 3, 4]]
    plain = variable_statistics_plot.Reservoir(2, ())
    plain.add(7)
    plain.add(8)
    assert plain.get_data()[0].tolist() == [0, 1]


@each(warmup=[True, False], decay=[0, 0.5, 0.9])
def test_averages_of_weights_with_and_without_warm_up(warmup, decay):
    model, average = Line(), None
    average = extensions.WeightAverage(model, decay, warmup)
    average.initialize(None)
    expected, values = 0.5, [1.0, 2.0, 5.0]
    for t, value in enumerate(values, 1):
        model.w.array[...] = value
        average(None)
        keep = min(decay, (1 + t) / (10 + t)) if warmup else decay
        expected = keep * expected + (1 - keep) * value
        np.testing.assert_allclose(average.averages["w"], expected, rtol=1e-12)
    with average.applied():
        np.testing.assert_allclose(model.w.array, expected, rtol=1e-12)
    assert model.w.array == 5
    around = average.around(extensions.Evaluator(iterators.SerialIterator(examples(2), 2, repeat=False), model))
    assert around.default_name == "validation"


def test_a_parameter_made_late_begins_its_average():
    link = dbrdist.links.Linear(None, 1)
    average = extensions.WeightAverage(link, 0.5, warmup=False)
    average.initialize(None)
    assert list(average.averages) == ["b"]
    link(np.ones((1, 2), "f"))
    average(None)
    np.testing.assert_array_equal(average.averages["W"], link.W.array)


# ---- triggers -------------------------------------------------------------------------------------------------------


def test_triggers_from_any_form():
    assert str(triggers.IntervalTrigger(2, "epoch")) == "IntervalTrigger(2, 'epoch')"
    assert not triggers.get_trigger(None)(Clock().tick())
    fires = triggers.get_trigger((2, "iteration"))
    clock = Clock()
    assert [fires(clock.tick()) for _ in range(4)] == [False, True, False, True]
    assert triggers.get_trigger(fires) is fires


def test_a_time_trigger_fires_at_its_period():
    clock = Clock()
    trigger, other = triggers.TimeTrigger(2.0), triggers.TimeTrigger(2.0, lambda trainer: trainer.elapsed_time / 2)
    fired = []
    for clock.elapsed_time in (0.0, 1.9, 2.0, 3.9, 4.0, 9.5, 9.9, 10.0):
        fired.append((trigger(clock), other(clock)))
    assert fired == [(False, False), (False, False), (True, False), (False, False), (True, True), (True, True),
                     (False, False), (True, False)]  # fmt: skip


@each(points=[[1.5, 2], 2.0, [0.25]])
def test_points_of_a_schedule_are_passed_once(points):
    trigger, clock = triggers.ManualScheduleTrigger(points, "epoch"), Clock(4.0)
    wanted = points if isinstance(points, list) else [points]
    for n in range(1, 13):
        assert trigger(clock.tick()) == (n / 4 in wanted)
        assert trigger.finished == (n / 4 >= max(wanted))


@each(
    case=[
        ("auto", "main/loss", [3, 2, 2, 2, 1, 1], 2, 4), ("auto", "main/accuracy", [1, 2, 2, 3, 3, 2], 2, 6),
        ("max", "main/loss", [1, 2, 2, 1], 2, 4), ("min", "main/accuracy", [2, 1, 1, 2], 2, 4),
        ("min", "x", [3, 2, 3, 4, 5], None, 5), ("min", "x", [1, 1], 1, 2),
    ]
)  # fmt: skip
def test_early_stopping_counts_checks_without_improvement(case):
    mode, monitor, values, patience, stops_at = case
    stop, clock = triggers.EarlyStoppingTrigger((1, "iteration"), monitor, patience, mode), Clock(100.0)
    fired = [stop(clock.tick(**{monitor: float(v)})) for v in values[:stops_at]]
    assert fired == [False] * (stops_at - 1) + [True]
    assert stop.get_training_length() == (100, "epoch")


def test_early_stopping_says_so_where_it_is_asked(capsys):
    stop, clock = triggers.EarlyStoppingTrigger((1, "iteration"), "x", 3, "min", verbose=True), Clock(1.0)
    for value in (2.0, 1.0, 1.0, 0.5, 0.6):
        stop(clock.tick(x=value))
    assert capsys.readouterr().out.splitlines() == [
        f"epoch {n}: x has not improved for 1 checks" for n in (3, 5)
    ]  # fmt: skip
    longest = triggers.EarlyStoppingTrigger((1, "iteration"), "x", 30, max_trigger=(2, "epoch"))
    clock = Clock(2.0)
    assert [longest(clock.tick(x=1.0)) for _ in range(4)] == [False, False, False, True]
    with pytest.warns(UserWarning, match="EarlyStoppingTrigger: nothing reported 'x' since the last check"):
        assert not triggers.EarlyStoppingTrigger((1, "iteration"), "x")(Clock().tick())


def test_a_run_ends_at_its_epochs_or_iterations():
    for end, at in ((triggers.EndTrigger(1.5), 6), (triggers.EndTrigger(9, 3), 3), (triggers.EndTrigger(0.5, 100), 2)):
        clock = Clock(4.0)
        assert [end(clock.tick()) for _ in range(8)] == [n >= at for n in range(1, 9)]
    assert triggers.EndTrigger(1.5).get_training_length() == (1.5, "epoch")
    assert triggers.EndTrigger(1.5, 7).get_training_length() == (7, "iteration")


def test_parts_of_an_updater_by_name():
    trainer = made(device="@numpy", loss_scale=4.0)
    updater = trainer.updater
    optimizer = updater.get_optimizer("main")
    assert str(updater.device) == "@numpy" == str(updater.input_device) and optimizer._loss_scale == 4.0
    assert updater.get_all_optimizers() == {"main": optimizer} and not updater.is_new_epoch
    updater.update()
    updater.update()
    assert updater.is_new_epoch and updater.epoch == 1 and updater.previous_epoch_detail == 0.5
    assert updater.get_iterator("main").epoch_detail == updater.epoch_detail == 1.0
    both = training.StandardUpdater({"main": updater.get_iterator("main")}, {"main": optimizer})
    assert both.device is None is both.input_device and both.get_optimizer("main") is optimizer


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
