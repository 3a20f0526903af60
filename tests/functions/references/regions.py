"""Regions of interest, and relatives of convolution, one place at a time."""

from __future__ import annotations

import itertools
import math
import zlib

import numpy as np

from .windows import each


def bins(start, end, num, length, last=0):
    """For each bin the pixels of the image in it."""
    start, end = round(start), round(end)
    size = max(end - start + last, 1) / num
    for k in range(num):
        low, high = start + math.floor(k * size), start + math.ceil((k + 1) * size)
        yield [p for p in range(low, high) if 0 <= p < length]


def pooled_regions(x, rois, roi_indices, outsize, spatial_scale, reduce, last=0):
    out = each(outsize, 2)
    y = np.zeros((len(rois), x.shape[1], *out))
    for r, (roi, image) in enumerate(zip(np.asarray(rois) * spatial_scale, roi_indices)):
        rows = list(bins(roi[0], roi[2], out[0], x.shape[2], last))
        columns = list(bins(roi[1], roi[3], out[1], x.shape[3], last))
        for c, i, j in np.ndindex(*y.shape[1:]):
            seen = [float(x[int(image), c, p, q]) for p in rows[i] for q in columns[j]]
            if seen:
                y[r, c, i, j] = reduce(seen)
    return y


def mean_of(values):
    return sum(values) / len(values)


def roi_average_pooling_2d(x, rois, roi_indices, outsize, spatial_scale):
    return pooled_regions(x, rois, roi_indices, outsize, spatial_scale, mean_of)


def roi_max_pooling_2d(x, rois, roi_indices, outsize, spatial_scale):
    return pooled_regions(x, rois, roi_indices, outsize, spatial_scale, max)


def roi_pooling_2d(x, rois, outh, outw, spatial_scale):
    rois = np.asarray(rois)
    corners = np.stack([rois[:, 2], rois[:, 1], rois[:, 4], rois[:, 3]], axis=1)
    return pooled_regions(x, corners, rois[:, 0], (outh, outw), spatial_scale, max, 1)


def bilinear_at(image, y, x):
    """The value of a plane between its pixels: None beyond its edges."""
    if not -1 <= y <= image.shape[0] or not -1 <= x <= image.shape[1]:
        return None
    y, x = min(max(y, 0.0), image.shape[0] - 1), min(max(x, 0.0), image.shape[1] - 1)
    value = 0.0
    for p in range(int(y), min(int(y) + 2, image.shape[0])):  # those less than a pixel away: others weigh nothing
        for q in range(int(x), min(int(x) + 2, image.shape[1])):
            value += max(0, 1 - abs(p - y)) * max(0, 1 - abs(q - x)) * float(image[p, q])
    return value


def aligned_regions(x, rois, roi_indices, outsize, spatial_scale, sampling_ratio, reduce):
    out, ratios = each(outsize, 2), each(sampling_ratio, 2)
    y = np.zeros((len(rois), x.shape[1], *out))
    for r, (roi, image) in enumerate(zip(np.asarray(rois) * spatial_scale, roi_indices)):
        sizes = [max(roi[2 + k] - roi[k], 1) / out[k] for k in range(2)]
        nums = [math.ceil(size) if ratio is None else ratio for size, ratio in zip(sizes, ratios)]
        for c, i, j in np.ndindex(*y.shape[1:]):
            places = itertools.product(
                *(
                    [roi[k] + (at + (s + 0.5) / nums[k]) * sizes[k] for s in range(nums[k])]
                    for k, at in ((0, i), (1, j))
                )
            )
            y[r, c, i, j] = reduce([bilinear_at(x[image, c], *place) for place in places])
    return y


def roi_average_align_2d(x, rois, roi_indices, outsize, spatial_scale, sampling_ratio=None):
    return aligned_regions(
        x, rois, roi_indices, outsize, spatial_scale, sampling_ratio, lambda vs: mean_of([v or 0.0 for v in vs])
    )


def roi_max_align_2d(x, rois, roi_indices, outsize, spatial_scale, sampling_ratio=None):
    return aligned_regions(
        x, rois, roi_indices, outsize, spatial_scale, sampling_ratio,
        lambda vs: max([v for v in vs if v is not None], default=0.0),
    )  # fmt: skip


# ---- relatives of convolution ---------------------------------------------------------------------------------------


def local_convolution_2d(x, W, b=None, stride=1):
    s, (o, oh, ow, _, kh, kw) = each(stride, 2), W.shape
    y = np.zeros((len(x), o, oh, ow))
    for i, j in np.ndindex(oh, ow):
        window = x[:, :, i * s[0] : i * s[0] + kh, j * s[1] : j * s[1] + kw]
        for k in range(o):
            y[:, k, i, j] = (window * W[k, i, j]).sum((1, 2, 3)) + (0 if b is None else b[k, i, j])
    return y


