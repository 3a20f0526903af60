"""What a module of ours says of a name that it does not have: is it one of Chainer's, and what comes near it?"""

from __future__ import annotations

import dis
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from dbrdist.core.names.moved import MOVED
from dbrdist.core.usage.foreign_names import hint

# Chainer's names, a section for each of its modules.
NAMES = os.path.join(os.path.dirname(__file__), "chainer-names.txt")
_IMPORT_FROM = dis.opmap["IMPORT_FROM"]
_ASKING = ("_is_import_from", "absent", "error", "getattr_", "__getattr__")


def explained(module: str, public: str = "") -> Callable[[str], Any]:
    """The function ``__getattr__`` of a module: a module that has moved, or an error that helps.

    ``public`` is the path under which programs know the module, if that is another.
    """

    def getattr_(name: str) -> Any:
        if f"{module}.{name}" in MOVED:
            return importlib.import_module(f"{module}.{name}")
        raise error(module, name, public)

    return getattr_


def error(module: str, name: str, public: str = "") -> Exception:
    """The error for a name that ``module`` of ours does not have; programs know it as ``public``."""
    public = public or module
    return absent("chainer" + public.removeprefix("dbrdist"), name, dir(sys.modules[module]), public)


def absent(
    chainers: str, name: str, here: Iterable[str], module: str | None = None, reason: str | None = None
) -> Exception:
    """The error for a name that ``module`` lacks, which stands for the module ``chainers`` and has the names ``here``.

    ``reason`` says why it is missing and what to use instead, where that is known.

    For ``from module import name`` it is an ImportError: Python would replace an AttributeError by an ImportError of
    its own, without these words.
    """
    module = chainers if module is None else module
    words = f"module {module!r} has no attribute {name!r}"
    if name.startswith("_"):  # asked for by Python itself and by tools
        return AttributeError(words, name=name)
    foreign = hint("".join(chainers.partition(".")[1:]), name)
    if reason is not None:
        words, here = f"{words}: {reason}", ()
    elif foreign:
        words += f"; {foreign}"
    elif any(name in names for path, names in chainer_names().items() if _is_within(chainers, path)):
        words += f"; {name} is a name of Chainer that dbrdist does not have yet"
    ordered = sorted(here, key=str.swapcase)  # of a class and a module of one name the class counts
    names = {public.lower(): public for public in ordered if not public.startswith("_")}
    import difflib  # loaded for errors alone

    close = difflib.get_close_matches(name.lower(), names, 1)
    words += f"; did you mean {names[close[0]]!r}?" if close and not foreign else ""
    if _is_import_from():
        return ImportError(f"cannot import name {name!r}: {words}", name=module)
    return AttributeError(words, name=name)


def _is_within(module: str, path: str) -> bool:
    """Whether ``path`` is a module of Chainer or a package around it; its root stands for itself alone."""
    return module == path if "." not in path else (module + ".").startswith(path + ".")


def no_module(path: str, paths: Iterable[str]) -> ModuleNotFoundError:
    """The error for an import path that Chainer does not have either."""
    import difflib  # loaded for errors alone

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
    with open(NAMES, encoding="utf-8") as file:
        lines = file.read().splitlines()
    for line in lines:
        if line.startswith("["):
            names = modules.setdefault(line.strip("[]"), set())
        elif line and not line.startswith("#"):
            names.add(line.partition(":")[0])
    return {module: frozenset(names) for module, names in modules.items()}
