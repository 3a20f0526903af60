"""One row for each operation: what every operation has to pass.

The tests beside this file walk the table: gradients of first and second order in float64, the rule on arrays and on
Variables, 16-bit types, memory layout, and PyTorch. A row names the function, the shapes of its floating-point inputs,
and the values from which they are drawn, away from kinks and poles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import random
from dbrdist.utils import CooMatrix
from tests.each import each


def smooth(rng: Any, shape: tuple[int, ...]) -> Any:
    """From -1 to 1."""
    return rng.uniform(-1.0, 1.0, shape)


def positive(rng: Any, shape: tuple[int, ...]) -> Any:
    """From 0.5 to 2."""
    return rng.uniform(0.5, 2.0, shape)


def inner(rng: Any, shape: tuple[int, ...]) -> Any:
    """From -0.7 to 0.7: within (-1, 1)."""
    return rng.uniform(-0.7, 0.7, shape)


def share(rng: Any, shape: tuple[int, ...]) -> Any:
    """From 0.1 to 0.9."""
    return rng.uniform(0.1, 0.9, shape)


def nonzero(rng: Any, shape: tuple[int, ...]) -> Any:
    """From 0.3 to 1.5, of either sign."""
    return rng.uniform(0.3, 1.5, shape) * rng.choice([-1.0, 1.0], shape)


def distinct(rng: Any, shape: tuple[int, ...]) -> Any:
    """Multiples of 1/8 around zero, none twice: exact in 16 bits, and without ties."""
    n = int(np.prod(shape))
    return (rng.permutation(n).reshape(shape) - n // 2 + 0.5) / 8.0


def regular(rng: Any, shape: tuple[int, ...]) -> Any:
    """Square matrices far from singular, symmetric and positive definite."""
    a = rng.uniform(-0.5, 0.5, shape)
    return a + np.swapaxes(a, -1, -2) + 2.0 * np.eye(shape[-1])


@dataclass(frozen=True)
class Case:
    """One operation.

    ``function`` takes one Variable for each shape in an entry of ``shapes`` and gives a Variable or a tuple of them.
    ``domain`` is one drawing function for all inputs or one for each. ``order`` is the highest derivative there is.
    ``narrow_tolerance`` is that of 16-bit types, in units of their rounding error (None: not defined for them).
    ``needs`` is a package without which the row is skipped. ``has_one_rule`` is False where arrays have a kernel of
    their own, so that gradients on arrays and on Variables differ by rounding.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    domain: Any = smooth
    order: int = 2
    rtol: float = 1e-6
    narrow_tolerance: float | None = 16.0
    needs: str | None = None
    has_one_rule: bool = True

    def __str__(self) -> str:
        return self.name

    def inputs(self, shapes: tuple[tuple[int, ...], ...], dtype: Any = np.float64) -> list[Any]:
        """The inputs for one entry of ``shapes``: the same at each call."""
        if self.needs is not None:
            pytest.importorskip(self.needs)
        rng = np.random.default_rng(len(self.name))
        domains = self.domain if isinstance(self.domain, tuple) else (self.domain,) * len(shapes)
        return [np.asarray(draw(rng, s), dtype) for draw, s in zip(domains, shapes, strict=True)]


ANY = (((),), ((0, 3),), ((3, 4),), ((2, 3, 4, 5),))
FULL = (((3, 4),), ((2, 3, 4, 5),))
PAIRS = (
    ((), ()),
    ((0, 3), (0, 3)),
    ((3, 4), (3, 4)),
    ((3, 4), (4,)),
    ((), (2, 3)),
    ((2, 1, 3), (4, 1)),
    ((2, 3, 4, 5), (2, 3, 4, 5)),
    ((2, 3, 4, 5), (1, 3, 1, 1)),
)
SAME = (((), ()), ((0, 3), (0, 3)), ((3, 4), (3, 4)), ((2, 3, 4, 5), (2, 3, 4, 5)))


def labels(x: Any, num_classes: int | None = None, ignored: bool = False) -> Any:
    """Integer labels for scores of the shape of x (N, K, D...)."""
    k = x.shape[1] if num_classes is None else num_classes
    shape = (x.shape[0], *x.shape[2:])
    t = (np.arange(int(np.prod(shape))) * 7 % k).astype(np.int32).reshape(shape)
    if ignored and t.size:
        t.reshape(-1)[0] = -1
    return _like(x, t)


def _like(x: Any, a: Any) -> Any:
    """An array on the device of x."""
    return x.xp.asarray(a)


def mask(x: Any) -> Any:
    """Booleans of the shape of x."""
    return _like(x, np.arange(int(np.prod(x.shape))).reshape(x.shape) % 3 == 0)


def similar(x: Any) -> Any:
    """For each row of x whether it belongs to its partner."""
    return _like(x, np.arange(x.shape[0]) % 2)


def probabilities(x: Any) -> Any:
    """Distributions over axis 1, in the type of x."""
    rng = np.random.default_rng(1)
    p = rng.uniform(0.1, 1.0, x.shape)
    return _like(x, (p / p.sum(axis=1, keepdims=True)).astype(x.dtype))


def weights_of_classes(x: Any) -> Any:
    """A weight for each class, in the type of x."""
    return _like(x, np.linspace(0.5, 1.5, x.shape[1]).astype(x.dtype))


ARITHMETIC = [
    Case("add", lambda a, b: a + b, PAIRS),
    Case("sub", lambda a, b: a - b, PAIRS),
    Case("mul", lambda a, b: a * b, PAIRS),
    Case("div", lambda a, b: a / b, PAIRS, (smooth, positive)),
    Case("pow", lambda a, b: a**b, PAIRS, (positive, smooth), narrow_tolerance=32),
    Case("pow_constant", lambda a: a**3, ANY),
    Case("pow_fraction", lambda a: a**-1.5, ANY, positive, narrow_tolerance=32),
    Case("rpow", lambda a: 2.5**a, ANY, smooth, narrow_tolerance=32),
    Case("number_arithmetic", lambda a: (2.0 - a) * 3.0 + 1.0 / (a + 3.0), ANY),
    Case("neg", lambda a: -a, ANY),
    Case("absolute", F.absolute, ANY, nonzero),
    Case("add_many", lambda a, b, c: F.add(a, b, c), (((3, 4), (3, 4), (4,)),)),
    Case("maximum", F.maximum, PAIRS, (distinct, nonzero)),
    Case("minimum", F.minimum, PAIRS, (distinct, nonzero)),
    Case("clip", lambda x: F.clip(x, -0.9, 1.2), ANY, distinct),
    Case("clip_below", lambda x: F.clip(x, -0.9, None), ANY, distinct),
    Case("fmod", lambda x, y: F.fmod(x, y), SAME, (smooth, positive), order=1),
    Case("squared_difference", F.squared_difference, PAIRS),
    Case("linear_interpolate", F.linear_interpolate, (((3, 4),) * 3, ((),) * 3, ((2, 3, 4, 5),) * 3)),
    Case("scale", F.scale, (((2, 3, 4), (3,)), ((2, 3, 4, 5), (3, 4)), ((2, 3), ()))),
    Case("bias", F.bias, (((2, 3, 4), (3,)), ((2, 3, 4, 5), (3, 4)))),
]

