"""Parts of the launcher that only whole jobs went through: its options, commands, pages of beats, folders of jobs."""

import ctypes
import json
import os
import pathlib
import socket
import struct
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import click
import pytest
from dbrdist_launch import codes, heartbeat, linux
from dbrdist_launch.channel import Channel
from dbrdist_launch.doctor import checks
from dbrdist_launch.doctor.findings import Findings
from dbrdist_launch.errors import LaunchError
from dbrdist_launch.launcher import cli
from dbrdist_launch.launcher import session as sessions
from dbrdist_launch.launcher.judgement import report, stalls
from dbrdist_launch.launcher.judgement.ranks import Rank
from dbrdist_launch.launcher.judgement.report import Failure
from dbrdist_launch.launcher.preparation import program
from dbrdist_launch.launcher.records import jobs
from dbrdist_launch.launcher.records.jobs import JobFolder
from dbrdist_launch.launcher.records.runs import LaunchFolder
from dbrdist_launch.launcher.running.listener import ConnectionListener
from dbrdist_launch.loop import Loop
from dbrdist_launch.messages import Answer, Ask, Beat
from dbrdist_launch.rank import child
from dbrdist_launch.rank.outputs import Outputs

STEP = 2.0**-10

# ---- the page of beats ----------------------------------------------------------------------------------------------


def page_of(writer):
    """(number of beats, step, fields) as a supervisor reads them from the page."""
    found = heartbeat.read(bytes(writer.page))
    return found.number, found.step, found.fields


def test_the_page_is_found_by_its_path_or_by_the_descriptor_that_came_with_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "page").write_bytes(bytes(4096))
    page, other = os.memfd_create("dbrdist-heartbeat"), os.memfd_create("another")
    for descriptor in (page, other):
        os.ftruncate(descriptor, 4096)
    monkeypatch.delenv("DBRDIST_HEARTBEAT", raising=False)
    assert heartbeat._open() is None and capsys.readouterr().err == ""
    own, stale = f"/proc/self/fd/{page}", f"/proc/self/fd/{other}"
    for words, is_found in (
        (f"{tmp_path}/page", True), (own, True), (f"{own},{other}", True), (f"{stale},{page}", True),
        (f"/proc/self/fd/9999,{page}", True), (f",{page}", True), (f"{stale},{other}", False), (stale, False),
        (f"{tmp_path}/none,{other}", False),
    ):  # fmt: skip
        monkeypatch.setenv("DBRDIST_HEARTBEAT", words)
        writer = heartbeat._open()
        assert (writer is not None) == is_found, words
        said = (
            ""
            if is_found
            else f"heartbeats do not reach the launcher: {words.partition(',')[0]} cannot be opened here\n"
        )
        assert capsys.readouterr().err == (said and f"dbrdist-launch: {said}")
        if writer is not None:
            writer.beat(7, {})
            raw = (tmp_path / "page").read_bytes() if words.endswith("page") else os.pread(page, 16, 0)
            assert struct.unpack("=qq", raw[:16]) == (1, 7)
    for descriptor in (page, other):
        os.close(descriptor)


