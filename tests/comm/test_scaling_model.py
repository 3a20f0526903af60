"""The formulas of benchmarks/scaling_model.py, in closed forms; what it measures is not run here."""

import sys

import pytest

from tests.comm import jobs


@pytest.fixture(scope="module")
def model():
    """The benchmark as a module, which imports others beside it."""
    before = set(sys.modules)
    sys.path.insert(0, str(jobs.ROOT / "benchmarks"))
    try:
        import scaling_model

        yield scaling_model
    finally:
        sys.path.remove(str(jobs.ROOT / "benchmarks"))
        for name in set(sys.modules) - before:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(jobs.ROOT / "benchmarks")):
                del sys.modules[name]


def parts(model, **changes):
    one = model.Parts(1.0, 0.25, 16.0, 8.0, 4.0, 0.5, 2.0, 0.125, 32.0, 1)
    return one._replace(**changes)


def test_a_ring_sends_every_byte_but_its_own_twice(model):
    assert model.ring_seconds(1, 1000, 1.0, 1.0) == 0
    assert model.ring_seconds(4, 1000, 0.0, 1.0) == 2 * 750
    assert model.ring_seconds(4, 0, 1.0, 1.0) == 6


def test_halving_and_doubling(model):
    assert model.halving_seconds(1, 1000, 1.0, 1.0, 1.0) == 0
    for p, rounds in ((2, 1), (4, 2), (8, 3), (1024, 10)):
        assert model.halving_seconds(p, 0, 1.0, 1.0, 1.0) == 2 * rounds
        sent = sum(
            1024 / 2**k for k in range(1, rounds + 1)
        )  # half, a quarter ..., there and back; added on the way there
        assert model.halving_seconds(p, 1024, 0.0, 1.0, 0.5) == 2.5 * sent
    # of three ranks one hands everything over before, and gets everything after
    assert model.halving_seconds(3, 100, 1.0, 1.0, 0.5) == model.halving_seconds(2, 100, 1.0, 1.0, 0.5) + 2 + 200 + 50


def test_a_line_through_the_shortest_and_the_longest_message(model):
    assert model.fit([[100, 3.0], [200, 99.0], [1100, 13.0]]) == (pytest.approx(2.0), pytest.approx(0.01))
    assert model.fit([[100, 1.0], [1100, 11.0]]) == (0.0, pytest.approx(0.01))  # no latency below zero
    assert model.fit([[100, 5.0], [1100, 4.0]]) == (5.0, 0.0)


def test_flat_on_one_host(model):
    one = parts(model)
    assert model.flat_seconds(2, model.SHARED_FROM_BYTES - 1, one) == 32 + 4 + 2 * 16
    n = model.SHARED_FROM_BYTES
    assert model.flat_seconds(2, n, one) == 32 + 4 + 2 * 16 + n * 0.5
    n = 2 * model.CACHE_BYTES
    assert model.flat_seconds(2, n, one) == 32 + 4 + 2 * 16 + n * 2.0


def test_flat_between_two_hosts(model):
    pair = parts(model, alpha=64.0, beta=128.0)
    n = model.SHARED_FROM_BYTES
    between = 2 * 64 + n * (128 + 0.5 * 3 * 0.125)
    assert model.flat_seconds(2, n, pair, pair) == 32 + 4 + 2 * 8 + between
    assert model.flat_seconds(4, n, parts(model), pair) == 32 + 4 + 2 * 8 + between + n * 0.5  # and within a host


def test_ranks_of_a_core_compute_in_turns_and_wait_together(model):
    n = model.SHARED_FROM_BYTES
    once, twice = (model.flat_seconds(4, n, parts(model, turns=turns)) for turns in (1, 2))
    assert twice - once == 32 + n * 0.5  # rows and meetings are measured with ranks that share cores
    once, twice = (model.message_seconds(4, n, parts(model, turns=turns)) for turns in (1, 2))
    assert twice - once == 0.75 * n * 3 * 0.125


def measured(model, seconds):
    """What ranks would measure if ``flat`` took that long for the smallest array."""
    lines = {"messages": [[100, 3.0], [1100, 13.0]], "flat": [[4096, seconds]], "MPI_Allreduce": []}
    return lines | {"meeting": 2.0, "meeting_on_host": 1.0, "row": 5.0, "sums": [0.1, 0.2], "sigma": 0.3}


def test_parts_come_from_what_was_measured_with_as_many_ranks(model, monkeypatch):
    monkeypatch.setattr(model, "NUM_CORES", 2)
    four = measured(model, 1e9) | {"row": 50.0, "sigma": 0.9}
    found = model.parts_of({"one host": {2: measured(model, 12.0), 4: four}})["one host"]
    assert found[2] == model.Parts(pytest.approx(2.0), pytest.approx(0.01), 2.0, 1.0, 5.0, 0.1, 0.2, 0.3, 12 - 5 - 4, 1)
    # but for the time of Python, and of a byte in MPI's sum, which two ranks with a core each say
    assert (found[4].row, found[4].sigma, found[4].call, found[4].turns) == (50.0, 0.3, 3.0, 2)
    assert model.parts_of({"one host": {2: measured(model, 1.0)}})["one host"][2].call == 0


def test_the_efficiency_of_one_rank_and_of_hidden_communication(model):
    network = model.Network(0.0, model.GRADIENT_BYTES / model.STEP_SECONDS)  # a step's time for all gradients
    assert model.efficiency(1, network, 0.0) == 1
    assert model.efficiency(2, network, 0.0) == pytest.approx(1 / 2)
    assert model.efficiency(4, network, 0.0) == pytest.approx(1 / 2.5)
    assert model.efficiency(4, network, 1.5 * model.STEP_SECONDS) == 1
    assert model.efficiency(4, network, 0.5 * model.STEP_SECONDS) == pytest.approx(1 / 2)
    nodes = network._replace(ranks_per_node=4, bandwidth_within=1e30)  # four ranks of a node are as one
    assert model.efficiency(8, nodes, 0.0) == pytest.approx(model.efficiency(2, network, 0.0))
