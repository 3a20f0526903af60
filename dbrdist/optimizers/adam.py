"""Adam and what came of it: AdamW, AMSGrad, AdaBound, AMSBound."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from dbrdist.core.array.backend import Array
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.names.limits import fraction, not_negative, positive, rate
from dbrdist.core.update.hyperparameter import HyperparameterProxy
from dbrdist.core.update.optimizer import GradientMethod
from dbrdist.core.update.update_rule import UpdateRule, denominator, workspace

if TYPE_CHECKING:
    from dbrdist.core.update.hyperparameter import Hyperparameter

Rate = Annotated[float, rate, "Learning rate per step."]
Beta1 = Annotated[float, fraction, "Decay per step of the gradient's mean."]
Beta2 = Annotated[float, fraction, "Decay per step of the squared gradient's mean."]
Eps = Annotated[float, rate, "Added to the denominator."]
Eta = Annotated[float, not_negative, "Factor of the whole update, weight decay included."]
Decay = Annotated[float, not_negative, "Decay of the parameters per step, times `eta`, apart from the gradient."]
FinalRate = Annotated[
    float, rate, "The learning rate of the SGD that it turns into; schedules scale it as they do `alpha`."
]
Speed = Annotated[float, rate, "How fast it turns into SGD: about 1 / `gamma` steps."]


class AdamRule(UpdateRule):
    """m <- beta1 m + (1 - beta1) g; v <- beta2 v + (1 - beta2) g^2; with amsgrad vhat <- max(vhat, v), else vhat = v;
    p <- p - eta (alpha_t m / (sqrt(vhat) + eps) + wd p), where adabound clips the factor of m
    """

    keeps_zero = True

    @property
    def state_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The largest v so far is kept with amsgrad only."""
        return ("m", "v", "vhat") if self.hyperparam.amsgrad else ("m", "v")

    def fit(self, param: Parameter) -> None:
        """Begin the largest v with today's where amsgrad was switched on after the first update."""
        self._complete()
        super().fit(param)

    def serialize(self, serializer: Any) -> None:
        """Save or load the state, also where amsgrad was switched on since the last update."""
        self._complete()
        super().serialize(serializer)

    def _complete(self) -> None:
        state = self._state
        if state is not None and self.hyperparam.amsgrad and "vhat" not in state:
            state["vhat"] = state["v"].copy()

    def step(self, hp: Hyperparameter, t: int, p: Array, g: Array, *state: Array) -> None:
        m, v, *largest = state
        beta1, beta2 = hp.beta1, hp.beta2
        alpha_t = _alpha_t(hp, t)
        w = workspace(g)
        m *= beta1
        m += np.multiply(g, 1 - beta1, out=w)
        np.square(g, out=w)
        w *= 1 - beta2
        v *= beta2
        v += w
        for vhat in largest:
            v = np.maximum(vhat, v, out=vhat)
        if hp.weight_decay_rate:
            p *= 1 - hp.eta * hp.weight_decay_rate
        np.sqrt(v, out=w)
        denominator(w, hp.eps)
        if hp.adabound:
            np.divide(alpha_t, w, out=w)
            w.clip(*_bounds(hp, t), out=w)
            w *= m
            w *= hp.eta
        else:
            np.divide(m, w, out=w)
            w *= hp.eta * alpha_t
        p -= w

    def kernel(self, hp: Hyperparameter, t: int, state: list[Array]) -> tuple[str, tuple[float, ...]] | None:
        if hp.adabound:
            return None
        decay = 1 - hp.eta * hp.weight_decay_rate
        return "adam", (hp.beta1, 1 - hp.beta1, hp.beta2, 1 - hp.beta2, hp.eta * _alpha_t(hp, t), hp.eps, decay)


def _alpha_t(hp: Hyperparameter, t: int) -> float:
    return float(hp.alpha * math.sqrt(1 - hp.beta2**t) / (1 - hp.beta1**t))


def _bounds(hp: Hyperparameter, t: int) -> tuple[float, float]:
    """AdaBound's interval for the rate of each element: from (0, inf) it closes on final_lr, which follows alpha."""
    final = hp.final_lr * hp.alpha / hp.initial_alpha
    upper = final * (1 + 1 / (hp.gamma * t)) if hp.gamma else math.inf
    return final * (1 - 1 / (hp.gamma * t + 1)), upper


