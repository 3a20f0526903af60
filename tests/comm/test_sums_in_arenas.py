"""Sums in memory that ranks share, and whose part of it is whose: on ranks that take their turns in one thread."""

import itertools
import mmap
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist import optimizers
from dbrdist.comm import arenas, create_communicator, sharding
from dbrdist.comm.codec import Scaled
from dbrdist.comm.reduction import Plan
from dbrdist.comm.sharding import Sharding
from dbrdist.core.backend import as_dtype
from dbrdist.core.parameter import Parameter
from tests.comm.training_contract import Net, batches
from tests.each import each

PAGE = mmap.PAGESIZE


def pieces_of(num, size, dtype="f4"):
    """What each of some ranks has; and the same in float64."""
    rng = np.random.default_rng(num * size)
    found = [rng.normal(size=size).astype(as_dtype(dtype)) for _ in range(num)]
    return found, np.array([x.astype("f8") for x in found]).reshape(num, size)


def close(x, expected, dtype):
    tolerance = {"f8": 1e-14, "f4": 1e-6, "f2": 2.0**-11 * 1.01, "bfloat16": 2.0**-8 * 1.01}[dtype]
    np.testing.assert_allclose(x.astype("f8"), expected, rtol=tolerance, atol=2e-6 if dtype != "f8" else 1e-15)


# ---- within a host --------------------------------------------------------------------------------------------------


@each(
    dtype=["f8", "f4", "f2", "bfloat16"],
    num=[1, 3],
    factors=[None, [0.5, 0.25, 2.0]],
    divisor=[None, 3.0],
    size=[100, 33_000],
)
def test_a_part_is_added_and_given_to_all(dtype, num, factors, divisor, size):
    """33,000 elements of four bytes are two chunks; 16-bit ones count as four."""
    found, wide = pieces_of(num, size, dtype)
    weights = [1.0] * num if factors is None else factors[:num]
    begin, end = 10, size - 7
    arenas._add_in_place(found, begin, end, factors and weights, divisor)
    expected = np.tensordot(weights, wide, 1) / (divisor or 1)
    for x, old in zip(found, wide):
        close(x[begin:end], expected[begin:end], dtype)
        assert (x[:begin] == old[:begin]).all() and (x[end:] == old[end:]).all()
        assert x.tobytes()[begin * x.itemsize : end * x.itemsize] == found[0][begin:end].tobytes()


@each(**{"begin, end, itemsize, found": [
    (0, 10, 4, [(0, 10)]), (5, 5, 4, []), (3, 3 + (1 << 15), 4, [(3, 3 + (1 << 15))]),
    (0, (1 << 15) + 1, 2, [(0, 1 << 15), (1 << 15, (1 << 15) + 1)]),
    (0, 1 << 15, 8, [(0, 1 << 14), (1 << 14, 1 << 15)]),
]})  # fmt: skip
def test_chunks_of_128_kib(begin, end, itemsize, found):
    assert arenas._chunks(begin, end, itemsize) == found


