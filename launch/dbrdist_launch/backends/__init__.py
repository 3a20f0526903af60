"""How each starter of MPI programs is called: one file per dialect, and the choice among them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import LaunchError
from . import hydra, mpi, openmpi, slurm
from .job import Job

NAMES = ("auto", "hydra", "openmpi", "srun", "srun-pmi2", "srun-pmix")


@dataclass(frozen=True)
class Backend:
    """A chosen starter: kind is hydra, openmpi or srun."""

    kind: str
    starter: mpi.Starter | None = None
    plugin: str = ""

    def command(self, job: Job, program: list[str]) -> list[str]:
        """The exact words that start `program` as the job's ranks."""
        if self.kind == "srun":
            return slurm.command(job, self.plugin, program)
        assert self.starter is not None
        if self.kind == "openmpi":
            return openmpi.command(self.starter.path, self._major(), job, program)
        return hydra.command(self.starter.path, job, program)

    def environment(self, job: Job) -> dict[str, str]:
        """What the starter needs in its own environment."""
        if self.kind == "srun":
            return slurm.environment(self.plugin)
        return openmpi.environment(self._major(), job) if self.kind == "openmpi" else hydra.environment(job)

    def _major(self) -> int:
        assert self.starter is not None
        return int(self.starter.version.split(".")[0])

    @property
    def label(self) -> str:
        if self.starter is None:
            return f"srun --mpi={self.plugin}"
        return f"{self.starter.family} {self.starter.version} ({self.starter.path})"


def choose(
    name: str,
    interpreter: str | None,
    library: mpi.Library | None,
    mpiexec: str | None,
    environment: Mapping[str, str] = os.environ,
) -> Backend:
    """Take the backend that was named, or the one that fits the library and the place where we are."""
    if name.startswith("srun") or (name == "auto" and mpiexec is None and _srun_fits(library, environment)):
        return _srun(name, library)
    starter = mpi.find_starter(interpreter, library, mpiexec)
    kind = "openmpi" if starter.family == "openmpi" else "hydra"
    if name not in ("auto", kind):
        raise LaunchError(
            f"--backend {name} does not fit: the mpiexec that matches the program is {starter.path} "
            f"({starter.family} {starter.version}); leave --backend out, or name another with --mpiexec"
        )
    return Backend(kind, starter)


def _srun_fits(library: mpi.Library | None, environment: Mapping[str, str]) -> bool:
    """In an allocation, but not already a rank of a step, and srun speaks the library's protocol."""
    inside = "SLURM_JOB_ID" in environment and environment.get("SLURM_STEP_ID", "batch") in ("batch", "4294967291")
    interactive = inside or ("SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment)
    if not interactive or library is None:
        return False
    wanted = slurm.plugin_for(library.family)
    return any(plugin.startswith(wanted) for plugin in slurm.plugins())


def _srun(name: str, library: mpi.Library | None) -> Backend:
    known = slurm.plugins()
    if not known:
        raise LaunchError(f"--backend {name}: there is no working srun in PATH")
    fitting = slurm.plugin_for(library.family) if library is not None else "pmi2"
    plugin = name.partition("-")[2] or fitting
    if library is not None and plugin != fitting:
        raise LaunchError(
            f"--backend {name}: {library.family} {library.version} speaks {fitting} with srun; by {plugin} it would "
            "start as N separate jobs of one rank each"
        )
    if not any(word.startswith(plugin) for word in known):
        raise LaunchError(f"--backend {name}: this srun knows {', '.join(known)}, and the program needs {plugin}")
    return Backend("srun", None, plugin)
