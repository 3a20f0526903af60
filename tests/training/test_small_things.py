"""Arguments of extensions at the edge of what they take: what mutations of the code showed to be untested."""

from __future__ import annotations

import pytest
from training_helpers import Line, examples

from dbrdist.core.backend import get_device
from dbrdist.datasets.convert import concat_examples
from dbrdist.datasets.serial import SerialIterator
from dbrdist.training import extensions


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
