"""Layers of LSTM and GRU on a GPU: a step is one product and one kernel of our own, in both directions.

Legend: N examples, U units, G gates; steps are pairs of first row and number of rows, in the order of computation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.core.array import backend
from dbrdist.core.array.types import Array
from dbrdist.kernels.gpu import cuda_source
from dbrdist.kernels.gpu.cuda_products import multiply
from dbrdist.kernels.unsupported import Unsupported

if TYPE_CHECKING:
    from dbrdist.core.array.types import DType

Rows = list[tuple[int, int]]

_FILE = "recurrent"
_NUM_GATES = {"lstm": 4, "gru": 3}


def _own(a: Array, dtype: DType) -> Array:
    """A copy in C order that may be overwritten."""
    made = backend.empty((a.size,), dtype, a).reshape(a.shape)
    made[...] = a
    return made


def _launcher(name: str, dtype: DType, units: int) -> Callable[..., None]:
    """The kernel as a function of n and its arrays."""
    run = cuda_source.kernel(_FILE, name, dtype)

    def launch(n: int, *arrays: Array | None) -> None:
        run(*cuda_source.over(n * units), (*[0 if a is None else a for a in arrays], np.int32(n), np.int32(units)))

    return launch


def _require(kind: str, *arrays: Array) -> None:
    cuda_source.require(*arrays)
    if kind not in _NUM_GATES or any(not a.flags.c_contiguous for a in arrays):
        raise Unsupported("another cell, or memory with gaps")


def _plan_forward(kind: str, steps: Rows, zx: Array, V: Array, d: Array, states: list[Array]) -> Any:
    """See n_step_rnn.RecurrentLayer."""
    _require(kind, zx, V, d)
    cuda_source.require(*states)
    dtype, gates, units = zx.dtype, _NUM_GATES[kind], V.shape[1]
    launch = _launcher(f"{kind}_forward", dtype, units)

    def forward(kind: str, steps: Rows, zx: Array, V: Array, d: Array, states: list[Array]) -> Any:
        new = backend.get_array_module(zx).empty
        V, total = V.astype(dtype, copy=False).T, len(zx)
        d = d.astype(dtype, copy=False)
        states = [_own(s, dtype) for s in states]
        zh = new((len(states[0]), gates * units), dtype)
        kept, y = [new((total, 4 * units), dtype), new((total, units), dtype)], new((total, units), dtype)
        if kind == "lstm":
            kept.append(new((total, units), dtype))
        bias = [d] if kind == "gru" else []
        for start, n in steps:
            here = slice(start, start + n)
            multiply(states[0][:n], V, zh[:n])
            launch(n, zx[here], zh, *bias, *states, *[a[here] for a in kept], y[here])
        return y, states, kept

    return forward


def _plan_backward(kind: str, steps: Rows, kept: list[Array], V: Array, gy: Array | None, gs: list[Array]) -> Any:
    """The gradients of zx, of zh and of the states before the first step; ``gs`` is overwritten."""
    _require(kind, *kept, V, *gs)
    cuda_source.require(gy)
    dtype, units, width = kept[0].dtype, V.shape[1], V.shape[0]
    launch = _launcher(f"{kind}_backward", dtype, units)

    def lstm(steps: Rows, kept: list[Array], V: Array, gy: Array | None, gs: list[Array], gz: Array) -> Array:
        gates, _, cells = kept
        gh, gc = gs
        for start, n in reversed(steps):
            here = slice(start, start + n)
            launch(n, gates[here], cells[here], None if gy is None else gy[here], gh, gc, gz[here])
            multiply(gz[here], V, gh[:n])
        return gz

    def gru(steps: Rows, kept: list[Array], V: Array, gy: Array | None, gs: list[Array], gz: Array) -> Array:
        gates, before = kept
        (gh,) = gs
        gzh = backend.get_array_module(V).empty((len(gz), width), dtype)
        for start, n in reversed(steps):
            here = slice(start, start + n)
            launch(n, gates[here], before[here], None if gy is None else gy[here], gh, gz[here], gzh[here])
            through = gh[:n]
            through += multiply(gzh[here], V)
        return gzh

    walk = lstm if kind == "lstm" else gru

    def backward(kind: str, steps: Rows, kept: list[Array], V: Array, gy: Array | None, gs: list[Array]) -> Any:
        if gy is not None and not (gy.dtype == dtype and gy.flags.c_contiguous):
            gy = _own(gy, dtype)
        gz = backend.get_array_module(V).empty((len(kept[0]), width), dtype)
        return gz, walk(steps, kept, V.astype(dtype, copy=False), gy, gs, gz)

    return backward


ROWS = {"recurrent_forward": _plan_forward, "recurrent_backward": _plan_backward}
