"""Chainer's type checks for functions that users write: expressions over types and shapes that explain themselves.

    def check_type_forward(self, in_types):
        type_check.expect(in_types.size() == 2)
        x_type, w_type = in_types
        type_check.expect(x_type.dtype.kind == "f", x_type.shape[1] == w_type.shape[0])

An expectation that does not hold raises :class:`InvalidType` with the expression as it was written and its value.
``config.type_check`` switches the checks off.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from dbrdist.core.array.config import config
from dbrdist.core.tape.checks import InvalidType as InvalidType


class Expr:
    """A value that is computed when it is asked for, and that knows how it was written."""

    _binding = 9  # how tightly its text binds: parts of a looser operator need no parentheses

    def eval(self) -> Any:
        """The value."""
        raise NotImplementedError

    def __str__(self) -> str:
        raise NotImplementedError

    def __getattr__(self, name: str) -> GetAttr:
        if name.startswith("__"):
            raise AttributeError(name)
        return GetAttr(self, name)

    def __getitem__(self, key: Any) -> GetItem:
        return GetItem(self, key)

    def __iter__(self) -> Any:
        return iter([self[i] for i in range(len(self.eval()))])

    def __call__(self, *args: Any) -> Call:
        return Call(self, args)

    def __bool__(self) -> bool:
        raise RuntimeError(f"{self} has no truth value of its own; pass it to type_check.expect, or call .eval()")

    def __eq__(self, other: object) -> Any:
        return BoolBinaryOperator("==", self, other)

    def __ne__(self, other: object) -> Any:
        return BoolBinaryOperator("!=", self, other)

    __hash__ = object.__hash__

    def __lt__(self, other: Any) -> BoolBinaryOperator:
        return BoolBinaryOperator("<", self, other)

    def __le__(self, other: Any) -> BoolBinaryOperator:
        return BoolBinaryOperator("<=", self, other)

    def __gt__(self, other: Any) -> BoolBinaryOperator:
        return BoolBinaryOperator(">", self, other)

    def __ge__(self, other: Any) -> BoolBinaryOperator:
        return BoolBinaryOperator(">=", self, other)

    def __neg__(self) -> UnaryOperator:
        return UnaryOperator("-", self)

    def __add__(self, other: Any) -> BinaryOperator:
        return BinaryOperator("+", self, other)

    def __radd__(self, other: Any) -> BinaryOperator:
        return BinaryOperator("+", other, self)

    def __sub__(self, other: Any) -> BinaryOperator:
        return BinaryOperator("-", self, other)

    def __rsub__(self, other: Any) -> BinaryOperator:
        return BinaryOperator("-", other, self)

    def __mul__(self, other: Any) -> BinaryOperator:
        return BinaryOperator("*", self, other)

    def __rmul__(self, other: Any) -> BinaryOperator:
        return BinaryOperator("*", other, self)

    def __truediv__(self, other: Any) -> BinaryOperator:
        return BinaryOperator("/", self, other)

    def __rtruediv__(self, other: Any) -> BinaryOperator:
        return BinaryOperator("/", other, self)

    def __floordiv__(self, other: Any) -> BinaryOperator:
        return BinaryOperator("//", self, other)

    def __rfloordiv__(self, other: Any) -> BinaryOperator:
        return BinaryOperator("//", other, self)

    def __mod__(self, other: Any) -> BinaryOperator:
        return BinaryOperator("%", self, other)

    def __rmod__(self, other: Any) -> BinaryOperator:
        return BinaryOperator("%", other, self)

    def __pow__(self, other: Any) -> BinaryOperator:
        return BinaryOperator("**", self, other)


class Atom(Expr):
    """An expression without parts."""


class Constant(Atom):
    """A value written as itself."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def eval(self) -> Any:
        return self.value

    def __str__(self) -> str:
        return str(self.value)


class Variable(Atom):
    """A value with a name."""

    def __init__(self, value: Any, name: str) -> None:
        self.value = value
        self.name = name

    def eval(self) -> Any:
        return self.value

    def __str__(self) -> str:
        return self.name


def make_variable(value: Any, name: str) -> Variable:
    """A named value for expressions."""
    return Variable(value, name)


class GetAttr(Expr):
    """``obj.name``."""

    def __init__(self, obj: Expr, name: str) -> None:
        self.obj = obj
        self.name = name

    def eval(self) -> Any:
        return getattr(self.obj.eval(), self.name)

    def __str__(self) -> str:
        return f"{_within(self.obj, 9)}.{self.name}"


class GetItem(Expr):
    """``obj[key]``."""

    def __init__(self, obj: Expr, key: Any) -> None:
        self.obj = obj
        self.key = key

    def eval(self) -> Any:
        return self.obj.eval()[eval(self.key)]

    def __str__(self) -> str:
        keys = self.key if isinstance(self.key, tuple) else (self.key,)
        return f"{_within(self.obj, 9)}[{', '.join(map(_written_key, keys))}]"


def _written_key(key: Any) -> str:
    if not isinstance(key, slice):
        return "..." if key is Ellipsis else str(key)
    step = "" if key.step is None else f":{key.step}"
    return f"{'' if key.start is None else key.start}:{'' if key.stop is None else key.stop}{step}"


class Call(Expr):
    """``obj(args)``."""

    def __init__(self, obj: Expr, args: Sequence[Any]) -> None:
        self.obj = obj
        self.args = tuple(args)

    def eval(self) -> Any:
        return self.obj.eval()(*map(eval, self.args))

    def __str__(self) -> str:
        return f"{_within(self.obj, 9)}({', '.join(map(str, self.args))})"


