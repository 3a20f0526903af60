"""The inner process of a rank: runs the program, passes on what it says, and reports how it ends."""

from __future__ import annotations

import json
import mmap
import os
import selectors
import signal
import time
from _socket import AF_UNIX, SOCK_STREAM, socket  # see channel.py

from .. import codes, heartbeat, limits, linux
from ..channel import Channel, Message
from ..errors import place_of
from ..identity import of_environment
from ..loop import Loop, Signals
from .child import Child, stack_signal
from .deaths import OomWatch
from .outputs import Outputs
from .pmix import ConnectionHolder
from .spy import by_py_spy
from .surroundings import surroundings
from .workers import WorkerWatch

ADDRESS = "DBRDIST_LAUNCH_CHANNEL"
TOKEN = "DBRDIST_LAUNCH_TOKEN"
_SEGMENTS = "/dev/shm/mpich_shm_"  # MPICH removes its shared memory in MPI_Finalize only: killed jobs would fill it
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class Supervisor:
    """One rank's supervisor; `run` returns the program's exit code."""

    def __init__(self, command: list[str], lifeline: int, backend: str) -> None:
        self.command, self.lifeline, self.backend = command, lifeline, backend
        self.loop = Loop()
        self.status: int | None = None  # of the program, once it has ended
        self.ended_at = 0.0
        self.reported_at = 0.0
        self.released = False  # the launcher has said goodbye
        self.ended_by_us = False
        self.segments: set[str] = set()  # shared memory that a program which we end would leave behind
        self.kill_at: float | None = None
        self.asked_at = float("-inf")
        self.stop: tuple[float, int] | None = None  # when to pass which signal on
        self.partial_event = b""
        self.stacks = b""
        self.finalizing: tuple[float, int, Message] | None = None  # when to look again at which process
        self.leaving: dict[int, Message] = {}  # processes whose interpreter is ending, and with what code

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
        for path in self.segments:
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
            self.channel.send("event", event="fault", message=f"{error!r} at {place_of(error)}")
            time.sleep(limits.SEARCH_SECONDS)  # so that it does not spin

    def _connect(self) -> None:
        address, token = os.environ.pop(ADDRESS), os.environ.pop(TOKEN)
        self.channel = Channel(_connect_to_any(address))
        self.channel.send("hello", token=token, pid=os.getpid(), **self.identity._asdict())
        messages: list[Message] | None = []
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.channel, selectors.EVENT_READ)
            while messages == []:
                waiting.select()
                messages = self.channel.receive()
        if not messages or messages[0]["t"] != "welcome":
            raise ConnectionError("the launcher refused this rank")
        self.terms, later = messages[0], messages[1:]
        self.channel.watch_peer(float(self.terms["host_timeout"]))
        self.connected = True
        self._early = later

    def _start(self) -> None:
        ignored = {int(number) for number in _STOPS if signal.getsignal(number) is signal.SIG_IGN}
        self.signals = Signals(self.loop, (*_STOPS, signal.SIGCHLD), self._on_signal)
        linux.adopt_orphans()
        descriptor = os.memfd_create(heartbeat.PAGE_NAME)
        os.ftruncate(descriptor, heartbeat.PAGE_BYTES)
        self.page = mmap.mmap(descriptor, heartbeat.PAGE_BYTES)
        environment = surroundings(os.environ, self.terms, self.identity)
        self.child = Child(self.command, environment, self.terms.get("directory"), descriptor, ignored)
        _go_first()
        self.oom, self.workers = OomWatch(), WorkerWatch(self.child.pid)
        self.oom_looked_at = float("-inf")
        self.pmix = ConnectionHolder(self.child.pid, os.environ)
        self.channel.send("started", pid=self.child.pid)
        self.loop.watch_channel(self.channel, self._on_channel)
        self.loop.watch(self.lifeline, self._on_lifeline)
        self.loop.watch(self.child.events, self._on_events)
        self.outputs = Outputs(
            self.loop, {self.child.out: "out", self.child.err: "err"}, int(self.terms["window"]),
            lambda data, stream: self.channel.send("out", data, stream=stream),
        )  # fmt: skip
        self._take(self._early)

    # --- what arrives

    def _on_channel(self) -> None:
        messages = self.channel.receive()
        if messages is None:
            self._launcher_lost()
        else:
            self._take(messages)

    def _take(self, messages: list[Message]) -> None:
        for message in messages:
            kind = message["t"]
            if kind == "ping":
                self._beat()
            elif kind == "credit":
                self.outputs.give_credit(int(message["bytes"]))
            elif kind == "stop":
                # Slurm signals every process of a step: the program has had the request, or will in a moment.
                delay = limits.SLURM_SECONDS if "SLURM_STEP_ID" in os.environ else 0.0
                self.stop = (time.monotonic() + delay, int(message["signal"]))
            elif kind == "kill":
                self._end_program(float(message.get("grace", limits.KILL_SECONDS)))
            elif kind == "stacks":
                self._ask_for_stacks()
            elif kind == "bye":
                self.released = True

    def _on_lifeline(self) -> None:
        """mpiexec killed the outer process: some rank called MPI_Abort, or mpiexec gives up."""
        self.loop.forget(self.lifeline)
        self.kill_at = time.monotonic() + limits.ABORT_SECONDS
        self.channel.send("event", event="cut")

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._fetch_ended()
        else:
            self.asked_at = time.monotonic()
            self.channel.send("asked", signal=number)

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
                    ended: Message = {"code": code, "signal": number, "oom": None, "ours": False}
                    self.channel.send("ended", **ended)  # at once: srun may leave no time for more
                    oom = self.oom.counted(pid) if number == signal.SIGKILL else None
                    if oom is not None:
                        self.channel.send("ended", **{**ended, "oom": oom})

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
                self.stacks += line + b"\n"

    def _on_event(self, line: bytes) -> None:
        try:
            event = json.loads(line)
            pid = int(event["pid"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return  # the pipe is the program's too: it may write there what it likes
        if event["event"] == "leaving":
            self.leaving[pid] = event
        if event["event"] == "finished":
            before = self.leaving.get(pid)
            if before is not None and before.get("code") and before.get("finalizes"):
                self.finalizing = (time.monotonic() + limits.FINALIZE_SECONDS, pid, before)
        else:
            self.channel.send("event", **{**event, "own": pid == self.child.pid})

    # --- what time brings

    def _seconds_to_wait(self) -> float:
        now = time.monotonic()
        due = [3600.0]
        if self.pmix.searching:
            due.append(limits.SEARCH_SECONDS)
        times = (self.stop and self.stop[0], self.kill_at, self.outputs.gather_until)
        due += [at - now for at in times if at is not None]
        if self.finalizing is not None:
            due.append(self.finalizing[0] - now)
        if self.status is not None and not self.reported_at:
            due.append(self._silent_at() - now)
        if self.reported_at:
            due.append(self.reported_at + limits.FAREWELL_SECONDS - now)
        return min(due)

    def _silent_at(self) -> float:
        """When the output of the ended program counts as read to its end: a grandchild may keep it open."""
        return 0.0 if not self.outputs.pipes else max(self.ended_at, self.outputs.heard_at) + limits.DRAIN_SECONDS

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
        if self.pmix.searching and self.status is None:
            self.pmix.look()
        if self.finalizing is not None and now >= self.finalizing[0]:
            (_, pid, event), self.finalizing = self.finalizing, None
            if linux.state(pid) not in ("", "Z"):
                self.channel.send("event", **{**event, "event": "finalizing"})
        if self.status is not None and not self.reported_at and now >= self._silent_at():
            self._report()

    def _beat(self) -> None:
        """Answer a ping: what the program is doing."""
        if self.status is not None:
            self.channel.send("pong")
            return
        now = time.monotonic()
        if now - self.oom_looked_at > limits.OOM_LOOK_SECONDS:
            self.oom.look(self.child.pid)
            self.oom_looked_at = now
        beat = heartbeat.read(self.page)
        state, traced = linux.state_and_tracer(self.child.pid)
        self.channel.send(
            "beat", state=state, traced=traced, count=beat.number, step=beat.step if beat.number else -1,
            age=now - beat.time if beat.number else None, paused=beat.paused, fields=beat.fields,
        )  # fmt: skip
        dead = self.workers.look()
        if dead is not None:
            pid, how = dead
            oom = self.oom.verdict(pid) if "SIGKILL" in how else None
            message = f"worker process {pid} {how}" + (f" ({oom})" if oom else "")
            self.channel.send("event", event="worker", message=message, oom=oom is not None)

    def _report(self) -> None:
        assert self.status is not None
        code, number = codes.from_wait_status(self.status)
        oom = self.oom.verdict(self.child.pid) if number == signal.SIGKILL and not self.ended_by_us else None
        beat = heartbeat.read(self.page)
        self.channel.send(
            "exit", code=code, signal=number, oom=oom, ours=self.ended_by_us,
            step=beat.step if beat.number else None, age=time.monotonic() - beat.time if beat.number else None,
        )  # fmt: skip
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
        self.released = True

    def _kill_now(self) -> None:
        self._fetch_ended()
        if self.status is None:
            self.ended_by_us = True
            self._note_segments()
            linux.kill_group(self.child.pid, signal.SIGKILL)
            linux.kill(self.child.pid, signal.SIGKILL)
        self.released = True

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

    def _ask_for_stacks(self) -> None:
        """Have the program write the stacks of its threads; sent when they have come, or their time is over."""
        self.stacks = b""
        # The program may be a shell around the Python that has our hooks.
        below = [] if self.status is not None else [self.child.pid, *linux.descendants(self.child.pid)]
        hooked = next((pid for pid in below if linux.catches(pid, stack_signal())), None)
        if hooked is not None:
            linux.kill(hooked, stack_signal())
            until = time.monotonic() + limits.STACK_SECONDS
            with selectors.DefaultSelector() as events:
                events.register(self.child.events, selectors.EVENT_READ)
                while time.monotonic() < until and events.select(0.1 if self.stacks else until - time.monotonic()):
                    self._on_events()
        text = self.stacks[-limits.TAIL_BYTES :].decode(errors="replace") or by_py_spy(below)
        self.channel.send("stacks", text=text, state=linux.state(self.child.pid))


def _go_first() -> None:
    """Be woken before busy ranks, where we may: srun can kill a whole step 10 ms after a rank's end."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    except OSError:
        pass  # an ordinary user on a machine with a core for each rank does not need it


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
