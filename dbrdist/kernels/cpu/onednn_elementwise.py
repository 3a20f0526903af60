"""Elementwise kernels on oneDNN: dense arrays of one layout, seen as one long row, in one pass over memory.

What takes several calls, or a look at the result, goes block by block, while a block is in the cache. ``TABLE`` says
which rows of functions (``core.rows``) the library computes, and how. Left out is what it gets wrong (NaN, small
numbers) and what NumPy computes as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite, pi, sqrt
from typing import Any, NamedTuple

import numpy as np

from dbrdist.core.array import backend
from dbrdist.core.array.types import DType, HostArray
from dbrdist.kernels.cpu import onednn
from dbrdist.kernels.cpu.onednn import Builder, Primitive, address, scratch
from dbrdist.kernels.cpu.onednn_finite import is_finite, memory_row
from dbrdist.kernels.reference import numpy_

_SMALL = 1 << 15  # elements; below, NumPy's elementwise loops beat a call of the library
_SMALL_ROW = 1 << 13  # the same for what takes NumPy several passes
_BLOCK = 1 << 17  # elements of a block: smaller ones are many calls, larger ones leave the cache
_WIDE = np.dtype(np.float32)

# Values of dnnl_alg_kind_t. A step of a chain is one of them with its numbers, or with the other operand.
RELU, TANH, SQUARE, LINEAR, LOGISTIC, EXP = 0x20, 0x21, 0x23, 0x26, 0x29, 0x2A
SWISH, CLIP, POWER, GELU_ERF, MISH, HARDSWISH = 0x2C, 0x2F, 0x30, 0x31, 0x33, 0x34
RELU_OF_OUTPUT, TANH_OF_OUTPUT, LOGISTIC_OF_OUTPUT = _OF_OUTPUT = 0x100, 0x101, 0x104
ADD, MUL, MAX, MIN, DIV, SUB, GE, GT, LE, LT = range(0x1FFF0, 0x1FFFA)


class Derivative(NamedTuple):
    """gy times the derivative of one of the library's functions, of its input or output."""

    kind: int
    alpha: float = 0.0
    beta: float = 0.0


class Kernel(NamedTuple):
    """How to compute a row or a derivative of one.

    Args:
        steps: of the row's numbers: a Derivative; or a chain, the name of an operand and steps from there; or several
            chains by the name of what they make, which those that follow may take, the result last.
        is_checked: a result that is not finite everywhere is left to the row's own formula.
        below, tail: where the first operand is less than ``below`` of the row's numbers, the result is ``tail`` of the
            operands there and the numbers.
    """

    steps: Callable[..., Any]
    is_checked: bool = False
    below: Callable[..., float] | None = None
    tail: Callable[..., HostArray] | None = None


# Below it, the library's exponential function gives 0, and what is made of it, too.
_LEAST = -86.0


def _sigmoid_tail(x: HostArray, beta: float = 1.0) -> HostArray:
    with np.errstate(over="ignore", under="ignore"):
        return 1 / (np.exp(x * -beta) + 1)


def _exp_tail(x: HostArray, gy: HostArray, factor: float) -> HostArray:
    with np.errstate(under="ignore"):
        return gy * (np.exp(x) * factor)


def _mish_gradient_tail(x: HostArray, gy: HostArray) -> HostArray:
    """gy (1 + x) exp(x), to which the derivative comes close."""
    with np.errstate(under="ignore"):
        return gy * (np.exp(x) * (x + 1))


def _swish_gradient_tail(x: HostArray, gy: HostArray, beta: float) -> HostArray:
    s = _sigmoid_tail(x, beta)
    with np.errstate(under="ignore"):
        return gy * (s * (x * beta * (1 - s) + 1))


def _below_least(beta: float = 1.0, *_: float) -> float:
    return _LEAST / _meant(beta > 0, beta)


def _one_or(low: float) -> tuple[int, float, float]:
    """Keeps 1, and makes ``low`` of 0."""
    return (CLIP, low, 1.0) if 0 <= low <= 1 else (LINEAR, 1.0 - low, low)


