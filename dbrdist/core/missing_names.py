"""What a module of ours says of a name that it does not have: is it one of Chainer's, and what comes near it?"""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Chainer's names, a section for each of its modules.
NAMES = Path(__file__).with_name("chainer-names.txt")


def explained(module: str) -> Callable[[str], Any]:
    """The function ``__getattr__`` of a module, which raises an AttributeError that helps."""

    def getattr_(name: str) -> Any:
        raise error(module, name)

    return getattr_


def error(module: str, name: str) -> AttributeError:
    """The error for a name that ``module`` does not have."""
    words = f"module {module!r} has no attribute {name!r}"
    if name.startswith("_"):  # asked for by Python itself and by tools
        return AttributeError(words)
    if name in chainer_names().get(module.replace("dbrdist", "chainer", 1), ()):
        return AttributeError(f"{words}; {name} is a name of Chainer that dbrdist does not have yet")
    here = {public.lower(): public for public in vars(sys.modules[module]) if not public.startswith("_")}
    close = difflib.get_close_matches(name.lower(), here, 1)
    return AttributeError(words + (f"; did you mean {here[close[0]]!r}?" if close else ""))


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
