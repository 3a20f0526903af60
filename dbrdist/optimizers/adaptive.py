"""A rate for each element from the gradients so far: AdaGrad, AdaDelta, RMSprop, SMORMS3, M-SVAG."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np

from dbrdist.core.array.backend import Array
from dbrdist.core.names.limits import decay, fraction, not_negative, rate
from dbrdist.core.update.hyperparameter import HyperparameterProxy
from dbrdist.core.update.optimizer import GradientMethod
from dbrdist.core.update.update_rule import UpdateRule, denominator, workspace

if TYPE_CHECKING:
    from dbrdist.core.update.hyperparameter import Hyperparameter


def _average(a: Array, rate: float, new: Array) -> None:
    """a <- rate a + (1 - rate) new; ``new`` is used up."""
    new *= 1 - rate
    a *= rate
    a += new


class AdaGradRule(UpdateRule):
    """h <- h + g^2; p <- p - lr g / (sqrt(h) + eps)"""

    state_names = ("h",)
    keeps_zero = True

    def step(self, hp: Hyperparameter, t: int, p: Array, g: Array, *state: Array) -> None:
        (h,) = state
        w = workspace(g)
        h += np.square(g, out=w)
        denominator(np.sqrt(h, out=w), hp.eps)
        np.divide(g, w, out=w)
        w *= hp.lr
        p -= w

    def kernel(self, hp: Hyperparameter, t: int, state: list[Array]) -> tuple[str, tuple[float, ...]] | None:
        return "ada_grad", (hp.lr, hp.eps)


class AdaGrad(GradientMethod):
    """AdaGrad (Duchi, Hazan and Singer 2011), h <- h + g^2; p <- p - lr g / (sqrt(h) + eps).

    Args:
        lr: learning rate, not negative; default 0.001.
        eps: added to the denominator, not negative; default 1e-08.

    Example:
        >>> optimizer = optimizers.AdaGrad(lr=0.01).setup(L.Linear(2, 1))
    """

    config_name = "adagrad"
    rule_class = AdaGradRule
    lr = HyperparameterProxy("lr")
    eps = HyperparameterProxy("eps")

    def __init__(
        self,
        lr: Annotated[float, rate, "Learning rate per step."] = 0.001,
        eps: Annotated[float, rate, "Added to the denominator."] = 1e-8,
    ) -> None:
        super().__init__(lr=lr, eps=eps)


class AdaDeltaRule(UpdateRule):
    """msg <- rho msg + (1 - rho) g^2; dx = sqrt((msdx + eps) / (msg + eps)) g;
    msdx <- rho msdx + (1 - rho) dx^2; p <- p - dx
    """

    state_names = ("msg", "msdx")
    keeps_zero = True

    def step(self, hp: Hyperparameter, t: int, p: Array, g: Array, *state: Array) -> None:
        msg, msdx = state
        w = workspace(g)
        _average(msg, hp.rho, np.square(g, out=w))
        np.add(msdx, hp.eps, out=w)
        w /= denominator(msg.copy(), hp.eps)
        np.sqrt(w, out=w)
        w *= g
        p -= w
        _average(msdx, hp.rho, np.square(w, out=w))


class AdaDelta(GradientMethod):
    """AdaDelta (Zeiler 2012, arXiv 1212.5701), which has no learning rate: updates have the parameters' unit.

    Args:
        rho: decay of the means per step, from 0 to less than 1; default 0.95.
        eps: added to the means before the square roots, not negative; default 1e-06.

    Example:
        >>> optimizer = optimizers.AdaDelta().setup(L.Linear(2, 1))
    """

    config_name = "adadelta"
    rule_class = AdaDeltaRule
    rho = HyperparameterProxy("rho")
    eps = HyperparameterProxy("eps")

    def __init__(
        self,
        rho: Annotated[float, decay, "Decay per step of the means of squared gradients and squared updates."] = 0.95,
        eps: Annotated[float, rate, "Added to both means; it sets the size of the first updates."] = 1e-6,
    ) -> None:
        super().__init__(rho=rho, eps=eps)


class RMSpropRule(UpdateRule):
    """ms <- alpha ms + (1 - alpha) g^2; p <- p - lr g / (sqrt(ms) + eps), or / sqrt(ms + eps)"""

    state_names = ("ms",)
    keeps_zero = True

    def step(self, hp: Hyperparameter, t: int, p: Array, g: Array, *state: Array) -> None:
        (ms,) = state
        w = workspace(g)
        _average(ms, hp.alpha, np.square(g, out=w))
        if hp.eps_inside_sqrt:
            w[...] = ms
            np.sqrt(denominator(w, hp.eps), out=w)
        else:
            denominator(np.sqrt(ms, out=w), hp.eps)
        np.divide(g, w, out=w)
        w *= hp.lr
        p -= w

    def kernel(self, hp: Hyperparameter, t: int, state: list[Array]) -> tuple[str, tuple[float, ...]] | None:
        return None if hp.eps_inside_sqrt else ("rmsprop", (hp.lr, hp.alpha, 1 - hp.alpha, hp.eps))


class RMSprop(GradientMethod):
    """RMSprop (Tieleman and Hinton 2012, lecture 6.5).

    ms <- alpha ms + (1 - alpha) g^2; p <- p - lr g / (sqrt(ms) + eps), with ``eps_inside_sqrt`` / sqrt(ms + eps).

    Args:
        lr: learning rate, not negative; default 0.01.
        alpha: decay of the mean squared gradient per step; default 0.99.
        eps: added to the denominator, not negative; default 1e-08.
        eps_inside_sqrt: add eps before the square root is taken; default False.

    Example:
        >>> optimizer = optimizers.RMSprop(lr=0.001).setup(L.Linear(2, 1))
    """

    config_name = "rmsprop"
    rule_class = RMSpropRule
    lr = HyperparameterProxy("lr")
    alpha = HyperparameterProxy("alpha")
    eps = HyperparameterProxy("eps")
    eps_inside_sqrt = HyperparameterProxy("eps_inside_sqrt")

    def __init__(
        self,
        lr: Annotated[float, rate, "Learning rate per step."] = 0.01,
        alpha: Annotated[float, decay, "Decay per step of the squared gradient's mean."] = 0.99,
        eps: Annotated[float, rate, "Added to the denominator."] = 1e-8,
        eps_inside_sqrt: Annotated[bool, "Whether `eps` is added before the root is taken."] = False,
    ) -> None:
        super().__init__(lr=lr, alpha=alpha, eps=eps, eps_inside_sqrt=eps_inside_sqrt)


class RMSpropGravesRule(UpdateRule):
    """n <- alpha n + (1 - alpha) g^2; mean <- alpha mean + (1 - alpha) g;
    delta <- momentum delta - lr g / sqrt(n - mean^2 + eps); p <- p + delta
    """

    state_names = ("n", "g", "delta")
    keeps_zero = True

    def step(self, hp: Hyperparameter, t: int, p: Array, g: Array, *state: Array) -> None:
        n, mean, delta = state
        w = workspace(g)
        _average(n, hp.alpha, np.square(g, out=w))
        w[...] = g
        _average(mean, hp.alpha, w)
        np.subtract(n, np.square(mean, out=w), out=w)
        np.maximum(w, 0, out=w)  # a variance; rounding takes that of equal gradients below zero
        np.sqrt(denominator(w, hp.eps), out=w)
        np.divide(g, w, out=w)
        w *= hp.lr
        delta *= hp.momentum
        delta -= w
        p += delta


class RMSpropGraves(GradientMethod):
    """RMSprop with momentum, over the gradient's standard deviation (Graves 2013, arXiv 1308.0850, equations 38-41).

    Args:
        lr: learning rate, not negative; default 0.0001.
        alpha: decay of the means of gradient and squared gradient per step; default 0.95.
        momentum: decay of the velocity per step, from 0 to less than 1; default 0.9.
        eps: added to the variance before the square root, not negative; default 0.0001.

    Example:
        >>> optimizer = optimizers.RMSpropGraves().setup(L.Linear(2, 1))
    """

    config_name = "rmsprop_graves"
    rule_class = RMSpropGravesRule
    lr = HyperparameterProxy("lr")
    alpha = HyperparameterProxy("alpha")
    momentum = HyperparameterProxy("momentum")
    eps = HyperparameterProxy("eps")

    def __init__(
        self,
        lr: Annotated[float, rate, "Learning rate per step."] = 1e-4,
        alpha: Annotated[float, decay, "Decay per step of the means of gradient and squared gradient."] = 0.95,
        momentum: Annotated[float, decay, "Fraction of the last update that is kept."] = 0.9,
        eps: Annotated[float, rate, "Added to the variance."] = 1e-4,
    ) -> None:
        super().__init__(lr=lr, alpha=alpha, momentum=momentum, eps=eps)


class SMORMS3Rule(UpdateRule):
    """r = 1 / (mem + 1); mean <- (1 - r) mean + r g; g2 <- (1 - r) g2 + r g^2; x = mean^2 / (g2 + eps);
    p <- p - g min(lr, x) / (sqrt(g2) + eps); mem <- 1 + mem (1 - x)

    ``mem`` begins at 1; the state ``age`` is mem - 1, which begins at zero like all states.
    """

    state_names = ("age", "g", "g2")

    def state_of_chainer(self, state: dict[str, Array]) -> dict[str, Array]:
        """With the age of its ``mem``."""
        return {"age": state["mem"] - 1, "g": state["g"], "g2": state["g2"]}

    def step(self, hp: Hyperparameter, t: int, p: Array, g: Array, *state: Array) -> None:
        age, mean, g2 = state
        w = workspace(g)
        r = 1 / (age + 2)
        mean += np.multiply(np.subtract(g, mean, out=w), r, out=w)
        np.subtract(np.square(g, out=w), g2, out=w)
        g2 += np.multiply(w, r, out=w)
        x = mean * mean
        w[...] = g2
        x /= denominator(w, hp.eps)
        age += 1
        age *= 1 - x
        denominator(np.sqrt(g2, out=w), hp.eps)
        np.divide(g, w, out=w)
        w *= np.minimum(x, hp.lr, out=x)
        p -= w


class SMORMS3(GradientMethod):
    """Squared mean over root mean square, cubed (Simon Funk 2015, sifter.org/~simon/journal/20150420.html).

    Args:
        lr: learning rate, not negative; default 0.001.
        eps: added to the denominator, not negative; default 1e-16.

    Example:
        >>> optimizer = optimizers.SMORMS3().setup(L.Linear(2, 1))
    """

    rule_class = SMORMS3Rule
    lr = HyperparameterProxy("lr")
    eps = HyperparameterProxy("eps")

    def __init__(
        self,
        lr: Annotated[float, rate, "The largest learning rate per step."] = 0.001,
        eps: Annotated[float, rate, "Added to the denominators."] = 1e-16,
    ) -> None:
        super().__init__(lr=lr, eps=eps)


class MSVAGRule(UpdateRule):
    """m <- beta m + (1 - beta) g; v <- beta v + (1 - beta) g^2; with both divided by 1 - beta^t,
    s = (v - m^2) / (1 - rho); p <- p - eta (lr m m^2 / (m^2 + rho s) + wd p)
    """

    state_names = ("m", "v")
    keeps_zero = True

    def step(self, hp: Hyperparameter, t: int, p: Array, g: Array, *state: Array) -> None:
        m, v = state
        w = workspace(g)
        _average(v, hp.beta, np.square(g, out=w))
        w[...] = g
        _average(m, hp.beta, w)
        total = 1 - hp.beta**t
        np.square(m, out=w)
        spread = v * total
        spread -= w
        np.maximum(spread, 0, out=spread)  # a variance, but for rounding
        spread *= _variance_ratio(hp.beta, t)
        spread += w
        w /= denominator(spread, 0)
        w *= m
        w *= hp.eta * hp.lr / total
        if hp.weight_decay_rate:
            p *= 1 - hp.eta * hp.weight_decay_rate
        p -= w


def _variance_ratio(beta: float, t: int) -> float:
    """rho / (1 - rho) of Balles and Hennig's equation 27: the variance of m relative to what v - m^2 estimates.

    Of a single gradient nothing is known but itself: the variance counts as 0.
    """
    if t == 1 or beta == 0:
        return 0.0
    rho = (1 - beta) * (1 + beta**t) / ((1 + beta) * (1 - beta**t))
    return rho / (1 - rho)


class MSVAG(GradientMethod):
    """Momentum with variance adaptation: M-SVAG (Balles and Hennig 2018, arXiv 1705.07774).

    ``weight_decay_rate`` is decoupled from the gradient and scaled by ``eta``, as in :class:`~dbrdist.optimizers.Adam`.

    Args:
        lr: learning rate, not negative; default 0.1.
        beta: decay of the means of gradient and squared gradient per step; default 0.9.
        eta: factor of the whole update; default 1.0.
        weight_decay_rate: decay of the parameters per step; default 0.

    Example:
        >>> optimizer = optimizers.MSVAG(lr=0.1).setup(L.Linear(2, 1))
    """

    rule_class = MSVAGRule
    lr = HyperparameterProxy("lr")
    beta = HyperparameterProxy("beta")
    eta = HyperparameterProxy("eta")
    weight_decay_rate = HyperparameterProxy("weight_decay_rate")

    def __init__(
        self,
        lr: Annotated[float, rate, "Learning rate per step."] = 0.1,
        beta: Annotated[float, fraction, "Decay per step of the means of gradient and squared gradient."] = 0.9,
        eta: Annotated[float, not_negative, "Factor of the whole update, weight decay included."] = 1.0,
        weight_decay_rate: Annotated[float, not_negative, "Decay of the parameters per step, times `eta`."] = 0.0,
    ) -> None:
        super().__init__(lr=lr, beta=beta, eta=eta, weight_decay_rate=weight_decay_rate)
