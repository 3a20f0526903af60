"""Cross entropy of many classes.

N examples, K classes, D further axes; t are the targets.
"""

from __future__ import annotations

import operator
from typing import Annotated, Any

import numpy as np
from numpy import ndarray

from dbrdist import kernels
from dbrdist.core.array.backend import Array, accumulation_dtype, get_array_module, is_array, is_floating
from dbrdist.core.array.config import config
from dbrdist.core.array.gpu.mixed_devices import refuse_mixed
from dbrdist.core.array.sums import product_sum
from dbrdist.core.array.types import IntArray, Module
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.names.limits import decay, within
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import expected, floating, one_of
from dbrdist.core.tape.function_node import FunctionNode, call
from dbrdist.core.tape.variable import Operand, Variable, as_variable
from dbrdist.core.usage.mistakes import warn
from dbrdist.functions.activation import Softmax
from dbrdist.functions.lean_loss import lean_cross_entropy
from dbrdist.functions.math import (
    SumOfExp,
    greatest,
    log_of_sum,
    scaled_exp_difference,
    sum_of_exp,
)
from dbrdist.functions.scores import NOT_SCORES, see_scores, warn_of_one_class

_MOST_LABELS = 1 << 24  # classes whose numbers float32 holds


class LabelCrossEntropy(FunctionNode):
    """y[n, d] = -sum over k of q[n, k, d] ln softmax(x)[n, k, d] in the wider type, for integer labels t (N, D...).

    q is (1 - smoothing) at the label and smoothing / K everywhere, times the weight of the class; 0 where ``valid`` is
    False. Without smoothing it is not built. gx = softmax(x) gy sum_k q - q gy.
    """

    def __init__(self, t: Array, valid: Array, weight: Array, smoothing: float) -> None:
        self.t = t
        self.valid = valid  # shape of t, or None where all labels are
        self.weight = weight  # (K,) in the wider type, or None
        self.smoothing = smoothing

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0,))
        x = xs[0]
        xp = get_array_module(x)
        dtype, num_classes = accumulation_dtype(x.dtype), x.shape[1]
        self.shape = (*x.shape[:1], *x.shape[2:], num_classes)
        self.gives_new = x.ndim == 2
        rows = self._rows(x)
        t = self.t.reshape(-1).astype(np.int64, copy=False)
        if self.valid is not None:
            t = xp.where(self.valid.reshape(-1), t, 0)
        self.at = xp.arange(len(t)) * num_classes + t
        # Each label's weight at its class, and that of all classes.
        self.at_label = xp.full(len(t), 1 - self.smoothing, dtype)
        self.spread = dtype.type(self.smoothing / num_classes)
        if self.weight is not None:
            self.at_label *= self.weight[t]
            self.spread = self.spread * self.weight
        losses = self._losses_by_loop(rows, t)
        if losses is None:
            # ln sum exp(x) = shift + ln total, apart: of large scores the sum would be rounded by more than the loss is
            self.shift = shift = greatest(rows, (1,))
            self.sums = sum_of_exp(rows, shift, (1,))
            logs = log_of_sum(self.sums, rows, shift, (1,))
            losses = -_product(xp, self.at_label, rows.take(self.at) - shift[:, 0] - logs[:, 0])
            if self.smoothing:
                losses -= _product(xp, self.spread, rows - shift - logs).sum(axis=1)
        return (self._only_valid(losses).reshape(self.shape[:-1]),)

    def _losses_by_loop(self, rows: Array, t: IntArray) -> Array | None:
        """The losses of rows (M, K) by a compiled loop; None where it is not for them."""
        self.labels = None
        num_classes = self.shape[-1]
        if rows.dtype != np.float32 or num_classes > _MOST_LABELS or (self.smoothing and self.weight is not None):
            return None
        labels = t.astype(np.float32)
        made = kernels.of_rows("cross_entropy", (rows, labels), num_classes)
        if made is None:
            return None
        self.labels = labels
        shift, sums, at, below = made
        self.shift, self.sums = shift[:, None], sums[:, None]
        logs = log_of_sum(self.sums, rows, self.shift, (1,))[:, 0]
        losses = -_product(np, self.at_label, at - logs)
        return losses - np.float32(self.smoothing) * (below - logs) if self.smoothing else losses

    def _rows(self, x: Operand) -> Any:
        """(N, K, D...) as (M, K) in the wider type: as it lies in memory for (N, K) and for channels-last images."""
        rows = ops.transpose(x, (0, *range(2, x.ndim), 1)) if x.ndim > 2 else x
        return ops.cast(ops.reshape(rows, (self.t.size, x.shape[1])), accumulation_dtype(x.dtype))

    def _only_valid(self, rows: Operand) -> Any:
        """Zero for ignored labels, whatever stands there: of scores that are all -inf comes NaN."""
        if self.valid is None:
            return rows
        return ops.where(self.valid.reshape(-1, *(1,) * (rows.ndim - 1)), rows, 0.0)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Any, ...]:
        gy, (x,) = gys[0], self.retained_inputs()
        total = self.at_label + self.spread.sum() * (1 if self.weight is not None else self.shape[-1])
        if self._on_variables:
            return (self._derive_again(x, gy, self._only_valid(total)),)
        gy = gy.reshape(-1)
        with np.errstate(divide="ignore", invalid="ignore"):  # scores that are all -inf
            factor = (total * gy)[:, None] / self.sums
        rows, gx = self._rows(x), None
        if self.labels is not None:
            less = self.spread * gy if self.smoothing else np.zeros_like(gy, order="C")
            weight = (self.at_label + self.spread if self.smoothing else self.at_label) * gy
            numbers = self.shift[:, 0], factor[:, 0], less, self.labels, weight
            made = kernels.of_rows("cross_entropy_gradient", (rows, *numbers), self.shape[-1])
            gx = None if made is None else made[0].reshape(rows.shape)
        if gx is None:
            gx = self._gradient(scaled_exp_difference(rows, self.shift, factor), gy)
        if self.valid is not None:
            get_array_module(gx).copyto(gx, 0, where=~self.valid.reshape(-1, 1))  # a mask as an index would wait
        return (_class_second(gx.reshape(self.shape).astype(x.dtype, copy=False)),)

    def _gradient(self, gx: Array, gy: Array) -> Array:
        """gx, softmax(x) gy sum_k q, less q gy"""
        if self.smoothing and (self.weight is not None or self.valid is not None):
            gx -= self._weights() * gy[:, None]
            return gx
        rows = get_array_module(gx).arange(len(self.at))  # gx lies in any order, so that no flat view is sure
        places, weight = (rows, self.at - rows * self.shape[-1]), self.at_label
        if self.smoothing:
            weight = weight + self.spread
            labels = gx[places]
            gx -= (self.spread * gy)[:, None]
            gx[places] = labels
        gx[places] -= weight * gy
        return gx

    def _derive_again(self, x: Variable, gy: Any, total: Array) -> Any:
        """The same of Variables, whose graph holds the sums as well."""
        rows = self._only_valid(self._rows(x))  # 0 times NaN would be NaN in the next derivative
        gy = ops.reshape(gy, (len(self.at), 1))
        shift = self._only_valid(self.shift)
        sums = call(SumOfExp((1,), shift), rows)
        gx = scaled_exp_difference(rows, shift, ops.div(ops.mul(gy, total[:, None]), sums))
        gx = ops.sub(gx, ops.mul(self._weights(), gy))
        return ops.cast(_class_second(ops.reshape(gx, self.shape)), x.dtype)

    def _weights(self) -> Array:
        """q (M, K)"""
        xp = get_array_module(self.at_label)
        q = xp.zeros((len(self.at), self.shape[-1]), self.at_label.dtype)
        q.reshape(-1)[self.at] = self.at_label
        return self._only_valid(q + self.spread)


