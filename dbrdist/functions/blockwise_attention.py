"""Attention whose scores are never stored: they are made block by block, while they are in the cache, and once more in
backward (Rabe and Staats 2021, arXiv 2112.05682; Dao et al. 2022, arXiv 2205.14135).

Legend: L queries, S keys and their values, E and V numbers in each; a block is some of the queries of one head.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dbrdist import kernels
from dbrdist.core.array.backend import Array, Device, current_device, empty, get_array_module, to_device
from dbrdist.core.array.declared import keep
from dbrdist.core.array.random import Lines
from dbrdist.core.array.types import DType, Module
from dbrdist.core.tape import ops
from dbrdist.core.tape.function_node import FunctionNode
from dbrdist.functions.activation import softmax

if TYPE_CHECKING:
    from dbrdist.core.tape.variable import Variable

_BLOCK_QUERIES = 512
# Scores of a head from which on they are made in blocks. Forward and backward take as long as at once, on one core with
# AVX-512 and 64 numbers in a query: 43 ms and 41 for 12 heads of 512 queries, 330 and 319 for 6 of 2,048; with 128
# queries 17 and 13 ms.
_LEAST_SCORES = 1 << 18


@lru_cache(maxsize=16)
def _keys_before(num: int, size: int, device: Device) -> Array:
    """On a GPU: whether query i sees key k, which is none after it."""
    mask: Array = device.send(np.tri(num, size, dtype=bool))
    return mask


class Seen(NamedTuple):
    """Which keys a query may see, and what is added to its scores.

    Args:
        keys: booleans that broadcast to (..., L, S), or None: all.
        added: numbers that broadcast to (..., L, S), an array or a Variable, or None.
        is_causal: whether query i sees keys 0 to i only, besides.
    """

    keys: Array | None
    added: Any
    is_causal: bool

    def all_keys(self, num: int, size: int, xp: Module = np) -> Array | None:
        """As ``keys``, with the causal ones among them; for L queries and S keys."""
        if not self.is_causal:
            return self.keys
        before = np.tri(num, size, dtype=bool) if xp is np else keep(_keys_before(num, size, current_device()))
        return before if self.keys is None else self.keys & before

    def softmax(self, scores: Array, head: tuple[int, ...], block: slice, shape: tuple[int, ...]) -> Array:
        """The softmax over the keys that are seen, for a block of a head; zeros where none is. ``shape`` is that of all
        scores; these may be overwritten.
        """
        if self.added is not None:
            scores += np.broadcast_to(self.added, shape)[head][block]
        keys = None if self.keys is None else np.broadcast_to(self.keys, shape)[head][block]
        if self.is_causal:
            before = np.arange(shape[-1]) <= np.arange(block.start, block.stop)[:, None]
            keys = before if keys is None else keys & before
        if keys is None:
            return kernels.softmax(scores, 1)
        sees_some = keys.any(axis=-1)
        scores[~keys] = -np.inf
        scores[~sees_some] = 0
        weights = kernels.softmax(scores, 1)
        weights[~sees_some] = 0
        return weights


class Dropped(NamedTuple):
    """Which weights are dropped: those with random bits below a threshold; the others are scaled."""

    lines: Lines
    threshold: np.uint32
    scale: float

    def mask(self, row: int, start: int, stop: int, dtype: Any) -> Array:
        """0 and the scale for lines of a row, shape (stop - start, S)."""
        return (self.lines.bits(row, start, stop) >= self.threshold).astype(dtype) * dtype.type(self.scale)

    def whole_mask(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """0 and the scale for all weights."""
        lines = prod(shape[1:-1])
        mask = np.empty((shape[0], lines, shape[-1]), dtype)
        for row in range(shape[0]):
            mask[row] = self.mask(row, 0, lines, dtype)
        return mask.reshape(shape)


def serves(query: Variable, key: Variable, value: Variable, mask: Variable | None) -> bool:
    """Whether :class:`Attention` takes these operands: large float32 or float64 arrays of the host with as many heads.

    A mask of floating numbers that wants a gradient needs the scores.
    """
    arrays = [a.array for a in (query, key, value)]
    first = arrays[0]
    return (
        all(type(a) is np.ndarray and a.dtype == first.dtype and a.shape[:-2] == first.shape[:-2] for a in arrays)
        and first.dtype.char in "fd"
        and first.ndim > 2
        and query.shape[-2] * key.shape[-2] >= _LEAST_SCORES
        and not getattr(mask, "requires_grad", False)
    )


class Attention(FunctionNode):
    """y = w v with w = softmax(scale q k' + added) of the keys that are seen, times the mask of dropped weights m.

    gv = (w m)' gy; with gw = m (gy v'), the gradient of the scores is gs = w (gw - sum(w gw)), and so
    gq = scale gs k and gk = scale gs' q.
    """

    gives_new = True

    def __init__(self, scale: float, seen: Seen, dropped: Dropped | None) -> None:
        self.scale = scale
        self.seen = seen
        self.dropped = dropped

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1, 2))
        q, k, v = xs
        self.lead = q.shape[:-2]  # the axes of examples and heads
        y = _lying_as(q, v.shape[-1])
        for head, blocks in self._heads(q):
            scaled = q[head] * self.scale
            for block in blocks:
                weights, mask = self._weights(scaled, k[head], head, block)
                kernels.matmul(weights if mask is None else weights * mask, v[head], y[head][block])
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...]) -> tuple[Any, ...]:
        q, k, v = self.retained_inputs()
        gxs = self.of_variables(q, k, v, gys[0]) if self._on_variables else self._in_blocks(q, k, v, gys[0])
        return tuple(gxs[i] for i in wanted)

    def _in_blocks(self, q: Array, k: Array, v: Array, gy: Array) -> tuple[Array, Array, Array]:
        """All three gradients: the weights of a block serve them all."""
        gq, gk, gv = (_lying_as(a, a.shape[-1]) for a in (q, k, v))
        for head, blocks in self._heads(q):
            scaled = q[head] * self.scale
            for block in blocks:
                weights, mask = self._weights(scaled, k[head], head, block)
                here = gy[head][block]
                _add_product((weights if mask is None else weights * mask).T, here, gv[head], block)
                gw = kernels.matmul(here, v[head].T)
                gs = kernels.softmax_backward(weights, gw if mask is None else gw * mask, 1)
                kernels.matmul(gs, k[head], gq[head][block])
                _add_product(gs.T, scaled[block], gk[head], block)
            gq[head] *= self.scale
        return gq, gk, gv

    def of_variables(self, q: Variable, k: Variable, v: Variable, gy: Array) -> tuple[Variable, Variable, Variable]:
        """The same with Variables, for passes of higher order; these store all scores."""
        scaled = ops.mul(q, self.scale)
        scores = ops.matmul(scaled, ops.swap(k))
        weights = weights_of(scores, self.seen)
        gw = ops.matmul(gy, ops.swap(v))
        used = weights
        if self.dropped is not None:
            mask = to_device(self.dropped.whole_mask(scores.shape, scores.dtype), scores.device)
            used, gw = ops.mul(weights, mask), ops.mul(gw, mask)
        gs = ops.mul(weights, ops.sub(gw, ops.sum(ops.mul(weights, gw), -1, True)))
        gq = ops.mul(ops.matmul(gs, k), self.scale)
        return gq, ops.matmul(ops.swap(gs), scaled), ops.matmul(ops.swap(used), gy)

    def _heads(self, q: Array) -> Iterator[tuple[tuple[int, ...], list[slice]]]:
        """The place of each head, and the blocks of its queries."""
        num = q.shape[-2]
        blocks = [slice(start, min(start + _BLOCK_QUERIES, num)) for start in range(0, num, _BLOCK_QUERIES)]
        for head in np.ndindex(q.shape[:-2]):
            yield head, blocks

    def _weights(self, scaled: Array, k: Array, head: tuple[int, ...], block: slice) -> tuple[Array, Array | None]:
        """The softmax of a block of one head, and the mask of what is dropped of it."""
        scores = kernels.matmul(scaled[block], k.T)
        num, inner = len(scaled), self.lead[1:]
        weights = self.seen.softmax(scores, head, block, (*self.lead, num, len(k)))
        if self.dropped is None:
            return weights, None
        first = int(np.ravel_multi_index(head[1:], inner)) * num if inner else 0
        return weights, self.dropped.mask(head[0], first + block.start, first + block.stop, weights.dtype)


def _lying_as(a: Array, width: int) -> Array:
    """Uninitialised memory of the shape of ``a`` with other rows, its axes in the order of those of ``a``."""
    order = sorted(range(a.ndim - 1), key=lambda i: -a.strides[i])
    shape = [*[a.shape[i] for i in order], width]
    return empty((prod(shape),), a.dtype, a).reshape(shape).transpose(*np.argsort(order), a.ndim - 1)


def _add_product(a: Array, b: Array, to: Array, block: slice) -> None:
    """Write the product to ``to`` for the first block, and add it for others."""
    if block.start == 0:
        kernels.matmul(a, b, to)
    else:
        to += kernels.matmul(a, b)


def weights_of(scores: Variable, seen: Seen) -> Variable:
    """The softmax of scores (..., L, S) over the keys that are seen, at once; zeros for a query that sees none."""
    xp, (num, size) = get_array_module(scores.array), scores.shape[-2:]
    if not scores.size:
        return scores
    if seen.added is not None:
        scores = ops.add(scores, seen.added)
    keys = seen.all_keys(num, size, xp)
    if keys is None:
        return _softmax(scores)
    if seen.keys is None:  # each query sees the first key, at least
        return _softmax(ops.where(keys, scores, scores.dtype.type(-np.inf)))
    keys = xp.broadcast_to(keys, scores.shape)
    sees_some = keys.any(axis=-1, keepdims=True)
    lowest = xp.where(sees_some, -np.inf, 0.0).astype(scores.dtype)  # no finite number is below all scores
    weights = _softmax(ops.where(keys, scores, lowest))
    if isinstance(keys, np.ndarray) and bool(sees_some.all()):  # a GPU would be waited for
        return weights
    return ops.where(keys, weights, scores.dtype.type(0))


def _softmax(scores: Variable) -> Variable:
    """Over the last axis; kernels take rows."""
    rows = ops.reshape(scores, (int(np.prod(scores.shape[:-1])), scores.shape[-1]))
    return ops.reshape(softmax(rows), scores.shape)
