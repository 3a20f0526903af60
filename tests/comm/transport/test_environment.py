"""Tests of dbrdist.comm.transport.environment."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dbrdist.comm.transport import environment
from tests.comm import jobs
from tests.each import each


@pytest.mark.mpiexec
def test_what_the_environment_says():
    assert environment.launched({}) == (1, 0, "")
    assert environment.launched({"PMI_SIZE": "4", "PMI_RANK": "2"}) == (4, 2, "PMI_SIZE")
    assert environment.launched({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1"})[:2] == (3, 1)
    batch_script = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}
    assert environment.launched(batch_script) == (1, 0, "")
    assert environment.launched({**batch_script, "SLURM_STEP_ID": "0"}) == (8, 0, "SLURM_NTASKS")
    assert environment.prefix(3, {}) == "[rank 3] "
    assert environment.prefix(3, {"DBRDIST_LAUNCH": "1"}) == ""
    assert environment.refusal(1, {"PMI_SIZE": "1"}) == ""
    assert environment.refusal(4, {"PMI_SIZE": "4"}) == ""
    assert "PMI_SIZE=4 says that 4 ranks were started" in environment.refusal(1, {"PMI_SIZE": "4"})


@pytest.mark.mpiexec
def test_several_ranks_in_the_environment_but_one_in_the_world_is_refused():
    """As when the launcher of another MPI library started this process (with a variable that none reads here)."""
    program = "from dbrdist.comm import create_communicator as c; c()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=jobs.ROOT,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "HOME": "/", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"},
    )
    assert done.returncode == 1
    assert "CommunicatorError: MV2_COMM_WORLD_SIZE=2 says that 2 ranks were started" in done.stderr


def test_what_launchers_leave_in_the_environment():
    for environ, found in (
        ({}, (1, 0, "")), ({"PMI_SIZE": "3", "PMI_RANK": "2"}, (3, 2, "PMI_SIZE")),
        ({"PMI_SIZE": "3"}, (3, 0, "PMI_SIZE")),
        ({"PMI_SIZE": "3", "PMI_RANK": "x"}, (3, 0, "PMI_SIZE")), ({"PMI_SIZE": "x"}, (1, 0, "")),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "1"}, (1, 0, "")),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}, (4, 1, "SLURM_NTASKS")),
    ):  # fmt: skip
        assert environment.launched(environ) == found and environment.is_launched(environ) == bool(found[2])
    assert environment.num_local_ranks({}) == 1 == environment.num_local_ranks({"MPI_LOCALNRANKS": "x"})
    assert environment.num_local_ranks({"MPI_LOCALNRANKS": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}) == 4
    assert environment.prefix(3, {}) == "[rank 3] " and environment.prefix(3, {"DBRDIST_LAUNCH": "1"}) == ""


@each(**{"world_size, started, is_refused": [(1, 2, True), (1, 3, True), (1, 1, False), (2, 2, False), (2, 3, False)]})
def test_a_world_of_one_is_refused_where_more_ranks_were_started(world_size, started, is_refused):
    text = environment.refusal(world_size, {"PMI_SIZE": str(started), "PMI_RANK": "0"})
    assert text.startswith(f"PMI_SIZE={started} says that {started} ranks were started") if is_refused else text == ""
    assert environment.refusal(world_size, {}) == ""


@pytest.mark.slow
def test_launchers_say_how_many_ranks_a_host_has():
    assert environment.num_local_ranks({}) == 1
    assert environment.num_local_ranks({"MPI_LOCALNRANKS": "4"}) == 4
    assert environment.num_local_ranks({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MPI_LOCALNRANKS": "?"}) == 2


def test_a_process_that_a_rank_starts_is_none_and_a_job_in_a_job_is():
    """It inherits the variables of the rank, which without a line to the launcher are all there is to go by."""
    rank = {"PMIX_NAMESPACE": "job1", "PMIX_RANK": "3", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
    environment.mark_as_rank(rank)
    assert not environment.is_helper(rank)  # this process has set it
    pid, place = rank[environment._MARK].split(" ", 1)
    helper = {**rank, environment._MARK: f"{int(pid) + 1} {place}"}
    assert environment.is_helper(helper)
    assert not environment.is_helper({**helper, "PMIX_NAMESPACE": "job2"})  # a job in a job
    alone = {}
    environment.mark_as_rank(alone)
    assert alone == {} and not environment.is_helper(alone)


HELPERS = """
import subprocess, sys
from dbrdist.comm import create_communicator
comm = create_communicator("flat")
code = "from dbrdist.comm import create_communicator as make; comm = make(sys.argv[1]); print('size', comm.size)"
for name in ("auto", "flat"):
    if comm.rank == 1:
        run = subprocess.run([sys.executable, "-c", "import sys; " + code, name], capture_output=True, text=True)
        print(name, run.returncode, run.stdout.strip(), run.stderr.strip().splitlines()[-1][:140])
comm.barrier()
"""


@pytest.mark.mpiexec
def test_a_helper_of_a_rank_has_one_rank_or_says_why_not(tmp_path):
    """MPI would end it, or wait for ever."""
    program = tmp_path / "helpers.py"
    program.write_text(HELPERS)
    outcome = jobs.run(2, program, python=jobs.REAL)
    assert outcome.code == 0, outcome.text
    assert "auto 0 size 1 dbrdist: communicator 'single', 1 rank (started by a rank of the job" in outcome.text
    assert "flat 1  dbrdist.errors.CommunicatorError: create_communicator: this process was started" in outcome.text
