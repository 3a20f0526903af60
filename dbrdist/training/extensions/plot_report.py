"""Curves of observed values, as an image that grows with the run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dbrdist.core.files.serializer import AbstractSerializer, is_about
from dbrdist.core.model.reporter import DictSummary
from dbrdist.training import plotting
from dbrdist.training.extension import Extension
from dbrdist.training.observed_keys import warn_of_keys
from dbrdist.training.triggers import get_trigger

if TYPE_CHECKING:
    from dbrdist.training.trainer import Trainer


class PlotReport(Extension):
    """Draws the means of observed values over each interval against the iteration or the epoch.

    Called at every step, it collects the values of `y_keys`; when `trigger` fires it adds a point to each curve and
    writes the figure again. Without matplotlib (`pip install 'dbrdist[plot]'`) it warns and does nothing. A snapshot
    holds the points.

    Args:
        y_keys: the values to draw, such as `["main/loss", "validation/main/loss"]`.
        x_key: "iteration", "epoch", or an observed value.
        trigger: when a point is added and the figure is written.
        postprocess: called with the figure, its axes and the means (DictSummary) before the figure is written.
        filename: the file in the trainer's `out`, None for plot.png; its ending is the format (png, svg, pdf).
        marker: matplotlib's name of the points' marker; None for none.
        grid: draw a grid.
        kwargs: ``file_name``, Chainer's older name of ``filename``.

    Example:
        >>> plot = extensions.PlotReport(["main/loss", "validation/main/loss"], "epoch")  # doctest: +SKIP
    """

    def __init__(
        self,
        y_keys: Sequence[str],
        x_key: str = "iteration",
        trigger: Any = (1, "epoch"),
        postprocess: Callable[[Any, Any, Any], None] | None = None,
        filename: str | None = None,
        marker: str | None = "x",
        grid: bool = True,
        **kwargs: Any,
    ):
        self._filename = plotting.chosen_filename("PlotReport", filename, "plot.png", "file_name", kwargs)
        self._y_keys = [y_keys] if isinstance(y_keys, str) else list(y_keys)
        self._x_key = x_key
        self._trigger = get_trigger(trigger)
        self._postprocess = postprocess
        self._marker = marker
        self._grid = grid
        self._summary = DictSummary()
        self._has_looked = False  # for keys that nobody reports
        self._points: dict[str, list[tuple[float, float]]] = {key: [] for key in self._y_keys}
        self.available()

    @staticmethod
    def available() -> bool:
        """True if matplotlib is installed; warns where it is not."""
        return plotting.available()

    def __call__(self, trainer: Trainer) -> None:
        if not plotting.is_installed():
            return
        observation = trainer.observation
        self._summary.add({key: observation[key] for key in (*self._y_keys, self._x_key) if key in observation})
        if trainer.is_before_training or self._trigger(trainer):
            summary, self._summary = self._summary, DictSummary()
            self._add_points(trainer, summary.compute_mean())
            if not self._has_looked and trainer.updater.epoch >= 1:
                found = {key for key, points in self._points.items() if points}
                self._has_looked = warn_of_keys(type(self).__name__, self._y_keys, found.union(observation), trainer)
            self._draw(os.path.join(trainer.out, self._filename), summary)

    def _add_points(self, trainer: Trainer, means: dict[str, float]) -> None:
        positions = {**means, "epoch": trainer.updater.epoch, "iteration": trainer.updater.iteration}
        new = [key for key in self._y_keys if key in means]
        if new and self._x_key not in positions:
            raise ValueError(
                f"PlotReport: x_key: expected 'iteration', 'epoch' or a value that was observed, got {self._x_key!r}; "
                f"observed were {', '.join(means)}"
            )
        for key in new:
            self._points[key].append((positions[self._x_key], means[key]))

    def _draw(self, path: str, summary: DictSummary) -> None:
        curves = {key: points for key, points in self._points.items() if points}
        if not curves:
            return
        figure, ((axes,),) = plotting.new_figure(1, 1)
        axes.set_xlabel(self._x_key)
        if self._x_key in ("epoch", "iteration"):
            axes.xaxis.get_major_locator().set_params(integer=True)
        plotting.draw_grid(axes, self._grid)
        for key, points in curves.items():
            plotting.draw_line(axes, points, marker=self._marker, label=key)
        if self._postprocess is not None:
            self._postprocess(figure, axes, summary)
        legend = axes.legend(**plotting.BESIDE)
        plotting.save_figure(figure, path, [legend])

    def serialize(self, serializer: AbstractSerializer) -> None:
        if hasattr(self._trigger, "serialize"):
            self._trigger.serialize(serializer["_trigger"])
        self._summary.serialize(serializer["_summary"])
        if not is_about(serializer["_curves"], self._x_key):
            return  # points over another quantity
        points = json.loads(str(serializer("_points", json.dumps(self._points))))
        self._points = {key: [tuple(point) for point in points.get(key, ())] for key in self._y_keys}
