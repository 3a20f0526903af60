"""Tests of dbrdist.comm.communicators.mpi_communicator."""

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm.communicators import mpi_communicator, two_levels
from dbrdist.comm.communicators.mpi_communicator import MpiCommunicator
from dbrdist.comm.communicators.two_levels import NonCudaAwareCommunicator
from dbrdist.comm.protocol.wire_type import Codec, Narrowed, Scaled
from dbrdist.comm.transport import message
from dbrdist.core.array import backend
from dbrdist.core.array.backend import as_dtype
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


class Mpi(MpiCommunicator):
    """Rank 1 of three, without MPI."""

    def __init__(self):
        self._MPI, self._rank, self._size, self._configs = MODULE, 1, 3, {}
        self._comm, self._rows, self._abandoned, self.waited = Line(), Line(), [], []

    def __del__(self):
        """There is nothing to give back."""

    def _wait(self, call, request, kind="reduce"):
        self.waited.append((call, request.name, kind))


def test_counts_of_mpi_are_below_2_to_the_31():
    assert mpi_communicator._PIECE_BYTES < 2**31 and two_levels._PIECE_BYTES < 2**31


@each(**{"size, lengths": [(0, []), (3, [3]), (4, [4]), (9, [4, 4, 1])]})
def test_long_messages_go_in_pieces(monkeypatch, size, lengths):
    monkeypatch.setattr(mpi_communicator, "_PIECE_BYTES", 4)
    monkeypatch.setattr(mpi_communicator, "_WHOLE_BYTES", -1)
    comm, call = Mpi(), SimpleNamespace(peer=2, tag=5, num_bytes=size)
    raw, head = np.arange(size, dtype=np.uint8), np.array([1, 1, size])
    comm._bcast_bytes(raw, 2)
    comm._send_parts(call, head, [raw])
    asked = [(name, args) for name, *args in comm._comm.asked]
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
    comm._send_parts(SimpleNamespace(peer=2, tag=5, num_bytes=9), head, parts)
    ((name, (raw, _), *to),) = comm._comm.asked
    assert (name, to) == ("Isend", [2, 5])
    comm._comm.Improbe = lambda peer, tag, status: (
        setattr(status, "Get_count", lambda kind: len(raw))
        or SimpleNamespace(Recv=lambda buffer: buffer[0].__setitem__(slice(None), np.frombuffer(raw, np.uint8)))
    )
    call = SimpleNamespace(peer=2, tag=5, is_waiting=False, error="", pause_seconds=0.0)
    found, theirs = comm._recv_parts(call)
    assert found.tolist() == head.tolist() and [p.tobytes() for p in theirs] == [b"abc", b"defghi"]
    assert all(part.flags.writeable and part.ctypes.data % 16 == 0 for part in theirs)
    assert len(comm._comm.asked) == 1 and not comm.waited


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

    comm._comm.Improbe, comm._comm.Irecv = probe, take
    head, parts = comm._recv_parts(call)
    assert head.tolist() == [9, 2, 5, 3] and [p.tobytes() for p in parts] == [b"abcde", b"xyz"]
    assert [w[1] for w in comm.waited] == ["Irecv"] * 3


def test_bytes_are_exchanged_as_they_are_told():
    comm = Mpi()
    comm._allgather_bytes("mine", "raw", [1, 2], [0, 1])
    comm._allgather_own("raw", [1, 2], [0, 1])
    comm._exchange_bytes("sent", [1], [2], "raw", [3], [4])
    assert comm._comm.asked == [
        ("Allgatherv", ["mine", "byte"], ["raw", ([1, 2], [0, 1]), "byte"]),
        ("Allgatherv", "in place", ["raw", ([1, 2], [0, 1]), "byte"]),
        ("Alltoallv", ["sent", ([1], [2]), "byte"], ["raw", ([3], [4]), "byte"]),
    ]
    for meets_by, num in (("row", 0), ("bytes", 1)):
        comm = Mpi()
        comm._meet(SimpleNamespace(meets_by=meets_by))
        assert len(comm._comm.asked) == len(comm.waited) == num


@each(**{"dtype, op": [("f4", "sum"), ("?", "or"), ("i8", "sum")]}, factors=[None, [9.0, 2.0, 9.0]])
def test_mpis_own_sum(dtype, op, factors):
    if factors and dtype != "f4":
        pytest.skip("only gradients have weights")
    comm, x = Mpi(), np.arange(6).astype(dtype)
    seen = []
    comm._comm.Iallreduce = lambda *args: (
        seen.append((*args[:1], args[1].copy(), *args[2:])) or SimpleNamespace(name="i")
    )
    divisor = 4.0 if dtype == "f4" else None
    comm._reduce_native(comm._comm, "call", x, factors, divisor)
    ((place, sent, how),) = seen
    assert (place, how) == ("in place", op) and sent.tolist() == (np.arange(6) * (2 if factors else 1)).astype(
        dtype
    ).tolist()
    assert x.tolist() == (sent / 4 if divisor else sent).tolist()


