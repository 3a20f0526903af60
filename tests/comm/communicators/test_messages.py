"""Tests of dbrdist.comm.communicators.messages."""

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm.communicators import messages
from dbrdist.comm.communicators.messages import MessageReducer
from dbrdist.comm.protocol.wire_type import Codec, Narrowed, Scaled
from dbrdist.core.array.backend import as_dtype
from tests.each import each

MODULE = SimpleNamespace(BYTE="byte", SUM="sum", LOR="or", IN_PLACE="in place")


class Added(MessageReducer):
    """Rank 1 of three, without MPI."""

    def __init__(self):
        super().__init__(SimpleNamespace(ranks=SimpleNamespace(MPI=MODULE, rank=1, size=3, abandoned=[])))
        self.ranks.comm, self.ranks.rows, self.ranks.wait = SimpleNamespace(rank=1), "rows", lambda call, request: None


def test_counts_of_mpi_are_below_2_to_the_31():
    assert messages._PIECE_BYTES < 2**31


@each(**{"dtype, op": [("f4", "sum"), ("?", "or"), ("i8", "sum")]}, factors=[None, [9.0, 2.0, 9.0]])
def test_mpis_own_sum(dtype, op, factors):
    if factors and dtype != "f4":
        pytest.skip("only gradients have weights")
    comm, x = Added(), np.arange(6).astype(dtype)
    seen = []
    comm.ranks.comm.Iallreduce = lambda *args: (
        seen.append((*args[:1], args[1].copy(), *args[2:])) or SimpleNamespace(name="i")
    )
    divisor = 4.0 if dtype == "f4" else None
    comm._reduce_native(comm.ranks.comm, "call", x, factors, divisor)
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
    comm, seen = Added(), []
    monkeypatch.setattr(comm, "_reduce_native", lambda *args: seen.append(("mpi", args[0], args[2].copy(), *args[3:])))
    monkeypatch.setattr(comm, "_messages", lambda way: ("messages over", way))
    monkeypatch.setattr(messages, "PipelinedSum", lambda *args: SimpleNamespace(run=lambda: seen.append(args)))
    x = np.arange(5).astype(as_dtype(dtype))
    monkeypatch.setattr(messages, "_PIECE_BYTES", 2 * x.itemsize)
    for over in (comm.ranks.comm, "between"):
        seen.clear()
        comm.reduce_over(over, "call", x, codec, [1.0], 2.0)
        if is_narrow:
            ((way, call, array, *rest),) = seen
            assert way == (
                "messages over",
                comm.ranks.rows if over is comm.ranks.comm else over,
            )  # apart from the program's own
            assert call == "call" and array is x and rest == [codec, [1.0], 2.0]
        else:
            assert [s[2].tolist() for s in seen] == [[0, 1], [2, 3], [4]]
            assert all(s[:2] == ("mpi", over) and s[3:] == ([1.0], 2.0) for s in seen)
            assert {s[2].dtype for s in seen} == {np.dtype("f4")}
