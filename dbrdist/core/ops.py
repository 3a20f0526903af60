"""The closed set of primitives: arrays in, array out; any Variable in, Variable out.

Variable's operators, the functions and every rule are written with them, so that one rule serves first-order passes on
bare arrays and higher-order passes on Variables. Operands broadcast as in NumPy; numbers take the array's type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dbrdist.core import arrays
from dbrdist.core.backend import (
    Array,
    accumulation_dtype,
    elementwise,
    get_array_module,
)
from dbrdist.core.fusion import Pending, PendingSum
from dbrdist.core.graph import BaseVariable, FunctionNode, VariableNode, call

# ---- elementwise ----------------------------------------------------------------------------------------------------


def _fit(g: Any, node: Any) -> Any:
    """A gradient of the broadcast result, brought to an input's shape and type."""
    if g.shape != node.shape:
        g = sum_to(g, node.shape)
    if g.dtype != node.dtype:
        g = cast(g, node.dtype)
    return g


class Elementwise(FunctionNode):
    """An elementwise formula of one or two operands; a subclass gives the formula and the partial derivatives."""

    keep_in: tuple[int, ...] = ()
    keep_out: tuple[int, ...] = ()
    formula: Any = None

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self._keep_inputs = self.keep_in
        self._keep_outputs = self.keep_out
        return (elementwise(type(self).formula, *xs),)

    def partial(self, i: int, gy: Any) -> Any:
        """The gradient of input i before it is brought to the input's shape."""
        raise NotImplementedError

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        gy = gys[0]
        nodes = self.inputs
        assert nodes is not None
        return tuple([_fit(self.partial(i, gy), nodes[i]) for i in wanted])


# From this many elements on the sum of two activations waits for a relu that may take it over.
_PENDING_ELEMENTS = 4096


class Add(Elementwise):
    """y = a + b"""

    formula = np.add

    def partial(self, i: int, gy: Any) -> Any:
        return gy


class AddActivations(Add):
    """y = a + b for 4-d results of functions, of equal shape and type: waits for a ReLU"""

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        a, b = xs
        return (Pending(PendingSum(a, b), a.shape, a.dtype, fuses_gradient=False),)


class Sub(Elementwise):
    """y = a - b"""

    formula = np.subtract

    def partial(self, i: int, gy: Any) -> Any:
        return neg(gy) if i else gy


class Mul(Elementwise):
    """y = a b"""

    keep_in = (0, 1)
    formula = np.multiply

    def partial(self, i: int, gy: Any) -> Any:
        return mul(gy, self.retained_inputs()[1 - i])


class Div(Elementwise):
    """y = a / b"""

    keep_in = (0, 1)
    formula = np.true_divide

    def partial(self, i: int, gy: Any) -> Any:
        a, b = self.retained_inputs()
        if i == 0:
            return div(gy, b)
        return neg(div(mul(gy, a), mul(b, b)))


class Neg(Elementwise):
    """y = -x"""

    formula = np.negative

    def partial(self, i: int, gy: Any) -> Any:
        return neg(gy)


class Exp(Elementwise):
    """y = exp x"""

    keep_out = (0,)
    formula = np.exp

    def partial(self, i: int, gy: Any) -> Any:
        return mul(gy, self.retained_outputs()[0])


class Log(Elementwise):
    """y = ln x"""

    keep_in = (0,)
    formula = np.log

    def partial(self, i: int, gy: Any) -> Any:
        return div(gy, self.retained_inputs()[0])


class Sqrt(Elementwise):
    """y = sqrt x"""

    keep_out = (0,)
    formula = np.sqrt

    def partial(self, i: int, gy: Any) -> Any:
        return div(gy, mul(self.retained_outputs()[0], 2.0))


class Tanh(Elementwise):
    """y = tanh x"""

    keep_out = (0,)
    formula = np.tanh

    def partial(self, i: int, gy: Any) -> Any:
        y = self.retained_outputs()[0]
        return mul(gy, sub(1.0, mul(y, y)))


class Absolute(Elementwise):
    """y = |x|; the derivative at 0 is 0"""

    keep_in = (0,)
    formula = np.absolute

    def partial(self, i: int, gy: Any) -> Any:
        x = self.retained_inputs()[0]
        return mul(gy, elementwise(np.sign, x.array if isinstance(x, BaseVariable) else x))


class Power(Elementwise):
    """y = a ** b"""

    keep_in = (0, 1)
    formula = np.power

    def partial(self, i: int, gy: Any) -> Any:
        a, b = self.retained_inputs()
        if i == 0:
            return mul(gy, mul(b, power(a, sub(b, 1.0))))
        return mul(gy, mul(power(a, b), log(a)))