def _class_second(x: Operand) -> Any:
    """(N, D..., K) as (N, K, D...)"""
    return ops.transpose(x, (0, x.ndim - 1, *range(1, x.ndim - 1))) if x.ndim > 2 else x


def _product(xp: Module, weight: Array, logs: Array) -> Array:
    """Weights times logarithms; what has no weight adds nothing, also where the logarithm is -inf."""
    if xp is not np or not weight.all():  # a look at weights on a GPU would wait for them
        logs = xp.where(weight == 0, logs.dtype.type(0), logs)
    return weight * logs


class MeanOverLabels(FunctionNode):
    """y = mean of -ln softmax(x)[n, t_n, d] over the labels that are not ignored, on a device: one kernel each way.

    gx = (softmax(x) - onehot(t)) gy / their number. Labels on a GPU are not looked at: those of no class give NaN.
    """

    def __init__(self, t: Array, ignore_label: int, normalize: bool) -> None:
        wide = t if t.dtype in (np.int32, np.int64) else t.astype(np.int64)
        self.t = get_array_module(t).ascontiguousarray(wide.reshape(-1))
        self.ignore_label = operator.index(ignore_label)
        self.divisor = 0 if normalize else max(len(t), 1)

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0,))
        x = xs[0]
        self.gives_new = x.ndim == 2
        y, self.saved = kernels.cross_entropy(self._rows(x), self.t, self.ignore_label, self.divisor)
        return (y,)

    def _rows(self, x: Operand) -> Any:
        """(N, K, D...) as (M, K)"""
        if x.ndim > 2:
            x = ops.reshape(ops.transpose(x, (0, *range(2, x.ndim), 1)), (self.t.size, x.shape[1]))
        return x if self._on_variables else get_array_module(x).ascontiguousarray(x)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...]) -> tuple[Any, ...]:
        gy, (x,) = gys[0], self.retained_inputs()
        rows = self._rows(x)
        if self._on_variables:
            gx = self._derive_again(rows, gy)
        else:
            gx = kernels.cross_entropy_backward(rows, self.t, self.saved, gy, self.ignore_label)
        return (_class_second(ops.reshape(gx, (*x.shape[:1], *x.shape[2:], x.shape[1]))),)

    def _derive_again(self, rows: Any, gy: Any) -> Any:
        """The same of Variables."""
        scale, xp, dtype = self.saved[-1], get_array_module(self.t), accumulation_dtype(rows.dtype)
        counts = (self.t != self.ignore_label)[:, None]
        rows = ops.where(counts, ops.cast(rows, dtype), 0.0)  # 0 times NaN would be NaN in the next derivative
        onehot = self.t[:, None] == xp.arange(rows.shape[1])
        difference = ops.sub(call(Softmax(1), rows), onehot.astype(dtype))
        factor = ops.mul(ops.cast(gy, dtype), counts * scale)
        return ops.cast(ops.mul(difference, factor), self.inputs[0].dtype)


