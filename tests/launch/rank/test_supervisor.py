"""What a rank's supervisor does with each message, signal, event and deadline, told to it one by one."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import support
from clocks import STEP, Channel, Clock
from clocks import Channel as Kept
from dbrdist_launch import heartbeat, limits, messages
from dbrdist_launch.channel import Channel as RealChannel
from dbrdist_launch.identity import Identity
from dbrdist_launch.inherited import Inherited
from dbrdist_launch.rank import supervisor as supervisors
from dbrdist_launch.rank.pmix import ConnectionHolder
from dbrdist_launch.rank.supervisor import Supervisor
from dbrdist_launch.signals import PASSED_ON, STOPS
from inject import INJECT
from support import ROOT

WELCOME = messages.Welcome(["x"], {}, None, 6.0, 9, "auto", "", True, "m", 0, [], {}, False)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


class Pipes:
    """Outputs whose program writes nothing."""

    late = ()

    def __init__(self):
        self.pipes, self.heard_at, self.gather_until, self.credits, self.looks, self.has_ended = (
            {},
            0.0,
            None,
            [],
            [],
            False,
        )

    def give_credit(self, count):
        self.credits.append(count)

    def look(self, now):
        self.looks.append(now)

    def end(self):
        self.has_ended = True

    def drain(self):
        return bool(self.late and self.late.pop())


class Left:
    """A program that leaves processes behind, or none."""

    due = 0.0
    said = ""

    def look(self, now):
        pass

    def patience(self, is_open, went_well):
        return limits.DRAIN_SECONDS if is_open else 0.0

    def words(self, is_open):
        return self.said


@pytest.fixture
def supervised(clock, monkeypatch):
    """A supervisor of a program that is not there, and what was sent to processes."""
    one = Supervisor(99, "hydra", "-", Inherited())
    one.loop.close()
    one.loop = SimpleNamespace(forget=lambda number: one.forgotten.append(number), turn=clock.pass_by)
    one.forgotten, one.channel, one.outputs, one.connected = [], Channel(), Pipes(), True
    one.child = SimpleNamespace(pid=4242, events=-1)
    one.left = Left()
    one.pmix = SimpleNamespace(searching=False, looks=0)
    one.oom = SimpleNamespace(look=lambda pid: one.oom_looks.append(clock.now))
    one.oom.verdict, one.oom.counted = lambda pid: "memory", lambda pid: None
    one.workers = SimpleNamespace(look=lambda: None)
    one.oom_looks, one.oom_looked_at, one.page = [], float("-inf"), bytes(heartbeat.PAGE_BYTES)
    one.killed = []
    for name, to in (("kill", "one"), ("kill_group", "group")):
        monkeypatch.setattr(
            supervisors.linux, name, lambda pid, number, to=to: one.killed.append((to, pid, int(number)))
        )
    monkeypatch.setattr(supervisors.linux, "descendants", lambda pid: [])
    monkeypatch.setattr(supervisors.linux, "mapped_files", lambda pid, pattern: set())
    monkeypatch.setattr(supervisors.os, "waitpid", lambda *_: (0, 0))
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    return one


@pytest.mark.parametrize(
    ("answers", "early", "said"),
    [
        (["welcome", "ping"], ["ping"], None), (["ping", "stop", "welcome"], ["ping", "stop"], None),
        (["ping"], [], "the launcher refused this rank"), ([], [], "the launcher refused this rank"),
        (["ping", "kill", "bye"], [], "the job ended before this rank had started"),
    ],
)  # fmt: skip
def test_a_rank_waits_for_its_welcome(monkeypatch, answers, early, said):
    """Which waits for rank 0: other messages, a ping each second, may come first."""
    here, there = socket.socketpair()
    with here, there:
        one = Supervisor(99, "hydra", "-", Inherited())
        one.loop.close()
        one.identity = Identity(1, 2, 0, 0, "a")
        monkeypatch.setenv(supervisors.ADDRESS, "unix:/s")
        monkeypatch.setenv(supervisors.TOKEN, "secret")
        monkeypatch.setattr(supervisors, "_connect_to_any", lambda address: there if address == "unix:/s" else None)
        launcher = RealChannel(here)
        for answer in answers:
            launcher.send(WELCOME if answer == "welcome" else messages.KINDS[answer](*[15] * (answer == "stop")))
        if "welcome" not in answers:
            here.shutdown(socket.SHUT_WR)
        if said is None:
            one._connect()
            assert one.terms.host_timeout == 6.0 and one.connected
            assert [support.told(message)[0] for message in one._early] == early
        else:
            with pytest.raises(ConnectionError, match=said):
                one._connect()
        (hello,) = launcher.receive()
        assert (type(hello), hello.token, hello.rank, hello.size) == (messages.Hello, "secret", 1, 2)
        assert supervisors.ADDRESS not in os.environ and supervisors.TOKEN not in os.environ


def test_a_supervisor_without_a_rank_says_how_it_is_started(monkeypatch):
    monkeypatch.setattr(supervisors, "of_environment", lambda backend: None)
    one = Supervisor(99, "hydra", "-", Inherited())
    one.loop.close()
    with pytest.raises(RuntimeError, match="no rank in the environment: expected mpiexec"):
        one.run()


@pytest.mark.parametrize(("status", "code"), [(None, 137), (0, 0), (3 << 8, 3), (9, 137)])
def test_a_supervisor_ends_as_its_program(monkeypatch, tmp_path, status, code):
    monkeypatch.setattr(supervisors, "of_environment", lambda backend: Identity(0, 1, 0, 1, "a"))
    (tmp_path / "segment").touch()
    one, turns = Supervisor(99, "hydra", "-", Inherited()), []
    one.loop.close()
    one._connect = one._start = lambda: None
    one._done = lambda: len(turns) == 3
    one._turn = lambda: turns.append(1)
    one.status, one.segments = status, {str(tmp_path / "segment"), str(tmp_path / "gone")}
    assert one.run() == code and len(turns) == 3 and (tmp_path / "segment").exists() == (not status)


def test_a_port_for_the_programs_rendezvous_is_free_on_all_interfaces():
    port = supervisors._free_port()
    with socket.create_server(("", port)) as server:
        assert server.getsockname()[1] == port > 0


def test_a_supervisor_has_said_and_heard_nothing_yet():
    one = Supervisor(99, "hydra", "-", Inherited())
    one.loop.close()
    assert (one.lifeline, one.backend, one.address) == (99, "hydra", "-")
    assert not (one.connected or one.released or one.ended_by_us or one.hurried or one.frozen or one.segments)
    assert (one.status, one.ended_at, one.reported_at, one.kill_at, one.stop) == (None, 0.0, 0.0, None, None)


def test_the_launcher_is_reached_by_the_first_address_that_answers(tmp_path):
    with socket.create_server(("127.0.0.2", 0)) as server:
        port = server.getsockname()[1]
        supervisors._connect_to_any(f"127.0.0.2:{port}").close()
        supervisors._connect_to_any(f"127.0.0.1,127.0.0.2:{port}").close()
    with pytest.raises(ConnectionError, match=f"cannot be reached from this host: 127.0.0.1:{port}: .*; 127.0.0.2:"):
        supervisors._connect_to_any(f"127.0.0.1,127.0.0.2:{port}")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        ours = supervisors._connect_to_any(f"unix:{tmp_path}/s")
        theirs, _ = server.accept()
        with theirs:
            ours.send(b"hello")
            assert theirs.recv(9) == b"hello"
        ours.close()


def test_messages_of_the_launcher(supervised, clock, monkeypatch):
    one = supervised
    one._take([messages.Credit(7), messages.Credit(8)])
    assert one.outputs.credits == [7, 8]
    one._take([messages.StopRequest(15)])
    assert one.stop == (clock.now, 15)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    one._take([messages.StopRequest(2)])
    assert one.stop == (clock.now + limits.SLURM_SECONDS, 2)
    assert one.killed == [] and not one.released
    one._take([messages.Kill()])
    assert one.kill_at == clock.now + limits.KILL_SECONDS and one.ended_by_us and one.outputs.has_ended
    assert one.killed == [("group", 4242, 15), ("group", 4242, 18)] and one.released
    one._take([messages.Kill(9.0)])
    assert one.kill_at == clock.now + 9.0
    other = Supervisor(99, "hydra", "-", Inherited())
    other.loop.close()
    other._take([messages.Bye()])
    assert other.released and other.kill_at is None


def test_nothing_is_killed_that_has_ended(supervised):
    one = supervised
    one.status = 0
    one._take([messages.Kill()])
    one._kill_now()
    assert one.killed == [] and not one.ended_by_us and one.kill_at is None and one.released


@pytest.mark.parametrize(
    ("since", "status", "number", "passed"),
    [
        (2 * limits.SLURM_SECONDS + STEP, None, 15, [("one", 4242, 15)]),
        (2 * limits.SLURM_SECONDS, None, 15, []),
        (9.0, 0, 15, []),
        (9.0, None, 2, [("group", 4242, 2)]),
    ],
)
def test_a_request_is_passed_on_where_it_has_not_come_by_itself(supervised, clock, since, status, number, passed):
    one = supervised
    one.stop, one.status, one.asked_at = (clock.now, number), status, clock.now - since
    one.reported_at = 1.0
    clock.now -= STEP
    one._look()
    assert one.killed == [] and one.stop is not None
    clock.now += STEP
    one.asked_at = clock.now - since
    one._look()
    assert one.killed == passed and one.stop is None


def test_mpiexec_that_kills_is_followed_after_a_moment(supervised, clock):
    one = supervised
    one.lifeline, held = os.pipe()
    os.write(held, b"o")
    one._on_lifeline()
    assert one.forgotten == [] and one.channel.sent.pop() == ("event", {"event": "orphaned"})
    os.close(held)
    one._on_lifeline()
    assert one.forgotten == [one.lifeline]
    assert one.channel.sent == [("event", {"event": "cut", "at": clock.now})]
    os.close(one.lifeline)
    assert one.kill_at == clock.now + limits.ABORT_SECONDS
    clock.now = one.kill_at - STEP
    one._look()
    assert one.killed == []
    clock.now += STEP
    one._look()
    assert one.killed == [("group", 4242, 9), ("one", 4242, 9)] and one.kill_at is None and one.ended_by_us


def test_a_launcher_that_is_gone_takes_the_rank_with_it_once(supervised):
    one = supervised
    one.channel.inbox = None
    one._on_channel()
    assert not one.connected and one.channel.is_closed and len(one.killed) == 2
    one._on_channel()
    assert len(one.killed) == 2


def test_signals_of_a_supervisor(supervised, clock):
    one = supervised
    one._on_signal(signal.SIGCHLD)
    assert one.channel.sent == [] and one.asked_at == float("-inf")
    one._on_signal(signal.SIGUSR1)
    assert one.channel.sent == [("asked", {"signal": signal.SIGUSR1})] and one.asked_at == clock.now


@pytest.mark.parametrize(("catching", "sent"), [({4242}, [4242]), ({4243, 4244}, [4243, 4244]), (set(), [])])
def test_sigusr2_goes_to_those_that_have_a_handler_for_it(supervised, monkeypatch, catching, sent):
    one = supervised
    monkeypatch.setattr(supervisors.linux, "descendants", lambda pid: [4243, 4244])
    monkeypatch.setattr(supervisors.linux, "expects", lambda pid, number: pid in catching)
    monkeypatch.setattr(supervisors.linux, "hears", lambda pid, number: pid == 4242 and not is_helper)
    is_helper = False
    for ask in (lambda: one._on_signal(signal.SIGUSR2), lambda: one._take([messages.Signal(12)])):
        ask()
        assert one.killed == [("one", pid, 12) for pid in sent]
        assert one.channel.sent == ([] if sent else [("asked", {"signal": 12})])
        one.killed.clear()
        one.channel.sent.clear()
    is_helper = True  # it gets the signal, and the program would die of it
    one._on_signal(signal.SIGUSR2)
    assert one.killed == [("one", pid, 12) for pid in sent]
    assert one.channel.sent == [("asked", {"signal": 12})]
    is_helper = False
    one.killed.clear()
    one.channel.sent.clear()
    monkeypatch.setenv("SLURM_STEP_ID", "0")  # Slurm has signalled every process of the step
    one._on_signal(signal.SIGXCPU)
    assert one.killed == [] and one.channel.sent == ([] if sent else [("asked", {"signal": signal.SIGXCPU})])


def test_a_suspended_program_is_not_silent_meanwhile(supervised, clock, monkeypatch):
    one = supervised
    monkeypatch.setattr(supervisors.linux, "descendants", lambda pid: [4243])
    then = clock.now
    one._take([messages.Signal(signal.SIGCONT)])  # it was not suspended
    assert one.frozen == []
    for number in (signal.SIGTSTP, signal.SIGTSTP, signal.SIGCONT):
        clock.now += 10
        one._take([messages.Signal(number)])
    assert one._age(then, clock.now) == 10 and one.suspended_at is None and one.channel.sent == []
    assert one.killed == [
        ("one", pid, number)
        for number in (signal.SIGCONT, signal.SIGSTOP, signal.SIGSTOP, signal.SIGCONT)
        for pid in (4242, 4243)
    ]
    one.status = 0
    one._take([messages.Signal(signal.SIGTSTP)])
    assert len(one.killed) == 8


@pytest.mark.parametrize(
    ("ended", "by_us", "counted", "told"),
    [
        ((4242, 0), False, None, []),
        ((4242, 3 << 8), False, None, [{"code": 3, "signal": 0, "oom": None, "ours": False}]),
        ((4242, 3 << 8), True, None, []),
        ((4242, 9), False, None, [{"code": 137, "signal": 9, "oom": None, "ours": False}]),
        ((4242, 9), False, "memory", [{"code": 137, "signal": 9, "oom": None, "ours": False},
                                      {"code": 137, "signal": 9, "oom": "memory", "ours": False}]),
        ((4242, 11), False, "memory", [{"code": 139, "signal": 11, "oom": None, "ours": False}]),
        ((4243, 3 << 8), False, None, None),
    ],
)  # fmt: skip
def test_the_end_of_the_program_is_told_at_once(supervised, clock, monkeypatch, ended, by_us, counted, told):
    one, found = supervised, [(4240, 0), ended, (0, 0)]
    one.ended_by_us, one.oom.counted = by_us, lambda pid: counted
    monkeypatch.setattr(supervisors.os, "waitpid", lambda *_: found.pop(0))
    one._fetch_ended()
    assert found == []
    if told is None:
        assert one.status is None and not one.outputs.has_ended
    else:
        assert (one.status, one.ended_at, one.outputs.has_ended) == (ended[1], clock.now, True)
    assert [fields for kind, fields in one.channel.sent if kind == "ended"] == (told or [])


def event(one, **fields):
    one._on_event(supervisors.wire.dumps(fields).encode())


def test_events_of_the_program(supervised, clock, monkeypatch):
    one = supervised
    for line in (b"no json", b"[]", b"{}", b'{"event": "x", "pid": "y"}', b'{"pid": [1], "event": "x"}', b"[" * 100000):
        one._on_event(line)
    assert one.channel.sent == []
    event(one, event="exception", pid=4242, message="m")
    event(one, event="exception", pid=4243, message="m")
    assert [fields["own"] for _, fields in one.channel.sent] == [True, False]
    one.channel.sent.clear()
    for code, finalizes in ((0, True), (3, False), (None, True)):
        event(one, event="leaving", pid=4242, code=code, finalizes=finalizes)
        event(one, event="finished", pid=4242)
        assert one.finalizing is None
    event(one, event="finished", pid=7)
    assert one.channel.kinds() == ["event"] * 3 and one.finalizing is None
    event(one, event="leaving", pid=4242, code=3, finalizes=True)
    event(one, event="finished", pid=4242)
    due = clock.now + limits.FINALIZE_SECONDS
    assert one.finalizing[:2] == (due, 4242) and one._seconds_to_wait() == limits.FINALIZE_SECONDS
    one.channel.sent.clear()
    for state, told in (("S", True), ("", False), ("Z", False)):
        monkeypatch.setattr(supervisors.linux, "state", lambda pid, state=state: state)
        event(one, event="finished", pid=4242)
        clock.now = one.finalizing[0] - STEP
        one._look()
        assert one.channel.sent == []
        clock.now += STEP
        one._look()
        assert one.finalizing is None and (one.channel.sent != []) == told
        if told:
            ((kind, fields),) = one.channel.sent
            assert (kind, fields["event"], fields["code"]) == ("event", "finalizing", 3)
        one.channel.sent.clear()


def test_events_and_stacks_share_a_pipe(supervised):
    one = supervised
    end, program = os.pipe()
    one.child.events = end
    os.write(program, b'Thread 1\n\x1e{"event": "hooks", "pid": 4242}\n  File x\n\x1e{"event": "wo')
    one._on_events()
    assert one.stacks.text == b"Thread 1\n  File x\n" and [fields["event"] for _, fields in one.channel.sent] == [
        "hooks"
    ]
    os.write(program, b'rld", "pid": 4242}\n')
    one._on_events()
    assert one.channel.sent[-1][1]["event"] == "world" and one.forgotten == []
    os.close(program)
    one._on_events()
    assert one.forgotten == [end]
    os.close(end)


def test_how_long_a_supervisor_may_wait(supervised, clock):
    one, now = supervised, clock.now
    assert one._seconds_to_wait() == limits.FROZEN_SECONDS
    one.woke_at = now + 3600.0
    one.pmix.searching = True
    assert one._seconds_to_wait() == limits.SEARCH_SECONDS
    one.pmix.searching = False
    for name, value in (("stop", (now + 5.0, 15)), ("kill_at", now + 4.0), ("finalizing", (now + 3.0, 1, {}))):
        setattr(one, name, value)
        assert one._seconds_to_wait() == {"stop": 5.0, "kill_at": 4.0, "finalizing": 3.0}[name]
    one.outputs.gather_until = now + 2.0
    assert one._seconds_to_wait() == 2.0
    one.status, one.ended_at, one.outputs.pipes = 0, now, {1: "out"}
    one.left.due = now + 0.1
    assert one._seconds_to_wait() == pytest.approx(0.1)
    one.left.due = now + 1.0
    assert one._seconds_to_wait() == pytest.approx(limits.DRAIN_SECONDS)
    one.outputs.heard_at = now + 1.0
    assert one._silent_at() == now + 1.0 + limits.DRAIN_SECONDS
    one.outputs.pipes = {}
    assert one._silent_at() == 0.0 and one._seconds_to_wait() <= 0
    one.stop = one.kill_at = one.finalizing = one.outputs.gather_until = None
    one.reported_at = now
    assert one._seconds_to_wait() == limits.FAREWELL_SECONDS


@pytest.mark.parametrize(
    ("status", "by_us", "page", "report", "released"),
    [
        (0, False, None, {"code": 0, "signal": 0, "oom": None, "ours": False, "step": None, "age": None}, True),
        (3 << 8, False, 5, {"code": 3, "signal": 0, "oom": None, "ours": False, "step": 5, "age": 2.0}, False),
        (9, False, None, {"code": 137, "signal": 9, "oom": "memory", "ours": False, "step": None, "age": None}, False),
        (9, True, None, {"code": 137, "signal": 9, "oom": None, "ours": True, "step": None, "age": None}, False),
        (15, False, None, {"code": 143, "signal": 15, "oom": None, "ours": False, "step": None, "age": None}, False),
    ],
)
def test_the_report_of_an_end(supervised, clock, monkeypatch, status, by_us, page, report, released):
    one = supervised
    beat = heartbeat.read(one.page)._replace(number=int(page is not None), step=page or 0, time=clock.now - 2.0)
    monkeypatch.setattr(supervisors.heartbeat, "read", lambda page: beat)
    one.status, one.ended_by_us, one.ended_at, one.outputs.pipes = status, by_us, clock.now, {1: "out"}
    assert not one._done()
    one._look()
    assert one.channel.sent == []
    clock.now += limits.DRAIN_SECONDS
    beat = beat._replace(time=clock.now - 2.0)
    one._look()
    one._look()
    assert one.channel.sent == [("exit", report)] and one.released == released
    assert one._done() == released
    one.released, one.channel.unsent = True, b"x"
    assert not one._done()
    one.connected = False
    assert one._done()
    one.released = False
    clock.now = one.reported_at + limits.FAREWELL_SECONDS
    assert not one._done()
    clock.now += STEP
    assert one._done()


def test_no_report_while_output_waits_to_be_read(supervised, clock):
    one = supervised
    one.status, one.ended_at = 0, clock.now - 100.0
    one.outputs.late = [True]
    one._look()
    assert not one.reported_at
    one._look()
    assert one.reported_at


def test_answers_to_a_ping(supervised, clock, monkeypatch):
    one = supervised
    beat = heartbeat.read(one.page)
    monkeypatch.setattr(supervisors.heartbeat, "read", lambda page: beat)
    monkeypatch.setattr(supervisors.linux, "state_and_tracer", lambda pid: ("S", False))
    one._take([messages.Ping()])
    ((kind, fields),) = one.channel.sent
    assert (kind, fields["beats"], fields["step"], fields["age"]) == ("beat", 0, -1, None)
    beat = beat._replace(number=3, step=7, time=clock.now - 2.0)
    clock.now += limits.OOM_LOOK_SECONDS
    one._beat()
    fields = one.channel.sent[-1][1]
    assert (fields["beats"], fields["step"], fields["age"]) == (3, 7, 2.0 + limits.OOM_LOOK_SECONDS)
    assert one.oom_looks == [1000.0]
    clock.now += STEP
    one._beat()
    assert one.oom_looks == [1000.0, clock.now]
    one.channel.sent.clear()
    for how, oom in (("killed by SIGKILL", True), ("ended with exit code 3", False)):
        one.workers.look = lambda how=how: (77, how)
        one._beat()
        told = one.channel.sent[-1][1]
        assert told == {"event": "worker", "message": f"worker process 77 {how}" + " (memory)" * oom, "oom": oom}
    one.status = 0
    one._beat()
    assert one.channel.sent[-1] == ("pong", {})


# ---- the connection that must not break -----------------------------------------------------------------------------


@pytest.fixture
def server():
    """A server of PMIx, as far as a connection to it goes, and the environment that names it."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        port = made.getsockname()[1]
        environ = {"PMIX_SERVER_URI41": f"pmix.0;tcp4://127.0.0.1:{port}", "SLURM_STEP_ID": "0", "OTHER": "x:7"}
        yield made, environ


