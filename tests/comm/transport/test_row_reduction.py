"""Tests of dbrdist.comm.transport.row_reduction."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm.protocol.gate import ROW_BYTES, ROW_WORDS
from dbrdist.comm.transport.row_reduction import RowReduction

CALL = SimpleNamespace()
EXTREMES = np.array([0, -1, 1, 2**63 - 1, -(2**63)])


class Meetings:
    """One communicator of all ranks, in one thread: a collective is over once every rank has begun it."""

    def __init__(self, size):
        self.size, self.begun, self.num_bytes = size, [[] for _ in range(size)], 0

    def of(self, rank):
        return SimpleNamespace(
            size=self.size,
            Iallreduce=lambda sent, found, op: self.begin(rank, "sum", sent, found, lambda all_: op(all_)),
            Iallgather=lambda sent, found: self.begin(rank, "gather", sent, found, np.array),
        )

    def begin(self, rank, kind, sent, found, make):
        number = len(self.begun[rank])
        self.begun[rank].append((kind, sent.copy()))
        if rank == 0:
            self.num_bytes += sent.nbytes

        def test():
            if any(len(theirs) <= number for theirs in self.begun):
                return False
            entries = [theirs[number] for theirs in self.begun]
            assert len({(kind, sent.size) for kind, sent in entries}) == 1, "the ranks are in different collectives"
            found[...] = make([sent for _, sent in entries])
            return True

        return SimpleNamespace(Test=test)


def ranks(size):
    rows, rest = Meetings(size), Meetings(size)
    module = SimpleNamespace(MAX=lambda arrays: np.max(arrays, 0))

    def wait(call, request, kind):
        assert call is CALL and kind == "row"
        assert request.Test(), "it would wait for ever"

    return [RowReduction(module, rows.of(k), rest.of(k), wait) for k in range(size)], rows, rest


@pytest.mark.parametrize("differing", [[], [0], [3], [46], [1, 2, 40], list(range(47))])
def test_every_rank_has_every_row(differing):
    of_rank, reduced, gathered = ranks(5)
    rows = np.tile(np.resize(EXTREMES, ROW_WORDS), (5, 1))
    for rank, word in itertools.product(range(5), differing):
        rows[rank, word] = EXTREMES[rank]
    posted = [reduction.post(row.tobytes()) for reduction, row in zip(of_rank, rows)]
    for pending in posted:
        pending.is_there()
    for pending in posted:
        assert pending.wait(CALL) == [row.tobytes() for row in rows] and pending.pieces() == []
    assert reduced.num_bytes == 2 * ROW_BYTES < 1024
    assert gathered.num_bytes == 8 * len(differing)


def test_rows_that_are_looked_at_in_another_order_on_each_rank():
    """What differs in two rows is gathered in one order, also where a rank has looked at the second row alone."""
    of_rank, _, _ = ranks(2)
    rows = [[np.full(ROW_WORDS, rank, np.int64) for rank in range(2)] for _ in range(2)]
    rows[1][1][7:] = 0  # fewer words differ in the second
    posted = [[of_rank[rank].post(row[rank].tobytes()) for row in rows] for rank in range(2)]
    posted[0][1].is_there()
    posted[1][0].is_there()
    posted[1][1].is_there()
    posted[0][0].is_there()
    for rank, number in ((0, 1), (0, 0), (1, 0), (1, 1)):
        assert posted[rank][number].wait(CALL) == [row.tobytes() for row in rows[number]]


def test_a_row_is_not_there_before_all_have_shown_it():
    of_rank, _, _ = ranks(2)
    first = of_rank[0].post(bytes(ROW_BYTES))
    assert not first.is_there()
    second = of_rank[1].post(np.ones(ROW_WORDS, np.int64).tobytes())
    assert not first.is_there()  # what differs is still on its way
    assert second.is_there() and first.is_there()