@each(size=[0, 1, 63, 64, 65, 1000], num=[1, 2, 3, 4])
def test_parts_of_owners_lie_on_cache_lines(size, num):
    parts = [arenas.own_part(size, place, num) for place in range(num)]
    assert parts[0][0] == 0 and parts[-1][1] == size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    assert all(begin % 64 == 0 or begin == size for begin, _ in parts)
    lengths = [-(-(end - begin) // 64) for begin, end in parts]
    assert max(lengths) - min(lengths) <= 1
    assert arenas.own_part(size, num, num) == (0, 0)


class Local:
    """The communicator of a host's ranks: its meetings."""

    def Ibarrier(self):
        return "barrier"


class Comm:
    """One rank; what it has waited for and sent between hosts."""

    def __init__(self, hosts, size, rank=0, config=None):
        self._hosts, self.size, self.rank, self.config, self.waits, self.sent = hosts, size, rank, config, [], []

    def _wait(self, call, request):
        self.waits.append((call, request))

    def get_config(self, name):
        assert name == "allreduce_grad_dtype"
        return self.config

    def _reduce_between(self, call, x, codec, divisor):
        """The other host has the same."""
        self.sent.append((x.size, x.dtype, type(codec), divisor))
        assert codec._scale > 1  # the ranks have agreed on one
        x *= 2
        x /= divisor or 1


def hosts_of(ranks, place=0, num_owners=None, between=None, is_only_one=True, has_one_each=False):
    return SimpleNamespace(
        ranks=ranks, place=place, num_owners=num_owners or len(ranks), between=between, is_only_one=is_only_one,
        has_one_each=has_one_each, local=Local(),
    )  # fmt: skip


def call_of():
    return SimpleNamespace(num_bytes=0, kind=None, agree=lambda word: np.array([word]))


def test_ranks_of_one_host_each_add_their_part_of_all_runs():
    runs = [pieces_of(2, 200), pieces_of(2, 130, "f8")]
    shared = arenas.SharedGradients([found for found, _ in runs])
    for place in range(2):
        comm, call = Comm(hosts_of([0, 1], place), 2, place, "float16"), call_of()
        call.agree = None  # on one host nothing is sent, and no scale is needed for it
        shared.reduce(comm, call, [0.25, 0.75], 2.0)
        assert comm.waits == [(call, "barrier")] * 2 and call.num_bytes == 200 * 4 + 130 * 8 and call.kind == "f8"
        assert comm.sent == []
        for (found, wide), size, half in zip(runs, (200, 130), (128, 64)):
            expected = (0.25 * wide[0] + 0.75 * wide[1]) / 2
            for x, old in zip(found, wide):
                done = size if place else half
                np.testing.assert_allclose(x[:done], expected[:done], rtol=1e-5, atol=1e-6)
                assert (x[done:] == old[done:]).all()


def test_parts_of_runs_are_added_alone():
    found, wide = pieces_of(2, 300)
    other, untouched = pieces_of(2, 10)
    comm, call = Comm(hosts_of([0, 1], 0, 1), 2), call_of()
    arenas.SharedGradients([other, found]).reduce(comm, call, None, None, [(1, 100, 250)])
    for x, y, old in zip(found, other, wide):
        np.testing.assert_allclose(x[100:250], wide.sum(0)[100:250], rtol=1e-6, atol=1e-6)
        assert (x[:100] == old[:100]).all() and (x[250:] == old[250:]).all() and (np.array(other) == untouched).all()
        assert y.size == 10
    assert call.num_bytes == 150 * 4


@each(
    dtype=["f4", "f2", "bfloat16"],
    **{
        "ranks, place, factors, has_one_each, has_between": [
            ([2, 3], 0, None, False, True), ([2, 3], 1, [9, 9, 0.5, 0.25], False, True), ([1], 0, None, True, True),
            ([1], 0, [9, 0.5], True, True), ([1], 0, None, False, True), ([2, 3, 4], 2, None, False, False),
        ]
    },
)  # fmt: skip
def test_owners_add_for_their_host_and_meet_those_of_others(dtype, ranks, place, factors, has_one_each, has_between):
    """Narrow sums of several terms travel in float32, a rank's own gradients as they are."""
    found, wide = pieces_of(len(ranks), 300, dtype)
    owners = min(len(ranks), 2)
    between = "between" if has_between else None
    comm = Comm(hosts_of(ranks, place, owners, between, False, has_one_each), 8, ranks[place], as_dtype("f2"))
    arenas.SharedGradients([found]).reduce(comm, call_of(), factors, 3.0)
    weights = [1.0 if factors is None else factors[rank] for rank in ranks]
    begin, end = arenas.own_part(300, place, owners)
    expected = 2 * np.tensordot(weights, wide, 1) / 3
    for x, old in zip(found, wide):
        if has_between:
            close(x[begin:end], expected[begin:end], {"f2": "bfloat16"}.get(dtype, dtype))
        else:
            begin = end = 0
        assert (x[:begin] == old[:begin]).all() and (x[end:] == old[end:]).all()
    is_alone = has_one_each and factors is None
    kind = as_dtype(dtype) if is_alone or dtype == "f4" else np.dtype("f4")
    assert comm.sent == ([(end - begin, kind, Scaled, 3.0)] if has_between else [])


@each(dtype=["f4", "f2"], place=[0, 1, 2])
def test_each_rank_gets_its_parts_alone(dtype, place):
    runs = [pieces_of(3, 500, dtype), pieces_of(3, 200, dtype)]
    comm, call = Comm(hosts_of([0, 1, 2], place), 3, place), call_of()
    arenas.SharedGradients([f for f, _ in runs]).reduce_scatter(
        comm, call, [0.5, 1.0, 0.25], 2.0, [(0, 100, 300), (1, 0, 50)]
    )
    for (found, wide), (begin, end) in zip(runs, [(100, 300), (0, 50)]):
        expected = np.tensordot([0.5, 1.0, 0.25], wide, 1) / 2
        close(found[place][begin:end], expected[begin:end], dtype)
        for k, (x, old) in enumerate(zip(found, wide)):
            assert (x[:begin] == old[:begin]).all() and (x[end:] == old[end:]).all()
            assert k == place or (x == old).all()
    assert (
        call.num_bytes == 700 * as_dtype(dtype).itemsize
        and call.kind == as_dtype(dtype)
        and comm.waits == [(call, "barrier")] * 2
    )


@each(place=[0, 1, 2])
def test_sums_are_added_in_the_order_of_ranks_wherever_they_go(place):
    """In float32 1e8 + 1 - 1e8 is 0, and the other orders give 1."""
    values = [np.float32(1e8), np.float32(1), np.float32(-1e8)]
    found = [np.full(3, v) for v in values]
    arenas.SharedGradients([found]).reduce_scatter(
        Comm(hosts_of([0, 1, 2], place), 3, place), call_of(), None, None, [(0, 0, 3)]
    )
    assert found[place].tolist() == [0] * 3


@each(place=[0, 1])
def test_values_are_taken_from_those_who_updated_them(place):
    found, wide = pieces_of(2, 100)
    own = SimpleNamespace(data=found[place])
    comm, call = Comm(hosts_of([0, 1], place), 2, place), call_of()
    arenas.SharedValues([found]).spread(comm, call, [own], [[0, 64, 100]])
    np.testing.assert_array_equal(found[place], np.concatenate([wide[0, :64], wide[1, 64:]]).astype("f4"))
    np.testing.assert_array_equal(found[1 - place], wide[1 - place].astype("f4"))
    assert comm.waits == [(call, "barrier")] * 2 and call.num_bytes == 400 and call.kind == np.float32


# ---- segments -------------------------------------------------------------------------------------------------------


def plan_of(*sizes, dtype="f4"):
    params = [Parameter(np.arange(size, dtype=dtype)) for size in sizes]
    for k, p in enumerate(params):
        p.grad = np.full(p.shape, k + 1, dtype)
    return Plan([(f"/{k}", p) for k, p in enumerate(params)]), params


def test_runs_are_reached_by_their_tickets():
    plan, (a, b) = plan_of(100, 30)
    (run,) = plan.runs
    for segments, move in ((arenas.GRADIENTS, arenas.move_gradients_in), (arenas.VALUES, arenas.move_values_in)):
        numbers = arenas.tickets(plan.runs, segments)
        segment = arenas.segment_for(run.arena, segments)
        assert numbers.tolist() == [*segment.ticket, run.start] and segments[run.arena] is segment
        assert arenas.segment_for(run.arena, segments) is segment
        plan.move(move)
        plan.move(move)  # they are there
        (run,) = plan.runs
        array = run.grad if segments is arenas.GRADIENTS else run.data
        assert np.shares_memory(array, segment.raw)
        ((mine, theirs),) = arenas.reach([numbers, numbers], plan.runs, 0, segments)
        assert mine.dtype == theirs.dtype == "f4" and mine.size == theirs.size == run.size
        assert np.shares_memory(mine, segment.raw) and not np.shares_memory(theirs, segment.raw)
        array[3] = 77
        assert mine[3] == theirs[3] == 77
    assert a.grad.tolist() == [1, 1, 1, 77, *[1] * 96] and b.grad.tolist() == [2] * 30
    assert a.array.tolist() == [0, 1, 2, 77, *range(4, 100)] and b.array.tolist() == list(range(30))


def test_a_run_in_the_middle_is_reached_where_it_begins():
    plan, params = plan_of(64, 64, 64)
    middle = Plan([("/1", params[1])])
    assert [run.start for run in middle.runs] == [64] and middle.runs[0].arena is plan.runs[0].arena
    numbers = arenas.tickets(middle.runs, arenas.GRADIENTS)
    middle.move(arenas.move_gradients_in)
    ((own,),) = arenas.reach([numbers], middle.runs, 0, arenas.GRADIENTS)
    assert own.tolist() == [2] * 64


def test_an_array_of_two_parameters_is_not_shared():
    link = Net()
    link(*next(batches(1)))
    plans = [Plan(list(one.namedparams())) for one in (link, link.copy("share"))]
    runs = [run for plan in plans for run in plan.runs]
    with pytest.raises(OSError, match="a parameter that is not updated shares its array with another"):
        arenas.tickets(runs, arenas.VALUES)
    assert arenas.tickets(runs, arenas.GRADIENTS).size == 6 * len(runs)
    alone, _ = plan_of(8)
    assert arenas.tickets(alone.runs, arenas.VALUES).size == 6


def test_memory_of_gradients_is_given_back():
    plan, (p,) = plan_of(4 * PAGE)  # 16 pages of four-byte elements
    arena = plan.runs[0].arena
    assert arenas.resident_bytes(arena) == arena.grad.nbytes
    arenas.release(arena, 0, 4 * PAGE)  # not in a segment: nothing happens
    assert p.grad.all()
    arenas.segment_for(arena, arenas.GRADIENTS)
    arenas.release(arena, 0, 4 * PAGE)
    assert p.grad.all()
    plan.move(arenas.move_gradients_in)
    assert arenas.resident_bytes(arena) == 16 * PAGE
    arenas.release(arena, PAGE // 4 - 1, PAGE // 4 * 3 + 1)  # the second and the third
    assert arenas.resident_bytes(arena) == 14 * PAGE
    assert np.flatnonzero(p.grad == 0).tolist() == list(range(PAGE // 4, PAGE // 4 * 3))


# ---- whose part is whose --------------------------------------------------------------------------------------------


class Rank:
    """One of three ranks; the others answer as given."""

    size = 3

    def __init__(self, rank, answers=()):
        self.rank, self.answers = rank, list(answers)


@each(size=[0, 1, 64, 65, 200, 1000], num=[1, 2, 3])
def test_borders_of_ranks_lie_on_cache_lines(size, num):
    found = sharding._borders(size, num)
    assert found[0] == 0 and found[-1] == size and len(found) == num + 1 and found == sorted(found)
    assert found == [min(64 * (-(-size // 64) * k // num), size) for k in range(num + 1)]


def test_parts_between_two_elements_are_counted_from_the_first():
    one = Sharding(Rank(1), None, 1)
    one._borders = [[], [0, 64, 128, 200]]
    assert one.borders(1, 0, 200) == [0, 64, 128, 200] and one.borders(1, 100, 150) == [0, 0, 28, 50]
    assert one.borders(1, 64, 128) == [0, 0, 64, 64] and not one.releases and Sharding(Rank(1), None, 2).releases


@each(rank=[0, 1, 2])
def test_a_rank_owns_its_part_of_each_run(rank):
    _plan, params = plan_of(64, 64, 72)
    (run,) = Plan([(str(k), p) for k, p in enumerate(params)]).runs
    one = Sharding(Rank(rank), None, 1)
    one._stretches = [(object(), 0, [0, 1, 2, 3]), (run.arena, run.start, [0, 64, 128, run.size])]
    part = one.shard(run)
    borders = [0, 64, 128, run.size]
    assert (part.start, part.stop) == (borders[rank], borders[rank + 1])
    assert [p is params[rank] for p, where in part.layers() if where.stop > where.start] == [True]
    (middle,) = Plan([("/1", params[1])]).runs  # the second parameter is frozen no more
    found = one.shard(middle)
    assert found.size == (64 if rank == 1 else 0)
    one._stretches = [(run.arena, 64, [0, 10, 20, 64])]
    for other in (run, Plan([("/2", params[2])]).runs[0]):
        with pytest.raises(RuntimeError, match="a parameter that is not among those whose gradients the ranks have"):
            one.shard(other)
    begin, end = [0, 10, 20, 64][rank : rank + 2]
    assert one.shard(middle).size == end - begin


@each(rank=[0, 1, 2], begin=[0, 32])
def test_gradients_of_others_are_given_back(monkeypatch, rank, begin):
    released, arena = [], object()
    monkeypatch.setattr(arenas, "release", lambda *args: released.append(args))
    run = SimpleNamespace(arena=arena, start=1000)
    Sharding(Rank(rank), None, 2).release(run, begin, begin + 100, [0, 40, 70, 100])
    start = 1000 + begin
    borders = [0, 40, 70, 100]
    assert released == [
        (arena, start, start + borders[rank]), (arena, start + borders[rank + 1], start + 100)
    ]  # fmt: skip


@each(has_values=[True, False], stage=[1, 2])
def test_new_values_are_spread_and_gradients_let_go(has_values, stage):
    done = []
    comm = SimpleNamespace(rank=0, size=1, _share_parts=lambda *args: done.append(args))
    one = Sharding(comm, None, stage)
    one._borders = [[0, 5], [0, 7]]
    one._values = SimpleNamespace(spread=lambda *args: done.append(args)) if has_values else None
    one.release = lambda *args: done.append(args)
    runs = [SimpleNamespace(data="a", size=5), SimpleNamespace(data="b", size=7)]
    with create_communicator("single")._gate.call("update") as call:
        one.share_values(call, SimpleNamespace(runs=runs))
        assert not call._is_moving and call.meets_by == "bytes"
    expected = [(comm, call, runs, one._borders)] if has_values else [(call, "a", [0, 5]), (call, "b", [0, 7])]
    expected += [(runs[0], 0, 5, [0, 5]), (runs[1], 0, 7, [0, 7])] if stage == 2 else []
    assert done == expected


def test_numbers_are_added_over_ranks():
    one = Sharding(SimpleNamespace(allreduce=lambda x: 3 * x), None, 1)
    assert one.total([1, np.float32(0.5)]) == [3.0, 1.5] and one.total([]) == []
    assert all(type(value) is float for value in one.total([1]))


@each(stage=[1, 2])
def test_one_rank_settles_and_a_state_that_moved_is_collected(monkeypatch, stage):
    comm = create_communicator("single")
    shared, overlaps = [], []
    monkeypatch.setattr(comm, "_share_values", lambda call, plan: shared.append(plan), raising=False)
    monkeypatch.setattr(comm, "_overlap", lambda call, plan: overlaps.append(plan) or "overlap", raising=False)
    model = Net()
    optimizer = optimizers.MomentumSGD().setup(model)
    model(*next(batches(1)))
    plan = Plan(list(model.namedparams()))
    plan.place = 5
    one = Sharding(comm, optimizer, stage)
    one.settle(plan)
    assert one.place == 5 and plan.division is one and shared == [plan] and one._borders == [[0, plan.runs[0].size]]
    assert plan.overlap == ("overlap" if stage == 2 else None) and len(overlaps) == stage - 1
    arena = plan.runs[0].arena
    assert (
        (arena in arenas.GRADIENTS)
        == (stage == 2)
        == np.shares_memory(arena.grad, arenas.segment_for(arena, arenas.GRADIENTS).raw)
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


def test_a_system_without_such_memory_keeps_gradients_where_they_are(monkeypatch):
    def refuse(*args):
        raise OSError("no anonymous files")

    monkeypatch.setattr(arenas, "Segment", refuse)
    model = Net()
    optimizer = optimizers.SGD().setup(model)
    model(*next(batches(1)))
    plan = Plan(list(model.namedparams()))
    Sharding(create_communicator("single"), optimizer, 2).settle(plan)
    assert plan.runs[0].arena not in arenas.GRADIENTS


def test_only_arrays_of_the_host_go_into_segments(monkeypatch):
    made, moved = [], []
    monkeypatch.setattr(arenas, "segment_for", lambda *args: made.append(args))
    monkeypatch.setattr(arenas, "move_gradients_in", moved.append)
    on_host, on_device = SimpleNamespace(grad=np.zeros(1)), SimpleNamespace(grad=[0])
    sharding._into_segments([on_device, on_host])
    assert made == [(on_host, arenas.GRADIENTS)] and moved == [[on_host]]
