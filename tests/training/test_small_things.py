"""Arguments of extensions at the edge of what they take: what mutations of the code showed to be untested."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace

import numpy as np
import pytest
from training_helpers import Clock, Line, examples, make_trainer, restore, saved

from dbrdist import Parameter, Variable
from dbrdist.core.backend import get_device
from dbrdist.datasets.convert import concat_examples
from dbrdist.datasets.serial import SerialIterator
from dbrdist.training import extensions, make_extension
from dbrdist.training.extensions import progress_bar


@pytest.mark.parametrize("device", [None, "@numpy"])
def test_an_evaluator_hands_its_device_to_the_converter(device):
    seen = []

    def converter(batch, where):
        seen.append(where)
        return concat_examples(batch, where)

    iterator = SerialIterator(examples(4), 2, repeat=False, shuffle=False)
    extensions.Evaluator(iterator, Line(), converter, device=device)()
    assert seen == [None if device is None else get_device(device)] * 2


def test_a_rate_of_zero_is_taken():
    class Trainer:
        class optimizer:
            lr = 2.0

        updater = None

    shift = extensions.ExponentialShift("lr", 0.0, init=3.0, optimizer=Trainer.optimizer)
    shift.initialize(Trainer)
    assert Trainer.optimizer.lr == 3
    shift(Trainer)
    assert Trainer.optimizer.lr == 0


def test_a_micro_average_is_a_ratio_of_sums():
    extension, clock = extensions.MicroAverage("right", "all", "accuracy", (3, "iteration")), Clock()
    seen = []
    for right, count in ((1, 1), (0, 9), (np.array(5.0), Variable(np.array(10.0))), (2, 4), (0, 0), (1, 1)):
        extension(clock.tick(right=right, all=count))
        seen.append(clock.observation.get("accuracy"))
    assert seen == [None, None, 0.3, None, None, 0.6]


def test_a_micro_average_leaves_out_what_it_cannot_use():
    extension, clock = extensions.MicroAverage("right", "all", "accuracy", (2, "iteration")), Clock()
    extension(clock.tick(right=3))
    extension(clock.tick(right=1, all=2))
    assert clock.observation["accuracy"] == 0.5
    extension(clock.tick(all=3))
    extension(clock.tick())
    assert math.isnan(clock.observation["accuracy"])


def test_a_micro_average_goes_on_after_a_restart():
    first, clock = extensions.MicroAverage("right", "all", "accuracy", (2, "iteration")), Clock()
    first(clock.tick(right=1, all=9))
    second = restore(saved(first), extensions.MicroAverage("right", "all", "accuracy", (2, "iteration")))
    second(clock.tick(right=2, all=1))
    assert clock.observation["accuracy"] == 0.3


def test_a_micro_average_is_there_for_the_log(tmp_path):
    trainer = make_trainer(tmp_path, stop=(2, "epoch"))
    sizes = iter([4, 4, 2] * 9)

    @make_extension(trigger=(1, "iteration"), priority=300)
    def count(trainer):
        size = next(sizes)
        trainer.observation.update(right=size - 1, all=size)

    trainer.extend(count)
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.MicroAverage("right", "all", "accuracy"))  # an editor: before those who read
    trainer.run()
    log = trainer.get_extension("LogReport").log
    assert [entry["accuracy"] for entry in log] == pytest.approx([7 / 10, 6 / 8])  # three steps, then two


def test_graphs_behind_observed_variables_are_let_go():
    extension, clock = extensions.unchain_variables(), Clock()
    kept = Parameter(np.ones(3)) * 2
    assert kept.creator is not None
    extension(clock.tick(loss=kept, other=1.0))
    assert kept.creator is None


@pytest.mark.parametrize(("unit", "length", "left"), [("iteration", 90, "0:30"), ("epoch", 5, "0:10")])
def test_speed_and_remaining_time_count_from_the_start_of_the_run(monkeypatch, unit, length, left):
    """A resumed run starts at its 10th step: 20 steps and 2 epochs in 10 s."""
    clock = [100.0]
    monkeypatch.setattr(progress_bar, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    updater = SimpleNamespace(iteration=10, epoch_detail=1.0)
    trainer = SimpleNamespace(updater=updater, stop_trigger=None)
    out = io.StringIO()
    bar = extensions.ProgressBar((length, unit), update_interval=10, out=out, live=False, min_seconds=4.0)
    bar.initialize(trainer)
    for iteration, seconds in ((20, 103.0), (29, 109.0), (30, 110.0), (40, 113.9)):  # the third alone is said
        updater.iteration, updater.epoch_detail, clock[0] = iteration, iteration / 10, seconds
        bar(trainer)
    of_iterations, of_epochs = (f" of {length}", "") if unit == "iteration" else ("", f" of {length}")
    assert out.getvalue() == f"epoch 3.00{of_epochs}, step 30{of_iterations}, 2 steps/s, {left} left\n"
