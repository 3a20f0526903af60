"""Tests of dbrdist.cli.output.words."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import dbrdist
from dbrdist.cli.output import console, folder, words
from dbrdist.cli.output.console import Console
from dbrdist.cli.output.warned import in_words
from dbrdist.cli.output.words import folded
from dbrdist.core.files import serializer
from dbrdist.training.extensions import snapshots
from tests.cli.cli_helpers import OWN_MODULE
from tests.each import each


@each(n=[words.WIDTH - 1, words.WIDTH, words.WIDTH + 1])
def test_lines_are_folded_beyond_a_width(n):
    line = "  " + "ab " * 20
    line += "c" * (n - len(line))
    folded = words.folded(line)
    assert (folded == line) == (n <= words.WIDTH)
    if n > words.WIDTH:
        first, second = folded.splitlines()
        assert len(first) <= words.WIDTH and second.startswith("    c")


@each(line=["a  b ", "ab\tc", "\tabcd", "     "])
def test_lines_that_have_room_stay_as_they_are(line):
    """Also what folding would change: tabs and spaces at the end."""
    for width in (len(line), len(line) + 1, None):
        assert words.folded(line, width) == line
    assert words.folded(line, len(line) - 1) != line


def test_what_errors_say():
    for error, said in (
        (OSError(2, "no such file", "x"), "x: no such file"), (OSError(2, "no such file"), "no such file"),
        (OSError("[Errno 5] words"), "words"), (KeyError("key"), "key"), (ValueError("v"), "v"),
    ):  # fmt: skip
        assert words.said(error) == said
    assert [words.counted(n, "rank") for n in (0, 1, "1", 2, np.int64(1442), [1])] == [
        "0 ranks", "1 rank", "1 rank", "2 ranks", "1,442 ranks", "[1] ranks",
    ]  # fmt: skip
    assert folder._reason(OSError(2, "no")) == "no" and folder._reason(OSError("w")) == "w" == folder._reason(
        ValueError("w")
    )


@pytest.fixture
def own_module(folder):
    (folder / "ends_own.py").write_text(OWN_MODULE)
    return folder


def test_folded(capsys, monkeypatch):
    line = "  a: " + "word " * 40
    assert all(len(part) <= 80 for part in folded(line).splitlines())
    assert folded(line).split() == line.split()
    assert folded("x" * 100) == "x" * 100 and folded("a  b") == "a  b"
    for width, between in ((None, " "), (80, "\n  "), (200, " ")):
        monkeypatch.setattr(console, "columns_of", lambda stream, width=width: width)
        Console().say("y" * 50 + " " + "z" * 50)
        assert capsys.readouterr().out == "y" * 50 + between + "z" * 50 + "\n"


def test_a_warning_in_words():
    inner = str(Path(dbrdist.__file__).parent / "core" / "link.py")
    assert in_words(UserWarning("two\n  lines"), UserWarning, inner, 3) == "two lines"
    assert in_words("odd", FutureWarning, "/else/where.py", 3) == "odd (FutureWarning at /else/where.py:3)"


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("a small file system needs root's right to mount one")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("log", ["1 iteration", "1 epoch"], ids=["the log is what fails", "the snapshot is"])
def test_a_disk_that_is_full_in_the_middle(run, own_module, small_disk, log):
    path = str(small_disk / "filler")
    ext = f"[{{name: 'ends_own:fill', args: {{at: 4, path: {path}}}, every: 1 iteration}}]"
    words = ["run.yaml", f"out={small_disk}/r", f"log.every={log}", "snapshot.every=2 iterations", "iterations=9"]
    code, _, err = run(*words, f"extensions={ext}")
    assert code == 2
    assert "No space left on device" in err and "unharmed" in err
    assert "Errno" not in err and "Traceback" not in err
    (left,) = Path(small_disk, "r").glob("snapshot_iter_*")
    assert left.name == "snapshot_iter_2" and snapshots.is_whole(str(left))
    assert json.loads(Path(small_disk, "r", "summary.json").read_text())["status"] == "failed"
    os.remove(path)
    code, _, err = run(*words, "--resume")
    assert code == 0, err
    assert run(*[w for w in words if "out=" not in w], "out=straight")[0] == 0
    one, other = (dict(np.load(f"{place}/snapshot_iter_9")) for place in (f"{small_disk}/r", "straight"))
    weights = [key for key in one if key.startswith("updater/model")]
    assert weights and all(np.array_equal(one[key], other[key]) for key in weights)


@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "log.jsonl"])
def test_a_disk_that_is_full_says_so_without_a_number(run, monkeypatch, name):
    """Simulated: the file cannot be flushed."""
    flush = serializer._flush

    def full(path):
        if f"{name}.tmp-" in str(path):
            raise OSError(28, "No space left on device")
        flush(path)

    monkeypatch.setattr(serializer, "_flush", full)
    code, _, err = run("run.yaml")
    assert code == (2 if name == "config.yaml" else code)
    assert "Errno" not in err and "Traceback" not in err


def test_an_error_of_the_system_is_said_without_its_number():
    assert words.said(OSError(28, "No space left on device")) == "No space left on device"
    assert words.said(FileNotFoundError(2, "No such file or directory", "x")) == "x: No such file or directory"
