"""What small steps do to arrays of the host, as NumPy's calls: where dbrdist is not compiled, and what the loops of
``small_loops.pyx`` leave over.

N examples, K classes or columns. ``spread`` is the index that makes a vector an operand beside an (N, K) array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dbrdist.core.array.backend import number
from dbrdist.core.array.types import Array

# by name: to find them in NumPy again takes a tenth of their time on a small batch; and operators take more than these
_add, _divide, _multiply, _subtract, _where = np.add, np.divide, np.multiply, np.subtract, np.where
_sum = np.add.reduce
_float32 = np.dtype(np.float32)
_zero = number(0.0, _float32)
SMALL_LOSS = 0.125  # in float32 it has 6 digits, the logarithm of a sum less than one more
THIRD, FIFTH, SEVENTH = 1 / 3, 1 / 5, 1 / 7
_SMALL = 1024  # elements for which new memory takes less time than finding some


def rows_times(x: Array, W: Array, b: Array | None, spread: Array | slice) -> Array:
    """x W^T + b of x (N, I), W (K, I) and b (K,), or without b."""
    y: Array = x.dot(W.T)
    if b is not None:
        _add(y, b[spread], y)
    return y


def turned_times(a: Array, b: Array, out: Array | None = None) -> Array:
    """a^T b of a (N, K) and b (N, M), in ``out`` where that is given."""
    y: Array = a.T.dot(b, out)
    return y


times = np.ndarray.dot  # a b of a (N, K) and b (K, M)
weighted_rows = np.ndarray.dot  # the sum of the rows of b (N, K), each times its element of a (N,); in a third argument


def masked(y: Array, gy: Array) -> Array:
    """0 where y, the output of a ReLU, is 0, whatever gy is there; else gy. Both of one shape and type."""
    dtype = gy.dtype
    return _where(y, gy, _zero if dtype is _float32 else number(0.0, dtype))


def masked_images(y: Array, gy: Array) -> Array:
    """:func:`masked` of (N, C, H, W) in one layout, which the result keeps."""
    gx = gy * (y != 0)  # choosing by a random mask takes six times as long as multiplying
    return _where(y, gy, _zero) if has_nan(gx) else gx  # 0 times what is not finite is NaN


def has_nan(a: Array) -> bool:
    """True if there is NaN, which counts as the largest: a third of the time of comparing elements with themselves."""
    if a.dtype.char not in "fd" or not a.size:
        return not (a == a).all()
    row = a.ravel("K")
    largest = row.item(row.argmax())
    return bool(largest != largest)


def are_classes(t: Array, num_classes: int) -> bool:
    """Whether all of the integers t (N,), N > 0, are from 0 to K - 1.

    The places of the extremes are found in a fifth of the time of the extremes themselves.
    """
    return bool(t.item(t.argmin()) >= 0 and t.item(t.argmax()) < num_classes)


def below_largest(
    x: Array, t: Array, starts: Array, spread: Array | tuple[slice | None, ...]
) -> tuple[Array, Array, Array]:
    """x (N, K) less the largest of each row; where the labels t (N,) lie in it, as flat places; and what is there.

    ``starts`` are the places where the rows start.
    """
    largest = x.take(_add(x.argmax(1), starts))  # a fifth of the time of x.max(1)
    below = _subtract(x, largest[spread])
    at = _add(t, starts)
    return below, at, below.take(at)


def divide_by_sums(p: Array, spread: Array | tuple[slice | None, ...]) -> Array:
    """p (N, K) becomes p over the sums of its rows (N,), which are returned; one does not depend on other rows."""
    total: Array = _sum(p, 1)
    _divide(p, total[spread], p)
    return total


def mean_cross_entropy(logs: Array, below: Array, p: Array, weights: Array) -> Array:
    """The mean of the losses (N,), which replace ``logs``: ln of a row's sum, less the score ``below`` the largest.

    p (N, K) are the shares, ``weights`` N of 1 / N. If the mean is small, small losses get all their digits: they are
    -ln(1 - the sum of the other shares), as the ln of 1 + 1e-9 is 0 in float32.
    """
    y = np.empty((), p.dtype)
    losses = _subtract(logs, below, logs)
    losses.dot(weights, y)
    if y.item() < SMALL_LOSS:
        others = p * (p < 0.5)
        if p.dtype.itemsize == 8:
            np.copyto(losses, -np.log1p(-np.minimum(np.add.reduce(others, 1), 0.5)), where=losses < SMALL_LOSS)
            losses.dot(weights, y)
        else:
            np.copyto(losses, _in_float64(others), casting="same_kind", where=losses < SMALL_LOSS)
            y[...] = np.add.accumulate(losses, 0, np.float64)[-1] / len(losses)
    return y


def _in_float64(others: Array) -> Array:
    """-ln(1 - s) of the sum s of each row, to 1e-10 where it is under 0.125: 2 artanh(s / (2 - s)), in four terms.

    A loop in C repeats it bit for bit; of NumPy's sums only ``accumulate`` is from left to right.
    """
    share = np.add.accumulate(others, 1, np.float64)[:, -1]
    half = _divide(share, 2.0 - share)
    square = _multiply(half, half)
    terms = _multiply(square, SEVENTH)
    for term in (FIFTH, THIRD):
        _add(terms, term, terms)
        _multiply(terms, square, terms)
    _multiply(_add(terms, 1.0, terms), half, terms)
    return _add(terms, terms, terms)


def cross_entropy_gradient(p: Array, at: Array, gy: Array, scale: Array) -> Array:
    """p gy scale, less gy scale at the places ``at``; gy and scale are of one element."""
    scaled = _multiply(gy, scale, np.empty((), p.dtype))  # an array: a scalar takes twice the time in what follows
    gx = _multiply(p, scaled)
    gx.put(at, _subtract(gx.take(at), scaled))
    return gx


def scale_sum(terms: Sequence[Array], scale: Array, out: Array) -> None:
    """out becomes the sum of two or more terms, added in their order, times a number in an array of 0 axes."""
    _add(terms[0], terms[1], out)
    for term in terms[2:]:
        _add(out, term, out)
    _multiply(out, scale, out)


def momentum_sgd(p: Array, g: Array, v: Array, workspace: Callable[[Array], Array], lr: float, momentum: float) -> None:
    """v becomes momentum v - lr g, and p becomes p + v; ``workspace(g)`` has room for one term, if g is not small."""
    dtype = v.dtype
    w = workspace(g) if g.size > _SMALL else None
    _multiply(v, number(momentum, dtype), v)  # for a small network operators take a quarter more
    _subtract(v, _multiply(g, number(lr, dtype), w), v)
    _add(p, v, p)
