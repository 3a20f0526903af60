"""What an attempt and a supervisor do with each message, signal and deadline, told to them one by one."""

import os
import signal
import subprocess
from types import SimpleNamespace

import pytest
import support
from clocks import STEP, Channel, Clock
from dbrdist_launch import codes, limits, linux
from dbrdist_launch.backends.hydra import Hydra
from dbrdist_launch.backends.job import Host, Job
from dbrdist_launch.backends.mpi import Starter
from dbrdist_launch.launcher.judgement.report import Failure
from dbrdist_launch.launcher.preparation.settings import LaunchSettings
from dbrdist_launch.launcher.running import attempt as attempts
from dbrdist_launch.launcher.running import suspension
from dbrdist_launch.launcher.running.attempt import Attempt
from dbrdist_launch.launcher.running.plan import LaunchPlan
from dbrdist_launch.launcher.streams import input as inputs
from dbrdist_launch.launcher.streams.output import Piece
from dbrdist_launch.messages import Ask, Exit, Failed, Hello


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


class Output:
    """Keeps what is said and taken."""

    footer = None

    def __init__(self):
        self.said, self.pieces = [], []

    def echo(self, data):
        pass

    def note(self, text):
        self.said.append(text)

    def take(self, piece):
        self.pieces.append(piece)


class Mpiexec:
    """A starter that runs until the test lets it end."""

    name, kills_step, code = "mpiexec", False, None

    def poll(self):
        return self.code

    def result(self):
        return self.code or 0, 0


@pytest.fixture
def start(clock):
    """Makes attempts of ranks that have said hello."""
    made = []

    def make(size=2, present=None, job=None, addresses=(), deadline=None, **values):
        job = job or Job(("x",), size)
        plan = LaunchPlan(
            job, ["/m"], {}, {"A": "1"}, 60.0, Hydra(Starter("mpich", "5", "/m")), "t", None, addresses, deadline
        )
        one = Attempt(plan, Output(), LaunchSettings(("x",), **values))
        one.starter = one.judge.starter = Mpiexec()
        one.starter_outputs = SimpleNamespace(give_credit=lambda count: None)
        one.started_at = one.judge.started_at = one.judge.progress_at = one.next_tick = one.last_tick = clock.now
        one.next_ping, one.listeners = clock.now, []
        one.loop.close()
        one.loop = SimpleNamespace(
            watch_channel=lambda channel, call: None, forget=lambda number: None, turn=clock.pass_by
        )
        for number in range(size if present is None else present):
            one._on_hello(Channel(), hello(number, size))
        made.append(one)
        return one

    yield make
    for one in made:
        os.close(one.wake_read)
        os.close(one.wake_write)


def hello(rank, size=2, host="a"):
    return Hello("t", rank, size, rank, host)


def exit_of(code=0, number=0, ours=False, step=None, age=0.0):
    return Exit(code, number, None, ours, step, age)


def sent(one, rank, kind):
    return [fields for name, fields in one.ranks[rank].channel.sent if name == kind]


# ---- ranks that come ------------------------------------------------------------------------------------------------


def test_a_rank_is_told_what_it_needs(start, monkeypatch):
    monkeypatch.setattr(inputs, "has_input", lambda: True)
    placed = (Host("a", 2), Host("b", 1))
    one = start(3, job=Job(("x",), 3, placed), addresses=("10.0.0.1",), host_timeout=7.0, threads="keep", gpus="rank")
    (welcome,) = sent(one, 0, "welcome")
    assert welcome == {
        "environment": {"A": "1"}, "directory": os.getcwd(), "host_timeout": 7.0, "window": limits.WINDOW_BYTES,
        "threads": "keep", "gpus": "rank", "inject": True, "master": "a", "local_sizes": {"a": 2},
        "command": ["x"], "port": 0, "files": [], "input": True,
    }  # fmt: skip
    assert not sent(one, 1, "welcome")[0]["input"]
    assert one.ranks[0].channel.peer_seconds == 7.0
    (welcome,) = sent(start(2), 1, "welcome")
    assert (welcome["window"], welcome["master"]) == (limits.LOCAL_WINDOW_BYTES, "127.0.0.1")
    assert welcome["local_sizes"] == {"a": 2}
    monkeypatch.setattr(attempts.os, "getcwd", lambda: (_ for _ in ()).throw(FileNotFoundError()))
    assert attempts.working_folder() is None


def test_rank_0_is_met_at_the_first_host_of_the_job_or_where_it_is(start):
    masters = []
    for hosts, addresses in (((Host("b", 1), Host("a", 1)), ("10.0.0.1",)), ((), ("10.0.0.1",)), ((), ())):
        one = start(2, job=Job(("x",), 2, hosts), addresses=addresses)
        masters += [sent(one, rank, "welcome")[0]["master"] for rank in (0, 1)]
    assert masters == ["b", "b", "a", "a", "127.0.0.1", "127.0.0.1"]


