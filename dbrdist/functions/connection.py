"""Functions with weights: linear, embedding, bilinear.

N examples, I inputs, O outputs.
"""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import numpy as np
from numpy import ndarray

from dbrdist import kernels
from dbrdist.core.array.array_operations import per_column
from dbrdist.core.array.backend import Array, empty, is_array
from dbrdist.core.array.config import config
from dbrdist.core.array.observed import observed
from dbrdist.core.array.sums import ones, sum_rows
from dbrdist.core.array.types import Destinations, DType
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import Operands, OperandTypeError, describe, expected
from dbrdist.core.tape.elementwise_table import together
from dbrdist.core.tape.function_node import FunctionNode
from dbrdist.core.tape.node import Value, VariableNode
from dbrdist.core.tape.variable import Operand, Variable, as_variable
from dbrdist.core.usage.mistakes import refuse, warn
from dbrdist.kernels.small_arrays.small import rows_times, times, turned_times, weighted_rows

# From this many multiplications on, the call of the fastest kernel pays.
_LARGE_PRODUCT = 1 << 19
_KEPT_ROWS = 1 << 14  # plans for more rows, whose ones take more memory, are not kept,
_KEPT_PLANS = 64  # nor more plans than these
_float32, _float64 = np.dtype(np.float32), np.dtype(np.float64)
_single: dict[Any, Any] = {}  # the plans of small products, by the shapes of x and W
_double: dict[Any, Any] = {}


class LinearFunction(FunctionNode):
    """y = x W^T + b, x (N, I), W (O, I), b (O,). gx = gy W, gW = gy^T x, gb = sum over N of gy."""

    operands = Operands("linear", x="float", W="float", b="float")
    writes = True
    reads_copy_of = 1
    laid: Any = None  # on a device: W in the type in which forward read it, for backward

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self._keep_inputs = (0, 1)
        y = _small_product(self, xs)
        if y is not None:
            return (y,)
        x, W = xs[0], xs[1]
        b = xs[2] if len(xs) == 3 else None
        if x.shape[1:] != W.shape[1:] or (b is not None and b.shape != W.shape[:1]):
            raise _mismatch(*xs)
        dtype = x.dtype
        if type(x) is ndarray and dtype.char in "fd" and x.size * len(W) < _LARGE_PRODUCT and W.dtype == dtype:
            y = x.dot(W.T)
            if b is not None:
                y += b
            return (y,)
        if type(x) is not ndarray and W.dtype != dtype:
            copy, self.copy = self.copy, None
            made = kernels.linear_and_keep(x, W, b, copy)
            if made is not None:
                y, self.laid = made
                return (y,)
        return (kernels.linear(x, W, b),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...], out: Destinations) -> tuple[Any, ...]:
        gy = gys[0]
        gxs = _small_gradients(self, wanted, gy, out)
        if gxs is not None:
            return gxs
        if self._on_variables:
            return self._derive_again(wanted, gy)
        x, W = self._kept_xs
        dtype = x.dtype
        grads: list[Any] = []
        at_once = None if type(gy) is ndarray else self._gradients_of_weights(wanted, gy, x, out)
        for k, i in enumerate(wanted):
            target = out and out[k]
            if i == 0:
                laid = self.laid
                as_laid = laid is not None and laid.dtype == gy.dtype
                grads.append(_in_type(kernels.matmul(gy, laid if as_laid else W), dtype))
            elif at_once is not None:
                grads.append(at_once[i - 1])
            elif i == 1:
                grads.append(kernels.matmul(gy.T, x, empty(W.shape, W.dtype, gy) if target is None else target))
            else:
                b = self.inputs[2]
                grads.append(_in_type(_row_sum(gy, b, target), b.dtype))
        return tuple(grads)

    def _drop_copies(self) -> None:
        self.laid = None

    def _gradients_of_weights(
        self, wanted: tuple[int, ...], gy: Array, x: Array, out: Destinations
    ) -> tuple[Array, Array] | None:
        """Those of W and b at once, by a device that has a kernel for that."""
        if wanted[-2:] != (1, 2):
            return None
        _, W, b = self.inputs
        targets = (None, None) if out is None else out[-2:]
        return kernels.linear_weight_gradients(gy, x, (W.dtype, b.dtype), *targets)

    def _derive_again(self, wanted: tuple[int, ...], gy: Any) -> tuple[Any, ...]:
        """The same of Variables."""
        nodes = self.inputs
        x, W = self.retained_inputs()
        grads: list[Any] = []
        for i in wanted:
            g = ops.matmul(gy, W) if i == 0 else ops.matmul(gy.T, x) if i == 1 else _row_sum(gy, nodes[2])
            grads.append(_in_type(g, nodes[i].dtype))
        return tuple(grads)


