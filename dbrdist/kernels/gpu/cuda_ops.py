"""The provider ``cuda``: sums, rectified units, cross entropy and updates in own CUDA C++, on arrays of CuPy.

A launch of CuPy's own elementwise kernels takes the host 10 us and that of a formula several of them; one of these
takes 5 (H100, CuPy 14.2).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from dbrdist.core.array import backend, declared
from dbrdist.core.array.types import Array
from dbrdist.kernels.cpu.onednn import Unsupported
from dbrdist.kernels.gpu import cuda_source
from dbrdist.kernels.gpu.cuda_source import NULL, over, require, require_here

if TYPE_CHECKING:
    from dbrdist.core.array.types import DType

Plan = Callable[..., Any]

_WARPS = 8  # in a block that has one for each row,
_MOST_WARPS = 32  # or that does all of a few rows, so that nothing has to follow
_FEW_SCORES = 1 << 15
_MOST_ROWS = 1 << 12  # whose sums one block for 32 columns takes in less time than CuPy's reduction
_MOST_BLOCKS = 132 * 16
_BYTES = 16  # that a thread reads at once
_PIECE = 1 << 14  # elements of a layer that a block takes
_LABELS = {"int32": "int", "int64": "long long"}


def _new(x: Array) -> Callable[[], Array]:
    """A function that makes memory like that of ``x``, which is dense: in C order or as images."""
    if x.flags.c_contiguous:
        return cuda_source.plain(x.shape, x.dtype)
    if x.ndim == 4 and backend.is_channels_last(x):
        return cuda_source.images(x.shape, x.dtype)
    raise Unsupported("memory with gaps")


# ---- elementwise


def _map(name: str, *xs: Array) -> tuple[Callable[..., None], Callable[[], Array]]:
    """A kernel of arrays that lie alike, as a function of them and the result, and what makes results."""
    require(*xs)
    first = xs[0]
    if any(x.shape != first.shape or x.strides != first.strides or x.dtype != first.dtype for x in xs):
        raise Unsupported("operands of two layouts or types")
    new, size = _new(first), first.size
    grid, block = over(-(-size * first.itemsize // _BYTES))
    launch = cuda_source.kernel("elementwise", name, first.dtype)
    return lambda *arrays: launch(grid, block, (*arrays, size)), new


def _plan_map(name: str) -> Callable[..., Plan]:
    """The planner of a kernel whose result is a new array."""

    def planner(*xs: Array) -> Plan:
        run, new = _map(name, *xs)

        def plan(*xs: Array) -> Array:
            y = new()
            run(*xs, y)
            return y

        return plan

    return planner


def relu_backward_of_sum(y: Array, a: Array, b: Array, out: Array | None = None) -> Plan:
    """a + b where y is not 0; ``out`` may be a or b."""
    run, new = _map("relu_backward_of_sum", y, a, b)
    require(out)

    def plan(y: Array, a: Array, b: Array, out: Array | None = None) -> Array:
        gx = new() if out is None else out
        run(y, a, b, gx)
        return gx

    return plan


# ---- sums of columns


def column_sums(x: Array, dtype: DType, out: Array | None = None) -> Plan:
    """The sums over the rows of a matrix."""
    require(x, out)
    rows, columns = x.shape
    if rows > _MOST_ROWS or not x.flags.c_contiguous or dtype.name not in cuda_source.C_TYPES:
        raise Unsupported("many rows")
    if out is not None and (out.dtype != dtype or not out.flags.c_contiguous):
        raise Unsupported("room of another type")
    empty = backend.get_array_module(x).empty
    launch = cuda_source.kernel("elementwise", "column_sums", x.dtype, dtype)
    grid, block, sizes = (-(-columns // 32),), (32, 32), (np.int32(rows), np.int32(columns))

    def plan(x: Array, dtype: DTypeLike, out: Array | None) -> Array:
        if out is None:
            out = empty(columns, dtype)
        launch(grid, block, (x, out, *sizes))
        return out

    return plan


# ---- cross entropy


def _of_rows(x: Array, t: Array) -> tuple[tuple[Any, ...], tuple[int], tuple[int], tuple[Any, Any]]:
    """Template arguments, grid, block and sizes for a warp per row."""
    require(x)
    require_here(t)
    if t.dtype.name not in _LABELS or not (x.flags.c_contiguous and t.flags.c_contiguous):
        raise Unsupported("labels of another type, or memory with gaps")
    types = x.dtype, _LABELS[t.dtype.name], backend.accumulation_dtype(x.dtype)
    warps = _MOST_WARPS if x.size <= _FEW_SCORES else _WARPS
    grid = 1 if x.size <= _FEW_SCORES else min(-(-len(x) // warps), _MOST_BLOCKS)
    return types, (grid,), (32 * warps,), (np.int32(len(x)), np.int32(x.shape[1]))


def cross_entropy(x: Array, t: Array, ignore_label: int, divisor: int) -> Plan:
    """The mean over the rows of x, and what the gradient needs; see numpy_softmax.cross_entropy."""
    types, grid, block, (rows, classes) = _of_rows(x, t)
    dtype, wide, empty = x.dtype, types[2], backend.get_array_module(x).empty
    launch = cuda_source.kernel("loss", "cross_entropy", *types)
    finish = cuda_source.kernel("loss", "mean_of_losses", *types) if grid[0] > 1 else None

    def plan(x: Array, t: Array, ignore_label: int, divisor: int) -> tuple[Array, tuple[Array, ...]]:
        largest, sums, losses = empty(rows, wide), empty(rows, wide), empty(rows, wide)
        y, scale = empty((), dtype), empty((), wide)
        launch(grid, block, (x, t, largest, sums, losses, y, scale, rows, classes, ignore_label, divisor))
        if finish is not None:
            finish((1,), (1024,), (t, losses, y, scale, rows, ignore_label, divisor))
        return y, (largest, sums, scale)

    return plan


def cross_entropy_backward(x: Array, t: Array, saved: tuple[Array, ...], gy: Array, ignore_label: int) -> Plan:
    """(softmax(x) - onehot(t)) gy / what the mean is over."""
    types, _, _, (rows, classes) = _of_rows(x, t)
    require(gy)
    require_here(*saved)
    if gy.dtype != x.dtype:
        raise Unsupported("a gradient of another type")
    dtype, empty, shape = x.dtype, backend.get_array_module(x).empty, x.shape
    launch = cuda_source.kernel("loss", "cross_entropy_backward", *types)
    grid, block = (min(-(-len(x) // _WARPS), _MOST_BLOCKS),), (32 * _WARPS,)

    def plan(x: Array, t: Array, saved: tuple[Array, ...], gy: Array, ignore_label: int) -> Array:
        largest, sums, scale = saved
        gx = empty(shape, dtype)
        launch(grid, block, (x, t, largest, sums, gy, scale, gx, rows, classes, ignore_label))
        return gx

    return plan


# ---- updates of flat memory


def _numbers_of(numbers: Any) -> tuple[Any, ...]:
    """The arguments of a kernel for its numbers: as they are, or where a captured step declares them."""
    block = declared.current()
    if block is None:
        return *map(float, numbers), NULL, NULL
    skip = NULL if block.overflow is None else block.overflow
    return *(0.0,) * len(numbers), numbers, skip


_UPDATES = "sgd", "momentum_sgd", "corrected_momentum_sgd", "nesterov_ag", "ada_grad", "rmsprop", "adam", "lars"


def update(rule: str, arrays: tuple[Array, ...], numbers: tuple[float, ...], before: tuple[Any, ...] = ()) -> Plan:
    """One pass over p, g and the state of a rule."""
    if rule not in _UPDATES or before:
        raise Unsupported("no source for the rule, or hooks before it")
    p, g, *state = arrays
    require(p, g, *state)
    wide = backend.accumulation_dtype(p.dtype)
    if g.dtype != p.dtype or any(a.dtype != wide for a in state):
        raise Unsupported("state of another type")
    if rule == "lars":
        return _lars(p.dtype, wide)
    types = (p.dtype, wide) if state else (p.dtype,)
    launch = cuda_source.kernel("update", rule, *types)

    largest = (NULL,) if rule == "adam" and len(state) == 2 else ()  # the largest v, which is not kept

    def plan(rule: str, arrays: tuple[Array, ...], numbers: Any, before: tuple[Any, ...] = ()) -> bool:
        size = arrays[0].size
        grid, block = over(size)
        launch(grid, block, (*arrays, *largest, size, *_numbers_of(numbers)))
        return True

    return plan


def _lars(dtype: DTypeLike, wide: Any) -> Plan:
    norms = cuda_source.kernel("update", "lars_norms", dtype, wide)
    move = cuda_source.kernel("update", "lars", dtype, wide)

    def plan(rule: str, arrays: tuple[Array, ...], numbers: tuple[Any, ...], before: tuple[Any, ...] = ()) -> bool:
        p, g, v = arrays
        layers, rates = numbers[0], numbers[1:]
        if declared.current() is not None:
            [rates] = rates
        of_piece, of_layer = map(declared.keep, _tables(layers, backend.device_of(p)))
        grid = (len(of_piece),)
        squares = backend.empty((2 * len(of_piece),), wide, p)
        norms(grid, (512,), (p, g, squares, of_piece))
        move(grid, (512,), (p, g, v, squares, of_piece, of_layer, *_numbers_of(rates)))
        return True

    return plan


@functools.lru_cache(maxsize=64)
def _tables(layers: tuple[tuple[int, int, bool], ...], device: backend.Device) -> tuple[Array, Array]:
    """The pieces into which layers (first and last + 1 element, whether it is scaled) are cut, and their pieces."""
    of_piece: list[tuple[int, int, int]] = []
    of_layer = []
    for k, (start, stop, is_scaled) in enumerate(layers):
        first = len(of_piece)
        of_piece += [(k, i, min(i + _PIECE, stop)) for i in range(start, stop, _PIECE)]
        of_layer.append((first, len(of_piece), int(is_scaled)))
    return device.send(np.array(of_piece, np.int64)), device.send(np.array(of_layer, np.int64))


ROWS: dict[str, Callable[..., Plan]] = {
    planner.__name__: planner
    for planner in (
        relu_backward_of_sum, column_sums, cross_entropy, cross_entropy_backward, update,
    )
} | {name: _plan_map(name) for name in ("relu_forward", "relu_backward", "add")}  # fmt: skip
