"""What an attempt starts, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...backends.job import Backend, Job, goes_to_rank_0
from ..judgement.report import Failure
from ..streams.input import KeptInput


class LaunchPlan(NamedTuple):
    """What is started, and how the ranks find the launcher."""

    job: Job
    command: list[str]  # of mpiexec or srun
    environment: dict[str, str]  # of mpiexec
    rank_environment: dict[str, str]  # what the ranks get beyond it
    start_seconds: float | None
    backend: Backend
    token: str
    control: str | None = None  # a Unix socket for `ps`, `stacks`, `stop`; the ranks use it too where all are here
    addresses: tuple[str, ...] = ()  # for ranks elsewhere; () where all are here
    deadline: float | None = None  # when the user's --timeout is over, on the monotonic clock
    told_by_environment: bool = True  # where the ranks find address and token; else in the folder of `control`
    kept_input: KeptInput | None = None  # what attempts before have read

    def ranks_on(self, host: str) -> dict[str, int]:
        """The number of ranks on a host, by its name; empty where that is not known."""
        job = self.job
        return {h.name: h.slots for h in job.hosts if h.name == host} if job.hosts else {host: job.ranks}

    def feeds_rank_0(self) -> bool:
        """Whether the launcher's input is for rank 0; else the starter has it."""
        return goes_to_rank_0(self.backend, self.job.extra)


@dataclass(eq=False, repr=False)
class Outcome:
    """How an attempt ended."""

    code: int
    failure: Failure | None = None
    asked: int = 0  # the signal that asked for the end, or 0
    steps: int = -1  # the highest step that a rank told of
    seconds: float = 0.0
    first_rank_seconds: float | None = None
    started_at: float = 0.0  # on the monotonic clock
