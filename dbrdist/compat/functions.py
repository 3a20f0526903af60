"""Functions that Chainer checks more strictly, calls deprecated, or has alone, under Chainer's path."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from dbrdist import functions
from dbrdist.core.array.types import Array, Number
from dbrdist.core.files.serializer import saved_state
from dbrdist.core.tape.checks import ArgumentError
from dbrdist.core.tape.variable import Operand, Variable, as_array


def _of_one_type(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of two operands, which must be of one type, as in Chainer."""

    @functools.wraps(function)
    def checked(x1: Operand, x2: Operand | Number) -> Variable:
        first, second = (getattr(as_array(x), "dtype", None) for x in (x1, x2))
        if first != second and first is not None and second is not None:
            raise ArgumentError(f"{function.__name__}: x2: expected type {first} as that of x1, got {second}")
        return function(x1, x2)

    return checked


def _deprecated(function: Callable[..., Any], instead: str) -> Callable[..., Any]:
    """A function that warns, as in Chainer, that another one took its place."""

    @functools.wraps(function)
    def warned(*args: Array, **kwargs: Any) -> Variable:
        warnings.warn(f"{function.__name__} is deprecated. Use {instead} instead.", DeprecationWarning, stacklevel=2)
        return function(*args, **kwargs)

    return warned


def serialize(obj: Any) -> dict[str, Any]:
    """What ``save_npz`` would save of an object: arrays by path."""
    return saved_state(obj)


maximum = _of_one_type(functions.maximum)
minimum = _of_one_type(functions.minimum)
batch_matmul = _deprecated(functions.batch_matmul, "matmul")
fixed_batch_renormalization = _deprecated(functions.fixed_batch_renormalization, "fixed_batch_normalization")
