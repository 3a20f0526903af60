"""Tests of dbrdist.training.extensions.progress_bar."""

from __future__ import annotations

import io
import os
import pty
import sys
import threading
from types import SimpleNamespace

import pytest

from dbrdist.core.files import standard_streams
from dbrdist.training import extensions, triggers
from dbrdist.training.extensions import progress_bar
from tests.each import each
from tests.training.training_helpers import Clock, make_trainer


@each(total=[(4, "iteration"), (2, "epoch"), None])
def test_progress_in_either_unit(total):
    out = io.StringIO()
    bar = extensions.ProgressBar(total, 1, out=out, live=False, min_seconds=0.0, details=lambda trainer: "more")
    clock = Clock(2.0)
    clock.stop_trigger = None
    bar.initialize(clock)
    bar(clock)
    for _ in range(3):
        bar(clock.tick())
    lines = out.getvalue().splitlines()
    of = {"iteration": ("", " of 4"), "epoch": (" of 2", ""), "": ("", "")}[total[1] if total else ""]
    assert len(lines) == 4 and [line.split(" steps/s")[0].rsplit(", ", 1)[0] for line in lines] == [
        f"epoch {n / 2:.2f}{of[0]}, step {n}{of[1]}" for n in range(4)
    ]
    assert all(", more" in line for line in lines)
    assert [line.endswith(" left") for line in lines] == [False] + [total is not None] * 3


def test_progress_takes_its_length_from_the_trigger_and_writes_now_and_then():
    out = io.StringIO()
    bar = extensions.ProgressBar(None, 2, out=out, live=False, min_seconds=0.0)
    clock = Clock(2.0)
    clock.stop_trigger = triggers.IntervalTrigger(3, "epoch")
    bar.initialize(clock)
    for _ in range(4):
        bar(clock.tick())
    assert [line.split(",")[0] for line in out.getvalue().splitlines()] == ["epoch 1.00 of 3", "epoch 2.00 of 3"]
    seldom = extensions.ProgressBar((3, "epoch"), 1, out=out, live=False, min_seconds=1e6)
    seldom.initialize(clock)
    seldom(clock.tick())
    assert len(out.getvalue().splitlines()) == 2


def test_a_bar_is_drawn_where_there_is_a_terminal(tmp_path):
    pytest.importorskip("rich")
    for is_terminal in (False, True):
        out = io.StringIO()
        out.isatty = lambda is_terminal=is_terminal: is_terminal
        trainer = make_trainer(str(tmp_path), (2, "epoch"))
        bar = extensions.ProgressBar(update_interval=1, out=out)
        trainer.extend(bar)
        seen = []
        trainer.extend(
            lambda t, bar=bar, seen=seen: seen.append(bar._bar is not None), name="see", trigger=(1, "epoch")
        )
        trainer.run()
        assert seen == [is_terminal] * 2
        assert ("\u2501" in out.getvalue() or "\u2588" in out.getvalue() or "\r" in out.getvalue()) == is_terminal


@pytest.mark.parametrize(("unit", "length", "left"), [("iteration", 90, "0:30"), ("epoch", 5, "0:10")])
def test_speed_and_remaining_time_count_from_the_start_of_the_run(monkeypatch, unit, length, left):
    """A resumed run starts at its 10th step: 20 steps and 2 epochs in 10 s."""
    clock = [100.0]
    monkeypatch.setattr(progress_bar, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    updater = SimpleNamespace(iteration=10, epoch_detail=1.0)
    trainer = SimpleNamespace(updater=updater, stop_trigger=None)
    out = io.StringIO()
    bar = extensions.ProgressBar((length, unit), update_interval=10, out=out, live=False, min_seconds=4.0)
    bar.initialize(trainer)
    for iteration, seconds in ((20, 103.0), (29, 109.0), (30, 110.0), (40, 113.9)):  # the third alone is said
        updater.iteration, updater.epoch_detail, clock[0] = iteration, iteration / 10, seconds
        bar(trainer)
    of_iterations, of_epochs = (f" of {length}", "") if unit == "iteration" else ("", f" of {length}")
    assert out.getvalue() == f"epoch 3.00{of_epochs}, step 30{of_iterations}, 2 steps/s, {left} left\n"


def test_progress_in_plain_lines(tmp_path):
    out = io.StringIO()
    trainer = make_trainer(tmp_path, (2, "epoch"), batch=5)
    trainer.extend(extensions.ProgressBar(update_interval=1, out=out))
    trainer.run()
    written = out.getvalue().splitlines()
    assert len(written) == 4
    assert written[-1].startswith("epoch 2.00 of 2, step 4, ")


def test_progress_on_a_terminal(tmp_path):
    out = io.StringIO()
    trainer = make_trainer(tmp_path, (4, "iteration"))
    trainer.extend(extensions.ProgressBar(update_interval=1, out=out, live=True))
    trainer.run()
    assert "step 4 of 4" in out.getvalue()


@each(words=["words above the bar\n", "half a line [/bold]", "[/red] :smile: 12 " * 80 + "\n"])
def test_a_bar_on_the_terminal_that_is_the_standard_output(tmp_path, monkeypatch, words):
    """The bar puts a stream of its own in the place of sys.stdout, and must not write to that one itself.

    Brackets in words are no markup, and long words no lines of pieces.
    """
    reader, writer = pty.openpty()
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.extend(pieces(reader)))
    thread.start()
    with open(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "2000")
        trainer = make_trainer(tmp_path, stop=(3, "iteration"))
        trainer.extend(extensions.ProgressBar(update_interval=1))
        trainer.extend(lambda _: standard_streams.stdout.write(words), trigger=(1, "iteration"))
        trainer.run()
        assert sys.stdout is terminal
    thread.join(10)
    os.close(reader)
    text = b"".join(found).decode()
    assert text.count(words.strip()) == 3 and "epoch" in text