def test_who_asks_is_told_since_when_the_attempt_runs(start, clock):
    one, heard = start(1), []
    one.questions = SimpleNamespace(hear=lambda *given: heard.append(given))
    clock.pass_by(12.5)
    channel = Channel()
    one._on_hello(channel, Ask("t", "ranks"))
    assert heard == [(channel, "ranks", 12.5)] and list(one.ranks) == [0]


def test_a_listener_says_and_hears_by_the_attempt(start, monkeypatch):
    monkeypatch.setattr(attempts, "ConnectionListener", lambda *given: given)
    one = start(1, addresses=("10.0.0.1",), port=7)
    assert one._listen("/s") == (one.loop, "t", one._on_hello, one._say, "/s", ("10.0.0.1",), 7)
    assert start(1)._listen(None)[4:] == (None, ("127.0.0.1",), 0)


@pytest.mark.parametrize(("rank", "size", "who"), [(1, 3, "a process"), (0, 2, "another process")])
def test_ranks_of_another_world_and_second_ones_are_refused(start, rank, size, who):
    one = start(2, present=1)
    channel = Channel()
    one._on_hello(channel, hello(rank, size))
    assert channel.is_closed and channel.sent == [] and list(one.ranks) == [0]
    assert (one.failure.kind, one.failure.code, one.failure.host) == ("start", codes.NOT_STARTED, "a")
    assert (
        f"one job of 2 ranks, but {who} says that it is rank {rank} of {size}: mpiexec does not match"
        in one.failure.message
    )
    first = one.failure
    late = Channel()
    one._on_hello(late, hello(1))
    assert late.is_closed and one.failure is first and list(one.ranks) == [0]


@pytest.mark.parametrize(("asked", "passed"), [(0, []), (signal.SIGINT, [2]), (signal.SIGUSR1, [15])])
def test_a_rank_that_comes_after_a_request_to_stop_hears_of_it(start, asked, passed):
    one = start(2, present=1)
    one.asked = asked
    one._on_hello(Channel(), hello(1))
    assert [fields["signal"] for fields in sent(one, 1, "stop")] == passed


# ---- what ranks tell ------------------------------------------------------------------------------------------------


def tell(one, rank, whole=None, **fields):
    one.ranks[rank].channel.inbox = [whole or support.message(fields.pop("t"), **fields)]
    one._on_rank(one.ranks[rank])


def test_output_is_urgent_from_half_of_the_window_on(start):
    one = start(1)
    half = limits.LOCAL_WINDOW_BYTES // 2 - limits.PIECE_BYTES
    tell(one, 0, t="out", stream="out", data=b"x" * half)
    assert not one.output.pieces[-1].urgent and one.ranks[0].owed == half + limits.PIECE_BYTES
    tell(one, 0, t="out", stream="err", data=b"e")
    piece = one.output.pieces[-1]
    assert (piece.urgent, piece.stream, piece.rank, piece.host) == (True, "err", 0, "a")


def test_what_was_written_may_be_written_again(start, monkeypatch):
    one = start(2)
    for rank, length in ((0, 10), (0, 5), (1, 3)):
        tell(one, rank, t="out", stream="out", data=b"x" * length)
    for piece in one.output.pieces:
        one._on_written(piece)
    with pytest.raises(BlockingIOError):
        one._on_wake()  # nobody was woken
    one.ranks[1].connected = False
    given = []
    monkeypatch.setattr(one.starter_outputs, "give_credit", given.append)
    one._give_credit()
    one._on_written(Piece(attempts.SPAWNED, "a", "out", b"four"))
    one._give_credit()
    assert given == [0, 4 + limits.PIECE_BYTES]
    assert sent(one, 0, "credit") == [{"bytes": 15 + 2 * limits.PIECE_BYTES}] and one.ranks[0].owed == 0
    assert sent(one, 1, "credit") == [] and not one.arrived
    one.output.pieces[0].urgent, one.output.pieces[0].rank = True, 9
    one._on_written(one.output.pieces[0])
    one._on_wake()
    one._give_credit()  # of a rank that nobody knows


def test_answers_and_beats(start, clock):
    one = start(2)
    for rank in one.ranks.values():
        rank.pinged = True
    beat = {"state": "S", "traced": False, "beats": 3, "step": 5, "age": 2.0, "paused": False, "fields": {"loss": 1}}
    clock.now += 4.0
    tell(one, 0, t="beat", **beat)
    tell(one, 1, t="pong")
    first, second = one.ranks[0], one.ranks[1]
    assert not first.pinged and not second.pinged and (first.step, first.beat_at) == (5, clock.now - 2.0)
    assert second.beat_at is None and first.heard_at == clock.now
    tell(one, 1, t="started", pid=7)
    began = clock.now
    clock.now += 1.0
    tell(one, 0, t="started", pid=8)
    assert (one.ranks[1].pid, one.ranks[0].pid, one.first_rank_at) == (7, 8, began)
    tell(one, 0, t="stacks", text="s", sources={}, state="T")
    assert (first.stacks, first.state) == ("s", "T")
    tell(one, 0, t="ended", code=3, signal=0)
    ended = clock.now
    clock.now += 1.0
    tell(one, 0, t="ended", code=4, signal=0)
    assert first.ended == ended and first.early_exit.code == 4


