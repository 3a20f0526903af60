"""Renormalization, whitening, products with sparse matrices."""

from __future__ import annotations

import math

import numpy as np


def batch_renormalization(
    x, gamma, beta, rmax, dmax, eps=2e-05, running_mean=None, running_var=None, decay=0.9, update_statistics=False
):
    y = np.empty(x.shape)
    count = x.size // gamma.size
    for at in np.ndindex(gamma.shape):
        here = (slice(None), *at)
        mean, deviation = x[here].mean(), math.sqrt(x[here].var() + eps)
        running = math.sqrt(running_var[at] + eps)
        r = min(max(deviation / running, 1 / rmax), rmax)
        d = min(max((mean - running_mean[at]) / running, -dmax), dmax)
        y[here] = gamma[at] * ((x[here] - mean) / deviation * r + d) + beta[at]
        if update_statistics:
            running_mean[at] = decay * running_mean[at] + (1 - decay) * mean
            running_var[at] = decay * running_var[at] + (1 - decay) * x[here].var() * count / max(count - 1, 1)
    return y


def fixed_batch_renormalization(x, gamma, beta, mean, var, eps=2e-05):
    y = np.empty(x.shape)
    for at in np.ndindex(gamma.shape):
        here = (slice(None), *at)
        y[here] = gamma[at] * (x[here] - mean[at]) / math.sqrt(var[at] + eps) + beta[at]
    return y


def inverse_root(a):
    """By Newton's iteration (Denman and Beavers 1976), without eigenvalues."""
    y, z = np.asarray(a, np.float64), np.eye(len(a))
    for _ in range(60):
        y, z = (y + np.linalg.inv(z)) / 2, (z + np.linalg.inv(y)) / 2
    return z


def decorrelated_batch_normalization(x, *, groups=16, eps=2e-05, running_mean=None, running_projection=None, decay=0.9):
    y, size = np.empty(x.shape), x.shape[1] // groups
    for g in range(groups):
        part = x[:, g * size : (g + 1) * size]
        rows = np.moveaxis(part, 1, -1).reshape(-1, size)
        if not len(rows):
            continue
        mean = rows.mean(0)
        covariance = sum((np.outer(r - mean, r - mean) for r in rows), np.zeros((size, size))) / len(rows)
        p = inverse_root(covariance + eps * np.eye(size))
        for at in np.ndindex(x.shape[0], *x.shape[2:]):
            here = (at[0], slice(g * size, (g + 1) * size), *at[1:])
            y[here] = p @ (x[here] - mean)
        if running_mean is not None:
            running_mean[g] += (1 - decay) * (mean - running_mean[g])
        if running_projection is not None:
            running_projection[g] += (1 - decay) * (p * math.sqrt((len(rows) - 1) / len(rows)) - running_projection[g])
    return y


def fixed_decorrelated_batch_normalization(x, mean, projection, groups=16):
    y, size = np.empty(x.shape), x.shape[1] // groups
    for g, at in ((g, at) for g in range(groups) for at in np.ndindex(x.shape[0], *x.shape[2:])):
        here = (at[0], slice(g * size, (g + 1) * size), *at[1:])
        y[here] = projection[g] @ (x[here] - mean[g])
    return y


def dense(m):
    """A matrix, also of one that is sparse."""
    if not hasattr(m, "row"):
        return np.asarray(m, np.float64)
    data = np.asarray(m.data.array, np.float64)
    found = np.zeros((*data.shape[:-1], *m.shape))
    for at in np.ndindex(data.shape):
        if m.row[at] >= 0:
            found[(*at[:-1], m.row[at], m.col[at])] += data[at]
    return found


def sparse_matmul(a, b, transa=False, transb=False):
    a, b = (np.swapaxes(dense(m), -1, -2) if t else dense(m) for m, t in ((a, transa), (b, transb)))
    return np.einsum("...ij,...jk->...ik", a, b)


def forget(func, *xs):
    return func(*xs)
