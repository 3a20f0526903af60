"""Event files for TensorBoard, written without it: framed records, each a small message of protocol buffers.

Formats: tensorflow/core/lib/io/record_writer.h (frames), tensorflow/core/util/event.proto and summary.proto (messages).
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dbrdist.training.extension import Extension
from dbrdist.training.extensions.log_report import LogReport

if TYPE_CHECKING:
    from dbrdist.training.trainer import Trainer

PRIORITY_AFTER_THE_LOG = -1


class TensorBoard(Extension):
    """Writes each new line of a LogReport as scalars, by its keys and at its iteration, below the trainer's `out`.

    `log_report` is the name of the LogReport in the trainer. `tensorboard --logdir result/tensorboard` shows them. A
    resumed run adds a file; values beyond the snapshot are dropped by TensorBoard.

    Args:
        log_report: the LogReport, or its name in the trainer; default 'LogReport'.
        folder: folder of the event files, below the trainer's output; default 'tensorboard'.

    Example:
        >>> events = extensions.TensorBoard()  # trainer.extend(events)
    """

    trigger = (1, "iteration")
    priority = PRIORITY_AFTER_THE_LOG

    def __init__(self, log_report: str = "LogReport", folder: str = "tensorboard"):
        self._log_report = log_report
        self._folder = folder
        self._num_written = 0
        self._file: EventFile | None = None

    def initialize(self, trainer: Trainer) -> None:
        report = self._report(trainer)
        report.read_back(trainer)
        self._num_written = len(report.log)
        self._file = EventFile(os.path.join(trainer.out, self._folder))
        if trainer.updater.iteration:
            self._file.drop_from(trainer.updater.iteration + 1)

    def __call__(self, trainer: Trainer) -> None:
        log = self._report(trainer).log
        for entry in log[self._num_written :]:
            values = {key: value for key, value in entry.items() if key != "iteration" and _is_scalar(value)}
            assert self._file is not None  # made by `initialize`
            self._file.add(entry["iteration"], values)
        self._num_written = len(log)

    def finalize(self) -> None:
        if self._file is not None:
            self._file.close()

    def _report(self, trainer: Any) -> LogReport:
        report: LogReport = trainer.get_extension(self._log_report)
        return report


def _is_scalar(value: float | str) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


class EventFile:
    """A new file of events in a folder, which TensorBoard reads while it grows."""

    def __init__(self, folder: str):
        os.makedirs(folder, exist_ok=True)
        now, number = time.time(), 0
        start = os.path.join(folder, f"events.out.tfevents.{int(now):010}.{socket.gethostname()}.{os.getpid()}")
        while os.path.exists(f"{start}.{number}"):
            number += 1
        self.path = f"{start}.{number}"
        self._file = open(self.path, "xb")  # noqa: SIM115 - closed by `close`
        self._write(_bytes(3, b"brain.Event:2"))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add scalars by name at a step; they are kept in single precision."""
        summary = b"".join(_bytes(1, _bytes(1, name.encode()) + _float(2, value)) for name, value in values.items())
        self._write(_integer(2, step) + _bytes(5, summary))

    def drop_from(self, step: int) -> None:
        """Say that whatever earlier files have from this step on is no longer true."""
        self._write(_integer(2, step) + _bytes(7, _integer(1, 1)))  # a session log: START

    def close(self) -> None:
        """End the file."""
        self._file.close()

    def _write(self, message: bytes) -> None:
        message = _double(1, time.time()) + message
        length = struct.pack("<Q", len(message))
        self._file.write(length + _checksum(length) + message + _checksum(message))
        self._file.flush()


# ---- protocol buffers: each field is its number and kind, then the value ----


def _varint(n: int) -> bytes:
    n &= (1 << 64) - 1
    low = []
    while n > 0x7F:
        low.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*low, n])


def _integer(field: int, n: int) -> bytes:
    return _varint(field << 3) + _varint(n)


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", max(-_LARGEST, min(_LARGEST, value)))


_LARGEST = 3.4028234663852886e38


# ---- the checksum: CRC-32C (Castagnoli), rotated and shifted ----


def _table() -> list[int]:
    table = []
    for n in range(256):
        for _ in range(8):
            n = n >> 1 ^ (0x82F63B78 if n & 1 else 0)
        table.append(n)
    return table


_TABLE = _table()


def _checksum(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
