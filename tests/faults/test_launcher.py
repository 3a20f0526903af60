"""dbrdist-launch: output that earlier versions lost, healthy jobs that they ended, programs that they changed."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.programs, pytest.mark.mpiexec]


def limited(number):
    """For a child before its program: as many open files at most, which it may raise where ``hard`` is more."""
    soft, hard = number

    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard or resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    return limit


def until(condition, seconds=40):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)


def below(pid):
    """The processes that a process has started, and those that they have."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == pid:
                found += [int(entry), *below(int(entry))]
    return found


def environ_of(pid):
    with open(f"/proc/{pid}/environ", "rb") as file:
        return dict(pair.split(b"=", 1) for pair in file.read().split(b"\0") if b"=" in pair)


def on_a_terminal(start, *words, typed=b"", size=(24, 80), **environ):
    """What a command on a terminal of its own writes there."""
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))

    def lead():
        os.setsid()
        os.close(os.open(os.ttyname(terminal), os.O_RDWR))

    ends = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    process = start.popen(*words, environ=environ, preexec_fn=lead, start_new_session=False, **ends)
    os.close(terminal)
    os.write(main, typed)
    seen = b""
    while True:
        try:
            data = os.read(main, 1 << 16) if select.select([main], [], [], 60)[0] else b""
        except OSError:  # nobody has it open any more
            data = b""
        if not data:
            os.close(main)
            return process.wait(20), seen.decode(errors="replace")
        seen += data


# ---- every byte arrives


