"""`flux run`, inside an instance of the Flux resource manager. Written after its manual; never run here."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from .job import Host, Job, Place

NAMES, ORDER = ("flux",), 2  # see __init__.py


@dataclass(repr=False)
class Flux:
    """flux run: PMI for MPICH by itself, PMIx for Open MPI by its plugin."""

    pmix: bool = False
    identity = "flux"
    label = "flux run"
    queues = True
    places_ranks = True
    ends_by = (signal.SIGINT, signal.SIGINT)
    kills_step = True
    in_turn = ()

    def command(self, job: Job, program: list[str]) -> list[str]:
        words = [shutil.which("flux") or "flux", "run", "-n", str(job.ranks)]
        if job.hosts:
            words += ["-N", str(len(job.hosts)), "--requires", "host:" + ",".join(host.name for host in job.hosts)]
        words += ["--env=-*", *(f"--env={name}" for name in job.forward)]
        words += ["-o", f"cpu-affinity={'per-task' if job.bind != 'none' else 'off'}"]
        return [*words, *(["-o", "pmi=pmix"] if self.pmix else []), *job.extra, *program]

    def environment(self, job: Job) -> dict[str, str]:
        return {}

    def hosts(self, environment: Mapping[str, str]) -> tuple[Host, ...]:
        return ()


def choose(place: Place) -> Flux | None:
    """For --backend flux, and inside an instance, unless an mpiexec was named."""
    inside = "FLUX_URI" in place.environment and "FLUX_TASK_RANK" not in place.environment
    if place.asked == "flux" or (inside and place.mpiexec is None and shutil.which("flux")):
        return Flux(place.library is not None and place.library.family == "openmpi")
    return None