def _small_product(call: FunctionNode, xs: tuple[Array, ...]) -> Array | None:
    """The output on the host, of one type with x and W, where NumPy's own product takes the least time; else None."""
    x, W = xs[0], xs[1]
    dtype = x.dtype
    plans = _single if dtype is _float32 else _double if dtype is _float64 else None
    if plans is None or W.dtype is not dtype or type(x) is not ndarray:
        return None
    shapes = x.shape, W.shape
    plan = plans.get(shapes)
    if plan is None:
        plan = _plan(plans, shapes[0], shapes[1], dtype)
        if plan is None:
            return None
    b = xs[2] if len(xs) == 3 else None
    if b is not None and b.shape != plan[2]:
        return None
    call._for_rule = plan
    return rows_times(x, W, b, plan[0])


def _plan(plans: dict[Any, Any], shape: tuple[int, ...], sizes: tuple[int, ...], dtype: DType) -> Any:
    """What small products of x and W of these shapes need, or None where another way takes less time: the index that
    spreads a bias over the rows, ones to sum the rows, and the shape of a bias."""
    if len(shape) != 2 or len(sizes) != 2 or shape[1] != sizes[1]:
        return None
    num_rows, num_outputs = shape[0], sizes[0]
    if num_rows > _KEPT_ROWS or not 0 < num_rows * num_outputs * shape[1] < _LARGE_PRODUCT:
        return None  # of no inputs or rows there may be any number of outputs
    if len(plans) >= _KEPT_PLANS:
        plans.clear()
    plan = plans[shape, sizes] = per_column(num_rows, num_outputs), ones(num_rows, dtype), (num_outputs,)
    return plan


def _small_gradients(
    call: FunctionNode, wanted: tuple[int, ...], gy: Any, out: Destinations
) -> tuple[Array, ...] | None:
    """The gradients after a small product, where gy is of its type; else None."""
    plan = call._for_rule
    if plan is None or call._on_variables:
        return None
    x, W = call._kept_xs
    dtype = x.dtype
    if type(gy) is not ndarray or gy.dtype is not dtype:
        return None
    grads: list[Any] = []
    for k, i in enumerate(wanted):
        if i == 0:
            grads.append(times(gy, W))
            continue
        target = None if out is None else out[k]
        if i == 1:
            grads.append(turned_times(gy, x, target))
            continue
        b = call.inputs[2]
        grads.append(
            weighted_rows(plan[1], gy, target) if b.dtype is dtype else _in_type(_row_sum(gy, b, target), b.dtype)
        )
    return tuple(grads)


def _row_sum(gy: Operand, b: VariableNode, out: Array | None = None) -> Any:
    """The gradient of the bias, summed and kept in its own type where that is the wider one."""
    if not isinstance(gy, (ndarray, Variable)):
        return kernels.column_sums(gy, b.dtype if b.dtype.itemsize > gy.dtype.itemsize else gy.dtype, out)
    if b.dtype.itemsize > gy.dtype.itemsize:
        gy = ops.cast(gy, b.dtype)
    return sum_rows(gy, out) if type(gy) is ndarray else ops.sum_to(gy, b.shape, out)


def _in_type(g: Operand, dtype: DType) -> Any:
    return g if g.dtype == dtype else ops.cast(g, dtype)


