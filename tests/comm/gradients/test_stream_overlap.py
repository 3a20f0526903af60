"""Buckets on a stream of their own: their order over ranks; streams themselves are in tests/gpu/test_gpu_overlap.py."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np

from dbrdist.comm.gradients import stream_overlap
from dbrdist.comm.gradients.reduction_plan import ReductionPlan
from dbrdist.comm.gradients.stream_overlap import StreamOverlap
from dbrdist.core.model.parameter import Parameter
from tests.each import each


def four(num_bytes=64 * 4):
    """Four parameters in buckets of one each, and what was reduced."""
    params = [Parameter(np.zeros(64, "f")) for _ in range(4)]
    plan = ReductionPlan([(f"/{i}", p) for i, p in enumerate(params)])
    joined, sent = [], []
    side = SimpleNamespace(
        device=SimpleNamespace(create_context=contextlib.nullcontext), here=contextlib.nullcontext,
        join=lambda: joined.append(len(sent)),
    )  # fmt: skip
    start = plan.runs[0].grad.ctypes.data

    def reduce(grad, factors, divisor):
        sent.append((grad.ctypes.data - start) // (64 * 4))

    overlap = StreamOverlap(reduce, side, plan, num_bytes)
    overlap.kept = plan
    return overlap, params, sent, joined


class Passage:
    """Rows of all ranks, of which rank 0's is given."""

    def __init__(self, of_0):
        self.of_0, self.shown = of_0, []

    def agree(self, payload):
        self.shown.append(payload.tolist())
        row = np.full(42, 7, np.int64)
        row[: 1 + len(self.of_0)] = [len(self.of_0), *self.of_0]
        return np.array([row, row + 1])


def run(overlap, params, order, passage):
    """A step in which the gradients of parameters are complete in an order."""
    overlap.open(lambda: (None, 2.0), ("train.py", 1))
    overlap.expect({p.node for p in params})
    for i in order:
        overlap.ready(params[i].node)
    overlap.wait(None, 2.0, passage)


@each(of_0=[[2, 0, 3, 1], []])
def test_from_the_second_step_on_buckets_go_in_the_order_of_rank_0(of_0):
    overlap, params, sent, joined = four()
    passage = Passage(of_0)
    run(overlap, params, [1, 0, 2, 3], passage)
    assert sent == [3, 2, 1, 0] and joined == [4]  # the last parameters first, as nobody knows better
    assert passage.shown == [[4, 2, 3, 1, 0]]  # numbers of buckets: that of parameter 1 is 2
    sent.clear()
    run(overlap, params, [1, 3, 0, 2], passage)
    assert sent == ([1, 3, 0, 2] if of_0 else [3, 2, 1, 0])
    assert len(passage.shown) == (1 if of_0 else 2)  # where rank 0 had no backward pass they ask again


def test_more_buckets_than_fit_into_a_row_keep_their_order(monkeypatch):
    overlap, params, sent, _ = four()
    monkeypatch.setattr(stream_overlap, "_MOST_IN_ROW", 3)
    for _ in range(2):
        run(overlap, params, [0, 1, 2, 3], None)
    passage = Passage([0, 1, 2, 3])
    run(overlap, params, [0, 1, 2, 3], passage)
    assert sent == [3, 2, 1, 0] * 3 and passage.shown == []
    big = ReductionPlan([(f"/{i}", Parameter(np.zeros(64, "f"))) for i in range(200)])
    assert len(StreamOverlap(None, None, big, 1).buckets) <= 41


def test_without_a_passage_the_order_stays():
    overlap, params, sent, joined = four()
    for _ in range(2):
        run(overlap, params, [0, 1, 2, 3], None)
    assert sent == [3, 2, 1, 0] * 2 and joined == [4, 8]


def test_a_rehearsal_counts_buckets_and_sends_none():
    overlap, params, sent, joined = four()
    weights, agreed = [None], []

    def agree():
        agreed.append(1)
        weights[0] = None, 2.0

    overlap.open(lambda: weights[0], ("train.py", 1), agree)
    with overlap.rehearsing():
        overlap.agree()
        overlap.expect({p.node for p in params[1:]})
        assert overlap.num_complete == 1
        for p in params[3:0:-1]:
            overlap.ready(p.node)
        assert overlap.num_complete == 4
    assert (sent, agreed, overlap.num_complete, overlap.may_have_started) == ([], [], 0, False)
    params[0].grad = np.full(64, 3, "f")  # from a graph, as the zeros of other steps
    overlap.expect_in_place({p.node for p in params[1:]})
    overlap.ready(params[3].node)
    assert sent == []  # the ranks have not agreed
    overlap.agree()
    overlap.ready(params[2].node)
    assert sent == [3, 2] and overlap.num_complete == 3
    overlap.agree()
    overlap.ready(params[1].node)
    assert sent == [3, 2, 1, 0] and agreed == [1]
    overlap.wait(None, 2.0)
    assert joined == [4]
    np.testing.assert_array_equal(params[0].grad, 3)


def test_after_a_step_nobody_waits_for_its_ranks():
    overlap, _params, _, _ = four()
    overlap.open(lambda: None, ("train.py", 1), lambda: 1 / 0)
    overlap.wait(None, 2.0)
    overlap.agree()
