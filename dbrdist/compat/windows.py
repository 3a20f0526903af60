"""Windows of images side by side, as Chainer's ``utils.conv`` and ``utils.conv_nd`` cut them out and add them up."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from dbrdist.core.array.backend import get_array_module
from dbrdist.core.array.types import Array, PerAxis
from dbrdist.utils.conv import get_conv_outsize

AxisSizes = Sequence[int]


class WrongLength(ValueError, AssertionError):
    """Another number of values than there are axes, about which Chainer raises AssertionError."""


def as_tuple(x: Any, n: int) -> tuple[int, ...]:
    """A number n times, or a sequence of n values as a tuple."""
    if hasattr(x, "__getitem__"):
        if len(x) != n:
            raise WrongLength(f"expected {n} values, got {len(x)}")
        return tuple(x)
    return (x,) * n


def _places(
    ksize: AxisSizes, stride: AxisSizes, dilate: AxisSizes, outs: AxisSizes
) -> Iterator[tuple[Any, tuple[slice, ...]]]:
    """Each place within a window, and what is there of all windows of a padded image."""
    for place in itertools.product(*map(range, ksize)):
        yield place, tuple([slice(i * d, i * d + s * n, s) for i, d, s, n in zip(place, dilate, stride, outs)])


def im2col_nd_cpu(
    img: Array, ksize: AxisSizes, stride: AxisSizes, pad: AxisSizes, pval: float = 0, cover_all: bool = False,
    dilate: PerAxis = 1, outs: AxisSizes | None = None,
) -> Array:  # fmt: skip
    """The windows of images (N, C, d...), padded with ``pval``: (N, C, k..., out...)."""
    dims = img.shape[2:]
    ksize, stride, pad, dilate = (as_tuple(x, len(dims)) for x in (ksize, stride, pad, dilate))
    if outs is None:
        outs = [get_conv_outsize(d, k, s, p, cover_all, di) for d, k, s, p, di in zip(dims, ksize, stride, pad, dilate)]
    xp = get_array_module(img)
    widths = ((0, 0), (0, 0), *((p, p + s - 1) for p, s in zip(pad, stride)))
    padded = xp.pad(img, widths, mode="constant", constant_values=pval)
    col = xp.empty((*img.shape[:2], *ksize, *outs), img.dtype)
    for place, cut in _places(ksize, stride, dilate, outs):
        col[(slice(None), slice(None), *place)] = padded[(slice(None), slice(None), *cut)]
    return col


def im2col_nd(
    img: Array, ksize: AxisSizes, stride: AxisSizes, pad: AxisSizes, cover_all: bool = False, dilate: int = 1
) -> Array:
    """As :func:`im2col_nd_cpu`, padded with zeros."""
    return im2col_nd_cpu(img, ksize, stride, pad, 0, cover_all, dilate)


def col2im_nd(col: Array, stride: AxisSizes, pad: AxisSizes, dims: AxisSizes, dilate: PerAxis = 1) -> Array:
    """The sum of windows (N, C, k..., out...) where they lie in images (N, C, dims...)."""
    ndim = len(dims)
    ksize, outs = col.shape[2:-ndim], col.shape[-ndim:]
    ksize, stride, pad, dilate = (as_tuple(x, ndim) for x in (ksize, stride, pad, dilate))
    padded = get_array_module(col).zeros(
        (*col.shape[:2], *(d + 2 * p + s - 1 for d, p, s in zip(dims, pad, stride))), col.dtype
    )
    for place, cut in _places(ksize, stride, dilate, outs):
        padded[(slice(None), slice(None), *cut)] += col[(slice(None), slice(None), *place)]
    return padded[(slice(None), slice(None), *(slice(p, p + d) for p, d in zip(pad, dims)))]


def im2col_cpu(
    img: Array, kh: int, kw: int, sy: int, sx: int, ph: int, pw: int, pval: float = 0, cover_all: bool = False,
    dy: int = 1, dx: int = 1, out_h: int | None = None, out_w: int | None = None,
) -> Array:  # fmt: skip
    """The windows of images (N, C, H, W), padded with ``pval``: (N, C, kh, kw, out_h, out_w)."""
    h, w = img.shape[2:]
    out_h = get_conv_outsize(h, kh, sy, ph, cover_all, dy) if out_h is None else out_h
    out_w = get_conv_outsize(w, kw, sx, pw, cover_all, dx) if out_w is None else out_w
    return im2col_nd_cpu(img, (kh, kw), (sy, sx), (ph, pw), pval, cover_all, (dy, dx), (out_h, out_w))


def im2col(
    img: Array, kh: int, kw: int, sy: int, sx: int, ph: int, pw: int, cover_all: bool = False, dy: int = 1, dx: int = 1,
    out_h: int | None = None, out_w: int | None = None,
) -> Array:  # fmt: skip
    """As :func:`im2col_cpu`, padded with zeros."""
    return im2col_cpu(img, kh, kw, sy, sx, ph, pw, 0, cover_all, dy, dx, out_h, out_w)


def col2im(col: Array, sy: int, sx: int, ph: int, pw: int, h: int, w: int, dy: int = 1, dx: int = 1) -> Array:
    """The sum of windows (N, C, kh, kw, out_h, out_w) where they lie in images (N, C, h, w)."""
    return col2im_nd(col, (sy, sx), (ph, pw), (h, w), (dy, dx))


NAMES = {
    "chainer.utils.conv.col2im": col2im,
    "chainer.utils.conv.col2im_cpu": col2im,
    "chainer.utils.conv.im2col": im2col,
    "chainer.utils.conv.im2col_cpu": im2col_cpu,
    "chainer.utils.conv_nd.as_tuple": as_tuple,
    "chainer.utils.conv_nd.col2im_nd": col2im_nd,
    "chainer.utils.conv_nd.col2im_nd_cpu": col2im_nd,
    "chainer.utils.conv_nd.im2col_nd": im2col_nd,
    "chainer.utils.conv_nd.im2col_nd_cpu": im2col_nd_cpu,
}
