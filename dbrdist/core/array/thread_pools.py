"""The threads of the libraries that compute: OpenMP (with which oneDNN runs), OpenBLAS, MKL, BLIS.

Each library keeps a pool of threads, by default as many as the process has cores. That is right for one process and
wrong for several on one host: two ranks with two threads each on two cores trained 22 times slower than with one.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

_ALL = "OMP_NUM_THREADS"  # every one of these libraries reads it
_SPIN, _WAIT = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
# How often an idle thread of libgomp looks for work before it sleeps. By default it looks for about a millisecond, and
# takes the core from whoever has work. Measured on two cores, two threads, seconds of 3 epochs of the digits: 0.3 with
# the default or with this, 0.5 with 0; beside two busy processes 0.9, 0.7 and 0.8.
_NUM_SPINS = "10000"


class _Kind(NamedTuple):
    """How to ask one of the libraries: the name of its file, its own variables, getters and setters."""

    name: str
    file: str
    variables: tuple[str, ...]
    getters: tuple[str, ...]
    setters: tuple[str, ...]


def _decorated(name: str) -> tuple[str, ...]:
    """OpenBLAS's functions may have a prefix and a suffix; NumPy's wheel has both."""
    return tuple(f"{prefix}{name}{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "", "_64"))


_KINDS = (
    _Kind(
        "OpenBLAS",
        r"openblas",
        ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS"),
        _decorated("openblas_get_num_threads"),
        _decorated("openblas_set_num_threads"),
    ),
    _Kind("MKL", r"libmkl_rt", ("MKL_NUM_THREADS",), ("MKL_Get_Max_Threads",), ("MKL_Set_Num_Threads",)),
    _Kind("BLIS", r"libblis", ("BLIS_NUM_THREADS",), ("bli_thread_get_num_threads",), ("bli_thread_set_num_threads",)),
    _Kind("OpenMP", r"lib(gomp|omp|iomp5)\b", (), ("omp_get_max_threads",), ("omp_set_num_threads",)),
)


class Pool(NamedTuple):
    """The pool of a library that is loaded."""

    name: str
    variables: tuple[str, ...]
    size: Callable[[], int]
    resize: Callable[[int], object]


_ours: dict[str, str] = {}  # variables that this module has set: they are not the user's
_share: int | None = None


def num_cores() -> int:
    """The cores for which this process should make threads or processes: its share once that was set."""
    return _share if _share is not None else len(affinity())


def affinity() -> frozenset[int]:
    """The numbers of the cores on which this process may run."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except AttributeError:  # outside of Linux
        return frozenset(range(os.cpu_count() or 1))


def is_set_by_user(*variables: str) -> bool:
    """True if the environment has one of these variables, and not from here."""
    return any(v in os.environ and os.environ[v] != _ours.get(v) for v in variables)


def limit(num_threads: int) -> bool:
    """Let each library use this many threads at most; False where the user has set OMP_NUM_THREADS, which wins.

    A library whose own variable is set (OPENBLAS_NUM_THREADS, MKL_NUM_THREADS) is left alone, and so is one that uses
    fewer already. Libraries that are loaded later, and processes that are started later, find the environment set. An
    OpenMP that is loaded already takes the number for the calling thread alone: that is how OpenMP counts.
    """
    global _share
    _share = num_threads
    if is_set_by_user(_ALL):
        return False
    _set(_ALL, num_threads)
    for pool in pools():
        if not is_set_by_user(*pool.variables) and pool.size() > num_threads:
            pool.resize(num_threads)
    return True


def use_one() -> None:
    """Let each library use one thread, whatever the environment says: sums then have one order everywhere.

    Two threads add other partial sums than one does. An OpenMP that is loaded already takes the number for the calling
    thread alone.
    """
    for variable in (_ALL, *(v for kind in _KINDS for v in kind.variables)):
        if variable == _ALL or variable in os.environ:
            _set(variable, 1)
    for pool in pools():
        if pool.size() != 1:
            pool.resize(1)


def wait_briefly() -> None:
    """Let idle OpenMP threads sleep after some 30 microseconds; works until OpenMP is loaded, at oneDNN's first use."""
    if not is_set_by_user(_SPIN, _WAIT):
        _set(_SPIN, _NUM_SPINS)


def _set(variable: str, value: int | str) -> None:
    os.environ[variable] = _ours[variable] = str(value)


def pools() -> Iterator[Pool]:
    """The pools of all libraries that this process has loaded. None outside of Linux."""
    try:
        with open("/proc/self/maps") as maps:
            paths = sorted({line.split(maxsplit=5)[5].rstrip("\n") for line in maps if ".so" in line})
    except OSError:
        return
    for path in paths:
        for kind in _KINDS:
            if re.search(kind.file, os.path.basename(path)) and (pool := _opened(kind, path)):
                yield pool


def _opened(kind: _Kind, path: str) -> Pool | None:
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:  # its file was replaced meanwhile
        return None
    getters = [getattr(library, name) for name in kind.getters if hasattr(library, name)]
    setters = [getattr(library, name) for name in kind.setters if hasattr(library, name)]
    return Pool(kind.name, kind.variables, getters[0], setters[0]) if getters and setters else None