def _selu(alpha: float, scale: float) -> Any:
    """scale times x, and below 0 times alpha (exp(x) - 1), which is 2 t / (1 - t) for t = tanh(x / 2): exact near 0."""
    return {
        "above": ("x", _ZERO, (MAX, "x"), (LINEAR, scale)),
        "t": ("x", _ZERO, (MIN, "x"), (LINEAR, 0.5), (TANH,)),
        "y": ("t", (LINEAR, -1.0, 1.0), (POWER, 2 * alpha * scale, -1.0), (MUL, "t"), (ADD, "above")),
    }


def _elu_gradient(alpha: float, scale: float) -> Any:
    """gy times scale, and below 0 times alpha exp(x) as well."""
    exp = ("x", _ZERO, (MIN, "x"), (EXP,))
    if alpha == scale == 1:
        return (*exp, (MUL, "gy"))
    _meant(alpha >= 0, alpha)
    factor = ((GE, 0.0), (CLIP, alpha, 1.0)) if alpha <= 1 else ((LT, 0.0), (LINEAR, alpha - 1, 1.0))
    return {"exp": exp, "gx": ("x", *factor, (LINEAR, scale), (MUL, "exp"), (MUL, "gy"))}


# Nothing is less than minus infinity, and neither is NaN, for which GE and GT hold. From this 0 on MAX and MIN keep the
# NaN of their second operand; they lose that of the first. Comparisons take a number alone: after another step with an
# array, the library fails at sizes that 16 does not divide.
_ZERO = (LT, -inf)

_GELU_SLOPE = 2 * sqrt(2 / pi)  # of the argument of the sigmoid, at 0
_GELU_CUBIC = 0.044715 * _GELU_SLOPE
# (a + 5 / 2) exp(a^2) erfc(a) / 2 for a from 0 to 10 as a polynomial in 1 - 5 / (a + 5 / 2), the highest power first;
# the largest relative error is 8e-9 (fitted to mpmath's erfc by Lawson's algorithm).
_ERFC = 0.5 * np.array((
    1.44111412e-04, 6.32456355e-04, -5.25321702e-04, -4.80628041e-03, 8.42074110e-03, 2.83611923e-02, -1.71254522e-01,
    4.53914104e-01, -8.04651736e-01, 1.05403182e00,
))  # fmt: skip
_GELU_TAIL = -2.0


def _gelu_tail(x: HostArray, gy: HostArray | None = None) -> HostArray:
    """x p(x), or gy times its derivative p(x) + x exp(-x^2 / 2) / sqrt(2 pi), p the normal distribution function.

    For x below ``_GELU_TAIL``, where the library, which adds erf(x) to 1, loses one digit after another.
    """
    x = x.astype(np.float64)
    bell, share = np.exp(-0.5 * x * x), 1 / (2.5 - sqrt(0.5) * x)
    ratio = np.polyval(_ERFC, 1 - 5 * share) * share
    return x * (ratio * bell) if gy is None else (ratio + x / sqrt(2 * pi)) * bell * gy


def _gelu_argument(x: HostArray) -> HostArray:
    return x * (x * x * _GELU_CUBIC + _GELU_SLOPE)


def _gelu_by_tanh_gradient_tail(x: HostArray, gy: HostArray) -> HostArray:
    s = _sigmoid_tail(_gelu_argument(x))
    return gy * (s * (x * (3 * _GELU_CUBIC * x * x + _GELU_SLOPE) * (1 - s) + 1))


def _gelu_by_tanh_gradient() -> Any:
    """s (1 + x (1 - s) (a + 3 b x^2)), s = sigmoid(a x + b x^3)"""
    return {
        "s": ("x", (MUL, "x"), (LINEAR, _GELU_CUBIC, _GELU_SLOPE), (MUL, "x"), (LOGISTIC,)),
        "m": ("x", (MUL, "x"), (LINEAR, 3 * _GELU_CUBIC, _GELU_SLOPE), (MUL, "x")),
        "gx": ("s", (LINEAR, -1.0, 1.0), (MUL, "m"), (LINEAR, 1.0, 1.0), (MUL, "s"), (MUL, "gy")),
    }


