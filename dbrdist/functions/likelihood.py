"""Losses that are negative log-likelihoods of a distribution, and divergences of distributions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dbrdist.core.array.backend import Array
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.elementwise import elementwise
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import one_of
from dbrdist.core.tape.elementwise_table import row, together
from dbrdist.core.tape.variable import Operand, Variable, as_array
from dbrdist.core.usage.mistakes import warn
from dbrdist.functions.loss import bernoulli, mean_of_losses, same_shapes
from dbrdist.functions.scores import see_scores, see_targets

_normal_loss = row(
    "normal_loss",
    lambda x, mean, ln_var: (x - mean) ** 2 * 0.5 * np.exp(-ln_var) + (ln_var + math.log(2 * math.pi)) * 0.5,
    lambda x, mean, ln_var: ops.mul(ops.sub(x, mean), ops.exp(ops.neg(ln_var))),
    lambda x, mean, ln_var: ops.mul(ops.sub(mean, x), ops.exp(ops.neg(ln_var))),
    lambda x, mean, ln_var: ops.sub(
        0.5, ops.mul(ops.mul(ops.power(ops.sub(x, mean), 2), 0.5), ops.exp(ops.neg(ln_var)))
    ),
    "(ln 2 pi + ln_var + (x - mean)^2 / exp(ln_var)) / 2",
    args="x mean ln_var",
    has_loop_for_each=True,
)
_laplace_loss = row(
    "laplace_loss",
    lambda x, loc, ln_scale: abs(x - loc) * np.exp(-ln_scale) + ln_scale + math.log(2),
    lambda x, loc, ln_scale: ops.mul(_sign_of_difference(x, loc), ops.exp(ops.neg(ln_scale))),
    lambda x, loc, ln_scale: ops.mul(_sign_of_difference(loc, x), ops.exp(ops.neg(ln_scale))),
    lambda x, loc, ln_scale: ops.sub(1.0, ops.mul(ops.absolute(ops.sub(x, loc)), ops.exp(ops.neg(ln_scale)))),
    "ln 2 + ln_scale + |x - loc| / exp(ln_scale)",
    args="x loc ln_scale",
    domain=((0.3, 1.5), (-1.5, -0.3), (-1.0, 1.0)),
    has_loop_for_each=True,
)


def _sign_of_difference(a: Operand, b: Operand) -> Array:
    return elementwise(np.sign, as_array(ops.sub(a, b)))


def _reduced(function: str, losses: Variable, reduce: str, choices: tuple[str, ...]) -> Variable:
    """``losses`` as they are ('no'), or their 'sum' or 'mean', which of nothing is 0."""
    one_of(function, "reduce", choices, reduce)
    return losses if reduce == "no" else losses.sum() if reduce == "sum" else mean_of_losses(losses)


def _see_order(x: Operand, y: Operand) -> None:
    see_scores("bernoulli_nll", y)
    if isinstance(x, Variable) and x.node.creator_node is not None and not isinstance(y, Variable):
        words = "the data x depend on parameters and the scores y do not"
        warn(f"bernoulli_nll: {words}; write bernoulli_nll(data, scores)")
    else:
        see_targets("bernoulli_nll", "x", as_array(x))


def _outcomes(function: str, **xs: Operand) -> tuple[Any, ...]:
    """The operands as Variables of one shape; in a program of Chainer, in types and shapes that go together."""
    if not as_chainer[0]:
        return same_shapes(function, **xs)
    variables = together(function, "number", **xs)
    shapes = [x.shape for x in variables]
    try:
        shape = np.broadcast_shapes(*shapes)
    except ValueError:
        return same_shapes(function, **xs)
    return tuple([x if x.shape == shape else ops.broadcast_to(x, shape) for x in variables])


def bernoulli_nll(x: Operand, y: Operand, reduce: str = "sum") -> Variable:
    """Negative log-likelihood of a Bernoulli distribution, -x ln sigmoid(y) - (1 - x) ln(1 - sigmoid(y)).

    Args:
        x: outcomes or probabilities from 0 to 1, any shape.
        y: scores before the sigmoid, in the shape of x.
        reduce: 'sum', 'mean' or 'no' for one loss per element.

    Example:
        >>> F.bernoulli_nll(np.array([1.0, 0.0]), np.array([0.0, 0.0]), reduce="no").array.round(4)
        array([0.6931, 0.6931])
    """
    _see_order(x, y)
    x, y = _outcomes("bernoulli_nll", x=x, y=y)
    return _reduced("bernoulli_nll", bernoulli(x, y), reduce, ("sum", "mean", "no"))


def gaussian_nll(x: Operand, mean: Operand, ln_var: Operand, reduce: str = "sum") -> Variable:
    """Negative log-likelihood of a normal distribution, (ln 2 pi + ln_var + (x - mean)^2 / exp(ln_var)) / 2.

    Args:
        x: outcomes, any shape.
        mean: the means, in the shape of x.
        ln_var: the logarithms of the variances, in the shape of x.
        reduce: 'sum', 'mean' or 'no' for one loss per element.

    Example:
        >>> F.gaussian_nll(np.array([0.0]), np.array([0.0]), np.array([0.0])).array.round(4)
        np.float64(0.9189)
    """
    x, mean, ln_var = _outcomes("gaussian_nll", x=x, mean=mean, ln_var=ln_var)
    return _reduced("gaussian_nll", _normal_loss(x, mean, ln_var), reduce, ("sum", "mean", "no"))


def gaussian_kl_divergence(mean: Operand, ln_var: Operand, reduce: str = "sum") -> Variable:
    """Divergence of N(mean, exp ln_var) from N(0, 1), (mean^2 + exp(ln_var) - ln_var - 1) / 2, in nats.

    Args:
        mean: the means, any shape.
        ln_var: the logarithms of the variances, in the shape of ``mean``.
        reduce: 'sum', 'mean' or 'no' for one value per element.

    Example:
        >>> F.gaussian_kl_divergence(np.array([0.0, 2.0]), np.zeros(2), reduce="no").array
        array([0., 2.])
    """
    mean, ln_var = _outcomes("gaussian_kl_divergence", mean=mean, ln_var=ln_var)
    losses = ops.mul(ops.sub(ops.sub(ops.add(ops.power(mean, 2), ops.exp(ln_var)), ln_var), 1.0), 0.5)
    return _reduced("gaussian_kl_divergence", losses, reduce, ("sum", "mean", "no"))


def laplace_nll(x: Operand, loc: Operand, ln_scale: Operand, reduce: str = "sum") -> Variable:
    """Negative log-likelihood of a Laplace distribution, ln 2 + ln_scale + |x - loc| / exp(ln_scale).

    Args:
        x: outcomes, any shape.
        loc: the locations, in the shape of x.
        ln_scale: the logarithms of the scales, in the shape of x.
        reduce: 'sum', 'mean' or 'no' for one loss per element.

    Example:
        >>> F.laplace_nll(np.array([1.0]), np.array([0.0]), np.array([0.0])).array.round(4)
        np.float64(1.6931)
    """
    x, loc, ln_scale = _outcomes("laplace_nll", x=x, loc=loc, ln_scale=ln_scale)
    return _reduced("laplace_nll", _laplace_loss(x, loc, ln_scale), reduce, ("sum", "mean", "no"))
