"""Hooks of optimizers: weight decay and gradient clipping, in one pass over flat memory each."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dbrdist.core.flat import Run
from dbrdist.core.update_rule import pieces
from dbrdist.optimizers.lars import norm


class WeightDecay:
    """Add ``rate`` times the parameter to its gradient; for one rule alone with ``rule.add_hook``."""

    name = "WeightDecay"
    keeps_zero = True
    call_for_each_param = True
    timing = "pre"

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, rule: Any, param: Any) -> None:
        if param.array is not None and param.grad is not None:
            g = param.grad
            g += self.rate * param.array

    def flat(self, run: Run) -> None:
        """The same for a whole run."""
        data, grad = run.data, run.grad
        for piece in pieces(data):
            g = grad[piece]
            g += self.rate * data[piece]


class GradientClipping:
    """Scale the gradients of all parameters that are updated so that their joint 2-norm is at most ``threshold``."""

    name = "GradientClipping"
    timing = "pre"

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def __call__(self, optimizer: Any) -> None:
        runs = list(optimizer.runs())
        total: Any = sum(norm(run.grad) ** 2 for run in runs)
        if isinstance(total, (int, float)):
            rate: Any = self.threshold / math.sqrt(total) if total > 0 else 1.0
            if rate >= 1:
                return
        else:  # on a GPU, one more pass costs less than waiting for the number
            rate = np.minimum(self.threshold / np.sqrt(total), 1.0)
        for run in runs:
            g = run.grad
            g *= rate if isinstance(rate, float) else rate.astype(g.dtype)


class GradientHardClipping:
    """Clip every element of the gradients to an interval."""

    name = "GradientHardClipping"
    call_for_each_param = True
    timing = "pre"

    def __init__(self, lower_bound: float, upper_bound: float) -> None:
        self.lower_bound = lower_bound
        self.upper_bound = upper_bound

    def __call__(self, rule: Any, param: Any) -> None:
        if param.grad is not None:
            param.grad.clip(self.lower_bound, self.upper_bound, out=param.grad)

    def flat(self, run: Run) -> None:
        """The same for a whole run."""
        g = run.grad
        g.clip(self.lower_bound, self.upper_bound, out=g)
