"""srun, which starts the ranks itself and speaks PMI-2 (MPICH, Intel MPI) or PMIx (Open MPI) with them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from .. import cache
from ..errors import LaunchError
from ..identity import repeated
from .hosts import expand
from .job import Host, Job, Place

_ABORT_DELAY = "OMPI_MCA_mpi_abort_delay"  # in seconds, Open MPI 4 and 5
_BIND = {"core": "cores", "numa": "ldoms"}

NAMES, ORDER = ("srun", "srun-pmi2", "srun-pmix"), 1  # see __init__.py


@dataclass(repr=False)
class Srun:
    """srun with one of its plugins for MPI: pmi2 or pmix."""

    plugin: str
    identity = "srun"
    queues = True
    places_ranks = True
    # srun takes two interrupts within a second for "cancel the step, and the job that I made for it".
    ends_by = (signal.SIGINT, signal.SIGINT)
    kills_step = True
    in_turn = ()

    @property
    def label(self) -> str:
        return f"srun --mpi={self.plugin}"

    def command(self, job: Job, program: list[str]) -> list[str]:
        words = [shutil.which("srun") or "srun", f"--mpi={self.plugin}", "-n", str(job.ranks)]
        if job.hosts:
            words += ["-N", str(len(job.hosts)), "--nodelist", ",".join(host.name for host in job.hosts)]
            if len({host.slots for host in job.hosts}) == 1:
                words += ["--ntasks-per-node", str(job.hosts[0].slots)]
        each = os.environ.get("SLURM_CPUS_PER_TASK")
        if each and not _has_cpus(job.extra) and "SRUN_CPUS_PER_TASK" not in os.environ:
            words.append(f"--cpus-per-task={each}")  # which srun does not take from the batch job, since 22.05
        if job.bind != "none":
            words.append(f"--cpu-bind={_BIND[job.bind]}")
        # The end of one rank is reported by its supervisor; srun must not end the others before they are asked.
        names = ",".join((*job.forward, *self.environment(job)))
        words += ["--kill-on-bad-exit=0", "--export", names or "NONE"]
        return [*words, *job.extra, *program]

    def environment(self, job: Job) -> dict[str, str]:
        """What Open MPI's ranks need under srun.

        PMIx complains on each rank about a security module that Slurm's nodes do not offer. And srun kills a whole
        step, supervisors too, some 10 ms after a rank aborts, also one that has just lost its peer: with a delay of a
        second the rank that ended first, or that called MPI_Abort, is known by then.
        """
        if not self.plugin.startswith("pmix"):
            return {}
        return {"PMIX_MCA_psec": "native", _ABORT_DELAY: os.environ.get(_ABORT_DELAY, "1")}

    def hosts(self, environment: Mapping[str, str]) -> tuple[Host, ...]:
        return ()  # srun knows them better


def _has_cpus(words: tuple[str, ...]) -> bool:
    """Whether the user's own words for srun say how many cores a task gets."""
    return any(re.match(r"-c|--cpus-per-(task|gpu)|--exact|--overcommit|-O$", word) for word in words)


def plugins() -> list[str]:
    """The values of --mpi that this srun knows; [] without srun."""
    path = shutil.which("srun")
    if path is None:
        return []
    key = "srun " + cache.stamp(path)
    found = cache.get(key)
    if found is None:
        try:
            child = subprocess.run(
                [path, "--mpi=list"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20
            )
        except (OSError, subprocess.TimeoutExpired):
            return []
        words = (child.stdout + child.stderr).split()
        found = {"plugins": [word.strip(",") for word in words if word.startswith(("pmi", "none", "cray"))]}
        if child.returncode == 0:
            cache.put(key, found)
    return list(found["plugins"])


def plugin_for(family: str) -> str:
    """The protocol that an MPI library speaks with srun."""
    return {"openmpi": "pmix", "cray": "cray_shasta"}.get(family, "pmi2")


def allocation(environment: Mapping[str, str] = os.environ) -> tuple[Host, ...]:
    """The nodes of a Slurm allocation with their tasks; () outside of one."""
    text = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if not environment.get("SLURM_JOB_ID") or not text:
        return ()
    tasks = environment.get("SLURM_TASKS_PER_NODE") or environment.get("SLURM_JOB_CPUS_PER_NODE") or "1"
    counts = repeated(tasks)
    if not counts:
        raise LaunchError(
            f"Slurm's variables give {tasks!r} as the tasks of each node; expected a form such as 2(x3),1"
        )
    return tuple(Host(name, counts[min(at, len(counts) - 1)]) for at, name in enumerate(expand(text)))


def choose(place: Place) -> Srun | None:
    """For --backend srun, and in an allocation whose srun speaks the library's protocol."""
    named = place.asked.startswith("srun")
    if not named and (place.mpiexec is not None or place.library is None or not _outside_of_steps(place.environment)):
        return None
    known = plugins()
    fitting = plugin_for(place.library.family) if place.library is not None else "pmi2"
    if not named:
        return Srun(fitting) if any(plugin.startswith(fitting) for plugin in known) else None
    if not known:
        raise LaunchError(f"--backend {place.asked}: there is no working srun in PATH")
    plugin = place.asked.partition("-")[2] or fitting
    if place.library is not None and plugin != fitting:
        raise LaunchError(
            f"--backend {place.asked}: {place.library.family} {place.library.version} uses {fitting} with srun; with "
            f"{plugin} it would start as N separate jobs of one rank each"
        )
    if not any(word.startswith(plugin) for word in known):
        raise LaunchError(
            f"--backend {place.asked}: this srun supports {', '.join(known)}, but the program needs {plugin}"
        )
    return Srun(plugin)


def _outside_of_steps(environment: Mapping[str, str]) -> bool:
    """In an allocation, but not already a rank of a step; a batch script and an interactive shell are steps too."""
    return "SLURM_JOB_ID" in environment and environment.get("SLURM_STEP_ID", "batch") in ("batch", "4294967291")
