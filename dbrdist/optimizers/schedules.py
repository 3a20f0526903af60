"""Schedules of learning rates and other hyperparameters: pure functions of progress, counted in epochs or any unit.

``extensions.FollowSchedule`` sets a hyperparameter by one of them, or by a function of your own; ``lr`` stands for the
value at the start.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Annotated

from dbrdist.core.names.limits import exponent, level, levels, not_negative, number, positive, rate, within_limits

Schedule = Callable[[float], float]


@within_limits
def constant(
    lr: Annotated[float, number],
) -> Schedule:
    """lr throughout."""
    return _Constant(lr)


class _Constant:
    def __init__(self, value: float):
        self._value = value

    def __call__(self, epoch: float) -> float:
        return self._value


def is_constant(schedule: Schedule) -> bool:
    """Whether a schedule is that of :func:`constant`."""
    return isinstance(schedule, _Constant)


def whole_periods(position: float, period: float) -> int:
    """How many periods are over at a position: epochs are quotients of sample counts, so that 0.3 / 0.1 counts as 3."""
    periods = position / period
    return math.floor(periods + 1e-10 + 1e-15 * abs(periods))


def _has_come(epoch: float, milestone: float) -> bool:
    return epoch >= milestone - 1e-10 - 1e-15 * abs(milestone)


_MILESTONES = "Epochs, rising, fractions allowed, at which the rate is multiplied by `gamma`."
_FACTORS = "In place of `gamma` one factor for each milestone, of the optimizer's own rate; in force from there on."


@within_limits
def step(
    lr: Annotated[float, number],
    gamma: Annotated[float, rate, "The factor."] = 0.1,
    milestones: Annotated[Sequence[float], levels, _MILESTONES] = (),
    factors: Annotated[Sequence[float] | None, levels, _FACTORS] = None,
) -> Schedule:
    """lr gamma^k, where k of the milestones are reached.

    With ``factors``, one for each milestone, it is lr times the factor of the last milestone reached instead, and lr
    before the first one: ``step(12.8, 0.1, (0, 40, 70, 85), (0.5, 0.075, 0.01, 0.001))``.
    """
    if factors is None:
        return lambda epoch: lr * gamma ** sum(_has_come(epoch, m) for m in milestones)
    if len(factors) != len(milestones):
        raise ValueError(f"step: expected {len(milestones)} factors, one for each milestone, got {len(factors)}")
    stages = sorted(zip(milestones, factors))
    return lambda epoch: lr * next((factor for m, factor in reversed(stages) if _has_come(epoch, m)), 1.0)


_POINTS = "Pairs of an epoch, rising, and the factor of the optimizer's rate there; constant before and after them."


@within_limits
def piecewise_linear(
    lr: Annotated[float, number], points: Annotated[Sequence[tuple[float, float]], _POINTS]
) -> Schedule:
    """lr times a factor that is linear between ``points``, pairs (epoch, factor) in rising order, constant outside.

    ``piecewise_linear(1.7, ((0, 1e-4), (2, 1), (16, 0)))`` is FFCV's for 16 epochs.
    """
    epochs, factors = zip(*points)
    if any(a >= b for a, b in itertools.pairwise(epochs)):
        raise ValueError(f"piecewise_linear: expected points with rising epochs, got {list(epochs)}")

    def at(epoch: float) -> float:
        k = bisect.bisect_right(epochs, epoch)
        if k == 0 or k == len(epochs):
            return lr * factors[max(k - 1, 0)]
        done = (epoch - epochs[k - 1]) / (epochs[k] - epochs[k - 1])
        return lr * (factors[k - 1] + (factors[k] - factors[k - 1]) * done)

    return at


_LITERAL = "Whether the linear part has twice the slope, as transcriptions of the paper print it: up to 1.5, then 1."


@within_limits
def rmsprop_warmup(
    center: Annotated[float, level, "The epoch at which the share is one half."] = 10.0,
    period: Annotated[float, positive, "Epochs: the share is 1 from `center` + `period` / 2 on."] = 5.0,
    literal: Annotated[bool, _LITERAL] = False,
    whole_epochs: Annotated[bool, "Whether the share changes at the end of epochs only, not at each step."] = False,
) -> Schedule:
    """The share a_sgd of :class:`~dbrdist.optimizers.RMSpropWarmup` (Akiba et al. 2017): an ELU of the epoch.

    exp(2 (epoch - center) / period) / 2 up to ``center``, then 1/2 + (epoch - center) / period up to 1, which it
    reaches at center + period / 2.

    Args:
        center: the epoch at which the share is one half.
        period: the share is 1 from center + period / 2 on.
        literal: take twice the slope of the linear part, as transcriptions of the paper have it: the share then rises
            to 1.5 before it falls to 1. Probably a misprint, since the slope of an ELU is continuous.
        whole_epochs: change at the end of epochs only, as some re-implementations do.
    """
    slope = (2 if literal else 1) / period

    def share(epoch: float) -> float:
        at = (whole_periods(epoch, 1.0) if whole_epochs else epoch) - center
        if at < 0:
            return math.exp(2 * at / period) / 2
        return 0.5 + slope * at if at < period / 2 else 1.0

    return share


def by_whole_epochs(schedule: Schedule) -> Schedule:
    """The schedule's value at the beginning of each epoch, for the whole of it, as in many PyTorch programs."""
    return lambda epoch: schedule(float(whole_periods(epoch, 1.0)))


