"""The inner process of a rank: runs the program, passes on what it says, and reports how it ends."""

from __future__ import annotations

import mmap
import os
import select
import time
from _socket import AF_INET, AF_UNIX, SOCK_STREAM, socket  # see channel.py

from .. import codes, heartbeat, limits, linux, messages, wire
from ..channel import Channel
from ..errors import place_of
from ..identity import of_environment
from ..inherited import Inherited
from ..loop import Loop, Signals
from ..signals import PASSED_ON, STOPS, signal
from .child import Child, stack_signal
from .deaths import OomWatch
from .inputs import Inputs
from .leftovers import Leftovers
from .outputs import Outputs
from .pmi import PmiRelay
from .pmix import ConnectionHolder
from .stacks import Stacks
from .surroundings import ADDRESS, TOKEN, surroundings
from .workers import WorkerWatch

TYPE_CHECKING = False  # see channel.py
if TYPE_CHECKING:
    from typing import Any

    from ..messages import Message

_SEGMENTS = "/dev/shm/mpich_shm_"  # MPICH removes its shared memory in MPI_Finalize only: killed jobs would fill it
_EARLY_LOOKS = 10  # at the shared memory of a program whose MPI_Init nobody tells of


class Supervisor:
    """One rank's supervisor; `run` returns the program's exit code."""

    def __init__(self, lifeline: int, backend: str, address: str, inherited: Inherited) -> None:
        self.lifeline, self.backend, self.address, self.inherited = lifeline, backend, address, inherited
        self.loop = Loop()
        self.loop.on_wake = self._forgive_own_sleep
        self.relay = PmiRelay(os.environ)
        self.connected = False
        self.status: int | None = None  # of the program, once it has ended
        self.ended_at = 0.0
        self.reported_at = 0.0
        self.released = False  # the launcher has said goodbye
        self.ended_by_us = False
        self.hurried = False  # nobody waits for what the program left behind
        self.woke_at = time.monotonic()
        self.frozen: list[tuple[float, float]] = []  # from when to when this process was stopped
        self.looks = 0  # at the shared memory
        self.segments: set[str] = set()  # shared memory that a program which we end would leave behind
        self.kill_at: float | None = None
        self.suspended_at: float | None = None
        self.asked_at = float("-inf")
        self.stop: tuple[float, int] | None = None  # when to pass which signal on
        self.partial_event = b""
        self.stacks = Stacks(stack_signal(), self._send_stacks)
        self.finalizing: tuple[float, int, dict[str, Any]] | None = None  # when to look again at which process
        self.leaving: dict[int, dict[str, Any]] = {}  # processes whose interpreter is ending, and with what code

    # --- life

    def run(self) -> int:
        identity = of_environment(self.backend)
        if identity is None:
            raise RuntimeError("no rank in the environment: expected mpiexec or srun, started by dbrdist-launch")
        self.identity = identity
        self._connect()
        self._start()
        while not self._done():
            self._turn()
        for path in self.segments if self.status else ():
            try:
                os.unlink(path)
            except OSError:
                pass  # another rank of this host was faster, or MPI_Finalize
        if self.status is None:
            return codes.from_signal(signal.SIGKILL)
        return codes.from_wait_status(self.status)[0]

    def _turn(self) -> None:
        """An error of the supervisor itself is reported, and does not affect the program."""
        try:
            self.loop.turn(self._seconds_to_wait())
            self._look()
        except Exception as error:
            self._tell("fault", message=f"{error!r} at {place_of(error)}")
            time.sleep(limits.SEARCH_SECONDS)  # so that it does not spin

    def tell_failure(self, text: str) -> bool:
        """Let the launcher know that this supervisor itself fails; False where that cannot be said."""
        if not self.connected:
            return False
        self.channel.send(messages.Failed(text))
        return not self.channel.unsent

    def _connect(self) -> None:
        address, token = self._address()
        self.channel = Channel(_connect_to_any(address), limits.WELCOME_BYTES)
        port = _free_port() if self.identity.rank == 0 else 0
        self.channel.send(messages.Hello(token=token, pid=os.getpid(), port=port, **self.identity._asdict()))
        waiting = select.poll()
        waiting.register(self.channel, select.POLLIN)
        early: list[Message] = []  # other messages may overtake the welcome, which waits for rank 0
        while not any(isinstance(message, (messages.Welcome, messages.Kill)) for message in early):
            waiting.poll()
            found = self.channel.receive()
            if found is None:
                raise ConnectionError("the launcher refused this rank")
            early += found
        if any(isinstance(message, messages.Kill) for message in early):
            raise ConnectionError("the job ended before this rank had started")
        (self.terms,) = [message for message in early if isinstance(message, messages.Welcome)]
        self.channel.watch_peer(self.terms.host_timeout)
        self.connected = True
        self._early = [message for message in early if message is not self.terms]

    def _address(self) -> tuple[str, str]:
        """(where the launcher listens, the token): by a folder that is its user's alone, else by the environment."""
        named, token = os.environ.pop(ADDRESS, ""), os.environ.pop(TOKEN, "")
        if not self.address.startswith("unix:"):
            return named, token
        with open(os.path.join(os.path.dirname(self.address.removeprefix("unix:")), "token")) as file:
            return self.address, file.read()

    def _start(self) -> None:
        numbers = (*STOPS, *PASSED_ON, signal.SIGCHLD)
        ignored = {int(number) for number in numbers if signal.getsignal(number) == signal.SIG_IGN}
        self.signals = Signals(self.loop, numbers, self._on_signal, self.inherited)
        linux.adopt_orphans()
        descriptor = self._heartbeat_page()
        environment = surroundings(os.environ, self.terms, self.identity)
        self.inherited.was_raised(self.terms.files)
        given = self.terms.command, environment, self.terms.directory, descriptor, ignored, self.inherited
        self.child = Child(*given, self.relay.in_child, self.terms.input)
        self.left = Leftovers((self.child.out, self.child.err), self.child.input)
        _go_first()
        self.oom, self.workers = OomWatch(), WorkerWatch(self.child.pid)
        self.oom_looked_at = float("-inf")
        self.pmix = ConnectionHolder(self.child.pid, os.environ)
        self.channel.send(messages.Started(self.child.pid))
        self.loop.watch_channel(self.channel, self._on_channel)
        self.loop.watch(self.lifeline, self._on_lifeline)
        self.loop.watch(self.child.events, self._on_events)
        self.outputs = Outputs(
            self.loop, {self.child.out: "out", self.child.err: "err"}, self.terms.window,
            lambda data, stream: self.channel.send(messages.Out(stream, data)),
        )  # fmt: skip
        if self.terms.input:
            self.inputs = Inputs(
                self.loop, self.child.input, lambda count, closed: self.channel.send(messages.Taken(count, closed))
            )
        self.relay.begin(self.loop, self.channel, self.outputs.read_all)
        self._take(self._early)

    def _heartbeat_page(self) -> int | None:
        """The page on which the program beats, as a descriptor; None where no file may hold so much (ulimit -f)."""
        descriptor = os.memfd_create(heartbeat.PAGE_NAME)
        try:
            os.ftruncate(descriptor, heartbeat.PAGE_BYTES)
        except OSError as error:
            os.close(descriptor)
            self.page = mmap.mmap(-1, heartbeat.PAGE_BYTES)
            self._tell("unseen", message=f"its heartbeats are not seen: {error.strerror} (ulimit -f)")
            return None
        self.page = mmap.mmap(descriptor, heartbeat.PAGE_BYTES)
        return descriptor

    # --- what arrives

    def _on_channel(self) -> None:
        found = self.channel.receive()
        if found is None:
            self._launcher_lost()
        else:
            self._take(found)

    def _take(self, found: list[Message]) -> None:
        for message in found:
            if isinstance(message, messages.Ping):
                self._beat()
            elif isinstance(message, messages.In):
                self.inputs.take(message.data)
            elif isinstance(message, messages.Credit):
                self.outputs.give_credit(message.bytes)
            elif isinstance(message, messages.StopRequest):
                # Slurm signals every process of a step: the program has had the request, or will in a moment.
                delay = limits.SLURM_SECONDS if "SLURM_STEP_ID" in os.environ else 0.0
                self.stop = (time.monotonic() + delay, message.signal)
            elif isinstance(message, messages.Kill):
                self._end_program(limits.KILL_SECONDS if message.grace is None else message.grace)
            elif isinstance(message, messages.AskStacks):
                below = [] if self.status is not None else [self.child.pid, *linux.descendants(self.child.pid)]
                self.stacks.ask(below, time.monotonic())
            elif isinstance(message, messages.Signal):
                if message.signal in (signal.SIGTSTP, signal.SIGCONT):
                    self._suspend(message.signal)
                else:
                    self._pass_on(message.signal)
            elif isinstance(message, messages.Bye):
                self.released = True

    def _tell(self, event: str, **fields: object) -> None:
        self.channel.send(messages.RankEvent(event, fields))

    def _pass_event(self, event: dict[str, Any], **more: object) -> None:
        """One that the program has told, with whatever fields it has."""
        fields = {**event, **more}
        self.channel.send(messages.RankEvent(str(fields.pop("event")), fields))

    def _on_lifeline(self) -> None:
        """mpiexec killed the outer process: some rank called MPI_Abort, or mpiexec gives up. Or it has gone itself."""
        if os.read(self.lifeline, 64):
            self._tell("orphaned")
            return
        self.loop.forget(self.lifeline)
        self.kill_at = time.monotonic() + limits.ABORT_SECONDS
        self._tell("cut", at=time.monotonic())

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._fetch_ended()
        elif number in PASSED_ON:
            self._pass_on(number, has_it="SLURM_STEP_ID" in os.environ)  # Slurm signals every process of a step
        else:
            self.asked_at = time.monotonic()
            self.channel.send(messages.Asked(number))

    def _suspend(self, number: int) -> None:
        """The launcher is suspended, or goes on, and the program with it: it is not silent meanwhile."""
        now = time.monotonic()
        if number == signal.SIGTSTP:
            self.suspended_at = self.suspended_at or now
        elif self.suspended_at is not None:
            self.frozen, self.suspended_at = [*self.frozen[-99:], (self.suspended_at, now)], None
        sent = signal.SIGSTOP if number == signal.SIGTSTP else signal.SIGCONT
        for pid in [self.child.pid, *linux.descendants(self.child.pid)] if self.status is None else []:
            linux.kill(pid, sent)

    def _pass_on(self, number: int, has_it: bool = False) -> None:
        """To those processes of the program that handle, block or ignore it; where only a helper does, or nobody, it
        asks for the end."""
        below = [self.child.pid, *linux.descendants(self.child.pid)] if self.status is None else []
        heard = [pid for pid in below if linux.expects(pid, number)]
        for pid in heard if not has_it else ():
            linux.kill(pid, number)
        if below and not (heard and linux.hears(self.child.pid, number)):
            self.channel.send(messages.Asked(number))

    def _fetch_ended(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child.pid:
                self.status, self.ended_at = status, time.monotonic()
                self.outputs.end()  # what is left in its pipes comes before the report
                if status and not self.ended_by_us:
                    code, number = codes.from_wait_status(status)
                    self.channel.send(messages.Ended(code, number))  # at once: srun may leave no time for more
                    oom = self.oom.counted(pid) if number == signal.SIGKILL else None
                    if oom is not None:
                        self.channel.send(messages.Ended(code, number, oom))

    def _on_events(self) -> None:
        data = os.read(self.child.events, limits.READ_BYTES)
        if not data:
            self.loop.forget(self.child.events)
            return
        *lines, self.partial_event = (self.partial_event + data).split(b"\n")
        for line in lines:
            if line.startswith(b"\x1e"):
                self._on_event(line[1:])
            else:
                self.stacks.take(line + b"\n", time.monotonic())

    def _on_event(self, line: bytes) -> None:
        try:
            event = wire.loads(line)
            pid = int(event["pid"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return  # the pipe is the program's too: it may write there what it likes
        if event["event"] == "leaving":
            self.leaving[pid] = event
        if event["event"] == "world":
            self._note_segments()  # they are new, and who dies later may die too fast for a look
        if event["event"] == "finished":
            before = self.leaving.get(pid)
            if before is not None and before.get("code") and before.get("finalizes"):
                self.finalizing = (time.monotonic() + limits.FINALIZE_SECONDS, pid, before)
        else:
            self._pass_event(event, own=pid == self.child.pid)

    # --- what time brings

    def _seconds_to_wait(self) -> float:
        now = time.monotonic()
        due = [3600.0]
        if self.pmix.searching:
            due.append(limits.SEARCH_SECONDS)
        due.append(self.woke_at + limits.FROZEN_SECONDS - now)
        times = (self.stop and self.stop[0], self.kill_at, self.outputs.gather_until, self.stacks.due, self.relay.due)
        due += [at - now for at in times if at is not None]
        if self.finalizing is not None:
            due.append(self.finalizing[0] - now)
        if self.status is not None and not self.reported_at:
            due.append(min(self._silent_at(), self.left.due) - now)
        if self.reported_at:
            due.append(self.reported_at + limits.FAREWELL_SECONDS - now)
        return min(due)

    def _silent_at(self) -> float:
        """When the output of the ended program counts as read to its end: what it started may keep it open."""
        went_well = not self.status and not self.ended_by_us and not self.hurried
        seconds = self.left.patience(bool(self.outputs.pipes), went_well)
        if self.ended_by_us or self.hurried:
            seconds = min(seconds, limits.DRAIN_SECONDS)
        return max(self.ended_at, self.outputs.heard_at) + seconds if seconds else 0.0

    def _look(self) -> None:
        now = time.monotonic()
        if self.stop is not None and now >= self.stop[0]:
            number, self.stop = self.stop[1], None
            if self.status is None and now - self.asked_at > 2 * limits.SLURM_SECONDS:
                # A terminal's Ctrl-C reaches the whole group, and so does this one.
                (linux.kill_group if number == signal.SIGINT else linux.kill)(self.child.pid, number)
        if self.kill_at is not None and now >= self.kill_at:
            self.kill_at = None
            self._kill_now()
        self.outputs.look(now)
        self.relay.look(now)
        if self.pmix.searching and self.status is None:
            self.pmix.look()
        if self.finalizing is not None and now >= self.finalizing[0]:
            (_, pid, event), self.finalizing = self.finalizing, None
            if linux.state(pid) not in ("", "Z"):
                self._pass_event({**event, "event": "finalizing"})
        self.stacks.look(now)
        if self.status is not None and not self.reported_at:
            self.left.look(now)
            if now >= self._silent_at() and not self.outputs.drain():
                self._report()

    def _forgive_own_sleep(self) -> None:
        """All of a job may be stopped and go on (`scontrol suspend`, `docker pause`): nobody was silent meanwhile."""
        now = time.monotonic()
        if now - self.woke_at > 2 * limits.FROZEN_SECONDS:
            self.frozen = [*self.frozen[-99:], (self.woke_at, now)]
        self.woke_at = now

    def _age(self, then: float, now: float) -> float:
        """Seconds since then in which this process could run: the program could too."""
        return now - then - sum(end - max(then, begin) for begin, end in self.frozen if end > then)

    def _beat(self) -> None:
        """Answer a ping: what the program is doing."""
        if self.status is not None:
            self.channel.send(messages.Pong())
            return
        now = time.monotonic()
        if now - self.oom_looked_at > limits.OOM_LOOK_SECONDS:
            self.oom.look(self.child.pid)
            self.oom_looked_at = now
            self.looks = min(self.looks, _EARLY_LOOKS - 1)
        if self.looks < _EARLY_LOOKS:
            self.looks += 1
            self._note_segments()
        beat = heartbeat.read(self.page)
        state, traced = linux.state_and_tracer(self.child.pid)
        self.channel.send(messages.Beat(
            state=state, traced=traced, beats=beat.number, step=beat.step if beat.number else -1,
            age=self._age(beat.time, now) if beat.number else None, paused=beat.paused, fields=beat.fields,
        ))  # fmt: skip
        dead = self.workers.look()
        if dead is not None:
            pid, how = dead
            oom = self.oom.verdict(pid) if "SIGKILL" in how else None
            message = f"worker process {pid} {how}" + (f" ({oom})" if oom else "")
            self._tell("worker", message=message, oom=oom is not None)

    def _report(self) -> None:
        assert self.status is not None
        code, number = codes.from_wait_status(self.status)
        oom = self.oom.verdict(self.child.pid) if number == signal.SIGKILL and not self.ended_by_us else None
        beat = heartbeat.read(self.page)
        left = "" if self.ended_by_us else self.left.words(bool(self.outputs.pipes))
        if left:
            self._tell("left", message=left)
        self.channel.send(messages.Exit(
            code=code, signal=number, oom=oom, ours=self.ended_by_us,
            step=beat.step if beat.number else None,
            age=self._age(beat.time, time.monotonic()) if beat.number else None,
        ))  # fmt: skip
        self.reported_at = time.monotonic()
        if code == 0:
            self.released = True  # nobody has a question to a rank that ended well

    # --- ends

    def _done(self) -> bool:
        if self.status is None or not self.reported_at:
            return False
        if self.connected and self.channel.unsent:
            return False  # the launcher, or the way to it, is slow: these are the program's last words
        return self.released or time.monotonic() - self.reported_at > limits.FAREWELL_SECONDS

    def _end_program(self, grace_seconds: float) -> None:
        if self.status is None:
            self.ended_by_us = True
            self._note_segments()
            self.outputs.end()
            linux.kill_group(self.child.pid, signal.SIGTERM)
            linux.kill_group(self.child.pid, signal.SIGCONT)  # a stopped process does not see a SIGTERM
            self.kill_at = time.monotonic() + grace_seconds
        self.released = self.hurried = True

    def _kill_now(self) -> None:
        self._fetch_ended()
        if self.status is None:
            self.ended_by_us = True
            self._note_segments()
            linux.kill_group(self.child.pid, signal.SIGKILL)
            linux.kill(self.child.pid, signal.SIGKILL)
        self.released = self.hurried = True

    def _note_segments(self) -> None:
        for pid in (self.child.pid, *linux.descendants(self.child.pid)):
            self.segments |= linux.mapped_files(pid, _SEGMENTS)

    def _launcher_lost(self) -> None:
        """The launcher has ended or its host is gone: nobody would hear of this rank any more, so it ends."""
        if self.connected:
            self.connected = False
            self.loop.forget(self.channel.fileno())
            self.channel.close()
            self._kill_now()

    def _send_stacks(self, text: str, sources: dict[str, str]) -> None:
        self.channel.send(messages.FoundStacks(text, sources, linux.state(self.child.pid)))


def _go_first() -> None:
    """Be woken before busy ranks, where we may: srun can kill a whole step 10 ms after a rank's end."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    except OSError:
        pass  # an ordinary user on a machine with a core for each rank does not need it


def _free_port() -> int:
    """A port of this host for whom the program makes its rendezvous with (MASTER_PORT); 0 where there is none."""
    try:
        found = socket(AF_INET, SOCK_STREAM)
        found.bind(("", 0))
        port = int(found.getsockname()[1])
        found.close()
        return port
    except OSError:
        return 0


def _connect_to_any(address: str) -> socket:
    """Connect to the first of the launcher's addresses that answers: unix:PATH, or HOST,HOST:PORT."""
    if address.startswith("unix:"):
        found = socket(AF_UNIX, SOCK_STREAM)
        found.connect(address.removeprefix("unix:"))
        return found
    from socket import create_connection  # for jobs on several hosts alone: it costs each rank 3 ms

    hosts, _, port = address.rpartition(":")
    failures = []
    for host in hosts.split(","):
        try:
            return create_connection((host, int(port)), limits.CONNECT_SECONDS)
        except OSError as error:
            failures.append(f"{host}:{port}: {error}")
    raise ConnectionError("the launcher cannot be reached from this host: " + "; ".join(failures))
