"""The table that a run prints: its columns, and how their numbers are written."""

from __future__ import annotations

import math
import sys
from typing import Any

from dbrdist.cli.output.words import WIDTH, as_percent, columns_of
from dbrdist.training.extensions.log_report import Column
from dbrdist.training.extensions.progress_bar import duration

# columns that a narrow terminal leaves out, in this order
_DISPENSABLE = (
    *("examples_per_second", "iteration", "main/accuracy", "validation/main/loss", "elapsed_time", "main/loss"),
    *("validation/main/accuracy", "epoch"),
)


def columns(is_evaluated: bool, are_classes: bool) -> list[Column]:
    """A table that fits the terminal, or 80 characters: what is wanted least is left out first.

    Args:
        is_evaluated: whether there are values of an evaluation.
        are_classes: whether there are accuracies.
    """
    found, width = _all(is_evaluated, are_classes), columns_of(sys.stdout) or WIDTH
    for key in _DISPENSABLE:
        if sum(column.width + 2 for column in found) - 2 > width:
            found = [column for column in found if column.key != key]
    return found


def _all(is_evaluated: bool, are_classes: bool) -> list[Column]:
    parts = ("main", "validation/main") if is_evaluated else ("main",)
    names = ("loss", "accuracy") if are_classes else ("loss",)
    headings = {"main/loss": "loss", "main/accuracy": "accuracy"}
    headings |= {"validation/main/loss": "test loss", "validation/main/accuracy": "test acc"}
    write = {"loss": short, "accuracy": percent}
    keys = [(f"{part}/{name}", write[name]) for part in parts for name in names]
    values = [Column(key, headings[key], 9, form, ">") for key, form in keys]
    speed = Column("examples_per_second", "examples/s", 10, lambda value: f"{value:,.0f}", ">")
    return [
        Column("epoch", "epoch", 5, lambda value: whole(value, 5), ">"),
        Column("iteration", "step", 7, lambda value: whole(value, 7), ">"),
        *values,
        speed,
        Column("elapsed_time", "time", 8, duration, ">"),
    ]


def short(value: object) -> str:
    """A number of at most 9 characters, with as many digits behind the point as its neighbours."""
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    fixed = f"{value:.4f}"
    return fixed if (abs(value) >= 1e-3 and len(fixed) <= 9) or value == 0 else f"{value:.2e}"


def whole(value: Any, width: int) -> str:
    """A whole number, in groups of three digits where they fit."""
    grouped = f"{value:,}"
    return grouped if len(grouped) <= width else str(value)


def percent(value: Any) -> str:
    """A share with two digits behind the point."""
    return as_percent(value)