@within_limits
def exponential(
    lr: Annotated[float, number],
    gamma: Annotated[float, rate, "The factor per epoch; each step gets its fraction of it."],
) -> Schedule:
    """lr gamma^epoch."""
    return lambda epoch: lr * gamma**epoch


@within_limits
def stairs(
    lr: Annotated[float, number],
    gamma: Annotated[float, not_negative, "factor"],
    every: Annotated[float, positive, "epochs of a period"],
) -> Schedule:
    """lr gamma^k, where k is the number of whole periods ``every``."""
    return lambda epoch: lr * gamma ** whole_periods(epoch, every)


@within_limits
def inverse(
    lr: Annotated[float, number],
    gamma: Annotated[float, number, "speed"],
    power: Annotated[float, number, "exponent"],
) -> Schedule:
    """lr (1 + gamma epoch)^-power."""
    return lambda epoch: lr * (1 + gamma * epoch) ** -power


_BEGIN = "The epoch at which the fall begins; `warmup` is the end of the warm-up."


@within_limits
def polynomial(
    lr: Annotated[float, number],
    total: Annotated[float, positive],
    power: Annotated[float, exponent, "The exponent; 1 is a straight line."] = 1.0,
    end: Annotated[float, level, "The learning rate at the end."] = 0.0,
    begin: Annotated[float, not_negative, _BEGIN] = 0.0,
) -> Schedule:
    """end + (lr - end) (1 - t)^power, where t goes from 0 at ``begin`` (the end of a warm-up) to 1 at ``total``."""
    return lambda epoch: end + (lr - end) * (1 - _progress(epoch, begin, total)) ** power


@within_limits
def cosine(
    lr: Annotated[float, number],
    total: Annotated[float, positive],
    end: Annotated[float, level, "The learning rate at the end."] = 0.0,
    begin: Annotated[float, not_negative, _BEGIN] = 0.0,
) -> Schedule:
    """end + (lr - end) (1 + cos(pi t)) / 2, with t as in :func:`polynomial` (Loshchilov and Hutter 2017)."""
    return lambda epoch: end + (lr - end) * (1 + math.cos(math.pi * _progress(epoch, begin, total))) / 2


def _progress(epoch: float, begin: float, total: float) -> float:
    if epoch <= begin:
        return 0.0
    return 1.0 if epoch >= total else (epoch - begin) / (total - begin)


@within_limits
def warmup(
    after: Schedule,
    epochs: Annotated[float, not_negative],
    start: Annotated[float, number] = 0.0,
) -> Schedule:
    """Linear from ``start`` to ``after(epochs)`` over the first ``epochs``, then ``after`` (Goyal et al. 2017)."""
    if epochs <= 0:
        return after
    peak = after(epochs)
    return lambda epoch: after(epoch) if epoch >= epochs else start + (peak - start) * epoch / epochs
