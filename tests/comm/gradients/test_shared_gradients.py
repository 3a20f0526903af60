"""What becomes of shared memory when ranks die; values are in tests/mpi/test_mpi_arenas.py."""

import itertools
import mmap
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist import optimizers
from dbrdist.comm import create_communicator
from dbrdist.comm.gradients import sharding, shared_gradients
from dbrdist.comm.gradients.reduction_plan import ReductionPlan
from dbrdist.comm.gradients.sharding import ZeroSharding
from dbrdist.comm.protocol.wire_type import Scaled
from dbrdist.core.array.backend import as_dtype
from tests.comm import jobs
from tests.comm.comm_helpers import Rank, plan_of
from tests.comm.training_contract import Net, batches
from tests.each import each

PROGRAM = jobs.PROGRAMS / "dies_in_reduction.py"


@pytest.mark.mpiexec
@pytest.mark.parametrize("how", ["kill", "all", "raise"])
def test_a_rank_that_dies_in_a_reduction_ends_the_job(how):
    outcome = jobs.run(3, PROGRAM, how)
    assert outcome.text.count("shares True") == 3
    assert outcome.code != 0
    if how == "raise":
        assert "[rank 1] weighted_mean_grad at " in outcome.text
        assert "ended with ValueError: on purpose; the others wait in it, so the job is ended" in outcome.text


OVERLAP = jobs.PROGRAMS / "overlap.py"


@pytest.mark.mpiexec
def test_a_rank_that_raises_while_gradients_travel_ends_the_job():
    outcome = jobs.run(2, OVERLAP, "raise", limit_seconds=40)
    assert outcome.code == 1
    assert "[rank 1] ValueError: in backward, on purpose" in outcome.text


@pytest.mark.mpiexec
def test_after_an_error_while_gradients_travel_there_is_no_next_step():
    """Ranks may have failed at different buckets, which would meet those of the next step."""
    outcome = jobs.run(2, OVERLAP, "caught", limit_seconds=40)
    assert outcome.code == 1, outcome.text
    assert "after MPI_FINALIZE" not in outcome.text  # as of the thread that had begun to reduce
    assert "this communicator cannot be used any more, because update at " in outcome.text
    assert "ended with ValueError: in backward, on purpose" in outcome.text


@pytest.mark.mpiexec
def test_a_rank_that_is_killed_while_gradients_travel_ends_the_job():
    assert jobs.run(2, OVERLAP, "kill", limit_seconds=40).code != 0


PAGE = mmap.PAGESIZE


def pieces_of(num, size, dtype="f4"):
    """What each of some ranks has; and the same in float64."""
    rng = np.random.default_rng(num * size)
    found = [rng.normal(size=size).astype(as_dtype(dtype)) for _ in range(num)]
    return found, np.array([x.astype("f8") for x in found]).reshape(num, size)


def close(x, expected, dtype):
    tolerance = {"f8": 1e-14, "f4": 1e-6, "f2": 2.0**-11 * 1.01, "bfloat16": 2.0**-8 * 1.01}[dtype]
    np.testing.assert_allclose(x.astype("f8"), expected, rtol=tolerance, atol=2e-6 if dtype != "f8" else 1e-15)


@each(
    dtype=["f8", "f4", "f2", "bfloat16"],
    num=[1, 3],
    factors=[None, [0.5, 0.25, 2.0]],
    divisor=[None, 3.0],
    size=[100, 66_000],
)
def test_a_part_is_added_and_given_to_all(dtype, num, factors, divisor, size):
    """66,000 elements of four bytes are two chunks; 16-bit ones count as four."""
    found, wide = pieces_of(num, size, dtype)
    weights = [1.0] * num if factors is None else factors[:num]
    begin, end = 10, size - 7
    shared_gradients._add_in_place(found, begin, end, factors and weights, divisor)
    expected = np.tensordot(weights, wide, 1) / (divisor or 1)
    for x, old in zip(found, wide):
        close(x[begin:end], expected[begin:end], dtype)
        assert (x[:begin] == old[:begin]).all() and (x[end:] == old[end:]).all()
        assert x.tobytes()[begin * x.itemsize : end * x.itemsize] == found[0][begin:end].tobytes()