ELEMENTARY = [
    Case("sin", F.sin, ANY),
    Case("cos", F.cos, ANY),
    Case("tan", F.tan, ANY, inner),
    Case("arcsin", F.arcsin, ANY, inner),
    Case("arccos", F.arccos, ANY, inner),
    Case("arctan", F.arctan, ANY),
    Case("arctan2", F.arctan2, PAIRS, (nonzero, positive)),
    Case("arctanh", F.arctanh, ANY, inner),
    Case("sinh", F.sinh, ANY),
    Case("cosh", F.cosh, ANY),
    Case("exp", F.exp, ANY),
    Case("expm1", F.expm1, ANY),
    Case("log", F.log, ANY, positive),
    Case("log1p", F.log1p, ANY, positive),
    Case("log2", F.log2, ANY, positive),
    Case("log10", F.log10, ANY, positive),
    Case("sqrt", F.sqrt, ANY, positive),
    Case("rsqrt", F.rsqrt, ANY, positive),
    Case("square", F.square, ANY),
]

SPECIAL = [
    Case("erf", F.erf, ANY),
    Case("erfc", F.erfc, ANY),
    Case("erfcx", F.erfcx, ANY, narrow_tolerance=32, needs="scipy"),
    Case("erfinv", F.erfinv, ANY, inner, narrow_tolerance=32, needs="scipy"),
    Case("erfcinv", F.erfcinv, ANY, lambda r, s: r.uniform(0.3, 1.7, s), narrow_tolerance=32, needs="scipy"),
    Case("ndtr", F.ndtr, ANY),
    Case("ndtri", F.ndtri, ANY, lambda r, s: r.uniform(0.1, 0.9, s), narrow_tolerance=32, needs="scipy"),
    Case("log_ndtr", F.log_ndtr, ANY, needs="scipy"),
    Case("lgamma", F.lgamma, ANY, positive, needs="scipy"),
    Case("digamma", F.digamma, ANY, positive, needs="scipy"),
    Case("polygamma", lambda x: F.polygamma(2, x), ANY, positive, needs="scipy"),
    Case("polygamma_orders", lambda x: F.polygamma(_like(x, np.arange(4)), x), (((3, 4),),), positive, needs="scipy"),
    Case("zeta", lambda q: F.zeta(2.5, q), ANY, positive, needs="scipy"),
]

REDUCTIONS = [
    Case("sum", F.sum, ANY),
    Case("sum_axis", lambda x: F.sum(x, axis=1), FULL + (((0, 3),),)),
    Case("sum_axes", lambda x: F.sum(x, axis=(0, -1), keepdims=True), FULL),
    Case("mean", F.mean, (((),), ((3, 4),), ((2, 3, 4, 5),))),
    Case("mean_axis", lambda x: F.mean(x, axis=1), FULL + (((0, 3),),)),
    Case("mean_keepdims", lambda x: F.mean(x, axis=(0, 1), keepdims=True), FULL),
    Case("mean_weighted", lambda x, w: F.mean(x, 1, w), (((3, 4), (4,)),), (smooth, positive)),
    Case("average", F.average, FULL),
    Case("max", F.max, (((),), ((3, 4),), ((2, 3, 4, 5),)), distinct),
    Case("max_axis", lambda x: F.max(x, axis=1), FULL + (((0, 3),),), distinct),
    Case("max_axes", lambda x: F.max(x, axis=(0, -1), keepdims=True), FULL, distinct),
    Case("min", F.min, (((),), ((3, 4),), ((2, 3, 4, 5),)), distinct),
    Case("min_axis", lambda x: F.min(x, axis=-1), FULL, distinct),
    Case("logsumexp", F.logsumexp, (((3, 4),), ((2, 3, 4, 5),))),
    Case("logsumexp_axis", lambda x: F.logsumexp(x, axis=1), FULL),
    Case("cumsum", F.cumsum, (((),), ((0, 3),), ((3, 4),))),
    Case("cumsum_axis", lambda x: F.cumsum(x, axis=-1), FULL + (((0, 3),),)),
    Case("cumsum_channels", lambda x: F.cumsum(x, axis=1), FULL),
    Case("cumprod", F.cumprod, (((),), ((0, 3),), ((3, 2),)), nonzero),
    Case("cumprod_axis", lambda x: F.cumprod(x, axis=1), (((3, 4),), ((2, 0),), ((2, 3, 2),)), nonzero),
    Case("prod", F.prod, (((),), ((0, 3),), ((3, 2),), ((2, 3, 2),)), nonzero, narrow_tolerance=32),
    Case("prod_axis", lambda x: F.prod(x, axis=-1), (((3, 4),), ((2, 0),), ((0, 2),), ((2, 3, 2),)), nonzero),
    Case("prod_axes", lambda x: F.prod(x, axis=(0, -1), keepdims=True), (((2, 3, 2),),), nonzero, narrow_tolerance=32),
    Case("batch_l2_norm_squared", F.batch_l2_norm_squared, (((0, 3),), ((3,),), ((3, 4),), ((2, 3, 4, 5),))),
]

PRODUCTS = [
    Case(
        "matmul",
        F.matmul,
        (
            ((2, 3), (3, 4)),
            ((0, 3), (3, 4)),
            ((2, 3), (3,)),
            ((3,), (3, 4)),
            ((3,), (3,)),
            ((5, 2, 3), (5, 3, 4)),
            ((5, 2, 3), (3, 4)),
            ((2, 3), (5, 3, 4)),
            ((5, 2, 3), (3,)),
            ((3,), (5, 3, 2)),
            ((2, 1, 2, 3), (4, 3, 2)),
        ),
    ),
    Case("matmul_transposed", lambda a, b: F.matmul(a, b, True, True), (((3, 2), (4, 3)), ((5, 3, 2), (5, 4, 3)))),
    Case("batch_matmul", F.batch_matmul, (((5, 2, 3), (5, 3, 4)), ((5, 2, 3), (5, 3)))),
    Case("tensordot", lambda a, b: F.tensordot(a, b, 1), (((2, 3, 4), (4, 5)), ((3,), (3,)))),
    Case("tensordot_axes", lambda a, b: F.tensordot(a, b, ([1, 0], [0, 2])), (((2, 3, 4), (3, 5, 2)),)),
    Case("linear", F.linear, (((2, 3), (4, 3), (4,)), ((0, 3), (4, 3), (4,)), ((1, 1), (1, 1), (1,)))),
    Case("linear_without_bias", F.linear, (((2, 3), (4, 3)),)),
    Case("linear_flattens", F.linear, (((2, 3, 2), (4, 6), (4,)), ((2, 3, 2, 2), (4, 12), (4,)))),
    Case("linear_batch_axes", lambda x, W, b: F.linear(x, W, b, 2), (((2, 5, 3), (4, 3), (4,)),)),
    Case("embed_id", lambda W: F.embed_id(_like(W, np.array([[0, 2], [2, 1]])), W), (((4, 3),),)),
    Case("embed_id_ignore", lambda W: F.embed_id(_like(W, np.array([-1, 2, 2])), W, -1), (((4, 3),),)),
    Case("bilinear", F.bilinear, (((2, 3), (2, 4), (3, 4, 5)), ((2, 3), (2, 4), (3, 4, 5), (3, 5), (4, 5), (5,)))),
]

