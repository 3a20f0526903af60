"""Parameters that get their shapes late, on ranks without examples, under each way to send less or later: functions of
a communicator, run on threads and in tests/mpi."""

from __future__ import annotations

import operator

import numpy as np

import dbrdist.core.tape.ops as ops
from dbrdist import optimizers
from dbrdist.comm import create_multi_node_optimizer
from dbrdist.comm.gradients.compression import TopK
from dbrdist.core.array.config import using_config
from dbrdist.core.model import flat
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter
from dbrdist.errors import CommunicatorError
from tests.comm.contract import raises

LR = 0.1
NUM_CALLS = 7
SHAPES = ((4, 3), (5,))

WAYS = [
    (dict, {}),
    (lambda: {"zero": 1}, {}),
    (lambda: {"zero": 2}, {}),
    (lambda: {"compression": TopK(1.0)}, {}),  # which sends all
    (lambda: {"double_buffering": True}, {"late": True}),
    (lambda: {"accumulate": 2}, {"accumulate": 2}),
    (lambda: {"accumulate": 3}, {"accumulate": 3}),
    (lambda: {"accumulate": 2, "zero": 2}, {"accumulate": 2}),
    (lambda: {"accumulate": 2, "compression": TopK(1.0)}, {"accumulate": 2}),
    (lambda: {"accumulate": 2, "double_buffering": True}, {"accumulate": 2, "late": True}),
    (lambda: {"local_steps": 2}, {"local_steps": 2}),
    (lambda: {"local_steps": 3}, {"local_steps": 3}),
]
# Whether a rank has no examples in a call, and the call from which on the second parameter is used.
CASES = [
    (lambda rank, call, size: rank == 0 and call < 3, 0),
    (lambda rank, call, size: rank == size - 1 and call < 3, 4),
    (lambda rank, call, size: (rank + call) % 2 == 0, 5),
]
NOBODY_AT_FIRST = (lambda rank, call, size: call in (0, 4) or (rank == 0 and call < 6), 4)  # accumulate waits for some


class Growing(Link):
    """Half the squared distances from what it is called with: gradients of ``p - x``. Both parameters wait for it."""

    def __init__(self, value):
        super().__init__()
        with self.init_scope():
            self.W = Parameter(value)
            self.b = Parameter(value)

    def forward(self, *xs):
        loss = 0.0
        for p, x in zip((self.W, self.b), xs):
            if not p.is_initialized:
                p.initialize(x.shape)
            loss = loss + ops.sum((p - x) ** 2) * 0.5
        return loss


def made(comm, **options):
    model = Growing(comm.rank + 1.0)
    return model, create_multi_node_optimizer(optimizers.SGD(lr=LR).setup(model), comm, **options)


def targets(rank, call):
    rng = np.random.default_rng([rank, call])
    return [rng.normal(size=shape) for shape in SHAPES]


def counts(size, has_none, call):
    return [0 if has_none(rank, call, size) else 1 + (rank + call) % 3 for rank in range(size)]


class ByHand:
    """The same in plain NumPy: ``values[rank]`` are the parameters, of which a rank without examples has gradient 0."""

    def __init__(self, size, has_none, since, accumulate=1, local_steps=1, late=False):
        self.counts = [counts(size, has_none, call) for call in range(NUM_CALLS)]
        self.begins = [min(c for c in range(first, NUM_CALLS) if any(self.counts[c])) for first in (0, since)]
        leaders = [min(np.flatnonzero(self.counts[c])) for c in self.begins]
        self.values = [[np.full(shape, leader + 1.0) for shape, leader in zip(SHAPES, leaders)] for _ in range(size)]
        self.ranks, self.accumulate, self.local_steps, self.late = range(size), accumulate, local_steps, late
        self.num_local, self.gathered, self.arriving, self.are_equal = 0, [], None, True

    def gradients(self, rank, call):
        used = [call >= begin and self.counts[call][rank] > 0 for begin in self.begins]
        return [(p - x) * is_used for p, x, is_used in zip(self.values[rank], targets(rank, call), used)]

    def step(self, rank, gradients):
        self.values[rank] = [p - LR * g for p, g in zip(self.values[rank], gradients)]

    def update(self, call):
        found = [self.gradients(rank, call) for rank in self.ranks]
        if self.local_steps > 1 and call > 0:
            for rank in self.ranks:
                self.step(rank, found[rank])
            self.num_local += 1
            self.are_equal = self.num_local % self.local_steps == 0
            if self.are_equal:
                means = [sum(ps) / len(ps) for ps in zip(*self.values)]
                self.values = [list(means) for _ in self.ranks]
            return
        self.gathered += zip(self.counts[call], found)
        if (call + 1) % self.accumulate:
            return
        total = sum(n for n, _ in self.gathered)
        means = [sum(n * gs[i] for n, gs in self.gathered) / total for i in range(len(SHAPES))]
        calls = range(call + 1 - self.accumulate, call + 1)
        self.gathered = []
        if self.late:
            grows = call >= self.accumulate and self.begins[1] in calls  # another set of parameters: only sends
            means, self.arriving = None if grows else self.arriving, means
        for rank in self.ranks if means is not None else ():
            self.step(rank, means)


@using_config("dtype", np.float64)
def check_late_parameters_and_ranks_without_examples(comm):
    """Each call's values are those of plain NumPy, and after each joint step or average the ranks' are the same."""
    if comm.size == 1:
        return
    for options, settings in WAYS:
        for has_none, since in [*CASES, NOBODY_AT_FIRST] if "accumulate" in settings else CASES:
            model, optimizer = made(comm, **options())
            by_hand = ByHand(comm.size, has_none, since, **settings)
            for call in range(NUM_CALLS):
                xs = targets(comm.rank, call)[: 1 + (call >= since)]
                optimizer.update(model, *xs, num_samples=by_hand.counts[call][comm.rank])
                by_hand.update(call)
                there = [call >= begin for begin in by_hand.begins]
                assert [p.is_initialized for p in (model.W, model.b)] == there
                for p, expected in zip((model.W, model.b), by_hand.values[comm.rank]):
                    if p.is_initialized:
                        np.testing.assert_allclose(p.array, expected, rtol=1e-12, atol=1e-12)
            assert by_hand.are_equal == (not optimizer.num_local_steps)
            if by_hand.are_equal:
                for theirs in comm.allgather(model.W.array):
                    assert (theirs == model.W.array).all()


def check_averages_need_one_order_of_memory(comm):
    """Also while a parameter waits for its shape: no rank adds up others' W and its own b."""
    if comm.size == 1:
        return
    for is_waiting in (True, False):
        model, optimizer = made(comm, local_steps=2)
        with model.init_scope():
            model.c = Parameter(np.zeros(6, np.float32))
            if is_waiting:
                model.d = Parameter(0.0)
        optimizer.actual_optimizer.setup(model)
        xs = [x.astype(np.float32) for x in targets(comm.rank, 0)]
        for _ in range(2):
            optimizer.update(model, *xs)
        if comm.rank == 1:
            params = [model.c, model.b, model.W]
            for p in params:
                p.leave_arena()
            flat.gather(params)
        text = "local_steps: expected the parameters in the same order of memory on every rank"
        raises(CommunicatorError, text, lambda m=model, o=optimizer, xs=xs: o.update(m, *xs))


CHECKS = [function for name, function in sorted(globals().items()) if name.startswith("check_")]
by_name = operator.attrgetter("__name__")
