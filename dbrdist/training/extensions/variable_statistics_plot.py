"""How the values of variables and their gradients are distributed, over the run, as an image."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import DTypeLike

from dbrdist.core.array import random
from dbrdist.core.array.backend import device_of, get_array_module, on, to_cpu, to_device
from dbrdist.core.array.types import Array, Number
from dbrdist.core.files.serializer import AbstractSerializer, is_about
from dbrdist.core.model.link import Link
from dbrdist.core.names.limits import count
from dbrdist.core.tape.variable import Variable
from dbrdist.training import plotting
from dbrdist.training.extension import Extension
from dbrdist.training.triggers import get_trigger

if TYPE_CHECKING:
    from dbrdist.core.array.types import HostArray
    from dbrdist.core.model.parameter import Parameter
    from dbrdist.training.trainer import Trainer

_SIGMAS = (0, 0.13, 2.28, 15.87, 50, 84.13, 97.72, 99.87, 100)  # -inf, -3 ... 3, inf standard deviations


class Reservoir:
    """A uniform sample of at most `size` of the arrays that were added, in their order (Vitter 1985, algorithm R)."""

    def __init__(self, size: int, data_shape: Sequence[int], dtype: DTypeLike = np.float32):
        if size < 1:
            raise ValueError(f"Reservoir: size: expected at least 1, got {size}")
        self._data = np.zeros((size, *data_shape), dtype)
        self._indexes = np.zeros(size, np.int64)
        self._num_added = 0

    def add(self, x: Array | Number, idx: int | None = None) -> None:
        """Add an array; `idx` is its position, by default the number of those before it."""
        n, size = self._num_added, len(self._data)
        place = n if n < size else int(random.generator(random.get_seed(), "reservoir", sample=n).integers(n + 1))
        self._num_added += 1
        if place < size:
            self._data[place] = x
            self._indexes[place] = n if idx is None else idx

    def get_data(self) -> tuple[HostArray, HostArray]:
        """The positions, shape (n,), and the sample, shape (n, *data_shape), by position."""
        n = min(self._num_added, len(self._data))
        order = np.argsort(self._indexes[:n], kind="stable")
        return self._indexes[order], self._data[order]

    def serialize(self, serializer: AbstractSerializer) -> None:
        self._num_added = int(serializer("_num_added", self._num_added))
        self._indexes = serializer("_indexes", self._indexes)
        self._data = serializer("_data", self._data)


class Statistician:
    """Mean, standard deviation and percentiles of an array, as a dictionary with `mean`, `std` and `percentile`."""

    def __init__(
        self, collect_mean: bool = True, collect_std: bool = True, percentile_sigmas: tuple[float, ...] = _SIGMAS
    ):  # fmt: skip
        self.collect_mean = collect_mean
        self.collect_std = collect_std
        self.percentile_sigmas = tuple(np.atleast_1d(percentile_sigmas).tolist())

    def __call__(self, x: Any, axis: Any = 0, dtype: Any = None, xp: Any = None) -> dict[str, Any]:
        """The statistics along `axis`; that of the percentiles comes first in their array."""
        xp = get_array_module(x) if xp is None else xp
        found = {}
        if self.collect_mean:
            found["mean"] = xp.mean(x, axis, dtype)
        if self.collect_std:
            found["std"] = xp.std(x, axis, dtype)
        if self.percentile_sigmas:
            found["percentile"] = xp.percentile(x, self.percentile_sigmas, axis)
        return found


class VariableStatisticsPlot(Extension):
    """Draws mean, standard deviation and percentiles of variables and of their gradients against the iteration.

    Called at every step, it takes the statistics of all elements of all targets together; when `trigger` fires it
    writes the figure. Without matplotlib (`pip install 'dbrdist[plot]'`) it warns and does nothing. A snapshot holds
    the statistics.

    Args:
        targets: a link (all its parameters), a Variable, or several.
        max_sample_size: at most so many steps are kept, drawn uniformly.
        report_data, report_grad: draw the values, draw the gradients.
        plot_mean, plot_std: draw the mean, draw the standard deviation around it.
        percentile_sigmas: the percentiles to draw; None or () for none. Bands lie between the first and the last, the
            second and the last but one, and so on.
        trigger: when the figure is written.
        filename: the file in the trainer's `out`, None for statistics.png; its ending is the format.
        figsize: width and height in inches.
        marker: matplotlib's name of the points' marker; None for none.
        grid: draw a grid.
        kwargs: ``file_name``, Chainer's older name of ``filename``.

    Example:
        >>> plot = extensions.VariableStatisticsPlot(L.Linear(2, 1))  # doctest: +SKIP
    """

    def __init__(
        self,
        targets: Link | Parameter | Sequence[str],
        max_sample_size: Annotated[int, count, "At most so many steps are kept, drawn uniformly."] = 1000,
        report_data: bool = True,
        report_grad: bool = True,
        plot_mean: bool = True,
        plot_std: bool = True,
        percentile_sigmas: tuple[float, ...] | None = _SIGMAS,
        trigger: Any = (1, "epoch"),
        filename: str | None = None,
        figsize: tuple[float, float] | None = None,
        marker: str | None = None,
        grid: bool = True,
        **kwargs: Any,
    ):
        where = "VariableStatisticsPlot"
        self._filename = plotting.chosen_filename(where, filename, "statistics.png", "file_name", kwargs)
        self._variables = list(_variables_of(targets))
        self._keys = ["data"] * report_data + ["grad"] * report_grad
        percentiles = () if percentile_sigmas is None else percentile_sigmas
        self._statistician = Statistician(plot_mean, plot_std, percentiles)
        self._sigmas = self._statistician.percentile_sigmas
        if not self._variables:
            raise ValueError(f"{where}: targets: expected at least one variable, got none")
        if not self._keys or not (plot_mean or plot_std or self._sigmas):
            raise ValueError(f"{where}: expected something to draw, but all of it is switched off")
        self._trigger = get_trigger(trigger)
        self._figsize = figsize
        self._marker = marker
        self._grid = grid
        self._names = ["mean"] * plot_mean + ["std"] * plot_std + [f"{sigma:g} %" for sigma in self._sigmas]
        self._samples = Reservoir(max_sample_size, (len(self._keys), len(self._names)))
        self.available()

    @staticmethod
    def available() -> bool:
        """True if matplotlib is installed; warns where it is not."""
        return plotting.available()

    def __call__(self, trainer: Trainer) -> None:
        if not plotting.is_installed():
            return
        self._samples.add(np.stack([self._statistics(key) for key in self._keys]), trainer.updater.iteration)
        if self._trigger(trainer):
            self._draw(os.path.join(trainer.out, self._filename))

    def _statistics(self, key: str) -> HostArray:
        """The numbers of one step: mean, standard deviation, percentiles, as far as they are asked for."""
        arrays = [getattr(variable, key) for variable in self._variables]
        parts = [a for a in arrays if a is not None and a.size]
        if not parts:
            return np.full(self._samples.get_data()[1].shape[2:], np.nan, np.float32)
        parts = [to_device(a, device_of(parts[0])).reshape(-1) for a in parts]  # of a model divided over devices, too
        with on(parts[0]):
            xp = get_array_module(*parts)
            found = self._statistician(xp.concatenate(parts).astype(np.float32), axis=0)
        return np.concatenate([np.atleast_1d(to_cpu(value)) for value in found.values()])

    def _draw(self, path: str) -> None:
        steps, data = self._samples.get_data()
        has_mean, has_std = self._statistician.collect_mean, self._statistician.collect_std
        num_rows, num_columns = int(has_mean or has_std) + bool(self._sigmas), len(self._keys)
        size = self._figsize or (6.4 * num_columns, 3.6 * num_rows)
        figure, axes = plotting.new_figure(num_rows, num_columns, size)
        for column, key in enumerate(self._keys):
            values = data[:, column]
            mean = values[:, 0] if has_mean else None
            std = values[:, int(has_mean)] if has_std else None
            if has_mean or has_std:
                self._draw_mean(axes[0, column], steps, mean, std)
            if self._sigmas:
                self._draw_percentiles(axes[-1, column], steps, values[:, -len(self._sigmas) :])
            axes[0, column].set_title({"data": "values", "grad": "gradients"}[key])
            axes[-1, column].set_xlabel("iteration")
        for ax in axes.ravel():
            plotting.draw_grid(ax, self._grid)
        legends = [ax.legend(**plotting.BESIDE, fontsize="small") for ax in axes[:, -1]]
        plotting.save_figure(figure, path, legends)

    def _draw_mean(self, ax: Any, steps: Any, mean: Any, std: Any) -> None:
        if mean is None:
            ax.plot(steps, std, marker=self._marker, label="standard deviation")
            return
        ax.plot(steps, mean, marker=self._marker, label="mean")
        if std is not None:
            ax.fill_between(steps, mean - std, mean + std, alpha=0.3, linewidth=0, label="mean ± standard deviation")

    def _draw_percentiles(self, ax: Any, steps: Any, values: Array) -> None:
        n = len(self._sigmas)
        for low in range(n // 2):  # the outer bands first, the inner ones darker
            label = f"{self._sigmas[low]:g} to {self._sigmas[n - 1 - low]:g} %"
            alpha = 0.15 + 0.35 * low / max(n // 2 - 1, 1)
            ax.fill_between(
                steps, values[:, low], values[:, n - 1 - low], alpha=alpha, color="C0", linewidth=0, label=label
            )
        if n % 2:
            label = f"{self._sigmas[n // 2]:g} %"
            ax.plot(steps, values[:, n // 2], color="black", marker=self._marker, label=label)

    def serialize(self, serializer: AbstractSerializer) -> None:
        if hasattr(self._trigger, "serialize"):
            self._trigger.serialize(serializer["_trigger"])
        size = len(self._samples._data)
        if is_about(serializer["_samples"], json.dumps([self._keys, self._names, size])):
            self._samples.serialize(serializer["_samples"])


def _variables_of(targets: Any) -> Iterator[Any]:
    if isinstance(targets, Link):
        yield from targets.params()
    elif isinstance(targets, Variable):
        yield targets
    elif isinstance(targets, list | tuple):
        for target in targets:
            yield from _variables_of(target)
    else:
        raise TypeError(
            f"VariableStatisticsPlot: targets: expected a link, a Variable or several, got {type(targets).__name__}"
        )
