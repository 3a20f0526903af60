"""What a user can set: one table of names, defaults and help. The command line is made from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...errors import LaunchError
from ...wire import whole

GROUPS = ("Ranks and hosts", "Environment", "Output", "Limits", "Restarts", "Starting")


def _option(default: Any, group: int, text: str, *names: str, **more: Any) -> Any:
    """A setting with its option; without names the field's own, with dashes. Times are in seconds."""
    metadata = {"group": GROUPS[group], "help": text, "names": names, **more}
    return field(default=default, metadata=metadata)


_COUNT: dict[str, Any] = {"kind": int, "least": 1, "metavar": "N"}
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SECONDS: dict[str, Any] = {"kind": float, "least": 0, "metavar": "SECONDS", "show": True}


@dataclass(eq=False, repr=False)
class LaunchSettings:
    """What the user asked for."""

    command: tuple[str, ...]
    ranks: int | None = _option(
        None, 0, "Number of ranks; default: all slots; auto: one for each GPU of this machine, or else for each core.",
        "-n", "-np", "--ranks", kind="ranks", metavar="N|auto",
    )  # fmt: skip
    module: str | None = _option(
        None, 0, "Run a Python module: -m package.module ...", "-m", "--module", metavar="MODULE"
    )
    hosts: str | None = _option(
        None, 0, "Hosts, each with its slots: the number of ranks that it takes.", metavar="A:2,B:2"
    )
    hostfile: str | None = _option(
        None, 0, "Read the hosts from a file in MPICH's or Open MPI's format.", metavar="FILE"
    )
    per_host: int | None = _option(None, 0, "Ranks per host, instead of the slots.", **_COUNT)
    host_discovery: str | None = _option(
        None, 0, "A program that prints the hosts, one name:slots per line.", metavar="SCRIPT"
    )
    bind: str = _option(
        "none", 0, "Bind ranks to cores or NUMA nodes; on one machine, not if there are more ranks than cores.",
        choices=("none", "core", "numa"),
    )  # fmt: skip
    gpus: str = _option(
        "all", 0, "Each rank sees all GPUs of its host, or one (CUDA_VISIBLE_DEVICES).", choices=("all", "rank")
    )
    env: tuple[str, ...] = _option(
        (), 1, "Pass a variable to the ranks: NAME=VALUE, or NAME or 'PREFIX*' from this environment; repeatable.",
        metavar="NAME[=VALUE]",
    )  # fmt: skip
    only_env: bool = _option(False, 1, "Pass only PATH, HOME and what --env names to ranks on other hosts.")
    threads: str = _option(
        "auto", 1, "auto sets OMP_NUM_THREADS, unless it is set, to the host's cores divided by its ranks.",
        choices=("auto", "keep"),
    )  # fmt: skip
    inject: bool = _option(
        True, 1, "Install hooks in Python ranks, which report stacks and exceptions.", "--inject/--no-inject"
    )
    quiet: bool = _option(False, 2, "Show only rank 0's output and failures.")
    show: str | None = _option(
        None, 2, "Show only the output of these ranks: 0,4-7, or all, or none.", "--show-ranks", metavar="RANKS"
    )
    timestamps: bool = _option(False, 2, "Begin each line with the time.")
    verbose: bool = _option(False, 2, "Also show what mpiexec or srun itself prints.")
    view: bool | None = _option(None, 2, "Draw the live view; default: on a terminal.", "--view/--no-view")
    tee: str | None = _option(None, 2, "Also write what is shown to this file.", metavar="FILE")
    log_dir: str | None = _option(
        None, 2, "Write each rank's stdout and stderr, and status.json, to files in DIR/JOB/.", metavar="DIR"
    )
    log_size: str | None = _option(
        None, 2, "Largest size of one log file, as in 500K, 100M or 2G; a full one is renamed; default: no limit.",
        metavar="SIZE",
    )  # fmt: skip
    log_keep: int = _option(
        3, 2, "Full log files to keep of each stream, with --log-size.", kind=int, least=0, metavar="N", show=True
    )
    events: str | None = _option(None, 2, "Append what happens to this file, one JSON object per line.", metavar="FILE")
    metrics: str | None = _option(
        None, 2, "Serve metrics for Prometheus at http://ADDRESS:PORT/metrics; default address: 127.0.0.1.",
        metavar="[ADDRESS:]PORT",
    )  # fmt: skip
    name: str | None = _option(
        None, 2, "The job's name, in DIR and for `ps`; default: date, time and process id.", metavar="JOB"
    )
    record: str | None = _option(None, 2, "Write a copy of status.json to this file.", metavar="FILE")
    stacks: bool = _option(False, 2, "Report the Python stacks of all ranks after any failure, not only after a stall.")
    timeout: float | None = _option(None, 3, "Limit for the whole job, including restarts; default: none.", **_SECONDS)
    start_timeout: float | None = _option(
        None, 3, "Limit for the wait for each rank at the start; default: 60, or none if the start may be queued.",
        **_SECONDS,
    )  # fmt: skip
    heartbeat_timeout: float = _option(
        60.0, 3, "Limit for the time between two heartbeats of a rank that sends them.", **_SECONDS
    )
    host_timeout: float = _option(6.0, 3, "Time after which a host that does not answer counts as lost.", **_SECONDS)
    exit_timeout: float | None = _option(
        None, 3, "Limit for the time from the first rank's end to the end of all; default: none.", **_SECONDS
    )
    grace: float = _option(
        30.0, 3, "Time for the ranks to save and stop when asked to, before they are killed.", **_SECONDS
    )
    end_on: tuple[str, ...] = _option(
        (), 3, "Also end the job when a thread or a worker process dies, instead of a warning; repeatable.",
        choices=("thread", "worker"),
    )  # fmt: skip
    max_restarts: int = _option(0, 4, "Restart a failed job, up to N times.", kind=int, least=0, metavar="N")
    min_hosts: int = _option(1, 4, "Give up if fewer than N hosts are left.", **_COUNT)
    cooldown: float = _option(
        30.0, 4, "Time for which a lost host is not used; it doubles each time that host is lost.", **_SECONDS
    )
    max_host_failures: int | None = _option(
        None, 4, "Use a host no more after N failures that began there; default: no limit.", **_COUNT
    )
    backoff: float = _option(
        0.0, 4, "Time to wait before the first restart; it doubles with each one, up to --max-backoff.", **_SECONDS
    )
    max_backoff: float = _option(300.0, 4, "Longest time to wait before a restart.", **_SECONDS)
    start_retries: int = _option(
        2,
        4,
        "Try again after a start that hangs or, with Open MPI, ends with 213, up to N times.",
        kind=int,
        least=0,
        metavar="N",
        show=True,
    )
    requeue: bool = _option(
        False, 4, "Under Slurm, put a job back into the queue if it saved and stopped on request, or lost a host."
    )
    backend: str = _option("auto", 5, "What starts the ranks.", choices="backends")
    mpiexec: str | None = _option(None, 5, "The mpiexec to use, instead of the one that is found.", metavar="PATH")
    mpi_option: tuple[str, ...] = _option((), 5, "An argument for mpiexec or srun itself; repeatable.", metavar="WORD")
    ssh: str | None = _option(None, 5, "The program to reach hosts with, instead of ssh.", metavar="PATH")
    ssh_option: tuple[str, ...] = _option((), 5, "An option for ssh -o; repeatable.", metavar="K=V")
    interface: str | None = _option(
        None, 5, "Network interface, or its address, for the side channel and for MPI.", metavar="NAME"
    )
    port: int = _option(
        0, 5, "TCP port of the side channel; default: a free one.", kind=int, least=0, most=65535, metavar="PORT"
    )
    print: bool = _option(False, 5, "Print the exact command and exit.")
    config: str | None = _option(
        None, 5, "Read options from a TOML file; the environment and the command line override them.",
        metavar="FILE",
    )  # fmt: skip
    bare: bool = _option(False, 5, "Run the program under plain mpiexec or srun, without supervision.")

    @property
    def log_bytes(self) -> int | None:
        """The limit of a log file in bytes; LaunchError for what is no size."""
        if self.log_size is None:
            return None
        number, unit = self.log_size[:-1], self.log_size[-1:].upper()
        if unit not in _UNITS:
            number, unit = self.log_size, ""
        count = whole(number)
        if not count:
            raise LaunchError(f"--log-size {self.log_size!r}: expected a size such as 500K, 100M or 2G")
        return int(count * _UNITS.get(unit, 1))

    @property
    def words(self) -> tuple[str, ...]:
        """The command to run."""
        return ("python", "-m", self.module, *self.command) if self.module else self.command
