"""Tests of dbrdist.comm.protocol.observations."""

import pytest

from dbrdist.comm import run_threads
from dbrdist.comm.protocol.observations import Observations
from tests.each import each


def test_means_of_what_ranks_observe():
    """Forty values, more than one row has; each rank weighs its examples, and one without has observed nothing."""
    names = [f"k{i:02}" for i in range(40)]

    def body(comm):
        one = Observations(comm)
        observed = {name: float(10 * i + comm.rank) for i, name in enumerate(names)}
        if comm.rank == 1:
            del observed["k05"]
        first = one.average(observed, [1, 3, 0][comm.rank])
        second = one.average({"k00": float(comm.rank)} if comm.rank == 2 else {}, 2)
        return first, second

    for first, second in run_threads(3, body, timeout_seconds=60):
        assert list(first) == names and second == {"k00": 2.0}
        for i, name in enumerate(names):
            assert first[name] == (50.0 if name == "k05" else 10 * i + 0.75)


@each(size=[1, 2])
def test_an_error_of_a_rank_is_raised_by_all(size):
    def body(comm):
        with pytest.raises(ValueError, match="on purpose"):
            Observations(comm).average({"a": 1.0}, 1, ValueError("on purpose") if comm.rank == 0 else None)
        return Observations(comm).average({"a": 1.0}, 0)

    assert run_threads(size, body, timeout_seconds=60) == [{}] * size
