"""Healthy jobs go on: what the launcher once ended, and must leave alone."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from support import PROGRAMS, assert_nothing_left, environment, launch, popen

pytestmark = pytest.mark.mpiexec


def program(tmp_path, text):
    """A program of its own file."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(text))
    return path


def wait_for(path, seconds=40.0):
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, f"{path} does not appear"
        time.sleep(0.05)


def test_a_failure_that_a_wrapper_handles_is_none():
    python = sys.executable
    words = f"{python} -c 'import nope' || true; {python} -c 'import sys; sys.exit(5)'; sleep 3; echo well"
    result = launch("-n", 2, "bash", "-c", words)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("well") == 2
    assert "failed first" not in result.stderr


def test_helpers_that_end_are_the_programs_own_business(tmp_path):
    text = """
        import subprocess, sys, threading, time
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        time.sleep(2.5)
        helper.terminate()
        other = subprocess.Popen([sys.executable, "-c", "import os, time; time.sleep(2.5); os._exit(1)"])
        threading.Thread(target=lambda: 1 / 0).start()
        time.sleep(8)
        print("well")
    """
    result = launch("-n", 1, "python", program(tmp_path, text))
    assert (result.returncode, result.stdout.count("well")) == (0, 1), result.stderr
    assert "the job continues (--end-on thread would end it)" in result.stderr
    assert "ended with exit code 1; the job continues (--end-on worker would end it)" in result.stderr


@pytest.mark.parametrize("uses_mpi", [False, True])
def test_a_slow_exit_is_awaited(tmp_path, uses_mpi):
    text = f"""
        import atexit, os, sys, time
        if {uses_mpi}:
            from mpi4py import MPI
        class Buffer:
            def __del__(self, sleep=time.sleep, open=open):
                sleep(3.0)
                open("flushed-" + rank, "w").close()
        rank, buffer = os.environ["RANK"], Buffer()
        atexit.register(time.sleep, 2.0)
        if rank == "1":
            sys.exit(4)
        time.sleep(8.0)
    """
    result = launch("-n", 2, "python", program(tmp_path, text), cwd=tmp_path)
    assert result.returncode == 4
    assert (tmp_path / "flushed-1").exists()
    assert "rank 1" in result.stderr
    assert ("MPI_Finalize" in result.stderr) == uses_mpi  # without MPI nobody waits there


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    sys.exit(3)\nexcept SystemExit:\n    pass",
        "try:\n    f()\nexcept SystemExit:\n    pass",
        "def g():\n    try:\n        sys.exit(3)\n    finally:\n        return\ng()",
        "import contextlib\nwith contextlib.suppress(SystemExit):\n    f()",
        "import threading\nt = threading.Thread(target=sys.exit, args=(3,))\nt.start()\nt.join()",
        "import multiprocessing as m, pickle\nassert pickle.loads(pickle.dumps(sys.exit)) is sys.exit\n"
        "p = m.get_context('forkserver').Process(target=sys.exit)",
    ],
)
def test_an_exit_that_is_caught_is_none(tmp_path, text):
    """And a rank may wait in MPI_Finalize for as long as the others need."""
    head = "import os, sys, time\nfrom mpi4py import MPI\ndef f():\n    sys.exit(3)\n"
    late = "\nif __name__ == '__main__' and MPI.COMM_WORLD.rank == 0:\n    time.sleep(4)\n"
    path = program(tmp_path, "")
    path.write_text(head + text + late)
    result = launch("-n", 2, "python", path)
    assert result.returncode == 0, result.stderr


def test_a_stopped_launcher_is_forgiven(tmp_path):
    text = """
        import time
        from dbrdist_launch import heartbeat
        for step in range(100):
            heartbeat.beat(step)
            time.sleep(0.1)
            print("step", step)
        print("well")
    """
    process = popen(
        "-n", 2, "--heartbeat-timeout", 2, "--host-timeout", 2, "python", program(tmp_path, text), mark="asleep"
    )
    for _ in range(4):
        process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    time.sleep(6.0)
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out.count("well")) == (0, 2), err
    assert_nothing_left("asleep")


def test_nohup_outlives_its_terminal(tmp_path):
    text = "import signal, time; open('up', 'w').close(); time.sleep(3); print(signal.getsignal(signal.SIGHUP).name)"
    words = ["nohup", sys.executable, "-m", "dbrdist_launch", "-n", "1", "python", "-c", text]
    process = subprocess.Popen(
        words, cwd=tmp_path, env=environment("nohup"), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(tmp_path / "up")
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.endswith("SIG_IGN\n")


def test_a_rank_in_a_debugger_is_not_stalled(tmp_path):
    """Any tracer counts; here one that a few lines of ctypes make."""
    text = """
        import time
        from dbrdist_launch import heartbeat
        for step in range(3):
            heartbeat.beat(step)
        open("up", "w").write(str(__import__("os").getpid()))
        time.sleep(100)
    """
    tracer = """
        import ctypes, os, sys, time
        libc = ctypes.CDLL(None, use_errno=True)
        pid = int(open("up").read())
        if libc.ptrace(16, pid, None, None):
            sys.exit(77)
        os.waitpid(pid, 0)
        time.sleep(5.0)
        libc.ptrace(17, pid, None, None)
    """
    process = popen("-n", 1, "--heartbeat-timeout", 2, "python", program(tmp_path, text), mark="traced", cwd=tmp_path)
    wait_for(tmp_path / "up")
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(tracer)], cwd=tmp_path)
    held = process.poll() is None
    _, err = process.communicate(timeout=60)
    assert_nothing_left("traced")
    if child.returncode == 77:
        pytest.skip("ptrace is not allowed here")
    assert held and "a debugger is attached" in err
    assert process.returncode == 124  # once it is gone, the beats are awaited again


