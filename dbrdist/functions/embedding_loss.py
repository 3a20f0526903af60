"""Losses on a network's outputs: distances between embeddings, covariances between features.

N examples, K, L and M features. Distances and covariances of 16-bit types are computed in float32.
"""

from __future__ import annotations

import math
import operator
from typing import Annotated, Any, TypeAlias

import numpy as np

from dbrdist.core.array.backend import Array, accumulation_dtype, get_array_module
from dbrdist.core.array.sums import square_sum
from dbrdist.core.names.limits import count, margins, not_negative, number, within
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import expected, floating, one_of
from dbrdist.core.tape.elementwise_table import together
from dbrdist.core.tape.function_node import FunctionNode
from dbrdist.core.tape.variable import Operand, Variable, as_array, as_variable
from dbrdist.functions.loss import check_labels, same_shapes
from dbrdist.functions.rectifier import relu

Margin: TypeAlias = Annotated[float, margins, "How much further apart than others those of another class should be."]


def _embeddings(function: str, reduce: str, **xs: Operand) -> tuple[Variable, ...]:
    """The arguments as Variables of one shape (N, K)."""
    one_of(function, "reduce", ("mean", "no"), reduce)
    variables = same_shapes(function, **xs)
    if variables[0].ndim != 2:
        raise expected(function, next(iter(xs)), "shape (N, K)", variables[0])
    return variables


def _squared_distances(a: Variable, b: Variable) -> Variable:
    """|a - b|^2 for each row (N, K), in the wider type"""
    difference = ops.sub(a, b)
    return ops.sum(ops.power(ops.cast(difference, accumulation_dtype(difference.dtype)), 2), 1)


def _finished(losses: Variable, reduce: str, like: Variable) -> Variable:
    """One loss for each example, or their mean (0 for none), in the type of ``like``."""
    if reduce == "mean":
        losses = ops.div(ops.sum(losses), float(max(losses.shape[0], 1)))
    return ops.cast(losses, like.dtype)


def _margin(margin: float | Variable, like: Variable) -> float | Variable:
    """A number, or a Variable, which may be learned, in the type of ``like``."""
    return ops.cast(margin, like.dtype) if isinstance(margin, Variable) else float(margin)


def contrastive(x0: Operand, x1: Operand, y: Operand, margin: Margin = 1, reduce: str = "mean") -> Variable:
    """(y d^2 + (1 - y) max(margin - d, 0)^2) / 2, d the distance between the rows (Hadsell et al. 2006).

    x0, x1 (N, K); y (N,) integers, 1 for a pair that belongs together and 0 for another. The gradient of d is 0 where
    two rows are equal. ``reduce``: 'mean' over N, or 'no' for one loss per pair.

    Args:
        x0: vectors (N, K).
        x1: vectors (N, K).
        y: integers (N,): 1 for pairs of one class, 0 for others.
        margin: distance that others should have, > 0; default 1. A Variable gets its gradient.
        reduce: 'mean' for one number, 'no' for one loss per element; default 'mean'.

    Example:
        >>> F.contrastive(np.array([[3.0, 4.0]]), np.zeros((1, 2)), np.array([1])).array
        array(12.5)
    """
    within(contrastive, margin=margin)
    x0, x1 = _embeddings("contrastive", reduce, x0=x0, x1=x1)
    y = as_array(y)
    if getattr(y, "shape", None) != x0.shape[:1] or y.dtype.kind not in "iub":
        raise expected("contrastive", "y", f"integers of shape {x0.shape[:1]}, 1 for a similar pair, else 0", y)
    check_labels("contrastive", "y", y, 0)
    squares = _squared_distances(x0, x1)
    is_zero = squares.array == 0
    distances = ops.where(is_zero, 0.0, ops.sqrt(ops.where(is_zero, 1.0, squares)))
    lacking = ops.power(relu(ops.sub(_margin(margin, distances), distances)), 2)
    similar = y.astype(squares.dtype)
    losses = ops.mul(ops.add(ops.mul(squares, similar), ops.mul(lacking, 1 - similar)), 0.5)
    return _finished(losses, reduce, x0)


def triplet(
    anchor: Operand, positive: Operand, negative: Operand, margin: Margin = 0.2, reduce: str = "mean"
) -> Variable:
    """max(|anchor - positive|^2 - |anchor - negative|^2 + margin, 0) for each row (Schroff et al. 2015).

    All (N, K). ``reduce``: 'mean' over N, or 'no' for one loss per row.

    Args:
        anchor: vectors (N, K).
        positive: vectors of the same class (N, K).
        negative: vectors of another class (N, K).
        margin: how much nearer the positive ones should be, > 0; default 0.2. A Variable gets its gradient.
        reduce: 'mean' for one number, 'no' for one loss per element; default 'mean'.

    Example:
        >>> F.triplet(np.zeros((1, 2)), np.zeros((1, 2)), np.array([[0.3, 0.4]])).array
        array(0.)
    """
    within(triplet, margin=margin)
    anchor, positive, negative = _embeddings("triplet", reduce, anchor=anchor, positive=positive, negative=negative)
    excess = ops.sub(_squared_distances(anchor, positive), _squared_distances(anchor, negative))
    return _finished(relu(ops.add(excess, _margin(margin, excess))), reduce, anchor)


