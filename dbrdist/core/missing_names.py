"""What a module of ours says of a name that it does not have: is it one of Chainer's, and what comes near it?"""

from __future__ import annotations

import difflib
import dis
import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

# Chainer's names, a section for each of its modules.
NAMES = Path(__file__).with_name("chainer-names.txt")
_IMPORT_FROM = dis.opmap["IMPORT_FROM"]
_ASKING = ("_is_import_from", "absent", "error", "getattr_", "__getattr__")


def explained(module: str) -> Callable[[str], Any]:
    """The function ``__getattr__`` of a module, which raises an error that helps."""

    def getattr_(name: str) -> Any:
        raise error(module, name)

    return getattr_


def error(module: str, name: str) -> Exception:
    """The error for a name that ``module`` of ours does not have."""
    return absent("chainer" + module.removeprefix("dbrdist"), name, vars(sys.modules[module]), module)


def absent(chainers: str, name: str, here: Iterable[str], module: str | None = None) -> Exception:
    """The error for a name that ``module`` lacks, which stands for the module ``chainers`` and has the names ``here``.

    For ``from module import name`` it is an ImportError: Python would replace an AttributeError by an ImportError of
    its own, without these words.
    """
    module = chainers if module is None else module
    words = f"module {module!r} has no attribute {name!r}"
    if name.startswith("_"):  # asked for by Python itself and by tools
        return AttributeError(words, name=name)
    if any(name in names for path, names in chainer_names().items() if (chainers + ".").startswith(path + ".")):
        words += f"; {name} is a name of Chainer that dbrdist does not have yet"
    names = {public.lower(): public for public in here if not public.startswith("_")}
    close = difflib.get_close_matches(name.lower(), names, 1)
    words += f"; did you mean {names[close[0]]!r}?" if close else ""
    if _is_import_from():
        return ImportError(f"cannot import name {name!r}: {words}", name=module)
    return AttributeError(words, name=name)


def no_module(path: str, paths: Iterable[str]) -> ModuleNotFoundError:
    """The error for an import path that Chainer does not have either."""
    close = difflib.get_close_matches(path, paths, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return ModuleNotFoundError(f"No module named {path!r} in Chainer 7.8.1{hint}", name=path)


def _is_import_from() -> bool:
    """Whether the statement outside of our modules that asked is ``from module import name``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name in _ASKING:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM


@functools.cache
def chainer_names() -> dict[str, frozenset[str]]:
    """The public names of each module of Chainer."""
    modules: dict[str, set[str]] = {}
    for line in NAMES.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            names = modules.setdefault(line.strip("[]"), set())
        elif line and not line.startswith("#"):
            names.add(line.partition(":")[0])
    return {module: frozenset(names) for module, names in modules.items()}
