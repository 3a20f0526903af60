"""A run's folder: what is in it, who may write in it, and how the run in it stands.

Only the names listed here are ever written, moved or removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

from dbrdist.cli.output.lock import Lock, holder_of, seems_held
from dbrdist.cli.output.words import counted
from dbrdist.comm.data import audit
from dbrdist.core.files import strict_json
from dbrdist.core.files.regular_file import regular
from dbrdist.core.files.serializer import write_atomically
from dbrdist.errors import ConfigError
from dbrdist.training.extensions import snapshots
from dbrdist.training.runs import RECIPE

CONFIG, SUMMARY, LOG, WORDS, LOCK, REPORT = (
    "config.yaml",
    "summary.json",
    "log.jsonl",
    "log.txt",
    "run.lock",
    "report",
)
BEST, TENSORBOARD, TRACE = "snapshot_best", "tensorboard", "trace.json"
RANKS, TEST_EXAMPLES = "ranks", "test_examples.json"
BATCH_SIZES = "batch_finder.csv"
FINDINGS = ("lr_finder.csv", "lr_finder.png")  # of a range test: the table and the picture
_NAMES = (
    CONFIG,
    RECIPE,
    SUMMARY,
    LOG,
    WORDS,
    BEST,
    REPORT,
    TENSORBOARD,
    TRACE,
    audit.FOLDER,
    RANKS,
    TEST_EXAMPLES,
    *FINDINGS,
    BATCH_SIZES,
    "log.csv",
)
_TEMPORARY = re.compile(rf"({'|'.join(map(re.escape, _NAMES))}|snapshot_iter_\d+)\.tmp-\d+(-\d+)?")
# after the summary of a run that continues, room for its results and the names of some examples that were left out
_RESERVED_BYTES, _MAX_REASON = 1 << 14, 2000
_NO_SUMMARY = "with no summary"
KILLED = "its process ended without a report: it was killed, or its host went down"


class RunFolder:
    """The folder of a run, held by this process from `open` to `close`."""

    def __init__(self, path: str):
        self.path = path
        self._lock = Lock(self.file(LOCK))
        self.summary: dict[str, Any] = {}

    def file(self, name: str) -> str:
        """The path of a file in the folder."""
        return os.path.join(self.path, name)

    def has(self, path: str | None) -> bool:
        """Whether a path is that of one of the run's files."""
        return isinstance(path, str) and path.startswith(self.file(""))

    def open(self, mode: str) -> None:
        """Make the folder, or take the one that is there; nothing in it is changed yet but leftovers of crashes.

        `mode` is `new` (the folder must hold no run), `overwrite` (a run in it is moved aside) or `resume`. Raises
        ConfigError where another process is writing there, or where a run is in the way.
        """
        try:
            os.makedirs(self.path, exist_ok=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"out: the folder {self.path!r} cannot be created: {_reason(error)}") from error
        try:
            self._lock.acquire()
        except OSError as error:
            raise ConfigError(f"out: the folder {self.path!r} is not writable: {_reason(error)}") from error
        try:
            self._take(mode)
        except BaseException:
            self.close()
            raise

    def _take(self, mode: str) -> None:
        for name in os.listdir(self.path):
            if _TEMPORARY.fullmatch(name):  # a process was killed while it wrote this
                os.remove(self.file(name))
        found = list(self._own_files())
        if mode == "overwrite" and found not in ([], [CONFIG]):
            print(f"the run that was in {self.path} is now in {self._move_aside(found)}", flush=True)
        elif found == [CONFIG] or (mode == "new" and found):
            raise ConfigError(self._in_the_way(found))
        elif mode == "resume":
            self.summary = read_json(self.file(SUMMARY))
            if self.summary.get("status") == "running":
                self.summary |= {"status": "failed", "reason": KILLED}

    def _own_files(self) -> Iterator[str]:
        yield from (name for name in _NAMES if os.path.lexists(self.file(name)))
        yield from (os.path.basename(path) for path in snapshots.find(self.path))

    def _in_the_way(self, found: list[str]) -> str:
        if found == [CONFIG]:
            return f"out: {self.file(CONFIG)} exists and would be overwritten; give the run its own folder with out=..."
        return (
            f"out: {self.path} holds a run ({describe(self.path)}); --resume continues it, --overwrite moves it "
            "aside, and out=... selects another folder"
        )

    def _move_aside(self, names: list[str]) -> str:
        number, base = 1, os.path.abspath(self.path)
        while os.path.lexists(f"{base}.old-{number}"):
            number += 1
        aside = f"{base}.old-{number}"
        os.mkdir(aside)
        for name in names:
            os.rename(self.file(name), os.path.join(aside, name))
        return os.path.relpath(aside) if not os.path.isabs(self.path) else aside

    def set_apart_damaged(self, resumed_from: str | None) -> None:
        """Rename damaged snapshots, which the number of a later one could meet; the rest continues from another."""
        newer = snapshots.find(self.path)
        for path in newer[newer.index(resumed_from) + 1 :] if resumed_from in newer else newer:
            os.replace(path, self.file(f"damaged_{os.path.basename(path)}"))

    def write_status(self, status: str, reason: str | None = None, **facts: float | str | Sequence[str] | None) -> None:
        """Write summary.json: how the run stands, and what is known of it.

        While the run continues, blanks follow it, so that its end fits even if the disk is full.
        """
        known, path = self.summary, self.file(SUMMARY)
        self.summary = known | {"status": status, "reason": reason, **facts}
        if status == "running":
            with contextlib.suppress(OSError):  # no room for the blanks
                write_json(path, self.summary, _RESERVED_BYTES)
                return
        try:
            write_json(path, self.summary)
        except OSError:
            in_brief = {"status": status, "reason": reason and reason[:_MAX_REASON]}
            if not any(_overwrite(path, text) for text in map(_as_text, (self.summary, known | in_brief))):
                raise

    def close(self) -> None:
        """Let other processes have the folder."""
        self._lock.release()


