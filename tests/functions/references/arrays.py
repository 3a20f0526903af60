"""Arithmetic, elementary functions, reductions, products and shapes."""

from __future__ import annotations

import math

import numpy as np

# ---- arithmetic -----------------------------------------------------------------------------------------------------


def add(*xs):
    return sum_of_list(xs)


def sum_of_list(xs):
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


def absolute(self):
    return np.sqrt(self * self)


def maximum(x1, x2):
    return np.where(x1 > x2, x1, x2)


def minimum(x1, x2):
    return np.where(x1 < x2, x1, x2)


def clip(x, x_min, x_max):
    low = -math.inf if x_min is None else x_min
    high = math.inf if x_max is None else x_max
    return each(lambda v: min_of(max_of(v, low), high), x)


def max_of(a, b):
    return a if a > b else b


def min_of(a, b):
    return a if a < b else b


def each(function, *xs):
    """A function of numbers, element by element, with broadcasting."""
    xs = np.broadcast_arrays(*xs)
    y = np.empty(xs[0].shape)
    for i in np.ndindex(y.shape):
        y[i] = function(*(float(x[i]) for x in xs))
    return y


def fmod(x, divisor):
    return each(math.fmod, x, divisor)


def squared_difference(x1, x2):
    return x1 * x1 - 2 * x1 * x2 + x2 * x2


def linear_interpolate(p, x, y):
    return y + p * (x - y)


def scale(x, y, axis=1):
    return x * along(x, y, axis)


def bias(x, y, axis=1):
    return x + along(x, y, axis)


def along(x, y, axis):
    """y with as many axes as x, its own beginning at ``axis``."""
    y = np.asarray(y)
    return y[(None,) * axis + (...,) + (None,) * (x.ndim - axis - y.ndim)]


# ---- elementary functions: from the standard library, element by element --------------------------------------------


def sin(x):
    return each(math.sin, x)


def cos(x):
    return each(math.cos, x)


def tan(x):
    return each(math.tan, x)


def arcsin(x):
    return each(math.asin, x)


def arccos(x):
    return each(math.acos, x)


def arctan(x):
    return each(math.atan, x)


def arctan2(x1, x2):
    return each(math.atan2, x1, x2)


def arctanh(x):
    return each(math.atanh, x)


def sinh(x):
    return each(math.sinh, x)


def cosh(x):
    return each(math.cosh, x)


def tanh(x):
    return each(math.tanh, x)


def exp(x):
    return each(math.exp, x)


def expm1(x):
    return each(math.expm1, x)


def log(x):
    return each(math.log, x)


def log1p(x):
    return each(math.log1p, x)


def log2(x):
    return each(math.log2, x)


def log10(x):
    return each(math.log10, x)


def sqrt(x):
    return each(math.sqrt, x)


def rsqrt(x):
    return x**-0.5


def square(x):
    return x * x


def sign(x):
    return each(lambda v: (v > 0) - (v < 0), x)


def floor(x):
    return each(math.floor, x)


def ceil(x):
    return each(math.ceil, x)


def fix(x):
    return each(math.trunc, x)


# ---- reductions -----------------------------------------------------------------------------------------------------


def over_axes(reduced, x, axis, keepdims=False):
    """A function of a list of numbers, over all elements or over axes."""
    x = np.asarray(x)
    axes = range(x.ndim) if axis is None else [axis] if isinstance(axis, int) else axis
    axes = sorted(a % x.ndim for a in axes)
    kept = [i for i in range(x.ndim) if i not in axes]
    y = np.empty([x.shape[i] for i in kept])
    for at in np.ndindex(y.shape):
        index = [slice(None)] * x.ndim
        for i, j in zip(kept, at):
            index[i] = j
        y[at] = reduced([float(v) for v in x[tuple(index)].ravel()])
    return y.reshape([1 if i in axes else n for i, n in enumerate(x.shape)]) if keepdims else y


def sum(x, axis=None, keepdims=False):
    return over_axes(math.fsum, x, axis, keepdims)


def mean(x, axis=None, weights=None, keepdims=False):
    if weights is None:
        return over_axes(lambda vs: math.fsum(vs) / len(vs), x, axis, keepdims)
    w = np.asarray(weights)
    if w.shape != x.shape:
        w = along(x, w, (axis if isinstance(axis, int) else axis[0]) % x.ndim)
    w = w + np.zeros(x.shape)
    return sum(x * w, axis, keepdims) / sum(w, axis, keepdims)


def average(x, axis=None, weights=None, keepdims=False):
    return mean(x, axis, weights, keepdims)


def max(x, axis=None, keepdims=False):
    return over_axes(lambda vs: sorted(vs)[-1], x, axis, keepdims)


def min(x, axis=None, keepdims=False):
    return over_axes(lambda vs: sorted(vs)[0], x, axis, keepdims)


def argmax(x, axis=None):
    return over_axes(lambda vs: vs.index(sorted(vs)[-1]), x, axis)


def argmin(x, axis=None):
    return over_axes(lambda vs: vs.index(sorted(vs)[0]), x, axis)


def logsumexp(x, axis=None):
    def of(values):
        largest = sorted(values)[-1]
        return largest + math.log(math.fsum(math.exp(v - largest) for v in values))

    return over_axes(of, x, axis)


# ---- products -------------------------------------------------------------------------------------------------------


