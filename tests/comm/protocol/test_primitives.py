"""Tests of dbrdist.comm.protocol.primitives."""

from types import SimpleNamespace

import numpy as np

from dbrdist.comm import run_threads
from dbrdist.comm.protocol.primitives import Ranks
from tests.comm.comm_helpers import SIZE, call, said
from tests.each import each

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
    comm = SimpleNamespace(size=4, exchange_bytes=lambda *args: found.append(args))
    raw = np.zeros(12, np.uint8)
    Ranks.exchange_from(comm, [3, 1], "sent", [1, 2, 3, 4], [5, 6, 7, 8], raw)
    Ranks.exchange_from(comm, [2], "sent", [], [], raw, [7], [4])
    Ranks.exchange_from(comm, [], "sent", [1, 0, 0, 0], [2, 0, 0, 0], raw[:0])
    assert [args[:3] + args[4:] for args in found] == [
        ("sent", [1, 2, 3, 4], [5, 6, 7, 8], [0, 6, 0, 6], [0, 6, 0, 0]),
        ("sent", [0] * 4, [0] * 4, [0, 0, 7, 0], [0, 0, 4, 0]),
        ("sent", [1, 0, 0, 0], [2, 0, 0, 0], [0] * 4, [0] * 4),
    ]
    assert all(args[3].base is raw or args[3] is raw for args in found)
    found.clear()
    own, call = np.zeros(3, np.uint8), SimpleNamespace(root=2)
    Ranks.gather_bytes(comm, call, own, raw, [], [])
    Ranks.gather_bytes(comm, call, own, raw, [1, 2, 3, 4], [5, 6, 7, 8])
    assert [(args[1:3], args[4:]) for args in found] == [
        (([0, 0, 3, 0], [0] * 4), ([0] * 4, [0] * 4)), (([0, 0, 3, 0], [0] * 4), ([1, 2, 3, 4], [5, 6, 7, 8]))
    ]  # fmt: skip


@each(**{"size, piece, lengths": [(10, 4, [4, 4, 2]), (10, 0, [10]), (0, 0, []), (0, 3, []), (4, 4, [4])]})
def test_a_long_object_is_sent_some_bytes_at_a_time(size, piece, lengths):
    sent = []
    comm = SimpleNamespace(bcast_bytes=lambda raw, root: sent.append((raw.tolist(), root)))
    raw = np.arange(size, dtype=np.uint8)
    Ranks.bcast_in_pieces(comm, SimpleNamespace(root=2), raw, piece)
    assert [len(x) for x, _ in sent] == lengths and [byte for x, _ in sent for byte in x] == raw.tolist()
    assert {root for _, root in sent} <= {2}
