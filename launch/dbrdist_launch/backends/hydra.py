"""mpiexec of MPICH and of Intel MPI."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from . import mpi
from .hosts import of_environment
from .job import Host, Job, Place

NAMES, ORDER = ("hydra",), 4  # see __init__.py


@dataclass(repr=False)
class Hydra:
    """One mpiexec.hydra."""

    starter: mpi.Starter
    identity = "hydra"
    queues = False
    places_ranks = False
    ends_by = (signal.SIGTERM,)
    kills_step = False
    in_turn = ("core", "numa")

    @property
    def label(self) -> str:
        return self.starter.label

    def command(self, job: Job, program: list[str]) -> list[str]:
        words = [self.starter.path, "-n", str(job.ranks)]
        if job.hosts:
            words += ["-hosts", ",".join(f"{host.name}:{host.slots}" for host in job.hosts), "-launcher", "ssh"]
            if job.ssh:
                words += ["-launcher-exec", job.ssh]
            # Hydra's default forwards the whole environment, with whatever secrets stand in it.
            words += ["-genvlist", ",".join(job.forward)] if job.forward else ["-genvnone"]
        if job.interface:
            words += ["-iface", job.interface]
        if job.bind != "none":
            words += ["-bind-to", job.bind]
        return [*words, *job.extra, *program]

    def environment(self, job: Job) -> dict[str, str]:
        if not job.hosts:
            return {}
        # -genvlist of MPICH 5.0.2 overlooks the last variable of mpiexec's environment: let it be one nobody needs.
        last = {"DBRDIST_LAUNCH_LAST": "1"}
        return {"HYDRA_LAUNCHER_EXTRA_ARGS": " ".join(job.ssh_options), **last} if job.ssh_options else last

    def hosts(self, environment: Mapping[str, str]) -> tuple[Host, ...]:
        return of_environment(environment)


def choose(place: Place) -> Hydra | None:
    """For --backend hydra, and wherever an mpiexec of this kind fits the program."""
    starter = mpi.find_starter(place.interpreter, place.library, place.mpiexec)
    return Hydra(starter) if starter.family != "openmpi" else None
