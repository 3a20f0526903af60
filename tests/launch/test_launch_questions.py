"""What is asked of a running job, where it is found, how its starter ends, and what a page of heartbeats holds."""

import json
import os
import signal
import stat
import struct
import subprocess
from types import SimpleNamespace

import pytest
from dbrdist_launch import codes, heartbeat, limits
from dbrdist_launch.errors import LaunchError
from dbrdist_launch.inherited import Inherited
from dbrdist_launch.launcher.judgement.ranks import Rank
from dbrdist_launch.launcher.records import jobs
from dbrdist_launch.launcher.records.jobs import JobFolder
from dbrdist_launch.launcher.running import process, questions
from dbrdist_launch.launcher.running.process import StarterProcess
from dbrdist_launch.launcher.running.questions import Questions
from dbrdist_launch.messages import Exit
from dbrdist_launch.rank.child import stack_signal
from test_launch_attempt import STEP, Clock
from test_launch_attempt import Channel as Kept

# ---- questions ------------------------------------------------------------------------------------------------------


class Asker(Kept):
    """The channel of who asks."""

    def __init__(self):
        super().__init__()
        self.set = []
        self.socket = SimpleNamespace(setblocking=self.set.append, settimeout=self.set.append)


@pytest.fixture
def asked(monkeypatch):
    clock = Clock(monkeypatch)
    ranks = {number: Rank(number, "ab"[number % 2], Kept(), number % 2) for number in (2, 0, 1)}
    ranks[1].exit = Exit(code=3, signal=0, ours=False)
    said, stops = [], []
    one = Questions(ranks, said.append, lambda: stops.append(1))
    one.clock, one.said, one.stops = clock, said, stops
    return one


def test_stacks_are_sent_to_those_who_asked_once_all_have_come(asked):
    first, second = Asker(), Asker()
    asked.ranks[0].stacks = "old"
    asked.hear(first, "stacks", 1.0)
    asked.hear(second, "stacks", 1.0)
    assert [asked.ranks[k].channel.kinds() for k in range(3)] == [["ask-stacks"] * 2, [], ["ask-stacks"] * 2]
    assert asked.ranks[0].stacks is None and asked.shown_at == asked.clock.now + limits.STACKS_SECONDS
    asked.ranks[0].stacks = " File x\n\n"
    assert not asked.have_stacks()
    asked.look(asked.shown_at - STEP)
    assert first.sent == [] and asked.shown_at is not None
    asked.ranks[2].stacks = ""
    asked.look(asked.clock.now)
    text = (
        f"rank 0 on a, running, no heartbeats:\n File x\nrank 1 on b, ended with exit code 3:\n{questions._NONE}\n"
        f"rank 2 on a, running, no heartbeats:\n{questions._NONE}"
    )
    assert first.sent == [("answer", {"data": text.encode()})] == second.sent and first.set == [True, 1.0]
    assert first.is_closed and second.is_closed and asked.curious == [] and asked.said == []
    assert asked.shown_at is None and asked.ranks[0].stacks is None
    asked.look(asked.clock.now + 99.0)
    assert asked.said == []


def test_stacks_are_printed_where_nobody_asked_or_when_their_time_is_over(asked):
    asked.show_stacks()
    until = asked.shown_at
    asked.look(until - STEP)
    assert asked.said == []
    asked.look(until)
    (text,) = asked.said
    assert text.count(questions._NONE) == 3 and text.startswith("rank 0 on a, ")