@each(**{"begin, end, itemsize, found": [
    (0, 10, 4, [(0, 10)]), (5, 5, 4, []), (3, 3 + (1 << 16), 4, [(3, 3 + (1 << 16))]),
    (0, (1 << 16) + 1, 2, [(0, 1 << 16), (1 << 16, (1 << 16) + 1)]),
    (0, 1 << 16, 8, [(0, 1 << 15), (1 << 15, 1 << 16)]),
]})  # fmt: skip
def test_chunks_of_256_kib(begin, end, itemsize, found):
    assert shared_gradients._chunks(begin, end, itemsize) == found


@each(size=[0, 1, 63, 64, 65, 1000], num=[1, 2, 3, 4])
def test_parts_of_owners_lie_on_cache_lines(size, num):
    parts = [shared_gradients.own_part(size, place, num) for place in range(num)]
    assert parts[0][0] == 0 and parts[-1][1] == size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    assert all(begin % 64 == 0 or begin == size for begin, _ in parts)
    lengths = [-(-(end - begin) // 64) for begin, end in parts]
    assert max(lengths) - min(lengths) <= 1
    assert shared_gradients.own_part(size, num, num) == (0, 0)


class Local:
    """The communicator of a host's ranks: its meetings."""

    def Ibarrier(self):
        return "barrier"


class Comm:
    """One rank; what it has waited for and sent between hosts."""

    def __init__(self, hosts, size, rank=0, config=None):
        self.hosts, self.size, self.rank, self.config, self.waits, self.sent = hosts, size, rank, config, [], []
        self.comm = self.ranks = self

    def wait(self, call, request):
        self.waits.append((call, request))

    def get_config(self, name):
        assert name == "allreduce_grad_dtype"
        return self.config

    def reduce_between(self, call, x, codec, divisor):
        """The other host has the same."""
        self.sent.append((x.size, x.dtype, type(codec), divisor))
        assert codec.scale > 1  # the ranks have agreed on one
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
    shared = shared_gradients.SharedGradients([found for found, _ in runs])
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
    shared_gradients.SharedGradients([other, found]).reduce(comm, call, None, None, [(1, 100, 250)])
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
    shared_gradients.SharedGradients([found]).reduce(comm, call_of(), factors, 3.0)
    weights = [1.0 if factors is None else factors[rank] for rank in ranks]
    begin, end = shared_gradients.own_part(300, place, owners)
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
    shared_gradients.SharedGradients([f for f, _ in runs]).reduce_scatter(
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
    shared_gradients.SharedGradients([found]).reduce_scatter(
        Comm(hosts_of([0, 1, 2], place), 3, place), call_of(), None, None, [(0, 0, 3)]
    )
    assert found[place].tolist() == [0] * 3


@each(place=[0, 1])
def test_values_are_taken_from_those_who_updated_them(place):
    found, wide = pieces_of(2, 100)
    own = SimpleNamespace(data=found[place])
    comm, call = Comm(hosts_of([0, 1], place), 2, place), call_of()
    shared_gradients.SharedValues([found]).spread(comm, call, [own], [[0, 64, 100]])
    np.testing.assert_array_equal(found[place], np.concatenate([wide[0, :64], wide[1, 64:]]).astype("f4"))
    np.testing.assert_array_equal(found[1 - place], wide[1 - place].astype("f4"))
    assert comm.waits == [(call, "barrier")] * 2 and call.num_bytes == 400 and call.kind == np.float32


def test_runs_are_reached_by_their_tickets():
    plan, (a, b) = plan_of(100, 30)
    (run,) = plan.runs
    for segments, move in (
        (shared_gradients.GRADIENTS, shared_gradients.move_gradients_in),
        (shared_gradients.VALUES, shared_gradients.move_values_in),
    ):
        numbers = shared_gradients.tickets(plan.runs, segments)
        segment = shared_gradients.segment_for(run.arena, segments)
        assert numbers.tolist() == [*segment.ticket, run.start] and segments[run.arena] is segment
        assert shared_gradients.segment_for(run.arena, segments) is segment
        plan.move(move)
        plan.move(move)  # they are there
        (run,) = plan.runs
        array = run.grad if segments is shared_gradients.GRADIENTS else run.data
        assert np.shares_memory(array, segment.raw)
        ((mine, theirs),) = shared_gradients.reach([numbers, numbers], plan.runs, 0, segments)
        assert mine.dtype == theirs.dtype == "f4" and mine.size == theirs.size == run.size
        assert np.shares_memory(mine, segment.raw) and not np.shares_memory(theirs, segment.raw)
        array[3] = 77
        assert mine[3] == theirs[3] == 77
    assert a.grad.tolist() == [1, 1, 1, 77, *[1] * 96] and b.grad.tolist() == [2] * 30
    assert a.array.tolist() == [0, 1, 2, 77, *range(4, 100)] and b.array.tolist() == list(range(30))


def test_a_run_in_the_middle_is_reached_where_it_begins():
    plan, params = plan_of(64, 64, 64)
    middle = ReductionPlan([("/1", params[1])])
    assert [run.start for run in middle.runs] == [64] and middle.runs[0].arena is plan.runs[0].arena
    numbers = shared_gradients.tickets(middle.runs, shared_gradients.GRADIENTS)
    middle.move(shared_gradients.move_gradients_in)
    ((own,),) = shared_gradients.reach([numbers], middle.runs, 0, shared_gradients.GRADIENTS)
    assert own.tolist() == [2] * 64


def test_an_array_of_two_parameters_is_not_shared():
    link = Net()
    link(*next(batches(1)))
    plans = [ReductionPlan(list(one.namedparams())) for one in (link, link.copy("share"))]
    runs = [run for plan in plans for run in plan.runs]
    with pytest.raises(OSError, match="a parameter that is not updated shares its array with another"):
        shared_gradients.tickets(runs, shared_gradients.VALUES)
    assert shared_gradients.tickets(runs, shared_gradients.GRADIENTS).size == 6 * len(runs)
    alone, _ = plan_of(8)
    assert shared_gradients.tickets(alone.runs, shared_gradients.VALUES).size == 6


def test_memory_of_gradients_is_given_back():
    plan, (p,) = plan_of(4 * PAGE)  # 16 pages of four-byte elements
    arena = plan.runs[0].arena
    assert shared_gradients.resident_bytes(arena) == arena.grad.nbytes
    shared_gradients.release(arena, 0, 4 * PAGE)  # not in a segment: nothing happens
    assert p.grad.all()
    shared_gradients.segment_for(arena, shared_gradients.GRADIENTS)
    shared_gradients.release(arena, 0, 4 * PAGE)
    assert p.grad.all()
    plan.move(shared_gradients.move_gradients_in)
    assert shared_gradients.resident_bytes(arena) == 16 * PAGE
    shared_gradients.release(arena, PAGE // 4 - 1, PAGE // 4 * 3 + 1)  # the second and the third
    assert shared_gradients.resident_bytes(arena) == 14 * PAGE
    assert np.flatnonzero(p.grad == 0).tolist() == list(range(PAGE // 4, PAGE // 4 * 3))


@each(rank=[0, 1, 2], begin=[0, 32])
def test_gradients_of_others_are_given_back(monkeypatch, rank, begin):
    released, arena = [], object()
    monkeypatch.setattr(shared_gradients, "release", lambda *args: released.append(args))
    run = SimpleNamespace(arena=arena, start=1000)
    ZeroSharding(Rank(rank), None, 2).release(run, begin, begin + 100, [0, 40, 70, 100])
    start = 1000 + begin
    borders = [0, 40, 70, 100]
    assert released == [
        (arena, start, start + borders[rank]), (arena, start + borders[rank + 1], start + 100)
    ]  # fmt: skip


def test_a_system_without_such_memory_keeps_gradients_where_they_are(monkeypatch):
    def refuse(*args):
        raise OSError("no anonymous files")

    monkeypatch.setattr(shared_gradients, "Segment", refuse)
    model = Net()
    optimizer = optimizers.SGD().setup(model)
    model(*next(batches(1)))
    plan = ReductionPlan(list(model.namedparams()))
    ZeroSharding(create_communicator("single"), optimizer, 2).settle(plan)
    assert plan.runs[0].arena not in shared_gradients.GRADIENTS


def test_only_arrays_of_the_host_go_into_segments(monkeypatch):
    made, moved = [], []
    monkeypatch.setattr(shared_gradients, "segment_for", lambda *args: made.append(args))
    monkeypatch.setattr(shared_gradients, "move_gradients_in", moved.append)
    on_host, on_device = SimpleNamespace(grad=np.zeros(1)), SimpleNamespace(grad=[0])
    sharding._into_segments([on_device, on_host])
    assert made == [(on_host, shared_gradients.GRADIENTS)] and moved == [[on_host]]
