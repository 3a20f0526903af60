"""What a job leaves behind: a folder of its own in --log-dir, with a status.json that is always whole.

    DIR/JOB/attempt-0/rank-0.out, rank-0.err, ...
    DIR/JOB/status.json: {"job", "command", "state", "code", "attempts": [...], "failure": {...} or null}
    DIR/latest -> JOB

A disk that fails costs a warning.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ... import wire
from ...errors import LaunchError
from ..running.plan import Outcome


class LaunchFolder:
    """The folder and status of one job; without a folder and a record it only remembers."""

    def __init__(self, name: str, command: list[str], log_dir: str | None, record: str | None) -> None:
        if not name or os.sep in name or name.startswith(".") or not name.isprintable() or name == "latest":
            raise LaunchError(f"--name {name!r}: expected a name that a folder can have")
        self.say: Callable[[str], None] = lambda text: None
        self.folder = self._make(name, log_dir) if log_dir is not None else None
        self.name = os.path.basename(self.folder) if self.folder else name
        self.paths = [os.path.join(self.folder, "status.json")] if self.folder else []
        if record is not None:
            self._check_record(record)
            self.paths.append(record)
        self.status: dict[str, Any] = {
            "job": self.name, "command": command, "pid": os.getpid(), "started": _now(), "state": "running",
            "code": None, "attempts": [], "failure": None, "host_failures": {},
        }  # fmt: skip
        self._ended_at: float | None = None
        self._warned = False

    def _make(self, name: str, log_dir: str) -> str:
        """A folder that no other job has, locked while this one runs."""
        try:
            os.makedirs(log_dir, exist_ok=True)
            folder, number = os.path.join(log_dir, name), 1
            while True:
                try:
                    os.mkdir(folder)
                    break
                except FileExistsError:
                    number += 1
                    folder = os.path.join(log_dir, f"{name}-{number}")
            self._lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LaunchError(f"--log-dir {log_dir!r} cannot be written: {error.strerror}") from error
        _link(os.path.basename(folder), os.path.join(log_dir, "latest"))
        return folder

    def _check_record(self, path: str) -> None:
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            raise LaunchError(f"--record {path!r}: the folder {folder!r} does not exist or is not writable")

    def attempt_folder(self) -> str | None:
        """Where the next attempt's output goes."""
        if self.folder is None:
            return None
        path = os.path.join(self.folder, f"attempt-{len(self.status['attempts'])}")
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            self._warn(path, error)
        return path

    def add(self, hosts: list[str], ranks: int, restart: int, outcome: Outcome, decision: str) -> None:
        """An attempt has ended."""
        since_end = None
        if self._ended_at is not None and outcome.first_rank_seconds is not None:
            since_end = round(outcome.started_at + outcome.first_rank_seconds - self._ended_at, 3)
        self._ended_at = outcome.started_at + outcome.seconds
        self.status["attempts"].append(
            {
                "restart": restart,
                "ended": _now(),
                "hosts": hosts,
                "ranks": ranks,
                "code": outcome.code,
                "seconds": round(outcome.seconds, 3),
                "seconds_to_first_rank": outcome.first_rank_seconds and round(outcome.first_rank_seconds, 3),
                "seconds_from_last_end_to_first_rank": since_end,
                "last_step": outcome.steps if outcome.steps >= 0 else None,
                "failure": outcome.failure and asdict(outcome.failure),
                "decision": decision,
            }
        )
        self.write()

    def end(self, outcome: Outcome) -> None:
        """The job has ended: the last attempt's failure is its own."""
        state = "failed" if outcome.failure else "stopped" if outcome.asked else "done"
        self.status.update(state=state, code=outcome.code, failure=outcome.failure and asdict(outcome.failure))
        self.write()

    def write(self) -> None:
        for path in self.paths:
            try:
                write_json(path, self.status)
            except OSError as error:
                self._warn(path, error)

    def _warn(self, path: str, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            self.say(f"{path} cannot be written: {error.strerror}")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _link(target: str, path: str) -> None:
    """Point a symbolic link elsewhere; file systems without them go without."""
    try:
        os.symlink(target, f"{path}.{os.getpid()}")
        os.replace(f"{path}.{os.getpid()}", path)
    except OSError:
        pass


def write_json(path: str, content: object) -> None:
    """Write beside the target and rename; what cannot be renamed onto (a pipe, /dev/stdout) is written to."""
    import json  # for jobs with --log-dir or --record alone

    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w") as file:
            json.dump(wire.valid(content), file, indent=2)
            file.write("\n")
        return
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w") as file:
            json.dump(wire.valid(content), file, indent=2)
            file.write("\n")
        os.replace(temporary, path)
    except OSError:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        raise
