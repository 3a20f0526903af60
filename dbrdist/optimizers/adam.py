"""Adam and AdamW."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dbrdist.core.backend import Array
from dbrdist.core.optimizer import GradientMethod, HyperparameterProxy
from dbrdist.core.update_rule import UpdateRule, workspace


class AdamRule(UpdateRule):
    """m <- beta1 m + (1 - beta1) g; v <- beta2 v + (1 - beta2) g^2;
    p <- p - eta (alpha_t m / (sqrt(v) + eps) + wd p)
    """

    state_names = ("m", "v")
    keeps_zero = True

    def step(self, hp: Any, t: int, p: Array, g: Array, *state: Array) -> None:
        m, v = state
        beta1, beta2 = hp.beta1, hp.beta2
        alpha_t = hp.alpha * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        w = workspace(g)
        m *= beta1
        m += np.multiply(g, 1 - beta1, out=w)
        np.square(g, out=w)
        w *= 1 - beta2
        v *= beta2
        v += w
        if hp.weight_decay_rate:
            p *= 1 - hp.eta * hp.weight_decay_rate
        np.sqrt(v, out=w)
        w += hp.eps
        if not hp.eps:
            w[w == 0] = 1  # no gradient so far, and the gaps in flat memory: m is 0 too
        np.divide(m, w, out=w)
        w *= hp.eta * alpha_t
        p -= w


class Adam(GradientMethod):
    """Adam (Kingma and Ba 2015, with alpha corrected for both biases as in their section 2).

    ``weight_decay_rate`` is decoupled from the gradient (Loshchilov and Hutter 2019) and scaled by ``eta``.
    """

    rule_class = AdamRule
    alpha = HyperparameterProxy("alpha")
    lr = HyperparameterProxy("alpha")
    beta1 = HyperparameterProxy("beta1")
    beta2 = HyperparameterProxy("beta2")
    eps = HyperparameterProxy("eps")
    eta = HyperparameterProxy("eta")
    weight_decay_rate = HyperparameterProxy("weight_decay_rate")

    def __init__(
        self,
        alpha: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        eta: float = 1.0,
        weight_decay_rate: float = 0,
        amsgrad: bool = False,
        adabound: bool = False,
        final_lr: float = 0.1,
        gamma: float = 0.001,
    ) -> None:
        if amsgrad or adabound:
            raise ValueError("Adam: amsgrad and adabound are not part of dbrdist yet; expected False for both")
        super().__init__(alpha=alpha, beta1=beta1, beta2=beta2, eps=eps, eta=eta, weight_decay_rate=weight_decay_rate)
        self._unused = (final_lr, gamma)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019).

    p <- p - eta (alpha_t m / (sqrt(v) + eps) + weight_decay_rate p).
    """

    def __init__(
        self,
        alpha: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        eta: float = 1.0,
        weight_decay_rate: float = 0,
    ) -> None:
        super().__init__(alpha, beta1, beta2, eps, eta, weight_decay_rate)
