"""Forks of a warm process run programs as Python does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import warm
from tests.each import each

pytestmark = pytest.mark.programs
FAILING = """
import atexit, sys
import own

def inner():
    raise ValueError("broken on purpose")

atexit.register(print, "at exit")
print(__name__, __file__, sys.argv, sys.path[0], own.VALUE, sys.modules["__main__"].inner is inner)
print("to stderr", file=sys.stderr)
inner()
"""
PROGRAMS = {
    "arguments": ["-c", "import sys; print(sys.argv, __name__)", "a", "-m"],
    "environment": ["-c", "import os; print(os.getcwd(), sorted(os.environ), os.umask(0), os.sched_getaffinity(0))"],
    "import path": ["-c", "import sys; print(sys.path)"],
    "status": ["-c", "import sys; sys.exit(7)"],
    "words": ["-c", "raise SystemExit('words')"],
    "exit of a rank": ["-c", "import dbrdist.comm, sys; sys.exit(5)"],
    "os._exit": ["-c", "import os; os._exit(9)"],
    "killed": ["-c", "import os; os.kill(os.getpid(), 9)"],
    "terminated": ["-c", "import os; os.kill(os.getpid(), 15)"],
    "interrupted": ["-c", "raise KeyboardInterrupt"],
    "traceback": ["-c", "1 / 0"],
    "syntax": ["-c", "a b"],
    "script": ["failing.py", "a"],
    "module": ["-m", "failing", "b"],
    "package": ["-m", "json.tool", "--help"],
    "imported": ["-m", "dbrdist.cli.data", "info", "nowhere"],
    "missing": ["-m", "no_such_module"],
    "input": ["-c", "import sys; print(input(), sys.stdin.read(), sys.stdin.encoding, sys.stdout.encoding)"],
    "streams": ["-c", "import sys; sys.stderr.write('\\udcff é'); sys.stdout.buffer.write(b'\\xff')"],
    "open files": ["-c", "import os; print(os.read(int(os.environ['FILE']), 9), len(os.listdir('/proc/self/fd')))"],
    "threads": ["-c", "import threading; threading.Thread(target=print, args=['t']).start()"],
    "signals": ["-c", "import signal as s; print([s.getsignal(n) for n in range(1, 32)], s.pthread_sigmask(0, []))"],
    "spawn": ["-c", "import multiprocessing as m; print(m.get_context('spawn').Pool(1).map(abs, [-3]))"],
    "option": ["-I", "-c", "import sys; print(sys.flags.isolated, sys.argv)", "a"],
    "of standard input": [],
    "stand-ins": ["-c", "import dbrdist; dbrdist.print_runtime_info()"],
    "limits": ["-c", "from dbrdist.comm import mpi; print(mpi._is_forked, mpi.started())"],
}


@each(**{"words, unbuffered": [*((w, "") for w in PROGRAMS.values()), (PROGRAMS["streams"], "1")]})
def test_a_fork_does_as_python_does(words, unbuffered, tmp_path):
    (tmp_path / "own.py").write_text("VALUE = 3\n")
    (tmp_path / "failing.py").write_text(FAILING)
    (tmp_path / "file").write_text("contents")

    def outcome(python):
        with open(tmp_path / "file") as file:
            env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(warm.ROOT), "HOME": str(tmp_path), "LC_ALL": "C.UTF-8"}
            env |= {"FILE": str(file.fileno()), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": unbuffered}
            done = subprocess.run(
                [*python, *words], cwd=tmp_path, env=env, input=b"one\ntwo", capture_output=True, timeout=60,
                pass_fds=[file.fileno()],
            )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    assert outcome(warm.python()) == outcome([sys.executable])


def test_few_and_closed_files_are_no_obstacle():
    code = "import sys, os; print(sys.stdin, sorted(os.listdir('/proc/self/fd')))"
    shell = ["/bin/sh", "-c", 'ulimit -n 20; exec 7>&1; exec "$@" <&-', "sh"]
    found = [subprocess.check_output([*shell, *python, "-c", code]) for python in (warm.python(), [sys.executable])]
    assert found[0] == found[1]


def test_a_client_without_a_server_becomes_python(tmp_path):
    code = "import os, sys; print(sys.argv, os.getppid(), os.umask(0)); sys.exit(3)"
    words = [[*warm.python()[:-1], str(tmp_path / "nowhere" / "socket")], [sys.executable]]
    found = [subprocess.run([*one, "-c", code, "a"], capture_output=True, check=False) for one in words]
    assert (found[0].returncode, found[0].stdout, found[0].stderr) == (3, found[1].stdout, b"")


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # also where it goes while its file is read
        return False


def wait_for_the_end_of(pid):
    end = time.monotonic() + 60
    while is_alive(pid):
        assert time.monotonic() < end, "it is still there"
        time.sleep(0.01)


@each(number=[signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_are_forwarded(number):
    # No `signal.pause`: a signal between Python's last look for one and that call would be waited out in it.
    code = f"""
