"""Batch and layer normalization, in plain array code for any float type, 16 bits in float32."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from dbrdist.core.array import backend
from dbrdist.core.array.sums import wide_sum
from dbrdist.core.array.types import Array

# ---- batch normalization, on the matrix (M, K): M elements are averaged, K are kept


def _as_matrix(x: Array, axis: tuple[int, ...]) -> Array:
    kept = tuple(i for i in range(x.ndim) if i not in axis)
    size = prod(x.shape[i] for i in axis)
    matrix = x.transpose(axis + kept).reshape(size, x.size // size if size else prod(x.shape[i] for i in kept))
    return matrix.astype(backend.accumulation_dtype(x.dtype), copy=False)


def _row_sum(a: Array) -> Array:
    return wide_sum(a, (0,), keepdims=False)


def _from_matrix(matrix: Array, like: Array, axis: tuple[int, ...]) -> Array:
    order = axis + tuple(i for i in range(like.ndim) if i not in axis)
    inverse = sorted(range(like.ndim), key=order.__getitem__)
    y = matrix.reshape([like.shape[i] for i in order]).transpose(inverse).astype(like.dtype, copy=False)
    return backend.channels_last(y) if y.ndim == 4 else y


def _kept_shape(x: Array, axis: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(s for i, s in enumerate(x.shape) if i not in axis)


_FEW = 512  # elements, of which sums of float32 lose less than a digit


def coarse_from(count: int) -> float:
    """How many standard deviations the mean of ``count`` elements may be before :func:`is_coarse` holds; 0 for any.

    Added one after another in float32, they have a mean that is wrong by about 4e-8 sqrt(count) of itself. That shall
    be no more than 1.6e-4 standard deviations.
    """
    return 4096 / count**0.5 if count > _FEW else 0.0


def is_coarse(mean: Array, var: Array, eps: float, limit: float) -> bool:
    """Whether any of these means is too large beside its deviation for sums of float32; see :func:`coarse_from`."""
    return bool(limit) and bool(are_coarse(mean, var, eps, limit).any())


def are_coarse(mean: Array, var: Array, eps: float, limit: float) -> Array:
    """:func:`is_coarse` of each, for a limit that is not 0."""
    return np.abs(mean) > np.sqrt(var + eps) * limit


def _centered(x: Array, axis: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """The matrix less its mean, mean and variance; the latter is the mean of squares, not E[x^2] - E[x]^2."""
    xp, matrix = backend.get_array_module(x), _as_matrix(x, axis)
    count = max(matrix.shape[0], 1)
    mean = _row_sum(matrix) / count
    centered = matrix - mean
    var = _row_sum(xp.square(centered)) / count
    if xp is np and mean.dtype == np.float32 and is_coarse(mean, var, 0.0, coarse_from(count)):
        error = _row_sum(centered) / count
        mean, centered = mean + error, centered - error
        var = _row_sum(xp.square(centered)) / count
    return centered, mean, var


def bn_statistics(x: Array, axis: tuple[int, ...]) -> tuple[Array, Array]:
    """Mean and biased variance over ``axis``; those of an empty batch are zero."""
    _, mean, var = _centered(x, axis)
    shape = _kept_shape(x, axis)
    return mean.reshape(shape), var.reshape(shape)


def bn_forward(
    x: Array, gamma: Array, beta: Array, eps: float, axis: tuple[int, ...], relu: bool
) -> tuple[Array, Array, Array, Any]:
    """Normalize over ``axis`` with the batch's own statistics: y, mean, var (biased) and what backward needs."""
    xp = backend.get_array_module(x)
    centered, mean, var = _centered(x, axis)
    y = centered * (gamma.reshape(-1) / xp.sqrt(var + eps)) + beta.reshape(-1)
    positive = None
    if relu:
        y = xp.maximum(y, 0)
        positive = y != 0
    shape = _kept_shape(x, axis)
    return _from_matrix(y, x, axis), mean.reshape(shape), var.reshape(shape), positive


def bn_inference(
    x: Array, gamma: Array, beta: Array, mean: Array, var: Array, eps: float, axis: tuple[int, ...], relu: bool,
    out: Array | None = None,
) -> Array:  # fmt: skip
    """Normalize with given statistics."""
    xp = backend.get_array_module(x)
    matrix = _as_matrix(x, axis)
    y = (matrix - mean.reshape(-1)) * (gamma.reshape(-1) / xp.sqrt(var.reshape(-1) + eps)) + beta.reshape(-1)
    if relu:
        y = xp.maximum(y, 0)
    y = _from_matrix(y, x, axis)
    if out is None:
        return y
    out[...] = y
    return out


def bn_again(
    x: Array, gamma: Array, beta: Array, mean: Array, var: Array, eps: float, inner: Any, relu: bool,
    axis: tuple[int, ...], out: Array,
) -> None:  # fmt: skip
    """See host_dispatch.bn_again; statistics of its own are wider, so that bits may differ."""
    bn_inference(x, gamma, beta, mean, var, eps, axis, relu, out)


