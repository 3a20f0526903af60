"""From the settings of the command line to a job that runs, restarts and ends."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, field

from .. import backends, codes
from ..backends import mpi
from ..backends.job import Host, Job
from ..errors import LaunchError
from ..rank.supervisor import ADDRESS, TOKEN
from . import environment, hosts, report
from .attempt import Attempt, Outcome, Terms
from .output import Output
from .pool import HostPool, probe_by_ssh
from .program import Program, mpi_of_binary, resolve
from .restarts import Policy, Record

_SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10")


@dataclass(frozen=True)
class Settings:
    """What the user asked for; the command line's help says what each means."""

    command: tuple[str, ...]
    ranks: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    per_host: int | None = None
    backend: str = "auto"
    mpiexec: str | None = None
    mpi_option: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    bind: str = "none"
    gpus: str = "all"
    threads: str = "auto"
    ssh: str | None = None
    ssh_option: tuple[str, ...] = ()
    interface: str | None = None
    port: int = 0
    show: bool = False
    bare: bool = False
    quiet: bool = False
    verbose: bool = False
    view: bool | None = None
    log_dir: str | None = None
    stacks: bool = False
    inject: bool = True
    start_timeout: float = 15.0
    heartbeat_timeout: float = 60.0
    host_timeout: float = 6.0
    grace: float = 30.0
    max_restarts: int = 0
    min_hosts: int = 1
    host_discovery: str | None = None
    cooldown: float = 30.0
    start_retries: int = 2
    record: str | None = None
    requeue: bool = False


