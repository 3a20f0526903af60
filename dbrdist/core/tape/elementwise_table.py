"""Elementwise operations as data: a row names the formula and its partial derivatives, and the rest follows.

From one row come the function node with its derivatives of every order, forward mode, the primitive (arrays in, array
out; any Variable in, Variable out), the public function with its docstring, and a test of every property that
``tests/functions`` knows. Such a row is::

    sin = function("sin", np.sin, lambda x: cos.primitive(x), "Sine, elementwise.")

A partial derivative is a function of what it needs, by name: the operands, the output ``y``, numbers such as ``slope``.
With ``gy`` among its arguments it gives the whole product of gy and the derivative; the numbers 1 and -1 stand for
themselves. It is written with primitives, so that it works on arrays and on Variables alike. What a partial derivative
names is what a call retains.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from dbrdist.core.array.backend import Array, is_floating
from dbrdist.core.array.chainer_mode import as_chainer, labels
from dbrdist.core.array.elementwise import KERNEL_ELEMENTS, at_once, elementwise, fused, kernels
from dbrdist.core.array.sums import product_sum
from dbrdist.core.array.types import Number
from dbrdist.core.tape.checks import ArgumentError, Operands
from dbrdist.core.tape.elementwise_examples import EXAMPLES
from dbrdist.core.tape.function_node import FunctionNode
from dbrdist.core.tape.named_errors import naming_errors
from dbrdist.core.tape.node import Value
from dbrdist.core.tape.variable import Operand, Variable, as_variable

if TYPE_CHECKING:
    from collections.abc import Callable

    from dbrdist.core.array.types import DType

Formula: TypeAlias = "Callable[..., Array]"  # of arrays and numbers
Derivative: TypeAlias = "Callable[..., Operand] | float | None"  # None and 0: there is none
Domain: TypeAlias = tuple[float, float] | tuple[tuple[float, float], ...]

ROWS: dict[str, Row] = {}  # all rows by name, for tests and docs
PUBLIC: dict[str, RowFunction] = {}  # the public functions of rows by name

# Bound by the package (__init__.py): the operators, with which every derivative is put together. Some are rows here.
operators: Any = None


class RowPrimitive(Protocol):
    """What rules call: arrays in, array out; any Variable in, Variable out."""

    row: Row

    def __call__(self, *args: Operand | Number) -> Any: ...


class RowFunction(Protocol):
    """The public function of a row."""

    row: Row
    primitive: RowPrimitive

    def __call__(self, *args: Operand | Number, **named: Operand | Number) -> Variable: ...


class Partial:
    """The derivative by one operand: a number, or a rule with the places of its arguments among what was retained."""

    __slots__ = ("names", "rule", "takes_gradient")

    def __init__(self, rule: Derivative) -> None:
        self.rule: Any = rule
        self.names: tuple[str, ...] = ()
        self.takes_gradient = False
        if callable(rule):
            code = rule.__code__
            names = code.co_varnames[: code.co_argcount]
            self.takes_gradient = names[:1] == ("gy",)
            self.names = names[1:] if self.takes_gradient else names

    def pull(self, gy: Operand, values: dict[str, Any]) -> Any:
        """gy times the derivative."""
        rule = self.rule
        if rule is None:
            return operators.mul(gy, 0.0)
        if not self.names and not self.takes_gradient:
            return gy if rule == 1 else operators.neg(gy) if rule == -1 else operators.mul(gy, rule)
        arguments = [values[name] for name in self.names]
        return rule(gy, *arguments) if self.takes_gradient else operators.mul(gy, rule(*arguments))


class Row:
    """One elementwise operation.

    Args:
        name: that of the public function.
        formula: a ufunc, or a function of arrays and the numbers in ``numbers``, in this order.
        partials: the derivative by each operand.
        doc: the docstring of the public function.
        args: the names of the operands.
        kind: of type that operands have: ``float``, or ``number`` where integers are meant as well.
        domain: the values between which tests draw operands: a pair, or one for each operand.
        numbers: the further arguments of the function, with their defaults.
        has_steps: whether a derivative takes several passes over memory, so that large arrays are worked through block
            by block; None: where the formula does.
        is_one_pass: whether the formula is one pass over memory, though no ufunc: of whole arrays it takes least time.
        of_difference: whether it is a function of the first operand minus the second: then the derivative by the second
            is minus that by the first, and is not given.
        has_loop_for_each: whether a kernel may compute the gradients of all operands in one pass.
    """

    def __init__(
        self, name: str, formula: Formula, partials: tuple[Derivative, ...], doc: str, args: tuple[str, ...],
        kind: str, domain: Domain, numbers: dict[str, Any], has_steps: bool | None, is_one_pass: bool,
        of_difference: bool, has_loop_for_each: bool,
    ) -> None:  # fmt: skip
        self.name = name
        self.formula = formula
        self.is_one_pass = is_one_pass
        self.of_difference = of_difference
        self.has_loop_for_each = has_loop_for_each
        self.partials = tuple(Partial(p) for p in (*partials, *partials[:of_difference]))
        self.doc = doc
        self.args = args
        self.domain = domain
        self.numbers = numbers
        self.operands = Operands(name, **dict.fromkeys(args, kind))
        needed = {n for p in self.partials for n in p.names}
        unknown = needed - {*args, *numbers, "y"}
        if unknown or len(self.partials) != len(args):
            raise TypeError(
                f"row {name!r}: expected a derivative by each of {args}, got names {sorted(unknown)} beside"
            )
        self.keep_in = tuple(i for i, a in enumerate(args) if a in needed)
        self.keep_out = (0,) if "y" in needed - set(args) else ()
        self.kept_names = tuple(a for a in args if a in needed) + ("y",) * len(self.keep_out)
        self.runs_at_once = isinstance(formula, np.ufunc) and not numbers
        self.is_product = formula is np.multiply
        self.has_steps = not self.runs_at_once if has_steps is None else has_steps
        gives_new = all(p.rule != 1 for p in self.partials)  # else gy itself is handed on
        contents = {"row": self, "operands": self.operands, "gives_new": gives_new, "hands_on": True, "__doc__": doc}
        self.node = type(name, (Elementwise,), contents)

    def compute(self, xs: tuple[Array, ...], values: tuple[float, ...]) -> Array:
        """The formula on arrays."""
        if self.name in kernels:
            y = from_kernel(self.name, self.args, xs, values)
            if y is not None:
                return y
        if self.runs_at_once:
            return elementwise(self.formula, *xs)
        formula = self.formula
        if self.is_one_pass and xs[0].dtype.char in "fd":
            return elementwise(lambda *vs: formula(*vs, *values), *xs)
        return fused(lambda *vs: formula(*vs, *values), *xs) if values else fused(formula, *xs)

    def primitive(self, *args: Any) -> Any:
        """Arrays in, array out; any Variable in, Variable out."""
        num = len(self.args)
        xs, values = args[:num], args[num:]
        for x in xs:
            if isinstance(x, Variable):
                return self.applied(xs, values)
        return self.compute(matched(xs) if num > 1 else xs, values)

    def applied(self, xs: tuple[Operand | Number, ...], values: tuple[float, ...] = ()) -> Variable:
        """The function of Variables or arrays, as a Variable."""
        if len(xs) > 1:
            xs = matched(xs)
        node = self.node()
        if values:
            node.values = tuple([_as_python_number(v) for v in values])
        return node.apply(xs)[0]


class Elementwise(FunctionNode):
    """The call of a row."""

    is_arithmetic = True
    row: Row
    values: tuple[float, ...] = ()  # of the row's numbers

    @property
    def label(self) -> str:
        return labels.get(type(self)) or self.row.name

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        row = self.row
        self._keep_inputs = row.keep_in
        self._keep_outputs = row.keep_out
        try:
            return (row.compute(xs, self.values),)
        except ValueError as e:  # shapes that do not go together
            raise ArgumentError(str(e)) from e

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        gy, nodes = gys[0], self.inputs
        if self.row.has_loop_for_each and len(wanted) == len(nodes):
            gxs = self._pulled_at_once(gy)
            if gxs is not None:
                return gxs
        if self.row.of_difference and len(wanted) == 2:
            gx = self.pulled(0, gy)
            return operators.sum_to(gx, nodes[0].shape), operators.sum_to(operators.neg(gx), nodes[1].shape)
        if self.row.is_product and type(gy) is np.ndarray and gy.size >= KERNEL_ELEMENTS and not self._on_variables:
            return tuple([self._pulled_product(i, gy) for i in wanted])
        return tuple([operators.sum_to(self.pulled(i, gy), nodes[i].shape) for i in wanted])

    def _pulled_product(self, i: int, gy: Array) -> Array:
        """The gradient of a factor; of a column beside a matrix it is sums of products, which need not be kept."""
        shape, other = self.inputs[i].shape, self.retained_inputs()[1 - i]
        is_column = gy.ndim == 2 and shape == (len(gy), 1) != gy.shape
        if is_column and other.shape == gy.shape and gy.dtype == other.dtype == np.float32:
            return product_sum(gy, other, (1,), True)
        return operators.sum_to(self.pulled(i, gy), shape)

    def _pulled_at_once(self, gy: Operand) -> tuple[Array, ...] | None:
        """The gradients of all operands by one loop; None where there is none, or operands are broadcast."""
        key = (self.row.name, "each")
        if key not in kernels or type(gy) is not np.ndarray or any(node.shape != gy.shape for node in self.inputs):
            return None
        arrays = (*self.retained_inputs(), gy)
        return from_kernel(key, (*self.row.kept_names, "gy"), arrays, self.values)  # type: ignore[return-value]

    def pulled(self, i: int, gy: Operand) -> Any:
        """gy times the derivative by operand ``i``: back towards it, or forward from its tangent."""
        row = self.row
        if i and row.of_difference:
            return operators.neg(self.pulled(0, gy))
        partial = row.partials[i]
        if not partial.names:
            return partial.pull(gy, {})
        kept = ()
        if row.keep_in:
            kept = self.retained_inputs()
        if row.keep_out:
            kept = (*kept, *self.retained_outputs())
        numbers = dict(zip(row.numbers, self.values))
        if isinstance(gy, Variable) or self._on_variables:
            return partial.pull(gy, {**numbers, **dict(zip(row.kept_names, kept))})
        names = row.kept_names
        if (row.name, i) in kernels:
            gx = from_kernel((row.name, i), (*names, "gy"), (*kept, gy), self.values)
            if gx is not None:
                return gx

        def product(gy: Array, *kept: Array) -> Array:
            return partial.pull(gy, {**numbers, **dict(zip(names, kept))})

        return fused(product, gy, *kept) if row.has_steps else at_once(product, gy, *kept)


def row(
    name: str, formula: Formula, *rest: Any, args: str = "x", kind: str = "float",
    domain: Domain = (-1.0, 1.0), has_steps: bool | None = None, is_one_pass: bool = False,
    of_difference: bool = False, has_loop_for_each: bool = False, **numbers: Any,
) -> RowPrimitive:  # fmt: skip
    """Declare a row, and return its primitive; see :class:`Row`. ``rest``: a derivative by each operand, and the
    docstring."""
    *partials, doc = rest
    entry = Row(
        name, formula, tuple(partials), doc, tuple(args.split()), kind, domain, numbers, has_steps, is_one_pass,
        of_difference, has_loop_for_each,
    )  # fmt: skip
    ROWS[name] = entry
    return _primitive_of(entry)


def _primitive_of(entry: Row) -> RowPrimitive:
    runs_at_once, formula, node = entry.runs_at_once, entry.formula, entry.node
    primitive: Callable[..., Operand]
    if len(entry.args) == 1 and not entry.numbers:

        def primitive(x: Operand) -> Operand:
            return node().apply((x,))[0] if isinstance(x, Variable) else entry.compute((x,), ())

    elif runs_at_once:  # a ufunc of two operands

        def primitive(a: Operand | Number, b: Operand | Number) -> Operand:
            if isinstance(a, Value) and isinstance(b, Value):
                if _dtype(a) is not _dtype(b):
                    a, b = matched((a, b))
                return node().apply((a, b))[0]
            if getattr(a, "dtype", None) is not getattr(b, "dtype", None):
                a, b = matched((a, b))
            if isinstance(a, Value) or isinstance(b, Value):
                return node().apply((a, b))[0]
            return elementwise(formula, a, b)

    else:
        primitive = entry.primitive
        return _named(lambda *args: entry.primitive(*args), entry)
    return _named(primitive, entry)


def _dtype(x: Value) -> DType | None:
    """The type of a Variable's array, or of the array that a parameter will have."""
    a = x._array
    dtype = getattr(x, "dtype", None) if a is None else a.dtype
    return dtype