def test_what_ranks_do_is_answered_at_once_and_a_stop_is_passed_on(asked):
    first, second = Asker(), Asker()
    asked.hear(first, "stop", 1.0)
    assert first.sent == [("answer", {"data": b"asked to save and stop"})] and first.is_closed and asked.stops == [1]
    asked.ranks[0].tails["out"] = b"x" * 300
    asked.hear(second, "state", 12.4)
    ((kind, fields),) = second.sent
    lines = fields["data"].decode().splitlines()
    assert kind == "answer" and lines[0] == "--- 3 ranks, 12 s" and len(lines) == 5 and second.is_closed
    assert max(map(len, lines)) == 199 and asked.stops == [1] and asked.curious == []
    third = Asker()
    questions._answer(third, "é" * limits.MESSAGE_BYTES)
    assert third.sent == [("answer", {"data": "é".encode() * (limits.MESSAGE_BYTES // 2)})]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "running, no heartbeats"), ({"count": 1}, "running"), ({"count": 1, "step": 0}, "running, step 0"),
        ({"count": 2, "step": 7, "beat_at": 98.5}, "running, step 7, last heartbeat 1.5 s ago"),
        ({"leaving": True}, "leaving, no heartbeats"), ({"state": "T"}, "stopped, no heartbeats"),
        ({"state": "T", "traced": True}, "in a debugger, no heartbeats"),
        ({"connected": False, "traced": True}, "lost"),
        ({"exit": Exit(code=137, signal=9), "connected": False}, "ended with SIGKILL"),
        ({"exit": Exit(code=3, signal=0), "count": 1, "step": 2}, "ended with exit code 3, step 2"),
    ],
)  # fmt: skip
def test_what_a_rank_is_doing(changes, words):
    one = Rank(0, "a", None)
    for name, value in changes.items():
        setattr(one, name, value)
    assert one.activity(100.0) == words


# ---- jobs of this machine -------------------------------------------------------------------------------------------


def test_a_job_is_found_by_its_name_or_number(monkeypatch):
    found = [{"job": "a", "pid": 7, "id": "x1"}, {"job": "b", "pid": 8, "id": "x2"}]
    monkeypatch.setattr(jobs, "running", lambda: found)
    assert jobs.find("b") is found[1] and jobs.find("7") is found[0] and jobs.find("x2") is found[1]
    found.append({"job": "b", "pid": 9, "id": "x3"})
    with pytest.raises(LaunchError, match=r"^2 running jobs are called 'b'; give a process id or the job.s id: 8"):
        jobs.find("b")
    found.pop()
    with pytest.raises(LaunchError, match=r"^no job 'c' is running on this machine; running jobs: a \(7\), b \(8\)$"):
        jobs.find("c")
    found.clear()
    with pytest.raises(LaunchError, match=r"running jobs: none$"):
        jobs.find("a")


def test_a_job_is_described_with_its_ranks(monkeypatch):
    monkeypatch.setattr(jobs, "time", SimpleNamespace(time=lambda: 107.4))
    monkeypatch.setattr(jobs, "ask", lambda job, what: f"{what}\nmore")
    job = {"job": "a", "pid": 7, "id": "x1", "command": ["python", "x" * 200], "started": 100.0}
    assert jobs.describe(job) == f"a  pid 7  id x1  7 s  python {'x' * 93}\n  state\n  more"
    del job["started"]
    assert jobs.describe(job).startswith("a  pid 7  id x1  0 s  ")


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o770, 0o701, 0o704])
def test_a_folder_that_others_may_enter_is_not_used(tmp_path, monkeypatch, mode):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert jobs.base() == f"{tmp_path}/dbrdist-launch"
    (tmp_path / "dbrdist-launch").mkdir()
    (tmp_path / "dbrdist-launch").chmod(mode)
    one = JobFolder("a", ["x"], "t")
    assert (one.folder is not None) == (one.socket is not None) == (mode == 0o700)
    if one.folder is not None:
        path = one.ssh_with("my ssh", ("-o", "a b"))
        with open(path) as file:
            assert file.read() == "#!/bin/sh\nexec 'my ssh' -o 'a b' \"$@\"\n"
        assert [stat.S_IMODE(os.stat(p).st_mode) for p in (path, one.folder)] == [0o700, 0o700]
    else:
        with pytest.raises(LaunchError, match="--ssh-option with spaces needs a folder for a script"):
            one.ssh_with("ssh", ())
    one.close()
    assert os.listdir(tmp_path / "dbrdist-launch") == []


@pytest.mark.parametrize("runtime", [None, "", "/nowhere"])
def test_without_a_runtime_folder_that_of_the_user_is_taken(monkeypatch, runtime):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    if runtime is not None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    assert jobs.base() == f"/tmp/dbrdist-launch-{os.getuid()}"


# ---- the starter ----------------------------------------------------------------------------------------------------


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


# ---- heartbeats -----------------------------------------------------------------------------------------------------


class Page(bytearray):
    """A page that keeps how long its fields were said to be while they were written."""

    lengths = ()

    def __setitem__(self, at, value):
        self.lengths = (*self.lengths, struct.unpack_from("=I", self, 28)[0])
        super().__setitem__(at, value)


