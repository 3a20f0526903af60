"""The program of a rank as a child of its supervisor: its pipes, its session, its signals, and what it is told."""

import fcntl
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from dbrdist_launch import entry, limits, linux, messages
from dbrdist_launch import main as mains
from dbrdist_launch.inherited import Inherited
from dbrdist_launch.launcher.streams.starter_output import StarterOutput
from dbrdist_launch.rank import child as children
from dbrdist_launch.rank import outer, stacks
from dbrdist_launch.rank import supervisor as supervisors
from dbrdist_launch.rank.child import Child, stack_signal
from dbrdist_launch.rank.supervisor import Supervisor
from dbrdist_launch.signals import PASSED_ON, STOPS
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
    one = Child(["sh", "-c", SCRIPT], told, str(tmp_path), page, ignored, Inherited())
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
    one = Child(["/nowhere/program"], {}, None, page, set(), Inherited())
    assert os.waitstatus_to_exitcode(os.waitpid(one.pid, 0)[1]) == 127
    assert all_of(one.out) == all_of(one.err) == all_of(one.events) == b""


def test_the_pipe_of_the_output_is_as_large_as_it_may_be(page):
    one = Child(["true"], {"PATH": os.environ["PATH"]}, None, page, set(), Inherited())
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
        one = Child(["sleep", "60"], {"PATH": os.environ["PATH"]}, None, page, set(), Inherited())
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
    one, happened, given = Supervisor(99, "hydra", "-", Inherited()), [], {}
    one.loop.close()
    one.loop = SimpleNamespace(
        watch=lambda *more: happened.append(more), watch_channel=lambda *more: happened.append(more)
    )
    one.channel, one.identity, one._early = Kept(), "identity", [messages.Bye()]
    one.terms = messages.Welcome(["x", "y"], {}, "/d", 6.0, 7, "auto", "", True, "m", 0, [], {})
    program = SimpleNamespace(pid=4242, events=5, out=6, err=7)

    def start(command, environment, directory, page, ignored, inherited):
        given.update(command=command, environment=environment, directory=directory, page=page, ignored=ignored)
        return program

    for name, made in (
        ("Signals", lambda loop, numbers, call, inherited: (loop, numbers, call)),
        ("Child", start), ("OomWatch", lambda: "oom"),
        ("surroundings", lambda *given: given), ("WorkerWatch", lambda pid: ("workers", pid)),
        ("ConnectionHolder", lambda pid, environ: ("pmix", pid, environ)), ("Outputs", lambda *given: given),
        ("Leftovers", lambda outputs: ("left", outputs)), ("_go_first", lambda: happened.append("first")),
    ):  # fmt: skip
        monkeypatch.setattr(supervisors, name, made)
    monkeypatch.setattr(supervisors.linux, "adopt_orphans", lambda: happened.append("adopts"))
    handlers = {signal.SIGHUP: signal.SIG_IGN, signal.SIGUSR1: signal.SIG_IGN}
    monkeypatch.setattr(supervisors.signal, "getsignal", lambda number: handlers.get(number, signal.SIG_DFL))
    one._start()
    assert one.signals == (one.loop, (*STOPS, *PASSED_ON, signal.SIGCHLD), one._on_signal)
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
    ("catching", "below", "text", "asked"),
    [({4242, 4243}, [4242, 4243], "Thread", 4242), ({4243}, [4242, 4243], "Thread", 4243),
     (set(), [4242, 4243], "by py-spy of [4242, 4243]", None), ({4242}, [], "by py-spy of []", None)],
)  # fmt: skip
def test_stacks_come_from_the_first_process_that_has_hooks(monkeypatch, catching, below, text, asked):
    killed, told, now = [], [], 1000.0
    monkeypatch.setattr(stacks.linux, "kill", lambda pid, number: killed.append((pid, number)))
    monkeypatch.setattr(stacks.linux, "catches", lambda pid, number: number == stack_signal() and pid in catching)
    monkeypatch.setattr(stacks, "by_py_spy", lambda pids: f"by py-spy of {pids}")
    one = stacks.Stacks(stack_signal(), lambda *answer: told.append(answer))
    one.ask(below, now)
    if asked:
        assert killed == [(asked, stack_signal())] and told == [] and one.due == now + limits.STACK_SECONDS
        one.take(b"Thread\n", now)
        one.look(now + limits.STACK_PAUSE_SECONDS / 2)
        assert told == []
        one.look(now + limits.STACK_PAUSE_SECONDS)
    assert [answer[0].strip() for answer in told] == [text] and one.due is None


