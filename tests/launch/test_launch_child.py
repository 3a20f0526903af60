"""The program of a rank as a child of its supervisor: its pipes, its session, its signals, and what it is told."""

import fcntl
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from dbrdist_launch import limits, linux
from dbrdist_launch import main as mains
from dbrdist_launch.launcher.process import StarterProcess
from dbrdist_launch.rank import child as children
from dbrdist_launch.rank import main as rank_main
from dbrdist_launch.rank import supervisor as supervisors
from dbrdist_launch.rank.child import Child, stack_signal
from dbrdist_launch.rank.supervisor import Supervisor
from test_launch_attempt import Channel as Kept
from test_launch_processes import in_child, until

# Python warns of forks beside threads, as those of the test runner; what is forked here calls the kernel alone.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
SCRIPT = """
echo "$A" "$PWD"
echo "$DBRDIST_HEARTBEAT" "$DBRDIST_LAUNCH_EVENTS"
cut -d' ' -f6 /proc/$$/stat
echo $$
echo events > /proc/$$/fd/"${DBRDIST_LAUNCH_EVENTS%,*}"
readlink /proc/$$/fd/"${DBRDIST_HEARTBEAT#*,}"
echo error >&2
exec grep -E '^Sig(Ign|Blk):' /proc/self/status
"""  # the shell itself blocks signals now and then


def all_of(descriptor):
    """What comes out of a pipe until nobody can write to it any more."""
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


@pytest.fixture
def page():
    made = os.memfd_create("dbrdist-heartbeat")
    yield made
    os.close(made)


@pytest.mark.parametrize("ignored", [set(), {signal.SIGHUP, signal.SIGUSR1}])
def test_a_program_has_a_session_and_pipes_of_its_own(tmp_path, page, ignored):
    mask, told = signal.pthread_sigmask(signal.SIG_BLOCK, []), {"A": "b c", "PATH": os.environ["PATH"]}
    one = Child(["sh", "-c", SCRIPT], told, str(tmp_path), page, ignored)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    first, names, session, pid, held, *masks = all_of(one.out).decode().splitlines()
    assert first == f"b c {tmp_path}" and int(session) == int(pid) == one.pid
    words, _, events = names.partition(" ")
    assert words.startswith(f"/proc/{os.getpid()}/fd/{page},") and int(words.partition(",")[2]) >= 300
    assert events.endswith(f",{stack_signal()}") and int(events.partition(",")[0]) >= 300
    assert held.startswith("/memfd:dbrdist-heartbeat")
    bits = {line[:6]: int(line.split()[1], 16) for line in masks}
    ours = (*children._CAUGHT, signal.SIGPIPE, signal.SIGCHLD)
    assert {number for number in ours if bits["SigIgn"] >> (number - 1) & 1} == ignored
    assert not any(bits["SigBlk"] >> (number - 1) & 1 for number in ours)
    assert (all_of(one.err), all_of(one.events)) == (b"error\n", b"events\n")
    assert os.waitstatus_to_exitcode(os.waitpid(one.pid, 0)[1]) == 0


def test_a_program_that_is_not_there_ends_with_127(page):
    one = Child(["/nowhere/program"], {}, None, page, set())
    assert os.waitstatus_to_exitcode(os.waitpid(one.pid, 0)[1]) == 127
    assert all_of(one.out) == all_of(one.err) == all_of(one.events) == b""


def test_the_pipe_of_the_output_is_as_large_as_it_may_be(page):
    one = Child(["true"], {"PATH": os.environ["PATH"]}, None, page, set())
    read, write = os.pipe()
    try:
        largest = fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 18)
    except OSError:  # more than this user may have
        largest = fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)
    assert fcntl.fcntl(one.out, fcntl.F_GETPIPE_SZ) == largest
    os.waitpid(one.pid, 0)
    for descriptor in (read, write, one.out, one.err, one.events):
        os.close(descriptor)


def test_a_program_dies_with_its_supervisor(page, tmp_path):
    def supervise():
        one = Child(["sleep", "60"], {"PATH": os.environ["PATH"]}, None, page, set())
        (tmp_path / "part").write_text(str(one.pid))
        os.rename(tmp_path / "part", tmp_path / "pid")
        until(lambda: Path(f"/proc/{one.pid}/cmdline").read_text().startswith("sleep"))
        return 0

    assert in_child(supervise) == 0
    pid = int((tmp_path / "pid").read_text())
    until(lambda: linux.state(pid) in ("", "Z"))


def test_descriptors_are_copied_high_or_anywhere(monkeypatch):
    copy = children._inherited(0)
    assert copy >= 300 and os.get_inheritable(copy)
    os.close(copy)

    def refuse(*_):
        raise OSError

    monkeypatch.setattr(children.fcntl, "fcntl", refuse)
    copy = children._inherited(0)
    assert 0 < copy < 300 and os.get_inheritable(copy)
    os.close(copy)


