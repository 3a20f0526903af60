"""Tests of dbrdist.comm.communicators.two_levels."""

from types import SimpleNamespace

import numpy as np

from dbrdist.comm.communicators import two_levels
from dbrdist.comm.communicators.messages import MessageReducer
from dbrdist.comm.communicators.two_levels import (
    HierarchicalReducer,
    NonCudaAwareReducer,
    TwoDimensionalReducer,
    TwoLevelReducer,
)
from dbrdist.comm.protocol.wire_type import Codec
from dbrdist.core.array import backend
from dbrdist.core.array.backend import as_dtype
from tests.each import each


class Two(TwoLevelReducer):
    """Rank 1 of some ranks; what goes to each level."""

    def __init__(self, size, has_one_each, between="between", place=0, num_owners=1, ranks=(0, 1)):
        super().__init__(SimpleNamespace(ranks=SimpleNamespace(size=size, rank=1)))
        self.done = []
        self._hosts = SimpleNamespace(
            has_one_each=has_one_each, between=between, place=place, num_owners=num_owners, ranks=list(ranks)
        )

    def _reduce_piece(self, call, codec, x, total, divisor):
        self.done.append(("piece", call, codec, x.size, total.dtype.name, total.tolist(), divisor))


@each(
    **{
        "size, has_one_each, level": [
            (1, True, "plain"),
            (2, True, "between"),
            (2, False, "piece"),
            (3, False, "piece"),
        ]
    },
    factors=[None, [9, 0.5, 9]],
    dtype=["f4", "f2", "bfloat16"],
)
def test_which_level_adds_what(monkeypatch, size, has_one_each, level, factors, dtype):
    comm, codec = Two(size, has_one_each), Codec()
    monkeypatch.setattr(MessageReducer, "reduce_host", lambda self, *args: self.done.append(("plain", *args)))
    if level == "between":
        monkeypatch.setattr(comm, "_between_hosts", lambda *args: Two._reduce_piece(comm, *args))
    x = np.arange(5).astype(as_dtype(dtype))
    monkeypatch.setattr(two_levels, "_PIECE_BYTES", 2 * x.itemsize)
    old = x.copy()
    comm._reduce_levels("call", codec, x, factors, 2.0)
    if level == "plain":
        assert comm.done == [("plain", "call", x, factors, 2.0)]
        return
    is_wider = dtype != "f4" and (factors is not None or level == "piece")
    kind = "float32" if is_wider else as_dtype(dtype).name
    weight = 0.5 if factors else 1
    pieces = [(old[i : i + 2].astype("f4") * weight).tolist() for i in (0, 2, 4)]
    assert comm.done == [("piece", "call", codec, len(p), kind, p, 2.0) for p in pieces]


@each(has_between=[True, False], is_own=[True, False])
def test_between_hosts_a_sum_is_sent_or_divided(monkeypatch, has_between, is_own):
    comm, codec = Two(3, False, "between" if has_between else None), Codec()
    asked = []
    monkeypatch.setattr(comm, "reduce_over", lambda *args: asked.append(args))
    own = np.array([2.0, 4.0], "f4")
    x = own if is_own else np.zeros(2, "f2")
    comm._between_hosts("call", codec, x, own, 2.0)
    if has_between:
        ((way, call, array, *rest),) = asked
        assert (way, call, rest) == ("between", "call", [codec, None, 2.0]) and array is own
    assert x.tolist() == ([2, 4] if has_between else [1, 2])


class Host:
    """The ranks of a host; requests are their words."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        return lambda *args: self.asked.append((name, *args)) or name


def on_host(kind, place, num_owners, num_ranks):
    comm = kind(SimpleNamespace(ranks=SimpleNamespace(rank=1)))
    local, waited, between = Host(), [], []
    comm._hosts = SimpleNamespace(local=local, place=place, num_owners=num_owners, ranks=list(range(num_ranks)))
    comm.ranks.MPI = SimpleNamespace(IN_PLACE="in place", BYTE="byte", SUM="sum", LOR="or")
    comm.ranks.wait = lambda call, request: waited.append(request)
    comm._between_hosts = lambda call, codec, x, own, divisor: between.append((x, own, divisor))
    return comm, local, waited, between


@each(place=[0, 1], dtype=["f4", "?"])
def test_the_first_rank_of_a_host_speaks_for_it(place, dtype):
    comm, local, waited, between = on_host(HierarchicalReducer, place, 1, 3)
    x, total = np.zeros(4, dtype), np.zeros(4, dtype)
    HierarchicalReducer._reduce_piece(comm, "call", "codec", x, total, 2.0)
    op = "or" if dtype == "?" else "sum"
    first = ("Ireduce", "in place", total, op, 0) if place == 0 else ("Ireduce", total, None, op, 0)
    assert [a is b or a == b for a, b in zip(local.asked[0], first)] == [True] * 5
    name, (raw, byte), root = local.asked[1]
    assert (name, byte, root) == ("Ibcast", "byte", 0) and np.shares_memory(raw, x) and raw.size == x.nbytes
    assert waited == ["Ireduce", "Ibcast"] and len(between) == (place == 0)
    assert place or (between[0][0] is x and between[0][1] is total and between[0][2] == 2.0)


@each(place=[0, 1, 2])
def test_owners_of_a_host_have_a_part_each(place):
    """Two owners among three ranks: five elements are two and three, and none for the third."""
    comm, local, waited, between = on_host(TwoDimensionalReducer, place, 2, 3)
    x, total = np.zeros(5, "f4"), np.zeros(5, "f4")
    TwoDimensionalReducer._reduce_piece(comm, "call", "codec", x, total, 2.0)
    (scatter, sent, own, counts, op), (gather, how, (raw, (sizes, starts), byte)) = local.asked
    assert (scatter, gather, op, how, byte) == ("Ireduce_scatter", "Iallgatherv", "sum", "in place", "byte")
    assert sent is total and counts.tolist() == [2, 3, 0] and own.size == counts[place] and own.dtype == "f4"
    assert sizes.tolist() == [8, 12, 0] and starts.tolist() == [0, 8, 20] and np.shares_memory(raw, x)
    assert waited == ["Ireduce_scatter", "Iallgatherv"] and len(between) == (place < 2)
    if place < 2:
        part, summed, divisor = between[0]
        assert summed is own and divisor == 2.0 and part.size == own.size
        assert part.ctypes.data - x.ctypes.data == [0, 8][place]


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
    comm = NonCudaAwareReducer(SimpleNamespace(ranks=None))
    x = Staged(np.arange(size, dtype="f4"), log)
    call = SimpleNamespace(num_bytes=1, kind=None)

    def double(host):
        assert isinstance(host, np.ndarray) and host.dtype == "f4"
        host *= 2

    for _ in range(2):
        comm.on_host(call, x, double)
    assert x.x.tolist() == (4 * np.arange(size)).tolist() and made == ([17] if size else [])
    assert log == [entry for n in lengths for entry in (("set", n), ("wait", n))] * 2
    assert call.num_bytes == 1 + 8 * size and call.kind == (np.float32 if size else None)
    y, seen = np.ones(3), []
    comm.on_host(call, y, seen.append)
    assert seen[0] is y and call.num_bytes == 1 + 8 * size + 24