ALGEBRA = [
    Case("einsum", lambda a, b: F.einsum("ij,jk->ik", a, b), (
        ((2, 3), (3, 4)), ((0, 3), (3, 4)), ((30, 40), (40, 30)))),
    Case("einsum_implicit", lambda a, b: F.einsum("ba,cb", a, b), (((2, 3), (4, 2)),)),
    Case("einsum_three", lambda a, b, c: F.einsum("ij,ik,jkl->il", a, b, c), (((3, 4), (3, 5), (4, 5, 2)),)),
    Case("einsum_trace", lambda a: F.einsum("ii", a), (((3, 3),),)),
    Case("einsum_diagonals", lambda a, b: F.einsum("iji,jj->ij", a, b), (((3, 2, 3), (2, 2)),)),
    Case("einsum_threefold", lambda a: F.einsum("jijj->ji", a), (((2, 3, 2, 2),),)),
    Case("einsum_sums", lambda a, b: F.einsum("ijk,l->j", a, b), (((2, 3, 4), (5,)),)),
    Case("einsum_transposed", lambda a: F.einsum("ijk->kij", a), (((2, 3, 4),),)),
    Case("einsum_ellipsis", lambda a, b: F.einsum("...ij,...jk->...ik", a, b), (
        ((5, 2, 3), (5, 3, 4)), ((2, 3), (5, 3, 4)), ((5, 1, 2, 3), (6, 3, 4)), ((6, 2, 3), (5, 1, 3, 4)))),
    Case("einsum_lists", lambda a, b: F.einsum(a, [Ellipsis, 1], b, [1, 0], [0, Ellipsis]), (((2, 3), (3, 4)),)),
    Case("einsum_outer", lambda a, b: F.einsum("i,j", a, b), (((2,), (3,)),)),
    Case("einsum_number", lambda a, b: F.einsum(",i->i", a, b), (((), (3,)),)),
    Case("det", F.det, (((1, 1),), ((3, 3),)), regular, narrow_tolerance=64),
    Case("batch_det", F.batch_det, (((2, 3, 3),), ((0, 2, 2),)), regular, narrow_tolerance=64),
    Case("inv", F.inv, (((1, 1),), ((3, 3),)), regular, narrow_tolerance=64),
    Case("batch_inv", F.batch_inv, (((2, 3, 3),),), regular, narrow_tolerance=64),
    Case("cholesky", lambda a: F.cholesky(a + F.transpose(a)), (((1, 1),), ((3, 3),)), regular, narrow_tolerance=64),
    Case("fft", lambda a, b: F.fft((a, b)), (((1,), (1,)), ((0, 3), (0, 3)), ((2, 5), (2, 5)), ((2, 3, 4),) * 2)),
    Case("fft_one_used", lambda a, b: F.fft((a, b))[1], (((2, 5), (2, 5)),)),
    Case("ifft", lambda a, b: F.ifft((a, b)), (((2, 5), (2, 5)), ((2, 3, 4),) * 2)),
]  # fmt: skip

SHAPES = [
    Case("diagonal", F.diagonal, (((3, 4),), ((2, 3, 4),))),
    Case("diagonal_below", lambda x: F.diagonal(x, -1, 2, 0), (((2, 3, 4),), ((4, 3, 2),), ((1, 3, 4),))),
    Case("diagonal_of_images", lambda x: F.diagonal(x, 1, 2, 3), (((2, 3, 4, 5),),)),
    Case("pad_sequence", lambda *xs: F.pad_sequence(xs), (((3,), (1,), (0,)), ((2, 3), (4, 3)))),
    Case("pad_sequence_length", lambda *xs: F.pad_sequence(xs, 5, -1), (((3, 2), (1, 2)),)),
    Case("transpose_sequence", lambda *xs: F.transpose_sequence(xs), (
        ((3,), (2,), (2,)), ((3, 2), (3, 2), (1, 2), (0, 2)), ((1, 2),), ((2,), (0,)))),
    Case("transpose_sequence_one_used", lambda *xs: F.transpose_sequence(xs)[1], (((3, 2), (2, 2), (1, 2)),)),
    Case("reshape", lambda x: F.reshape(x, (-1,)), (((),), ((3, 4),), ((2, 3, 4, 5),))),
    Case("reshape_to_4d", lambda x: F.reshape(x, (2, 3, 2, 1)), (((3, 4),),)),
    Case("transpose", F.transpose, ANY),
    Case("transpose_axes", lambda x: F.transpose(x, (-1, 0, 1)), (((2, 3, 4),),)),
    Case("swapaxes", lambda x: F.swapaxes(x, 0, -1), FULL),
    Case("moveaxis", lambda x: F.moveaxis(x, (0, 1), (-1, 0)), (((2, 3, 4),),)),
    Case("rollaxis", lambda x: F.rollaxis(x, 2), (((2, 3, 4),), ((2, 3, 4, 5),))),
    Case("expand_dims", lambda x: F.expand_dims(x, -1), ANY),
    Case("squeeze", F.squeeze, (((1, 3, 1),), ((1, 1),), ((2, 1, 3, 1),))),
    Case("squeeze_axis", lambda x: F.squeeze(x, -1), (((1, 3, 1),),)),
    Case("flatten", F.flatten, ANY),
    Case("broadcast", lambda a, b: F.broadcast(a, b), PAIRS),
    Case("broadcast_to", lambda x: F.broadcast_to(x, (2, 3, 4)), (((),), ((4,),), ((3, 1),))),
    Case("sum_to", lambda x: F.sum_to(x, (1, 4)), (((3, 4),), ((2, 3, 4),))),
    Case("concat", lambda *xs: F.concat(xs), (((2, 3), (2, 0), (2, 4)), ((2, 3, 4, 5), (2, 1, 4, 5)))),
    Case("concat_axis", lambda *xs: F.concat(xs, axis=-1), (((2, 3), (2, 4)), ((2, 3, 4, 5), (2, 3, 4, 1)))),
    Case("stack", lambda *xs: F.stack(xs, axis=1), (((), ())[:0] + ((2, 3), (2, 3)), ((2, 3, 4), (2, 3, 4)))),
    Case("vstack", lambda *xs: F.vstack(xs), (((3,), (2, 3)),)),
    Case("hstack", lambda *xs: F.hstack(xs), (((3,), (2,)), ((2, 3), (2, 1)))),
    Case("dstack", lambda *xs: F.dstack(xs), (((3,), (3,)), ((2, 3), (2, 3)), ((2, 3, 1), (2, 3, 2)))),
    Case("split_axis", lambda x: F.split_axis(x, 2, 1), (((3, 4),), ((2, 4, 3, 5),))),
    Case("split_axis_one_used", lambda x: F.split_axis(x, [1, 3], 1)[1], (((3, 4),), ((2, 4, 3, 5),))),
    Case("separate", lambda x: F.separate(x, axis=1), (((3, 2),), ((2, 2, 3, 4),))),
    Case("get_item", lambda x: x[1:, ::2], FULL),
    Case("get_item_number", lambda x: x[1], FULL),
    Case("get_item_newaxis", lambda x: x[..., None, -1], FULL),
    Case("get_item_arrays", lambda x: x[[0, 1, 1], [2, 0, 0]], FULL),
    Case("get_item_mask", lambda x: F.get_item(x, mask(x)), FULL),
    Case("select_item", lambda x: F.select_item(x, labels(x)), (((3, 4),), ((0, 3),))),
    Case("permutate", lambda x: F.permutate(x, _like(x, np.array([2, 0, 1]))), (((3, 4),),)),
    Case("permutate_back", lambda x: F.permutate(x, _like(x, np.array([2, 0, 1])), 1, True), (((2, 3),),)),
    Case("flip", lambda x: F.flip(x, -1), FULL),
    Case("flipud", F.flipud, FULL),
    Case("fliplr", F.fliplr, FULL),
    Case("where", lambda a, b: F.where(mask(a), a, b), SAME),
    Case("where_broadcast", lambda a, b: F.where(mask(a), a, b), (((3, 4), (4,)), ((3, 4), ()))),
    Case("scatter_add", lambda a, b: F.scatter_add(a, [0, 0, 2], b), (((3, 4), (3, 4)),)),
    Case("repeat", lambda x: F.repeat(x, 3), (((),), ((3, 4),))),
    Case("repeat_axis", lambda x: F.repeat(x, 2, axis=1), FULL),
    Case("repeat_each", lambda x: F.repeat(x, [2, 0, 1], axis=0), (((3, 4),),)),
    Case("tile", lambda x: F.tile(x, (2, 1, 3)), (((),), ((3, 4),))),
    Case("pad", lambda x: F.pad(x, ((1, 2), (0, 1)), "constant", constant_values=3), (((3, 4),),)),
    Case("pad_reflect", lambda x: F.pad(x, ((3, 2), (0, 1)), "reflect"), (((3, 4),),)),
    Case("pad_wrap", lambda x: F.pad(x, ((1, 4), (2, 5)), "wrap"), (((3, 4),),)),
    Case("pad_edge_4d", lambda x: F.pad(x, ((0, 0), (0, 0), (1, 2), (2, 1)), "edge"), (((2, 3, 4, 5),),)),
    Case("pad_4d", lambda x: F.pad(x, 1, "constant"), (((2, 3, 4, 5),),)),
    Case("cast", lambda x: F.cast(x, np.float32), FULL, order=1, narrow_tolerance=None, rtol=1e-3),
    Case("copy", lambda x: F.copy(x, x.device), ANY),
    Case("identity", F.identity, ANY),
]  # fmt: skip

