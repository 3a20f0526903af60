"""Learning-rate schedules as pure functions of progress, counted in epochs (a float; any unit will do).

``make(name, **arguments)`` gives the function by name; extensions and ``dbrdist-train`` call it once per step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Schedule = Callable[[float], float]


def constant(lr: float) -> Schedule:
    """lr throughout."""
    return lambda epoch: lr


def step(lr: float, gamma: float, milestones: Sequence[float]) -> Schedule:
    """lr gamma^k, where k of the milestones are reached."""
    return lambda epoch: lr * gamma ** sum(epoch >= m for m in milestones)


def exponential(lr: float, gamma: float) -> Schedule:
    """lr gamma^epoch."""
    return lambda epoch: lr * gamma**epoch


def polynomial(lr: float, total: float, power: float = 1.0, end: float = 0.0, begin: float = 0.0) -> Schedule:
    """end + (lr - end) (1 - t)^power, where t goes from 0 at ``begin`` (the end of a warm-up) to 1 at ``total``."""
    return lambda epoch: end + (lr - end) * (1 - _progress(epoch, begin, total)) ** power


def cosine(lr: float, total: float, end: float = 0.0, begin: float = 0.0) -> Schedule:
    """end + (lr - end) (1 + cos(pi t)) / 2, with t as in :func:`polynomial` (Loshchilov and Hutter 2017)."""
    return lambda epoch: end + (lr - end) * (1 + math.cos(math.pi * _progress(epoch, begin, total))) / 2


def _progress(epoch: float, begin: float, total: float) -> float:
    return min(max((epoch - begin) / (total - begin), 0.0), 1.0)


def warmup(after: Schedule, epochs: float, start: float = 0.0) -> Schedule:
    """Linear from ``start`` to ``after(epochs)`` over the first ``epochs``, then ``after`` (Goyal et al. 2017)."""
    if epochs <= 0:
        return after
    peak = after(epochs)
    return lambda epoch: after(epoch) if epoch >= epochs else start + (peak - start) * epoch / epochs


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": constant,
    "step": step,
    "exponential": exponential,
    "polynomial": polynomial,
    "cosine": cosine,
}
