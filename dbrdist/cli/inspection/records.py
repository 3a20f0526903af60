"""What runs leave in their folders, read while they continue: no file in a folder is trusted, changed or executed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dbrdist.cli.output.folder import (
    CONFIG,
    LOG,
    RANKS,
    SUMMARY,
    TEST_EXAMPLES,
    WORDS,
    read_json,
    state_seen,
)
from dbrdist.cli.output.words import counted
from dbrdist.core.files.regular_file import regular, require_regular
from dbrdist.errors import CheckpointError

_MAX_TEXT_BYTES = 1 << 20  # of a configuration, and of the end of the messages
_MAX_LINE_BYTES = 1 << 20  # of the log
_MAX_FILE_BYTES = 1 << 27  # of any other file: 2,000 pictures take up to 80 MB
_MAX_RANK_BYTES = 1 << 16  # of the state of a rank
_MAX_MESSAGES = 200  # lines
_HEAD_BYTES = 512  # by which a log is known: the first line has the time that it took
_MAX_RANKS = 1 << 16
_MAX_KEYS = 1000  # of a log


def number(value: float | str | None) -> float | None:
    """A value that can be drawn; None for all others."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value)  # NaN is not
    return None


def epoch_of(entry: dict[str, float]) -> float:
    """The epoch of a line of the log, with its fraction where the line has it."""
    return number(entry.get("epoch_detail", entry.get("epoch", 0))) or 0.0