# ---- its supervisor -------------------------------------------------------------------------------------------------


def test_a_supervisor_starts_the_program_with_all_that_looks_after_it(monkeypatch):
    one, happened, given = Supervisor(["x", "y"], 99, "hydra"), [], {}
    one.loop.close()
    one.loop = SimpleNamespace(
        watch=lambda *more: happened.append(more), watch_channel=lambda *more: happened.append(more)
    )
    one.channel, one.identity, one._early = Kept(), "identity", [{"t": "bye"}]
    one.terms = {"window": "7", "directory": "/d"}
    program = SimpleNamespace(pid=4242, events=5, out=6, err=7)

    def start(command, environment, directory, page, ignored):
        given.update(command=command, environment=environment, directory=directory, page=page, ignored=ignored)
        return program

    for name, made in (
        ("Signals", lambda loop, numbers, call: (loop, numbers, call)), ("Child", start), ("OomWatch", lambda: "oom"),
        ("surroundings", lambda *given: given), ("WorkerWatch", lambda pid: ("workers", pid)),
        ("ConnectionHolder", lambda pid, environ: ("pmix", pid, environ)), ("Outputs", lambda *given: given),
        ("_go_first", lambda: happened.append("first")),
    ):  # fmt: skip
        monkeypatch.setattr(supervisors, name, made)
    monkeypatch.setattr(supervisors.linux, "adopt_orphans", lambda: happened.append("adopts"))
    handlers = {signal.SIGHUP: signal.SIG_IGN, signal.SIGUSR1: signal.SIG_IGN}
    monkeypatch.setattr(supervisors.signal, "getsignal", lambda number: handlers.get(number, signal.SIG_DFL))
    one._start()
    stops = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGCHLD)
    assert one.signals == (one.loop, stops, one._on_signal)
    assert happened == [
        "adopts", "first", (one.channel, one._on_channel), (99, one._on_lifeline), (5, one._on_events),
    ]  # fmt: skip
    page = given.pop("page")
    assert given == {
        "command": ["x", "y"], "environment": (os.environ, one.terms, "identity"), "directory": "/d",
        "ignored": {int(signal.SIGHUP), int(signal.SIGUSR1)},
    }  # fmt: skip
    os.pwrite(page, b"beat", 100)
    assert len(one.page) == os.fstat(page).st_size == 4096 and one.page[100:104] == b"beat"
    assert os.readlink(f"/proc/self/fd/{page}").startswith("/memfd:dbrdist-heartbeat")
    assert (one.oom, one.workers, one.pmix) == ("oom", ("workers", 4242), ("pmix", 4242, os.environ))
    assert one.channel.sent == [("started", {"pid": 4242})] and one.released and one.oom_looked_at == float("-inf")
    loop, pipes, window, send = one.outputs
    send(b"words", "err")
    assert (loop, pipes, window) == (one.loop, {6: "out", 7: "err"}, 7)
    assert one.channel.sent[-1] == ("out", {"stream": "err", "data": b"words"})
    one.page.close()
    os.close(page)


@pytest.mark.parametrize(
    ("catching", "status", "text", "asked"),
    [({4242, 4243}, None, "Thread", 4242), ({4243}, None, "Thread", 4243),
     (set(), None, "by py-spy of [4242, 4243]", None),
     ({4242}, 0, "by py-spy of []", None)],
)  # fmt: skip
def test_stacks_come_from_the_first_process_that_has_hooks(monkeypatch, catching, status, text, asked):
    read, write = os.pipe()
    one, killed = Supervisor(["x"], 99, "hydra"), []
    one.loop.close()
    one.channel, one.child, one.status, one.stacks = Kept(), SimpleNamespace(pid=4242, events=read), status, b"old"

    def kill(pid, number):
        killed.append((pid, number))
        os.write(write, b"Thread\n")

    monkeypatch.setattr(supervisors.limits, "STACK_SECONDS", 20.0)
    for name, act in (
        ("descendants", lambda pid: [4243]), ("kill", kill), ("state", lambda pid: "S"),
        ("catches", lambda pid, number: number == stack_signal() and pid in catching),
    ):  # fmt: skip
        monkeypatch.setattr(supervisors.linux, name, act)
    monkeypatch.setattr(supervisors, "by_py_spy", lambda pids: f"by py-spy of {pids}")
    one._ask_for_stacks()
    assert killed == ([(asked, stack_signal())] if asked else [])
    ((kind, fields),) = one.channel.sent
    assert (kind, fields["text"].strip(), fields["state"]) == ("stacks", text, "S")
    os.close(read)
    os.close(write)


