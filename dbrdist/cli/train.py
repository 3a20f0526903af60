"""The command `dbrdist-train`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import click

from dbrdist import __version__
from dbrdist.cli import assemble, commands, load, memory, plan, preflight, resolve, resume, run
from dbrdist.cli.config import Config
from dbrdist.cli.console import Console
from dbrdist.cli.folder import CONFIG
from dbrdist.cli.load import Origin
from dbrdist.cli.refuse import WRONG, Refused, RefusedHere, code_of, refusal
from dbrdist.cli.warned import Warned
from dbrdist.cli.words import folded, said
from dbrdist.comm import abort, create_communicator, environment
from dbrdist.core import thread_pools
from dbrdist.errors import CommunicatorError, ConfigError, DbrdistError
from dbrdist.training.runs import folder_of


def _help(context: click.Context, option: click.Parameter, asked: bool) -> None:
    if asked:
        _say_before_mpi(context.get_help())
        context.exit()


@click.command(add_help_option=False)
@click.argument("config", required=False, metavar="CONFIG.yaml")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--resume", is_flag=True, help="Continue from the newest snapshot in the run's folder, if there is one.")
@click.option("--overwrite", is_flag=True, help="Move a run that is in the folder aside, and start a new one.")
@click.option("--evaluate", metavar="RUN", help="Evaluate the newest snapshot in the folder RUN and print the means.")
@click.option("--report", metavar="RUN", help="Write the report on RUN, or compare it with the runs that follow.")
@click.option(
    "--audit", metavar="RUN", help="Prove that RUN, trained with audit: true, used each example once per epoch."
)
@click.option("--predict", metavar="RUN", help="Print the most likely classes of the image files that follow.")
@click.option("--export", metavar="RUN", help="Write RUN's weights to the .safetensors file that follows.")
@click.option("--init", metavar="NAME", help="Print a commented configuration: digits, cifar10 or imagenet.")
@click.option(
    "--trace", is_flag=True, help="Write a timeline of every rank to trace.json, and say what steps wait for."
)
@click.option("--version", is_flag=True, help="Print the version and exit.")
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration and the plan, and exit.")
@click.option("--print-schema", is_flag=True, help="Print the JSON schema of configurations and exit.")
@click.option(
    "-h", "--help", is_flag=True, is_eager=True, expose_value=False, callback=_help, help="Print this text and exit."
)
def command(
    config: str | None,
    overrides: tuple[str, ...],
    resume: bool,
    overwrite: bool,
    evaluate: str | None,
    report: str | None,
    audit: str | None,
    predict: str | None,
    export: str | None,
    init: str | None,
    trace: bool,
    version: bool,
    dry_run: bool,
    print_schema: bool,
) -> int:
    """Train as CONFIG.yaml says, alone or under any mpiexec.

    KEY=VALUE replaces an entry: `optimizer.lr=0.1`. A run leaves its resolved configuration, log.jsonl, snapshots and
    summary.json in its folder; SIGTERM or SIGUSR1 saves and ends it with exit code 75.
    """
    if print_schema:
        _say_before_mpi(json.dumps(Config.model_json_schema(), indent=2))
        return 0
    words = [] if config is None else [config, *overrides]
    lines = _aside(words, report=report, audit=audit, predict=predict, export=export, init=init, version=version)
    if lines is not None:
        for line in _readable(lines) if environment.launched()[1] == 0 else ():
            print(line, flush=True)
        return 0
    stored = evaluate is not None and (config is None or ("=" in config and not os.path.exists(config)))
    if stored:
        overrides = (*([config] if config else []), *overrides)
        config = os.path.join(folder_of(str(evaluate)), CONFIG)
    if config is None or ("=" in config and not os.path.exists(config)):
        raise click.UsageError("expected a configuration: dbrdist-train CONFIG.yaml [KEY=VALUE]...")
    if evaluate is not None and (resume or dry_run or overwrite or trace):
        raise click.UsageError("--evaluate cannot be combined with --resume, --overwrite, --trace or --dry-run")
    if resume and overwrite:
        raise click.UsageError(
            "--resume continues the run in the folder, --overwrite moves it aside: use only one of them"
        )
    settings, origin = _checked(config, overrides, trusted=not stored)
    if trace and settings.virtual_workers is not None:
        raise click.UsageError("--trace does not work with virtual workers; write `batch: N`")
    if dry_run:
        return _dry_run(settings, origin)
    return _run(settings, origin, "resume" if resume else "overwrite" if overwrite else "new", evaluate, trace)


def _aside(words: list[str], **asked: Any) -> Iterable[str] | None:
    """The lines of what is not training; None where training is asked for."""
    chosen = [name for name, value in asked.items() if value]
    if len(chosen) > 1:
        raise click.UsageError(f"--{chosen[0]} cannot be combined with --{chosen[1]}")
    if asked["version"]:
        return [f"dbrdist {__version__}"]
    if asked["init"]:
        return [commands.configuration(asked["init"])]
    if asked["report"]:
        return commands.write_report([asked["report"], *words])
    if asked["audit"]:
        return commands.audit_run(asked["audit"], words)
    if asked["export"]:
        return commands.export(asked["export"], words)
    return commands.predict_images(asked["predict"], words) if asked["predict"] else None


def _readable(lines: Iterable[str]) -> Iterator[str]:
    """The lines; a file that cannot be read or written for them is a ConfigError."""
    try:
        yield from lines
    except OSError as error:
        raise ConfigError(f"dbrdist-train: {said(error)}") from error


def _checked(config: str, overrides: tuple[str, ...], trusted: bool) -> tuple[Config, Origin]:
    """The configuration, with its callables imported; a run's folder, which is not trusted, names none by itself."""
    try:
        settings, origin = load.load(config, overrides)
    except OSError as error:
        raise ConfigError(f"{config}: the configuration cannot be read: {error.strerror}") from None
    if trusted:
        resolve.search_beside(config)
    else:
        resolve.refuse_code_of_a_folder(settings, origin)
    resolve.check_callables(settings, origin)
    return settings, origin


