"""Ranks that disagree, on threads; tests/mpi has the same on processes."""

import pytest

from dbrdist.comm import run_threads
from dbrdist.comm.communicators import world
from tests.comm import disagreement_contract, disagreements


@pytest.mark.parametrize("check", disagreement_contract.CHECKS, ids=disagreement_contract.by_name)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_disagreement_on_threads(check, num_ranks):
    run_threads(num_ranks, check, timeout_seconds=60)


@pytest.mark.parametrize("seed", range(12))
def test_random_disagreements_on_threads(seed, monkeypatch):
    """A sample, at ten times the speed; ``python -m tests.comm.disagreements 200`` runs as many as wanted."""
    monkeypatch.setattr(world, "patience_seconds", world.patience_seconds / 10)
    monkeypatch.setattr(world, "_LOOK_SECONDS", world._LOOK_SECONDS / 10)
    assert not disagreements.run_in_threads(seed, 0.1).wrong


@pytest.mark.mpiexec
@pytest.mark.parametrize("seed", [1, 5, 8, 18])
def test_random_disagreements_on_processes(seed):
    assert not disagreements.run_job(seed, limit_seconds=100).wrong