def test_a_lost_launcher_is_not_listened_to_any_more():
    one, forgotten = Supervisor(["x"], 99, "hydra"), []
    one.loop.close()
    one.loop, one.channel, one.connected = SimpleNamespace(forget=forgotten.append), Kept(), True
    one._kill_now = lambda: forgotten.append("killed")
    one._launcher_lost()
    one._launcher_lost()
    assert forgotten == [-1, "killed"] and one.channel.is_closed and not one.connected


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (None, 5, ""), (ConnectionError("refused"), 71, "dbrdist-launch: refused\n"),
        (RuntimeError("no rank"), 71, "dbrdist-launch: no rank\n"), (ValueError("odd"), 71, "ValueError: odd\n"),
        (KeyboardInterrupt(), 71, "KeyboardInterrupt\n"),
    ],
)  # fmt: skip
def test_whatever_ends_a_supervisor_nothing_is_left_running(monkeypatch, capsys, error, code, said):
    happened = []

    def run(self):
        happened.append((self.command, self.lifeline, self.backend))
        self.loop.close()
        if error is not None:
            raise error
        return 5

    monkeypatch.setattr(Supervisor, "run", run)
    monkeypatch.setattr(rank_main.os, "setsid", lambda: happened.append("session"))
    monkeypatch.setattr(rank_main.linux, "end_descendants", lambda: happened.append("ended"))
    assert rank_main._inner("hydra", ["x"], 99) == code
    assert happened == ["session", (["x"], 99, "hydra"), "ended"]
    err = capsys.readouterr().err
    assert err.endswith(said) and ("Traceback" in err) == (type(error) in (ValueError, KeyboardInterrupt))


# ---- the starter's words --------------------------------------------------------------------------------------------


def test_the_starter_is_heard_line_by_line(monkeypatch):
    monkeypatch.setattr(limits, "LINE_BYTES", 8)
    read, write = os.pipe()
    loop, said = (
        SimpleNamespace(watch=lambda pipe, call: calls.append((pipe, call)), forget=lambda n: gone.append(n)),
        [],
    )
    calls, gone = [], []
    StarterProcess.watch(None, loop, read, said.append)
    ((pipe, call),) = calls
    assert pipe == read
    for data, lines in (
        (b"one\ntwo \r\n\n  \nth", ["one", "two"]), (b"ree\n", ["three"]), (b"12345678", []), (b"\n", ["12345678"]),
        (b"123456789", ["123456789"]), (b"0\n\xff\n", ["0", "\udcff"]), (b"rest", []),
    ):  # fmt: skip
        os.write(write, data)
        call()
        assert said == lines and gone == []
        said.clear()
    os.close(write)
    call()
    assert said == ["rest"] and gone == [read]
    os.close(read)


# ---- entry points ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["hydra"]])
def test_a_rank_without_a_command_says_how_it_is_called(capsys, arguments):
    assert rank_main.main(arguments) == 2
    assert capsys.readouterr().err == "usage: python .../dbrdist_launch/rank/main.py BACKEND command ...\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (None, 5, ""), (KeyboardInterrupt(), 130, ""),
        (ValueError("odd"), 71, "dbrdist-launch: internal error: ValueError('odd')"),
    ],
)  # fmt: skip
def test_the_launcher_ends_with_the_code_of_its_job(monkeypatch, capsys, error, code, said):
    from dbrdist_launch.launcher import cli

    def run(arguments):
        assert arguments == ["a", "b"]
        if error is not None:
            raise error
        return 5

    monkeypatch.setattr(cli, "run", run)
    for given in (["a", "b"], None):
        monkeypatch.setattr(sys, "argv", ["dbrdist-launch", "a", "b"])
        with pytest.raises(SystemExit) as caught:
            mains.main(given)
        assert caught.value.code == code
        assert capsys.readouterr().err.partition(" at ")[0] == said


def test_a_reader_that_has_gone_does_not_change_the_code(monkeypatch):
    def fail():
        raise BrokenPipeError

    left = []
    monkeypatch.setattr(mains.sys, "stdout", SimpleNamespace(flush=fail))
    monkeypatch.setattr(mains.os, "_exit", left.append)
    with pytest.raises(SystemExit):
        mains._leave(3)
    monkeypatch.undo()
    assert left == [3]


def test_closed_standard_files_are_opened_again():
    def act():
        for number in (0, 1, 2):
            os.close(number)
        sys.stdout = sys.stderr = None
        mains._open_standard_files()
        null = os.stat(os.devnull)
        are_open = all(os.path.samestat(os.fstat(number), null) for number in (0, 1, 2))
        return 7 if are_open and (sys.stdout.fileno(), sys.stderr.fileno()) == (1, 2) else 8

    assert in_child(act) == 7
