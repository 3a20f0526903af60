"""Array computations that are not functions of the tape, such as conditions: an exporter can observe them too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbrdist.core.array.backend import Array, get_array_module
from dbrdist.core.array.config import config
from dbrdist.core.array.elementwise import elementwise

if TYPE_CHECKING:
    from collections.abc import Callable


def observed(formula: Callable[..., Array], *xs: Array | int) -> Array:
    """``formula(*xs)``, elementwise, reported to this thread's observer if it has one (``dbrdist.onnx``).

    ``formula`` is a ufunc; ``xs`` are arrays and numbers.
    """
    observer = config.__dict__["_observer"]
    y = elementwise(formula, *xs)
    if observer is not None:
        y = get_array_module(y).asarray(y)
        observer(formula.__name__, {}, xs, y)
    return y


def observed_index(name: str, x: Array, axis: int | None) -> Array:
    """``x.argmax(axis)`` or ``x.argmin(axis)`` of int32, reported to this thread's observer if it has one."""
    y = get_array_module(x).asarray(getattr(x, name)(axis=axis), "i")
    observer = config.__dict__["_observer"]
    if observer is not None:
        observer(name, {"axis": axis}, (x,), y)
    return y
