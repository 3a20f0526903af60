"""Linear algebra: sums of products by subscripts, determinants, inverses, Cholesky factors, Fourier transforms.

16-bit types are computed in float32 and narrowed once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any

import numpy as np

from dbrdist.core.array.backend import Array, accumulation_dtype, get_array_module
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import ArgumentError, Operands, expected, floating
from dbrdist.core.tape.elementwise_table import together
from dbrdist.core.tape.function_node import FunctionNode, call
from dbrdist.core.tape.variable import Operand, Variable, as_array, as_variable
from dbrdist.functions.picking import diagonal

# ---- products by subscripts -----------------------------------------------------------------------------------------

Labels = list[Hashable]  # the name of each axis: a letter, a number, or ("...", i) for the i-th from the right
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ORDERED_FROM = 1 << 14  # products in the sum; below, finding a good order takes longer than the sum


class EinSum(FunctionNode):
    """y = the sum of products over the letters that ``out`` lacks

    No term has a letter twice, and each letter of a term is also in another term or in ``out``. So the gradient of a
    term is a node of the same kind, with ``out`` in the place of that term.
    """

    def __init__(self, terms: tuple[str, ...], out: str) -> None:
        self.terms = terms
        self.out = out

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs(tuple(range(len(xs))))
        dtype = np.result_type(*[x.dtype for x in xs])
        wide = accumulation_dtype(dtype)
        lengths = {letter: n for term, x in zip(self.terms, xs) for letter, n in zip(term, x.shape)}
        is_large = len(xs) > 1 and prod(lengths.values()) >= _ORDERED_FROM
        xs = tuple([x.astype(wide, copy=False) for x in xs])
        y = get_array_module(*xs).einsum(f"{','.join(self.terms)}->{self.out}", *xs, optimize=is_large)
        return (y.astype(dtype),)  # a copy, where the sum is a view

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        xs, gxs = self.retained_inputs(), []
        for i in wanted:
            terms = (*self.terms[:i], self.out, *self.terms[i + 1 :])
            gxs.append(call(EinSum(terms, self.terms[i]), *xs[:i], gys[0], *xs[i + 1 :]))
        return tuple(gxs)


def einsum(*operands: Any) -> Variable:
    """The sum of products over axes that are named by subscripts, as :func:`numpy.einsum`.

    Args:
        operands: subscripts and the arrays, ``einsum("ij,jk->ik", a, b)``; or each array with a list of axes and the
            axes of the result last, ``einsum(a, [0, 1], b, [1, 2], [0, 2])``. ``...`` (Ellipsis) stands for further
            axes, which broadcast. Without ``->`` the result has the letters that occur once, in alphabetical order.

    Raises:
        ValueError: subscripts and arrays do not match, or axes of one letter differ in length.

    Example:
        >>> a = np.arange(6.0).reshape(2, 3)
        >>> F.einsum("ij,kj->ik", a, a).array
        array([[ 5., 14.],
               [14., 50.]])
        >>> F.einsum("ii", np.eye(3)).array
        array(3.)
    """
    xs, terms, out = _parsed(operands)
    xs = together("einsum", is_product=True, **{f"operand {i}": x for i, x in enumerate(xs)})
    named = [_named_axes(i, term, x.ndim) for i, (term, x) in enumerate(zip(terms, xs))]
    lengths = _lengths(named, xs)
    num_free = {x.ndim - len(term) + 1 for term, x in zip(terms, xs) if Ellipsis in term}
    if as_chainer[0] and len(num_free) > 1:
        raise expected("einsum", "operands", "as many axes for each '...', as in Chainer", str(sorted(num_free)))
    result = _result(named, out)
    kept = set(result)
    pairs = [_simplified(x, labels, lengths) for x, labels in zip(xs, named)]
    counts = [label for _, labels in pairs for label in labels]
    pairs = [_summed(x, labels, [a for a in labels if a in kept or counts.count(a) > 1]) for x, labels in pairs]
    letters = dict(zip(dict.fromkeys(counts), _LETTERS))
    words = tuple("".join(letters[a] for a in labels) for _, labels in pairs)
    return EinSum(words, "".join(letters[a] for a in result)).apply(tuple(x for x, _ in pairs))[0]


def _parsed(operands: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Labels], Labels | None]:
    """The arrays, the labels of each, and those of the result where they are given; Ellipsis stands for itself."""
    if operands and isinstance(operands[0], str):
        text, xs = operands[0].replace(" ", ""), operands[1:]
        left, arrow, right = text.partition("->")
        terms, out = [_letters(term) for term in left.split(",")], _letters(right) if arrow else None
    else:
        xs, terms = operands[: len(operands) // 2 * 2 : 2], [_numbers(t) for t in operands[1::2]]
        out = _numbers(operands[-1]) if len(operands) % 2 else None
    if not xs or len(xs) != len(terms):
        raise expected("einsum", "operands", f"an array for each of the {len(terms)} terms", f"{len(xs)} arrays")
    return xs, terms, out


def _letters(term: str) -> Labels:
    labels: Labels = [Ellipsis if c == "@" else c for c in term.replace("...", "@")]
    if "@" in term or any(c is not Ellipsis and c not in _LETTERS for c in labels) or labels.count(Ellipsis) > 1:
        raise expected("einsum", "subscripts", "letters, ',', '->' and one '...' in a term", repr(term))
    return labels


def _numbers(term: Any) -> Labels:
    labels = list(term) if isinstance(term, (list, tuple)) else [term, None]
    if any(a is not Ellipsis and not isinstance(a, (int, np.integer)) for a in labels) or labels.count(Ellipsis) > 1:
        raise expected("einsum", "subscripts", "a string first, or a list of ints and Ellipsis behind each array",
                       repr(term) if not hasattr(term, "shape") else term)  # fmt: skip
    return labels


def _named_axes(i: int, labels: Labels, ndim: int) -> Labels:
    """A label for each axis."""
    num_free = ndim - len(labels) + labels.count(Ellipsis)
    if num_free < 0 or (num_free and Ellipsis not in labels):
        words = "".join("..." if a is Ellipsis else str(a) for a in labels)
        raise expected("einsum", f"operand {i}", f"the {len(labels)} axes of {words!r}", f"{ndim} axes")
    free: Labels = [("...", k) for k in range(num_free, 0, -1)]
    return [label for a in labels for label in (free if a is Ellipsis else [a])]


def _lengths(named: list[Labels], xs: Sequence[Variable]) -> dict[Hashable, int]:
    """The length of each label's axes; those of ``...`` may be 1 beside others."""
    lengths: dict[Hashable, int] = {}
    for i, (labels, x) in enumerate(zip(named, xs)):
        for label, n in zip(labels, x.shape):
            known = lengths.setdefault(label, n)
            may_repeat = isinstance(label, tuple) and 1 in (known, n) and not as_chainer[0]
            if known != n and not may_repeat:
                what = f"length {known} of {'...' if isinstance(label, tuple) else label!r} as before"
                raise expected("einsum", f"operand {i}", what, x)
            lengths[label] = n if known == 1 else known
    return lengths