@pytest.mark.parametrize("options", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_signals_cut_nothing_out_of_the_output(start, options):
    program = (
        "import signal\nsignal.signal(signal.SIGALRM, lambda *_: None)\n"
        "signal.setitimer(signal.ITIMER_REAL, .002, .002)\nprint('x' * 4_000_000)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)"
    )
    code, text = start.launch("-n", 1, "python", *options, "-c", program)
    assert text.count("x") >= 4_000_000 and code == 0, (code, text.count("x"))


def test_what_spawned_processes_write_is_shown(start):
    start.file("worker.py", """
from mpi4py import MPI
parent = MPI.Comm.Get_parent()
print("from the worker", flush=True)
parent.Barrier(); parent.Disconnect()
""")  # fmt: skip
    start.file("main.py", """
import sys
from mpi4py import MPI
child = MPI.COMM_SELF.Spawn(sys.executable, ["worker.py"], maxprocs=1)
child.Barrier(); child.Disconnect()
""")  # fmt: skip
    code, text = start.launch("-n", 1, "python", "main.py")
    assert "from the worker" in text and code == 0, text


@pytest.mark.parametrize("program", ["exec > >(sleep 1; cat); echo hello", "(sleep 1; echo hello) &"])
def test_what_a_program_has_started_may_write_the_rest(start, program):
    code, text = start.launch("-n", 1, "bash", "-c", program)
    assert "hello" in text and code == 0, text


def test_a_reader_that_stands_still_does_not_hold_the_report_back(start):
    read, write = os.pipe()
    words = ["dbrdist-launch", "-n", "1", "python", "-c", "print('x' * 300_000); raise ValueError('odd')"]
    with open("err", "w") as err:
        start.popen(*words, stdout=write, stderr=err)
    os.close(write)
    end = time.monotonic() + 40
    while "ValueError: odd" not in (said := (start.folder / "err").read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    os.close(read)
    assert "ValueError: odd" in said


# ---- healthy jobs go on


def test_a_job_that_is_suspended_as_a_whole_goes_on(start):
    start.file("beats.py", """
import os, time
from dbrdist_launch import heartbeat
print("up", os.getpid(), flush=True)
for step in range(50):
    heartbeat.beat(step); time.sleep(0.05)
""")  # fmt: skip
    process = start.popen("dbrdist-launch", "-n", "2", "--heartbeat-timeout", "3", "python", "beats.py")
    ranks = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
    time.sleep(1.0)  # beats are read once a second
    others = [process.pid, *(pid for pid in below(process.pid) if pid not in ranks)]
    for pid in (*others, *ranks):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5.0)  # the suspension itself
    for pid in others:
        os.kill(pid, signal.SIGCONT)
    time.sleep(0.3)  # on a busy machine, which does not continue all at once
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    text, _ = process.communicate(timeout=40)
    assert process.returncode == 0, text


@pytest.fixture
def runtime():
    """A folder for jobs, whose sockets need a short path."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield folder


@pytest.fixture
def containers(start):
    """Processes and mounts of their own, which not every user may have."""
    if shutil.which("unshare") is None or start("unshare", "-mpf", "--mount-proc", "true")[0]:
        pytest.skip("needs unshare of processes and mounts")


@pytest.mark.usefixtures("containers")
def test_jobs_of_two_containers_leave_each_other_alone(start, runtime):
    """They have one runtime folder, and processes of the same numbers."""
    words = ["unshare", "-pf", "--mount-proc", "dbrdist-launch", "-n", "2", "sleep", "3"]
    environ = {"XDG_RUNTIME_DIR": runtime}
    both = [start.popen(*words, environ=environ) for _ in range(3)]
    found = [(job.communicate(timeout=60)[0], job.returncode) for job in both]
    assert [code for _, code in found] == [0, 0, 0], found


@pytest.mark.usefixtures("containers")
def test_a_list_of_jobs_in_a_container_takes_no_job_of_the_host_away(start, runtime):
    environ = {"XDG_RUNTIME_DIR": runtime}
    process = start.popen(
        "dbrdist-launch", "-n", "1", "--name", "outside", "cat", environ=environ, stdin=subprocess.PIPE
    )
    until(lambda: list(Path(runtime).rglob("job.json")))
    start("unshare", "-pf", "--mount-proc", "dbrdist-launch", "ps", **environ)
    _, text = start.launch("ps", **environ)
    process.communicate("", timeout=40)
    assert "outside" in text


def test_blocked_signals_of_the_parent_do_not_keep_a_job_from_ending(start):
    def block():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])

    code, text = start.launch("-n", 1, "echo", "hi", preexec_fn=block, limit_seconds=40)
    assert code == 0 and "hi" in text, (code, text)


def test_more_ranks_than_files_that_may_be_open(start):
    program = "import resource; print('limit', resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    code, text = start.launch("-n", 12, "python", "-c", program, preexec_fn=limited((20, None)))
    assert code == 0 and text.count("limit 20\n") == 12, text


def test_a_lone_colon_is_an_argument(start):
    code, text = start.launch("-n", 2, "python", "-c", "import sys; print(sys.argv[1:])", "a", ":", "b")
    assert code == 0 and text.count("['a', ':', 'b']") == 2, text


def test_a_long_timeout_of_hosts_is_taken_or_refused_in_words(start):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code, text = start.launch("-n", 1, "--port", port, "--host-timeout", 1000000, "true")
    assert code == 0 or "host-timeout" in text, text


# ---- the right one is blamed


def test_the_rank_that_hangs_is_named(start):
    """The one that hangs beat last; the others wait for it."""
    start.file("stall.py", """
import queue, time
from mpi4py import MPI
from dbrdist_launch import heartbeat
world = MPI.COMM_WORLD
for step in range(5):
    if step == 3 and world.rank == 2: time.sleep(0.8)
    heartbeat.beat(step)
    if step == 3 and world.rank == 2: queue.Queue().get()
    world.allreduce(1)
""")  # fmt: skip
    code, text = start.launch("-n", 3, "--heartbeat-timeout", 3, "python", "stall.py")
    assert code == 124 and "rank 2 on" in text.splitlines()[0], text


def test_a_supervisor_that_cannot_start_says_why(start):
    code, text = start.launch("-n", 1, "true", preexec_fn=limited((26, 26)))
    assert code == 0 or "Too many open files" in text, text


@pytest.mark.parametrize("who", ["supervisor", "proxy"])
def test_who_was_killed_is_named_with_the_signal(start, who):
    """The outermost process of a rank, or that of mpiexec which starts the ranks of a host."""
    program = "import time\nfrom mpi4py import MPI\nprint('up', flush=True)\ntime.sleep(60)"
    process = start.popen("dbrdist-launch", "-n", "2", "python", "-c", program)
    for _ in range(2):
        assert "up" in process.stdout.readline()
    found = below(process.pid)
    if who == "proxy":
        (victim,) = (pid for pid in found if Path(f"/proc/{pid}/comm").read_text().strip() == "hydra_pmi_proxy")
    else:
        victim = next(pid for pid in found if environ_of(pid).get(b"PMI_RANK") == b"1")
    os.kill(victim, signal.SIGKILL)
    until(lambda: process.poll() is not None)
    text, _ = process.communicate()
    named = "rank 1 on" if who == "supervisor" else "process of mpiexec"
    assert process.returncode == 137 and named in text, (process.returncode, text)


def test_a_rank_without_hooks_that_left_is_named(start):
    start.file("leaves.py", """
import os, time
from mpi4py import MPI
world = MPI.COMM_WORLD
world.barrier()
if world.rank == 1: time.sleep(0.5); os._exit(0)
world.allreduce(1)
""")  # fmt: skip
    code, text = start.launch("-n", 3, "--no-inject", "python", "leaves.py")
    assert code != 0 and "rank 1 on" in text.splitlines()[0], text


# ---- the program is the program that it was


def test_a_wrapper_keeps_its_own_python_path(start):
    start.file("lib/mine.py", "")
    start.file("main.py", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import mine; print(7 * 6)'])")
    _, text = start.launch("-n", 1, "bash", "-c", "export PYTHONPATH=$PWD/lib:$PYTHONPATH; exec python main.py")
    assert "42" in text, text


def test_calls_of_builtins_run_no_code_of_the_launcher(start):
    """Where no more frames are free, `id` works as other builtins do: no hook is called by it."""
    start.file("deep.py", """
def deep():
    try:
        return deep()
    except RecursionError:
        hash(())
        try:
            id(())
        except RecursionError:
            return "hooked"
        return "free"
print(deep())
""")  # fmt: skip
    _, text = start.launch("-n", 1, "python", "deep.py")
    assert "free" in text, text


def test_an_exit_that_was_caught_keeps_nothing(start):
    start.file("caught.py", """
import sys
def leave():
    file = open("x", "w"); file.write("whole")
    sys.exit(3)
try:
    leave()
except SystemExit:
    pass
print("file:", open("x").read())
""")  # fmt: skip
    _, text = start.launch("-n", 1, "python", "caught.py")
    assert "file: whole" in text, text


def test_signals_are_ignored_as_under_plain_mpiexec(start):
    found = []
    for starter in ("mpiexec", "dbrdist-launch"):
        words = ["bash", "-c", f"{starter} -n 1 grep SigIgn /proc/self/status; true"]
        _, text = start(*words)
        found.append(int(text.split()[-1], 16) >> (signal.SIGXFSZ - 1) & 1)
    assert found[1] == found[0]


def test_what_is_typed_on_a_terminal_reaches_rank_0(start):
    program = "import os\nif os.environ['RANK'] == '0': print('got', input('name? '))"
    words = ["dbrdist-launch", "-n", "2", "python", "-c", program]
    code, text = on_a_terminal(start, *words, typed=b"Ada\n", TERM="dumb")
    assert "got Ada" in text and code == 0, text


def test_sigusr2_reaches_the_program(start):
    start.file("hears.py", """
import signal, sys, time
def hear(number, frame): print("heard", flush=True); sys.exit(0)
signal.signal(signal.SIGUSR2, hear)
print("ready", flush=True); time.sleep(60)
""")  # fmt: skip
    process = start.popen("dbrdist-launch", "-n", "2", "python", "hears.py")
    for _ in range(2):
        assert "ready" in process.stdout.readline()
    process.send_signal(signal.SIGUSR2)
    text, _ = process.communicate(timeout=40)
    assert text.count("heard") == 2 and process.returncode == 0, text


def test_what_follows_a_module_belongs_to_it(start):
    start.file("mymod.py", "import sys; print(sys.argv[1:])")
    words = ["-n", 1, "--env", f"PYTHONPATH={start.folder}", "-m", "mymod", "--lr", "3", "--quiet"]
    _, text = start.launch(*words)
    assert "['--lr', '3', '--quiet']" in text, text


# ---- terminals, lists of jobs, batch systems


def test_the_view_fits_the_height_of_the_terminal(start):
    words = ["dbrdist-launch", "-n", "14", "sleep", "2"]
    _, text = on_a_terminal(start, *words, size=(10, 80), TERM="xterm", LINES="", COLUMNS="")
    assert max(map(int, re.findall(r"\x1b\[(\d+)[AF]", text)), default=0) < 10


def test_a_terminal_without_escapes_gets_none(start):
    _, text = on_a_terminal(start, "dbrdist-launch", "-n", "2", "sleep", "1", TERM="dumb")
    assert "\x1b" not in text


def running(start, name, **environ):
    """A job that ends when its input does."""
    words = ["dbrdist-launch", "-n", "1", "--name", name, "sh", "-c", "echo up; cat"]
    process = start.popen(*words, environ=environ, stdin=subprocess.PIPE)
    assert "up" in process.stdout.readline()
    return process


def test_jobs_of_other_logins_are_listed(start, runtime):
    """One from cron has no runtime folder, a login by ssh has one."""
    name = f"job-{os.getpid()}"
    process = running(start, name, XDG_RUNTIME_DIR="")
    _, text = start.launch("ps", XDG_RUNTIME_DIR=runtime)
    process.communicate("", timeout=40)
    assert name in text, text


def test_jobs_in_a_folder_of_another_user_are_not_listed(start, runtime):
    environ = {"XDG_RUNTIME_DIR": runtime}
    process = running(start, "strange", **environ)
    assert "strange" in start.launch("ps", **environ)[1]
    for name in os.listdir(runtime):
        try:
            os.chown(os.path.join(runtime, name), 4321, 4321)
        except PermissionError:
            pytest.skip("only root can give a folder to another user, and not in every container")
    _, text = start.launch("ps", **environ)
    process.communicate("", timeout=40)
    assert "strange" not in text, text


def test_one_name_of_two_jobs_stops_not_one_of_them(start, runtime):
    environ = {"XDG_RUNTIME_DIR": runtime}
    both = [running(start, "twice", **environ) for _ in range(2)]
    code, text = start.launch("stop", "twice", **environ)
    for process in both:
        process.communicate("", timeout=60)
    assert code != 0 or len({process.returncode == 0 for process in both}) == 1, (code, text)


SRUN = """#!/bin/sh
case "$*" in
*--version*) echo "slurm 23.02.1";;
*--mpi=list*) printf "MPI plugin types are...\\n\\tnone\\n\\tpmi2\\n\\tcray_shasta\\n";;
esac
"""


def allocation(start, **environ):
    """The variables of a batch job on this host, with a stand-in for srun."""
    start.file("bin/srun", SRUN).chmod(0o755)
    host = os.uname().nodename
    return {
        "SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": host, "SLURM_TASKS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "4",
        "PATH": f"{start.folder}/bin:{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(start.folder / "cache"), **environ,
    }  # fmt: skip


def test_cpus_per_task_of_a_batch_job_reach_srun(start):
    code, text = start.launch("--backend", "srun", "--print", "-n", 2, "true", **allocation(start))
    assert code == 0 and re.search(r"(-c|--cpus-per-task)[ =]?4\b|SRUN_CPUS_PER_TASK=4", text), text


def test_the_wheels_mpiexec_is_not_taken_for_another_library(start):
    """mpi4py says that it has loaded Cray's MPICH: srun starts it here, or the job is refused."""
    version = "MPI VERSION    : CRAY MPICH version 8.1.29.26 (ANL base 3.4a2)"
    start.file("stand_in/mpi4py/__init__.py", "class rc: pass\n__version__ = '4.1.2'\n")
    start.file("stand_in/mpi4py/MPI.py", f"def Get_library_version():\n    return {version!r}\n")
    environ = allocation(start, PYTHONPATH=str(start.folder / "stand_in"))
    _, text = start.launch("--print", "-n", 2, "python", "-c", "pass", **environ)
    assert not text.startswith(os.path.dirname(sys.executable)), text


