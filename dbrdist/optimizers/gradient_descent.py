"""Gradient descent: SGD and momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np

from dbrdist.core.array.backend import Array
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.names.limits import decay, rate
from dbrdist.core.update.hyperparameter import HyperparameterProxy
from dbrdist.core.update.optimizer import GradientMethod
from dbrdist.core.update.update_rule import UpdateRule, pieces, workspace
from dbrdist.kernels.small_arrays.small import momentum_sgd

if TYPE_CHECKING:
    from dbrdist.core.update.hyperparameter import Hyperparameter

_SWEEP_INTERVAL = 64  # updates, in which a factor of 0.9 makes a thousandth


def sweep(v: Array, t: int) -> None:
    """At each 64th update, make elements of v 0 that are below the smallest normal number.

    Where a unit gets no gradient any more, v shrinks by the momentum at each update, down to the smallest numbers that
    there are and no further. Processors take a hundred times as long for these: with a sixth of them the update of
    ResNet-20 took 870 us instead of 165. GPUs do not. Of 16 bits, in which a rule of your own may keep v, such numbers
    count: the smallest normal one of float16 is 6e-5.
    """
    if not t % _SWEEP_INTERVAL and isinstance(v, np.ndarray) and v.itemsize > 2:
        v *= np.abs(v) >= np.finfo(v.dtype).tiny


def _with_velocity(rule: str, hp: Hyperparameter, t: int, v: Array) -> tuple[str, tuple[float, ...]]:
    """The kernel of a rule with a velocity, after a :func:`sweep` in pieces."""
    if not t % _SWEEP_INTERVAL:
        for piece in pieces(v):
            sweep(v[piece], t)
    return rule, (hp.lr, hp.momentum)


_WITH_RATE = "v contains the learning rate"
_WITHOUT_RATE = "v does not contain the learning rate"


class SGDRule(UpdateRule):
    """p <- p - lr g"""

    keeps_zero = True

    def step(self, hp: Hyperparameter, t: int, p: Array, g: Array, *state: Array) -> None:
        w = workspace(g)
        p -= np.multiply(g, hp.lr, out=w)

    def kernel(self, hp: Hyperparameter, t: int, state: list[Array]) -> tuple[str, tuple[float, ...]] | None:
        return "sgd", (hp.lr,)


class SGD(GradientMethod):
    """Stochastic gradient descent, p <- p - lr g.

    Args:
        lr: learning rate, not negative; default 0.01.

    Example:
        >>> model = L.Linear(1, 1, initialW=3.0)
        >>> optimizer = optimizers.SGD(lr=0.5).setup(model)
        >>> optimizer.update(lambda: F.sum(model(np.ones((1, 1), np.float32))))
        >>> model.W.array
        array([[2.5]], dtype=float32)
    """

    rule_class = SGDRule
    lr = HyperparameterProxy("lr")

    def __init__(self, lr: Annotated[float, rate, "Learning rate per step."] = 0.01) -> None:
        super().__init__(lr=lr)


class MomentumSGDRule(UpdateRule):
    """v <- momentum v - lr g; p <- p + v"""

    state_names = ("v",)
    state_meaning = _WITH_RATE
    keeps_zero = True

    def step(self, hp: Hyperparameter, t: int, p: Array, g: Array, *state: Array) -> None:
        (v,) = state
        if not t % _SWEEP_INTERVAL:
            sweep(v, t)
        momentum, lr = hp.momentum, hp.lr
        if isinstance(v, np.ndarray):
            momentum_sgd(p, g, v, workspace, lr, momentum)
        else:
            np.multiply(v, momentum, v)
            np.subtract(v, np.multiply(g, lr, workspace(g)), v)
            np.add(p, v, p)

    def kernel(self, hp: Hyperparameter, t: int, state: list[Array]) -> tuple[str, tuple[float, ...]] | None:
        return _with_velocity("momentum_sgd", hp, t, state[0])


class MomentumSGD(GradientMethod):
    """SGD with momentum, v <- momentum v - lr g; p <- p + v (Goyal et al. 2017, equation 10).

    Args:
        lr: learning rate, not negative; default 0.01.
        momentum: decay of the velocity per step, from 0 to less than 1; default 0.9.

    Example:
        >>> model = L.Classifier(L.Linear(2, 2))
        >>> optimizer = optimizers.MomentumSGD(lr=0.1, momentum=0.9).setup(model)
        >>> optimizer.update(model, np.ones((1, 2), np.float32), np.array([0]))
    """

    rule_class = MomentumSGDRule
    lr = HyperparameterProxy("lr")
    momentum = HyperparameterProxy("momentum")

    def __init__(
        self,
        lr: Annotated[float, rate, "Learning rate per step."] = 0.01,
        momentum: Annotated[float, decay, "Fraction of the last update that is kept."] = 0.9,
    ) -> None:
        super().__init__(lr=lr, momentum=momentum)


class CorrectedMomentumSGDRule(UpdateRule):
    """v <- momentum v - g; p <- p + lr v"""

    state_names = ("v",)
    state_meaning = _WITHOUT_RATE
    keeps_zero = True

    def step(self, hp: Hyperparameter, t: int, p: Array, g: Array, *state: Array) -> None:
        (v,) = state
        sweep(v, t)
        w = workspace(g)
        v *= hp.momentum
        v -= g
        p += np.multiply(v, hp.lr, out=w)

    def kernel(self, hp: Hyperparameter, t: int, state: list[Array]) -> tuple[str, tuple[float, ...]] | None:
        return _with_velocity("corrected_momentum_sgd", hp, t, state[0])


class CorrectedMomentumSGD(GradientMethod):
    """SGD with momentum whose buffer does not contain the learning rate, v <- momentum v - g; p <- p + lr v.

    When lr changes, no momentum correction is needed (Goyal et al. 2017, equation 9).

    Args:
        lr: learning rate, not negative; default 0.01.
        momentum: decay of the velocity per step, from 0 to less than 1; default 0.9.

    Example:
        >>> optimizer = optimizers.CorrectedMomentumSGD(lr=0.1).setup(L.Linear(2, 1))
    """

    rule_class = CorrectedMomentumSGDRule
    lr = HyperparameterProxy("lr")
    momentum = HyperparameterProxy("momentum")

    def __init__(
        self,
        lr: Annotated[float, rate, "Learning rate per step."] = 0.01,
        momentum: Annotated[float, decay, "Fraction of the last update that is kept."] = 0.9,
    ) -> None:
        super().__init__(lr=lr, momentum=momentum)


class NesterovAGRule(UpdateRule):
    """v <- momentum v - lr g; p <- p + momentum v - lr g, with the new v"""

    state_names = ("v",)
    state_meaning = _WITH_RATE
    keeps_zero = True

    def step(self, hp: Hyperparameter, t: int, p: Array, g: Array, *state: Array) -> None:
        (v,) = state
        sweep(v, t)
        w = workspace(g)
        np.multiply(g, hp.lr, out=w)
        v *= hp.momentum
        v -= w
        factor = hp.momentum
        if as_chainer[0]:  # whose formula has the new v instead of the old one
            w *= 1 + factor
            factor *= factor
        p -= w
        p += np.multiply(v, factor, out=w)

    def kernel(self, hp: Hyperparameter, t: int, state: list[Array]) -> tuple[str, tuple[float, ...]] | None:
        return None if as_chainer[0] else _with_velocity("nesterov_ag", hp, t, state[0])


class NesterovAG(GradientMethod):
    """Nesterov's accelerated gradient in the form of Bengio et al. 2013 (arXiv 1212.0901).

    Args:
        lr: learning rate, not negative; default 0.01.
        momentum: decay of the velocity per step, from 0 to less than 1; default 0.9.

    Example:
        >>> optimizer = optimizers.NesterovAG(lr=0.1).setup(L.Linear(2, 1))
    """

    rule_class = NesterovAGRule
    lr = HyperparameterProxy("lr")
    momentum = HyperparameterProxy("momentum")

    def __init__(
        self,
        lr: Annotated[float, rate, "Learning rate per step."] = 0.01,
        momentum: Annotated[float, decay, "Fraction of the last update that is kept."] = 0.9,
    ) -> None:
        super().__init__(lr=lr, momentum=momentum)


class CorrectedNesterovAGRule(UpdateRule):
    """v <- momentum v - g; p <- p + lr (momentum v - g), with the new v"""

    state_names = ("v",)
    state_meaning = _WITHOUT_RATE
    keeps_zero = True

    def step(self, hp: Hyperparameter, t: int, p: Array, g: Array, *state: Array) -> None:
        (v,) = state
        sweep(v, t)
        w = workspace(g)
        v *= hp.momentum
        v -= g
        np.multiply(v, hp.momentum, out=w)
        w -= g
        w *= hp.lr
        p += w


class CorrectedNesterovAG(GradientMethod):
    """Nesterov's accelerated gradient whose buffer does not contain the learning rate, as in Torch and PyTorch.

    v <- momentum v - g; p <- p + lr (momentum v - g). When lr changes, no momentum correction is needed (Goyal et al.
    2017, equation 9).

    Args:
        lr: learning rate, not negative; default 0.01.
        momentum: decay of the velocity per step, from 0 to less than 1; default 0.9.

    Example:
        >>> optimizer = optimizers.CorrectedNesterovAG(lr=0.1).setup(L.Linear(2, 1))
    """

    rule_class = CorrectedNesterovAGRule
    lr = HyperparameterProxy("lr")
    momentum = HyperparameterProxy("momentum")

    def __init__(
        self,
        lr: Annotated[float, rate, "Learning rate per step."] = 0.01,
        momentum: Annotated[float, decay, "Fraction of the last update that is kept."] = 0.9,
    ) -> None:
        super().__init__(lr=lr, momentum=momentum)
