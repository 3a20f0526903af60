"""Tests of dbrdist.cli.running.batch_finder."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path

import pytest

from dbrdist.cli.builders import memory
from dbrdist.cli.configuration.finders import BatchFinder
from dbrdist.cli.running import batch_finder
from dbrdist.cli.running.batch_finder import TimedBatch, sizes, suggestion, verdict
from dbrdist.training import StandardUpdater
from tests.each import each


def steps(*speeds, first=8):
    """Measurements of batches that double, with these speeds."""
    return [TimedBatch(first * 2**k, first * 2**k / speed, speed) for k, speed in enumerate(speeds)]


def read(path):
    with open(path, newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def test_batches_double_from_the_lowest_as_far_as_there_are_examples():
    assert list(sizes(BatchFinder(), 1, 100)) == [8, 16, 32, 64]
    assert list(sizes(BatchFinder(lowest=1, highest=9), 3, 100)) == [3, 6]  # one example per rank at least
    assert list(sizes(BatchFinder(lowest=101), 1, 100)) == []


def test_the_suggestion_is_the_smallest_batch_that_is_nearly_the_fastest():
    assert suggestion(steps(100, 180, 196, 200, 190)).batch == 32
    assert suggestion(steps(100, 90)).batch == 8


@each(
    case=[
        (steps(100, 180, 196, 200), None, 1000, ["32 is the smallest"]),
        (steps(100, 200), None, 1000, ["16 is the smallest", "try a higher batch_finder.highest"]),
        (steps(100, 200), None, 20, ["16 is the smallest", "the training set has 20 examples"]),
        (steps(100, 90), None, 1000, ["8 is the smallest", "try a lower batch_finder.lowest"]),
        (steps(100, 200), "too large", 1000, ["batch-size finder: too large", "16 is the smallest"]),
        (steps(100), None, 1000, ["8 is the smallest"]),  # one batch says nothing about larger or smaller ones
        ([], "too large", 1000, ["no batch was tried: too large"]),
    ]
)
def test_the_last_lines_say_what_was_found_and_whether_it_is_at_the_edge(case):
    found, reason, num_examples, expected = case
    lines = verdict(found, reason, BatchFinder(), num_examples)
    assert len(lines) == len(expected)
    assert all(words in line for words, line in zip(expected, lines)), lines


def test_a_step_that_needs_more_memory_than_there_is_is_not_tried(monkeypatch):
    need = memory.Need(1e6, 1e6)
    monkeypatch.setattr(memory, "free_bytes", lambda: 100_000_000)
    assert batch_finder._lack(need, 44, 2) is None
    words = batch_finder._lack(need, 45, 2)
    assert words == "a step with 45 examples per rank needs about 92 MB, and 100 MB is free"
    monkeypatch.setattr(memory, "free_bytes", lambda: None)
    assert batch_finder._lack(need, 10**9, 2) is None and batch_finder._lack(None, 10**9, 2) is None


@pytest.mark.slow
def test_growing_batches_are_tried_in_place_of_the_run(run):
    code, out, err = run(
        "run.yaml", "model=mlp", "transforms.train=[]", "batch_finder={lowest: 4, highest: 17, steps: 2}"
    )
    assert code == 0, err
    rows = read("result/batch_finder.csv")
    assert [row["batch"] for row in rows] == [4, 8, 16]
    for row in rows:
        assert row["examples_per_second"] * row["seconds_per_step"] == pytest.approx(row["batch"])
    best = suggestion([TimedBatch(int(r["batch"]), r["seconds_per_step"], r["examples_per_second"]) for r in rows])
    assert f"begin with batch={best.batch}\n" in out and "\nfinished in " in out
    summary = json.loads(Path("result/summary.json").read_text())
    assert (summary["status"], summary["iterations"]) == ("finished", 0)
    assert not [name for name in os.listdir("result") if name.startswith("snapshot")]


@pytest.mark.slow
@each(
    case=[("{lowest: 10, highest: 5}", "expected at least lowest, 10, got 5"), ("{steps: 0}", "batch_finder.steps"),
          ("{lowest: 0}", "batch_finder.lowest"), ("true", "batch_finder"),
          ("{lowest: 100000, highest: 200000}", "no batch of 100,000 to 200,000 examples fits")]
)  # fmt: skip
def test_what_makes_no_test_is_refused(run, case):
    code, _, err = run("run.yaml", f"batch_finder={case[0]}")
    assert code == 2 and case[1] in err


@pytest.mark.slow
@each(other=["lr_finder={}", "batch={virtual_workers: 2, per_worker: 2}"])
def test_what_it_excludes_is_named(run, other):
    code, _, err = run("run.yaml", "batch_finder={}", other)
    assert code == 2 and "batch_finder: " in err


@pytest.mark.slow
def test_memory_that_runs_out_in_a_step_ends_the_test(run, monkeypatch):
    def update(self):
        if self.get_iterator("main").batch_size > 8:
            raise MemoryError
        return original(self)

    original = StandardUpdater.update
    monkeypatch.setattr(StandardUpdater, "update", update)
    code, out, err = run("run.yaml", "model=mlp", "transforms.train=[]", "batch_finder={lowest: 4, steps: 1}")
    assert code == 0, err
    assert "a step with 16 examples needs more memory than there is" in out
    assert [row["batch"] for row in read("result/batch_finder.csv")] == [4, 8]


SILENT = """\
from dbrdist import functions as F
from dbrdist.training import StandardUpdater

