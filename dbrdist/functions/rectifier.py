"""The rectified linear unit, and its gradient."""

from __future__ import annotations

from typing import Any

from dbrdist import kernels
from dbrdist.core.array.backend import Array
from dbrdist.core.tape.checks import Operands
from dbrdist.core.tape.deferred import Deferred
from dbrdist.core.tape.function_node import FunctionNode, call
from dbrdist.core.tape.fusion import discreet, waiting
from dbrdist.core.tape.variable import Operand, Variable
from dbrdist.functions.rectified import MaskedGradient, SummedGradient, defer_sum, take
from dbrdist.kernels import relu_backward, relu_backward_over, relu_forward


class ReLU(FunctionNode):
    """y = max(x, 0). After a batch normalization it may exist already, and its mask is left to that backward."""

    operands = Operands("relu", x="float")
    gives_new = True
    defer_sum = staticmethod(defer_sum)
    masks_later = False  # True where the backward of the normalization applies the mask

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        y = None
        if waiting:
            y, self._for_rule = take(xs[0])
            self.masks_later = y is not None
        if y is None or self._for_rule is None:
            self._keep_outputs = (0,)
        return (relu_forward(xs[0]) if y is None else y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...]) -> tuple[Any, ...]:
        gy = gys[0]
        if self._on_variables:
            return (call(ReLUGradient(self._positive()), gy),)
        is_ours = self.owns_gy
        if type(gy) is SummedGradient and not self.masks_later:
            return (kernels.relu_backward_of_sum(self._kept_ys[0], gy.a, gy.b, gy.b if gy.is_ours else None),)
        if isinstance(gy, Deferred):
            gy, is_ours = gy.force(), True
        if self.masks_later:
            return (MaskedGradient(gy, self._masked, is_ours),)
        return ((relu_backward_over if is_ours else relu_backward)(self._kept_ys[0], gy),)

    def _positive(self) -> Array:
        """The output, or what has zeros in the same places."""
        return self._kept_ys[0] if self._for_rule is None else self._for_rule()

    def _masked(self, gy: Array) -> Array:
        return relu_backward(self._positive(), gy)


discreet[ReLU] = ReLU.forward


class ReLUGradient(FunctionNode):
    """gx = gy where y > 0, else 0; linear in gy."""

    def __init__(self, y: Array) -> None:
        self.y = y

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (relu_backward(self.y, xs[0]),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(ReLUGradient(self.y), gys[0]),)


def relu(x: Operand) -> Variable:
    """Rectified linear unit, y = max(x, 0), any shape (Nair and Hinton 2010).

    Args:
        x: array or Variable of a floating type, any shape.

    Example:
        >>> F.relu(np.array([-1.0, 2.0])).array
        array([0., 2.])
    """
    return ReLU().apply((x,))[0]