def test_a_connection_that_breaks_is_remembered(start, clock):
    one = start(2)
    one.ranks[1].channel.inbox = None
    one._on_rank(one.ranks[1])
    rank = one.ranks[1]
    assert (rank.connected, rank.lost_at, rank.channel.is_closed) == (False, clock.now, True)


@pytest.mark.parametrize(
    ("end", "change", "said_bye", "failed", "asked"),
    [
        (exit_of(), {}, False, False, 0),
        (exit_of(75), {}, True, False, 0),
        (exit_of(0, 9), {}, False, True, 0),
        (exit_of(3), {}, False, True, 0),
        (exit_of(143, 15, ours=True), {}, True, False, 0),
        (exit_of(143, 15), {"asked": signal.SIGTERM}, True, False, 15),
        (exit_of(143), {"asked": signal.SIGUSR1}, True, False, 10),
        (exit_of(130), {"asked": signal.SIGINT}, True, False, 2),
        (exit_of(143), {"asked": signal.SIGINT}, False, True, 2),
        (exit_of(1), {"asked": signal.SIGINT}, False, True, 2),
        (exit_of(143, 15), {"asked_by_ranks": (0.0, 15)}, True, False, 15),
        (exit_of(143, 15), {"asked_by_ranks": (0.0, 10)}, False, True, 0),
        (exit_of(3), {"asked_by_ranks": (0.0, 15)}, False, True, 0),
    ],
)
def test_ends_that_are_failures_and_answers(start, end, change, said_bye, failed, asked):
    one = start(2)
    for name, value in change.items():
        setattr(one, name, value)
    tell(one, 1, end)
    assert one.ranks[1].exit is not None
    assert (one.failure is not None, one.asked) == (failed, asked)
    assert ("bye" in one.ranks[1].channel.kinds()) == (said_bye or failed)
    if failed:
        assert sent(one, 0, "kill") == [{"grace": limits.KILL_SECONDS}]


def test_a_python_that_was_interrupted_while_it_started_answered(start):
    one = start(2)
    one.asked = signal.SIGINT
    tell(one, 1, t="out", stream="err", data=b"KeyboardInterrupt\n")
    tell(one, 1, exit_of(1))
    assert one.failure is None and "bye" in one.ranks[1].channel.kinds()
    other = start(2)
    other.asked = signal.SIGTERM
    tell(other, 1, t="out", stream="err", data=b"KeyboardInterrupt\n")
    tell(other, 1, exit_of(1))
    assert other.failure is not None


def test_a_report_carries_the_last_beat(start, clock):
    one = start(2)
    tell(one, 0, exit_of(step=7, age=3.0))
    assert (one.ranks[0].step, one.ranks[0].beat_at) == (7, clock.now - 3.0)
    tell(one, 1, exit_of())
    assert (one.ranks[1].step, one.ranks[1].beat_at) == (-1, None)


def test_the_second_failure_does_not_count(start):
    one = start(3)
    tell(one, 1, exit_of(3))
    tell(one, 2, exit_of(4))
    assert one.failure.rank == 1


# ---- signals --------------------------------------------------------------------------------------------------------


def test_signals_of_the_launcher(start, clock, monkeypatch):
    one = start(2, grace=8.0)
    one.questions.show_stacks = lambda: one.output.note("stacks")
    one.ranks[1].exit = exit_of()
    stopped = []
    monkeypatch.setattr(suspension.os, "kill", lambda pid, number: stopped.append(number))
    monkeypatch.setattr(suspension, "_is_without_shell", lambda: False)
    one._on_signal(signal.SIGCHLD)
    one._on_signal(signal.SIGTSTP)
    assert stopped == [signal.SIGSTOP] and sent(one, 1, "signal") == []
    assert sent(one, 0, "signal") == [{"signal": signal.SIGTSTP}, {"signal": signal.SIGCONT}]
    one._on_signal(signal.SIGQUIT)
    assert (one.asked, one.judge.stop_asked) == (0, False)
    assert one.output.said == [
        "dbrdist-launch: suspended with all its ranks; `fg` or SIGCONT continues them", "stacks",
    ]  # fmt: skip
    told = []
    monkeypatch.setattr(one.events, "tell", lambda kind, **fields: told.append((kind, fields)))
    one._on_signal(signal.SIGINT)
    words = "dbrdist-launch: SIGINT: asking all ranks to save and stop within 8 s (press Ctrl-C again to stop now)"
    assert (one.asked, one.judge.stop_asked, one.output.said[-1]) == (signal.SIGINT, True, words)
    assert one.judge.answers == (75, 130)
    assert sent(one, 0, "stop") == [{"signal": 2}] and sent(one, 1, "stop") == []
    assert one.stop_deadline == clock.now + 8.0 and one.end_deadline is None
    one._on_signal(signal.SIGTERM)
    assert len(sent(one, 0, "stop")) == 1 and one.end_deadline is None
    assert told == [("stop_asked", {"signal": "SIGINT"})]
    one._on_signal(signal.SIGINT)
    assert one.output.said[-1] == "dbrdist-launch: interrupted again, stopping now"
    assert sent(one, 0, "kill") == [{"grace": 0.0}] and one.end_deadline == clock.now + limits.STARTER_SECONDS
    other = start(2)
    other._on_signal(signal.SIGTERM)
    assert other.output.said[-1].endswith("SIGTERM: asking all ranks to save and stop within 30 s")
    failed = start(2)
    failed.failure = Failure("exit", 1, "a", 1, "m")
    failed._on_signal(signal.SIGTERM)
    assert (failed.asked, failed.output.said) == (0, [])