def pieces(descriptor):
    """What arrives at a terminal until nobody has it open."""
    while True:
        try:
            piece = os.read(descriptor, 4096)
        except OSError:
            return
        if not piece:
            return
        yield piece


def on_terminal(monkeypatch, tmp_path, given, stdout, stderr):
    """Run three steps under a bar at a stream, each of which prints to both; what came to the terminal.

    `given(terminal)` is the bar's stream; the standard streams are the terminal where they are None, else files.
    """
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "2000")
    reader, writer = pty.openpty()
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.extend(pieces(reader)))
    thread.start()
    with open(writer, "w") as terminal, open(os.dup(writer), "w") as other:
        monkeypatch.setattr(sys, "stdout", stdout or terminal)
        monkeypatch.setattr(sys, "stderr", stderr or other)

        def speak(_):
            print("to stdout")
            print("to stderr", file=sys.stderr)
            for stream in (standard_streams.stdout, standard_streams.stderr):
                stream.write("words\n")

        trainer = make_trainer(str(tmp_path), stop=(3, "iteration"))
        trainer.extend(extensions.ProgressBar(update_interval=1, out=given(terminal), live=True))
        trainer.extend(speak, trigger=(1, "iteration"))
        trainer.run()
        assert (sys.stdout, sys.stderr) == (stdout or terminal, stderr or other)
    thread.join(10)
    os.close(reader)
    return b"".join(found).decode()


class Tee:
    """A program's own stream, which leads back to the standard output of the moment."""

    encoding = "utf-8"

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        return getattr(getattr(sys, self._name), name)

    def write(self, words):
        return getattr(sys, self._name).write(words)


@pytest.mark.slow
@each(
    given=[
        lambda terminal: None, lambda terminal: terminal, lambda terminal: standard_streams.stdout,
        lambda terminal: standard_streams.stderr, lambda terminal: sys.stderr, lambda terminal: sys.stdout,
        lambda terminal: Tee("stdout"), lambda terminal: Tee("stderr"),
    ],
)  # fmt: skip
def test_a_bar_at_any_stream_that_leads_to_the_terminal(tmp_path, monkeypatch, given):
    """At the stream that the bar itself had put a proxy before, it wrote to itself without an end."""
    text = on_terminal(monkeypatch, tmp_path, given, None, None)
    assert (text.count("to stdout"), text.count("to stderr"), text.count("words")) == (3, 3, 6), text
    assert "step 3 of 3" in text


@each(name=["stdout", "stderr"])
def test_words_that_go_to_a_file_stay_there_while_a_bar_is_on_the_terminal(tmp_path, monkeypatch, name):
    """`program > log`, or `2> errors`, from a terminal where the other stream has the bar."""
    with open(tmp_path / "log", "w+") as log:
        files = (log, None) if name == "stdout" else (None, log)
        text = on_terminal(monkeypatch, tmp_path, lambda _: sys.stderr if name == "stdout" else None, *files)
        log.seek(0)
        assert log.read() == f"to {name}\nwords\n" * 3
    assert f"to {name}" not in text and text.count("words") == 3 and "step 3 of 3" in text


@each(**{"columns, width": [(60, 60), (81, 81), (82, 71), (100, 71), (122, 71), (200, 149)]})
def test_words_leave_the_bar_its_room(columns, width):
    """72 columns are for words; a bar has 10 at least and 50 at most, and a space before the words."""
    pytest.importorskip("rich")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        bar, clock = extensions.ProgressBar((4, "iteration"), out=io.StringIO(), live=True), Clock()
        bar.initialize(clock)
        bar.finalize()
    assert bar._width == width


def test_words_above_a_bar_stay_as_they_are(monkeypatch):
    """No `[bold]`, no `:smile:` and no number in them is anything but itself."""
    console = pytest.importorskip("rich.console")
    made, out = [], io.StringIO()

    class Noted(console.Console):
        def __init__(self, **words):
            made.append(words)
            super().__init__(**words)

    monkeypatch.setattr(console, "Console", Noted)
    bar, clock = extensions.ProgressBar((4, "iteration"), out=out, live=True), Clock()
    bar.initialize(clock)
    bar.finalize()
    assert made[0] == {"file": out, "markup": False, "emoji": False, "highlight": False}