ACTIVATIONS = [
    Case("relu", F.relu, ANY, nonzero),
    Case("sigmoid", F.sigmoid, ANY),
    Case("tanh", F.tanh, ANY),
    Case("softmax", F.softmax, (((3, 4),), ((0, 3),), ((2, 3, 4, 5),))),
    Case("softmax_axis", lambda x: F.softmax(x, axis=-1), FULL),
    Case("log_softmax", F.log_softmax, (((3, 4),), ((0, 3),), ((2, 3, 4, 5),))),
    Case("log_softmax_axis", lambda x: F.log_softmax(x, axis=0), FULL),
    Case("softplus", F.softplus, ANY),
    Case("softplus_beta", lambda x: F.softplus(x, 2.5), ANY),
    Case("leaky_relu", F.leaky_relu, ANY, nonzero),
    Case("prelu", F.prelu, (((2, 3), (3,)), ((2, 3), ()), ((2, 3, 4, 5), (3,))), nonzero),
    Case("elu", F.elu, ANY, nonzero),
    Case("selu", F.selu, ANY, nonzero),
    Case("clipped_relu", lambda x: F.clipped_relu(x, 1.0), ANY, distinct),
    Case("relu6", F.relu6, ANY, distinct),
    Case("hard_sigmoid", F.hard_sigmoid, ANY, distinct, narrow_tolerance=32),
    Case("swish", F.swish, (((2, 3), (3,)), ((2, 3), ()), ((2, 3, 4, 5), (3,)))),
    Case("silu", F.silu, ANY),
    Case("silu_beta", lambda x: F.silu(x, 2.5), ANY),
    Case("mish", F.mish, ANY),
    Case("hardswish", F.hardswish, ANY, distinct),
    Case("gelu", F.gelu, ANY),
    Case("gelu_by_tanh", lambda x: F.gelu(x, "tanh"), ANY),
    Case("crelu", F.crelu, (((3, 4),), ((5, 1),), ((2, 3, 4, 5),)), nonzero),
    Case("maxout", lambda x: F.maxout(x, 2), (((3, 4),), ((2, 4, 3, 5),)), distinct),
]

LOSSES = [
    Case("softmax_cross_entropy", lambda x: F.softmax_cross_entropy(x, labels(x)), (((3, 4),), ((2, 3, 4, 5),))),
    Case("softmax_cross_entropy_empty", lambda x: F.softmax_cross_entropy(x, labels(x)), (((0, 3),),)),
    Case("softmax_cross_entropy_ignore", lambda x: F.softmax_cross_entropy(x, labels(x, ignored=True)), FULL),
    Case(
        "softmax_cross_entropy_unnormalized",
        lambda x: F.softmax_cross_entropy(x, labels(x, ignored=True), normalize=False),
        FULL,
    ),
    Case("softmax_cross_entropy_each", lambda x: F.softmax_cross_entropy(x, labels(x), reduce="no"), FULL),
    Case(
        "softmax_cross_entropy_weighted",
        lambda x: F.softmax_cross_entropy(x, labels(x), class_weight=weights_of_classes(x)),
        FULL,
    ),
    Case("softmax_cross_entropy_smooth", lambda x: F.softmax_cross_entropy(x, labels(x), label_smoothing=0.1), FULL),
    Case("softmax_cross_entropy_soft", lambda x: F.softmax_cross_entropy(x, probabilities(x)), FULL),
    Case(
        "softmax_cross_entropy_divergence",
        lambda x: F.softmax_cross_entropy(x, probabilities(x), reduce="no", soft_target_loss="kl-divergence"),
        FULL,
        narrow_tolerance=64,
    ),
    Case("mean_squared_error", F.mean_squared_error, SAME),
    Case(
        "mean_absolute_error",
        F.mean_absolute_error,
        (((3, 4), (3, 4)),),
        (nonzero, lambda r, s: r.uniform(-0.1, 0.1, s)),
    ),
    Case("squared_error", F.squared_error, SAME),
    Case("absolute_error", F.absolute_error, SAME, (nonzero, lambda r, s: r.uniform(-0.1, 0.1, s))),
    Case("sigmoid_cross_entropy", lambda x: F.sigmoid_cross_entropy(x, labels(x, 2)[:, None]), (((3, 1),),)),
    Case(
        "sigmoid_cross_entropy_ignore",
        lambda x: F.sigmoid_cross_entropy(x, labels(x, 2, True)[:, None], reduce="no"),
        (((3, 1),),),
    ),
    Case("huber_loss", lambda x, t: F.huber_loss(x, t, 0.6), (((3, 4), (3, 4)),), (nonzero, smooth)),
    Case("hinge", lambda x: F.hinge(x, labels(x)), (((3, 4),),), inner),
    Case("hinge_squared", lambda x: F.hinge(x, labels(x), "L2", "no"), (((3, 4),),), inner),
    Case("bernoulli_nll", lambda x, y: F.bernoulli_nll(x, y, "mean"), (((3, 4), (3, 4)),), (share, nonzero)),
    Case("binary_cross_entropy", lambda x: F.binary_cross_entropy(x, labels(x)), (((3, 4),),)),
    Case("gaussian_nll", F.gaussian_nll, (((3, 4),) * 3,)),
    Case("gaussian_kl_divergence", F.gaussian_kl_divergence, (((3, 4),) * 2,)),
    Case("laplace_nll", F.laplace_nll, (((3, 4),) * 3,), (positive, lambda r, s: r.uniform(-0.4, 0.3, s), smooth)),
    Case(
        "sigmoid_focal_loss",
        lambda x: F.sigmoid_focal_loss(x, labels(x, 2, True)[:, None]),
        (((3, 1),), ((2, 1, 3, 4),), ((0, 1),)),
    ),
    Case(
        "sigmoid_focal_loss_each",
        lambda x: F.sigmoid_focal_loss(x, labels(x, 2)[:, None], None, 0.5, "no"),
        (((3, 1),), ((2, 1, 3, 4),)),
    ),
]

