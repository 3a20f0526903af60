"""Images taken apart, put together, resized and sampled.

Legend: N images, C channels, H W rows and columns; x (N, C, H, W).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np

from dbrdist import kernels
from dbrdist.core.array.array_operations import are_images
from dbrdist.core.array.backend import (
    Array,
    accumulation_dtype,
    empty,
    empty_as,
    get_array_module,
    lies_as_images,
    zeros_as,
)
from dbrdist.core.array.elementwise import KERNEL_ELEMENTS, elementwise
from dbrdist.core.array.types import PerAxis
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import expected, floating, one_of
from dbrdist.core.tape.elementwise_table import together
from dbrdist.core.tape.function_node import FunctionNode, call
from dbrdist.core.tape.variable import Operand, Variable, as_variable
from dbrdist.functions.convolution import pair
from dbrdist.functions.sampling import sampled
from dbrdist.kernels.geometry import out_size


def _images(function: str, x: Operand, name: str = "x") -> Variable:
    floating(function, **{name: x})
    x = as_variable(x)
    if x.ndim != 4:
        raise expected(function, name, "images, shape (N, C, H, W)", x)
    return x


# ---- between channels and pixels ------------------------------------------------------------------------------------


class Rearranged(FunctionNode):
    """y = x with blocks of r by r pixels as channels, or (``to_pixels``) the other way: the transpose of each other

    One copy straight into place, channels-last, takes half the time of steps of reshape and transpose.
    """

    is_linear = True
    gives_new = True

    def __init__(self, r: int, to_pixels: bool) -> None:
        self.r, self.to_pixels = r, to_pixels

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        x, r = xs[0], self.r
        n, c, h, w = x.shape
        if self.to_pixels:
            y = empty((n, c // (r * r), h * r, w * r), x.dtype, x)
            _copy(_blocks(y, r), x.reshape((n, r, r, c // (r * r), h, w)))
        else:
            y = empty((n, c * r * r, h // r, w // r), x.dtype, x)
            _copy(y.reshape((n, r, r, c, h // r, w // r)), _blocks(x, r))
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(Rearranged(self.r, not self.to_pixels), gys[0]),)


def _blocks(pixels: Array, r: int) -> Array:
    """(N, C, H r, W r) as a view (N, r, r, C, H, W): a split axis is never copied."""
    n, c, h, w = pixels.shape
    return pixels.reshape((n, c, h // r, r, w // r, r)).transpose(0, 3, 5, 1, 2, 4)


def _copy(target: Array, source: Array) -> None:
    """One (N, r, r, C, H, W) into another; of one channel NumPy would run along the short rows of a block."""
    if target.shape[3] == 1 and isinstance(target, np.ndarray):
        for i, j in np.ndindex(target.shape[1:3]):
            target[:, i, j] = source[:, i, j]
    else:
        target[...] = source


def depth2space(X: Operand, r: int) -> Variable:
    """Channels laid out as pixels: (N, C r r, H, W) to (N, C, H r, W r) (Shi et al. 2016, arXiv:1609.05158).

    Channel (i r + j) C + c becomes row i and column j of each r by r block of channel c.

    Args:
        X: images (N, C, H, W).
        r: side of a block in pixels.

    Example:
        >>> F.depth2space(np.ones((1, 8, 3, 3)), 2).shape
        (1, 2, 6, 6)
    """
    X, r = _images("depth2space", X, "X"), operator.index(r)
    if r < 1 or X.shape[1] % (r * r):
        raise expected("depth2space", "X", f"a multiple of r r = {r * r} channels", X)
    return Rearranged(r, True).apply((X,))[0]


def space2depth(X: Operand, r: int) -> Variable:
    """Blocks of r by r pixels laid out as channels: (N, C, H r, W r) to (N, C r r, H, W); undoes depth2space.

    Args:
        X: images (N, C, H, W).
        r: side of a block in pixels.

    Example:
        >>> F.space2depth(np.ones((1, 2, 6, 6)), 2).shape
        (1, 8, 3, 3)
    """
    X, r = _images("space2depth", X, "X"), operator.index(r)
    if r < 1 or X.shape[2] % r or X.shape[3] % r:
        raise expected("space2depth", "X", f"rows and columns that r = {r} divides", X)
    return Rearranged(r, False).apply((X,))[0]


# ---- windows --------------------------------------------------------------------------------------------------------


class Windows(NamedTuple):
    """Where windows are on an image: sizes of kernel, stride, padding, dilation, and how many there are."""

    k: tuple[int, int]
    s: tuple[int, int]
    p: tuple[int, int]
    d: tuple[int, int]
    out: tuple[int, int]

    def padded(self, h: int, w: int) -> tuple[int, int]:
        """Rows and columns that hold the image in its frame, and every window."""
        reach = [(o - 1) * s + (k - 1) * d + 1 for o, s, k, d in zip(self.out, self.s, self.k, self.d)]
        return max(h + 2 * self.p[0], reach[0]), max(w + 2 * self.p[1], reach[1])

    def taps(self) -> list[tuple[int, int, slice, slice]]:
        """For each element of a window the rows and columns that it sees."""
        (sh, sw), (dh, dw), (oh, ow) = self.s, self.d, self.out
        return [
            (i, j, slice(i * dh, i * dh + (oh - 1) * sh + 1, sh), slice(j * dw, j * dw + (ow - 1) * sw + 1, sw))
            for i in range(self.k[0])
            for j in range(self.k[1])
        ]


def _by_image(*xs: Array) -> Any:
    """Arrays of images cut into single ones on the host, where an image and its windows stay in the cache: half the
    time for 32 of 32 x 28 x 28. A device takes all at once."""
    return zip(*xs) if isinstance(xs[0], np.ndarray) else (xs,)


class Im2Col(FunctionNode):
    """y (N, C kh kw, OH, OW) = the windows of x"""

    is_linear = True
    gives_new = True

    def __init__(self, windows: Windows) -> None:
        self.windows = windows

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        (x,), g = xs, self.windows
        n, c, h, w = x.shape
        frame = zeros_as(x, (n, c, *g.padded(h, w)), x.dtype)
        frame[:, :, g.p[0] : g.p[0] + h, g.p[1] : g.p[1] + w] = x
        y = empty_as(x, (n, c * g.k[0] * g.k[1], *g.out), x.dtype)
        if lies_as_images(x):
            parts = y.transpose(0, 2, 3, 1).reshape(n, *g.out, c, *g.k).transpose(0, 3, 4, 5, 1, 2)
        else:
            parts = y.reshape(n, c, *g.k, *g.out)  # a view, as is the other
        for image, part in _by_image(frame, parts):
            for i, j, rows, columns in g.taps():
                part[..., i, j, :, :] = image[..., rows, columns]
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(Col2Im(self.windows, self.inputs[0].shape), gys[0]),)


class Col2Im(FunctionNode):
    """y = the sum of windows where they are on an image: the transpose of Im2Col"""

    is_linear = True
    gives_new = True

    def __init__(self, windows: Windows, shape: tuple[int, ...]) -> None:
        self.windows = windows
        self.shape = shape

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        (x,), g, (n, c, h, w) = xs, self.windows, self.shape
        frame = zeros_as(x, (n, c, *g.padded(h, w)), accumulation_dtype(x.dtype))
        for image, part in _by_image(frame, x.reshape(n, c, *g.k, *g.out)):
            for i, j, rows, columns in g.taps():
                image[..., rows, columns] += part[..., i, j, :, :]
        inner = frame[:, :, g.p[0] : g.p[0] + h, g.p[1] : g.p[1] + w]
        return (elementwise(lambda v: v.astype(x.dtype), inner),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(Im2Col(self.windows), gys[0]),)


def im2col(
    x: Operand, ksize: PerAxis, stride: PerAxis = 1, pad: PerAxis = 0, cover_all: bool = False, dilate: PerAxis = 1
) -> Variable:
    """The windows of images as channels, shape (N, C kh kw, OH, OW).

    Args:
        x: images.
        ksize, stride, pad, dilate: each a number or (rows, columns); ``pad`` adds zeros on every side.
        cover_all: let the last window reach beyond the image, so that every element is covered.

    Example:
        >>> F.im2col(np.ones((1, 3, 5, 5)), 3).shape
        (1, 27, 3, 3)
    """
    x = _images("im2col", x)
    k, s, p, d = pair(ksize), pair(stride), pair(pad), pair(dilate)
    if min(*k, *s, *d) < 1 or min(p) < 0:
        raise expected("im2col", "ksize, stride, pad, dilate", "sizes from 1 on, and pad from 0 on", str((k, s, p, d)))
    out = tuple(out_size(n, k[i], s[i], p[i], d[i], cover_all) for i, n in enumerate(x.shape[2:]))
    if min(out) < 1:
        raise expected("im2col", "x", f"images that windows of {k} fit into", x)
    return Im2Col(Windows(k, s, p, d, (out[0], out[1]))).apply((x,))[0]


# ---- resizing -------------------------------------------------------------------------------------------------------


_MOST_ELEMENTS = 1 << 31  # whose numbers the loop reads as 32-bit integers


class Interpolation(FunctionNode):
    """y_i = (1 - w_i) x_{low_i} + w_i x_{high_i} along an axis"""

    is_linear = gives_new = True

    def __init__(self, axis: int, low: list[int], high: list[int], weight: list[float]) -> None:
        self.axis = axis
        self.low, self.high, self.weight = low, high, weight

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (_as_it_lies(self._mixed, xs[0], self.axis),)

    def _mixed(self, x: Array, axis: int) -> Array:
        xp, wide = get_array_module(x), accumulation_dtype(x.dtype)
        made = self._by_loop(x, axis)
        if made is not None:
            return made
        y = x.take(xp.asarray(self.low), axis)
        if not any(self.weight):
            return y
        # an infinite neighbour of weight 0 must not make NaN
        whole = xp.asarray([i for i, w in enumerate(self.weight) if w == 0], int)
        kept = y.take(whole, axis)
        w = xp.asarray(self.weight, wide).reshape((-1,) + (1,) * (x.ndim - axis - 1))
        y, other = (v.astype(wide, copy=False) for v in (y, x.take(xp.asarray(self.high), axis)))
        with np.errstate(invalid="ignore"):
            y *= 1 - w
            other *= w
            y += other
        y[(*(slice(None),) * axis, whole)] = kept
        return y.astype(x.dtype, copy=False)

    def _by_loop(self, x: Array, axis: int) -> Array | None:
        """By a compiled loop, with the same bits; None where there is none."""
        if type(x) is not np.ndarray or x.dtype != np.float32 or not KERNEL_ELEMENTS <= x.size < _MOST_ELEMENTS:
            return None
        if not x.flags.c_contiguous:
            return None
        inner = prod(x.shape[axis + 1 :])
        low, high = (
            (np.asarray(places, np.int32)[:, None] * inner + np.arange(inner, dtype=np.int32)).ravel().view(np.float32)
            for places in (self.low, self.high)
        )
        weight = np.repeat(np.asarray(self.weight, np.float32), inner)
        made = kernels.of_rows("interpolate_rows", (x, low, high, weight), weight.size, x.shape[axis] * inner)
        return None if made is None else made[0].reshape(*x.shape[:axis], len(self.low), *x.shape[axis + 1 :])

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        length = self.inputs[0].shape[self.axis]
        return (call(Spread(self.axis, self.low, self.high, self.weight, length), gys[0]),)


class Spread(FunctionNode):
    """y = zeros of a length, with (1 - w_i) x_i added at low_i and w_i x_i at high_i: Interpolation transposed"""

    is_linear = gives_new = True

    def __init__(self, axis: int, low: list[int], high: list[int], weight: list[float], length: int) -> None:
        self.axis = axis
        self.low, self.high, self.weight = low, high, weight
        self.length = length

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (_as_it_lies(self._spread, xs[0], self.axis),)

    def _spread(self, x: Array, axis: int) -> Array:
        """In rounds, each of which adds the next term of every place: terms come in the order of i."""
        xp, wide, lead = get_array_module(x), accumulation_dtype(x.dtype), (slice(None),) * axis
        y = xp.zeros((*x.shape[:axis], self.length, *x.shape[axis + 1 :]), wide)
        rounds: list[list[tuple[int, int, float]]] = []
        turns = [0] * self.length
        for i, (low, high, w) in enumerate(zip(self.low, self.high, self.weight)):
            for place, share in ((low, 1 - w), (high, w))[: 2 if w else 1]:
                if turns[place] == len(rounds):
                    rounds.append([])
                rounds[turns[place]].append((place, i, share))
                turns[place] += 1
        for terms in rounds:
            places, order, shares = zip(*sorted(terms))
            part = x.take(xp.asarray(order), axis).astype(wide, copy=False)
            if any(share != 1 for share in shares):
                part *= xp.asarray(shares, wide).reshape((-1,) + (1,) * (x.ndim - axis - 1))
            if places[-1] - places[0] == len(places) - 1:
                y[(*lead, slice(places[0], places[-1] + 1))] += part
            else:
                y[(*lead, xp.asarray(places))] += part
        return y.astype(x.dtype, copy=False)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(Interpolation(self.axis, self.low, self.high, self.weight), gys[0]),)


def _as_it_lies(formula: Callable[[Array, int], Array], x: Array, axis: int) -> Array:
    """A formula along an axis of images, which sees them in the order of their memory."""
    if not are_images(x):
        return formula(x, axis)
    return formula(x.transpose(0, 2, 3, 1), (0, 3, 1, 2)[axis]).transpose(0, 3, 1, 2)


def _places(length: int, size: int, mode: str, align_corners: bool) -> tuple[list[int], list[int], list[float]]:
    """For each of ``size`` new positions its two neighbours among ``length`` old ones, and the second's weight."""
    if mode == "nearest":
        low = [min(i * length // size, length - 1) for i in range(size)]
        return low, low, [0.0] * size
    if align_corners:
        at = np.linspace(0.0, length - 1, size)
    else:
        at = np.maximum((np.arange(size) + 0.5) * (length / size) - 0.5, 0.0)
    low = np.minimum(at.astype(int), length - 1).tolist()
    return low, [min(i + 1, length - 1) for i in low], (at - low).tolist()


def resize_images(x: Operand, output_shape: PerAxis, *, mode: str = "bilinear", align_corners: bool = True) -> Variable:
    """Images with other numbers of rows and columns, (N, C, H', W').

    Args:
        x: images.
        output_shape: (H', W').
        mode: 'bilinear' between the four pixels around a place, or 'nearest' for one pixel.
        align_corners: whether the centres of the corner pixels stay at the corners, else the outer edges of the pixels;
            'nearest' ignores this.

    Example:
        >>> F.resize_images(np.arange(4.0).reshape(1, 1, 2, 2), (3, 3)).array[0, 0]
        array([[0. , 0.5, 1. ],
               [1. , 1.5, 2. ],
               [2. , 2.5, 3. ]])
    """
    x = _images("resize_images", x)
    one_of("resize_images", "mode", ("bilinear", "nearest"), mode)
    size = tuple(operator.index(n) for n in output_shape)
    if len(size) != 2 or min(size) < 1:
        raise expected("resize_images", "output_shape", "two numbers from 1 on", repr(output_shape))
    if not x.shape[2] * x.shape[3]:
        raise expected("resize_images", "x", "at least one pixel", x)
    for axis, n in zip((2, 3), size):
        x = Interpolation(axis, *_places(x.shape[axis], n, mode, align_corners)).apply((x,))[0]
    return x


# ---- sampling -------------------------------------------------------------------------------------------------------


def spatial_transformer_grid(theta: Operand, output_shape: PerAxis) -> Variable:
    """The places that an affine map takes the pixels of an image to, (N, 2, H, W) (Jaderberg et al. 2015).

    Args:
        theta: the maps, shape (N, 2, 3): theta (x, y, 1)' with x and y from -1 to 1.
        output_shape: (H, W).

    Returns:
        The horizontal places, then the vertical ones; -1 and 1 are the centres of the outermost pixels.

    Example:
        >>> F.spatial_transformer_grid(np.array([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]]), (2, 2)).array[0, 0]
        array([[-1.,  1.],
               [-1.,  1.]])
    """
    floating("spatial_transformer_grid", theta=theta)
    theta = as_variable(theta)
    if theta.shape[1:] != (2, 3):
        raise expected("spatial_transformer_grid", "theta", "shape (N, 2, 3)", theta)
    h, w = (operator.index(n) for n in output_shape)
    y, x = np.meshgrid(np.linspace(-1, 1, h), np.linspace(-1, 1, w), indexing="ij")
    places = np.stack((x.ravel(), y.ravel(), np.ones(h * w)))
    xp = get_array_module(theta.array)
    return ops.reshape(ops.matmul(theta, xp.asarray(places).astype(theta.dtype)), (theta.shape[0], 2, h, w))


def spatial_transformer_sampler(x: Operand, grid: Operand) -> Variable:
    """Images at the places of a grid, bilinear between pixels, 0 beyond the border: (N, C, H', W').

    Args:
        x: images.
        grid: horizontal and vertical places, shape (N, 2, H', W'), as from :func:`spatial_transformer_grid`.

    Example:
        >>> grid = F.spatial_transformer_grid(np.array([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]]), (2, 2))
        >>> F.spatial_transformer_sampler(np.arange(4.0).reshape(1, 1, 2, 2), grid).array[0, 0]
        array([[0., 1.],
               [2., 3.]])
    """
    x, grid = together("spatial_transformer_sampler", x=x, grid=grid)
    _images("spatial_transformer_sampler", x)
    if grid.ndim != 4 or grid.shape[:2] != (x.shape[0], 2):
        raise expected("spatial_transformer_sampler", "grid", f"shape ({x.shape[0]}, 2, H, W) for x {x.shape}", grid)
    dtype, wide = x.dtype, accumulation_dtype(x.dtype)
    grid = ops.cast(grid, wide)
    columns, rows = (
        ops.mul(ops.add(ops.getitem(grid, (slice(None), i)), 1.0), (n - 1) / 2)
        for i, n in ((0, x.shape[3]), (1, x.shape[2]))
    )
    return ops.cast(ops.transpose(sampled(ops.cast(x, wide), rows, columns), (0, 3, 1, 2)), dtype)
