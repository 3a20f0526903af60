"""What large-scale image classification measures and minimises beside the cross entropy of softmax.

N examples, K classes; t are integer labels, shape (N,), or weights of the classes, shape (N, K).
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from dbrdist.core.array.backend import Array, accumulation_dtype, get_array_module, is_floating
from dbrdist.core.array.config import config
from dbrdist.core.names.limits import count, decay, within
from dbrdist.core.tape import ops
from dbrdist.core.tape.call import variable
from dbrdist.core.tape.checks import expected, floating
from dbrdist.core.tape.variable import Operand, Variable, as_array, as_variable
from dbrdist.functions.loss import bernoulli
from dbrdist.functions.scores import see_targets, warn_of_other_labels


def binary_cross_entropy(
    x: Operand,
    t: Operand,
    *,
    label_smoothing: Annotated[float, decay, "Fraction of each label's weight that is spread over all classes."] = 0.0,
    threshold: Annotated[
        float | None,
        decay,
        "Targets above this count as 1 and others as 0, after smoothing: all classes of a mixed image count as whole.",
    ] = None,
    sum_classes: Annotated[
        bool, "Whether the losses of an image's classes are added up; otherwise it is their mean."
    ] = False,
) -> Variable:
    """Binary cross entropy of sigmoid(x) and the targets of each class, -t ln sigmoid(x) - (1 - t) ln sigmoid(-x).

    Args:
        x: scores, shape (N, K).
        t: integer labels, shape (N,), or weights of the classes from 0 to 1, shape (N, K), as mixup makes them. Takes
            no gradient.
        label_smoothing: from 0 to 1; this part of each target is spread evenly over all K classes.
        threshold: targets become 1 where they are above it, else 0, after smoothing: every class that is in a mixed
            image counts as whole (Wightman et al. 2021, arXiv 2110.00476).
        sum_classes: sum over classes and take the mean over examples; by default it is the mean over both.

    Example:
        >>> F.binary_cross_entropy(np.array([[0.0]]), np.array([[1.0]])).array.round(4)
        np.float64(0.6931)
    """
    floating("binary_cross_entropy", x=x)
    x, t = as_variable(x), as_array(t)
    see_targets("binary_cross_entropy", "t", t)
    if x.ndim != 2:
        raise expected("binary_cross_entropy", "x", "shape (N, K)", x)
    within(binary_cross_entropy, label_smoothing=label_smoothing, threshold=threshold)
    dtype = accumulation_dtype(x.dtype)
    targets = _weights("binary_cross_entropy", x, t).astype(dtype)
    if label_smoothing:
        targets = targets * dtype.type(1 - label_smoothing) + dtype.type(label_smoothing / x.shape[1])
    if threshold is not None:
        targets = (targets > threshold).astype(dtype)
    total = ops.sum(bernoulli(Variable(targets, requires_grad=False), ops.cast(x, dtype)))
    number = x.shape[0] if sum_classes else x.size
    return ops.cast(ops.div(total, float(max(number, 1))), x.dtype)


def _weights(function: str, x: Variable, t: Array) -> Array:
    """The weights of the classes: one-hot rows for integer labels."""
    num_examples, num_classes = x.shape
    if t.shape == x.shape and is_floating(t.dtype):
        return t
    if t.dtype.kind not in "iu" or t.shape != (num_examples,):
        raise expected(function, "t", f"integer labels of shape ({num_examples},), or weights of shape {x.shape}", t)
    xp = get_array_module(t)
    if t.size and (xp is np or config.debug) and not 0 <= int(t.min()) <= int(t.max()) < num_classes:
        raise expected(function, "t", f"labels from 0 to {num_classes - 1}", f"labels from {t.min()} to {t.max()}")
    return xp.arange(num_classes, dtype=t.dtype) == t[:, None]


def top_k_accuracy(
    y: Operand, t: Operand, k: Annotated[int, count, "How many of the most likely classes count."] = 5
) -> Variable:
    """The fraction of labels that are among the k classes with the highest scores.

    A class of equal score counts as higher if its number is lower, as with :func:`accuracy`. An example whose label has
    the score NaN is a miss.

    Args:
        y: scores, shape (N, K).
        t: integer labels, shape (N,), or weights of the classes (N, K), whose largest marks the label.
        k: how many classes are looked at, 1 or more.

    Returns:
        A 0-d Variable in the type of y, from 0 to 1, without a gradient; 0 if there are no examples.

    Raises:
        ValueError: y or t has another shape, or k is no whole number of 1 or more.

    Example:
        >>> F.top_k_accuracy(np.array([[0.5, 0.3, 0.2]]), np.array([1]), k=2)
        variable(1.0)
    """
    y, t = as_array(y), as_array(t)
    if y.ndim != 2 or not is_floating(y.dtype):
        raise expected("top_k_accuracy", "y", "scores of shape (N, K)", y)
    within(top_k_accuracy, k=k)
    if t.shape == y.shape and is_floating(t.dtype):
        t = t.argmax(axis=1)
    if t.dtype.kind not in "iu" or t.shape != y.shape[:1]:
        raise expected("top_k_accuracy", "t", f"integer labels of shape ({y.shape[0]},), or weights of {y.shape}", t)
    warn_of_other_labels("top_k_accuracy", t, y.shape[1], None)
    xp = get_array_module(y)
    is_own = xp.arange(y.shape[1]) == t[:, None].astype(np.int64)
    own = xp.where(is_own, y, y.dtype.type(0)).sum(axis=1, keepdims=True).astype(y.dtype)
    before = xp.arange(y.shape[1]) < t[:, None].astype(np.int64)
    num_higher = ((y > own) | ((y == own) & before) | xp.isnan(y)).sum(axis=1)
    hits = (num_higher < k) & is_own.any(axis=1) & ~xp.isnan(own[:, 0])
    return variable(xp.asarray(xp.count_nonzero(hits) / max(len(t), 1), y.dtype), False)
