"""dbrdist-launch with thousands of simulated ranks in one process: what the launcher pays, and whom it names.

The launcher's code is its own: the attempt with its ticks, deadlines and kills, the judge, the culprit by the stacks of
all, what is known of each rank, output with its credit, every message as bytes through the real writer and parser. A
rank's page of heartbeats is real, too. Processes, sockets and the clock are simulated.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "launch")]

from cluster.clock import Clock  # noqa: E402
from dbrdist_launch import channel, codes, heartbeat, limits, messages  # noqa: E402
from dbrdist_launch.backends.job import Host, Job  # noqa: E402
from dbrdist_launch.launcher.judgement import judge, ranks  # noqa: E402
from dbrdist_launch.launcher.preparation.settings import LaunchSettings  # noqa: E402
from dbrdist_launch.launcher.running import attempt, listener, questions  # noqa: E402
from dbrdist_launch.launcher.running.plan import LaunchPlan, Outcome  # noqa: E402
from dbrdist_launch.launcher.streams.output import Output  # noqa: E402

TIMEOUT_SECONDS = 30.0  # without a heartbeat
_TOKEN = "0" * 32
_PROGRAM = "program/train.py"
_LINES = {"waits": "    total = comm.allreduce(x)", "works": "    y = model(x)"}


class LaunchedRank:
    """The supervisor of one rank and its program, and the launcher's end of the connection to them."""

    def __init__(self, job: LaunchedJob, rank: int) -> None:
        self.job, self.rank = job, rank
        self.page = bytearray(heartbeat.PAGE_BYTES)
        self.writer = object.__new__(heartbeat._Writer)
        self.writer.page, self.writer.count, self.writer.step, self.writer.fields_due = self.page, 0, -1, 0.0  # type: ignore[assignment]
        self.does = "works"
        self.is_alive = True
        self.credit = 0
        self.heard = channel.Parser(limits.WELCOME_BYTES)
        # The launcher's end.
        self.parser, self.arrived, self.is_open = channel.Parser(), bytearray(), True
        self.unsent = b""
        self.num_bytes = self.num_messages = 0  # in both directions

    # ---- the connection, as the launcher sees it ----

    def fileno(self) -> int:
        return 1 << 20 | self.rank

    def watch_peer(self, seconds: float) -> None:
        """The kernel of a simulated host answers at once."""

    def send(self, message: Any) -> None:
        head, data = messages.write(message)
        self._count(head + bytes(data))
        began = time.thread_time()
        if self.is_alive:
            for found in self.heard.feed(head + bytes(data)):
                self._hear(messages.read(*found))
        self.job.seconds_of_ranks += time.thread_time() - began

    def receive(self) -> list[Any] | None:
        if not self.is_open:
            return None
        data = bytes(self.arrived)
        self.arrived.clear()
        return [messages.read(*found) for found in self.parser.feed(data)]

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        self.is_open = self.is_alive = False

    # ---- the rank ----

    def say(self, message: Any) -> None:
        """Send to the launcher."""
        began = time.thread_time()
        head, data = messages.write(message)
        self._count(head + bytes(data))
        self.arrived += head
        self.arrived += data
        self.job.loop.due.add(self)
        self.job.seconds_of_ranks += time.thread_time() - began

    def beat(self, step: int) -> None:
        self.writer.beat(step, {"loss": 0.5} if step % 10 == 0 else {})

    def break_off(self) -> None:
        """The connection breaks without a word."""
        self.is_open = self.is_alive = False
        self.job.loop.due.add(self)

    def leave(self, code: int, number: int = 0, ours: bool = False) -> None:
        """The program ends."""
        self.say(messages.Ended(code, number, None, ours))
        self.say(messages.Exit(code, number, None, ours))

    def _count(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self.num_messages += 1

    def _hear(self, message: Any) -> None:
        if isinstance(message, messages.Ping):
            beat = heartbeat.read(self.page)
            age = self.job.clock.now - beat.time if beat.number else None
            step = beat.step if beat.number else -1
            self.say(messages.Beat("S", False, beat.number, step, age, beat.paused, beat.fields))
        elif isinstance(message, messages.Welcome):
            self.say(messages.Started(10_000 + self.rank))
        elif isinstance(message, messages.AskStacks):
            line = 1 + list(_LINES).index(self.does)
            text = f'Current thread 0x1 (most recent call first):\n  File "{_PROGRAM}", line {line} in main\n'
            self.say(messages.FoundStacks(text, {f"{_PROGRAM}:{line}": _LINES[self.does]}, "S"))
        elif isinstance(message, messages.Credit):
            self.credit += message.bytes
        elif isinstance(message, messages.Kill):
            self.leave(0, 15, ours=True)
        elif isinstance(message, messages.Bye):
            self.break_off()


class SimulatedLoop:
    """Time passes where the launcher waits; then all that has come is handed over."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.on_wake: Any = lambda: None
        self.calls: dict[int, Any] = {}
        self.due: set[LaunchedRank] = set()  # ranks that have said something

    def watch(self, descriptor: int, call: Any) -> None:
        self.calls[descriptor] = call

    def watch_channel(self, rank: Any, call: Any) -> None:
        self.calls[rank.fileno()] = call

    def forget(self, descriptor: int) -> None:
        self.calls.pop(descriptor, None)

    def turn(self, seconds: float) -> None:
        self.clock.now += max(seconds, 0.001)
        self.on_wake()
        due, self.due = self.due, set()
        for rank in sorted(due, key=lambda rank: rank.rank):
            call = self.calls.get(rank.fileno())
            if call is not None:
                call()

    def close(self) -> None:
        """Nothing is open."""


class Starter:
    """mpiexec, which ends once all ranks have."""

    name, kills_step, input = "mpiexec", False, None

    def __init__(self, job: LaunchedJob) -> None:
        self.job = job

    def poll(self) -> int | None:
        return None if any(rank.is_alive for rank in self.job.ranks) else 0

    def result(self) -> tuple[int, int]:
        return 0, 0


class LaunchedJob:
    """An attempt of dbrdist-launch with simulated ranks, eight on each host."""

    def __init__(self, size: int, folder: str, clock: Clock) -> None:
        self.size, self.clock = size, clock
        self.seconds_of_ranks = 0.0  # of this process's time: what ranks would have spent
        self.loop = SimulatedLoop(clock)
        self.output = Output(frozenset(), folder)
        self.said: list[str] = []
        self.output.note = self.said.append  # type: ignore[method-assign]
        hosts = tuple(Host(f"host{k}", 8) for k in range(-(-size // 8)))
        job = Job(("python", "train.py"), size, hosts)
        backend: Any = SimpleNamespace(places_ranks=False, identity="hydra", label="simulated", queues=False)
        plan = LaunchPlan(job, ["mpiexec"], {}, {}, limits.START_SECONDS, backend, _TOKEN, addresses=("127.0.0.1",))
        settings = LaunchSettings(("python", "train.py"), heartbeat_timeout=TIMEOUT_SECONDS)
        self.attempt = made = attempt.Attempt(plan, self.output, settings)
        made.loop.close()
        made.loop = self.loop  # type: ignore[assignment]
        self.loop.on_wake = made._forgive_own_sleep
        made.started_at = made.judge.started_at = made.judge.progress_at = clock.now
        made.next_tick = made.last_tick = made.next_ping = clock.now
        made.listeners = []
        made.starter = made.judge.starter = Starter(self)  # type: ignore[assignment]
        made.starter_outputs = SimpleNamespace(all_started=False, give_credit=lambda count: None)  # type: ignore[assignment]
        self.output.written = made._on_written
        self.output.start()
        self.ranks = [LaunchedRank(self, rank) for rank in range(size)]

    def start(self) -> None:
        """Every rank says hello, and is told what to run."""
        for rank in self.ranks:
            hello = messages.Hello(_TOKEN, rank.rank, self.size, rank.rank % 8, f"host{rank.rank // 8}", 8, rank.rank)
            ((fields, data),) = channel.Parser(limits.HELLO_BYTES).feed(messages.write(hello)[0])
            found = messages.read(fields, data)
            assert listener.problem_with(found, _TOKEN) is None and isinstance(found, messages.Hello)
            self.attempt._on_hello(rank, found)  # type: ignore[arg-type]
        self.turn()

    def turn(self) -> bool:
        """One turn of the launcher; whether the job is over."""
        return self.attempt._turn()

    def run(self, seconds: float, beating: Any = None) -> bool:
        """So many simulated seconds, in which the ranks of ``beating`` make two steps each."""
        until, step = self.clock.now + seconds, int(self.clock.now)
        while self.clock.now < until:
            if self.turn():
                return True
            for rank in self.ranks if beating is None else beating:
                rank.beat(step + int(self.clock.now))
        return False

    @property
    def num_bytes(self) -> int:
        return sum(rank.num_bytes for rank in self.ranks)

    def close(self) -> None:
        self.output.stop()
        self.output.close()
        with self.attempt.wake_lock:
            self.output.written = lambda piece: None
        for descriptor in (self.attempt.wake_read, self.attempt.wake_write):
            os.close(descriptor)


@contextlib.contextmanager
def launched(size: int) -> Iterator[LaunchedJob]:
    """A job that has started, on a simulated clock."""
    clock = Clock()
    with contextlib.ExitStack() as stack:
        for module in (attempt, judge, ranks, questions, heartbeat):
            stack.enter_context(mock.patch.object(module, "time", clock))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        job = LaunchedJob(size, folder, clock)
        stack.callback(job.close)
        yield job


class _Cost:
    """The launcher's CPU seconds within a block: without those of the simulated ranks."""

    def __init__(self, job: LaunchedJob) -> None:
        self.job, self.seconds = job, 0.0

    def __enter__(self) -> _Cost:
        self._began, self._of_ranks = time.thread_time(), self.job.seconds_of_ranks
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.thread_time() - self._began - (self.job.seconds_of_ranks - self._of_ranks)


def start(size: int) -> dict[str, float]:
    """From the first hello to the last welcome."""
    with launched(size) as job:
        with _Cost(job) as cost:
            job.start()
        assert len(job.attempt.ranks) == size and all(rank.pid for rank in job.attempt.ranks.values())
        return {"cpu_seconds": cost.seconds, "bytes_per_rank": job.num_bytes / size}


def watching(size: int, seconds: float = 20.0) -> dict[str, float]:
    """A job in which all goes well; a long pause that was announced, and slow ranks: nobody is accused."""
    with launched(size) as job:
        job.start()
        job.run(3)
        before = job.num_bytes
        with _Cost(job) as cost:
            job.run(seconds)
        per_second = {
            "cpu_seconds_per_second": cost.seconds / seconds,
            "bytes_per_rank_and_second": (job.num_bytes - before) / size / seconds,
        }
        for rank in job.ranks:
            rank.writer.pause()
        job.run(3 * TIMEOUT_SECONDS, ())
        job.run(2)
        slow = job.ranks[: size // 10]
        for _ in range(6):  # others beat on meanwhile
            job.run(0.8 * TIMEOUT_SECONDS / 2, job.ranks[size // 10 :])
            job.run(1, slow)
        assert job.attempt.failure is None and not job.said, job.said
        return per_second


def outputs(size: int, num_lines: int = 20) -> dict[str, float]:
    """Every rank writes some lines: all bytes are in the logs, and every rank gets its credit back."""
    with launched(size) as job:
        job.start()
        line = b"x" * 79 + b"\n"
        began, of_ranks = time.process_time(), job.seconds_of_ranks
        for _ in range(num_lines):
            for rank in job.ranks:
                rank.say(messages.Out("out", line))
            job.run(0.5)
        job.output.stop()  # the writer has written
        job.run(1)
        seconds = time.process_time() - began - (job.seconds_of_ranks - of_ranks)
        assert all(rank.credit == num_lines * (80 + limits.PIECE_BYTES) for rank in job.ranks)
        assert all(found.owed == 0 for found in job.attempt.ranks.values())
        return {"cpu_seconds_per_thousand_lines": seconds / (num_lines * size) * 1000}


def stall(size: int) -> dict[str, float]:
    """One rank hangs in its own code, all others wait for it: it is named, and all are ended."""
    with launched(size) as job:
        job.start()
        job.run(5)
        odd = size // 3
        for rank in job.ranks:
            rank.does = "works" if rank.rank == odd else "waits"
        began = job.clock.now
        with _Cost(job) as cost:
            ended = job.run(3 * TIMEOUT_SECONDS, ())
        assert ended
        return {**_verdict(job, odd, codes.STALLED), "cpu_seconds": cost.seconds, "seconds": job.clock.now - began}


def death(size: int) -> dict[str, float]:
    """A rank dies: it is named, and all others are ended."""
    with launched(size) as job:
        job.start()
        job.run(5)
        before, began, odd = job.num_bytes, job.clock.now, size // 2
        with _Cost(job) as cost:
            job.ranks[odd].leave(0, 9)
            ended = job.run(30)
        assert ended
        found = _verdict(job, odd, None)
        return {
            **found, "cpu_seconds": cost.seconds, "seconds": job.clock.now - began,
            "bytes_per_rank": (job.num_bytes - before) / size,
        }  # fmt: skip


def lost_host(size: int) -> dict[str, float]:
    """All connections of one host break: the host is named."""
    with launched(size) as job:
        job.start()
        job.run(5)
        began = job.clock.now
        with _Cost(job) as cost:
            for rank in job.ranks[8:16]:
                rank.break_off()
            ended = job.run(30)
        assert ended
        failure = _outcome(job).failure
        assert failure is not None and failure.host == "host1", failure
        return {"cpu_seconds": cost.seconds, "seconds": job.clock.now - began}


def _outcome(job: LaunchedJob) -> Outcome:
    return job.attempt._outcome()


def _verdict(job: LaunchedJob, rank: int, code: int | None) -> dict[str, float]:
    outcome = _outcome(job)
    failure = outcome.failure
    assert failure is not None and failure.rank == rank, (failure and failure.message, rank)
    assert code is None or outcome.code == code
    assert not any(rank.is_alive for rank in job.ranks), "not all ranks were ended"
    return {"named_rank": rank}


def simulate(size: int) -> dict[str, dict[str, float]]:
    """All of it."""
    return {
        "launcher start": start(size), "launcher watching": watching(size), "launcher output": outputs(size),
        "launcher stall": stall(size), "launcher death": death(size), "launcher lost host": lost_host(size),
    }  # fmt: skip


if __name__ == "__main__":
    for size in map(int, sys.argv[1:] or ["64"]):
        for name, numbers in simulate(size).items():
            print(size, name, ", ".join(f"{key} {value:.6g}" for key, value in numbers.items()), flush=True)
