"""Attention, and the normalization that goes with it (Vaswani et al. 2017; Zhang and Sennrich 2019).

Legend: L queries, S keys and their values, E and V numbers in each, H heads; further axes in front broadcast.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np

from dbrdist.core.array.backend import Array, accumulation_dtype, to_device
from dbrdist.core.array.config import config
from dbrdist.core.array.gpu.mixed_devices import refuse_mixed
from dbrdist.core.array.random import Lines
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import expected
from dbrdist.core.tape.elementwise_table import together
from dbrdist.core.tape.function_node import FunctionNode
from dbrdist.core.tape.variable import Operand, Variable, as_array, as_variable
from dbrdist.functions.blockwise_attention import Attention, Dropped, Seen, serves, weights_of
from dbrdist.functions.noise import dropout, dropout_of_lines
from dbrdist.functions.transformer import heads_on_device, with_bias


def scaled_dot_product_attention(
    query: Operand, key: Operand, value: Operand, mask: Operand | None = None, dropout_ratio: float = 0.0,
    is_causal: bool = False, scale: float | Variable | None = None,
) -> Variable:  # fmt: skip
    """softmax(scale query key') value: for each query a weighted mean of the values, by how similar their keys are.

    Args:
        query: shape (..., L, E).
        key: shape (..., S, E).
        value: shape (..., S, V).
        mask: broadcasts to (..., L, S): booleans, True for keys that a query may see, or floating numbers that are
            added to the products, -inf for keys that it may not. A query that may see none gets zeros.
        dropout_ratio: the fraction of weights dropped in training; see :func:`dropout`.
        is_causal: let query i see keys 0 to i only, besides what ``mask`` says.
        scale: factor of the products; None for 1 / sqrt(E). A Variable gets its gradient.

    Returns (..., L, V).

    On the CPU, the scores of heads with L S of 2^18 and more are made in blocks of queries and never stored, so that
    memory grows with L and not with L S (a mask whose gradient is wanted needs them all). Between 16-bit operands and
    result all is computed in float32.

    Example:
        >>> q = np.ones((2, 5, 8), np.float32)
        >>> F.scaled_dot_product_attention(q, q, q, is_causal=True).shape
        (2, 5, 8)
    """
    name = "scaled_dot_product_attention"
    query, key, value = together(name, query=query, key=key, value=value)
    for what, a in (("query", query), ("key", key), ("value", value)):
        if a.ndim < 2:
            raise expected(name, what, "at least 2 axes", a)
    if key.shape[-1] != query.shape[-1]:
        raise expected(name, "key", f"rows of {query.shape[-1]} numbers to match query {query.shape}", key)
    if value.shape[-2] != key.shape[-2]:
        raise expected(name, "value", f"{key.shape[-2]} rows, one for each key of {key.shape}", value)
    if isinstance(scale, Variable):  # which may be learned
        query, scale = ops.mul(query, ops.cast(scale, query.dtype)), 1.0
    scale = _scale(query.shape[-1]) if scale is None else float(scale)
    dtype = query.dtype
    if isinstance(query.array, np.ndarray) and dtype.itemsize == 2 and dtype == key.dtype == value.dtype:
        # a score of 40 in 16 bits is off by 0.02, and its weight by 2 %; NumPy multiplies in float32 anyway
        wide = [ops.cast(x, accumulation_dtype(dtype)) for x in (query, key, value)]
        return ops.cast(scaled_dot_product_attention(*wide, mask, dropout_ratio, is_causal, scale), dtype)
    lead = np.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    shape = (*lead, query.shape[-2], key.shape[-2])
    seen = _seen(shape, query, mask, is_causal)
    dropped = _dropped(shape, dropout_ratio) if dropout_ratio and config.train else None
    if serves(query, key, value, seen.added):
        return Attention(scale, _as_arrays(seen), dropped).apply((query, key, value))[0]
    made = heads_on_device((query, key, value), (None, None, None), None, scale, seen, dropped)
    return _of_scores(query, key, value, scale, seen, dropped, dropout_ratio) if made is None else made


def _of_scores(
    query: Variable, key: Variable, value: Variable, scale: float, seen: Seen, dropped: Dropped | None,
    dropout_ratio: float,
) -> Variable:  # fmt: skip
    """Attention by one function after the other, with all scores at once."""
    lead = np.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    shape = (*lead, query.shape[-2], key.shape[-2])
    weights = weights_of(ops.matmul(ops.mul(query, scale), ops.swap(key)), seen)
    if dropped is not None and weights.shape == shape:
        made = dropout_of_lines(weights, dropout_ratio, dropped.lines)
        if made is not None:
            return ops.matmul(made, value)
    if dropped is not None and weights.ndim > 2:
        kept = dropped.whole_mask((*lead, *weights.shape[-2:]), weights.dtype)
        weights = ops.broadcast_to(weights, kept.shape)
        weights = dropout(weights, dropout_ratio, mask=to_device(kept, weights.device))
    elif dropout_ratio:
        weights = dropout(weights, dropout_ratio)
    return ops.matmul(weights, value)


def _seen(shape: tuple[int, ...], query: Variable, mask: Any, is_causal: bool) -> Seen:
    """What a mask of scores of a shape means, for queries of a type on a device."""
    name = "scaled_dot_product_attention"
    if mask is None:
        return Seen(None, None, is_causal)
    given = as_array(mask)
    if not _broadcasts(getattr(given, "shape", None), shape):
        raise expected(name, "mask", f"a shape that broadcasts to {shape}", mask)
    if given.dtype.kind in "iu":
        raise expected(name, "mask", "booleans, or floating numbers to add", mask)
    if not isinstance(given, np.ndarray):
        refuse_mixed(name, query=query, mask=given)
    added, dtype = None, query.dtype
    if given.dtype.kind != "b":
        mask = ops.cast(as_variable(mask), dtype)
        given = mask.array != -np.inf
        added = ops.where(given, mask, dtype.type(0))
    sees_all = isinstance(given, np.ndarray) and bool(given.all())  # a GPU would be waited for
    if not sees_all:  # a mask of the host that hides nothing may be anywhere
        refuse_mixed(name, query=query, mask=given)
    return Seen(None if sees_all else given, added, is_causal)


def _as_arrays(seen: Seen) -> Seen:
    return seen if seen.added is None else seen._replace(added=seen.added.array)


def _dropped(shape: tuple[int, ...], ratio: float) -> Dropped | None:
    """What is drawn for weights of a shape; None for those without axes of examples, whose rows are queries."""
    if not 0.0 <= ratio < 1.0:
        raise expected("dropout", "ratio", "a number from 0 to less than 1", ratio)
    if len(shape) < 3:
        return None
    lines = Lines(int(np.prod(shape[1:-1])), shape[-1])
    return Dropped(lines, np.uint32(ratio * 2.0**32), 1.0 / (1.0 - ratio))


def _broadcasts(shape: tuple[int, ...] | None, to: tuple[int, ...]) -> bool:
    if shape is None or len(shape) > len(to):
        return False
    return all(n in (1, m) for n, m in zip(shape[::-1], to[::-1]))


def multi_head_attention(
    query: Operand, key: Operand, value: Operand, n_heads: int, mask: Operand | None = None, dropout_ratio: float = 0.0,
    is_causal: bool = False,
) -> Variable:  # fmt: skip
    """Attention of each of H parts of the vectors by itself.

    Args:
        query: shape (B, L, E).
        key: shape (B, S, E).
        value: shape (B, S, V).
        n_heads: H, a divisor of E and V.
        mask: broadcasts to (B, H, L, S); a mask (B, L, S) holds for all heads.
        dropout_ratio, is_causal: as in :func:`scaled_dot_product_attention`.

    Returns (B, L, V).

    Example:
        >>> x = np.ones((2, 5, 8), np.float32)
        >>> F.multi_head_attention(x, x, x, n_heads=2).shape
        (2, 5, 8)
    """
    return attention_of_heads((query, key, value), (None, None, None), n_heads, mask, dropout_ratio, is_causal)


def attention_of_heads(
    xs: tuple[Operand, ...], biases: tuple[Variable | None, ...], n_heads: int, mask: Operand | None,
    dropout_ratio: float, is_causal: bool,
) -> Variable:  # fmt: skip
    """:func:`multi_head_attention` of queries, keys and values of :func:`linear_before_bias`, or None for no biases."""
    name = "multi_head_attention"
    xs = query, key, value = together(name, query=xs[0], key=xs[1], value=xs[2])
    for what, a in (("query", query), ("key", key), ("value", value)):
        if a.ndim != 3 or a.shape[0] != query.shape[0]:
            raise expected(name, what, f"shape ({query.shape[0] if query.ndim else 'B'}, length, width)", a)
        if n_heads < 1 or a.shape[2] % n_heads:
            raise expected(name, "n_heads", f"a divisor of the width of {what} {a.shape}", n_heads)
    if getattr(mask, "ndim", None) == 3:
        mask = mask[:, None]
    if type(query.array) is not np.ndarray and query.shape[2] == key.shape[2] and key.shape[1] == value.shape[1]:
        shape = query.shape[0], n_heads, query.shape[1], key.shape[1]
        scale, seen = _scale(query.shape[2] // n_heads), _seen(shape, query, mask, is_causal)
        dropped = _dropped(shape, dropout_ratio) if dropout_ratio and config.train else None
        y = heads_on_device(xs, biases, n_heads, scale, seen, dropped)
        if y is not None:
            return y
        y = _of_scores(*_heads(xs, biases, n_heads), scale, seen, dropped, dropout_ratio)
    else:
        y = scaled_dot_product_attention(*_heads(xs, biases, n_heads), mask, dropout_ratio, is_causal)
    return ops.reshape(ops.transpose(y, (0, 2, 1, 3)), (*query.shape[:2], value.shape[2]))


def _heads(xs: tuple[Variable, ...], biases: tuple[Variable | None, ...], n_heads: int) -> list[Variable]:
    """Arrays (B, L, H D), plus biases (H D) or None, as (B, H, L, D)."""
    parts = [x if b is None else with_bias(x, b) for x, b in zip(xs, biases)]
    heads = [ops.reshape(x, (*x.shape[:2], n_heads, x.shape[2] // n_heads)) for x in parts]
    return [ops.transpose(h, (0, 2, 1, 3)) for h in heads]


def _scale(width: int) -> float:
    """The factor of products of vectors of this width."""
    return 1 / sqrt(max(width, 1))


class RMSNormalization(FunctionNode):
    """y = gamma x_hat with x_hat = x s, s = (mean(x^2) + eps)^(-1/2), for each row of x (N, K)

    With g = gamma gy, gx = s (g - x_hat mean(g x_hat)) and ggamma = sum(gy x_hat).
    """

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1))
        x, gamma = xs
        return (ops.cast(ops.mul(self.normalized(x)[0], gamma), x.dtype),)

    def normalized(self, x: Operand) -> tuple[Any, Any, float]:
        """x_hat and s in the wider type, and 1 / K."""
        wide, part = ops.cast(x, accumulation_dtype(x.dtype)), 1 / max(x.shape[1], 1)
        s = ops.power(ops.add(ops.mul(ops.sum(ops.mul(wide, wide), 1, True), part), self.eps), -0.5)
        return ops.mul(wide, s), s, part

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        x, gamma = self.retained_inputs()
        x_hat, s, part = self.normalized(x)
        gy = ops.cast(gys[0], x_hat.dtype)
        along = ops.mul(gy, x_hat)
        grads = []
        for i in wanted:
            if i == 1:
                grads.append(ops.cast(ops.sum(along, 0), gamma.dtype))
                continue
            mean = ops.mul(ops.sum(ops.mul(along, gamma), 1, True), part)
            grads.append(ops.cast(ops.mul(s, ops.sub(ops.mul(gy, gamma), ops.mul(x_hat, mean))), x.dtype))
        return tuple(grads)


def rms_normalization(x: Operand, gamma: Operand, eps: float = 1e-6) -> Variable:
    """gamma x / sqrt(mean(x^2) + eps) over the last axis (RMSNorm, Zhang and Sennrich 2019).

    Args:
        x: input, shape (..., K).
        gamma: scale, shape (K,).
        eps: added to the mean of squares.

    Example:
        >>> F.rms_normalization(np.array([[3.0, -3.0]]), np.ones(2)).array.round(3)
        array([[ 1., -1.]])
    """
    name = "rms_normalization"
    x, gamma = together(name, x=x, gamma=gamma)
    if not x.ndim or gamma.shape != x.shape[-1:]:
        raise expected(name, "gamma", f"shape {x.shape[-1:]} as the last axis of x", gamma)
    y = RMSNormalization(eps).apply((ops.reshape(x, (x.size // max(x.shape[-1], 1), x.shape[-1])), gamma))[0]
    return ops.reshape(y, x.shape)
