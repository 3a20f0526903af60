"""Gradients reduced on a stream beside backward: the clocks find what the two events would not order."""

from __future__ import annotations

import numpy as np
import pytest
from support import put

import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Sequential, optimizers
from dbrdist.comm.gradients.reduction_plan import ReductionPlan
from dbrdist.comm.gradients.stream_overlap import SideStream, StreamOverlap
from dbrdist.core.array import backend, random
from dbrdist.core.tape import backprop


@pytest.fixture(autouse=True)
def needs_streams(on):
    if on == "numpy":
        pytest.skip("needs streams")


def network(device):
    random.set_seed(0)
    net = Sequential(L.Linear(6, 8), F.relu, L.Linear(8, 8), F.relu, L.Linear(8, 3)).to_device(device)
    return net, optimizers.SGD(0.1).setup(net)


def steps(device, reduce=None, side=None, number=3):
    """Parameters after steps in which ``reduce`` changes the gradients of each bucket; which buckets began when."""
    net, optimizer = network(device)
    plan = ReductionPlan(sorted(net.namedparams()))
    began = []

    def noting(grad, factors, divisor):
        began[-1].append(grad.size)
        reduce(grad, factors, divisor)

    overlap = None if reduce is None else StreamOverlap(noting, side or SideStream(device), plan, 256)
    rng = np.random.default_rng(0)
    x, t = put(device, rng.standard_normal((4, 6)).astype(np.float32), np.array([0, 2, 1, 1], np.int32))
    for _ in range(number):
        began.append([])
        net.cleargrads()
        if overlap is not None:
            overlap.open(lambda: (None, 2.0), ("train.py", 1))
        backprop.backward([F.softmax_cross_entropy(net(x), t)], listener=overlap)
        began.append([])
        if overlap is not None:
            overlap.wait(None, 2.0)
        for p in net.params() if reduce is None else ():
            p.grad[...] = p.grad * 3.0 / 2.0
        optimizer.update()
    return [backend.to_cpu(p.array) for p in net.params()], began


def tripled(grad, factors, divisor):
    """Three ranks of the same gradients; through memory of its own, as sums of 16 bits go."""
    travelling = grad * 3.0
    grad[...] = travelling / divisor


def test_buckets_begin_during_backward_and_give_the_same_numbers(device):
    alone, _ = steps(device)
    beside, began = steps(device, tripled)
    for a, b in zip(alone, beside, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    for during, after in zip(began[::2], began[1::2]):
        assert len(during) >= 3 and not after  # the last one began with the last gradient


def test_without_the_events_there_are_races(device, on):
    if on != "stand-in":
        pytest.skip("the stand-in's clocks find races")
    import clocks

    class Early(SideStream):
        """Does not wait for what made the gradients."""

        def here(self):
            return self.stream

    class Late(SideStream):
        """The update does not wait for the sums."""

        def join(self):
            pass

    for kind in (Early, Late):
        with pytest.raises(clocks.Race):
            steps(device, tripled, kind(device))


def test_the_stream_is_of_the_gradients_device_whatever_is_current(device, on):
    if on not in ("stand-in", "whole"):
        pytest.skip("needs a second device")
    second = backend.get_device("@cupy:1")
    with backend.using_device(device):
        beside, _ = steps(second, tripled)
        assert backend.current_device() == device
    for a, b in zip(beside, steps(device, tripled)[0], strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_is_left_after_a_failure_is_started(device):
    """Or the streams of other ranks would wait for it for ever."""
    net, _ = network(device)
    plan, sizes = ReductionPlan(sorted(net.namedparams())), []
    overlap = StreamOverlap(lambda grad, *weights: sizes.append((grad.size, *weights)), SideStream(device), plan, 256)
    weights = [None]
    overlap.open(lambda: weights[0], ("train.py", 1))
    overlap.give_up()
    assert sizes == []  # this rank does not know yet whether others have begun
    weights[0] = [0.5, 0.5], None
    overlap.give_up()
    assert len(sizes) == len(overlap.buckets) and {w[1] for _, *w in sizes} == {None}
    assert sum(size for size, *_ in sizes) == sum(run.size for run in plan.runs)
    overlap.give_up()
    assert len(sizes) == len(overlap.buckets)


def test_an_error_of_the_device_does_not_hide_the_first(device):
    net, _ = network(device)
    plan, tried = ReductionPlan(sorted(net.namedparams())), []

    def fail(*args):
        tried.append(args)
        raise RuntimeError("cudaErrorIllegalAddress")

    overlap = StreamOverlap(fail, SideStream(device), plan)
    overlap.open(lambda: (None, 1.0), ("train.py", 1))
    overlap.give_up()  # raises nothing
    assert len(tried) == 1