def activation(x: Operand) -> Operand:
    """A 16-bit array as a Variable: it decides the type of the computation, as float32 weights beside it do not."""
    if isinstance(x, Value):
        return x
    dtype = getattr(x, "dtype", None)
    return as_variable(x) if getattr(dtype, "itemsize", 0) == 2 and is_array(x) else x


def linear(x: Operand, W: Operand, b: Operand | None = None, n_batch_axes: int = 1) -> Variable:
    """y = x W^T + b.

    Args:
        x: the first ``n_batch_axes`` axes count examples, the others together have I elements.
        W: weights, shape (O, I).
        b: biases, shape (O,); None for none.
        n_batch_axes: how many axes of x count examples.

    Returns:
        A Variable with the batch axes of x, then O.

    Raises:
        ValueError: the shapes do not match, or ``n_batch_axes`` is not from 1 to the number of axes of x less 1.

    Example:
        >>> F.linear(np.array([[1.0, 2.0]]), np.array([[3.0, 4.0]]), np.array([0.5])).array
        array([[11.5]])
    """
    if type(n_batch_axes) is not int:
        n_batch_axes = whole_batch_axes(n_batch_axes)
    a = x._array if isinstance(x, Value) else x
    if n_batch_axes != 1 or a.ndim != 2:
        shape = x.shape
        if not 1 <= n_batch_axes < max(len(shape), 2):
            raise expected("linear", "n_batch_axes", f"1 to {len(shape) - 1} for x of shape {shape}", n_batch_axes)
        return _linear_of_batch_axes(x, W, b, n_batch_axes)
    if a is x:
        x = activation(x)
    return LinearFunction().apply((x, W) if b is None else (x, W, b))[0]


def whole_batch_axes(n_batch_axes: int) -> int:
    """As an integer; an array is probably a second input of a network that takes one."""
    try:
        return operator.index(n_batch_axes)
    except TypeError:
        hint = "does the network take more than one input?" if hasattr(n_batch_axes, "shape") else ""
        raise OperandTypeError("linear", "n_batch_axes", "an integer", describe(n_batch_axes), hint) from None


def _linear_of_batch_axes(x: Operand, W: Any, b: Any, n_batch_axes: int) -> Variable:
    x = as_variable(x)
    batch = x.shape[:n_batch_axes]
    width = int(np.prod(x.shape[n_batch_axes:]))
    if W.ndim == 2 and width != W.shape[1]:
        raise expected(
            "linear", "x", f"{W.shape[1]} elements per example for W of shape {W.shape}", x, _hint_of_axes(x, W)
        )
    y = linear(ops.reshape(x, (int(np.prod(batch)), width)), W, b)
    return ops.reshape(y, (*batch, W.shape[0]))


def _hint_of_axes(x: Any, W: Any) -> str:
    """What is probably meant where the number of elements does not fit, but the last axis does."""
    if x.shape[-1] != W.shape[1]:
        return ""
    if x.ndim == 1:
        return "a single example needs an axis of examples, x[None]"
    return f"n_batch_axes={x.ndim - 1} applies the link to the last axis"


def _mismatch(x: Array, W: Array, b: Array | None = None) -> Exception:
    if W.ndim != 2:
        return expected("linear", "W", "2 axes: outputs, inputs", W)
    if x.shape[1] != W.shape[1]:
        return expected("linear", "x", f"{W.shape[1]} elements per example for W of shape {W.shape}", x)
    return expected("linear", "b", f"shape ({W.shape[0]},) for W of shape {W.shape}", b)