@pytest.mark.parametrize("change", [{}, {"cut": True}, {"lost_at": 999.9}, {"ended": 999.9}])
def test_a_request_that_ranks_had_counts_where_none_is_gone(start, clock, change):
    one = start(2)
    tell(one, 0, t="asked", signal=10)
    tell(one, 1, t="asked", signal=15)
    due = clock.now + limits.REQUEST_SECONDS
    assert one.asked_by_ranks == (due, 10)
    for name, value in change.items():
        setattr(one.ranks[1], name, value)
    one._look_for_failures = lambda now: None
    clock.now = due - STEP
    one._tick()
    assert one.asked == 0 and one.asked_by_ranks is not None
    clock.now = one.next_tick = due
    one._tick()
    assert one.asked == (0 if change else 10) and one.asked_by_ranks is None


# ---- time -----------------------------------------------------------------------------------------------------------


def test_ranks_are_asked_once_a_second_and_again_when_they_have_answered(start, clock):
    one = start(3)
    one.ranks[2].connected = False

    def pings():
        one._tick()
        return [len(sent(one, rank, "ping")) for rank in range(3)]

    assert pings() == [1, 1, 0] and one.next_ping == clock.now + limits.PING_SECONDS
    clock.now += limits.TICK_SECONDS - STEP
    before = one.last_tick
    assert pings() == [1, 1, 0] and one.last_tick == before
    one.ranks[0].pinged = False
    clock.now = before + limits.PING_SECONDS - STEP
    assert pings() == [1, 1, 0] and one.last_tick == clock.now
    clock.now = one.next_tick = before + limits.PING_SECONDS
    assert pings() == [2, 1, 0]


def test_a_turn_looks_gives_credit_and_draws(start, clock, monkeypatch):
    one = start(1)
    drawn = []
    monkeypatch.setattr(attempts, "table", lambda ranks, seconds: drawn.append(seconds) or "table")
    one.questions.look = lambda now: None
    clock.now += 0.5
    assert not one._turn() and drawn == [] and one.output.footer is None
    one.output.footer = ""
    tell(one, 0, t="out", stream="out", data=b"x")
    one._on_written(one.output.pieces[0])
    clock.now += 0.5
    assert not one._turn() and one.output.footer == "table" and drawn == [1.0]
    assert len(sent(one, 0, "credit")) == 1
    one._look_for_failures = lambda now: 1 // 0
    one.failure = Failure("exit", 0, "a", 1, "m")
    clock.now += 0.5
    assert not one._turn() and one.output.said == []  # the first cause is known: nobody looks for another
    ended(one, 0)
    one.starter.code = 0
    assert one._turn()


@pytest.mark.parametrize(
    ("control", "addresses", "paths"),
    [(None, (), [None]), ("/s", (), ["/s"]), ("/s", ("10.0.0.1",), ["/s", None]), (None, ("10.0.0.1",), [None])],
)
def test_ranks_elsewhere_need_an_address_of_their_own(start, monkeypatch, control, addresses, paths):
    """Over the Unix socket come those of this machine, and `ps`, `stacks` and `stop`."""
    one, listened = start(1, addresses=addresses, port=7), []
    one.plan = one.plan._replace(control=control)

    def listen(loop, token, hear, say, path, addresses, port):
        listened.append((path, addresses, port))
        return SimpleNamespace(address=f"at {path}", close=lambda: None)

    def starter(command, environment, backend, inherited, without_input):
        started.update(environment)
        raise OSError("no mpiexec")

    started = {}
    monkeypatch.setattr(attempts, "ConnectionListener", listen)
    monkeypatch.setattr(attempts, "Signals", lambda *arguments: None)
    monkeypatch.setattr(attempts, "StarterProcess", starter)
    with pytest.raises(OSError, match="no mpiexec"):
        one.run()
    assert listened == [(path, addresses or ("127.0.0.1",), 7) for path in paths]
    assert started[attempts.ADDRESS] == f"at {paths[-1]}" and started[attempts.TOKEN] == "t"


