"""Chainer's names for iDeep, which is not there: NumPy's arrays go through oneDNN without it."""

from __future__ import annotations

from typing import NoReturn

from dbrdist.core.array.backend import NO_IDEEP, Array, Intel64Device
from dbrdist.core.names.missing_names import explained as _explained

__all__ = [
    "Intel64Device",
    "check_ideep_available",
    "inputs_all_ready",
    "is_ideep_available",
    "mdarray",
    "should_use_ideep",
]


class mdarray:
    """The type of iDeep's arrays: no object is one of them."""


def is_ideep_available() -> bool:
    """False."""
    return False


def check_ideep_available() -> NoReturn:
    """Raise RuntimeError, which names what to take instead."""
    raise RuntimeError(NO_IDEEP)


def should_use_ideep(level: str) -> bool:
    """False, whatever ``config.use_ideep`` says; ``level``: '==always' or '>=auto'."""
    if level not in ("==always", ">=auto"):
        raise ValueError(f"should_use_ideep: level: expected '==always' or '>=auto', got {level!r}")
    return False


def inputs_all_ready(inputs: tuple[Array, ...], supported_ndim: tuple[int, ...] = (2, 4)) -> bool:
    """False: no inputs go to iDeep."""
    return False


__getattr__ = _explained(__name__)
