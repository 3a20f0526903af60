"""Tables of what functions used."""

from __future__ import annotations

from typing import Any, TextIO

from dbrdist.core.files.standard_streams import stdout


class Report:
    """A table of functions: what each used in all its calls, most first."""

    call_history: list[tuple[str, Any]]

    def summary(self) -> dict[str, dict[str, float]]:
        """For each function, in the order of first calls: what it used, and ``occurrence``, how often it was called."""
        found: dict[str, dict[str, Any]] = {}
        for name, used in self.call_history:
            row = found.setdefault(name, self._row())
            self._add(row, used)
            row["occurrence"] += 1
        return found

    def _row(self) -> dict[str, float]:
        raise NotImplementedError

    def _add(self, row: dict[str, float], used: dict[str, float]) -> None:
        raise NotImplementedError


def in_units(value: float, units: str, step: float) -> str:
    """A number with the largest unit that leaves it at 1 or more."""
    size = 0
    names = units.split()
    while size < len(names) - 1 and abs(value) >= step:
        value, size = value / step, size + 1
    return f"{value:.2f}{names[size]}"


def print_table(rows: list[tuple[str, ...]], file: TextIO | None) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths)), file=file or stdout)
