"""Attention, one query at a time."""

from __future__ import annotations

import math

import numpy as np


def scaled_dot_product_attention(
    query, key, value, mask=None, dropout_ratio=0.0, is_causal=False, scale=None
):  # without dropping
    lead = np.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    num, size = query.shape[-2], key.shape[-2]
    q, k, v = (np.broadcast_to(a, (*lead, *a.shape[-2:])) for a in (query, key, value))
    mask = np.broadcast_to(np.zeros(()) if mask is None else mask, (*lead, num, size))
    y = np.zeros((*lead, num, v.shape[-1]))
    for at in np.ndindex(*lead, num):
        seen = [j for j in range(size) if (j <= at[-1] or not is_causal) and (mask.dtype != bool or mask[at][j])]
        scores = [
            float(q[at] @ k[at[:-1]][j]) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
            + (0.0 if mask.dtype == bool else float(mask[at][j]))
            for j in seen
        ]
        weights = [math.exp(s - max(scores)) for s in scores]
        for w, j in zip(weights, seen):
            y[at] += w / sum(weights) * v[at[:-1]][j]
    return y


def multi_head_attention(query, key, value, n_heads, mask=None, dropout_ratio=0.0, is_causal=False):
    parts = [np.split(a, n_heads, axis=2) for a in (query, key, value)]
    masks = [None] * n_heads
    if mask is not None:
        whole = np.asarray(mask)[:, None] if np.ndim(mask) == 3 else np.asarray(mask)
        whole = np.broadcast_to(whole, (len(query), n_heads, query.shape[1], key.shape[1]))
        masks = [whole[:, h] for h in range(n_heads)]
    return np.concatenate(
        [scaled_dot_product_attention(*head, m, is_causal=is_causal) for *head, m in zip(*parts, masks)], axis=2
    )


def rms_normalization(x, gamma, eps=1e-06):
    y = np.empty(x.shape)
    for at in np.ndindex(*x.shape[:-1]):
        y[at] = gamma * x[at] / math.sqrt(sum(float(v) ** 2 for v in x[at]) / len(gamma) + eps)
    return y
