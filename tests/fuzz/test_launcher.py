"""The fuzzer of the launcher passes, and finds planted faults; tests find those that no random job can show."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.comm import jobs
from tests.fuzz import launcher

# Jobs of seed 3 in which a planted fault shows; job 2 shows the others.
WHERE = {
    "bytes-lost": 3, "code-cut": 1, "wrong-rank": 48, "filters-cut": 79, "size-signal-ignored": 3, "spawned-lost": 4,
    "stop-counted": 19, "half-letters": 46, "early-unnamed": 8, "option-taken": 34,
    "input-cut": 33,
}  # fmt: skip
# Faults that no random job can show, since they need two logins, a terminal, Slurm: name -> (file, what stands there,
# what stands there in the broken copy, the test that finds it).
TESTED = {
    "report-held": (
        "launcher/streams/output.py", "one_place = view or _same_place(1, 2)", "one_place = True",
        "jobs/test_inherited.py::test_a_reader_that_stands_still_does_not_hold_the_report_back"),
    "folder-by-number": (
        "launcher/records/jobs.py", "os.urandom(6).hex())", "str(os.getpid()))",
        "launcher/records/test_jobs.py::test_a_job_has_a_folder_that_nobody_else_takes_or_deletes"),
    "typed-lost": (
        "launcher/running/attempt.py", "self.input.begin_for_rank(rank.rank, rank.channel)", "pass",
        "jobs/test_inherited.py::test_what_is_typed_on_a_terminal_reaches_rank_0"),
    "signal-kills": (
        "signals.py", "signal.SIGUSR2, signal.SIGXCPU", "signal.SIGXCPU",
        "jobs/test_inherited.py::test_sigusr2_reaches_a_program_that_handles_it_and_asks_others_to_stop"),
    "one-login": (
        "launcher/records/jobs.py", "for place in bases() if", "for place in bases()[:1] if",
        "launcher/records/test_jobs.py::test_a_job_of_another_login_is_listed"),
    "any-owner": (
        "launcher/records/jobs.py", "and found.st_uid == os.getuid() and not found.st_mode & 0o077", "",
        "launcher/records/test_jobs.py::test_jobs_in_a_folder_of_somebody_else_are_not_listed"),
    "one-of-two-stopped": (
        "launcher/records/jobs.py", "if len(found) == 1:", "if found:",
        "launcher/records/test_jobs.py::test_a_job_is_found_by_its_name_or_number"),
    "cores-lost": (
        "backends/slurm.py", "if each and not _has_cpus", "if not each and not _has_cpus",
        "backends/test_slurm.py::test_words_of_srun"),
    "library-unknown": (
        "backends/mpi.py", "CRAY MPICH version", "Cray version",
        "launcher/test_session.py::test_versions_of_libraries"),
    "segments-left": (
        "rank/supervisor.py", "self.segments |= linux.mapped_files(pid, _SEGMENTS)", "pass",
        "jobs/test_first.py::test_killed_ranks_leave_no_shared_memory_behind"),
}  # fmt: skip

pytestmark = [pytest.mark.mpiexec, pytest.mark.programs, pytest.mark.timeout(300)]


def test_a_few_random_jobs():
    jobs.mpiexec()
    assert launcher.main(["--jobs", "4", "--seed", "7"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", TESTED)
def test_a_fault_that_no_random_job_shows_is_found_by_a_test(tmp_path, name):
    jobs.mpiexec()
    file, old, new, test = TESTED[name]
    launcher.broken((file, old, new), tmp_path / "launch")
    shutil.copytree(launcher.ROOT / "tests" / "launch", tmp_path / "tests" / "launch")
    shutil.copy(launcher.ROOT / "pyproject.toml", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/launch/{test}"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "launch")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and "FAILED" in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", launcher.PLANTS)
def test_a_planted_fault_is_found(name):
    jobs.mpiexec()
    number = str(WHERE.get(name, 2))
    assert launcher.main(["--only", number, "--seed", "3", "--plant", name]) == 1
    assert launcher.main(["--only", number, "--seed", "3"]) == 0
