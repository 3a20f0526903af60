"""Tests of dbrdist.comm.communicators.mpi_communicator."""

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm.communicators import mpi_communicator, two_levels
from dbrdist.comm.communicators.mpi_communicator import MpiRanks
from dbrdist.comm.transport import message
from tests.each import each

MODULE = SimpleNamespace(
    BYTE="byte", INT64_T="int64", SUM="sum", LOR="or", IN_PLACE="in place", Status=lambda: SimpleNamespace()
)


class Line:
    """A communicator of MPI: what it was asked for, each with a request that is done."""

    rank = 1

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        def ask(*args):
            self.asked.append((name, *args))
            return SimpleNamespace(Test=lambda: True, name=name)

        return ask


class Mpi(MpiRanks):
    """Rank 1 of three, without MPI."""

    def __init__(self):
        self.MPI, self.rank, self.size, self._mailbox, self._then = MODULE, 1, 3, None, None
        self.comm, self.rows, self.abandoned, self.waited = Line(), Line(), [], []

    def wait(self, call, request, kind="reduce"):
        self.waited.append((call, request.name, kind))


def test_counts_of_mpi_are_below_2_to_the_31():
    assert mpi_communicator._PIECE_BYTES < 2**31 and two_levels._PIECE_BYTES < 2**31


@each(**{"size, lengths": [(0, []), (3, [3]), (4, [4]), (9, [4, 4, 1])]})
def test_long_messages_go_in_pieces(monkeypatch, size, lengths):
    monkeypatch.setattr(mpi_communicator, "_PIECE_BYTES", 4)
    monkeypatch.setattr(mpi_communicator, "_WHOLE_BYTES", -1)
    comm, call = Mpi(), SimpleNamespace(peer=2, tag=5, num_bytes=size)
    raw, head = np.arange(size, dtype=np.uint8), np.array([1, 1, size])
    comm.bcast_bytes(raw, 2)
    comm.send_parts(call, head, [raw])
    asked = [(name, args) for name, *args in comm.comm.asked]
    bcasts, sends = asked[: len(lengths)], asked[len(lengths) :]
    pieces = np.split(raw, np.cumsum(lengths)[:-1]) if lengths else []
    for (name, ((piece, kind), root)), expected in zip(bcasts, pieces, strict=True):
        assert (name, kind, root) == ("Bcast", "byte", 2) and piece.tolist() == expected.tolist()
    assert sends[0][0] == "Isend" and sends[0][1][0] == [message.join(head, []), "byte"]
    assert sends[0][1][1:] == [2, 5]
    for (name, ((piece, kind), peer, tag)), expected in zip(sends[1:], pieces, strict=True):
        assert (name, kind, peer, tag) == ("Isend", "byte", 2, 5) and piece.tolist() == expected.tolist()
    assert comm.waited == [(call, "Isend", "reduce")] * len(lengths)


def test_a_short_message_is_one_of_mpis():
    comm, parts = Mpi(), [np.frombuffer(b"abc", np.uint8), np.frombuffer(b"defghi", np.uint8)]
    head = np.array([7, 2, 3, 6, 40])
    comm.send_parts(SimpleNamespace(peer=2, tag=5, num_bytes=9), head, parts)
    ((name, (raw, _), *to),) = comm.comm.asked
    assert (name, to) == ("Isend", [2, 5])
    comm.comm.Improbe = lambda peer, tag, status: (
        setattr(status, "Get_count", lambda kind: len(raw))
        or SimpleNamespace(Recv=lambda buffer: buffer[0].__setitem__(slice(None), np.frombuffer(raw, np.uint8)))
    )
    call = SimpleNamespace(peer=2, tag=5, is_waiting=False, error="", pause_seconds=0.0)
    found, theirs = comm.recv_parts(call)
    assert found.tolist() == head.tolist() and [p.tobytes() for p in theirs] == [b"abc", b"defghi"]
    assert all(part.flags.writeable and part.ctypes.data % 16 == 0 for part in theirs)
    assert len(comm.comm.asked) == 1 and not comm.waited


def test_a_small_array_is_one_of_mpis_if_its_head_can_describe_it():
    comm, call = Mpi(), SimpleNamespace(peer=2, tag=5)
    big_endian = np.ones(3, np.dtype(np.float32).newbyteorder())
    for x in (np.ones((1,) * 33, np.float32), np.ones(9)[::2], big_endian, np.ones(1 << 14)):
        assert comm.send_small(call, x) is False
    assert not comm.comm.asked
    for x in (np.ones((1,) * 32, np.float32), np.ones((2, 0)), np.array(3)):
        assert comm.send_small(call, x) is True
        assert comm.comm.asked.pop() == ("Isend", [message.whole(x), "byte"], 2, 5)


