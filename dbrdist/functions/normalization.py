"""Batch normalization.

Legend: m the number of elements averaged, mu and v mean and variance over ``axis``, s = 1 / sqrt(v + eps),
x_hat = (x - mu) s. gamma, beta and all statistics have the shape of the axes that are kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from typing import Any

from dbrdist import kernels
from dbrdist.core import ops
from dbrdist.core.backend import Array, is_floating
from dbrdist.core.checks import expected
from dbrdist.core.fusion import MaskedGradient, Pending
from dbrdist.core.graph import FunctionNode

Axis = tuple[int, ...]
OnStatistics = Callable[[Array, Array], None]
_PENDING_ELEMENTS = 4096  # below, waiting for a ReLU costs more than it saves


class BatchNormalization(FunctionNode):
    """y = gamma x_hat + beta with the statistics of the batch; waits for a ReLU that may follow

    ``on_statistics(mean, var)`` is called once, with the biased variance, when they are known: at the latest when the
    output is read, backward starts, or the output is dropped.
    """

    writes = True

    def __init__(self, eps: float, axis: Axis, on_statistics: OnStatistics | None, waits: bool) -> None:
        self.eps = eps
        self.axis = axis
        self.on_statistics = on_statistics
        self.waits = waits
        self.data: tuple[Array, ...] = ()
        self.mean: Array = None
        self.var: Array = None
        self.saved: Any = None
        self.is_rectified = False  # ``saved`` has the mask of a ReLU

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1))
        self.data, x = xs, xs[0]
        if self.waits and x.size >= _PENDING_ELEMENTS:
            return (Pending(self, x.shape, x.dtype, fuses_gradient=True),)
        return (self.finish(None),)

    def finish(self, add_relu: Any) -> Array:
        """The output, rectified where a kernel is handed down; see :class:`dbrdist.core.fusion.Finisher`."""
        relu, is_first = add_relu is not None, self.mean is None
        data, self.data = self.data, ()  # a pass that fails is not tried again when this is dropped
        y, mean, var, saved = kernels.bn_forward(*data, self.eps, relu, self.axis)
        self.data = data
        if is_first or relu:
            self.mean, self.var, self.saved, self.is_rectified = mean, var, saved, relu
        if is_first and self.on_statistics is not None:
            self.on_statistics(mean, var)
        return y

    def __del__(self) -> None:
        if self.mean is None and self.data and self.on_statistics is not None and not sys.is_finalizing():
            self.finish(None)  # nobody read the output, but the running statistics count this batch

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        gy, (x, gamma) = gys[0], self.retained_inputs()
        if self._on_variables:
            grads = BatchNormalizationGradient(self).apply((x, gamma, gy))
        else:
            grads = self.backward_kernel(x, gamma, gy, _view(out, wanted, 1), _view(out, wanted, 2))
        return tuple(ops.cast(grads[i], self.inputs[i].dtype) for i in wanted)

    def backward_kernel(
        self, x: Array, gamma: Array, gy: Any, out_gamma: Array = None, out_beta: Array = None
    ) -> tuple[Array, Array, Array]:
        """Gradients of x, gamma and beta from a gradient of the output, or from one still to be masked by the ReLU."""
        masked = type(gy) is MaskedGradient
        if masked and not self.is_rectified:
            gy, masked = gy.force(), False
        gy = gy.gy if masked else gy
        statistics = (self.mean, self.var)
        return kernels.bn_backward(
            x, gamma, *statistics, gy, self.eps, self.saved, masked, self.axis, out_gamma, out_beta
        )  # fmt: skip


class BatchNormalizationGradient(FunctionNode):
    """gx = gamma s (gy - (gbeta + x_hat ggamma) / m), ggamma = sum gy x_hat, gbeta = sum gy, of x, gamma and gy

    Its own gradients follow from <u, gx> + <a, ggamma> + <b, gbeta> with respect to gy, gamma, x_hat and s.
    """

    num_outputs = 3

    def __init__(self, forward_node: BatchNormalization) -> None:
        self.forward_node = forward_node

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1, 2))
        return self.forward_node.backward_kernel(*xs)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...]) -> tuple[Any, ...]:
        node, (x, gamma, gy) = self.forward_node, self.retained_inputs()
        axis, m = node.axis, max(prod(x.shape[i] for i in node.axis), 1)
        kept = _kept_shape(x.shape, axis)

        def total(v: Any) -> Any:
            return ops.sum(v, axis, True)

        u, a, b = gys
        gamma_k = ops.reshape(gamma, kept)
        mean = ops.mul(total(x), 1.0 / m)
        centered = ops.sub(x, mean)
        s = ops.power(ops.add(ops.mul(total(ops.mul(centered, centered)), 1.0 / m), node.eps), -0.5)
        x_hat = ops.mul(centered, s)
        zero = ops.mul(gamma_k, 0.0)
        u = ops.mul(x, 0.0) if u is None else u
        a = zero if a is None else ops.reshape(a, kept)
        b = zero if b is None else ops.reshape(b, kept)
        sum_u, sum_ux, gbeta, ggamma = total(u), total(ops.mul(u, x_hat)), total(gy), total(ops.mul(gy, x_hat))
        inner = ops.add(ops.mul(gbeta, sum_u), ops.mul(ggamma, sum_ux))
        d = ops.sub(total(ops.mul(u, gy)), ops.mul(inner, 1.0 / m))  # <u, gx> = gamma s d
        scale = ops.mul(gamma_k, s)

        def of_x() -> Any:
            q = ops.add(ops.mul(gy, sum_ux), ops.mul(u, ggamma))
            q = ops.sub(ops.mul(a, gy), ops.mul(q, ops.mul(scale, 1.0 / m)))  # the gradient of x_hat
            along = ops.add(total(ops.mul(q, x_hat)), ops.mul(scale, d))  # of the scale s, with its direct share
            return ops.mul(s, ops.sub(q, ops.mul(ops.add(total(q), ops.mul(x_hat, along)), 1.0 / m)))

        def of_gy() -> Any:
            spread = ops.mul(ops.add(sum_u, ops.mul(x_hat, sum_ux)), 1.0 / m)
            return ops.add(ops.mul(scale, ops.sub(u, spread)), ops.add(ops.mul(a, x_hat), b))

        rules = (of_x, lambda: ops.reshape(ops.mul(s, d), gamma.shape), of_gy)
        return tuple(ops.cast(rules[i](), self.inputs[i].dtype) for i in wanted)


class FixedBatchNormalization(FunctionNode):
    """y = gamma x_hat + beta with given mean and variance; waits for a ReLU that may follow"""

    def __init__(self, eps: float, axis: Axis) -> None:
        self.eps = eps
        self.axis = axis
        self.data: tuple[Array, ...] = ()

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1, 3, 4))
        self.data, x = xs, xs[0]
        if x.size >= _PENDING_ELEMENTS:
            return (Pending(self, x.shape, x.dtype, fuses_gradient=False),)
        return (self.finish(None),)

    def finish(self, add_relu: Any) -> Array:
        """The output, rectified where a kernel is handed down; see :class:`dbrdist.core.fusion.Finisher`."""
        return kernels.bn_inference(*self.data, self.eps, add_relu is not None, self.axis)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...]) -> tuple[Any, ...]:
        gy, (x, gamma, mean, var) = gys[0], self.retained_inputs()
        kept, shape = _kept_shape(x.shape, self.axis), gamma.shape

        def total(v: Any) -> Any:
            return ops.reshape(ops.sum(v, self.axis, True), shape)

        s = ops.power(ops.add(var, self.eps), -0.5)
        scale = ops.mul(gamma, s)
        centered = ops.sub(x, ops.reshape(mean, kept))

        def along() -> Any:
            return total(ops.mul(gy, centered))

        rules = (
            lambda: ops.mul(gy, ops.reshape(scale, kept)),
            lambda: ops.mul(along(), s),
            lambda: total(gy),
            lambda: ops.neg(ops.mul(total(gy), scale)),
            lambda: ops.mul(ops.mul(along(), ops.mul(scale, ops.mul(s, s))), -0.5),
        )
        return tuple(ops.cast(rules[i](), self.inputs[i].dtype) for i in wanted)


def _view(out: Any, wanted: tuple[int, ...], i: int) -> Array:
    """Where the gradient of input ``i`` may be written, or None."""
    return None if out is None or i not in wanted else out[wanted.index(i)]


def _kept_shape(shape: tuple[int, ...], axis: Axis) -> tuple[int, ...]:
    return tuple(1 if i in axis else n for i, n in enumerate(shape))


def default_axis(ndim: int, num_kept: int = 1) -> Axis:
    """All axes but the ``num_kept`` after the first: what batch normalization averages over."""
    return (0, *range(num_kept + 1, ndim))


def running_update(running_mean: Array, running_var: Array, decay: float, count: int) -> Callable[[Array, Array], None]:
    """What moves running statistics in place towards those of a batch in which ``count`` elements were averaged.

    The running variance is unbiased: the batch's is multiplied by count / (count - 1). An empty batch moves nothing.
    """

    def update(mean: Array, var: Array) -> None:
        if count:
            running_mean[...] = decay * running_mean + (1 - decay) * mean
            running_var[...] = decay * running_var + (1 - decay) * (count / max(count - 1.0, 1.0)) * var

    return update


def batch_normalization(
    x: Any, gamma: Any, beta: Any, *, eps: float = 2e-5, running_mean: Array = None, running_var: Array = None,
    decay: float = 0.9, axis: Any = None,
) -> Any:  # fmt: skip
    """Normalize with the batch's own statistics (Ioffe and Szegedy 2015).

    Args:
        x: input of any shape.
        gamma, beta: scale and shift, of the shape of the axes that are kept.
        eps: added to the variance.
        running_mean, running_var: arrays that move towards the statistics of the batch, or None.
        decay: their weight of the past.
        axis: the axes to average over; None keeps as many after the first as gamma has: the channels, as a rule.
    """
    axis = checked_axis("batch_normalization", x, gamma, axis, beta=beta)
    update = None
    if running_mean is not None or running_var is not None:
        if running_mean is None or running_var is None:
            raise expected("batch_normalization", "running_mean, running_var", "both or neither", "one of them")
        count = prod(x.shape[i] for i in axis)
        update = running_update(running_mean, running_var, decay, count)
    # The caller holds the running arrays and may look at them at once, so they cannot wait.
    return BatchNormalization(eps, axis, update, waits=update is None).apply((x, gamma, beta))[0]


def fixed_batch_normalization(
    x: Any, gamma: Any, beta: Any, mean: Any, var: Any, eps: float = 2e-5, axis: Any = None
) -> Any:
    """Normalize with given mean and variance; arguments as of :func:`batch_normalization`."""
    axis = checked_axis("fixed_batch_normalization", x, gamma, axis, beta=beta, mean=mean, var=var)
    return FixedBatchNormalization(eps, axis).apply((x, gamma, beta, mean, var))[0]


def checked_axis(name: str, x: Any, gamma: Any, axis: Any, **others: Any) -> Axis:
    """The axes as a sorted tuple of numbers from 0 on; refuses shapes that do not fit them."""
    ndim = len(x.shape)
    if axis is None:
        axis = default_axis(ndim, len(gamma.shape))
    axis = tuple(sorted(a % ndim for a in ((axis,) if isinstance(axis, int) else axis)))
    kept = tuple(n for i, n in enumerate(x.shape) if i not in axis)
    if not is_floating(x.dtype):
        raise TypeError(str(expected(name, "x", "a floating type", x, "cast it first")))
    for what, a in {"gamma": gamma, **others}.items():
        if tuple(a.shape) != kept:
            raise expected(name, what, f"shape {kept} for x {tuple(x.shape)} averaged over axis {axis}", a)
    return axis
