"""Optimizer state divided over ranks that are threads."""

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist import optimizers
from dbrdist.comm import create_communicator, run_threads
from dbrdist.comm.gradients import sharding, shared_gradients
from dbrdist.comm.gradients.reduction_plan import ReductionPlan
from dbrdist.comm.gradients.sharding import ZeroSharding
from tests.comm import sharding_contract
from tests.comm.comm_helpers import Rank, plan_of
from tests.comm.training_contract import Net, batches
from tests.each import each


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.filterwarnings(sharding_contract.OVERFLOWS_ARE_MEANT)
@pytest.mark.parametrize("check", sharding_contract.CHECKS, ids=sharding_contract.by_name)
def test_sharding_on_threads(check, num_ranks):
    run_threads(num_ranks, check, timeout_seconds=60)


@each(size=[0, 1, 64, 65, 200, 1000], num=[1, 2, 3])
def test_borders_of_ranks_lie_on_cache_lines(size, num):
    found = sharding._borders(size, num)
    assert found[0] == 0 and found[-1] == size and len(found) == num + 1 and found == sorted(found)
    assert found == [min(64 * (-(-size // 64) * k // num), size) for k in range(num + 1)]


def test_parts_between_two_elements_are_counted_from_the_first():
    one = ZeroSharding(Rank(1), None, 1)
    one._borders = [[], [0, 64, 128, 200]]
    assert one.borders(1, 0, 200) == [0, 64, 128, 200] and one.borders(1, 100, 150) == [0, 0, 28, 50]
    assert one.borders(1, 64, 128) == [0, 0, 64, 64] and not one.releases and ZeroSharding(Rank(1), None, 2).releases


@each(rank=[0, 1, 2])
def test_a_rank_owns_its_part_of_each_run(rank):
    _plan, params = plan_of(64, 64, 72)
    (run,) = ReductionPlan([(str(k), p) for k, p in enumerate(params)]).runs
    one = ZeroSharding(Rank(rank), None, 1)
    one._stretches = [(object(), 0, [0, 1, 2, 3]), (run.arena, run.start, [0, 64, 128, run.size])]
    part = one.shard(run)
    borders = [0, 64, 128, run.size]
    assert (part.start, part.stop) == (borders[rank], borders[rank + 1])
    assert [p is params[rank] for p, where in part.layers() if where.stop > where.start] == [True]
    (middle,) = ReductionPlan([("/1", params[1])]).runs  # the second parameter is frozen no more
    found = one.shard(middle)
    assert found.size == (64 if rank == 1 else 0)
    one._stretches = [(run.arena, 64, [0, 10, 20, 64])]
    for other in (run, ReductionPlan([("/2", params[2])]).runs[0]):
        with pytest.raises(RuntimeError, match="a parameter that is not among those whose gradients the ranks have"):
            one.shard(other)
    begin, end = [0, 10, 20, 64][rank : rank + 2]
    assert one.shard(middle).size == end - begin


@each(has_values=[True, False], stage=[1, 2])
def test_new_values_are_spread_and_gradients_let_go(has_values, stage):
    done = []
    reducer = SimpleNamespace(share_parts=lambda *args: done.append(args))
    comm = SimpleNamespace(rank=0, size=1, reducer=reducer)
    one = ZeroSharding(comm, None, stage)
    one._borders = [[0, 5], [0, 7]]
    one._values = SimpleNamespace(spread=lambda *args: done.append(args)) if has_values else None
    one.release = lambda *args: done.append(args)
    runs = [SimpleNamespace(data="a", size=5), SimpleNamespace(data="b", size=7)]
    with create_communicator("single").gate.call("update") as call:
        one.share_values(call, SimpleNamespace(runs=runs))
        assert not call.is_moving and call.meets_by == "bytes"
    expected = [(reducer, call, runs, one._borders)] if has_values else [(call, "a", [0, 5]), (call, "b", [0, 7])]
    expected += [(runs[0], 0, 5, [0, 5]), (runs[1], 0, 7, [0, 7])] if stage == 2 else []
    assert done == expected


def test_numbers_are_added_over_ranks():
    one = ZeroSharding(SimpleNamespace(allreduce=lambda x: 3 * x), None, 1)
    assert one.total([1, np.float32(0.5)]) == [3.0, 1.5] and one.total([]) == []
    assert all(type(value) is float for value in one.total([1]))


@each(stage=[1, 2])
def test_one_rank_settles_and_a_state_that_moved_is_collected(monkeypatch, stage):
    comm = create_communicator("single")
    shared, overlaps = [], []
    monkeypatch.setattr(comm.reducer, "share_values", lambda call, plan: shared.append(plan), raising=False)
    monkeypatch.setattr(comm.reducer, "overlap", lambda call, plan: overlaps.append(plan) or "overlap", raising=False)
    model = Net()
    optimizer = optimizers.MomentumSGD().setup(model)
    model(*next(batches(1)))
    plan = ReductionPlan(list(model.namedparams()))
    plan.place = 5
    one = ZeroSharding(comm, optimizer, stage)
    one.settle(plan)
    assert one.place == 5 and plan.division is one and shared == [plan] and one._borders == [[0, plan.runs[0].size]]
    assert plan.overlap == ("overlap" if stage == 2 else None) and len(overlaps) == stage - 1
    arena = plan.runs[0].arena
    assert (
        (arena in shared_gradients.GRADIENTS)
        == (stage == 2)
        == np.shares_memory(arena.grad, shared_gradients.segment_for(arena, shared_gradients.GRADIENTS).raw)
    )
    plan.overlap = "already" if stage == 2 else None
    optimizer.update(model, *next(batches(1)))
    assert not one._has_moved(plan.runs)
    rule = model.l1.W.update_rule
    size, rule.piece = model.l1.W.size, (0, 3)
    assert rule.state["v"].shape == (size,)  # as it lies in a part
    rule._state = {"v": np.arange(3.0)}
    assert one._has_moved(plan.runs)
    one.settle(plan)
    assert plan.overlap == ("already" if stage == 2 else None)
    assert rule.piece is None and rule.state["v"].shape == model.l1.W.shape
    assert rule.state["v"].reshape(-1).tolist() == [0.0, 1.0, 2.0] + [0.0] * (size - 3)
    with one.whole_state(0):
        pass
    assert rule.state["v"].reshape(-1)[:3].tolist() == [0.0, 1.0, 2.0]
