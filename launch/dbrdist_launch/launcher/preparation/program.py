"""The user's command: what will run, with which interpreter."""

from __future__ import annotations

import os
import re
import shutil
import sys
from typing import NamedTuple

from ... import codes
from ...errors import LaunchError

_PYTHON = re.compile(r"^(python|pypy)[0-9.]*t?$")


class Program(NamedTuple):
    """A command with absolute paths; `interpreter` is None for a program that is not written in Python."""

    command: tuple[str, ...]
    interpreter: str | None


def resolve(command: tuple[str, ...]) -> Program:
    """Make the first word absolute: `python` is the interpreter beside the launcher, then what PATH finds."""
    if not command:
        raise LaunchError("expected a command, as in dbrdist-launch -n 4 python train.py")
    name = command[0]
    if os.sep in name:
        path = os.path.abspath(name)
    elif _PYTHON.match(name):
        beside = os.path.join(os.path.dirname(sys.executable), name)
        path = sys.executable if not os.path.exists(beside) else beside
    else:
        # A script of the environment that the launcher belongs to, even when it is not activated.
        search = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", os.defpath)
        found = shutil.which(name, path=search)
        path = os.path.abspath(found) if found else ""  # PATH may name folders of this one
    _check(name, path)
    return Program((path, *command[1:]), path if _PYTHON.match(os.path.basename(path)) else _interpreter_of(path))


def _check(name: str, path: str) -> None:
    if not path or not os.path.exists(path):
        hint = f"; for a Python script: dbrdist-launch -n 4 python {name}" if name.endswith(".py") else ""
        raise LaunchError(f"the command {name!r} was not found{hint}", codes.COMMAND_NOT_FOUND)
    if os.path.isdir(path) or not os.access(path, os.X_OK):
        hint = f"; for a Python script: dbrdist-launch -n 4 python {name}" if name.endswith(".py") else ""
        raise LaunchError(f"the command {name!r} ({path}) is not executable{hint}", codes.COMMAND_NOT_RUNNABLE)


def _interpreter_of(script: str) -> str | None:
    """The Python that a script's first line names."""
    try:
        with open(script, "rb") as file:
            first = file.readline(256)
    except OSError:
        return None
    if not first.startswith(b"#!"):
        return None
    words = first[2:].decode(errors="replace").split()
    if words and os.path.basename(words[0]) == "env":
        words = [shutil.which(words[-1]) or ""]
    return words[0] if words and _PYTHON.match(os.path.basename(words[0])) else None


def mpi_of_binary(path: str) -> str | None:
    """The MPI family that a compiled program asks for, by the library's name among its strings."""
    try:
        with open(path, "rb") as file:
            content = file.read(1 << 24)
    except OSError:
        return None
    if not content.startswith(b"\x7fELF"):
        return None
    if b"libmpi.so.40\0" in content:
        return "openmpi"
    return "mpich" if b"libmpi.so.12\0" in content or b"libmpich.so.12\0" in content else None
