"""Running statistics of batch normalization over ranks: means in an evaluation, and after a resume on other numbers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist import links as L
from dbrdist.cli.state import AverageStatistics, LocalState
from dbrdist.comm import run_threads
from dbrdist.core.chain import Sequential
from dbrdist.core.serializer import DictionarySerializer, NpzDeserializer


def network(rank=0):
    """Statistics that follow from the rank."""
    model = Sequential(L.BatchNormalization(3), L.BatchNormalization(2))
    for i, bn in enumerate(model):
        bn.avg_mean[...] = 10.0 * i + rank
        bn.avg_var[...] = 1 + 10.0 * i + rank**2
        bn.N = 5
    return model


def statistics(model):
    return [np.array(a) for bn in model for a in (bn.avg_mean, bn.avg_var)]


def means_of(num_ranks):
    return [np.mean(values, 0) for values in zip(*(statistics(network(r)) for r in range(num_ranks)))]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_an_evaluation_sees_the_means_of_all_ranks(num_ranks):
    def body(comm):
        model = network(comm.rank)
        AverageStatistics(comm, model)(None)
        assert [bn.N for bn in model] == [5, 5]
        return statistics(model)

    for seen in run_threads(num_ranks, body, timeout_seconds=60):
        for a, b in zip(seen, means_of(num_ranks), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def saved_by(num_ranks):
    """What rank 0 writes into a snapshot; each rank has left out as many examples as its number."""

    def body(comm):
        local = LocalState(
            comm, network(comm.rank), SimpleNamespace(skipped=[f"{comm.rank}: {i}" for i in range(comm.rank)])
        )
        local.gather()
        serializer = DictionarySerializer()
        local.serialize(serializer)
        return serializer.target

    return run_threads(num_ranks, body, timeout_seconds=60)[0]


@pytest.mark.parametrize("before, now", [(1, 1), (3, 3), (2, 1), (4, 2), (1, 3), (2, 3), (3, 2)])
def test_a_resume_gives_each_rank_its_own_or_the_mean(before, now):
    entries = saved_by(before)

    def body(comm):
        model = network(100 + comm.rank)
        local = LocalState(comm, model, SimpleNamespace(skipped=[]))
        local.serialize(NpzDeserializer(entries))
        return statistics(model), len(local.skipped)

    results = run_threads(now, body, timeout_seconds=60)
    for rank, (seen, _) in enumerate(results):
        expected = statistics(network(rank)) if before == now else means_of(before)
        for a, b in zip(seen, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    assert sum(skipped for _, skipped in results) == sum(range(before))
