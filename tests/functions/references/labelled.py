"""Probabilities of label sequences by trying them all, and losses over samples of a vocabulary."""

from __future__ import annotations

import itertools
import math

import numpy as np

from .nets import sigmoid


def _sequences(xs):
    return [[x[n] for x in xs if n < len(x)] for n in range(len(xs[0]))]


def _score(cost, scores, labels):
    steps = sum(float(s[k]) for s, k in zip(scores, labels))
    return steps + sum(float(cost[i, j]) for i, j in itertools.pairwise(labels))


def crf1d(cost, xs, ys, reduce="mean"):
    losses = []
    for n, scores in enumerate(_sequences(xs)):
        given = [int(y[n]) for y in ys if n < len(y)]
        every = [_score(cost, scores, path) for path in itertools.product(range(len(cost)), repeat=len(scores))]
        losses.append(math.log(sum(map(math.exp, every))) - _score(cost, scores, given))
    return np.mean(losses) if reduce == "mean" else np.array(losses)


def argmax_crf1d(cost, xs):
    found = []
    for scores in _sequences(xs):
        paths = list(itertools.product(range(len(cost)), repeat=len(scores)))
        found.append(max((_score(cost, scores, path), path) for path in paths))
    return np.array([score for score, _ in found]), [
        np.array([path[t] for _, path in found if t < len(path)]) for t in range(len(xs))
    ]


def connectionist_temporal_classification(x, t, blank_symbol, input_length=None, label_length=None, reduce="mean"):
    losses = []
    for n in range(len(t)):
        steps = len(x) if input_length is None else int(input_length[n])
        labels = tuple(int(k) for k in t[n][: t.shape[1] if label_length is None else int(label_length[n])])
        p = [np.exp(x[k][n]) / np.exp(x[k][n]).sum() for k in range(steps)]
        total = 0.0
        for path in itertools.product(range(x[0].shape[1]), repeat=steps):
            kept = tuple(k for k, _ in itertools.groupby(path) if k != blank_symbol)
            if kept == labels:
                total += math.prod(float(p[k][label]) for k, label in enumerate(path))
        losses.append(-math.log(total))
    return np.mean(losses) if reduce == "mean" else np.array(losses)


def negative_sampling(x, t, W, sampler, sample_size, reduce="sum", *, samples=None, return_samples=False):
    losses = np.zeros(len(x))
    for n in range(len(x)):
        if t[n] >= 0:
            losses[n] = -np.log(sigmoid(x[n] @ W[t[n]])) - sum(np.log(sigmoid(-x[n] @ W[k])) for k in samples[n][1:])
    found = losses.sum() if reduce == "sum" else losses
    return (found, samples) if return_samples else found


def black_out(x, t, W, samples, reduce="mean"):
    losses = np.zeros(len(x))
    for n in range(len(x)):
        scores = np.exp([x[n] @ W[k] for k in (t[n], *samples[n])])
        p = scores / scores.sum()
        losses[n] = -np.log(p[0]) - np.log(1 - p[1:]).sum()
    return losses.mean() if reduce == "mean" else losses
