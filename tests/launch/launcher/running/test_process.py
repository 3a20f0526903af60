"""How mpiexec or srun is ended, and how it ended."""

import os
import subprocess
from types import SimpleNamespace

import pytest
from clocks import Clock
from dbrdist_launch.errors import LaunchError
from dbrdist_launch.inherited import Inherited
from dbrdist_launch.launcher.running import process
from dbrdist_launch.launcher.running.process import StarterProcess


class Process:
    """An mpiexec that ends after some signals, or only when it is killed."""

    pid = 4242

    def __init__(self, signals):
        self.left, self.happened, self.returncode = signals, [], None
        self.stdout, self.stderr = (SimpleNamespace(close=lambda: self.happened.append("closed")) for _ in range(2))

    def poll(self):
        return self.returncode

    def send_signal(self, number):
        self.happened.append(int(number))
        self.left -= 1
        self.returncode = None if self.left else -number

    def wait(self, seconds=None):
        self.happened.append(seconds)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("mpiexec", seconds)

    def kill(self):
        self.happened.append("killed")
        self.returncode = -9


def test_what_is_left_in_the_pipes_is_read_without_waiting():
    """The first has ended; somebody else still holds the second one."""
    one, (first, second) = object.__new__(StarterProcess), [os.pipe() for _ in range(2)]
    one.pipes = first[0], second[0]
    os.write(first[1], b"out 1\nout 2")
    os.write(second[1], b"err")
    os.close(first[1])
    assert one.last_words() == [b"out 1\nout 2", b"err"]
    assert one.last_words() == [b"", b""]
    for descriptor in (first[0], *second):
        os.close(descriptor)


@pytest.mark.parametrize(
    ("ends_by", "signals", "happened"),
    [
        ((15,), 1, [15, 0.5]), ((15,), 9, [15, 0.5, "killed", None]), ((2, 15), 1, [2, 0.3]),
        ((2, 15), 2, [2, 0.3, 15, 0.3]), ((2, 15), 9, [2, 0.3, 15, 0.3, "killed", None]),
    ],
)  # fmt: skip
def test_a_starter_is_ended_by_its_signals_and_by_force(monkeypatch, ends_by, signals, happened):
    clock = Clock(monkeypatch)
    one = object.__new__(StarterProcess)
    one.process, one.ends_by, killed = Process(signals), ends_by, []
    states = {11: ["S", "S", ""], 12: ["Z"], 13: ["S"] * 10**4}
    monkeypatch.setattr(process.linux, "descendants", lambda pid: [11, 12, 13] if pid == 4242 else [])
    monkeypatch.setattr(process.linux, "state", lambda pid: states[pid].pop(0))
    monkeypatch.setattr(process.linux, "kill", lambda pid, number: killed.append((pid, int(number))))
    monkeypatch.setattr(process.linux, "kill_group", lambda pid, number: killed.append(("group", pid, int(number))))
    began = clock.now
    one.end()
    one.close()
    assert one.process.happened == [*happened, "closed", "closed"]
    assert killed == [("group", 4242, 9), (13, 9)] and 1.0 <= clock.now - began < 1.02


@pytest.mark.parametrize(("code", "found"), [(0, (0, 0)), (3, (3, 0)), (-9, (137, 9)), (-15, (143, 15))])
def test_how_a_starter_ended(code, found):
    one = object.__new__(StarterProcess)
    one.process = Process(1)
    one.process.returncode = code
    assert one.poll() == code and one.result() == found


def test_a_starter_that_is_not_there_is_a_sentence():
    with pytest.raises(LaunchError, match="cannot start '/nowhere/mpiexec': No such file or directory"):
        StarterProcess(["/nowhere/mpiexec"], {}, SimpleNamespace(ends_by=(), kills_step=False), Inherited())


@pytest.mark.parametrize(
    ("is_terminal", "without_input", "stdin"),
    [(False, False, None), (False, True, subprocess.DEVNULL), (True, True, subprocess.DEVNULL),
     (True, False, subprocess.PIPE)],
)  # fmt: skip
def test_a_starter_reads_our_input_but_for_a_terminal(monkeypatch, is_terminal, without_input, stdin):
    """It has a session of its own, and what it does between fork and exec is done by the kernel's words alone."""
    happened, pipes = [], [os.pipe() for _ in range(3)]

    def start(command, **options):
        happened.append((command, options))
        options["preexec_fn"]()
        given = os.fdopen(pipes[0][1], "wb") if options["stdin"] == subprocess.PIPE else None
        out, err = (SimpleNamespace(fileno=lambda pipe=pipe: pipe[0]) for pipe in pipes[1:])
        return SimpleNamespace(stdin=given, stdout=out, stderr=err)

    monkeypatch.setattr(process.subprocess, "Popen", start)
    monkeypatch.setattr(process.os, "isatty", lambda number: is_terminal and number == 0)
    monkeypatch.setattr(process.linux, "load", lambda: happened.append("loaded"))
    monkeypatch.setattr(process.linux, "die_with_parent", lambda *words: happened.append(words))
    inherited = SimpleNamespace(hand_on=lambda files: happened.append(("hand on", files)))
    backend = SimpleNamespace(ends_by=(2, 15), kills_step=True)
    one = StarterProcess(["/m/mpiexec", "x"], {"A": "1"}, backend, inherited, without_input)
    loaded, (command, options), *prepared = happened
    assert (
        loaded == "loaded"
        and prepared == [(os.getpid(), 15), ("hand on", False)]
        and callable(options.pop("preexec_fn"))
    )
    assert command == ["/m/mpiexec", "x"] and options == {
        "env": {"A": "1"}, "stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
        "start_new_session": True, "close_fds": False,
    }  # fmt: skip
    assert (one.name, one.ends_by, one.kills_step) == ("mpiexec", (2, 15), True)
    assert one.pipes == (pipes[1][0], pipes[2][0])
    if stdin == subprocess.PIPE:
        os.write(one.input, b"typed")
        os.close(one.input)
        assert os.read(pipes[0][0], 9) == b"typed" and os.read(pipes[0][0], 9) == b""  # nobody else holds it
    else:
        assert one.input is None
        os.close(pipes[0][1])
    for descriptor in (pipes[0][0], *pipes[1], *pipes[2]):
        os.close(descriptor)
