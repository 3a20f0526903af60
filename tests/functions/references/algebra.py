"""Linear algebra, cumulative sums and products, sequences, windows and samples of images, measures by class."""

from __future__ import annotations

import itertools
import math

import numpy as np

from .arrays import over_axes

# ---- linear algebra -------------------------------------------------------------------------------------------------


def einsum(*operands):
    return np.einsum(*operands, optimize=False)


def batch_l2_norm_squared(x):
    return np.array([math.fsum(float(v) ** 2 for v in row.flat) for row in x])


def det(a):
    """Leibniz' formula."""
    n, total = len(a), 0.0
    for order in itertools.permutations(range(n)):
        inversions = sum(order[i] > order[j] for i in range(n) for j in range(i + 1, n))
        total += (-1) ** inversions * math.prod(float(a[i, order[i]]) for i in range(n))
    return np.array(total)


def batch_det(a):
    return np.array([det(m) for m in a])


def inv(a):
    """Cramer's rule."""
    n = len(a)
    y = np.empty((n, n))
    for i, j in np.ndindex(n, n):
        minor = np.delete(np.delete(a, i, 0), j, 1)
        y[j, i] = (-1) ** (i + j) * det(minor) / det(a)
    return y


def batch_inv(a):
    return np.stack([inv(m) for m in a])


def cholesky(a):
    n = len(a)
    y = np.zeros((n, n))
    for i in range(n):
        for j in range(i + 1):
            rest = a[i, j] - sum(y[i, k] * y[j, k] for k in range(j))
            y[i, j] = math.sqrt(rest) if i == j else rest / y[j, j]
    return y


def fourier(x, sign, scale):
    real, imag = (np.asarray(v, float) for v in x)
    n = real.shape[-1]
    angles = sign * 2 * np.pi * np.outer(np.arange(n), np.arange(n)) / n
    c, s = np.cos(angles), np.sin(angles)
    return (real @ c - imag @ s) * scale, (real @ s + imag @ c) * scale


def fft(x):
    return fourier(x, -1, 1.0)


def ifft(x):
    return fourier(x, 1, 1.0 / x[0].shape[-1])


# ---- cumulative -----------------------------------------------------------------------------------------------------


def accumulated(function, x, axis):
    x, axis = (x.reshape(-1), 0) if axis is None else (x, axis)
    rows = np.moveaxis(np.array(x, np.float64), axis, 0)
    for i in range(1, len(rows)):
        rows[i] = function(rows[i - 1], rows[i])
    return np.moveaxis(rows, 0, axis)


def cumsum(x, axis=None):
    return accumulated(lambda a, b: a + b, x, axis)


def cumprod(x, axis=None):
    return accumulated(lambda a, b: a * b, x, axis)


def prod(x, axis=None, keepdims=False):
    return over_axes(math.prod, x, axis, keepdims) if x.size else np.prod(x, axis, keepdims=keepdims)


# ---- diagonals and sequences ----------------------------------------------------------------------------------------


def diagonal(x, offset=0, axis1=0, axis2=1):
    return np.diagonal(x, offset, axis1, axis2)


def pad_sequence(xs, length=None, padding=0):
    length = max(map(len, xs)) if length is None else length
    rows = [[x[t] if t < len(x) else np.full(x.shape[1:], padding) for t in range(length)] for x in xs]
    return np.array(rows, np.float64).reshape(len(xs), length, *xs[0].shape[1:])


def transpose_sequence(xs):
    return tuple(np.array([x[t] for x in xs if t < len(x)]) for t in range(len(xs[0])))


# ---- images ---------------------------------------------------------------------------------------------------------


