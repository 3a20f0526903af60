"""The maximum or minimum over axes, as a node."""

from __future__ import annotations

import math

import numpy as np

from dbrdist import kernels
from dbrdist.core.array.backend import Array
from dbrdist.core.array.elementwise import elementwise
from dbrdist.core.tape import ops
from dbrdist.core.tape.function_node import FunctionNode
from dbrdist.core.tape.variable import as_array

_SHORT_AXIS = 8  # elements
_MANY = 1 << 12  # elements of all, from which on more calls cost less than they save


def _is_same(x: Array, y: Array) -> Array:
    """x == y, and NaN is NaN."""
    return (x == y) | ((x != x) & (y != y))


class Extremum(FunctionNode):
    """y = the maximum or minimum over axes; every element that equals it gets the gradient"""

    def __init__(self, name: str, axis: tuple[int, ...] | None, keepdims: bool) -> None:
        self.name = name
        self.axis = axis
        self.keepdims = keepdims
        self.y: Array | None = (
            None  # with the reduced axes, where a compiled loop takes x and y in the place of ``chosen``
        )

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        x = xs[0]
        y = self._of_rows(x)
        if y is not None:
            self.retain_inputs((0,))
            self.y = y
        elif self._is_short(x):
            y = self._fold(x)
        else:
            y = getattr(x, self.name)(axis=self.axis, keepdims=True)
            self.chosen = elementwise(_is_same, x, y)
        axes = tuple(range(x.ndim)) if self.axis is None else self.axis
        self.kept_shape = y.shape
        return (y if self.keepdims else y.reshape([n for i, n in enumerate(x.shape) if i not in axes]),)

    def _of_rows(self, x: Array) -> Array | None:
        """The extremum over the last axes, by a compiled loop; None where NumPy has to do."""
        axes = range(x.ndim) if self.axis is None else sorted(self.axis)
        lead = x.ndim - len(axes)
        if not axes or axes[0] != lead or not x.size:
            return None
        made = kernels.of_rows(f"{self.name}_of_rows", (x,), math.prod(x.shape[lead:]))
        return None if made is None else made[0].reshape(*x.shape[:lead], *(1,) * len(axes))

    def _gradient_of_rows(self, x: Array, y: Array, gy: Array) -> Array | None:
        made = kernels.of_rows("extremum_backward", (x, y.ravel(), gy.ravel()), x.size // y.size)
        return None if made is None else made[0].reshape(x.shape)

    def _is_short(self, x: Array) -> bool:
        """Whether there are few elements along the last axis, which NumPy's reductions visit one by one."""
        is_last = self.axis is not None and len(self.axis) == 1 and self.axis[0] == x.ndim - 1
        return is_last and type(x) is np.ndarray and 1 < x.shape[-1] <= _SHORT_AXIS and x.size > _MANY and x.ndim != 4

    def _fold(self, x: Array) -> Array:
        """The extremum along a short last axis, as NumPy's: element by element of the axis over all others."""
        larger = np.maximum if self.name == "max" else np.minimum
        y = larger(x[..., 0], x[..., 1])
        for i in range(2, x.shape[-1]):
            larger(y, x[..., i], out=y)
        self.chosen = np.empty(x.shape, bool)
        for i in range(x.shape[-1]):
            self.chosen[..., i] = _is_same(x[..., i], y)
        return y[..., None]

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        gy = ops.reshape(gys[0], self.kept_shape)
        if self.y is not None:
            x = as_array(self.retained_inputs()[0])
            gx = None if self._on_variables else self._gradient_of_rows(x, self.y, gy)
            if gx is not None:
                return (gx,)
            self.chosen = elementwise(_is_same, x, self.y)
        if not self._on_variables and type(gy) is np.ndarray and self._is_short(self.chosen):
            gx = np.empty(self.chosen.shape, gy.dtype)
            for i in range(gx.shape[-1]):
                gx[..., i] = np.where(self.chosen[..., i], gy[..., 0], gy.dtype.type(0))
            return (gx,)
        gy = ops.broadcast_to(gy, self.chosen.shape)
        return (ops.where(self.chosen, gy, gy.dtype.type(0)),)