import signal, sys, time
signal.signal({int(number)}, lambda n, frame: sys.exit(n))
print("up", flush=True)
while True:
    time.sleep(0.01)
"""
    with subprocess.Popen([*warm.python(), "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"up\n"
        process.send_signal(number)
        assert process.wait(60) == number


def test_a_child_ends_with_its_client():
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    with subprocess.Popen([*warm.python(), "-c", code], stdout=subprocess.PIPE) as process:
        child = int(process.stdout.readline())
        process.kill()
        wait_for_the_end_of(child)


def test_what_a_child_has_started_ends_with_the_client():
    code = "import os, subprocess as s; print(os.getpid(), s.Popen(['sleep', '100']).pid, flush=True); input()"
    words = [*warm.python(), "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        both = process.stdout.readline().split()
        process.kill()
        assert process.stdout.read() == b""  # nobody has it open any more
    for pid in both:
        wait_for_the_end_of(int(pid))


def test_children_end_with_a_server_that_is_killed(monkeypatch):
    monkeypatch.setattr(warm, "_server", None)
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    with subprocess.Popen([*warm.python(), "-c", code], stdout=subprocess.PIPE) as process:
        child = int(process.stdout.readline())
        warm._server.process.kill()
        assert process.wait(60) == 97
        wait_for_the_end_of(child)
    assert subprocess.call([*warm.python(), "-c", "import sys; sys.exit(4)"]) == 4  # a new one
    warm._server.end()


def test_the_server_and_its_children_end_with_the_tests(tmp_path):
    folder = tmp_path / ("long" * 40)  # names of sockets have 108 bytes at most
    folder.mkdir()
    code = f"""
import subprocess, sys
sys.path.insert(0, {str(warm.ROOT)!r})
from tests import warm
program = "import os, time; print(os.getpid(), os.getppid(), flush=True); time.sleep(100)"
child = subprocess.Popen([*warm.python(), "-c", program], stdout=subprocess.PIPE, text=True)
print(warm._server.path, child.stdout.readline(), flush=True)
"""
    for ending in ("", "import os; os.kill(os.getpid(), 9)"):
        env = {**os.environ, "TMPDIR": str(folder)}
        done = subprocess.run(
            [sys.executable, "-c", code + ending], capture_output=True, text=True, timeout=60, env=env
        )
        path, child, server = done.stdout.split()
        wait_for_the_end_of(int(child))
        wait_for_the_end_of(int(server))
        assert not any(folder.iterdir()) and str(folder) in path


def test_chance_differs_between_forks():
    code = "import random, numpy; print(random.random(), numpy.random.random())"
    words = [subprocess.run([*warm.python(), "-c", code], capture_output=True, check=True).stdout for _ in range(2)]
    assert not set(words[0].split()) & set(words[1].split())
