"""Schedules of learning rates and other hyperparameters: pure functions of progress, counted in epochs or any unit.

``extensions.FollowSchedule`` sets a hyperparameter by one of them, or by a function of your own; ``lr`` stands for the
value at the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Schedule = Callable[[float], float]


def constant(lr: float) -> Schedule:
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


def step(lr: float, gamma: float, milestones: Sequence[float]) -> Schedule:
    """lr gamma^k, where k of the milestones are reached."""
    return lambda epoch: lr * gamma ** sum(epoch >= m for m in milestones)


def exponential(lr: float, gamma: float) -> Schedule:
    """lr gamma^epoch."""
    return lambda epoch: lr * gamma**epoch


def stairs(lr: float, gamma: float, every: float) -> Schedule:
    """lr gamma^k, where k is the number of whole periods ``every``."""
    return lambda epoch: lr * gamma ** (epoch // every)


def inverse(lr: float, gamma: float, power: float) -> Schedule:
    """lr (1 + gamma epoch)^-power."""
    return lambda epoch: lr * (1 + gamma * epoch) ** -power


def polynomial(lr: float, total: float, power: float = 1.0, end: float = 0.0, begin: float = 0.0) -> Schedule:
    """end + (lr - end) (1 - t)^power, where t goes from 0 at ``begin`` (the end of a warm-up) to 1 at ``total``."""
    return lambda epoch: end + (lr - end) * (1 - _progress(epoch, begin, total)) ** power


def cosine(lr: float, total: float, end: float = 0.0, begin: float = 0.0) -> Schedule:
    """end + (lr - end) (1 + cos(pi t)) / 2, with t as in :func:`polynomial` (Loshchilov and Hutter 2017)."""
    return lambda epoch: end + (lr - end) * (1 + math.cos(math.pi * _progress(epoch, begin, total))) / 2


def _progress(epoch: float, begin: float, total: float) -> float:
    if epoch <= begin:
        return 0.0
    return 1.0 if epoch >= total else (epoch - begin) / (total - begin)


def warmup(after: Schedule, epochs: float, start: float = 0.0) -> Schedule:
    """Linear from ``start`` to ``after(epochs)`` over the first ``epochs``, then ``after`` (Goyal et al. 2017)."""
    if epochs <= 0:
        return after
    peak = after(epochs)
    return lambda epoch: after(epoch) if epoch >= epochs else start + (peak - start) * epoch / epochs
