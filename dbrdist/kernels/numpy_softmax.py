"""Softmax along one axis, in plain array code for any float type; sums of 16-bit types run in float32."""

from __future__ import annotations

from typing import Any

from dbrdist.core import backend

Array = Any


def _along(formula: Any, axis: int, *xs: Array) -> Array:
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

    def formula(xp: Any, axis: int, x: Array) -> Array:
        p = x - x.max(axis=axis, keepdims=True)
        xp.exp(p, out=p)
        p /= p.sum(axis=axis, keepdims=True)
        return p

    return _along(formula, axis, x)


def softmax_backward(y: Array, gy: Array, axis: int) -> Array:
    """y (gy - sum(y gy))"""

    def formula(xp: Any, axis: int, y: Array, gy: Array) -> Array:
        gx = y * gy
        gx -= y * gx.sum(axis=axis, keepdims=True)
        return gx

    return _along(formula, axis, y, gy)


def log_softmax(x: Array, axis: int) -> Array:
    """x - ln sum exp(x), without overflow."""

    def formula(xp: Any, axis: int, x: Array) -> Array:
        y = x - x.max(axis=axis, keepdims=True)
        y -= xp.log(xp.exp(y).sum(axis=axis, keepdims=True))
        return y

    return _along(formula, axis, x)


def log_softmax_backward(y: Array, gy: Array, axis: int) -> Array:
    """gy - exp(y) sum(gy)"""

    def formula(xp: Any, axis: int, y: Array, gy: Array) -> Array:
        gx = xp.exp(y)
        gx *= -gy.sum(axis=axis, keepdims=True)
        gx += gy
        return gx

    return _along(formula, axis, y, gy)


ROWS = {
    "softmax": lambda *arguments: softmax,
    "log_softmax": lambda *arguments: log_softmax,
    "softmax_backward": lambda *arguments: softmax_backward,
    "log_softmax_backward": lambda *arguments: log_softmax_backward,
}