def _mish() -> Any:
    """x n / (n + 2), n = e (e + 2), e = exp(x): the library's own mish has no digit right below -16."""
    return {
        "e": ("x", _ZERO, (LINEAR, 1.0, 20.0), (MIN, "x"), (EXP,)),
        "n": ("e", (LINEAR, 1.0, 2.0), (MUL, "e")),
        "y": ("n", (LINEAR, 1.0, 2.0), (POWER, 1.0, -1.0), (MUL, "n"), (MUL, "x")),
    }


# By the name of a row; by that name and the place of an operand, for the gradient of that operand.
TABLE: dict[Any, Kernel] = {
    "tanh": Kernel(lambda: ("x", (TANH,))),
    ("tanh", 0): Kernel(lambda: Derivative(TANH_OF_OUTPUT)),
    "sigmoid": Kernel(lambda: ("x", (LOGISTIC,)), False, _below_least, _sigmoid_tail),
    ("sigmoid", 0): Kernel(lambda: Derivative(LOGISTIC_OF_OUTPUT)),
    "silu": Kernel(
        lambda beta: ("x", (LINEAR, beta), (LOGISTIC,), (MUL, "x")),
        False, _below_least, lambda x, beta: x * _sigmoid_tail(x, beta),
    ),
    ("silu", 0): Kernel(lambda beta: Derivative(SWISH, beta), False, _below_least, _swish_gradient_tail),
    "leaky_relu": Kernel(lambda slope: ("x", (RELU, _meant(slope != 0, slope)))),  # by 0 it would lose NaN
    ("leaky_relu", 0): Kernel(lambda slope: ("x", (MUL, -1.0), (LE, 0.0), _one_or(slope), (MUL, "gy"))),
    ("elu", 0): Kernel(lambda alpha: _elu_gradient(alpha, 1.0), True, lambda alpha: _LEAST, _exp_tail),
    "selu": Kernel(lambda alpha, scale: _selu(alpha, scale)),
    ("selu", 0): Kernel(
        lambda alpha, scale: _elu_gradient(alpha, scale),
        True, lambda alpha, scale: _LEAST, lambda x, gy, alpha, scale: _exp_tail(x, gy, alpha * scale),
    ),
    "huber": Kernel(
        lambda delta: {
            "a": ("x", (SUB, "t")),
            "held": ("a", (CLIP, -_meant(delta >= 0, delta), delta)),
            "y": ("held", (LINEAR, -0.5), (ADD, "a"), (MUL, "held")),
        }
    ),
    ("huber", 0): Kernel(
        lambda delta: {
            "a": ("x", (SUB, "t")),
            "below": ("a", _ZERO, (LINEAR, 1.0, _meant(delta >= 0, delta)), (MIN, "a")),
            "gx": ("below", _ZERO, (LINEAR, 1.0, -delta), (MAX, "below"), (MUL, "gy")),
        }
    ),
    ("softplus", 0): Kernel(
        lambda beta: ("x", (LINEAR, beta), (LOGISTIC,), (MUL, "gy")),
        False, _below_least, lambda x, gy, beta: gy * _sigmoid_tail(x, beta),
    ),
    ("relu6", 0): Kernel(lambda: Derivative(CLIP, 0.0, 6.0), is_checked=True),
    ("clipped_relu", 0): Kernel(lambda z: Derivative(CLIP, 0.0, _meant(z >= 0, z)), is_checked=True),
    "hardswish": Kernel(lambda: ("x", (HARDSWISH, 1 / 6, 0.5))),
    ("hardswish", 0): Kernel(lambda: Derivative(HARDSWISH, 1 / 6, 0.5), is_checked=True),
    "mish": Kernel(_mish, False, _below_least, lambda x: x * np.exp(x)),
    ("mish", 0): Kernel(lambda: Derivative(MISH), True, _below_least, _mish_gradient_tail),
    "gelu": Kernel(lambda: ("x", (GELU_ERF,)), True, lambda: _GELU_TAIL, _gelu_tail),
    ("gelu", 0): Kernel(lambda: Derivative(GELU_ERF), True, lambda: _GELU_TAIL, _gelu_tail),
    "gelu_by_tanh": Kernel(
        lambda: ("x", (MUL, "x"), (LINEAR, _GELU_CUBIC, _GELU_SLOPE), (MUL, "x"), (LOGISTIC,), (MUL, "x")),
        False, lambda: -9.0, lambda x: x * _sigmoid_tail(_gelu_argument(x)),
    ),
    ("gelu_by_tanh", 0): Kernel(_gelu_by_tanh_gradient, True, lambda: -9.0, _gelu_by_tanh_gradient_tail),
    ("square", 0): Kernel(lambda: ("x", (LINEAR, 2.0), (MUL, "gy"))),
    "squared_difference": Kernel(lambda: ("x1", (SUB, "x2"), (SQUARE,))),
    ("squared_difference", 0): Kernel(lambda: ("x1", (SUB, "x2"), (LINEAR, 2.0), (MUL, "gy"))),
    "pow_number": Kernel(lambda c: ("x", (MUL, "x"), (MUL, _meant(c == 3, "x")))),
    ("pow_number", 0): Kernel(
        lambda c: ("x", (LINEAR, 2.0), (MUL, "gy")) if c == 2
        else ("x", (MUL, _meant(c == 3, "x")), (LINEAR, 3.0), (MUL, "gy"))
    ),
    "exp_difference": Kernel(lambda: ("a", (SUB, "b"), (EXP,)), is_checked=True),
    "scaled_exp_difference": Kernel(lambda: ("a", (SUB, "b"), (EXP,), (MUL, "c")), is_checked=True),
    ("rsqrt", 0): Kernel(lambda: ("y", (DIV, "x"), (LINEAR, -0.5), (MUL, "gy"))),
}  # fmt: skip


