"""What /proc and the kernel tell of processes, and how all of them are ended."""

import ctypes
import io
import os
import select
import signal
import threading
import time

import pytest
from clocks import Clock
from dbrdist_launch import linux
from dbrdist_launch.launcher import cli
from processes import GONE, in_child, until

# Python warns of forks beside threads, as those of the test runner; what is forked here calls the kernel alone.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def test_all_below_a_process_are_ended_and_fetched():
    def act():
        read, write = os.pipe()
        for _ in range(2):
            if not os.fork():
                if not os.fork():
                    signal.pause()
                os.write(write, b"x")
                signal.pause()
        while len(os.read(read, 2)) < 2:
            os.write(write, b"x")
        below = linux.descendants(os.getpid())
        linux.adopt_orphans()
        linux.end_descendants()
        try:
            os.waitpid(-1, os.WNOHANG)
            return 8
        except ChildProcessError:
            return 7 if len(below) == 4 and all(linux.state(pid) == "" for pid in below) else 9

    assert in_child(act) == 7


def test_what_cannot_be_ended_is_left_after_five_seconds(monkeypatch):
    clock, killed = Clock(monkeypatch), []
    monkeypatch.setattr(os, "waitpid", lambda pid, options: (0, 0) if (pid, options) == (-1, os.WNOHANG) else None)
    monkeypatch.setattr(linux, "descendants", lambda pid: [11, 12] if pid == os.getpid() else [])
    monkeypatch.setattr(linux, "kill", lambda pid, number: killed.append((clock.now, pid, int(number))))
    linux.end_descendants()
    times = sorted({time for time, *_ in killed})
    assert {tuple(one[1:]) for one in killed} == {(11, 9), (12, 9)} and len(killed) == 2 * len(times)
    assert times[1] - times[0] == pytest.approx(0.001) and times[-1] == pytest.approx(1005.0, abs=0.0011)


def test_a_signal_is_ignored_only_where_the_kernel_says_so():
    numbers = (signal.SIGHUP, signal.SIGUSR1, signal.SIGRTMAX)
    assert [linux.ignores(os.getpid(), number) for number in numbers] == [False] * 3
    for number in numbers:
        before = signal.signal(number, signal.SIG_IGN)
        try:
            assert [linux.ignores(os.getpid(), other) for other in numbers] == [other == number for other in numbers]
        finally:
            signal.signal(number, before)
    assert not linux.ignores(GONE, signal.SIGHUP)


def test_orphans_are_adopted_and_a_parent_takes_its_child_with_it():
    """As the kernel tells it: PR_GET_CHILD_SUBREAPER is 37, PR_GET_PDEATHSIG is 2."""
    prctl = ctypes.CDLL(None).prctl

    def told(option):
        value = ctypes.c_int(-1)
        assert prctl(option, ctypes.byref(value), 0, 0, 0) == 0
        return value.value

    before = told(37), told(2)
    try:
        prctl(36, 0, 0, 0, 0)
        linux.adopt_orphans()
        assert told(37) == 1
        linux.die_with_parent(os.getppid(), 10)
        assert told(2) == 10
    finally:
        prctl(36, before[0], 0, 0, 0)
        prctl(1, before[1], 0, 0, 0)


def option(name):
    return next(parameter for parameter in cli.launch.params if parameter.name == name)


def test_states_of_processes(fork):
    sleeper, ended = fork(), fork(lambda: os._exit(5))
    until(lambda: linux.state(ended) == "Z" and linux.state(sleeper) == "S")
    assert (linux.state(os.getpid()), linux.state_and_tracer(os.getpid())) == ("R", ("R", False))
    assert linux.stat(ended)[-1] == str(5 << 8) and linux.stat(sleeper)[1] == str(os.getpid())
    assert (linux.state(GONE), linux.stat(GONE), linux.state_and_tracer(GONE)) == ("", None, ("", False))
    os.kill(sleeper, signal.SIGSTOP)
    until(lambda: linux.state_and_tracer(sleeper) == ("T", False))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Name:\tx\nState:\tS (sleeping)\nTracerPid:\t0\nSigCgt:\t0\n", ("S", False)),
        ("State:\tt (tracing stop)\nTracerPid:\t17\nState:\tZ\n", ("t", True)),
        ("State:\n", ("", False)),
        ("TracerPid:\t3\n", ("", True)),
    ],
)
def test_a_tracer_is_seen(monkeypatch, text, found):
    monkeypatch.setattr(linux, "open", lambda path, **more: io.StringIO(text), raising=False)
    assert linux.state_and_tracer(7) == found


