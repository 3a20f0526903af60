"""Saved arrays become those of an object: shapes, types, devices."""

from __future__ import annotations

from typing import Any

import numpy as np

from dbrdist.core.array.backend import device_of, on, to_device
from dbrdist.core.array.types import Array, DType
from dbrdist.core.usage.mistakes import refuse, warn
from dbrdist.errors import CheckpointError


def fill_entry(key: str, value: Any, saved: Array) -> Array:
    """``value``, an array of the object, with the saved numbers.

    Raises:
        CheckpointError: if shapes or types do not fit.
    """
    if value.shape != saved.shape:
        raise CheckpointError(
            f"{key}: expected shape {value.shape} as in the object, found {saved.shape} in the saved state"
        )
    if value.dtype != saved.dtype and not np.can_cast(saved.dtype, value.dtype, "same_kind"):
        raise CheckpointError(f"{key}: expected a type that fits {value.dtype}, found {saved.dtype} in the saved state")
    if value.dtype.itemsize < saved.dtype.itemsize:
        saved = _narrowed(key, saved, value.dtype)
    if isinstance(value, np.ndarray):
        value[...] = saved
    elif value.flags.c_contiguous:
        value.set(np.asarray(saved, value.dtype))
    else:
        with on(value):
            value[...] = to_device(np.asarray(saved, value.dtype), device_of(value))
    return value


def _narrowed(key: str, saved: Array, dtype: DType) -> Array:
    """Saved values in a narrower type, whose range they may exceed."""
    with np.errstate(over="ignore"):
        narrow = np.asarray(saved).astype(dtype)
    if dtype.kind in "iu":
        if (narrow != saved).any():
            refuse(CheckpointError(f"{key}: the saved state has {saved.dtype} numbers that {dtype} cannot hold"))
    elif saved.dtype.kind == "f" and (np.isinf(narrow) & np.isfinite(saved)).any():
        warn(f"{key}: the saved state has numbers that {dtype} cannot hold, which become infinite")
    return narrow
