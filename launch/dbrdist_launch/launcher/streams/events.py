"""What happens to a job, as lines of JSON in a file (--events) while it happens.

Each line has `time` (seconds since 1970), `event` and `job`. The events: job_started, attempt_started, rank_started,
rank_ended, warning, stop_asked, failure, attempt_ended, waiting, job_ended.
"""

from __future__ import annotations

import os
import queue
import threading
import time

from ... import wire


class Events:
    """Writes in a thread: a disk that is slow, or a pipe that nobody reads, holds nothing up."""

    def __init__(self, path: str | None = None, job: str = "") -> None:
        self.path, self.job = path, job
        self.problem: str | None = None  # why lines are missing
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def tell(self, event: str, **fields: object) -> None:
        if self.path is None:
            return
        told = {"time": round(time.time(), 3), "event": event, "job": self.job, **fields}
        self._queue.put(wire.dumps(wire.valid(told)).encode() + b"\n")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(self.path,), daemon=True)
            self._thread.start()

    def _run(self, path: str) -> None:
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            while (line := self._queue.get()) is not None:
                view = memoryview(line)
                while view:
                    view = view[os.write(file, view) :]
            os.close(file)
        except OSError as error:
            self.problem = f"--events {path!r} cannot be written: {error.strerror}"

    def close(self, seconds: float = 5.0) -> None:
        """Wait a moment for the last lines; a pipe without a reader does not hold the launcher."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(seconds)