def _dry_run(settings: Config, origin: Origin) -> int:
    size, rank, _ = environment.launched()
    if rank == 0:
        try:
            made = assemble.parts(settings, origin, 0, size)
            preflight.check(settings, origin, made)
        except Exception as error:
            refused = refusal(error)
            if refused is None:
                raise
            raise refused from error
        need = memory.sentence(memory.measure(settings, origin, made), settings, size, environment.num_local_ranks())
        lines = [*plan.describe(settings, made, size), *need]
        print("\n".join([load.dump(settings), *map(folded, lines)]), flush=True)
    return 0


def _run(settings: Config, origin: Origin, mode: str, evaluate: str | None, trace: bool) -> int:
    try:
        comm = create_communicator(settings.communicator)
    except CommunicatorError:
        raise
    except (ValueError, RuntimeError) as error:  # it does not fit these hosts or devices, which every rank finds
        raise ConfigError(f"{origin.where(('communicator',))}: communicator: {error}") from None
    if settings.reproducible:
        thread_pools.use_one()
    console = Console()
    warned = Warned(comm.rank, console)
    try:
        with warned.listening():
            resume.compare_ranks(settings, origin, comm)
            if evaluate is not None:
                run.evaluate(settings, origin, comm, evaluate)
                warned.gather(comm)
                return 0
            training = run.Run(settings, origin, comm, console, warned)
            training.announce()
            return training.train(trace) if training.start_folder(mode) else 0
    except RefusedHere as reason:
        abort.report(f"dbrdist-train: {reason}")
        return reason.code
    except Refused as reason:
        if comm.rank == 0 and str(reason):
            _complain(f"dbrdist-train: {reason}" if reason.code != WRONG else str(reason))
        return reason.code


def _complain(words: str) -> None:
    """Say what is wrong, once for all ranks, so that an editor finds `file:line:column` at the start of a line."""
    sys.stdout.flush()
    os.write(2, f"{words}\n".encode(errors="backslashreplace"))


def _say_before_mpi(words: str) -> None:
    """Print by the process that the launcher calls rank 0; the others end alike, silent."""
    if environment.launched()[1] == 0:
        print(words, flush=True)


def _refuse_before_mpi(words: str, code: int) -> int:
    """Every rank finds the same mistake: the one that the launcher calls rank 0 says so, at once.

    Where it is found on some rank only (a file that one host lacks), that one says so some seconds later; by then
    the job has ended where all found it.
    """
    size, rank, _ = environment.launched()
    if rank > 0:
        time.sleep(5.0)
    _complain(words)
    if size > 1:
        time.sleep(0.3)  # the launcher must have passed the words on before it is told to end the job
    return code


def _main() -> int:
    try:
        with Warned(environment.launched()[1], Console()).listening():
            code: Any = command.main(standalone_mode=False)
    except click.Abort:  # what click makes of Ctrl-C
        raise KeyboardInterrupt from None
    except ConfigError as error:
        return _refuse_before_mpi(str(error), WRONG)
    except click.ClickException as error:
        return _refuse_before_mpi(f"dbrdist-train: {error.format_message()}", WRONG)
    except Refused as reason:
        return _refuse_before_mpi(str(reason), reason.code)
    except DbrdistError as error:
        return _refuse_before_mpi(f"dbrdist-train: {error}", code_of(error))
    return code or 0


def main() -> None:
    """Run the command; a failure on any rank ends the job."""
    abort.guard(_main)


if __name__ == "__main__":
    main()
