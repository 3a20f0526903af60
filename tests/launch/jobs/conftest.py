"""Fake hosts and a fake Slurm for whole jobs of the launcher, where this machine can make them."""

import fake_cluster
import fake_slurm
import pytest
from setups import Setup


def nodes(module, kind, count):
    """So many nodes, for as long as a fixture lives."""
    reason = module.missing()
    if reason is not None:
        pytest.skip(reason)
    with kind(count) as made:
        yield made


@pytest.fixture(scope="module")
def place(request):
    """One place where jobs fail, kept up for all kinds of failures."""
    reason = Setup.missing(request.param)
    if reason is not None:
        pytest.skip(reason)
    setup = Setup(request.param)
    yield setup
    setup.close()


@pytest.fixture(scope="module")
def cluster():
    yield from nodes(fake_cluster, fake_cluster.FakeCluster, 2)


@pytest.fixture(scope="module")
def slurm():
    yield from nodes(fake_slurm, fake_slurm.FakeSlurm, 2)


@pytest.fixture
def eight_nodes():
    yield from nodes(fake_slurm, fake_slurm.FakeSlurm, 8)