def test_no_deadline_passes_while_the_job_is_suspended(start, clock, monkeypatch):
    """The signal comes within a turn, whose tick follows: a grace period that has seconds left has them still."""
    one = start(2, grace=8.0, deadline=clock.now + 20)
    one._on_signal(signal.SIGTERM)
    assert one.stop_deadline == clock.now + 8.0
    monkeypatch.setattr(suspension.os, "kill", lambda pid, number: clock.pass_by(3600))
    monkeypatch.setattr(suspension, "_is_without_shell", lambda: False)
    one._on_signal(signal.SIGTSTP)
    one._tick()
    assert one.stop_deadline > clock.now + 5 and one.plan.deadline > clock.now + 15
    assert one.end_deadline is None and sent(one, 0, "kill") == []


def test_a_fault_while_the_job_is_suspended_leaves_no_rank_stopped(start, monkeypatch):
    one = start(1)
    monkeypatch.setattr(suspension, "_is_without_shell", lambda: False)
    one.ranks[0].channel.unsent = b"x"

    def turn(seconds):
        raise ValueError("a faulty message")

    one.loop.turn = turn
    with pytest.raises(ValueError, match="faulty"):
        one._on_signal(signal.SIGTSTP)
    assert sent(one, 0, "signal") == [{"signal": signal.SIGTSTP}, {"signal": signal.SIGCONT}]


def test_a_job_that_no_shell_could_continue_is_not_suspended(start, monkeypatch):
    """As in `ssh -t host dbrdist-launch`: at a terminal, in its foreground, with nothing of its session above."""
    one = start(1)
    monkeypatch.setattr(suspension, "_is_without_shell", lambda: True)
    one._on_signal(signal.SIGTSTP)
    assert "there is no shell at this terminal" in one.output.said[0] and sent(one, 0, "signal") == []


@pytest.mark.parametrize(("group", "has_shell"), [(os.setpgrp, True), (os.setsid, False)])
def test_a_shell_is_above_the_group_in_the_same_session(group, has_shell):
    script = subprocess.Popen(["sh", "-c", "sleep 60; true"], preexec_fn=group)
    try:
        while not (below := linux.children(script.pid)):
            pass
        assert suspension._has_shell(script.pid) == suspension._has_shell(below[0]) == has_shell
    finally:
        os.killpg(script.pid, signal.SIGKILL)
        script.wait()


def test_what_slept_is_forgiven(start, clock):
    for asleep, forgiven in (
        (limits.ASLEEP_SECONDS, 0.0),
        (limits.ASLEEP_SECONDS + STEP, limits.ASLEEP_SECONDS + STEP),
    ):
        one = start(2)
        heard, progress = one.ranks[0].heard_at, one.judge.progress_at
        one.stop_deadline = deadline = clock.now + 100.0
        clock.now += limits.TICK_SECONDS + asleep
        one._forgive_own_sleep()
        assert one.judge.progress_at - progress == one.ranks[0].heard_at - heard == forgiven
        assert one.stop_deadline - deadline == forgiven
    one = start(2)
    clock.now += 100.0
    one._forgive_own_sleep()
    assert one.stop_deadline is None


def test_each_tick_looks_for_failures_until_there_is_one(start, clock):
    one, looks = start(2), []
    one._look_for_failures = looks.append
    one._tick()
    clock.now += limits.TICK_SECONDS - STEP
    one._tick()  # too early
    clock.now += STEP
    one._tick()
    assert looks == [1000.0, 1000.0 + limits.TICK_SECONDS]
    one.failure = Failure("exit", 0, "a", 1, "m")
    clock.now += 1.0
    one._tick()
    assert len(looks) == 2


def test_the_grace_period_ends(start, clock):
    one = start(2, grace=8.0)
    one._on_signal(signal.SIGTERM)
    for at, kills in ((8.0 - STEP, 0), (8.0, 1), (9.0, 1)):
        clock.now = one.next_tick = one.last_tick = 1000.0 + at
        one._tick()
        assert len(sent(one, 0, "kill")) == kills
    assert one.output.said[-1] == "dbrdist-launch: the grace period is over, stopping now"


def test_the_end_of_the_starter_is_noted_once(start, clock):
    one = start(2)
    one._tick()
    assert one.judge.starter_ended_at is None
    one.starter.code = 0
    for seconds in (1.0, 0.5):
        clock.now += seconds
        one._tick()
    assert one.judge.starter_ended_at == clock.now - 0.5


def test_warnings_are_said_and_stacks_asked_for_once(start, clock):
    one = start(2, heartbeat_timeout=5.0)
    asked, told = [], []
    one.events = SimpleNamespace(tell=lambda *given, **fields: told.append((given, fields)))
    one.questions.ask_for_stacks = lambda: asked.append(clock.now)
    one.judge.warnings = ["one", "two"]
    for rank in one.ranks.values():
        rank.beat_at, rank.heard_at = clock.now - 6.0, clock.now
    one._look_for_failures(clock.now)
    assert one.output.said == ["dbrdist-launch: one", "dbrdist-launch: two"] and one.judge.warnings == []
    assert told == [(("warning",), {"message": "one"}), (("warning",), {"message": "two"})]
    assert asked == [clock.now] and one.judge.stacks_until == clock.now + limits.STACKS_SECONDS
    one._look_for_failures(clock.now)
    assert len(asked) == 1
    one.end_deadline, one.judge.warnings = clock.now + 1, ["three"]
    one._look_for_failures(clock.now + 99.0)
    assert one.judge.warnings == ["three"] and one.failure is None


