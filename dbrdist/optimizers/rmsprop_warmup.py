"""RMSprop warm-up: from RMSprop to momentum SGD, for large batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np

from dbrdist.core.array.backend import Array
from dbrdist.core.names.limits import decay, level, rate
from dbrdist.core.update.hyperparameter import HyperparameterProxy
from dbrdist.core.update.optimizer import GradientMethod
from dbrdist.core.update.update_rule import UpdateRule, denominator, workspace
from dbrdist.optimizers.gradient_descent import sweep

if TYPE_CHECKING:
    from dbrdist.core.update.hyperparameter import Hyperparameter


class RMSpropWarmupRule(UpdateRule):
    """m <- alpha m + (1 - alpha) g^2; v <- momentum v - (a_sgd + a_rmsprop / (sqrt(m) + eps)) g; p <- p + lr v"""

    state_names = ("m", "v")
    keeps_zero = True

    def step(self, hp: Hyperparameter, t: int, p: Array, g: Array, *state: Array) -> None:
        m, v = state
        sweep(v, t)
        w = workspace(g)
        m *= hp.alpha
        np.square(g, out=w)
        w *= 1 - hp.alpha
        m += w
        v *= hp.momentum
        v -= np.multiply(g, hp.a_sgd, out=w)
        share = rmsprop_share(hp.lr, hp.a_sgd, hp.lr_rmsprop)
        if share:
            np.sqrt(m, out=w)
            denominator(w, hp.eps)
            np.divide(g, w, out=w)
            w *= share
            v -= w
        p += np.multiply(v, hp.lr, out=w)


def rmsprop_share(lr: float, a_sgd: float, lr_rmsprop: float) -> float:
    """a_rmsprop = (1 - a_sgd) lr_rmsprop / lr, so that RMSprop's own rate does not follow lr; 0 where lr is 0."""
    return (1 - a_sgd) * lr_rmsprop / lr if lr else 0.0


class RMSpropWarmup(GradientMethod):
    """Momentum SGD that begins as RMSprop (Akiba, Suzuki and Fukuda 2017, arXiv 1711.04325).

    m <- alpha m + (1 - alpha) g^2; v <- momentum v - (a_sgd + a_rmsprop / (sqrt(m) + eps)) g; p <- p + lr v, with
    a_rmsprop = (1 - a_sgd) lr_rmsprop / lr. No bias is corrected. The momentum v does not contain lr, so that no
    momentum correction is needed when lr changes.

    With ``a_sgd`` 1 this is :class:`CorrectedMomentumSGD`. Schedule it with
    :func:`~dbrdist.optimizers.schedules.rmsprop_warmup`:

        trainer.extend(extensions.FollowSchedule(schedules.rmsprop_warmup(center=10, period=5), "a_sgd"))

    Args:
        lr: learning rate of the SGD part.
        momentum: fraction of v that a step keeps.
        alpha: decay per step of the squared gradient's mean.
        eps: added to the root.
        lr_rmsprop: learning rate of the RMSprop part.
        a_sgd: share of the SGD part, from 0 to 1.

    Example:
        >>> optimizer = optimizers.RMSpropWarmup(lr=0.1).setup(L.Linear(2, 1))
    """

    config_name = "rmsprop_warmup"
    rule_class = RMSpropWarmupRule
    lr = HyperparameterProxy("lr")
    momentum = HyperparameterProxy("momentum")
    alpha = HyperparameterProxy("alpha")
    eps = HyperparameterProxy("eps")
    lr_rmsprop = HyperparameterProxy("lr_rmsprop")
    a_sgd = HyperparameterProxy("a_sgd")

    def __init__(
        self,
        lr: Annotated[float, rate, "Learning rate per step of the SGD part."] = 0.1,
        momentum: Annotated[float, decay, "Fraction of the last update that is kept."] = 0.9,
        alpha: Annotated[float, decay, "Decay per step of the squared gradient's mean."] = 0.99,
        eps: Annotated[float, rate, "Added to the denominator."] = 1e-8,
        lr_rmsprop: Annotated[float, rate, "Learning rate per step of the RMSprop part."] = 3e-4,
        a_sgd: Annotated[float, level, "The share of the SGD part; schedule it with `elu`."] = 1.0,
    ) -> None:
        super().__init__(lr=lr, momentum=momentum, alpha=alpha, eps=eps, lr_rmsprop=lr_rmsprop, a_sgd=a_sgd)
