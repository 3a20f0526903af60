"""Tests of dbrdist.datasets.public.download."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
from pathlib import Path
from urllib import request

import numpy as np
import pytest

from dbrdist import dataset as D
from dbrdist.core.files import dataset_root
from dbrdist.dataset import (
    cache_or_load_file,
    cached_download,
    download,
    get_dataset_directory,
    get_dataset_root,
    set_dataset_root,
)
from dbrdist.datasets import get_cifar10, get_mnist, get_ptb_words, get_svhn
from tests.each import each
from tests.warm import ROOT


def test_a_cached_file_is_made_once(tmp_path):
    path, made = str(tmp_path / "deep" / "x.npz"), []

    def create(to):
        made.append(to)
        np.savez(to, a=np.arange(3))
        return "made"

    def load(path):
        return np.load(path)["a"].tolist()

    assert D.cache_or_load_file(path, create, load) == "made"
    assert D.cache_or_load_file(path, create, load) == [0, 1, 2] and len(made) == 1
    assert os.listdir(os.path.dirname(path)) == ["x.npz"]
    with pytest.raises(FileNotFoundError, match=r"expected the creator to write the file that it was given, y.npz"):
        D.cache_or_load_file(str(tmp_path / "y.npz"), lambda to: None, load)


def test_what_is_missing_is_looked_for_and_nothing_is_made():
    for get in (get_cifar10, get_mnist, get_svhn, get_ptb_words):
        with pytest.raises(OSError, match="is not on this machine"):
            get()
        assert not list(Path(get_dataset_root()).rglob("*.*")), get
    with pytest.raises(OSError, match="is not on this machine"):
        download.find("X", "pfnet/chainer/x", [download.Source("x.gz", (), "")])
    assert not os.path.exists(get_dataset_directory("pfnet/chainer/x", create_directory=False))


class Answer(io.BytesIO):
    def __init__(self, data, **headers):
        super().__init__(data)
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


@each(length=[None, "4", "3", "5", "many"])
def test_lengths_that_a_server_announces(length, tmp_path):
    asked = []

    def urlopen(url, timeout):
        asked.append((url, timeout))
        return Answer(b"four", **({} if length is None else {"Content_Length": length}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request, "urlopen", urlopen)
        url = f"https://a.example/{length}"
        if length in ("3", "5"):
            with pytest.raises(OSError, match=f"expected {length} bytes from {url}, got 4; try again"):
                download.download(url)
        else:
            assert Path(download.download(url)).read_bytes() == b"four"
        assert asked == [(url, 60)]


def test_a_file_that_another_process_has_downloaded_meanwhile_is_taken(monkeypatch):
    url = "https://a.example/x"

    def flock(file, _):
        path = Path(file.name.removesuffix(".lock"))
        path.write_bytes(b"theirs")

    monkeypatch.setattr(download.fcntl, "flock", flock)
    assert Path(download.download(url)).read_bytes() == b"theirs"


def test_a_file_that_another_process_has_made_meanwhile_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(download.fcntl, "flock", lambda file, _: (tmp_path / "x").write_text("theirs"))
    made = download.cache_or_load_file(str(tmp_path / "x"), lambda path: 1 / 0, lambda path: Path(path).read_text())
    assert made == "theirs" and os.listdir(tmp_path) == ["x"]


def test_downloads_are_kept(server, capsys):
    server.files["https://a.example/x"] = b"some bytes"
    path = cached_download("https://a.example/x")
    assert Path(path).read_bytes() == b"some bytes" and path.startswith(get_dataset_root())
    assert cached_download("https://a.example/x") == path and len(server.asked) == 1
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]  # no locks, no halves
    assert "Downloading from https://a.example/x" in capsys.readouterr().err


def test_downloads_that_fail_leave_nothing(server):
    with pytest.raises(OSError, match=r"expected to download https://a.example/x, but that failed: .*no network"):
        cached_download("https://a.example/x")
    server.files["https://a.example/x"] = b"half"
    server.length = "8"
    with pytest.raises(OSError, match=r"expected 8 bytes from https://a.example/x, got 4"):
        cached_download("https://a.example/x")
    server.length = None
    with pytest.raises(OSError, match=f"MD5 checksum 0123 from .*, got {hashlib.md5(b'half').hexdigest()}"):
        download.download("https://a.example/x", "0123")
    assert os.listdir(os.path.join(get_dataset_root(), "_dl_cache")) == []


def test_cache_or_load_file(tmp_path):
    calls = []

    def create(path):
        calls.append(path)
        assert not os.path.exists(path) and os.path.basename(path) == "made.txt"
        Path(path).write_text("content")
        return "made"

    path = str(tmp_path / "new" / "made.txt")
    assert cache_or_load_file(path, create, lambda p: Path(p).read_text()) == "made"
    assert cache_or_load_file(path, create, lambda p: Path(p).read_text()) == "content"
    assert len(calls) == 1 and os.listdir(tmp_path / "new") == ["made.txt"]

    def fail(path):
        Path(path).write_text("half")
        raise KeyError("no")

    with pytest.raises(KeyError):
        cache_or_load_file(tmp_path / "b", fail, None)
    with pytest.raises(FileNotFoundError, match="expected the creator to write the file that it was given, b"):
        cache_or_load_file(tmp_path / "b", lambda path: 1, None)
    assert sorted(os.listdir(tmp_path)) == ["new"]


def test_a_lock_that_its_holder_has_removed_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    lock, inodes = tmp_path / "x.lock", []

    def flock(file, _):
        inodes.append(os.fstat(file.fileno()).st_ino)
        if len(inodes) == 1:  # the process that had it is done
            os.remove(lock)
            (tmp_path / "keeps-the-inode").touch()

    monkeypatch.setattr(download.fcntl, "flock", flock)
    with download._alone_with(str(tmp_path / "x")):
        assert os.stat(lock).st_ino == inodes[-1] and len(inodes) == 2
    assert not lock.exists()


PROCESS = """
import os, sys, time
from dbrdist.dataset import cache_or_load_file
folder, number = sys.argv[1], sys.argv[2]

