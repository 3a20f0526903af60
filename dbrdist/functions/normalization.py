"""Batch normalization.

Legend: m the number of elements averaged, mu and v mean and variance over ``axis``, s = 1 / sqrt(v + eps),
x_hat = (x - mu) s. gamma, beta and all statistics have the shape of the axes that are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any
from weakref import ref

import numpy as np
from numpy import ndarray

from dbrdist import kernels
from dbrdist.core.array.backend import (
    Array,
    DType,
    accumulation_dtype,
    copy_as_it_lies,
    get_array_module,
    is_floating,
    lies_as_images,
    number,
    unwritten,
)
from dbrdist.core.array.ownership import is_private
from dbrdist.core.array.sums import parts_of_rows, sum_of_many_rows
from dbrdist.core.array.types import Destinations, PerAxis, Shape
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import Given, expected
from dbrdist.core.tape.function_node import FunctionNode, is_observed
from dbrdist.core.tape.fusion import discreet, settle, wait, waiting
from dbrdist.core.tape.node import form
from dbrdist.core.tape.variable import Operand, Variable, as_array
from dbrdist.functions.recomputed import may_be_offered, offer_normalized
from dbrdist.functions.rectified import Mask, MaskedGradient, PendingNormalization, expects_relu
from dbrdist.functions.rectifier import ReLU

Share = Callable[[Array], Array]
_LARGE = 4096  # elements; below, a ReLU costs less than looking for it
_OF_IMAGES, _OF_ROWS = (0, 2, 3), (0,)  # axes; as one expression, tuples of two lengths are an error for Cython
_add, _multiply = np.add, np.multiply


class Normalization(FunctionNode):
    """What both batch normalizations share: an output that may leave its ReLU behind (see ``functions.rectified``)

    ``key`` is the Variable gamma where that may be, else None.
    """

    rectifies = False  # whether forward computed the rectified output
    saved: Any = None  # what the kernel kept for backward
    offers = False  # whether the output may be made again for a convolution's backward

    def __init__(self, eps: float, axis: Shape, key: Parameter | None = None) -> None:
        self.eps = eps
        self.axis = axis
        self.key = key

    def taken_key(self) -> tuple[Any, bool]:
        """The key, which is good for one call, and whether a ReLU is expected."""
        key, self.key = self.key, None
        self.rectifies = key is not None and expects_relu(key, isinstance(key, Parameter))
        return key, self.rectifies

    def offered(self, key: Variable | None, y: Array, x: Array, *vectors: Array) -> Array:
        """The output for ``y``, which is rectified where that is expected: then the output is written when asked for.

        ``vectors`` are gamma, beta, mean and variance, as they are now: the caller may change them.
        """
        offers, self.offers = self.offers, False  # good for one call, as the key
        if key is None:
            return y
        if not (self.rectifies or offers):
            wait(PendingNormalization(y, ReLU, key))
            return y
        output = unwritten(y.shape, y.dtype, y) if self.rectifies else y
        as_now = kernels.bn_vectors(self.saved, *vectors)
        recipe = (ref(self), x, as_now, self.saved, self.eps, self.axis) if offers else None
        if self.rectifies:
            write = partial(_normalize, x, as_now, self.eps, self.axis)
            wait(PendingNormalization(output, ReLU, key, y, write, self.mask_for(y), recipe))
        else:
            wait(PendingNormalization(y, ReLU, key))
        if recipe is not None:
            offer_normalized(output, *recipe, False)
        return output

    def mask_for(self, y: Array) -> Mask | None:
        """What tells later where the rectified output ``y`` is not zero, if that is kept anyway."""
        return None


def _normalize(x: Array, vectors: Callable[[], Any], eps: float, axis: Shape, out: Array) -> None:
    kernels.bn_inference(x, *vectors(), eps, False, axis, out)


class BatchNormalization(Normalization):
    """y = gamma x_hat + beta with the statistics of the batch, which stay as ``mean`` and ``var`` (biased)

    See :class:`SharedBatchNormalization` for the same in parts.
    """

    writes = gives_new = True
    mean: Array
    var: Array
    moving: Any = None  # on a device: running statistics, their decay and the weights of this batch
    has_moved = False  # whether forward has moved them
    shares_x = False  # whether a convolution makes its input again from x

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self._keep_inputs = (0, 1)
        x, gamma, beta = xs
        if self.key is None:
            y, self.mean, self.var, self.saved = self._normalized(x, gamma, beta, False)
            return (y,)
        key, rectifies = self.taken_key()
        y, self.mean, self.var, self.saved = self._normalized(x, gamma, beta, rectifies)
        return (self.offered(key, y, x, gamma, beta, self.mean, self.var),)

    def _normalized(self, x: Array, gamma: Array, beta: Array, rectifies: bool) -> tuple[Array, Array, Array, Any]:
        moving, self.moving = self.moving, None
        if moving is not None:
            made = kernels.bn_forward_and_move(x, gamma, beta, self.eps, rectifies, self.axis, *moving)
            if made is not None:
                self.has_moved = True
                return made
        return kernels.bn_forward(x, gamma, beta, self.eps, rectifies, self.axis)

    def _hand_out_inputs(self) -> None:
        if waiting:
            settle()  # nobody begins from an x that may change
        if self.shares_x and self._kept_xs:  # who asks may write to it
            self.shares_x, (x, *others) = False, self._kept_xs
            self._kept_xs = (copy_as_it_lies(x), *others)
        super()._hand_out_inputs()

    def mask_for(self, y: Array) -> Mask | None:
        return kernels.bn_mask(self.saved, y.shape, y.dtype)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Destinations = None) -> tuple[Any, ...]:
        gy, is_whole = gys[0], len(wanted) == 3
        if self._on_variables:
            x, gamma = self.retained_inputs()
            grads = BatchNormalizationGradient(self).apply((x, gamma, gy))
        else:
            x, gamma = self._kept_xs
            is_ours = gy.is_ours if type(gy) is MaskedGradient else self.owns_gy
            views = out[1:] if is_whole and out is not None else (view_of(out, wanted, 1), view_of(out, wanted, 2))
            grads = self.backward_kernel(x, gamma, gy, *views, is_ours)
        return in_types_of_inputs(self, wanted, grads if is_whole else [grads[i] for i in wanted])

    def backward_kernel(
        self,
        x: Array,
        gamma: Array,
        gy: Any,
        out_gamma: Array | None = None,
        out_beta: Array | None = None,
        is_ours: bool = False,
    ) -> tuple[Array, Array, Array]:
        """Gradients of x, gamma and beta from a gradient of the output, or from one still to be masked by the ReLU.

        ``is_ours``: nobody else has ``gy``, and it may be overwritten.
        """
        masked = type(gy) is MaskedGradient
        if masked and not self.rectifies:
            gy, masked = gy.force(), False
        gy = gy.gy if masked else gy
        statistics = (self.mean, self.var)
        return kernels.bn_backward(
            x, gamma, *statistics, gy, self.eps, self.saved, masked, self.axis, out_gamma, out_beta, is_ours
        )  # fmt: skip


discreet[BatchNormalization] = BatchNormalization.forward


class SharedBatchNormalization(BatchNormalization):
    """Batch normalization of a batch of which others have further parts; for first derivatives

    ``share(a)`` adds up a vector of float64 over all parts, and is called once forward and once backward: with
    (m, m mean, m (var + mean^2)) and with (sum gy x_hat, sum gy). The gradients of gamma and beta are of this part.
    """

    def __init__(self, eps: float, axis: Shape, share: Share) -> None:
        super().__init__(eps, axis)
        self.share = share

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1))
        x, gamma, beta = xs
        xp = get_array_module(x)
        mean, var = (v.astype("d").reshape(-1) for v in kernels.bn_statistics(x, self.axis))
        m = prod(x.shape[i] for i in self.axis)
        total = self.share(xp.concatenate((xp.full(1, m, "d"), m * mean, m * (var + mean * mean))))
        self.count = max(float(total[0]), 1.0)
        mean, square = (total[1:] / self.count).reshape(2, -1)
        wide = accumulation_dtype(x.dtype)
        self.mean = mean.astype(wide).reshape(gamma.shape)
        self.var = xp.maximum(square - mean * mean, 0).astype(wide).reshape(gamma.shape)
        return (kernels.bn_inference(x, gamma, beta, self.mean, self.var, self.eps, False, self.axis),)

    def backward_kernel(
        self,
        x: Array,
        gamma: Array,
        gy: Any,
        out_gamma: Array | None = None,
        out_beta: Array | None = None,
        is_ours: bool = False,
    ) -> tuple[Array, Array, Array]:
        gy = gy.force() if type(gy) is MaskedGradient else gy
        own = kernels.bn_sums(x, self.mean, self.var, gy, self.eps, self.axis)
        xp = get_array_module(x)
        total = self.share(xp.concatenate([v.astype("d").reshape(-1) for v in own]))
        sums = [v.astype(self.mean.dtype).reshape(gamma.shape) for v in total.reshape(2, -1)]
        gx = kernels.bn_input_gradient(
            x, gamma, self.mean, self.var, gy, *sums, self.count, self.eps, self.axis
        )  # fmt: skip
        return gx, *(v.astype(gamma.dtype, copy=False) for v in own)


class BatchNormalizationGradient(FunctionNode):
    """gx = gamma s (gy - (gbeta + x_hat ggamma) / m), ggamma = sum gy x_hat, gbeta = sum gy, of x, gamma and gy

    Its own gradients follow from <u, gx> + <a, ggamma> + <b, gbeta> with respect to gy, gamma, x_hat and s.
    """

    def __init__(self, forward_node: BatchNormalization) -> None:
        self.forward_node = forward_node

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1, 2))
        return self.forward_node.backward_kernel(*xs)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Any, ...]:
        if isinstance(self.forward_node, SharedBatchNormalization):
            raise NotImplementedError("batch normalization over several parts of a batch has first derivatives only")
        terms = _SecondOrder(self.forward_node, *self.retained_inputs(), *gys)
        rules = (terms.of_x, terms.of_gamma, terms.of_gy)
        return in_types_of_inputs(self, wanted, [rules[i]() for i in wanted])


class _SecondOrder:
    """The terms of :class:`BatchNormalizationGradient`'s gradients; an object, since closures that are compiled make
    reference cycles."""

    def __init__(
        self, node: Normalization, x: Operand, gamma: Operand, gy: Operand, u: Operand | None, a: Operand | None,
        b: Operand | None,
    ) -> None:  # fmt: skip
        self.axis, self.shape = node.axis, gamma.shape
        self.m = max(prod(x.shape[i] for i in node.axis), 1)
        kept = _kept_shape(x.shape, node.axis)
        gamma = ops.reshape(gamma, kept)
        centered = ops.sub(x, self.mean(x))
        self.s = ops.power(ops.add(self.mean(ops.mul(centered, centered)), node.eps), -0.5)
        self.x_hat = ops.mul(centered, self.s)
        self.gy = gy
        self.u = ops.mul(x, 0.0) if u is None else u
        self.a, self.b = (ops.mul(gamma, 0.0) if v is None else ops.reshape(v, kept) for v in (a, b))
        self.sum_u, self.sum_ux = self.total(self.u), self.total(ops.mul(self.u, self.x_hat))
        self.ggamma = self.total(ops.mul(gy, self.x_hat))
        inner = ops.add(ops.mul(self.total(gy), self.sum_u), ops.mul(self.ggamma, self.sum_ux))
        self.d = ops.sub(self.total(ops.mul(self.u, gy)), ops.mul(inner, 1.0 / self.m))  # <u, gx> = gamma s d
        self.scale = ops.mul(gamma, self.s)

    def total(self, v: Operand) -> Any:
        return ops.sum(v, self.axis, True)

    def mean(self, v: Operand) -> Any:
        return ops.mul(self.total(v), 1.0 / self.m)

    def of_x(self) -> Operand:
        q = ops.add(ops.mul(self.gy, self.sum_ux), ops.mul(self.u, self.ggamma))
        q = ops.sub(ops.mul(self.a, self.gy), ops.mul(q, ops.mul(self.scale, 1.0 / self.m)))  # the gradient of x_hat
        along = ops.add(self.total(ops.mul(q, self.x_hat)), ops.mul(self.scale, self.d))  # of s, with its direct share
        spread = ops.mul(ops.add(self.total(q), ops.mul(self.x_hat, along)), 1.0 / self.m)
        return ops.mul(self.s, ops.sub(q, spread))

    def of_gamma(self) -> Array:
        return ops.reshape(ops.mul(self.s, self.d), self.shape)

    def of_gy(self) -> Operand:
        spread = ops.mul(ops.add(self.sum_u, ops.mul(self.x_hat, self.sum_ux)), 1.0 / self.m)
        direct = ops.add(ops.mul(self.a, self.x_hat), self.b)
        return ops.add(ops.mul(self.scale, ops.sub(self.u, spread)), direct)


class FixedBatchNormalization(Normalization):
    """y = gamma x_hat + beta with given mean and variance"""

    gives_new = True

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1, 3, 4))
        key, rectifies = self.taken_key()
        y = kernels.bn_inference(*xs, self.eps, rectifies, self.axis)
        return (self.offered(key, y, *xs),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...]) -> tuple[Any, ...]:
        gy, (x, gamma, mean, var) = gys[0], self.retained_inputs()
        gy = gy.force() if type(gy) is MaskedGradient else gy
        kept = _kept_shape(x.shape, self.axis)
        s = ops.power(ops.add(var, self.eps), -0.5)
        scale = ops.mul(gamma, s)
        gx, gbeta, along = (None,) * 3 if self._on_variables else self._by_rows(x, gy, mean, scale)
        if gx is None:
            terms = ops.mul(gy, ops.sub(x, ops.reshape(mean, kept)))
            gx = ops.mul(gy, ops.reshape(scale, kept)) if 0 in wanted else None
            gbeta, along = (self.total(v, gamma.shape) for v in (gy, terms))
        gvar = ops.mul(ops.mul(along, ops.mul(scale, ops.mul(s, s))), -0.5)
        grads = (gx, ops.mul(along, s), gbeta, ops.neg(ops.mul(gbeta, scale)), gvar)
        return in_types_of_inputs(self, wanted, [grads[i] for i in wanted])

    def _by_rows(self, x: Array, gy: Array, mean: Array, scale: Array) -> tuple[Any, Any, Any]:
        """gy scale, and the sums of gy and gy (x - mean), by a compiled loop over rows of channels; or None."""
        are_images = x.ndim == 4 and lies_as_images(x)
        axis = _OF_IMAGES if are_images else _OF_ROWS
        count, width = x.size // max(mean.size, 1), mean.size
        parts, blocks = parts_of_rows(count, width) if x.size else (0, 0)
        if self.axis != axis or type(x) is not ndarray or type(gy) is not ndarray or not parts:
            return None, None, None
        rows = [v.transpose(0, 2, 3, 1) for v in (x, gy)] if are_images else [x, gy]
        vectors = mean.ravel(), scale.ravel()
        made = kernels.of_rows("fixed_normalization_backward", (*rows, *vectors), count, width, parts, blocks)
        if made is None:
            return None, None, None
        gx = made[0].reshape(rows[0].shape)
        gbeta, along = (sum_of_many_rows(v.reshape(parts, width)).reshape(mean.shape) for v in made[1:])
        return gx.transpose(0, 3, 1, 2) if are_images else gx, gbeta, along

    def total(self, v: Operand, shape: tuple[int, ...]) -> Any:
        return ops.reshape(ops.sum(v, self.axis, True), shape)


def in_types_of_inputs(node: FunctionNode, wanted: tuple[int, ...], grads: Sequence[Operand]) -> tuple[Any, ...]:
    """Gradients in the types of their inputs."""
    nodes = node.inputs
    for i, g in zip(wanted, grads):
        if g.dtype is not nodes[i].dtype:
            return tuple([ops.cast(g, nodes[i].dtype) for i, g in zip(wanted, grads)])
    return tuple(grads)


def view_of(out: Any, wanted: tuple[int, ...], i: int) -> Array:
    """Where the gradient of input ``i`` may be written, or None."""
    return None if out is None or i not in wanted else out[wanted.index(i)]


def _kept_shape(shape: tuple[int, ...], axis: Shape) -> tuple[int, ...]:
    return tuple(1 if i in axis else n for i, n in enumerate(shape))


@lru_cache(maxsize=64)
def default_axis(ndim: int, num_kept: int = 1) -> Shape:
    """All axes but the ``num_kept`` after the first: what batch normalization averages over."""
    return (0, *range(num_kept + 1, ndim))


def _key(x: Operand, gamma: Any) -> Any:
    """gamma, where a ReLU that follows may be computed along with the normalization of x, else None."""
    if not (isinstance(x, Variable) and isinstance(gamma, Variable)) or x._array.size < _LARGE:
        return None
    return gamma if is_private(x) and not is_observed() else None


def move_running(running_mean: Array, running_var: Array, mean: Array, var: Array, decay: float, count: int) -> None:
    """Move running statistics in place towards those of a batch in which ``count`` elements were averaged.

    The running variance is unbiased: the batch's is multiplied by count / (count - 1). An empty batch moves nothing.
    """
    if not count:
        return
    weights = _weights(decay, count)
    if type(running_mean) is ndarray and running_mean.dtype == running_var.dtype == mean.dtype:
        _move(running_mean, decay, mean, weights[0])
        _move(running_var, decay, var, weights[1])
    else:
        kernels.bn_move(running_mean, running_var, mean, var, decay, weights)


def _weights(decay: float, count: int) -> tuple[float, float]:
    """Of the mean and of the biased variance of so many elements."""
    return 1 - decay, (1 - decay) * (count / max(count - 1.0, 1.0))


def _move(running: Array, decay: float, value: Array, weight: float) -> None:
    """running = decay running + weight value, of arrays of NumPy and one type; each call of it counts."""
    dtype = running.dtype
    _multiply(running, number(decay, dtype), running)
    _add(running, _multiply(value, number(weight, dtype)), running)


def batch_normalization(
    x: Operand, gamma: Operand, beta: Operand, *, eps: float = 2e-5, running_mean: Array | None = None,
    running_var: Array | None = None, decay: float = 0.9, axis: int | Sequence[int] | None = None,
) -> Variable:  # fmt: skip
    """Normalize with the batch's own statistics (Ioffe and Szegedy 2015).

    Args:
        x: input of any shape.
        gamma, beta: scale and shift, of the shape of the axes that are kept.
        eps: added to the variance.
        running_mean, running_var: arrays that move towards the statistics of the batch, or None.
        decay: their weight of the past.
        axis: the axes to average over; None keeps as many after the first as gamma has: the channels, as a rule.

    Example:
        >>> F.batch_normalization(np.array([[1.0], [3.0]]), np.ones(1), np.zeros(1), eps=0.0).array
        array([[-1.],
               [ 1.]])
    """
    axis = checked_axis("batch_normalization", x, gamma, axis, beta=beta)
    if (running_mean is None) != (running_var is None):
        raise expected("batch_normalization", "running_mean, running_var", "both or neither", "one of them")
    node = BatchNormalization(eps, axis, _key(x, gamma))
    node.offers = node.key is not None and may_be_offered(x)
    return of_batch(node, (x, gamma, beta), running_mean, running_var, decay)


def of_batch(
    node: BatchNormalization, operands: tuple[Any, ...], running_mean: Array | None, running_var: Array | None,
    decay: float,
) -> Variable:  # fmt: skip
    """The output of a normalization, towards whose statistics the running ones move, if there are any."""
    x = operands[0]
    if running_mean is not None and type(running_mean) is not ndarray and x.size:
        node.moving = (running_mean, running_var), decay, _weights(decay, x.size // (running_mean.size or 1))
    y = node.apply(operands)[0]
    if running_mean is not None and not node.has_moved:
        count = x.size // (node.mean.size or 1)  # the elements behind each mean
        move_running(running_mean, running_var, node.mean, node.var, decay, count)
    return y


def fixed_batch_normalization(
    x: Operand, gamma: Operand, beta: Operand, mean: Operand, var: Operand, eps: float = 2e-5,
    axis: int | Sequence[int] | None = None,
) -> Variable:  # fmt: skip
    """Normalize with given mean and variance, gamma (x - mean) / sqrt(var + eps) + beta, as at inference.

    Args:
        x: input, shape (N, C, D...).
        gamma, beta: factor and offset, shape (C,), or that of the axes which ``axis`` leaves.
        mean, var: statistics in the shape of gamma.
        eps: added to the variance before the root.
        axis: the axes over which the statistics were taken; None is all but those of gamma, as in
            :func:`batch_normalization`.

    Raises:
        ValueError: gamma, beta, mean and var do not match x and ``axis``.

    Example:
        >>> one = np.ones(1)
        >>> F.fixed_batch_normalization(np.array([[5.0]]), 2 * one, one, 3 * one, 4 * one, eps=0.0).array
        array([[3.]])
    """
    axis = checked_axis("fixed_batch_normalization", x, gamma, axis, beta=beta, mean=mean, var=var)
    key = _key(x, gamma) if isinstance(as_array(x), ndarray) else None  # four copies cost a GPU more than a ReLU
    return FixedBatchNormalization(eps, axis, key).apply((x, gamma, beta, mean, var))[0]


def checked_axis(name: str, x: Operand, gamma: Any, axis: Any, **others: Operand) -> Shape:
    """The axes as a sorted tuple of numbers from 0 on; refuses shapes that do not fit them."""
    if axis is not None and type(axis) is not tuple and not isinstance(axis, int):
        axis = tuple(axis)
    return _checked_axis(name, axis, form(x), ("gamma", *others), form(gamma), *map(form, others.values()))


@lru_cache(maxsize=1024)
def _checked_axis(
    name: str, axis: PerAxis | None, x: tuple[Any, DType], names: tuple[str, ...], *vectors: Any,
) -> Shape:  # fmt: skip
    """Remembered, since a network asks the same at each step; x and ``vectors`` are shapes and types."""
    shape, dtype = x
    ndim = len(shape)
    if axis is None:
        axis = default_axis(ndim, len(vectors[0][0]))
    axis = tuple(sorted(a % ndim for a in ((axis,) if isinstance(axis, int) else axis)))
    kept = tuple(n for i, n in enumerate(shape) if i not in axis)
    if not is_floating(dtype):
        raise TypeError(str(expected(name, "x", "a floating type", Given(shape, dtype), "cast it first")))
    for what, given in zip(names, vectors):
        if given[0] != kept:
            raise expected(name, what, f"shape {kept} for x {shape} averaged over axis {axis}", Given(*given))
    return axis
