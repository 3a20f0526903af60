"""The charts of a report: which there are, their lines, and the points of a line that are drawn."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dbrdist.cli.inspection.chart import Key, Series, colour
from dbrdist.cli.inspection.records import RunRecord, as_log

_MAX_POINTS = 1000  # of a line: more than the pixels of a chart

# title, file name, keys of the log with what each is called in a chart of one run
CHARTS = (
    ("Loss", "loss", (("main/loss", "training"), ("validation/main/loss", "test"))),
    ("Accuracy", "accuracy", (("main/accuracy", "training"), ("validation/main/accuracy", "test"))),
    ("Learning rate", "learning_rate", (("lr", ""),)),
    ("Examples per second", "throughput", (("examples_per_second", ""),)),
    ("Share of the time spent waiting for data", "data_wait", (("data_wait_fraction", ""),)),
    ("Share of the time spent communicating", "communication", (("communication_fraction", ""),)),
)


def curves(
    runs: Sequence[RunRecord], only: str | None = None, low: float = -np.inf, high: float = np.inf
) -> Iterator[tuple[str, str, list[Series]]]:
    """(title, file name, lines) of each chart that has any, or of the chart of file name `only` between two epochs."""
    for title, name, keys in (*CHARTS, *own_charts(runs)):
        if only not in (None, name):
            continue
        series = []
        for i, run in enumerate(runs):
            for k, (key, role) in enumerate(keys):
                words = role if len(runs) == 1 else " ".join(filter(None, (run.name, role)))
                dashed = len(runs) > 1 and k == 0 < len(keys) - 1
                line = points(run.log, key, low, high)
                series.append(Series(words, line, colour(k if len(runs) == 1 else i), dashed))
        series = [s for s in series if s.points]
        if series:
            yield title, name, series


_OF_A_LINE = {"epoch", "iteration", "elapsed_time", "epoch_detail", "memory_bytes", "device_memory_bytes"}
MOST_IN_LEGEND = 3  # names of runs
_MAX_CHARTS = 24  # of values that this file does not know


def own_charts(runs: Sequence[RunRecord]) -> list[tuple[str, str, tuple[tuple[str, str], ...]]]:
    """Charts of what else was observed: the user's metrics, for training and test together."""
    known = {key for _, _, keys in CHARTS for key, _ in keys} | _OF_A_LINE
    own: dict[str, list[str]] = {}
    for run in runs:
        log = as_log(run.log)
        for key in log.names():
            title = key.removeprefix("validation/").removeprefix("main/")
            has_room = title in own or len(own) < _MAX_CHARTS
            if key not in known and has_room and len(log.column(key)[0]):
                own.setdefault(title, []).append(key)
    charts, taken = [], {name for _, name, _ in CHARTS}
    for title in own:
        name = re.sub(r"[^\w.-]+", "_", title)
        while name in taken:
            name += "_"
        taken.add(name)
        charts.append((title, name, tuple((key, _role(key)) for key in sorted(set(own[title])))))
    return charts


def _role(key: str) -> str:
    return "test" if key.startswith("validation/") else "training" if key.startswith("main/") else ""


def points(
    log: Sequence[dict[str, Any]], key: str, low: float = -np.inf, high: float = np.inf
) -> list[tuple[float, float]]:
    """(epoch, value) of each line; of many the least and the greatest of each stretch, so that no extreme is lost.

    With `low` and `high` only those between these epochs, and one on each side.
    """
    x, y = as_log(log).column(key)
    if low > -np.inf or high < np.inf:
        inside = (x >= low) & (x <= high)
        kept = inside.copy()
        kept[1:] |= inside[:-1]
        kept[:-1] |= inside[1:]
        x, y = x[kept], y[kept]
    if len(x) > _MAX_POINTS:
        ends = _extremes(y)
        x, y = x[ends], y[ends]
    return list(zip(x.tolist(), y.tolist()))


def _extremes(y: np.ndarray) -> np.ndarray:
    """The places of the least and the greatest of each stretch, of the first and of the last."""
    length = -(-2 * len(y) // _MAX_POINTS)
    rows = np.append(y, np.full(-len(y) % length, y[-1])).reshape(-1, length)
    begins = np.arange(len(rows)) * length
    ends = begins + rows.argmin(1), begins + rows.argmax(1)  # of equal values the first: never what fills the last row
    return np.unique(np.concatenate([[0, len(y) - 1], *ends]))


def legend(runs: Sequence[RunRecord], series: Sequence[Series]) -> list[Key] | None:
    """Of several runs: each run's colour once, and what dashes say; None for the one that lines make.

    Many names would leave no room for the lines: the page shows their colours in its list of runs.
    """
    if len(runs) == 1:
        return None
    drawn = {s.colour for s in series}
    named = runs if len(runs) <= MOST_IN_LEGEND else ()
    keys = [Key(run.name, colour(number)) for number, run in enumerate(named) if colour(number) in drawn]
    if any(s.dashed for s in series):
        keys += [Key("training", None, dashed=True), Key("test", None)]
    return keys
