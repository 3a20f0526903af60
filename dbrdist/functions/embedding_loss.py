"""Losses of what a network makes of its inputs: distances between embeddings, covariances between features.

N examples, K, L and M features. Distances and covariances of 16-bit types are computed in float32.
"""

from __future__ import annotations

from typing import Any

from dbrdist.core import ops
from dbrdist.core.backend import accumulation_dtype, get_array_module
from dbrdist.core.checks import expected, one_of
from dbrdist.core.rows import together
from dbrdist.core.variable import as_array
from dbrdist.functions.activation import relu
from dbrdist.functions.loss import check_labels, same_shapes


def _embeddings(function: str, margin: float, reduce: str, **xs: Any) -> tuple[Any, ...]:
    """The arguments as Variables of one shape (N, K)."""
    one_of(function, "reduce", ("mean", "no"), reduce)
    if not margin > 0:
        raise expected(function, "margin", "a number above 0", margin)
    variables = same_shapes(function, **xs)
    if variables[0].ndim != 2:
        raise expected(function, next(iter(xs)), "shape (N, K)", variables[0])
    return variables


def _squared_distances(a: Any, b: Any) -> Any:
    """|a - b|^2 for each row (N, K), in the wider type"""
    difference = ops.sub(a, b)
    return ops.sum(ops.power(ops.cast(difference, accumulation_dtype(difference.dtype)), 2), 1)


def _finished(losses: Any, reduce: str, like: Any) -> Any:
    """One loss for each example, or their mean (0 for none), in the type of ``like``."""
    if reduce == "mean":
        losses = ops.div(ops.sum(losses), float(max(losses.shape[0], 1)))
    return ops.cast(losses, like.dtype)


def contrastive(x0: Any, x1: Any, y: Any, margin: float = 1, reduce: str = "mean") -> Any:
    """(y d^2 + (1 - y) max(margin - d, 0)^2) / 2, d the distance between the rows (Hadsell et al. 2006).

    x0, x1 (N, K); y (N,) integers, 1 for a pair that belongs together and 0 for another. The gradient of d is 0 where
    two rows are equal. ``reduce``: 'mean' over N, or 'no' for one loss per pair.
    """
    x0, x1 = _embeddings("contrastive", margin, reduce, x0=x0, x1=x1)
    y = as_array(y)
    if getattr(y, "shape", None) != x0.shape[:1] or y.dtype.kind not in "iub":
        raise expected("contrastive", "y", f"integers of shape {x0.shape[:1]}, 1 for a similar pair, else 0", y)
    check_labels("contrastive", "y", y, 0)
    squares = _squared_distances(x0, x1)
    is_zero = squares.array == 0
    distances = ops.where(is_zero, 0.0, ops.sqrt(ops.where(is_zero, 1.0, squares)))
    lacking = ops.power(relu(ops.sub(float(margin), distances)), 2)
    similar = y.astype(squares.dtype)
    losses = ops.mul(ops.add(ops.mul(squares, similar), ops.mul(lacking, 1 - similar)), 0.5)
    return _finished(losses, reduce, x0)


def triplet(anchor: Any, positive: Any, negative: Any, margin: float = 0.2, reduce: str = "mean") -> Any:
    """max(|anchor - positive|^2 - |anchor - negative|^2 + margin, 0) for each row (Schroff et al. 2015).

    All (N, K). ``reduce``: 'mean' over N, or 'no' for one loss per row.
    """
    anchor, positive, negative = _embeddings(
        "triplet", margin, reduce, anchor=anchor, positive=positive, negative=negative
    )
    excess = ops.sub(_squared_distances(anchor, positive), _squared_distances(anchor, negative))
    return _finished(relu(ops.add(excess, float(margin))), reduce, anchor)


def _deviations(function: str, reduce: str, **xs: Any) -> tuple[Any, ...]:
    """Features (N, K) less their means over N, in the wider type."""
    one_of(function, "reduce", ("half_squared_sum", "no"), reduce)
    variables = together(function, **xs)
    for name, x in zip(xs, variables):
        if x.ndim != 2 or x.shape[0] != variables[0].shape[0]:
            rows = "N" if x is variables[0] else variables[0].shape[0]
            raise expected(function, name, f"shape ({rows}, number of features)", x)
    wide = [ops.cast(x, accumulation_dtype(x.dtype)) for x in variables]
    return tuple(ops.sub(x, ops.mean(x, 0, True)) for x in wide)


def _half_squared_sum(covariance: Any, reduce: str, like: Any) -> Any:
    if reduce == "half_squared_sum":
        covariance = ops.mul(ops.sum(ops.power(covariance, 2)), 0.5)
    return ops.cast(covariance, like.dtype)


def cross_covariance(y: Any, z: Any, reduce: str = "half_squared_sum") -> Any:
    """Half the sum of the squared covariances between the features of y (N, L) and of z (N, M) (Cheung et al. 2014).

    ``reduce='no'`` gives the covariances (L, M) themselves, with 1 / N.
    """
    a, b = _deviations("cross_covariance", reduce, y=y, z=z)
    covariance = ops.mul(ops.matmul(ops.swap(a), b), 1 / max(a.shape[0], 1))
    return _half_squared_sum(covariance, reduce, y)


def decov(h: Any, reduce: str = "half_squared_sum") -> Any:
    """Half the sum of the squared covariances between different features of h (N, K) (Cogswell et al. 2015).

    ``reduce='no'`` gives the covariances (K, K) themselves, with 1 / N and 0 on the diagonal.
    """
    (a,) = _deviations("decov", reduce, h=h)
    num_rows, num_features = a.shape
    diagonal = get_array_module(a.array).eye(num_features, dtype=a.dtype)
    elsewhere = (1 - diagonal) / max(num_rows, 1)
    return _half_squared_sum(ops.mul(ops.matmul(ops.swap(a), a), elsewhere), reduce, h)
