"""mpiexec of Open MPI, versions 4 (orterun) and 5 (prterun)."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from . import mpi
from .hosts import of_environment
from .job import Host, Job, Place

NAMES, ORDER = ("openmpi",), 3  # see __init__.py


@dataclass(repr=False)
class OpenMPI:
    """One mpiexec of Open MPI."""

    starter: mpi.Starter
    identity = "openmpi"
    queues = False
    places_ranks = False
    ends_by = (signal.SIGTERM,)
    kills_step = False
    in_turn = ("core",)

    @property
    def label(self) -> str:
        return self.starter.label

    @property
    def _major(self) -> int:
        return int(self.starter.version.split(".")[0])

    def command(self, job: Job, program: list[str]) -> list[str]:
        words = [self.starter.path, "-n", str(job.ranks)]
        if os.getuid() == 0:  # the usual user of a container
            words.append("--allow-run-as-root")
        if job.hosts:
            words += ["--host", ",".join(f"{host.name}:{host.slots}" for host in job.hosts)]
            for name in job.forward:
                words += ["-x", name]
        else:
            # Slots are counted by cores; more ranks than that are the caller's wish.
            words += ["--map-by", ":OVERSUBSCRIBE"] if self._major >= 5 else ["--oversubscribe"]
        words += ["--bind-to", job.bind]
        if job.interface:
            words += ["--mca", "btl_tcp_if_include", job.interface]
        return [*words, *job.extra, *program]

    def environment(self, job: Job) -> dict[str, str]:
        prefix = "PRTE_MCA_plm_ssh" if self._major >= 5 else "OMPI_MCA_plm_rsh"
        if job.hosts and (job.ssh or job.ssh_options):
            return {f"{prefix}_agent": " ".join([job.ssh or "ssh", *job.ssh_options])}
        return {}

    def hosts(self, environment: Mapping[str, str]) -> tuple[Host, ...]:
        return of_environment(environment)


def choose(place: Place) -> OpenMPI | None:
    """For --backend openmpi, and wherever an mpiexec of this kind fits the program."""
    starter = mpi.find_starter(place.interpreter, place.library, place.mpiexec)
    return OpenMPI(starter) if starter.family == "openmpi" else None
