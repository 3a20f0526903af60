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
from typing import TYPE_CHECKING

import numpy as np

from dbrdist.core.array.config import config
from dbrdist.core.tape.checks import InvalidType as InvalidType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import EllipsisType
    from typing import Any, TypeAlias

    from dbrdist.core.array.types import Array, DType, Number

    # What stands in expressions beside expressions: numbers, types and shapes, and what computes with them.
    Part: TypeAlias = "Expr | TypeInfo | DType | type | Callable[..., Part] | Value | Sequence[Part] | None"
    Value: TypeAlias = Number | str | slice | EllipsisType


class Expr:
    """A value that is computed when it is asked for, and that knows how it was written.

    ``priority`` is how tightly its text binds: within an operator of a higher one it stands in parentheses.
    """

    priority = 8

    def eval(self) -> Any:
        """The value."""
        raise NotImplementedError

    def __str__(self) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        return str(self)

    def __getattr__(self, name: str) -> GetAttr:
        if name.startswith("__"):
            raise AttributeError(name)
        return GetAttr(self, name)

    def __getitem__(self, key: Part) -> GetItem:
        return GetItem(self, key)

    def __iter__(self) -> Iterator[GetItem]:
        return iter([self[i] for i in range(len(self.eval()))])

    def __call__(self, *args: Part) -> Call:
        return Call(self, args)

    def __bool__(self) -> bool:
        raise RuntimeError(f"{self} has no truth value of its own; pass it to type_check.expect, or call .eval()")

    def __eq__(self, other: Any) -> Any:
        return BoolBinaryOperator(self, other, "==", "!=", operator.eq)

    def __ne__(self, other: Any) -> Any:
        return BoolBinaryOperator(self, other, "!=", "==", operator.ne)

    __hash__ = object.__hash__

    def __lt__(self, other: Part) -> BoolBinaryOperator:
        return BoolBinaryOperator(self, other, "<", ">=", operator.lt)

    def __le__(self, other: Part) -> BoolBinaryOperator:
        return BoolBinaryOperator(self, other, "<=", ">", operator.le)

    def __gt__(self, other: Part) -> BoolBinaryOperator:
        return BoolBinaryOperator(self, other, ">", "<=", operator.gt)

    def __ge__(self, other: Part) -> BoolBinaryOperator:
        return BoolBinaryOperator(self, other, ">=", "<", operator.ge)

    def __neg__(self) -> UnaryOperator:
        return UnaryOperator(6, self, "-", operator.neg)

    def __pos__(self) -> UnaryOperator:
        return UnaryOperator(6, self, "+", operator.pos)

    def __invert__(self) -> UnaryOperator:
        return UnaryOperator(6, self, "~", operator.invert)


# The binary operators of an expression: the name of the method, the sign, the priority.
_BINARY = (
    ("or", "|", 0),
    ("xor", "^", 1),
    ("and", "&", 2),
    ("lshift", "<<", 3),
    ("rshift", ">>", 3),
    ("add", "+", 4),
    ("sub", "-", 4),
    ("mul", "*", 5),
    ("truediv", "/", 5),
    ("floordiv", "//", 5),
    ("mod", "%", 5),
    ("pow", "**", 7),
)


def _give_operator(name: str, sign: str, priority: int) -> None:
    """Let expressions stand on either side of an operator."""
    compute = getattr(operator, f"__{name}__")

    def left(self: Expr, other: Part) -> BinaryOperator:
        return BinaryOperator(priority, self, other, sign, compute, sign == "**")

    def right(self: Expr, other: Part) -> BinaryOperator:
        return BinaryOperator(priority, other, self, sign, compute, sign == "**")

    setattr(Expr, f"__{name}__", left)
    setattr(Expr, f"__r{name}__", right)


for _row in _BINARY:
    _give_operator(*_row)


class Atom(Expr):
    """An expression that needs no parentheses."""


class Constant(Atom):
    """A value written as itself."""

    def __init__(self, value: Part) -> None:
        self.value = value

    def eval(self) -> Any:
        return self.value

    def __str__(self) -> str:
        return str(self.value)


class Variable(Atom):
    """A value with a name."""

    def __init__(self, value: Part, name: str) -> None:
        self.value = value
        self.name = name

    def eval(self) -> Any:
        return self.value

    def __str__(self) -> str:
        return self.name


def make_variable(value: Part, name: str) -> Variable:
    """A named value for expressions."""
    return Variable(value, name)


class GetAttr(Atom):
    """``obj.name``; ``name`` may be an expression."""

    def __init__(self, obj: Part, name: Part) -> None:
        self.obj = obj
        self.name = name

    def eval(self) -> Any:
        return getattr(eval(self.obj), eval(self.name))

    def __str__(self) -> str:
        name = self.name.value if isinstance(self.name, Constant) else self.name
        if isinstance(name, str):
            return f"{_within(self.obj, 8)}.{name}"
        return f"getattr({_written(self.obj)}, {_written(name)})"


class GetItem(Atom):
    """``obj[key]``."""

    def __init__(self, obj: Part, key: Part) -> None:
        self.obj = obj
        self.key = key

    def eval(self) -> Any:
        return eval(self.obj)[eval(self.key)]

    def __str__(self) -> str:
        keys = self.key if isinstance(self.key, tuple) else (self.key,)
        return f"{_within(self.obj, 8)}[{', '.join(map(_written_key, keys))}]"


def _written_key(key: Part) -> str:
    if not isinstance(key, slice):
        return "..." if key is Ellipsis else _written(key)
    start, stop, step = ("" if bound is None else _written(bound) for bound in (key.start, key.stop, key.step))
    return f"{start}:{stop}{step and ':' + step}"


