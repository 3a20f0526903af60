"""Names that old programs take from Python's own modules and Python dropped since 3.6, for those programs alone."""

from __future__ import annotations

import base64
import collections
import collections.abc
import errno
import fractions
import importlib
import inspect
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from dbrdist.compat.program import is_own

_ArgSpec = collections.namedtuple("_ArgSpec", "args varargs keywords defaults")


def _getargspec(function: Any) -> _ArgSpec:
    return _ArgSpec(*inspect.getfullargspec(function)[:4])


NAMES: dict[ModuleType, dict[str, Any]] = {
    base64: {"encodestring": base64.encodebytes, "decodestring": base64.decodebytes},
    # without ByteString, of which newer Pythons warn
    collections: {name: getattr(collections.abc, name) for name in collections.abc.__all__ if name != "ByteString"},
    fractions: {"gcd": math.gcd},
    inspect: {"getargspec": _getargspec},
    os: {"errno": errno},
    time: {"clock": time.process_time},
}
_MODULES = {"xml.etree.cElementTree": "xml.etree.ElementTree"}


class _Moved(MetaPathFinder, Loader):
    """Serves modules under the names that they had."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in _MODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__dict__.update(vars(importlib.import_module(_MODULES[spec.name])))
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: the names are there."""


def _serving(module: ModuleType, names: dict[str, Any]) -> Callable[[str], Any]:
    def find(name: str) -> Any:
        if name in names and is_own(sys._getframe(1).f_code.co_filename):
            return names[name]
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    return find


def restore_python_names(modules: Sequence[ModuleType] = tuple(NAMES)) -> None:
    """Let the program's own files use them: ``collections.Iterable``, ``inspect.getargspec``, ``time.clock`` ..."""
    for module in modules:
        if "__getattr__" not in vars(module):
            module.__getattr__ = _serving(module, NAMES[module])  # type: ignore[method-assign]
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())