def _meant(holds: bool, value: float | str) -> Any:
    if not holds:
        raise onednn.Unsupported(f"{value} as a number of this row")
    return value


# ---- what a plan runs


def _build(steps: Any, names: tuple[str, ...], arrays: tuple[HostArray, ...]) -> tuple[Primitive, list[Any]]:
    """A primitive and its operands: places in ``names``, or arrays of one number."""
    if isinstance(steps, Derivative):
        return _build_derivative(steps, arrays), [0, len(arrays) - 1]
    return _build_chain(steps, names, arrays)


def _build_derivative(derivative: Derivative, arrays: tuple[HostArray, ...]) -> Primitive:
    kind, first = derivative.kind, arrays[0]
    if any(a.shape != first.shape for a in arrays):
        raise onednn.Unsupported("operands that broadcast")
    with Builder() as b:
        row, attributes = b.memory((first.size,), onednn.data_type(first.dtype)), b.attributes()
        numbers = [onednn.c_float(v) for v in derivative[1:]]
        forward = b.describe("eltwise_forward", onednn.FORWARD_TRAINING, kind, row, row, *numbers, attributes)
        backward = b.describe("eltwise_backward", kind, row, row, row, *numbers, forward, attributes)
        kept = onednn.DST if kind in _OF_OUTPUT else onednn.SRC
        return b.primitive(backward, {kept: row, onednn.DIFF_DST: row, onednn.DIFF_SRC: row})


