"""Tests of dbrdist.comm.protocol.primitives."""

import itertools
from types import SimpleNamespace

import numpy as np

from dbrdist.comm import run_threads
from dbrdist.comm.protocol import primitives
from dbrdist.comm.protocol.primitives import Provider
from tests.comm.comm_helpers import SIZE, call, said
from tests.each import each


class Rank(primitives.Provider):
    """Rank 1 of three; the others have given arrays."""

    rank, size = 1, 3
    intra_rank = intra_size = inter_rank = inter_size = 0
    _post_row = _bcast_bytes = _allgather_bytes = _send_parts = _recv_parts = _reduce_host = _make_part = None

    def __init__(self, everyone):
        super().__init__()
        self.everyone, self.exchanges, self.met = [x.copy() for x in everyone], [], 0

    def _meet(self, call):
        self.met += 1

    def _exchange_bytes(self, sent, sent_counts, sent_starts, raw, counts, starts):
        self.exchanges.append((tuple(sent_counts), tuple(sent_starts)))
        self.everyone[1] = sent.view(self.everyone[1].dtype).copy()
        for k, (count, start) in enumerate(zip(counts, starts)):
            begin = sent_starts[1]
            raw[start : start + count] = self.everyone[k].view(np.uint8)[begin : begin + sent_counts[1]]

    def _allgather_own(self, raw, counts, starts):
        self.exchanges.append((tuple(counts), tuple(starts)))
        for k, (count, start) in enumerate(zip(counts, starts)):
            raw[start : start + count] = self.everyone[k].view(np.uint8)[start : start + count]


