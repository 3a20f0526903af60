"""LAMB: Adam's direction with a trust ratio per layer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from dbrdist.core.array.backend import Array
from dbrdist.core.model.flat import Run
from dbrdist.core.names.limits import fraction, not_negative, rate
from dbrdist.core.update.hyperparameter import HyperparameterProxy
from dbrdist.core.update.optimizer import GradientMethod
from dbrdist.core.update.update_rule import UpdateRule, denominator, in_pieces, pieces, workspace
from dbrdist.optimizers.lars import SKIP_VECTORS, norm, quotient

if TYPE_CHECKING:
    from dbrdist.core.update.hyperparameter import Hyperparameter


class LAMBRule(UpdateRule):
    """m <- beta1 m + (1 - beta1) g; v <- beta2 v + (1 - beta2) g^2; u = m / (sqrt(v) + eps) + wd p, with m and v
    corrected for their biases; p <- p - alpha ||p|| / ||u|| u
    """

    state_names = ("m", "v")
    keeps_zero = True

    def step_run(self, hp: Any, t: int, run: Run, state: list[Array]) -> None:
        data, grad = run.data, run.grad
        decayed = functools.partial(_direction, hp, t, hp.weight_decay_rate)
        for layers in run.groups():
            squares: list[Any] = []
            for param, where in layers:
                p, g, moments = data[where], grad[where], [a[where] for a in state]
                in_pieces(functools.partial(_average, hp.beta1, hp.beta2), p, g, moments)
                if param.ndim > 1 or not hp.skip_vectors:
                    squares += _squares(decayed, p, *moments)
            norms = iter(run.total(squares))
            for param, where in layers:
                direction, trust = functools.partial(_direction, hp, t, 0.0), 1.0
                if param.ndim > 1 or not hp.skip_vectors:
                    direction, trust = decayed, _trust(next(norms), next(norms))
                move = functools.partial(_move, direction, hp.alpha * trust)
                in_pieces(move, data[where], grad[where], [a[where] for a in state])


def _average(beta1: float, beta2: float, p: Array, g: Array, m: Array, v: Array) -> None:
    w = workspace(g)
    m *= beta1
    m += np.multiply(g, 1 - beta1, out=w)
    v *= beta2
    np.square(g, out=w)
    w *= 1 - beta2
    v += w


def _direction(hp: Hyperparameter, t: int, decay: float, p: Array, m: Array, v: Array) -> Array:
    """u, in the workspace."""
    root = math.sqrt(1 - hp.beta2**t)
    w = workspace(m)
    np.sqrt(v, out=w)
    denominator(w, hp.eps * root)
    np.divide(m, w, out=w)
    w *= root / (1 - hp.beta1**t)
    if decay:
        w += decay * p
    return w


def _squares(direction: Callable[..., Array], p: Array, m: Array, v: Array) -> list[Any]:
    """||p|| and ||u|| squared; u is made piece by piece and not kept."""
    u = sum((norm(direction(p[i].astype(m.dtype, copy=False), m[i], v[i])) ** 2 for i in pieces(p)), 0.0)
    return [norm(p) ** 2, u]


def _trust(*squares: Any) -> Any:
    """||p|| / ||u||, and 1 where one of them is zero."""
    p_norm, u_norm = (math.sqrt(s) if isinstance(s, float) else np.sqrt(s) for s in squares)
    return quotient(p_norm, u_norm, (p_norm > 0) & (u_norm > 0))


def _move(direction: Callable[..., Array], rate: Any, p: Array, g: Array, m: Array, v: Array) -> None:
    w = direction(p, m, v)
    w *= rate
    p -= w


class LAMB(GradientMethod):
    """Layer-wise adaptive moments for large batches (You et al. 2020, arXiv 1904.00962, algorithm 2 with phi(z) = z).

    The rate of each parameter is alpha ||p|| / ||u||, and alpha where a norm is zero; weight decay is part of u. With
    ``skip_vectors``, parameters with at most one axis (biases, scales) have rate alpha and no weight decay.

    Args:
        alpha: step size, the learning rate, not negative; default 0.001.
        beta1: decay of the mean gradient per step, from 0 to less than 1; default 0.9.
        beta2: decay of the mean squared gradient per step, from 0 to less than 1; default 0.999.
        eps: added to the square root in the denominator, not negative; default 1e-06.
        weight_decay_rate: decay of the parameters, within the scaled update; default 0.01.
        skip_vectors: leave parameters with one axis, such as biases, without scaling and decay; default True.

    Example:
        >>> optimizer = optimizers.LAMB(alpha=0.002, weight_decay_rate=0.01).setup(L.Linear(2, 1))
    """

    rule_class = LAMBRule
    alpha = HyperparameterProxy("alpha")
    lr = HyperparameterProxy("alpha")
    beta1 = HyperparameterProxy("beta1")
    beta2 = HyperparameterProxy("beta2")
    eps = HyperparameterProxy("eps")
    weight_decay_rate = HyperparameterProxy("weight_decay_rate")

    def __init__(
        self,
        alpha: Annotated[float, rate, "Learning rate per step."] = 0.001,
        beta1: Annotated[float, fraction, "Decay per step of the gradient's mean."] = 0.9,
        beta2: Annotated[float, fraction, "Decay per step of the squared gradient's mean."] = 0.999,
        eps: Annotated[float, rate, "Added to the denominator."] = 1e-6,
        weight_decay_rate: Annotated[
            float, not_negative, "Decay relative to the parameter; part of the direction."
        ] = 0.01,
        skip_vectors: Annotated[bool, SKIP_VECTORS] = True,
    ) -> None:
        super().__init__(
            alpha=alpha,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay_rate=weight_decay_rate,
            skip_vectors=skip_vectors,
        )
