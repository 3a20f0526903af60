"""Event files, read back by a decoder that shares nothing with the writer."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

from dbrdist.training.extensions import LogReport, TensorBoard, tensorboard
from dbrdist.training.extensions.tensorboard import EventFile
from tests.each import each


def crc32c(data):
    """Bit by bit, from the polynomial 0x1EDC6F41 as in RFC 3720, input and output reflected."""
    register = 0xFFFFFFFF
    for byte in data:
        for bit in range(8):
            feedback = (register ^ byte >> bit) & 1
            register = register >> 1 ^ (int(f"{0x1EDC6F41:032b}"[::-1], 2) if feedback else 0)
    return register ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) % 2**32


def test_the_checksum_of_the_standard():
    """RFC 3720, B.4: 32 zeros, 32 ones, rising bytes."""
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E


def fields(message):
    """(number, value) of a message of protocol buffers; nested ones stay bytes."""
    found, at = [], 0

    def varint():
        nonlocal at
        n = shift = 0
        while True:
            byte = message[at]
            at += 1
            n |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return n

    while at < len(message):
        key = varint()
        kind = key & 7
        if kind == 0:
            value = varint()
        elif kind == 2:
            size = varint()
            value, at = message[at : at + size], at + size
        else:
            size, code = {1: (8, "<d"), 5: (4, "<f")}[kind]
            (value,), at = struct.unpack_from(code, message, at), at + size
        found.append((key >> 3, value))
    return found


def events(path):
    """Each record's fields, with both checksums compared."""
    data, at, found = Path(path).read_bytes(), 0, []
    while at < len(data):
        head = data[at : at + 8]
        (size,) = struct.unpack("<Q", head)
        assert struct.unpack_from("<I", data, at + 8) == (masked(head),)
        body = data[at + 12 : at + 12 + size]
        assert struct.unpack_from("<I", data, at + 12 + size) == (masked(body),)
        found.append(dict(fields(body)))
        at += 16 + size
    return found


def scalars(event):
    return {dict(fields(v))[1].decode(): dict(fields(v))[2] for _, v in fields(event[5])}


def test_scalars(tmp_path):
    file = EventFile(str(tmp_path / "deep" / "er"))
    file.add(7, {"main/loss": 0.5, "grün": -3.0, "large": 1e300})
    file.add(2**40 + 3, {})
    file.drop_from(300)
    file.close()
    version, first, second, session = events(file.path)
    assert version[3] == b"brain.Event:2"
    assert first[2] == 7
    assert scalars(first) == {"main/loss": 0.5, "grün": -3.0, "large": pytest.approx(3.4028234663852886e38)}
    assert (second[2], second[5]) == (2**40 + 3, b"")
    assert session[2] == 300
    assert fields(session[7]) == [(1, 1)]
    assert all(1.7e9 < event[1] < 1e11 for event in (version, first, second, session))
    assert Path(file.path).name.startswith("events.out.tfevents.")


def test_what_was_added_is_in_the_file_while_it_grows(tmp_path):
    file = EventFile(str(tmp_path))
    assert len(events(file.path)) == 1  # the version
    for step in (1, 2):
        file.add(step, {"loss": 0.5})
        assert [event.get(2) for event in events(file.path)[1:]] == [*range(1, step + 1)]
    file.close()


def test_files_of_one_second_do_not_meet(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard.time, "time", lambda: 42.9)
    monkeypatch.setattr(tensorboard.socket, "gethostname", lambda: "host")
    monkeypatch.setattr(tensorboard.os, "getpid", lambda: 7)
    files = [EventFile(str(tmp_path)) for _ in range(3)]
    assert [file.path.rpartition(".")[2] for file in files] == ["0", "1", "2"]
    assert {file.path.rpartition(".")[0] for file in files} == {f"{tmp_path}/events.out.tfevents.0000000042.host.7"}
    for file in files:
        file.close()


class Trainer:
    """A log that grows, at steps of a run."""

    def __init__(self, out):
        self.out, self.log = str(out), LogReport()
        self.updater = SimpleNamespace(iteration=0)

    def get_extension(self, name):
        assert name == "LogReport"
        return self.log


def test_lines_of_the_log(tmp_path):
    trainer, board = Trainer(tmp_path), TensorBoard()
    board.initialize(trainer)
    trainer.log.log.append({"main/loss": 2.0, "iteration": 3, "epoch": 1, "time": "now", "lr": math.nan, "ok": True})
    board(trainer)
    board(trainer)
    trainer.log.log.extend([{"main/loss": 1.0, "iteration": 6}, {"main/loss": 0.5, "iteration": 9}])
    board(trainer)
    board.finalize()
    trainer.updater.iteration, again = 9, TensorBoard()
    again.initialize(trainer)
    again(trainer)
    again.finalize()
    first, second = (events(path) for path in sorted((tmp_path / "tensorboard").iterdir()))
    assert [(e[2], scalars(e)) for e in first[1:]] == [
        (3, {"main/loss": 2.0, "epoch": 1.0, "ok": 1.0}),
        (6, {"main/loss": 1.0}),
        (9, {"main/loss": 0.5}),
    ]
    assert [(e.get(2), e.get(7)) for e in second] == [(None, None), (10, b"\x08\x01")]


def test_lines_of_the_run_before_are_not_written_again(tmp_path):
    """The log may be asked for them by whoever comes first."""
    trainer, board = Trainer(tmp_path), TensorBoard()
    (tmp_path / "log.jsonl").write_text('{"loss": 2.0, "iteration": 3}\n{"loss": 1.0, "iteration": 6}\n')
    trainer.log._num_saved = 2
    trainer.updater.iteration = 6
    board.initialize(trainer)
    trainer.log.log.append({"loss": 0.5, "iteration": 9})
    board(trainer)
    board.finalize()
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert [(e[2], scalars(e)) for e in events(path)[2:]] == [(9, {"loss": 0.5})]


def test_numbers_of_protocol_buffers():
    for n, expected in ((0, [0]), (1, [1]), (127, [127]), (128, [128, 1]), (300, [172, 2]), (16384, [128, 128, 1])):
        assert list(tensorboard._varint(n)) == expected
    assert len(tensorboard._varint(-1)) == 10


@each(
    **{"n, expected": [
        (0, "00"), (1, "01"), (127, "7f"), (128, "80 01"), (300, "ac 02"), (16383, "ff 7f"), (16384, "80 80 01"),
        (-1, "ff " * 9 + "01"), (2**64 - 1, "ff " * 9 + "01"),
    ]}
)  # fmt: skip
def test_whole_numbers_as_protocol_buffers_have_them(n, expected):
    assert tensorboard._varint(n) == bytes.fromhex(expected)


def test_the_table_of_remainders_is_that_of_the_polynomial():
    """Castagnoli's of RFC 3720, a bit at a time."""
    polynomial = int(f"{0x1EDC6F41:032b}"[::-1], 2)
    for byte, found in enumerate(tensorboard._table()):
        for _ in range(8):
            is_odd = byte % 2
            byte //= 2
            byte ^= polynomial * is_odd
        assert found == byte