def depth2space(X, r):
    n, c, h, w = X.shape
    y = np.empty((n, c // r**2, h * r, w * r))
    for e, k, i, j in np.ndindex(*y.shape):
        y[e, k, i, j] = X[e, (i % r * r + j % r) * (c // r**2) + k, i // r, j // r]
    return y


def space2depth(X, r):
    n, c, h, w = X.shape
    y = np.empty((n, c * r**2, h // r, w // r))
    for e, k, i, j in np.ndindex(*X.shape):
        y[e, (i % r * r + j % r) * c + k, i // r, j // r] = X[e, k, i, j]
    return y


def two(v):
    return (v, v) if isinstance(v, int) else tuple(v)


def im2col(x, ksize, stride=1, pad=0, cover_all=False, dilate=1):
    k, s, p, d = two(ksize), two(stride), two(pad), two(dilate)
    n, c, *size = x.shape
    free = [size[i] + 2 * p[i] - (k[i] - 1) * d[i] - 1 for i in (0, 1)]
    out = [(math.ceil if cover_all else math.floor)(f / stride) + 1 for f, stride in zip(free, s)]
    y = np.zeros((n, c * k[0] * k[1], *out))
    for e, ch, i, j, a, b in np.ndindex(n, c, *k, *out):
        row, column = a * s[0] + i * d[0] - p[0], b * s[1] + j * d[1] - p[1]
        if 0 <= row < size[0] and 0 <= column < size[1]:
            y[e, (ch * k[0] + i) * k[1] + j, a, b] = x[e, ch, row, column]
    return y


def resize_images(x, output_shape, *, mode="bilinear", align_corners=True):
    y = np.empty((*x.shape[:2], *output_shape))
    for i, j in np.ndindex(*output_shape):
        places = []
        for k, length, size in zip((i, j), x.shape[2:], output_shape):
            if mode == "nearest":
                places.append(float(k * length // size))
            elif align_corners:
                places.append(k * (length - 1) / (size - 1) if size > 1 else 0.0)
            else:
                places.append(min(max((k + 0.5) * length / size - 0.5, 0.0), length - 1.0))
        y[:, :, i, j] = sampled(x, *places)
    return y


def sampled(x, row, column):
    """Tent-shaped weights around a place, on images (..., H, W)."""
    total = np.zeros(x.shape[:-2])
    for i, j in np.ndindex(*x.shape[-2:]):
        total = total + max(0.0, 1 - abs(row - i)) * max(0.0, 1 - abs(column - j)) * x[..., i, j]
    return total


def spatial_transformer_grid(theta, output_shape):
    h, w = output_shape
    y = np.empty((len(theta), 2, h, w))
    for n, i, j in np.ndindex(len(theta), h, w):
        at = [-1 + 2 * j / (w - 1) if w > 1 else -1, -1 + 2 * i / (h - 1) if h > 1 else -1, 1]
        y[n, :, i, j] = np.asarray(theta[n]) @ at
    return y


def spatial_transformer_sampler(x, grid):
    n, c, h, w = x.shape
    y = np.empty((n, c, *grid.shape[2:]))
    for e, i, j in np.ndindex(n, *grid.shape[2:]):
        u, v = grid[e, :, i, j]
        y[e, :, i, j] = sampled(x[e], (v + 1) * (h - 1) / 2, (u + 1) * (w - 1) / 2)
    return y


# ---- measures -------------------------------------------------------------------------------------------------------


def classification_summary(y, t, label_num=None, beta=1.0, ignore_label=-1):
    scores = np.moveaxis(y, 1, -1).reshape(-1, y.shape[1])
    pairs = [(int(s.argmax()), int(k)) for s, k in zip(scores, t.reshape(-1)) if k != ignore_label]
    rows = []
    for k in range(max(b for _, b in pairs) + 1 if label_num is None else label_num):
        hits = sum(a == k and b == k for a, b in pairs)
        found, support = sum(a == k for a, _ in pairs), sum(b == k for _, b in pairs)
        precision, recall = ratio(hits, found), ratio(hits, support)
        f_beta = ratio((1 + beta**2) * precision * recall, beta**2 * precision + recall)  # NaN without a hit
        rows.append((precision, recall, f_beta, support))
    return tuple(np.array(column, float) for column in zip(*rows))


def ratio(a, b):
    return a / b if b else math.nan


def precision(y, t, label_num=None, ignore_label=-1):
    return classification_summary(y, t, label_num, 1.0, ignore_label)[::3]


def recall(y, t, label_num=None, ignore_label=-1):
    return classification_summary(y, t, label_num, 1.0, ignore_label)[1::2]


def f1_score(y, t, label_num=None, ignore_label=-1):
    return classification_summary(y, t, label_num, 1.0, ignore_label)[2:]


# ---- chance ---------------------------------------------------------------------------------------------------------


def zoneout(h, x, ratio=0.5):
    """Where chance has no say."""
    return {0.0: x, 1.0: h}[ratio] * 1.0


def simplified_dropconnect(x, W, b=None, ratio=0.5, train=True, mask=None, use_batchwise_mask=True):
    masks = mask if use_batchwise_mask else [mask] * len(x)
    kept = 1 - ratio if train else 1.0
    rows = [(W * m / kept) @ row.reshape(-1) for row, m in zip(x, masks)]
    y = np.array(rows).reshape(len(x), len(W))
    return y if b is None else y + b


# ---- normalization --------------------------------------------------------------------------------------------------


def normalize(x, eps=1e-5, axis=1):
    lengths = over_axes(lambda vs: math.sqrt(math.fsum(float(v) ** 2 for v in vs)), x, axis, True)
    return x / (lengths + eps)


def local_response_normalization(x, n=5, k=2, alpha=1e-4, beta=0.75):
    y = np.empty(x.shape)
    for c in range(x.shape[1]):
        near = [x[:, j] ** 2 for j in range(x.shape[1]) if abs(j - c) <= n // 2]
        y[:, c] = x[:, c] / (k + alpha * sum(near)) ** beta
    return y