@pytest.fixture
def writer(tmp_path):
    (tmp_path / "page").write_bytes(bytes(heartbeat.PAGE_BYTES))
    one = heartbeat._Writer(str(tmp_path / "page"))
    one.page = Page(heartbeat.PAGE_BYTES)
    return one


def test_a_reader_sees_whole_fields_or_none(writer):
    writer.write_fields({"a": 1})
    writer.write_fields({"b": "long"})
    assert writer.page.lengths == (0, 0) and heartbeat.read(writer.page).fields == {"b": "long"}
    room = heartbeat.PAGE_BYTES - 32
    for length, is_written in ((room - 9, True), (room - 8, False)):
        before = heartbeat.read(writer.page).fields
        fields = {"a": "x" * length}
        writer.write_fields(fields)
        assert (len(json.dumps(fields)) <= room) is is_written
        assert heartbeat.read(writer.page).fields == (fields if is_written else before)
    loop = []
    loop.append(loop)
    for odd in ({"a": loop}, {(1,): 2}):
        writer.write_fields(odd)
        assert heartbeat.read(writer.page).fields == {"a": "x" * (room - 9)}
    writer.write_fields({"a": {3}})
    assert heartbeat.read(writer.page).fields == {"a": "{3}"}


@pytest.mark.parametrize("data", [b"[1]", b"{", b"[" * 4000, b"\xff"])
def test_fields_that_are_being_written_are_left_out(data):
    page = bytearray(heartbeat.PAGE_BYTES)
    page[32 : 32 + len(data)] = data
    struct.pack_into("=qqd", page, 0, 3, 4, 5.0)
    for length in (0, len(data), heartbeat.PAGE_BYTES - 31, 1 << 31):
        struct.pack_into("=I", page, 28, length)
        assert heartbeat.read(page) == (3, 4, 5.0, False, {})


def test_a_rank_that_has_not_told_a_step_has_none(writer):
    assert (writer.count, writer.step) == (0, -1)
    writer.beat(None, {})
    assert heartbeat.read(writer.page)[:2] == (1, -1)
    writer.pause()
    assert heartbeat.read(writer.page).paused
    for number, (step, found) in enumerate(
        ((7, 7), (0.5, 0), (-1.5, -1), ("8", 8), ("x", -1), (float("nan"), -1), (float("inf"), -1), ([], -1),
         (1 << 70, (1 << 63) - 1), (-1 << 70, -(1 << 63)), (True, 1)), 2,
    ):  # fmt: skip
        writer.beat(step, {})
        assert heartbeat.read(writer.page)[:2] == (number, found) and not heartbeat.read(writer.page).paused


# ---- codes ----------------------------------------------------------------------------------------------------------


def test_exit_codes_are_those_of_the_help():
    from dbrdist_launch.launcher.cli import _EPILOG

    said = dict(
        part.strip().split(" ", 1)
        for part in _EPILOG.partition("Exit codes: ")[2].partition("; ")[0].replace("\n", " ").split(",")
    )
    assert {int(number): words for number, words in said.items() if number != "128+N"} == {
        codes.DONE: "done", codes.USAGE: "refused", codes.HOST_LOST: "host lost", codes.NOT_STARTED: "could not start",
        codes.PREEMPTED: "stopped on request and saved", codes.STALLED: "stalled or out of time",
        codes.COMMAND_NOT_RUNNABLE: "command not executable", codes.COMMAND_NOT_FOUND: "command not found",
    }  # fmt: skip
    assert codes.from_signal(9) == 137 and codes.LOST_PEER == 14


def test_the_signal_for_stacks_is_one_of_those_that_nobody_uses():
    assert signal.SIGRTMIN < stack_signal() < signal.SIGRTMAX


def test_nobody_was_silent_while_the_launcher_slept():
    one = Rank(0, "a", None, heard_at=10.0)
    one.forgive(2.5)
    assert (one.heard_at, one.beat_at, one.stopped_since) == (12.5, None, None)
    one.beat_at, one.stopped_since = 9.0, 0.0
    one.forgive(4.0)
    assert (one.heard_at, one.beat_at, one.stopped_since) == (16.5, 13.0, 4.0)
