"""The live view on a terminal, seen through a pseudo-terminal."""

import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
from dbrdist_launch.launcher.ranks import Rank
from dbrdist_launch.launcher.view import open_view, table
from support import PROGRAMS, assert_nothing_left, environment


def test_table_shows_progress_throughput_and_last_line():
    from rich.console import Console

    rank = Rank(0, "a", channel=None)
    rank.take_beat({"state": "S", "count": 3, "paused": False, "step": 7, "age": 0.1,
                    "fields": {"total": 9, "items_per_second": 12.5, "loss": 0.25}}, time.monotonic())  # fmt: skip
    rank.take_lines("out", ["epoch 1 done", " "])
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(table({0: rank}, 5.0))
        text = console.export_text()
    for word in ("7/9", "12.5", "loss=0.25", "epoch 1 done", "running"):
        assert word in text


def test_view_without_rich_is_left_out(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert open_view(required=False) is None


@pytest.mark.mpiexec
def test_terminal_gets_the_view_and_whole_lines(tmp_path):
    control, terminal = pty.openpty()
    words = [sys.executable, "-m", "dbrdist_launch", "-n", "2", "python", str(PROGRAMS / "counting.py")]
    env = environment("view", TEST_FOLDER=str(tmp_path), TEST_STEPS="120", TERM="xterm", COLUMNS="110", LINES="30")
    process = subprocess.Popen(words, stdin=terminal, stdout=terminal, stderr=terminal, env=env)
    os.close(terminal)
    seen = b""
    until = time.monotonic() + 40
    while time.monotonic() < until:
        if select.select([control], [], [], 0.2)[0]:
            try:
                seen += os.read(control, 65536)
            except OSError:  # the other end is closed
                break
        elif process.poll() is not None:
            break
    assert process.wait(5) == 0
    os.close(control)
    assert_nothing_left("view")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    assert "[0 " in text and "done with 2" in text
    assert "items/s" in text and "/120" in text
