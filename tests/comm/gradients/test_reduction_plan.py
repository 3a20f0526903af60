"""Tests of dbrdist.comm.gradients.reduction_plan."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm.gradients import reduction_plan
from dbrdist.comm.gradients.reduction_plan import ReductionPlan
from dbrdist.core.model.parameter import Parameter
from tests.each import each


class Verb:
    """A verb that notes whether all move bytes."""

    def __init__(self):
        self.num_bytes, self.kind, self.met, self.is_moving = 0, None, 0, False

    def meet_without_row(self):
        self.met += 1

    @contextlib.contextmanager
    def moving(self):
        self.is_moving = True
        yield
        self.is_moving = False


class Division:
    """Three ranks that have thirds of what they are asked for."""

    def __init__(self, releases):
        self.releases, self.released = releases, []

    def borders(self, number, begin, end):
        return [(end - begin) * k // 3 for k in range(4)]

    def release(self, run, begin, end, borders):
        self.released.append((run, begin, end, borders))


def plan_of(*sizes):
    params = [Parameter(np.zeros(size, dtype)) for size, dtype in sizes]
    for k, p in enumerate(params):
        p.grad = np.full(p.shape, k + 1, p.dtype)
    return ReductionPlan([(f"/{k}", p) for k, p in enumerate(params)]), params


@pytest.fixture
def reduced(monkeypatch):
    """What ``reduce_gradients`` was called with: sizes, first elements, and the rest."""
    found = []
    monkeypatch.setattr(
        reduction_plan, "reduce_gradients",
        lambda comm, call, grads, *args: found.append(([g.size for g in grads], [g.ravel()[0] for g in grads], *args)),
    )  # fmt: skip
    return found


@each(is_shared=[True, False], is_only_one=[True, False], releases=[True, False], rank=[0, 2], whole=[True, False])
def test_each_rank_gets_its_part(reduced, is_shared, is_only_one, releases, rank, whole):
    """Of two runs, of 64 and 30 elements, or of a part of the second."""
    reduced.clear()
    plan, _params = plan_of((64, "f4"), (30, "f8"))
    division = plan.division = Division(releases)
    asked, call = [], Verb()
    if is_shared:
        plan.shared = SimpleNamespace(reduce_scatter=lambda *args: asked.append((call.is_moving, *args[2:])))
    comm = SimpleNamespace(rank=rank, reducer=SimpleNamespace(is_on_one_host=is_only_one))
    sizes = [run.size for run in plan.runs]
    if whole:
        plan.reduce_scatter(comm, call, [0.5], 2.0)
        parts = [(0, 0, sizes[0]), (1, 0, sizes[1])]
    else:
        plan.reduce_part(comm, call, 1, 6, 27, [0.5], 2.0)
        parts = [(1, 6, 27)]
    borders = [division.borders(*part) for part in parts]
    if is_shared and is_only_one:
        own = [(n, begin + b[rank], begin + b[rank + 1]) for (n, begin, _), b in zip(parts, borders)]
        assert asked == [(True, [0.5], 2.0, own)] and reduced == []
    else:
        firsts = [plan.runs[n].grad[begin] for n, begin, _ in parts]
        assert reduced == [([end - begin for _, begin, end in parts], firsts, [0.5], 2.0, borders)] and asked == []
    expected = [(plan.runs[n], begin, end, b) for (n, begin, end), b in zip(parts, borders)]
    assert division.released == (expected if releases else [])
    assert call.met == (not whole) and not call.is_moving


@each(is_shared=[True, False])
def test_a_part_of_a_run_is_averaged_on_all_ranks(reduced, is_shared):
    reduced.clear()
    plan, _params = plan_of((64, "f4"), (30, "f8"))
    asked, call = [], Verb()
    plan.shared = SimpleNamespace(reduce=lambda *args: asked.append((call.is_moving, *args[2:]))) if is_shared else None
    plan.reduce_part(SimpleNamespace(reducer="reducer"), call, 1, 6, 27, None, 2.0)
    assert asked == ([(True, None, 2.0, [(1, 6, 27)])] if is_shared else []) and call.met == 1
    assert reduced == ([] if is_shared else [([21], [2.0], None, 2.0)])


@each(is_shared=[True, False], one_by_one=[True, False], is_all=[True, False])
def test_gradients_are_averaged_where_they_lie_or_one_by_one(reduced, is_shared, one_by_one, is_all):
    reduced.clear()
    plan, params = plan_of((64, "f4"), (5, "f4"), (30, "f8"))
    asked, call = [], Verb()
    plan.shared = SimpleNamespace(reduce=lambda *args: asked.append((call.is_moving, *args[2:]))) if is_shared else None
    comm = SimpleNamespace(reducer=SimpleNamespace(one_by_one=one_by_one))
    plan.reduce(comm, call, params if is_all else params[1:], [0.5], 2.0)
    if is_all and is_shared:
        assert asked == [(True, [0.5], 2.0)] and reduced == []
    else:
        wanted = params if is_all else params[1:]
        sizes = [p.size for p in wanted] if one_by_one else [69, 30] if is_all else [5, 30]
        firsts = ([1, 2, 3] if one_by_one else [1, 3]) if is_all else [2, 3]
        assert reduced == [(sizes, firsts, [0.5], 2.0)] and asked == []
    assert plan.num_bytes == 4 * 69 + 8 * 30


@each(**{"places, is_settled": [((3, 3), True), ((0, 0), False), ((3, 4), False), ((3, 0), False), ((0, 3), False)]})
def test_gradients_are_brought_to_their_places_once(places, is_settled):
    plan, _params = plan_of((8, "f4"))
    plan.place = 7
    reducer = SimpleNamespace(
        share_gradients=lambda call, plan: "shared", overlap=lambda call, plan: "overlap", next_place=lambda: 9
    )
    comm = SimpleNamespace(reducer=reducer)
    plan.settle(comm, "call", places)
    assert (plan.shared, plan.overlap, plan.place) == ((None, None, 7) if is_settled else ("shared", "overlap", 9))


@each(size=[1, 2], leaves=[True, False], borders=[None, [[0, 1, 3], None]])
def test_every_gradient_goes_through_the_codec(monkeypatch, size, leaves, borders):
    done, call = [], Verb()
    one = SimpleNamespace(
        prepare=lambda *args: done.append(("prepare", *args[2:])),
        reduce=lambda comm, which, grad, *args: done.append((grad, call.is_moving, which is call, *args)),
    )
    monkeypatch.setattr(reduction_plan, "codec_for", lambda dtype: done.append(dtype) or one)
    reducer = SimpleNamespace(leaves_gradients=leaves, added_first=(0, 1))
    comm = SimpleNamespace(size=size, reducer=reducer, get_config=lambda name: name)
    reduction_plan.reduce_gradients(comm, call, ["a", "b"], None, 2.0, borders)
    parts = borders or [None, None]
    expected = ["allreduce_grad_dtype", ("prepare", 2.0)]
    expected += [(grad, True, True, None, 2.0, own) for grad, own in zip("ab", parts)]
    assert done == ([] if size == 1 or leaves else expected)


@each(dtype=["f4", "f8", "c8", "f2"], num=[1, 2, 3], factors=[None, [0.25, 3.0, 0.5]])
def test_short_gradients_are_added_in_order_and_divided_by_whatever_divisor_comes(dtype, num, factors):
    rng = np.random.default_rng(0)
    w, b = Parameter(np.zeros((3, 5), dtype)), Parameter(np.zeros(4, dtype))
    w.grad, b.grad = np.zeros_like(w.array), np.zeros_like(b.array)
    plan = ReductionPlan([("/w", w), ("/b", b)])
    grads, call = plan.collect(), Verb()
    for divisor in (4.0, 3.0, None, 8.0):
        everyones = [[rng.standard_normal(g.shape).astype(dtype) for _ in range(num)] for g in grads]
        plan.add_up(call, everyones, factors and factors[:num], divisor)
        for g, pieces in zip(grads, everyones):
            weighted = np.array(pieces, "c16").T * (factors or np.ones(3))[:num]
            np.testing.assert_allclose(g, weighted.sum(-1) / (divisor or 1), rtol=0, atol=8 * np.finfo(dtype).eps)
    assert call.num_bytes == 4 * sum(g.nbytes for g in grads)
