"""The command line of `dbrdist-launch`, made from the table of settings."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any

import click

from .. import codes, cores
from ..backends import NAMES
from ..errors import LaunchError
from ..rank import gpus
from .preparation.settings import GROUPS, LaunchSettings
from .records import jobs
from .session import Session

_EPILOG = """\b
dbrdist-launch doctor            check MPI, hosts and network before you run a job
dbrdist-launch ps                show your jobs on this machine and what their ranks do
dbrdist-launch stacks JOB        print the Python stacks of all ranks (so does SIGQUIT, Ctrl-\\)
dbrdist-launch stop JOB          ask all ranks to save and stop

\b
Exit codes: 0 done, 2 refused, 69 host lost, 71 could not start, 75 stopped on
request and saved, 124 stalled or out of time, 126 command not executable, 127
command not found, 128+N ended by signal N; otherwise the exit code of the first
rank that failed.

\b
Options can also be set in the environment (DBRDIST_LAUNCH_MAX_RESTARTS=3 for
--max-restarts 3) and in a file (--config)."""
_NEIGHBOURS = {
    "--nproc": "-n", "--np": "-n", "--nprocs": "-n", "--ntasks": "-n", "--nproc-per-node": "--per-host",
    "--nproc_per_node": "--per-host", "--ppn": "--per-host", "-ppn": "--per-host", "-H": "--hosts", "--host": "--hosts",
    "--machinefile": "--hostfile", "-f": "--hostfile", "-genv": "--env", "-x": "--env", "--export": "--env",
    "--nnodes": "--hosts", "--max_restarts": "--max-restarts", "--output-filename": "--log-dir",
}  # fmt: skip


class _Command(click.Command):
    """With help in groups, and a hint for options that other launchers have."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, self._end_at_module(ctx, args))
        except click.NoSuchOption as error:
            meant = _NEIGHBOURS.get(error.option_name)
            if meant is None:
                raise
            text = f"No such option '{error.option_name}'. Did you mean '{meant}'?"
            raise click.UsageError(text, ctx) from error

    def _end_at_module(self, ctx: click.Context, args: list[str]) -> list[str]:
        """What follows `-m MODULE` belongs to the module, as with Python's own -m."""
        takes_value = {
            name: isinstance(found, click.Option) and not found.is_flag and not found.count
            for found in self.get_params(ctx)
            for name in found.opts
        }
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] != "--":
            name, sign, _ = args[at].partition("=")
            glued = name not in takes_value and not name.startswith("--")  # -n4, -mMODULE
            name = name[:2] if glued else name
            at += 1 if sign or glued or not takes_value.get(name) else 2
            if name in ("-m", "--module"):
                return [*args[:at], "--", *args[at:]]
        return args

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        settings = {field.name: field for field in fields(LaunchSettings)}
        for group in GROUPS:
            rows = []
            for parameter in self.get_params(ctx):
                field = settings.get(parameter.name or "")
                if field is not None and field.metadata.get("group") == group:
                    row = parameter.get_help_record(ctx)
                    rows += [row] if row else []
            with formatter.section(group):
                formatter.write_dl(rows)


class _Ranks(click.IntRange):
    """A number, or as many as this machine has room for."""

    name = "number of ranks, or auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return gpus.count() or cores.available_cores() if value == "auto" else super().convert(value, param, ctx)