def test_fields_are_written_ten_times_a_second_at_most(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    (tmp_path / "page").write_bytes(bytes(4096))
    writer = heartbeat._Writer(str(tmp_path / "page"))
    writer.beat(0, {"a": 0})
    began = now[0]
    for after, seen in ((0.1 - STEP, 0), (0.1 + STEP, 2), (0.15, 2), (0.25, 4)):
        now[0] = began + after
        writer.beat(writer.step + 1, {"a": writer.count})
        assert page_of(writer) == (writer.count, writer.step, {"a": seen})
    for step, kept in ((None, 4), (0.5, 0), ("x", -1), (1 << 70, (1 << 63) - 1), (-(1 << 70), -(1 << 63))):
        writer.beat(step, {})
        assert page_of(writer)[1] == kept


# ---- the user's command ---------------------------------------------------------------------------------------------


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder on PATH, and what makes a file in it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def make(name, text="", mode=0o755):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
        return str(tmp_path / name)

    return make


def test_commands_become_absolute(tools, monkeypatch):
    tool = tools("tool", "#!/bin/sh\n")
    for word in ("tool", "./tool", tool):
        assert program.resolve((word, "-x")) == ((tool, "-x"), None)
    monkeypatch.delenv("PATH")
    monkeypatch.setattr(program.os, "defpath", os.path.dirname(tool))
    assert program.resolve(("tool",)).command == (tool,)
    beside = os.path.join(os.path.dirname(sys.executable), "python")
    assert program.resolve(("python", "t.py")) == ((beside, "t.py"), beside)
    assert program.resolve(("python2.99",)) == ((sys.executable,), sys.executable)


def test_the_interpreter_of_a_script_is_in_its_first_line(tools):
    python = tools("python3.11")
    for text, found in (
        (f"#!{python}\n", python), (f"#! {python} -u\n", python), ("#!/usr/bin/env python3.11\n", python),
        ("#!/usr/bin/env -S x python3.11\n", python), ("#!/usr/bin/env python3.99\n", None), ("#!/bin/sh\n", None),
        (f"{python}\n", None), (f"x #!{python}\n", None), ("#!\n", None), ("", None), (f"#!{python}w\n", None),
    ):  # fmt: skip
        assert program.resolve((tools("script", text),)).interpreter == found, text
    assert program._interpreter_of("/no/such/file") is None


def test_commands_that_cannot_run_are_refused(tools):
    hint = r"; for a Python script: dbrdist-launch -n 4 python"
    with pytest.raises(LaunchError, match="expected a command"):
        program.resolve(())
    tools("plain", mode=0o644)
    tools("plain.py", mode=0o644)
    os.mkdir("folder")
    for word, code, words in (
        ("./none", codes.COMMAND_NOT_FOUND, "the command './none' was not found$"),
        ("none", codes.COMMAND_NOT_FOUND, "the command 'none' was not found$"),
        ("none.py", codes.COMMAND_NOT_FOUND, f"the command 'none.py' was not found{hint} none.py$"),
        ("./folder", codes.COMMAND_NOT_RUNNABLE, r"the command './folder' \(.*/folder\) is not executable$"),
        ("./plain", codes.COMMAND_NOT_RUNNABLE, r"the command './plain' \(.*/plain\) is not executable$"),
        ("./plain.py", codes.COMMAND_NOT_RUNNABLE, rf"\(.*/plain.py\) is not executable{hint} ./plain.py$"),
    ):
        with pytest.raises(LaunchError, match=words) as caught:
            program.resolve((word,))
        assert caught.value.code == code


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (FileNotFoundError(2, "No such file or directory"), 127, "'x': No such file or directory: 'x'"),
        (FileNotFoundError(2, "No such file or directory", "/gone"), 127, "'x': No such file or directory: '/gone'"),
        (PermissionError(13, "Permission denied", b"/y\xff"), 126, "'x': Permission denied: '/y\\udcff'"),
        (OSError(8, "Exec format error"), 127, "'x': Exec format error: 'x'"),
    ],
)
def test_a_program_that_cannot_start_says_why(monkeypatch, capsys, error, code, said):
    done = []

    def cannot(*args):
        done.append(args)
        raise error

    monkeypatch.setattr(child.os, "execvpe", cannot)
    monkeypatch.setattr(child.os, "chdir", lambda path: done.append(path))
    monkeypatch.setattr(child.os, "_exit", lambda status: done.append(status))
    for directory in (None, "/d"):
        done.clear()
        child._run(["x", "y"], {"A": "1"}, directory, SimpleNamespace(hand_on=lambda: None))
        assert done == [*([directory] if directory else []), ("x", ["x", "y"], {"A": "1"}), code]
        assert capsys.readouterr().err == f"cannot run {said}\n"


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


# ---- folders of jobs ------------------------------------------------------------------------------------------------


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "dbrdist-launch"


def test_a_job_has_a_folder_that_nobody_else_takes_or_deletes(runtime, monkeypatch):
    """Two containers may share it, and have the same process ids."""
    monkeypatch.setattr(jobs, "bases", lambda: [str(runtime)])
    one, other = JobFolder("name", ["a", "b"], "token"), JobFolder("name", ["a", "b"], "other")
    assert one.folder != other.folder and sorted(os.listdir(one.folder)) == ["job.json", "token"]
    content = json.loads(pathlib.Path(one.folder, "job.json").read_text())
    assert content.pop("started") == pytest.approx(time.time(), abs=60)
    assert content == {"job": "name", "pid": os.getpid(), "command": ["a", "b"], "token": "token"}
    assert pathlib.Path(one.folder, "token").read_text() == "token"
    found = {job["token"]: job for job in jobs.running()}
    assert sorted(found) == ["other", "token"] and found["token"]["socket"] == f"{one.folder}/socket"
    one.close()
    assert not os.path.exists(one.folder) and [job["token"] for job in jobs.running()] == ["other"]
    other.close()
    assert jobs.running() == [] and os.listdir(runtime) == []


