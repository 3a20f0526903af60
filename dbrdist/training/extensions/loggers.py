"""Loggers: each line of a LogReport for a table, Weights & Biases or MLflow. A logger that fails never ends a run."""

from __future__ import annotations

import csv
import importlib
import io
import math
import os
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dbrdist.core.array.types import Module
from dbrdist.core.files.serializer import write_atomically
from dbrdist.errors import StopRequested
from dbrdist.training.extension import Extension
from dbrdist.training.extensions.log_report import LogReport
from dbrdist.training.extensions.tensorboard import PRIORITY_AFTER_THE_LOG

if TYPE_CHECKING:
    from dbrdist.training.trainer import Trainer


class MetricsLogger(Extension):
    """Base of loggers: passes each new line of a LogReport to :meth:`log`; an error there becomes one warning.

    Args:
        log_report: the name of the LogReport in the trainer; default 'LogReport'.

    Example:
        >>> class Printer(extensions.MetricsLogger):
        ...     def log(self, line, step):
        ...         print(step, line)
    """

    trigger = (1, "iteration")
    priority = PRIORITY_AFTER_THE_LOG

    def __init__(self, log_report: str = "LogReport"):
        self._log_report = log_report
        self._num_written = 0
        self._has_failed = False
        self.error: BaseException | None = None  # what ended the run, for `end`

    def initialize(self, trainer: Trainer) -> None:
        report = self._report(trainer)
        report.read_back(trainer)
        self._num_written = len(report.log)
        self._guarded(self.begin, trainer)

    def __call__(self, trainer: Any) -> None:
        log = self._report(trainer).log
        for entry in log[self._num_written :]:
            values = {key: float(value) for key, value in entry.items() if key != "iteration" and _is_number(value)}
            self._guarded(self.log, int(entry.get("iteration", trainer.updater.iteration)), values)
        self._num_written = len(log)

    def on_error(self, trainer: Trainer, exc: BaseException, tb: Any) -> None:
        self.error = exc

    def finalize(self) -> None:
        current = sys.exc_info()[1]
        if self.error is None and isinstance(current, KeyboardInterrupt | SystemExit):
            self.error = current
        self._guarded(self.end)

    def begin(self, trainer: Trainer) -> None:
        """Called with the ``trainer`` before the first step."""

    def log(self, iteration: int, values: Mapping[str, float]) -> None:
        """Called with each line of the log: the ``iteration``, from 1, and its numbers ``values`` by name."""
        raise NotImplementedError

    def end(self) -> None:
        """Called at the end of the run."""

    def _guarded(self, function: Any, *args: Trainer | int | dict[str, float]) -> None:
        """Call a function of the logger; after an error this logger does nothing more."""
        if self._has_failed:
            return
        try:
            function(*args)
        except Exception as error:
            self._has_failed = True
            name = type(self).__name__
            warnings.warn(f"{name} stops logging, the run goes on: {type(error).__name__}: {error}", stacklevel=2)

    def _report(self, trainer: Trainer) -> LogReport:
        report = trainer.get_extension(self._log_report)
        if not isinstance(report, LogReport):
            raise TypeError(f"expected a LogReport named {self._log_report!r}, got {type(report).__name__}")
        return report


def _is_number(value: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


class CSVLogger(MetricsLogger):
    """Writes the log as a table of comma-separated values; a new column makes the file be written anew.

    A resumed run continues the file up to the line of its snapshot.

    Args:
        filename: the file, below the trainer's output; default 'log.csv'.
        log_report: the name of the LogReport in the trainer; default 'LogReport'.

    Example:
        >>> log = extensions.CSVLogger("log.csv")  # trainer.extend(log)
    """

    def __init__(self, filename: str = "log.csv", log_report: str = "LogReport"):
        super().__init__(log_report)
        self._filename = filename
        self._path = ""
        self._rows: list[dict[str, float]] = []
        self._columns = ["iteration"]

    def begin(self, trainer: Trainer) -> None:
        self._path = os.path.join(trainer.out, self._filename)
        for entry in self._report(trainer).log:
            self._add(
                entry.get("iteration", ""), {k: v for k, v in entry.items() if k != "iteration" and _is_number(v)}
            )
        if self._rows:
            self._write()

    def log(self, iteration: int, values: Mapping[str, float]) -> None:
        is_new = self._add(iteration, values)
        if is_new or not os.path.exists(self._path):
            self._write()
            return
        with open(self._path, "a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(self._rows[-1])

    def _add(self, iteration: int, values: Mapping[str, float]) -> bool:
        new = [key for key in values if key not in self._columns]
        self._columns += new
        self._rows.append({"iteration": iteration, **values})
        return bool(new)

    def _write(self) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, restval="")
        writer.writeheader()
        writer.writerows(self._rows)
        write_atomically(self._path, lambda file: file.write(text.getvalue().encode()))


class WandbLogger(MetricsLogger):
    """Sends the log to Weights & Biases through the package ``wandb``; ``WANDB_MODE=offline`` needs no network.

    Args:
        log_report: the name of the LogReport in the trainer; default 'LogReport'.
        options: arguments of ``wandb.init``, such as ``project`` and ``config``.

    Raises:
        ImportError: the package is not installed.

    Example:
        >>> log = extensions.WandbLogger(project="digits", mode="offline")  # doctest: +SKIP
    """

    def __init__(self, log_report: str = "LogReport", **options: Any):
        super().__init__(log_report)
        self._wandb = _package("wandb", "WandbLogger")
        self._options = options
        self._run: Any = None

    def begin(self, trainer: Trainer) -> None:
        self._run = self._wandb.init(**{"dir": trainer.out, **self._options})

    def log(self, iteration: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=iteration)

    def end(self) -> None:
        if self._run is not None:
            self._run.finish(**({} if self.error is None else {"exit_code": 1}))


class MLflowLogger(MetricsLogger):
    """Sends the log to MLflow through the package ``mlflow``; a ``tracking_uri`` of a database file needs no network.

    Slashes in names stay; characters that MLflow refuses become underscores.

    Args:
        log_report: the name of the LogReport in the trainer; default 'LogReport'.
        tracking_uri: a server, or a database such as 'sqlite:///mlflow.db'; None for MLflow's own setting.
        options: arguments of ``mlflow.start_run``, such as ``run_name``.

    Raises:
        ImportError: the package is not installed.

    Example:
        >>> log = extensions.MLflowLogger(tracking_uri="sqlite:///mlflow.db", run_name="first")  # doctest: +SKIP
    """

    def __init__(self, log_report: str = "LogReport", tracking_uri: str | None = None, **options: Any):
        super().__init__(log_report)
        self._mlflow = _package("mlflow", "MLflowLogger")
        self._tracking_uri, self._options = tracking_uri, options

    def begin(self, trainer: Trainer) -> None:
        if self._tracking_uri is not None:
            self._mlflow.set_tracking_uri(self._tracking_uri)
        self._mlflow.start_run(**self._options)

    def log(self, iteration: int, values: Mapping[str, float]) -> None:
        named = {"".join(c if c.isalnum() or c in "_-./ " else "_" for c in key): v for key, v in values.items()}
        self._mlflow.log_metrics(named, step=iteration)

    def end(self) -> None:
        is_stop = isinstance(self.error, KeyboardInterrupt | StopRequested)
        self._mlflow.end_run("FINISHED" if self.error is None else "KILLED" if is_stop else "FAILED")


def _package(name: str, logger: str) -> Module:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{logger} needs the package {name}: pip install {name}") from error
