"""Batch normalization with bounds (renormalization), and of channels together (whitening).

Legend: N examples, C channels in G groups of K, M = N times the further axes.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from dbrdist import kernels
from dbrdist.core.array.backend import Array, accumulation_dtype, get_array_module, is_floating
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import expected, floating
from dbrdist.core.tape.function_node import FunctionNode, call
from dbrdist.core.tape.repeats import computed_once
from dbrdist.core.tape.variable import Operand, Variable, as_array, as_variable
from dbrdist.functions.normalization import (
    batch_normalization,
    checked_axis,
    default_axis,
    fixed_batch_normalization,
    move_running,
)


def batch_renormalization(
    x: Operand, gamma: Operand, beta: Operand, rmax: float, dmax: float, eps: float = 2e-5,
    running_mean: Array | None = None, running_var: Array | None = None, decay: float = 0.9,
    update_statistics: bool = False,
) -> Variable:  # fmt: skip
    """Batch normalization whose results follow the running statistics, within bounds (Ioffe 2017).

    y = gamma (x_hat r + d) + beta with x_hat of the batch's own mean m and deviation s, r = s / S held between 1 / rmax
    and rmax and d = (m - M) / S held between -dmax and dmax, where M and S are the running mean and deviation. r and d
    count as constants for gradients.

    Args:
        x: input of any shape.
        gamma, beta: scale and shift, of the shape of the axes after the first that are kept, as a rule the channels.
        rmax, dmax: the bounds.
        eps: added to both variances.
        running_mean, running_var: the running statistics, arrays of the shape of gamma.
        decay: their weight of the past.
        update_statistics: whether they move, in place, towards those of the batch; after r and d are taken.

    Example:
        >>> mean, var = np.array([2.0]), np.array([1.0])
        >>> F.batch_renormalization(np.array([[1.0], [3.0]]), np.ones(1), np.zeros(1), 3.0, 5.0, 0.0, mean, var).array
        array([[-1.],
               [ 1.]])
    """
    name = "batch_renormalization"
    for what, running in (("running_mean", running_mean), ("running_var", running_var)):
        if running is None:
            raise expected(name, what, "an array, by which r and d are measured", "None")
    if not (rmax >= 1 and dmax >= 0):
        raise expected(name, "rmax, dmax", "rmax from 1 on, and dmax from 0 on", f"{rmax} and {dmax}")
    axis = checked_axis(name, x, gamma, None, beta=beta, running_mean=running_mean, running_var=running_var)

    def corrections() -> tuple[Array, Array]:
        mean, var = kernels.bn_statistics(as_array(x), axis)
        xp = get_array_module(mean)
        deviation = xp.sqrt(running_var + eps)
        dtype = gamma.dtype if is_floating(gamma.dtype) else var.dtype
        r = xp.clip(xp.sqrt(var + eps) / deviation, 1.0 / rmax, rmax).astype(dtype)
        d = xp.clip((mean - running_mean) / deviation, -dmax, dmax).astype(dtype)
        if update_statistics:
            move_running(running_mean, running_var, mean, var, decay, prod(x.shape[i] for i in axis))
        return r, d

    r, d = computed_once(corrections)
    gamma = as_variable(gamma)
    return batch_normalization(x, ops.mul(gamma, r), ops.add(ops.mul(gamma, d), beta), eps=eps, axis=axis)


def fixed_batch_renormalization(
    x: Operand, gamma: Operand, beta: Operand, mean: Operand, var: Operand, eps: float = 2e-5
) -> Variable:
    """Normalize with given mean and variance: :func:`fixed_batch_normalization` by its name in older programs.

    Args:
        x: input, shape (N, C, D...).
        gamma, beta: factor and offset, shape (C,).
        mean, var: statistics, shape (C,).
        eps: added to the variance before the root.

    Example:
        >>> one = np.ones(1)
        >>> F.fixed_batch_renormalization(np.array([[5.0]]), 2 * one, one, 3 * one, 4 * one, eps=0.0).array
        array([[3.]])
    """
    axis = default_axis(len(x.shape), len(gamma.shape))
    return fixed_batch_normalization(x, gamma, beta, mean, var, eps, axis)


# ---- whitening ------------------------------------------------------------------------------------------------------


class InverseRoot(FunctionNode):
    """P = A^(-1/2) for symmetric positive definite matrices A (..., K, K)

    From P P = 1/A follows P dP + dP P = -P^2 dA P^2: the gradient is a Lyapunov equation, also for equal eigenvalues.
    """

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_outputs((0,))
        values, vectors = _eigen(xs[0])
        return ((vectors * (values**-0.5)[..., None, :]) @ vectors.swapaxes(-1, -2),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        (p,) = self.retained_outputs()
        square = ops.matmul(p, p)
        return (ops.neg(call(Lyapunov(), p, ops.matmul(ops.matmul(square, gys[0]), square))),)


class Lyapunov(FunctionNode):
    """X with P X + X P = Q, P symmetric positive definite; P and Q (..., K, K)"""

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0,))
        self.retain_outputs((0,))
        p, q = xs
        values, vectors = _eigen(p)
        turned = vectors.swapaxes(-1, -2) @ q @ vectors
        turned = turned / (values[..., :, None] + values[..., None, :])
        return (vectors @ turned @ vectors.swapaxes(-1, -2),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        (p,), (x,) = self.retained_inputs(), self.retained_outputs()
        gq = call(Lyapunov(), p, gys[0])
        rules = (
            lambda: ops.neg(ops.add(ops.matmul(gq, ops.swap(x)), ops.matmul(ops.swap(x), gq))),
            lambda: gq,
        )
        return tuple(rules[i]() for i in wanted)


def _eigen(a: Array) -> tuple[Array, Array]:
    """Eigenvalues and eigenvectors of symmetric matrices; NaN where there are none."""
    xp = get_array_module(a)
    try:
        values, vectors = xp.linalg.eigh(a)
    except np.linalg.LinAlgError:
        return xp.full(a.shape[:-1], xp.nan, a.dtype), xp.full(a.shape, xp.nan, a.dtype)
    return values, vectors


def _by_groups(name: str, x: Operand, groups: int) -> tuple[Variable, Any]:
    """x as Variable, and in groups (G, M, K) in the wider type."""
    floating(name, x=x)
    x = as_variable(x)
    if x.ndim < 2:
        raise expected(name, "x", "at least 2 axes", x)
    if not isinstance(groups, (int, np.integer)) or groups < 1 or x.shape[1] % groups:
        raise expected(name, "groups", f"a divisor of the {x.shape[1]} channels of x", groups)
    last = ops.transpose(ops.cast(x, accumulation_dtype(x.dtype)), (0, *range(2, x.ndim), 1))
    rows = ops.reshape(last, (x.size // max(x.shape[1], 1), groups, x.shape[1] // groups))
    return x, ops.transpose(rows, (1, 0, 2))


def _as_given(y: Variable, x: Variable) -> Variable:
    """Groups (G, M, K) in the shape and type of x; images lie channels-last."""
    y = ops.reshape(ops.transpose(y, (1, 0, 2)), (x.shape[0], *x.shape[2:], x.shape[1]))
    return ops.cast(ops.transpose(y, (0, x.ndim - 1, *range(1, x.ndim - 1))), x.dtype)


def decorrelated_batch_normalization(
    x: Operand, *, groups: int = 16, eps: float = 2e-5, running_mean: Array | None = None,
    running_projection: Array | None = None, decay: float = 0.9,
) -> Variable:  # fmt: skip
    """Channels of mean 0 and variance 1 that are not correlated within their group (ZCA whitening, Huang et al. 2018).

    y = P (x - m) with the mean m of the batch and P = (covariance + eps)^(-1/2) for each group of channels.

    Args:
        x: input, shape (N, C, ...).
        groups: into how many groups of K neighbours the C channels are divided.
        eps: added to the variances.
        running_mean, running_projection: arrays of shape (groups, K) and (groups, K, K) that move towards m and P in
            place, or None. As a running variance is, P is that of the unbiased covariance: times sqrt((M - 1) / M).
        decay: their weight of the past.

    Example:
        >>> F.decorrelated_batch_normalization(np.array([[1.0, 2.0], [3.0, 5.0]]), groups=1).shape
        (2, 2)
    """
    name = "decorrelated_batch_normalization"
    x, rows = _by_groups(name, x, groups)
    g, m, k = rows.shape
    for what, running, shape in (
        ("running_mean", running_mean, (g, k)), ("running_projection", running_projection, (g, k, k)),
    ):  # fmt: skip
        if running is not None and running.shape != shape:
            raise expected(name, what, f"shape {shape} for {groups} groups of x {x.shape}", running)
    share = 1.0 / max(m, 1)
    mean = ops.mul(ops.sum(rows, 1, True), share)
    centered = ops.sub(rows, mean)
    xp = get_array_module(rows.array)
    covariance = ops.mul(ops.matmul(ops.swap(centered), centered), share)
    p = InverseRoot().apply((ops.add(covariance, xp.eye(k, dtype=rows.dtype) * rows.dtype.type(eps)),))[0]
    if m:
        _move(running_mean, mean.array.reshape(g, k), decay)
        _move(running_projection, p.array * (max(m - 1, 1) / m) ** 0.5, decay)
    return _as_given(ops.matmul(centered, p), x)


def _move(running: Array, value: Array, decay: float) -> None:
    if running is not None:
        running[...] = decay * running + (1 - decay) * value


def fixed_decorrelated_batch_normalization(
    x: Operand, mean: Operand, projection: Operand, groups: int = 16
) -> Variable:
    """P (x - mean) for each group of channels, with given statistics.

    Args:
        x: input, shape (N, C, ...).
        mean, projection: shapes (groups, K) and (groups, K, K), as the running statistics of
            :func:`decorrelated_batch_normalization`.
        groups: into how many groups of K neighbours the C channels are divided.

    Example:
        >>> F.fixed_decorrelated_batch_normalization(np.array([[3.0]]), np.ones((1, 1)), np.ones((1, 1, 1)), 1).array
        array([[2.]])
    """
    name = "fixed_decorrelated_batch_normalization"
    floating(name, mean=mean, projection=projection)
    x, rows = _by_groups(name, x, groups)
    g, _, k = rows.shape
    for what, a, shape in (("mean", mean, (g, k)), ("projection", projection, (g, k, k))):
        if a.shape != shape:
            raise expected(name, what, f"shape {shape} for {groups} groups of x {x.shape}", a)
    mean, projection = (ops.cast(as_variable(a), rows.dtype) for a in (mean, projection))
    centered = ops.sub(rows, ops.reshape(mean, (g, 1, k)))
    return _as_given(ops.matmul(centered, ops.swap(projection)), x)