def _build_chain(
    chain: Any, names: tuple[str, ...], arrays: tuple[HostArray, ...], made: DType | None = None
) -> tuple[Primitive, list[Any]]:
    """A binary operation, times 1 where the chain does not begin with one, and what follows as its post-operations.

    ``made``: the type of the result, where that is not the operands'.
    """
    first, *steps = chain
    if steps[0][0] < ADD:
        steps.insert(0, (MUL, 1.0))
    others = [s[1] for s in steps if s[0] >= ADD]
    dtype, shapes = arrays[0].dtype, _shapes_of(arrays)
    with Builder() as b:
        memories = {n: b.memory(s, onednn.data_type(a.dtype)) for n, s, a in zip(names, shapes, arrays)}
        row, one = memories[first], b.memory((1,) * len(shapes[0]), onednn.data_type(dtype))
        result = row if made is None else b.memory(shapes[0], onednn.data_type(made))
        follow = [s if s[0] < ADD else (s[0], memories.get(s[1], one)) for s in steps[1:]]
        places = {onednn.SRC: row, onednn.SRC_1: memories.get(others[0], one)}
        places |= {onednn.post_operand(i): s[1] for i, s in enumerate(follow) if s[0] >= ADD}
        description = b.describe("binary", steps[0][0], row, places[onednn.SRC_1], result, b.attributes(follow))
        primitive = b.primitive(description, {**places, onednn.DST: result})
    if not primitive.implementation.startswith("jit"):  # the reference implementation takes a hundred times as long
        raise onednn.Unsupported("a chain of operations on this processor")
    return primitive, [names.index(v) if isinstance(v, str) else np.array([v], dtype) for v in (first, *others)]


