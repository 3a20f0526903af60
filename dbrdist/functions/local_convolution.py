"""Relatives of convolution: filters that differ from place to place, windows that follow the image, shifts.

Legend: N images, C channels, H W rows and columns, O output channels, kh kw the window, OH OW rows and columns of the
result; x (N, C, H, W).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dbrdist.core.array.backend import Array, accumulation_dtype, get_array_module, zeros_as
from dbrdist.core.array.types import PerAxis
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import expected, floating
from dbrdist.core.tape.elementwise_table import together
from dbrdist.core.tape.function_node import FunctionNode, call
from dbrdist.core.tape.variable import Operand, Variable, as_variable
from dbrdist.functions.convolution import pair
from dbrdist.functions.image import im2col
from dbrdist.functions.sampling import sampled


def _operands(function: str, num_axes: int, **xs: Any) -> list[Any]:
    """x, W and others as Variables of one type; the last is None where the bias is."""
    given = together(function, **{k: v for k, v in xs.items() if v is not None})
    named = dict(zip((k for k, v in xs.items() if v is not None), given))
    if named["x"].ndim != 4:
        raise expected(function, "x", "images, shape (N, C, H, W)", named["x"])
    if named["W"].ndim != num_axes:
        raise expected(function, "W", f"{num_axes} axes", named["W"])
    return [named.get(k) for k in xs]


def local_convolution_2d(x: Operand, W: Operand, b: Operand | None = None, stride: PerAxis = 1) -> Variable:
    """Convolution with different filters at each position of the result, (N, O, OH, OW).

    Args:
        x: images.
        W: filters, shape (O, OH, OW, C, kh, kw).
        b: biases, shape (O, OH, OW), or None.
        stride: steps of the window, a number or (rows, columns).

    Example:
        >>> F.local_convolution_2d(np.ones((1, 1, 3, 3)), np.ones((2, 2, 2, 1, 2, 2))).shape
        (1, 2, 2, 2)
    """
    name = "local_convolution_2d"
    x, W, b = _operands(name, 6, x=x, W=W, b=b)
    o, oh, ow, c, kh, kw = W.shape
    s = pair(stride)
    if min(s) < 1:
        raise expected(name, "stride", "sizes from 1 on", repr(stride))
    out = tuple((n - k) // step + 1 for n, k, step in zip(x.shape[2:], (kh, kw), s))
    if (c, oh, ow) != (x.shape[1], *out):
        raise expected(name, "W", f"shape (O, {out[0]}, {out[1]}, {x.shape[1]}, kh, kw) for x {x.shape}", W)
    if b is not None and b.shape != (o, oh, ow):
        raise expected(name, "b", f"shape {(o, oh, ow)} for W {W.shape}", b)
    windows = ops.transpose(im2col(x, (kh, kw), s), (2, 3, 0, 1))  # OH OW N (C kh kw)
    filters = ops.reshape(ops.transpose(W, (1, 2, 3, 4, 5, 0)), (oh, ow, c * kh * kw, o))
    y = ops.reshape(ops.matmul(windows, filters), (oh * ow, x.shape[0], o))
    y = ops.reshape(ops.transpose(y, (1, 2, 0)), (x.shape[0], o, oh, ow), True)
    return y if b is None else ops.add(y, b)


def deformable_convolution_2d_sampler(
    x: Operand, offset: Operand, W: Operand, b: Operand | None = None, stride: PerAxis = 1, pad: PerAxis = 0
) -> Variable:
    """Convolution that samples its input at positions shifted by ``offset``, (N, O, OH, OW) (Dai et al. 2017).

    Args:
        x: images, 0 beyond the border.
        offset: by how many pixels each place of each window is moved, shape (N, 2 kh kw, OH, OW): to the right in the
            first half of the channels, down in the second. Values between pixels are bilinear.
        W: filters, shape (O, C, kh, kw).
        b: biases, shape (O,), or None.
        stride, pad: a number or (rows, columns).

    Example:
        >>> x, offset = np.ones((1, 2, 5, 5)), np.zeros((1, 18, 3, 3))
        >>> F.deformable_convolution_2d_sampler(x, offset, np.ones((4, 2, 3, 3))).shape
        (1, 4, 3, 3)
    """
    name = "deformable_convolution_2d_sampler"
    x, offset, W, b = _operands(name, 4, x=x, offset=offset, W=W, b=b)
    (n, c, *sizes), (o, _, *k), s, p = x.shape, W.shape, pair(stride), pair(pad)
    if W.shape[1] != c:
        raise expected(name, "W", f"shape (O, {c}, kh, kw) for x {x.shape}", W)
    if min(s) < 1 or min(p) < 0:
        raise expected(name, "stride, pad", "stride from 1 on, and pad from 0 on", str((s, p)))
    out = [(size + 2 * p[i] - k[i]) // s[i] + 1 for i, size in enumerate(sizes)]
    if min(out) < 1:
        raise expected(name, "x", f"images that windows of {tuple(k)} fit into", x)
    if offset.shape != (n, 2 * k[0] * k[1], *out):
        raise expected(name, "offset", f"shape {(n, 2 * k[0] * k[1], *out)} for x {x.shape} and W {W.shape}", offset)
    if b is not None and b.shape != (o,):
        raise expected(name, "b", f"shape ({o},) for W {W.shape}", b)
    y = ops.matmul(_moved_windows(x, offset, k, s, p, out), _as_matrix(W))
    y = ops.transpose(ops.reshape(ops.cast(y, x.dtype), (n, *out, o)), (0, 3, 1, 2))
    return y if b is None else ops.add(y, ops.reshape(b, (1, o, 1, 1)))


def _moved_windows(
    x: Any, offset: Any, k: Sequence[int], s: tuple[int, ...], p: tuple[int, ...], out: Sequence[int]
) -> Variable:
    """What the moved windows see, (N OH OW, kh kw C), in the wider type."""
    xp, wide, (n, c) = get_array_module(x.array), accumulation_dtype(x.dtype), x.shape[:2]
    moved = ops.reshape(ops.cast(offset, wide), (n, 2, k[0] * k[1], *out))
    places = []
    for axis, half in ((0, 1), (1, 0)):
        window = np.arange(out[axis]) * s[axis] - p[axis]
        window = window.reshape((-1, 1) if axis == 0 else (1, -1))
        tap = np.indices(k)[axis].reshape(-1, 1, 1)
        places.append(ops.add(ops.getitem(moved, (slice(None), half)), xp.asarray((tap + window).astype(wide))))
    seen = sampled(ops.cast(x, wide), *(ops.transpose(v, (0, 2, 3, 1)) for v in places))
    return ops.reshape(seen, (n * out[0] * out[1], k[0] * k[1] * c))


def _as_matrix(W: Any) -> Variable:
    """Filters (O, C, kh, kw) as (kh kw C, O), in the wider type."""
    o, c, kh, kw = W.shape
    W = ops.cast(W, accumulation_dtype(W.dtype))
    return ops.reshape(ops.transpose(W, (2, 3, 1, 0)), (kh * kw * c, o))


class Shift(FunctionNode):
    """y = x with groups of channels moved by rows and columns; its transpose moves them back"""

    is_linear = True
    gives_new = True

    def __init__(self, groups: list[tuple[slice, tuple[int, ...]]]) -> None:
        self.groups = groups  # channels, and by how many rows and columns they move

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        x = xs[0]
        y = zeros_as(x, x.shape, x.dtype)
        for channels, moves in self.groups:
            source, target = zip(*(_overlap(n, m) for n, m in zip(x.shape[2:], moves)))
            y[(slice(None), channels, *target)] = x[(slice(None), channels, *source)]
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        back = [(channels, tuple(-m for m in moves)) for channels, moves in self.groups]
        return (call(Shift(back), gys[0]),)


def shift(x: Operand, ksize: PerAxis = 3, dilate: PerAxis = 1) -> Variable:
    """Groups of channels moved in the directions of a window; vacated positions become 0 (Wu et al. 2018).

    Args:
        x: images with at least kh kw channels, which are divided into kh kw groups of neighbours; the last group takes
            the rest.
        ksize: kh and kw, odd: a number or a pair. Group i moves by (i // kw - kh // 2) rows and (i % kw - kw // 2)
            columns; the last group stays, and the middle one moves in its place.
        dilate: factor of all moves, a number or a pair.

    Example:
        >>> F.shift(np.ones((1, 9, 4, 4))).shape
        (1, 9, 4, 4)
    """
    name = "shift"
    floating(name, x=x)
    x, k, d = as_variable(x), pair(ksize), pair(dilate)
    if min(k) < 1 or not (k[0] % 2 and k[1] % 2):
        raise expected(name, "ksize", "odd numbers", repr(ksize))
    num = k[0] * k[1]
    if x.ndim != 4 or x.shape[1] < num:
        raise expected(name, "x", f"images with at least {num} channels for a window of {k}", x)
    size, middle = x.shape[1] // num, (num - 1) // 2
    groups = []
    for i in range(num):
        at = {middle: num - 1, num - 1: middle}.get(i, i)
        moves = tuple((place - length // 2) * step for place, length, step in zip(divmod(at, k[1]), k, d))
        groups.append((slice(i * size, (i + 1) * size if i < num - 1 else x.shape[1]), moves))
    return Shift(groups).apply((x,))[0]


def _overlap(length: int, move: int) -> tuple[slice, slice]:
    """What stays on an axis that is moved: where it was, and where it comes to lie."""
    stay = max(length - abs(move), 0)
    before, after = (max(-move, 0), max(move, 0)) if stay else (0, 0)
    return slice(before, before + stay), slice(after, after + stay)