def matmul(a, b, transa=False, transb=False):
    a = np.swapaxes(a, -1, -2) if transa and a.ndim > 1 else a
    b = np.swapaxes(b, -1, -2) if transb and b.ndim > 1 else b
    rows, columns = (a[None] if a.ndim == 1 else a), (b[:, None] if b.ndim == 1 else b)
    y = (rows[..., :, :, None] * columns[..., None, :, :]).sum(-2)
    y = y[..., 0] if b.ndim == 1 else y
    return (y[..., 0] if b.ndim == 1 else y[..., 0, :]) if a.ndim == 1 else y


def batch_matmul(a, b, transa=False, transb=False):
    a, b = (v[..., None] if v.ndim == 2 else v for v in (a, b))
    return np.stack([matmul(p, q, transa, transb) for p, q in zip(a, b)])


def tensordot(a, b, axes=2):
    if isinstance(axes, int):
        left, right = list(range(a.ndim - axes, a.ndim)), list(range(axes))
    else:
        left, right = ([v] if isinstance(v, int) else list(v) for v in axes)
    letters = "abcdefghijklmnop"
    names_a = list(letters[: a.ndim])
    names_b = list(letters[a.ndim : a.ndim + b.ndim])
    for i, j in zip(left, right):
        names_b[j] = names_a[i]
    result = [n for n in names_a + names_b if (names_a + names_b).count(n) == 1]
    return np.einsum(f"{''.join(names_a)},{''.join(names_b)}->{''.join(result)}", a, b)


def linear(x, W, b=None, n_batch_axes=1):
    rows = x.reshape(math.prod(x.shape[:n_batch_axes]), W.shape[1])
    y = np.einsum("ni,oi->no", rows, W)
    y = y if b is None else y + b
    return y.reshape(*x.shape[:n_batch_axes], W.shape[0])


def embed_id(x, W, ignore_label=None):
    y = np.zeros((*x.shape, W.shape[1]))
    for at in np.ndindex(x.shape):
        if ignore_label is None or x[at] != ignore_label:
            y[at] = W[x[at]]
    return y


def bilinear(e1, e2, W, V1=None, V2=None, b=None):
    e1, e2 = e1.reshape(len(e1), -1), e2.reshape(len(e2), -1)
    y = np.einsum("ni,nj,ijk->nk", e1, e2, W)
    return y if V1 is None else y + np.einsum("ni,ik->nk", e1, V1) + np.einsum("nj,jk->nk", e2, V2) + b


# ---- shapes: NumPy's own functions, which the code does not call ----------------------------------------------------


def reshape(x, shape):
    return np.reshape(x, shape)


def transpose(x, axes=None):
    return np.transpose(x, axes)


def swapaxes(x, axis1, axis2):
    return np.swapaxes(x, axis1, axis2)


def moveaxis(x, source, destination):
    return np.moveaxis(x, source, destination)


def rollaxis(x, axis, start=0):
    return np.rollaxis(x, axis, start)


def expand_dims(x, axis):
    return np.expand_dims(x, axis)


def squeeze(x, axis=None):
    return np.squeeze(x, axis)


def flatten(x):
    return np.array(list(x.flat))


def broadcast(*args):
    return tuple(np.broadcast_arrays(*args))


def broadcast_to(x, shape):
    return np.broadcast_to(x, shape)


def sum_to(x, shape):
    y = np.zeros(shape)
    for at in np.ndindex(x.shape):
        tail = at[x.ndim - len(shape) :]
        y[tuple(0 if n == 1 else i for i, n in zip(tail, shape))] += x[at]
    return y


def concat(xs, axis=1):
    return np.concatenate(xs, axis)


def stack(xs, axis=0):
    return np.stack(xs, axis)


def vstack(xs):
    return np.vstack(xs)


def hstack(xs):
    return np.hstack(xs)


def dstack(xs):
    return np.dstack(xs)


def split_axis(x, indices_or_sections, axis, force_tuple=True):
    pieces = tuple(np.split(x, indices_or_sections, axis))
    return pieces if force_tuple or len(pieces) > 1 else pieces[0]


def separate(x, axis=0):
    return tuple(np.take(x, i, axis) for i in range(x.shape[axis]))


def get_item(x, slices):
    return np.asarray(x)[slices]


def select_item(x, t):
    return np.array([row[k] for row, k in zip(x, t)])


def permutate(x, indices, axis=0, inv=False):
    y = np.empty(x.shape)
    source, target = np.moveaxis(x, axis, 0), np.moveaxis(y, axis, 0)
    for i, k in enumerate(indices):
        if inv:
            target[k] = source[i]
        else:
            target[i] = source[k]
    return y


def flip(x, axis):
    return np.flip(x, axis)


def flipud(a):
    return np.flipud(a)


def fliplr(a):
    return np.fliplr(a)


def where(condition, x, y):
    return np.where(condition, x, y)


def scatter_add(a, slices, b):
    y = np.array(a, np.float64)
    np.add.at(y, slices, b)
    return y


def repeat(x, repeats, axis=None):
    return np.repeat(x, repeats, axis)


def tile(x, reps):
    return np.tile(x, reps)


def pad(x, pad_width, mode, **keywords):
    return np.pad(x, pad_width, mode, **keywords)


def cast(x, typ):
    return np.asarray(x).astype(typ)


def copy(x, dst):
    return np.array(x)


def identity(*inputs):
    return inputs[0] if len(inputs) == 1 else inputs
