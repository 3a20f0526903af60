"""Joining, splitting, repeating and copies of arrays, nearly all composed of the primitives in ``core.tape.ops``."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dbrdist.core.array.backend import (
    Array,
    DeviceSpec,
    as_dtype,
    device_of,
    get_device,
    to_device,
    zeros_as,
)
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.elementwise import elementwise
from dbrdist.core.array.types import PerAxis
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import expected, wrong_type
from dbrdist.core.tape.elementwise_table import matched
from dbrdist.core.tape.function_node import FunctionNode
from dbrdist.core.tape.variable import Operand, Variable, as_array, as_variable
from dbrdist.functions.picking import Diagonal as Diagonal
from dbrdist.functions.picking import OntoDiagonal as OntoDiagonal
from dbrdist.functions.picking import Permutation as Permutation
from dbrdist.functions.picking import diagonal as diagonal
from dbrdist.functions.picking import flip as flip
from dbrdist.functions.picking import fliplr as fliplr
from dbrdist.functions.picking import flipud as flipud
from dbrdist.functions.picking import get_item as get_item
from dbrdist.functions.picking import permutate as permutate
from dbrdist.functions.picking import scatter_add as scatter_add
from dbrdist.functions.picking import select_item as select_item
from dbrdist.functions.picking import where as where
from dbrdist.functions.shapes import broadcast as broadcast
from dbrdist.functions.shapes import broadcast_to as broadcast_to
from dbrdist.functions.shapes import expand_dims as expand_dims
from dbrdist.functions.shapes import flatten as flatten
from dbrdist.functions.shapes import moveaxis as moveaxis
from dbrdist.functions.shapes import one_axis
from dbrdist.functions.shapes import reshape as reshape
from dbrdist.functions.shapes import rollaxis as rollaxis
from dbrdist.functions.shapes import squeeze as squeeze
from dbrdist.functions.shapes import sum_to as sum_to
from dbrdist.functions.shapes import swapaxes as swapaxes
from dbrdist.functions.shapes import transpose as transpose

# ---- joining and splitting ------------------------------------------------------------------------------------------


def concat(xs: Sequence[Any], axis: int = 1) -> Variable:
    """The arrays one after another along an axis; the other axes agree.

    Args:
        xs: arrays or Variables whose other axes are equal.
        axis: axis along which they are joined; default 1.

    Example:
        >>> F.concat([np.zeros((1, 2)), np.ones((1, 1))]).array
        array([[0., 0., 1.]])
    """
    xs = tuple(as_variable(x) for x in matched(tuple(xs)))
    if not xs:
        raise expected("concat", "xs", "at least one array", "none")
    axis = one_axis("concat", xs[0].ndim, axis)
    rest = [n for i, n in enumerate(xs[0].shape) if i != axis]
    for k, x in enumerate(xs):
        if x.ndim != xs[0].ndim or [n for i, n in enumerate(x.shape) if i != axis] != rest:
            raise expected("concat", f"xs[{k}]", f"shape {xs[0].shape} to match xs[0] except along axis {axis}", x)
    return ops.concat(xs, axis)


def stack(xs: Sequence[Operand], axis: int = 0) -> Variable:
    """Arrays of one shape along a new axis.

    Args:
        xs: arrays or Variables of one shape.
        axis: position of the new axis; default 0.

    Example:
        >>> F.stack([np.array([1.0, 2.0]), np.array([3.0, 4.0])], axis=1).array
        array([[1., 3.],
               [2., 4.]])
    """
    xs = tuple(as_variable(x) for x in matched(tuple(xs)))
    if not xs:
        raise expected("stack", "xs", "at least one array", "none")
    for k, x in enumerate(xs):
        if x.shape != xs[0].shape:
            raise expected("stack", f"xs[{k}]", f"shape {xs[0].shape} to match xs[0]", x)
    axis = one_axis("stack", xs[0].ndim + 1, axis)
    return ops.concat(tuple(expand_dims(x, axis) for x in xs), axis)


def vstack(xs: Sequence[Operand]) -> Variable:
    """Concatenated along the first axis; vectors count as rows.

    Args:
        xs: arrays or Variables.

    Example:
        >>> F.vstack([np.array([1.0, 2.0]), np.array([3.0, 4.0])]).array
        array([[1., 2.],
               [3., 4.]])
    """
    xs = [as_variable(x) for x in matched(tuple(xs))]
    if as_chainer[0] and len({x.ndim for x in xs}) > 1:
        raise expected("vstack", "xs", "arrays with the same number of axes, as in Chainer", str([x.shape for x in xs]))
    return concat([reshape(x, (1, -1)) if x.ndim < 2 else x for x in xs], axis=0)


def hstack(xs: Sequence[Operand]) -> Variable:
    """Concatenated along the second axis; vectors along their only one.

    Args:
        xs: arrays or Variables.

    Example:
        >>> F.hstack([np.array([1.0]), np.array([2.0, 3.0])]).array
        array([1., 2., 3.])
    """
    xs = [reshape(x, (1,)) if x.ndim == 0 else x for x in map(as_variable, matched(tuple(xs)))]
    return concat(xs, axis=0 if xs and xs[0].ndim == 1 else 1)


def dstack(xs: Sequence[Operand]) -> Variable:
    """Concatenated along the third axis; (N,) counts as (1, N, 1) and (M, N) as (M, N, 1).

    Args:
        xs: arrays or Variables.

    Example:
        >>> F.dstack([np.array([1.0, 2.0]), np.array([3.0, 4.0])]).array
        array([[[1., 3.],
                [2., 4.]]])
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

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        node, axis = self.inputs[0], self.axis
        like = next(as_array(g) for g in gys if g is not None)
        pieces = []
        for i, j, g in zip(self.bounds, self.bounds[1:], gys):
            if g is None:
                g = zeros_as(like, (*node.shape[:axis], j - i, *node.shape[axis + 1 :]), node.dtype)
            pieces.append(g)
        return (ops.concat(pieces, axis),)


