"""How the communicator ``flat`` chooses between shared memory, messages and sockets, and what it says: part by part."""

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm import create_communicator
from dbrdist.comm.communicators import shared_memory
from dbrdist.comm.communicators.messages import MessageReducer
from dbrdist.comm.communicators.shared_memory import FlatReducer, SharedSum, SingleNodeReducer
from dbrdist.comm.gradients import bandwidth
from dbrdist.comm.gradients.overlap import Overlap
from dbrdist.comm.gradients.shared_gradients import SharedGradients
from dbrdist.comm.protocol.wire_type import Codec
from dbrdist.comm.transport import message, mpi
from tests.each import each

DEFAULTS = {"shared_memory": None, "overlap": None, "sockets": None}


class Ranks(SimpleNamespace):
    """As much of the ranks as the reducer asks for."""

    def takes(self, arrays):
        return False


class Flat(FlatReducer):
    """One rank of three on two hosts, without MPI."""

    def __init__(self, size=3, rank=0, inter_size=2, **configs):
        self.given = SimpleNamespace(get_config={**DEFAULTS, **configs}.__getitem__)
        self.given.ranks = Ranks(size=size, rank=rank, inter_size=inter_size, has_cores=True, comm=Everyone())
        super().__init__(self.given)


class Everyone:
    """A communicator of MPI; ``answers`` are what the next allgathers give instead of this rank's word three times."""

    def __init__(self, *answers):
        self.answers, self.words, self.bcasts = list(answers), [], []

    def allgather(self, word):
        self.words.append(word)
        return self.answers.pop(0) if self.answers else [word] * 3

    def bcast(self, word):
        self.bcasts.append(word)
        return word


def plan_of(num_bytes, division=None, runs=("run",), shared=None):
    return SimpleNamespace(num_bytes=num_bytes, division=division, runs=list(runs), shared=shared)


MANY, FEW = 1 << 20, (1 << 20) - 1
RELEASES, KEEPS = SimpleNamespace(releases=True), SimpleNamespace(releases=False)


@each(
    **{
        "wanted, size, inter_size, plan, watched, overlaps": [
            (None, 3, 2, plan_of(MANY), True, True), (None, 3, 2, plan_of(FEW), True, False),
            (None, 3, 1, plan_of(MANY), True, False), (None, 2, 2, plan_of(MANY), True, True),
            (None, 3, 2, plan_of(MANY), False, False), (None, 3, 2, plan_of(MANY, runs=()), True, False),
            (None, 1, 1, plan_of(MANY), True, False), (True, 2, 1, plan_of(FEW), True, True),
            (True, 1, 1, plan_of(MANY), True, False), (True, 2, 1, plan_of(FEW), False, False),
            (True, 2, 1, plan_of(FEW, runs=()), True, False), (False, 3, 2, plan_of(MANY), True, False),
            (False, 3, 2, plan_of(MANY, RELEASES), True, False), (None, 2, 1, plan_of(FEW, RELEASES), True, True),
            (None, 2, 1, plan_of(MANY, KEEPS), True, False), (None, 3, 2, plan_of(MANY, KEEPS), True, True),
            (None, 3, 2, plan_of(FEW, KEEPS), True, False),
        ]
    }
)  # fmt: skip
def test_when_gradients_are_reduced_while_backward_runs(monkeypatch, wanted, size, inter_size, plan, watched, overlaps):
    monkeypatch.setattr(mpi, "watching_is_allowed", lambda: watched)
    assert Flat(size, 0, inter_size, overlap=wanted)._overlaps(plan) is overlaps


LONG, SHORT = 1 << 16, (1 << 16) - 1


@each(
    **{
        "wanted, num_bytes, has_cores, copies, reaches": [
            (None, LONG, True, True, True), (None, SHORT, True, False, False), (None, LONG, False, False, True),
            (None, SHORT, False, False, False), (True, SHORT, False, True, True), (True, LONG, True, True, True),
            (False, LONG, True, False, True),
        ]
    }
)  # fmt: skip
def test_how_long_arrays_go_through_memory(wanted, num_bytes, has_cores, copies, reaches):
    comm = Flat(shared_memory=wanted)
    comm.ranks.has_cores = has_cores
    assert comm._copies_through_memory(num_bytes) is copies
    run = SimpleNamespace(grad=np.zeros(2, "f4"))
    assert comm._reaches(plan_of(num_bytes, runs=[run])) is reaches
    for grad in (np.zeros(2, ">f4"), [1.0]):
        assert comm._reaches(plan_of(num_bytes, runs=[run, SimpleNamespace(grad=grad)])) is False


