"""Divergences between continuous distributions of one family, in closed form."""

from __future__ import annotations

import numpy as np

import dbrdist.functions as F
from dbrdist.core.tape.variable import Variable
from dbrdist.distributions.base import log_beta, register_kl
from dbrdist.distributions.continuous import Beta, Chisquare, Exponential, Gamma, Pareto, Uniform
from dbrdist.distributions.location_scale import Gumbel, Laplace, LogNormal, Normal

_EULER = float(np.euler_gamma)


@register_kl(Normal, Normal)
def _kl_normal(p: Normal, q: Normal) -> Variable:
    ratio = F.exp(2.0 * (p.log_scale - q.log_scale))
    return 0.5 * (ratio + F.square((p.loc - q.loc) / q.scale) - 1.0) + q.log_scale - p.log_scale


@register_kl(LogNormal, LogNormal)
def _kl_log_normal(p: LogNormal, q: LogNormal) -> Variable:
    return _kl_normal(p._normal, q._normal)


@register_kl(Laplace, Laplace)
def _kl_laplace(p: Laplace, q: Laplace) -> Variable:
    distance = F.absolute(p.loc - q.loc)
    return F.log(q.scale / p.scale) + (distance + p.scale * F.exp(-distance / p.scale)) / q.scale - 1.0


@register_kl(Gumbel, Gumbel)
def _kl_gumbel(p: Gumbel, q: Gumbel) -> Variable:
    ratio = p.scale / q.scale
    shift = (p.loc - q.loc) / q.scale
    # The mean of exp(-z_q) is exp(-shift) Gamma(1 + ratio).
    moment = F.exp(F.lgamma(1.0 + ratio) - shift)
    return -F.log(ratio) + _EULER * (ratio - 1.0) + shift + moment - 1.0


@register_kl(Uniform, Uniform)
def _kl_uniform(p: Uniform, q: Uniform) -> Variable:
    inside = (p.low.array >= q.low.array) & (p.high.array <= q.high.array)
    return p._within(inside, F.log(q.scale / p.scale), np.inf)


@register_kl(Exponential, Exponential)
def _kl_exponential(p: Exponential, q: Exponential) -> Variable:
    return F.log(p.lam / q.lam) + q.lam / p.lam - 1.0


@register_kl(Gamma, Gamma)
def _kl_gamma(p: Gamma, q: Gamma) -> Variable:
    return (
        (p.k - q.k) * F.digamma(p.k) - F.lgamma(p.k) + F.lgamma(q.k)
        + q.k * F.log(q.theta / p.theta) + p.k * (p.theta / q.theta - 1.0)
    )  # fmt: skip


@register_kl(Chisquare, Chisquare)
def _kl_chisquare(p: Chisquare, q: Chisquare) -> Variable:
    h, g = 0.5 * p.k, 0.5 * q.k
    return (h - g) * F.digamma(h) - F.lgamma(h) + F.lgamma(g)


@register_kl(Beta, Beta)
def _kl_beta(p: Beta, q: Beta) -> Variable:
    a, b = p.a - q.a, p.b - q.b
    sums = a * F.digamma(p.a) + b * F.digamma(p.b) - (a + b) * F.digamma(p.a + p.b)
    return log_beta(q.a, q.b) - log_beta(p.a, p.b) + sums


@register_kl(Pareto, Pareto)
def _kl_pareto(p: Pareto, q: Pareto) -> Variable:
    inside = p.scale.array >= q.scale.array
    divergence = q.alpha * F.log(p.scale / q.scale) + F.log(p.alpha / q.alpha) + q.alpha / p.alpha - 1.0
    return p._within(inside, divergence, np.inf)