def test_deadlines_of_the_job(start, clock):
    one = start(2, deadline=1010.0, timeout=10.0)
    assert one._deadlines(1010.0 - STEP) is None
    failure = one._deadlines(1010.0)
    assert (failure.kind, failure.rank, failure.code) == ("deadline", None, codes.STALLED)
    assert failure.message == "the job did not end within 10 s (--timeout)"
    assert start(2)._deadlines(1e9) is None


@pytest.mark.parametrize("by", ["exit", "leaving", "exception", "thread"])
def test_ranks_that_stay_behind_end_the_job_where_the_user_asked(start, clock, by):
    """Also where the rank that ended first was no Python, which tells nothing of itself."""
    for seconds in (None, 4.0):
        one = start(3, exit_timeout=seconds)
        if by == "exit":
            tell(one, 1, exit_of())
        else:
            tell(one, 1, t="event", event=by, message="E: m", own=True, name="t", code=1)
        begins = seconds is not None and by != "thread"
        assert one.exit_deadline == (clock.now + 4.0 if begins else None)
        if begins:
            clock.now += 1.0
            tell(one, 2, exit_of())
            assert one.exit_deadline == clock.now + 3.0  # it counts from the first
            assert one._deadlines(clock.now + 3.0 - STEP) is None
            failure = one._deadlines(clock.now + 3.0)
            text = "not all ranks ended within 4 s of the first (--exit-timeout)"
            still = [0] if by == "exit" else [0, 1]
            words = f"E: m; {text}" if by == "exception" else f"{text}; still running: {still}"
            assert (failure.rank, failure.host, failure.message) == (1, "a", words)
            assert failure.kind == ("exception" if by == "exception" else "deadline")


# ---- the end --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stacks", "kind", "is_shown"), [(False, "exit", False), (True, "exit", True), (False, "stalled", True)]
)
def test_the_others_are_asked_for_a_last_beat(start, clock, stacks, kind, is_shown):
    one = start(3, stacks=stacks)
    one.ranks[2].exit = exit_of()
    asked = []
    one.questions.ask_for_stacks = lambda: asked.append(1)
    one.questions.have_stacks = lambda: False
    one.ranks[0].stacks = "here"
    one._fail(Failure(kind, 1, "a", 1, "m"))
    assert [len(sent(one, rank, "ping")) for rank in range(3)] == [1, 1, 0] and len(asked) == stacks
    waited = limits.STACKS_SECONDS if stacks else limits.ANSWER_SECONDS
    assert one.failure.seconds == round(waited, 3) or one.failure.seconds == 0.0
    assert clock.now == 1000.0 + waited
    assert [other["rank"] for other in one.failure.others] == [0, 2]
    assert ("stacks" in one.failure.others[0]) == is_shown
    assert one.end_deadline == clock.now + limits.KILL_SECONDS + limits.STARTER_SECONDS


def test_nobody_is_waited_for_who_has_answered(start, clock):
    one = start(2)

    def answer(seconds):
        clock.now += 0.05
        for rank in one.ranks.values():
            rank.pinged = False

    one.loop.turn = answer
    one._fail(Failure("exit", 1, "a", 1, "m"))
    assert clock.now == 1000.05


def ended(one, *codes_of_ranks):
    for rank, code in zip(one.ranks.values(), codes_of_ranks):
        rank.exit = exit_of(*code) if isinstance(code, tuple) else exit_of(code)
    return one


def test_a_job_is_over_when_ranks_and_starter_have_ended(start, clock):
    one = start(2)
    assert not one._finished()
    ended(one, 0)
    assert not one._finished() and one.all_ended_at is None
    ended(one, 0, 0)
    assert not one._finished() and one.all_ended_at == clock.now  # mpiexec still runs
    clock.now += limits.STARTER_SECONDS
    assert not one._finished()
    clock.now += STEP
    assert one._finished()
    one = ended(start(2), 0, 0)
    one.starter.code = 0
    assert one._finished()
    lacking = ended(start(2, present=1), 0)
    lacking.starter.code = 0
    assert not lacking._finished()
    lacking.judge.starter_ended_at = clock.now
    assert not lacking._finished()
    lacking.asked = 15
    assert lacking._finished()
    lost = ended(start(2), 0)
    lost.ranks[1].connected, lost.starter.code = False, 0
    assert not lost._finished()  # what became of it is not known yet