@each(
    **{
        "shared, dtype, wanted, is_shared": [
            (True, "f4", True, True), (True, "?", True, False), (False, "f4", True, False), (True, "f4", False, False)
        ]
    }
)  # fmt: skip
def test_what_is_added_through_memory(monkeypatch, shared, dtype, wanted, is_shared):
    comm, seen = Flat(shared_memory=wanted), []
    x, call = np.zeros(4, dtype), object()
    monkeypatch.setattr(MessageReducer, "reduce_host", lambda self, *args: seen.append(("messages", *args)))
    comm.ranks.meet = lambda call: seen.append(("meet", call))
    comm._shared = SimpleNamespace(reduce=lambda *args: seen.append(("shared", *args))) if shared else None
    comm.reduce_host(call, x, [0.5], 2.0)
    assert [name for name, *_ in seen] == (["meet", "shared"] if is_shared else ["messages"])
    _, *others, array, factors, divisor = seen[-1]
    assert array is x and (factors, divisor) == ([0.5], 2.0) and others == ([] if is_shared else [call])
    assert seen[0][1] is call or not is_shared


# ---- sums in pieces -------------------------------------------------------------------------------------------------
class Turns:
    """Two ranks that are told to go on by turns: what each waits for is done by the other one meanwhile."""

    def __init__(self, rank, size):
        self.rank, self.size, self.met = rank, size, 0

    def Barrier(self):
        self.met += 1