def _deviations(function: str, reduce: str, **xs: Any) -> tuple[Variable, ...]:
    """Features (N, K) less their means over N, in the wider type."""
    one_of(function, "reduce", ("half_squared_sum", "no"), reduce)
    variables = together(function, **xs)
    for name, x in zip(xs, variables):
        if x.ndim != 2 or x.shape[0] != variables[0].shape[0]:
            rows = "N" if x is variables[0] else variables[0].shape[0]
            raise expected(function, name, f"shape ({rows}, number of features)", x)
    wide = [ops.cast(x, accumulation_dtype(x.dtype)) for x in variables]
    return tuple(ops.sub(x, ops.mean(x, 0)) for x in wide)


def _half_squared_sum(covariance: Variable, reduce: str, like: Any) -> Variable:
    if reduce == "half_squared_sum":
        covariance = ops.mul(ops.sum(ops.power(covariance, 2)), 0.5)
    return ops.cast(covariance, like.dtype)


def cross_covariance(y: Operand, z: Operand, reduce: str = "half_squared_sum") -> Variable:
    """Half the sum of the squared covariances between two groups of features (Cheung et al. 2014).

    Args:
        y: the first features, shape (N, L).
        z: the second features, shape (N, M).
        reduce: 'half_squared_sum', or 'no' for the covariances themselves, shape (L, M), with 1 / N.

    Example:
        >>> F.cross_covariance(np.array([[0.0], [2.0]]), np.array([[0.0], [4.0]]), reduce="no").array
        array([[2.]])
    """
    a, b = _deviations("cross_covariance", reduce, y=y, z=z)
    covariance = ops.mul(ops.matmul(ops.swap(a), b), 1 / max(a.shape[0], 1))
    return _half_squared_sum(covariance, reduce, y)


def decov(h: Operand, reduce: str = "half_squared_sum") -> Variable:
    """Half the sum of the squared covariances between different features (Cogswell et al. 2015).

    Args:
        h: features, shape (N, K).
        reduce: 'half_squared_sum', or 'no' for the covariances themselves, shape (K, K), with 1 / N and 0 on the
            diagonal.

    Example:
        >>> F.decov(np.array([[0.0, 0.0], [2.0, 4.0]])).array
        array(4.)
    """
    (a,) = _deviations("decov", reduce, h=h)
    y = _covariances(a) if reduce == "no" else SquaredCovariances().apply((a,))[0]
    return ops.cast(y, h.dtype)


def _covariances(a: Operand) -> Operand:
    """a^T a / N with 0 on the diagonal, for a (N, K)."""
    xp, num_features = get_array_module(a), a.shape[1]
    c = ops.matmul(ops.swap(ops.mul(a, 1 / max(a.shape[0], 1))), a)
    if isinstance(c, Variable):
        return ops.mul(c, 1 - xp.eye(num_features, dtype=a.dtype))
    i = xp.arange(num_features)
    c[i, i] = 0
    return c


