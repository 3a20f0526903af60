"""Losses that are negative log-likelihoods of a distribution, and divergences of distributions."""

from __future__ import annotations

from typing import Any

import numpy as np

from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import one_of
from dbrdist.core.tape.variable import Operand, Variable
from dbrdist.core.usage.mistakes import warn
from dbrdist.functions.loss import bernoulli, same_shapes
from dbrdist.functions.math import exp
from dbrdist.functions.scores import see_scores


def _reduced(function: str, losses: Any, reduce: str, choices: tuple[str, ...]) -> Any:
    """``losses`` as they are ('no'), or their 'sum' or 'mean'."""
    one_of(function, "reduce", choices, reduce)
    return losses if reduce == "no" else losses.sum() if reduce == "sum" else losses.mean()


def _see_order(x: Any, y: Any) -> None:
    see_scores("bernoulli_nll", y)
    if isinstance(x, Variable) and x.node.creator_node is not None and not isinstance(y, Variable):
        words = "the data x depend on parameters and the scores y do not"
        warn(f"bernoulli_nll: {words}; write bernoulli_nll(data, scores)")


def bernoulli_nll(x: Operand, y: Operand, reduce: str = "sum") -> Variable:
    """-x ln sigmoid(y) - (1 - x) ln(1 - sigmoid(y)) for probabilities x and scores y; reduce 'sum', 'mean' or 'no'."""
    _see_order(x, y)
    x, y = same_shapes("bernoulli_nll", x=x, y=y)
    return _reduced("bernoulli_nll", bernoulli(x, y), reduce, ("sum", "mean", "no"))


def gaussian_nll(x: Operand, mean: Operand, ln_var: Operand, reduce: str = "sum") -> Variable:
    """(ln 2 pi + ln_var + (x - mean)^2 / exp(ln_var)) / 2; equal shapes; reduce 'sum', 'mean' or 'no'."""
    x, mean, ln_var = same_shapes("gaussian_nll", x=x, mean=mean, ln_var=ln_var)
    scaled = ops.mul(ops.power(ops.sub(x, mean), 2), exp(ops.neg(ln_var)))
    losses = ops.mul(ops.add(ops.add(scaled, ln_var), float(np.log(2 * np.pi))), 0.5)
    return _reduced("gaussian_nll", losses, reduce, ("sum", "mean", "no"))


def gaussian_kl_divergence(mean: Operand, ln_var: Operand, reduce: str = "sum") -> Variable:
    """KL(N(mean, exp ln_var) | N(0, 1)) = (mean^2 + exp(ln_var) - ln_var - 1) / 2; reduce 'sum', 'mean' or 'no'."""
    mean, ln_var = same_shapes("gaussian_kl_divergence", mean=mean, ln_var=ln_var)
    losses = ops.mul(ops.sub(ops.sub(ops.add(ops.power(mean, 2), exp(ln_var)), ln_var), 1.0), 0.5)
    return _reduced("gaussian_kl_divergence", losses, reduce, ("sum", "mean", "no"))


def laplace_nll(x: Operand, loc: Operand, ln_scale: Operand, reduce: str = "sum") -> Variable:
    """ln 2 + ln_scale + |x - loc| / exp(ln_scale); equal shapes; reduce 'sum', 'mean' or 'no'."""
    x, loc, ln_scale = same_shapes("laplace_nll", x=x, loc=loc, ln_scale=ln_scale)
    scaled = ops.mul(ops.absolute(ops.sub(x, loc)), exp(ops.neg(ln_scale)))
    losses = ops.add(ops.add(scaled, ln_scale), float(np.log(2)))
    return _reduced("laplace_nll", losses, reduce, ("sum", "mean", "no"))
