"""The closed set of primitives: arrays in, array out; any Variable in, Variable out.

Variable's operators, the functions and every rule are written with them, so that one rule serves first-order passes on
bare arrays and higher-order passes on Variables. Operands broadcast as in NumPy; numbers take the array's type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dbrdist.core.array import array_operations, sums
from dbrdist.core.array.backend import Array, accumulation_dtype, get_array_module, is_floating
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.elementwise import KERNEL_ELEMENTS, elementwise, fused
from dbrdist.core.array.types import Axes, Destinations, DType, Index, Number
from dbrdist.core.tape.checks import ArgumentError, Operands
from dbrdist.core.tape.deferred import slice_gradient
from dbrdist.core.tape.elementwise_table import RowPrimitive, from_kernel, matched, row
from dbrdist.core.tape.function_node import FunctionNode, call
from dbrdist.core.tape.variable import Operand, Variable, as_array

# ---- elementwise ----------------------------------------------------------------------------------------------------

add = row("add", np.add, 1, 1, "a + b", args="a b", kind="number")
sub = row("sub", np.subtract, 1, -1, "a - b", args="a b", kind="number")
mul = row("mul", np.multiply, lambda b: b, lambda a: a, "a b", args="a b", kind="number")
div: RowPrimitive = row(
    "div",
    np.true_divide,
    lambda gy, b: div(gy, b),
    lambda gy, b, y: neg(div(mul(gy, y), b)),
    "a / b",
    args="a b",
    kind="number",
    domain=((-1.0, 1.0), (0.5, 2.0)),
)
neg: RowPrimitive = row("neg", np.negative, -1, "-x", kind="number")
exp = row("exp", np.exp, lambda y: y, "e to the x, elementwise.")
log = row("log", np.log, lambda gy, x: div(gy, x), "Natural logarithm, elementwise.", domain=(0.5, 2.0))
sqrt = row("sqrt", np.sqrt, lambda gy, y: div(gy, mul(y, 2.0)), "Square root, elementwise.", domain=(0.5, 2.0))
# 1 - y^2 would be rounded by more than it is where y is near 1
tanh = row("tanh", np.tanh, lambda y: mul(sub(1.0, y), add(y, 1.0)), "Hyperbolic tangent, elementwise.", has_steps=True)
absolute = row(
    "absolute",
    np.absolute,
    lambda self: elementwise(np.sign, as_array(self)),
    "|x|, elementwise; the derivative at 0 is 0.",
    args="self",
    kind="number",
    domain=(0.3, 1.5),
)
_power = row(
    "pow",
    np.power,
    lambda gy, a, b: mul(gy, mul(b, power(a, sub(b, 1.0)))),
    lambda gy, a, y: mul(gy, mul(y, log(where(elementwise(np.not_equal, as_array(a), 0), a, 1.0)))),  # 0 at a = 0
    "a to the b",
    args="a b",
    kind="number",
    domain=((0.5, 2.0), (-1.0, 1.0)),
    has_steps=True,  # a^(b - 1) may be more than 16 bits hold where its product with b is not
)


def _slope_of_power(x: Operand, c: float) -> Operand | float:
    """c x^(c - 1), of common exponents without a call of pow, which takes ten times as long as a product."""
    if c in (0, 2, -1):
        return neg(power(div(1.0, x), 2)) if c < 0 else mul(x, 2.0) if c else 0.0
    return div(0.5, power(x, 0.5)) if c == 0.5 else mul(power(x, c - 1), float(c))


_power_of_number = row(
    "pow_number",
    array_operations.power_of,
    lambda gy, x, c: mul(gy, _slope_of_power(x, c)),
    "x to the power of a number",
    kind="number",
    domain=(0.5, 2.0),
    c=3,
)


class Where(FunctionNode):
    """y = a where the condition holds, else b; the condition takes no gradient"""

    is_linear = gives_new = True

    def __init__(self, condition: Array) -> None:
        self.condition = condition

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (array_operations.chosen(self.condition, *xs),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        gy = gys[0]
        zero = gy.dtype.type(0)
        parts = ((gy, zero), (zero, gy))
        return tuple([sum_to(where(self.condition, *parts[i]), self.inputs[i].shape) for i in wanted])


class Cast(FunctionNode):
    """y = x in another type"""

    is_linear = gives_new = True

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (array_operations.converted(xs[0], self.dtype),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (cast(gys[0], self.inputs[0].dtype),)


def power(a: Operand | Number, b: Any) -> Any:
    """a to the b; numbers as exponents have a simpler derivative"""
    if isinstance(b, (int, float, np.generic)):
        return _power_of_number(a, b.item() if isinstance(b, np.generic) else b)
    if isinstance(a, (int, float, np.generic)):
        dtype = b.dtype if is_floating(b.dtype) else None
        a = get_array_module(b).asarray(a, dtype)  # its logarithm would be a number of 64 bits
    return _power(a, b)


class Remainder(FunctionNode):
    """y = a - b k for whole numbers k, exactly; ga = gy, gb = -k gy, where k = a / b rounded as the ufunc does"""

    operands = Operands("remainder", a="number", b="number")

    def __init__(self, function: np.ufunc) -> None:
        self.function = function  # np.fmod, or np.remainder

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1))
        self.y = _remainder_of(self.function, xs)
        return (self.y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        gy, (a, b) = gys[0], (as_array(x) for x in self.retained_inputs())
        rules = (
            lambda: mul(gy, 1.0) if self._on_variables else gy,  # forward mode looks for a function of gy
            lambda: neg(mul(gy, fused(lambda a, b, y: np.rint((a - y) / b), a, b, self.y))),
        )
        return tuple([sum_to(rules[i](), self.inputs[i].shape) for i in wanted])


def remainder(a: Operand | Number, b: Operand | Number, function: np.ufunc = np.remainder) -> Operand:
    """What is left of a when a whole multiple of b is taken away, with the sign of b; with np.fmod that of a"""
    xs = matched((a, b))
    on_tape = any(isinstance(x, Variable) for x in xs)
    return Remainder(function).apply(xs)[0] if on_tape else _remainder_of(function, xs)


def _remainder_of(function: np.ufunc, xs: tuple[Array, ...]) -> Array:
    a, b = xs
    if type(a) is np.ndarray and not np.ndim(b) and a.size >= KERNEL_ELEMENTS and _follows(b, a.dtype):
        xs = a, np.full_like(a, b)
    y = from_kernel(function.__name__, ("a", "b"), xs, ())
    return elementwise(function, *xs) if y is None else y


def _follows(b: Operand | Number, dtype: DType) -> bool:
    """Whether the kernel is for this type, and a number beside such an array leaves it so."""
    return dtype == np.float32 and (type(b) in (int, float) or getattr(b, "dtype", None) == dtype)


def floor_div(a: Operand | Number, b: Operand | Number) -> Variable:
    """The next integer below a / b, elementwise, of integers in their type; without gradient"""
    try:
        y = elementwise(np.floor_divide, *(as_array(x) for x in matched((a, b))))
    except ValueError as e:  # shapes that do not go together
        raise ArgumentError(str(e)) from e
    return Variable(get_array_module(y).asarray(y), requires_grad=False)


def where(condition: Array, a: Any, b: Any) -> Any:
    """a where ``condition`` (an array of bool) holds, else b"""
    if getattr(a, "dtype", None) is not getattr(b, "dtype", None):
        a, b = matched((a, b))
    if isinstance(a, Variable) or isinstance(b, Variable):
        return Where(condition).apply((a, b))[0]
    return array_operations.chosen(condition, a, b)


def cast(x: Operand, dtype: DType) -> Any:
    """x in another type; x itself if it has that type"""
    if x.dtype == dtype:
        return x
    if isinstance(x, Variable):
        return Cast(dtype).apply((x,))[0]
    return array_operations.converted(x, dtype)


# ---- shape ----------------------------------------------------------------------------------------------------------


class Reshape(FunctionNode):
    """y = x in another shape, elements in C order"""

    is_linear = True
    was_images = False

    def __init__(self, shape: tuple[int, ...], to_images: bool) -> None:
        self.shape = shape
        self.to_images = to_images

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.was_images = array_operations.are_images(xs[0])
        return (array_operations.reshaped(xs[0], self.shape, self.to_images),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        gx = reshape(gys[0], self.inputs[0].shape, self.was_images)
        self.gives_new = array_operations.is_dense_alone(gx, gys[0], self.owns_gy)
        return (gx,)


class Transpose(FunctionNode):
    """y = x with its axes permuted"""

    is_linear = True

    def __init__(self, axes: tuple[int, ...] | None) -> None:
        self.axes = axes

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (xs[0].transpose(self.axes),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        axes = self.axes
        if axes is not None:
            axes = tuple(int(i) for i in np.argsort([a % len(axes) for a in axes]))
        return (transpose(gys[0], axes),)


class BroadcastTo(FunctionNode):
    """y = x repeated to a larger shape, as a view"""

    is_linear = True

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (get_array_module(xs[0]).broadcast_to(xs[0], self.shape),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (sum_to(gys[0], self.inputs[0].shape),)


class Sum(FunctionNode):
    """y = the sum of x over axes"""

    is_linear = True

    def __init__(self, axis: tuple[int, ...] | None, keepdims: bool) -> None:
        self.axis = axis
        self.keepdims = bool(keepdims)  # NumPy 2 takes no numpy.bool there

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (sums.sum_over(xs[0], self.axis, self.keepdims),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        shape = self.inputs[0].shape
        gy = gys[0]
        if not self.keepdims:
            axes = range(len(shape)) if self.axis is None else [a % len(shape) for a in self.axis]
            gy = reshape(gy, tuple(1 if i in axes else n for i, n in enumerate(shape)))
        return (broadcast_to(gy, shape),)


class Mean(FunctionNode):
    """y = the mean of x over axes; sum and division run in the wider type, so that neither overflows"""

    operands = Operands("mean", x="float")
    is_linear = True

    def __init__(self, axis: tuple[int, ...] | None, keepdims: bool) -> None:
        self.axis = axis
        self.keepdims = keepdims

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        y, self.scale = sums.mean_over(xs[0], self.axis, self.keepdims)
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        node = self.inputs[0]
        shape = node.shape
        gx = None if self._on_variables else sums.spread_mean(gys[0], shape, self.axis, self.keepdims)
        if gx is not None:
            return (gx,)
        gy = cast(mul(cast(gys[0], accumulation_dtype(node.dtype)), self.scale), node.dtype)
        if not self.keepdims:
            axes = range(len(shape)) if self.axis is None else [a % len(shape) for a in self.axis]
            gy = reshape(gy, tuple(1 if i in axes else n for i, n in enumerate(shape)))
        return (broadcast_to(gy, shape),)


class SumTo(FunctionNode):
    """y = x summed over the axes along which ``shape`` was broadcast"""

    is_linear = True

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (array_operations.summed_to(xs[0], self.shape),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (broadcast_to(gys[0], self.inputs[0].shape),)


class Concat(FunctionNode):
    """y = the inputs one after another along an axis"""

    is_linear = True

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (array_operations.concatenated(xs, self.axis),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        gy, axis = gys[0], self.axis % len(self.inputs[0].shape)
        starts = np.cumsum([0] + [node.shape[axis] for node in self.inputs])
        lead = (slice(None),) * axis
        gxs = tuple([getitem(gy, (*lead, slice(int(starts[i]), int(starts[i + 1])))) for i in wanted])
        self.gives_new = self.owns_gy and array_operations.are_dense_parts(gxs, gy, len(self.inputs))
        return gxs


class GetItem(FunctionNode):
    """y = x[slices]"""

    is_linear = gives_new = writes = True
    was_images = False

    def __init__(self, slices: Index) -> None:
        self.slices = slices

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.was_images = array_operations.are_images(xs[0])
        return (array_operations.item(xs[0], self.slices),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...], out: Any = None) -> tuple[Any, ...]:
        node, gy, slices = self.inputs[0], gys[0], self.slices
        pending = slice_gradient(node, gy, slices, self.was_images)
        return (pending or scatter(gy, slices, node.shape, self.was_images, out and out[0]),)


class Scatter(FunctionNode):
    """y = zeros with x added at the slices: the transpose of GetItem"""

    is_linear = True

    def __init__(self, slices: Index, shape: tuple[int, ...], to_images: bool) -> None:
        self.slices = slices
        self.shape = shape
        self.to_images = to_images
        self.gives_new = not array_operations.is_basic(slices)  # else views

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (array_operations.scattered(xs[0], self.slices, self.shape, self.to_images),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (getitem(gys[0], self.slices),)


def reshape(x: Operand, shape: tuple[int, ...], to_images: bool = False) -> Any:
    """x in another shape; one entry may be -1. x itself if it has that shape. ``to_images``: laid out as images are"""
    if x.shape == shape:
        return x
    if isinstance(x, Variable):
        return Reshape(shape, to_images).apply((x,))[0]
    return array_operations.reshaped(x, shape, to_images)


def transpose(x: Operand, axes: tuple[int, ...] | None = None) -> Any:
    """x with its axes permuted (reversed where ``axes`` is None)"""
    return Transpose(axes).apply((x,))[0] if isinstance(x, Variable) else x.transpose(axes)


def broadcast_to(x: Operand, shape: tuple[int, ...]) -> Any:
    """x repeated to ``shape``, without copying"""
    if x.shape == shape:
        return x
    if isinstance(x, Variable):
        return BroadcastTo(shape).apply((x,))[0]
    return get_array_module(x).broadcast_to(x, shape)


def sum(x: Operand, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Any:
    """The sum over all elements, or over axes"""
    axes = _axes(axis)
    return Sum(axes, keepdims).apply((x,))[0] if isinstance(x, Variable) else sums.sum_over(x, axes, keepdims)


def mean(x: Operand, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Any:
    """The mean over all elements, or over axes"""
    return call(Mean(_axes(axis), keepdims), x)


def _axes(axis: Axes) -> tuple[int, ...] | None:
    if axis is None:
        return None
    return (int(axis),) if isinstance(axis, (int, np.integer)) else tuple(axis)


def sum_to(x: Operand, shape: tuple[int, ...], out: Array | None = None) -> Any:
    """x summed to ``shape``, from which it could have been broadcast; ``out`` may take the result of an array"""
    if x.shape == shape:
        return x
    if type(x) is np.ndarray and x.ndim == 2 and x.shape[1:] == shape:
        return sums.sum_rows(x, out)
    return SumTo(shape).apply((x,))[0] if isinstance(x, Variable) else array_operations.summed_to(x, shape)


def concat(xs: Sequence[Any], axis: int = 1) -> Any:
    """The inputs one after another along ``axis``"""
    if any(isinstance(x, Variable) for x in xs):
        return Concat(axis).apply(tuple(xs))[0]
    return array_operations.concatenated(xs, axis)


def getitem(x: Operand, slices: Index) -> Any:
    """x[slices], with numbers, slices, None, Ellipsis and integer or boolean arrays"""
    if type(slices) is list and as_chainer[0] and not all(isinstance(s, int) for s in slices):
        slices = tuple(slices)  # as in Chainer and in NumPy before 1.23
    return GetItem(slices).apply((x,))[0] if isinstance(x, Variable) else array_operations.item(x, slices)


def scatter(
    x: Operand, slices: Index, shape: tuple[int, ...], to_images: bool = False, out: Array | None = None
) -> Any:
    """Zeros of ``shape`` with x added at ``slices``; repeated indices add up. ``to_images``: laid out as images are.

    ``out``: where an array x may write the result.
    """
    if isinstance(x, Variable):
        return Scatter(slices, shape, to_images).apply((x,))[0]
    return array_operations.scattered(x, slices, shape, to_images, out)


# ---- matrix product -------------------------------------------------------------------------------------------------


class MatMul(FunctionNode):
    """y = a b for matrices, or stacks of matrices that broadcast (N, M, K) (N, K, L)"""

    operands = Operands("matmul", a="number", b="number")
    is_arithmetic = writes = gives_new = True

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1))
        return (array_operations.product(*xs),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...], out: Destinations = None) -> tuple[Array, ...]:
        gy = gys[0]
        a, b = self.retained_inputs()
        if a.ndim == 1 or b.ndim == 1:
            return self._derive_vectors(wanted, gy, a, b)
        gxs = []
        for k, i in enumerate(wanted):
            g = matmul(gy, swap(b)) if i == 0 else matmul(swap(a), gy, None if out is None else out[k])
            gxs.append(sum_to(g, self.inputs[i].shape))
        return tuple(gxs)

    def _derive_vectors(self, wanted: tuple[int, ...], gy: Array, a: Array, b: Array) -> tuple[Array, ...]:
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
        return tuple(reshape(sum_to(both[i](), (a2, b2)[i].shape), (a, b)[i].shape) for i in wanted)


def swap(x: Operand) -> Any:
    """x with its last two axes exchanged"""
    return transpose(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def matmul(a: Operand, b: Operand, out: Any = None) -> Any:
    """The matrix product, as ``numpy.matmul``; ``out`` takes the result where both operands are arrays"""
    if type(a) is np.ndarray and type(b) is np.ndarray and a.ndim == b.ndim == 2:
        dtype = a.dtype
        if dtype is b.dtype and dtype.itemsize > 2:  # dot costs half of what matmul does for small matrices
            return a.dot(b, out) if out is not None and out.dtype is dtype else a.dot(b)
    if isinstance(a, Variable) or isinstance(b, Variable):
        return MatMul().apply((a, b))[0]
    return array_operations.product(a, b, out)
