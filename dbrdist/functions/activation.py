"""Activations."""

from __future__ import annotations

from typing import Any

from dbrdist import kernels
from dbrdist.core.backend import Array
from dbrdist.core.config import config
from dbrdist.core.fusion import MaskedGradient, Pending
from dbrdist.core.graph import BaseVariable, FunctionNode, call, get_function_hooks


class ReLU(FunctionNode):
    """y = max(x, 0). After a pending pass it is computed in that pass, and its mask may be left to that backward."""

    def __init__(self, masks_later: bool = False) -> None:
        self.masks_later = masks_later

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_outputs((0,))
        return (kernels.relu_forward(xs[0]),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        (y,) = self._ys
        gy = gys[0]
        if self.masks_later and not isinstance(gy, BaseVariable):
            return (MaskedGradient(gy, y, kernels.relu_backward),)
        return (call(ReLUGradient(y), gy),)


class ReLUGradient(FunctionNode):
    """gx = gy where y > 0, else 0; linear in gy."""

    def __init__(self, y: Array) -> None:
        self.y = y

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (kernels.relu_backward(self.y, xs[0]),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        return (call(ReLUGradient(self.y), gys[0]),)


def relu(x: Any) -> Any:
    """Rectified linear unit, y = max(x, 0), any shape (Nair and Hinton 2010)."""
    if isinstance(x, BaseVariable) and x._array.__class__ is Pending and not (config.debug or get_function_hooks()):
        pending = x._array
        y = pending.take_relu(kernels.add_relu)
        if y is not None:
            node = ReLU(pending.fuses_gradient)
            node.retain_outputs((0,))
            return node.adopt((x,), (y,))[0]
    return ReLU().apply((x,))[0]