def function(name: str, *rest: Any, **options: Any) -> RowFunction:
    """Declare a row, and return its public function; rules call ``primitive`` of it, arrays in and arrays out."""
    return public(row(name, *rest, **options))


def public(primitive: RowPrimitive) -> RowFunction:
    """The public function of a row: it takes arrays or Variables and always returns a Variable."""
    entry: Row = primitive.row
    num_args, node = len(entry.args), entry.node
    names = (*entry.args, *entry.numbers)

    def of_one(x: Operand) -> Variable:
        return node().apply((x,))[0]

    def of_several(*given: Operand | Number, **named: Operand | Number) -> Variable:
        values = _bound(entry, names, given, named)
        return entry.applied(values[:num_args], values[num_args:])

    result = _named(of_one if len(names) == 1 else naming_errors(of_several), entry)
    result.primitive = primitive
    result.__module__ = "dbrdist.functions"  # where its name is found, for pickle
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    result.__signature__ = inspect.Signature(
        [inspect.Parameter(n, kind, default=entry.numbers.get(n, inspect.Parameter.empty)) for n in names]
    )
    PUBLIC[entry.name] = result
    return result


def _bound(
    entry: Row, names: tuple[str, ...], given: tuple[Operand | Number, ...], named: dict[str, Operand | Number]
) -> tuple[Any, ...]:
    """The values of all arguments, in order."""
    values = list(given)
    for name in names[len(given) :]:
        if name in named:
            values.append(named.pop(name))
        elif name in entry.numbers and entry.numbers[name] is not inspect.Parameter.empty:
            values.append(entry.numbers[name])
        else:
            raise TypeError(f"{entry.name}: expected an argument {name!r}, got none")
    if named or len(given) > len(names):
        raise TypeError(f"{entry.name}: expected the arguments {', '.join(names)}, got {named or len(given)}")
    return tuple(values)


