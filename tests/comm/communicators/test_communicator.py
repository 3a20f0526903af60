"""Tests of dbrdist.comm.communicators.communicator."""

import re
from types import SimpleNamespace

import pytest

from dbrdist.comm.communicators import create
from tests.comm import jobs
from tests.each import each

PROGRAM = jobs.PROGRAMS / "lifetimes.py"
EARLY = jobs.PROGRAMS / "early.py"


def ends_well(outcome, num_ranks):
    assert outcome.code == 0, outcome.text
    assert sorted(outcome.lines("the end")) == [f"the end of rank {r}" for r in range(num_ranks)]


@pytest.mark.mpiexec
@pytest.mark.parametrize("deed", ["many_parts", "many_communicators"])
def test_communicators_are_freed(deed):
    """MPICH has some 2,000 of them, of which the program leaves some 50; each of ours takes several."""
    ends_well(jobs.run(2, PROGRAM, deed, 70, limit_seconds=110), 2)


@pytest.mark.mpiexec
@pytest.mark.parametrize(
    "deed",
    [
        "use_after_the_end_of_mpi",
        "windows_in_two_threads",
        "two_threads_on_one",
        "handled_signal",
    ],
)
def test_programs_that_end_well(deed):
    ends_well(jobs.run(2, PROGRAM, deed), 2)


@pytest.mark.mpiexec
def test_a_forked_child_is_harmless_and_no_rank():
    outcome = jobs.run(2, PROGRAM, "fork")
    ends_well(outcome._replace(text=outcome.text.replace("child: at its end\nthe end of rank", "")), 2)
    refusals = outcome.lines("child: barrier: process")
    assert len(refusals) == 6, outcome.text
    assert all("was forked from a rank but is not a rank itself" in line for line in refusals)


@pytest.mark.mpiexec
def test_a_forked_child_that_fails_ends_alone():
    outcome = jobs.run(2, PROGRAM, "fork_that_fails")
    ends_well(outcome, 2)
    assert outcome.text.count("ValueError: of the child alone") == 2


@pytest.mark.mpiexec
@pytest.mark.parametrize("verb", ["barrier", "recv", "finalize"])
def test_an_interrupt_reaches_a_rank_that_waits(verb):
    outcome = jobs.run(2, PROGRAM, "interrupt", verb)
    assert outcome.code == 130, outcome.text
    assert "[rank 0] interrupted" in outcome.text


@pytest.mark.mpiexec
def test_a_job_that_fails_leaves_the_last_verbs_of_its_ranks(tmp_path):
    outcome = jobs.run(2, PROGRAM, "failing", TMPDIR=str(tmp_path))
    assert outcome.code == 1, outcome.text
    for rank in range(2):
        (path,) = re.findall(rf"\[rank {rank}\] the last \d+ verbs of this rank are in (\S+)", outcome.text)
        with open(path) as file:
            text = file.read()
        assert re.search(r"#\d+ allreduce 24 bytes float32 at \S*lifetimes.py:\d+ 0\.\d+ s\n", text), text
        assert re.search(r"#\d+ bcast_obj root 0 \d+ bytes at \S*lifetimes.py:\d+ 0\.\d+ s\n", text), text
        assert ("allgather_obj at" in text) == (rank == 0), text
        assert rank == 1 or "not over" in text


@pytest.mark.mpiexec
@pytest.mark.parametrize(("deed", "code", "text"), [("exception", 1, "FileNotFoundError: no data"), ("exit", 3, "")])
def test_a_failure_before_the_first_communicator_ends_the_job(deed, code, text):
    outcome = jobs.run(3, EARLY, deed)
    assert outcome.code == code, outcome.text
    assert text in outcome.text
    assert "the end of" not in outcome.text


@pytest.mark.mpiexec
def test_a_helper_of_a_rank_that_fails_ends_alone():
    ends_well(jobs.run(2, EARLY, "helper"), 2)


@each(
    **{
        "name, size, inter_size, shared, words": [
            ("flat", 1, 1, None, "'flat', 1 rank (why)"), ("naive", 3, 2, None, "'naive', 3 ranks (why)"),
            ("flat", 4, 1, None, "'flat', 4 ranks (one host: gradients are added in memory that its ranks share)"),
            ("flat", 4, 1, True, "'flat', 4 ranks (one host: gradients are added in memory that its ranks share)"),
            ("flat", 4, 1, False, "'flat', 4 ranks (one host: gradients are sent as messages)"),
            ("flat", 4, 2, None, "'flat', 4 ranks (2 hosts: within each, gradients are added in memory that its ranks "
                                 "share)"),
        ]
    }
)  # fmt: skip
def test_a_communicator_is_described(name, size, inter_size, shared, words):
    comm = SimpleNamespace(size=size, inter_size=inter_size, get_config=lambda key: {"shared_memory": shared}[key])
    assert create._description(name, "why", comm) == f"communicator {words}"
    if name != "flat":
        assert create._description(name, "", comm) == "communicator 'naive', 3 ranks"


@pytest.mark.mpiexec
def test_no_communicator_is_made_after_the_end_of_mpi():
    outcome = jobs.run(2, jobs.PROGRAMS / "finalized.py")
    words = "create_communicator: MPI has been finalized, by the program or at its exit; communicate before that"
    assert outcome.code == 0 and sorted(outcome.lines("rank ")) == [f"rank {r}: {words}" for r in range(2)]