def test_signals_that_have_a_handler(fork):
    def catch():
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # whatever this process does with it
        signal.signal(signal.SIGUSR2, lambda *_: None)

    pid = fork(catch)
    until(lambda: linux.catches(pid, signal.SIGUSR2))
    assert not linux.catches(pid, signal.SIGUSR1) and not linux.catches(pid, signal.SIGPIPE)
    assert not linux.catches(GONE, signal.SIGUSR2)


def test_signals_of_which_a_process_does_not_die(fork):
    def begin():
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.signal(signal.SIGXCPU, signal.SIG_IGN)
        signal.signal(signal.SIGUSR2, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPWR])

    pid = fork(begin)
    until(lambda: linux.expects(pid, signal.SIGPWR))
    expected = [number for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU) if linux.expects(pid, number)]
    assert expected == [signal.SIGUSR2, signal.SIGXCPU] and linux.ignores(pid, signal.SIGXCPU)
    assert not linux.ignores(pid, signal.SIGUSR2) and not linux.expects(GONE, signal.SIGUSR2)
    waiting = fork(lambda: signal.sigwait([signal.SIGPWR]))
    until(lambda: linux.expects(waiting, signal.SIGPWR))


def _beside_a_child(then):
    """A parent without a handler that does `then`, beside a child that has one."""
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    (read, _write), parent = os.pipe(), os.getpid()
    child = os.fork()
    if child == 0:
        linux.die_with_parent(parent)
        signal.signal(signal.SIGUSR2, lambda *_: None)
        signal.pause()
    then(child, read)


def _spin(child, read):
    while True:
        pass


@pytest.mark.parametrize(
    ("then", "heard"),
    [
        (lambda child, read: os.waitpid(child, 0), True),  # as a shell does
        (lambda child, read: os.read(read, 1), True),  # x=$(program)
        (lambda child, read: select.select([read], [], []), True),
        (lambda child, read: time.sleep(60), False),
        (lambda child, read: threading.Event().wait(), False),
        (_spin, False),
    ],
)
def test_a_signal_that_only_a_helper_expects(fork, then, heard):
    pid = fork(lambda: _beside_a_child(then))
    until(lambda: any(linux.expects(child, signal.SIGUSR2) for child in linux.children(pid)), 20)
    until(lambda: linux.hears(pid, signal.SIGUSR2) == heard, 20)  # it comes there in a moment
    assert not linux.expects(pid, signal.SIGUSR2) and linux.hears(linux.children(pid)[0], signal.SIGUSR2)


def test_children_and_what_is_below_them(fork, tmp_path):
    def grow():
        below = os.fork()
        if below:
            (tmp_path / "below").write_text(str(below))
            os.rename(tmp_path / "below", tmp_path / "told")
        signal.pause()

    pid, other = fork(grow), fork()
    until((tmp_path / "told").exists)
    below = int((tmp_path / "told").read_text())
    assert {pid, other} <= set(linux.children(os.getpid())) and below not in linux.children(os.getpid())
    found = linux.descendants(os.getpid())
    assert found.index(pid) < found.index(below) and other in found and found.count(below) == 1
    assert linux.descendants(pid) == [below] == linux.children(pid)
    assert linux.children(GONE) == [] == linux.descendants(below)
    linux.kill(below, signal.SIGKILL)


def test_signals_to_those_who_are_gone_or_have_no_group(fork):
    pid = fork()
    assert linux.kill(pid, 0) and not linux.kill(GONE, signal.SIGTERM)
    linux.kill_group(GONE, signal.SIGTERM)
    linux.kill_group(pid, signal.SIGKILL)  # no group of its own: itself
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def test_a_group_is_signalled_as_a_whole(fork, tmp_path):
    def lead():
        os.setsid()
        if os.fork():
            (tmp_path / "made").touch()

    pid = fork(lead)
    until((tmp_path / "made").exists)
    (below,) = linux.children(pid)
    linux.kill_group(pid, signal.SIGTERM)
    assert os.waitpid(pid, 0)[1] == signal.SIGTERM
    until(lambda: linux.state(below) in ("", "Z"))