class WeightedCrossEntropy(FunctionNode):
    """y[n, d] = -sum over k of q[n, k, d] ln softmax(x)[n, k, d], as sums in the wider type; x and q (N, K, D...).

    gx = (softmax(x) sum_k q - q) gy.
    """

    gives_new = True

    def __init__(self, q: Array) -> None:
        self.q = q

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0,))
        self.sums = None
        if xs[0].ndim == 2 and xs[0].dtype == np.float32:
            made = kernels.of_rows("soft_cross_entropy", (xs[0], self.q), xs[0].shape[1])
            if made is not None:
                *self.sums, losses = made
                return (losses,)
        logs = kernels.log_softmax(xs[0].astype(self.q.dtype, copy=False), 1)
        if type(logs) is np.ndarray and logs.dtype == self.q.dtype and self.q.all():
            return (-product_sum(self.q, logs, (1,), False),)
        return (-_product(get_array_module(logs), self.q, logs).sum(axis=1),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Any, ...]:
        (x,), q = self.retained_inputs(), self.q
        if self.sums is not None and not self._on_variables:
            shift, total, shares = self.sums
            with np.errstate(divide="ignore", invalid="ignore"):
                factor = shares * gys[0] / total
            numbers = shift, factor, np.ascontiguousarray(gys[0])
            made = kernels.of_rows("soft_cross_entropy_gradient", (x, q, *numbers), x.shape[1])
            if made is not None:
                return (made[0].reshape(x.shape),)
        p = call(Softmax(1), ops.cast(x, q.dtype))
        gy = ops.reshape(gys[0], (x.shape[0], 1, *x.shape[2:]))
        if type(p) is np.ndarray and p.dtype == q.dtype == gy.dtype:  # in its place: p is as large as x, and new
            p *= q.sum(axis=1, keepdims=True)
            p -= q
            p *= gy
            return (ops.cast(p, x.dtype),)
        gx = ops.mul(ops.sub(ops.mul(p, q.sum(axis=1, keepdims=True)), q), gy)
        return (ops.cast(gx, x.dtype),)


