"""Rooms whose files are loaded when one of their names is first read, so that an import costs what a program uses.

Type checkers and editors read the imports under ``TYPE_CHECKING`` in the room; a test compares them with its table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from dbrdist.core.names.moved import loaded


def loaded_when_named(
    room: str,
    files: Mapping[str, str],
    otherwise: Callable[[str], Any],
    shown: Callable[[Any], Any] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions ``__getattr__`` and ``__dir__`` of a room: ``files`` are the names of each file of it.

    ``otherwise`` answers for all other names. ``shown`` makes of what a file has what the room has of that name.
    """
    file_of = {name: file for file, names in files.items() for name in names.split()}
    namespace = vars(sys.modules[room])

    def getattr_(name: str) -> Any:
        file = file_of.get(name)
        if file is None:
            found = _file(room, name, files)
            return otherwise(name) if found is None else found
        module = loaded(f"{room}.{file}")
        for each in files[file].split():
            value = getattr(module, each)
            namespace.setdefault(each, value if shown is None else shown(value))  # where two threads come at once
        return namespace[name]

    def dir_() -> list[str]:
        return sorted({*namespace, *file_of, *(file.partition(".")[0] for file in files)})

    return getattr_, dir_


def _file(room: str, name: str, files: Mapping[str, str]) -> ModuleType | None:
    """A file or package of the room under its own name, with all that it holds; None if there is none."""
    below = [file for file in files if f"{file}.".startswith(f"{name}.")]
    for file in below:
        loaded(f"{room}.{file}")
    return sys.modules[f"{room}.{name}"] if below else None