class Call(Atom):
    """``obj(args)``."""

    def __init__(self, obj: Part, args: Sequence[Part]) -> None:
        self.obj = obj
        self.args = tuple(args)

    def eval(self) -> Any:
        return eval(self.obj)(*map(eval, self.args))

    def __str__(self) -> str:
        return f"{_within(self.obj, 8)}({', '.join(map(_written, self.args))})"


class UnaryOperator(Expr):
    """``exp term``, such as ``-term``, computed by ``func``."""

    def __init__(self, priority: int, term: Part, exp: str, func: Callable[..., Part]) -> None:
        self.priority = priority
        self.term = term
        self.exp = exp
        self.func = func

    def eval(self) -> Any:
        return self.func(eval(self.term))

    def __str__(self) -> str:
        return f"{self.exp}{_within(self.term, self.priority)}"


class BinaryOperator(Expr):
    """``lhs exp rhs``, computed by ``func``."""

    def __init__(
        self, priority: int, lhs: Part, rhs: Part, exp: str, func: Callable[..., Part],
        right_associative: bool = False,
    ) -> None:  # fmt: skip
        self.priority = priority
        self.lhs = lhs
        self.rhs = rhs
        self.exp = exp
        self.func = func
        self.right_associative = right_associative

    def eval(self) -> Any:
        return self.func(eval(self.lhs), eval(self.rhs))

    def __str__(self) -> str:
        right = self.right_associative  # of operators that bind alike, which comes first
        left_text = _within(self.lhs, self.priority + right)
        return f"{left_text} {self.exp} {_within(self.rhs, self.priority + (not right))}"


class Testable:
    """What :func:`expect` takes."""

    def expect(self) -> None:
        """Raise :class:`InvalidType` unless it holds."""
        raise NotImplementedError


class BoolBinaryOperator(BinaryOperator, Testable):
    """A comparison ``lhs exp rhs``; ``inv`` is the sign of the opposite."""

    def __init__(self, lhs: Part, rhs: Part, exp: str, inv: str, func: Callable[..., Part]) -> None:
        super().__init__(-1, lhs, rhs, exp, func)
        self.inv = inv

    def expect(self) -> None:
        left, right = eval(self.lhs), eval(self.rhs)
        if not self.func(left, right):
            raise InvalidType(str(self), f"{left} {self.inv} {right}")


def _within(part: Part, priority: int) -> str:
    """The text of a part, in parentheses where it binds more loosely than what stands around it."""
    return f"({part})" if isinstance(part, Expr) and part.priority < priority else _written(part)


def _written(part: Part) -> str:
    """The text of an expression, of a list or tuple of them, or of a value."""
    if isinstance(part, Expr):
        return str(part)
    if type(part) is list:
        return f"[{', '.join(map(_written, part))}]"
    if type(part) is tuple:
        return f"({', '.join(map(_written, part))}{',' if len(part) == 1 else ''})"
    return repr(part) if isinstance(part, str) else str(part)


def eval(exp: Any) -> Any:
    """The value of an expression, or of those in a list, tuple or slice; anything else is its own value."""
    if isinstance(exp, Expr):
        return exp.eval()
    if type(exp) in (list, tuple):
        return type(exp)(map(eval, exp))
    if type(exp) is slice:
        return slice(eval(exp.start), eval(exp.stop), eval(exp.step))
    return exp


def expect(*bool_exprs: Testable | bool) -> None:
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


def prod(xs: Expr | Sequence[int]) -> Expr:
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

    def __init__(self, shape: tuple[int, ...], dtype: DType) -> None:
        self.shape = shape
        self.dtype = dtype
        self.ndim = len(shape)
        self.size = int(np.prod(shape, dtype=np.int64))

    def __repr__(self) -> str:
        return f"TypeInfo({self.shape}, {self.dtype})"


class TypeInfoTuple(tuple[Variable, ...]):
    """Shapes and types of all inputs, as expressions."""

    name = "in_types"

    def size(self) -> Expr:
        """How many inputs there are."""
        return Variable(len(self), f"{self.name}.size")

    def __str__(self) -> str:
        return self.name


class LightTypeInfoTuple(tuple[TypeInfo, ...]):
    """The same as plain values."""

    def size(self) -> int:
        """How many inputs there are."""
        return len(self)


def _infos(data: Iterable[Array]) -> list[TypeInfo]:
    return [TypeInfo(x.shape, x.dtype) for x in data]


def get_types(data: Iterable[Array | None], name: str, accept_none: bool = False) -> TypeInfoTuple:
    """The types of arrays or Variables as expressions, called ``name[0]``, ``name[1]`` and so on in messages."""
    given = list(data)
    if not accept_none and any(x is None for x in given):
        raise ValueError(f"type_check.get_types: {name} has None in place of an array")
    infos = [Variable(None if x is None else TypeInfo(x.shape, x.dtype), f"{name}[{i}]") for i, x in enumerate(given)]
    types = TypeInfoTuple(infos)
    types.name = name
    return types


def get_light_types(data: Iterable[Array]) -> LightTypeInfoTuple:
    """The types of arrays or Variables as plain values."""
    return LightTypeInfoTuple(_infos(data))


def same_types(*arrays: Array) -> bool:
    """Whether all are arrays of one kind: all NumPy's, or all CuPy's."""
    kinds = {type(a).__module__.partition(".")[0] for a in arrays}
    return len(kinds) <= 1


def argname(in_types: TypeInfoTuple, names: Sequence[str]) -> None:
    """Give the inputs names, which messages then use; also check that there are as many inputs as names."""
    if isinstance(in_types, TypeInfoTuple):
        expect(in_types.size() == len(names))
        for info, name in zip(in_types, names):
            info.name = name
    else:
        expect(len(in_types) == len(names))


_argname = argname  # as Chainer's own functions spell it