def _result(named: list[Labels], out: Labels | None) -> Labels:
    """The labels of the result."""
    every = [label for labels in named for label in labels]
    free = sorted({a for a in every if isinstance(a, tuple)}, key=lambda a: -a[1])
    if out is None:
        single: list[Any] = [a for a in every if not isinstance(a, tuple) and every.count(a) == 1]
        return [*free, *sorted(single)]
    if free and Ellipsis not in out:
        raise expected("einsum", "subscripts", "'...' in the result, since axes of '...' are not summed", "none")
    if Ellipsis in out and not free and as_chainer[0]:
        raise expected("einsum", "subscripts", "'...' in the result only where a term has it", str(out))
    result = [label for a in out for label in (free if a is Ellipsis else [a])]
    if len(set(result)) != len(result) or not set(result) <= set(every):
        raise expected("einsum", "subscripts", "letters of the terms in the result, each once", str(out))
    return result


def _simplified(x: Variable, labels: Labels, lengths: dict[Hashable, int]) -> tuple[Any, Labels]:
    """x without axes of ``...`` that are repeated, and with the diagonal in the place of axes of one name."""
    kept = [i for i, (a, n) in enumerate(zip(labels, x.shape)) if n == lengths[a]]
    x, labels = ops.reshape(x, tuple(x.shape[i] for i in kept)), [labels[i] for i in kept]
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            i = labels.index(label)
            j = labels.index(label, i + 1)
            x = diagonal(x, 0, i, j)
            labels = [*labels[:i], *labels[i + 1 : j], *labels[j + 1 :], label]
    return x, labels


def _summed(x: Variable, labels: Labels, kept: Labels) -> tuple[Any, Labels]:
    """x summed over the axes that neither the result nor another term has."""
    axes = tuple(i for i, a in enumerate(labels) if a not in kept)
    return (ops.sum(x, axes) if axes else x), kept


