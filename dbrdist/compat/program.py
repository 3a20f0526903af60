"""The program that ``python -m dbrdist.compat`` runs: its main file, and the modules of its own that it imports."""

from __future__ import annotations

import ast
import builtins
import os
import runpy
import sys
import sysconfig
import types
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

from dbrdist.compat.numpy_1 import numpy_calls

# Where installed packages are; files elsewhere belong to the program.
_INSTALLED = tuple(
    os.path.join(os.path.realpath(folder), "")
    for folder in {*sysconfig.get_paths().values(), str(Path(__file__).parents[1])}
    if os.path.realpath(folder) != "/"
)


def is_own(path: str) -> bool:
    """Whether a file belongs to the program, rather than to an installed package."""
    path = os.path.realpath(path)
    return path.endswith(".py") and not path.startswith(_INSTALLED) and "site-packages" not in path.split(os.sep)


class _ChangedLoader(SourceFileLoader):
    """Compiles a file of the program with :mod:`numpy_calls`; the result is not kept on disk."""

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        return numpy_calls.compiled(self.get_data(path), path)


class _ProgramFinder(MetaPathFinder):
    """Finds modules as Python does, and has those of the program compiled by :class:`_ChangedLoader`."""

    def find_spec(self, fullname: str, path: Any = None, target: types.ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader or not is_own(spec.loader.path):
            return None
        spec.loader = _ChangedLoader(spec.loader.name, spec.loader.path)
        return spec


def serve_numpy_1() -> None:
    """Let the program's files, from now on, do with arrays what NumPy 1 allowed."""
    vars(builtins).update(numpy_calls.HELPERS)
    sys.meta_path.insert(0, _ProgramFinder())


def run(script: str, changed: bool) -> None:
    """Run a file as the main program; ``changed``: compiled with :mod:`numpy_calls`."""
    if not changed:
        runpy.run_path(script, run_name="__main__")
        return
    with open(script, "rb") as file:
        code = numpy_calls.compiled(file.read(), script)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=builtins, __cached__=None)
    before, sys.modules["__main__"] = sys.modules["__main__"], main
    try:
        exec(code, main.__dict__)
    finally:
        sys.modules["__main__"] = before


def has_main_guard() -> bool:
    """Whether the main file can be imported by another process: its main part is under ``if __name__ == ...``.

    True where nobody knows, as for a program that was not read from a file.
    """
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None or not os.path.isfile(path):
        return True
    tree = ast.parse(Path(path).read_bytes(), path)
    guards = (n.test for n in tree.body if isinstance(n, ast.If))
    return any(isinstance(n, ast.Name) and n.id == "__name__" for test in guards for n in ast.walk(test))
