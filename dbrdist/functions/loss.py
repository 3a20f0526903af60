"""Losses.

N examples, K classes, D further axes; t are the targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from numpy import ndarray

from dbrdist.core.array.backend import Array, accumulation_dtype, get_array_module, is_floating
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.config import config
from dbrdist.core.array.elementwise import elementwise
from dbrdist.core.array.gpu.mixed_devices import refuse_mixed
from dbrdist.core.array.sums import square_sum
from dbrdist.core.names.limits import distances, share, threshold, within
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import UnknownOptionError, expected, floating, one_of, wrong_type
from dbrdist.core.tape.elementwise_table import row, together
from dbrdist.core.tape.function_node import FunctionNode
from dbrdist.core.tape.variable import Operand, Variable, as_array, as_variable
from dbrdist.core.usage.mistakes import refuse
from dbrdist.functions.activation import sigmoid, softplus
from dbrdist.functions.class_loss import LabelCrossEntropy as LabelCrossEntropy
from dbrdist.functions.class_loss import MeanOverLabels as MeanOverLabels
from dbrdist.functions.class_loss import WeightedCrossEntropy as WeightedCrossEntropy
from dbrdist.functions.class_loss import softmax_cross_entropy as softmax_cross_entropy
from dbrdist.functions.math import (
    clipped,
    maximum,
    squared_difference,
)
from dbrdist.functions.scores import see_scores


def same_shapes(function: str, **xs: Any) -> tuple[Variable, ...]:
    """The arguments as Variables; an error unless all have the shape of the first."""
    variables = together(function, **xs)
    if as_chainer[0] and len({isinstance(x, Variable) for x in xs.values()}) == 1:
        first, *others = xs.items()
        for name, x in others:
            if x.dtype != first[1].dtype:
                raise wrong_type(function, name, f"the type {first[1].dtype} of {first[0]}", x)
    for name, x in zip(xs, variables):
        if x.shape != variables[0].shape:
            raise expected(function, name, f"shape {variables[0].shape} to match {next(iter(xs))}", x)
    return variables


def mean_of_losses(losses: Variable) -> Variable:
    """The mean of all elements; of nothing it is 0, since a rank's block of the last batch may be empty."""
    return losses.mean() if losses.size else losses.sum()