def test_folders_of_dead_launchers_are_taken_away(runtime, monkeypatch):
    """A launcher that lives holds a lock, whatever its number means here."""
    monkeypatch.setattr(jobs, "bases", lambda: [str(runtime)])
    alive = JobFolder("alive", ["x"], "t")
    for name, text in (("1", '{"pid": 1}'), ("3", "{}"), (".new", "")):
        (runtime / name).mkdir(mode=0o700)
        (runtime / name / "job.json").write_text(text)
    (runtime / "others").mkdir(mode=0o777)
    (runtime / "others").chmod(0o777)
    assert [job["job"] for job in jobs.running()] == ["alive"]
    assert sorted(os.listdir(runtime)) == sorted([".new", "others", os.path.basename(alive.folder)])
    alive.close()


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_jobs_in_a_folder_of_somebody_else_are_not_listed(tmp_path, monkeypatch, mode):
    monkeypatch.setattr(jobs, "bases", lambda: [str(tmp_path / "nowhere"), str(tmp_path / "b")])
    (tmp_path / "b").mkdir()
    (tmp_path / "b").chmod(0o700)
    monkeypatch.setattr(jobs, "base", lambda: str(tmp_path / "b"))
    one = JobFolder("\x1b]0;title\x07", ["x"], "t")
    (tmp_path / "b").chmod(mode)
    assert len(jobs.running()) == (mode == 0o700)
    one.close()
    assert jobs.plain("\x1b]0;a\x07\tb\n\x9b") == "?]0;a?\tb\n?"


def test_jobs_of_every_login_are_looked_for(monkeypatch, tmp_path):
    places = {f"/tmp/dbrdist-launch-{os.getuid()}", f"/run/user/{os.getuid()}/dbrdist-launch"}
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert set(jobs.bases()) == places and jobs.base().startswith("/tmp/")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert set(jobs.bases()) == {*places, f"{tmp_path}/dbrdist-launch"} and jobs.base().startswith(str(tmp_path))


