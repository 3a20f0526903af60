"""Means over an interval, as JSON lines and as a printed table."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dbrdist.core.files import standard_streams, strict_json
from dbrdist.core.files.regular_file import regular
from dbrdist.core.files.serializer import AbstractSerializer, is_about, write_atomically
from dbrdist.core.model.reporter import DictSummary, warn_of_no_numbers
from dbrdist.core.usage.foreign_names import refuse_unknown
from dbrdist.core.usage.mistakes import warn
from dbrdist.training.extension import Extension
from dbrdist.training.observed_keys import warn_of_keys
from dbrdist.training.triggers import get_trigger

if TYPE_CHECKING:
    from typing import TextIO

    from dbrdist.training.trainer import Trainer


class LogReport(Extension):
    """Collects the observed values of each step and writes their means as one line of JSON.

    A line has the observed keys, `epoch`, `iteration` and `elapsed_time` in seconds. NaN and infinity are null in the
    file. A snapshot holds the number of lines, not the lines: after a resume the file keeps that many, and what comes
    after them is written again.

    Args:
        keys: the keys to write; None writes all.
        trigger: when a line is written, a trigger or a pair `(period, unit)`.
        postprocess: `postprocess(line)` may change the line, a dictionary, before it is written.
        filename: the file, relative to the trainer's `out`; None is `log.jsonl`.
        kwargs: `log_name`, Chainer's older name of `filename`.

    Raises:
        TypeError: `keys` is a text, or an argument is unknown.

    Example:
        >>> report = extensions.LogReport(["main/loss"], trigger=(100, "iteration"))
        >>> report.log
        []
    """

    def __init__(
        self,
        keys: Sequence[str] | None = None,
        trigger: Any = (1, "epoch"),
        postprocess: Callable[[dict[str, Any]], None] | None = None,
        filename: str | None = None,
        **kwargs: Any,
    ):
        refuse_unknown("LogReport", LogReport.__init__, kwargs)
        if isinstance(keys, str):
            raise TypeError(f"LogReport: keys: expected a list of keys, got the text {keys!r}; write [{keys!r}]")
        self._keys = keys
        self._trigger = get_trigger(trigger)
        self._postprocess = postprocess
        self._filename = "log.jsonl" if filename is None else filename
        self._summary = DictSummary()
        self._log: list[dict[str, Any]] = []
        self._has_seen_nan = False
        self._has_looked = False  # for keys that nobody reports
        self._num_bytes: int | None = None  # of the file after the last line; None where it is not watched
        self._num_saved: int | None = None  # the lines that a loaded snapshot counted and nobody has read yet

    @property
    def log(self) -> list[dict[str, Any]]:
        """The lines so far, as dictionaries."""
        return self._log

    def initialize(self, trainer: Trainer) -> None:
        self.read_back(trainer)
        text = "".join(_line(entry) for entry in self._log)
        write_atomically(self._path(trainer), lambda file: file.write(text.encode()))
        self._num_bytes = len(text.encode())

    def read_back(self, trainer: Trainer) -> None:
        """After a resume of ``trainer``, take the lines that were there when the snapshot was saved."""
        if self._num_saved is None:
            return
        path, expected, self._num_saved = self._path(trainer), self._num_saved, None
        self._log = read_log(path)[:expected]
        if len(self._log) < expected:
            warnings.warn(
                f"{path} has {len(self._log)} of the {expected} lines that were there when the snapshot was saved; "
                "the others are lost",
                stacklevel=2,
            )

    def __call__(self, trainer: Trainer) -> None:
        observation = trainer.observation
        if self._keys is not None:
            observation = {key: observation[key] for key in self._keys if key in observation}
        self._summary.add(observation)
        if trainer.updater.iteration and not self._trigger(trainer):  # before the first step there is a line at once
            return
        entry: dict[str, Any] = dict(self._summary.compute_mean())
        self._summary = DictSummary()
        entry["epoch"] = trainer.updater.epoch
        entry["iteration"] = trainer.updater.iteration
        entry["elapsed_time"] = trainer.elapsed_time
        if self._postprocess is not None:
            self._postprocess(entry)
        self._log.append(entry)
        self._look_for_nan(entry, trainer.updater.iteration)
        warn_of_no_numbers(observation)
        if self._keys is not None and not self._has_looked and trainer.updater.epoch >= 1:
            reported = set(trainer.observation).union(*self._log)
            self._has_looked = warn_of_keys(type(self).__name__, self._keys, reported, trainer)
        self._write(trainer, entry)

    def _look_for_nan(self, entry: dict[str, float], iteration: int) -> None:
        """Warn once where the loss is no number any more: nothing that follows trains the network."""
        loss = entry.get("main/loss")
        if loss is not None and loss != loss and not self._has_seen_nan:
            self._has_seen_nan = True
            warn(
                f"LogReport: main/loss is NaN by iteration {iteration}: look for NaN in the data, lower the "
                "learning rate, or clip gradients; extensions.FailOnNonNumber() ends the training there"
            )

    def _write(self, trainer: Trainer, entry: dict[str, float]) -> None:
        """Write the last entry of the log."""
        with open(self._path(trainer), "a", encoding="utf-8") as file:
            self._look_for_others(file)
            file.write(_line(entry))
            if self._num_bytes is not None:
                file.flush()
                self._num_bytes = file.tell()

    def _look_for_others(self, file: Any) -> None:
        """Warn once where the file has grown since this LogReport wrote to it: another rank writes the same one."""
        found = file.seek(0, os.SEEK_END)
        if self._num_bytes is not None and found > self._num_bytes:
            warn(
                f"LogReport: another process or LogReport writes to {file.name} too, so lines come twice; extend the "
                "trainer with it on one rank only: if comm.rank == 0"
            )
            self._num_bytes = None

    def serialize(self, serializer: AbstractSerializer) -> None:
        if hasattr(self._trigger, "serialize"):
            self._trigger.serialize(serializer["_trigger"])
        self._summary.serialize(serializer["_summary"])
        if not is_about(serializer["_lines"], self._filename):
            return  # lines of another file
        num_lines = int(serializer("_num_lines", len(self._log) if self._num_saved is None else self._num_saved))
        if serializer.is_loading:
            self._num_saved = num_lines

    def _path(self, trainer: Trainer) -> str:
        return os.path.join(trainer.out, self._filename)


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a log, as dictionaries, up to the first that is no whole line of JSON; none without a file."""
    entries: list[dict[str, Any]] = []
    try:
        with open(path, encoding="utf-8", errors="replace", opener=regular) as file:
            for line in file:
                entries.append(json.loads(line))
                if not isinstance(entries[-1], dict):
                    return entries[:-1]
    except (FileNotFoundError, ValueError):  # the last line of a process that was killed may be half a line
        pass
    return entries