def softmax_cross_entropy(
    x: Operand,
    t: Operand,
    normalize: bool = True,
    cache_score: bool = True,
    class_weight: Array | None = None,
    ignore_label: int | None = -1,
    reduce: str = "mean",
    enable_double_backprop: bool = False,
    soft_target_loss: str = "cross-entropy",
    *,
    label_smoothing: Annotated[float, decay, "Fraction of each label's weight that is spread over all classes."] = 0.0,
) -> Variable:
    """Cross entropy of softmax(x) and the targets, -ln softmax(x)[n, t_n].

    Args:
        x: scores, shape (N, K, D...).
        t: integer labels, shape (N, D...), or probabilities with the shape of x. Takes no gradient.
        normalize: divide the sum by the number of labels that are not ignored, else by N.
        cache_score: accepted for compatibility with Chainer, without effect.
        class_weight: shape (K,); the term of class k is multiplied by ``class_weight[k]``. Takes no gradient.
        ignore_label: labels equal to it are ignored; None ignores none.
        reduce: 'mean', or 'no' for one loss per label, shape (N, D...).
        enable_double_backprop: accepted for compatibility with Chainer; the rule is always differentiable.
        soft_target_loss: 'cross-entropy', or 'kl-divergence' with sum t ln t added; for probabilities.
        label_smoothing: from 0 to 1; this part of each label's weight is spread evenly over all K classes
            (Szegedy et al. 2016).

    Example:
        >>> F.softmax_cross_entropy(np.zeros((1, 2)), np.array([0])).array.round(4)
        np.float64(0.6931)
    """
    if type(t) is not ndarray:
        t = t.array if isinstance(t, Variable) else t
    if not isinstance(x, Variable) or type(x.node.creator_node).__name__ in NOT_SCORES:  # else in a call less
        see_scores("softmax_cross_entropy", x)
    if ignore_label is None:
        ignore_label = _NO_LABEL
    if class_weight is None and not label_smoothing and reduce == "mean" and _NO_LABEL < ignore_label < 0:
        y = lean_cross_entropy(x, t)
        if y is not None:
            return y
    refuse_mixed("softmax_cross_entropy", x=x, t=t, class_weight=class_weight)
    floating("softmax_cross_entropy", x=x)
    x = as_variable(x)
    within(softmax_cross_entropy, label_smoothing=label_smoothing)
    one_of("softmax_cross_entropy", "reduce", ("mean", "no"), reduce)
    one_of("softmax_cross_entropy", "soft_target_loss", ("cross-entropy", "kl-divergence"), soft_target_loss)
    if not is_array(t):
        raise expected("softmax_cross_entropy", "t", "an array or Variable", f"{type(t).__name__} {t!r:.40}")
    if x.ndim < 2:
        raise expected("softmax_cross_entropy", "x", "shape (N, K, ...)", x)
    if t.shape == x.shape and is_floating(t.dtype):
        if class_weight is not None:
            raise expected("softmax_cross_entropy", "t", "integer labels with class_weight", "probabilities")
        if label_smoothing:
            t = t * t.dtype.type(1 - label_smoothing) + t.dtype.type(label_smoothing / x.shape[1])
        return _of_probabilities(x, t, reduce, soft_target_loss)
    if t.dtype.kind not in "iu" or t.shape != (x.shape[0], *x.shape[2:]):
        want = f"integer labels of shape {(x.shape[0], *x.shape[2:])}, or probabilities of shape {x.shape}"
        raise expected("softmax_cross_entropy", "t", want, t, _what_was_meant(x, t))
    return _of_labels(x, t, normalize, class_weight, ignore_label, reduce, label_smoothing)