@pytest.mark.parametrize("pieces", [1, 2, 0])
def test_a_launcher_is_asked_and_its_answer_may_come_in_pieces(tmp_path, pieces):
    path, heard = str(tmp_path / "s"), []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def answer():
            connection, _ = server.accept()
            here, there = socket.socketpair()
            with connection, here, there:
                while not heard:
                    heard.extend(Channel(connection).receive() or [])
                Channel(here).send(Answer("rank 0 läuft\n".encode()))
                raw = there.recv(4096)
                connection.setblocking(True)
                for k in range(pieces):
                    connection.sendall(raw[k * len(raw) // pieces : (k + 1) * len(raw) // pieces])
                    time.sleep(0.02)

        other = threading.Thread(target=answer)
        other.start()
        found = jobs.ask({"socket": path, "token": "t"}, "state")
        other.join(20)
    assert found == ("rank 0 läuft\n" if pieces else "no answer")
    assert heard == [Ask("t", "state")]
    os.unlink(path)
    assert jobs.ask({"socket": path, "token": "t"}, "state").startswith(
        "no answer: No such file or directory; the job may"
    )


# ---- options --------------------------------------------------------------------------------------------------------


def option(name):
    return next(parameter for parameter in cli.launch.params if parameter.name == name)


def test_what_options_take():
    for name in ("end_on", "mpi_option", "ssh_option"):
        assert option(name).multiple, name
    assert not any(option(name).multiple for name in ("backend", "port", "quiet", "tee"))
    for name in ("quiet", "timestamps", "verbose", "stacks", "requeue", "print", "inject", "view"):
        assert option(name).is_flag, name
    assert option("inject").secondary_opts == ["--no-inject"] and option("quiet").secondary_opts == []
    assert option("config").is_eager and not option("tee").is_eager
    assert option("port").type.max == 65535 and option("port").type.min == 0
    context = click.Context(cli.launch)
    assert context.command.parse_args(context, ["--ssh-option", "a=b", "--ssh-option", "c=d", "-n", "2", "x"]) == []
    assert context.params["ssh_option"] == ("a=b", "c=d") and context.params["quiet"] is False


def test_the_help_shows_options_in_groups_with_defaults():
    context = click.Context(cli.launch, terminal_width=200, max_content_width=200)
    text = " ".join(cli.launch.get_help(context).split())
    for words in (
        "--start-retries N Try again after a start that hangs, up to N times. [default: 2;", "--no-inject",
        "--port PORT TCP port of the side channel", "--ssh-option K=V An option for ssh -o; repeatable.",
        "--quiet Show only rank 0's output and failures.",
    ):  # fmt: skip
        assert words in text, words
    assert text.count("[default:") < 15 and "default: ()" not in text and "[default: None" not in text
    assert text.index("--timestamps") < text.index("--heartbeat-timeout") < text.index("--max-restarts")


@pytest.mark.parametrize("name", ["doctor", "ps", "stacks", "stop"])
def test_the_help_of_a_command_names_it(capsys, name):
    assert cli.run([name, "-h"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: dbrdist-launch {name} ")


def test_options_that_other_launchers_have_are_named():
    context = click.Context(cli.launch)
    word, meant = next(iter(cli._NEIGHBOURS.items()))
    with pytest.raises(click.UsageError, match=f"No such option '{word}'. Did you mean '{meant}'"):
        cli.launch.parse_args(context, [word, "3", "x"])
    with pytest.raises(click.NoSuchOption):
        cli.launch.parse_args(click.Context(cli.launch), ["--no-such-option", "x"])


# ---- what is read and judged ----------------------------------------------------------------------------------------


def test_ssh_knows_names_that_its_configuration_turns_into_others(monkeypatch):
    asked = []
    monkeypatch.setattr(sessions.hosts, "resolve", lambda name: "1.2.3.4" if name == "known" else None)
    one = SimpleNamespace(settings=SimpleNamespace(ssh=None))
    for lines, is_known in (
        ("user me\nhostname known\nsendenv LANG LC_* X\nbare\n", True), ("hostname alias\n", False),
        ("hostname unknown\n", False), ("user me\n", False), ("", False),
    ):  # fmt: skip

        def run(words, lines=lines, **options):
            asked.append(words)
            return SimpleNamespace(stdout=lines)

        monkeypatch.setattr(sessions.subprocess, "run", run)
        assert sessions.Session._ssh_knows(one, "alias") is is_known
    assert asked == [["ssh", "-G", "alias"]] * 5
    for error in (OSError(), subprocess.TimeoutExpired("ssh", 5)):
        monkeypatch.setattr(sessions.subprocess, "run", lambda *args, error=error, **options: raise_(error))
        assert not sessions.Session._ssh_knows(one, "alias")


def raise_(error):
    raise error


def test_a_port_that_another_has_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        loop = Loop()
        with pytest.raises(LaunchError, match=rf"cannot listen on port {port} of 127.0.0.1: .*; omit --port"):
            ConnectionListener(loop, "t", None, None, None, ("127.0.0.1",), port)
        with pytest.raises(LaunchError, match=rf"cannot listen on port {port} of all interfaces: "):
            ConnectionListener(loop, "t", None, None, None, ("127.0.0.1", "127.0.0.2"), port)
        loop.close()


@pytest.mark.parametrize(("is_there", "may_write"), [(True, True), (True, False), (False, True)])
def test_a_record_needs_a_folder_to_write_to(tmp_path, monkeypatch, is_there, may_write):
    monkeypatch.setattr(os, "access", lambda path, mode: may_write and mode == os.W_OK)
    path = str((tmp_path if is_there else tmp_path / "none") / "record.json")
    if is_there and may_write:
        LaunchFolder._check_record(None, path)
        LaunchFolder._check_record(None, "record.json")
    else:
        with pytest.raises(LaunchError, match="does not exist or is not writable"):
            LaunchFolder._check_record(None, path)


def beat(**change):
    return Beat(
        **{"state": "S", "traced": False, "beats": 1, "paused": False, "step": 3, "fields": {}, "age": None} | change
    )


def test_a_rank_is_stopped_from_the_first_beat_that_says_so():
    rank = Rank(0, "a", None)
    for now, state, traced, since in (
        (1.0, "S", False, None), (2.0, "T", False, 2.0), (3.0, "T", False, 2.0), (4.0, "T", True, None),
        (5.0, "R", False, None), (6.0, "t", True, None),
    ):  # fmt: skip
        rank.take_beat(beat(state=state, traced=traced), now)
        assert rank.stopped_since == since
    rank.take_beat(beat(fields={"loss": 1}, age=0.5), 9.0)
    rank.take_beat(beat(), 10.0)
    assert (rank.fields, rank.beat_at, rank.step) == ({"loss": 1}, 8.5, 3)


def test_how_ranks_are_described():
    rank = Rank(0, "a", None)
    assert rank.activity(10.0).endswith(", no heartbeats")
    rank.take_beat(beat(age=0.0), 9.0)
    assert rank.activity(10.5).endswith(", step 3, last heartbeat 1.5 s ago")
    rank.take_beat(beat(step=-1), 9.0)
    assert "step" not in rank.activity(10.5)


def test_times_in_a_report_are_in_milliseconds():
    ranks = [Rank(number, "a", None) for number in (0, 1)]
    for rank in ranks:
        rank.beat_at, rank.step = 97.12345, 4
    failure = Failure("exit", 1, "a", 1, "m")
    report.complete(failure, ranks, 100.0, 50.00012, False)
    assert (failure.seconds, failure.last_beat_seconds, failure.step) == (50.0, 2.877, 4)


def test_the_oldest_beat_is_that_of_the_lowest_rank_among_equals():
    ranks = {number: Rank(number, "a", None) for number in range(4)}
    for number, at in ((0, 7.0), (1, 5.0), (2, 5.0), (3, 9.0)):
        ranks[number].beat_at = at
    assert stalls._oldest(ranks, [3, 2, 1, 0]) == 1 and stalls._oldest(ranks, [3, 0]) == 0


def test_the_end_of_an_interpreter_is_told_with_what_follows_it():
    lines = ["zero", "one", "50%| Fatal Python error: Aborted", "", "Thread 1:", "  File x", ""]
    text = "Fatal Python error: Aborted\n\nThread 1:\n  File x"
    assert report.last_traceback(lines) == (text, "Fatal Python error: Aborted", True, True)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.5, "0.5 B"), (999, "999 B"), (1000, "1 KB"), (2_345_678, "2.35 MB"), (1e9, "1 GB"), (5e12, "5 TB")],
)
def test_amounts_of_bytes(number, text):
    assert checks._bytes(number) == text


def test_the_measured_speed_is_said():
    findings = Findings()
    entry = {
        "ranks": 4, "latency_seconds": 1.5e-6, "bandwidth_bytes_per_second": 12e9, "allreduce_latency_seconds": 3e-6,
        "allreduce_bandwidth_bytes_per_second": 5e9, "interface": "eth0",
    }  # fmt: skip
    facts = [{"host": "a", "interfaces": [{"name": n, "address": f"10.0.0.{k}", "speed": speed} for k, (n, speed) in
              enumerate((("eth0", 1000), ("eth1", 1000), ("ib0", None)))]}]  # fmt: skip
    checks.network(findings, entry, ["10.0.0.0", "10.0.0.2", "10.9.9.9"], facts)
    said = json.dumps(findings.as_dict())
    assert "MPI's TCP connections on a use eth0 (10.0.0.0, 1000 Mbit/s)" in said and "a faster one" not in said
    assert "on a use ib0 (10.0.0.2)" in said and "on ? use 10.9.9.9 (10.9.9.9)" in said
    facts[0]["interfaces"][1]["speed"] = 1001
    checks.network(findings, entry, ["10.0.0.0"], facts)
    assert "a has a faster interface: eth1 (1001 Mbit/s)" in json.dumps(findings.as_dict())
    assert "between two ranks: latency 1.5 us, bandwidth 12 GB/s" in said
    assert "over 4 ranks: latency 3.0 us, bandwidth 5 GB/s" in said


def test_a_pipe_in_which_nothing_has_gathered_is_watched_again():
    read, write = os.pipe()
    loop, came = Loop(), []
    outputs = Outputs(loop, {read: "out"}, 1 << 20, lambda data, stream: came.append(bytes(data)))
    outputs._wait(read)
    outputs.gather_until = 5.0
    outputs.look(5.0)
    assert came == [] and not outputs.waiting
    os.write(write, b"x")
    loop.turn(1.0)
    assert came == [b"x"]
    outputs.gather_until = 9.0  # others are gathered: they are all looked at then
    outputs._wait(read)
    outputs._read(read)
    assert outputs.waiting == {read}
    loop.close()
    os.close(write)
    os.close(read)


def test_the_last_32_kib_of_a_ranks_output_are_kept_for_the_report():
    rank = Rank(0, "a", None)
    for number in range(3):
        rank.take_output("err", b"%d" % number * 20000)
    assert rank.tails["err"] == b"1" * 12768 + b"2" * 20000
    for length in (32767, 32768, 32769):
        rank.tails["err"] = b"old"
        rank.take_output("err", b"x" * length)
        assert rank.tails["err"] == (b"d" if length == 32767 else b"") + b"x" * min(length, 32768)