EMBEDDINGS = [
    Case("contrastive", lambda a, b: F.contrastive(a, b, similar(a), 1.5), (((3, 4), (3, 4)), ((0, 3), (0, 3)))),
    Case("contrastive_each", lambda a, b: F.contrastive(a, b, similar(a), 4.0, "no"), (((3, 2), (3, 2)),)),
    Case("triplet", F.triplet, (((3, 4),) * 3, ((0, 4),) * 3)),
    Case("triplet_each", lambda *xs: F.triplet(*xs, 9.0, "no"), (((3, 4),) * 3,)),
    Case("cross_covariance", F.cross_covariance, (((5, 4), (5, 3)), ((0, 4), (0, 3)))),
    Case("cross_covariance_each", lambda y, z: F.cross_covariance(y, z, "no"), (((5, 4), (5, 3)),)),
    Case("decov", F.decov, (((5, 4),), ((0, 3),))),
    Case("decov_each", lambda h: F.decov(h, "no"), (((5, 4),),)),
]

CHANCE = [
    Case(
        "dropout",
        lambda x: F.dropout(x, mask=_like(x, (np.arange(x.size).reshape(x.shape) % 2 * 2.0).astype(x.dtype))),
        ANY,
    ),
    Case("rrelu", lambda x: F.rrelu(x, r=_like(x, np.full(x.shape, 0.25, x.dtype))), ANY, nonzero),
    Case("gaussian", lambda m, v: F.gaussian(m, v, eps=m.xp.full(m.shape, 0.5, m.dtype)), (((3, 4), (3, 4)),)),
]

MASKS = (np.arange(24) * 5 % 7 > 2).reshape(2, 4, 3)
CHANCE += [
    Case("zoneout", lambda h, x: F.zoneout(h, x, 1.0), SAME),
    Case("zoneout_never", lambda h, x: F.zoneout(h, x, 0.0), SAME),
    Case(
        "simplified_dropconnect",
        lambda x, W, b: F.simplified_dropconnect(x, W, b, 0.25, mask=_like(x, MASKS)),
        (((2, 3), (4, 3), (4,)), ((2, 3, 1), (4, 3), (4,))),
    ),
    Case(
        "simplified_dropconnect_one_mask",
        lambda x, W: F.simplified_dropconnect(x, W, mask=_like(x, MASKS[0]), use_batchwise_mask=False),
        (((2, 3), (4, 3)), ((0, 3), (4, 3))),
    ),
]

IMAGES = ((2, 3, 5, 6), (4, 3, 3, 2), (4,))

CONVOLUTION = [
    Case("convolution_2d", F.convolution_2d, (IMAGES, IMAGES[:2], ((0, 3, 5, 6), *IMAGES[1:]))),
    Case("convolution_2d_strided", lambda x, W, b: F.convolution_2d(x, W, b, 2, 1), (IMAGES,)),
    Case("convolution_2d_dilated", lambda x, W: F.convolution_2d(x, W, pad=2, dilate=(2, 1)), (IMAGES[:2],)),
    Case("convolution_2d_grouped", lambda x, W: F.convolution_2d(x, W, groups=2), (((2, 4, 5, 6), (6, 2, 3, 2)),)),
    Case("deconvolution_2d", lambda x, W, b: F.deconvolution_2d(x, W, b, 2, 1), (((2, 4, 3, 4), (4, 3, 3, 2), (3,)),)),
]

POOLING = [
    Case("max_pooling_2d", lambda x: F.max_pooling_2d(x, 3, 2, 1), (((2, 3, 5, 6),),), distinct),
    Case("max_pooling_2d_inside", lambda x: F.max_pooling_2d(x, 2, cover_all=False), (((2, 3, 5, 6),),), distinct),
    Case("average_pooling_2d", lambda x: F.average_pooling_2d(x, 3, 2, 1), (((2, 3, 5, 6),),)),
    Case("global_average_pooling_2d", F.global_average_pooling_2d, (((2, 3, 5, 6),),)),
]


# Grids that stay within their pixels, where the interpolation has no kink.
def between_pixels(rng: Any, shape: tuple[int, ...]) -> Any:
    return (rng.integers(-1, 4, shape) + rng.uniform(0.2, 0.8, shape)) / 1.5 - 1.0


PIXELS = [
    Case("depth2space", lambda x: F.depth2space(x, 2), (((2, 8, 3, 2),), ((0, 4, 2, 3),))),
    Case("space2depth", lambda x: F.space2depth(x, 2), (((2, 3, 4, 6),),)),
    Case("im2col", lambda x: F.im2col(x, 3, 2, 1), (((2, 3, 5, 6),), ((0, 3, 5, 6),))),
    Case("im2col_far", lambda x: F.im2col(x, (2, 3), (1, 2), (2, 0), True, (2, 1)), (((2, 3, 5, 6),),)),
    Case("resize_images", lambda x: F.resize_images(x, (7, 9)), (((2, 3, 4, 5),), ((0, 3, 4, 5),), ((2, 3, 1, 4),))),
    Case("resize_images_less", lambda x: F.resize_images(x, (3, 2)), (((2, 3, 4, 5),),)),
    Case("resize_images_edges", lambda x: F.resize_images(x, (7, 3), align_corners=False), (((2, 3, 4, 5),),)),
    Case("resize_images_nearest", lambda x: F.resize_images(x, (6, 3), mode="nearest"), (((2, 3, 4, 5),),)),
    Case("spatial_transformer_grid", lambda t: F.spatial_transformer_grid(t, (3, 4)), (((2, 2, 3),),)),
    Case(
        "spatial_transformer_sampler",
        F.spatial_transformer_sampler,
        (((2, 3, 4, 4), (2, 2, 3, 5)),),
        (smooth, between_pixels),
        narrow_tolerance=64,
    ),
]

STATISTICS = (nonzero, positive, smooth)