def test_no_signal_cuts_a_write_short(monkeypatch):
    """While a process stands in a write it is not asked: the write would end there."""
    killed, told, writes = [], [], [True]
    monkeypatch.setattr(stacks.linux, "kill", lambda pid, number: killed.append(pid))
    monkeypatch.setattr(stacks.linux, "catches", lambda pid, number: True)
    monkeypatch.setattr(stacks, "would_cut", lambda pid: writes[0])
    monkeypatch.setattr(stacks, "by_py_spy", lambda pids: "")
    one = stacks.Stacks(50, lambda *answer: told.append(answer))
    one.ask([1], 0.0)
    one.look(limits.STACK_LOOK_SECONDS)
    assert killed == told == []
    one.look(limits.STACK_SECONDS)
    assert killed == [] and "waits in a write" in told[0][0]
    one.ask([1], 10.0)
    writes[0] = False
    one.look(one.due)
    assert killed == [1]


def test_a_process_that_lost_its_handler_meanwhile_is_not_asked(monkeypatch):
    """While it stood in a write its Python may have come to its end: the signal would kill it."""
    killed, told, catches, writes = [], [], [True], [True]
    monkeypatch.setattr(stacks.linux, "kill", lambda pid, number: killed.append(pid))
    monkeypatch.setattr(stacks.linux, "catches", lambda pid, number: catches[0])
    monkeypatch.setattr(stacks, "would_cut", lambda pid: writes[0])
    monkeypatch.setattr(stacks, "by_py_spy", lambda pids: "by py-spy")
    one = stacks.Stacks(50, lambda *answer: told.append(answer[0]))
    one.ask([1], 0.0)
    catches[0] = writes[0] = False
    one.look(limits.STACK_LOOK_SECONDS)
    assert (killed, told, one.due) == ([], ["by py-spy"], None)


def test_a_process_in_a_write_is_seen():
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, bytes(1 << 20))
        os.read(read, 1)
        os.read(os.pipe()[0], 1)
        os._exit(0)
    try:
        until(lambda: stacks.would_cut(child))
        os.close(write)
        while os.read(read, 1 << 16) and stacks.would_cut(child):
            pass
        until(lambda: not stacks.would_cut(child))
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(read)


def test_who_waits_for_a_signal_is_not_asked():
    """Any signal would end its `pause`."""
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    try:
        until(lambda: stacks.would_cut(child))
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("loop", "asked"),
    [
        ("while not request.Test():\n    time.sleep(0.01)", "while not request.Test():"),
        ("while True:\n    done = request.Test()\n    if done: break\n    time.sleep(1)", "done = request.Test()"),
        ("while True:\n    time.sleep(1)\n    if comm.Iprobe(): break", "if comm.Iprobe(): break"),
        ("while not MPI.Request.Testall(all):\n    pass", "while not MPI.Request.Testall(all):"),
        ("while True:\n    step()\n    time.sleep(1)", ""), ("request.Test()\ntime.sleep(1)", ""),
        ("while not request.Test():\n    compute()", ""),
        ("while not request.Test(): x()\nwhile y:\n    time.sleep(1)", ""),
    ],
)  # fmt: skip
def test_who_sleeps_in_a_loop_says_what_the_loop_asks(loop, asked):
    text = "import time\n" + loop
    ends = ("time.sleep(1)", "time.sleep(0.01)", "pass", "compute()")
    at, line = next((n, line.strip()) for n, line in enumerate(text.split("\n"), 1) if line.strip() in ends)
    found = stacks.sources(f'  File "<string>", line {at} in <module>\n', text)
    assert found == {f"<string>:{at}": line + (stacks.IN_LOOP + asked if asked else "")}


@pytest.mark.parametrize(
    ("loop", "is_waiting"),
    [
        ("while not request.Test():\n    pass", True), ("while not comm.Iprobe(): pass", True),
        ("while not request.Test():  # all\n    continue  # ask again", True), ("while not request.Test():", False),
        ("while not request.Test():\n    compute()", False), ("while not done:\n    pass", False),
    ],
)  # fmt: skip
def test_who_asks_without_a_pause_is_mostly_in_the_question(loop, is_waiting):
    line = loop.partition("\n")[0]
    found = stacks.sources('  File "<string>", line 1 in <module>\n  File "<string>", line 0 in f\n', loop)
    assert found == {"<string>:1": line + (stacks.IN_LOOP + line if is_waiting else "")}