def test_a_start_in_a_queue_is_awaited(tmp_path):
    """An srun that waits for resources says nothing for as long as it takes."""
    srun = tmp_path / "srun"
    srun.write_text(
        "#!/bin/sh\nif [ $1 = --mpi=list ]; then echo 'none pmi2'; exit; fi\n"
        'sleep 5\nwhile [ "${1%%rank/main.py}" = "$1" ]; do shift; done\n'
        f'SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0 exec {sys.executable} -I -S "$@"\n'
    )
    srun.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    result = launch("-n", 1, "--backend", "srun", sys.executable, "-c", "print('well')", env=env)
    assert (result.returncode, result.stdout.count("well")) == (0, 1), result.stderr


def test_odd_beats_and_forked_children_do_no_harm(tmp_path):
    text = """
        import multiprocessing, os, time
        from dbrdist_launch import heartbeat
        loop = []
        loop.append(loop)
        for step in (0.5, "seven", None, 1 << 80, -1, float("nan"), [], True):
            heartbeat.beat(step, loss=float("nan"), odd=object(), message="x" * 9000, loop=loop)
        heartbeat.beat(3, **{"total": 5})
        if os.fork() == 0:
            heartbeat.beat(99)
            os._exit(0)
        os.wait()
        time.sleep(0.5)
        os._exit(4)
    """
    result = launch("-n", 1, "--log-dir", tmp_path, "python", program(tmp_path, text))
    assert result.returncode == 4
    from support import failure_in

    assert failure_in(tmp_path)["step"] == 3


def test_beats_pass_where_the_supervisor_cannot_be_seen(tmp_path):
    """As in a container with a PID namespace of its own: the path in /proc is another process's, or nobody's."""
    text = "from dbrdist_launch import heartbeat; heartbeat.beat(7); print(heartbeat.active()); import os; os._exit(3)"
    change = "DBRDIST_HEARTBEAT=/proc/1/fd/999999,${DBRDIST_HEARTBEAT#*,}"
    result = launch("-n", 1, "sh", "-c", f"{change} exec {sys.executable} -c '{text}'")
    assert "True" in result.stdout and "step 7" in result.stderr, result.stderr


def test_a_deleted_working_folder_costs_nothing(tmp_path):
    folder = tmp_path / "gone"
    words = f"mkdir {folder}; cd {folder}; rmdir {folder}; exec {sys.executable} -m dbrdist_launch -n 1 echo well"
    child = subprocess.run(["sh", "-c", words], env=environment("gone"), capture_output=True, text=True, timeout=60)
    assert child.returncode == 0 and "well" in child.stdout, child.stderr
    assert "dbrdist_launch/" not in child.stderr


def test_without_a_home_nothing_is_made_in_the_working_folder(tmp_path):
    env = {k: v for k, v in environment("home").items() if k not in ("HOME", "XDG_CACHE_HOME")}
    code = "import os; os.path.expanduser = lambda path: path; from dbrdist_launch.main import main; main()"
    words = [sys.executable, "-c", code, "-n", "1", "echo", "well"]
    child = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr
    assert list(tmp_path.iterdir()) == []


def test_two_jobs_in_one_folder_do_not_meet(tmp_path):
    words = ["-n", 1, "--log-dir", tmp_path, "--name", "same", "python", PROGRAMS / "hello.py"]
    jobs = [popen(*words, mark="two") for _ in range(2)]
    for job in jobs:
        assert job.wait(60) == 0
        job.communicate()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "same", "same-2"]
    for name in ("same", "same-2"):
        assert (tmp_path / name / "attempt-0" / "rank-0.out").read_text().startswith("hello from rank 0")


def test_a_log_folder_that_vanishes_costs_a_warning(tmp_path):
    text = "import shutil, sys, time; shutil.rmtree(sys.argv[1]); print('well'); time.sleep(1); sys.exit(3)"
    folder = tmp_path / "logs"
    result = launch("-n", 1, "--log-dir", folder, "python", "-c", text, folder)
    assert result.returncode == 3 and "well" in result.stdout
    assert "cannot be written" in result.stderr or "is incomplete" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("code", [0, 3])
def test_a_fault_of_ours_costs_neither_job_nor_exit_code(code):
    patch = "from dbrdist_launch.launcher.judgement.judge import Judge; Judge.verdict = lambda *_: 1 / 0; "
    program = f"import sys, time; time.sleep(1); print('well'); sys.exit({code})"
    run = f"from dbrdist_launch.main import main; main(['-n', '2', {sys.executable!r}, '-c', {program!r}])"
    child = subprocess.run(
        [sys.executable, "-c", patch + run], env=environment("fault"), capture_output=True, text=True, timeout=60
    )
    assert child.returncode == code, child.stderr
    assert child.stdout.count("well") == 2 or code  # the first rank that fails may end the other
    assert child.stderr.count("internal error, the job continues: ZeroDivisionError") == 5
    assert_nothing_left("fault")


def test_a_fault_before_the_job_is_one_sentence():
    patch = "import dbrdist_launch.launcher.session as s; s.Session.job = lambda *_: 1 / 0; "
    run = "from dbrdist_launch.main import main; main(['-n', '2', 'true'])"
    words = [sys.executable, "-c", patch + run]
    child = subprocess.run(words, env=environment("fault"), capture_output=True, text=True, timeout=60)
    assert child.returncode == 71
    assert (
        child.stderr.startswith("dbrdist-launch: internal error: ZeroDivisionError") and child.stderr.count("\n") == 1
    )
