"""Tests of dbrdist.datasets.loading.files."""

import contextlib
import os
import threading

import pytest

from dbrdist.datasets.loading import files
from dbrdist.datasets.loading.files import OpenFiles, read_file
from tests.datasets.image_files import jpeg
from tests.descriptors import open_files


def test_whole_files(tmp_path):
    for size in (0, 1, 5000, 3_000_000):
        data = os.urandom(size)
        (tmp_path / "file").write_bytes(data)
        assert read_file(str(tmp_path / "file")) == data
    with pytest.raises(IsADirectoryError):
        read_file(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        read_file(str(tmp_path / "nothing"))


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="there is no /proc")
def test_a_file_whose_size_is_not_known():
    assert read_file("/proc/self/status").startswith(b"Name:") and len(read_file("/proc/self/status")) > 200


def test_a_pipe_to_which_nobody_writes_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_WRITER_MS", 20)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"nobody writes to this pipe.*pipe"):
        read_file(str(tmp_path / "pipe"))


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null"])
def test_a_device_is_no_file(path):
    with pytest.raises(OSError, match="expected a regular file, it is a device"):
        read_file(path)


def test_what_claims_more_than_one_would_keep_takes_no_memory(tmp_path, monkeypatch):
    path = str(tmp_path / "sparse.png")
    with open(path, "wb") as file:
        file.truncate(1 << 43)
    with pytest.raises(OSError, match="at most 2,147,483,647 bytes, got 8,796,093,022,208"):
        read_file(path)
    monkeypatch.setattr(files, "_MAX_BYTES", 1000)
    with open(path, "r+b") as file:
        file.truncate(1000)
    assert read_file(path) == bytes(1000)
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: _write_forever(pipe))
    writer.start()
    with pytest.raises(OSError, match="at most 1,000 bytes, got "):
        read_file(pipe)
    writer.join()


def _write_forever(path):
    with open(path, "wb", buffering=0) as file, contextlib.suppress(BrokenPipeError):
        while True:
            file.write(bytes(500))


def test_a_pipe_is_read_to_its_end(tmp_path):
    path, data = str(tmp_path / "pipe"), jpeg(0) * 300
    os.mkfifo(path)

    def write():
        with open(path, "wb") as file:
            file.write(data)

    thread = threading.Thread(target=write)
    thread.start()
    assert read_file(path) == data
    thread.join(30)


def test_files_are_closed_when_there_are_many(tmp_path):
    files = OpenFiles(max_open=3)
    before = open_files()
    for k in range(10):
        (tmp_path / str(k)).write_bytes(b"%d" % k * 9)
        assert files.read(f"{tmp_path}/{k}", 2, 5) == b"%d" % k * 5
    assert {path for _, path in open_files() - before} == {f"{tmp_path}/{k}" for k in (7, 8, 9)}
    with pytest.raises(OSError, match="the file ends after 4 of 5 bytes at 5"):
        files.read(f"{tmp_path}/9", 5, 5)
    del files
    assert not open_files() - before


def test_a_part_of_a_file_that_comes_in_pieces(tmp_path, monkeypatch):
    data, pread = bytes(range(100)), os.pread
    (tmp_path / "file").write_bytes(data)
    monkeypatch.setattr(os, "pread", lambda number, size, offset: pread(number, min(size, 7), offset))
    files = OpenFiles()
    for start, size in ((0, 100), (3, 14), (20, 0), (93, 7)):
        assert files.read(str(tmp_path / "file"), start, size) == data[start : start + size]
    with pytest.raises(OSError, match="the file ends after 10 of 11 bytes at 90"):
        files.read(str(tmp_path / "file"), 90, 11)