def describe(path: str) -> str:
    """How the run in a folder stands, in a few words."""
    summary = read_json(os.path.join(path, SUMMARY))
    status = state_of(path, summary)
    if not summary.get("iterations"):
        return status
    return f"{status} after {counted(summary['iterations'], 'step')}"


def state_of(path: str, summary: dict[str, str | None]) -> str:
    """The status of the run in a folder; one that is said to run, without a process, has failed."""
    status = summary.get("status")
    if status == "running" and holder_of(os.path.join(path, LOCK)) is None:
        return "failed"
    return str(status or _NO_SUMMARY)


def state_seen(path: str, summary: dict[str, Any]) -> str:
    """As :func:`state_of`, without the lock, which must not be taken while a run may begin."""
    status = summary.get("status")
    return "failed" if status == "running" and not seems_held(os.path.join(path, LOCK)) else str(status or _NO_SUMMARY)


def earlier_starts(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """What is kept of the starts of a run before this one."""
    if "status" not in summary:
        return []
    kept = ("status", "reason", "began", "ended", "iterations", "command", "hosts", "version", "commit")
    before = summary.get("earlier_starts")
    return [*(before if isinstance(before, list) else ()), {key: summary[key] for key in kept if key in summary}]


def read_json(path: str) -> dict[str, Any]:
    """A JSON file with a mapping in it; an empty one where it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError), open(path, encoding="utf-8", opener=regular) as file:
        found = json.load(file)
        if isinstance(found, dict):
            return found
    return {}


def write_json(path: str, data: Any, num_blanks: int = 0) -> None:
    """Write a JSON file that people read, with blanks behind it."""
    write_atomically(path, lambda file: file.write(_as_text(data) + b" " * num_blanks))


def _as_text(data: Any) -> bytes:
    return (strict_json.dumps(data, indent=2) + "\n").encode()


def _overwrite(path: str, text: bytes) -> bool:
    """Replace what is in a file by as many bytes, which takes no room on the disk; False where they are too few."""
    try:
        with open(path, "r+b", opener=regular) as file:
            size = os.fstat(file.fileno()).st_size
            if len(text) <= size:
                file.write(text.ljust(size))
    except OSError:
        return False
    return len(text) <= size


def now() -> str:
    """The local time with its zone, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