class LogLines(list[dict[str, Any]]):
    """The lines of a log. It may only grow; the columns of its numbers grow with it."""

    def __init__(self, entries: Iterable[dict[str, Any]] = ()):
        super().__init__(entries)
        self._columns: dict[str, tuple[int, array[float], array[float]]] = {}
        self._names: dict[str, None] = {}
        self._num_named = 0

    def names(self) -> list[str]:
        """The keys of all lines, each once; at most so many that nobody draws them all."""
        for entry in self[self._num_named :]:
            if len(self._names) < _MAX_KEYS:
                self._names.update(dict.fromkeys(entry))
        self._num_named = len(self)
        return list(self._names)

    def column(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """The epochs and the values of the lines that have a finite number under a key."""
        done, epochs, values = self._columns.get(key, (0, array("d"), array("d")))
        for entry in self[done:]:
            value = number(entry.get(key))
            if value is not None:
                epochs.append(epoch_of(entry))
                values.append(value)
        self._columns[key] = (len(self), epochs, values)
        return np.array(epochs), np.array(values)


def as_log(lines: Sequence[dict[str, Any]]) -> LogLines:
    """Lines with the columns of their numbers."""
    return lines if isinstance(lines, LogLines) else LogLines(lines)


class RunRecord(NamedTuple):
    """What a run left in its folder."""

    path: str
    name: str
    summary: dict[str, Any]
    log: Sequence[dict[str, Any]]
    config: str
    ranks: Sequence[dict[str, Any]] = ()  # the state of each rank, in their order
    messages: Sequence[str] = ()  # the last lines of what the run printed
    examples: dict[str, Any] = {}  # test images with the outputs for them, and the worst mistakes
    problems: Sequence[str] = ()  # why something of it cannot be shown, a sentence each


class RunReader:
    """Reads a run's folder again and again; of the log only what is new."""

    def __init__(self, path: str):
        self.path = path
        self._begin_log(None)
        self._ranks: dict[int, dict[str, Any]] = {}
        self._kept: dict[str, tuple[Any, Any]] = {}  # file -> (its stamp, what it holds)

    def read(self) -> RunRecord:
        """The record of the run as it is now; a folder that is gone gives an empty one that says so."""
        problems: list[str] = []
        if not os.path.isdir(self.path):
            self._begin_log(None)
            self._ranks, self._kept = {}, {}
            gone = {"status": "gone"}
            words = f"{self.path}: the folder was removed; it is shown again when there is a run in it"
            return RunRecord(self.path, _name(self.path), gone, LogLines(), "", problems=[words])
        summary = self._cached(SUMMARY, read_json, {})
        self._read_log(problems)
        status = state_seen(self.path, summary)
        return RunRecord(
            self.path,
            _name(self.path),
            {**summary, "status": status},
            self._log,
            self._cached(CONFIG, _text, ""),
            self._read_ranks(),
            self._cached(WORDS, _last_lines, []),
            self._cached(TEST_EXAMPLES, read_json, {}),
            problems,
        )

    def _begin_log(self, file: tuple[int, int] | None) -> None:
        """Forget the log; the next lines come from another file, which device and inode name."""
        self._log, self._log_file = LogLines(), file
        self._at = 0  # bytes of it that were read
        self._log_head = b""  # its first bytes: a file system gives a new file the number of one that was removed
        self._num_unreadable = 0

    def _cached(self, name: str, read: Callable[[str], Any], missing: Any) -> Any:
        """What a file holds, read again if it has changed; what it held before where it cannot be read now."""
        path = os.path.join(self.path, name)
        try:
            found = os.stat(path)
        except OSError:
            self._kept.pop(name, None)
            return missing
        stamp = (found.st_ino, found.st_size, found.st_mtime_ns)
        if name not in self._kept or self._kept[name][0] != stamp:
            if found.st_size > _MAX_FILE_BYTES and read is read_json:
                return missing
            try:
                self._kept[name] = (stamp, read(path))
            except (OSError, ValueError):
                return self._kept[name][1] if name in self._kept else missing
        return self._kept[name][1]

    def _read_log(self, problems: list[str]) -> None:
        """Add the lines that are new; a line without its end is being written, and is left for the next time."""
        path = os.path.join(self.path, LOG)
        try:
            with open(path, "rb", opener=regular) as file:
                status = os.fstat(file.fileno())
                is_same = (status.st_dev, status.st_ino) == self._log_file and status.st_size >= self._at
                if not is_same or file.read(len(self._log_head)) != self._log_head:
                    self._begin_log((status.st_dev, status.st_ino))
                file.seek(self._at)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._log_head = self._log_head or line[:_HEAD_BYTES]
                    self._at += len(line)
                    self._add(line)
        except FileNotFoundError:
            self._begin_log(None)
        except OSError as error:
            problems.append(f"{path}: the log cannot be read: {error.strerror}")
        if self._num_unreadable:
            lines = counted(self._num_unreadable, "line is", "lines are")
            problems.append(f"{path}: {lines} no JSON object and left out")

    def _add(self, line: bytes) -> None:
        try:
            entry = json.loads(line) if len(line) <= _MAX_LINE_BYTES else None
        except (ValueError, RecursionError):
            entry = None
        if isinstance(entry, dict):
            self._log.append({sys.intern(key): value for key, value in entry.items()})  # each key once in memory
        elif line.strip():
            self._num_unreadable += 1

    def _read_ranks(self) -> list[dict[str, Any]]:
        """The state that each rank wrote last; while one is being written, the one before."""
        found = {}
        with contextlib.suppress(OSError):
            names = os.listdir(os.path.join(self.path, RANKS))
            for name in names[:_MAX_RANKS]:
                stem, _, kind = name.partition(".")
                if kind == "json" and stem.isascii() and stem.isdecimal() and len(stem) < 7:
                    state = _state_in(os.path.join(self.path, RANKS, name))
                    if state:
                        self._ranks[int(stem)] = state
                    if int(stem) in self._ranks:
                        found[int(stem)] = self._ranks[int(stem)]
        self._ranks = found
        return [{**found[rank], "rank": rank} for rank in sorted(found)]


def read(path: str) -> RunRecord:
    """The record of the run in a folder.

    Raises:
        CheckpointError: there is none.
        OSError: its log or configuration is no regular file.
    """
    for name in (LOG, CONFIG):
        if os.path.exists(os.path.join(path, name)):
            require_regular(os.path.join(path, name))
    run = RunReader(path).read()
    if not run.log and not read_json(os.path.join(path, SUMMARY)):
        raise CheckpointError(f"{path}: expected the folder of a run, with {SUMMARY} and {LOG} in it")
    return run


def distinct(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Runs with names that differ: their paths, where the last part does not tell them apart."""
    names = [run.name for run in runs]
    return [run if names.count(run.name) == 1 else run._replace(name=run.path) for run in runs]


def _name(path: str) -> str:
    return os.path.basename(os.path.abspath(path))


def _state_in(path: str) -> dict[str, Any]:
    """The state of a rank; an empty one where the file is gone, damaged or too large."""
    with contextlib.suppress(OSError):
        if os.stat(path).st_size <= _MAX_RANK_BYTES:
            return read_json(path)
    return {}


def _text(path: str) -> str:
    with open(path, "rb", opener=regular) as file:
        return file.read(_MAX_TEXT_BYTES).decode(errors="replace")


def _last_lines(path: str) -> list[str]:
    """The end of a file of text, in lines."""
    with open(path, "rb", opener=regular) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - (1 << 16)))
        lines = file.read().decode(errors="replace").splitlines()
    return lines[-_MAX_MESSAGES:] if size <= 1 << 16 else lines[1:][-_MAX_MESSAGES:]