def test_mapped_files_are_those_with_a_prefix(monkeypatch):
    text = (
        "7f00-7f01 r--p 00000000 08:01 11 /dev/shm/mpich_shm_a b\n7f02-7f03 rw-p 0 00:00 0 \n"
        "7f04-7f05 r--p 0 08:01 12 /usr/lib/x.so\n7f06-7f07 r--p 0 08:01 11 /dev/shm/mpich_shm_c\n"
    )
    monkeypatch.setattr(linux, "open", lambda path, **more: io.StringIO(text), raising=False)
    assert linux.mapped_files(7, "/dev/shm/mpich_shm_") == {"/dev/shm/mpich_shm_a b", "/dev/shm/mpich_shm_c"}
    monkeypatch.undo()
    assert linux.mapped_files(GONE, "/") == set() != linux.mapped_files(os.getpid(), "/")


@pytest.mark.slow
def test_who_loses_its_parent_is_ended_or_adopted(tmp_path):
    """The kernel's signal for the death of a parent; one that died before is noticed too."""

    def adopt():
        linux.adopt_orphans()
        middle = os.fork()
        if not middle:
            parent = os.getpid()
            if not os.fork():
                linux.die_with_parent(parent, signal.SIGTERM)
                (tmp_path / "ready").touch()
                time.sleep(60)
            until((tmp_path / "ready").exists)
            os._exit(0)
        os.waitpid(middle, 0)
        return os.waitstatus_to_exitcode(os.waitpid(-1, 0)[1]) + 100  # an orphan is ours

    assert in_child(adopt) == 100 - signal.SIGTERM
    us = os.getpid()

    def live_with(parent):
        signal.signal(
            signal.SIGUSR1, signal.SIG_DFL
        )  # MPI catches it in a process in which another test has started it
        linux.die_with_parent(parent, signal.SIGUSR1)
        return 7

    assert in_child(lambda: live_with(us)) == 7
    assert in_child(lambda: live_with(us + 1)) == -signal.SIGUSR1
    assert in_child(lambda: linux.die_with_parent(us + 1) or 7) == -signal.SIGKILL


@pytest.mark.slow
def test_all_descendants_are_ended_and_fetched(tmp_path):
    def act():
        linux.adopt_orphans()
        if not os.fork():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.fork()
            os.setsid()
            (tmp_path / str(os.getpid())).touch()
            time.sleep(60)
        until(lambda: len(os.listdir(tmp_path)) == 2)
        linux.end_descendants()
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return len(linux.descendants(os.getpid()))
        return 50

    assert in_child(act) == 0


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [100, 1 << 60])
def test_descendants_that_the_kernel_ends_late_are_waited_for_and_no_longer_than_asked(rounds, monkeypatch):
    asked, kill = [], linux.kill

    def late(pid, number):
        asked.append(pid)
        return kill(pid, number if len(asked) > rounds else 0)

    def act():
        linux.adopt_orphans()
        if not os.fork():
            time.sleep(60)
        monkeypatch.setattr(linux, "kill", late)
        linux.end_descendants(20.0 if rounds == 100 else 0.02)
        left = linux.descendants(os.getpid())
        for pid in left:
            kill(pid, signal.SIGKILL)
        return len(left)

    assert in_child(act) == (rounds != 100)


def test_a_process_is_a_python_by_the_name_of_its_program(monkeypatch):
    assert linux.is_python(os.getpid()) and not linux.is_python(GONE)
    for path, found in (("/usr/bin/python3.11", True), ("/opt/pypy3", True), ("/usr/bin/bash", False),
                        ("/python/bin/sh", False)):  # fmt: skip
        monkeypatch.setattr(linux.os, "readlink", lambda link, path=path: path if link == "/proc/7/exe" else "")
        assert linux.is_python(7) is found
