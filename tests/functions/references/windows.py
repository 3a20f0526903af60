"""Windows over any number of axes, one place at a time."""

from __future__ import annotations

import itertools
import math

import numpy as np

from .nets import convolution_2d


def each(value, ndim):
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * ndim


def places(sizes, out, k, s, p, d=None):
    """For each window: its place in the result, its own places, and the places in the input, where it has them."""
    d = d or (1,) * len(k)
    for o in np.ndindex(*out):
        for u in np.ndindex(*k):
            at = tuple(i * step + v * gap - pad for i, v, step, gap, pad in zip(o, u, s, d, p))
            if all(0 <= a < n for a, n in zip(at, sizes)):
                yield o, u, at


def out_sizes(sizes, k, s, p, d, cover_all):
    round_up = math.ceil if cover_all else math.floor
    return tuple(
        round_up((n + 2 * pad - gap * (size - 1) - 1) / step) + 1 for n, size, step, pad, gap in zip(sizes, k, s, p, d)
    )


def convolution_nd(x, W, b=None, stride=1, pad=0, cover_all=False, dilate=1, groups=1):
    ndim = x.ndim - 2
    s, p, d = each(stride, ndim), each(pad, ndim), each(dilate, ndim)
    out = out_sizes(x.shape[2:], W.shape[2:], s, p, d, cover_all)
    y = np.zeros((len(x), len(W), *out))
    for o, u, at in places(x.shape[2:], out, W.shape[2:], s, p, d):
        for k, c in itertools.product(range(len(W)), range(W.shape[1])):
            y[(slice(None), k, *o)] += x[(slice(None), k // (len(W) // groups) * W.shape[1] + c, *at)] * W[(k, c, *u)]
    return y if b is None else y + np.reshape(b, (-1, *(1,) * ndim))


def convolution_1d(x, W, b=None, stride=1, pad=0, cover_all=False, dilate=1, groups=1):
    return convolution_nd(x, W, b, stride, pad, cover_all, dilate, groups)


def convolution_3d(x, W, b=None, stride=1, pad=0, cover_all=False, dilate=1, groups=1):
    return convolution_nd(x, W, b, stride, pad, cover_all, dilate, groups)


def deconvolution_nd(x, W, b=None, stride=1, pad=0, outsize=None, dilate=1, groups=1):
    ndim = x.ndim - 2
    s, p, d = each(stride, ndim), each(pad, ndim), each(dilate, ndim)
    if outsize is None:
        outsize = [
            step * (n - 1) + gap * (k - 1) + 1 - 2 * q for n, k, step, q, gap in zip(x.shape[2:], W.shape[2:], s, p, d)
        ]
    outsize = each(outsize, ndim) if not isinstance(outsize, list) else outsize
    y = np.zeros((len(x), W.shape[1] * groups, *outsize))
    for i, u, at in places(outsize, x.shape[2:], W.shape[2:], s, p, d):
        for c, k in itertools.product(range(x.shape[1]), range(W.shape[1])):
            channel = c // (x.shape[1] // groups) * W.shape[1] + k
            y[(slice(None), channel, *at)] += x[(slice(None), c, *i)] * W[(c, k, *u)]
    return y if b is None else y + np.reshape(b, (-1, *(1,) * ndim))


def deconvolution_1d(x, W, b=None, stride=1, pad=0, outsize=None, dilate=1, groups=1):
    return deconvolution_nd(x, W, b, stride, pad, outsize, dilate, groups)


def deconvolution_3d(x, W, b=None, stride=1, pad=0, outsize=None, dilate=1, groups=1):
    return deconvolution_nd(x, W, b, stride, pad, outsize, dilate, groups)


def depthwise_convolution_2d(x, W, b=None, stride=1, pad=0):
    parts = [
        convolution_2d(x[:, c : c + 1], W[:, c : c + 1], None, stride, pad) for c in range(x.shape[1])
    ]  # each (N, D, OH, OW)
    y = np.concatenate(parts, axis=1)
    return y if b is None else y + b[:, None, None]


def dilated_convolution_2d(x, W, b=None, stride=1, pad=0, dilate=1, cover_all=False):
    return convolution_2d(x, W, b, stride, pad, cover_all, dilate=dilate)


def pooled(x, ksize, stride, pad, cover_all):
    k = each(ksize, x.ndim - 2)
    s = k if stride is None else each(stride, x.ndim - 2)
    p = each(pad, x.ndim - 2)
    out = out_sizes(x.shape[2:], k, s, p, (1,) * len(k), cover_all)
    seen = {}
    for o, u, at in places(x.shape[2:], out, k, s, p):
        seen.setdefault(o, []).append((u, at))
    return out, seen, k


def max_pooling_nd(x, ksize, stride=None, pad=0, cover_all=True, return_indices=False):
    out, seen, k = pooled(x, ksize, stride, pad, cover_all)
    y, indices = np.empty((*x.shape[:2], *out)), np.empty((*x.shape[:2], *out), np.int32)
    for (n, c), (o, window) in itertools.product(np.ndindex(x.shape[:2]), seen.items()):
        values = [float(x[(n, c, *at)]) for _, at in window]
        best = values.index(sorted(values)[-1])
        y[(n, c, *o)] = values[best]
        indices[(n, c, *o)] = np.ravel_multi_index(window[best][0], k)
    return (y, indices) if return_indices else y


def max_pooling_1d(x, ksize, stride=None, pad=0, cover_all=True, return_indices=False):
    return max_pooling_nd(x, ksize, stride, pad, cover_all, return_indices)


def max_pooling_3d(x, ksize, stride=None, pad=0, cover_all=True, return_indices=False):
    return max_pooling_nd(x, ksize, stride, pad, cover_all, return_indices)


def average_pooling_nd(x, ksize, stride=None, pad=0, pad_value=0):
    out, seen, k = pooled(x, ksize, stride, pad, False)
    y = np.empty((*x.shape[:2], *out))
    for o, window in seen.items():
        count = math.prod(k) if pad_value == 0 else len(window)
        y[(..., *o)] = np.sum([x[(..., *at)] for _, at in window], axis=0) / count
    return y


def average_pooling_1d(x, ksize, stride=None, pad=0, pad_value=0):
    return average_pooling_nd(x, ksize, stride, pad, pad_value)


def average_pooling_3d(x, ksize, stride=None, pad=0, pad_value=0):
    return average_pooling_nd(x, ksize, stride, pad, pad_value)


def before(x, ksize, stride, pad, outsize, cover_all):
    k = each(ksize, x.ndim - 2)
    s = k if stride is None else each(stride, x.ndim - 2)
    p = each(pad, x.ndim - 2)
    if outsize is None:
        outsize = tuple(
            next(n for n in range(1, 60) if out_sizes((n,), *[(v,) for v in axis[1:]], (1,), cover_all) == axis[:1])
            for axis in zip(x.shape[2:], k, s, p)
        )
    return k, s, p, each(outsize, len(k))


def unpooling_nd(x, ksize, stride=None, pad=0, outsize=None, cover_all=True):
    k, s, p, outsize = before(x, ksize, stride, pad, outsize, cover_all)
    y = np.zeros((*x.shape[:2], *outsize))
    for o, _, at in places(outsize, x.shape[2:], k, s, p):
        y[(..., *at)] += x[(..., *o)]
    return y


def unpooling_1d(x, ksize, stride=None, pad=0, outsize=None, cover_all=True):
    return unpooling_nd(x, ksize, stride, pad, outsize, cover_all)


def unpooling_2d(x, ksize, stride=None, pad=0, outsize=None, cover_all=True):
    return unpooling_nd(x, ksize, stride, pad, outsize, cover_all)


def unpooling_3d(x, ksize, stride=None, pad=0, outsize=None, cover_all=True):
    return unpooling_nd(x, ksize, stride, pad, outsize, cover_all)


def upsampling_2d(x, indexes, ksize, stride=None, pad=0, outsize=None, cover_all=True):
    k, s, p, outsize = before(x, ksize, stride, pad, outsize, cover_all)
    y = np.zeros((*x.shape[:2], *outsize))
    for o, u, at in places(outsize, x.shape[2:], k, s, p):
        chosen = indexes[(..., *o)] == u[0] * k[1] + u[1]
        y[(..., *at)] += np.where(chosen, x[(..., *o)], 0)
    return y


def spatial_pyramid_pooling_2d(x, pyramid_height, pooling=None):
    found = []
    for bins in 2 ** np.arange(pyramid_height):
        k = [-(-n // bins) for n in x.shape[2:]]
        pad = [(size * bins - n) // 2 for size, n in zip(k, x.shape[2:])]
        level = np.empty((*x.shape[:2], bins, bins))
        for i, j in np.ndindex(bins, bins):
            rows = slice(max(0, i * k[0] - pad[0]), (i + 1) * k[0] - pad[0])
            columns = slice(max(0, j * k[1] - pad[1]), (j + 1) * k[1] - pad[1])
            level[:, :, i, j] = x[:, :, rows, columns].max(axis=(2, 3))
        found.append(level.reshape(len(x), -1))
    return np.concatenate(found, axis=1)[:, :, None, None]