def _line(entry: dict[str, float]) -> str:
    """One line of strict JSON, which knows no NaN."""
    return strict_json.dumps(entry) + "\n"


class Column(NamedTuple):
    """A column of a printed table: a key of the log, its heading, its width, and how a value is written."""

    key: str
    heading: str
    width: int
    write: Callable[[Any], str] = lambda value: f"{value:.6g}" if isinstance(value, float) else str(value)
    align: str = "<"  # or ">"

    def cell(self, value: float | None) -> str:
        """A value as text of at least the column's width; a missing one is blank."""
        return f"{'' if value is None else self.write(value):{self.align}{self.width}}"


class PrintReport(Extension):
    """Prints `entries` of each new line of a LogReport as a row of a table.

    An entry is a key of the log, or a :class:`Column` with its own heading, width and way to write a value.
    `log_report` is the LogReport or its name in the trainer; `out` a text stream, None for the standard output of the
    moment.

    Args:
        entries: keys of the log, or Columns: one for each column.
        log_report: the LogReport, or its name in the trainer; default 'LogReport'.
        out: stream to print to; None for the standard output.

    Example:
        >>> table = extensions.PrintReport(["epoch", "main/loss", "validation/main/accuracy"])
    """

    def __init__(
        self, entries: Sequence[str | Column], log_report: str | LogReport = "LogReport", out: TextIO | None = None
    ):
        if isinstance(entries, str):
            words = f"expected a list of keys, got the text {entries!r}; write [{entries!r}]"
            raise TypeError(f"{type(self).__name__}: entries: {words}")
        self._columns = [e if isinstance(e, Column) else Column(e, e, max(10, len(e))) for e in entries]
        self._log_report = log_report
        self._out = out
        self._num_printed = 0
        self._found: Any = None
        self._has_looked = False  # for entries that nobody reports

    def initialize(self, trainer: Any) -> None:
        report = self._found = self._report(trainer)
        report.read_back(trainer)
        self._num_printed = len(report.log)
        self._print("  ".join(f"{column.heading:{column.align}{column.width}}" for column in self._columns))

    def __call__(self, trainer: Trainer) -> None:
        report = self._found
        if report is None:
            report = self._found = self._report(trainer)
        if report is self._log_report:
            report(trainer)  # not among the trainer's extensions: it lives here
        log = report.log
        if len(log) != self._num_printed:
            self._look_for_keys(log, trainer)
            for entry in log[self._num_printed :]:
                self._print("  ".join(column.cell(entry.get(column.key)) for column in self._columns))
            self._num_printed = len(log)

    def serialize(self, serializer: AbstractSerializer) -> None:
        if isinstance(self._log_report, LogReport):
            self._log_report.serialize(serializer["_log_report"])

    def _look_for_keys(self, log: list[dict[str, Any]], trainer: Trainer) -> None:
        """Warn once, after an epoch, of entries that no line of the log has had."""
        if self._has_looked or log[-1].get("epoch", 1) < 1:
            return
        keys = [column.key for column in self._columns]
        self._has_looked = warn_of_keys(type(self).__name__, keys, set().union(*log), trainer)

    def _report(self, trainer: Trainer) -> Extension:
        report = self._log_report
        if isinstance(report, LogReport):
            return report
        try:
            return trainer.get_extension(report)
        except ValueError:
            raise ValueError(
                f"{type(self).__name__} needs a LogReport, and the trainer has no extension {report!r}; add "
                "trainer.extend(extensions.LogReport())"
            ) from None

    def _print(self, line: str) -> None:
        out = standard_streams.stdout if self._out is None else self._out
        out.write(line.rstrip() + "\n")
        if hasattr(out, "flush"):  # a program's own stream may have none
            out.flush()
