"""The communicators over MPI, on ranks that are threads and a stand-in for MPI; the same on real MPI in tests/mpi."""

import numpy as np
import pytest

from dbrdist.comm import create_communicator
from tests.comm import (
    contract,
    edges_contract,
    reduction_ways_contract,
    sharding_contract,
    started_contract,
    training_contract,
)
from tests.comm.mpi_of_threads import on_ranks

pytestmark = pytest.mark.slow  # some hundred checks
ONE_HOST = lambda rank, size: 0  # noqa: E731
FIRST_ALONE = lambda rank, size: int(rank > 0)  # noqa: E731
PAIRS = lambda rank, size: rank // 2  # noqa: E731
EACH_ALONE = lambda rank, size: rank  # noqa: E731
SHARED = {"shared_memory": True}
KINDS = {
    "naive": ("naive", {}, 3, ONE_HOST),
    "flat": ("flat", {}, 2, ONE_HOST),
    "messages": ("flat", {"shared_memory": False}, 3, ONE_HOST),
    "shared": ("flat", SHARED, 3, ONE_HOST),
    "flat on hosts": ("flat", {**SHARED, "sockets": False}, 3, FIRST_ALONE),
    "hierarchical": ("hierarchical", {}, 3, FIRST_ALONE),
    "two_dimensional": ("two_dimensional", {}, 4, PAIRS),
    "unlike hosts": ("two_dimensional", {}, 3, FIRST_ALONE),
    "hosts of one": ("two_dimensional", {}, 2, EACH_ALONE),
}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Calls functions of a communicator on all its ranks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where measured times are kept

    def run(kind, *checks):
        name, settings, size, layout = KINDS[kind]

        def body():
            comm = create_communicator(name, **settings)
            for check in checks:
                check(comm)
            comm.finalize()

        on_ranks(monkeypatch, size, body, layout)

    return run


GROUPS = {  # of checks, and the kinds that they are for
    **{f"contract {k}": (["naive", "flat", "shared", "unlike hosts"], contract.CHECKS[k::3]) for k in range(3)},
    "sums": (
        KINDS,
        [
            contract.check_weighted_sums,
            contract.check_sums_of_16_bit_types_run_in_float32,
            training_contract.check_multi_node_mean_grad,
            training_contract.check_gradients_that_some_or_all_ranks_lack,
        ],
    ),
    "training": (
        KINDS,
        [
            training_contract.check_gradients_travel_in_the_configured_type,
            training_contract.check_n_ranks_give_the_weights_of_one,
        ],
    ),
    "divided state and fewer bytes": (
        KINDS,
        [
            sharding_contract.check_weights_are_those_of_one_process,
            reduction_ways_contract.check_power_sgd_is_that_of_the_paper,
            reduction_ways_contract.check_top_k_sends_the_largest,
        ],
    ),
    "started reductions": (["naive", "flat", "shared", "flat on hosts"], started_contract.CHECKS),
    "edges": (["naive", "shared", "unlike hosts"], edges_contract.CHECKS),
}


@pytest.mark.parametrize(("group", "kind"), [(group, kind) for group, (kinds, _) in GROUPS.items() for kind in kinds])
def test_checks_that_real_mpi_passes_too(run, group, kind):
    run(kind, *GROUPS[group][1])


@pytest.mark.parametrize(
    ("kind", "shares", "num_between"),
    [("flat", True, None), ("shared", True, None), ("messages", False, None), ("flat on hosts", False, 2)],
)
def test_what_shares_memory(run, kind, shares, num_between):
    def check(comm):
        assert (comm.reducer._shared is not None, comm.ranks._mailbox is not None) == (shares, shares)
        assert (comm.reducer.hosts is None) == (kind == "messages")
        if num_between is not None:  # the first ranks of both hosts
            between = comm.reducer.hosts.between
            assert (between and between.size) == (num_between if comm.intra_rank == 0 else None)

    run(kind, check)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_of_a_communicator_and_its_part(monkeypatch, kind):
    name, settings, size, layout = KINDS[kind]

    def body():
        comm = create_communicator(name, **settings)
        part = comm.split(comm.rank % 2 if comm.rank < 3 else None, -comm.rank)
        if part is not None:
            assert type(part) is type(comm) and part.allreduce_obj(1) == part.size
            part.finalize()
        comm.finalize()

    on_ranks(monkeypatch, size, body, layout, all_are_freed=True)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_16_bit_types_are_not_rounded(run, kind):
    """The one rounding is that of the result: half of its last bit."""

    def check(comm):
        weights = [1 / 3, 1 / 7, 1 / 11, 1 / 13][: comm.size]
        every = np.random.default_rng(5).uniform(1, 2, (comm.size, 1001)).astype(np.float16)
        x = every[comm.rank].copy()
        contract.reduce(comm, x, weights, 3.0)
        expected = np.tensordot(weights, every.astype(np.float64), 1) / 3
        np.testing.assert_allclose(x.astype(np.float64), expected, rtol=2.0**-11 * 1.001)

    run(kind, check)