class SquaredCovariances(FunctionNode):
    """y = half the sum of c^2, c = a^T a / N with 0 on the diagonal; ga = 2 a c gy / N"""

    gives_new = True

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0,))
        self.c = _covariances(xs[0])
        flat = self.c.reshape(-1)
        return (get_array_module(flat).asarray(square_sum(flat) * 0.5, flat.dtype),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        (a,) = self.retained_inputs()
        c = _covariances(a) if self._on_variables else self.c
        return (ops.mul(ops.matmul(a, c), ops.mul(gys[0], 2 / max(a.shape[0], 1))),)


def discriminative_margin_based_clustering_loss(
    embeddings: Operand,
    labels: Operand,
    delta_v: Annotated[float, not_negative, "How far pixels may lie from the mean of their object."],
    delta_d: Annotated[float, not_negative, "Half of how far means of objects have to lie apart."],
    max_embedding_dim: Annotated[int, count, "Number of objects."],
    norm: int = 1,
    alpha: Annotated[float, number, "Factor of the variance loss."] = 1.0,
    beta: Annotated[float, number, "Factor of the distance loss."] = 1.0,
    gamma: Annotated[float, number, "Factor of the regularization loss."] = 0.001,
) -> tuple[Variable, ...]:
    """Losses that pull the embeddings of one object's pixels together and those of two objects apart.

    Args:
        embeddings: an embedding of each pixel, shape (N, C, H, W).
        labels: the number of the object at each pixel, integers (N, H, W), the same shape without C; 1 to
            ``max_embedding_dim`` are objects, all else is background.
        delta_v: how far pixels may lie from the mean of their object.
        delta_d: half of how far the means of two objects of an image have to lie apart.
        max_embedding_dim: the number of objects; Chainer wants as many as channels.
        norm: 1 or 2, the norm that measures distances.
        alpha, beta, gamma: factors of the three losses.

    Returns:
        Variance loss, distance loss and regularization loss:

        - max(|e - mean| - delta_v, 0)^2, averaged over the pixels of an object number in all images, then over numbers;
        - max(2 delta_d - |mean - mean'|, 0)^2, averaged over the pairs of objects that are in one image;
        - |mean|, averaged over images and object numbers.

    De Brabandere et al. 2017.

    Example:
        >>> x, labels = np.zeros((1, 2, 1, 2)), np.array([[[0, 1]]])
        >>> variance, distance, size = F.discriminative_margin_based_clustering_loss(x, labels, 0.5, 1.5, 2)
        >>> variance.array
        array(0.)
    """
    name = "discriminative_margin_based_clustering_loss"
    floating(name, embeddings=embeddings)
    embeddings, labels = as_variable(embeddings), as_array(labels)
    if embeddings.ndim < 3:
        raise expected(name, "embeddings", "shape (N, C, H, W)", embeddings)
    n, c, *sizes = embeddings.shape
    if getattr(labels, "shape", None) != (n, *sizes) or labels.dtype.kind not in "iu":
        raise expected(name, "labels", f"integers of shape {(n, *sizes)}", labels)
    if norm not in (1, 2):
        raise expected(name, "norm", "1 or 2", str(norm))
    within(
        discriminative_margin_based_clustering_loss, delta_v=delta_v, delta_d=delta_d,
        max_embedding_dim=max_embedding_dim, alpha=alpha, beta=beta, gamma=gamma,
    )  # fmt: skip
    xp, k = get_array_module(labels), operator.index(max_embedding_dim)
    numbers = xp.arange(1, k + 1).reshape(1, -1, 1)
    masks = (labels.reshape(n, 1, -1) == numbers).astype(accumulation_dtype(embeddings.dtype))  # N K P
    counts = masks.sum(2, keepdims=True)
    e = ops.reshape(ops.cast(embeddings, masks.dtype), (n, c, math.prod(sizes)))
    means = ops.mul(ops.matmul(masks, ops.swap(e)), 1 / xp.maximum(counts, 1))  # N K C
    own = ops.matmul(ops.swap(means), masks)  # N C P: the mean of each pixel's object
    far = relu(ops.sub(_length(ops.sub(own, e), 1, norm), float(delta_v)))
    weights = (masks / xp.maximum(counts.sum(0), 1)).sum(1) / k  # N P
    variance = ops.sum(ops.mul(ops.mul(far, far), weights))
    losses = (variance, alpha), (_means_apart(means, counts[..., 0] > 0, delta_d, norm), beta), (
        ops.div(ops.sum(_length(means, 2, norm)), float(max(n * k, 1))), gamma,
    )  # fmt: skip
    return tuple(ops.cast(ops.mul(loss, float(factor)), embeddings.dtype) for loss, factor in losses)


def _means_apart(means: Variable, is_there: Array, delta_d: float, norm: int) -> Variable:
    """How much too close the means (N, K, C) of objects are that are in one image."""
    n, k, c = means.shape
    xp = get_array_module(is_there)
    distances = _length(ops.sub(ops.reshape(means, (n, k, 1, c)), ops.reshape(means, (n, 1, k, c))), 3, norm)
    pairs = (is_there[:, :, None] & is_there[:, None]) & (xp.arange(k)[:, None] < xp.arange(k))
    close = relu(ops.sub(2 * float(delta_d), distances))
    return ops.div(ops.sum(ops.where(pairs, ops.mul(close, close), close.dtype.type(0))), _at_least_one(pairs))


def _at_least_one(pairs: Array) -> np.generic:
    return pairs.sum().clip(1, None).astype("d")


def _length(v: Variable, axis: int, norm: int) -> Variable:
    """The norm along an axis; the gradient of a Euclidean one is 0 at 0."""
    if norm == 1:
        return ops.sum(ops.absolute(v), axis)
    squares = ops.sum(ops.mul(v, v), axis)
    is_zero = as_array(squares) == 0
    return ops.where(is_zero, squares.dtype.type(0), ops.sqrt(ops.where(is_zero, squares.dtype.type(1), squares)))
