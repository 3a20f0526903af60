"""What a user can set: one table of names, defaults and help. The command line is made from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

GROUPS = ("Ranks and hosts", "Environment", "Output", "Limits", "Restarts", "Starting")


def _option(default: Any, group: int, text: str, *names: str, **more: Any) -> Any:
    """A setting with its option; without names the field's own, with dashes. Times are in seconds."""
    metadata = {"group": GROUPS[group], "help": text, "names": names, **more}
    return field(default=default, metadata=metadata)


_COUNT: dict[str, Any] = {"kind": int, "least": 1, "metavar": "N"}
_SECONDS: dict[str, Any] = {"kind": float, "least": 0, "metavar": "SECONDS", "show": True}


@dataclass(eq=False, repr=False)
class Settings:
    """What the user asked for."""

    command: tuple[str, ...]
    ranks: int | None = _option(
        None, 0, "Number of ranks; default: all slots; auto: one for each GPU of this machine, else for each core.",
        "-n", "-np", "--ranks", kind="ranks", metavar="N|auto",
    )  # fmt: skip
    module: str | None = _option(
        None, 0, "Run a Python module: -m package.module ...", "-m", "--module", metavar="MODULE"
    )
    hosts: str | None = _option(None, 0, "Hosts with their slots.", metavar="A:2,B:2")
    hostfile: str | None = _option(None, 0, "The same from a file (MPICH's or Open MPI's form).", metavar="FILE")
    per_host: int | None = _option(None, 0, "Ranks on each host, in place of its slots.", **_COUNT)
    host_discovery: str | None = _option(
        None, 0, "A program that prints the hosts, one name:slots a line.", metavar="SCRIPT"
    )
    bind: str = _option(
        "none", 0, "Bind ranks; never where there are more of them than cores.", choices=("none", "core", "numa")
    )
    gpus: str = _option(
        "all", 0, "Ranks see all GPUs of their host, or one each (CUDA_VISIBLE_DEVICES).", choices=("all", "rank")
    )
    env: tuple[str, ...] = _option(
        (), 1, "A variable for the ranks: NAME=VALUE, NAME or 'PREFIX*' from here; repeatable.", metavar="NAME[=VALUE]"
    )
    only_env: bool = _option(False, 1, "Ranks elsewhere get only what --env names, PATH and HOME.")
    threads: str = _option(
        "auto", 1, "Set OMP_NUM_THREADS, where it is not set, to the host's cores over its ranks.",
        choices=("auto", "keep"),
    )  # fmt: skip
    inject: bool = _option(True, 1, "Hooks in Python ranks: stacks, causes, MPI's world.", "--inject/--no-inject")
    quiet: bool = _option(False, 2, "Show only rank 0 and failures.")
    show: str | None = _option(None, 2, "Show only these ranks: 0, 0,4-7, none.", "--show-ranks", metavar="RANKS")
    timestamps: bool = _option(False, 2, "The time in front of each line.")
    verbose: bool = _option(False, 2, "Show also what mpiexec or srun itself says.")
    view: bool | None = _option(None, 2, "The live view; default: on a terminal.", "--view/--no-view")
    tee: str | None = _option(None, 2, "What is shown goes into this file too.", metavar="FILE")
    log_dir: str | None = _option(
        None, 2, "DIR/JOB/ gets one file for each rank's stdout and stderr, and status.json.", metavar="DIR"
    )
    name: str | None = _option(None, 2, "The job's name there and for `ps`; default: date, time and process id.")
    record: str | None = _option(None, 2, "A copy of status.json.", metavar="FILE")
    stacks: bool = _option(False, 2, "Report the Python stacks of all ranks at any failure, not only at stalls.")
    timeout: float | None = _option(None, 3, "For the whole job, restarts included; default: none.", **_SECONDS)
    start_timeout: float | None = _option(
        None, 3, "Without a new rank at the start; default: 60, and none where a queue may stand before it.", **_SECONDS
    )
    heartbeat_timeout: float = _option(60.0, 3, "Without a beat of a rank that has beaten.", **_SECONDS)
    host_timeout: float = _option(6.0, 3, "Until a host that does not answer counts as lost.", **_SECONDS)
    exit_timeout: float | None = _option(
        None, 3, "From the first rank's end of program to the end of all; default: none.", **_SECONDS
    )
    grace: float = _option(30.0, 3, "From a stop request to the end by force.", **_SECONDS)
    end_on: tuple[str, ...] = _option(
        (), 3, "End the job also at a dead thread, or a dead worker process; else they are warnings. Repeatable.",
        choices=("thread", "worker"),
    )  # fmt: skip
    max_restarts: int = _option(0, 4, "Start a failed job again, so often.", kind=int, least=0, metavar="N")
    min_hosts: int = _option(1, 4, "Fewer hosts than that: give up.", **_COUNT)
    cooldown: float = _option(30.0, 4, "A lost host is not tried for so long.", **_SECONDS)
    start_retries: int = _option(2, 4, "For starts that hang.", kind=int, least=0, metavar="N", show=True)
    requeue: bool = _option(
        False, 4, "Under Slurm: put a job that saved and stopped, or lost a host, back into the queue."
    )
    backend: str = _option("auto", 5, "Who starts the ranks.", choices="backends")
    mpiexec: str | None = _option(None, 5, "The mpiexec to use, in place of the one that is found.", metavar="PATH")
    mpi_option: tuple[str, ...] = _option((), 5, "A word for mpiexec or srun itself; repeatable.", metavar="WORD")
    ssh: str | None = _option(None, 5, "The program that reaches hosts, in place of ssh.", metavar="PATH")
    ssh_option: tuple[str, ...] = _option((), 5, "An option for ssh -o; repeatable.", metavar="K=V")
    interface: str | None = _option(
        None, 5, "Network interface or address for the side channel and for MPI.", metavar="NAME"
    )
    port: int = _option(0, 5, "TCP port of the side channel; default: a free one.", kind=int, least=0, most=65535)
    print: bool = _option(False, 5, "Print the exact command and stop.")
    config: str | None = _option(
        None, 5, "Options from a TOML file, such as max-restarts = 3; the environment and the command line come first.",
        metavar="FILE",
    )  # fmt: skip
    bare: bool = _option(False, 5, "Run that command without supervision.")

    @property
    def words(self) -> tuple[str, ...]:
        """The command to run."""
        return ("python", "-m", self.module, *self.command) if self.module else self.command
