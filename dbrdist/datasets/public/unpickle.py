"""Pickles without the power to run programs.

A pickle may call any function that Python can import. Here it gets those alone that put data together.
"""

from __future__ import annotations

import _compat_pickle
import pickle
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

from dbrdist.errors import DbrdistError

# What NumPy's arrays and scalars are made by, in files of NumPy 1 and 2.
ARRAYS = frozenset(
    [(f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")]
    + [(f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")]
    + [("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")]
)
_BUILT_IN = (
    *("object", "set", "frozenset", "complex", "bytearray", "bytes", "str", "int"),
    *("float", "bool", "list", "tuple", "dict", "slice", "range"),
)
PLAIN = frozenset(
    [("builtins", name) for name in _BUILT_IN]
    + [("collections", name) for name in ("OrderedDict", "defaultdict", "Counter", "deque")]
    + [("datetime", name) for name in ("date", "datetime", "time", "timedelta", "timezone")]
    + [("copyreg", "_reconstructor"), ("copyreg", "__newobj__")]
    + [("decimal", "Decimal"), ("fractions", "Fraction"), ("uuid", "UUID"), ("array", "_array_reconstructor")]
    + [("pathlib", name) for name in ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath")]
    + [("pathlib._local", name) for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")]
)
# Packages whose classes do more than hold data, as numpy.memmap, which can empty a file.
_NO_CLASSES = (sys.stdlib_module_names - {"__main__"}) | {"numpy", "ml_dtypes", "dbrdist", "cupy", "scipy", "mpi4py"}


def _today(module: str, name: str) -> tuple[str, str]:
    """What Python 3 calls a name of Python 2."""
    if (module, name) in _compat_pickle.NAME_MAPPING:
        return _compat_pickle.NAME_MAPPING[module, name]
    return _compat_pickle.IMPORT_MAPPING.get(module, module), name


class RefusedPickle(pickle.UnpicklingError):
    """A pickle asks for something that data does not need."""


class DataUnpickler(pickle.Unpickler):
    """Reads pickles that refer to nothing but ``allowed``, pairs (module, name).

    With ``classes`` also to classes that are neither the standard library's nor NumPy's, such as those of your own
    program.
    """

    def __init__(
        self, file: BinaryIO, allowed: frozenset[tuple[str, str]], classes: bool = False, encoding: str = "ASCII"
    ) -> None:
        super().__init__(file, encoding=encoding)
        self._allowed = allowed
        self._classes = classes

    def find_class(self, module: str, name: str) -> Any:
        home, known_as = _today(module, name)
        if (home, known_as) in self._allowed:
            return self._imported(module, name)
        package = home.partition(".")[0]
        if self._classes and package not in _NO_CLASSES:
            found = self._imported(module, name)
            if isinstance(found, type) and (found.__module__, found.__qualname__) == (home, known_as):
                return found  # a class at home there: `from subprocess import Popen` brings none in
        if package in ("numpy", "ml_dtypes"):
            found = self._imported(module, name)
            if isinstance(found, type) and issubclass(found, (np.generic, np.dtype)):
                return found
        raise RefusedPickle(f"it refers to {home}.{known_as}, which plain data does not need")

    def _imported(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError) as e:
            raise RefusedPickle(f"it refers to {module}.{name}, which cannot be imported here: {e}") from e

    def persistent_load(self, pid: str) -> Any:
        raise RefusedPickle("it refers to an object outside of the file")


def reading(what: str, load: Callable[[], Any], hint: str = "") -> Any:
    """``load()``, whose errors become a ValueError that names ``what`` is read."""
    try:
        return load()
    except RefusedPickle as e:
        raise ValueError(f"refused the pickle {what}: {e}{hint}") from e
    except DbrdistError:
        raise
    except Exception as e:  # damage shows as any of them
        raise ValueError(f"expected a pickle {what} that can be read: {type(e).__name__}: {e}") from e