_OPERATORS: dict[str, tuple[int, Callable[[Any, Any], Any]]] = {
    "==": (4, operator.eq),
    "!=": (4, operator.ne),
    "<": (4, operator.lt),
    "<=": (4, operator.le),
    ">": (4, operator.gt),
    ">=": (4, operator.ge),
    "+": (5, operator.add),
    "-": (5, operator.sub),
    "*": (6, operator.mul),
    "/": (6, operator.truediv),
    "//": (6, operator.floordiv),
    "%": (6, operator.mod),
    "**": (8, operator.pow),
}


class UnaryOperator(Expr):
    """``-term``."""

    _binding = 7

    def __init__(self, sign: str, term: Any) -> None:
        self.sign = sign
        self.term = term

    def eval(self) -> Any:
        return -eval(self.term)

    def __str__(self) -> str:
        return f"{self.sign}{_within(self.term, self._binding)}"


class BinaryOperator(Expr):
    """``lhs sign rhs``."""

    def __init__(self, sign: str, lhs: Any, rhs: Any) -> None:
        self.sign = sign
        self.lhs = lhs
        self.rhs = rhs
        self._binding, self._compute = _OPERATORS[sign]

    def eval(self) -> Any:
        return self._compute(eval(self.lhs), eval(self.rhs))

    def __str__(self) -> str:
        # Of equally strong operators the left one comes first.
        return f"{_within(self.lhs, self._binding)} {self.sign} {_within(self.rhs, self._binding + 1)}"


class Testable:
    """What :func:`expect` takes."""

    def expect(self) -> None:
        """Raise :class:`InvalidType` unless it holds."""
        raise NotImplementedError


class BoolBinaryOperator(BinaryOperator, Testable):
    """A comparison."""

    def expect(self) -> None:
        left, right = eval(self.lhs), eval(self.rhs)
        if not self._compute(left, right):
            opposite = {"==": "!=", "!=": "==", "<": ">=", "<=": ">", ">": "<=", ">=": "<"}[self.sign]
            raise InvalidType(str(self), f"{left} {opposite} {right}")


def _within(part: Any, binding: int) -> str:
    """The text of a part, in parentheses where it binds more loosely than what stands around it."""
    return f"({part})" if isinstance(part, Expr) and part._binding < binding else str(part)


def eval(exp: Any) -> Any:
    """The value of an expression; anything else is its own value."""
    return exp.eval() if isinstance(exp, Expr) else exp


def expect(*bool_exprs: Any) -> None:
    """Raise :class:`InvalidType` unless each comparison holds."""
    if not config.type_check:
        return
    for expr in bool_exprs:
        if isinstance(expr, Testable):
            expr.expect()
        elif not isinstance(expr, (bool, np.bool_)):
            raise TypeError(f"type_check.expect: expected comparisons, got {type(expr).__name__}")
        elif not expr:
            raise InvalidType("a comparison that holds", "False")


def prod(xs: Any) -> Expr:
    """The product of a shape."""
    return Call(Variable(lambda shape: int(np.prod(shape, dtype=np.int64)), "prod"), (xs,))


def expect_broadcast_shapes(message: str, *shapes: Sequence[int]) -> None:
    """Raise unless the shapes go together by the rules of broadcasting."""
    values = [tuple(eval(shape)) for shape in shapes]
    try:
        np.broadcast_shapes(*values)
    except ValueError:
        written = ", ".join(map(str, shapes))
        raise InvalidType(f"each shape fits the others: {written}", ", ".join(map(str, values)), message) from None


class TypeInfo:
    """Shape and type of one input."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape = shape
        self.dtype = dtype
        self.ndim = len(shape)
        self.size = int(np.prod(shape, dtype=np.int64))

    def __repr__(self) -> str:
        return f"TypeInfo({self.shape}, {self.dtype})"


class TypeInfoTuple(tuple[Any, ...]):
    """Shapes and types of all inputs, as expressions."""

    name = "in_types"

    def size(self) -> Expr:
        """How many inputs there are."""
        return Variable(len(self), f"{self.name}.size")

    def __str__(self) -> str:
        return self.name


class LightTypeInfoTuple(tuple[Any, ...]):
    """The same as plain values."""

    def size(self) -> int:
        """How many inputs there are."""
        return len(self)


def _infos(data: Iterable[Any]) -> list[TypeInfo]:
    return [TypeInfo(x.shape, x.dtype) for x in data]


def get_types(data: Iterable[Any], name: str, accept_none: bool = False) -> TypeInfoTuple:
    """The types of arrays or Variables as expressions, called ``name[0]``, ``name[1]`` and so on in messages."""
    given = list(data)
    if not accept_none and any(x is None for x in given):
        raise ValueError(f"type_check.get_types: {name} has None in place of an array")
    infos = [Variable(None if x is None else TypeInfo(x.shape, x.dtype), f"{name}[{i}]") for i, x in enumerate(given)]
    types = TypeInfoTuple(infos)
    types.name = name
    return types


def get_light_types(data: Iterable[Any]) -> LightTypeInfoTuple:
    """The types of arrays or Variables as plain values."""
    return LightTypeInfoTuple(_infos(data))


def same_types(*arrays: Any) -> bool:
    """Whether all are arrays of one kind: all NumPy's, or all CuPy's."""
    kinds = {type(a).__module__.partition(".")[0] for a in arrays}
    return len(kinds) <= 1


def argname(in_types: Any, names: Sequence[str]) -> None:
    """Give the inputs names, which messages then use; also check that there are as many inputs as names."""
    if isinstance(in_types, TypeInfoTuple):
        expect(in_types.size() == len(names))
        for info, name in zip(in_types, names):
            info.name = name
    else:
        expect(len(in_types) == len(names))


_argname = argname  # as Chainer's own functions spell it