def split_axis(x: Operand, indices_or_sections: Any, axis: int, force_tuple: bool = True) -> Any:
    """Pieces along an axis, as a tuple.

    Args:
        x: array or Variable, any shape.
        indices_or_sections: a number of equal pieces, or the ascending indices before which to cut.
        axis: the axis along which to cut.
        force_tuple: False returns a single piece without the tuple.

    Raises:
        ValueError: the number does not divide the length of the axis, or the indices do not ascend.

    Example:
        >>> [y.array.tolist() for y in F.split_axis(np.arange(5.0), [2, 4], 0)]
        [[0.0, 1.0], [2.0, 3.0], [4.0]]
    """
    x = as_variable(x)
    axis = one_axis("split_axis", x.ndim, axis)
    length = x.shape[axis]
    try:
        sections = operator.index(indices_or_sections)
    except TypeError:
        sections = None
    if sections is not None:
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


def separate(x: Operand, axis: int = 0) -> tuple[Variable, ...]:
    """The slices along an axis, without it, as a tuple.

    Args:
        x: array or Variable.
        axis: axis that is taken apart; default 0.

    Example:
        >>> [y.array.tolist() for y in F.separate(np.array([[1.0, 2.0], [3.0, 4.0]]))]
        [[1.0, 2.0], [3.0, 4.0]]
    """
    x = as_variable(x)
    axis = one_axis("separate", x.ndim, axis)
    shape = x.shape[:axis] + x.shape[axis + 1 :]
    return tuple(ops.reshape(piece, shape) for piece in split_axis(x, x.shape[axis], axis))


# ---- repeating ------------------------------------------------------------------------------------------------------


def repeat(x: Operand, repeats: PerAxis, axis: int | None = None) -> Variable:
    """Each element repeated along an axis.

    Args:
        x: array or Variable, any shape.
        repeats: how often, a number for all or one per element of the axis.
        axis: the axis; None repeats the elements of the flattened array.

    Raises:
        ValueError: a negative number, or not one per element.

    Example:
        >>> F.repeat(np.array([1.0, 2.0]), [2, 1], axis=0).array
        array([1., 1., 2.])
    """
    x = as_variable(x)
    if axis is None or not x.ndim:
        x, axis = flatten(x), 0 if axis is None else axis
    if isinstance(axis, bool):
        raise wrong_type("repeat", "axis", "an int", axis)
    axis = one_axis("repeat", x.ndim, axis)
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


def tile(x: Operand, reps: tuple[int, ...]) -> Variable:
    """The whole array repeated, a number of times along each axis, the last first.

    Args:
        x: array or Variable.
        reps: number of repetitions, or one for each axis, the last first.

    Example:
        >>> F.tile(np.array([1.0, 2.0]), 2).array
        array([1., 2., 1., 2.])
    """
    x = as_variable(x)
    reps = tuple(map(operator.index, (reps,) if isinstance(reps, (int, np.integer)) else reps))
    if any(r < 0 for r in reps):
        raise expected("tile", "reps", "numbers from 0 on", reps)
    ndim = max(x.ndim, len(reps))
    shape = (1,) * (ndim - x.ndim) + x.shape
    reps = (1,) * (ndim - len(reps)) + reps
    split = tuple(m for n in shape for m in (1, n))
    wide = ops.broadcast_to(ops.reshape(x, split), tuple(m for r, n in zip(reps, shape) for m in (r, n)))
    return ops.reshape(wide, tuple(r * n for r, n in zip(reps, shape)))


# ---- copies ---------------------------------------------------------------------------------------------------------


def cast(x: Operand, typ: DTypeLike) -> Variable:
    """x in another floating-point type; x itself if it has that type.

    Args:
        x: array or Variable of a floating type.
        typ: the new type, a name or a NumPy dtype.

    Example:
        >>> F.cast(np.ones(2), np.float32).dtype
        dtype('float32')
    """
    return ops.cast(as_variable(x), as_dtype(typ))


class Copy(FunctionNode):
    """y = x on another device, or a copy on its own; gx = gy on the device of x"""

    def __init__(self, device: DeviceSpec) -> None:
        self.device = device

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.source = device_of(xs[0])
        if self.source == self.device:
            return (elementwise(lambda x: x.copy(), xs[0]),)
        return (to_device(xs[0], self.device),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        gy = gys[0]
        return (Copy(self.source).apply((gy,))[0] if isinstance(gy, Variable) else to_device(gy, self.source),)


def copy(x: Operand, dst: DeviceSpec) -> Variable:
    """A copy of x on device ``dst``: a Device, its name, or a GPU's number (-1: host).

    Args:
        x: array or Variable.
        dst: the device: a Device, its name, or the number of a GPU, -1 for the host.

    Example:
        >>> F.copy(np.array([1.0]), "@numpy").array
        array([1.])
    """
    return Copy(get_device(dst)).apply((x,))[0]


def identity(*inputs: Operand) -> Any:
    """The inputs as they are.

    Args:
        inputs: arrays or Variables.

    Example:
        >>> F.identity(np.array([1.0])).array
        array([1.])
    """
    outputs = tuple(as_variable(x) for x in inputs)
    return outputs[0] if len(outputs) == 1 else outputs


def __getattr__(name: str) -> Any:
    """``pad`` and its node, which had been here before they got a file of their own."""
    if name in ("Pad", "pad"):
        return getattr(importlib.import_module("dbrdist.functions.padding"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
