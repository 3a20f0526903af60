"""Resizing with a filter against aliasing, as Pillow does it: in a compiled loop, or by products with small matrices.

A pixel of the result is a weighted mean of the pixels around its place, with a triangle or a cubic whose support grows
with the factor of reduction (``Image.resize`` with BILINEAR or BICUBIC; torchvision calls it antialiasing). Both
directions are rounded to bytes, first along rows, then along columns. Cubics are left to Pillow where it is installed.

Weights are multiples of 1/65536 (cubics: 1/32768) and pixels are bytes, so that every sum is exact in float32: results
depend neither on the order in which a library of linear algebra adds, nor on its threads. Pillow's weights have 22
bits: one or two values of a hundred differ, by 1.
"""

from __future__ import annotations

import functools
import math
import threading
from typing import Any

import numpy as np

from dbrdist import kernels
from dbrdist.core.array.types import Array
from dbrdist.datasets.image.opencv import cv2_or_none, is_installed

_SUPPORT = {"bilinear": 1.0, "bicubic": 2.0}
_BITS = {"bilinear": 16, "bicubic": 15}  # 255 times the sum of the weights' absolute values takes 24 bits at most
_HALF_UP = 2.0**-16  # lifts what is halfway between two bytes (and what is less than that below an odd half)
_ROWS = 12  # of the result, in one product: more rows have more pixels in common, and more weights that are 0
_PRODUCT = 1 << 18  # multiplications in one, at most: OpenBLAS divides larger ones among threads
_MAX_CACHED = 4096
_MAX_ROOM_BYTES = 1 << 25  # of each memory that a thread keeps: more, for a few large images, would be a waste
_MANY_TAPS = 4096  # pixels with so small weights each that what rounding leaves is no longer little


def resize(image: Array, height: int, width: int, method: str, out: Array | None = None) -> Array:
    """``image`` (H, W, C) as (height, width, C), in ``out`` where that fits; ``method`` is 'bilinear' or 'bicubic'."""
    if image.dtype != np.uint8:
        return _resize_numbers(image, height, width, method)
    pillow = _pillow()
    if method == "bicubic" and pillow is not None and image.shape[2] in (1, 3):
        source = image[:, :, 0] if image.shape[2] == 1 else image
        made = pillow.fromarray(np.ascontiguousarray(source)).resize((width, height), pillow.Resampling.BICUBIC)
        return np.array(made).reshape(height, width, image.shape[2])
    return resize_numpy(image, height, width, method, out)


def resize_numpy(image: Array, height: int, width: int, method: str, out: Array | None = None) -> Array:
    """The same without Pillow, at most 1 of 255 away.

    Some versions of Pillow take rows first where that is less work. Cubics overshoot, and what is cut off in between
    then differs: by more than 1 at edges from black to white.
    """
    h, w, c = image.shape
    if w != width:
        columns = _rooms.second.of((width, h * c))
        _along(_transposed(image, _rooms.first).reshape(w, h * c), width, method, columns)
        image = _transposed(columns.reshape(width, h, c), _rooms.first)
    if h == height:
        return image.copy()
    if out is None or out.shape != (height, width, c) or out.dtype != np.uint8 or not out.flags.c_contiguous:
        out = np.empty((height, width, c), np.uint8)
    rows = np.ascontiguousarray(image).reshape(h, width * c)
    _along(rows, height, method, out.reshape(height, width * c))
    return out


class _Room:
    """Memory that is used again and again: fresh memory costs a page fault for each 4 KiB. Very much is not kept."""

    def __init__(self, dtype: type) -> None:
        self._all: Any = np.empty(0, dtype)

    def of(self, shape: tuple[int, ...]) -> Any:
        """An array of undefined values, until the next one is asked for."""
        size = math.prod(shape)
        if size * self._all.itemsize > _MAX_ROOM_BYTES:
            return np.empty(shape, self._all.dtype)
        if self._all.size < size:
            self._all = np.empty(size, self._all.dtype)
        return self._all[:size].reshape(shape)


class _Rooms(threading.local):
    """What this thread uses while it resizes: bytes in two orders, and the numbers before and after products."""

    def __init__(self) -> None:
        self.first, self.second, self.before, self.after = map(_Room, (np.uint8, np.uint8, np.float32, np.float32))


_rooms = _Rooms()


def _resize_numbers(image: Array, height: int, width: int, method: str) -> Array:
    """The same for images of other types: integers are rounded once, and floating numbers are not."""
    kind = image.dtype.kind
    if kind not in "iuf":
        raise TypeError(f"expected an image of integers or floating numbers to resize, got {image.dtype}")
    values: Any = image.astype(np.float32 if image.dtype == np.float32 else np.float64)
    multiply: Any = np.dot if kind != "f" or np.isfinite(values).all() else _of_what_counts
    for axis, new in ((1, width), (0, height)):
        if values.shape[axis] != new:
            starts, stops, weights = _weights(values.shape[axis], new, method, 0)
            rows, taps = weights.shape[1:]
            old = np.moveaxis(values, axis, 0)
            flat = old.reshape(len(old), -1)
            made = np.empty((new, flat.shape[1]), values.dtype)
            for start, stop, matrix in zip(starts, stops, weights):
                made[stop - rows : stop] = multiply(matrix, flat[start : start + taps])
            values = np.moveaxis(made.reshape(new, *old.shape[1:]), 0, axis)
    if kind != "f":
        limits = np.iinfo(image.dtype.str)
        top = float(limits.max)  # for 64 bits that is one more than there is
        values = np.clip(np.rint(values), limits.min, top if top == limits.max else math.nextafter(top, 0))
    return np.ascontiguousarray(values, image.dtype)


