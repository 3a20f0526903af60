"""Functions that move elements: shapes, pieces, repetition, indexing; and reductions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from dbrdist.onnx.conversion import Conversion, OperatorError, converts
from dbrdist.onnx.graph import OnnxGraph

_TO_THE_START = -(2**31)  # where a walk backwards ends after the first element


@converts("Reshape")
def _reshape(g: OnnxGraph, c: Conversion) -> str:
    return c.reshape(c.names[0], c.out_shape())


@converts("Transpose")
def _transpose(g: OnnxGraph, c: Conversion) -> str:
    axes = c.node.axes
    ndim = len(c.shape())
    if ndim < 2:
        return g.op("Identity", c.names[0])
    order = tuple(range(ndim))[::-1] if axes is None else tuple(a % ndim for a in axes)
    return g.op("Transpose", c.names[0], perm=order)


@converts("BroadcastTo")
def _broadcast_to(g: OnnxGraph, c: Conversion) -> str:
    return c.broadcast(c.names[0], c.out_shape())


@converts("Sum")
def _sum(g: OnnxGraph, c: Conversion) -> str:
    return g.sum(c.names[0], c.axes(c.node.axis), c.node.keepdims)


@converts("Mean")
def _mean(g: OnnxGraph, c: Conversion) -> str:
    return g.mean(c.names[0], c.axes(c.node.axis), c.node.keepdims)


@converts("WeightedMean")
def _weighted_mean(g: OnnxGraph, c: Conversion) -> str:
    x, w = c.names
    axes, keepdims = c.axes(c.node.axis), c.node.keepdims
    return g.op("Div", g.sum(g.op("Mul", x, w), axes, keepdims), g.sum(w, axes, keepdims))


@converts("SumTo")
def _sum_to(g: OnnxGraph, c: Conversion) -> str:
    target, shape = c.out_shape(), c.shape()
    lead = len(shape) - len(target)
    axes = [*range(lead), *(i + lead for i, n in enumerate(target) if n == 1 and shape[i + lead] != 1)]
    return c.reshape(g.sum(c.names[0], axes, True), target)


@converts("Extremum")
def _extremum(g: OnnxGraph, c: Conversion) -> str:
    kind = "ReduceMax" if c.node.name == "max" else "ReduceMin"
    axes = c.axes(c.node.axis)
    return g.op(kind, c.names[0], g.ints(axes), keepdims=int(c.node.keepdims)) if axes else c.names[0]


@converts("LogSumExp")
def _log_sum_exp(g: OnnxGraph, c: Conversion) -> str:
    (x,), axes = c.names, c.axes(c.node.axis)
    top = g.op("ReduceMax", x, g.ints(axes), keepdims=1)
    total = g.sum(g.op("Exp", g.op("Sub", x, top)), axes, True)
    return c.reshape(g.op("Add", g.op("Log", total), top), c.out_shape())


@converts("Prod")
def _prod(g: OnnxGraph, c: Conversion) -> str:
    return g.op("ReduceProd", c.names[0], g.ints([0]), keepdims=0)


@converts("CumSum")
def _cumsum(g: OnnxGraph, c: Conversion) -> str:
    return g.op("CumSum", c.names[0], g.constant(np.asarray(c.node.axis, np.int64)), reverse=int(c.node.backwards))


@converts("CumProd")
def _cumprod(g: OnnxGraph, c: Conversion) -> str:
    """Products of the rows so far, one after another."""
    (x,), n = c.names, c.shape()[0]
    if n != n.other or not n:
        raise OperatorError("a cumulative product along the batch, or of nothing, has no operator")
    rows = [g.part(x, 0, 0, 1)]
    for i in range(1, n):
        rows.append(g.op("Mul", rows[-1], g.part(x, 0, i, i + 1)))
    return g.op("Concat", *rows, axis=0)


@converts("Concat")
def _concat(g: OnnxGraph, c: Conversion) -> str:
    return g.op("Concat", *c.names, axis=c.node.axis)


@converts("SplitAxis")
def _split(g: OnnxGraph, c: Conversion) -> list[str]:
    bounds = c.attribute("bounds")
    return [g.part(c.names[0], c.node.axis, i, j) for i, j in itertools.pairwise(bounds)]


@converts("Where")
def _where(g: OnnxGraph, c: Conversion) -> str:
    return g.op("Where", c.name_of(c.node.condition), *c.names)


@converts("Cast")
def _cast(g: OnnxGraph, c: Conversion) -> str:
    return g.cast(c.names[0], c.dtype)


@converts("Copy")
def _copy(g: OnnxGraph, c: Conversion) -> str:
    return g.op("Identity", c.names[0])


@converts("Pad")
def _pad(g: OnnxGraph, c: Conversion) -> str:
    widths, fill = c.node.widths, c.node.value
    if not np.isscalar(fill):
        raise OperatorError("pad with a value for each side has no operator; give constant_values one number")
    pads = [a for a, _ in widths] + [b for _, b in widths]
    return g.op("Pad", c.names[0], g.ints(pads), c.number(fill), mode="constant")


@converts("PadWithElements")
def _pad_with_elements(g: OnnxGraph, c: Conversion) -> str:
    (x,) = c.names
    for axis, frame in c.node.frames.items():
        x = g.op("Gather", x, g.ints(frame.places.tolist()), axis=axis)
    return x


# ---- indexing -------------------------------------------------------------------------------------------------------


@converts("GetItem")
def _getitem(g: OnnxGraph, c: Conversion) -> str:
    slices = c.node.slices
    parts = slices if isinstance(slices, tuple) else (slices,)
    if all(p is None or p is Ellipsis or _is_number(p) or isinstance(p, slice) for p in parts):
        return _basic(g, c, parts)
    if isinstance(slices, np.ndarray) and slices.dtype.kind in "iu":  # rows of a table
        return g.op("Gather", c.names[0], c.name_of(slices), axis=0)
    if sum(map(_is_list, parts)) == 1 and all(_is_list(p) or p is Ellipsis or isinstance(p, slice) for p in parts):
        return _along_one_axis(g, c, parts)
    if len(parts) == 2 and len(c.shape()) == 2 and all(isinstance(p, np.ndarray) and p.ndim == 1 for p in parts):
        return _elements_of_rows(g, c, *parts)
    return by_index(g, c)


def _is_number(part: Any) -> bool:
    return isinstance(part, (int, np.integer)) and not isinstance(part, bool)


def _is_list(part: Any) -> bool:
    """Whether it is a list or an array of indices, or a mask along one axis."""
    if not isinstance(part, (list, np.ndarray)):
        return False
    a = np.asarray(part)
    return a.dtype.kind in "iu" or (a.dtype == bool and a.ndim == 1)


def _basic(g: OnnxGraph, c: Conversion, parts: tuple[Any, ...]) -> str:
    """Numbers, slices, None and Ellipsis: slices, then a reshape."""
    x, shape = c.names[0], c.shape()
    free = len(shape) - sum(p is not None and p is not Ellipsis for p in parts)
    axis = 0
    for p in parts:
        if p is None:
            continue
        if p is Ellipsis:
            axis += free
            continue
        if _is_number(p):
            place = int(p)
            p = slice(place, place + 1 if place != -1 else None)
        if p != slice(None):
            x = _sliced(g, c, x, axis, p, shape[axis])
        axis += 1
    return c.reshape(x, c.out_shape())


def _sliced(g: OnnxGraph, c: Conversion, x: str, axis: int, part: slice, n: Any) -> str:
    start, stop, step = part.indices(n)
    if n != n.other and part.indices(n.other) != (start, stop, step):
        if part.start is None and part.stop is None:  # all of the batch, perhaps backwards
            start, stop = (0, 2**31) if step > 0 else (2**31, _TO_THE_START)
        else:
            raise OperatorError("a slice of the batch depends on its size; export without dynamic_batch")
    return g.part(x, axis, start, _TO_THE_START if stop < 0 and step < 0 else stop, step)


def _along_one_axis(g: OnnxGraph, c: Conversion, parts: tuple[Any, ...]) -> str:
    """Indices or a mask along one axis and slices along the others, such as channels: x[:, [0, 2]]."""
    x, shape, axis, at = c.names[0], c.shape(), 0, 0
    for p in parts:
        if _is_list(p):
            at, places = axis, np.asarray(p)
            indices = c.name_of(p) if isinstance(p, np.ndarray) else g.constant(places)
            if places.dtype == bool:
                indices = g.constant(np.flatnonzero(places))
        elif p is not Ellipsis and p != slice(None):
            x = _sliced(g, c, x, axis, p, shape[axis])
        axis += len(shape) - len(parts) + 1 if p is Ellipsis else 1
    return g.op("Gather", x, indices, axis=at)


def _elements_of_rows(g: OnnxGraph, c: Conversion, rows: Any, columns: Any) -> str:
    """x[i, t_i] for vectors of rows and columns."""
    name = c.name_of(columns)
    if not np.array_equal(rows, np.arange(c.shape()[0])):
        return by_index(g, c)
    picked = g.op("GatherElements", c.names[0], g.reshape(g.cast(name, np.int64), (-1, 1)), axis=1)
    return g.reshape(picked, (-1,))


@converts(
    "Permutation", "Diagonal", "OntoDiagonal", "Shift", "Im2Col", "Strided", "Unstrided", "PadSequence",
    "TransposeSequence",
)  # fmt: skip
def by_index(g: OnnxGraph, c: Conversion) -> Any:
    """A function whose results are elements of its operands, or one value: run on their numbers, it says which."""
    shapes = _fixed_shapes(c)
    _require_constant(c)
    start, numbers = 1, []
    for s in shapes:
        n = int(np.prod(s))
        numbers.append(np.arange(start, start + n, dtype=np.float64).reshape(s))
        start += n
    twin = c.node.twin()
    fill, twin.value = getattr(twin, "value", 0), 0
    places = twin.forward(tuple(numbers))
    table = g.op("Concat", g.constant(np.asarray([fill], c.dtype)), *(g.reshape(n, (-1,)) for n in c.names), axis=0)
    indexes = (g.constant(np.asarray(place).astype(np.int64)) for place in places)
    return [g.op("Gather", table, index, axis=0) for index in indexes]


@converts("Scatter")
def _scatter(g: OnnxGraph, c: Conversion) -> str:
    """Zeros with the elements added where they belong; some may be added at one place."""
    _fixed_shapes(c)
    _require_constant(c)
    size = int(np.prod(c.node.shape))
    places = np.arange(size).reshape(c.node.shape)[c.node.slices]
    updates = g.reshape(c.names[0], (-1,))
    indexes = g.ints(np.broadcast_to(places, c.call.xs[0].shape).reshape(-1))
    zeros = g.constant(np.zeros(size, c.dtype))
    return g.reshape(g.op("ScatterElements", zeros, indexes, updates, axis=0, reduction="add"), c.node.shape)


def _fixed_shapes(c: Conversion) -> list[Any]:
    shapes = [c.shape(i) for i in range(len(c.call.xs))]
    c.fixed("the shape", [tuple(s) for s in shapes], [tuple(n.other for n in s) for s in shapes])
    return shapes


def _require_constant(c: Conversion) -> None:
    """Refuse indexes that depend on values."""
    for name in ("slices", "order"):
        kept = getattr(c.node, name, None)
        for part in kept if isinstance(kept, tuple) else (kept,):
            if isinstance(part, np.ndarray):
                c.name_of(part)


@converts("Rearranged")
def _rearranged(g: OnnxGraph, c: Conversion) -> str:
    if c.node.to_pixels:
        return g.op("DepthToSpace", c.names[0], blocksize=c.node.r, mode="DCR")
    return g.op("SpaceToDepth", c.names[0], blocksize=c.node.r)


@converts("Interpolation")
def _interpolation(g: OnnxGraph, c: Conversion) -> str:
    """(1 - w) x[low] + w x[high] along an axis."""
    (x,), node = c.names, c.node
    axis = node.axis
    low = g.take(x, axis, node.low)
    weight = np.asarray(node.weight, c.dtype).reshape([-1 if i == axis else 1 for i in range(len(c.shape()))])
    if not weight.any():
        return low
    step = g.op("Sub", g.take(x, axis, node.high), low)
    return g.op("Add", low, g.op("Mul", g.constant(weight), step))


@converts("Mixed")
def _mixed(g: OnnxGraph, c: Conversion) -> str:
    """Four pixels around each place, times their weights: y (N, P, C) of x (N, S, C) and w (N, 4, P).

    Which pixels is fixed: where it depends on values, so do the weights, which are refused before.
    """
    (n, size, num_channels), (_, num_taps, num_places) = _fixed_shapes(c)
    numbers = np.asarray(c.node.pixels.numbers, np.int64) + (np.arange(n) * size).reshape(-1, 1, 1)
    pixels = g.reshape(c.names[0], (n * size, num_channels))
    y = ""
    for k in range(num_taps):
        weight = g.reshape(g.part(c.names[1], 1, k, k + 1), (n, num_places, 1))
        part = g.op("Mul", g.op("Gather", pixels, g.constant(numbers[:, k]), axis=0), weight)
        y = g.op("Add", part, y) if y else part
    return y


@converts("EinSum")
def _einsum(g: OnnxGraph, c: Conversion) -> str:
    return g.op("Einsum", *c.names, equation=f"{','.join(c.node.terms)}->{c.node.out}")


@converts("Det")
def _det(g: OnnxGraph, c: Conversion) -> str:
    return g.op("Det", c.names[0])