class _Amsgrad(HyperparameterProxy):
    """``amsgrad``: it decides what the state holds, so the next update must look at the rules again."""

    def __set__(self, obj: Any, value: Any) -> None:
        super().__set__(obj, value)
        obj.forget_plan()


class _Rate(HyperparameterProxy):
    """``lr``: another name of alpha; in a program of Chainer, the step size of the last update, alpha_t."""

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        return obj.alpha_t if obj is not None and as_chainer[0] and obj.t else super().__get__(obj, owner)


class Adam(GradientMethod):
    """Adam (Kingma and Ba 2015, with alpha corrected for both biases as in their section 2).

    ``weight_decay_rate`` is decoupled from the gradient (Loshchilov and Hutter 2019) and scaled by ``eta``. With
    ``amsgrad`` the denominator has the largest v so far (Reddi et al. 2018). With ``adabound`` the rate of each element
    is clipped to an interval that closes on ``final_lr`` at the speed ``gamma`` (Luo et al. 2019); ``final_lr`` is
    meant for the ``alpha`` given here, and changes with it in the same proportion.

    Args:
        alpha: step size, the learning rate, not negative; default 0.001.
        beta1: decay of the mean gradient per step, from 0 to less than 1; default 0.9.
        beta2: decay of the mean squared gradient per step, from 0 to less than 1; default 0.999.
        eps: added to the square root in the denominator, not negative; default 1e-08.
        eta: factor of the whole update; default 1.0.
        weight_decay_rate: decoupled decay of the parameters per step, as a fraction of eta (AdamW); default 0.
        amsgrad: use the largest mean squared gradient so far (AMSGrad); default False.
        adabound: bound the step sizes (AdaBound); default False.
        final_lr: the step size of SGD towards which the bounds converge; default 0.1.
        gamma: speed at which the bounds converge, per step; default 0.001.

    Example:
        >>> model = L.Classifier(L.Linear(2, 2))
        >>> optimizer = optimizers.Adam(alpha=0.01).setup(model)
        >>> optimizer.update(model, np.ones((1, 2), np.float32), np.array([0]))
        >>> optimizer.t
        1
    """

    rule_class = AdamRule
    alpha = HyperparameterProxy("alpha")
    lr = _Rate("alpha")
    beta1 = HyperparameterProxy("beta1")
    beta2 = HyperparameterProxy("beta2")
    eps = HyperparameterProxy("eps")
    eta = HyperparameterProxy("eta")
    weight_decay_rate = HyperparameterProxy("weight_decay_rate")
    amsgrad = _Amsgrad("amsgrad")
    adabound = HyperparameterProxy("adabound")
    final_lr = HyperparameterProxy("final_lr")
    gamma = HyperparameterProxy("gamma")

    def __init__(
        self,
        alpha: Rate = 0.001,
        beta1: Beta1 = 0.9,
        beta2: Beta2 = 0.999,
        eps: Eps = 1e-8,
        eta: Eta = 1.0,
        weight_decay_rate: Decay = 0.0,
        amsgrad: Annotated[bool, "Whether the denominator has the largest squared mean so far."] = False,
        adabound: Annotated[bool, "Whether it turns into SGD, as AdaBound does."] = False,
        final_lr: FinalRate = 0.1,
        gamma: Speed = 0.001,
    ) -> None:
        if adabound and not alpha > 0:
            raise ValueError(
                f"{type(self).__name__}: alpha: expected a number above 0, since final_lr follows alpha in proportion, "
                f"got {alpha}"
            )
        super().__init__(
            alpha=alpha,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            eta=eta,
            weight_decay_rate=weight_decay_rate,
            amsgrad=amsgrad,
            adabound=adabound,
            final_lr=final_lr,
            gamma=gamma,
            initial_alpha=alpha,
        )

    @property
    def alpha_t(self) -> float:
        """The step size of the last update: alpha with the correction of both means for their start at 0.

        Raises RuntimeError before the first update.
        """
        if not self.t:
            raise RuntimeError(f"{type(self).__name__}: alpha_t is that of the last update, and there was none yet")
        return _alpha_t(self.hyperparam, self.t)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019).

    p <- p - eta (alpha_t m / (sqrt(v) + eps) + weight_decay_rate p).

    Args:
        alpha: step size, the learning rate, not negative; default 0.001.
        beta1: decay of the mean gradient per step, from 0 to less than 1; default 0.9.
        beta2: decay of the mean squared gradient per step, from 0 to less than 1; default 0.999.
        eps: added to the square root in the denominator, not negative; default 1e-08.
        eta: factor of the whole update; default 1.0.
        weight_decay_rate: decoupled decay of the parameters per step; default 0.

    Example:
        >>> optimizer = optimizers.AdamW(alpha=0.001, weight_decay_rate=0.01).setup(L.Linear(2, 1))
    """

    config_name = "adamw"

    def __init__(
        self,
        alpha: Rate = 0.001,
        beta1: Beta1 = 0.9,
        beta2: Beta2 = 0.999,
        eps: Eps = 1e-8,
        eta: Eta = 1.0,
        weight_decay_rate: Decay = 0.0,
    ) -> None:
        super().__init__(alpha, beta1, beta2, eps, eta, weight_decay_rate)


class AMSGrad(Adam):
    """Adam whose denominator never shrinks: it has the largest v so far (Reddi et al. 2018).

    Args:
        alpha: step size, the learning rate, not negative; default 0.001.
        beta1: decay of the mean gradient per step, from 0 to less than 1; default 0.9.
        beta2: decay of the mean squared gradient per step, from 0 to less than 1; default 0.999.
        eps: added to the square root in the denominator, not negative; default 1e-08.
        eta: factor of the whole update; default 1.0.

    Example:
        >>> optimizer = optimizers.AMSGrad().setup(L.Linear(2, 1))
    """

    config_name = "amsgrad"

    def __init__(
        self, alpha: Rate = 0.001, beta1: Beta1 = 0.9, beta2: Beta2 = 0.999, eps: Eps = 1e-8, eta: Eta = 1.0
    ) -> None:
        super().__init__(alpha, beta1, beta2, eps, eta, amsgrad=True)


class AdaBound(Adam):
    """Adam that turns into SGD: each element's rate is clipped to an interval that closes on ``final_lr``.

    Luo et al. 2019 (arXiv 1902.09843): from ``final_lr (1 - 1 / (gamma t + 1))`` to ``final_lr (1 + 1 / (gamma t))``.

    Args:
        alpha: step size, the learning rate, not negative; default 0.001.
        beta1: decay of the mean gradient per step, from 0 to less than 1; default 0.9.
        beta2: decay of the mean squared gradient per step, from 0 to less than 1; default 0.999.
        final_lr: the step size of SGD towards which the bounds converge; default 0.1.
        gamma: speed at which the bounds converge, per step; default 0.001.
        eps: added to the square root in the denominator, not negative; default 1e-08.
        eta: factor of the whole update; default 1.0.

    Example:
        >>> optimizer = optimizers.AdaBound().setup(L.Linear(2, 1))
    """

    config_name = "adabound"

    def __init__(
        self,
        alpha: Annotated[float, positive, "Learning rate per step."] = 0.001,
        beta1: Beta1 = 0.9,
        beta2: Beta2 = 0.999,
        final_lr: FinalRate = 0.1,
        gamma: Speed = 0.001,
        eps: Eps = 1e-8,
        eta: Eta = 1.0,
    ) -> None:
        super().__init__(alpha, beta1, beta2, eps, eta, adabound=True, final_lr=final_lr, gamma=gamma)


class AMSBound(Adam):
    """:class:`AdaBound` with the largest v so far, as in :class:`AMSGrad` (Luo et al. 2019).

    Args:
        alpha: step size, the learning rate, not negative; default 0.001.
        beta1: decay of the mean gradient per step, from 0 to less than 1; default 0.9.
        beta2: decay of the mean squared gradient per step, from 0 to less than 1; default 0.999.
        final_lr: the step size of SGD towards which the bounds converge; default 0.1.
        gamma: speed at which the bounds converge, per step; default 0.001.
        eps: added to the square root in the denominator, not negative; default 1e-08.
        eta: factor of the whole update; default 1.0.

    Example:
        >>> optimizer = optimizers.AMSBound().setup(L.Linear(2, 1))
    """

    config_name = "amsbound"

    def __init__(
        self,
        alpha: Annotated[float, positive, "Learning rate per step."] = 0.001,
        beta1: Beta1 = 0.9,
        beta2: Beta2 = 0.999,
        final_lr: FinalRate = 0.1,
        gamma: Speed = 0.001,
        eps: Eps = 1e-8,
        eta: Eta = 1.0,
    ) -> None:
        super().__init__(alpha, beta1, beta2, eps, eta, 0, True, True, final_lr, gamma)
