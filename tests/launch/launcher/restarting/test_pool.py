"""Hosts that are set aside, and come back."""

import subprocess

import pytest
from dbrdist_launch.backends import hosts
from dbrdist_launch.backends.job import Host
from dbrdist_launch.launcher.restarting import pool as pools
from dbrdist_launch.launcher.restarting.pool import HostPool

STEP = 2.0**-10  # exact on either side of all times here


def test_hosts_come_back_when_their_time_is_over():
    now = [100.0]
    answers = [{"b": "no route"}, {}, {}]
    asked = []

    def probe(names):
        asked.append(list(names))
        return answers.pop(0)

    pool = HostPool((Host("a", 1), Host("b", 1)), cooldown_seconds=8.0, probe=probe, clock=lambda: now[0])
    assert pool.after_failure() == (["b"], []) and [h.name for h in pool.available()] == ["a"]
    now[0] = 108.0 - STEP
    assert pool.after_failure() == ([], [])
    now[0] = 108.0
    assert pool.after_failure() == ([], ["b"]) and [h.name for h in pool.available()] == ["a", "b"]
    assert asked == [["a", "b"], ["a"], ["a", "b"]]


def test_lost_hosts_cool_down_and_come_back():
    now, dead = [0.0], {"b": "no answer"}
    pool = HostPool(
        hosts.parse_list("a:1,b:1"), lambda names: {n: dead[n] for n in names if n in dead}, 30.0, clock=lambda: now[0]
    )
    assert pool.after_failure() == (["b"], [])
    assert [host.name for host in pool.available()] == ["a"]
    dead.clear()
    now[0] = 10.0
    assert pool.after_failure() == ([], [])  # it answers again, but cools down
    now[0] = 31.0
    assert pool.after_failure() == ([], ["b"])
    assert [host.name for host in pool.available()] == ["a", "b"]


class Ssh:
    """What `ssh host true` does: the code and words, or no answer."""

    def __init__(self, words, answer, happened):
        self.words, self.answer, self.happened, self.returncode = words, answer, happened, None

    def communicate(self, timeout=None):
        self.happened.append((self.words[-2], timeout and round(timeout, 6)))
        if self.answer is None and timeout is not None:
            raise subprocess.TimeoutExpired(self.words, timeout)
        self.returncode, said = self.answer or (-9, b"")
        return None, said

    def kill(self):
        self.happened.append("killed")


@pytest.mark.parametrize(("agent", "options"), [(None, ()), ("/s", ("-p", "22"))])
def test_hosts_are_asked_at_once_and_for_three_seconds_in_all(monkeypatch, agent, options):
    happened, started, now = [], [], [100.0]
    answers = {"a": (0, b""), "b": (255, b"one\nno route\n"), "c": (3, b" "), "d": None, "e": None}

    def start(words, **given):
        assert given == {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        started.append(words)
        return Ssh(words, answers[words[-2]], happened)

    def passes():
        now[0] += 1.0
        return now[0] - 1.0

    monkeypatch.setattr(pools.hosts_module, "is_local", lambda name: name == "here")
    monkeypatch.setattr(pools.subprocess, "Popen", start)
    monkeypatch.setattr(pools.time, "monotonic", passes)
    found = pools.probe_by_ssh([*answers, "here"], agent, options)
    assert found == {
        "b": "no route", "c": "ssh ended with exit code 3", "d": "no answer within 3 s", "e": "no answer within 3 s",
    }  # fmt: skip
    ours = [] if agent else ["-o", "BatchMode=yes", "-o", "ConnectTimeout=2"]
    assert started == [[agent or "ssh", *options, *ours, name, "true"] for name in answers]
    assert happened == [
        ("a", 2.0), ("b", 1.0), ("c", 0.1), ("d", 0.1), "killed", ("d", None), ("e", 0.1), "killed", ("e", None),
    ]  # fmt: skip


def test_without_ssh_no_host_is_reached(monkeypatch):
    def start(words, **given):
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(pools.hosts_module, "is_local", lambda name: False)
    monkeypatch.setattr(pools.subprocess, "Popen", start)
    assert pools.probe_by_ssh(["a", "b"], None, ()) == dict.fromkeys("ab", "ssh: No such file or directory")
