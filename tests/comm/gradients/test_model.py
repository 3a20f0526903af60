"""Tests of dbrdist.comm.gradients.model."""

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm import run_threads
from dbrdist.comm.gradients import model as models
from dbrdist.comm.gradients.model import Broadcast
from dbrdist.core.model.parameter import Parameter
from dbrdist.errors import CommunicatorError
from dbrdist.links import Linear
from tests.each import each


def named_of(num=2):
    params = [Parameter(np.zeros(3)) for _ in range(num)]
    for k, p in enumerate(params):
        p.grad = np.full(3, k + 1.0)
    return [(f"/{k}", p) for k, p in enumerate(params)]


class Call:
    """A verb in which the other rank has a row of its own."""

    def __init__(self, theirs):
        self.theirs, self.rows, self.named = theirs, [], None

    def agree(self, row, **named):
        self.rows.append(list(row))
        self.named = named
        return np.array([row, [mine if other is None else other for mine, other in zip(row, self.theirs)]])


@each(
    **{
        "theirs, zero_fill, lacks, is_anew, places, wanted, weights": [
            ((None,) * 5, False, (), False, [6, 6], (0, 1), (None, 2.0)),
            ((None, 77, None, None, None), False, (), True, [0, 0], (0, 1), (None, 2.0)),
            ((None, None, None, None, 5), False, (), False, [6, 5], (0, 1), (None, 2.0)),
            ((None, None, 9, None, None), False, (), False, [6, 6], (0, 1), ([0.25, 0.75], None)),
            ((None, None, None, 1, None), False, (1,), False, [6, 6], (0, 1), (None, 2.0)),
            ((None,) * 5, False, (1,), False, [6, 6], (0,), (None, 2.0)),
            ((None,) * 5, True, (1,), False, [6, 6], (0, 1), (None, 2.0)),
        ]
    }
)  # fmt: skip
def test_what_ranks_agree_on_before_they_average(
    monkeypatch, theirs, zero_fill, lacks, is_anew, places, wanted, weights
):
    """Parameters, where they lie in memory, examples, which gradients are there, and at which place."""
    named = named_of()
    settled, reduced = [], []
    monkeypatch.setattr(models.ReductionPlan, "settle", lambda self, comm, call, found: settled.append((self, found)))
    monkeypatch.setattr(models.ReductionPlan, "reduce", lambda self, comm, call, *args: reduced.append((self, *args)))
    comm = SimpleNamespace(reducer=SimpleNamespace(plans={}), allreduce=lambda has: has | True)
    for k in lacks:
        named[k][1].cleargrad()
    plan = models.plan_for(comm, named)
    plan.place = 6
    call = Call(theirs)
    models.mean_grad(comm, call, [*named, ("/late", Parameter())], zero_fill, 3)
    ((row,), has) = call.rows, np.array([zero_fill or k not in lacks for k in range(2)])
    assert row == [plan.digest, plan.runs_digest, 3, models.zlib.crc32(has.tobytes()), 6]
    assert call.named["num_same"] == 1 and call.named["what"] == "the same parameters"
    assert call.named["detail"]() == plan.text
    ((used, found),) = settled
    assert (used is not plan) == is_anew and found == places and comm.reducer.plans[used.key] is used
    assert reduced == [(used, [named[k][1] for k in wanted], *weights)]


def test_the_last_plans_are_kept():
    comm = SimpleNamespace(reducer=SimpleNamespace(plans={}))
    found = [named_of(1) for _ in range(9)]
    plans = [models.plan_for(comm, named) for named in found]
    assert list(comm.reducer.plans.values()) == plans[1:]
    assert models.plan_for(comm, found[1]) is plans[1] and list(comm.reducer.plans.values()) == [*plans[2:], plans[1]]
    assert models.plan_for(comm, found[0]) is not plans[0]
    found[2][0][1].leave_arena()
    assert models.plan_for(comm, found[2]) is not plans[2]


