"""The live view on a terminal, seen through a pseudo-terminal."""

import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
from dbrdist_launch.launcher.judgement.ranks import Rank
from dbrdist_launch.launcher.streams import view
from dbrdist_launch.launcher.streams.view import table
from dbrdist_launch.messages import Beat
from support import PROGRAMS, assert_nothing_left, environment

pytestmark = pytest.mark.slow


def ranks_with_much_to_tell(count=1):
    found = {}
    for number in range(count):
        rank = found[number] = Rank(number, "a", channel=None)
        fields = {"total": 9, "items_per_second": 12.5, "loss": 0.25, "message": "x" * 100}
        rank.take_beat(Beat("S", False, 3, 7, 0.1, False, fields), time.monotonic())
        rank.take_output("out", b"epoch 1 done\n10%\r20% \x1b[31mred\n  \n")
    return found


@pytest.mark.parametrize("width", [40, 62, 80, 120])
def test_table_shows_progress_throughput_and_last_line(width):
    lines = table(ranks_with_much_to_tell(), 5.0, width)
    text = "\n".join(lines)
    assert all(len(line) < width and line.isprintable() for line in lines)
    for word in ("7/9", "12.5", "running", "0.1 s") if width > 40 else ("7/9",):
        assert word in text
    if width > 40:
        assert width < 80 or ("loss" in text and "20%" in text)
        assert lines[1].split()[-3:] == ["fields", "last", "line"]


def test_table_of_many_ranks_is_cut():
    lines = table(ranks_with_much_to_tell(100), 5.0, 80, 100)
    assert len(lines) == 35 and lines[-1] == "and 68 more"


def test_nobody_is_left_out_where_all_fit():
    assert not table(ranks_with_much_to_tell(32), 5.0, 80, 100)[-1].startswith("and ")
    assert table(ranks_with_much_to_tell(33), 5.0, 80, 100)[-1] == "and 1 more"


def test_the_table_letter_by_letter(monkeypatch):
    """Fields have a third of the room beside the fixed columns, 45 characters here; the last line has the rest."""
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    first, second = Rank(0, "a", None), Rank(11, "host", None)
    fields = {"total": 9, "items_per_second": 12.54, "loss": 0.25, "n": "x\ty"}
    first.take_beat(Beat("S", False, 3, 7, 0.125, False, fields), 100.0)
    first.take_output("out", b"abcdefghijklmnopqrstuvwxyz\n")
    second.take_beat(Beat("T", False, 3, -1, 0.125, False, {"items_per_second": "fast"}), 98.0)
    assert table({11: second, 0: first}, 5.4, 80) == [
        "--- 2 ranks, 5 s",
        "rank  host  state    step  items/s  beat   fields       last line",
        "0     a     running  7/9   12.5     0.1 s  loss=0.25 ~  abcdefghijklmnopqrstuv~",
        "11    host  stopped                 2.1 s",
    ]
    narrow = table({0: first}, 5.4, 60)
    assert narrow[2] == "0     a     running  7/9   12.5     0.1 s  loss=~  abcdefgh"
    wide = table({0: first}, 5.4, 200)
    assert wide[2] == "0     a     running  7/9   12.5     0.1 s  loss=0.25 n=x y  abcdefghijklmnopqrstuvwxyz"
    monkeypatch.setenv("COLUMNS", "60")
    assert table({0: first}, 5.4) == narrow


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
    assert process.wait(60) == 0
    os.close(control)
    assert_nothing_left("view")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    assert "[0 " in text and "done with 2" in text
    assert "items/s" in text and "/120" in text


@pytest.mark.mpiexec
def test_the_view_costs_no_time_however_much_is_written():
    """Each line once drew the table anew: 12,000 lines took a minute, and the job was killed for its silence."""
    program = "for i in range(20000): print('line', i, 'x' * 40)"
    control, terminal = pty.openpty()
    words = [sys.executable, "-m", "dbrdist_launch", "-n", "2", "python", "-c", program]
    env = environment("much", TERM="xterm", COLUMNS="80", LINES="30")
    process = subprocess.Popen(words, stdin=terminal, stdout=terminal, stderr=terminal, env=env)
    os.close(terminal)
    seen = bytearray()
    while True:
        try:
            data = os.read(control, 1 << 16)
        except OSError:
            break
        if not data:
            break
        seen += data
    assert process.wait(60) == 0
    os.close(control)
    text = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", bytes(seen))
    for rank in range(2):
        found = re.findall(rb"^\[%d \S+\] line (\d+) x{40}\r$" % rank, text, re.M)
        assert found == [b"%d" % n for n in range(20000)]


@pytest.mark.parametrize("height", [6, 10, 24, 60])
def test_the_table_fits_the_height_of_the_terminal(height):
    lines = table(ranks_with_much_to_tell(40), 5.0, 80, height)
    assert len(lines) < height and lines[0].startswith("--- 40 ranks") and lines[-1].endswith("more")


def test_wide_letters_take_two_columns_and_accents_none():
    assert view.columns("a漢字é") == 6 and view.columns("e\u0301") == 1
    ranks = ranks_with_much_to_tell(2)
    for rank in ranks.values():
        rank.take_output("out", "漢字".encode() * 200 + b"\n")
    for width in (60, 61, 80, 200):
        assert all(view.columns(line) < width for line in table(ranks, 5.0, width, 24))


@pytest.mark.parametrize(("term", "able"), [("xterm", True), ("dumb", False), ("", False), (None, False)])
def test_a_terminal_that_cannot_move_its_cursor_gets_no_view(term, able):
    assert view.is_able({} if term is None else {"TERM": term}) is able


@pytest.mark.parametrize(
    ("step", "fields", "shown"),
    [(-1, {}, ""), (-1, {"total": 9}, ""), (0, {}, "0"), (0, {"total": 9}, "0/9"), (7, {"total": 0}, "7")],
)
def test_the_step_of_a_rank_and_how_many_there_are(step, fields, shown):
    rank = Rank(0, "a", None, step=step, fields=fields)
    assert view._row(rank, 5.0) == ("0", "a", "running", shown, "", "", "", "")


def test_a_terminal_of_few_lines_keeps_one_for_the_cursor():
    *begin, row, more = table(ranks_with_much_to_tell(40), 5.0, 80, 5)
    assert begin[0].startswith("--- 40 ranks") and row.startswith("0 ") and more == "and 39 more"
    for height in (1, 2, 3, 4):
        assert table(ranks_with_much_to_tell(40), 5.0, 80, height) == [*begin, row, more][: height - 1]
