"""From the settings to a job that runs, restarts and ends."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from .. import backends, codes, cores, limits
from ..backends import hosts, mpi, slurm
from ..backends.job import Host, Job, Place
from ..channel import new_token
from ..errors import LaunchError
from ..inherited import Inherited
from ..loop import Loop, Signals
from ..rank import bundle
from ..rank.surroundings import ADDRESS, TOKEN
from ..signals import PASSED_ON, REAL_TIME, STOPS
from ..wire import whole
from .judgement import report
from .preparation import binding, environment
from .preparation.program import mpi_of_binary, resolve
from .preparation.settings import LaunchSettings
from .records.jobs import JobFolder
from .records.runs import LaunchFolder
from .restarting.pool import HostPool, probe_by_ssh
from .restarting.requeue import requeue
from .restarting.restarts import Policy
from .running.attempt import Attempt
from .running.plan import LaunchPlan, Outcome
from .streams.events import Events
from .streams.input import KeptInput
from .streams.output import Output
from .streams.view import is_able

if TYPE_CHECKING:
    from .records.metrics import Metrics

_MOST_RANKS = 1 << 20  # no job has more
_SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10")
_RANK = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "rank", "main.py")


class Session:
    """Runs the attempts of one job."""

    events = Events()
    metrics: Metrics | None = None

    def __init__(self, settings: LaunchSettings) -> None:
        self.settings = s = settings
        self.notes: list[str] = []  # to be said once there is a place to say it
        self.folder: JobFolder | None = None
        self.kept_input = KeptInput()
        self.program = resolve(s.words)
        self.shown = parse_ranks("0" if s.quiet and s.show is None else s.show)
        self.added, self.named = environment.parse_settings(s.env, os.environ)
        for name in environment.forwarded(os.environ, self.named, only=True):
            if name in self.named:
                self.added[name] = os.environ[name]  # over the side channel, not on a command line
        self.library = self._library()
        self.backend = backends.choose(Place(s.backend, self.program.interpreter, self.library, s.mpiexec))
        self.hosts = self._hosts()
        for host in self.hosts:
            self._check_host(host)
        self.deadline = time.monotonic() + s.timeout if s.timeout else None

    def _library(self) -> mpi.Library | None:
        if self.program.interpreter is not None:
            return mpi.library_of(self.program.interpreter)
        family = mpi_of_binary(self.program.command[0])
        return mpi.Library(family, "") if family else None

    def _hosts(self) -> tuple[Host, ...]:
        if self.settings.hosts and self.settings.hostfile:
            raise LaunchError("--hosts and --hostfile cannot be combined; use only one of them")
        if self.settings.hosts:
            return hosts.parse_list(self.settings.hosts)
        if self.settings.hostfile:
            return hosts.parse_file(self.settings.hostfile, self.notes.append)
        if self.settings.host_discovery:
            pool = HostPool((), lambda _: {}, 0.0, self.settings.host_discovery)
            pool.discover()
            return pool.hosts
        return self.backend.hosts(os.environ)

    def _check_host(self, host: Host) -> None:
        if not self.backend.places_ranks and hosts.resolve(host.name) is None and not self._ssh_knows(host.name):
            raise LaunchError(
                f"unknown host {host.name!r}: neither the system nor ssh's configuration has an address for it"
            )

    def _ssh_knows(self, name: str) -> bool:
        """An alias in ssh's configuration that stands for a resolvable name."""
        words = [self.settings.ssh or "ssh", "-G", name]
        try:
            child = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5)
        except (OSError, subprocess.TimeoutExpired):
            return False
        found = dict(line.split(" ", 1) for line in child.stdout.splitlines() if " " in line)
        return found.get("hostname", name) != name and hosts.resolve(found["hostname"]) is not None

    # --- one attempt

    def job(self, available: tuple[Host, ...]) -> Job:
        """The job on the hosts that are there."""
        s = self.settings
        ranks, placed = s.ranks, available
        if available:
            if s.max_restarts and ranks is not None:
                slots = sum(s.per_host or host.slots for host in available)
                ranks = min(ranks, slots)  # on fewer hosts than at first
            placed, ranks = hosts.place(available, ranks, s.per_host)
            if len(placed) == 1 and hosts.is_local(placed[0].name) and not self.backend.places_ranks:
                placed = ()
        elif ranks is None:
            ranks = whole(os.environ.get("SLURM_NTASKS")) or None
        if ranks is None:
            raise LaunchError("expected the number of ranks, as in -n 4 or --hosts a:2,b:2")
        if ranks > _MOST_RANKS:
            raise LaunchError(f"-n {ranks}: no job has more than {_MOST_RANKS} ranks")
        names = environment.forwarded(os.environ, self.named, s.only_env)
        names += tuple(self.added) if s.bare else (ADDRESS, TOKEN)
        agent, options = self._ssh()
        return Job(
            self.program.command, ranks, placed, names, self._binding(ranks, placed), agent, options, s.interface,
            s.mpi_option,
        )  # fmt: skip

    def _has_spaces(self) -> bool:
        return any(" " in option for option in self.settings.ssh_option)

    def _ssh(self) -> tuple[str | None, tuple[str, ...]]:
        """(the program that reaches hosts, or None for ssh; its options): our own options are for ssh only."""
        s = self.settings
        wanted = (*(() if s.ssh else _SSH_OPTIONS), *s.ssh_option)
        options = tuple(word for option in wanted for word in ("-o", option))
        if self.folder is not None and self._has_spaces():
            return self.folder.ssh_with(s.ssh or "ssh", options), ()
        return s.ssh, options

    def _binding(self, ranks: int, placed: tuple[Host, ...]) -> str:
        """No binding where there are more ranks than cores: two ranks on one core stand in each other's way."""
        here = max((host.slots for host in placed), default=ranks)
        return "none" if not placed and here > cores.available_cores() else self.settings.bind

    def words(self, job: Job) -> list[str]:
        """The exact command of the starter."""
        if self.settings.bare:
            return self.backend.command(job, list(self.program.command))
        # By its path and without site packages the supervisor starts twice as fast as by -m. What it runs it learns
        # from the launcher; here the program stands for people to read, unless mpiexec would read on at a lone `:`.
        address = f"unix:{self._socket}" if self._is_here(job) else "-"
        supervisor = [sys.executable, "-I", "-S", _RANK, self.backend.identity, address]
        return self.backend.command(job, [*supervisor, *(() if ":" in self.program.command else self.program.command)])

    @property
    def _socket(self) -> str | None:
        return self.folder.socket if self.folder is not None else None

    def _is_here(self, job: Job) -> bool:
        """Whether all ranks are on this machine, and find the launcher in a folder that is its user's alone."""
        return self._socket is not None and not self.addresses(job)

    def addresses(self, job: Job) -> tuple[str, ...]:
        """Where ranks elsewhere find us: on the interface that leads to them; () where all are on this machine."""
        if self.settings.interface:
            return (hosts.address_of_interface(self.settings.interface),)
        known = job.hosts or slurm.allocation()
        if not known and self.backend.places_ranks:
            return hosts.own_addresses()  # it will choose the hosts
        elsewhere = [host.name for host in known if not hosts.is_local(host.name)]
        if not elsewhere:
            return ("127.0.0.1",) if self.settings.port or self.backend.places_ranks else ()
        found = [hosts.own_address_towards(name) for name in elsewhere]
        # Ranks on this machine take the same way: the address is ours.
        return tuple(dict.fromkeys(address for address in found if address)) or (os.uname().nodename,)

    def plan(self, job: Job, restart: int, token: str) -> LaunchPlan:
        """What is started, and how."""
        start = self.settings.start_timeout
        return LaunchPlan(
            job, self.words(job), {**environment.without_stale(os.environ), **self.backend.environment(job)},
            {**self.added, "DBRDIST_RESTART": str(restart)},
            start if start is not None else None if self.backend.queues else limits.START_SECONDS,
            self.backend, token, self._socket, self.addresses(job), self.deadline, not self._is_here(job),
            self.kept_input,
        )  # fmt: skip

    # --- all of them

    def run(self) -> int:
        """Print, run bare, or run under supervision until the job is done or given up."""
        s = self.settings
        job = self.job(self.hosts)
        if s.print or s.bare:
            return self._print_or_run_bare(job)
        run = LaunchFolder(
            s.name or time.strftime("%Y%m%d-%H%M%S-") + str(os.getpid()), list(s.words), s.log_dir, s.record
        )
        view = s.view if s.view is not None else os.isatty(1) and os.isatty(2)
        if view and not is_able():
            view = False
            if s.view:
                self.notes.append("no live view: this terminal (TERM) cannot draw one")
        output = Output(self.shown, run.attempt_folder(), view, s.timestamps, s.tee, s.log_bytes, s.log_keep)
        run.say = lambda text: output.note(f"dbrdist-launch: {text}")
        self.events = Events(s.events, run.name)
        self.events.tell("job_started", command=list(s.words), ranks=job.ranks, pid=os.getpid())
        try:
            if s.metrics is not None:
                from .records.metrics import Metrics  # a web server: loaded for those who ask for one

                self.metrics = Metrics(s.metrics, run.name)
            return self._attempts(job, output, run)
        finally:
            if self.metrics is not None:
                self.metrics.close()
            self.events.close()
            if self.events.problem:
                output.note(f"dbrdist-launch: {self.events.problem}")
            output.flush()
            output.close()

    def _print_or_run_bare(self, job: Job) -> int:
        words = self.words(job)
        if self.settings.bare and ":" in self.program.command and not self.backend.places_ranks:
            raise LaunchError(
                f"--bare: {self.backend.label} takes the argument ':' for the beginning of another program; "
                "omit --bare, or pass it in a script"
            )
        if self.settings.print:
            print(shlex.join(words), flush=True)
            if not self.settings.bare and ":" in self.program.command:
                print(f"# its ranks run: {shlex.join(self.program.command)}", file=sys.stderr)
            if self.settings.bind != job.bind:
                print("# not bound: there are more ranks than cores here", file=sys.stderr)
            for line in binding.lines(job, self.backend, self.settings.gpus == "rank"):
                print(line, file=sys.stderr)
            return codes.DONE
        sys.stdout.flush()
        return os.execvpe(words[0], words, {**os.environ, **self.added, **self.backend.environment(job)})

    def attempt(self, job: Job, output: Output, restart: int, name: str = "job") -> Outcome:
        """Run the job once."""
        token = new_token()
        self.folder = JobFolder(name, list(self.settings.words), token)
        try:
            if job.ranks >= bundle.FEWEST_RANKS and self._is_here(job):
                self.folder.add_modules(bundle.pack())
            if self._has_spaces():
                agent, options = self._ssh()
                job = job._replace(ssh=agent, ssh_options=options)
            attempt = Attempt(self.plan(job, restart, token), output, self.settings, self.events)
            if self.metrics is not None:
                self.metrics.ranks, self.metrics.size, self.metrics.restarts = attempt.ranks, job.ranks, restart
            hosts = [host.name for host in job.hosts]
            self.events.tell("attempt_started", restart=restart, ranks=job.ranks, hosts=hosts)
            return attempt.run()
        finally:
            self.folder.close()
            self.folder = None

    def _attempts(self, job: Job, output: Output, run: LaunchFolder) -> int:
        s = self.settings
        self._say_what_stays(job, run)
        policy = Policy(s.max_restarts, s.start_retries, s.backoff, s.max_backoff)
        pool = HostPool(self.hosts, self._probe, s.cooldown, s.host_discovery, most_failures=s.max_host_failures)
        first = whole(os.environ.get("SLURM_RESTART_COUNT")) or 0
        while True:
            run.write()
            restart = first + policy.restarts
            outcome = self.attempt(job, output, restart, run.name)
            again, decision = policy.after(outcome)
            self._tell(outcome, output, job)
            ran = job
            if outcome.failure is not None:
                pool.note_failure(outcome.failure.host, f"{outcome.failure.kind}: {outcome.failure.message}")
                run.status["host_failures"] = pool.history
            if again:
                job, again, more = self._next_job(job, pool, output)
                decision += more
            run.add([host.name for host in ran.hosts], ran.ranks, restart, outcome, decision)
            self.events.tell("attempt_ended", code=outcome.code, seconds=round(outcome.seconds, 3), decision=decision)
            if decision:
                output.note(f"dbrdist-launch: {decision}")
            if again:
                outcome, again = self._wait(outcome, policy.wait_seconds(), output)
            if not again:
                return self._end(outcome, output, run)
            output.next_folder(run.attempt_folder())
            lost = self.kept_input.rewind()
            if lost:
                run.say(lost)

    def _wait(self, outcome: Outcome, seconds: float, output: Output) -> tuple[Outcome, bool]:
        """Wait before a restart; (the outcome, whether to start again): a request to stop ends the job here."""
        until = time.monotonic() + seconds
        if self.deadline is not None:
            until = min(until, self.deadline)
        if until <= time.monotonic():
            return outcome, True
        asked: list[int] = []
        loop = Loop()
        # Before a word of it: who reads it may ask at once.
        signals = Signals(loop, (*STOPS, *PASSED_ON, *REAL_TIME), asked.append, Inherited())
        try:
            output.note(f"dbrdist-launch: waiting {seconds:g} s before the restart (--backoff)")
            self.events.tell("waiting", seconds=seconds)
            while not asked and time.monotonic() < until:
                loop.turn(until - time.monotonic())
        finally:
            signals.close()
            loop.close()
        if not asked:
            return outcome, True
        output.note(f"dbrdist-launch: {codes.signal_name(asked[0])}: not restarted")
        return replace(outcome, code=codes.from_signal(asked[0]), asked=asked[0]), False

    def _say_what_stays(self, job: Job, run: LaunchFolder) -> None:
        """Once: what the user may miss on other hosts, or of ranks that there are not."""
        if self.shown and max(self.shown) >= job.ranks and self.settings.show is not None:
            run.say(f"--show-ranks {self.settings.show}: the job has no rank above {job.ranks - 1}")
        for note in self.notes:
            run.say(note)
        travels = job.hosts or self.backend.places_ranks
        hidden = environment.secrets(os.environ, (*job.forward, *self.added)) if travels else []
        if hidden:
            run.say(f"not passed on, because they look like secrets: {' '.join(hidden)} (--env NAME passes one)")

    def _next_job(self, job: Job, pool: HostPool, output: Output) -> tuple[Job, bool, str]:
        """The job on the hosts that still answer: (job, whether there are enough, what to say)."""
        if not self.hosts:
            return job, True, ""
        try:
            pool.discover()
        except LaunchError as error:
            output.note(f"dbrdist-launch: {error}; using the hosts known before")
        lost, came_back = pool.after_failure()
        for name in lost:
            why = pool.aside[name][1]
            output.note(f"dbrdist-launch: host {name} is not used for {pool.cooldown_of(name):g} s: {why}")
        available = pool.available()
        if len(available) < max(1, self.settings.min_hosts):
            return (
                job,
                False,
                f"; but too few hosts are left: {len(available)}, with --min-hosts {self.settings.min_hosts}",
            )
        back = f"; back again: {' '.join(came_back)}" if came_back else ""
        return self.job(available), True, " on " + " ".join(host.name for host in available) + back

    def _probe(self, names: list[str]) -> dict[str, str]:
        options = tuple(word for option in self.settings.ssh_option for word in ("-o", option))
        return probe_by_ssh(names, self.settings.ssh, options)

    def _tell(self, outcome: Outcome, output: Output, job: Job) -> None:
        if outcome.failure is None:
            return
        if outcome.failure.kind == "start" and job.hosts and not self.backend.places_ranks:
            for name, why in self._probe([host.name for host in job.hosts]).items():
                outcome.failure.host = outcome.failure.host or name
                outcome.failure.host_trouble = True
                outcome.failure.message += f"; host {name} cannot be reached: {why}"
        rank = outcome.failure.rank
        self.events.tell("failure", **asdict(outcome.failure))
        output.note(report.as_text(outcome.failure, seen=rank is not None and output.shows(rank)))

    def _end(self, outcome: Outcome, output: Output, run: LaunchFolder) -> int:
        if outcome.failure is None and outcome.asked and outcome.code == codes.PREEMPTED:
            output.note("dbrdist-launch: all ranks have saved and stopped (exit code 75)")
        run.end(outcome)
        self.events.tell("job_ended", state=run.status["state"], code=outcome.code)
        if self.settings.requeue:
            said = requeue(outcome)
            if said:
                output.note(f"dbrdist-launch: {said}")
        return outcome.code


def parse_ranks(text: str | None) -> frozenset[int] | None:
    """0,4-7 -> those; none -> no one; None or all -> None, which stands for all."""
    if text in (None, "all"):
        return None
    found: set[int] = set()
    for part in [] if text == "none" else str(text).split(","):
        first, _, last = part.partition("-")
        low, high = whole(first), whole(last or first)
        if low is None or high is None:
            raise LaunchError(f"--show-ranks {text!r}: expected numbers and ranges such as 0,4-7, or all, or none")
        found.update(range(min(low, _MOST_RANKS), min(high, _MOST_RANKS) + 1))
    return frozenset(found)