def test_a_failed_job_is_over_when_the_others_have_ended(start, clock):
    one = start(3)
    one.starter.code = 0
    one.failure = Failure("host_lost", 1, "b", 69, "m", ranks_lost=[1])
    assert not one._finished()
    one.ranks[0].exit = exit_of(143, 15)
    one.ranks[2].connected = False
    assert one._finished()  # rank 1 is lost with its host, rank 2 with its connection
    one.starter.code = None
    assert one._finished()  # mpiexec would wait for the host
    waits = ended(start(2), 3, 143)
    waits.failure = Failure("exit", 0, "a", 3, "m")
    assert not waits._finished()
    waits.starter.code = 3
    assert waits._finished()
    late = start(2)
    late.end_deadline = clock.now + 1.0
    assert not late._finished()
    clock.now += 1.0
    assert late._finished()


def test_what_is_undecided_is_not_over(start):
    one = ended(start(2), 0, (143, 15, True))
    one.starter.code = 0
    assert not one._finished()
    one.asked = one.judge.stop_asked = 15
    assert one._finished()


@pytest.mark.parametrize(
    ("ends", "asked", "code"),
    [
        ((0, 0), 0, 0),
        ((0, 75), 15, 75),
        ((75, 0), 0, 75),
        ((0,), 0, 143),
        ((0, (9, 9)), 0, 143),
        ((0, (2, 2)), 2, 130),
        ((0, 3), 15, 143),
        ((0, 3), 0, 3),
    ],
)
def test_the_code_of_a_job_without_a_failure(start, ends, asked, code):
    one = ended(start(2), *ends)
    one.asked = asked
    outcome = one._outcome()
    assert (outcome.code, outcome.asked, outcome.failure) == (code, asked, None)


def test_the_outcome_counts_from_the_start(start, clock):
    one = ended(start(2), 0, 0)
    clock.now += 5.0
    assert one._outcome().first_rank_seconds is None
    one.first_rank_at, one.ranks[1].step = 1002.0, 9
    outcome = one._outcome()
    assert (outcome.started_at, outcome.seconds, outcome.first_rank_seconds, outcome.steps) == (1000.0, 5.0, 2.0, 9)
    one.judge.at_end = lambda: Failure("start", None, None, 71, "m")
    assert one._outcome().code == 71
    one.failure, one.asked = None, 15
    assert one._outcome().failure is None


def test_faults_of_ours_are_said_a_few_times_and_end_only_a_job_without_starter(start, clock):
    one = start(2)
    one._finished = lambda: 1 // 0
    for _ in range(10 * attempts._MOST_FAULTS + 5):
        assert not one._turn()
    assert len(one.output.said) == attempts._MOST_FAULTS and "ZeroDivisionError" in one.output.said[0]
    one.starter.code = 0
    assert one._turn()
    one.faults = 10 * attempts._MOST_FAULTS - 1
    assert not one._turn() and one._turn()


def test_words_of_the_starter_are_kept_and_shown_on_request(start):
    one, told = start(1), start(1, verbose=True)
    for number in range(205):
        one._starter_said(f"line {number}")
        told._starter_said(f"line {number}")
    assert one.judge.starter_lines == [f"line {number}" for number in range(5, 205)] and one.output.said == []
    assert told.output.said[-1] == "[mpiexec] line 204"


def test_what_was_to_be_said_is_said_with_the_outcome(start):
    one, told = ended(start(2), 0, 0), []
    one.events = SimpleNamespace(tell=lambda event, **fields: told.append((event, fields)))
    one.judge.warnings = ["warning: first", "warning: second"]
    one._outcome()
    words = ["warning: first", "warning: second"]
    assert one.output.said == [f"dbrdist-launch: {text}" for text in words] and one.judge.warnings == []
    assert told == [("warning", {"message": text}) for text in words]


