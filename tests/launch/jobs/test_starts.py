"""What the launcher and its supervisors load, and what is refused before anything starts."""

import pathlib
import shutil
import socket
import subprocess
import sys

import pytest
from support import PROGRAMS, ROOT, attempts_in, environment, launch


@pytest.mark.programs
def test_launcher_and_supervisor_load_neither_numpy_nor_mpi():
    program = (
        "import sys; import dbrdist_launch.main, dbrdist_launch.launcher.cli, dbrdist_launch.launcher.session,"
        "dbrdist_launch.rank.supervisor,"
        "dbrdist_launch.doctor.cli, dbrdist_launch.heartbeat;"
        "print([n for n in ('numpy', 'mpi4py', 'cupy', 'rich', 'dbrdist') if n in sys.modules])"
    )
    child = subprocess.run([sys.executable, "-c", program], env=environment("x"), capture_output=True, text=True)
    assert child.stdout == "[]\n", child.stderr


@pytest.mark.programs
def test_supervisor_runs_without_site_packages():
    words = [sys.executable, "-I", "-S", str(ROOT / "launch" / "dbrdist_launch" / "rank" / "main.py")]
    child = subprocess.run(words, capture_output=True, text=True)
    assert child.returncode == 2 and "usage: python .../dbrdist_launch/rank/main.py BACKEND ADDRESS" in child.stderr


@pytest.mark.mpiexec
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-n", "2", "--log-dir", "/proc/nowhere"], 2, "cannot be written"),
        (["-n", "2", "--env", "NO NAME"], 2, "expected NAME=VALUE"),
        (["-n", "2", "--record", "nowhere/x"], 2, "the folder 'nowhere' does not exist"),
        (["-n", "2", "--name", "../x"], 2, "expected a name that a folder can have"),
        (["-n", "2", "--show-ranks", "1-x"], 2, "expected numbers and ranges"),
        (["-n", "2", "--backend", "nowhere"], 2, "or the name of an installed plugin"),
        (["-n", "2", "--host-discovery", "/nowhere"], 2, "cannot be run"),
        (["-n", "2", "--hostfile", "/dev/null"], 2, "names no host"),
        (["--nproc", "2"], 2, "Did you mean '-n'?"),
        (["-n", "2", "--interface", "nowhere0"], 2, "interfaces of this host: lo"),
        (["-n", "2", "--hosts", "a:2", "--hostfile", "x"], 2, "cannot be combined"),
        (["-n", "2", "--mpiexec", "/bin/true"], 2, "is not an mpiexec of MPICH, Intel MPI or Open MPI"),
        (["-n", "99999999"], 2, "no job has more than 1048576 ranks"),
        ([], 2, "expected the number of ranks"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments, code, words):
    child = subprocess.run(
        [sys.executable, "-m", "dbrdist_launch", *arguments, "python", str(PROGRAMS / "hello.py")],
        env=environment("x"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert child.returncode == code
    assert words in child.stderr
    assert "hello" not in child.stdout


@pytest.mark.mpiexec
def test_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        child = subprocess.run(
            [sys.executable, "-m", "dbrdist_launch", "-n", "2", "--port", port, "python", str(PROGRAMS / "hello.py")],
            env=environment("x"),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert child.returncode == 2
    assert f"cannot listen on port {port} of 127.0.0.1" in child.stderr


def failing_mpiexec(folder, code, times):
    """An mpiexec that ends with a code before it starts anything, so many times; then it is the real one."""
    real = shutil.which("mpiexec", path=str(pathlib.Path(sys.executable).parent)) or shutil.which("mpiexec")
    path = folder / "mpiexec"
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) exec {real} "$@";; esac\n'
        f"for turn in $(seq {times}); do mkdir {folder}/turn-$turn 2>/dev/null && "
        f'{{ echo "The listener failed to start." >&2; exit {code}; }}; done\nexec {real} "$@"\n'
    )
    path.chmod(0o755)
    return path


@pytest.mark.mpiexec
@pytest.mark.parametrize(("code", "times", "attempts", "ends"), [(213, 1, 2, 0), (213, 3, 3, 71), (1, 1, 1, 71)])
def test_start_that_meets_the_folder_of_a_dead_process_is_tried_again(tmp_path, code, times, attempts, ends):
    """Open MPI calls its session folder by its process id, and ends with 213 where a killed process left that one."""
    words = ("--mpiexec", failing_mpiexec(tmp_path, code, times), "--log-dir", tmp_path / "logs")
    result = launch("-n", 2, *words, "python", PROGRAMS / "hello.py")
    assert result.returncode == ends, result.stderr
    assert len(attempts_in(tmp_path / "logs")) == attempts
    assert result.stdout.count("hello") == (2 if ends == 0 else 0)
    assert result.stderr.count("trying the start again") == attempts - 1
