"""The learning-rate range test: a short run whose rate rises each step (Smith 2017, https://arxiv.org/abs/1506.01186)."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from dbrdist.cli.output.folder import FINDINGS
from dbrdist.cli.output.refuse import WRONG, Refused
from dbrdist.core.files.serializer import AbstractSerializer, write_atomically
from dbrdist.core.model.reporter import as_number
from dbrdist.training import Extension, plotting
from dbrdist.training.extensions.snapshots import PRIORITY_SNAPSHOT
from dbrdist.training.triggers import EndTrigger

if TYPE_CHECKING:
    from dbrdist.training.trainer import Trainer

TABLE, PICTURE = FINDINGS
_KEPT = 0.9  # of the mean of the losses, in a step
_TOO_MUCH = 4.0  # times the least mean of the losses, after which the test ends
FEWEST_STEPS = 10  # steps that a suggestion needs


class RangeTest(Extension):
    """Raises the learning rate by a factor after each step, and notes the loss. All ranks do the same.

    Args:
        lowest: the first rate.
        highest: the last rate, of step `steps`.
        steps: number of steps; more than one.
        key: of the learning rate in a configuration.
    """

    trigger = (1, "iteration")
    priority = PRIORITY_SNAPSHOT + 1

    def __init__(self, lowest: float, highest: float, steps: int, key: str = "optimizer.lr"):
        self.key = key
        self.rates = np.geomspace(lowest, highest, steps)
        self.losses: list[float] = []

    def initialize(self, trainer: Trainer) -> None:
        self._set_rate(trainer)

    def __call__(self, trainer: Trainer) -> None:
        if "main/loss" not in trainer.observation:
            words = "needs the loss of each step, but the updater reports none"
            raise Refused(f"lr_finder: the range test {words}; call report({{'loss': loss}}, model) in it", WRONG)
        self.losses.append(as_number(trainer.observation["main/loss"]))
        self._set_rate(trainer)

    def _set_rate(self, trainer: Trainer) -> None:
        if len(self.losses) < len(self.rates):
            trainer.updater.get_optimizer("main").lr = float(self.rates[len(self.losses)])

    def serialize(self, serializer: AbstractSerializer) -> None:
        """The losses so far: a test that was stopped on request goes on at the rate that comes next."""
        self.losses = json.loads(str(serializer("losses", json.dumps(self.losses))))

    def is_over(self) -> bool:
        """Whether the loss has grown so much that higher rates say nothing more; the same on every rank."""
        means = smoothed(self.losses)
        return len(means) > FEWEST_STEPS and bool(means[-1] > _TOO_MUCH * np.abs(means).min())

    def finish(self, folder: str, say: Callable[[str], None]) -> None:
        """Write the table and the picture, and say which rate to begin with."""
        rates, means = self.rates[: len(self.losses)], smoothed(self.losses)
        text = io.StringIO()
        rows = csv.writer(text)
        rows.writerow(("learning_rate", "loss", "smoothed_loss"))
        rows.writerows(zip(rates.tolist(), self.losses, means.tolist()))
        write_atomically(os.path.join(folder, TABLE), lambda file: file.write(text.getvalue().encode()))
        found = suggestion(rates, means)
        if found is None:
            say("learning-rate finder: the loss fell at no rate; try a lower lr_finder.lowest, or more steps")
        else:
            say(
                f"learning-rate finder: the loss fell fastest at {found:.2g} and was lowest at "
                f"{rates[np.nanargmin(means)]:.2g}; begin with {self.key}={found:.2g}"
            )
            if (words := self._at_the_edge(found, means)) is not None:
                say(f"learning-rate finder: {words}")
        if plotting.is_installed():
            _draw(os.path.join(folder, PICTURE), rates, self.losses, means, found)

    def _at_the_edge(self, found: float, means: np.ndarray) -> str | None:
        """What to say of a suggestion at the first rates, or below a loss that still fell at the last one."""
        if found <= self.rates[1]:
            return "that is where the test began: lower rates may be better; try a lower lr_finder.lowest"
        if len(means) == len(self.rates) and int(np.nanargmin(means)) == len(means) - 1:
            return "the loss still fell at the highest rate: higher ones may be better; try a higher lr_finder.highest"
        return None


class EndOfTest(EndTrigger):
    """Ends the run with the steps of a range test, or where that is over."""

    def __init__(self, test: RangeTest):
        super().__init__(math.inf, len(test.rates))
        self._test = test

    def __call__(self, trainer: Trainer) -> bool:
        return super().__call__(trainer) or self._test.is_over()


def smoothed(losses: list[float]) -> np.ndarray:
    """Exponential means of the losses up to each step, without a bias towards zero."""
    means, mean = np.empty(len(losses)), 0.0
    for k, loss in enumerate(losses):
        mean = _KEPT * mean + (1 - _KEPT) * loss
        means[k] = mean / (1 - _KEPT ** (k + 1))
    return means


def suggestion(rates: np.ndarray, means: np.ndarray) -> float | None:
    """The rate at which the loss falls fastest over the logarithm of the rate; None where it does not fall."""
    if len(means) < FEWEST_STEPS:
        return None
    end = int(np.nanargmin(means)) + 1
    if end < 3:
        return None
    slopes = np.gradient(means[:end], np.log(rates[:end]))
    steepest = int(np.nanargmin(slopes))
    return float(rates[steepest]) if math.isfinite(slopes[steepest]) else None  # it falls to the least mean


def _draw(path: str, rates: np.ndarray, losses: list[float], means: np.ndarray, found: float | None) -> None:
    figure, ((axes,),) = plotting.new_figure(1, 1, (7, 4))
    axes.plot(rates, losses, color="#9a9a9a", label="loss of a step")
    axes.plot(rates, means, color="#1f77c4", label="smoothed")
    if found is not None:
        axes.axvline(found, color="#e0651a", linestyle="--", label=f"suggestion: {found:.2g}")
    axes.set(title="Learning-rate finder", xlabel="learning rate", xscale="log", ylabel="loss")
    plotting.draw_grid(axes, True)
    axes.legend()
    plotting.save_figure(figure, path)
