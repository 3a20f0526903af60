"""Tests of dbrdist.comm.links.normalization."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from dbrdist.comm import run_threads
from dbrdist.comm.links import MultiNodeBatchNormalization
from dbrdist.comm.protocol.roster import RosterEntry, RosterName
from dbrdist.errors import CommunicatorError
from dbrdist.links import BatchNormalization

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_may_make_one_more(rank):
    """A batch normalization in no chain has no name: its number differs between ranks, and its line is the same."""

    def program(comm):
        if comm.rank == rank:
            MultiNodeBatchNormalization(4, comm)
        one, two = MultiNodeBatchNormalization(4, comm), MultiNodeBatchNormalization(4, comm)
        parts = [two(one(X[comm.rank :: 2])).array for _ in range(2)]
        np.testing.assert_array_equal(*parts)
        return parts[0]

    expected = BatchNormalization(4)(BatchNormalization(4)(X)).array
    parts = run_threads(2, program, timeout_seconds=30)
    for k, part in enumerate(parts):
        np.testing.assert_allclose(part, expected[k::2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("at_one_line", [False, True])
def test_ranks_that_swap_two_are_refused(at_one_line):
    def program(comm):
        if at_one_line:
            one, two = [MultiNodeBatchNormalization(4, comm) for _ in range(2)]
        else:
            one = MultiNodeBatchNormalization(4, comm)
            two = MultiNodeBatchNormalization(4, comm)
        (two if comm.rank else one)(X)

    with pytest.raises(CommunicatorError, match="the same batch normalization on every rank, got name number 1"):
        run_threads(2, program, timeout_seconds=30)


def test_a_name_by_number_travels():
    name = RosterName(RosterEntry(3, "train.py:7, number 1 there"))
    for again in (copy.deepcopy(name), pickle.loads(pickle.dumps(name))):
        assert str(again) == "number 3" and again.entry == name.entry
