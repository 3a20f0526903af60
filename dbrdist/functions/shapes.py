"""Shapes of arrays. Nearly all are compositions of the primitives in ``core.tape.ops``."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import expected, wrong_type
from dbrdist.core.tape.variable import Operand, Variable, as_variable


def one_axis(function: str, ndim: int, axis: int, name: str = "axis") -> int:
    if type(axis) is not int:
        whole: Any = int(axis) if isinstance(axis, (bool, np.bool_)) and as_chainer[0] else axis
        try:
            axis = operator.index(None if isinstance(whole, (bool, np.bool_)) or np.ndim(whole) else whole)
        except TypeError:
            raise wrong_type(function, name, "an int", axis) from None
    if not -ndim <= axis < ndim:
        raise expected(function, name, f"from {-ndim} to {ndim - 1}", axis)
    return axis % ndim


# ---- shape ----------------------------------------------------------------------------------------------------------


def reshape(x: Operand, shape: Any) -> Variable:
    """The same elements in another shape; one length may be -1.

    Args:
        x: array or Variable.
        shape: shape of the result.

    Example:
        >>> F.reshape(np.arange(6.0), (2, -1)).array
        array([[0., 1., 2.],
               [3., 4., 5.]])
    """
    x = as_variable(x)
    shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    try:
        return ops.reshape(x, shape)
    except ValueError:
        raise expected("reshape", "shape", f"a shape of {x.size} elements for x of shape {x.shape}", shape) from None


def transpose(x: Operand, axes: tuple[int, ...] | None = None) -> Variable:
    """The axes permuted, or reversed where None.

    Args:
        x: array or Variable.
        axes: the axes of x in their new order; None reverses them.

    Example:
        >>> F.transpose(np.array([[1.0, 2.0]])).array
        array([[1.],
               [2.]])
    """
    x = as_variable(x)
    if axes is not None:
        axes = tuple(axes)
        if sorted(a % max(x.ndim, 1) for a in axes) != list(range(x.ndim)):
            raise expected("transpose", "axes", f"each axis of x (shape {x.shape}) once", axes)
    return ops.transpose(x, axes)


def swapaxes(x: Operand, axis1: int, axis2: int) -> Variable:
    """Two axes exchanged.

    Args:
        x: array or Variable.
        axis1: an axis.
        axis2: the axis that takes its place.

    Example:
        >>> F.swapaxes(np.ones((2, 3, 4)), 0, 2).shape
        (4, 3, 2)
    """
    x = as_variable(x)
    order = list(range(x.ndim))
    i, j = one_axis("swapaxes", x.ndim, axis1, "axis1"), one_axis("swapaxes", x.ndim, axis2, "axis2")
    order[i], order[j] = j, i
    return ops.transpose(x, tuple(order))


def moveaxis(x: Operand, source: int | Sequence[int], destination: int | Sequence[int]) -> Variable:
    """Axes moved to other positions, the others in their order.

    Args:
        x: array or Variable.
        source: axis or tuple of axes to move.
        destination: where each of them goes.

    Example:
        >>> F.moveaxis(np.ones((2, 3, 4)), 0, 2).shape
        (3, 4, 2)
    """
    x = as_variable(x)
    places = [axes if isinstance(axes, (tuple, list)) else (axes,) for axes in (source, destination)]
    sources = [one_axis("moveaxis", x.ndim, a, "source") for a in places[0]]
    targets = [one_axis("moveaxis", x.ndim, a, "destination") for a in places[1]]
    if len(sources) != len(targets) or len(set(sources)) != len(sources) or len(set(targets)) != len(targets):
        raise expected("moveaxis", "destination", "as many different axes as in source", repr(destination))
    order = [a for a in range(x.ndim) if a not in sources]
    for target, source_axis in sorted(zip(targets, sources)):
        order.insert(target, int(source_axis))
    return ops.transpose(x, tuple(order))


def rollaxis(x: Operand, axis: int, start: int = 0) -> Variable:
    """One axis moved in front of axis ``start``.

    Args:
        x: array or Variable.
        axis: axis to move.
        start: axis before which it goes; default 0.

    Example:
        >>> F.rollaxis(np.ones((2, 3, 4)), 2).shape
        (4, 2, 3)
    """
    x = as_variable(x)
    axis = one_axis("rollaxis", x.ndim, axis)
    if not -x.ndim <= start <= x.ndim:
        raise expected("rollaxis", "start", f"from {-x.ndim} to {x.ndim}", start)
    start = start + x.ndim if start < 0 else start
    return moveaxis(x, axis, start - 1 if axis < start else start)


def expand_dims(x: Operand, axis: int) -> Variable:
    """A new axis of length one at ``axis``.

    Args:
        x: array or Variable.
        axis: position of the new axis of length 1.

    Example:
        >>> F.expand_dims(np.ones(3), 0).shape
        (1, 3)
    """
    x = as_variable(x)
    axis = one_axis("expand_dims", x.ndim + 1, axis)
    return ops.reshape(x, (*x.shape[:axis], 1, *x.shape[axis:]))


def squeeze(x: Operand, axis: int | Sequence[int] | None = None) -> Variable:
    """Without the axes of length one: all, or those given.

    Args:
        x: array or Variable.
        axis: axis or tuple of axes of length 1 to remove; None for all of them.

    Example:
        >>> F.squeeze(np.ones((1, 3, 1))).shape
        (3,)
    """
    x = as_variable(x)
    if axis is None:
        axes = [i for i, n in enumerate(x.shape) if n == 1]
    else:
        axes = [one_axis("squeeze", x.ndim, a) for a in ((axis,) if isinstance(axis, (int, np.integer)) else axis)]
        if any(x.shape[a] != 1 for a in axes):
            raise expected("squeeze", "axis", f"axes of length one of x of shape {x.shape}", repr(axis))
    return ops.reshape(x, tuple(n for i, n in enumerate(x.shape) if i not in axes))


def flatten(x: Operand) -> Variable:
    """All elements in one axis.

    Args:
        x: array or Variable of any shape.

    Example:
        >>> F.flatten(np.array([[1.0, 2.0], [3.0, 4.0]])).array
        array([1., 2., 3., 4.])
    """
    x = as_variable(x)
    return ops.reshape(x, (x.size,))


def broadcast(*args: Operand) -> tuple[Variable, ...]:
    """The arguments repeated to their common shape.

    Args:
        args: arrays or Variables that broadcast.

    Example:
        >>> [y.shape for y in F.broadcast(np.ones((2, 1)), np.ones(3))]
        [(2, 3), (2, 3)]
    """
    xs = tuple(as_variable(x) for x in args)
    try:
        shape = np.broadcast_shapes(*(x.shape for x in xs))
    except ValueError:
        raise expected("broadcast", "args", "shapes that broadcast", str([x.shape for x in xs])) from None
    return tuple(ops.broadcast_to(x, shape) for x in xs)


def broadcast_to(x: Operand, shape: tuple[int, ...]) -> Variable:
    """x repeated to a larger shape, without copying.

    Args:
        x: array or Variable.
        shape: shape of the result.

    Example:
        >>> F.broadcast_to(np.array([1.0, 2.0]), (2, 2)).array
        array([[1., 2.],
               [1., 2.]])
    """
    x = as_variable(x)
    shape = tuple(shape)
    lead = len(shape) - x.ndim
    if lead < 0 or any(n not in (1, m) for n, m in zip(x.shape, shape[lead:])):
        raise expected("broadcast_to", "shape", f"a shape to which {x.shape} broadcasts", shape)
    return ops.broadcast_to(x, shape)


def sum_to(x: Operand, shape: tuple[int, ...]) -> Variable:
    """x summed to a smaller shape, from which it could have been broadcast.

    Args:
        x: array or Variable.
        shape: shape of the result.

    Example:
        >>> F.sum_to(np.ones((2, 3)), (1, 3)).array
        array([[2., 2., 2.]])
    """
    x = as_variable(x)
    shape = tuple(shape)
    lead = x.ndim - len(shape)
    if lead < 0 or any(n not in (1, m) for n, m in zip(shape, x.shape[lead:])):
        raise expected("sum_to", "shape", f"a shape that broadcasts to {x.shape}", shape)
    return ops.sum_to(x, shape)
