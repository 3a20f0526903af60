"""The costs of many ranks do not grow: numbers of messages and bytes of simulated jobs, not times."""

import sys
from pathlib import Path

import numpy as np
import pytest

from dbrdist import links as L
from dbrdist.core.model.chain import Sequential

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from cluster import launched, simulator

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", params=[32, 96])
def found(request):
    model = Sequential(L.Linear(30, 40), L.BatchNormalization(40))
    return request.param, simulator.simulate(request.param, 2, model)


@pytest.mark.slow
def test_an_agreement_takes_less_than_a_kilobyte_of_each_rank(found):
    _, costs = found
    assert costs["step"]["bytes_sent_by_a_rank"] <= 1000
    assert costs["uneven step"]["bytes_sent_by_a_rank"] <= 1000  # only what differs is sent besides


@pytest.mark.slow
def test_a_pause_is_one_message_of_each_rank_to_the_judge_and_one_when_it_is_over(found):
    _, costs = found
    assert costs["pauses"]["messages_per_rank_and_pause"] <= 2


@pytest.mark.slow
def test_ranks_at_their_exit_tell_the_judge_alone(found):
    size, costs = found
    assert costs["exit"]["messages"] <= size
    assert costs["exit"]["most_new_partners_of_a_rank"] <= 1


@pytest.mark.slow
def test_all_ranks_have_the_verdict_soon_after_a_rank_has_left(found):
    _, costs = found
    assert costs["death"]["seconds_until_all_know"] < 5


@pytest.mark.slow
def test_the_launcher_names_the_rank_that_holds_the_others_up_and_ends_all(found):
    """The scenes assert it: a rank that hangs, one that dies, a host that is lost; slow ranks are left alone."""
    size, costs = found
    assert costs["launcher stall"]["named_rank"] == size // 3
    assert costs["launcher stall"]["seconds"] < launched.TIMEOUT_SECONDS + 5
    assert costs["launcher death"]["named_rank"] == size // 2
    assert costs["launcher death"]["seconds"] < 5 and costs["launcher lost host"]["seconds"] < 5


@pytest.mark.slow
def test_what_the_launcher_hears_and_says_is_in_proportion_to_the_ranks(found):
    _, costs = found
    assert costs["launcher start"]["bytes_per_rank"] < 600  # it was the list of all hosts, too
    assert costs["launcher watching"]["bytes_per_rank_and_second"] < 300
    assert costs["launcher death"]["bytes_per_rank"] < 1000


@pytest.mark.slow
def test_a_judge_that_has_no_news_looks_at_nobody(monkeypatch):
    """It looked at 1,023 x 1,024 pairs ten times a second, from the first pause on to the end of the run."""
    with simulator.simulated(40) as job:
        simulator.pauses(job, 1)
        for rank in job.ranks[1:]:
            rank.begin_wait(9, job.clock.now)
        job.run(3)
        asked = []
        monkeypatch.setattr(simulator.judge.deadlock, "stuck", lambda states: asked.append(states) or {})
        job.run(20)
        assert asked == []


@pytest.mark.slow
def test_equal_waits_are_looked_at_once(monkeypatch):
    looks = []
    real = simulator.judge.deadlock._is_missing
    monkeypatch.setattr(simulator.judge.deadlock, "_is_missing", lambda *args: looks.append(1) or real(*args))
    numbers = []
    for size in (40, 80):
        with simulator.simulated(size) as job:
            looks.clear()
            simulator.pauses(job, 1)
            numbers.append(len(looks) / size)
    assert numbers[1] < 1.5 * numbers[0]  # in proportion to the ranks, not to their pairs


@pytest.mark.parametrize("size", [8, 1024])
def test_a_snapshot_has_one_entry_per_statistic_and_a_fifth_of_the_model_at_most(size, monkeypatch):
    monkeypatch.setattr("dbrdist.comm.run.snapshots._MOST_ROWS_BYTES", 1000)
    model = Sequential(L.Linear(30, 40), L.BatchNormalization(40))
    cost = simulator.snapshot(size, model)
    assert cost["entries"] <= 7 and cost["times_model_and_momentum"] <= 1.2
    assert np.isfinite(cost["cpu_seconds"])


def test_what_a_rank_computes_to_create_a_communicator_follows_from_its_host(monkeypatch):
    """Other hosts' seats make no difference to it: of 16 or of 64 hosts, it adds up those of its own."""
    looks = []
    real = simulator.mpi_communicator.cores.part_of
    monkeypatch.setattr(
        simulator.mpi_communicator.cores, "part_of", lambda seat, seats: looks.append(len(seats)) or real(seat, seats)
    )
    for size in (128, 512):
        simulator.start(size, 8)
    assert looks == [8, 8]