def _shapes_of(arrays: tuple[HostArray, ...]) -> list[tuple[int, ...]]:
    """The arrays as the library sees them: rows (1, M, K) where others have one number for each row, else one row."""
    first = arrays[0]
    num_rows = {a.size for a in arrays[1:] if a.shape != first.shape}
    if not num_rows:
        return [(1, first.size)] * len(arrays)
    m = num_rows.pop()
    is_matrix = first.ndim == 2 and m == len(first)
    if not is_matrix or any(a.shape not in (first.shape, (m, 1)) for a in arrays):
        raise onednn.Unsupported("operands that broadcast")
    return [(1, m, a.size // m) for a in arrays]


def _layout_of(first: HostArray) -> tuple[Any, Any]:
    """What makes an array lie densely as the first one does, and what allocates such a result."""
    are_images = first.ndim == 4 and backend.lies_as_images(first)
    new = (backend.allocator if are_images else backend.plain_allocator)(first.shape, first.dtype)
    return backend.channels_last if are_images else np.ascontiguousarray, new


def _runner(primitive: Primitive, operands: list[Any], first: HostArray) -> Any:
    """The kernel for arrays of one type; the result lies as the first of them."""
    dense, new = _layout_of(first)

    def run(*arrays: HostArray) -> HostArray:
        xs, y = [dense(a) for a in arrays], new()
        primitive(*[address(xs[i] if type(i) is int else i) for i in operands], address(y))
        return y

    return run


def _runner_in_blocks(
    kernel: Kernel, steps: Any, names: tuple[str, ...], arrays: tuple[HostArray, ...], numbers: tuple[Any, ...]
) -> Any:
    """The kernel for arrays of one shape and type; it returns None where the row's own formula has to do."""
    below = -inf if kernel.below is None else kernel.below(*numbers)
    chains = steps if isinstance(steps, dict) else {"": steps}
    first = arrays[0]
    (dense, new), size, width = _layout_of(first), first.size, first.itemsize
    lengths = [min(_BLOCK, size - start) for start in range(0, size, _BLOCK)]
    built = {n: _build_chains(chains, names, np.empty(n, first.dtype)) for n in set(lengths)}
    blocks = [(i * _BLOCK * width, built[n]) for i, n in enumerate(lengths)]
    roles = [f"row {i}" for i in range(len(chains) - 1)]

    def run(*arrays: HostArray) -> HostArray | None:
        xs, y = [dense(a) for a in arrays], new()
        made = memory_row(y)
        starts, target = [address(x) for x in xs], address(y)
        kept = [scratch(role, _BLOCK * _WIDE.itemsize) for role in roles]
        places = [address(a) for a in kept]
        for offset, calls in blocks:
            here = slice(offset // width, offset // width + _BLOCK)
            now = [*[s + offset for s in starts], *places, target + offset]
            for primitive, operands in calls:
                primitive(*[now[i] if type(i) is int else address(i) for i in operands])
            if kernel.tail is not None:
                _mend(kernel.tail, below, made[here], [memory_row(x)[here] for x in xs], numbers)
            if kernel.is_checked and not is_finite(made[here]):
                return None
        return y

    return run


def _mend(
    tail: Callable[..., HostArray], below: float, y: HostArray, xs: list[HostArray], numbers: tuple[Any, ...],
) -> None:  # fmt: skip
    """Compute the elements of a block again for which the library's function has a tail that is wrong."""
    if xs[0].min() >= below:  # not so for NaN
        return
    low = np.flatnonzero(xs[0] < below)
    if low.size:
        y[low] = tail(*[x[low] for x in xs], *numbers)


def _build_chains(chains: dict[str, Any], names: tuple[str, ...], block: HostArray) -> list[Any]:
    """For each chain its primitive and its operands, the result last: places among names and what chains make."""
    if len(chains) == 1:
        primitive, operands = _build(*chains.values(), names, (block,) * len(names))
        return [(primitive, [*operands, len(names)])]
    known, arrays, calls = names, (block,) * len(names), []
    wide = np.empty(block.shape, _WIDE)  # what chains make for others is not rounded to 16 bits
    for name, steps in chains.items():
        made = _WIDE if len(calls) < len(chains) - 1 else block.dtype
        primitive, operands = _build_chain(steps, known, arrays, made)
        known, arrays = (*known, name), (*arrays, wide)
        calls.append((primitive, [*operands, len(known) - 1]))
    return calls


def _check(limit: int, *arrays: HostArray) -> None:
    onednn.require(*arrays)
    if arrays[0].size < limit:
        raise onednn.Unsupported("a small array")


def _plan_row(key: Any, names: tuple[str, ...], arrays: tuple[HostArray, ...], numbers: tuple[float, ...]) -> Any:
    _check(_SMALL_ROW, *arrays)
    first = arrays[0]
    is_dense = first.flags.c_contiguous or (first.ndim == 4 and backend.is_channels_last(first))
    if key not in TABLE or not is_dense or not all(type(v) in (int, float) and isfinite(v) for v in numbers):
        raise onednn.Unsupported("a row, its layout or its numbers")
    kernel = TABLE[key]
    steps = kernel.steps(*numbers)
    has_blocks = isinstance(steps, dict) or kernel.is_checked or kernel.tail is not None
    if has_blocks and all(a.shape == first.shape for a in arrays):
        in_blocks = _runner_in_blocks(kernel, steps, names, arrays, numbers)
        return lambda key, names, arrays, numbers: in_blocks(*arrays)
    if isinstance(steps, dict) or kernel.tail is not None:
        raise onednn.Unsupported("operands that broadcast")
    run = _runner(*_build(steps, names, arrays), first)

    def row(
        key: Any, names: tuple[str, ...], arrays: tuple[HostArray, ...], numbers: tuple[float, ...],
    ) -> HostArray | None:  # fmt: skip
        y = run(*arrays)
        return None if kernel.is_checked and not is_finite(y) else y

    return row


def _plan_relu_forward(x: HostArray) -> Any:
    _check(_SMALL, x)
    if x.dtype == np.float32:  # NumPy's maximum is as fast
        raise onednn.Unsupported("float32")
    return _runner(*_build(("x", _ZERO, (MAX, "x")), ("x",), (x,)), x)


def _plan_relu_backward(y: HostArray, gy: HostArray) -> Any:
    """oneDNN multiplies by 0 or 1, which makes NaN of what is not finite."""
    _check(_SMALL, y, gy)
    run = _runner(*_build(("y", (GT, 0.0), (MUL, "gy")), ("y", "gy"), (y, gy)), y)

    def relu_backward(y: HostArray, gy: HostArray) -> HostArray:
        gx = run(y, gy)
        return gx if is_finite(gx) else numpy_.relu_backward(y, gy)

    return relu_backward


def _plan_add(a: HostArray, b: HostArray) -> Any:
    _check(_SMALL, a, b)
    return _runner(*_build(("a", (ADD, "b")), ("a", "b"), (a, b)), a)


ROWS = {
    "relu_forward": _plan_relu_forward,
    "relu_backward": _plan_relu_backward,
    "add": _plan_add,
    "row": _plan_row,
}