def batch_l2_norm_squared(x: Operand) -> Variable:
    """The sum of squares of each example, shape (N,); x (N, ...).

    Args:
        x: array or Variable (B, ...).

    Example:
        >>> F.batch_l2_norm_squared(np.array([[3.0, 4.0]])).array
        array([25.])
    """
    floating("batch_l2_norm_squared", x=x)
    x = as_variable(x)
    if x.ndim < 1 + as_chainer[0]:
        raise expected("batch_l2_norm_squared", "x", "an axis of examples, and in Chainer one of features", x)
    wide = ops.cast(x, accumulation_dtype(x.dtype))
    return ops.cast(ops.sum(ops.power(wide, 2), tuple(range(1, x.ndim))), x.dtype)


# ---- square matrices ------------------------------------------------------------------------------------------------


def _computed(name: str, x: Array, what: str) -> Array:
    """A function of ``numpy.linalg``, in the type of x."""
    solve: Callable[..., Any] = getattr(get_array_module(x).linalg, name)
    try:
        y = solve(x.astype(accumulation_dtype(x.dtype), copy=False))
    except np.linalg.LinAlgError:
        raise expected(name, "a", what, x) from None
    return y.astype(x.dtype, copy=False)


class Inv(FunctionNode):
    """y = inverse of a; ga = -y' gy y' (y' transposed), for stacks of matrices"""

    operands = Operands("inv", a="float")

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_outputs((0,))
        return (_computed("inv", xs[0], "matrices that are not singular"),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        (y,) = self.retained_outputs()
        turned = ops.swap(y)
        return (ops.neg(ops.matmul(ops.matmul(turned, gys[0]), turned)),)


class Det(FunctionNode):
    """y = determinant of a; ga = gy y inv(a)', the cofactors, for stacks of matrices"""

    operands = Operands("det", a="float")

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0,))
        self.retain_outputs((0,))
        return (get_array_module(xs[0]).asarray(_computed("det", xs[0], "square matrices")),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array | None, ...]:
        (a,), (y,) = self.retained_inputs(), self.retained_outputs()
        try:
            inverse = call(Inv(), a)
        except ArgumentError:  # a matrix is singular
            if isinstance(a, Variable):
                raise
            return (ops.mul(ops.reshape(gys[0], (*y.shape, 1, 1)), _cofactors(a)),)
        along = ops.reshape(ops.mul(gys[0], y), (*y.shape, 1, 1))
        return (ops.mul(along, ops.swap(inverse)),)


def _cofactors(a: Array) -> Array:
    """Those of matrices that may be singular: of a = u s v they are det(u) det(v) u c v with the cofactors c of s."""
    linalg = get_array_module(a).linalg
    u, s, v = linalg.svd(a.astype(accumulation_dtype(a.dtype), copy=False))
    for_each = s[..., None, :].repeat(s.shape[-1], axis=-2)
    at = range(s.shape[-1])
    for_each[..., at, at] = 1
    sign = (linalg.det(u) * linalg.det(v))[..., None, None]
    return (sign * (u * for_each.prod(axis=-1)[..., None, :]) @ v).astype(a.dtype, copy=False)


