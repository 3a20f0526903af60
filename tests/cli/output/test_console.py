"""Tests of dbrdist.cli.output.console."""

from __future__ import annotations

import sys
import time
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


def test_all_that_goes_to_the_streams_and_to_the_file(tmp_path, capfd, monkeypatch):
    """What was said before there was a file comes first; half a line waits for its end, an empty one is left out."""
    monkeypatch.setattr(time, "strftime", lambda form: f"[{form}]")
    console, path = Console(), tmp_path / "log.txt"
    console.say("early")
    console.open(str(path), "heading")
    assert path.read_text() == "[%Y-%m-%d %H:%M:%S]  heading\n[%Y-%m-%d %H:%M:%S]  early\n"
    assert console.write("half a ") == 7
    console.warn("look")
    console.log("for the file")
    console.write("line\n\nanother\n   \nrest")
    console.say("caf\udce9")
    written = path.read_text().replace("[%Y-%m-%d %H:%M:%S]  ", "").splitlines()
    assert written[2:] == ["warning: look", "for the file", "half a line", "another", "caf\\udce9"]
    console.close()
    console.close()
    console.log("after the end")
    assert len(path.read_text().splitlines()) == 7
    out, err = capfd.readouterr()
    assert out.encode(errors="backslashreplace").startswith(b"early\nhalf a line\n\nanother\n   \nrestcaf")
    assert err == "warning: look\n"
    assert console.isatty() is False and console.flush() is None
