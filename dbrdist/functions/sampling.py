"""Images read between their pixels.

Legend: N images of S pixels with C channels; P places in each; T = 4 pixels around a place: upper left, upper right,
lower left, lower right.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from dbrdist import kernels
from dbrdist.core.array import array_operations
from dbrdist.core.array.backend import Array, get_array_module
from dbrdist.core.array.elementwise import elementwise
from dbrdist.core.array.sums import sum_over
from dbrdist.core.tape import ops
from dbrdist.core.tape.function_node import FunctionNode, call
from dbrdist.core.tape.variable import Operand, Variable, as_array

_MOST_PIXELS = 1 << 31  # whose numbers the loops read as 32-bit integers


class Pixels(NamedTuple):
    """Which pixels are around each place."""

    numbers: Array  # (N, T, P)
    size: int  # S

    def taps(self) -> list[tuple[Array, Array]]:
        """For each of the T pixels the indices of images and pixels, (N, 1) and (N, P)."""
        xp = get_array_module(self.numbers)
        examples = xp.arange(len(self.numbers)).reshape(-1, 1)
        return [(examples, self.numbers[:, k]) for k in range(self.numbers.shape[1])]

    def by_loop(self, name: str, num_channels: int, *arrays: Array) -> Array | None:
        """What a compiled loop makes of arrays, flat; None where there is none for them."""
        if type(arrays[0]) is not np.ndarray or self.size >= _MOST_PIXELS:
            return None
        n, last = num_channels * self.numbers.shape[2], np.ascontiguousarray(self.numbers, np.int32).view(np.float32)
        arrays = (*map(np.ascontiguousarray, arrays), last)
        made = kernels.of_rows(name, arrays, n, num_channels * self.size, num_channels)
        return None if made is None else made[0]


class _OfPixels(FunctionNode):
    """What is linear in each of two arrays, of pixels and of places."""

    gives_new = True

    def __init__(self, pixels: Pixels) -> None:
        self.pixels = pixels


class Mixed(_OfPixels):
    """y (N, P, C) = the sum over t of w_t x at the t-th pixel of each place; x (N, S, C), w (N, T, P)"""

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1))
        x, w = xs
        made = self.pixels.by_loop("mix_pixels", x.shape[2], x, w)
        if made is not None:
            return (made.reshape(len(x), -1, x.shape[2]),)
        y: Any = 0.0
        for k, place in enumerate(self.pixels.taps()):
            y = x[place] * w[:, k, :, None] + y
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        (x, w), gy = self.retained_inputs(), gys[0]
        if type(gy) is np.ndarray:
            gy = np.ascontiguousarray(gy)  # for both loops
        rules = lambda: call(SpreadMixed(self.pixels), gy, w), lambda: call(PixelProducts(self.pixels), gy, x)
        return tuple([rules[i]() for i in wanted])


_TAP_ORDER = 1, 2, 0, 3  # in which the sums of each of the T pixels are added, as in sampling_loops.h


class SpreadMixed(_OfPixels):
    """y (N, S, C) = zeros with w_t x added at the t-th pixel of each place; x (N, P, C), w (N, T, P)"""

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1))
        x, w = xs
        shape = len(x), self.pixels.size, x.shape[2]
        made = self.pixels.by_loop("spread_pixels", x.shape[2], x, w)
        if made is not None:
            return (made.reshape(shape),)
        y: Any = None
        taps = self.pixels.taps()
        for k in _TAP_ORDER:
            place = taps[k]
            part = array_operations.scattered(x * w[:, k, :, None], place, shape, False)
            y = part if y is None else y + part
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        (x, w), gy = self.retained_inputs(), gys[0]
        rules = lambda: call(Mixed(self.pixels), gy, w), lambda: call(PixelProducts(self.pixels), x, gy)
        return tuple([rules[i]() for i in wanted])


class PixelProducts(_OfPixels):
    """y_t (N, T, P) = the product of a at each place and of b at its t-th pixel; a (N, P, C), b (N, S, C)"""

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1))
        a, b = xs
        y = self.pixels.by_loop("pixel_products", a.shape[2], a, b)
        if y is not None:
            return (y.reshape(self.pixels.numbers.shape),)
        parts = [sum_over(a * b[place], (2,), False) for place in self.pixels.taps()]
        return (get_array_module(a).stack(parts, 1),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        (a, b), gy = self.retained_inputs(), gys[0]
        rules = lambda: call(Mixed(self.pixels), b, gy), lambda: call(SpreadMixed(self.pixels), a, gy)
        return tuple([rules[i]() for i in wanted])


def sampled(x: Operand, rows: Operand, columns: Operand) -> Variable:
    """x at places between its pixels, bilinear, 0 beyond the border.

    ``rows`` and ``columns``: the places in pixels from the first, both (N, ...). Returns (N, ..., C).
    """
    n, num_channels, height, width = x.shape
    places = rows.shape[1:]
    flat = (n, 1, math.prod(places))
    beside = _neighbours(columns, width)
    numbers, weights = [], []
    for row, row_weight in _neighbours(rows, height):
        for column, weight in beside:
            numbers.append((row * width + column).reshape(flat))
            weights.append(ops.reshape(ops.mul(row_weight, weight), flat))
    pixels = Pixels(get_array_module(as_array(x)).concatenate(numbers, 1), height * width)
    # In this order, since four axes as N H W C would pass for images of another layout.
    values = ops.transpose(ops.reshape(x, (n, num_channels, pixels.size)), (0, 2, 1))
    y = Mixed(pixels).apply((values, ops.concat(weights, axis=1)))[0]
    return ops.reshape(y, (n, *places, num_channels))


def _neighbours(at: Operand, length: int) -> list[tuple[Array, Any]]:
    """The two pixels beside each place along one axis, with their weights: 0 for pixels beyond the border."""
    below = elementwise(lambda v: np.clip(np.floor(np.where(v == v, v, -2.0)), -2, length), as_array(at))
    part = ops.sub(at, below)
    found = []
    for index, weight in ((below, ops.sub(1.0, part)), (below + 1, part)):
        inside = (index >= 0) & (index < length)
        found.append((index.clip(0, length - 1).astype(int), ops.where(inside, weight, 0.0)))
    return found
