"""The command line of `dbrdist-launch`."""

from __future__ import annotations

import click

from .. import codes
from ..backends import NAMES

_EPILOG = """\b
dbrdist-launch doctor     checks MPI, hosts and network before a job does.

\b
Exit codes: 0 done, 75 stopped on request and saved, 124 stalled, 128+N ended by
signal N, 69 host lost, 71 could not start, 2 refused; else the exit code of the
first rank that failed."""


def run(arguments: list[str]) -> int:
    """Parse and run; the exit code of the launcher."""
    command: click.Command = launch
    if arguments[:1] == ["doctor"]:
        from ..doctor.cli import doctor

        command, arguments = doctor, arguments[1:]
    try:
        result = command.main(args=arguments, prog_name="dbrdist-launch", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return codes.USAGE
    except (click.Abort, KeyboardInterrupt):
        return codes.from_signal(2)
    return result if isinstance(result, int) else codes.DONE


class _Seconds(click.FloatRange):
    name = "seconds"

    def __init__(self) -> None:
        super().__init__(min=0.0)


_SECONDS = _Seconds()
_OPTIONS = (
    click.option("-n", "--ranks", type=click.IntRange(min=1), help="Number of ranks; default: all slots."),
    click.option("--hosts", metavar="A:2,B:2", help="Hosts with their slots."),
    click.option("--hostfile", metavar="FILE", help="The same from a file (MPICH's or Open MPI's form)."),
    click.option(
        "--per-host", type=click.IntRange(min=1), metavar="N", help="Ranks on each host, in place of its slots."
    ),
    click.option(
        "--backend", type=click.Choice(NAMES), default="auto", show_default=True, help="Who starts the ranks."
    ),
    click.option("--mpiexec", metavar="PATH", help="The mpiexec to use, in place of the one that is found."),
    click.option("--mpi-option", multiple=True, metavar="WORD", help="A word for mpiexec or srun itself; repeatable."),
    click.option("--env", multiple=True, metavar="K=V", help="A variable for the ranks; repeatable."),
    click.option(
        "--bind",
        type=click.Choice(["none", "core", "numa"]),
        default="none",
        show_default=True,
        help="Bind ranks; never where there are more of them than cores.",
    ),
    click.option(
        "--gpus",
        type=click.Choice(["all", "rank"]),
        default="all",
        show_default=True,
        help="Ranks see all GPUs of their host, or one each (CUDA_VISIBLE_DEVICES).",
    ),
    click.option(
        "--threads",
        type=click.Choice(["auto", "keep"]),
        default="auto",
        show_default=True,
        help="Set OMP_NUM_THREADS, where it is not set, to the host's cores over its ranks.",
    ),
    click.option("--ssh", metavar="PATH", help="The program that reaches hosts, in place of ssh."),
    click.option("--ssh-option", multiple=True, metavar="K=V", help="An option for ssh -o; repeatable."),
    click.option("--interface", metavar="NAME", help="Network interface or address for the side channel and for MPI."),
    click.option(
        "--port", type=click.IntRange(0, 65535), default=0, help="Port of the side channel; default: a free one."
    ),
    click.option("--print", "show", is_flag=True, help="Print the exact command and stop."),
    click.option("--bare", is_flag=True, help="Run that command without supervision: nothing below applies."),
    click.option("--quiet", is_flag=True, help="Show only rank 0 and failures."),
    click.option("--verbose", is_flag=True, help="Show also what mpiexec or srun itself says."),
    click.option(
        "--view/--no-view", default=None, help="The live view; default: on a terminal, where rich is installed."
    ),
    click.option("--log-dir", metavar="DIR", help="One log per rank, failure.json and attempts.json go here."),
    click.option(
        "--stacks", is_flag=True, help="Report the Python stacks of all ranks at any failure, not only at stalls."
    ),
    click.option(
        "--inject/--no-inject", default=True, help="Hooks in Python ranks: stacks, dead threads, hanging exits."
    ),
    click.option(
        "--start-timeout", type=_SECONDS, default=15.0, show_default=True, help="Without a new rank at the start."
    ),
    click.option(
        "--heartbeat-timeout",
        type=_SECONDS,
        default=60.0,
        show_default=True,
        help="Without a beat of a rank that has beaten; also how long a rank may be stopped.",
    ),
    click.option(
        "--host-timeout", type=_SECONDS, default=6.0, show_default=True, help="Without a word of a supervisor."
    ),
    click.option(
        "--grace", type=_SECONDS, default=30.0, show_default=True, help="From a stop request to the end by force."
    ),
    click.option("--max-restarts", type=click.IntRange(min=0), default=0, help="Start a failed job again, so often."),
    click.option("--min-hosts", type=click.IntRange(min=1), default=1, help="Fewer hosts than that: give up."),
    click.option("--host-discovery", metavar="SCRIPT", help="A program that prints the hosts, one name:slots a line."),
    click.option(
        "--cooldown", type=_SECONDS, default=30.0, show_default=True, help="A lost host is not tried for so long."
    ),
    click.option(
        "--start-retries", type=click.IntRange(min=0), default=2, show_default=True, help="For starts that hang."
    ),
    click.option("--record", metavar="FILE", help="The record of attempts; default: attempts.json in --log-dir."),
    click.option(
        "--requeue",
        is_flag=True,
        help="Under Slurm: put a job that saved and stopped, or lost a host, back into the queue.",
    ),
)


def _with_options(function):  # type: ignore[no-untyped-def]
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@click.command(
    context_settings={
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
    },
    epilog=_EPILOG,
)
@_with_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def launch(**settings) -> int:  # type: ignore[no-untyped-def]
    """Run COMMAND as an MPI job: dbrdist-launch -n 4 python train.py"""
    from .session import Session, Settings

    return Session(Settings(**settings)).run()