def from_kernel(
    key: str | tuple[str, int | str], names: tuple[str, ...], arrays: tuple[Array, ...], values: tuple[float, ...]
) -> Array | None:
    """What a faster kernel makes of large arrays on the host; None where there is none for them."""
    for a in arrays:
        if type(a) is not np.ndarray:
            return None
    if arrays[0].size < KERNEL_ELEMENTS:
        return None
    for v in values:
        if type(v) is not float and type(v) is not int:  # an array of numbers, which broadcasts in formulas
            return None
    y: Array | None = kernels[key](names, arrays, values) if key in kernels else None
    return y


def _as_python_number(value: Array | Number) -> Any:
    """A number of NumPy's as Python's, which follows the operands' type; anything else as it is."""
    if not isinstance(value, (np.generic, np.ndarray)) or value.ndim:
        return value
    return float(value) if is_floating(value.dtype) else value.item()


def _named(function: Any, entry: Row) -> Any:
    function.__name__ = function.__qualname__ = entry.name
    function.__doc__ = _documentation(entry)
    function.row = entry
    return function


# What the numbers are that rows take besides operands.
_NUMBERS = {
    "alpha": "factor of the exponential part below 0", "beta": "factor of x inside the exponential",
    "scale": "factor of the whole", "slope": "factor of x below 0", "z": "the upper bound",
}  # fmt: skip


