"""Tests of dbrdist.comm.protocol.pair; MPI's are in tests/mpi."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist.comm import run_threads
from tests.each import each

ONE, OTHER = np.arange(6.0, dtype="f").reshape(2, 3), np.array([1, 2], np.int64)


@each(source=[0, 1])
@each(sent=[ONE, (ONE,), (ONE, OTHER), [OTHER, ONE], (), OTHER[:0], (OTHER[:0], ONE)])
def test_one_array_comes_as_an_array_and_several_as_a_tuple(source, sent):
    """Also from a rank to itself."""

    def exchange(comm):
        if comm.rank == source:
            comm.send(sent, 0, 3)
        return comm.recv(source, 3) if comm.rank == 0 else None

    found = run_threads(2, exchange)[0]
    assert type(found) is (np.ndarray if isinstance(sent, np.ndarray) else tuple)
    several, expected = ((found,), (sent,)) if isinstance(sent, np.ndarray) else (found, sent)
    assert len(several) == len(expected)
    for a, b in zip(several, expected):
        assert a.dtype == b.dtype and not np.shares_memory(a, b)
        np.testing.assert_array_equal(a, b)


@each(source=[0, 1])
def test_objects_and_arrays_are_not_taken_for_each_other(source):
    def exchange(comm):
        if comm.rank == source:
            comm.send_obj({"a": 1}, 0, 1)
            comm.send(ONE, 0, 2)
        if comm.rank == 0:
            with pytest.raises(Exception, match="recv_obj"):
                comm.recv(source, 1)
            with pytest.raises(Exception, match=r"recv\b"):
                comm.recv_obj(source, 2)

    run_threads(2, exchange)