def test_a_message_is_received_in_pieces_of_its_parts(monkeypatch):
    monkeypatch.setattr(mpi_communicator, "_PIECE_BYTES", 4)
    comm = Mpi()
    call = SimpleNamespace(peer=2, tag=5, is_waiting=False, error="", pause_seconds=0.0)
    raws = iter([b"abcd", b"e", b"xyz"])

    def probe(peer, tag, status):
        assert (peer, tag) == (2, 5)
        first = message.join(np.array([9, 2, 5, 3]), [])
        status.Get_count = lambda kind: {"byte": len(first)}[kind]
        return SimpleNamespace(Recv=lambda raw: raw[0].__setitem__(slice(None), np.frombuffer(first, np.uint8)))

    def take(buffer, peer, tag):
        assert (buffer[1], peer, tag) == ("byte", 2, 5)
        buffer[0][...] = np.frombuffer(next(raws), np.uint8)
        return SimpleNamespace(Test=lambda: True, name="Irecv")

    comm.comm.Improbe, comm.comm.Irecv = probe, take
    head, parts = comm.recv_parts(call)
    assert head.tolist() == [9, 2, 5, 3] and [p.tobytes() for p in parts] == [b"abcde", b"xyz"]
    assert [w[1] for w in comm.waited] == ["Irecv"] * 3


def test_bytes_are_exchanged_as_they_are_told():
    comm = Mpi()
    comm.allgather_bytes("mine", "raw", [1, 2], [0, 1])
    comm.allgather_own("raw", [1, 2], [0, 1])
    comm.exchange_bytes("sent", [1], [2], "raw", [3], [4])
    assert comm.comm.asked == [
        ("Allgatherv", ["mine", "byte"], ["raw", ([1, 2], [0, 1]), "byte"]),
        ("Allgatherv", "in place", ["raw", ([1, 2], [0, 1]), "byte"]),
        ("Alltoallv", ["sent", ([1], [2]), "byte"], ["raw", ([3], [4]), "byte"]),
    ]
    for meets_by, num in (("row", 0), ("bytes", 1)):
        comm = Mpi()
        comm.meet(SimpleNamespace(meets_by=meets_by))
        assert len(comm.comm.asked) == len(comm.waited) == num


@each(is_collective=[True, False], records=[True, False])
def test_waits_are_noted_where_somebody_records(monkeypatch, is_collective, records):
    met, waited = [], []
    recorder = SimpleNamespace(meet=lambda *args: met.append(args)) if records else None
    monkeypatch.setattr(mpi_communicator.spans, "recording", lambda: recorder)
    monkeypatch.setattr(mpi_communicator.time, "perf_counter", lambda: 7.0)
    monkeypatch.setattr(mpi_communicator.mpi, "wait_until", lambda *args: waited.append(args))
    call = SimpleNamespace(is_collective=is_collective, num_waits=2, comm_name="c", number=9)
    comm = Mpi()
    comm.wait_until(call, "test", "row")
    assert waited == [("test", call, None)]
    assert met == ([(("c", 9, 3, "row"), 7.0)] if records and is_collective else [])


def test_messages_move_while_a_row_in_memory_is_waited_for(monkeypatch):
    waited, probed = [], []
    monkeypatch.setattr(mpi_communicator.mpi, "wait_until", lambda *args: waited.append(args))
    comm, call = Mpi(), SimpleNamespace(is_collective=True)
    comm.MPI, comm.comm.Iprobe = SimpleNamespace(ANY_SOURCE=-1, ANY_TAG=-2), lambda *args: probed.append(args)
    comm.wait_and_move(call, "test", "row")
    ((test, which, meanwhile),) = waited
    meanwhile()
    assert test == "test" and which is call and probed == [(-1, -2)]


def test_what_a_wait_left_behind_is_kept(monkeypatch):
    comm, request = Mpi(), SimpleNamespace(Test=None)

    def stop(call, test, kind):
        raise KeyboardInterrupt

    monkeypatch.setattr(comm, "wait_until", stop)
    with pytest.raises(KeyboardInterrupt):
        MpiRanks.wait(comm, "call", request)
    assert comm.abandoned == [request]


@each(size=[1, 2])
def test_a_failure_of_one_rank_alone_ends_no_job(monkeypatch, size):
    ended = []
    monkeypatch.setattr(mpi_communicator.watch, "end_for", lambda *args: ended.append(args))
    comm = Mpi()
    comm.size = size
    comm.failed_half_way("call", "why")
    assert ended == [("call", "why")] * (size > 1)


@each(has_mailbox=[True, False], answer=[True, False])
def test_rows_go_through_memory_where_all_ranks_reach_it(has_mailbox, answer):
    comm, posted = Mpi(), []
    assert comm.takes([np.ones(1)]) is comm.has_room() is False
    if has_mailbox:
        box = SimpleNamespace(takes=lambda arrays: answer, has_room=lambda: answer, exchange="exchange")
        box.release, box.post = "release", lambda *args: posted.append(args) or "letter"
        comm.use_mailbox(box)
        assert (comm.exchange_row, comm.release_enclosed) == ("exchange", "release")
        assert comm.post_row("call", b"row", [1]) == "letter" and posted == [("call", b"row", [1])]
    assert comm.takes([np.ones(1)]) is comm.has_room() is (has_mailbox and answer)
    comm.user_comm, comm.is_part, comm._differing, comm._then = Line(), False, Line(), None
    comm.free()  # and nothing of the memory
    assert comm._mailbox is None and comm.exchange_row.__func__ is MpiRanks.exchange_row
    assert [name for (name,) in comm.comm.asked] == ["Free"] == [name for (name,) in comm.rows.asked]
    assert comm.user_comm.asked == []