def _what_was_meant(x: Variable, t: Array) -> str:
    """What to write for labels of another type, in a column, or one-hot integers."""
    shape = (x.shape[0], *x.shape[2:])
    if t.shape == shape:
        return "write t.astype(int)" if t.dtype.kind in "bf" else ""
    if t.shape == x.shape and x.shape[1] > 1:
        return "one-hot labels are t.argmax(axis=1)"
    return "write t[:, 0]" if t.shape == (shape[0], 1, *shape[1:]) else ""


_NO_LABEL = -(1 << 31)  # nobody's label, where none is to be ignored


def _bad_labels(t: Array, num_classes: int, ignore_label: int) -> Exception:
    want = f"labels from 0 to {num_classes - 1}"
    want += f", or {ignore_label} to be ignored" if ignore_label != _NO_LABEL else ""
    return expected("softmax_cross_entropy", "t", want, f"labels from {t.min()} to {t.max()}")


def _of_labels(
    x: Any, t: Array, normalize: bool, class_weight: Array, ignore_label: int, reduce: str, smoothing: float
) -> Variable:
    """The general path: any axes, types, weights and labels to be ignored."""
    xp = get_array_module(x.array)
    num_classes, dtype = x.shape[1], accumulation_dtype(x.dtype)
    valid: Any = None
    if xp is np or config.debug:  # a look at labels on a GPU would wait for it
        valid = t != ignore_label
        known = t[valid]
        if known.size and (int(known.min()) < 0 or int(known.max()) >= num_classes):
            raise _bad_labels(known, num_classes, ignore_label)
        if num_classes == 1 and known.size:
            warn_of_one_class("softmax_cross_entropy")
    if xp is not np and class_weight is None and not smoothing and reduce == "mean" and x.size:
        return MeanOverLabels(t, ignore_label, normalize).apply((x,))[0]
    valid = t != ignore_label if valid is None else valid
    if class_weight is not None:
        if isinstance(class_weight, Variable):
            if class_weight.creator_node is not None or isinstance(class_weight, Parameter):
                warn("softmax_cross_entropy: class_weight gets no gradient; write class_weight.array if that is meant")
            class_weight = class_weight.array
        if not is_array(class_weight) or class_weight.shape != (num_classes,):
            raise expected("softmax_cross_entropy", "class_weight", f"an array of shape ({num_classes},)", class_weight)
        class_weight = class_weight.astype(dtype)
    mask = None if xp is np and valid.all() else valid
    losses = LabelCrossEntropy(t, mask, class_weight, smoothing).apply((x,))[0]
    if reduce == "no":
        return ops.cast(losses, x.dtype)
    count = xp.maximum(valid.sum(), 1).astype(dtype) if normalize else dtype.type(max(len(t), 1))
    return ops.cast(ops.div(ops.sum(losses), count), x.dtype)


def _of_probabilities(x: Variable, t: Array, reduce: str, soft_target_loss: str) -> Variable:
    q = t.astype(accumulation_dtype(x.dtype))
    losses = WeightedCrossEntropy(q).apply((x,))[0]
    if soft_target_loss == "kl-divergence":
        losses = ops.add(losses, (q * np.log(q + 1e-7)).sum(axis=1))  # Chainer's guard against ln 0
    if reduce == "mean":
        losses = ops.div(ops.sum(losses), float(max(losses.size, 1)))
    return ops.cast(losses, x.dtype)