def _normalized(x: Array, mean: Array, var: Array, eps: float, axis: tuple[int, ...]) -> tuple[Array, Array]:
    """The matrix x_hat, and 1 / sqrt(var + eps)."""
    inverse = 1 / backend.get_array_module(x).sqrt(var.reshape(-1) + eps)
    return (_as_matrix(x, axis) - mean.reshape(-1)) * inverse, inverse


def bn_sums(x: Array, mean: Array, var: Array, gy: Array, eps: float, axis: tuple[int, ...]) -> tuple[Array, Array]:
    """The sums of gy x_hat and of gy over ``axis``."""
    x_hat, _ = _normalized(x, mean, var, eps, axis)
    g, shape = _as_matrix(gy, axis), _kept_shape(x, axis)
    return _row_sum(g * x_hat).reshape(shape), _row_sum(g).reshape(shape)


def bn_input_gradient(
    x: Array, gamma: Array, mean: Array, var: Array, gy: Array, ggamma: Array, gbeta: Array, count: float, eps: float,
    axis: tuple[int, ...],
) -> Array:  # fmt: skip
    """gamma (gy - (gbeta + x_hat ggamma) / count) / sqrt(var + eps), from sums over ``count`` elements."""
    x_hat, inverse = _normalized(x, mean, var, eps, axis)
    spread = (gbeta.reshape(-1) + x_hat * ggamma.reshape(-1)) / count
    return _from_matrix((_as_matrix(gy, axis) - spread) * (gamma.reshape(-1) * inverse), x, axis)


def bn_backward(
    x: Array, gamma: Array, mean: Array, var: Array, gy: Array, eps: float, saved: Array | None, axis: tuple[int, ...],
    relu: bool, out_gamma: Array | None = None, out_beta: Array | None = None, is_ours: bool = False,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Gradients of x, gamma and beta. With ``relu``, ``gy`` is the gradient of the rectified output."""
    xp = backend.get_array_module(x)
    x_hat, inverse = _normalized(x, mean, var, eps, axis)
    g = _as_matrix(gy, axis)
    if relu:
        g = xp.where(saved, g, 0)
    gbeta, ggamma = _row_sum(g), _row_sum(g * x_hat)
    gx = (g - (gbeta + x_hat * ggamma) / max(len(g), 1)) * (gamma.reshape(-1) * inverse)
    return _from_matrix(gx, x, axis), _into(out_gamma, ggamma, gamma), _into(out_beta, gbeta, gamma)


def bn_move(
    running_mean: Array, running_var: Array, mean: Array, var: Array, decay: float, weights: tuple[float, float]
) -> None:
    """running = decay running + weight value, of mean and variance."""
    for running, value, weight in ((running_mean, mean, weights[0]), (running_var, var, weights[1])):
        running[...] = decay * running + weight * value


def _into(out: Array | None, value: Array, like: Array) -> Array:
    if out is None:
        return value.reshape(like.shape).astype(like.dtype, copy=False)
    out[...] = value.reshape(out.shape)
    return out


# ---- layer normalization, of the rows of a matrix (M, K)


def _wide_rows(x: Array) -> Array:
    """In the accumulation type and C order: NumPy adds neighbours in pairs, and others one after another."""
    return backend.get_array_module(x).ascontiguousarray(x.astype(backend.accumulation_dtype(x.dtype), copy=False))


def ln_forward(x: Array, gamma: Array, beta: Array, eps: float) -> tuple[Array, Array, Array]:
    """Each row less its mean, divided by sqrt(var + eps), times gamma (K) plus beta (K): y, mean (M), var (M)."""
    xp = backend.get_array_module(x)
    wide, count = _wide_rows(x), max(x.shape[1], 1)
    mean = wide.sum(1) / count
    centered = wide - mean[:, None]
    var = xp.square(centered).sum(1) / count
    centered *= (1 / xp.sqrt(var + eps))[:, None]
    return (centered * gamma + beta).astype(x.dtype, copy=False), mean, var


def ln_backward(x: Array, gamma: Array, mean: Array, var: Array, gy: Array, eps: float) -> tuple[Array, Array, Array]:
    """Gradients of x, gamma and beta."""
    xp, wide, count = backend.get_array_module(x), _wide_rows(gy), max(x.shape[1], 1)
    inverse = (1 / xp.sqrt(var + eps))[:, None]
    x_hat = (_wide_rows(x) - mean[:, None]) * inverse
    g = wide * gamma
    gx = (g - (g.sum(1)[:, None] + x_hat * (g * x_hat).sum(1)[:, None]) / count) * inverse
    ggamma, gbeta = _row_sum(wide * x_hat), _row_sum(wide)
    return gx.astype(x.dtype, copy=False), *(v.astype(gamma.dtype, copy=False) for v in (ggamma, gbeta))


ROWS = {
    "bn_statistics": lambda *arguments: bn_statistics,
    "bn_sums": lambda *arguments: bn_sums,
    "bn_forward": lambda *arguments: bn_forward,
    "bn_inference": lambda *arguments: bn_inference,
    "bn_again": lambda *arguments: bn_again,
    "bn_backward": lambda *arguments: bn_backward,
    "bn_move": lambda *arguments: bn_move,
    "ln_forward": lambda *arguments: ln_forward,
    "ln_backward": lambda *arguments: ln_backward,
}