class Cholesky(FunctionNode):
    """a = y y' with y lower triangular, of the lower triangle of a (Murray 2016, arXiv:1602.07527, section 3.2)

    With P(m) the lower triangle of m and half of its diagonal, and s = inv(y)' P(y' gy) inv(y): ga = (s + s') / 2.
    """

    operands = Operands("cholesky", a="float")

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_outputs((0,))
        return (_computed("cholesky", xs[0], "a positive definite matrix"),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        (y,) = self.retained_outputs()
        xp, n, dtype = get_array_module(as_array(y)), y.shape[-1], y.dtype
        part = (xp.tri(n) - 0.5 * xp.eye(n)).astype(dtype)
        inverse = call(Inv(), y)
        s = ops.matmul(ops.swap(inverse), ops.mul(part, ops.matmul(ops.swap(y), gys[0])))
        s = ops.matmul(s, inverse)
        return (ops.mul(ops.add(s, ops.swap(s)), 0.5),)


def _square(function: str, a: Operand, ndim: int) -> Variable:
    floating(function, a=a)
    a = as_variable(a)
    if a.ndim != ndim or a.shape[-1] != a.shape[-2]:
        raise expected(function, "a", "a square matrix" if ndim == 2 else "square matrices, shape (N, K, K)", a)
    return a


def det(a: Operand) -> Variable:
    """The determinant of a square matrix, 0-d. Its gradient has the cofactors; a second one refuses a singular matrix.

    Args:
        a: square matrix (N, N).

    Example:
        >>> F.det(np.array([[2.0, 0.0], [0.0, 3.0]])).array.round(6)
        np.float64(6.0)
    """
    return Det().apply((_square("det", a, 2),))[0]


def batch_det(a: Operand) -> Variable:
    """The determinants of N square matrices, shape (N,); see :func:`det`.

    Args:
        a: stack of square matrices (B, N, N).

    Example:
        >>> F.batch_det(np.array([[[2.0, 0.0], [0.0, 3.0]]])).array.round(6)
        array([6.])
    """
    return Det().apply((_square("batch_det", a, 3),))[0]


def inv(a: Operand) -> Variable:
    """The inverse of a square matrix.

    Args:
        a: square matrix (N, N).

    Example:
        >>> F.inv(np.array([[2.0, 0.0], [0.0, 4.0]])).array
        array([[0.5 , 0.  ],
               [0.  , 0.25]])
    """
    return Inv().apply((_square("inv", a, 2),))[0]


def batch_inv(a: Operand) -> Variable:
    """The inverses of N square matrices, shape (N, K, K).

    Args:
        a: stack of square matrices (B, N, N).

    Example:
        >>> F.batch_inv(np.array([[[2.0, 0.0], [0.0, 4.0]]])).array
        array([[[0.5 , 0.  ],
                [0.  , 0.25]]])
    """
    return Inv().apply((_square("batch_inv", a, 3),))[0]


def cholesky(a: Operand) -> Variable:
    """The lower triangular factor L of a positive definite matrix a = L L'.

    Only the lower triangle of a is read; the gradient is symmetric, as a is, so that its steps keep it so.

    Args:
        a: square matrix (N, N).

    Example:
        >>> F.cholesky(np.array([[4.0, 2.0], [2.0, 2.0]])).array
        array([[2., 0.],
               [1., 1.]])
    """
    return Cholesky().apply((_square("cholesky", a, 2),))[0]


# ---- Fourier transforms ---------------------------------------------------------------------------------------------


class Fourier(FunctionNode):
    """y = the transform of x along the last axis, real and imaginary parts apart; ``name``: fft or ifft

    fft sums x_k exp(-2 pi i j k / n); ifft has the other sign and divides by n. So the gradient of each is the other,
    times or divided by n.
    """

    operands = Operands("fft", real="float", imag="float")
    is_linear = True

    def __init__(self, name: str, scale: float = 1.0) -> None:
        self.name = name
        self.scale = scale

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        real, imag = (x.astype(accumulation_dtype(x.dtype), copy=False) for x in xs)
        y = getattr(get_array_module(real).fft, self.name)(real + 1j * imag) * self.scale
        return y.real.astype(xs[0].dtype), y.imag.astype(xs[1].dtype)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        like = next(g for g in gys if g is not None)
        real, imag = (ops.mul(like, 0.0) if g is None else g for g in gys)
        n = like.shape[-1]
        name, factor = ("ifft", n) if self.name == "fft" else ("fft", 1.0 / n)
        grads = call(Fourier(name, factor * self.scale), real, imag)
        return tuple(grads[i] for i in wanted)


def _transformed(name: str, x: Any) -> tuple[Variable, Variable]:
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        raise expected(name, "x", "a pair (real, imag)", x if hasattr(x, "shape") else repr(x))
    real, imag = together(name, real=x[0], imag=x[1])
    if real.shape != imag.shape:
        raise expected(name, "imag", f"shape {real.shape} to match real", imag)
    if not real.ndim or not real.shape[-1]:
        raise expected(name, "real", "at least one element along the last axis", real)
    y: tuple[Any, Any] = Fourier(name).apply((real, imag))
    return y


def fft(x: Sequence[Operand]) -> tuple[Variable, Variable]:
    """The discrete Fourier transform along the last axis.

    Args:
        x: the pair (real, imag) of arrays of one shape.

    Returns:
        The pair (real, imag) of Variables in the shape of the input.

    Raises:
        ValueError: x is no pair, or its parts differ in shape.

    Example:
        >>> real, imag = F.fft((np.array([1.0, 0.0, 0.0, 0.0]), np.zeros(4)))
        >>> real.array
        array([1., 1., 1., 1.])
    """
    return _transformed("fft", x)


def ifft(x: Sequence[Operand]) -> tuple[Variable, Variable]:
    """The inverse of :func:`fft` along the last axis.

    Args:
        x: the pair (real, imag) of arrays of one shape.

    Returns:
        The pair (real, imag) of Variables in the shape of the input.

    Example:
        >>> real, imag = F.ifft((np.ones(4), np.zeros(4)))
        >>> real.array
        array([1., 0., 0., 0.])
    """
    return _transformed("ifft", x)