def test_the_record_of_a_job_is_text_that_others_can_read(start):
    """A rank has written bytes that are no UTF-8."""
    program = "import sys; sys.stderr.buffer.write(b'odd \\xff\\n'); sys.stderr.flush(); raise SystemExit(3)"
    start.launch("-n", 1, "--log-dir", "logs", "python", "-c", program)
    text = (start.folder / "logs" / "latest" / "status.json").read_text()
    assert not re.search(r"\\ud[89a-f]", text), text  # a half of a pair
    json.dumps(json.loads(text), ensure_ascii=False).encode()


def test_odd_numbers_of_slots_are_refused_in_words(start):
    code, text = start.launch("--hosts", "a:²", "-n", 1, "true")
    assert code != 0 and "internal error" not in text, text


def test_hosts_of_grid_engine_are_read(start):
    start.file("hosts", f"{os.uname().nodename} 3 queue UNDEFINED\n")
    _, text = start.launch("--print", "true", PE_HOSTFILE=str(start.folder / "hosts"))
    assert "-n 3" in text, text


@pytest.mark.usefixtures("containers")
def test_ranks_that_die_together_leave_no_shared_memory(start):
    start.file("dies.py", """
import os, signal
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
os.kill(os.getpid(), signal.SIGKILL)
""")  # fmt: skip
    words = "mount -t tmpfs none /dev/shm; dbrdist-launch -n 2 python dies.py; echo left: $(ls /dev/shm)"
    _, text = start("unshare", "-m", "sh", "-c", words)
    assert text.splitlines()[-1] == "left:", text
