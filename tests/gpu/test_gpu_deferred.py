"""An output whose write was deferred is written where its call ran, whoever reads first."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from dbrdist.core.tape import fusion
from dbrdist.functions.rectified import PendingNormalization
from dbrdist.functions.rectifier import ReLU


@pytest.fixture(autouse=True)
def two_devices(on, device):
    if on == "numpy" or device.xp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two devices")


def in_thread(work):
    """Run work in another thread, whose device is 0, and raise what it raises."""
    errors = []

    def run():
        try:
            work()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


class Gamma:
    """What stands for a parameter."""


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("has_stream", [False, True])
def test_another_thread_has_it_written(number, has_stream, xp):
    gamma, made = Gamma(), []
    with xp.cuda.Device(number):
        stream = xp.cuda.Stream(non_blocking=True) if has_stream else xp.cuda.get_current_stream()

    def call():
        with xp.cuda.Device(number), stream:
            x, y = xp.ones(5), xp.empty(5)

            def write(output):
                seen.append((xp.cuda.Device().id, xp.cuda.get_current_stream().ptr))
                output[...] = x * 2

            fusion.wait(PendingNormalization(y, ReLU, gamma, x, write))
            made.append(y)

    seen = []
    in_thread(call)
    with xp.cuda.Device(1 - number):
        fusion.settle()  # as every function of the tape does first
        assert xp.cuda.Device().id == 1 - number
    assert seen == [(number, stream.ptr)]
    with xp.cuda.Device(number):
        assert (made[0] + 1).get().tolist() == [3] * 5  # on this thread's stream, after the write
    assert not fusion.waiting


def test_the_own_thread_goes_on_without_events(xp, monkeypatch):
    y = xp.empty(5)
    fusion.wait(PendingNormalization(y, ReLU, Gamma(), None, lambda output: output.fill(2)))
    monkeypatch.setattr(xp.cuda, "Event", None)
    fusion.settle()
    np.testing.assert_array_equal(y.get(), np.full(5, 2))
