"""Tests of dbrdist.cli.output.console."""

from __future__ import annotations

import sys
from pathlib import Path

from dbrdist.cli.output.console import Console
from tests.each import each


def test_a_thousand_lines_wait_for_the_log(tmp_path):
    console = Console()
    for number in range(1001):
        console.log(f"line {number}")
    console.open(str(tmp_path / "log.txt"), "heading")
    console.close()
    found = (tmp_path / "log.txt").read_text().splitlines()
    assert len(found) == 1001 and found[0].endswith("  heading") and found[-1].endswith("  line 999")


class Stream:
    """A standard output that fails with an error at a write or at a flush."""

    def __init__(self, at="", error=None):
        self.at, self.error, self.done = at, error, []

    def write(self, text):
        self.done.append(text)
        if self.at == "write":
            raise self.error

    def flush(self):
        self.done.append("flush")
        if self.at == "flush":
            raise self.error

    def fileno(self):
        raise ValueError("closed")


@each(**{"at, error": [("", None), ("write", BrokenPipeError()), ("flush", OSError()), ("write", ValueError())]})
def test_what_is_said_goes_out_at_once_and_a_reader_that_is_gone_ends_nothing(monkeypatch, at, error):
    stream = Stream(at, error)
    monkeypatch.setattr(sys, "stdout", stream)
    Console().write("words")
    assert stream.done == ["words", "flush"][: 1 if at == "write" else 2]


def test_what_a_run_prints_into_a_pipe_has_whole_lines(run):
    place = "a-folder-of-a-run/" * 3 + "with-a-name"
    for words in (["--dry-run"], [], ["--resume", "iterations=4"]):
        code, out, err = run("run.yaml", f"out={place}", *words)
        assert code == 0, err
        assert out.count("free here") == 1 and "\n  here" not in out
    written = [line[21:] for line in Path(place, "log.txt").read_text().splitlines()]
    assert any(line.startswith("finished: ") and line.endswith(place) for line in written)