def test_late_parameters_take_the_shape_and_later_the_values_of_the_root():
    def body(comm):
        link = Linear(4 if comm.rank == 0 else None, 2)
        if comm.rank == 1:
            link.b.array[...] = 9
        models.bcast_params(comm, link)
        return link.W.array.tolist(), link.b.array.tolist(), link.W.on_initialize

    first, second = run_threads(2, body, timeout_seconds=60)
    assert first == second and first[2] is None and np.shape(first[0]) == (2, 4) and first[1] == [0, 0]


def test_ranks_that_initialise_different_parameters_are_told():
    def body(comm, names):
        p = Parameter(np.full(2, float(comm.rank)))
        Broadcast(comm, names[comm.rank], 1)(p)
        return p.array.tolist()

    assert run_threads(2, body, ("/a", "/a"), timeout_seconds=60) == [[1, 1]] * 2
    with pytest.raises(CommunicatorError, match="to initialise the same parameter"):
        run_threads(2, body, ("/a", "/b"), timeout_seconds=60)


@pytest.mark.parametrize("num_params", [3, 60])
def test_parameters_are_broadcast_with_one_agreement_for_all(num_params):
    """Of a row for each of 160 parameters, a thousand ranks would make 160 reductions in a row."""

    def body(comm):
        params = [(f"/{k}", Parameter(np.full((k % 4, 3), k + comm.rank, np.float32))) for k in range(num_params)]
        before = comm.gate.record.counted(comm.gate.name)
        models.bcast_named(comm, params, 1)
        assert all((p.array == int(name[1:]) + 1).all() for name, p in params)
        return comm.gate.record.counted(comm.gate.name) - before

    assert max(run_threads(2, body, timeout_seconds=60)) < 10


def test_long_parameters_layouts_and_odd_values_are_broadcast():
    """Pieces, other orders of axes on another rank, NaN and zeros of both signs."""
    long = np.arange(700_001, dtype=np.float32)
    odd = np.array([np.nan, -0.0, 1.0], np.float32)

    def body(comm):
        x = np.zeros((2, 3, 4, 5), np.float32) + comm.rank
        late = long if comm.rank == 0 else np.where(long < 600_000, long, -1).astype(np.float32)
        values = {"long": late, "same": np.arange(3.0), "odd": odd if comm.rank == 0 else np.abs(odd), "empty": x[:0]}
        values["axes"] = x if comm.rank == 0 else x.transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2)
        params = [(f"/{name}", Parameter(value.copy())) for name, value in values.items()]
        params[-1][1].array = values["axes"]
        models.bcast_named(comm, params, 0)
        return {name: p.array.copy() for name, p in params}

    for found in run_threads(3, body, timeout_seconds=60):
        np.testing.assert_array_equal(found["/long"], long)
        np.testing.assert_array_equal(found["/odd"].view(np.int32), odd.view(np.int32))
        assert not found["/axes"].any() and found["/same"].tolist() == [0.0, 1.0, 2.0]


@each(at=[0, 1023, 1024, 4095, 4096, 5000, 1_100_000, 1_200_000], value=[2.0, -0.0, np.nan], old=[0.0, np.nan])
def test_a_broadcast_assigns_what_has_another_value(at, value, old):
    """Wherever the first element lies that differs. Zeros of another sign and NaN of other bits are the same values."""

    def body(comm):
        p = Parameter(np.zeros(1_200_001, np.float32))
        p.array[at] = old
        if np.isnan(old):
            p.array.view(np.int32)[at] |= 1 << comm.rank
        if comm.rank == 0:
            p.array[at] = value
        before = p.node.assigned
        models.bcast_named(comm, [("/p", p)], 0)
        return p.array.view(np.int32)[at], p.node.assigned != before

    (bits, _), (received, is_assigned) = run_threads(2, body, timeout_seconds=60)
    assert received == bits == np.float32(value).view(np.int32)
    assert is_assigned == (not np.array_equal(np.float32(value), np.float32(old), equal_nan=True))