NORMALIZATION = [
    Case("normalize", F.normalize, (((3, 4),), ((0, 3),), ((2, 3, 4, 5),))),
    Case("normalize_axes", lambda x: F.normalize(x, 0.1, (0, -1)), FULL),
    Case("local_response_normalization", F.local_response_normalization, (((3, 4),), ((0, 3),), ((2, 7, 3, 2),))),
    Case(
        "local_response_normalization_strong",
        lambda x: F.local_response_normalization(x, 2, 1, 0.5, 1.5),
        (((3, 4),), ((2, 7, 3, 2),), ((2, 1, 3),)),
    ),
    Case(
        "batch_normalization",
        F.batch_normalization,
        (((4, 3), (3,), (3,)), ((3, 2, 4, 5), (2,), (2,))),
        STATISTICS,
        rtol=1e-5,
        narrow_tolerance=64,
    ),
    Case(
        "fixed_batch_normalization",
        F.fixed_batch_normalization,
        (((4, 3), (3,), (3,), (3,), (3,)), ((3, 2, 4, 5), (2,), (2,), (2,), (2,))),
        (*STATISTICS, smooth, positive),
        narrow_tolerance=64,
    ),
    Case(
        "layer_normalization",
        F.layer_normalization,
        (((4, 6), (6,), (6,)), ((1, 3), (3,), (3,))),
        STATISTICS,
        rtol=1e-5,
        narrow_tolerance=64,
    ),
    Case(
        "group_normalization",
        lambda x, gamma, beta: F.group_normalization(x, 2, gamma, beta),
        (((3, 4), (4,), (4,)), ((2, 4, 3, 5), (4,), (4,)), ((2, 2, 5), (2,), (2,))),
        STATISTICS,
        rtol=1e-5,
        narrow_tolerance=64,
    ),
]


def _flat(found: Any) -> Any:
    """States and the list of outputs as one tuple."""
    return (*found[:-1], *found[-1])


U, STEPS = 2, ((3, 2), (2, 2), (2, 2))
RECURRENT = [
    Case("lstm", F.lstm, (((2, 3), (2, 12)), ((3, 2), (2, 8)), ((2, 1, 2), (0, 4, 2))), narrow_tolerance=64),
    Case("lstm_cell_alone", lambda c, x: F.lstm(c, x)[0], (((3, 2), (2, 8)),), narrow_tolerance=64),
    Case("lstm_output_alone", lambda c, x: F.lstm(c, x)[1], (((3, 2), (2, 8)),), narrow_tolerance=64),
    Case("slstm", F.slstm, (((2, 3), (2, 3), (2, 12), (2, 12)),), narrow_tolerance=64),
    Case("tree_lstm", F.tree_lstm, (((2, 3), (2, 12)), ((2, 3), (2, 3), (2, 3), (2, 18))), narrow_tolerance=64),
    Case(
        "n_step_lstm",
        lambda hx, cx, w, b, *xs: _flat(
            F.n_step_lstm(1, 0.0, hx, cx, [[w[k] for k in range(8)]], [[b[k] for k in range(8)]], xs)
        ),
        (((1, 3, U), (1, 3, U), (8, U, U), (8, U), *STEPS),),
        narrow_tolerance=256,
        has_one_rule=False,
    ),
    Case(
        "n_step_bilstm",
        lambda hx, cx, w, v, b, *xs: _flat(
            F.n_step_bilstm(
                1,
                0.0,
                hx,
                cx,
                [[w[k] for k in range(8)], [v[k] for k in range(8)]],
                [[b[k] for k in range(8)], [b[k + 8] for k in range(8)]],
                xs,
            )
        ),
        (((2, 3, U), (2, 3, U), (8, U, U), (8, U, U), (16, U), *STEPS),),
        narrow_tolerance=256,
        has_one_rule=False,
    ),
    Case(
        "n_step_gru",
        lambda hx, w, b, *xs: _flat(
            F.n_step_gru(1, 0.0, hx, [[w[k] for k in range(6)]], [[b[k] for k in range(6)]], xs)
        ),
        (((1, 3, U), (6, U, U), (6, U), *STEPS),),
        narrow_tolerance=256,
        has_one_rule=False,
    ),
    Case(
        "n_step_bigru",
        lambda hx, w, v, b, *xs: _flat(
            F.n_step_bigru(
                1,
                0.0,
                hx,
                [[w[k] for k in range(6)], [v[k] for k in range(6)]],
                [[b[k] for k in range(6)], [b[k + 6] for k in range(6)]],
                xs,
            )
        ),
        (((2, 3, U), (6, U, U), (6, U, U), (12, U), *STEPS),),
        narrow_tolerance=256,
        has_one_rule=False,
    ),
    Case(
        "n_step_rnn",
        lambda hx, w, b, *xs: _flat(
            F.n_step_rnn(1, 0.0, hx, [[w[k] for k in range(2)]], [[b[k] for k in range(2)]], xs)
        ),
        (((1, 3, U), (2, U, U), (2, U), *STEPS),),
        narrow_tolerance=256,
        has_one_rule=False,
    ),
    Case(
        "n_step_birnn",
        lambda hx, w, v, b, *xs: _flat(
            F.n_step_birnn(
                1,
                0.0,
                hx,
                [[w[k] for k in range(2)], [v[k] for k in range(2)]],
                [[b[k] for k in range(2)], [b[k + 2] for k in range(2)]],
                xs,
            )
        ),
        (((2, 3, U), (2, U, U), (2, U, U), (4, U), *STEPS),),
        narrow_tolerance=256,
        has_one_rule=False,
    ),
]

PLACES = np.array([[[[1, 3], [0, 2]]]])
WINDOWS = [
    Case("convolution_nd", lambda x, W, b: F.convolution_nd(x, W, b, (2, 1, 1), (1, 0, 1), False, (1, 2, 1), 2),
         (((2, 4, 3, 4, 3), (2, 2, 2, 2, 2), (2,)),)),
    Case("convolution_1d", lambda x, W, b: F.convolution_1d(x, W, b, 2, 1), (((2, 3, 6), (4, 3, 3), (4,)),)),
    Case("convolution_3d", lambda x, W: F.convolution_3d(x, W, stride=2, cover_all=True),
         (((1, 2, 4, 3, 4), (2, 2, 2, 2, 2)),)),
    Case("deconvolution_nd", lambda x, W, b: F.deconvolution_nd(x, W, b, (2, 1, 1), (1, 0, 1), None, (1, 2, 1), 2),
         (((2, 2, 2, 2, 3), (2, 2, 2, 2, 2), (4,)),)),
    Case("deconvolution_1d", lambda x, W, b: F.deconvolution_1d(x, W, b, 2, 1), (((2, 3, 3), (3, 4, 3), (4,)),)),
    Case("deconvolution_3d", lambda x, W: F.deconvolution_3d(x, W, stride=2, outsize=(4, 5, 4)),
         (((1, 2, 2, 2, 2), (2, 2, 2, 2, 2)),)),
    Case("depthwise_convolution_2d", lambda x, W, b: F.depthwise_convolution_2d(x, W, b, 1, 1),
         (((2, 3, 4, 4), (2, 3, 3, 3), (6,)),)),
    Case("dilated_convolution_2d", lambda x, W, b: F.dilated_convolution_2d(x, W, b, 1, 1, 2),
         (((2, 3, 5, 6), (4, 3, 2, 2), (4,)),)),
    Case("max_pooling_nd", lambda x: F.max_pooling_nd(x, 2, (1, 2, 2), (0, 1, 0)), (((2, 2, 3, 4, 4),),), distinct),
    Case("max_pooling_1d", lambda x: F.max_pooling_1d(x, 3, 2, 1), (((2, 3, 6),),), distinct),
    Case("max_pooling_3d", lambda x: F.max_pooling_3d(x, 2), (((1, 2, 3, 4, 3),),), distinct),
    Case("average_pooling_nd", lambda x: F.average_pooling_nd(x, 2, (1, 2, 2), (0, 1, 0), None), (((2, 2, 3, 3, 4),),)),
    Case("average_pooling_1d", lambda x: F.average_pooling_1d(x, 3, 2, 1), (((2, 3, 6),),)),
    Case("average_pooling_3d", lambda x: F.average_pooling_3d(x, 2), (((1, 2, 3, 4, 3),),)),
    Case("unpooling_nd", lambda x: F.unpooling_nd(x, 2, (1, 2, 2), (0, 1, 0), None, False), (((2, 2, 2, 2, 2),),)),
    Case("unpooling_1d", lambda x: F.unpooling_1d(x, 3, 2, 1), (((2, 3, 3),),)),
    Case("unpooling_2d", lambda x: F.unpooling_2d(x, 2, outsize=(4, 3)), (((2, 3, 2, 2),),)),
    Case("unpooling_3d", lambda x: F.unpooling_3d(x, 2), (((1, 2, 2, 1, 2),),)),
    Case("upsampling_2d", lambda x: F.upsampling_2d(x, _like(x, PLACES), 2, cover_all=False), (((1, 1, 2, 2),),)),
    Case("spatial_pyramid_pooling_2d", lambda x: F.spatial_pyramid_pooling_2d(x, 2), (((2, 3, 4, 5),),), distinct),
]  # fmt: skip