def test_only_a_step_of_slurm_that_names_a_server_is_searched(server, monkeypatch, clock):
    _, environ = server
    holder = ConnectionHolder(os.getpid(), environ)
    assert holder.searching and holder.ports == {int(environ["PMIX_SERVER_URI41"].rpartition(":")[2])}
    clock.now += limits.SEARCH_MOST_SECONDS - STEP
    assert holder.searching
    clock.now += STEP
    assert not holder.searching
    for lacking in ("PMIX_SERVER_URI41", "SLURM_STEP_ID"):
        left = {name: value for name, value in environ.items() if name != lacking}
        assert not ConnectionHolder(os.getpid(), left).searching


def can_copy(descriptor):
    """Whether the kernel, and the container, let a process copy a file by pidfd_getfd, which is call 438."""
    try:
        process = os.pidfd_open(os.getpid())
    except OSError:
        return False
    copy = ctypes.CDLL(None).syscall(438, process, descriptor, 0)
    for one in (process, copy)[: 1 + (copy >= 0)]:
        os.close(one)
    return copy >= 0


def test_the_connection_of_the_program_is_copied_once_it_is_there(server):
    made, environ = server
    if not can_copy(made.fileno()):
        pytest.skip("pidfd_getfd is not to be had here")
    holder = ConnectionHolder(os.getpid(), environ)
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        with socket.create_connection(elsewhere.getsockname()), socket.socket():
            holder.look()
            assert holder.held is None and holder.searching  # neither another server's, nor one that is not connected
        mine = socket.create_connection(made.getsockname())
        theirs, _ = made.accept()
        with mine, theirs:
            holder.look()
            assert not holder.searching and holder.held.getpeername() == made.getsockname()
            theirs.settimeout(5)
            mine.close()
            holder.held.send(b"still here")
            assert theirs.recv(16) == b"still here"
            holder.held.close()
            assert theirs.recv(16) == b""  # nobody else holds it: what was looked at was closed again


