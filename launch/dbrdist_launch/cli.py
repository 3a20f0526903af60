"""The command line of `dbrdist-launch`."""

from __future__ import annotations

import os
import shlex
import sys

import click

from . import codes, mpi
from .backends import hydra
from .errors import LaunchError
from .job import Job
from .program import Program, mpi_of_binary, resolve


def run(arguments: list[str]) -> int:
    """Parse and run; the exit code of the launcher."""
    try:
        result = launch.main(args=arguments, prog_name="dbrdist-launch", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return codes.USAGE
    except click.Abort:
        return codes.from_signal(2)
    return result if isinstance(result, int) else codes.DONE


@click.command(context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@click.option("-n", "--ranks", type=click.IntRange(min=1), required=True, help="Number of ranks.")
@click.option("--mpiexec", metavar="PATH", help="The mpiexec to use, in place of the one that is found.")
@click.option("--print", "show", is_flag=True, help="Print the exact command and stop.")
@click.option("--bare", is_flag=True, help="Run the program under mpiexec alone, without supervision.")
@click.option("--log-dir", metavar="DIR", help="One log file per rank and failure.json go here.")
@click.option("--verbose", is_flag=True, help="Show what mpiexec itself says.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def launch(ranks, mpiexec, show, bare, log_dir, verbose, command) -> int:
    """Run COMMAND as an MPI job of N ranks: dbrdist-launch -n 4 python train.py"""
    program = resolve(command)
    starter = mpi.find_starter(program.interpreter, _library(program), mpiexec)
    if starter.family == "openmpi":
        raise LaunchError(f"{starter.path} is of Open MPI {starter.version}; this launcher starts MPICH and Intel MPI")
    job = Job(program.command, ranks)
    words = hydra.command(starter.path, job, list(program.command) if bare else supervised(program))
    if show:
        print(shlex.join(words))
        return codes.DONE
    if bare:
        sys.stdout.flush()
        os.execvpe(words[0], words, {**os.environ, **hydra.environment(job)})
    return _supervise(words, job, log_dir, verbose)


def supervised(program: Program) -> list[str]:
    """The command of a rank: the supervisor, by its path and without site packages (it starts twice as fast)."""
    return [sys.executable, "-I", "-S", os.path.join(os.path.dirname(__file__), "rank.py"), "--", *program.command]


def _library(program: Program) -> mpi.Library | None:
    if program.interpreter is not None:
        return mpi.library_of(program.interpreter)
    family = mpi_of_binary(program.command[0])
    return mpi.Library(family, "") if family else None


def _supervise(words: list[str], job: Job, log_dir: str | None, verbose: bool) -> int:
    from . import report
    from .attempt import Attempt, Terms
    from .output import Output

    output = Output(log_dir=log_dir)
    outcome = Attempt(words, {**os.environ, **hydra.environment(job)}, {}, job.ranks, output, Terms(), verbose).run()
    if outcome.failure is not None:
        output.note(report.as_text(outcome.failure))
        if log_dir is not None:
            report.write_json(outcome.failure, log_dir)
    output.close()
    return outcome.code