WORDS, NOISE = np.array([1, 3, 0], np.int32), np.array([[0, 2], [3, 3], [1, 4]], np.int32)
CHOSEN = np.concatenate([WORDS[:, None], NOISE], axis=1)
TAGS = [np.array([1, 0, 2], np.int32), np.array([2, 2], np.int32), np.array([0], np.int32)]
TEXT = np.array([[1, 2], [2, 2]], np.int32)
VOCABULARY = [
    Case("crf1d", lambda c, *xs: F.crf1d(c, xs, [_like(c, y) for y in TAGS]), (((3, 3), (3, 3), (2, 3), (1, 3)),),
         narrow_tolerance=64),
    Case("connectionist_temporal_classification",
         lambda *xs: F.connectionist_temporal_classification(xs, _like(xs[0], TEXT), 0), (((2, 3),) * 4,),
         has_one_rule=False),
    Case("negative_sampling",
         lambda x, W: F.negative_sampling(x, _like(x, WORDS), W, None, 2, samples=_like(x, CHOSEN)),
         (((3, 4), (5, 4)),),
         narrow_tolerance=64),
    Case("black_out", lambda x, W: F.black_out(x, _like(x, WORDS), W, _like(x, NOISE)), (((3, 4), (5, 4)),),
         narrow_tolerance=None),
]  # fmt: skip


# Places that stay within their pixels, where values between pixels have no kink.
def inside_pixels(rng: Any, shape: tuple[int, ...]) -> Any:
    return rng.integers(-2, 3, shape) + rng.uniform(0.2, 0.8, shape)


def restarted(x: Any) -> Any:
    """x, with nothing drawn yet: a function of chance gives the same numbers again."""
    random.set_state((0,) * len(random.get_state()))
    return x


ROIS = np.array([[0.5, 1.0, 4.0, 5.5], [1.0, 0.5, 6.0, 3.0], [-3.0, -2.5, 9.0, 12.0], [2.0, 2.0, 2.0, 2.0]])
PLACED = np.array([1, 0, 1, 0], np.int32)
OF_IMAGES = np.concatenate([PLACED[:, None], ROIS], axis=1)
OBJECTS = np.array([[[1, 2, 0], [1, 2, 2]], [[3, 1, 1], [3, 0, 1]]], np.int32)
SEEN = (((2, 3, 5, 6),),)


def near(x: Any, a: Any) -> Any:
    """An array in the type of x and on its device."""
    return _like(x, a.astype(x.dtype))


REGIONS = [
    Case("roi_average_pooling_2d",
         lambda x: F.roi_average_pooling_2d(x, near(x, ROIS), _like(x, PLACED), (3, 2), 0.75), SEEN),
    Case("roi_average_align_2d",
         lambda x: F.roi_average_align_2d(x, near(x, ROIS), _like(x, PLACED), (3, 2), 0.75), SEEN),
    Case("roi_average_align_2d_ratio",
         lambda x: F.roi_average_align_2d(x, near(x, ROIS[:2]), _like(x, PLACED[:2]), 2, 0.5, (3, 2)), SEEN),
    Case("roi_max_pooling_2d",
         lambda x: F.roi_max_pooling_2d(x, near(x, ROIS), _like(x, PLACED), (3, 2), 0.75), SEEN, distinct),
    Case("roi_max_align_2d",
         lambda x: F.roi_max_align_2d(x, near(x, ROIS), _like(x, PLACED), (3, 2), 0.75), SEEN, distinct),
    Case("roi_max_align_2d_ratio",
         lambda x: F.roi_max_align_2d(x, near(x, ROIS), _like(x, PLACED), 2, 0.5, 2), SEEN, distinct),
    Case("roi_pooling_2d", lambda x: F.roi_pooling_2d(x, near(x, OF_IMAGES), 3, 2, 0.75), SEEN, distinct),
    Case("roi_of_no_regions",
         lambda x: F.roi_average_align_2d(x, near(x, ROIS[:0]), _like(x, PLACED[:0]), 2, 1.0), (((0, 3, 4, 5),),)),
]  # fmt: skip

RELATIVES = [
    Case("local_convolution_2d", F.local_convolution_2d, (
        ((2, 3, 4, 5), (2, 3, 3, 3, 2, 3), (2, 3, 3)), ((0, 1, 2, 2), (1, 1, 1, 1, 2, 2), (1, 1, 1)))),
    Case("local_convolution_2d_strided", lambda x, W: F.local_convolution_2d(x, W, None, (2, 1)), (
        ((2, 3, 5, 4), (2, 2, 3, 3, 3, 2)),)),
    Case("deformable_convolution_2d_sampler", F.deformable_convolution_2d_sampler, (
        ((2, 3, 4, 5), (2, 12, 3, 3), (2, 3, 2, 3), (2,)),), (smooth, inside_pixels, smooth, smooth),
         narrow_tolerance=64),
    Case("deformable_convolution_2d_sampler_strided",
         lambda x, d, W: F.deformable_convolution_2d_sampler(x, d, W, None, (2, 1), (1, 2)), (
             ((2, 3, 4, 3), (2, 8, 3, 6), (2, 3, 2, 2)),), (smooth, inside_pixels, smooth), narrow_tolerance=64),
    Case("shift", F.shift, (((2, 11, 3, 4),), ((0, 9, 2, 2),))),
    Case("shift_far", lambda x: F.shift(x, (1, 3), (1, -2)), (((2, 3, 3, 5),), ((2, 4, 3, 2),))),
    Case("as_strided", lambda x: F.as_strided(x, (3, 2), (1, 2)), (((6,),), ((2, 4),), ((2, 3, 4, 5),))),
    Case("as_strided_back", lambda x: F.as_strided(x, (2, 0, 3), (-1, 5, 0), 1), (((6,),),)),
    Case("as_strided_apart", lambda x: F.as_strided(x, (2, 2), (-3, 1), 4), (((6,),), ((2, 4),))),
    Case("gumbel_softmax", lambda x: F.gumbel_softmax(restarted(x), 1.5), (((3, 4),), ((0, 3),), ((2, 3, 5),)),
         narrow_tolerance=64),
    Case("discriminative_margin_based_clustering_loss",
         lambda x: F.discriminative_margin_based_clustering_loss(x, _like(x, OBJECTS), 0.1, 1.5, 4), (
             ((2, 3, 2, 3),),), nonzero, narrow_tolerance=64),
    Case("discriminative_margin_based_clustering_loss_euclidean",
         lambda x: F.discriminative_margin_based_clustering_loss(x, _like(x, OBJECTS), 0.1, 2.5, 3, 2, gamma=0.5), (
             ((2, 3, 2, 3),),), nonzero, narrow_tolerance=64),
]  # fmt: skip