class Silent(StandardUpdater):
    def update_core(self):
        optimizer = self.get_optimizer("main")
        inputs, labels = self.converter(self.get_iterator("main").next(), self.input_device)
        optimizer.target.cleargrads()
        F.softmax_cross_entropy(optimizer.target.predictor(inputs), labels).backward()
        optimizer.update()
"""


@pytest.mark.slow
def test_an_updater_that_reports_no_loss(run):
    """A batch is timed without one; the range test needs it, and says so."""
    Path("silent_updater.py").write_text(SILENT)
    words = ("run.yaml", "model=mlp", "transforms.train=[]", "updater=silent_updater:Silent")
    code, out, err = run(*words, "batch_finder={lowest: 4, highest: 8, steps: 1}", "snapshot.best=main/loss")
    assert code == 0 and "begin with batch=" in out and "no snapshot_best" not in out, (out, err)
    code, _, err = run(*words, "lr_finder={steps: 10}", "out=other")
    assert code == 2 and "lr_finder: the range test needs the loss of each step, but the updater reports none" in err


@pytest.mark.mpiexec
@pytest.mark.programs
@pytest.mark.slow
def test_ranks_try_the_same_batches_and_stop_together_on_request(started):
    words = ("-m", "dbrdist.cli.train", "run.yaml", "model=mlp", "transforms.train=[]")
    out, err = started(2, *words, "batch_finder={lowest: 1, highest: 8, steps: 1}").communicate(timeout=100)
    assert "begin with batch=" in out, err
    assert [row["batch"] for row in read("result/batch_finder.csv")] == [2, 4, 8]


@pytest.mark.programs
@pytest.mark.slow
def test_a_signal_ends_the_test_after_a_batch(started):
    process = started(0, "-m", "dbrdist.cli.train", "run.yaml", "model=mlp", "batch_finder={steps: 1000, highest: 16}")
    while "seed: " not in (line := process.stdout.readline()):
        assert line
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 75 and "SIGTERM arrived on rank 0" in out, (out, err)


HUNGRY = """\
import dbrdist
from dbrdist import functions as F, links as L
from mpi4py.MPI import COMM_WORLD

class Hungry(dbrdist.Chain):
    def __init__(self, num_classes=10):
        super().__init__()
        with self.init_scope():
            self.out = L.Linear(None, num_classes)

    def forward(self, x):
        if len(x) > 4 and COMM_WORLD.rank == 1:
            raise MemoryError("Unable to allocate 1. PiB for an array")
        return self.out(x)
"""


@pytest.mark.mpiexec
@pytest.mark.programs
@pytest.mark.slow
def test_memory_that_runs_out_on_one_rank_ends_the_test_on_all(started):
    Path("hungry.py").write_text(HUNGRY)
    words = ("-m", "dbrdist.cli.train", "run.yaml", "model=hungry:Hungry", "transforms.train=[]")
    process = started(2, *words, "batch_finder={lowest: 4, steps: 1}")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0 and "Traceback" not in err, err
    assert "a step with 16 examples needs more memory than there is" in out
    assert [row["batch"] for row in read("result/batch_finder.csv")] == [4, 8]
