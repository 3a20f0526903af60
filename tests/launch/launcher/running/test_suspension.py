"""Whether a job that is suspended could be continued: by a shell at its terminal, or by who has stopped it."""

import os
import signal
from types import SimpleNamespace

import pytest
from clocks import Clock
from dbrdist_launch import limits, messages
from dbrdist_launch.launcher.running import suspension

# Fields of /proc/PID/stat: the state, the process above, its group, its session.
SHELL, LAUNCHER, SCRIPT = ["S", "1", "10", "10"], ["S", "20", "20", "10"], ["S", "10", "20", "10"]


@pytest.mark.parametrize(
    ("processes", "has_shell"),
    [
        ({10: SHELL, 20: SCRIPT, 21: LAUNCHER}, True),
        ({20: SCRIPT, 21: LAUNCHER}, False),  # the shell has ended
        ({10: ["S", "1", "10", "9"], 20: SCRIPT, 21: LAUNCHER}, False),  # `ssh -t host`: another session
        ({10: ["S", "1", "9", "10"], 20: SCRIPT, 21: LAUNCHER}, True),
        ({10: SHELL}, False),  # this process itself is gone
        ({10: SHELL, 21: ["S", "10", "21", "10"]}, True),
    ],
)
def test_a_shell_is_the_first_process_above_the_group(monkeypatch, processes, has_shell):
    monkeypatch.setattr(suspension.linux, "stat", processes.get)
    assert suspension._has_shell(21) is has_shell


@pytest.mark.parametrize(
    ("terminal", "group", "has_shell", "without"),
    [
        (7, 20, False, True), (7, 20, True, False), (7, 30, False, False), (7, OSError(), False, False),
        (OSError(), 20, False, False),
    ],
)  # fmt: skip
def test_a_terminal_without_a_shell(monkeypatch, terminal, group, has_shell, without):
    closed, asked = [], []

    def give(value):
        if isinstance(value, OSError):
            raise value
        return value

    monkeypatch.setattr(suspension.os, "open", lambda *words: asked.append(words) or give(terminal))
    monkeypatch.setattr(suspension.os, "tcgetpgrp", lambda descriptor: asked.append(descriptor) or give(group))
    monkeypatch.setattr(suspension.os, "getpgrp", lambda: 20)
    monkeypatch.setattr(suspension.os, "close", closed.append)
    monkeypatch.setattr(suspension, "_has_shell", lambda pid: asked.append(pid) or has_shell)
    assert suspension._is_without_shell() is without
    assert asked[0] == ("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    assert closed == ([7] if terminal == 7 else []) and (os.getpid() in asked) == (terminal == 7 and group == 20)


@pytest.mark.parametrize("answers_after", [0.0, 0.125, 1e9])
def test_the_programs_are_stopped_before_the_launcher_and_continued_after_it(monkeypatch, answers_after):
    """It waits for its messages to be on their way, as long as an answer may take, and a moment for the output."""
    clock, sent, said = Clock(monkeypatch), [], []
    began = clock.now

    def rank(running):
        channel = SimpleNamespace(send=sent.append, unsent=b"x" if answers_after else b"")
        return SimpleNamespace(running=running, channel=channel)

    def turn(seconds):
        assert seconds == began + limits.ANSWER_SECONDS - clock.now
        clock.now += min(seconds, 0.125)
        if clock.now >= began + answers_after:
            ranks[0].channel.unsent = b""

    ranks = [rank(True), rank(False)]
    monkeypatch.setattr(suspension, "_is_without_shell", lambda: False)
    monkeypatch.setattr(suspension.os, "kill", lambda pid, number: sent.append((pid, number, clock.now)))
    suspension.suspend(ranks, SimpleNamespace(turn=turn), said.append)
    waited = min(answers_after, limits.ANSWER_SECONDS) + limits.SEARCH_SECONDS
    stopped = (os.getpid(), signal.SIGSTOP, pytest.approx(began + waited, abs=1e-9))
    assert sent == [messages.Signal(signal.SIGTSTP), stopped, messages.Signal(signal.SIGCONT)]
    assert said == ["suspended with all its ranks; `fg` or SIGCONT continues them"]
