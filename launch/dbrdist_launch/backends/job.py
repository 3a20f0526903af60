"""What is to be run, on which hosts, how: the part of the settings that backends translate; and what a backend is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from .mpi import Library

_INPUT_OPTIONS = {"hydra": ("-s",), "openmpi": ("-stdin", "--stdin")}  # of Intel MPI and of Open MPI: for which ranks


class Host(NamedTuple):
    """A host and the number of ranks that it takes."""

    name: str
    slots: int = 1


class Job(NamedTuple):
    """One job. `hosts` is empty for this machine alone, and where the batch system places the ranks."""

    command: tuple[str, ...]
    ranks: int
    hosts: tuple[Host, ...] = ()
    forward: tuple[str, ...] = ()  # names of variables that the ranks on other hosts get
    bind: str = "none"  # none, core or numa
    ssh: str | None = None  # the agent, instead of ssh
    ssh_options: tuple[str, ...] = ()
    interface: str | None = None  # for MPI's own traffic
    extra: tuple[str, ...] = ()  # passed on to the starter as they are


class Place(NamedTuple):
    """Where the launcher stands, and what the program needs."""

    asked: str  # the value of --backend
    interpreter: str | None = None
    library: Library | None = None
    mpiexec: str | None = None
    environment: Mapping[str, str] = os.environ


class Backend(Protocol):
    """A starter of MPI programs."""

    @property
    def identity(self) -> str:
        """Which variables tell a rank its number: a key of `identity`'s table (hydra, openmpi, srun, flux), or their
        names, `RANK,SIZE,LOCAL_RANK,LOCAL_SIZE`; one may be empty, or several names with spaces between them.
        """

    @property
    def label(self) -> str:
        """For people: what it is and where."""

    @property
    def queues(self) -> bool:
        """Whether a start may wait for resources: it has no time limit unless the user sets one."""

    @property
    def places_ranks(self) -> bool:
        """Whether a batch system chooses and reaches the hosts: no ssh of ours, no names to resolve."""

    @property
    def ends_by(self) -> tuple[int, ...]:
        """The signals that end it with all its ranks."""

    @property
    def kills_step(self) -> bool:
        """Whether it may kill the ranks' supervisors with them, before these can report."""

    @property
    def in_turn(self) -> tuple[str, ...]:
        """The values of --bind with which local rank k gets the k-th core or NUMA node; others are its own affair."""

    def command(self, job: Job, program: list[str]) -> list[str]:
        """The exact words that start `program` as the job's ranks."""

    def environment(self, job: Job) -> dict[str, str]:
        """What it needs in its own environment."""

    def hosts(self, environment: Mapping[str, str]) -> tuple[Host, ...]:
        """The hosts of the allocation in which it stands; () where there is none."""


def goes_to_rank_0(backend: Backend, words: tuple[str, ...]) -> bool:
    """Whether neither a batch system nor the user's own words for the starter say which ranks get the input."""
    own = _INPUT_OPTIONS.get(backend.identity, ())
    return not backend.places_ranks and not any(word.partition("=")[0] in own for word in words)
