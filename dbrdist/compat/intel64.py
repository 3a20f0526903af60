"""``chainer.backends.intel64`` on a machine without iDeep: everything can be asked for, and nothing is available."""

from __future__ import annotations

from typing import Any

from dbrdist.compat.absent import error

ideep = None  # the package, where Chainer finds it


class mdarray:
    """The class of iDeep's arrays, for ``isinstance``; no object is one."""


class Intel64Device:
    """The class of iDeep's device, for ``isinstance``; it cannot be instantiated."""

    def __init__(self) -> None:
        check_ideep_available()


def is_ideep_available() -> bool:
    """False."""
    return False


def check_ideep_available() -> None:
    """Raise RuntimeError: iDeep is not available."""
    raise RuntimeError(error("chainer.backends.intel64", "ideep4py").args[0])


def should_use_ideep(level: str) -> bool:
    """False, for each of Chainer's levels: ``'==always'`` and ``'>=auto'``."""
    if level not in ("==always", ">=auto"):
        raise ValueError(f"should_use_ideep: level: expected '==always' or '>=auto', got {level!r}")
    return False


def inputs_all_ready(inputs: Any, supported_ndim: tuple[int, ...] = (2, 4)) -> bool:
    """False: no input is an array of iDeep."""
    return False
