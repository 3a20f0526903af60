"""Softmax along one axis and the cross entropy of rows, in plain array code for any float type, 16 bits in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dbrdist.core.array import backend
from dbrdist.core.array.sums import with_all_digits
from dbrdist.core.array.types import Array, Module

if TYPE_CHECKING:
    from collections.abc import Callable


def _along(formula: Callable[..., Array], axis: int, *xs: Array) -> Array:
    """Run a formula on arrays in the accumulation type and an axis; on the N H W C view of images, to keep their
    layout.
    """
    x = xs[0]
    if x.ndim == 4 and backend.lies_as_images(x):
        views = [a.transpose(0, 2, 3, 1)[None] for a in xs]
        return _along(formula, (1, 4, 2, 3)[axis], *views)[0].transpose(0, 3, 1, 2)
    xp, dtype = backend.get_array_module(x), backend.accumulation_dtype(x.dtype)
    return formula(xp, axis, *[a.astype(dtype, copy=False) for a in xs]).astype(x.dtype, copy=False)


def softmax(x: Array, axis: int) -> Array:
    """exp(x) / sum exp(x), without overflow."""

    def formula(xp: Module, axis: int, x: Array) -> Array:
        p = x - x.max(axis=axis, keepdims=True)
        xp.exp(p, out=p)
        p /= p.sum(axis=axis, keepdims=True)
        return p

    return _along(formula, axis, x)


def softmax_backward(y: Array, gy: Array, axis: int) -> Array:
    """y (gy - sum(y gy))"""

    def formula(xp: Module, axis: int, y: Array, gy: Array) -> Array:
        gx = y * gy
        gx -= y * gx.sum(axis=axis, keepdims=True)
        return gx

    return _along(formula, axis, y, gy)


def log_softmax(x: Array, axis: int) -> Array:
    """x - ln sum exp(x), without overflow."""

    def formula(xp: Module, axis: int, x: Array) -> Array:
        y = x - x.max(axis=axis, keepdims=True)
        powers = xp.exp(y)
        total = powers.sum(axis=axis, keepdims=True)
        y -= with_all_digits(xp.log(total), total, powers.__getitem__, (axis,))
        return y

    return _along(formula, axis, x)


def log_softmax_backward(y: Array, gy: Array, axis: int) -> Array:
    """gy - exp(y) sum(gy)"""

    def formula(xp: Module, axis: int, y: Array, gy: Array) -> Array:
        gx = xp.exp(y)
        gx *= -gy.sum(axis=axis, keepdims=True)
        gx += gy
        return gx

    return _along(formula, axis, y, gy)


def cross_entropy(x: Array, t: Array, ignore_label: int, divisor: int) -> tuple[Array, tuple[Array, ...]]:
    """The mean over rows of ln sum exp(x) - x[t]; each row's largest m, its sum exp(x - m), and 1 over what the mean is
    over.

    m + ln sum exp(x - m) in one would be rounded, of large scores by more than the loss is.
    """
    xp, dtype = backend.get_array_module(x), backend.accumulation_dtype(x.dtype)
    x_wide, is_class, counts = x.astype(dtype, copy=False), (t >= 0) & (t < x.shape[1]), t != ignore_label
    finite = np.finfo(dtype).max
    largest = x_wide.max(axis=1).clip(-finite, finite)
    powers = xp.exp(x_wide - largest[:, None])
    sums = powers.sum(axis=1)
    logs = with_all_digits(xp.log(sums)[:, None], sums[:, None], powers.__getitem__, (1,))[:, 0]
    losses = logs - (x_wide.take(xp.arange(len(t)) * x.shape[1] + xp.where(is_class, t, 0)) - largest)
    losses = xp.where(counts, xp.where(is_class, losses, dtype.type(np.nan)), dtype.type(0))
    scale = 1 / xp.asarray(divisor or xp.maximum(counts.sum(), 1)).astype(dtype)
    return (losses.sum() * scale).astype(x.dtype), (largest, sums, scale)


def cross_entropy_backward(x: Array, t: Array, saved: tuple[Array, ...], gy: Array, ignore_label: int) -> Array:
    """(softmax(x) - onehot(t)) gy / what the mean is over"""
    largest, sums, scale = saved
    xp, classes = backend.get_array_module(x), x.shape[1]
    p = xp.exp(x.astype(sums.dtype, copy=False) - largest[:, None]) / sums[:, None]
    gx = (p - (t[:, None] == xp.arange(classes))) * (gy.astype(scale.dtype) * scale)
    xp.copyto(gx, np.nan, where=((t < 0) | (t >= classes))[:, None])
    xp.copyto(gx, 0, where=(t == ignore_label)[:, None])
    return gx.astype(x.dtype, copy=False)


ROWS = {
    "cross_entropy": lambda *arguments: cross_entropy,
    "cross_entropy_backward": lambda *arguments: cross_entropy_backward,
    "softmax": lambda *arguments: softmax,
    "log_softmax": lambda *arguments: log_softmax,
    "softmax_backward": lambda *arguments: softmax_backward,
    "log_softmax_backward": lambda *arguments: log_softmax_backward,
}
