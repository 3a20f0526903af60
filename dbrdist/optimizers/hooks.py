"""Hooks of optimizers: weight decay, Lasso, clipping, LARS and noise.

What changes elements one by one runs within the update's pass over memory. Norms need a pass of their own before it,
and noise is drawn for each parameter as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import numpy as np

from dbrdist.core.array import random
from dbrdist.core.array.backend import Array, device_of, get_array_module, on, to_device
from dbrdist.core.model.flat import Piece, Run
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.names.limits import any_number, largest, not_negative, positive, threshold
from dbrdist.core.update.elementwise_hook import ElementwiseHook
from dbrdist.core.usage.mistakes import refuse, warn
from dbrdist.optimizers.lars import joint_norms, norm, quotient


class WeightDecay(ElementwiseHook):
    """Add ``rate`` times the parameter to its gradient; for one rule alone with ``rule.add_hook``.

    ``params`` are the parameters that decay, such as all weights but no biases; None means all. Several groups with
    rates of their own are several hooks: ``optimizer.add_hook(WeightDecay(1e-4, weights), "decay of weights")``.

    Args:
        rate: strength, >= 0.
        params: the parameters that decay, an iterable; None for all of the optimizer.

    Example:
        >>> optimizer = optimizers.MomentumSGD(lr=0.1).setup(L.Linear(2, 1))
        >>> optimizer.add_hook(optimizers.WeightDecay(1e-4))
    """

    name = "WeightDecay"
    keeps_zero = True
    loop = "weight_decay"

    def __init__(
        self,
        rate: Annotated[float, not_negative, "Decay per step, relative to the parameter."],
        params: Iterable[Parameter] | None = None,
    ) -> None:
        super().__init__(params)
        self.rate = rate

    def numbers(self, rule: Any) -> tuple[Any, ...]:
        """The rate."""
        return (self.rate,)

    def piece(self, p: Array, g: Array, *numbers: Any) -> None:
        """g <- g + rate p"""
        (rate,) = numbers
        g += rate * p


_DECOUPLED = "Decay per step, relative to the parameter, at the optimizer's `lr`; it follows the schedule."


class DecoupledWeightDecay(ElementwiseHook):
    """Shrink parameters beside the gradient: p <- (1 - rate lr / initial_lr) p before each update.

    So the decay follows the schedule of the learning rate, but not its size (SGDW of Loshchilov and Hutter 2019, arXiv
    1711.05101, algorithm 1). For optimizers with ``lr``.

    Args:
        rate: decay per step, relative to the parameter, at the initial learning rate.
        initial_lr: the learning rate at which ``rate`` holds: the one that schedules multiply.
        params: as in :class:`WeightDecay`.

    Example:
        >>> optimizer = optimizers.MomentumSGD(lr=0.1).setup(L.Linear(2, 1))
        >>> optimizer.add_hook(optimizers.DecoupledWeightDecay(1e-4, initial_lr=0.1))
    """

    name = "DecoupledWeightDecay"
    keeps_zero = True
    changes_parameters = True
    loop = "decoupled_weight_decay"

    def __init__(
        self,
        rate: Annotated[float, not_negative, _DECOUPLED],
        initial_lr: Annotated[float, positive],
        params: Iterable[Parameter] | None = None,
    ) -> None:
        super().__init__(params)
        self.rate = rate
        self.initial_lr = initial_lr

    def numbers(self, rule: Any) -> tuple[Any, ...]:
        """The factor of p."""
        return (1 - self.rate * float(rule.hyperparam.lr) / self.initial_lr,)

    def piece(self, p: Array, g: Array, *numbers: Any) -> None:
        """p <- factor p"""
        (factor,) = numbers
        p *= factor


class Lasso(ElementwiseHook):
    """Add ``rate`` times the sign of the parameter to its gradient: the gradient of an L1 penalty.

    ``params`` as in :class:`WeightDecay`.

    Args:
        rate: strength, >= 0.
        params: the parameters that decay, an iterable; None for all of the optimizer.

    Example:
        >>> optimizer = optimizers.SGD(lr=0.1).setup(L.Linear(2, 1))
        >>> optimizer.add_hook(optimizers.Lasso(1e-4))
    """

    name = "Lasso"
    keeps_zero = True
    loop = "lasso"

    def __init__(
        self,
        rate: Annotated[float, not_negative, "Weight of the sum of absolute values in the loss."],
        params: Iterable[Parameter] | None = None,
    ) -> None:
        super().__init__(params)
        self.rate = rate

    def numbers(self, rule: Any) -> tuple[Any, ...]:
        """The rate."""
        return (self.rate,)

    def piece(self, p: Array, g: Array, *numbers: Any) -> None:
        """g <- g + rate sign(p)"""
        (rate,) = numbers
        g += rate * np.sign(p)


class GradientClipping:
    """Scale the gradients of all parameters that are updated so that their joint 2-norm is at most ``threshold``.

    Args:
        threshold: largest L2 norm of all gradients together, > 0.

    Example:
        >>> optimizer = optimizers.SGD(lr=0.1).setup(L.Linear(2, 1))
        >>> optimizer.add_hook(optimizers.GradientClipping(1.0))
    """

    name = "GradientClipping"
    works_on_shards = True
    timing = "pre"

    def __init__(
        self, threshold: Annotated[float, largest, "The largest allowed L2 norm of all gradients together."]
    ) -> None:
        if threshold == 0:
            warn("GradientClipping: the threshold 0 makes all gradients 0, so nothing is trained; leave the hook out")
        self.threshold = threshold

    def __call__(self, optimizer: Any) -> None:
        runs = list(optimizer.joint_runs())
        total: Any = _sum_of_squares(runs)
        if runs:
            [total] = runs[0].total([total])
        if isinstance(total, (int, float)):
            rate: Any = self.threshold / math.sqrt(total) if total > 0 else 1.0
            if rate >= 1:
                return
        else:  # on a GPU, one more pass costs less than waiting for the number
            rate = np.minimum(self.threshold / np.sqrt(total), 1.0)
        for run in runs:
            g = run.grad
            if isinstance(rate, float):
                g *= rate
                continue
            here = to_device(rate, device_of(g))
            with on(g):
                g *= here.astype(g.dtype)


def _sum_of_squares(runs: list[Run]) -> Any:
    """Of all gradients; on GPUs a 0-d array on the device of the first run."""
    total: Any = 0
    for run in runs:
        with on(run.grad):
            square: Any = norm(run.grad) ** 2
        if not isinstance(square, float):
            square = to_device(square, device_of(runs[0].grad))
        total = total + square
    return total


class GradientHardClipping(ElementwiseHook):
    """Clip every element of the gradients to an interval.

    Args:
        lower_bound: smallest value of an element.
        upper_bound: largest value of an element.

    Example:
        >>> optimizer = optimizers.SGD(lr=0.1).setup(L.Linear(2, 1))
        >>> optimizer.add_hook(optimizers.GradientHardClipping(-1.0, 1.0))
    """

    name = "GradientHardClipping"
    loop = "hard_clipping"

    def __init__(
        self,
        lower_bound: Annotated[float, any_number, "The smallest value that an element keeps."],
        upper_bound: Annotated[float, any_number, "The largest value that an element keeps."],
    ) -> None:
        super().__init__()
        if lower_bound > upper_bound:
            words = f"GradientHardClipping: expected lower_bound <= upper_bound, got {lower_bound} and {upper_bound}"
            refuse(ValueError(words))
        self.lower_bound = lower_bound
        self.upper_bound = upper_bound

    @property
    def keeps_zero(self) -> bool:  # type: ignore[override]  # follows the bounds
        """Whether 0 is within the bounds."""
        return bool(self.lower_bound <= 0 <= self.upper_bound)

    def numbers(self, rule: Any) -> tuple[Any, ...]:
        """Both bounds."""
        return self.lower_bound, self.upper_bound

    def piece(self, p: Array, g: Array, *numbers: Any) -> None:
        """g <- min(max(g, lower), upper)"""
        lower, upper = numbers
        g.clip(lower, upper, out=g)


_OF_NORM = "Decay per step, relative to the parameter; part of the norm that sets the scale."


class GradientLARS:
    """Scale each gradient to the norm of its parameter: g <- (g + wd p) ||p|| / (||g|| + wd ||p|| + eps).

    The factor is 1 for parameters with a norm of at most ``threshold``. The trust coefficient of You et al. 2017
    (arXiv 1708.03888) is left to the learning rate; :class:`~dbrdist.optimizers.LARS` has it.

    Args:
        threshold: parameters and gradients with a smaller norm are left alone; default 0.01.
        weight_decay: decay relative to the parameter, part of the norm; default 0.0.
        eps: added to the denominator; default 1e-09.

    Example:
        >>> optimizer = optimizers.MomentumSGD(lr=0.1).setup(L.Linear(2, 1))
        >>> optimizer.add_hook(optimizers.GradientLARS())
    """

    name = "GradientLARS"
    works_on_shards = True
    keeps_zero = True
    call_for_each_param = True
    timing = "pre"

    def __init__(
        self,
        threshold: Annotated[float, threshold, "Parameters with a norm of at most this keep their gradients."] = 1e-2,
        weight_decay: Annotated[float, not_negative, _OF_NORM] = 0.0,
        eps: Annotated[float, not_negative, "Added to the norm in the denominator."] = 1e-9,
    ) -> None:
        self.threshold = threshold
        self.weight_decay = weight_decay
        self.eps = eps

    def __call__(self, rule: Any, param: Any) -> None:
        if param.array is not None and param.grad is not None:
            p, g = param.array, param.grad
            self._scale(p, g, norm(p.reshape(-1)), norm(g.reshape(-1)))

    def flat(self, run: Run) -> None:
        """The same for each parameter of a ``run`` in flat memory."""
        for layers in run.groups():
            pairs = [(run.data[where], run.grad[where]) for _, where in layers]
            for pair, norms in zip(pairs, joint_norms(run, pairs)):
                self._scale(*pair, *norms)

    def _scale(self, p: Array, g: Array, p_norm: Any, g_norm: Any) -> None:
        whole = g_norm + self.weight_decay * p_norm + self.eps
        rate = quotient(p_norm, whole, (p_norm > self.threshold) & (whole > 0))
        if self.weight_decay:
            g += self.weight_decay * p
        g *= rate if isinstance(rate, float) else rate.astype(g.dtype)


def exponential_decay_noise(xp: Any, shape: tuple[int, ...], dtype: Any, hook: Any, opt: Any) -> Array:
    """Normal noise of variance eta / (1 + t)^0.55 (Neelakantan et al. 2015, arXiv 1511.06807)."""
    std = math.sqrt(hook.eta / (1 + opt.t) ** 0.55)
    return xp.asarray((std * hook.generator.standard_normal(shape)).astype(dtype))


class GradientNoise:
    """Add noise to the gradients: ``noise_func(xp, shape, dtype, hook, rule)``, for each parameter in turn.

    ``hook.generator`` is then a NumPy generator that follows from the run's seed, the number of updates so far and the
    parameter's place in flat memory: all ranks draw the same noise, and a resumed run draws what a straight one does.

    Args:
        eta: variance of the noise at the first step, not negative.
        noise_func: gives the noise for (xp, shape, dtype, hook, rule); by default normal noise of variance eta / (1 +
            t)^0.55.

    Example:
        >>> optimizer = optimizers.SGD(lr=0.1).setup(L.Linear(2, 1))
        >>> optimizer.add_hook(optimizers.GradientNoise(0.3))
    """

    name = "GradientNoise"
    works_on_shards = True
    keeps_zero = True
    call_for_each_param = True
    timing = "pre"
    needs_equal_seeds = True  # ranks that train together compare theirs
    generator: np.random.Generator

    def __init__(
        self,
        eta: Annotated[
            float, not_negative, "The variance of the noise at the first step; it falls as (1 + steps)^-0.55."
        ],
        noise_func: Callable[..., Array] = exponential_decay_noise,
    ) -> None:
        if not callable(noise_func):
            raise TypeError(f"GradientNoise: noise_func: expected a function, got {noise_func!r}")
        self.eta = eta
        self.noise_func = noise_func

    def __call__(self, rule: Any, param: Any) -> None:
        if param.grad is not None:
            self._add(rule, param, param.grad)

    def flat(self, run: Run) -> None:
        """The same for each parameter of a ``run`` in flat memory."""
        for p, where in run.layers():
            self._add(p.update_rule, p, run.grad[where], run.piece(p, where))

    def _add(self, rule: Any, param: Parameter, g: Array, piece: Piece | None = None) -> None:
        assert param.slot is not None  # an update begins with places for all
        purpose = f"gradient noise {param.dtype.name}"  # each type has flat memory of its own
        self.generator = random.generator(random.get_seed(), purpose, sample=rule.t, part=param.slot.start)
        noise = self.noise_func(get_array_module(g), param.shape, g.dtype, self, rule)
        g += (noise if piece is None else noise.reshape(-1)[slice(*piece)]).reshape(g.shape)
