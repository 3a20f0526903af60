"""Tests of dbrdist.core.files.standard_streams."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import types

import pytest

from dbrdist.core.files import standard_streams
from tests.each import each

TRAINING = """\
import dbrdist
import dbrdist.links as L
from dbrdist import datasets, iterators, optimizers, training
from dbrdist.function_hooks import PrintHook
from dbrdist.training import extensions, triggers

train, test = datasets.get_digits()
model = L.Classifier(L.Linear(64, 10))
optimizer = optimizers.SGD(lr=0.01).setup(model)
updater = training.StandardUpdater(iterators.SerialIterator(train, 500), optimizer)
stop = triggers.EarlyStoppingTrigger((1, "iteration"), "main/loss", 9, "max", verbose=True, max_trigger=(1, "epoch"))
trainer = training.Trainer(updater, stop, out={out!r})
tests = iterators.SerialIterator(test, 100, repeat=False, shuffle=False)
trainer.extend(extensions.Evaluator(tests, model, progress_bar=True), trigger=(1, "iteration"))
trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
trainer.extend(extensions.PrintReport(["iteration", "main/loss"]))
trainer.extend(extensions.ProgressBar(update_interval=1))
with PrintHook():
    trainer.run()
open({done!r}, "w").close()
"""


@pytest.mark.programs
@each(streams=[">&-", ">/dev/full", "2>/dev/full >&2", ">&- 2>&-", "| head -c 1"])
def test_a_training_program_ends_whatever_its_streams_take(tmp_path, streams):
    (tmp_path / "train.py").write_text(TRAINING.format(out=str(tmp_path), done=str(tmp_path / "done")))
    (tmp_path / "done").unlink(missing_ok=True)
    words = f"set -o pipefail; {sys.executable} train.py {streams}"
    path = os.pathsep.join([os.getcwd(), os.path.join(os.getcwd(), "launch"), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        ["bash", "-c", words], env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, capture_output=True, timeout=100
    )
    assert found.returncode == 0, found
    assert (tmp_path / "done").exists()


def test_what_an_encoding_lacks_is_escaped(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    assert standard_streams.stdout.write("é漢\udce9\n") == 4
    assert raw.getvalue() == b"\xe9\\u6f22\\udce9\n" and standard_streams.stdout.encoding == "latin-1"


def test_a_stream_that_is_not_there(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert standard_streams.stderr.write("x") == 1 and not standard_streams.stderr.isatty()
    with pytest.raises(OSError, match=r"sys\.stderr is None"):
        standard_streams.stderr.fileno()


class Own:
    """A program's own stream, without flush."""

    def __init__(self):
        self.words = []

    def write(self, words):
        self.words.append(words)


def test_a_stream_of_the_program(monkeypatch):
    own = Own()
    monkeypatch.setattr(sys, "stdout", own)
    standard_streams.stdout.write("a")
    assert own.words == ["a"] and not standard_streams.stdout.isatty()


class Full(io.StringIO):
    """A file of the program's on a full disk."""

    def write(self, words):
        raise OSError(28, "No space left on device")

    def fileno(self):
        return 99


SLOWLY_READ = """\
import os, sys
from dbrdist.core.files.standard_streams import stdout
os.set_blocking(1, False)
for i in range(500):
    stdout.write(f"{i}{'.' * 1000}\\n")
stdout.write("." * 300_000 + "\\n")
sys.stdout.write("the end\\n")
"""


@pytest.mark.programs
@each(unbuffered=["", "1"])
def test_a_pipe_that_does_not_block_loses_nothing(unbuffered):
    """Another program that shares a terminal or a pipe may have set it so."""
    path = os.pathsep.join([os.getcwd(), os.path.join(os.getcwd(), "launch"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen([sys.executable, "-c", SLOWLY_READ], stdout=subprocess.PIPE, env=environment) as child:
        first = os.read(child.stdout.fileno(), 100)  # it has begun
        lines = (first + child.stdout.read()).decode().split("\n")
    assert [line.strip(".") for line in lines] == [*map(str, range(500)), "", "the end", ""]
    assert len(lines[500]) == 300_000 and child.returncode == 0


def test_a_full_disk_is_told_once_and_a_file_of_the_program_stays(monkeypatch):
    told = io.StringIO()
    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr(sys, "stderr", told)
    monkeypatch.setattr(standard_streams, "os", None)  # no file descriptor is touched
    stream = standard_streams.StandardStream("stdout")
    for _ in range(3):
        stream.write("words")
    assert told.getvalue().count("the standard output cannot be written") == 1


@each(number=[1, 2, 9])
def test_what_follows_a_full_disk_goes_nowhere(monkeypatch, number):
    """Under the numbers of the standard streams alone: another file is the program's."""
    stream, happened = Full(), []
    stream.fileno = lambda: number
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    calls = types.SimpleNamespace(
        devnull="null", O_WRONLY=1, get_blocking=lambda descriptor: True,
        open=lambda *given: happened.append(("open", *given)) or 77,
        dup2=lambda *given: happened.append(("dup2", *given)), close=lambda *given: happened.append(("close", *given)),
    )  # fmt: skip
    monkeypatch.setattr(standard_streams, "os", calls)
    standard_streams.StandardStream("stdout").write("words")
    dropped = [("open", "null", 1), ("dup2", 77, number), ("close", 77)]
    assert happened == (dropped if number < 3 else [])


@each(error=[OSError(28, "No space left on device"), ValueError("closed"), None])
def test_what_cannot_be_passed_on_is_dropped(monkeypatch, error):
    dropped, flushed = [], []

    class Stream(io.StringIO):
        def flush(self):
            flushed.append(1)
            if error is not None:
                raise error

    monkeypatch.setattr(sys, "stdout", Stream())
    stream = standard_streams.StandardStream("stdout")
    monkeypatch.setattr(stream, "_drop", dropped.append)
    stream.flush()
    assert flushed == [1] and dropped == ([] if error is None else [error])
