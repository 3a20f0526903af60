"""What is to be run, on which hosts, how: the part of the command line that backends translate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """A host and the number of ranks that it takes."""

    name: str
    slots: int = 1


@dataclass(frozen=True)
class Job:
    """One job. `hosts` is empty for this machine alone, and where the batch system places the ranks."""

    command: tuple[str, ...]
    ranks: int
    hosts: tuple[Host, ...] = ()
    forward: tuple[str, ...] = ()  # names of variables that the ranks on other hosts get
    bind: str = "none"  # none, core or numa
    ssh: str | None = None  # the agent, in place of ssh
    ssh_options: tuple[str, ...] = ()
    interface: str | None = None  # for MPI's own traffic
    extra: tuple[str, ...] = ()  # passed on to the starter as they are
