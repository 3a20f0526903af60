"""Losses of embeddings and features, and some likelihoods."""

from __future__ import annotations

import math

import numpy as np

from .arrays import each
from .nets import reduced


def laplace_nll(x, loc, ln_scale, reduce="sum"):
    def one(v, m, s):
        return -math.log(math.exp(-abs(v - m) / math.exp(s)) / (2 * math.exp(s)))

    return reduced(each(one, x, loc, ln_scale), reduce)


def sigmoid_focal_loss(x, t, alpha=0.25, gamma=2.0, reduce="mean"):
    def one(v, label):
        if label == -1:
            return 0.0
        v = v if label else -v  # the score of the label
        minus_ln_p = math.log1p(math.exp(-v)) if v > 0 else math.log1p(math.exp(v)) - v
        rest = math.exp(-v) / (1 + math.exp(-v)) if v > 0 else 1 / (1 + math.exp(v))
        weight = 1 if alpha is None else alpha if label else 1 - alpha
        return weight * rest**gamma * minus_ln_p

    losses = each(one, x, t)
    return losses.sum() / max(np.count_nonzero(t != -1), 1) if reduce == "mean" else reduced(losses, reduce)


def of_rows(losses, reduce):
    return np.array(losses) if reduce == "no" else sum(losses) / max(len(losses), 1)


def contrastive(x0, x1, y, margin=1, reduce="mean"):
    distances = [math.dist(a, b) for a, b in zip(x0, x1)]
    losses = [d**2 / 2 if k else max(margin - d, 0) ** 2 / 2 for d, k in zip(distances, y)]
    return of_rows(losses, reduce)


def triplet(anchor, positive, negative, margin=0.2, reduce="mean"):
    rows = zip(anchor, positive, negative)
    losses = [max(math.dist(a, p) ** 2 - math.dist(a, n) ** 2 + margin, 0) for a, p, n in rows]
    return of_rows(losses, reduce)


def cross_covariance(y, z, reduce="half_squared_sum"):
    c = np.zeros((y.shape[1], z.shape[1]))
    for i, j in np.ndindex(c.shape):
        if len(y):
            c[i, j] = np.mean(y[:, i] * z[:, j]) - np.mean(y[:, i]) * np.mean(z[:, j])
    return c if reduce == "no" else (c * c).sum() / 2


def decov(h, reduce="half_squared_sum"):
    c = cross_covariance(h, h, "no")
    c[np.diag_indices(len(c))] = 0.0
    return c if reduce == "no" else (c * c).sum() / 2
