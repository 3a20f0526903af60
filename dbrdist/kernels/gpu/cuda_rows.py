"""Softmax, layer normalization, dropout and inputs on a GPU, each in one kernel of our own; sums run in one order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dbrdist.core.array import backend, declared
from dbrdist.core.array.random import Draw
from dbrdist.core.array.types import Array
from dbrdist.kernels.gpu import cuda_source
from dbrdist.kernels.unsupported import Unsupported

_FILE = "rows"
_WARPS = 8  # in a block, one for each row
_MOST_BLOCKS = 132 * 16
_NUM_COUNTERS = 6  # of a draw
_MOST_ROWS = 1 << 16  # over which one block for 32 columns takes sums


def over_rows(rows: int) -> tuple[tuple[int], tuple[int]]:
    return (min(-(-rows // _WARPS), _MOST_BLOCKS),), (32 * _WARPS,)


def require_rows(*arrays: Array) -> None:
    cuda_source.require(*arrays)
    if any(not a.flags.c_contiguous for a in arrays):
        raise Unsupported("memory with gaps, or another order")


# ---- softmax


def _plan_softmax(name: str) -> Callable[..., Any]:
    """The planner of a kernel of x, or of y and gy, along the last axis."""

    def planner(*arguments: Any) -> Any:
        *arrays, axis = arguments
        first = arrays[0]
        require_rows(*arrays)
        if axis not in (-1, first.ndim - 1) or any(a.dtype != first.dtype or a.shape != first.shape for a in arrays):
            raise Unsupported("another axis, or several types")
        if first.ndim == 4 and backend.lies_as_images(first):
            raise Unsupported("images")
        new, columns = cuda_source.plain(first.shape, first.dtype), first.shape[-1]
        rows = first.size // columns
        run = cuda_source.kernel(_FILE, name, first.dtype, backend.accumulation_dtype(first.dtype))
        (grid, block), sizes = over_rows(rows), (rows, np.int32(columns))

        def plan(*arguments: Any) -> Array:
            y = new()
            run(grid, block, (*arguments[:-1], y, *sizes))
            return y

        return plan

    return planner


# ---- layer normalization


def _of_layer(x: Array, gamma: Array, *others: Array) -> tuple[tuple[Any, ...], tuple[Any, Any], Any]:
    """Template arguments, sizes and the number of rows."""
    require_rows(x, gamma, *others)
    wide = backend.accumulation_dtype(x.dtype)
    if gamma.dtype not in (x.dtype, wide):
        raise Unsupported("a scale of another type")
    rows, columns = x.shape
    return (x.dtype, gamma.dtype, wide), (rows, np.int32(columns)), rows


def _plan_ln_forward(x: Array, gamma: Array, beta: Array, eps: float) -> Any:
    """See numpy_normalization.ln_forward."""
    types, sizes, rows = _of_layer(x, gamma, beta)
    if beta.dtype != gamma.dtype:
        raise Unsupported("scale and shift of two types")
    run, (grid, block) = cuda_source.kernel(_FILE, "ln_forward", *types), over_rows(rows)
    new, new_vector = cuda_source.plain(x.shape, x.dtype), cuda_source.plain((rows,), types[2])

    def ln_forward(x: Array, gamma: Array, beta: Array, eps: float) -> tuple[Array, Array, Array]:
        y, mean, var = new(), new_vector(), new_vector()
        run(grid, block, (x, gamma, beta, y, mean, var, *sizes, float(eps)))
        return y, mean, var

    return ln_forward


def _plan_ln_backward(x: Array, gamma: Array, mean: Array, var: Array, gy: Array, eps: float) -> Any:
    """See numpy_normalization.ln_backward."""
    into = _plan_ln_backward_into(x, gamma, mean, var, gy, eps, None, None)
    return lambda x, gamma, mean, var, gy, eps: into(x, gamma, mean, var, gy, eps, None, None)


def _plan_ln_backward_into(
    x: Array, gamma: Array, mean: Array, var: Array, gy: Array, eps: float, out_gamma: Array | None,
    out_beta: Array | None,
) -> Any:  # fmt: skip
    """See device_dispatch.ln_backward_into."""
    types, sizes, rows = _of_layer(x, gamma, mean, var, gy)
    if gy.dtype != x.dtype or mean.dtype != types[2] or var.dtype != types[2] or rows > _MOST_ROWS:
        raise Unsupported("a gradient of another type, or very many rows")
    for out in (out_gamma, out_beta):
        if out is not None:
            require_rows(out)
            if out.dtype != gamma.dtype:
                raise Unsupported("room of another type")
    run, (grid, block) = cuda_source.kernel(_FILE, "ln_backward", *types), over_rows(rows)
    add, columns = cuda_source.kernel(_FILE, "ln_columns", *types), ((-(-x.shape[1] // 32),), (32, 32))
    new, new_vector = cuda_source.plain(x.shape, x.dtype), cuda_source.plain((x.shape[1],), gamma.dtype)

    def ln_backward(
        x: Array, gamma: Array, mean: Array, var: Array, gy: Array, eps: float, out_gamma: Any, out_beta: Any
    ) -> tuple[Array, Array, Array]:
        gx = new()
        ggamma, gbeta = (new_vector() if out is None else out for out in (out_gamma, out_beta))
        run(grid, block, (x, gamma, mean, var, gy, gx, *sizes, float(eps)))
        add(*columns, (x, mean, var, gy, ggamma, gbeta, *sizes, float(eps)))
        return gx, ggamma, gbeta

    return ln_backward


# ---- dropout


def bits_of(draw: Draw | None, threshold: int, scale: float) -> tuple[Any, ...]:
    """The arguments of a kernel that drops elements: counters as numbers or as declared, threshold and scale."""
    step = declared.current()
    if draw is None:
        numbers, place = [np.uint64(0)] * _NUM_COUNTERS, cuda_source.NULL
    elif step is None:
        numbers, place = [np.uint64(n) for n in draw], cuda_source.NULL
    else:
        numbers, place = [np.uint64(0)] * len(draw), step.declare(draw.of_this_step, len(draw), np.uint64)
    return *numbers, np.uint32(threshold), float(scale), place


def _plan_dropout(x: Array, length: int, draw: Draw, threshold: int, scale: float) -> Any:
    """See device_dispatch.dropout."""
    cuda_source.require(x)
    if x.flags.c_contiguous:
        new = cuda_source.plain(x.shape, x.dtype)
    elif x.ndim == 4 and backend.is_channels_last(x):
        new = cuda_source.images(x.shape, x.dtype)
    else:
        raise Unsupported("memory with gaps")
    run = cuda_source.kernel(_FILE, "dropout", x.dtype, backend.accumulation_dtype(x.dtype))
    lines = x.size // length
    grid, block = cuda_source.over(lines * -(-length // 8))

    def dropout(x: Array, length: int, draw: Draw, threshold: int, scale: float) -> tuple[Array, Array]:
        y, mask = new(), new()
        run(grid, block, (x, y, mask, lines, length, *bits_of(draw, threshold, scale)))
        return y, mask

    return dropout


# ---- inputs


def _plan_by_table(x: Array, table: Array) -> Any:
    """See device_dispatch.by_table."""
    cuda_source.require(table)
    cuda_source.require_here(x)
    n, h, w, c = x.shape
    if x.dtype != np.uint8 or table.shape != (256, c) or not x.size:
        raise Unsupported("images of another type, or a table of other channels")
    if not (x.flags.c_contiguous and table.flags.c_contiguous):
        raise Unsupported("memory with gaps, or another order")
    run, (grid, block) = cuda_source.kernel("layout", "by_table", table.dtype), cuda_source.over(x.size)
    new, sizes = cuda_source.images((n, c, h, w), table.dtype), (x.size, np.int32(c))

    def by_table(x: Array, table: Array) -> Array:
        y = new()
        run(grid, block, (x, table, y, *sizes))
        return y

    return by_table


ROWS = {
    **{name: _plan_softmax(name) for name in ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")},
    "ln_forward": _plan_ln_forward,
    "ln_backward": _plan_ln_backward,
    "ln_backward_into": _plan_ln_backward_into,
    "dropout": _plan_dropout,
    "by_table": _plan_by_table,
}
