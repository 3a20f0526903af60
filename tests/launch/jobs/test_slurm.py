"""Slurm for real, on two fake nodes: srun and mpiexec, inside sbatch and outside; scancel, requeue, preemption."""

import json
import subprocess
import sys
import time

import fake_slurm
import pytest
from setups import openmpi_python
from support import PROGRAMS, environment, failure_in, wait_until

pytestmark = [pytest.mark.launch_system, pytest.mark.mpiexec]


@pytest.fixture(params=["mpich", "openmpi"])
def python(request):
    if request.param == "mpich":
        return sys.executable
    if openmpi_python() is None or not fake_slurm.has_pmix():
        pytest.skip("no environment with Open MPI, or no libpmix.so for srun: run .ci/launch")
    return openmpi_python()


def run(slurm, *words, timeout=60, check=True):
    env = environment("slurm", **slurm.environment)
    found = subprocess.run(slurm.inside(*words), env=env, capture_output=True, text=True, timeout=timeout)
    assert not check or found.returncode == 0, found.stdout + found.stderr
    return found


def submit(slurm, tmp_path, *arguments, python=sys.executable, steps=100, options=()):
    """A batch job of four ranks on two nodes that counts; returns its number."""
    script = tmp_path / "job.sh"
    words = [python, "-m", "dbrdist_launch", *arguments, "--log-dir", str(tmp_path), "--env", f"TEST_FOLDER={tmp_path}"]
    words += ["--env", f"TEST_STEPS={steps}", "python", str(PROGRAMS / "counting.py")]
    script.write_text("#!/bin/sh\nexec " + " ".join(map(str, words)) + "\n")
    chosen = ["-p", "low", "-N2", "-n4", "--requeue", "--open-mode=append", "-o", tmp_path / "out", *options]
    return run(slurm, "sbatch", "--parsable", *chosen, script).stdout.strip()


def state(slurm, job):
    text = run(slurm, "scontrol", "show", "job", job, "-o").stdout
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def wait(slurm, job, *states, seconds=60):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = state(slurm, job)
        if found["JobState"] in states:
            return found
        if found["JobState"] == "PENDING":  # a job that was put back waits two minutes, which we have not
            run(slurm, "scontrol", "update", f"jobid={job}", "starttime=now", check=False)
        time.sleep(0.3)
    raise AssertionError(f"job {job} is {found['JobState']} and not {states} after {seconds} s")


def wait_for_step(tmp_path, step, seconds=40):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if json.loads((tmp_path / "checkpoint.json").read_text())["step"] >= step:
                return
        except (OSError, ValueError):
            pass
        time.sleep(0.1)
    raise AssertionError(f"no step {step} within {seconds} s: {(tmp_path / 'out').read_text()}")


@pytest.mark.parametrize("nodes", [1, 2])
def test_srun_starts_one_job_on_one_and_two_nodes(slurm, python, nodes):
    words = [python, "-m", "dbrdist_launch", "--backend", "srun", "-n", 4, f"--mpi-option=-N{nodes}"]
    found = run(slurm, *words, "python", PROGRAMS / "hello.py")
    assert found.stdout.count(" of 4 on node") == 4
    assert ("node1" in found.stdout) == (nodes == 2)
    assert "Sorry" not in found.stderr


@pytest.mark.parametrize("backend", ["auto", "mpiexec"])
def test_batch_job_ends_well(slurm, python, backend, tmp_path):
    name = {"auto": "auto", "mpiexec": "hydra" if python == sys.executable else "openmpi"}[backend]
    job = submit(slurm, tmp_path, "--backend", name, python=python)
    found = wait(slurm, job, "COMPLETED", "FAILED")
    text = (tmp_path / "out").read_text()
    assert found["JobState"] == "COMPLETED", text
    assert "done with 4" in text
    assert {line[3:8] for line in text.splitlines() if "restart 0 of 4" in line} == {"node0", "node1"}


@pytest.mark.parametrize("backend", ["srun", "hydra"])
def test_scancel_saves_first(slurm, backend, tmp_path):
    job = submit(slurm, tmp_path, "--backend", backend, steps=100000)
    wait_for_step(tmp_path, 50)
    run(slurm, "scancel", job)
    assert wait(slurm, job, "CANCELLED")["ExitCode"].startswith("75:")
    text = (tmp_path / "out").read_text()
    assert text.count("saved at") == 4
    assert "all ranks have saved and stopped" in text


def test_cancelled_job_saves_and_stays_out_of_the_queue_for_all_that_it_may_go_back(slurm, tmp_path):
    job = submit(slurm, tmp_path, "--requeue", steps=100000)
    wait_for_step(tmp_path, 50)
    run(slurm, "scancel", job)
    assert wait(slurm, job, "CANCELLED", "PENDING")["JobState"] == "CANCELLED"
    wait_until(lambda: "is not requeued" in (tmp_path / "out").read_text())  # its last decision
    found = state(slurm, job)
    assert (found["JobState"], found["Restarts"]) == ("CANCELLED", "0")
    text = (tmp_path / "out").read_text()
    assert text.count("saved at") == 4
    assert f"Slurm job {job} is not requeued: it was cancelled" in text


def test_requeued_job_goes_on_where_it_saved(slurm, tmp_path):
    job = submit(slurm, tmp_path, steps=400)
    wait_for_step(tmp_path, 50)
    run(slurm, "scontrol", "requeue", job)
    assert wait(slurm, job, "COMPLETED")["Restarts"] == "1"
    text = (tmp_path / "out").read_text()
    assert text.count("restart 0 of 4 from 0") == 4
    assert text.count("restart 1 of 4 from") == 4 and "restart 1 of 4 from 0" not in text


def test_preempted_job_saves_within_the_grace_time_and_requeues_itself(slurm, tmp_path):
    job = submit(slurm, tmp_path, "--requeue", steps=400)
    wait_for_step(tmp_path, 50)
    high = run(
        slurm, "sbatch", "--parsable", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 2"
    )
    wait(slurm, high.stdout.strip(), "COMPLETED")
    assert wait(slurm, job, "COMPLETED")["Restarts"] == "1"
    text = (tmp_path / "out").read_text()
    assert f"Slurm job {job} is back in the queue" in text, text  # whole: pytest shortens it
    assert text.count("saved at") == 4 and "done with 4" in text


def test_failure_in_a_batch_job_is_reported_with_its_code(slurm, tmp_path):
    job = submit(slurm, tmp_path, "--env", "TEST_FAIL=2:30", steps=400)
    assert wait(slurm, job, "FAILED", "COMPLETED")["ExitCode"] == "3:0"
    failure = failure_in(tmp_path)
    assert (failure["rank"], failure["kind"], failure["code"], failure["step"]) == (2, "exit", 3, 30)
    assert (tmp_path / "latest" / "attempt-0" / "rank-3.out").exists()