CODECS = [
    ("f4", Codec(), False), ("f2", Codec(), True), ("f8", Narrowed(as_dtype("f4")), False),
    ("f4", Scaled(as_dtype("f2")), True), ("bfloat16", Codec(), True),
]  # fmt: skip


@each(**{"dtype, codec, is_narrow": CODECS})
def test_types_that_mpi_has_are_added_by_it_in_pieces(monkeypatch, dtype, codec, is_narrow):
    comm, seen = Mpi(), []
    monkeypatch.setattr(comm, "_reduce_native", lambda *args: seen.append(("mpi", args[0], args[2].copy(), *args[3:])))
    monkeypatch.setattr(comm, "_messages", lambda way: ("messages over", way))
    monkeypatch.setattr(mpi_communicator, "Sum", lambda *args: SimpleNamespace(run=lambda: seen.append(args)))
    x = np.arange(5).astype(as_dtype(dtype))
    monkeypatch.setattr(mpi_communicator, "_PIECE_BYTES", 2 * x.itemsize)
    for over in (comm._comm, "between"):
        seen.clear()
        comm._reduce_over(over, "call", x, codec, [1.0], 2.0)
        if is_narrow:
            ((way, call, array, *rest),) = seen
            assert way == ("messages over", comm._rows if over is comm._comm else over)  # apart from the program's own
            assert call == "call" and array is x and rest == [codec, [1.0], 2.0]
        else:
            assert [s[2].tolist() for s in seen] == [[0, 1], [2, 3], [4]]
            assert all(s[:2] == ("mpi", over) and s[3:] == ([1.0], 2.0) for s in seen)
            assert {s[2].dtype for s in seen} == {np.dtype("f4")}


@each(is_collective=[True, False], records=[True, False])
def test_waits_are_noted_where_somebody_records(monkeypatch, is_collective, records):
    met, waited = [], []
    recorder = SimpleNamespace(meet=lambda *args: met.append(args)) if records else None
    monkeypatch.setattr(mpi_communicator.spans, "recording", lambda: recorder)
    monkeypatch.setattr(mpi_communicator.time, "perf_counter", lambda: 7.0)
    monkeypatch.setattr(mpi_communicator.mpi, "wait_until", lambda *args: waited.append(args))
    call = SimpleNamespace(is_collective=is_collective, num_waits=2, comm_name="c", number=9)
    comm = Mpi()
    comm._wait_until(call, "test", "row")
    assert waited == [("test", call)]
    assert met == ([(("c", 9, 3, "row"), 7.0)] if records and is_collective else [])


def test_what_a_wait_left_behind_is_kept(monkeypatch):
    comm, request = Mpi(), SimpleNamespace(Test=None)

    def stop(call, test, kind):
        raise KeyboardInterrupt

    monkeypatch.setattr(comm, "_wait_until", stop)
    with pytest.raises(KeyboardInterrupt):
        MpiCommunicator._wait(comm, "call", request)
    assert comm._abandoned == [request]


@each(size=[1, 2])
def test_a_failure_of_one_rank_alone_ends_no_job(monkeypatch, size):
    ended = []
    monkeypatch.setattr(mpi_communicator.watch, "end_for", lambda *args: ended.append(args))
    comm = Mpi()
    comm._size = size
    comm._failed_half_way("call", "why")
    assert ended == [("call", "why")] * (size > 1)


class Staged:
    """A 1-d array of a device that is no NumPy array."""

    def __init__(self, x, log):
        self.x, self.log, self.size, self.itemsize, self.nbytes, self.dtype = (
            x,
            log,
            x.size,
            x.itemsize,
            x.nbytes,
            x.dtype,
        )

    def __getitem__(self, where):
        return Staged(self.x[where], self.log)

    def get(self, out):
        out[...] = self.x

    def set(self, host):
        self.x[...] = host
        self.log.append(("set", host.size))


@each(**{"size, lengths": [(0, []), (3, [3]), (4, [4]), (9, [4, 4, 1])]})
def test_device_arrays_go_through_one_buffer(monkeypatch, size, lengths):
    log, made = [], []
    monkeypatch.setattr(two_levels, "_PIECE_BYTES", 17)
    monkeypatch.setattr(backend, "pinned_bytes", lambda n: made.append(n) or np.zeros(n, np.uint8))
    monkeypatch.setattr(backend, "wait_for", lambda piece: log.append(("wait", piece.size)))
    comm = object.__new__(type("Comm", (NonCudaAwareCommunicator,), {"__del__": lambda self: None}))
    x = Staged(np.arange(size, dtype="f4"), log)
    call = SimpleNamespace(num_bytes=1, kind=None)

    def double(host):
        assert isinstance(host, np.ndarray) and host.dtype == "f4"
        host *= 2

    for _ in range(2):
        comm._on_host(call, x, double)
    assert x.x.tolist() == (4 * np.arange(size)).tolist() and made == ([17] if size else [])
    assert log == [entry for n in lengths for entry in (("set", n), ("wait", n))] * 2
    assert call.num_bytes == 1 + 8 * size and call.kind == (np.float32 if size else None)
    y, seen = np.ones(3), []
    comm._on_host(call, y, seen.append)
    assert seen[0] is y and call.num_bytes == 1 + 8 * size + 24
