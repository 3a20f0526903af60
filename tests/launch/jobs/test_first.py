"""dbrdist-launch with the MPI beside the interpreter: what a first user does."""

import os
import signal
import socket
import sys
import textwrap

import pytest
from dbrdist_launch.backends import mpi
from support import PROGRAMS, assert_nothing_left, attempts_in, failure_in, launch, popen

pytestmark = pytest.mark.mpiexec
FAILING = PROGRAMS / "failing.py"


def test_hello_prints_one_whole_line_per_rank():
    result = launch("-n", 4, "python", PROGRAMS / "hello.py")
    assert result.returncode == 0, result.stderr
    lines = sorted(result.stdout.splitlines())
    host = os.uname().nodename
    assert [line.split(" on ")[0] for line in lines] == [f"[{r} {host}] hello from rank {r} of 4" for r in range(4)]


def test_module_form_and_double_dash_work():
    result = launch("-n", 1, "--", sys.executable, "-c", "print('one')")
    assert (result.returncode, result.stdout.split("] ")[1]) == (0, "one\n")


def test_print_shows_the_exact_command_and_starts_nothing():
    result = launch("-n", 3, "--print", "--", "python", "train it.py", "a;b")
    assert result.returncode == 0
    assert result.stdout.count("\n") == 1
    assert " -n 3 " in result.stdout and "rank/main.py hydra " in result.stdout
    assert result.stdout.endswith("'train it.py' 'a;b'\n")
    bare = launch("-n", 3, "--print", "--bare", "--", "python", "train.py")
    assert bare.stdout.split()[1:] == ["-n", "3", os.path.join(os.path.dirname(sys.executable), "python"), "train.py"]


def test_what_travels_to_other_hosts_with_and_without_supervision():
    words = ["--hosts", "localhost:1,127.0.0.2:1", "--only-env", "--env", "ADDED=1", "--print"]
    printed = [launch(*words, *bare, "true").stdout.split() for bare in ([], ["--bare"])]
    names = [one[one.index("-genvlist") + 1].split(",") for one in printed]
    assert names == [["HOME", "PATH", "DBRDIST_LAUNCH_CHANNEL", "DBRDIST_LAUNCH_TOKEN"], ["HOME", "PATH", "ADDED"]]


@pytest.mark.parametrize(
    ("how", "code", "kind", "words"),
    [
        ("exception", 1, "exception", "ValueError: boom"),
        ("exit", 3, "exit", "exit code 3"),
        ("exit9", 9, "exit", "exit code 9"),
        ("sigkill", 137, "signal", "SIGKILL"),
        ("sigsegv", 139, "signal", "SIGSEGV"),
        ("abort", 7, "exit", "MPI_Abort(7)"),
        ("thread", 1, "thread", "thread loader: ZeroDivisionError"),
        ("worker", 1, "thread", "killed by SIGKILL"),
        ("supervisor", 137, "signal", "its supervisor was killed"),
    ],
)
def test_first_failure_is_named_and_its_code_passed_on(tmp_path, how, code, kind, words):
    result = launch("-n", 3, "--log-dir", tmp_path, "--end-on", "thread", "--end-on", "worker", "python", FAILING, how)
    assert result.returncode == code, result.stderr
    failure = failure_in(tmp_path)
    assert (failure["rank"], failure["kind"], failure["code"]) == (1, kind, code)
    assert failure["host"] == os.uname().nodename
    assert words in failure["message"]
    assert f"rank 1 on {failure['host']} failed first ({kind})" in result.stderr
    assert result.stderr.count("failed first") == 1
    assert 0 < failure["seconds"] < result.seconds
    assert {other["rank"] for other in failure["others"]} == {0, 2}


def test_traceback_is_in_the_report():
    result = launch("-n", 2, "--show-ranks", "none", "python", FAILING, "exception")
    report = result.stderr[result.stderr.index("failed first") :]
    assert "failing.py" in report and 'raise ValueError("boom")' in report


def test_lines_are_never_torn_and_bytes_survive():
    result = launch("-n", 4, "python", PROGRAMS / "lines.py", text=False)
    lines = result.stdout.split(b"\n")
    host = os.uname().nodename.encode()
    for rank in range(4):
        front = b"[%d %s] " % (rank, host)
        mine = [line[len(front) :] for line in lines if line.startswith(front)]
        assert mine[:200] == [b"line %d " % n + b"x" * 50 for n in range(200)]
        assert mine[200:] == [b"not utf-8: \xff\xfe", b"no end of line"]
    assert len(lines) == 4 * 202 + 1 and lines[-1] == b""
    assert result.stderr.count(b"to the error output") == 4


def test_killed_launcher_leaves_no_rank():
    text = "import os, time; print(os.environ['RANK'], flush=True); time.sleep(100)"
    process = popen("-n", 3, "python", "-c", text, mark="killed-launcher")
    for _ in range(3):
        assert process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert_nothing_left("killed-launcher")


