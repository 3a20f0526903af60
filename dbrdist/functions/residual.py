"""The end of a residual block, relu(batch_normalization(x) + residual), as one function for devices."""

from __future__ import annotations

from typing import Any

from dbrdist import kernels
from dbrdist.core.array.backend import Array
from dbrdist.core.tape import ops
from dbrdist.core.tape.deferred import Deferred
from dbrdist.core.tape.function_node import call
from dbrdist.core.tape.variable import Operand, Variable
from dbrdist.functions.normalization import (
    BatchNormalization,
    BatchNormalizationGradient,
    batch_normalization,
    checked_axis,
    in_types_of_inputs,
    of_batch,
    view_of,
)
from dbrdist.functions.rectified import SummedGradient, defer_sum
from dbrdist.functions.rectifier import ReLUGradient, relu


class RectifiedSum(BatchNormalization):
    """y = max(gamma x_hat + beta + r, 0), of x, gamma, beta and r

    On a GPU the sum is never written, and backward adds the gradients of y, masks them and sums them up in one pass.
    """

    defer_sum = staticmethod(defer_sum)

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self._keep_inputs, self._keep_outputs = (0, 1), (0,)
        x, gamma, beta, added = xs
        moving = self.moving or (None, 0.0, (0.0, 0.0))
        made = kernels.bn_add_relu(x, gamma, beta, added, self.eps, self.axis, *moving)
        if made is None:
            y, self.mean, self.var, self.saved = self._normalized(x, gamma, beta, False)
            return (kernels.relu_forward(ops.add(y, added)),)
        self.has_moved, self.moving = self.moving is not None, None
        y, self.mean, self.var, self.saved = made
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any = None) -> tuple[Any, ...]:
        grads = self._gradients_on_tape(gys[0]) if self._on_variables else self._gradients(wanted, gys[0], out)
        return in_types_of_inputs(self, wanted, [grads[i] for i in wanted])

    def _gradients_on_tape(self, gy: Any) -> tuple[Any, ...]:
        g = call(ReLUGradient(self._kept_ys[0]), gy)
        return *BatchNormalizationGradient(self).apply((*self.retained_inputs(), g)), g

    def _gradients(self, wanted: tuple[int, ...], gy: Any, out: Any) -> tuple[Array, ...]:
        """The gradients of all inputs; that of r is the gradient of the sum."""
        (x, gamma), y, views = self._kept_xs, self._kept_ys[0], (view_of(out, wanted, 1), view_of(out, wanted, 2))
        gys: tuple[Array, ...] = (gy,)
        is_ours = self.owns_gy
        if type(gy) is SummedGradient:
            gys, is_ours = (gy.a, gy.b), gy.is_ours
        elif isinstance(gy, Deferred):
            gys, is_ours = (gy.force(),), True
        statistics = self.mean, self.var
        grads = kernels.bn_backward_of_sum(x, gamma, *statistics, y, gys, self.eps, self.axis, *views, is_ours)
        if grads is None:
            g = kernels.relu_backward(y, *gys) if len(gys) == 1 else kernels.relu_backward_of_sum(y, *gys)
            grads = *self.backward_kernel(x, gamma, g, *views), g
        return grads


def batch_normalization_add_relu(
    x: Operand, gamma: Operand, beta: Operand, residual: Operand, *, eps: float = 2e-5,
    running_mean: Array | None = None, running_var: Array | None = None, decay: float = 0.9, axis: Any = None,
) -> Variable:  # fmt: skip
    """``relu(batch_normalization(x, gamma, beta, ...) + residual)``: on a GPU two passes over x instead of four.

    Args:
        x: the input, (N, C, H, W) or (N, C).
        gamma, beta, eps, running_mean, running_var, decay, axis: see :func:`batch_normalization`.
        residual: what is added, in the shape and type of x; others broadcast and are added by a call of their own.
    """
    if (getattr(residual, "shape", None), getattr(residual, "dtype", None)) != (x.shape, x.dtype):
        y = batch_normalization(
            x, gamma, beta, eps=eps, running_mean=running_mean, running_var=running_var, decay=decay, axis=axis
        )
        return relu(ops.add(y, residual))
    axis = checked_axis("batch_normalization", x, gamma, axis, beta=beta)
    return of_batch(RectifiedSum(eps, axis), (x, gamma, beta, residual), running_mean, running_var, decay)
