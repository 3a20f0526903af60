"""srun, which starts the ranks itself and speaks PMI-2 (MPICH, Intel MPI) or PMIx (Open MPI) with them."""

from __future__ import annotations

import os
import shutil
import subprocess

from .. import cache
from .job import Job

_ABORT_DELAY = "OMPI_MCA_mpi_abort_delay"  # in seconds, Open MPI 4 and 5
_BIND = {"core": "cores", "numa": "ldoms"}


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
    return "pmix" if family == "openmpi" else "pmi2"


def command(job: Job, plugin: str, program: list[str]) -> list[str]:
    """The command line of srun for a job."""
    words = [shutil.which("srun") or "srun", f"--mpi={plugin}", "-n", str(job.ranks)]
    if job.hosts:
        words += ["-N", str(len(job.hosts)), "--nodelist", ",".join(host.name for host in job.hosts)]
        if len({host.slots for host in job.hosts}) == 1:
            words += ["--ntasks-per-node", str(job.hosts[0].slots)]
    if job.bind != "none":
        words.append(f"--cpu-bind={_BIND[job.bind]}")
    # The end of one rank is reported by its supervisor; srun must not end the others before they are asked.
    words += ["--kill-on-bad-exit=0", "--export", ",".join((*job.forward, *environment(plugin))) or "NONE"]
    return [*words, *job.extra, *program]


def environment(plugin: str) -> dict[str, str]:
    """What Open MPI's ranks need under srun.

    PMIx complains on each rank about a security module that Slurm's nodes do not offer. And srun kills a whole step,
    supervisors too, some 10 ms after a rank aborts, also one that has just lost its peer: with a delay of a second the
    rank that ended first, or that called MPI_Abort, is known by then.
    """
    if not plugin.startswith("pmix"):
        return {}
    return {"PMIX_MCA_psec": "native", _ABORT_DELAY: os.environ.get(_ABORT_DELAY, "1")}