@dataclass
class Session:
    """Runs the attempts of one job."""

    settings: Settings
    program: Program = field(init=False)

    def __post_init__(self) -> None:
        self.program = resolve(self.settings.command)
        self.added = environment.parse_settings(self.settings.env)
        self.library = self._library()
        self.backend = backends.choose(
            self.settings.backend, self.program.interpreter, self.library, self.settings.mpiexec
        )
        self.hosts = self._hosts()
        for host in self.hosts:
            self._check_host(host)

    def _library(self) -> mpi.Library | None:
        if self.program.interpreter is not None:
            return mpi.library_of(self.program.interpreter)
        family = mpi_of_binary(self.program.command[0])
        return mpi.Library(family, "") if family else None

    def _hosts(self) -> tuple[Host, ...]:
        if self.settings.hosts and self.settings.hostfile:
            raise LaunchError("--hosts and --hostfile name the hosts twice; give one of them")
        if self.settings.hosts:
            return hosts.parse_list(self.settings.hosts)
        if self.settings.hostfile:
            return hosts.parse_file(self.settings.hostfile)
        if self.settings.host_discovery:
            pool = HostPool((), lambda _: {}, 0.0, self.settings.host_discovery)
            pool.discover()
            return pool.hosts
        return hosts.of_environment()

    def _check_host(self, host: Host) -> None:
        if self.backend.kind != "srun" and hosts.resolve(host.name) is None and not self._ssh_knows(host.name):
            raise LaunchError(
                f"unknown host {host.name!r}: neither the system's names nor ssh's configuration has an address for it"
            )

    def _ssh_knows(self, name: str) -> bool:
        """An alias in ssh's configuration that stands for a resolvable name."""
        import subprocess

        try:
            child = subprocess.run(
                [self.settings.ssh or "ssh", "-G", name],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=5,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        words = dict(line.split(" ", 1) for line in child.stdout.splitlines() if " " in line)
        return words.get("hostname", name) != name and hosts.resolve(words["hostname"]) is not None

    # --- one attempt

    def job(self, available: tuple[Host, ...]) -> Job:
        """The job on the hosts that are there."""
        ranks, placed = self.settings.ranks, available
        if available:
            if self.settings.max_restarts and ranks is not None:
                slots = sum(self.settings.per_host or host.slots for host in available)
                ranks = min(ranks, slots)  # on fewer hosts than at first
            placed, ranks = hosts.place(available, ranks, self.settings.per_host)
            if len(placed) == 1 and hosts.is_local(placed[0].name) and self.backend.kind != "srun":
                placed = ()
        elif ranks is None:
            ranks = int(os.environ.get("SLURM_NTASKS", "0")) or None
        if ranks is None:
            raise LaunchError("how many ranks? -n 4, or --hosts a:2,b:2")
        supervision = () if self.settings.bare else (ADDRESS, TOKEN)
        added = tuple(self.added) if self.settings.bare else ()
        options = tuple(word for option in (*_SSH_OPTIONS, *self.settings.ssh_option) for word in ("-o", option))
        return Job(
            self.program.command, ranks, placed, (*environment.forwarded_names(os.environ), *added, *supervision),
            self._binding(ranks, placed), self.settings.ssh, options, self.settings.interface, self.settings.mpi_option,
        )  # fmt: skip

    def _binding(self, ranks: int, placed: tuple[Host, ...]) -> str:
        """No binding where there are more ranks than cores: two ranks on one core stand in each other's way."""
        from ..cores import available_cores

        here = max((host.slots for host in placed), default=ranks)
        return "none" if not placed and here > available_cores() else self.settings.bind

    def words(self, job: Job) -> list[str]:
        """The exact command of the starter."""
        if self.settings.bare:
            return self.backend.command(job, list(self.program.command))
        rank = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "rank", "main.py")
        # By its path and without site packages the supervisor starts twice as fast as by -m.
        return self.backend.command(job, [sys.executable, "-I", "-S", rank, "--", *self.program.command])

    def addresses(self, job: Job) -> tuple[str, ...]:
        """Where the ranks find us: on this machine by loopback, else on the interface that leads to them."""
        if self.settings.interface:
            return (hosts.address_of_interface(self.settings.interface),)
        known = job.hosts or hosts.slurm_hosts()
        if not known and self.backend.kind == "srun":
            return hosts.own_addresses()  # srun will choose the nodes
        elsewhere = [host.name for host in known if not hosts.is_local(host.name)]
        if not elsewhere:
            return ("127.0.0.1",)
        found = [hosts.own_address_towards(name) for name in elsewhere]
        # Ranks on this machine take the same way: the address is ours.
        return tuple(dict.fromkeys(address for address in found if address)) or (os.uname().nodename,)

    def attempt(self, job: Job, output: Output, restart: int) -> Outcome:
        """Run the job once."""
        s = self.settings
        terms = Terms(
            start_seconds=s.start_timeout, heartbeat_seconds=s.heartbeat_timeout, silence_seconds=s.host_timeout,
            grace_seconds=s.grace, stacks=s.stacks, addresses=self.addresses(job), port=s.port, threads=s.threads,
            gpus=s.gpus, inject=s.inject,
        )  # fmt: skip
        ranks_get = {**self.added, "DBRDIST_RESTART": str(restart)}
        starter_gets = {**os.environ, **self.backend.environment(job)}
        return Attempt(self.words(job), starter_gets, ranks_get, job.ranks, output, terms, s.verbose).run()

    # --- all of them

    def run(self) -> int:
        """Print, run bare, or run under supervision until the job is done or given up."""
        job = self.job(self.hosts)
        if self.settings.show:
            print(shlex.join(self.words(job)))
            return codes.DONE
        if self.settings.bare:
            words = self.words(job)
            sys.stdout.flush()
            os.execvpe(words[0], words, {**os.environ, **self.added, **self.backend.environment(job)})
        output = Output(self.settings.quiet, self.settings.log_dir)
        view = self._open_view(output)
        try:
            return self._attempts(job, output)
        finally:
            if view is not None:
                view.close()
            output.close()

    def _open_view(self, output: Output):  # type: ignore[no-untyped-def]
        wanted = self.settings.view
        if wanted is False or (wanted is None and not (sys.stdout.isatty() and sys.stderr.isatty())):
            return None
        from .view import open_view

        output.view = open_view(wanted is True)
        return output.view

    def _attempts(self, job: Job, output: Output) -> int:
        s = self.settings
        policy = Policy(s.max_restarts, s.start_retries, s.min_hosts)
        record_path = s.record or (os.path.join(s.log_dir, "attempts.json") if s.log_dir else None)
        record = Record(record_path, list(self.program.command))
        if s.log_dir is not None:
            report.remove_json(s.log_dir)  # of an earlier job in the same folder
        pool = HostPool(self.hosts, self._probe, s.cooldown, s.host_discovery)
        first = int(os.environ.get("SLURM_RESTART_COUNT", "0") or 0)
        while True:
            restart = first + policy.restarts
            outcome = self.attempt(job, output, restart)
            again, decision = policy.after(outcome)
            self._tell(outcome, output, job)
            ran = job
            if again:
                job, again, more = self._next_job(job, pool, output)
                decision += more
            record.add([host.name for host in ran.hosts], ran.ranks, restart, outcome, decision)
            if decision:
                output.note(f"dbrdist-launch: {decision}")
            if not again:
                return self._end(outcome, output)

    def _next_job(self, job: Job, pool: HostPool, output: Output) -> tuple[Job, bool, str]:
        """The job on the hosts that still answer: (job, whether there are enough, what to say)."""
        if not self.hosts:
            return job, True, ""
        pool.discover()
        lost, came_back = pool.after_failure()
        for name in lost:
            output.note(
                f"dbrdist-launch: host {name} is set aside for {self.settings.cooldown:g} s: {pool.aside[name][1]}"
            )
        available = pool.available()
        if len(available) < max(1, self.settings.min_hosts):
            return job, False, f"; but only {len(available)} of at least {self.settings.min_hosts} hosts are left"
        back = f", {' '.join(came_back)} back again" if came_back else ""
        return self.job(available), True, " on " + " ".join(host.name for host in available) + back

    def _probe(self, names: list[str]) -> dict[str, str]:
        options = tuple(word for option in self.settings.ssh_option for word in ("-o", option))
        return probe_by_ssh(names, self.settings.ssh, options)

    def _tell(self, outcome: Outcome, output: Output, job: Job) -> None:
        if outcome.failure is None:
            return
        if outcome.failure.kind == "start" and job.hosts and self.backend.kind != "srun":
            for name, why in self._probe([host.name for host in job.hosts]).items():
                outcome.failure.host = outcome.failure.host or name
                outcome.failure.host_trouble = True
                outcome.failure.message += f"; host {name} cannot be reached: {why}"
        output.note(report.as_text(outcome.failure))
        if self.settings.log_dir is not None:
            report.write_json(outcome.failure, self.settings.log_dir)

    def _end(self, outcome: Outcome, output: Output) -> int:
        if outcome.failure is None and outcome.asked and outcome.code == codes.PREEMPTED:
            output.note("dbrdist-launch: all ranks have saved and stopped (exit code 75)")
        if self.settings.requeue:
            from .requeue import requeue

            said = requeue(outcome)
            if said:
                output.note(f"dbrdist-launch: {said}")
        return outcome.code
