"""The command line of the doctor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import click

from ..backends import hosts as hosts_module
from ..backends import mpi, slurm
from ..backends.job import Host
from ..errors import LaunchError
from ..launcher.preparation.settings import LaunchSettings
from ..launcher.records.runs import write_json
from ..launcher.session import Session
from ..launcher.streams.output import Output
from ..launcher.streams.pieces import Piece
from . import checks, fit, record
from .findings import Findings

_HERE = os.path.dirname(os.path.abspath(__file__))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-n", "--ranks", type=click.IntRange(min=2), help="Ranks of the test job; default: all slots of the hosts, or 2."
)
@click.option("--hosts", metavar="A:2,B:2", help="Hosts to check.")
@click.option("--hostfile", metavar="FILE", help="Read the hosts from a file.")
@click.option("--ssh", metavar="PATH", help="The program to reach hosts with, instead of ssh.")
@click.option("--ssh-option", multiple=True, metavar="K=V", help="An option for ssh -o; repeatable.")
@click.option("--interface", metavar="NAME", help="Network interface to use.")
@click.option("--backend", default="auto", help="What starts the test job.")
@click.option("--mpiexec", metavar="PATH", help="The mpiexec to check.")
@click.option("--no-job", is_flag=True, help="Do not start a test job; nothing is measured then.")
@click.option("--model", metavar="25.6M", help="Predict how long the gradients of so many parameters take.")
@click.option("--json", "json_file", metavar="FILE", help="Also write the findings to this file.")
def doctor(ranks, hosts, hostfile, ssh, ssh_option, interface, backend, mpiexec, no_job, model, json_file) -> int:  # type: ignore[no-untyped-def]
    """Check MPI, hosts and network; exit with 1 if a job would fail."""
    try:
        parameters = fit.parse_count(model) if model else None
    except (ValueError, KeyError):
        raise LaunchError(f"--model {model!r}: expected a number of parameters such as 25.6M") from None
    findings = Findings()
    named = _allocation(hosts, hostfile)
    fits = _mpi(findings, mpiexec)
    facts = _hosts(findings, [host.name for host in named], ssh, ssh_option)
    here = max((host.slots for host in named), default=ranks or 2)
    for found in facts:
        checks.memory_and_limits(findings, found, here)
        checks.alike(findings, facts[0], found) if found is not facts[0] else None
    if fits and not no_job and not findings.failed:
        settings = LaunchSettings(
            (sys.executable, os.path.join(_HERE, "mpi_probe.py")), ranks or (None if named else 2), hosts=hosts,
            hostfile=hostfile, backend=backend, mpiexec=mpiexec, ssh=ssh, ssh_option=ssh_option, interface=interface,
        )  # fmt: skip
        _job(findings, settings, facts, parameters)
    if json_file:
        try:
            write_json(json_file, findings.as_dict())
        except OSError as error:
            findings.warn("--json", f"{json_file} cannot be written: {error.strerror}", "name another file")
    bad = sum(entry["level"] == "FAIL" for entry in findings.entries)
    print(f"{bad} of {len(findings.entries)} findings would make a job fail" if bad else "a job can run here")
    return 1 if bad else 0


def _allocation(named: str | None, hostfile: str | None) -> tuple[Host, ...]:
    """The hosts that were named, else those of the allocation that we are in: PBS, LSF, MPI Operator, Slurm."""
    if named:
        return hosts_module.parse_list(named)
    if hostfile:
        return hosts_module.parse_file(hostfile)
    return hosts_module.of_environment() or slurm.allocation()


def _mpi(findings: Findings, mpiexec: str | None) -> bool:
    library = mpi.library_of(sys.executable)
    if library is None:
        findings.fail("MPI library", f"mpi4py of {sys.executable} loads no MPI library", "pip install mpi4py mpich")
        return False
    findings.ok("MPI library", f"mpi4py loads {library.family} {library.version} ({library.path})")
    try:
        starter = mpi.find_starter(sys.executable, library, mpiexec)
    except LaunchError as error:
        findings.fail("mpiexec", str(error), "")
        return False
    findings.ok("mpiexec", f"{starter.path} ({starter.family} {starter.version}) fits")
    return True


def _hosts(findings: Findings, names: list[str], ssh: str | None, options: tuple[str, ...]) -> list[dict[str, Any]]:
    """The facts of this machine, or of the hosts that were named; unreachable ones are findings."""
    probe = [sys.executable, os.path.join(_HERE, "host_probe.py")]
    if not names:
        return [_facts(probe, 20)[0]]
    found = []
    for name in names:
        words = probe
        if not hosts_module.is_local(name):
            flags = [word for option in ("BatchMode=yes", "ConnectTimeout=5", *options) for word in ("-o", option)]
            words = [ssh or "ssh", *flags, name, *probe]
        try:
            facts, offset, doubt = _facts(words, 20)
        except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
            said = getattr(error, "stderr", None) or str(error)
            findings.fail(
                "reachable", f"{name}: {said.strip().splitlines()[-1]}", f"make `ssh {name} {probe[0]} -V` work"
            )
            continue
        findings.ok("reachable", f"{name} answers as {facts['host']} within {2 * doubt:.2f} s")
        checks.clock(findings, name, offset, doubt)
        found.append(facts)
    return found


def _facts(words: list[str], seconds: float) -> tuple[dict[str, Any], float, float]:
    """(facts, clock offset, doubt of it)."""
    before = time.time()
    child = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=True)
    after = time.time()
    facts = json.loads(child.stdout.splitlines()[-1])
    return facts, facts["time"] - (before + after) / 2, (after - before) / 2


class _Captured(Output):
    """Keeps what rank 0 prints, and shows what it says on stderr."""

    def __init__(self) -> None:
        super().__init__()
        self.said = b""

    def take(self, piece: Piece) -> None:
        if piece.stream == "out" and piece.rank == 0:
            self.said += piece.data
            self.written(piece)
        else:
            super().take(piece)

    @property
    def result(self) -> dict[str, Any] | None:
        for line in self.said.decode(errors="replace").splitlines():
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        return None


def _job(findings: Findings, settings: LaunchSettings, facts: list[dict[str, Any]], parameters: int | None) -> None:
    session, output = Session(settings), _Captured()
    job = session.job(session.hosts)
    outcome = session.attempt(job, output, 0, "doctor")
    output.flush()
    if outcome.failure is not None or output.result is None:
        why = outcome.failure.message if outcome.failure else "rank 0 printed no result"
        findings.fail("MPI job", f"{job.ranks} ranks with {session.backend.label}: {why}", "see the output above")
        return
    checks.mpi_job(findings, output.result, job.ranks)
    if output.result["size"] == job.ranks and job.ranks > 1:
        entry = record.entry_of(output.result)
        checks.network(findings, entry, output.result["tcp"], facts)
        if parameters is not None:
            checks.model(findings, entry, parameters)
        try:
            record.write(output.result, entry)
            findings.ok("record", f"kept in {record.path()}")
        except OSError as error:
            findings.warn(
                "record", f"{record.path()} cannot be written: {error.strerror}", "set DBRDIST_NETWORK_FILE=FILE"
            )
