"""The provider ``cudnn``: attention of 16-bit types, causal or of all keys, which stores no scores.

With dropout it stores a mask, which an own kernel makes with the bits of the host, and cuDNN reads in both directions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dbrdist.core.array.config import config
from dbrdist.core.array.random import Drop
from dbrdist.core.array.types import Array, DType
from dbrdist.kernels.gpu import cuda_source, cudnn
from dbrdist.kernels.gpu.cuda_transformer import mask_of_weights
from dbrdist.kernels.unsupported import Unsupported

Plan = Callable[..., object]
Execute = Callable[..., None]  # of addresses

_MOST_WIDTH, _MULTIPLE = 128, 8  # of the numbers of a head, forward and backward
_float32 = np.dtype(np.float32)
_ONE = np.ones(1, np.float32)
_ADDRESS_OF_ONE = _ONE.ctypes.data


def _require(q: Array, k: Array, v: Array, *others: Array) -> None:
    cudnn.require(q, k, v, *others)
    if q.dtype.itemsize != 2 or config.use_cudnn == "never":
        raise Unsupported("another type, or cuDNN is switched off")
    if any(a.ndim != 4 or not a.flags.c_contiguous for a in (q, k, v)):
        raise Unsupported("heads of another layout")
    if any(a.shape[3] % _MULTIPLE or a.shape[3] > _MOST_WIDTH for a in (q, v)):
        raise Unsupported("heads of other widths")


def _strides(shape: tuple[int, ...], is_merged: bool = False) -> tuple[int, ...]:
    """Of (B, H, L, D) in memory, or of heads side by side, (B, L, H D), if ``is_merged``."""
    _, h, length, d = shape
    return (length * h * d, d, h * d, 1) if is_merged else (h * length * d, length * d, d, 1)


def _addresses(*arrays: Array) -> tuple[list[int], list[Array]]:
    """Where cuDNN finds these arrays, and what has to live until then: copies of those that begin anywhere."""
    kept = [a if cuda_source.is_aligned(a) else a.copy() for a in arrays]
    return [a.data.ptr for a in kept], kept


def _notes() -> cudnn.Notes:
    return cudnn.Notes(True, bool(config.cudnn_deterministic))


def _dropout(graph: cudnn.Graph, q: Array, k: Array, num_scales: int) -> dict[str, Any]:
    """The operands of a dropout by a mask, which holds the scale of what is kept: those of cuDNN are one."""
    shape = *q.shape[:3], k.shape[2]
    return {"dropout": (graph.tensor(shape, _strides(shape)), *[graph.number() for _ in range(num_scales)])}


def _forward_graph(q: Array, k: Array, v: Array, drops: bool, scale: float, is_causal: bool, merged: bool) -> Execute:
    graph = cudnn.Graph(q.dtype)
    operands: dict[str, Any] = dict(zip("qkv", [graph.tensor(a.shape, _strides(a.shape)) for a in (q, k, v)]))
    if drops:
        operands |= _dropout(graph, q, k, 1)
    y, stats = graph.graph.sdpa(**operands, generate_stats=True, attn_scale=scale, use_causal_mask=is_causal)
    shape, of_rows = (*q.shape[:3], v.shape[3]), (*q.shape[:3], 1)
    graph.result(y, shape, _strides(shape, merged))
    graph.result(stats, of_rows, _strides(of_rows), is_wide=True)
    return graph.build(_notes())


def _backward_graph(q: Array, k: Array, v: Array, drops: bool, scale: float, is_causal: bool, merged: bool) -> Execute:
    graph = cudnn.Graph(q.dtype)
    shape, of_rows = (*q.shape[:3], v.shape[3]), (*q.shape[:3], 1)
    operands: dict[str, Any] = dict(zip("qkv", [graph.tensor(a.shape, _strides(a.shape)) for a in (q, k, v)]))
    operands |= {name: graph.tensor(shape, _strides(shape, merged)) for name in ("o", "dO")}
    operands["stats"] = graph.tensor(of_rows, _strides(of_rows), is_wide=True)
    if drops:
        operands |= _dropout(graph, q, k, 2)
    made = graph.graph.sdpa_backward(**operands, attn_scale=scale, use_causal_mask=is_causal)
    for g, a in zip(made, (q, k, v)):
        graph.result(g, a.shape, _strides(a.shape, merged))
    return graph.build(_notes())


def _maker(shape: tuple[int, ...], dtype: DType, is_merged: bool) -> Callable[[], Array]:
    b, h, length, d = shape
    return cuda_source.plain((b, length, h * d) if is_merged else shape, dtype)


def fused_attention(q: Array, k: Array, v: Array, drop: Drop, scale: float, is_causal: bool, is_merged: bool) -> Plan:
    """See device_dispatch.fused_attention."""
    _require(q, k, v)
    kind = drop[0] is not None, scale, is_causal, is_merged
    _backward_graph(q, k, v, *kind)  # or else forward must not begin
    run = _forward_graph(q, k, v, *kind)
    new = _maker((*q.shape[:3], v.shape[3]), q.dtype, is_merged)
    new_stats = cuda_source.plain((*q.shape[:3], 1), _float32)
    new_mask = mask_of_weights(q, k.shape[2]) if drop[0] is not None else None

    def plan(
        q: Array, k: Array, v: Array, drop: Drop, scale: float, is_causal: bool, is_merged: bool
    ) -> tuple[Array, Array, Array | None]:
        y, stats = new(), new_stats()
        addresses, _kept = _addresses(q, k, v)
        mask = None
        if new_mask is not None and drop[0] is not None:
            mask = new_mask(drop[0], *drop[1:])
            addresses += [mask.data.ptr, _ADDRESS_OF_ONE]
        run(*addresses, y.data.ptr, stats.data.ptr)
        return y, stats, mask

    return plan


def fused_attention_backward(
    q: Array, k: Array, v: Array, y: Array, stats: Array, mask: Array | None, gy: Array, scale: float, is_causal: bool,
    is_merged: bool,
) -> Plan:  # fmt: skip
    """See device_dispatch.fused_attention_backward."""
    _require(q, k, v, y, gy)
    if not gy.flags.c_contiguous:
        raise Unsupported("a gradient of another layout")
    run = _backward_graph(q, k, v, mask is not None, scale, is_causal, is_merged)
    makers = [_maker(a.shape, a.dtype, is_merged) for a in (q, k, v)]

    def plan(
        q: Array, k: Array, v: Array, y: Array, stats: Array, mask: Array | None, gy: Array, scale: float,
        is_causal: bool, is_merged: bool,
    ) -> tuple[Array, ...]:  # fmt: skip
        grads = tuple([new() for new in makers])
        addresses, _kept = _addresses(q, k, v, y, gy, stats)
        if mask is not None:
            addresses += [mask.data.ptr, _ADDRESS_OF_ONE, _ADDRESS_OF_ONE]
        run(*addresses, *[g.data.ptr for g in grads])
        return grads

    return plan


ROWS: dict[str, Callable[..., Plan]] = {
    "fused_attention": fused_attention,
    "fused_attention_backward": fused_attention_backward,
}