class PowerConstant(FunctionNode):
    """y = x ** c for a number c"""

    def __init__(self, exponent: float) -> None:
        self.exponent = exponent

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0,))
        return (arrays.power_of_number(xs[0], self.exponent),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        c = self.exponent
        if c == 0:
            return (mul(gys[0], 0.0),)
        x = self.retained_inputs()[0]
        return (mul(gys[0], mul(power(x, c - 1) if c != 2 else x, float(c))),)


class Where(FunctionNode):
    """y = a where the condition holds, else b; the condition takes no gradient"""

    def __init__(self, condition: Array) -> None:
        self.condition = condition

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (arrays.chosen(self.condition, *xs),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        gy = gys[0]
        nodes = self.inputs
        assert nodes is not None
        zero = gy.dtype.type(0)
        parts = ((gy, zero), (zero, gy))
        return tuple(_fit(where(self.condition, *parts[i]), nodes[i]) for i in wanted)


class Cast(FunctionNode):
    """y = x in another type"""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (elementwise(lambda x: x.astype(self.dtype), xs[0]),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        assert self.inputs is not None
        return (cast(gys[0], self.inputs[0].dtype),)


_NUMBERS = (int, float, np.generic)


def _binary(cls: type[FunctionNode], formula: Any, a: Any, b: Any) -> Any:
    if type(a) is not type(b):
        if isinstance(b, _NUMBERS):
            b = b if isinstance(a, _NUMBERS) else arrays.typed(b, a)
        elif isinstance(a, _NUMBERS):
            a = arrays.typed(a, b)
    if isinstance(a, BaseVariable) or isinstance(b, BaseVariable):
        return cls().apply((a, b))[0]
    return elementwise(formula, a, b)


def _unary(cls: type[FunctionNode], formula: Any, x: Any) -> Any:
    if isinstance(x, BaseVariable):
        return cls().apply((x,))[0]
    return elementwise(formula, x)


def add(a: Any, b: Any) -> Any:
    """a + b"""
    if isinstance(a, BaseVariable) and isinstance(b, BaseVariable):
        m, n = a.node, b.node
        if m.shape == n.shape and len(m.shape) == 4 and _may_wait(m) and _may_wait(n) and m.dtype == n.dtype:
            return AddActivations().apply((a, b))[0]
    return _binary(Add, np.add, a, b)


def _may_wait(node: VariableNode) -> bool:
    """True for large results of functions, whose arrays nobody else changes before the pass runs."""
    return node.creator_node is not None and math.prod(node.shape) >= _PENDING_ELEMENTS


def sub(a: Any, b: Any) -> Any:
    """a - b"""
    return _binary(Sub, np.subtract, a, b)


def mul(a: Any, b: Any) -> Any:
    """a b"""
    return _binary(Mul, np.multiply, a, b)


def div(a: Any, b: Any) -> Any:
    """a / b"""
    return _binary(Div, np.true_divide, a, b)


def neg(x: Any) -> Any:
    """-x"""
    return _unary(Neg, np.negative, x)


def exp(x: Any) -> Any:
    """e to the x"""
    return _unary(Exp, np.exp, x)


def log(x: Any) -> Any:
    """The natural logarithm of x"""
    return _unary(Log, np.log, x)


def sqrt(x: Any) -> Any:
    """The square root of x"""
    return _unary(Sqrt, np.sqrt, x)


def tanh(x: Any) -> Any:
    """The hyperbolic tangent of x"""
    return _unary(Tanh, np.tanh, x)


def absolute(x: Any) -> Any:
    """|x|"""
    return _unary(Absolute, np.absolute, x)


def power(a: Any, b: Any) -> Any:
    """a to the b; numbers as exponents have a simpler derivative"""
    if isinstance(b, np.generic):
        b = b.item()
    if isinstance(b, (int, float)):
        return PowerConstant(b).apply((a,))[0] if isinstance(a, BaseVariable) else arrays.power_of_number(a, b)
    if isinstance(a, _NUMBERS):
        a = get_array_module(b).asarray(a, b.dtype)  # its logarithm would be a number of 64 bits
    return _binary(Power, np.power, a, b)


def where(condition: Array, a: Any, b: Any) -> Any:
    """a where ``condition`` (an array of bool) holds, else b"""
    if type(b) is float or type(b) is int:
        b = arrays.typed(b, a)
    elif type(a) is float or type(a) is int:
        a = arrays.typed(a, b)
    if isinstance(a, BaseVariable) or isinstance(b, BaseVariable):
        return Where(condition).apply((a, b))[0]
    return arrays.chosen(condition, a, b)


def cast(x: Any, dtype: Any) -> Any:
    """x in another type; x itself if it has that type"""
    if x.dtype == dtype:
        return x
    if isinstance(x, BaseVariable):
        return Cast(dtype).apply((x,))[0]
    return elementwise(lambda v: v.astype(dtype), x)


# ---- shape ----------------------------------------------------------------------------------------------------------


class Reshape(FunctionNode):
    """y = x in another shape, elements in C order"""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (arrays.reshaped(xs[0], self.shape),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        assert self.inputs is not None
        return (reshape(gys[0], self.inputs[0].shape),)


class Transpose(FunctionNode):
    """y = x with its axes permuted"""

    def __init__(self, axes: tuple[int, ...] | None) -> None:
        self.axes = axes

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (xs[0].transpose(self.axes),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        axes = self.axes
        if axes is not None:
            axes = tuple(int(i) for i in np.argsort([a % len(axes) for a in axes]))
        return (transpose(gys[0], axes),)


class BroadcastTo(FunctionNode):
    """y = x repeated to a larger shape, as a view"""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (get_array_module(xs[0]).broadcast_to(xs[0], self.shape),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        assert self.inputs is not None
        return (sum_to(gys[0], self.inputs[0].shape),)


class Sum(FunctionNode):
    """y = the sum of x over axes"""

    def __init__(self, axis: tuple[int, ...] | None, keepdims: bool) -> None:
        self.axis = axis
        self.keepdims = keepdims

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (arrays.sum_over(xs[0], self.axis, self.keepdims),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        assert self.inputs is not None
        shape = self.inputs[0].shape
        gy = gys[0]
        if not self.keepdims:
            axes = range(len(shape)) if self.axis is None else [a % len(shape) for a in self.axis]
            gy = reshape(gy, tuple(1 if i in axes else n for i, n in enumerate(shape)))
        return (broadcast_to(gy, shape),)


class Mean(FunctionNode):
    """y = the mean of x over axes; sum and division run in the wider type, so that neither overflows"""

    def __init__(self, axis: tuple[int, ...] | None, keepdims: bool) -> None:
        self.axis = axis
        self.keepdims = keepdims

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        x = xs[0]
        total = x.sum(axis=self.axis, dtype=accumulation_dtype(x.dtype), keepdims=self.keepdims)
        count = x.size // total.size if total.size else 0
        self.scale = 1.0 / count if count else float("nan")
        return ((total * self.scale).astype(x.dtype, copy=False),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        assert self.inputs is not None
        node = self.inputs[0]
        shape = node.shape
        gy = cast(mul(cast(gys[0], accumulation_dtype(node.dtype)), self.scale), node.dtype)
        if not self.keepdims:
            axes = range(len(shape)) if self.axis is None else [a % len(shape) for a in self.axis]
            gy = reshape(gy, tuple(1 if i in axes else n for i, n in enumerate(shape)))
        return (broadcast_to(gy, shape),)


class SumTo(FunctionNode):
    """y = x summed over the axes along which ``shape`` was broadcast"""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (arrays.summed_to(xs[0], self.shape),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        assert self.inputs is not None
        return (broadcast_to(gys[0], self.inputs[0].shape),)


class Concat(FunctionNode):
    """y = the inputs one after another along an axis"""

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (arrays.concatenated(xs, self.axis),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        assert self.inputs is not None
        gy, axis = gys[0], self.axis % len(self.inputs[0].shape)
        starts = np.cumsum([0] + [node.shape[axis] for node in self.inputs])
        lead = (slice(None),) * axis
        return tuple(getitem(gy, (*lead, slice(int(starts[i]), int(starts[i + 1])))) for i in wanted)


class GetItem(FunctionNode):
    """y = x[slices]"""

    def __init__(self, slices: Any) -> None:
        self.slices = slices

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (arrays.item(xs[0], self.slices),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        assert self.inputs is not None
        node = self.inputs[0]
        return (scatter(gys[0], self.slices, node.shape),)


class Scatter(FunctionNode):
    """y = zeros with x added at the slices: the transpose of GetItem"""

    def __init__(self, slices: Any, shape: tuple[int, ...]) -> None:
        self.slices = slices
        self.shape = shape

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (arrays.scattered(xs[0], self.slices, self.shape),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        return (getitem(gys[0], self.slices),)


def reshape(x: Any, shape: tuple[int, ...]) -> Any:
    """x in another shape; one entry may be -1. x itself if it has that shape"""
    if x.shape == shape:
        return x
    return Reshape(shape).apply((x,))[0] if isinstance(x, BaseVariable) else arrays.reshaped(x, shape)


def transpose(x: Any, axes: tuple[int, ...] | None = None) -> Any:
    """x with its axes permuted (reversed where ``axes`` is None)"""
    return Transpose(axes).apply((x,))[0] if isinstance(x, BaseVariable) else x.transpose(axes)


def broadcast_to(x: Any, shape: tuple[int, ...]) -> Any:
    """x repeated to ``shape``, without copying"""
    if x.shape == shape:
        return x
    if isinstance(x, BaseVariable):
        return BroadcastTo(shape).apply((x,))[0]
    return get_array_module(x).broadcast_to(x, shape)


def sum(x: Any, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Any:
    """The sum over all elements, or over axes"""
    axes = (axis,) if isinstance(axis, int) else axis
    return Sum(axes, keepdims).apply((x,))[0] if isinstance(x, BaseVariable) else arrays.sum_over(x, axes, keepdims)


def mean(x: Any, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Any:
    """The mean over all elements, or over axes"""
    axes = (axis,) if isinstance(axis, int) else axis
    return call(Mean(axes, keepdims), x)


def sum_to(x: Any, shape: tuple[int, ...], out: Array = None) -> Any:
    """x summed to ``shape``, from which it could have been broadcast; ``out`` may take the result of an array"""
    if x.shape == shape:
        return x
    if type(x) is np.ndarray and x.ndim == 2 and x.shape[1:] == shape:
        return arrays.sum_rows(x, out)
    return SumTo(shape).apply((x,))[0] if isinstance(x, BaseVariable) else arrays.summed_to(x, shape)


def concat(xs: Sequence[Any], axis: int = 1) -> Any:
    """The inputs one after another along ``axis``"""
    if any(isinstance(x, BaseVariable) for x in xs):
        return Concat(axis).apply(tuple(xs))[0]
    return arrays.concatenated(xs, axis)


def getitem(x: Any, slices: Any) -> Any:
    """x[slices], with numbers, slices, None, Ellipsis and integer or boolean arrays"""
    return GetItem(slices).apply((x,))[0] if isinstance(x, BaseVariable) else arrays.item(x, slices)


def scatter(x: Any, slices: Any, shape: tuple[int, ...]) -> Any:
    """Zeros of ``shape`` with x added at ``slices``; repeated indices add up"""
    if isinstance(x, BaseVariable):
        return Scatter(slices, shape).apply((x,))[0]
    return arrays.scattered(x, slices, shape)


# ---- matrix product -------------------------------------------------------------------------------------------------


class MatMul(FunctionNode):
    """y = a b for matrices, or stacks of matrices that broadcast (N, M, K) (N, K, L)"""

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1))
        return (arrays.product(*xs),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        gy = gys[0]
        a, b = self.retained_inputs()
        if a.ndim == 1 or b.ndim == 1:
            return self._derive_vectors(wanted, gy, a, b)
        gxs = []
        for k, i in enumerate(wanted):
            g = matmul(gy, swap(b)) if i == 0 else matmul(swap(a), gy, None if out is None else out[k])
            gxs.append(self._fit(g, i))
        return tuple(gxs)

    def _fit(self, g: Any, i: int) -> Any:
        assert self.inputs is not None
        return _fit(g, self.inputs[i])

    def _derive_vectors(self, wanted: tuple[int, ...], gy: Any, a: Any, b: Any) -> tuple[Any, ...]:
        """A vector on the left is a row, on the right a column, whose axis the result lacks."""
        a2 = reshape(a, (1, a.shape[0])) if a.ndim == 1 else a
        b2 = reshape(b, (b.shape[0], 1)) if b.ndim == 1 else b
        lead = tuple(gy.shape)
        if a.ndim == 1:
            lead = (*lead[: len(lead) - (b.ndim > 1)], 1, *lead[len(lead) - (b.ndim > 1) :])
        if b.ndim == 1:
            lead = (*lead, 1)
        g2 = reshape(gy, lead)
        both = (lambda: matmul(g2, swap(b2)), lambda: matmul(swap(a2), g2))
        return tuple(self._fit(reshape(sum_to(both[i](), (a2, b2)[i].shape), (a, b)[i].shape), i) for i in wanted)


def swap(x: Any) -> Any:
    """x with its last two axes exchanged"""
    return transpose(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def matmul(a: Any, b: Any, out: Array = None) -> Any:
    """The matrix product, as ``numpy.matmul``; ``out`` takes the result where both operands are arrays"""
    if type(a) is np.ndarray and type(b) is np.ndarray and a.ndim == b.ndim == 2:
        dtype = a.dtype
        if dtype is b.dtype and dtype.itemsize > 2:  # dot costs half of what matmul does for small matrices
            return a.dot(b, out) if out is not None and out.dtype is dtype else a.dot(b)
    if isinstance(a, BaseVariable) or isinstance(b, BaseVariable):
        return MatMul().apply((a, b))[0]
    return arrays.product(a, b, out)
