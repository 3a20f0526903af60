"""The type of the result where an array meets a scalar, as NumPy 1 chose it: the array's, unless the value needs more.

NumPy 2 gives ``float32 array * numpy.float64 scalar`` in float64, and refuses ``uint8 array + 300``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

# Kinds of types in NumPy 1's order; a scalar of a higher kind than the array's decides by its type.
_ORDER = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}
# By their names in Python's syntax tree.
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add, "Sub": operator.sub, "Mult": operator.mul, "Div": operator.truediv,
    "FloorDiv": operator.floordiv, "Mod": operator.mod, "Pow": operator.pow,
}  # fmt: skip
# Functions of NumPy that take an array and a scalar.
FUNCTIONS = ("add", "divide", "maximum", "minimum", "multiply", "power", "subtract", "true_divide", "where")


def operate(name: str, a: Any, b: Any) -> Any:
    """``a + b`` and the like; ``name`` is the operator's in Python's syntax tree."""
    if type(a) is np.ndarray:
        if a.ndim:
            b = fitted(b, a.dtype)
        elif type(b) is np.ndarray and b.ndim:
            a = fitted(a, b.dtype)
    elif type(b) is np.ndarray and b.ndim:
        a = fitted(a, b.dtype)
    return OPERATORS[name](a, b)


def of_two(function: Callable[..., Any], *args: Any, **kwds: Any) -> Any:
    """``function(a, b)`` for functions of NumPy, and for any other as it is."""
    is_typed = "dtype" in kwds or "signature" in kwds  # by the caller: no scalar decides
    if (type(function) is np.ufunc or function is np.where) and len(args) >= 2 and not is_typed:
        *others, a, b = args[:3] if function is np.where else args[:2]
        if type(a) is np.ndarray and a.ndim:
            b = fitted(b, a.dtype)
        elif type(b) is np.ndarray and b.ndim:
            a = fitted(a, b.dtype)
        args = (*others, a, b, *args[len(others) + 2 :])
    return function(*args, **kwds)


def fitted(x: Any, dtype: Any) -> Any:
    """A scalar in the type that NumPy 1 gave it beside an array of ``dtype``; anything else as it is."""
    is_number = type(x) is int
    if not is_number and not isinstance(x, np.generic) and not (type(x) is np.ndarray and not x.ndim):
        return x
    kind = "i" if is_number else x.dtype.kind
    order, least = _ORDER.get(dtype.kind), _ORDER.get(kind)
    if order is None or least is None or (least > order and order < 2) or (is_number and order != 1):
        return x
    if order == least == 1:
        limits = np.iinfo(dtype)
        if limits.min <= x <= limits.max:
            return dtype.type(x)
        if dtype.kind == "i" and x > 0:  # the next signed type
            return np.promote_types(dtype, np.min_scalar_type(-1 - int(x))).type(x)
    return np.promote_types(dtype, np.min_scalar_type(x)).type(x)