def test_source_lines_are_read_where_the_program_runs(tmp_path):
    (tmp_path / "a.py").write_text("one\n  two()\n")
    text = f'Current thread 0x1 (most recent call first):\n  File "{tmp_path}/a.py", line 2 in f\n'
    text += '  File "<string>", line 3 in <module>\n  File "/nowhere", line 1 in g\n'
    found = {f"{tmp_path}/a.py:2": "two()", "<string>:3": "z"}
    assert stacks.sources(text, "x\ny\nz") == found


def test_a_lost_launcher_is_not_listened_to_any_more():
    one, forgotten = Supervisor(99, "hydra", "-", Inherited()), []
    one.loop.close()
    one.loop, one.channel, one.connected = SimpleNamespace(forget=forgotten.append), Kept(), True
    one._kill_now = lambda: forgotten.append("killed")
    one._launcher_lost()
    one._launcher_lost()
    assert forgotten == [-1, "killed"] and one.channel.is_closed and not one.connected


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (None, 5, ""), (ConnectionError("refused"), 71, "rank 3: refused\n"),
        (RuntimeError("no rank"), 71, "rank 3: no rank\n"), (ValueError("odd"), 71, "rank 3: ValueError('odd')\n"),
        (KeyboardInterrupt(), 71, "rank 3: KeyboardInterrupt()\n"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("connected", [False, True])
def test_whatever_ends_a_supervisor_nothing_is_left_running(monkeypatch, capfd, error, code, said, connected):
    happened = []

    def run(self):
        happened.append((self.lifeline, self.backend, self.address))
        self.loop.close()
        self.connected, self.channel = connected, Kept()
        self.channel.unsent = b""
        happened.append(self.channel)
        if error is not None:
            raise error
        return 5

    monkeypatch.setattr(Supervisor, "run", run)
    monkeypatch.setattr(outer.os, "setsid", lambda: happened.append("session"))
    monkeypatch.setattr(outer.linux, "end_descendants", lambda: happened.append("ended"))
    monkeypatch.setenv("PMI_RANK", "3")
    assert outer._inner("hydra", "unix:/s", 99, Inherited()) == code
    session, called, channel, ended = happened
    assert (session, called, ended) == ("session", (99, "hydra", "unix:/s"), "ended")
    told = [fields["message"] for kind, fields in channel.sent if kind == "failed"]
    expected = said.removeprefix("rank 3: ").rstrip()
    assert told == ([expected] if connected and said else [])
    assert capfd.readouterr().err == ("" if connected or not said else f"dbrdist-launch: {said}")


# ---- the starter's words --------------------------------------------------------------------------------------------


RULE = "=" * 83 + "\n"


@pytest.mark.parametrize(
    ("text", "own", "shown"),
    [
        ("hello\n\nyou\n", [], "hello\n\nyou\n"),
        ("no end", [], "no end"),
        ("\n" + RULE + "=   BAD TERMINATION\n=   EXIT CODE: 9\n" + RULE, 4, ""),
        (RULE + "a table\n" + RULE + "x\n", [], RULE + "a table\n" + RULE + "x\n"),
        ("[mpiexec@vm] words\n[proxy:0@vm] more\nsrun: error: x\n", 3, ""),
        ("YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed\nbeyond\n", 1, "beyond\n"),
        ("-" * 74 + "\nprterun has exited\n" + "-" * 74 + "\nx\n", 3, "x\n"),
        ("\udcff\0binary\n", [], "\udcff\0binary\n"),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 100000])
def test_what_spawned_processes_write_is_told_from_mpiexecs_own_words(text, own, shown, step):
    said, found = [], []
    one = StarterOutput(said.append, found.append)
    data = text.encode("utf-8", "surrogateescape")
    for at in range(0, len(data), step):
        one.feed(data[at : at + step])
    one.end()
    assert b"".join(found) == shown.encode("utf-8", "surrogateescape")
    assert len(said) == (own if isinstance(own, int) else len(own))


# ---- entry points ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["hydra"]])
def test_a_rank_without_an_address_says_how_it_is_called(capsys, arguments):
    assert in_child(lambda: outer.main(arguments)) == 2


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


def test_closed_standard_files_are_opened_again():
    def act():
        for number in (0, 1, 2):
            os.close(number)
        sys.stdout = sys.stderr = None
        entry._raw.clear()
        entry.protect_streams()
        null = os.stat(os.devnull)
        are_open = all(os.path.samestat(os.fstat(number), null) for number in (0, 1, 2))
        return 7 if are_open and (sys.stdout.fileno(), sys.stderr.fileno()) == (1, 2) else 8

    assert in_child(act) == 7
