"""The sentences of argument errors, so that all functions sound alike.

A check compares first and builds its message only on failure::

    if x.shape[1] != W.shape[1]:
        raise expected("linear", "x", f"shape (N, {W.shape[1]}) to match W", x)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dbrdist.core.array.types import DType, Number
    from dbrdist.core.tape.variable import Operand


class InvalidType(Exception):
    """Types or shapes of operands do not meet an expectation: Chainer's name for it, ``type_check.InvalidType``."""

    def __init__(self, expect: str, actual: str | None = None, msg: str | None = None) -> None:
        """From what was expected and what came, after ``msg``; or from a plain message."""
        self.expect = expect
        self.actual = actual
        self.msg = msg
        super().__init__(expect, actual, msg)

    def __str__(self) -> str:
        if self.actual is None:
            return self.expect
        text = f"\nExpect: {self.expect}\nActual: {self.actual}"
        return text if self.msg is None else f"{self.msg}\n{text}"

    def within_function(self, label: str) -> None:
        """Say in which function a check of the user's failed, as Chainer does."""
        if self.msg is None and self.actual is not None:
            self.msg = f"Invalid operation is performed in: {label} (Forward)"
            self.args = (self.expect, self.actual, self.msg)


class ArgumentError(InvalidType, ValueError):
    """An argument that does not fit. Links on the way up add their names in front.

    Whoever catches Chainer's ``type_check.InvalidType`` or ValueError catches it. It may be made from its parts or from
    a plain message, and can be copied and pickled.
    """

    def __init__(
        self, function: str, argument: str | None = None, what: str = "", got: str = "", hint: str = ""
    ) -> None:
        Exception.__init__(self, function, argument, what, got, hint)
        self.function = function
        self.argument = argument
        self.expect = self.what = what
        self.actual = self.got = got
        self.hint = hint
        self.links: list[str] = []  # outermost first

    def __str__(self) -> str:
        where = f"link {'/'.join(self.links)}: " if self.links else ""
        if self.argument is None:
            return f"{where}{self.function}"
        hint = f"; {self.hint}" if self.hint else ""
        return f"{where}{self.function}: {self.argument}: expected {self.what}, got {self.got}{hint}"

    def within(self, link: object) -> None:
        """Say that the function was called by ``link``."""
        kind = type(link).__name__
        name = getattr(link, "name", None)
        self.links.insert(0, (name or kind) if self.links or not name else f"{name} ({kind})")


class OperandTypeError(ArgumentError, TypeError):
    """An operand of a kind of type that the function does not take."""


class OperandShapeError(ArgumentError, AssertionError):
    """A shape or an architecture that does not fit, where Chainer asserts that it does."""


class UnknownOptionError(ArgumentError, NotImplementedError):
    """A choice that the function does not offer, where Chainer says that it is not implemented."""


class Given(NamedTuple):
    """What a message shows of an array; hashable, so that checks can be remembered."""

    shape: tuple[int, ...]
    dtype: DType


# What a kind takes, by dtype.kind; "V" is bfloat16. The last entry is what the error says.
_KINDS = {
    "float": ("fcV", "a floating type", "cast it first, for example with x.astype(numpy.float32)"),
    "integer": ("iu", "integers", "cast it first"),
    "number": ("fcViub", "numbers", ""),
    "any": ("", "an array or Variable", ""),
}


class Operands:
    """What a function takes: its name, its operands' names, and the kind of type of each.

    Kinds: ``float`` (16 bits or more, bfloat16 included), ``integer``, ``number`` (both, and bool) and ``any``.
    """

    __slots__ = ("function", "kinds", "names")

    def __init__(self, function: str, /, **kinds: str) -> None:
        self.function = function
        self.names = tuple(kinds)
        self.kinds = tuple(kinds.values())

    def check(self, i: int, x: Operand | Number) -> None:
        """Raise unless ``x``, a bare array or number, is of the kind of operand ``i``; more operands than names are
        of the last kind."""
        kind = self.kinds[min(i, len(self.kinds) - 1)]
        letters, what, hint = _KINDS[kind]
        dtype = getattr(x, "dtype", None)
        if dtype is None:
            if kind == "number" and isinstance(x, (int, float)):
                return
            raise self._refused(i, "an array or Variable", f"{type(x).__name__} {x!r:.40}", "convert it first")
        if letters and (dtype.kind not in letters or (dtype.kind == "V" and dtype.name != "bfloat16")):
            raise self._refused(i, what, describe(x), hint)

    def _refused(self, i: int, what: str, got: str, hint: str) -> OperandTypeError:
        name = self.names[i] if i < len(self.names) else f"operand {i}"
        return OperandTypeError(self.function, name, what, got, hint)


def floating(function: str, **xs: Operand | Number) -> None:
    """Raise unless all operands are arrays or Variables of a floating type: for functions made of others."""
    operands = Operands(function, **dict.fromkeys(xs, "float"))
    for i, x in enumerate(xs.values()):
        operands.check(i, x)


def describe(x: Any) -> str:
    """An array or Variable as its shape and type, anything else as it prints."""
    shape = getattr(x, "shape", None)
    if shape is None:
        return repr(x)
    return f"shape {tuple(shape)} and dtype {x.dtype}"


def expected(function: str, argument: str, what: str, got: object, hint: str = "") -> ArgumentError:
    """The error ``function: argument: expected what, got got; hint``, to be raised by the caller.

    ``got`` is text, or the value itself, of which an array is described by shape and type.
    """
    return ArgumentError(function, argument, what, got if isinstance(got, str) else describe(got), hint)


def wrong_shape(function: str, argument: str, what: str, got: object) -> OperandShapeError:
    """As :func:`expected`, for a shape about which Chainer raises AssertionError."""
    return OperandShapeError(function, argument, what, got if isinstance(got, str) else describe(got), "")


def wrong_type(function: str, argument: str, what: str, got: object) -> OperandTypeError:
    """As :func:`expected`, for an argument of another type: a TypeError, too."""
    return OperandTypeError(function, argument, what, f"{type(got).__name__} {got!r:.40}", "")


def one_of(function: str, argument: str, choices: tuple[str | int, ...], got: object) -> None:
    """Raise unless ``got`` is among ``choices``."""
    if got not in choices:
        raise expected(function, argument, " or ".join(repr(c) for c in choices), repr(got))
