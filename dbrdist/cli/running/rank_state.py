"""The state of each rank, in a small file of the run's folder, for `dbrdist-train --watch`."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING, Any

from dbrdist.cli.running.meter import Meter
from dbrdist.core.files import strict_json
from dbrdist.training import Extension
from dbrdist.training.extensions.snapshots import PRIORITY_SNAPSHOT

if TYPE_CHECKING:
    from types import TracebackType

    from dbrdist.comm.communicators.communicator import CommunicatorBase
    from dbrdist.training.trainer import Trainer

_FILE_BYTES, _MAX_ERROR = 4096, 300
_MAX_ERROR_BYTES = 3000  # of the error in JSON, where a letter beyond ASCII takes 6 or 12
_SECONDS = 2.0  # between two states of a rank, at least
_FILES_PER_SECOND = 100  # of all ranks together, at most: they share a file system


class RankState(Extension):
    """Writes how far this rank is, and how long its steps take, every two seconds (of many ranks, less often).

    A file that cannot be written is left alone from then on: nothing depends on it.

    Args:
        folder: the folder of the states; where it does not exist, nothing is written.
        meter: the run's meter: seconds in steps, waiting for data and communicating.
        comm: the ranks, of which each writes its own file.
        num_epochs: length of the run in epochs.
    """

    trigger = (1, "iteration")
    priority = PRIORITY_SNAPSHOT + 999  # before all that may take long: what is written last is true then, too

    def __init__(self, folder: str, meter: Meter, comm: CommunicatorBase, num_epochs: float):
        self._path = os.path.join(folder, f"{comm.rank}.json")
        self._meter = meter
        self._num_epochs = num_epochs
        self._period = max(_SECONDS, comm.size / _FILES_PER_SECOND)
        self._descriptor = -1
        self._due = 0.0
        self._known: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "num_epochs": num_epochs}
        self._before = (0, 0.0, 0.0, 0.0, 0.0)
        self._start = (0.0, 0.0)
        self._trainer: Any = None

    def initialize(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._before = self._position(trainer)
        self._start = time.monotonic(), trainer.updater.epoch_detail
        try:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        except OSError:  # the folder is on another host's disk
            return
        self._write({"step": trainer.updater.iteration, "epoch": trainer.updater.epoch_detail})
        self._due = time.monotonic() + self._period / 4

    def __call__(self, trainer: Trainer) -> None:
        now = time.monotonic()
        if now < self._due or self._descriptor < 0:
            return
        self._due = now + self._period
        self._write(self._measured(trainer, now))

    def on_error(self, trainer: Trainer, exception: BaseException, traceback: TracebackType | None) -> None:
        words = f"{type(exception).__name__}: {exception}"[:_MAX_ERROR]
        while len(strict_json.dumps(words)) > _MAX_ERROR_BYTES:
            words = words[: len(words) * 3 // 4]
        self._known["error"] = words

    def finalize(self) -> None:
        if self._descriptor >= 0:
            self._write({**self._measured(self._trainer, time.monotonic()), "ended": True})
        self._close()

    def _position(self, trainer: Trainer) -> tuple[int, float, float, float, float]:
        seconds, examples, waited, exposed = self._meter.position()
        return trainer.updater.iteration, seconds, examples, waited, exposed

    def _measured(self, trainer: Trainer, now: float) -> dict[str, float]:
        """Where the run is, and its speed since the last time."""
        before, self._before = self._before, self._position(trainer)
        steps, seconds, examples, waited, exposed = (b - a for a, b in zip(before, self._before))
        epoch = trainer.updater.epoch_detail
        found = {"step": trainer.updater.iteration, "epoch": epoch, **self._meter.memory()}
        if steps > 0 and seconds > 0:
            found |= {"seconds_per_step": seconds / steps, "examples_per_second": examples / seconds}
            found |= {"data_wait_fraction": min(waited / seconds, 1.0)}
            if self._meter.measures_communication:
                found["communication_fraction"] = min(exposed / seconds, 1.0)
        began, first = self._start
        if epoch > first:
            found["seconds_left"] = max(self._num_epochs - epoch, 0.0) * (now - began) / (epoch - first)
        return found

    def _write(self, found: dict[str, float]) -> None:
        self._known |= {**found, "time": time.time()}
        text = strict_json.dumps(self._known).encode()
        try:
            if len(text) < _FILE_BYTES:
                os.pwrite(self._descriptor, text.ljust(_FILE_BYTES), 0)
        except OSError:
            self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # a network file system may tell here that the disk is full
                os.close(descriptor)


def empty_states(folder: str) -> None:
    """Make the folder of the states, without those of an earlier start; called by one rank."""
    try:
        os.makedirs(folder, exist_ok=True)
        for name in os.listdir(folder):
            if name.endswith(".json"):
                os.remove(os.path.join(folder, name))
    except OSError:  # the run's own files say what is wrong with the folder
        return
