"""Shapes, pieces and copies of arrays. Nearly all are compositions of the primitives in ``core.ops``."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from dbrdist.core.array.array_operations import are_images
from dbrdist.core.array.backend import (
    Array,
    as_dtype,
    channels_last,
    device_of,
    empty,
    full_as,
    get_array_module,
    get_device,
    is_array,
    to_device,
    zeros,
    zeros_as,
)
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.elementwise import elementwise
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import expected, wrong_type
from dbrdist.core.tape.elementwise_table import matched, together
from dbrdist.core.tape.function_node import FunctionNode, call
from dbrdist.core.tape.variable import Variable, as_array, as_variable


def _axis(function: str, ndim: int, axis: int, name: str = "axis") -> int:
    if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
        raise wrong_type(function, name, "an int", axis)
    if not -ndim <= axis < ndim:
        raise expected(function, name, f"from {-ndim} to {ndim - 1}", axis)
    return axis % ndim


# ---- shape ----------------------------------------------------------------------------------------------------------


def reshape(x: Any, shape: Any) -> Any:
    """The same elements in another shape; one length may be -1.

    Args:
        x: array or Variable.
        shape: shape of the result.
    """
    x = as_variable(x)
    shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    try:
        return ops.reshape(x, shape)
    except ValueError:
        raise expected("reshape", "shape", f"a shape of {x.size} elements for x of shape {x.shape}", shape) from None


def transpose(x: Any, axes: tuple[int, ...] | None = None) -> Any:
    """The axes permuted, or reversed where None.

    Args:
        x: array or Variable.
        axes: the axes of x in their new order; None reverses them.
    """
    x = as_variable(x)
    if axes is not None:
        axes = tuple(axes)
        if sorted(a % max(x.ndim, 1) for a in axes) != list(range(x.ndim)):
            raise expected("transpose", "axes", f"each axis of x (shape {x.shape}) once", axes)
    return ops.transpose(x, axes)


def swapaxes(x: Any, axis1: int, axis2: int) -> Any:
    """Two axes exchanged.

    Args:
        x: array or Variable.
        axis1: an axis.
        axis2: the axis that takes its place.
    """
    x = as_variable(x)
    order = list(range(x.ndim))
    i, j = _axis("swapaxes", x.ndim, axis1, "axis1"), _axis("swapaxes", x.ndim, axis2, "axis2")
    order[i], order[j] = j, i
    return ops.transpose(x, tuple(order))


def moveaxis(x: Any, source: Any, destination: Any) -> Any:
    """Axes moved to other positions, the others in their order.

    Args:
        x: array or Variable.
        source: axis or tuple of axes to move.
        destination: where each of them goes.
    """
    x = as_variable(x)
    places = [axes if isinstance(axes, (tuple, list)) else (axes,) for axes in (source, destination)]
    sources = [_axis("moveaxis", x.ndim, a, "source") for a in places[0]]
    targets = [_axis("moveaxis", x.ndim, a, "destination") for a in places[1]]
    if len(sources) != len(targets) or len(set(sources)) != len(sources) or len(set(targets)) != len(targets):
        raise expected("moveaxis", "destination", "as many different axes as in source", repr(destination))
    order = [a for a in range(x.ndim) if a not in sources]
    for target, source_axis in sorted(zip(targets, sources)):
        order.insert(target, int(source_axis))
    return ops.transpose(x, tuple(order))


def rollaxis(x: Any, axis: int, start: int = 0) -> Any:
    """One axis moved in front of axis ``start``.

    Args:
        x: array or Variable.
        axis: axis to move.
        start: axis before which it goes; default 0.
    """
    x = as_variable(x)
    axis = _axis("rollaxis", x.ndim, axis)
    if not -x.ndim <= start <= x.ndim:
        raise expected("rollaxis", "start", f"from {-x.ndim} to {x.ndim}", start)
    start = start + x.ndim if start < 0 else start
    return moveaxis(x, axis, start - 1 if axis < start else start)


def expand_dims(x: Any, axis: int) -> Any:
    """A new axis of length one at ``axis``.

    Args:
        x: array or Variable.
        axis: position of the new axis of length 1.
    """
    x = as_variable(x)
    axis = _axis("expand_dims", x.ndim + 1, axis)
    return ops.reshape(x, (*x.shape[:axis], 1, *x.shape[axis:]))


def squeeze(x: Any, axis: Any = None) -> Any:
    """Without the axes of length one: all, or those given.

    Args:
        x: array or Variable.
        axis: axis or tuple of axes of length 1 to remove; None for all of them.
    """
    x = as_variable(x)
    if axis is None:
        axes = [i for i, n in enumerate(x.shape) if n == 1]
    else:
        axes = [_axis("squeeze", x.ndim, a) for a in ((axis,) if isinstance(axis, (int, np.integer)) else axis)]
        if any(x.shape[a] != 1 for a in axes):
            raise expected("squeeze", "axis", f"axes of length one of x of shape {x.shape}", repr(axis))
    return ops.reshape(x, tuple(n for i, n in enumerate(x.shape) if i not in axes))


def flatten(x: Any) -> Any:
    """All elements in one axis.

    Args:
        x: array or Variable of any shape.
    """
    x = as_variable(x)
    return ops.reshape(x, (x.size,))


def broadcast(*args: Any) -> tuple[Any, ...]:
    """The arguments repeated to their common shape.

    Args:
        args: arrays or Variables that broadcast.
    """
    xs = tuple(as_variable(x) for x in args)
    try:
        shape = np.broadcast_shapes(*(x.shape for x in xs))
    except ValueError:
        raise expected("broadcast", "args", "shapes that broadcast", str([x.shape for x in xs])) from None
    return tuple(ops.broadcast_to(x, shape) for x in xs)


def broadcast_to(x: Any, shape: tuple[int, ...]) -> Any:
    """x repeated to a larger shape, without copying.

    Args:
        x: array or Variable.
        shape: shape of the result.
    """
    x = as_variable(x)
    shape = tuple(shape)
    lead = len(shape) - x.ndim
    if lead < 0 or any(n not in (1, m) for n, m in zip(x.shape, shape[lead:])):
        raise expected("broadcast_to", "shape", f"a shape to which {x.shape} broadcasts", shape)
    return ops.broadcast_to(x, shape)


def sum_to(x: Any, shape: tuple[int, ...]) -> Any:
    """x summed to a smaller shape, from which it could have been broadcast.

    Args:
        x: array or Variable.
        shape: shape of the result.
    """
    x = as_variable(x)
    shape = tuple(shape)
    lead = x.ndim - len(shape)
    if lead < 0 or any(n not in (1, m) for n, m in zip(shape, x.shape[lead:])):
        raise expected("sum_to", "shape", f"a shape that broadcasts to {x.shape}", shape)
    return ops.sum_to(x, shape)


# ---- joining and splitting ------------------------------------------------------------------------------------------


def concat(xs: Sequence[Any], axis: int = 1) -> Any:
    """The arrays one after another along an axis; the other axes agree.

    Args:
        xs: arrays or Variables whose other axes are equal.
        axis: axis along which they are joined; default 1.
    """
    xs = tuple(as_variable(x) for x in matched(tuple(xs)))
    if not xs:
        raise expected("concat", "xs", "at least one array", "none")
    axis = _axis("concat", xs[0].ndim, axis)
    rest = [n for i, n in enumerate(xs[0].shape) if i != axis]
    for k, x in enumerate(xs):
        if x.ndim != xs[0].ndim or [n for i, n in enumerate(x.shape) if i != axis] != rest:
            raise expected("concat", f"xs[{k}]", f"shape {xs[0].shape} to match xs[0] except along axis {axis}", x)
    return ops.concat(xs, axis)


def stack(xs: Sequence[Any], axis: int = 0) -> Any:
    """Arrays of one shape along a new axis.

    Args:
        xs: arrays or Variables of one shape.
        axis: position of the new axis; default 0.
    """
    xs = tuple(as_variable(x) for x in matched(tuple(xs)))
    if not xs:
        raise expected("stack", "xs", "at least one array", "none")
    for k, x in enumerate(xs):
        if x.shape != xs[0].shape:
            raise expected("stack", f"xs[{k}]", f"shape {xs[0].shape} to match xs[0]", x)
    axis = _axis("stack", xs[0].ndim + 1, axis)
    return ops.concat(tuple(expand_dims(x, axis) for x in xs), axis)


def vstack(xs: Sequence[Any]) -> Any:
    """Concatenated along the first axis; vectors count as rows.

    Args:
        xs: arrays or Variables.
    """
    xs = [as_variable(x) for x in matched(tuple(xs))]
    if as_chainer[0] and len({x.ndim for x in xs}) > 1:
        raise expected("vstack", "xs", "arrays with the same number of axes, as in Chainer", str([x.shape for x in xs]))
    return concat([reshape(x, (1, -1)) if x.ndim < 2 else x for x in xs], axis=0)


def hstack(xs: Sequence[Any]) -> Any:
    """Concatenated along the second axis; vectors along their only one.

    Args:
        xs: arrays or Variables.
    """
    xs = [reshape(x, (1,)) if x.ndim == 0 else x for x in map(as_variable, matched(tuple(xs)))]
    return concat(xs, axis=0 if xs and xs[0].ndim == 1 else 1)


def dstack(xs: Sequence[Any]) -> Any:
    """Concatenated along the third axis; (N,) counts as (1, N, 1) and (M, N) as (M, N, 1).

    Args:
        xs: arrays or Variables.
    """
    return concat([_with_depth(as_variable(x)) for x in matched(tuple(xs))], axis=2)


def _with_depth(x: Variable) -> Variable:
    if x.ndim < 2:
        return ops.reshape(x, (1, x.size, 1))
    return ops.reshape(x, (*x.shape, 1)) if x.ndim == 2 else x


class SplitAxis(FunctionNode):
    """Pieces of x along an axis; gx = the gradients of the pieces joined, zeros where none arrived"""

    gives_new = True

    def __init__(self, bounds: list[int], axis: int) -> None:
        self.bounds = bounds  # where pieces start, and the end of the last one
        self.axis = axis

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        lead = (slice(None),) * self.axis
        return tuple(xs[0][(*lead, slice(i, j))] for i, j in zip(self.bounds, self.bounds[1:]))

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...]) -> tuple[Any, ...]:
        node, axis = self.inputs[0], self.axis
        like = next(as_array(g) for g in gys if g is not None)
        pieces = []
        for i, j, g in zip(self.bounds, self.bounds[1:], gys):
            if g is None:
                g = zeros_as(like, (*node.shape[:axis], j - i, *node.shape[axis + 1 :]), node.dtype)
            pieces.append(g)
        return (ops.concat(pieces, axis),)


def split_axis(x: Any, indices_or_sections: Any, axis: int, force_tuple: bool = True) -> Any:
    """Pieces along an axis, as a tuple: a number of equal ones, or cut before the given indices.

    A single piece comes without the tuple where ``force_tuple`` is False.
    """
    x = as_variable(x)
    axis = _axis("split_axis", x.ndim, axis)
    length = x.shape[axis]
    if isinstance(indices_or_sections, (int, np.integer)):
        sections = operator.index(indices_or_sections)
        if sections < 1 or length % sections:
            raise expected("split_axis", "indices_or_sections", f"a divisor of {length}, the length of axis {axis}",
                           sections)  # fmt: skip
        bounds = list(range(0, length + 1, length // sections)) if length else [0] * (sections + 1)
    else:
        cuts = [min(int(i), length) for i in indices_or_sections]
        bounds = [0, *cuts, length]
        if bounds != sorted(bounds):
            raise expected("split_axis", "indices_or_sections", "indices in ascending order", repr(cuts))
    pieces = SplitAxis(bounds, axis).apply((x,))
    return pieces if force_tuple or len(pieces) > 1 else pieces[0]


def separate(x: Any, axis: int = 0) -> Any:
    """The slices along an axis, without it, as a tuple.

    Args:
        x: array or Variable.
        axis: axis that is taken apart; default 0.
    """
    x = as_variable(x)
    axis = _axis("separate", x.ndim, axis)
    shape = x.shape[:axis] + x.shape[axis + 1 :]
    return tuple(ops.reshape(piece, shape) for piece in split_axis(x, x.shape[axis], axis))


# ---- picking --------------------------------------------------------------------------------------------------------


def get_item(x: Any, slices: Any) -> Any:
    """x[slices], with numbers, slices, None, Ellipsis and integer or boolean arrays.

    Args:
        x: array or Variable.
        slices: numbers, slices, None, Ellipsis, and arrays of integers or booleans, as in NumPy.
    """
    if isinstance(slices, (tuple, list)) and sum(s is Ellipsis for s in slices) > 1:
        raise expected("get_item", "slices", "at most one Ellipsis", repr(slices))
    return ops.getitem(as_variable(x), slices)


def select_item(x: Any, t: Any) -> Any:
    """x[n, t_n] for each row n; x (N, K), t (N,) integers.

    Args:
        x: scores (N, K).
        t: integers (N,), from 0 to K - 1.
    """
    x, t = as_variable(x), as_array(t)
    if x.ndim != 2 or t.shape != x.shape[:1] or t.dtype.kind not in "iu":
        raise expected("select_item", "t", f"integers of shape {x.shape[:1]} for x of shape (N, K)", t)
    return ops.getitem(x, (get_array_module(t).arange(len(t)), t))


class Permutation(FunctionNode):
    """y = the slices of x along an axis in another order"""

    is_linear = True
    gives_new = True

    def __init__(self, axis: int, order: Array, inverse: Array) -> None:
        self.axis, self.order, self.inverse = axis, order, inverse

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (xs[0].take(self.order, self.axis),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...]) -> tuple[Any, ...]:
        return (call(Permutation(self.axis, self.inverse, self.order), gys[0]),)


def permutate(x: Any, indices: Any, axis: int = 0, inv: bool = False) -> Any:
    """Slices along an axis in the order of ``indices``; ``inv`` undoes that.

    Args:
        x: array or Variable.
        indices: integers (n,): the old positions in their new order.
        axis: the axis, of length n; default 0.
        inv: undo the permutation instead; default False.
    """
    x, indices = as_variable(x), as_array(indices)
    axis = _axis("permutate", x.ndim, axis)
    n = x.shape[axis]
    if indices.shape != (n,) or indices.dtype.kind not in "iu":
        raise expected("permutate", "indices", f"integers of shape ({n},) to match axis {axis} of x", indices)
    if n and (int(indices.min()) < -n or int(indices.max()) >= n):
        raise expected("permutate", "indices", f"places from {-n} to {n - 1}", f"{indices.min()} to {indices.max()}")
    xp = get_array_module(indices)
    order = indices.astype(np.intp) % max(n, 1)
    inverse = xp.argsort(order)
    if not bool((order[inverse] == xp.arange(n)).all()):  # some element is taken twice
        return ops.getitem(x, (*(slice(None),) * axis, inverse if inv else order))
    return Permutation(axis, *((inverse, order) if inv else (order, inverse))).apply((x,))[0]


def flip(x: Any, axis: int) -> Any:
    """The order of elements reversed along an axis.

    Args:
        x: array or Variable.
        axis: axis to reverse.
    """
    x = as_variable(x)
    axis = _axis("flip", x.ndim, axis)
    return ops.getitem(x, (*(slice(None),) * axis, slice(None, None, -1)))


def flipud(a: Any) -> Any:
    """The order of rows (axis 0) reversed.

    Args:
        a: array or Variable with that axis.
    """
    return flip(a, 0)


def fliplr(a: Any) -> Any:
    """The order of columns (axis 1) reversed.

    Args:
        a: array or Variable with that axis.
    """
    return flip(a, 1)


class Diagonal(FunctionNode):
    """y = the diagonal over two axes, as a view with its axis last"""

    is_linear = True

    was_images = False

    def __init__(self, offset: int, axes: tuple[int, int]) -> None:
        self.offset = offset
        self.axes = axes

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.was_images = are_images(xs[0])
        return (xs[0].diagonal(self.offset, *self.axes),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...]) -> tuple[Any, ...]:
        return (call(OntoDiagonal(self.offset, self.axes, self.inputs[0].shape, self.was_images), gys[0]),)


class OntoDiagonal(FunctionNode):
    """y = zeros with x on the diagonal over two axes: the transpose of Diagonal"""

    is_linear = True

    def __init__(self, offset: int, axes: tuple[int, int], shape: tuple[int, ...], to_images: bool) -> None:
        self.offset = offset
        self.axes = axes
        self.shape = shape
        self.to_images = to_images

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        (x,) = xs
        y = zeros(self.shape, x.dtype, x) if self.to_images else zeros_as(x, self.shape, x.dtype)
        rest = [i for i in range(y.ndim) if i not in self.axes]
        along = get_array_module(x).arange(x.shape[-1])
        y.transpose((*self.axes, *rest))[along + max(-self.offset, 0), along + max(self.offset, 0)] = x.transpose(
            (x.ndim - 1, *range(x.ndim - 1))
        )
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...]) -> tuple[Any, ...]:
        return (call(Diagonal(self.offset, self.axes), gys[0]),)


def diagonal(x: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    """The diagonal over two axes, which it replaces by one axis at the end; ``offset`` counts columns to the right.

    Args:
        x: array or Variable with at least two axes.
        offset: columns to the right of the main diagonal, negative for the left; default 0.
        axis1: axis of the rows; default 0.
        axis2: axis of the columns; default 1.
    """
    x = as_variable(x)
    if x.ndim < 2:
        raise expected("diagonal", "x", "at least 2 axes", x)
    axes = _axis("diagonal", x.ndim, axis1, "axis1"), _axis("diagonal", x.ndim, axis2, "axis2")
    if axes[0] == axes[1]:
        raise expected("diagonal", "axis2", f"another axis than axis1 = {axis1}", axis2)
    return Diagonal(operator.index(offset), axes).apply((x,))[0]


def where(condition: Any, x: Any, y: Any) -> Any:
    """x where ``condition`` (bool) holds, else y, with broadcasting; the condition gets no gradient.

    Args:
        condition: booleans, which broadcast with x and y.
        x: values where the condition holds.
        y: values elsewhere.
    """
    condition = as_array(condition)
    if isinstance(condition, np.bool_):  # what NumPy's comparisons make of arrays without axes
        condition = np.asarray(condition)
    if not is_array(condition) or condition.dtype != bool:
        raise expected("where", "condition", "an array of bool", condition)
    x, y = matched((x, y))
    return as_variable(ops.where(condition, x, y))


def scatter_add(a: Any, slices: Any, b: Any) -> Any:
    """a with b added at ``slices``; repeated indices add up.

    Args:
        a: array or Variable.
        slices: numbers, slices or arrays of integers, as in NumPy.
        b: values to add, which broadcast to a[slices].
    """
    a, b = together("scatter_add", "number", a=a, b=b)
    slices = as_array(slices)
    target = empty(a.shape, bool, a.array)[slices].shape  # on the device, where slices may lie
    return ops.add(a, ops.scatter(ops.broadcast_to(b, target), slices, a.shape))


# ---- repeating ------------------------------------------------------------------------------------------------------


def repeat(x: Any, repeats: Any, axis: int | None = None) -> Any:
    """Each element repeated along an axis (of the flattened array where None), a number of times or one per element."""
    x = as_variable(x)
    if axis is None or not x.ndim:
        x, axis = flatten(x), 0 if axis is None else axis
    axis = _axis("repeat", x.ndim, axis)
    if isinstance(repeats, (bool, str)) or not isinstance(repeats, (int, np.integer, tuple, list, np.ndarray)):
        raise wrong_type("repeat", "repeats", "an int or several", repeats)
    if isinstance(repeats, (int, np.integer)) or len(repeats) == 1:
        times = operator.index(repeats if isinstance(repeats, (int, np.integer)) else repeats[0])
        if times < 0:
            raise expected("repeat", "repeats", "a number from 0 on", times)
        split = (*x.shape[: axis + 1], 1, *x.shape[axis + 1 :])
        wide = ops.broadcast_to(ops.reshape(x, split), (*split[: axis + 1], times, *split[axis + 2 :]))
        return ops.reshape(wide, (*x.shape[:axis], x.shape[axis] * times, *x.shape[axis + 1 :]))
    if len(repeats) != x.shape[axis]:
        raise expected("repeat", "repeats", f"{x.shape[axis]} numbers, one per element of axis {axis}", len(repeats))
    order = np.repeat(np.arange(x.shape[axis]), repeats)
    return ops.getitem(x, (*(slice(None),) * axis, order))


def tile(x: Any, reps: Any) -> Any:
    """The whole array repeated, a number of times along each axis, the last first.

    Args:
        x: array or Variable.
        reps: number of repetitions, or one for each axis, the last first.
    """
    x = as_variable(x)
    reps = (reps,) if isinstance(reps, (int, np.integer)) else tuple(reps)
    if any(r < 0 for r in reps):
        raise expected("tile", "reps", "numbers from 0 on", reps)
    ndim = max(x.ndim, len(reps))
    shape = (1,) * (ndim - x.ndim) + x.shape
    reps = (1,) * (ndim - len(reps)) + reps
    split = tuple(m for n in shape for m in (1, n))
    wide = ops.broadcast_to(ops.reshape(x, split), tuple(m for r, n in zip(reps, shape) for m in (r, n)))
    return ops.reshape(wide, tuple(r * n for r, n in zip(reps, shape)))


class Pad(FunctionNode):
    """y = x within a frame of one value; gx = the part of gy within the frame"""

    def __init__(self, widths: list[tuple[int, int]], value: Any) -> None:
        self.widths = widths
        self.value = value

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        x = xs[0]
        if not np.isscalar(self.value):
            y = get_array_module(x).pad(x, self.widths, constant_values=self.value)
            return (channels_last(y) if are_images(x) else y,)
        y = full_as(x, tuple(a + n + b for n, (a, b) in zip(x.shape, self.widths)), x.dtype, self.value)
        y[self._inside(x.shape)] = x
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...]) -> tuple[Any, ...]:
        return (ops.getitem(gys[0], self._inside(self.inputs[0].shape)),)

    def _inside(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for n, (a, _) in zip(shape, self.widths))


def pad(x: Any, pad_width: Any, mode: str, **keywords: Any) -> Any:
    """x within a frame; ``pad_width``: a number, (before, after), or a pair for each axis.

    ``mode``: 'constant', with ``constant_values`` as in :func:`numpy.pad`: one number (default 0), (before, after),
    or a pair for each axis.
    """
    x = as_variable(x)
    value = keywords.pop("constant_values", 0)
    if mode != "constant" or keywords:
        raise expected("pad", "mode", "'constant' with constant_values", f"{mode!r}, {keywords or value}")
    try:
        widths = [(operator.index(a), operator.index(b)) for a, b in np.broadcast_to(pad_width, (x.ndim, 2))]
    except ValueError:
        raise expected("pad", "pad_width", f"a number, a pair or {x.ndim} pairs", repr(pad_width)) from None
    return Pad(widths, value).apply((x,))[0]


# ---- copies ---------------------------------------------------------------------------------------------------------


def cast(x: Any, typ: Any) -> Any:
    """x in another floating-point type; x itself if it has that type.

    Args:
        x: array or Variable of a floating type.
        typ: the new type, a name or a NumPy dtype.
    """
    return ops.cast(as_variable(x), as_dtype(typ))


class Copy(FunctionNode):
    """y = x on another device, or a copy on its own; gx = gy on the device of x"""

    def __init__(self, device: Any) -> None:
        self.device = device

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.source = device_of(xs[0])
        if self.source == self.device:
            return (elementwise(lambda x: x.copy(), xs[0]),)
        return (to_device(xs[0], self.device),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...]) -> tuple[Any, ...]:
        gy = gys[0]
        return (Copy(self.source).apply((gy,))[0] if isinstance(gy, Variable) else to_device(gy, self.source),)


def copy(x: Any, dst: Any) -> Any:
    """A copy of x on device ``dst``: a Device, its name, or a GPU's number (-1: host).

    Args:
        x: array or Variable.
        dst: the device: a Device, its name, or the number of a GPU, -1 for the host.
    """
    return Copy(get_device(dst)).apply((x,))[0]


def identity(*inputs: Any) -> Any:
    """The inputs as they are.

    Args:
        inputs: arrays or Variables.
    """
    outputs = tuple(as_variable(x) for x in inputs)
    return outputs[0] if len(outputs) == 1 else outputs
