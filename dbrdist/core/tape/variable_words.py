"""Messages of Variables: about comparisons, deprecated names and values."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NoReturn

from dbrdist.core.array.backend import Array
from dbrdist.core.array.chainer_mode import as_chainer

if TYPE_CHECKING:
    from types import NotImplementedType

    from dbrdist.core.tape.variable import Variable


class ComparisonError(NotImplementedError, TypeError):
    """Variables compared with each other: Chainer raises NotImplementedError for some signs, Python TypeError."""


def not_compared(sign: str) -> ComparisonError:
    """The error of a comparison."""
    return ComparisonError(f"Variables are not compared by {sign}; compare their arrays: x.array {sign} y.array")


def refuse_order(sign: str, other: object) -> NotImplementedType:
    """Raise for another Variable, an array or a number; anything else may know by itself how it compares."""
    if hasattr(other, "dtype") or isinstance(other, (int, float, list, tuple, type(None))):
        raise not_compared(sign)
    return NotImplemented


def not_assigned() -> AttributeError:
    """The error where ``requires_grad`` is assigned."""
    words = (
        "link.disable_update() freezes the parameters of a link, Variable(array, requires_grad=...) decides for others"
    )
    return AttributeError(f"requires_grad cannot be assigned: {words}", name="requires_grad")


def as_float(x: Variable) -> float:
    """The value of a Variable of one number, as of a loss."""
    if x.size != 1:
        raise TypeError(f"float: expected a Variable of one number, got shape {x.shape}; x.array has its numbers")
    return float(x.array.reshape(()))


def formatted(x: Variable, spec: str) -> str:
    """``format(x, spec)``: of a Variable of one number, such as a loss in ``f"{loss:.3f}"``, the number's."""
    if not spec:
        return str(x)
    if x.array is None or x.size != 1:
        got = "one without an array" if x.array is None else f"shape {x.shape}"
        raise TypeError(f"format {spec!r}: expected a Variable of one number, got {got}; format its array")
    return format(x.array.item() if x.dtype.kind in "biu" else as_float(x), spec)


class NoArray:
    """The attribute by which NumPy asks for an array: it would make one of Variables, element by element."""

    def __get__(self, obj: Any, owner: type) -> Any:
        if as_chainer[0] or obj is None:  # Chainer's have no such attribute
            raise AttributeError("__array__")
        return _refuse_array


def _refuse_array(*args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError(
        "NumPy takes arrays, got a Variable: write x.array, which has no graph, or take a function of "
        "dbrdist.functions, such as F.concat or F.stack"
    )


def warn_of_zerograd() -> None:
    """The warning of the method ``zerograd``, at the line that calls it."""
    words = "Variable.zerograd is deprecated. Use Variable.cleargrad instead."
    warnings.warn(words, DeprecationWarning, stacklevel=3)


def statistics(a: Array | None) -> str | None:
    """Mean and standard deviation, for ``debug_print``."""
    if a is None:
        return None
    return f"mean={float(a.mean()):.8f}, std={float(a.std()):.8f}" if a.size else "empty"
