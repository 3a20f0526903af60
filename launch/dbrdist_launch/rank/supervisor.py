"""The inner process of a rank: runs the program, passes on what it says, and reports how it ends."""

import json
import mmap
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable

from .. import codes, heartbeat, linux
from ..channel import Channel
from ..lines import LineSplitter
from .child import Child, stack_signal
from .deaths import OomWatch
from .identity import of_environment
from .pmix import ConnectionHolder
from .workers import WorkerWatch

ADDRESS = "DBRDIST_LAUNCH_CHANNEL"
TOKEN = "DBRDIST_LAUNCH_TOKEN"
_TICK_SECONDS = 0.5
_SEARCH_SECONDS = 0.02
_CONNECT_SECONDS = 4.0
_DRAIN_SECONDS = 0.3  # how long a grandchild may hold the output open after the program's end
_ABORT_SECONDS = 0.5  # from mpiexec's kill to ours: a rank in MPI_Abort ends by itself with its code
_FAREWELL_SECONDS = 20.0  # the launcher gathers what the others do before it lets a failed rank go
_SLURM_SECONDS = 0.5  # within which Slurm's signals reach all processes of a step
_KILL_SECONDS = 1.0  # from SIGTERM to SIGKILL


class Supervisor:
    """One rank's supervisor; `run` returns the program's exit code."""

    def __init__(self, command: list[str], lifeline: int) -> None:
        self.command = command
        self.lifeline = lifeline
        self.selector = selectors.DefaultSelector()
        self.status: int | None = None  # of the program, once it has ended
        self.ended_at = 0.0
        self.reported_at = 0.0
        self.released = False  # the launcher has said goodbye
        self.ended_by_us = False
        self.kill_at: float | None = None
        self.open_pipes: set[int] = set()
        self.asked: list[int] = []  # signals that we received
        self.asked_at = float("-inf")
        self.stop: tuple[float, int] | None = None  # when to pass which signal on
        self.partial_event = b""
        self.stacks = b""

    # --- life

    def run(self) -> int:
        identity = of_environment()
        if identity is None:
            raise RuntimeError("no rank in the environment: this runs under mpiexec or srun, started by dbrdist-launch")
        self.identity = identity
        self._connect()
        self._start()
        while not self._done():
            for key, _ in self.selector.select(self._seconds_to_wait()):
                key.data()
            self._tick()
        if self.status is None:
            return codes.from_signal(signal.SIGKILL)
        return codes.from_wait_status(self.status)[0]

    def _connect(self) -> None:
        hosts, _, port = os.environ.pop(ADDRESS).rpartition(":")
        token = os.environ.pop(TOKEN)
        self.channel = Channel(_connect_to_any(hosts.split(","), int(port)))
        self.channel.send("hello", token=token, pid=os.getpid(), **self.identity._asdict())
        messages: list[dict] | None = []
        while messages == []:
            messages = self.channel.receive()
        if not messages or messages[0]["t"] != "welcome":
            raise ConnectionError("the launcher refused this rank")
        self.terms = messages[0]
        self.silence_seconds = float(self.terms["silence_seconds"])
        self.channel.socket.settimeout(self.silence_seconds)
        self.heard_at = time.monotonic()
        self.connected = True

    def _start(self) -> None:
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(wake_read, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.wake = wake_read
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, lambda number, _: self.asked.append(number))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        linux.adopt_orphans()
        self.page = mmap.mmap(self._page_descriptor(), heartbeat.PAGE_BYTES)
        self.child = Child(self.command, self._environment(), self.terms.get("directory"))
        _go_first()
        self.oom, self.workers = OomWatch(), WorkerWatch(self.child.pid)
        self.oom.look(self.child.pid)
        self.pmix = ConnectionHolder(self.child.pid, os.environ)
        self.next_tick = time.monotonic() + _TICK_SECONDS
        self.channel.send("started", pid=self.child.pid)
        self._watch(self.channel.fileno(), self._on_channel)
        self._watch(self.lifeline, self._on_lifeline)
        self._watch(self.wake, self._on_signal)
        self._watch(self.child.events, self._on_events)
        for stream, descriptor in (("out", self.child.out), ("err", self.child.err)):
            self._watch_output(stream, descriptor)

    def _page_descriptor(self) -> int:
        self.page_file = os.memfd_create("dbrdist-heartbeat")
        os.ftruncate(self.page_file, heartbeat.PAGE_BYTES)
        return self.page_file

    def _environment(self) -> dict[str, str]:
        """The rank's environment as its MPI made it, and what the launcher adds."""
        environment = {**os.environ, **self.terms["environment"]}
        environment[heartbeat.VARIABLE] = f"/proc/{os.getpid()}/fd/{self.page_file}"
        environment["DBRDIST_LAUNCH"] = "1"
        environment.setdefault("PYTHONUNBUFFERED", "1")  # lines arrive when they are written, also before a SIGKILL
        if self.terms.get("threads") == "auto" and "OMP_NUM_THREADS" not in environment:
            from ..cores import available_cores

            share = available_cores() // max(1, self.identity.local_size)
            environment["OMP_NUM_THREADS"] = str(max(1, share))
        if self.terms.get("gpus") == "rank":
            from .gpus import for_local_rank

            environment.update(for_local_rank(self.identity.local_rank, environment))
        if self.terms.get("inject", True):
            inherited = environment.get("PYTHONPATH", "")
            here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "inject")
            environment["DBRDIST_LAUNCH_INJECTED_PYTHONPATH"] = inherited
            environment["PYTHONPATH"] = here + (os.pathsep + inherited if inherited else "")
        return environment

    # --- what arrives

    def _watch(self, descriptor: int, call: Callable[[], None]) -> None:
        self.selector.register(descriptor, selectors.EVENT_READ, call)

    def _watch_output(self, stream: str, descriptor: int) -> None:
        splitter = LineSplitter()

        def read() -> None:
            data = os.read(descriptor, 1 << 16)
            lines = splitter.feed(data) if data else splitter.end()
            if not data:
                self.selector.unregister(descriptor)
                self.open_pipes.discard(descriptor)
            if lines and not self.channel.send("out", stream=stream, lines=lines):
                self._launcher_lost()

        self.open_pipes.add(descriptor)
        self._watch(descriptor, read)

    def _on_channel(self) -> None:
        messages = self.channel.receive()
        if messages is None:
            self._launcher_lost()
            return
        self.heard_at = time.monotonic()
        for message in messages:
            kind = message["t"]
            if kind == "stop":
                # Slurm signals every process of a step: the program has had the request, or will in a moment.
                delay = _SLURM_SECONDS if "SLURM_STEP_ID" in os.environ else 0.0
                self.stop = (self.heard_at + delay, int(message["signal"]))
            elif kind == "kill":
                self._end_program(float(message.get("grace", _KILL_SECONDS)))
            elif kind == "stacks":
                self._ask_for_stacks()
            elif kind == "bye":
                self.released = True

    def _on_lifeline(self) -> None:
        """mpiexec killed the outer process: some rank called MPI_Abort, or mpiexec gives up."""
        self.selector.unregister(self.lifeline)
        self.kill_at = time.monotonic() + _ABORT_SECONDS
        self.channel.send("event", event="cut")

    def _on_signal(self) -> None:
        try:
            os.read(self.wake, 4096)
        except BlockingIOError:
            pass
        if self.asked:
            self.asked_at = time.monotonic()
        while self.asked:
            if not self.channel.send("asked", signal=self.asked.pop(0)):
                self._launcher_lost()
        self._fetch_ended()

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
                if status and not self.ended_by_us:
                    code, number = codes.from_wait_status(status)
                    ended = {"code": code, "signal": number, "oom": None, "ours": False}
                    self.channel.send("ended", **ended)  # at once: srun may leave no time for more
                    oom = self.oom.counted() if number == signal.SIGKILL else None
                    if oom is not None:
                        self.channel.send("ended", **{**ended, "oom": oom})

    def _on_events(self) -> None:
        data = os.read(self.child.events, 1 << 16)
        if not data:
            self.selector.unregister(self.child.events)
            return
        *lines, self.partial_event = (self.partial_event + data).split(b"\n")
        for line in lines:
            if line.startswith(b"\x1e"):
                self.channel.send("event", **json.loads(line[1:]))
            else:
                self.stacks += line + b"\n"

    # --- what time brings

    def _seconds_to_wait(self) -> float:
        now = time.monotonic()
        due = [self.next_tick - now]
        if self.pmix.searching:
            due.append(_SEARCH_SECONDS)
        if self.stop is not None:
            due.append(self.stop[0] - now)
        if self.kill_at is not None:
            due.append(self.kill_at - now)
        if self.status is not None and not self.reported_at:
            due.append(0.0 if not self.open_pipes else self.ended_at + _DRAIN_SECONDS - now)
        return max(0.0, min(due))

    def _tick(self) -> None:
        now = time.monotonic()
        if self.stop is not None and now >= self.stop[0]:
            number, self.stop = self.stop[1], None
            if self.status is None and now - self.asked_at > 2 * _SLURM_SECONDS:
                linux.kill(self.child.pid, number)
        if self.kill_at is not None and now >= self.kill_at:
            self.kill_at = None
            self._kill_now()
        if self.pmix.searching and self.status is None:
            self.pmix.look()
        silent = not self.open_pipes or now >= self.ended_at + _DRAIN_SECONDS
        if self.status is not None and not self.reported_at and silent:
            self._report()
        if now >= self.next_tick:
            self.next_tick = now + _TICK_SECONDS
            if now - self.heard_at > self.silence_seconds:
                self._launcher_lost()
            elif self.status is None:
                self._beat(now)

    def _beat(self, now: float) -> None:
        self.oom.look(self.child.pid)
        beat = heartbeat.read(self.page)
        self.channel.send(
            "beat",
            state=linux.state(self.child.pid),
            count=beat.number,
            step=beat.step if beat.number else -1,
            age=now - beat.time if beat.number else None,
            paused=beat.paused,
            fields=beat.fields,
        )
        dead = self.workers.look()
        if dead is not None:
            pid, how = dead
            oom = self.oom.verdict(pid) if "SIGKILL" in how else None
            message = f"worker process {pid} {how}" + (f" ({oom})" if oom else "")
            self.channel.send("event", event="worker", message=message)

    def _report(self) -> None:
        assert self.status is not None
        code, number = codes.from_wait_status(self.status)
        oom = self.oom.verdict(self.child.pid) if number == signal.SIGKILL and not self.ended_by_us else None
        beat = heartbeat.read(self.page)
        self.channel.send(
            "exit", code=code, signal=number, oom=oom, ours=self.ended_by_us,
            step=beat.step if beat.number else None, fields=beat.fields,
        )  # fmt: skip
        self.reported_at = time.monotonic()
        if code == 0:
            self.released = True  # nobody has a question to a rank that ended well

    # --- ends

    def _done(self) -> bool:
        if self.status is None or not self.reported_at:
            return False
        return self.released or time.monotonic() - self.reported_at > _FAREWELL_SECONDS

    def _end_program(self, grace_seconds: float) -> None:
        if self.status is None:
            self.ended_by_us = True
            linux.kill_group(self.child.pid, signal.SIGTERM)
            linux.kill_group(self.child.pid, signal.SIGCONT)  # a stopped process does not see a SIGTERM
            self.kill_at = time.monotonic() + grace_seconds
        self.released = True

    def _kill_now(self) -> None:
        self._fetch_ended()
        if self.status is None:
            self.ended_by_us = True
            linux.kill_group(self.child.pid, signal.SIGKILL)
            linux.kill(self.child.pid, signal.SIGKILL)
        self.released = True

    def _launcher_lost(self) -> None:
        """The launcher was killed or the network is cut: nobody would hear of this rank any more, so it ends."""
        if self.connected:
            self.connected = False
            self.selector.unregister(self.channel.fileno())
            self.channel.close()
            self.heard_at = float("inf")
            self._kill_now()

    def _ask_for_stacks(self) -> None:
        """Have the program write the stacks of its threads; sent when they have come, or their time is over."""
        self.stacks = b""
        if self.status is None and linux.catches(self.child.pid, stack_signal()):
            linux.kill(self.child.pid, stack_signal())
            until = time.monotonic() + 0.5
            with selectors.DefaultSelector() as events:
                events.register(self.child.events, selectors.EVENT_READ)
                while time.monotonic() < until and events.select(0.1 if self.stacks else until - time.monotonic()):
                    self._on_events()
        self.channel.send("stacks", text=self.stacks.decode(errors="replace"), state=linux.state(self.child.pid))


def _go_first() -> None:
    """Be woken before busy ranks, where we may: srun can kill a whole step 10 ms after a rank's end."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    except OSError:
        pass  # an ordinary user on a machine with a core for each rank does not need it


def _connect_to_any(hosts: list[str], port: int) -> socket.socket:
    """Connect to the first of the launcher's addresses that answers."""
    failures = []
    for host in hosts:
        try:
            return socket.create_connection((host, port), _CONNECT_SECONDS)
        except OSError as error:
            failures.append(f"{host}:{port}: {error}")
    raise ConnectionError("the launcher cannot be reached from this host: " + "; ".join(failures))