def test_an_attempt_from_its_first_listener_to_its_last_descriptor(start, clock, monkeypatch):
    """What is opened is closed again in order, and only then nobody writes to the pipe that wakes the loop."""
    one, happened = start(2), []

    def note(*what):
        return lambda *words: happened.append((*what, *words))

    def listen(loop, token, hear, say, path, addresses, port):
        happened.append(("listen", path))
        return SimpleNamespace(address="at", close=note("listener closes"))

    def starter(command, environment, backend, inherited, without_input):
        happened.append(("starter", command, environment, backend, inherited, without_input))
        return SimpleNamespace(
            pipes=(5, 6), input="input", end=note("starter ends"), last_words=lambda: [b"last"], close=note("closes")
        )

    def signals(loop, numbers, call, inherited):
        happened.append(("signals", numbers == attempts._CAUGHT, call == one._on_signal))
        return SimpleNamespace(close=note("signals close"))

    def outputs(loop, pipes, said, take):
        happened.append(("outputs", pipes, said == one._starter_said, take == one.output.take))
        return SimpleNamespace(finish=note("finish"))

    turns, read, write = [True, False, False], one.wake_read, one.wake_write
    one.inherited = SimpleNamespace(widen=note("widen"))
    one.input = SimpleNamespace(to_rank_0=True, begin_for_starter=note("begin"), close=note("input closes"))
    one.output.start = note("output starts")
    one.loop = SimpleNamespace(watch=lambda number, call: happened.append(("watch", number)), close=note("loop closes"))
    one._turn = lambda: happened.append("turn") or turns.pop()
    one._outcome = lambda: "outcome"
    for rank in one.ranks.values():
        rank.channel.close = note("channel closes", rank.rank)
    monkeypatch.setattr(attempts, "ConnectionListener", listen)
    monkeypatch.setattr(attempts, "Signals", signals)
    monkeypatch.setattr(attempts, "StarterProcess", starter)
    monkeypatch.setattr(attempts, "StarterOutputs", outputs)
    one.plan = one.plan._replace(control=None)
    clock.now += 5.0
    assert one.run() == "outcome" and turns == []
    given = {attempts.ADDRESS: "at", attempts.TOKEN: "t"} if one.plan.told_by_environment else {}
    assert happened == [
        ("listen", None), ("widen",), ("signals", True, True),
        ("starter", ["/m"], given, one.plan.backend, one.inherited, True), ("output starts",), ("watch", read),
        ("outputs", (5, 6), True, True), ("begin", "input"), "turn", "turn", "turn",
        ("input closes",), ("starter ends",), ("finish", [b"last"]), ("closes",), ("channel closes", 0),
        ("channel closes", 1), ("listener closes",), ("signals close",), ("loop closes",),
    ]  # fmt: skip
    assert one.started_at == one.next_tick == one.last_tick == one.next_ping == one.judge.progress_at == clock.now
    one.output.written("piece")
    assert one.wake_write == -1 and not any(os.path.exists(f"/proc/self/fd/{number}") for number in (read, write))
    one._on_written(SimpleNamespace(urgent=True))  # a thread that still writes
    one.wake_read, one.wake_write = os.pipe()


def test_each_tick_is_one_of_the_input_of_listeners_and_of_questions(start, clock):
    one, looked = start(2), []
    one.input = SimpleNamespace(look=lambda: looked.append("input"))
    one.listeners = [SimpleNamespace(look=lambda now, k=k: looked.append((k, now))) for k in range(2)]
    one.questions = SimpleNamespace(look=lambda now: looked.append(("questions", now)))
    one._tick()
    assert looked == ["input", (0, clock.now), (1, clock.now), ("questions", clock.now)]
    one._tick()
    assert len(looked) == 4 and one.next_tick == clock.now + limits.TICK_SECONDS


def test_after_the_grace_period_nobody_is_waited_for(start, clock):
    one = start(2, grace=8.0)
    one._on_signal(signal.SIGTERM)
    clock.now += 8.0
    one._tick()
    assert [sent(one, rank, "kill") for rank in range(2)] == [[{"grace": 0.0}]] * 2 and one.stop_deadline is None
    assert one.end_deadline == clock.now + limits.STARTER_SECONDS
    assert one.output.said[-1] == "dbrdist-launch: the grace period is over, stopping now"


def test_no_time_of_the_launchers_own_sleep_counts(start, clock):
    one, forgiven = start(2, deadline=2000.0), []
    one.judge.forgive = forgiven.append
    one.asked_by_ranks = (1001.0, 15)
    one.stop_deadline, one.exit_deadline, one.end_deadline = 1002.0, None, 1004.0
    clock.now += limits.ASLEEP_SECONDS + limits.TICK_SECONDS
    one._forgive_own_sleep()
    assert forgiven == [] and one.asked_by_ranks == (1001.0, 15)
    clock.now += 100.0
    one._forgive_own_sleep()
    slept = 100.0 + limits.ASLEEP_SECONDS
    assert forgiven == [slept] and one.asked_by_ranks == (1001.0 + slept, 15) and one.last_tick == clock.now
    found = one.stop_deadline, one.exit_deadline, one.end_deadline, one.all_ended_at, one.plan.deadline
    assert found == (1002.0 + slept, None, 1004.0 + slept, None, 2000.0 + slept)


def test_a_supervisor_that_fails_says_why(start, clock):
    one = start(2)
    one._take(one.ranks[1], Failed("why"), clock.now)
    assert one.ranks[1].broken == "why" and one.ranks[0].broken is None


@pytest.mark.parametrize(
    ("here", "places", "raised"), [(True, False, ["f"]), (False, False, []), (True, True, ["f"]), (False, True, ["f"])]
)
def test_ranks_that_inherit_limits_are_told_which_were_raised(start, monkeypatch, here, places, raised):
    """Those beside mpiexec, and all where a starter hands limits on to all hosts."""
    one = start(1, present=0)
    monkeypatch.setattr(one.inherited, "raised", ["f"])
    monkeypatch.setattr(one.plan.backend, "places_ranks", places)
    one._on_hello(Channel(), hello(0, 1, os.uname().nodename if here else "elsewhere"))
    (told,) = sent(one, 0, "welcome")
    assert told["files"] == raised
