"""Import paths of modules that lay in this folder itself and lie in its packages now: both name the same module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:  # which take as long to import as the rest of the launcher
    Loader = MetaPathFinder = object

_PACKAGES = {
    "preparation": "binding environment program settings",
    "judgement": "endings judge ranks report stalls",
    "streams": "events logs output pieces starter_output terminal view",
    "running": "attempt listener plan process questions suspension",
    "restarting": "pool requeue restarts",
    "records": "jobs metrics runs",
}
MOVED = {
    f"{__package__}.{name}": f"{__package__}.{package}.{name}"
    for package, names in _PACKAGES.items()
    for name in names.split()
}


class _Loader(Loader):
    def __init__(self, path: str) -> None:
        self._path = path

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._module = importlib.import_module(self._path)
        self._spec = self._module.__spec__
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import has replaced it


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = MOVED.get(fullname)
        return None if new is None else ModuleSpec(fullname, _Loader(new))


def serve() -> None:
    """From now on the old paths can be imported. They are asked for last: other imports take no longer."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