def _of_what_counts(matrix: Array, pixels: Array) -> Array:
    """The product, in which a NaN or an infinity has no part where its weight is 0."""
    return np.stack([row[row != 0].dot(pixels[row != 0]) for row in matrix])


def _transposed(image: Array, room: _Room) -> Any:
    """An image with rows and columns exchanged."""
    cv2, (h, w, c) = cv2_or_none(), image.shape
    made = room.of((w, h, c))
    if cv2 is None or c > 4:
        np.copyto(made, image.transpose(1, 0, 2))
    else:
        cv2.transpose(image, made)
    return made


def _along(pixels: Any, new: int, method: str, out: Any) -> None:
    """Bytes (old, M), filtered along the first axis into ``out`` (new, M): in a compiled loop where there is one."""
    old, m = pixels.shape
    taps_of, matrices = (_taps, _weights) if max(old, new) <= _MAX_CACHED else (_taps.__wrapped__, _weights.__wrapped__)
    if kernels.filter_rows(pixels, *taps_of(old, new, method, _BITS[method]), out):
        return
    starts, stops, weights = matrices(old, new, method, _BITS[method])
    rows, taps = weights.shape[1:]
    step = max(min(_PRODUCT // (rows * taps), _MAX_ROOM_BYTES // (4 * max(old, new))), 32)
    for first in range(0, m, step):
        part = slice(first, min(first + step, m))
        n = part.stop - first
        before, after = _rooms.before.of((old, n)), _rooms.after.of((new, n))
        np.copyto(before, pixels[:, part])
        for start, stop, matrix in zip(starts, stops, weights):
            matrix.dot(before[start : start + taps], after[stop - rows : stop])
        _round(after, out[:, part], method)


def _round(values: Any, out: Any, method: str) -> None:
    """Values as the nearest bytes, halves upwards."""
    cv2 = cv2_or_none()
    if method == "bicubic":
        np.maximum(values, 0, out=values)
    if cv2 is not None:
        cv2.convertScaleAbs(values, out, 1.0, _HALF_UP)
        return
    values += np.float32(_HALF_UP)
    np.copyto(out, np.minimum(np.rint(values, out=values), 255, out=values), casting="unsafe")


@functools.lru_cache(maxsize=1024)
def _taps(old: int, new: int, method: str, bits: int) -> tuple[Any, Any, Any]:
    """For each new pixel the first old one that it is made of, their number, and their weights (new, taps).

    With ``bits`` weights are multiples of ``2**-bits``, as float32; with 0 they are float64.
    """
    scale = old / new
    stretch = max(scale, 1.0)
    reach = _SUPPORT[method] * stretch
    centre = (np.arange(new) + 0.5) * scale
    first = np.maximum(np.floor(centre - reach + 0.5), 0).astype(np.intp)  # pixels that Pillow looks at
    last = np.minimum(np.floor(centre + reach + 0.5), old).astype(np.intp)
    pixel = first[:, None] + np.arange((last - first).max())
    x = np.abs((pixel + 0.5 - centre[:, None]) / stretch)
    weights = np.maximum(1 - x, 0) if method == "bilinear" else _cubic(x)
    weights = np.where(pixel < last[:, None], weights, 0)
    weights = _quantized(weights, bits) if bits else weights / weights.sum(1, keepdims=True)
    return first, last - first, np.ascontiguousarray(weights, np.float32 if bits else np.float64)


@functools.lru_cache(maxsize=512)
def _weights(old: int, new: int, method: str, bits: int) -> tuple[list[int], list[int], Any]:
    """The same in matrices (num, rows, taps): each makes the ``rows`` up to its stop of ``taps`` from its start on."""
    taps_of = _taps if max(old, new) <= _MAX_CACHED else _taps.__wrapped__
    first, counts, weights = taps_of(old, new, method, bits)
    rows = min(_ROWS, new)
    stops = [*range(rows, new, rows), new]
    last = first + counts
    taps = max(last[stop - 1] - first[stop - rows] for stop in stops)
    starts = [min(int(first[stop - rows]), old - taps) for stop in stops]
    matrices = np.zeros((len(stops), rows, taps + weights.shape[1]), weights.dtype)
    for matrix, start, stop in zip(matrices, starts, stops):
        row, part = np.arange(rows)[:, None], slice(stop - rows, stop)
        matrix[row, first[part, None] + np.arange(weights.shape[1]) - start] = weights[part]
    return starts, stops, np.ascontiguousarray(matrices[:, :, :taps])


def _quantized(weights: Array, bits: int) -> Any:
    """Multiples of ``2**-bits`` whose rows sum to 1; the largest one takes what rounding leaves.

    Where there are very many, sums of the first ones are rounded instead: no pixel takes much, nor less than nothing.
    """
    exact = weights / weights.sum(1, keepdims=True) * 2.0**bits
    if weights.shape[1] > _MANY_TAPS:
        return np.diff(np.rint(np.cumsum(exact, 1)), axis=1, prepend=0) * 2.0**-bits
    whole = np.rint(exact)
    whole[np.arange(len(whole)), whole.argmax(1)] += 2.0**bits - whole.sum(1)
    return whole * 2.0**-bits


def _cubic(x: Array) -> Array:
    """Keys' cubic with a = -1/2 at distances x (1981, "Cubic convolution interpolation")."""
    a = -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


@functools.cache
def _pillow() -> Any:
    """Pillow's module of images; None where it is not installed."""
    if not is_installed("PIL"):
        return None
    from PIL import Image

    return Image
