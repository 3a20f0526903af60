"""Messages of Variables: about comparisons, deprecated names and values."""

from __future__ import annotations

import warnings

from dbrdist.core.array.backend import Array


class ComparisonError(NotImplementedError, TypeError):
    """Variables compared with each other: Chainer raises NotImplementedError for some signs, Python TypeError."""


def not_compared(sign: str) -> ComparisonError:
    """The error of a comparison."""
    return ComparisonError(f"Variables are not compared by {sign}; compare their arrays: x.array {sign} y.array")


def not_assigned() -> AttributeError:
    """The error where ``requires_grad`` is assigned."""
    words = (
        "link.disable_update() freezes the parameters of a link, Variable(array, requires_grad=...) decides for others"
    )
    return AttributeError(f"requires_grad cannot be assigned: {words}", name="requires_grad")


def warn_of_zerograd() -> None:
    """The warning of the method ``zerograd``, at the line that calls it."""
    words = "Variable.zerograd is deprecated. Use Variable.cleargrad instead."
    warnings.warn(words, DeprecationWarning, stacklevel=3)


def statistics(a: Array | None) -> str | None:
    """Mean and standard deviation, for ``debug_print``."""
    if a is None:
        return None
    return f"mean={float(a.mean()):.8f}, std={float(a.std()):.8f}" if a.size else "empty"