class MeanSquaredError(FunctionNode):
    """y = mean of (a - b)^2; ga = 2 (a - b) gy / size, gb = -ga."""

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1))
        difference = (xs[0] - xs[1]).ravel("K")  # any order, as it lies in memory
        dtype = difference.dtype  # of the wider operand
        difference = difference.astype(accumulation_dtype(dtype), copy=False)
        return ((square_sum(difference) / max(difference.size, 1)).astype(dtype),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        a, b = self.retained_inputs()
        scaled = ops.mul(ops.cast(gys[0], accumulation_dtype(gys[0].dtype)), 2.0 / max(a.size, 1))
        g = ops.mul(ops.sub(a, b), scaled)
        return tuple(ops.cast(ops.neg(g) if i else g, self.inputs[i].dtype) for i in wanted)


def mean_squared_error(x0: Operand, x1: Operand) -> Variable:
    """The mean of (x0 - x1)^2 over all elements, 0-d; equal shapes. Of nothing it is 0.

    Args:
        x0: array or Variable of a floating type.
        x1: array or Variable of the same shape.

    Example:
        >>> F.mean_squared_error(np.array([1.0, 5.0]), np.array([2.0, 2.0])).array
        array(5.)
    """
    return MeanSquaredError().apply(same_shapes("mean_squared_error", x0=x0, x1=x1))[0]


def mean_absolute_error(x0: Operand, x1: Operand) -> Variable:
    """The mean of |x0 - x1| over all elements, 0-d; equal shapes. Of nothing it is 0.

    Args:
        x0: array or Variable of a floating type.
        x1: array or Variable of the same shape.

    Example:
        >>> F.mean_absolute_error(np.array([1.0, 5.0]), np.array([2.0, 2.0])).array
        array(2.)
    """
    a, b = same_shapes("mean_absolute_error", x0=x0, x1=x1)
    return mean_of_losses(_distance(a, b))


def squared_error(x0: Operand, x1: Operand) -> Variable:
    """(x0 - x1)^2, elementwise; equal shapes.

    Args:
        x0: array or Variable of a floating type.
        x1: array or Variable of the same shape.

    Example:
        >>> F.squared_error(np.array([1.0, 5.0]), np.array([2.0, 2.0])).array
        array([1., 9.])
    """
    return squared_difference(*same_shapes("squared_error", x0=x0, x1=x1))


def absolute_error(x0: Operand, x1: Operand) -> Variable:
    """|x0 - x1|, elementwise; equal shapes.

    Args:
        x0: array or Variable of a floating type.
        x1: array or Variable of the same shape.

    Example:
        >>> F.absolute_error(np.array([1.0, 5.0]), np.array([2.0, 2.0])).array
        array([1., 3.])
    """
    a, b = same_shapes("absolute_error", x0=x0, x1=x1)
    return _distance(a, b)


bernoulli = row(
    "bernoulli",
    lambda p, x: np.maximum(x, 0.0) - x * p + np.log1p(np.exp(-abs(x))),
    lambda gy, x: ops.neg(ops.mul(gy, x)),
    lambda p, x: _bernoulli_slope(p, x),
    "ln(1 + exp x) - p x = -p ln sigmoid(x) - (1 - p) ln(1 - sigmoid(x)), without overflow.",
    args="p x",
)
_focal = row(
    "focal",
    lambda x, t, gamma, of_ones, of_zeros: _focal_of(x, t, gamma, of_ones, of_zeros),
    lambda x, t, gamma, of_ones, of_zeros: _focal_slope(x, t, gamma, of_ones, of_zeros),
    None,
    "-a (1 - p)^gamma ln p; where t is 1, p = sigmoid(x), a = of_ones, where t is 0, sigmoid(-x), of_zeros.",
    args="x t",
    domain=((-1.0, 1.0), (0.2, 0.8)),
    gamma=2.0,
    of_ones=0.25,
    of_zeros=0.75,
)
_distance = row(
    "distance",
    lambda a, b: np.absolute(a - b),
    lambda a, b: elementwise(np.sign, as_array(ops.sub(a, b))),
    "|a - b|; the derivative at 0 is 0.",
    args="a b",
    domain=((0.3, 1.5), (-1.5, -0.3)),
    of_difference=True,
)
_huber = row(
    "huber",
    lambda x, t, delta: _huber_of(x - t, delta),
    lambda x, t, delta: clipped(ops.sub(x, t), -delta, delta),
    "a^2 / 2 where |a| is at most delta, a = x - t, else delta (|a| - delta / 2).",
    args="x t",
    domain=(-1.5, 1.5),
    of_difference=True,
    delta=0.6,
)


def _bernoulli_slope(p: Operand, x: Operand) -> Operand:
    """sigmoid(x) - p, which keeps its digits where both are near 1: there it is 1 - p less sigmoid(-x)."""
    if isinstance(x, Variable) or isinstance(p, Variable):
        a = as_array(x)
        above = (a > 0).astype(a.dtype)
        sign = 1 - 2 * above
        return ops.add(ops.sub(above, p), ops.mul(sign, sigmoid.primitive(ops.mul(sign, x))))
    slope = (x > 0) - p
    slope += np.copysign(sigmoid.primitive(-abs(x)), 0 - x)  # 0 - x is 0 for -0, too
    return slope


def _signs_and_weights(x: Operand, t: Array, of_ones: float, of_zeros: float) -> tuple[Array, Array, Array]:
    """Where a label is ignored, 1 or -1 by label, and the weight, in the type of x."""
    number, is_one, is_ignored = x.dtype.type, t == 1, t == -1
    weight = ops.where(is_one, number(of_ones), number(of_zeros))
    return is_ignored, ops.where(is_one, number(1), number(-1)), ops.where(is_ignored, number(0), weight)


def _focal_of(x: Array, t: Array, gamma: float, of_ones: float, of_zeros: float) -> Array:
    is_ignored, sign, weight = _signs_and_weights(x, t, of_ones, of_zeros)
    score = ops.where(is_ignored, x.dtype.type(0), x) * sign  # whatever stands where the label is ignored
    return softplus.primitive(-score, 1.0) * np.exp(softplus.primitive(score, 1.0) * -gamma) * weight


def _focal_slope(x: Operand, t: Array, gamma: float, of_ones: float, of_zeros: float) -> Operand:
    """d/dx of -q^gamma ln p, p = sigmoid(x), q = 1 - p: q^gamma (gamma p ln p - q)."""
    is_ignored, sign, weight = _signs_and_weights(x, as_array(t), of_ones, of_zeros)
    score = ops.mul(ops.where(is_ignored, 0.0, x), sign)
    minus = ops.neg(score)
    ln_p = ops.neg(softplus.primitive(minus, 1.0))
    power_of_q = ops.exp(ops.mul(softplus.primitive(score, 1.0), -gamma))  # finite at each order, which q**gamma is not
    inner = ops.sub(ops.mul(ops.mul(sigmoid.primitive(score), ln_p), gamma), sigmoid.primitive(minus))
    return ops.mul(ops.mul(power_of_q, inner), ops.mul(sign, weight))


def _huber_of(a: Array, delta: float) -> Array:
    """a^2 / 2, or delta (|a| - delta / 2) beyond delta."""
    within = np.clip(a, -delta, delta)
    return within * (a - within * 0.5)


def _of_two_classes(function: str, x: Operand, t: Array | Sequence[int]) -> tuple[Variable, Array]:
    """Scores as a Variable, and labels as an array of their shape."""
    floating(function, x=x)
    x, t = as_variable(x), as_array(t)
    refuse_mixed(function, x=x, t=t)
    if getattr(t, "shape", None) != x.shape or t.dtype.kind not in "iub":
        is_float = getattr(t, "dtype", None) is not None and is_floating(t.dtype)
        hint = "cast the labels with t.astype(int), or use bernoulli_nll(t, x) for probabilities" if is_float else ""
        raise expected(function, "t", f"integers of shape {x.shape} to match x", t, hint)
    see_scores(function, x)
    return x, t


def check_labels(function: str, argument: str, t: Array, lowest: int, highest: int = 1) -> None:
    """Raise unless labels lie in these bounds; on a GPU, which a look would wait for, in debug mode alone."""
    looks = isinstance(t, ndarray) or config.debug
    if looks and t.size and (int(t.min()) < lowest or int(t.max()) > highest):
        got = f"labels from {t.min()} to {t.max()}"
        refuse(expected(function, argument, f"labels from {lowest} to {highest}", got))


def class_numbers(function: str, argument: str, t: Array, num: int, lowest: int = 0) -> Array:
    """Labels that must be from ``lowest`` to num - 1; in a program of Chainer those below count from the end."""
    if not t.size or not (isinstance(t, ndarray) or config.debug):
        return t
    low, high = int(t.min()), int(t.max())
    if lowest <= low and high < num:
        return t
    error = expected(function, argument, f"labels from {lowest} to {num - 1}", f"labels from {low} to {high}")
    if low < -num or high >= num:
        raise error
    refuse(error)
    t = t.astype("i8")
    return get_array_module(t).where(t < lowest, t + num, t)


def sigmoid_cross_entropy(x: Operand, t: Operand, normalize: bool = True, reduce: str = "mean") -> Variable:
    """-t ln sigmoid(x) - (1 - t) ln(1 - sigmoid(x)), for labels of two classes.

    Args:
        x: scores before the sigmoid, any shape.
        t: integer labels 0, 1 or -1 (ignored), in the shape of x.
        normalize: divide the sum by the number of labels that are not ignored, else by the length of axis 0.
        reduce: 'mean', or 'no' for one loss per label.

    Raises:
        ValueError: t has no integers or another shape than x.

    Example:
        >>> F.sigmoid_cross_entropy(np.array([0.0, 2.0]), np.array([1, -1])).array.round(4)
        np.float64(0.6931)
    """
    one_of("sigmoid_cross_entropy", "reduce", ("mean", "no"), reduce)
    x, t = _of_two_classes("sigmoid_cross_entropy", x, t)
    check_labels("sigmoid_cross_entropy", "t", t, -1)
    wide = accumulation_dtype(x.dtype)
    valid, scores = t != -1, ops.cast(x, wide)
    has_all = isinstance(t, ndarray) and bool(valid.all())  # a look at labels on a GPU would wait for it
    if not has_all:
        scores = ops.where(valid, scores, 0.0)  # whatever stands where the label is ignored
    losses = bernoulli(t.astype(wide), scores)
    if not has_all:
        losses = ops.mul(losses, valid.astype(wide))
    if reduce == "mean":
        xp = get_array_module(x.array)
        count = xp.maximum(valid.sum(), 1).astype(wide) if normalize else wide.type(max(len(t), 1) if t.ndim else 1)
        losses = ops.div(ops.sum(losses), count)
    return ops.cast(losses, x.dtype)


def sigmoid_focal_loss(
    x: Operand,
    t: Operand,
    alpha: Annotated[float | None, share, "Weight of label 1."] = 0.25,
    gamma: Annotated[float, threshold, "Exponent."] = 2.0,
    reduce: str = "mean",
) -> Variable:
    """-a (1 - p)^gamma ln p, with p the probability of the label: sigmoid(x) or 1 - sigmoid(x) (Lin et al. 2017).

    Args:
        x: scores before the sigmoid, any shape.
        t: integer labels 0, 1 or -1 (ignored), in the shape of x.
        alpha: the weight a of label 1, from 0 to 1; label 0 has 1 - alpha. None weighs both with 1.
        gamma: exponent from 0 on; a larger one reduces the loss of easy examples further.
        reduce: 'mean' over the labels that are not ignored, 'sum' or 'no'.

    Raises:
        ValueError: alpha or gamma is out of range, or t has no integers or another shape than x.

    Example:
        >>> F.sigmoid_focal_loss(np.array([0.0]), np.array([1]), alpha=None, gamma=0.0).array.round(4)
        np.float64(0.6931)
    """
    one_of("sigmoid_focal_loss", "reduce", ("mean", "sum", "no"), reduce)
    within(sigmoid_focal_loss, alpha=alpha, gamma=gamma)
    x, t = _of_two_classes("sigmoid_focal_loss", x, t)
    check_labels("sigmoid_focal_loss", "t", t, -1)
    wide = accumulation_dtype(x.dtype)
    of_ones, of_zeros = (1, 1) if alpha is None else (alpha, 1 - alpha)
    losses = _focal(ops.cast(x, wide), t.astype(wide), gamma, of_ones, of_zeros)
    if reduce != "no":
        losses = ops.sum(losses)
    if reduce == "mean":
        losses = ops.div(losses, get_array_module(t).maximum((t != -1).sum(), 1).astype(wide))
    return ops.cast(losses, x.dtype)


def huber_loss(
    x: Operand,
    t: Operand,
    delta: Annotated[float, distances, "Distance up to which the loss is quadratic."],
    reduce: str = "sum_along_second_axis",
) -> Variable:
    """a^2 / 2 where a = |x - t| is at most delta, else delta (a - delta / 2) (Huber 1964).

    ``reduce``: 'sum_along_second_axis' (sum over axis 1) or 'no'.

    Args:
        x: array or Variable of a floating type.
        t: targets of the same shape.
        delta: distance up to which the loss is quadratic, > 0.
        reduce: 'sum_along_second_axis', or 'no' for one loss per element; default 'sum_along_second_axis'.

    Example:
        >>> F.huber_loss(np.array([[0.5, 3.0]]), np.zeros((1, 2)), 1.0, reduce="no").array
        array([[0.125, 2.5  ]])
    """
    one_of("huber_loss", "reduce", ("sum_along_second_axis", "no"), reduce)
    within(huber_loss, delta=delta)
    x, t = same_shapes("huber_loss", x=x, t=t)
    y = _huber(x, t, delta)
    return y if reduce == "no" else ops.sum(y, 1)


def hinge(x: Operand, t: Operand, norm: str = "L1", reduce: str = "mean") -> Variable:
    """max(0, 1 - d x) summed over classes, with d = 1 at the label and -1 elsewhere.

    Args:
        x: scores, shape (N, K).
        t: integer labels, shape (N,), from 0 to K - 1.
        norm: 'L1', or 'L2' for squared terms.
        reduce: 'mean' over N, or 'no' for the terms, shape (N, K).

    Raises:
        ValueError: t does not match x, or a label is not from 0 to K - 1.

    Example:
        >>> F.hinge(np.array([[2.0, -0.5]]), np.array([0]), reduce="no").array
        array([[0. , 0.5]])
    """
    if norm not in ("L1", "L2"):
        raise UnknownOptionError("hinge", "norm", "'L1' or 'L2'", repr(norm))
    one_of("hinge", "reduce", ("mean", "no"), reduce)
    floating("hinge", x=x)
    x = as_variable(x)
    t = t.array if isinstance(t, Variable) else t
    if x.ndim != 2 or getattr(t, "shape", None) != x.shape[:1] or t.dtype.kind not in "iu":
        raise expected("hinge", "t", f"integer labels of shape {x.shape[:1]} for x of shape (N, K)", t)
    t = class_numbers("hinge", "t", t, x.shape[1])
    xp = get_array_module(x.array)
    sign = xp.where(t[:, None] == xp.arange(x.shape[1]), -1, 1).astype(x.dtype)
    y = maximum(ops.add(ops.mul(x, sign), 1.0), xp.zeros(x.shape, x.dtype))
    if norm == "L2":
        y = ops.power(y, 2)
    if reduce == "no":
        return y
    total = ops.sum(ops.cast(y, accumulation_dtype(y.dtype)))  # of 16 bits it overflows where the mean does not
    return ops.cast(ops.div(total, float(max(x.shape[0], 1))), y.dtype)
