"""Tests of dbrdist.comm.gradients.reducer."""

import itertools
from types import SimpleNamespace

import numpy as np

from dbrdist.comm.gradients import reducer
from dbrdist.comm.gradients.reducer import Reducer
from dbrdist.comm.protocol.primitives import Ranks
from tests.each import each


class Rank(Ranks):
    """Rank 1 of three; the others have given arrays."""

    rank, size = 1, 3
    post_row = bcast_bytes = allgather_bytes = send_parts = recv_parts = None

    def __init__(self, everyone):
        self.everyone, self.exchanges, self.met = [x.copy() for x in everyone], [], 0

    def meet(self, call):
        self.met += 1

    def exchange_bytes(self, sent, sent_counts, sent_starts, raw, counts, starts):
        self.exchanges.append((tuple(sent_counts), tuple(sent_starts)))
        self.everyone[1] = sent.view(self.everyone[1].dtype).copy()
        for k, (count, start) in enumerate(zip(counts, starts)):
            begin = sent_starts[1]
            raw[start : start + count] = self.everyone[k].view(np.uint8)[begin : begin + sent_counts[1]]

    def allgather_own(self, raw, counts, starts):
        self.exchanges.append((tuple(counts), tuple(starts)))
        for k, (count, start) in enumerate(zip(counts, starts)):
            raw[start : start + count] = self.everyone[k].view(np.uint8)[start : start + count]


class Adder(Reducer):
    reduce_host = None

    def __init__(self, ranks):
        super().__init__(SimpleNamespace(ranks=ranks))


@each(dtype=["f4", ">f4", "f2"], per_turn=[2, 100], borders=[[0, 3, 8, 10], [4, 4, 7, 10]])
def test_a_rank_gets_its_part_of_a_sum_in_pieces(monkeypatch, dtype, per_turn, borders):
    everyone = [np.arange(10).astype(np.dtype(dtype).newbyteorder("=")) * (k + 1) for k in range(3)]
    comm, call = Rank(everyone), SimpleNamespace(num_bytes=5, kind=None)
    size = everyone[0].itemsize
    monkeypatch.setattr(reducer, "_SCATTERED_BYTES", per_turn * 3 * size + 1)
    x = everyone[1].astype(dtype)
    Adder(comm).reduce_scatter(call, x, borders, [1.0, 0.5, 2.0], 2.0)
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
    Adder(comm).share_parts(call, x, [0, 3, 3, 10])
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

    Adder(comm).on_host(call, x, double)
    assert x.tolist() == [2.0 * k for k in range(1, size + 1)] and seen == [True] * (size > 0)
    assert call.num_bytes == 5 + 4 * size and call.kind == (np.dtype(dtype) if size else None)