def embed_id(x: Operand, W: Operand, ignore_label: int | None = None) -> Variable:
    """Rows of a matrix by number, y = W[x].

    Args:
        x: integers from 0 to V - 1, any shape; takes no gradient.
        W: one row per id, shape (V, E).
        ignore_label: ids equal to it give zeros and no gradient; None ignores nothing.

    Returns:
        A Variable with the axes of x, then E.

    Raises:
        ValueError: x has no integers, or ids outside of W.

    Example:
        >>> F.embed_id(np.array([2, 0]), np.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])).array
        array([[4., 5.],
               [0., 1.]])
    """
    ids = x.array if isinstance(x, Variable) else x
    if ids.dtype.kind not in "iu":
        raise expected("embed_id", "x", "integers", ids)
    W = as_variable(W)
    valid = None if ignore_label is None else observed(np.not_equal, ids, ignore_label)
    if isinstance(ids, ndarray):
        known = ids if valid is None else ids[valid]
        if known.size and (known.min() < 0 or known.max() >= W.shape[0]):
            got = f"ids from {known.min()} to {known.max()}"
            error = expected("embed_id", "x", f"ids from 0 to {W.shape[0] - 1} for W of shape {W.shape}", got)
            if known.min() < -W.shape[0] or known.max() >= W.shape[0] or config.debug:
                raise error
            refuse(error)  # Chainer counts from the end
        if ids.ndim > 1 and ids.shape[-1] == W.shape[0] > 3 and ids.size > W.shape[0] and _is_onehot(ids):
            warn("embed_id: x: these look like one-hot rows, and each 0 and 1 is an id; write x.argmax(axis=-1)")
    if valid is None:
        return ops.getitem(W, ids)
    rows = ops.getitem(W, observed(np.multiply, ids, valid))
    return ops.where(valid[..., None], rows, rows.dtype.type(0))


def _is_onehot(ids: Array) -> bool:
    """Whether each row has one 1, and zeros; with all of them in one column it is the padding behind one id."""
    rows = ids.reshape(-1, ids.shape[-1])
    if int(rows.max()) != 1 or int(rows.min()) != 0 or not (rows.sum(axis=1) == 1).all():
        return False
    return int(rows.sum(axis=0).max()) < len(rows)


def bilinear(
    e1: Operand, e2: Operand, W: Operand, V1: Operand | None = None, V2: Operand | None = None, b: Operand | None = None
) -> Variable:
    """y[n, k] = sum over i, j of e1[n, i] e2[n, j] W[i, j, k] (+ e1 V1 + e2 V2 + b).

    Args:
        e1: the first inputs, shape (N, I); further axes are flattened.
        e2: the second inputs, shape (N, J); further axes are flattened.
        W: weights, shape (I, J, K).
        V1, V2: weights of the linear terms, shapes (I, K) and (J, K).
        b: biases, shape (K,). V1, V2 and b are given together or not at all.

    Returns:
        A Variable of shape (N, K).

    Raises:
        ValueError: some of V1, V2 and b are missing, or the shape of W does not match e1 and e2.

    Example:
        >>> F.bilinear(np.ones((1, 2)), np.ones((1, 3)), np.ones((2, 3, 1))).array
        array([[6.]])
    """
    given = [v is not None for v in (V1, V2, b)]
    if any(given) and not all(given):
        raise expected("bilinear", "V1, V2, b", "all three or none", f"{sum(given)} of them")
    if all(given):
        e1, e2, W, V1, V2, b = together("bilinear", e1=e1, e2=e2, W=W, V1=V1, V2=V2, b=b)
    else:
        e1, e2, W = together("bilinear", e1=e1, e2=e2, W=W)
    n = e1.shape[0]
    left, right, size = W.shape
    e1, e2 = (ops.reshape(e, (n, prod(e.shape[1:]))) for e in (e1, e2))  # -1 would not do for an empty batch
    if e1.shape[1] != left or e2.shape[1] != right:
        raise expected("bilinear", "W", f"shape ({e1.shape[1]}, {e2.shape[1]}, K)", W)
    pairs = ops.mul(ops.reshape(e1, (n, left, 1)), ops.reshape(e2, (n, 1, right)))
    y = ops.matmul(ops.reshape(pairs, (n, left * right)), ops.reshape(W, (left * right, size)))
    if all(given):
        y = ops.add(ops.add(y, ops.matmul(e1, V1)), ops.add(ops.matmul(e2, V2), b))
    return y