def test_what_cannot_be_copied_is_not_held(server):
    holder = ConnectionHolder(os.getpid(), server[1])
    assert holder._take(-1, 0) is False and holder.held is None


def test_a_program_that_has_ended_has_no_connection(server):
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    holder = ConnectionHolder(child, server[1])
    holder.look()
    assert holder.held is None


def test_ranks_start_without_what_takes_long_to_import():
    """Each is paid for by all ranks of a host at the same moment, before their first line."""
    heavy = {"json", "re", "enum", "signal", "traceback", "dataclasses", "typing", "socket", "subprocess", "shutil"}
    supervisor = "dbrdist_launch.rank.main, dbrdist_launch.rank.supervisor"
    started = {INJECT: "sitecustomize", str(ROOT / "launch"): supervisor}
    found = []
    for folder, modules in started.items():
        program = f"import sys; sys.path.insert(0, {folder!r}); import {modules}"
        program += f"; print(*sorted({heavy!r} & set(sys.modules)))"
        words = [sys.executable, "-I", "-S", "-c", program]
        found.append(subprocess.run(words, capture_output=True, text=True, timeout=60).stdout.split())
    assert found == [[], []]


class Given(tuple):
    """What an object was made of."""

    read_all = "all words"


def test_a_supervisor_starts_the_program_with_all_that_looks_after_it(monkeypatch):
    one, happened, given = Supervisor(99, "hydra", "-", Inherited()), [], {}
    one.loop.close()
    one.loop = SimpleNamespace(
        watch=lambda *more: happened.append(more), watch_channel=lambda *more: happened.append(more)
    )
    one.channel, one.identity, one._early = Kept(), "identity", [messages.Bye()]
    one.relay = SimpleNamespace(in_child="in child", begin=lambda *more: happened.append(more))
    one.terms = messages.Welcome(["x", "y"], {}, "/d", 6.0, 7, "auto", "", True, "m", 0, [], {}, True)
    program = SimpleNamespace(pid=4242, events=5, out=6, err=7, input=8)

    def start(command, environment, directory, page, ignored, inherited, prepare, has_input):
        assert prepare == one.relay.in_child and has_input
        given.update(command=command, environment=environment, directory=directory, page=page, ignored=ignored)
        return program

    for name, made in (
        ("Signals", lambda loop, numbers, call, inherited: (loop, numbers, call)),
        ("Child", start), ("OomWatch", lambda: "oom"),
        ("surroundings", lambda *given: given), ("WorkerWatch", lambda pid: ("workers", pid)),
        ("ConnectionHolder", lambda pid, environ: ("pmix", pid, environ)), ("Outputs", lambda *given: Given(given)),
        ("Inputs", lambda *given: Given(given)),
        ("Leftovers", lambda outputs, given: ("left", outputs, given)), ("_go_first", lambda: happened.append("first")),
    ):  # fmt: skip
        monkeypatch.setattr(supervisors, name, made)
    monkeypatch.setattr(supervisors.linux, "adopt_orphans", lambda: happened.append("adopts"))
    handlers = {signal.SIGHUP: signal.SIG_IGN, signal.SIGUSR1: signal.SIG_IGN}
    monkeypatch.setattr(supervisors.signal, "getsignal", lambda number: handlers.get(number, signal.SIG_DFL))
    one._start()
    assert one.signals == (one.loop, (*STOPS, *PASSED_ON, signal.SIGCHLD), one._on_signal)
    assert happened == [
        "adopts", "first", (one.channel, one._on_channel), (99, one._on_lifeline), (5, one._on_events),
        (one.loop, one.channel, "all words"),
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
    loop, pipe, taken = one.inputs
    taken(5, False)
    assert (loop, pipe, one.channel.sent[-1]) == (one.loop, 8, ("taken", {"bytes": 5, "closed": False}))
    one.page.close()
    os.close(page)


def test_a_lost_launcher_is_not_listened_to_any_more():
    one, forgotten = Supervisor(99, "hydra", "-", Inherited()), []
    one.loop.close()
    one.loop, one.channel, one.connected = SimpleNamespace(forget=forgotten.append), Kept(), True
    one._kill_now = lambda: forgotten.append("killed")
    one._launcher_lost()
    one._launcher_lost()
    assert forgotten == [-1, "killed"] and one.channel.is_closed and not one.connected


def test_shared_memory_is_looked_for_at_the_first_ten_beats_and_then_with_memory(supervised, clock, monkeypatch):
    """A program whose MPI_Init nobody tells of maps it at some time; each look goes through all its processes."""
    one, noted = supervised, []
    monkeypatch.setattr(supervisors.linux, "state_and_tracer", lambda pid: ("S", False))
    one._note_segments = lambda: noted.append(clock.now)
    for _ in range(12):
        one._beat()
    assert len(noted) == 10 and one.oom_looks == [clock.now]
    for _ in range(2):
        clock.now += limits.OOM_LOOK_SECONDS + STEP
        one._beat()
        one._beat()
    assert noted[10:] == one.oom_looks[1:] == [clock.now - limits.OOM_LOOK_SECONDS - STEP, clock.now]


def test_shared_memory_of_all_processes_of_the_program_is_noted(supervised, monkeypatch):
    monkeypatch.setattr(supervisors.linux, "descendants", lambda pid: [4243])
    monkeypatch.setattr(supervisors.linux, "mapped_files", lambda pid, pattern: {f"{pattern}{pid}"})
    supervised.segments = {"kept"}
    supervised._note_segments()
    assert supervised.segments == {"kept", "/dev/shm/mpich_shm_4242", "/dev/shm/mpich_shm_4243"}


def test_each_look_is_also_one_at_output_messages_and_stacks(supervised, clock):
    one, looked = supervised, []
    one.relay = SimpleNamespace(look=lambda now: looked.append(("relay", now)))
    one.stacks = SimpleNamespace(look=lambda now: looked.append(("stacks", now)))
    one._look()
    assert looked == [("relay", clock.now), ("stacks", clock.now)] and one.outputs.looks == [clock.now]


def test_the_last_hundred_spells_that_a_supervisor_was_stopped_are_kept(supervised, clock):
    one = supervised
    for _ in range(103):
        clock.now += 2 * limits.FROZEN_SECONDS
        one._forgive_own_sleep()  # no longer than it may sleep by itself
    assert one.frozen == []
    ends = []
    for _ in range(103):
        clock.now += 2 * limits.FROZEN_SECONDS + STEP
        one._forgive_own_sleep()
        ends.append(clock.now)
    assert one.frozen == [(at - 2 * limits.FROZEN_SECONDS - STEP, at) for at in ends[-100:]]
    one.suspended_at = clock.now
    one._suspend(signal.SIGCONT)
    assert [end for _, end in one.frozen] == [*ends[-99:], clock.now]


def test_time_in_which_a_supervisor_was_stopped_is_no_age(supervised):
    supervised.frozen = [(1.0, 3.0), (10.0, 14.0), (20.0, 25.0)]
    assert [supervised._age(then, 30.0) for then in (0.0, 3.0, 12.0, 14.0, 25.0)] == [19.0, 18.0, 11.0, 11.0, 5.0]


@pytest.mark.parametrize(
    ("by_us", "hurried", "status", "went_well", "seconds"),
    [
        (False, False, 0, True, 9.0), (False, False, 3 << 8, False, 9.0), (True, False, 0, False, limits.DRAIN_SECONDS),
        (False, True, 0, False, limits.DRAIN_SECONDS), (True, True, 9, False, limits.DRAIN_SECONDS),
    ],
)  # fmt: skip
def test_what_we_end_is_not_waited_for_as_long(supervised, by_us, hurried, status, went_well, seconds):
    one, asked = supervised, []
    one.left = SimpleNamespace(patience=lambda *words: asked.append(words) or 9.0)
    one.ended_by_us, one.hurried, one.status, one.ended_at, one.outputs.heard_at = by_us, hurried, status, 100.0, 200.0
    one.outputs.pipes = {1: "out"}
    assert one._silent_at() == 200.0 + seconds and asked == [(True, went_well)]
    one.ended_at, one.outputs.pipes = 300.0, {}
    assert one._silent_at() == 300.0 + seconds and asked[1:] == [(False, went_well)]


def test_a_welcome_is_waited_for_and_not_asked_for_again_and_again(monkeypatch):
    happened, answers = [], [[], [messages.Ping()], [WELCOME]]
    one = Supervisor(99, "hydra", "-", Inherited())
    one.loop.close()
    one.identity = Identity(1, 2, 0, 0, "a")

    class Waits:
        def register(self, channel, flags):
            happened.append(("register", flags))

        def poll(self):
            happened.append("poll")

    class There(Channel):
        def receive(self):
            happened.append("receive")
            return answers.pop(0)

    monkeypatch.setattr(supervisors, "_connect_to_any", lambda address: address)
    monkeypatch.setattr(supervisors, "Channel", lambda socket, limit: There())
    monkeypatch.setattr(supervisors.select, "poll", Waits)
    one._connect()
    assert happened == [("register", supervisors.select.POLLIN), *["poll", "receive"] * 3]
