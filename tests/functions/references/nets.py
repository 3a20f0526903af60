"""Activations, losses, measures, images and normalization."""

from __future__ import annotations

import itertools
import math

import numpy as np

from .arrays import along, each, max, mean, sum

# ---- activations ----------------------------------------------------------------------------------------------------


def relu(x):
    return each(lambda v: v if v > 0 else 0.0, x)


def sigmoid(x):
    return each(lambda v: 1 / (1 + math.exp(-v)) if v > 0 else math.exp(v) / (1 + math.exp(v)), x)


def softmax(x, axis=1):
    return np.exp(log_softmax(x, axis))


def log_softmax(x, axis=1):
    return x - np.logaddexp.reduce(np.asarray(x), axis=axis, keepdims=True)


def softplus(x, beta=1.0):
    return np.logaddexp(0.0, beta * x) / beta


def leaky_relu(x, slope=0.2):
    return each(lambda v: v if v >= 0 else slope * v, x)


def prelu(x, W):
    return each(lambda v, w: v if v >= 0 else w * v, x, along(x, W, 1) if np.ndim(W) else W)


def elu(x, alpha=1.0):
    return each(lambda v: v if v >= 0 else alpha * (math.exp(v) - 1), x)


def selu(x, alpha=1.6732632423543772848170429916717, scale=1.0507009873554804934193349852946):
    return each(lambda v: scale * v if v >= 0 else scale * alpha * (math.exp(v) - 1), x)


def clipped_relu(x, z=20.0):
    return each(lambda v: 0.0 if v <= 0 else v if v < z else z, x)


def relu6(x):
    return clipped_relu(x, 6)


def hard_sigmoid(x):
    return each(lambda v: 0.0 if v < -2.5 else 1.0 if v > 2.5 else v / 5 + 0.5, x)


def swish(x, beta):
    return x * sigmoid(x * (along(x, beta, 1) if np.ndim(beta) else beta))


def silu(x, beta=1.0):
    return each(lambda v: v / (1 + math.exp(-v * beta)) if v * beta > -700 else 0.0, x)


def mish(x):
    def one(v):
        e = math.exp(-abs(v))  # tanh(ln s) = (s^2 - 1) / (s^2 + 1), s = 1 + exp v
        return v * (1 + 2 * e) / (1 + 2 * e + 2 * e * e) if v > 0 else v * (e * e + 2 * e) / (e * e + 2 * e + 2)

    return each(one, x)


def hardswish(x):
    return each(lambda v: 0.0 if v <= -3 else v if v >= 3 else v * (v + 3) / 6, x)


def gelu(x, approximate="none"):
    def exact(v):
        return v * math.erfc(-v / math.sqrt(2)) / 2

    def by_tanh(v):
        return v / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))

    return each({"none": exact, "tanh": by_tanh}[approximate], x)


def crelu(x, axis=1):
    return np.concatenate([relu(x), relu(-x)], axis)