def test_killed_ranks_leave_no_shared_memory_behind(tmp_path):
    """MPICH removes its segment in MPI_Finalize only: a machine's /dev/shm was full of those of failed jobs."""
    text = """
        import os, re, time
        from mpi4py import MPI
        found = set(re.findall("/dev/shm/mpich_shm_.*", open("/proc/self/maps").read()))
        MPI.COMM_WORLD.Barrier()
        print("mapped", *found)
        MPI.COMM_WORLD.Barrier()
        if MPI.COMM_WORLD.rank == 1:
            os._exit(3)
        time.sleep(60)
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(text))
    result = launch("-n", 2, "python", "program.py", cwd=tmp_path)
    assert result.returncode == 3, result.stderr
    mapped = {word for line in result.stdout.splitlines() for word in line.split("mapped")[1].split()}
    assert not any(os.path.exists(path) for path in mapped), mapped


def test_unknown_command_is_refused_with_127():
    result = launch("-n", 2, "no-such-command")
    assert result.returncode == 127
    assert "the command 'no-such-command' was not found" in result.stderr
    assert "dbrdist-launch -n 4 python train.py" in launch("-n", 2, "train.py").stderr


def test_not_executable_command_is_refused_with_126(tmp_path):
    (tmp_path / "train.py").write_text("print()")
    result = launch("-n", 2, tmp_path / "train.py")
    assert result.returncode == 126
    assert "is not executable; for a Python script: dbrdist-launch -n 4 python" in result.stderr


def test_no_ranks_is_a_usage_error():
    assert launch("python", "x.py").returncode == 2
    assert launch("-n", 0, "python", "x.py").returncode == 2


def test_mismatched_mpiexec_is_refused():
    library = mpi.Library("openmpi", "5.0.11", "/x/libmpi.so.40")
    hydra = mpi.Starter("mpich", "5.0.2", "/x/mpiexec")
    assert not hydra.fits(library)
    assert hydra.fits(mpi.Library("intel", "2021.18"))
    assert not mpi.Starter("openmpi", "4.1.4", "/x").fits(library)
    assert "N separate jobs of one rank" in mpi._mismatch([hydra], library, "python")


def test_wrong_mpiexec_by_name_is_refused(tmp_path):
    fake = tmp_path / "mpiexec"
    fake.write_text("#!/bin/sh\necho 'mpiexec (Open MPI) 5.0.11'\n")
    fake.chmod(0o755)
    result = launch("-n", 2, "--mpiexec", fake, "python", PROGRAMS / "hello.py")
    assert result.returncode == 2
    assert "N separate jobs of one rank each" in result.stderr


def test_version_texts_are_read():
    assert mpi.read_library_version("Open MPI v5.0.11, package: x") == ("openmpi", "5.0.11")
    assert mpi.read_library_version("MPICH Version:      5.0.2\nx") == ("mpich", "5.0.2")
    assert mpi.read_library_version("Intel(R) MPI Library 2021.18 for Linux* OS") == ("intel", "2021.18")
    assert mpi.read_starter_version("mpiexec (OpenRTE) 4.1.4\n") == ("openmpi", "4.1.4")
    assert mpi.read_starter_version("mpirun (Open MPI) 5.0.11\n") == ("openmpi", "5.0.11")
    assert mpi.read_starter_version("HYDRA build details:\n    Version:    5.0.2\n") == ("mpich", "5.0.2")
    text = "Intel(R) MPI Library for Linux* OS, Version 2021.18 Build"
    assert mpi.read_starter_version(text) == ("intel", "2021.18")
    assert mpi.read_starter_version("something else") == ("", "")


def test_stranger_with_a_wrong_token_is_refused_and_named():
    """Whoever connects to the port without the job's token gets nothing and disturbs nothing."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    result = launch("-n", 1, "--port", port, "python", PROGRAMS / "stranger.py", port)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("answer b''") == 3, result.stdout
    assert result.stderr.count("refused a connection from") == 3, result.stderr
    assert "wrong token" in result.stderr


def test_quiet_shows_rank_0_and_keeps_the_rest_in_files(tmp_path):
    result = launch("-n", 3, "--quiet", "--log-dir", tmp_path, "python", PROGRAMS / "hello.py")
    assert result.stdout.count("hello") == 1 and "hello from rank 0" in result.stdout
    assert [(tmp_path / "latest" / "attempt-0" / f"rank-{r}.out").read_text().count("hello") for r in range(3)] == [
        1,
        1,
        1,
    ]


def test_stacks_of_all_ranks_are_in_the_report_on_request():
    result = launch("-n", 3, "--stacks", "python", FAILING, "sigkill")
    report = result.stderr[result.stderr.index("failed first") :]
    assert report.count("Current thread") == 2 and "in main" in report


def test_crash_loop_ends_with_its_reason(tmp_path):
    arguments = ["-n", 2, "--max-restarts", 9, "--log-dir", tmp_path, "--env", "TEST_FAIL=1:3"]
    env = {"TEST_FOLDER": str(tmp_path), "TEST_STEPS": "100"}
    result = launch(*arguments, "python", PROGRAMS / "counting.py", env=env, timeout=60)
    assert result.returncode == 3
    assert "the same failure 3 times in a row without a step in between" in result.stderr
    attempts = attempts_in(tmp_path)
    assert [attempt["restart"] for attempt in attempts] == [0, 1, 2]
    assert all(attempt["failure"]["rank"] == 1 for attempt in attempts)