def create(path):
    with open(os.path.join(folder, "created"), "a") as f:
        f.write("x")
    open(path, "w").write("from one of them")
    time.sleep(0.2)
    return "from one of them"

open(os.path.join(folder, "ready" + number), "w").close()
while sum(os.path.exists(os.path.join(folder, f"ready{k}")) for k in range(3)) < 3:
    time.sleep(0.01)
print(cache_or_load_file(os.path.join(folder, "file"), create, lambda path: open(path).read()))
"""


@pytest.mark.programs
def test_several_processes_make_a_file_once(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path), str(k)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for k in range(3)
    ]
    try:
        assert [p.communicate(timeout=100)[0] for p in processes] == ["from one of them\n"] * 3
    finally:
        for p in processes:
            p.kill()
    assert (tmp_path / "created").read_text() == "x"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["created", "file", "ready0", "ready1", "ready2"]


def test_the_root(monkeypatch, tmp_path):
    set_dataset_root(tmp_path / "a")
    assert get_dataset_root() == str(tmp_path / "a")
    assert get_dataset_directory("x/y", create_directory=False) == str(tmp_path / "a/x/y")
    assert not os.path.exists(tmp_path / "a")
    assert os.path.isdir(get_dataset_directory("x/y")) and os.path.isdir(get_dataset_directory("x/y"))
    monkeypatch.setattr(dataset_root, "_root", None)
    monkeypatch.setenv("CHAINER_DATASET_ROOT", str(tmp_path / "b"))
    assert get_dataset_root() == str(tmp_path / "b")
    monkeypatch.delenv("CHAINER_DATASET_ROOT")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert get_dataset_root() == str(tmp_path / ".chainer/dataset")
