"""LARS: a trust ratio per layer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from dbrdist import kernels
from dbrdist.core.array import declared
from dbrdist.core.array.backend import Array, accumulation_dtype, get_array_module
from dbrdist.core.model.flat import Run, Shard
from dbrdist.core.names.limits import decay, not_negative, rate
from dbrdist.core.update.hyperparameter import HyperparameterProxy
from dbrdist.core.update.optimizer import GradientMethod
from dbrdist.core.update.update_rule import UpdateRule, in_pieces, pieces, workspace
from dbrdist.optimizers.gradient_descent import sweep

if TYPE_CHECKING:
    from dbrdist.core.update.hyperparameter import Hyperparameter


def norm(a: Array) -> Any:
    """The 2-norm of a 1-d array, summed in a wider type and on the CPU in pieces that stay in cache.

    A float; on a GPU a 0-d array there, so that the host does not wait for it.
    """
    if not isinstance(a, np.ndarray):
        wide = a.astype(accumulation_dtype(a.dtype), copy=False)
        return np.sqrt((wide * wide).sum())
    total = 0.0
    for piece in pieces(a):
        wide = a[piece].astype(np.float64)
        total += float(wide.dot(wide))
    return math.sqrt(total)


def joint_norms(run: Run, pairs: Sequence[tuple[Array, Array]]) -> list[tuple[Any, Any]]:
    """The 2-norms of pairs of arrays; where ranks have parts of them, those of the whole."""
    norms = [norm(a) for pair in pairs for a in pair]
    if isinstance(run, Shard) and norms:
        norms = [math.sqrt(square) for square in run.total([float(n) ** 2 for n in norms])]
    return list(zip(norms[::2], norms[1::2]))


def quotient(a: Any, b: Any, where: Any) -> Any:
    """a / b, and 1 where ``where`` is false; numbers, or 0-d arrays on the device of the norms."""
    if isinstance(a, float):
        return a / b if where else 1.0
    return get_array_module(a).where(where, a / b, 1.0)


class LARSRule(UpdateRule):
    """v <- momentum v - lr trust (g + wd p); p <- p + v, with one trust ratio per parameter"""

    state_names = ("v",)
    keeps_zero = True

    def step_run(self, hp: Any, t: int, run: Run, state: list[Array]) -> None:
        data, grad = run.data, run.grad
        if not isinstance(data, np.ndarray) and not isinstance(run, Shard):
            layers = tuple((w.start, w.stop, p.ndim > 1 or not hp.skip_vectors) for p, w in run.layers())
            numbers: tuple[Any, ...] = (layers, *_rates(hp))
            if (block := declared.current()) is not None:
                numbers = layers, block.declare(lambda: _rates(self.hyperparam.in_numbers()), 5, np.float64)
            if kernels.update("lars", (data, grad, *state), numbers):
                return
        declared.refuse_in_capture("LARS has no kernel for these arrays")
        self._step_layers(hp, t, run, state[0])

    def _step_layers(self, hp: Any, t: int, run: Run, v: Array) -> None:
        data, grad = run.data, run.grad
        for layers in run.groups():
            scaled = [where for param, where in layers if param.ndim > 1 or not hp.skip_vectors]
            norms = iter(joint_norms(run, [(data[where], grad[where]) for where in scaled]))
            for param, where in layers:
                decay, trust = hp.weight_decay, 1.0
                if param.ndim <= 1 and hp.skip_vectors:
                    decay = 0.0
                else:
                    trust = _trust(hp, *next(norms))
                in_pieces(self._move(hp, t, decay, trust), data[where], grad[where], [v[where]])

    def _move(self, hp: Any, t: int, decay: float, trust: Any) -> Callable[..., None]:
        return functools.partial(_move, t, hp.momentum, decay, hp.lr * trust)


def _rates(hp: Any) -> tuple[float, ...]:
    return hp.lr, hp.momentum, hp.weight_decay, hp.trust_coefficient, hp.eps


def _trust(hp: Any, p_norm: Any, g_norm: Any) -> Any:
    whole = g_norm + hp.weight_decay * p_norm + hp.eps
    return quotient(hp.trust_coefficient * p_norm, whole, (p_norm > 0) & (g_norm > 0))


def _move(t: int, momentum: float, decay: float, rate: Any, p: Array, g: Array, v: Array) -> None:
    """v <- momentum v - rate (g + decay p); p <- p + v"""
    sweep(v, t)
    w = workspace(g)
    np.multiply(p, decay, out=w)
    w += g
    w *= rate
    v *= momentum
    v -= w
    p += v


_DECAY = "Decay per step, relative to the parameter; part of the norm that sets the layer's rate."
SKIP_VECTORS = "Whether biases and scales do without weight decay and the layer's own rate."


class LARS(GradientMethod):
    """Layer-wise adaptive rate scaling (You et al. 2017, arXiv 1708.03888), as in MLPerf's reference.

    trust = trust_coefficient ||p|| / (||g|| + wd ||p|| + eps) per parameter, and 1 where a norm is zero. With
    ``skip_vectors``, parameters with at most one axis (biases, scales) have trust 1 and no weight decay.

    Args:
        lr: learning rate, not negative; default 0.1.
        momentum: decay of the velocity per step, from 0 to less than 1; default 0.9.
        weight_decay: L2 decay added to the gradients before the norms are compared; default 0.0001.
        trust_coefficient: ratio of the update's norm to the parameter's; default 0.001.
        eps: added to the denominator of the ratio; default 0.0.
        skip_vectors: leave parameters with one axis, such as biases, without scaling and decay; default True.

    Example:
        >>> optimizer = optimizers.LARS(lr=1.0, weight_decay=5e-5).setup(L.Linear(2, 1))
    """

    rule_class = LARSRule
    lr = HyperparameterProxy("lr")
    momentum = HyperparameterProxy("momentum")
    weight_decay = HyperparameterProxy("weight_decay")
    trust_coefficient = HyperparameterProxy("trust_coefficient")
    eps = HyperparameterProxy("eps")

    def __init__(
        self,
        lr: Annotated[float, rate, "Learning rate per step."] = 0.1,
        momentum: Annotated[float, decay, "Fraction of the last update that is kept."] = 0.9,
        weight_decay: Annotated[float, not_negative, _DECAY] = 1e-4,
        trust_coefficient: Annotated[float, rate, "The layer's rate relative to the ratio of its norms."] = 0.001,
        eps: Annotated[float, not_negative, "Added to the norm in the denominator."] = 0.0,
        skip_vectors: Annotated[bool, SKIP_VECTORS] = True,
    ) -> None:
        super().__init__(
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            trust_coefficient=trust_coefficient,
            eps=eps,
            skip_vectors=skip_vectors,
        )


class CorrectedLARSRule(LARSRule):
    """v <- momentum v - trust (g + wd p); p <- p + lr v, with one trust ratio per parameter"""

    keeps_zero = True

    def step_run(self, hp: Hyperparameter, t: int, run: Run, state: list[Array]) -> None:
        self._step_layers(hp, t, run, state[0])

    def _move(self, hp: Any, t: int, decay: float, trust: Any) -> Callable[..., None]:
        return functools.partial(_move_corrected, t, hp.momentum, decay, hp.lr, trust)


def _move_corrected(t: int, momentum: float, decay: float, lr: float, trust: Any, p: Array, g: Array, v: Array) -> None:
    """v <- momentum v - trust (g + decay p); p <- p + lr v"""
    sweep(v, t)
    w = workspace(g)
    np.multiply(p, decay, out=w)
    w += g
    w *= trust
    v *= momentum
    v -= w
    p += np.multiply(v, lr, out=w)


class CorrectedLARS(LARS):
    """LARS with momentum correction: the other form that MLPerf's rules admit, that of NVIDIA's MXNet submissions.

    There the momentum is multiplied by lr / (lr of the step before). Here it does not contain lr at all, which gives
    the same updates, and works for rates of 0 too (Goyal et al. 2017, equation 9). Arguments as of :class:`LARS`.

    Args:
        lr: learning rate, not negative; default 0.1.
        momentum: decay of the velocity per step, from 0 to less than 1; default 0.9.
        weight_decay: L2 decay added to the gradients before the norms are compared; default 0.0001.
        trust_coefficient: ratio of the update's norm to the parameter's; default 0.001.
        eps: added to the denominator of the ratio; default 0.0.
        skip_vectors: leave parameters with one axis, such as biases, without scaling and decay; default True.

    Example:
        >>> optimizer = optimizers.CorrectedLARS(lr=0.1).setup(L.Linear(2, 1))
    """

    rule_class = CorrectedLARSRule
