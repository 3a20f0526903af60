"""The table of a run in a Jupyter notebook."""

from __future__ import annotations

import html
import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any

from dbrdist.training.extensions.log_report import Column, LogReport, PrintReport


class PrintReportNotebook(PrintReport):
    """As PrintReport, but one table of a notebook that grows with each new line of the LogReport.

    Outside of a notebook it prints the table as text, without IPython with a warning.

    Args:
        entries: keys of the log, or Columns: one for each column.
        log_report: the LogReport, or its name in the trainer; default 'LogReport'.

    Example:
        >>> table = extensions.PrintReportNotebook(["epoch", "main/loss"])  # doctest: +SKIP
    """

    def __init__(self, entries: Sequence[str | Column], log_report: str | LogReport = "LogReport"):
        super().__init__(entries, log_report)
        self._display: Any = None

    def initialize(self, trainer: Any) -> None:
        if not _is_notebook():
            super().initialize(trainer)
            return
        from IPython.display import display

        report = self._report(trainer)
        report.read_back(trainer)
        self._display = display(self._table(report.log), display_id=True)

    def __call__(self, trainer: Any) -> None:
        if self._display is None:
            super().__call__(trainer)
            return
        report = self._report(trainer)
        if isinstance(self._log_report, LogReport):
            report(trainer)
        if len(report.log) != self._num_printed:
            self._display.update(self._table(report.log))

    def _table(self, log: Sequence[dict[str, Any]]) -> Any:
        from IPython.display import HTML

        self._num_printed = len(log)
        rows = [[column.heading for column in self._columns]]
        rows += [[column.cell(entry.get(column.key)).strip() for column in self._columns] for entry in log]
        tags = ["th", *["td"] * len(log)]
        lines = ["".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) for tag, row in zip(tags, rows)]
        return HTML("<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>")


def _is_notebook() -> bool:
    if importlib.util.find_spec("IPython") is None:
        warnings.warn("IPython is not installed: PrintReportNotebook prints plain lines", stacklevel=3)
        return False
    from IPython import get_ipython

    return get_ipython() is not None
