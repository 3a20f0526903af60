"""The user's own callables: found from the working directory, checked against their arguments, called.

Whatever goes wrong in them is a ConfigError that names the configuration's line and repeats the last line of the
original traceback with the place in the user's file.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel

from dbrdist.cli.configuration.document import KeyPath
from dbrdist.cli.configuration.load import Origin
from dbrdist.cli.configuration.schema import Config
from dbrdist.cli.configuration.settings import Custom
from dbrdist.errors import ConfigError

# how many arguments the run itself passes to a user's callable, before those of the configuration
_PASSED = {"loss": 2, "metrics": 2, "schedule": 1, "updater": 4}


def check_callables(config: Config, origin: Origin) -> None:
    """Import every callable that the configuration names and compare its signature with the arguments given.

    Raises one ConfigError for all of them.
    """
    problems = []
    for path, custom in custom_components(config):
        try:
            function = find(custom, path, origin)
            _check_arguments(function, custom, path, origin)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def search_beside(config: str) -> None:
    """Find the user's modules in the configuration's folder too, after the working directory and the environment."""
    folder = os.path.dirname(os.path.abspath(config))
    if folder not in sys.path:
        sys.path.append(folder)


def refuse_code_of_a_folder(config: Config, origin: Origin, asked: str = "--evaluate RUN") -> None:
    """A run's folder holds data: of the callables that its configuration names, only those named again are run."""
    named = [".".join(map(str, path)) for path, _ in custom_components(config) if not _was_typed(path, origin)]
    if named:
        raise ConfigError(
            f"{origin.where(())}: {', '.join(named)}: this is your own code, and no code is run because a folder "
            f"names it; pass your configuration too (dbrdist-train CONFIG.yaml {asked}), or name it on the "
            f"command line ({named[0]}.name=package.module:callable)"
        )


def _was_typed(path: KeyPath, origin: Origin) -> bool:
    return any((*path, "name")[: len(typed)] == typed for typed in origin.overrides)


def custom_components(settings: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Custom]]:
    """Every Custom in a configuration with its path."""
    if isinstance(settings, Custom):
        yield path, settings
    if isinstance(settings, BaseModel):
        for name in type(settings).model_fields:
            yield from custom_components(getattr(settings, name), (*path, name))
    elif isinstance(settings, tuple):
        for i, item in enumerate(settings):
            yield from custom_components(item, (*path, i))


def find(custom: Custom, path: KeyPath, origin: Origin) -> Callable[..., Any]:
    """Import `package.module:callable`, the working directory first."""
    module_name, _, attributes = custom.name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise _mistake(path, origin, f"importing {module_name!r} failed: {last_line(error)}") from error
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            close = difflib.get_close_matches(attribute, dir(found), 1)
            words = f", did you mean {close[0]!r}?" if close else ""
            file = getattr(sys.modules[module_name], "__file__", None) or module_name
            raise _mistake(path, origin, f"{file} has no {attribute!r}{words}")
        found = getattr(found, attribute)
    if not callable(found):
        raise _mistake(path, origin, f"{custom.name!r} is of type {type(found).__name__}, not callable")
    return found  # type: ignore[no-any-return]


def call(custom: Custom, path: KeyPath, origin: Origin, *passed: Any) -> Any:
    """Call the user's callable with the arguments of the configuration."""
    function = find(custom, path, origin)
    try:
        return function(*passed, **custom.args)
    except (Exception, SystemExit) as error:
        raise _mistake(path, origin, f"calling {custom.name!r} failed: {last_line(error)}") from error


def last_line(error: BaseException) -> str:
    """What a traceback says last, as one line, and the file and line that raised it."""
    if isinstance(error, SyntaxError) and error.filename:  # no line of that file has run
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    words = " ".join("".join(traceback.format_exception_only(error)).split())
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    frames = [f for f in frames if f.filename != __file__ and os.sep + "importlib" + os.sep not in f.filename]
    return f"{words} ({frames[-1].filename}:{frames[-1].lineno})" if frames else words


def _mistake(path: KeyPath, origin: Origin, words: str) -> ConfigError:
    return ConfigError(f"{origin.where((*path, 'name'))}: {'.'.join(map(str, path))}: {words}")


def _check_arguments(function: Callable[..., Any], custom: Custom, path: KeyPath, origin: Origin) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins have none
        return
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for name in custom.args:
        if name not in signature.parameters and not takes_any:
            close = difflib.get_close_matches(name, signature.parameters, 1)
            words = f", did you mean {close[0]!r}?" if close else f"; it takes {signature}"
            where = origin.where((*path, "args", name), key=True)
            dotted = ".".join(map(str, (*path, "args", name)))
            raise ConfigError(f"{where}: {dotted}: {custom.name!r} takes no {name!r}{words}")
    try:
        key = next(part for part in reversed(path) if isinstance(part, str))
        signature.bind(*[None] * _PASSED.get(key, 0), **custom.args)
    except TypeError as error:
        raise _mistake(path, origin, f"the arguments do not fit {custom.name}{signature}: {error}") from None
