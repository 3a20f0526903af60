"""Tests of dbrdist.training.extensions.micro_average."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dbrdist import Variable
from dbrdist.training import extensions, make_extension
from tests.training.training_helpers import Clock, make_trainer, restore, saved


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
