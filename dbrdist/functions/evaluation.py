"""Metrics, without gradient.

N examples, K classes, D further axes; t are the targets.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy import ndarray

from dbrdist.core.array.backend import accumulation_dtype, get_array_module, is_floating
from dbrdist.core.array.gpu.mixed_devices import refuse_mixed
from dbrdist.core.array.types import Array
from dbrdist.core.tape.call import variable
from dbrdist.core.tape.checks import expected
from dbrdist.core.tape.variable import Operand, Variable, as_array, as_variable
from dbrdist.core.usage.mistakes import warn
from dbrdist.functions.scores import warn_of_other_labels
from dbrdist.kernels.small_arrays.small import are_classes

_LABELS = "bhilqBHI"  # integers that int64 holds


def accuracy(y: Operand, t: Operand, ignore_label: int | None = None) -> Variable:
    """The fraction of labels whose score is the largest.

    Args:
        y: scores, shape (N, K, D...), or (N, K) with t (N, 1).
        t: integer labels, shape (N, D...), or probabilities with the shape of y, whose largest marks the label.
        ignore_label: labels equal to it do not count; None counts all.

    Returns:
        A 0-d Variable in the type of y, from 0 to 1, without a gradient; 0 if no label counts.

    Raises:
        ValueError: the shape of t does not match that of y, or t has neither integers nor the shape of y.

    Example:
        >>> F.accuracy(np.array([[2.0, 1.0], [0.0, 3.0]]), np.array([0, 0]))
        variable(0.5)
    """
    return variable(hit_fraction(as_array(y), as_array(t), ignore_label), False)


def hit_fraction(y: Any, t: Any, ignore_label: int | None = None) -> Array:
    """:func:`accuracy` of arrays, as an array."""
    is_usual = type(y) is ndarray and type(t) is ndarray and y.ndim == 2 and t.shape == y.shape[:1] and t.size > 0
    if (
        is_usual and ignore_label is None and t.dtype.char in _LABELS and are_classes(t, y.shape[1])
    ):  # the same in half the time
        return np.array((y.argmax(1) == t).tobytes().count(1) / t.size, y.dtype)
    refuse_mixed("accuracy", y=y, t=t)
    ndim, kind = y.ndim, t.dtype.kind
    if ndim > 1 and kind not in "iu" and t.shape == y.shape and is_floating(t.dtype):
        if y.shape[1] == 1:
            warn("accuracy: of one output it is always 1; for numbers pass compute_accuracy=False to L.Classifier")
        t = t.argmax(axis=1)
        kind = t.dtype.kind
    if ndim < 2 or kind not in "iu" or t.size * y.shape[1] != y.size:
        want = f"integer labels of shape {(y.shape[0], *y.shape[2:])} for y of shape {y.shape}" if y.ndim > 1 else ""
        raise expected("accuracy", "t", want or "scores y of shape (N, K, ...)", t if want else y)
    best = y.argmax(1)
    if best.shape != t.shape:
        best = best.reshape(t.shape)
    warn_of_other_labels("accuracy", t, y.shape[1], ignore_label)
    hits = best == t.astype(best.dtype)  # integers of one type compare in a third of the time
    xp = get_array_module(y)
    if ignore_label is None:
        count: Any = t.size or 1
    else:
        valid = t != ignore_label
        hits &= valid
        count = xp.maximum(valid.sum(), 1)
    return xp.asarray(xp.count_nonzero(hits) / count, y.dtype)


def binary_accuracy(y: Operand, t: Operand) -> Variable:
    """The fraction of binary labels that agree with y >= 0.

    Args:
        y: scores before the sigmoid, any shape.
        t: labels 0 and 1 in the shape of y; -1 is ignored.

    Returns:
        A 0-d Variable in the type of y, from 0 to 1, without a gradient; 0 if all labels are ignored.

    Raises:
        ValueError: t has no integers, or another shape than y.

    Example:
        >>> F.binary_accuracy(np.array([1.5, -2.0, 0.5]), np.array([1, 0, -1]))
        variable(1.0)
    """
    y, t = as_array(y), as_array(t)
    if t.shape != y.shape or t.dtype.kind not in "iu":
        raise expected("binary_accuracy", "t", f"integers of shape {y.shape} to match y", t)
    warn_of_other_labels("binary_accuracy", t, 2, -1)
    xp = get_array_module(y)
    valid = t != -1
    hits = ((y >= 0) == t) & valid
    return as_variable(xp.asarray(hits.sum() / xp.maximum(valid.sum(), 1), y.dtype))


def classification_summary(
    y: Operand, t: Operand, label_num: int | None = None, beta: float = 1.0, ignore_label: int = -1
) -> tuple[Variable, Variable, Variable, Variable]:
    """Precision, recall, F-beta score and support (the number of labels) of each class, four of shape (classes,).

    Of a class with tp hits among p predictions and s labels: precision tp / p, recall tp / s, and
    (1 + beta^2) precision recall / (beta^2 precision + recall). What would be 0 / 0 is NaN, so that the score of a
    class without a label or without a hit is NaN, as in Chainer.

    Args:
        y: scores, shape (N, K, ...); the largest is the prediction.
        t: integer labels, shape (N, ...).
        label_num: the number of classes; None for the largest label + 1. Predictions of further classes are wrong.
        beta: the weight of recall relative to precision.
        ignore_label: labels equal to it do not count.

    Example:
        >>> y, t = np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]]), np.array([0, 1, 1])
        >>> precision, recall, f1, support = F.classification_summary(y, t)
        >>> precision.array, recall.array, support.array
        (array([0.5, 1. ]), array([1. , 0.5]), array([1, 2]))
    """
    found, true, p, num = _predictions(as_array(y), as_array(t), label_num, ignore_label)
    xp = get_array_module(found)
    support, relevant, hits = (
        xp.bincount(v, minlength=num)[:num].astype(np.float64) for v in (true, found, true[found == true])
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        precise, recalled = hits / relevant, hits / support
        score = (1 + beta**2) * precise * recalled / (beta**2 * precise + recalled)
    return *(as_variable(v.astype(p)) for v in (precise, recalled, score)), as_variable(support.astype(np.int64))


_MOST_CLASSES = 1 << 24  # that are counted without a word: a wrong label would take all memory


def _predictions(y: Array, t: Array, label_num: int | None, ignore_label: int) -> tuple[Any, Any, Any, int]:
    """Predicted and true labels that count, the type of y and the number of classes."""
    name = "classification_summary"
    if y.ndim < 2 or t.dtype.kind not in "iu" or t.size * y.shape[1] != y.size:
        raise expected(name, "t", "integer labels of shape (N, ...) for scores y of shape (N, K, ...)", t)
    valid = t.reshape(-1) != ignore_label
    found, true = y.argmax(axis=1).reshape(-1)[valid] if y.size else t.reshape(-1)[valid], t.reshape(-1)[valid]
    greatest = int(true.max()) if true.size else -1
    if label_num is None and greatest >= _MOST_CLASSES:
        raise expected(name, "t", f"labels below {_MOST_CLASSES}, or label_num", f"labels up to {greatest}")
    num = greatest + 1 if label_num is None else operator.index(label_num)
    if greatest >= num or (true.size and int(true.min()) < 0):
        raise expected(name, "t", f"labels from 0 to {num - 1}, or {ignore_label}", f"{true.min()} to {greatest}")
    if label_num is None:
        warn_of_other_labels(name, t, y.shape[1], ignore_label)
    return found, true, y.dtype, num


def precision(
    y: Operand, t: Operand, label_num: int | None = None, ignore_label: int = -1
) -> tuple[Variable, Variable]:
    """The precision of each class; see :func:`classification_summary`.

    Args:
        y: scores, shape (N, K, D...).
        t: integer labels, shape (N, D...).
        label_num: the number of classes K of the result; None takes that of y.
        ignore_label: labels equal to it do not count.

    Returns:
        The precisions and the numbers of examples (support), each of shape (K,).

    Example:
        >>> precision, support = F.precision(np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]]), np.array([0, 1, 1]))
        >>> precision.array, support.array
        (array([0.5, 1. ]), array([1, 2]))
    """
    summary = classification_summary(y, t, label_num, ignore_label=ignore_label)
    return summary[0], summary[3]


def recall(y: Operand, t: Operand, label_num: int | None = None, ignore_label: int = -1) -> tuple[Variable, Variable]:
    """The recall of each class; see :func:`classification_summary`.

    Args:
        y: scores, shape (N, K, D...).
        t: integer labels, shape (N, D...).
        label_num: the number of classes K of the result; None takes that of y.
        ignore_label: labels equal to it do not count.

    Returns:
        The recalls and the numbers of examples (support), each of shape (K,).

    Example:
        >>> recall, support = F.recall(np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]]), np.array([0, 1, 1]))
        >>> recall.array, support.array
        (array([1. , 0.5]), array([1, 2]))
    """
    summary = classification_summary(y, t, label_num, ignore_label=ignore_label)
    return summary[1], summary[3]


def f1_score(y: Operand, t: Operand, label_num: int | None = None, ignore_label: int = -1) -> tuple[Variable, Variable]:
    """The harmonic mean of precision and recall of each class; see :func:`classification_summary`.

    Args:
        y: scores, shape (N, K, D...).
        t: integer labels, shape (N, D...).
        label_num: the number of classes K of the result; None takes that of y.
        ignore_label: labels equal to it do not count.

    Returns:
        The scores and the numbers of examples (support), each of shape (K,).

    Example:
        >>> score, support = F.f1_score(np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]]), np.array([0, 1, 1]))
        >>> score.array.round(3), support.array
        (array([0.667, 0.667]), array([1, 2]))
    """
    summary = classification_summary(y, t, label_num, 1.0, ignore_label)
    return summary[2], summary[3]


def r2_score(
    pred: Operand, true: Operand, sample_weight: Operand | None = None, multioutput: str = "uniform_average"
) -> Variable:
    """The coefficient of determination, 1 - sum (true - pred)^2 / sum (true - mean true)^2, over axis 0.

    Args:
        pred: predictions, shape (N, ...).
        true: targets, in the shape of ``pred``.
        sample_weight: not supported, as in Chainer: None.
        multioutput: 'uniform_average' for the mean over the further axes, or 'raw_values' for one score each. Columns
            of equal targets count as 0.

    Raises:
        ValueError: the shapes differ, or an option is unknown.

    Example:
        >>> F.r2_score(np.array([1.0, 2.0, 2.0]), np.array([1.0, 2.0, 3.0])).array
        array(0.5)
    """
    p, t = as_array(pred), as_array(true)
    if sample_weight is not None:
        raise expected("r2_score", "sample_weight", "None", sample_weight)
    if multioutput not in ("uniform_average", "raw_values"):
        raise expected("r2_score", "multioutput", "'uniform_average' or 'raw_values'", repr(multioutput))
    if p.shape != t.shape:
        raise expected("r2_score", "true", f"shape {p.shape} to match pred", t)
    xp = get_array_module(p)
    dtype = p.dtype if is_floating(p.dtype) else np.result_type(p.dtype, np.float32)
    wide = accumulation_dtype(dtype)
    p, t = p.astype(wide), t.astype(wide)
    rest = ((t - p) ** 2).sum(axis=0)
    total = ((t - t.mean(axis=0)) ** 2).sum(axis=0)
    score = xp.where(total != 0, 1 - rest / xp.where(total != 0, total, 1), 0)
    score = score if multioutput == "raw_values" else score.mean()
    return as_variable(xp.asarray(score, dtype))