def deformable_convolution_2d_sampler(x, offset, W, b=None, stride=1, pad=0):
    s, p, (o, c, kh, kw), (_, _, oh, ow) = each(stride, 2), each(pad, 2), W.shape, offset.shape
    y = np.zeros((len(x), o, oh, ow)) + (0 if b is None else np.reshape(b, (-1, 1, 1)))
    for n, i, j, u, v in np.ndindex(len(x), oh, ow, kh, kw):
        tap = u * kw + v
        row = i * s[0] - p[0] + u + float(offset[n, kh * kw + tap, i, j])
        column = j * s[1] - p[1] + v + float(offset[n, tap, i, j])
        for k in range(c):
            framed = np.pad(x[n, k], 1)  # zeros around, so that what lies beyond is 0 without a jump
            y[n, :, i, j] += W[:, k, u, v] * (bilinear_at(framed, row + 1, column + 1) or 0.0)
    return y


def shift(x, ksize=3, dilate=1):
    (kh, kw), d, y = each(ksize, 2), each(dilate, 2), np.zeros(x.shape)
    num, size = kh * kw, x.shape[1] // (each(ksize, 2)[0] * each(ksize, 2)[1])
    for c in range(x.shape[1]):
        group = min(c // size, num - 1)
        if group == (num - 1) // 2:
            group = num - 1
        elif group == num - 1:
            group = (num - 1) // 2
        down, right = (group // kw - kh // 2) * d[0], (group % kw - kw // 2) * d[1]
        for i, j in np.ndindex(*x.shape[2:]):
            if 0 <= i - down < x.shape[2] and 0 <= j - right < x.shape[3]:
                y[:, c, i, j] = x[:, c, i - down, j - right]
    return y


def as_strided(x, shape, strides, storage_offset=None):
    elements = [float(v) for v in np.asarray(x).flat]
    y = np.zeros(shape)
    for at in np.ndindex(*y.shape):
        y[at] = elements[(storage_offset or 0) + sum(i * s for i, s in zip(at, each(strides, y.ndim)))]
    return y


def gumbel_softmax(log_pi, tau=0.1, axis=1):
    """With the numbers that a thread of seed 0 draws first: Philox, keyed by purpose, a row for each example."""
    rows, width = len(log_pi), math.prod(np.shape(log_pi)[1:])
    blocks = math.ceil(math.ceil(width / 2) / 4)
    key = np.array([0, zlib.crc32(b"forward")], np.uint64)
    words = np.random.Philox(counter=np.zeros(4, np.uint64), key=key).random_raw(rows * blocks * 4)
    halves = np.stack([words & np.uint64(0xFFFFFFFF), words >> np.uint64(32)], axis=-1).astype(np.float64)
    bits = halves.reshape(rows, blocks * 8)[:, :width].reshape(np.shape(log_pi))
    scores = (np.asarray(log_pi) - np.log(-np.log((bits + 0.5) / 2**32))) / tau
    e = np.exp(scores - scores.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def discriminative_margin_based_clustering_loss(
    embeddings, labels, delta_v, delta_d, max_embedding_dim, norm=1, alpha=1.0, beta=1.0, gamma=0.001
):
    n, c = embeddings.shape[:2]
    e, t = np.asarray(embeddings).reshape(n, c, -1), np.asarray(labels).reshape(n, -1)
    numbers = range(1, max_embedding_dim + 1)
    of = {(i, k): e[i][:, t[i] == k] for i in range(n) for k in numbers}
    means = {key: v.mean(1) if v.shape[1] else np.zeros(c) for key, v in of.items()}
    length = lambda v: np.linalg.norm(v, norm)  # noqa: E731
    variance = 0.0
    for k in numbers:
        far = [max(length(v - means[i, k]) - delta_v, 0) ** 2 for i in range(n) for v in of[i, k].T]
        variance += mean_of(far) if far else 0.0
    close = [
        max(2 * delta_d - length(means[i, k] - means[i, m]), 0) ** 2
        for i in range(n)
        for k, m in itertools.combinations(numbers, 2)
        if of[i, k].size and of[i, m].size
    ]
    sizes = [length(m) for m in means.values()]
    return (
        alpha * variance / max_embedding_dim, beta * (mean_of(close) if close else 0.0),
        gamma * (mean_of(sizes) if sizes else 0.0),
    )  # fmt: skip