def entries(x: Any, *places: Any, shape: tuple[int, int] = (3, 4)) -> Any:
    """A sparse matrix with the numbers x; -1 for what is no entry."""
    return CooMatrix(x, *(_like(x, np.array(p, np.int32)) for p in places), shape)


ROWS_, COLUMNS = (0, 0, 2, 1, 0, -1), (1, 3, 0, 2, 1, -1)  # one place twice
BATCH = ((ROWS_, (2, 2, 1, 0, -1, -1)), (COLUMNS, (3, 1, 1, 0, -1, -1)))
SEEN_BEFORE = (smooth, nonzero, smooth)


def before(x: Any, *values: float) -> Any:
    """Running statistics."""
    return near(x, np.array(values))


WHITENING = [
    Case("batch_renormalization_within_bounds",
         lambda x, g, b: F.batch_renormalization(x, g, b, 1.01, 0.01, 1e-3, before(x, 0.5, -0.6), before(x, 2, 0.02)), (
             ((5, 2), (2,), (2,)), ((3, 2, 4, 5), (2,), (2,))), SEEN_BEFORE, rtol=1e-5, narrow_tolerance=64),
    Case("fixed_batch_renormalization", F.fixed_batch_renormalization, (
        ((4, 3), (3,), (3,), (3,), (3,)), ((3, 2, 4, 5), (2,), (2,), (2,), (2,))), (
            nonzero, positive, smooth, smooth, positive), narrow_tolerance=64),
    Case("decorrelated_batch_normalization", lambda x: F.decorrelated_batch_normalization(x, groups=2, eps=0.05), (
        ((7, 4),), ((3, 4, 3, 5),), ((3, 2, 4),), ((0, 4),)), rtol=1e-5, narrow_tolerance=256),
    Case("fixed_decorrelated_batch_normalization",
         lambda x, m, p: F.fixed_decorrelated_batch_normalization(x, m, p, 2), (
             ((7, 4), (2, 2), (2, 2, 2)), ((3, 4, 3, 5), (2, 2), (2, 2, 2))), narrow_tolerance=64),
    Case("sparse_matmul", lambda d, b: F.sparse_matmul(entries(d, ROWS_, COLUMNS), b), (((6,), (4, 2)),)),
    Case("sparse_matmul_right", lambda d, a: F.sparse_matmul(a, entries(d, ROWS_, COLUMNS)), (((6,), (2, 3)),)),
    Case("sparse_matmul_batch", lambda d, b: F.sparse_matmul(entries(d, *BATCH), b, True, True), (
        ((2, 6), (2, 5, 3)),)),
    Case("sparse_matmul_right_batch", lambda d, a: F.sparse_matmul(a, entries(d, *BATCH), True, True), (
        ((2, 6), (2, 4, 5)),)),
    Case("forget", lambda x, y: F.forget(lambda a, b: (F.tanh(a * b), F.exp(b)), x, y), (
        ((3, 4), (3, 4)), ((2, 3, 4, 5),) * 2, ((0, 2), (0, 2)))),
    Case("forget_one_used", lambda x, y: F.forget(lambda a: (F.tanh(a) * y, a), x)[0] * x, (((3, 4), (3, 4)),)),
    Case("forget_twice", lambda x, W: F.forget(lambda a: F.forget(lambda b: F.linear(b, W), a) * F.sum(W), x), (
        ((3, 4), (5, 4)),)),
]  # fmt: skip

SOME_SEEN = np.array([[True, False, True], [False, False, False], [True, True, True], [False, True, False]])
ATTENTION = [
    Case("scaled_dot_product_attention", F.scaled_dot_product_attention, (
        ((4, 2), (3, 2), (3, 5)), ((2, 1, 4, 2), (2, 1, 3, 2), (2, 1, 3, 4)), ((2, 4, 3), (5, 3), (2, 5, 2)),
        ((0, 4, 2), (0, 3, 2), (0, 3, 5)))),
    Case("scaled_dot_product_attention_masked",
         lambda q, k, v: F.scaled_dot_product_attention(q, k, v, _like(q, SOME_SEEN), scale=0.5), (
             ((4, 2), (3, 2), (3, 5)), ((2, 4, 2), (2, 3, 2), (2, 3, 5)))),
    Case("scaled_dot_product_attention_causal",
         lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (((4, 2), (3, 2), (3, 5)),)),
    Case("scaled_dot_product_attention_biased",
         lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), (((4, 2), (3, 2), (3, 5), (4, 3)),)),
    Case("multi_head_attention", lambda q, k, v: F.multi_head_attention(q, k, v, 2), (
        ((2, 4, 6), (2, 3, 6), (2, 3, 4)), ((0, 1, 2), (0, 3, 2), (0, 3, 2)))),
    Case("rms_normalization", F.rms_normalization, (((3, 4), (4,)), ((5,), (5,)), ((2, 3, 4), (4,)), ((0, 3), (3,))),
         (nonzero, positive), narrow_tolerance=64),
]  # fmt: skip

SECTIONS = {
    "regions": REGIONS, "whitening": WHITENING, "attention": ATTENTION, "relatives": RELATIVES,
    "arithmetic": ARITHMETIC, "elementary": ELEMENTARY, "special": SPECIAL, "reductions": REDUCTIONS,
    "products": PRODUCTS, "algebra": ALGEBRA,
    "shapes": SHAPES, "activations": ACTIVATIONS, "losses": LOSSES, "embeddings": EMBEDDINGS, "chance": CHANCE,
    "convolution": CONVOLUTION, "pixels": PIXELS, "pooling": POOLING, "normalization": NORMALIZATION,
    "recurrent": RECURRENT, "windows": WINDOWS, "vocabulary": VOCABULARY,
}  # fmt: skip
CASES = [case for cases in SECTIONS.values() for case in cases]
ROWS = [(case, shapes) for case in CASES for shapes in case.shapes]


def ids_of(rows: list[tuple[Case, Any]]) -> list[str]:
    """Names of tests: the case and its shapes."""
    return [f"{case.name}-{'-'.join('x'.join(map(str, s)) or '0d' for s in shapes)}" for case, shapes in rows]


IDS = ids_of(ROWS)


def every_case(test: Callable[..., None], wanted: Callable[[Case], bool] = lambda case: True) -> Callable[..., None]:
    """A decorator: an item for each section of the table, with its cases (those that are wanted) one after the other.

    Those that fail are reported by name.
    """
    sections = {name: chosen for name, cases in SECTIONS.items() if (chosen := [c for c in cases if wanted(c)])}
    together = each(case=lambda section: sections[section])(test)
    return pytest.mark.parametrize("section", sections)(together)


every_twice_differentiable_case = functools.partial(every_case, wanted=lambda case: case.order > 1)
every_case_of_several_inputs = functools.partial(every_case, wanted=lambda case: len(case.shapes[-1]) > 1)