@each(size=[0, 1, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, (1 << 17) + 5])
def test_pieces_of_a_sum_take_turns_in_two_buffers(size):
    """One rank; it meets the others twice for each piece of 256 KiB, and once more at the end."""
    comm = Turns(0, 1)
    raw = np.zeros(2 << 18, np.uint8)
    one = SharedSum(comm, [raw])
    x = np.arange(1, size + 1, dtype="f4")
    one.reduce(x, [3.0], 2.0)
    np.testing.assert_array_equal(x, np.arange(1, size + 1, dtype="f4") * 3 / 2)
    pieces = -(-size // (1 << 16))
    assert comm.met == 2 * pieces + (size > 0)
    halves = raw.view("f4").reshape(2, -1)
    assert halves[0].any() == (pieces > 0) and halves[1].any() == (pieces > 1)


def test_each_rank_adds_its_block_of_all_pieces():
    raws = [np.zeros(2 << 18, np.uint8) for _ in range(3)]
    for rank, raw in enumerate(raws):
        raw[:28].view("f4")[...] = [10.0**rank] * 7
    one = SharedSum(Turns(1, 3), raws)
    x = np.full(7, 10.0, "f4")
    one.reduce(x, None, None)
    begin, end = message.blocks(7, 3)[1:3]
    expected = np.ones(7, "f4")  # the blocks of the other ranks are theirs to add
    expected[begin:end] = 111
    np.testing.assert_array_equal(x, expected)
    with pytest.raises(IndexError):
        one._buffers[2]


# ---- what is shared, and why not ------------------------------------------------------------------------------------
def test_all_or_nobody_shares(capfd):
    """Offers go to the ranks of the host alone; the others hear of a failure only where there is one."""
    shared, lacking = [([7], ""), ([9], "")], [([7], ""), (None, "no memory")]
    for rank, neighbours, is_failed, reasons, taken, said in (
        (0, shared, 0, [], "took [[7], [9]]", ""),
        (0, lacking, 1, ["", "no memory", ""], None, "rank 1: no memory"),
        (1, lacking, 1, ["", "no memory", ""], None, ""),
        (0, shared, 1, ["", "a", "b"], None, "ranks 1, 2: a"),
    ):
        comm, found = Flat(rank=rank), []
        comm.ranks.MPI = SimpleNamespace(MAX="largest", IN_PLACE="in place")
        comm.ranks.comm = Everyone(*([reasons] if reasons else []))

        def allreduce(sent, x, op, found=found, answer=is_failed):
            found.append((sent, x.tolist(), op))
            x[...] = answer

        comm.ranks.comm.Allreduce = allreduce
        hosts = SimpleNamespace(local=Everyone(neighbours))
        assert comm._share(hosts, lambda: [7], lambda found: f"took {found}") == taken
        assert hosts.local.words == [([7], "")] and found == [("in place", [0], "largest")]
        text = "the ranks of a host send messages instead of sharing memory, because on "
        assert capfd.readouterr().err == (f"dbrdist: {text}{said}\n" if said else "")


def test_errors_of_memory_are_reasons_and_others_are_raised():
    def fails(error):
        raise error

    assert shared_memory._tried(lambda: 3) == (3, "")
    for error, reason in ((OSError("no room"), "no room"), (OSError(), "OSError"), (MemoryError(), "MemoryError")):
        assert shared_memory._tried(lambda error=error: fails(error)) == (None, reason)
    with pytest.raises(ValueError, match="on purpose"):
        shared_memory._tried(lambda: fails(ValueError("on purpose")))


@each(shared=[True, False], is_only_one=[True, False], has_hosts=[True, False], is_there=[True, False])
def test_parameters_are_shared_where_gradients_are_on_one_host(monkeypatch, shared, is_only_one, has_hosts, is_there):
    comm, moved = Flat(), []
    comm.hosts = SimpleNamespace(is_only_one=is_only_one) if has_hosts else None
    runs = [[np.zeros(2)]]
    monkeypatch.setattr(comm, "_share_runs", lambda *args: runs if is_there else None)
    plan = plan_of(8, shared=SharedGradients(runs) if shared else None)
    plan.move = moved.append
    found = comm.share_values("call", plan)
    assert (found is not None) == (shared and is_only_one and has_hosts and is_there) == (len(moved) == 1)
    assert found is None or (found._runs is runs and moved == [shared_memory.shared_gradients.move_values_in])


@each(reaches=[True, False], has_hosts=[True, False], is_there=[True, False])
def test_gradients_are_shared_where_they_reach(monkeypatch, reaches, has_hosts, is_there):
    comm, moved, laid = Flat(), [], []
    comm.hosts = SimpleNamespace() if has_hosts else None
    runs = [[np.zeros(2)]]
    monkeypatch.setattr(comm, "_reaches", lambda plan: reaches)
    monkeypatch.setattr(comm, "lay_cable", lambda: laid.append(1))
    monkeypatch.setattr(comm, "_share_runs", lambda *args: runs if is_there else None)
    plan = plan_of(8)
    plan.move = moved.append
    found = comm.share_gradients("call", plan)
    assert len(laid) == (reaches and has_hosts)
    assert (found is not None) == (reaches and has_hosts and is_there)
    assert moved == ([] if found is None else [shared_memory.shared_gradients.move_gradients_in])
    assert found is None or found._runs is runs


# ---- between hosts --------------------------------------------------------------------------------------------------
class FakeCable:
    def __init__(self):
        self.is_closed = False

    def close(self):
        self.is_closed = True


LAID = [
    # sockets, is_fast, hosts, reason of all, as fast as MPI: cable kept, its word, tried
    (None, None, 2, "", True, True, True), (None, None, 2, "", False, False, True),
    (None, None, 2, "no route", True, False, True), (True, None, 2, "", False, True, True),
    (True, None, 2, "no route", False, False, True), (False, None, 2, "", True, False, False),
    (None, True, 2, "", False, True, True), (None, False, 2, "", True, False, False),
    (True, False, 2, "", True, False, False), (None, None, shared_memory.MOST_RANKS, "", True, True, True),
    (None, None, shared_memory.MOST_RANKS + 1, "", True, False, False),
]  # fmt: skip


@each(**{"sockets, is_fast, num_hosts, reason, fast, kept, tried": LAID}, rank=[0, 1], takes_part=[True, False])
def test_hosts_are_connected_where_that_is_fast_or_wanted(
    monkeypatch, capfd, sockets, is_fast, num_hosts, reason, fast, kept, tried, rank, takes_part
):
    comm = Flat(3, rank, num_hosts, sockets=sockets)
    comm.hosts = SimpleNamespace(is_only_one=False, between="between" if takes_part else None)
    comm.ranks.comm = Everyone(["", reason, ""])
    cable, seen = FakeCable(), []

    def connect(between):
        seen.append(between)
        return (None, reason) if reason else (cable, "")

    monkeypatch.setattr(shared_memory, "connect", connect)
    monkeypatch.setattr(comm, "_is_as_fast", lambda found: seen.append(found) or fast)
    comm.lay_cable(is_fast)
    own = cable if takes_part and not reason else None
    is_measured = tried and not reason and not sockets and not is_fast
    assert seen == ["between"] * (tried and takes_part) + [own] * is_measured
    assert bool(comm._has_cable) is kept and comm._cable is (own if kept else None)
    assert cable.is_closed == (tried and takes_part and not kept and not reason)
    is_said = bool(reason and sockets and rank == 0)
    text = f"dbrdist: sums of hosts are sent by MPI, not over sockets: {reason}\n"
    assert capfd.readouterr().err == (text if is_said else "")
    assert comm.between_hosts() == (" over sockets" if kept else "")
    comm.lay_cable(is_fast)  # once
    assert len(seen) == tried * takes_part + is_measured


@pytest.mark.parametrize("hosts", [None, SimpleNamespace(is_only_one=True)])
def test_one_host_is_not_connected(monkeypatch, hosts):
    comm = Flat(sockets=True)
    comm.hosts = hosts
    monkeypatch.setattr(shared_memory, "connect", lambda between: 1 / 0)
    comm.lay_cable()
    assert comm._has_cable is None and comm._cable is None


@each(**{"by_mpi, by_cable, fast": [([1.0] * 3, [1.25, 9, 9], True), ([2, 2, 1.0], [1.5, 1.4, 1.31], False),
                                    ([1.0] * 3, [0.5] * 3, True), ([1.0, 9, 9], [1.4] * 3, False)]})  # fmt: skip
def test_the_best_of_three_sums_each_way_is_compared(monkeypatch, by_mpi, by_cable, fast):
    comm, times, seen = Flat(), iter([*by_mpi, *by_cable]), []
    cable = FakeCable()
    monkeypatch.setattr(comm, "time_reduction", lambda n: seen.append((comm._cable, n)) or next(times))
    assert comm._is_as_fast(cable) is fast and comm.ranks.comm.bcasts == [fast]
    assert seen == [(None, 1 << 22)] * 3 + [(cable, 1 << 22)] * 3


@each(has_cable=[True, False], size=[0, 3])
def test_what_carries_a_sum_between_hosts(monkeypatch, has_cable, size):
    comm, seen = Flat(), []
    comm.hosts = SimpleNamespace(between="between")
    comm._cable = FakeCable() if has_cable else None
    monkeypatch.setattr(comm, "reduce_over", lambda *args: seen.append(args))
    add_up = lambda *args: SimpleNamespace(run=lambda: seen.append(("cable", *args)))  # noqa: E731
    monkeypatch.setattr(shared_memory, "PipelinedSum", add_up)
    x, call, codec = np.ones(size), object(), Codec()
    comm.reduce_between(call, x, codec, 2.0)
    (found,) = seen
    assert found == (("cable", comm._cable, call, x, codec, None, 2.0) if has_cable and size else
                     ("between", call, x, codec, None, 2.0))  # fmt: skip


@each(
    **{
        "hosts, over": [
            (None, "all"),
            ((True, "between"), "all"),
            ((False, "between"), "between"),
            ((False, None), None),
        ]
    }
)
def test_what_is_timed(monkeypatch, hosts, over):
    """On one host a sum of its ranks, else one of hosts; a rank that takes no part in that has no time."""
    comm, asked, met = Flat(), [], []
    comm.hosts = None if hosts is None else SimpleNamespace(is_only_one=hosts[0], between=hosts[1])
    single = create_communicator("single")
    comm.given.gate, comm.ranks.comm = single.gate, "all"
    comm.given.barrier = lambda: met.append(1)
    monkeypatch.setattr(bandwidth, "timed", lambda function: function() or 0.5)
    monkeypatch.setattr(comm, "reduce_over", lambda way, call, x, *args: asked.append((way, call, x, *args[1:])))
    monkeypatch.setattr(comm, "reduce_between", lambda call, x, *args: asked.append(("between", call, x, *args[1:])))
    assert comm.time_reduction(4000) == (0.0 if over is None else 0.5) and met == [1]
    call = single.gate.record.last[-1]
    assert (call.verb, call.meets_by, call.is_moving) == ("measure", "bytes", False)
    assert [a[0] for a in asked] == ([] if over is None else [over])
    for _, which, x, *rest in asked:
        assert which is call and x.dtype == np.float32 and x.size == 1000 and not x.any() and set(rest) == {None}


# ---- in the background ----------------------------------------------------------------------------------------------
@each(allowed=[True, False], size=[1, 2])
def test_a_courier_is_made_once_and_connected_as_this_one_is(monkeypatch, allowed, size):
    comm, laid = Flat(size), []
    part = SimpleNamespace(reducer=SimpleNamespace(lay_cable=lambda is_fast: laid.append(is_fast)))
    splits = []
    monkeypatch.setattr(mpi, "watching_is_allowed", lambda: allowed)
    comm.given.split = lambda *args: splits.append(args) or part

    def lay():
        comm._has_cable = "as here"

    monkeypatch.setattr(comm, "lay_cable", lay)
    found = comm.thread()
    if allowed and size > 1:
        assert found.comm is part and comm.thread() is found and splits == [(0, 0)] and laid == ["as here"]
    else:
        assert found is None and splits == []


@each(**{"measured, num_bytes, bucket": [(1 << 20, 1 << 20, 1 << 20), (100, 48 * 300, 300), (300, 48 * 300 - 1, 300)]})
def test_buckets_are_of_the_measured_size_or_a_48th(monkeypatch, measured, num_bytes, bucket):
    comm, asked, made = Flat(), [], []
    courier = SimpleNamespace(comm="of its own")
    monkeypatch.setattr(comm, "_overlaps", lambda plan: True)
    monkeypatch.setattr(comm, "thread", lambda: courier)
    monkeypatch.setattr(bandwidth, "bucket_bytes", lambda comm: asked.append(comm) or measured)
    monkeypatch.setattr(shared_memory, "Overlap", lambda *args: made.append(args) or object.__new__(Overlap))
    plan = plan_of(num_bytes)
    for _ in range(2):
        assert comm.overlap("call", plan) is not None
    assert made == [(courier, plan, bucket)] * 2 and asked == ["of its own"]
    monkeypatch.setattr(comm, "_overlaps", lambda plan: False)
    assert comm.overlap("call", plan) is None


def test_everything_is_given_back(monkeypatch):
    done = []
    monkeypatch.setattr(MessageReducer, "free", lambda self: done.append("rest"))
    comm = Flat()
    comm.free()
    assert done == ["rest"]
    comm._cable = SimpleNamespace(close=lambda: done.append("cable"))
    comm.hosts = SimpleNamespace(free=lambda: done.append("hosts"))
    part = SimpleNamespace(finalize=lambda: done.append("part"))
    comm._courier = SimpleNamespace(close=lambda: done.append("courier"), comm=part)
    comm._shared = object()
    comm.free()
    assert done[1:] == ["courier", "part", "cable", "hosts", "rest"] and comm._shared is None


@each(inter_size=[1, 2])
def test_single_node_is_for_one_host(inter_size):
    comm = Flat(4, 0, inter_size).given
    error = SingleNodeReducer(comm).misfit()
    text = "the communicator 'single_node' expected all ranks on one host, got 4 ranks on 2 hosts; use 'auto', 'flat' "
    assert error is None if inter_size == 1 else type(error) is ValueError and str(error).startswith(text)


@each(overlap=[None, True, False], takes=[True, False])
def test_what_is_enclosed_in_a_row(overlap, takes):
    comm = Flat(overlap=overlap)
    comm.ranks.takes = lambda arrays: takes
    assert comm.encloses([np.ones(1)]) is (not overlap and takes)
