"""Activations."""

from __future__ import annotations

from typing import Any

import numpy as np

from dbrdist import kernels
from dbrdist.core import ops
from dbrdist.core.backend import Array, accumulation_dtype, elementwise
from dbrdist.core.checks import expected
from dbrdist.core.config import config
from dbrdist.core.fusion import MaskedGradient, Pending
from dbrdist.core.graph import BaseVariable, FunctionNode, call, get_function_hooks
from dbrdist.core.ops import Elementwise
from dbrdist.core.variable import as_variable
from dbrdist.functions.math import clip, expm1, max
from dbrdist.kernels import relu_backward, relu_forward


class ReLU(FunctionNode):
    """y = max(x, 0). After a pending pass it is computed in that pass, and its mask may be left to that backward."""

    masks_later = False  # True where the backward of the fused pass applies the mask

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self._keep_outputs = (0,)
        return (relu_forward(xs[0]),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        (y,) = self._ys
        gy = gys[0]
        if isinstance(gy, BaseVariable):
            return (call(ReLUGradient(y), gy),)
        if self.masks_later:
            return (MaskedGradient(gy, y, relu_backward),)
        return (relu_backward(y, gy),)


class ReLUGradient(FunctionNode):
    """gx = gy where y > 0, else 0; linear in gy."""

    def __init__(self, y: Array) -> None:
        self.y = y

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (relu_backward(self.y, xs[0]),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        return (call(ReLUGradient(self.y), gys[0]),)


def relu(x: Any) -> Any:
    """Rectified linear unit, y = max(x, 0), any shape (Nair and Hinton 2010)."""
    if isinstance(x, BaseVariable) and type(x._array) is Pending and not (config.debug or get_function_hooks()):
        pending = x._array
        y = pending.take_relu(kernels.add_relu)
        if y is not None:
            node = ReLU()
            node.masks_later = pending.fuses_gradient
            node.retain_outputs((0,))
            return node.adopt((x,), (y,))[0]
    return ReLU().apply((x,))[0]


class Sigmoid(Elementwise):
    """y = 1 / (1 + exp(-x)) = (1 + tanh(x / 2)) / 2, y' = y (1 - y)"""

    keep_out = (0,)
    formula = staticmethod(lambda x: np.tanh(x * x.dtype.type(0.5)) * x.dtype.type(0.5) + x.dtype.type(0.5))

    def partial(self, i: int, gy: Any) -> Any:
        y = self.retained_outputs()[0]
        return ops.mul(gy, ops.mul(y, ops.sub(1.0, y)))


def sigmoid(x: Any) -> Any:
    """Logistic function, y = 1 / (1 + exp(-x)), elementwise."""
    return Sigmoid().apply((x,))[0]


def tanh(x: Any) -> Any:
    """Hyperbolic tangent, elementwise."""
    return ops.Tanh().apply((x,))[0]


def _channels(axis: int, ndim: int) -> int:
    """The axis as it is in the N H W C view that elementwise formulas see of 4-d arrays."""
    return (0, 3, 1, 2)[axis] if ndim == 4 else axis


class Softmax(FunctionNode):
    """y = exp(x) / sum exp(x) along an axis; gx = y (gy - sum(y gy))"""

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_outputs((0,))
        axis = _channels(self.axis, xs[0].ndim)
        return (elementwise(lambda x: _softmax_array(x, axis), xs[0]),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        (y,) = self.retained_outputs()
        g = ops.mul(y, gys[0])
        return (ops.sub(g, ops.mul(y, ops.sum(g, self.axis, True))),)


def _softmax_array(x: Array, axis: int) -> Array:
    """Sums of 16-bit types run in float32, and the result is narrowed once."""
    wide = x.astype(accumulation_dtype(x.dtype), copy=False)
    p = wide - wide.max(axis=axis, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(axis=axis, keepdims=True)
    return p.astype(x.dtype, copy=False)


class LogSoftmax(FunctionNode):
    """y = x - ln sum exp(x) along an axis; gx = gy - exp(y) sum(gy)"""

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_outputs((0,))
        axis = _channels(self.axis, xs[0].ndim)
        return (elementwise(lambda x: _log_softmax_array(x, axis), xs[0]),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        (y,) = self.retained_outputs()
        return (ops.sub(gys[0], ops.mul(ops.exp(y), ops.sum(gys[0], self.axis, True))),)


def _log_softmax_array(x: Array, axis: int) -> Array:
    wide = x.astype(accumulation_dtype(x.dtype), copy=False)
    y = wide - wide.max(axis=axis, keepdims=True)
    y -= np.log(np.exp(y).sum(axis=axis, keepdims=True))
    return y.astype(x.dtype, copy=False)


def _axis_of(function: str, x: Any, axis: int) -> int:
    ndim = len(x.shape)
    if not -ndim <= axis < ndim:
        raise expected(function, "axis", f"from {-ndim} to {ndim - 1} for x of shape {x.shape}", axis)
    return axis % ndim


def softmax(x: Any, axis: int = 1) -> Any:
    """y = exp(x) / sum exp(x) along an axis, without overflow; the result sums to one along it."""
    return Softmax(_axis_of("softmax", x, axis)).apply((x,))[0]


def log_softmax(x: Any, axis: int = 1) -> Any:
    """y = x - ln sum exp(x) along an axis: the logarithm of :func:`softmax`, accurate where that is near zero."""
    return LogSoftmax(_axis_of("log_softmax", x, axis)).apply((x,))[0]


class Softplus(FunctionNode):
    """y = ln(1 + exp(beta x)) / beta = max(x, 0) + ln(1 + exp(-beta |x|)) / beta, y' = sigmoid(beta x)"""

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0,))
        beta = xs[0].dtype.type(self.beta)
        return (elementwise(lambda x: np.maximum(x, x.dtype.type(0)) + np.log1p(np.exp(-abs(x * beta))) / beta, xs[0]),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        return (ops.mul(gys[0], call(Sigmoid(), ops.mul(self.retained_inputs()[0], self.beta))),)


def softplus(x: Any, beta: float = 1.0) -> Any:
    """y = ln(1 + exp(beta x)) / beta, a smooth relu, elementwise."""
    return Softplus(beta).apply((x,))[0]


def leaky_relu(x: Any, slope: float = 0.2) -> Any:
    """x where x >= 0, else slope x, elementwise (Maas et al. 2013)."""
    x = as_variable(x)
    return ops.where(x.array >= 0, x, ops.mul(x, slope))


def prelu(x: Any, W: Any) -> Any:
    """x where x >= 0, else W x; the axes of W are those of x from 1 on (He et al. 2015)."""
    x = as_variable(x)
    stop = 1 + len(W.shape)
    if x.shape[1:stop] != tuple(W.shape):
        raise expected("prelu", "W", f"the axes of x (shape {x.shape}) from 1 on", W)
    slopes = ops.reshape(as_variable(W), (1, *W.shape, *(1,) * (x.ndim - stop)) if W.shape else ())
    return ops.where(x.array >= 0, x, ops.mul(x, slopes))


def elu(x: Any, alpha: float = 1.0) -> Any:
    """x where x >= 0, else alpha (exp(x) - 1), elementwise (Clevert et al. 2015)."""
    x = as_variable(x)
    below = expm1(clip(x, None, 0.0))  # exp of large values would overflow, and its gradient with it
    return ops.where(x.array >= 0, x, ops.mul(below, alpha))


def selu(x: Any, alpha: float = 1.6732632423543772, scale: float = 1.0507009873554805) -> Any:
    """scale times elu(x, alpha), elementwise: keeps mean 0 and variance 1 (Klambauer et al. 2017)."""
    return ops.mul(elu(x, alpha), scale)


class ClippedReLU(FunctionNode):
    """y = min(max(x, 0), z); gx = gy where 0 < x < z, else 0"""

    def __init__(self, z: float) -> None:
        self.z = z

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        z = xs[0].dtype.type(self.z)
        self.inside = elementwise(lambda x: (x > 0) & (x < z), xs[0])
        return (elementwise(lambda x: np.minimum(np.maximum(x, x.dtype.type(0)), z), xs[0]),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        return (ops.where(self.inside, gys[0], gys[0].dtype.type(0)),)


def clipped_relu(x: Any, z: float = 20.0) -> Any:
    """min(max(x, 0), z), elementwise."""
    return ClippedReLU(z).apply((x,))[0]


def relu6(x: Any) -> Any:
    """min(max(x, 0), 6), elementwise."""
    return clipped_relu(x, 6.0)


def hard_sigmoid(x: Any) -> Any:
    """0.2 x + 0.5 held between 0 and 1, elementwise."""
    return clipped_relu(ops.add(ops.mul(as_variable(x), 0.2), 0.5), 1.0)


def swish(x: Any, beta: Any) -> Any:
    """x sigmoid(beta x); the axes of beta are those of x from 1 on (Ramachandran et al. 2017)."""
    x = as_variable(x)
    beta = as_variable(beta)
    stop = 1 + beta.ndim
    if x.shape[1:stop] != beta.shape:
        raise expected("swish", "beta", f"the axes of x (shape {x.shape}) from 1 on", beta)
    aligned = ops.reshape(beta, (1, *beta.shape, *(1,) * (x.ndim - stop)) if beta.shape else ())
    return ops.mul(x, sigmoid(ops.mul(x, aligned)))


def crelu(x: Any, axis: int = 1) -> Any:
    """relu(x) and relu(-x) one after another along an axis (Shang et al. 2016)."""
    x = as_variable(x)
    return relu(ops.concat((x, ops.neg(x)), _axis_of("crelu", x, axis)))


def maxout(x: Any, pool_size: int, axis: int = 1) -> Any:
    """The maximum of each ``pool_size`` neighbours along an axis (Goodfellow et al. 2013)."""
    x = as_variable(x)
    axis = _axis_of("maxout", x, axis)
    if pool_size <= 0 or x.shape[axis] % pool_size:
        raise expected("maxout", "pool_size", f"a divisor of the {x.shape[axis]} elements along axis {axis}", pool_size)
    split = (*x.shape[:axis], x.shape[axis] // pool_size, pool_size, *x.shape[axis + 1 :])
    return max(ops.reshape(x, split), axis=axis + 1)