class _Number(click.FloatRange):
    """A number of seconds: not NaN, with which no clock can be compared, nor infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = super().convert(value, param, ctx)
        if found is not None and not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return found


def _option(field: Field[Any]) -> Callable[[Any], Any]:
    """The option of a setting."""
    more: dict[str, Any] = dict(field.metadata)
    names = more["names"] or (f"--{field.name.replace('_', '-')}",)
    options: dict[str, Any] = {"default": field.default, "help": more["help"], "metavar": more.get("metavar")}
    options["show_default"] = bool(more.get("show") or more.get("choices")) and field.default not in (None, ())
    kind, choices = more.get("kind"), more.get("choices")
    if field.default is False and not any("/" in name for name in names):
        options["is_flag"] = True
    if isinstance(field.default, tuple):
        options["multiple"] = True
    if kind == "ranks":
        options["type"] = _Ranks(1)
    elif kind is not None:
        options["type"] = (click.IntRange if kind is int else _Number)(more.get("least"), more.get("most"))
    elif choices == "backends":
        options["metavar"] = "|".join(NAMES)
    elif choices is not None:
        options["type"] = click.Choice(choices)
    if field.name == "config":
        options.update(callback=_take_file, is_eager=True)
    return click.option(field.name, *names, **options)


def _read_options(path: str) -> dict[str, Any]:
    """What a file says of the settings, as click's own defaults."""
    import difflib
    import tomllib

    known = {
        name.partition("/")[0].lstrip("-").replace("_", "-"): field
        for field in fields(LaunchSettings)
        for name in (field.name, *field.metadata.get("names", ()))
        if field.name not in ("command", "config")
    }
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except (OSError, ValueError) as error:
        raise LaunchError(f"--config {path!r} cannot be read: {error}") from error
    found = {}
    for name, value in content.items():
        field = known.get(name.replace("_", "-"))
        if field is None:
            near = difflib.get_close_matches(name.replace("_", "-"), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else "`dbrdist-launch --help` lists the options"
            raise LaunchError(f"--config {path!r}: unknown option {name!r}; {hint}")
        found[field.name] = _default_of(field, value, f"--config {path!r}: {name} = {value!r}")
    return found


def _default_of(field: Field[Any], value: object, where: str) -> object:
    """A value of a file as click takes it: true or false, strings, or a string that the option itself checks."""
    if isinstance(field.default, bool) or field.name == "view":
        if not isinstance(value, bool):
            raise LaunchError(f"{where}: expected true or false")
        return value
    if field.default == () and isinstance(value, (list, str)):
        return [value] if isinstance(value, str) else list(map(str, value))
    if field.default == () or isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise LaunchError(f"{where}: expected {'a list of strings' if field.default == () else 'a string or a number'}")
    return str(value)


def _take_file(ctx: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    if path is not None:
        ctx.default_map = _read_options(path)
    return path


def _with_options(function: Callable[..., int]) -> Callable[..., int]:
    for field in reversed(fields(LaunchSettings)):
        if field.name != "command":
            function = _option(field)(function)
    return function


_CONTEXT = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.command(cls=_Command, context_settings=_CONTEXT, epilog=_EPILOG)
@_with_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def launch(**settings: Any) -> int:
    """Run COMMAND as an MPI job: dbrdist-launch -n 4 python train.py"""
    return Session(LaunchSettings(**settings)).run()


_SHORT_HELP = {"help_option_names": _CONTEXT["help_option_names"]}


@click.command(context_settings=_SHORT_HELP)
def ps() -> None:
    """Show your jobs on this machine and what their ranks do."""
    for job in jobs.running():
        print(jobs.plain(jobs.describe(job)))


@click.command(context_settings=_SHORT_HELP)
@click.argument("job")
def stacks(job: str) -> None:
    """Print the Python stacks of all ranks of a running job."""
    print(jobs.plain(jobs.ask(jobs.find(job), "stacks")))


@click.command(context_settings=_SHORT_HELP)
@click.argument("job")
def stop(job: str) -> None:
    """Ask all ranks of a running job to save and stop."""
    print(jobs.plain(jobs.ask(jobs.find(job), "stop")))


_COMMANDS: dict[str, click.Command] = {"ps": ps, "stacks": stacks, "stop": stop}


def run(arguments: list[str]) -> int:
    """Parse and run; the exit code of the launcher."""
    command: click.Command = launch
    name = "dbrdist-launch"
    if arguments[:1] == ["doctor"]:
        from ..doctor.cli import doctor  # the doctor is no part of a launch: its modules are loaded for it alone

        command = doctor
    elif arguments and arguments[0] in _COMMANDS:
        command = _COMMANDS[arguments[0]]
    if command is not launch:
        name, arguments = f"{name} {arguments[0]}", arguments[1:]
    try:
        result = command.main(
            args=arguments, prog_name=name, standalone_mode=False, auto_envvar_prefix="DBRDIST_LAUNCH"
        )
    except click.ClickException as error:
        error.show(sys.stderr)
        return codes.USAGE
    except (click.Abort, KeyboardInterrupt):
        return codes.from_signal(2)
    except LaunchError as error:
        print(f"dbrdist-launch: {error}", file=sys.stderr)
        return error.code
    return result if isinstance(result, int) else codes.DONE
