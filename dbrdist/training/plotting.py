"""Figures as image files. matplotlib, the extra `plot`, is loaded when the first figure is made."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

from dbrdist.core.files.serializer import write_atomically

# Where a legend covers no curve: at the right of the axes.
BESIDE = {"bbox_to_anchor": (1.03, 1), "loc": "upper left", "borderaxespad": 0.0}
_LARGEST = 1e306  # of numbers in a picture


def is_installed() -> bool:
    """True if matplotlib can be loaded."""
    return importlib.util.find_spec("matplotlib") is not None


def available() -> bool:
    """As :func:`is_installed`, with a warning where it is not."""
    found = is_installed()
    if not found:
        warnings.warn("matplotlib is not installed, so nothing is plotted; pip install 'dbrdist[plot]'", stacklevel=3)
    return found


def new_figure(num_rows: int, num_columns: int, size: Any = None) -> tuple[Any, Any]:
    """A figure and its axes, an array of (num_rows, num_columns). No window and no state of matplotlib is touched."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    return figure, figure.subplots(num_rows, num_columns, squeeze=False, sharex=True)


def draw_line(axes: Any, points: Iterable[tuple[float, float]], **style: Any) -> None:
    """Draw points in order. Numbers near the largest that there is are drawn below it: matplotlib adds them."""
    x, y = (np.array(values, float) for values in zip(*points))
    for values in (x, y):
        values[np.isfinite(values)] = np.clip(values[np.isfinite(values)], -_LARGEST, _LARGEST)
    axes.plot(x, y, **style)


def draw_grid(axes: Any, is_drawn: bool) -> None:
    """Draw a pale grid, or none."""
    if is_drawn:
        axes.grid(True, alpha=0.4)
    else:
        axes.grid(False)


def save_figure(figure: Any, path: str, extra: Iterable[Any] = ()) -> None:
    """Write a figure so that no reader sees half of it; the name's ending is the format, PNG without one."""
    from matplotlib.text import Text

    format = os.path.splitext(path)[1][1:].lower() or "png"
    for text in figure.findobj(Text):  # a log may have halves of letters, which no font has
        text.set_text(text.get_text().encode("utf-8", "backslashreplace").decode())

    def write(file: Any) -> None:
        figure.savefig(file, format=format, dpi=120, bbox_extra_artists=list(extra), bbox_inches="tight")

    write_atomically(path, write)


def chosen_filename(where: str, filename: str | None, default: str, former: str, others: dict[str, str]) -> str:
    """The file's name where Chainer also takes it as the keyword `former`; any other keyword is refused."""
    given = others.pop(former, None)
    if others:
        raise TypeError(f"{where}() got unknown arguments: {', '.join(others)}")
    return next((name for name in (filename, given) if name is not None), default)
