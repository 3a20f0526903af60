"""One run of a job: start it, listen to its ranks, end it at the first failure, and say what it was."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque

from ... import codes, limits, messages
from ...channel import Channel
from ...errors import place_of
from ...inherited import Inherited
from ...loop import Loop, Signals
from ...rank.surroundings import ADDRESS, TOKEN
from ...signals import PASSED_ON, REAL_TIME, STOPS
from ..judgement import report
from ..judgement.endings import common_code, is_answer, working_folder
from ..judgement.judge import Judge
from ..judgement.ranks import Rank
from ..judgement.report import Failure
from ..preparation.settings import LaunchSettings
from ..streams.events import Events
from ..streams.input import InputReader
from ..streams.output import Output
from ..streams.pieces import SPAWNED, Piece
from ..streams.starter_output import StarterOutputs
from ..streams.view import table
from .listener import ConnectionListener
from .plan import LaunchPlan, Outcome
from .process import StarterProcess
from .questions import Questions
from .suspension import suspend

_CAUGHT = (*STOPS, *PASSED_ON, *REAL_TIME, signal.SIGQUIT, signal.SIGTSTP, signal.SIGCHLD)
_MOST_FAULTS = 5  # that are reported


class Attempt:
    """Runs one starter command (mpiexec, srun) with supervised ranks."""

    def __init__(
        self, plan: LaunchPlan, output: Output, settings: LaunchSettings, events: Events | None = None
    ) -> None:
        self.plan, self.output, self.settings = plan, output, settings
        self.events = events or Events()
        self.size = plan.job.ranks
        self.window = limits.WINDOW_BYTES if plan.addresses else limits.LOCAL_WINDOW_BYTES
        self.inherited = Inherited()
        self.loop = Loop()
        self.loop.on_wake = self._forgive_own_sleep
        self.judge = Judge(
            self.size, plan.start_seconds, settings.heartbeat_timeout, settings.host_timeout, settings.end_on
        )
        self.ranks = self.judge.ranks
        self.failure: Failure | None = None
        self.port, self.master = 0, "127.0.0.1"  # for the program's own rendezvous: a free port of rank 0's host
        self.asked = 0  # the signal that asked for the end
        self.asked_by_ranks: tuple[float, int] | None = None  # when it counts, and the signal
        self.stop_deadline: float | None = None
        self.exit_deadline: float | None = None
        self.end_deadline: float | None = None
        self.all_ended_at: float | None = None
        self.faults = 0
        self.first_rank_at: float | None = None
        self.questions = Questions(self.ranks, output.note, lambda: self._ask_to_stop(signal.SIGTERM))
        self.waiting_for_port: list[Rank] = []  # ranks whose welcome waits for that of rank 0
        self.input = InputReader(self.loop, output.echo, plan.feeds_rank_0(), plan.kept_input)
        self.arrived: deque[Piece] = deque()  # output that has been written, told by the output's threads
        self.wake_lock = threading.Lock()
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_read, False)
        os.set_blocking(self.wake_write, False)

    # --- life

    def run(self) -> Outcome:
        """Run to the end; no process of the job is left when this returns."""
        self.started_at = self.judge.started_at = self.judge.progress_at = time.monotonic()
        self.next_tick = self.last_tick = self.next_ping = self.started_at
        self.listeners = [self._listen(self.plan.control)] if self.plan.control else []
        if self.plan.addresses or not self.listeners:
            self.listeners.append(self._listen(None))
        self.inherited.widen()
        signals = Signals(self.loop, _CAUGHT, self._on_signal, self.inherited)
        # Where all ranks are here the program's own children shall not inherit these: a folder holds them.
        told = {ADDRESS: self.listeners[-1].address, TOKEN: self.plan.token} if self.plan.told_by_environment else {}
        # Ours come first: of mpiexec's environment the last must be what the backend wants it to be.
        given = self.plan.command, {**told, **self.plan.environment}, self.plan.backend, self.inherited
        self.starter = self.judge.starter = StarterProcess(*given, without_input=self.input.to_rank_0)
        self.output.written = self._on_written
        self.output.start()
        try:
            self.loop.watch(self.wake_read, self._on_wake)
            self.starter_outputs = StarterOutputs(self.loop, self.starter.pipes, self._starter_said, self.output.take)
            self.input.begin_for_starter(self.starter.input)
            while not self._turn():
                pass
        finally:
            self.input.close()
            self.starter.end()
            self.starter_outputs.finish(self.starter.last_words())
            self.starter.close()
            for rank in self.ranks.values():
                rank.channel.close()
            for listener in self.listeners:
                listener.close()
            signals.close()
            with self.wake_lock:  # threads that still write know the pipe
                self.output.written = lambda piece: None
                for descriptor in (self.wake_read, self.wake_write):
                    os.close(descriptor)
                self.wake_write = -1
            self.loop.close()
        return self._outcome()

    def _turn(self) -> bool:
        """Whether the job is over. An error of the launcher itself is reported, and does not end the job."""
        try:
            if self._finished():
                return True
            self.loop.turn(self.next_tick - time.monotonic())
            if self.arrived:
                self._give_credit()
            self._tick()
        except Exception as error:
            self.faults += 1
            if self.faults <= _MOST_FAULTS:
                self._say(f"internal error, the job continues: {error!r} at {place_of(error)}")
            time.sleep(limits.SEARCH_SECONDS)
            return self.starter.poll() is not None and self.faults > 10 * _MOST_FAULTS
        return False

    def _listen(self, path: str | None) -> ConnectionListener:
        addresses = self.plan.addresses or ("127.0.0.1",)
        return ConnectionListener(
            self.loop, self.plan.token, self._on_hello, self._say, path, addresses, self.settings.port
        )

    def _say(self, text: str) -> None:
        self.output.note(f"dbrdist-launch: {text}")

    def _starter_said(self, line: str) -> None:
        self.judge.starter_lines = [*self.judge.starter_lines[-199:], line]
        if self.settings.verbose:
            self.output.note(f"[{self.starter.name}] {line}")

    # --- connections

    def _on_hello(self, channel: Channel, hello: messages.Hello | messages.Ask) -> None:
        if isinstance(hello, messages.Ask):
            self.questions.hear(channel, hello.what, time.monotonic() - self.started_at)
            return
        rank = Rank(hello.rank, hello.host, channel, hello.local_rank)
        if hello.size != self.size or rank.rank in self.ranks or self.failure is not None:
            channel.close()
            self._refuse_size(hello)
            return
        self.ranks[rank.rank] = rank
        self.starter_outputs.all_started = len(self.ranks) == self.size
        self.judge.progress_at = time.monotonic()
        channel.watch_peer(self.settings.host_timeout)
        if rank.rank == 0:
            self.port = hello.port
            self.master = rank.host if len(self.plan.job.hosts) > 1 or self.plan.addresses else "127.0.0.1"
            if self.plan.job.hosts:
                self.master = self.plan.job.hosts[0].name
        self.waiting_for_port.append(rank)
        if 0 in self.ranks:  # all make their rendezvous with it, at a port that is free there
            for waiting in self.waiting_for_port:
                self._welcome(waiting)
            self.waiting_for_port.clear()

    def _welcome(self, rank: Rank) -> None:
        """Tell a rank what to run, and how."""
        rank.welcomed = True
        channel = rank.channel
        channel.send(messages.Welcome(
            command=list(self.plan.job.command),
            environment=self.plan.rank_environment,
            directory=working_folder(),
            host_timeout=self.settings.host_timeout,
            window=self.window,
            threads=self.settings.threads,
            gpus=self.settings.gpus,
            inject=self.settings.inject,
            master=self.master, port=self.port,
            files=self.inherited.raised if self._shares_limits(rank) else [],
            local_sizes=self.plan.ranks_on(rank.host),
            input=self.input.to_rank_0 and rank.rank == 0,
        ))  # fmt: skip
        if self.asked:
            channel.send(messages.StopRequest(self._signal_for_ranks()))  # it came too late to hear of it
        self.loop.watch_channel(channel, lambda: self._on_rank(rank))

    def _shares_limits(self, rank: Rank) -> bool:
        """Whether a rank inherits from mpiexec what this process has changed; srun hands limits on to all hosts."""
        return rank.host == os.uname().nodename or self.plan.backend.places_ranks

    def _refuse_size(self, hello: messages.Hello) -> None:
        if self.failure is not None:
            return
        name, again = self.starter.name, "another process" if hello.rank in self.ranks else "a process"
        text = (
            f"{name} was asked to start one job of {self.size} ranks, but {again} says that it is rank {hello.rank} "
            f"of {hello.size}: {name} does not match the program's MPI library; see `dbrdist-launch doctor`"
        )
        self._fail(Failure("start", None, hello.host, codes.NOT_STARTED, text))

    def _on_rank(self, rank: Rank) -> None:
        found = rank.channel.receive()
        if found is None:
            self._lose(rank)
            return
        rank.heard_at = time.monotonic()
        for message in found:
            self._take(rank, message, rank.heard_at)

    def _take(self, rank: Rank, message: object, now: float) -> None:
        if isinstance(message, messages.Out):
            data = bytes(message.data)
            rank.take_output(message.stream, data)
            rank.owed += len(data) + limits.PIECE_BYTES
            urgent = 2 * rank.owed > self.window
            self.output.take(Piece(rank.rank, rank.host, message.stream, data, urgent))
        elif isinstance(message, (messages.Beat, messages.Pong)):
            rank.pinged = False
            if isinstance(message, messages.Beat):
                rank.take_beat(message, now)
        elif isinstance(message, messages.Started):
            rank.pid = message.pid
            self.events.tell("rank_started", rank=rank.rank, host=rank.host, pid=rank.pid)
            self.first_rank_at = self.first_rank_at or now
            self.input.begin_for_rank(rank.rank, rank.channel)
        elif isinstance(message, messages.Taken):
            self.input.taken(message)
        elif isinstance(message, messages.RankEvent):
            self.judge.take_event(rank, {**message.fields, "event": message.event}, now)
            if message.event in ("exception", "leaving"):
                self._begin_to_end(now)
        elif isinstance(message, messages.Asked):
            # Slurm's warning, or an mpiexec that ends its ranks since a host is gone: that shows in a moment.
            if self.asked_by_ranks is None:
                self.asked_by_ranks = (now + limits.REQUEST_SECONDS, message.signal)
        elif isinstance(message, messages.FoundStacks):
            rank.take_stacks(message)
        elif isinstance(message, messages.Failed):
            rank.broken = message.message
        elif isinstance(message, messages.Ended):
            rank.ended, rank.early_exit = rank.ended or now, message
        elif isinstance(message, messages.Exit):
            self._on_exit(rank, message)

    def _begin_to_end(self, now: float) -> None:
        if self.settings.exit_timeout and self.exit_deadline is None:
            self.exit_deadline = now + self.settings.exit_timeout

    def _on_written(self, piece: Piece) -> None:
        """Called by the output's threads. Only for a rank that might soon wait the loop is woken."""
        self.arrived.append(piece)
        if piece.urgent:
            with self.wake_lock:
                try:
                    if self.wake_write >= 0:
                        os.write(self.wake_write, b".")
                except BlockingIOError:
                    pass  # the loop has not yet seen the last ones

    def _on_wake(self) -> None:
        os.read(self.wake_read, 4096)

    def _give_credit(self) -> None:
        """What a rank wrote has reached its readers: it may write as much again."""
        counts: dict[int, int] = {}
        while self.arrived:
            piece = self.arrived.popleft()
            counts[piece.rank] = counts.get(piece.rank, 0) + len(piece.data) + limits.PIECE_BYTES
        self.starter_outputs.give_credit(counts.pop(SPAWNED, 0))
        for number, count in counts.items():
            rank = self.ranks.get(number)
            if rank is not None and rank.connected:
                rank.owed -= count
                rank.channel.send(messages.Credit(count))

    def _lose(self, rank: Rank) -> None:
        rank.connected = False
        rank.lost_at = time.monotonic()
        self.loop.forget(rank.channel.fileno())
        rank.channel.close()

    def _on_exit(self, rank: Rank, message: messages.Exit) -> None:
        rank.exit, rank.left_at = message, time.monotonic()
        self._begin_to_end(rank.left_at)
        told = {"code": message.code, "signal": message.signal, "step": message.step}
        self.events.tell("rank_ended", rank=rank.rank, host=rank.host, **told)
        if message.step is not None:
            rank.step, rank.beat_at = message.step, rank.left_at - (message.age or 0.0)
        if message.code in (codes.DONE, codes.PREEMPTED) and not message.signal:
            if message.code == codes.PREEMPTED:
                rank.channel.send(messages.Bye())
        elif message.ours or (self.asked and is_answer(rank, message, self.asked, self._signal_for_ranks())):
            rank.channel.send(messages.Bye())  # not a failure: we, or the stop request, ended it
        elif self.asked_by_ranks is not None and self.asked_by_ranks[1] == message.signal:
            self._ask_to_stop(message.signal)
            rank.channel.send(messages.Bye())
        elif self.failure is None:
            failure = self.judge.take_bad_exit(rank, time.monotonic())
            if failure is not None:
                self._fail(failure)

    # --- signals

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGTSTP:
            suspend(self.ranks.values(), self.loop, self._say)
            self._forgive_own_sleep()  # before this turn's tick, for which no deadline has passed
        elif number == signal.SIGQUIT:
            self.questions.show_stacks()
        elif number == signal.SIGINT and self.asked:
            self._say("interrupted again, stopping now")
            self._end_all(0.0)
        elif number in PASSED_ON or number in REAL_TIME:
            for rank in self.ranks.values():
                if rank.running:
                    rank.channel.send(messages.Signal(number))
        elif number != signal.SIGCHLD:
            self._ask_to_stop(number)

    def _signal_for_ranks(self) -> int:
        """Ctrl-C stays Ctrl-C; every other request is a SIGTERM."""
        return int(signal.SIGINT if self.asked == signal.SIGINT else signal.SIGTERM)

    def _ask_to_stop(self, number: int) -> None:
        """Pass one request to save and stop to all ranks, whichever way and however often it came."""
        if self.asked or self.failure is not None:
            return
        self.asked, self.judge.stop_asked = number, True
        self.judge.answers += (codes.from_signal(self._signal_for_ranks()),)
        self.events.tell("stop_asked", signal=codes.signal_name(number))
        self.stop_deadline = time.monotonic() + self.settings.grace
        again = " (press Ctrl-C again to stop now)" if number == signal.SIGINT else ""
        self._say(
            f"{codes.signal_name(number)}: asking all ranks to save and stop within {self.settings.grace:g} s{again}"
        )
        for rank in self.ranks.values():
            if rank.running:
                rank.channel.send(messages.StopRequest(self._signal_for_ranks()))

    # --- time

    def _tick(self) -> None:
        now = time.monotonic()
        if now < self.next_tick:
            return
        self.next_tick, self.last_tick = now + limits.TICK_SECONDS, now
        self.input.look()
        if now >= self.next_ping:
            self.next_ping = now + limits.PING_SECONDS
            for rank in self.ranks.values():
                if rank.connected and rank.welcomed and not rank.pinged:
                    rank.pinged = True
                    rank.channel.send(messages.Ping())
        for listener in self.listeners:
            listener.look(now)
        if self.judge.starter_ended_at is None and self.starter.poll() is not None:
            self.judge.starter_ended_at = now
        if self.failure is None:
            self._look_for_failures(now)
        if self.asked_by_ranks is not None and now >= self.asked_by_ranks[0]:
            if not any(rank.cut or rank.lost_at or rank.ended for rank in self.ranks.values()):
                self._ask_to_stop(self.asked_by_ranks[1])
            self.asked_by_ranks = None
        if self.stop_deadline is not None and now >= self.stop_deadline:
            self.stop_deadline = None
            self._say("the grace period is over, stopping now")
            self._end_all(0.0)
        self.questions.look(now)
        if self.output.footer is not None:
            self.output.footer = table(self.ranks, now - self.started_at)

    def _forgive_own_sleep(self) -> None:
        """This process was stopped, or the machine slept: no clock of ours has run in that time.

        Asked before the messages of that time are read: those tell of the ranks as they are now.
        """
        now = time.monotonic()
        asleep = now - self.last_tick - limits.TICK_SECONDS
        if asleep <= limits.ASLEEP_SECONDS:
            return
        self.last_tick = now
        self.judge.forgive(asleep)
        for name in ("stop_deadline", "exit_deadline", "end_deadline", "all_ended_at"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name) + asleep)
        if self.asked_by_ranks is not None:
            self.asked_by_ranks = (self.asked_by_ranks[0] + asleep, self.asked_by_ranks[1])
        if self.plan.deadline is not None:
            self.plan = self.plan._replace(deadline=self.plan.deadline + asleep)

    def _look_for_failures(self, now: float) -> None:
        if self.end_deadline is not None:
            return
        failure = self.judge.verdict(now) or self._deadlines(now)
        self._say_warnings()
        if failure is not None:
            self._fail(failure)
        elif self.judge.late and self.judge.stacks_until is None:
            self.questions.ask_for_stacks()
            self.judge.stacks_until = now + limits.STACKS_SECONDS

    def _say_warnings(self) -> None:
        while self.judge.warnings:
            self.events.tell("warning", message=self.judge.warnings[0])
            self._say(self.judge.warnings.pop(0))

    def _deadlines(self, now: float) -> Failure | None:
        """What the user set: --timeout, --exit-timeout."""
        if self.plan.deadline is not None and now >= self.plan.deadline:
            text = f"the job did not end within {self.settings.timeout:g} s (--timeout)"
            return Failure("deadline", None, None, codes.STALLED, text)
        if self.exit_deadline is not None and now >= self.exit_deadline:
            ranks = self.ranks.values()
            left = [r for r in ranks if r.told("exception")] or [r for r in ranks if r.leaving or r.exit is not None]
            still = [rank.rank for rank in ranks if rank.running]
            text = f"not all ranks ended within {self.settings.exit_timeout:g} s of the first (--exit-timeout)"
            failure = report.from_exit(left[0]) if left[0].told("exception") else None
            if failure is not None:
                failure.message += f"; {text}"
                return failure
            return Failure("deadline", left[0].rank, left[0].host, codes.STALLED, f"{text}; still running: {still}")
        return None

    # --- the end

    def _fail(self, failure: Failure) -> None:
        """The first cause is known: gather what the others do, make the report, end the job."""
        now = time.monotonic()
        self.failure = failure
        self._ask_once_more(now)
        with_stacks = self.settings.stacks or failure.kind in ("stalled", "stopped")
        report.complete(failure, sorted(self.ranks.values(), key=lambda r: r.rank), now, self.started_at, with_stacks)
        self._end_all(limits.KILL_SECONDS)

    def _ask_once_more(self, now: float) -> None:
        """Where the ranks are: their last beat may be a second old. They have little time to say it."""
        for rank in self.ranks.values():
            rank.pinged = rank.running
            if rank.running:
                rank.channel.send(messages.Ping())
        stacks = self.settings.stacks and self.judge.stacks_until is None
        if stacks:
            self.questions.ask_for_stacks()
        until = now + (limits.STACKS_SECONDS if stacks else limits.ANSWER_SECONDS)
        while time.monotonic() < until and (
            any(rank.pinged and rank.running for rank in self.ranks.values())
            or (stacks and not self.questions.have_stacks())
        ):
            self.loop.turn(until - time.monotonic())

    def _end_all(self, grace_seconds: float) -> None:
        self.end_deadline = time.monotonic() + grace_seconds + limits.STARTER_SECONDS
        for rank in self.ranks.values():
            if rank.connected:
                rank.channel.send(messages.Kill(grace_seconds))
                rank.channel.send(messages.Bye())

    def _finished(self) -> bool:
        now = time.monotonic()
        if self.end_deadline is not None and now >= self.end_deadline:
            return True
        waiting = [r for r in self.ranks.values() if r.running or (r.exit is None and self.failure is None)]
        if self.failure is None and self.end_deadline is None:
            if waiting or (len(self.ranks) < self.size and not (self.asked and self.judge.starter_ended_at)):
                return False
        elif any(rank.running and rank.rank not in self._lost() for rank in self.ranks.values()):
            return False
        if self.failure is None and self.end_deadline is None and self.judge.undecided():
            return False
        self.all_ended_at = self.all_ended_at or now
        if self._lost():
            return True  # mpiexec would wait for a host that is not there
        return self.starter.poll() is not None or now - self.all_ended_at > limits.STARTER_SECONDS

    def _lost(self) -> list[int]:
        return self.failure.ranks_lost if self.failure is not None else []

    def _outcome(self) -> Outcome:
        self._say_warnings()
        if self.failure is None and not self.asked:
            self.failure = self.judge.at_end()
        outcome = Outcome(codes.DONE, self.failure, self.asked, started_at=self.started_at)
        outcome.seconds = time.monotonic() - self.started_at
        outcome.steps = max((rank.step for rank in self.ranks.values()), default=-1)
        if self.first_rank_at is not None:
            outcome.first_rank_seconds = self.first_rank_at - self.started_at
        outcome.code = (
            self.failure.code if self.failure is not None else common_code(self.ranks.values(), self.size, self.asked)
        )
        return outcome