def maxout(x, pool_size, axis=1):
    groups = np.split(x, x.shape[axis] // pool_size, axis)
    return np.concatenate([max(g, axis, True) for g in groups], axis)


# ---- losses ---------------------------------------------------------------------------------------------------------


def reduced(losses, reduce):
    return {"no": lambda v: v, "sum": sum, "mean": mean}[reduce](losses)


def softmax_cross_entropy(
    x, t, normalize=True, cache_score=True, class_weight=None, ignore_label=-1, reduce="mean",
    enable_double_backprop=False, soft_target_loss="cross-entropy", *, label_smoothing=0.0,
):  # fmt: skip
    ln_p, num_classes = log_softmax(x), x.shape[1]
    if t.dtype.kind == "f":
        entropy = np.log(t + 1e-7) if soft_target_loss == "kl-divergence" else 0.0  # 1e-7: Chainer's
        return reduced((t * (entropy - ln_p)).sum(1), reduce)
    weight = np.ones(num_classes) if class_weight is None else class_weight
    losses = np.zeros(t.shape)
    for n, *d in np.ndindex(t.shape):
        k = t[(n, *d)]
        if k == ignore_label:
            continue
        for j in range(num_classes):
            share = label_smoothing / num_classes + (1 - label_smoothing) * (j == k)
            losses[(n, *d)] -= share * weight[j] * ln_p[(n, j, *d)]
    if reduce == "no":
        return losses
    count = int((t != ignore_label).sum()) if normalize else len(x)
    return losses.sum() / count if count else losses.sum()


def mean_squared_error(x0, x1):
    return mean(squared_error(x0, x1)) if x0.size else np.zeros(())


def mean_absolute_error(x0, x1):
    return mean(absolute_error(x0, x1))


def squared_error(x0, x1):
    return (x0 - x1) * (x0 - x1)


def absolute_error(x0, x1):
    return each(lambda a, b: a - b if a > b else b - a, x0, x1)


def sigmoid_cross_entropy(x, t, normalize=True, reduce="mean"):
    losses = np.where(t == -1, 0.0, np.where(t == 1, np.logaddexp(0, -x), np.logaddexp(0, x)))
    if reduce == "no":
        return losses
    count = int((t != -1).sum()) if normalize else len(t)
    return losses.sum() / count if count else losses.sum()


def huber_loss(x, t, delta, reduce="sum_along_second_axis"):
    def one(a, b):
        distance = abs(a - b)
        return distance**2 / 2 if distance <= delta else delta * distance - delta**2 / 2

    y = each(one, x, t)
    return y if reduce == "no" else sum(y, 1)


def hinge(x, t, norm="L1", reduce="mean"):
    y = np.zeros(x.shape)
    for n, k in np.ndindex(x.shape):
        margin = 1 - x[n, k] if t[n] == k else 1 + x[n, k]
        y[n, k] = margin ** {"L1": 1, "L2": 2}[norm] if margin > 0 else 0.0
    return y if reduce == "no" else y.sum() / len(x)


def bernoulli_nll(x, y, reduce="sum"):
    return reduced(x * np.logaddexp(0, -y) + (1 - x) * np.logaddexp(0, y), reduce)


def binary_cross_entropy(x, t, label_smoothing=0.0, threshold=None, sum_classes=False):
    q = t if t.ndim == 2 else np.eye(x.shape[1])[t]
    q = (1 - label_smoothing) * q + label_smoothing / x.shape[1]
    q = q if threshold is None else np.where(q > threshold, 1.0, 0.0)
    losses = bernoulli_nll(q, x, "no")
    return losses.sum(1).mean() if sum_classes else losses.mean()


def top_k_accuracy(y, t, k=5):
    """Sorted by score, the highest first, and by class number among equal ones."""
    t = t if t.ndim == 1 else t.argmax(1)
    order = [sorted(range(y.shape[1]), key=lambda j: (-row[j], j))[:k] for row in y]
    return np.mean([label in best for label, best in zip(t, order)])


def gaussian_nll(x, mean, ln_var, reduce="sum"):
    def one(v, m, s):
        return math.log(math.sqrt(2 * math.pi)) + s / 2 + (v - m) ** 2 / (2 * math.exp(s))

    return reduced(each(one, x, mean, ln_var), reduce)


def gaussian_kl_divergence(mean, ln_var, reduce="sum"):
    """Kingma and Welling 2014, appendix B: -(1 + ln s^2 - m^2 - s^2) / 2."""
    return reduced(-0.5 * (1 + ln_var - mean * mean - np.exp(ln_var)), reduce)


# ---- measures -------------------------------------------------------------------------------------------------------


def accuracy(y, t, ignore_label=None):
    scores = np.moveaxis(y, 1, -1).reshape(-1, y.shape[1]).tolist()
    pairs = [(row.index(sorted(row)[-1]), k) for row, k in zip(scores, t.ravel().tolist()) if k != ignore_label]
    return len([1 for guess, k in pairs if guess == k]) / (len(pairs) or 1)


def binary_accuracy(y, t):
    pairs = [(v >= 0, k) for v, k in zip(y.ravel().tolist(), t.ravel().tolist()) if k != -1]
    return len([1 for guess, k in pairs if guess == k]) / (len(pairs) or 1)


def r2_score(pred, true, sample_weight=None, multioutput="uniform_average"):
    columns = []
    for p, t in zip(pred.reshape(len(pred), -1).T, true.reshape(len(true), -1).T):
        rest, total = ((p - t) ** 2).sum(), t.var() * len(t)
        columns.append(1 - rest / total if total else 0.0)
    scores = np.reshape(columns, pred.shape[1:])
    return scores if multioutput == "raw_values" else scores.mean()


# ---- chance, with its draws given -----------------------------------------------------------------------------------


def dropout(x, ratio=0.5, *, mask=None, return_mask=False):
    return (x * mask, mask) if return_mask else x * mask


def rrelu(x, l=1 / 8, u=1 / 3, *, r=None, return_r=False):
    y = each(lambda v, w: v if v >= 0 else v * w, x, r)
    return (y, r) if return_r else y


def gaussian(mean, ln_var, *, eps=None, return_eps=False):
    y = mean + np.sqrt(np.exp(ln_var)) * eps
    return (y, eps) if return_eps else y


# ---- images ---------------------------------------------------------------------------------------------------------


def two(value):
    return tuple(value) if np.ndim(value) else (value, value)


def convolution_2d(x, W, b=None, stride=1, pad=0, cover_all=False, *, dilate=1, groups=1):
    (sh, sw), (ph, pw), (dh, dw) = two(stride), two(pad), two(dilate)
    num, _, height, width = x.shape
    num_out, per_group, kh, kw = W.shape
    round_up = math.ceil if cover_all else math.floor
    oh = round_up((height + 2 * ph - dh * (kh - 1) - 1) / sh) + 1
    ow = round_up((width + 2 * pw - dw * (kw - 1) - 1) / sw) + 1
    y = np.zeros((num, num_out, oh, ow))
    for o, i, j, c, u, v in itertools.product(*map(range, (num_out, oh, ow, per_group, kh, kw))):
        row, column = i * sh + u * dh - ph, j * sw + v * dw - pw
        if 0 <= row < height and 0 <= column < width:
            channel = o // (num_out // groups) * per_group + c
            y[:, o, i, j] += x[:, channel, row, column] * W[o, c, u, v]
    return y if b is None else y + b[:, None, None]


def deconvolution_2d(x, W, b=None, stride=1, pad=0, outsize=None, *, dilate=1, groups=1):
    (sh, sw), (ph, pw), (dh, dw) = two(stride), two(pad), two(dilate)
    num, channels, height, width = x.shape
    _, per_group, kh, kw = W.shape
    if outsize is None:
        outsize = (sh * (height - 1) + dh * (kh - 1) + 1 - 2 * ph, sw * (width - 1) + dw * (kw - 1) + 1 - 2 * pw)
    y = np.zeros((num, per_group * groups, *outsize))
    for c, i, j, o, u, v in itertools.product(*map(range, (channels, height, width, per_group, kh, kw))):
        row, column = i * sh + u * dh - ph, j * sw + v * dw - pw
        if 0 <= row < outsize[0] and 0 <= column < outsize[1]:
            y[:, c // (channels // groups) * per_group + o, row, column] += x[:, c, i, j] * W[c, o, u, v]
    return y if b is None else y + b[:, None, None]


def windows(x, ksize, stride, pad, cover_all):
    """Shape of the result, and for each of its places the elements of the window, as (row, column, u, v)."""
    (kh, kw), (ph, pw) = two(ksize), two(pad)
    sh, sw = (kh, kw) if stride is None else two(stride)
    round_up = math.ceil if cover_all else math.floor
    oh = round_up((x.shape[2] + 2 * ph - kh) / sh) + 1
    ow = round_up((x.shape[3] + 2 * pw - kw) / sw) + 1
    places = {}
    for i, j in itertools.product(range(oh), range(ow)):
        cells = itertools.product(range(kh), range(kw))
        seen = [(i * sh + u - ph, j * sw + v - pw, u, v) for u, v in cells]
        places[i, j] = [s for s in seen if 0 <= s[0] < x.shape[2] and 0 <= s[1] < x.shape[3]]
    return (*x.shape[:2], oh, ow), places


def max_pooling_2d(x, ksize, stride=None, pad=0, cover_all=True, return_indices=False):
    shape, places = windows(x, ksize, stride, pad, cover_all)
    y, indices = np.empty(shape), np.empty(shape, np.int32)
    for (n, c), ((i, j), seen) in itertools.product(np.ndindex(shape[:2]), places.items()):
        values = [float(x[n, c, row, column]) for row, column, _, _ in seen]
        best = values.index(sorted(values)[-1])
        y[n, c, i, j] = values[best]
        indices[n, c, i, j] = seen[best][2] * two(ksize)[1] + seen[best][3]
    return (y, indices) if return_indices else y


def average_pooling_2d(x, ksize, stride=None, pad=0):
    shape, places = windows(x, ksize, stride, pad, False)
    y = np.empty(shape)
    for (i, j), seen in places.items():
        y[:, :, i, j] = np.sum([x[:, :, row, column] for row, column, _, _ in seen], axis=0) / math.prod(two(ksize))
    return y


def global_average_pooling_2d(x):
    return np.einsum("nchw->nc", x) / (x.shape[2] * x.shape[3])


# ---- normalization --------------------------------------------------------------------------------------------------


def batch_normalization(x, gamma, beta, *, eps=2e-5, running_mean=None, running_var=None, decay=0.9, axis=None):
    axes = averaged(x, gamma, axis)
    mean, var = x.mean(axes), x.var(axes)
    if running_mean is not None:
        count = math.prod(x.shape[i] for i in axes)
        running_mean[...] = decay * running_mean + (1 - decay) * mean
        running_var[...] = decay * running_var + (1 - decay) * var * count / (count - 1)
    return fixed_batch_normalization(x, gamma, beta, mean, var, eps, axes)


def fixed_batch_normalization(x, gamma, beta, mean, var, eps=2e-5, axis=None):
    axes = averaged(x, gamma, axis)
    shape = [1 if i in axes else n for i, n in enumerate(x.shape)]
    gamma, beta, mean, var = (np.reshape(v, shape) for v in (gamma, beta, mean, var))
    return gamma * (x - mean) / np.sqrt(var + eps) + beta


def layer_normalization(x, gamma, beta, eps=1e-5):
    return np.stack([gamma * (row - row.mean()) / np.sqrt(row.var() + eps) + beta for row in x])


def group_normalization(x, groups, gamma, beta, eps=1e-5):
    y = np.empty_like(x)
    size = x.shape[1] // groups
    for n, g in np.ndindex(len(x), groups):
        channels = slice(g * size, (g + 1) * size)
        part = x[n, channels]
        scaled = (part - part.mean()) / np.sqrt(part.var() + eps)
        along = (size, *(1,) * (x.ndim - 2))
        y[n, channels] = scaled * gamma[channels].reshape(along) + beta[channels].reshape(along)
    return y


def averaged(x, gamma, axis):
    """The axes to average over; where none are given, all but those of gamma, which begin at 1."""
    if axis is None:
        return tuple(i for i in range(x.ndim) if not 1 <= i <= gamma.ndim)
    return (axis,) if isinstance(axis, int) else tuple(axis)
