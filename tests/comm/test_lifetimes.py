"""What lives how long: communicators, MPI, forked children, waits that a signal reaches, the record of verbs."""

import re

import pytest

from tests.comm import jobs

pytestmark = pytest.mark.mpiexec

PROGRAM = jobs.PROGRAMS / "lifetimes.py"
EARLY = jobs.PROGRAMS / "early.py"


def ends_well(outcome, num_ranks):
    assert outcome.code == 0, outcome.text
    assert sorted(outcome.lines("the end")) == [f"the end of rank {r}" for r in range(num_ranks)]


@pytest.mark.parametrize("deed", ["many_parts", "many_communicators"])
def test_communicators_are_freed(deed):
    """MPICH has some 2,000 of them, of which the program leaves some 50; each of ours takes several."""
    ends_well(jobs.run(2, PROGRAM, deed, 70, limit_seconds=110), 2)


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


def test_a_forked_child_is_harmless_and_no_rank():
    outcome = jobs.run(2, PROGRAM, "fork")
    ends_well(outcome._replace(text=outcome.text.replace("child: at its end\nthe end of rank", "")), 2)
    refusals = outcome.lines("child: barrier: process")
    assert len(refusals) == 6, outcome.text
    assert all("was forked from a rank but is not a rank itself" in line for line in refusals)


def test_a_forked_child_that_fails_ends_alone():
    outcome = jobs.run(2, PROGRAM, "fork_that_fails")
    ends_well(outcome, 2)
    assert outcome.text.count("ValueError: of the child alone") == 2


@pytest.mark.parametrize("verb", ["barrier", "recv", "finalize"])
def test_an_interrupt_reaches_a_rank_that_waits(verb):
    outcome = jobs.run(2, PROGRAM, "interrupt", verb)
    assert outcome.code == 130, outcome.text
    assert "[rank 0] interrupted" in outcome.text


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


@pytest.mark.parametrize(("deed", "code", "text"), [("exception", 1, "FileNotFoundError: no data"), ("exit", 3, "")])
def test_a_failure_before_the_first_communicator_ends_the_job(deed, code, text):
    outcome = jobs.run(3, EARLY, deed)
    assert outcome.code == code, outcome.text
    assert text in outcome.text
    assert "the end of" not in outcome.text


def test_a_helper_of_a_rank_that_fails_ends_alone():
    ends_well(jobs.run(2, EARLY, "helper"), 2)