def _documentation(entry: Row) -> str:
    """The docstring of a public function: the row's sentence, its arguments and its result."""
    kind = "numbers" if entry.operands.kinds[0] == "number" else "a floating type"
    several = "; the operands broadcast" if len(entry.args) > 1 else ""
    lines = [f"    {', '.join(entry.args)}: array or Variable of {kind}, any shape{several}."]
    lines += [f"    {n}: {_NUMBERS.get(n, 'a number')}; default {d}." for n, d in entry.numbers.items()]
    shape = "the shape to which the operands broadcast" if several else f"the shape of {entry.args[0]}"
    text = f"{entry.doc}\n\nArgs:\n" + "\n".join(lines) + f"\n\nReturns:\n    A Variable of {shape}."
    if entry.name in EXAMPLES:
        values, result = EXAMPLES[entry.name]
        text += f"\n\nExample:\n    >>> F.{entry.name}({values}).array.round(4)\n    {result}"
    return text


def matched(xs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Operands in types that go together.

    An array beside a floating Variable takes its type, as in Chainer, and so do integers beside floating operands and
    numbers; nothing else is converted here, and NumPy's rules of promotion hold.
    """
    typed = [x for x in xs if not isinstance(x, np.generic) and getattr(x, "dtype", None) is not None]
    floats = [x.dtype for x in typed if isinstance(x, Variable) and is_floating(x.dtype)]
    is_led = bool(floats)  # by Variables
    if not floats:
        floats = [x.dtype for x in typed if is_floating(x.dtype)]
    if not floats:
        return tuple([x.item() if isinstance(x, np.generic) and not is_floating(x.dtype) else x for x in xs])
    target = floats[0]
    for dtype in floats[1:]:
        if dtype != target:
            target = np.promote_types(dtype, target)
    return tuple([_matched(x, target, is_led) for x in xs])


def together(function: str, kind: str = "float", is_product: bool = False, **xs: Operand) -> tuple[Variable, ...]:
    """The operands of a function made of others, as Variables: of the right kind, and in types that go together.

    ``is_product``: in a program of Chainer, floating operands of matrix products keep their types.
    """
    operands = Operands(function, **dict.fromkeys(xs, kind))
    for i, x in enumerate(xs.values()):
        operands.check(i, x)
    if (
        is_product
        and as_chainer[0]
        and all(getattr(x, "dtype", None) is not None and is_floating(x.dtype) for x in xs.values())
    ):
        return tuple([as_variable(x) for x in xs.values()])
    return tuple([as_variable(x) for x in matched(tuple(xs.values()))])


def _matched(x: Any, target: DType, is_led: bool) -> Operand | Number:
    if isinstance(x, (int, float)):
        return target.type(x)
    dtype = getattr(x, "dtype", None)
    if dtype is None or dtype == target or not (is_floating(dtype) or dtype.kind in "iub"):
        return x  # complex numbers keep their imaginary part, and what is no number is for the gate to refuse
    if isinstance(x, np.generic):
        return target.type(x)
    if isinstance(x, Variable):
        return x if is_floating(dtype) else Variable(_cast(x.array, target), requires_grad=False)
    return _cast(x, target) if is_led or not is_floating(dtype) else x


def _cast(a: Array, dtype: DType) -> Array:
    return elementwise(lambda v: v.astype(dtype), a)
