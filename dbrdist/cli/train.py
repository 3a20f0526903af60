"""The command `dbrdist-train`."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which take their time
    from dbrdist_launch import entry

    entry.train()

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import click
from dbrdist_launch import entry

from dbrdist import __version__
from dbrdist.cli.builders import assemble, memory, plan, preflight
from dbrdist.cli.configuration import load, resolve
from dbrdist.cli.configuration.load import Origin
from dbrdist.cli.configuration.schema import Config
from dbrdist.cli.inspection import commands, gpu_check
from dbrdist.cli.inspection import schedule as schedules
from dbrdist.cli.output.console import Console
from dbrdist.cli.output.folder import CONFIG
from dbrdist.cli.output.interrupts import Command, call
from dbrdist.cli.output.refuse import WRONG, Refused, RefusedHere, code_of, refusal
from dbrdist.cli.output.warned import Warned
from dbrdist.cli.output.words import columns_of, folded, said
from dbrdist.cli.running import evaluation, rehearsal, resume, run
from dbrdist.comm.communicators.create import create
from dbrdist.comm.failure import abort
from dbrdist.comm.transport import environment, mpi
from dbrdist.core.array import thread_pools
from dbrdist.errors import CommunicatorError, ConfigError, DbrdistError
from dbrdist.training.runs import folder_of


def _help(context: click.Context, option: click.Parameter, asked: bool) -> None:
    if asked:
        _say_before_mpi(context.get_help())
        context.exit()


@click.command(cls=Command, add_help_option=False)
@click.argument("config", required=False, metavar="CONFIG.yaml")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--resume", is_flag=True, help="Continue from the newest snapshot in the run's folder, if there is one.")
@click.option("--overwrite", is_flag=True, help="Move a run that is in the folder aside, and start a new one.")
@click.option("--evaluate", metavar="RUN", help="Evaluate the newest snapshot in the folder RUN and print the means.")
@click.option("--report", metavar="RUN", help="Write the report on RUN, or compare it with the runs that follow.")
@click.option("--watch", metavar="RUN", help="Serve the page about RUN, and those that follow, while they train.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Of --watch, on this machine; 8040 or a free one by default."
)
@click.option(
    "--audit", metavar="RUN", help="Prove that RUN, trained with audit: true, used each example once per epoch."
)
@click.option("--predict", metavar="RUN", help="Print the most likely classes of the image files that follow.")
@click.option(
    "--export", metavar="RUN", help="Write RUN's weights to a .safetensors file, or its network to an .onnx file."
)
@click.option("--check-gpu", is_flag=True, help="Say what is there for training on a GPU, and how to get the rest.")
@click.option("--init", metavar="NAME", help="Print a commented configuration: digits, cifar10 or imagenet.")
@click.option(
    "--trace", is_flag=True, help="Write a timeline of every rank to trace.json, and say what steps wait for."
)
@click.option("--profile", is_flag=True, help="Say how long each function and layer takes; implies --trace.")
@click.option("--schedule", metavar="FILE.csv", help="Write every scheduled number at every step, without training.")
@click.option(
    "--rehearse", metavar="RANKSxPER_HOST", help="Foretell a job on so many ranks, and try a few small steps of it."
)
@click.option(
    "--examples",
    type=click.IntRange(1, 2**40),
    help="Training examples, for --schedule and --rehearse.",
)
@click.option(
    "--gigabits",
    type=click.FloatRange(0, min_open=True),
    default=100.0,
    help="Of a host's network, for --rehearse: Gbit/s.",
)
@click.option(
    "--microseconds", type=click.FloatRange(0), default=5.0, help="Of a message between hosts, for --rehearse."
)
@click.option(
    "--examples-per-second",
    type=click.FloatRange(0, min_open=True),
    help="Of one rank of that machine, for --rehearse; measured here if not given.",
)
@click.option(
    "--trial",
    metavar="WORKERSxIMAGES@PIXELS",
    default="8x2@64",
    help="Of the small steps that --rehearse tries; 8x2@64 if not given.",
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
    watch: str | None,
    port: int | None,
    audit: str | None,
    predict: str | None,
    export: str | None,
    check_gpu: bool,
    init: str | None,
    trace: bool,
    profile: bool,
    schedule: str | None,
    rehearse: str | None,
    examples: int | None,
    gigabits: float,
    microseconds: float,
    examples_per_second: float | None,
    trial: str,
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
    words = [config, *overrides] if config else []
    lines = _aside(
        words, port, report=report, watch=watch, audit=audit, predict=predict, export=export, init=init,
        version=version, check_gpu=check_gpu,
    )  # fmt: skip
    if lines is not None:
        for line in _readable(lines) if environment.launched()[1] == 0 else ():
            print(line, flush=True)
        return 0
    config, overrides, stored = _which(config, overrides, evaluate)
    _check_options(evaluate, resume, overwrite, dry_run=dry_run, trace=trace, profile=profile)
    trace = trace or profile
    settings, origin = _checked(config, overrides, trusted=not stored)
    if trace and settings.virtual_workers is not None:
        raise click.UsageError(
            f"--{'profile' if profile else 'trace'} does not work with virtual workers; write `batch: N`"
        )
    if schedule is not None or rehearse is not None:
        is_alone = not (resume or dry_run or overwrite or trace or evaluate is not None or (schedule and rehearse))
        examples = _examples_of("--rehearse" if schedule is None else "--schedule", examples, is_alone)
        if schedule is not None:
            return _write_schedule(settings, origin, schedule, examples)
        job = rehearsal.parse(str(rehearse), gigabits, microseconds, examples_per_second)
        return _rehearse(settings, origin, job, rehearsal.parse_trial(trial), examples)
    if examples is not None:
        raise click.UsageError("--examples goes with --schedule or --rehearse")
    if dry_run:
        return _dry_run(settings, origin)
    return _run(settings, origin, "resume" if resume else "overwrite" if overwrite else "new", evaluate, trace, profile)


def _which(config: str | None, overrides: tuple[str, ...], evaluate: str | None) -> tuple[str, tuple[str, ...], bool]:
    """The configuration, the overrides, and whether the configuration is that of the run to be evaluated."""
    is_given = config is not None and ("=" not in config or os.path.exists(config))
    if config is not None and is_given:
        return config, overrides, False
    if evaluate is None:
        raise click.UsageError("expected a configuration: dbrdist-train CONFIG.yaml [KEY=VALUE]...")
    return os.path.join(folder_of(evaluate), CONFIG), (*([config] if config else []), *overrides), True


def _examples_of(option: str, examples: int | None, is_alone: bool) -> int:
    """The number of training examples for an option that reads no data and is used without others."""
    if examples is None:
        raise click.UsageError(f"{option} reads no data: give the number of training examples, --examples 1281167")
    if not is_alone:
        raise click.UsageError("--schedule and --rehearse are used alone")
    return examples


def _check_options(evaluate: str | None, resume: bool, overwrite: bool, **of_training: bool) -> None:
    """Refuse options that exclude each other."""
    of_training |= {"resume": resume, "overwrite": overwrite}
    for name in (name for name, is_given in of_training.items() if is_given and evaluate is not None):
        raise click.UsageError(f"--evaluate does not train: it cannot be combined with --{name.replace('_', '-')}")
    if resume and overwrite:
        raise click.UsageError(
            "--resume continues the run in the folder, --overwrite moves it aside: use only one of them"
        )


# what says how to train, and has no meaning beside what does not
_OF_TRAINING = ("resume", "overwrite", "evaluate", "trace", "profile", "schedule", "rehearse", "dry_run")


def _aside(words: list[str], port: int | None, **asked: Any) -> Iterable[str] | None:
    """The lines of what is not training; None where training is asked for."""
    chosen = [name for name, value in asked.items() if value]
    given = click.get_current_context().params
    chosen += [name for name in _OF_TRAINING if chosen and given[name]]
    if len(chosen) > 1:
        raise click.UsageError(
            f"--{chosen[0].replace('_', '-')} cannot be combined with --{chosen[1].replace('_', '-')}"
        )
    if port is not None and not asked["watch"]:
        raise click.UsageError("--port goes with --watch")
    if asked["version"]:
        return [f"dbrdist {__version__}"]
    if asked["check_gpu"]:
        return gpu_check.check_gpu()
    if asked["init"]:
        return [commands.configuration(asked["init"])]
    if asked["report"]:
        return commands.write_report([asked["report"], *words])
    if asked["watch"]:
        return commands.watch_runs([asked["watch"], *words], port)
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
        is_run = os.path.isfile(os.path.join(config, "config.yaml"))
        hint = f"; it is the folder of a run, whose own is {os.path.join(config, 'config.yaml')}" if is_run else ""
        raise ConfigError(f"{config}: the configuration cannot be read: {error.strerror}{hint}") from None
    if trusted:
        resolve.search_beside(config)
    else:
        resolve.refuse_code_of_a_folder(settings, origin)
    resolve.check_callables(settings, origin)
    return settings, origin


def _write_schedule(settings: Config, origin: Origin, path: str, num_examples: int) -> int:
    if environment.launched()[1] == 0:
        for line in _readable(schedules.write(settings, origin, path, num_examples)):
            print(line, flush=True)
    return 0


def _rehearse(
    settings: Config, origin: Origin, job: rehearsal.TargetJob, trial: rehearsal.Trial, num_examples: int,
) -> int:  # fmt: skip
    size, _, _ = environment.launched()
    if size > 1:
        raise ConfigError("dbrdist-train: --rehearse runs on one process: leave out mpiexec")
    try:
        for line in rehearsal.describe(settings, origin, job, num_examples):
            print(folded(line), flush=True)
        print("a few small steps of the same run:", flush=True)
        code = rehearsal.try_out(settings, origin, trial, lambda small: _run(small, origin, "new", None, False))
    except Exception as error:
        refused = refusal(error)
        if refused is None:
            raise
        raise refused from error
    print("the rehearsal has " + ("passed" if code == 0 else f"failed with code {code}"), flush=True)
    return code


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
        measured, num_local = memory.measure(settings, origin, made), environment.num_local_ranks()
        need = memory.sentence(measured, settings, size, num_local, made.device)
        lines = [*plan.describe(settings, made, size), *need]
        width = columns_of(sys.stdout)
        print("\n".join([load.dump(settings), *(folded(line, width) for line in lines)]), flush=True)
    return 0


def _run(settings: Config, origin: Origin, mode: str, evaluate: str | None, trace: bool, profile: bool = False) -> int:
    try:
        is_alone = settings.communicator == "auto" and not environment.is_launched() and mpi.started() is None
        name = "single" if is_alone else settings.communicator  # named, it says nothing of itself
        comm = create(name, None, {}, may_use_gpus=settings.device != "cpu")
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
                evaluation.evaluate(settings, origin, comm, evaluate)
                warned.gather(comm)
                return 0
            training = run.TrainingRun(settings, origin, comm, console, warned, continues=mode == "resume")
            try:
                training.announce()
                return training.train(trace, profile) if training.start_folder(mode) else 0
            finally:
                training.stop.finalize()  # signals are as they were before, also where nothing was trained
    except RefusedHere as reason:
        abort.report(f"dbrdist-train: {reason}")
        return reason.code
    except Refused as reason:
        if comm.rank == 0 and str(reason):
            _complain(f"dbrdist-train: {reason}" if reason.code != WRONG else str(reason))
        return reason.code


def _complain(words: str) -> None:
    """Say what is wrong, once for all ranks, so that an editor finds `file:line:column` at the start of a line."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed or full: the exit code says the rest
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
            code = call(command)
    except (click.Abort, KeyboardInterrupt):
        if mpi.started() is None and environment.launched()[0] > 1:  # the others will not come to a meeting
            entry.interrupted("dbrdist-train")
        raise KeyboardInterrupt from None
    except ConfigError as error:
        return _refuse_before_mpi(str(error), WRONG)
    except click.NoSuchOption as error:
        return _refuse_before_mpi(f"dbrdist-train: {error.format_message()}{_as_entry(error.option_name)}", WRONG)
    except click.ClickException as error:
        return _refuse_before_mpi(f"dbrdist-train: {error.format_message()}", WRONG)
    except Refused as reason:
        return _refuse_before_mpi(str(reason), reason.code)
    except DbrdistError as error:
        return _refuse_before_mpi(f"dbrdist-train: {error}", code_of(error))
    return code or 0


# What other programs call options that are entries of the configuration here.
_ENTRIES = {
    "batch_size": "batch", "bs": "batch", "b": "batch", "lr": "optimizer.lr", "learning_rate": "optimizer.lr",
    "epoch": "epochs", "output": "out", "output_dir": "out", "out_dir": "out", "model_name": "model", "arch": "model",
    "num_workers": "workers", "momentum": "optimizer.momentum", "dataset": "data",
    "optim": "optimizer",
}  # fmt: skip


def _as_entry(option: str) -> str:
    """How to write an entry of the configuration that was given as an option."""
    name = option.lstrip("-").replace("-", "_")
    key = _ENTRIES.get(name, name)
    if key.partition(".")[0] not in Config.model_fields:
        return ""
    words = sys.argv[sys.argv.index(option) + 1 :] if option in sys.argv else []
    value = words[0] if words and not words[0].startswith("-") else "..."
    return f" Entries of the configuration are written without dashes, behind its name: {key}={value}"


def main() -> None:
    """Run the command; a failure on any rank ends the job."""
    entry.protect_streams()
    abort.guard(_main)
