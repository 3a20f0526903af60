"""Tests of dbrdist.comm.steps.buffering."""

from types import SimpleNamespace

import numpy as np

from dbrdist.comm import create_communicator
from dbrdist.comm.gradients.reduction_plan import ReductionPlan
from dbrdist.comm.steps import buffering
from dbrdist.core.model.parameter import Parameter
from tests.each import each


class OwnRecord:
    """One rank whose sums are doubled, with or without a thread that reduces."""

    def __init__(self, has_courier):
        self.jobs, self.waits, self.asked, self.calls = [], 0, 0, []
        self.courier = SimpleNamespace(put=self.jobs.append, wait=self.wait) if has_courier else None
        self.comm = create_communicator("single")
        self.gate, self.reducer = self.comm.gate, self

    def wait(self):
        self.waits += 1
        while self.jobs:
            self.jobs.pop(0)(self)

    def thread(self):
        self.asked += 1
        return self.courier


@each(has_courier=[True, False])
def test_means_of_the_step_before_take_the_place_of_gradients(monkeypatch, has_courier):
    seen = []

    def reduce(comm, call, grads, factors, divisor):
        seen.append((call.verb, call.place, call.pause_seconds, call.meets_by, factors, divisor))
        for grad in grads:
            grad *= 2

    monkeypatch.setattr(buffering, "reduce_gradients", reduce)
    p = Parameter(np.zeros(3))
    p.grad = np.ones(3)
    plan = ReductionPlan([("/p", p)])
    comm = OwnRecord(has_courier)
    buffers = buffering.Buffers(comm)
    assert buffers.arriving() == []
    assert buffers.swap(plan, [1.0], 2.0, ("x.py", 3)) is False
    assert len(comm.jobs) == has_courier and p.grad.tolist() == [1] * 3
    p.grad[...] = 10
    assert buffers.swap(plan, None, 4.0, ("x.py", 4)) is True
    assert p.grad.tolist() == [2] * 3  # of the first step
    assert [(q is p, mean.tolist()) for q, mean in buffers.arriving()] == [(True, [20] * 3)]
    how = buffering.PAUSE_SECONDS, "bytes"
    assert seen == [("reduce", ("x.py", 3), *how, [1.0], 2.0), ("reduce", ("x.py", 4), *how, None, 4.0)]
    assert comm.asked == (1 if has_courier else 2) and (comm.waits > 1) == has_courier
    buffers.forget()
    assert buffers.arriving() == [] and buffers.swap(plan, None, 4.0, ("x.py", 5)) is False
    buffers.resume({p: np.full(3, 7.0)})
    buffers._key = None
    assert [mean.tolist() for _, mean in buffers.arriving()] == [[7] * 3]
    assert buffers.swap(plan, None, 4.0, ("x.py", 6)) is True and p.grad.tolist() == [7] * 3
    other = Parameter(np.zeros(2))
    buffers.resume({p: np.ones(3)})
    assert buffers.swap(ReductionPlan([("/p", p), ("/o", other)]), None, 4.0, ("x.py", 7)) is False  # one has none


def test_means_that_are_there_already_are_held_for_the_next_step():
    p, q = Parameter(np.zeros((1, 2))), Parameter(np.zeros(1))
    buffers = buffering.Buffers(create_communicator("single"))
    plan = ReductionPlan([("/p", p)])
    found = []
    for value in (1.0, 2.0):
        p.grad = np.full((1, 2), value)
        found.append((buffers.hold(plan), p.grad.tolist(), [mean.tolist() for _, mean in buffers.arriving()]))
    assert found == [(False, [[1, 1]], [[1, 1]]), (True, [[1, 1]], [[2, 2]])]
    p.grad, q.grad = np.full((1, 2), 3.0), np.full(1, 4.0)
    both = ReductionPlan([("/p", p), ("/q", q)])
    assert buffers.hold(both) is False  # nothing of q was on its way
    p.grad[...] = q.grad[...] = 9
    assert buffers.swap(both, None, 1.0, ("x.py", 3)) is True
    assert (p.grad.tolist(), q.grad.tolist()) == ([[3, 3]], [4])