@each(dtype=["f4", ">f4", "f2"], per_turn=[2, 100], borders=[[0, 3, 8, 10], [4, 4, 7, 10]])
def test_a_rank_gets_its_part_of_a_sum_in_pieces(monkeypatch, dtype, per_turn, borders):
    everyone = [np.arange(10).astype(np.dtype(dtype).newbyteorder("=")) * (k + 1) for k in range(3)]
    comm, call = Rank(everyone), SimpleNamespace(num_bytes=5, kind=None)
    size = everyone[0].itemsize
    monkeypatch.setattr(primitives, "_SCATTERED_BYTES", per_turn * 3 * size + 1)
    x = everyone[1].astype(dtype)
    comm._reduce_scatter(call, x, borders, [1.0, 0.5, 2.0], 2.0)
    own = slice(borders[1], borders[2])
    assert x[own].tolist() == (np.arange(10) * (1 + 0.5 * 2 + 2 * 3) / 2)[own].tolist()
    assert comm.met == 1 and call.num_bytes == 5 + 10 * size and call.kind == np.dtype(dtype)
    longest = max(b - a for a, b in itertools.pairwise(borders))
    assert len(comm.exchanges) == -(-longest // per_turn)
    for turn, (counts, starts) in enumerate(comm.exchanges):
        for k, (a, b) in enumerate(itertools.pairwise(borders)):
            begin, end = min(a + turn * per_turn, b), min(a + (turn + 1) * per_turn, b)
            assert (counts[k], starts[k]) == ((end - begin) * size, begin * size)


def test_ranks_give_each_other_their_parts():
    everyone = [np.arange(10.0) * (k + 1) for k in range(3)]
    comm, call = Rank(everyone), SimpleNamespace(num_bytes=5, kind=None)
    x = everyone[1].copy()
    comm._share_parts(call, x, [0, 3, 3, 10])
    assert x.tolist() == [0, 1, 2, *(np.arange(3, 10.0) * 3)] and comm.exchanges == [((24, 0, 56), (0, 24, 24))]
    assert comm.met == 1 and call.num_bytes == 85 and call.kind == np.float64


@each(**{"dtype, size": [("f4", 3), (">f4", 3), ("f4", 0)]})
def test_what_is_done_on_the_host_comes_back(dtype, size):
    comm, call = Rank([np.zeros(1)]), SimpleNamespace(num_bytes=5, kind=None)
    x = np.arange(1, size + 1).astype(dtype)
    seen = []

    def double(host):
        seen.append(host.dtype.isnative)
        host *= 2

    comm._on_host(call, x, double)
    assert x.tolist() == [2.0 * k for k in range(1, size + 1)] and seen == [True] * (size > 0)
    assert call.num_bytes == 5 + 4 * size and call.kind == (np.dtype(dtype) if size else None)


VERBS = ("allreduce", "bcast", "gather", "allgather", "scatter", "alltoall")


class Sub(np.ndarray):
    """A user's own kind of array."""


class OnlyFloats(np.ndarray):
    """One that refuses to be seen as bytes, as numpy.char.chararray does."""

    def __array_finalize__(self, made_of):
        if self.dtype.kind != "f":
            raise ValueError(f"expected floats, got {self.dtype}")


TRAVELLING = {
    "no elements": np.zeros((0, 3), np.float32),
    "no axes": np.array(3.0),
    "backwards": np.arange(10.0)[::-2],
    "one element in all places": np.broadcast_to(np.float32(2), (3, 4)),
    "Fortran's order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "long double": np.ones(3, np.longdouble),
    "complex long double": np.full(3, 1 - 2j, np.clongdouble),
    "foreign byte order": np.arange(4, dtype=">f4"),
    "matrix": np.array([[1.0, 2.0, 3.0]]).view(np.matrix),
    "matrix on its side": np.array([[1.0, 2.0, 3.0]]).view(np.matrix).T,
    "subclass": np.ones(3).view(Sub),
    "subclass with its own mind": np.ones(3).view(OnlyFloats),
    "scalar": np.float32(2),
    "not a number": np.array([np.nan, -0.0]),
    "32 axes": np.ones((1,) * 32, np.float32),
}


@each(verb=VERBS, name=list(TRAVELLING))
def test_arrays_of_any_kind_travel(verb, name):
    x = TRAVELLING[name]
    times = SIZE if verb == "allreduce" else 1
    for rank, found in enumerate(run_threads(SIZE, lambda comm: call(comm, verb, x), timeout_seconds=30)):
        if rank and verb == "gather":
            assert found is None
            continue
        np.testing.assert_array_equal(np.asarray(found), np.asarray(x) * np.asarray(x).dtype.type(times))
        assert (found.shape, found.dtype.newbyteorder("=")) == (np.shape(x), np.asarray(x).dtype.newbyteorder("="))


REFUSED = {
    "a plain array, got a masked one": np.ma.masked_array([1.0, 2.0], [0, 1]),
    "an array of numbers, got dtype object": np.array([None]),
    "an array of numbers, got dtype [('a', '<f4')]": np.zeros(2, [("a", "f4")]),
    "an array of numbers, got dtype |V3": np.zeros(2, "V3"),
    "an array, got memoryview": memoryview(b"abc"),
    "an array, got float": 3.0,
    "at most 32 dimensions, got 33": np.ones((1,) * 33, np.float32),
}


@each(verb=VERBS, words=list(REFUSED))
def test_other_things_are_refused_on_every_rank(verb, words):
    assert f"{verb} expected {words}" in said(lambda comm: call(comm, verb, REFUSED[words]), 2)
    alone = said(lambda comm: call(comm, verb, REFUSED[words] if comm.rank == 0 else np.ones(2)), 2)
    assert f"{verb} expected {words}" in alone


def test_bytes_from_some_ranks_alone():
    found = []
    comm = SimpleNamespace(size=4, _exchange_bytes=lambda *args: found.append(args))
    raw = np.zeros(12, np.uint8)
    Provider._exchange(comm, None, "sent", [1, 2, 3, 4], [5, 6, 7, 8], raw, [3, 1])
    Provider._exchange(comm, None, "sent", [], [], raw, [2], [7], [4])
    Provider._exchange(comm, None, "sent", [1, 0, 0, 0], [2, 0, 0, 0], raw[:0], [])
    assert [args[:3] + args[4:] for args in found] == [
        ("sent", [1, 2, 3, 4], [5, 6, 7, 8], [0, 6, 0, 6], [0, 6, 0, 0]),
        ("sent", [0] * 4, [0] * 4, [0, 0, 7, 0], [0, 0, 4, 0]),
        ("sent", [1, 0, 0, 0], [2, 0, 0, 0], [0] * 4, [0] * 4),
    ]
    assert all(args[3].base is raw or args[3] is raw for args in found)
    found.clear()
    own, call = np.zeros(3, np.uint8), SimpleNamespace(root=2)
    Provider._gather_bytes(comm, call, own, raw, [], [])
    Provider._gather_bytes(comm, call, own, raw, [1, 2, 3, 4], [5, 6, 7, 8])
    assert [(args[1:3], args[4:]) for args in found] == [
        (([0, 0, 3, 0], [0] * 4), ([0] * 4, [0] * 4)), (([0, 0, 3, 0], [0] * 4), ([1, 2, 3, 4], [5, 6, 7, 8]))
    ]  # fmt: skip


@each(**{"size, piece, lengths": [(10, 4, [4, 4, 2]), (10, 0, [10]), (0, 0, []), (0, 3, []), (4, 4, [4])]})
def test_a_long_object_is_sent_some_bytes_at_a_time(size, piece, lengths):
    sent = []
    comm = SimpleNamespace(_bcast_bytes=lambda raw, root: sent.append((raw.tolist(), root)))
    raw = np.arange(size, dtype=np.uint8)
    Provider._bcast_in_pieces(comm, SimpleNamespace(root=2), raw, piece)
    assert [len(x) for x, _ in sent] == lengths and [byte for x, _ in sent for byte in x] == raw.tolist()
    assert {root for _, root in sent} <= {2}
