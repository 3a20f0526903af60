"""One run of a job: start it, listen to its ranks, end it at the first failure, and say what it was."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .. import codes
from ..channel import Channel, new_token, same_token
from ..lines import LineSplitter
from ..rank.supervisor import ADDRESS, TOKEN
from . import report
from .judge import STARTER_SECONDS, Judge
from .output import Output
from .process import StarterProcess
from .ranks import Rank
from .report import Failure

_HELLO_BYTES = 4096
_HELLO_SECONDS = 10.0
_TICK_SECONDS = 0.25
_PING_SECONDS = 1.0
_STACKS_SECONDS = 1.0
_REQUEST_SECONDS = 0.7


@dataclass(frozen=True)
class Terms:
    """How a job is watched; all times in seconds."""

    start_seconds: float = 20.0  # without a new rank
    heartbeat_seconds: float = 60.0
    silence_seconds: float = 6.0  # of a supervisor
    grace_seconds: float = 30.0  # from a stop request to the end by force
    kill_seconds: float = 1.0  # from SIGTERM to SIGKILL after a failure
    stacks: bool = False  # of all ranks, at every failure (at a stall they are always taken)
    addresses: tuple[str, ...] = ("127.0.0.1",)
    port: int = 0
    threads: str = "auto"
    gpus: str = "all"
    inject: bool = True


@dataclass
class Outcome:
    """How an attempt ended."""

    code: int
    failure: Failure | None = None
    asked: int = 0  # the signal that asked for the end, or 0
    steps: int = -1  # the highest step that a rank told of
    seconds: float = 0.0
    first_rank_seconds: float | None = None
    started_at: float = 0.0  # on the monotonic clock
    host_of: dict[int, str] = field(default_factory=dict)


class Attempt:
    """Runs one starter command (mpiexec, srun) with supervised ranks."""

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],  # of mpiexec
        rank_environment: dict[str, str],  # what the ranks get beyond it
        ranks: int,
        output: Output,
        terms: Terms,
        verbose: bool = False,
    ) -> None:
        self.command, self.environment, self.rank_environment = command, environment, rank_environment
        self.size, self.output, self.terms, self.verbose = ranks, output, terms, verbose
        self.token = new_token()
        self.selector = selectors.DefaultSelector()
        self.judge = Judge(ranks, terms.start_seconds, terms.heartbeat_seconds, terms.silence_seconds)
        self.ranks = self.judge.ranks
        self.strangers: dict[Channel, float] = {}  # connections without a hello
        self.failure: Failure | None = None
        self.asked = 0  # the signal that asked for the end
        self.asked_by_ranks: tuple[float, int] | None = None  # when it counts, and the signal
        self.stop_deadline: float | None = None
        self.end_deadline: float | None = None
        self.all_ended_at: float | None = None
        self.first_rank_at: float | None = None
        self.signals: list[int] = []

    # --- life

    def run(self) -> Outcome:
        """Run to the end; no process of the job is left when this returns."""
        self.started_at = self.judge.progress_at = self.next_tick = self.next_ping = time.monotonic()
        self.listener = self._listen()
        restore = self._catch_signals()
        addresses = f"{','.join(self.terms.addresses)}:{self.listener.getsockname()[1]}"
        self.starter = self.judge.starter = StarterProcess(
            self.command, {ADDRESS: addresses, TOKEN: self.token, **self.environment}
        )
        try:
            self._watch(self.listener.fileno(), self._accept)
            for descriptor in self.starter.pipes:
                self._watch_starter(descriptor)
            while not self._finished():
                for key, _ in self.selector.select(max(0.0, self.next_tick - time.monotonic())):
                    key.data()
                self._tick()
        finally:
            self.starter.end()
            for rank in self.ranks.values():
                rank.channel.close()
            self.listener.close()
            self.selector.close()
            restore()
        return self._outcome()

    def _listen(self) -> socket.socket:
        from ..errors import LaunchError

        bind = self.terms.addresses[0] if len(self.terms.addresses) == 1 else ""
        try:
            return socket.create_server((bind, self.terms.port), backlog=512)
        except OSError as error:
            raise LaunchError(
                f"cannot listen on {bind or 'all interfaces'} port {self.terms.port}: {error.strerror}; "
                "leave --port out for a free one, or name an address of this host with --interface"
            ) from error

    def _catch_signals(self) -> Callable[[], None]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGTSTP, signal.SIGCHLD)
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        before = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, self._note_signal) for number in numbers}

        def on_wake() -> None:
            try:
                os.read(wake_read, 4096)
            except BlockingIOError:
                pass
            while self.signals:
                self._on_signal(self.signals.pop(0))

        self._watch(wake_read, on_wake)

        def restore() -> None:
            signal.set_wakeup_fd(before)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.close(wake_read)
            os.close(wake_write)

        return restore

    def _note_signal(self, number: int, _: object) -> None:
        self.signals.append(number)

    def _watch(self, descriptor: int, call: Callable[[], None]) -> None:
        self.selector.register(descriptor, selectors.EVENT_READ, call)

    def _watch_starter(self, descriptor: int) -> None:
        splitter = LineSplitter()

        def read() -> None:
            data = os.read(descriptor, 1 << 16)
            if not data:
                self.selector.unregister(descriptor)
            for line in splitter.feed(data) if data else splitter.end():
                if line.strip():
                    self.judge.starter_lines = [*self.judge.starter_lines[-199:], line]
                    if self.verbose:
                        self.output.note(f"[{self.starter.name}] {line}")

        self._watch(descriptor, read)

    # --- connections

    def _accept(self) -> None:
        sock, _ = self.listener.accept()
        sock.settimeout(5.0)
        channel = Channel(sock, limit_bytes=_HELLO_BYTES)
        self.strangers[channel] = time.monotonic()
        self._watch(channel.fileno(), lambda: self._on_stranger(channel))

    def _on_stranger(self, channel: Channel) -> None:
        messages = channel.receive()
        if messages == []:
            return
        hello = messages[0] if messages else {}
        self.selector.unregister(channel.fileno())
        del self.strangers[channel]
        problem = self._problem_with(hello)
        if problem is not None:
            self.output.note(f"dbrdist-launch: refused a connection from {_peer(channel)}: {problem}")
            channel.close()
            return
        rank = Rank(hello["rank"], hello["host"], channel, hello["local_rank"])
        if hello["size"] != self.size or rank.rank in self.ranks or self.failure is not None:
            channel.close()
            self._refuse_size(hello)
            return
        channel.limit_bytes = None
        self.ranks[rank.rank] = rank
        self.judge.progress_at = time.monotonic()
        channel.send(
            "welcome",
            environment=self.rank_environment,
            directory=os.getcwd(),
            silence_seconds=self.terms.silence_seconds + 2.0,
            threads=self.terms.threads,
            gpus=self.terms.gpus,
            inject=self.terms.inject,
        )
        self._watch(channel.fileno(), lambda: self._on_rank(rank))

    def _problem_with(self, hello: dict) -> str | None:
        if hello.get("t") != "hello" or not isinstance(hello.get("token"), str):
            return "it does not speak our language"
        if not same_token(hello["token"], self.token):
            return "wrong token (a rank of another job, or a stranger)"
        return None

    def _refuse_size(self, hello: dict) -> None:
        if self.failure is None:
            self._fail(
                Failure(
                    "start", None, hello["host"], codes.NOT_STARTED,
                    f"{self.starter.name} was to start one job of {self.size} ranks, but one came that calls itself "
                    f"rank {hello['rank']} of {hello['size']}: this starter does not fit the MPI library of the "
                    "program; see `dbrdist-launch doctor`",
                )
            )  # fmt: skip

    def _on_rank(self, rank: Rank) -> None:
        messages = rank.channel.receive()
        if messages is None:
            self._lose(rank)
            return
        rank.heard_at = time.monotonic()
        for message in messages:
            self._take(rank, message, rank.heard_at)

    def _take(self, rank: Rank, message: dict, now: float) -> None:
        kind = message["t"]
        if kind == "out":
            rank.take_lines(message["stream"], message["lines"])
            self.output.lines(rank.rank, rank.host, message["stream"], message["lines"])
        elif kind == "beat":
            rank.take_beat(message, now)
        elif kind == "started":
            rank.pid = message["pid"]
            self.first_rank_at = self.first_rank_at or now
        elif kind == "event":
            self.judge.take_event(rank, message, now)
        elif kind == "asked":
            # Slurm's warning, or an mpiexec that ends its ranks since a host is gone: that shows in a moment.
            if self.asked_by_ranks is None:
                self.asked_by_ranks = (now + _REQUEST_SECONDS, int(message["signal"]))
        elif kind == "stacks":
            rank.stacks, rank.state = message["text"], message["state"]
        elif kind == "ended":
            rank.ended, rank.early_exit = rank.ended or now, message
        elif kind == "exit":
            self._on_exit(rank, message)

    def _lose(self, rank: Rank) -> None:
        rank.connected = False
        rank.lost_at = time.monotonic()
        self.selector.unregister(rank.channel.fileno())
        rank.channel.close()

    def _on_exit(self, rank: Rank, message: dict) -> None:
        rank.exit = message
        if message["step"] is not None and message["step"] > rank.step:
            rank.step = message["step"]
        if message["code"] in (codes.DONE, codes.PREEMPTED) and not message["signal"]:
            if message["code"] == codes.PREEMPTED:
                rank.channel.send("bye")
        elif message["ours"] or (self.asked and message["signal"]):
            rank.channel.send("bye")  # not a failure: we, or the stop request, ended it
        elif self.asked_by_ranks is not None and self.asked_by_ranks[1] == message["signal"]:
            self._ask_to_stop(message["signal"])
            rank.channel.send("bye")
        elif self.failure is None:
            failure = self.judge.take_bad_exit(rank, time.monotonic())
            if failure is not None:
                self._fail(failure)

    # --- signals

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGTSTP:
            self.output.note("dbrdist-launch: cannot be suspended, its ranks run on other terminals and hosts")
        elif number == signal.SIGINT and self.asked:
            self.output.note("dbrdist-launch: interrupted again, stopping now")
            self._end_all(0.0)
        elif number != signal.SIGCHLD:
            self._ask_to_stop(number)

    def _ask_to_stop(self, number: int) -> None:
        """Pass one request to save and stop to all ranks, whichever way and however often it came."""
        if self.asked or self.failure is not None:
            return
        self.asked, self.judge.stop_asked = number, True
        self.stop_deadline = time.monotonic() + self.terms.grace_seconds
        name = codes.signal_name(number)
        self.output.note(
            f"dbrdist-launch: {name}: asking all ranks to save and stop, within {self.terms.grace_seconds:g} s"
            + (" (Ctrl-C again: stop now)" if number == signal.SIGINT else "")
        )
        for rank in self.ranks.values():
            if rank.running:
                rank.channel.send("stop", signal=int(signal.SIGTERM))

    # --- time

    def _tick(self) -> None:
        now = time.monotonic()
        if now < self.next_tick:
            return
        self.next_tick = now + _TICK_SECONDS
        if now >= self.next_ping:
            self.next_ping = now + _PING_SECONDS
            for rank in self.ranks.values():
                if rank.connected:
                    rank.channel.send("ping")
        for channel, since in list(self.strangers.items()):
            if now - since > _HELLO_SECONDS:
                self.selector.unregister(channel.fileno())
                del self.strangers[channel]
                channel.close()
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
            self.output.note("dbrdist-launch: the grace period is over, stopping now")
            self._end_all(0.0)
        if self.output.view is not None:
            self.output.view.update(self.ranks, now - self.started_at)

    def _look_for_failures(self, now: float) -> None:
        if self.end_deadline is not None:
            return
        failure = self.judge.verdict(now)
        if failure is not None:
            self._fail(failure)
        elif self.judge.stall is not None and self.judge.stacks_until is None:
            self._ask_for_stacks(now)

    def _ask_for_stacks(self, now: float) -> None:
        self.judge.stacks_until = now + _STACKS_SECONDS
        for rank in self.ranks.values():
            if rank.running:
                rank.channel.send("stacks")

    # --- the end

    def _fail(self, failure: Failure) -> None:
        """The first cause is known: gather what the others do, print the report, end the job."""
        now = time.monotonic()
        self.failure = failure
        if self.terms.stacks and self.judge.stacks_until is None:
            self._gather_stacks(now)
        with_stacks = self.terms.stacks or failure.kind in ("stalled", "stopped")
        report.complete(failure, sorted(self.ranks.values(), key=lambda r: r.rank), now, self.started_at, with_stacks)
        self._end_all(self.terms.kill_seconds)

    def _gather_stacks(self, now: float) -> None:
        self._ask_for_stacks(now)
        waiting = [rank for rank in self.ranks.values() if rank.running]
        while waiting and time.monotonic() < now + _STACKS_SECONDS:
            with selectors.DefaultSelector() as some:
                for rank in waiting:
                    some.register(rank.channel.fileno(), selectors.EVENT_READ, rank)
                for key, _ in some.select(0.1):
                    self._on_rank(key.data)
            waiting = [rank for rank in waiting if rank.running and rank.stacks is None]

    def _end_all(self, grace_seconds: float) -> None:
        self.end_deadline = time.monotonic() + grace_seconds + STARTER_SECONDS
        for rank in self.ranks.values():
            if rank.connected:
                rank.channel.send("kill", grace=grace_seconds)
                rank.channel.send("bye")

    def _finished(self) -> bool:
        now = time.monotonic()
        if self.end_deadline is not None and now >= self.end_deadline:
            return True
        waiting = [r for r in self.ranks.values() if r.running or (r.exit is None and self.failure is None)]
        if self.failure is None and self.end_deadline is None:
            if len(self.ranks) < self.size or waiting:
                return False
        elif any(rank.running and rank.rank not in self._lost() for rank in self.ranks.values()):
            return False
        if self.failure is None and self.end_deadline is None and self.judge.undecided():
            return False
        self.all_ended_at = self.all_ended_at or now
        if self._lost():
            return True  # mpiexec would wait for a host that is not there
        return self.starter.poll() is not None or now - self.all_ended_at > STARTER_SECONDS

    def _lost(self) -> list[int]:
        return self.failure.ranks_lost if self.failure is not None else []

    def _outcome(self) -> Outcome:
        now = time.monotonic()
        outcome = Outcome(
            codes.DONE, self.failure, self.asked, seconds=now - self.started_at, started_at=self.started_at
        )
        outcome.steps = max((rank.step for rank in self.ranks.values()), default=-1)
        outcome.host_of = {rank.rank: rank.host for rank in self.ranks.values()}
        if self.first_rank_at is not None:
            outcome.first_rank_seconds = self.first_rank_at - self.started_at
        outcome.code = self.failure.code if self.failure is not None else self._common_code()
        return outcome

    def _common_code(self) -> int:
        """0, 75, or the signal that asked for the end and that a rank did not survive."""
        ends = [rank.exit for rank in self.ranks.values() if rank.exit is not None]
        if len(ends) < self.size or any(end["signal"] for end in ends):
            return codes.from_signal(self.asked or signal.SIGTERM)
        return max(end["code"] for end in ends)


def _peer(channel: Channel) -> str:
    try:
        return "{}:{}".format(*channel.socket.getpeername()[:2])
    except OSError:
        return "a peer that has left"
