"""Tests of dbrdist.cli.running.batch_finder."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from dbrdist.cli.builders import memory
from dbrdist.cli.configuration.finders import BatchFinder
from dbrdist.cli.output.refuse import Refused
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
        (steps(100, 180, 196, 200), None, 1000, [32]),
        (steps(100, 200), None, 33, [16, "larger batches may be faster still; try a higher batch_finder.highest"]),
        (steps(100, 200), None, 32, [16, "larger batches may be faster still; try a higher batch_finder.highest"]),
        (steps(100, 200), None, 31, [16, "larger batches may be faster still; the training set has 31 examples"]),
        (steps(100, 200, first=1), None, 1, [2, "larger batches may be faster still; the training set has 1 example"]),
        (steps(100, 90), None, 1000, [8, "a smaller batch may be as fast; try a lower batch_finder.lowest"]),
        (steps(100, 90, first=16), None, 1000, [16]),  # each of 16 ranks has one
        (steps(100, 200), "too large", 1000, ["too large", 16]),
        (steps(100), None, 1000, [8]),  # one batch says nothing about larger or smaller ones
        (steps(100, 200, first=1024), "too large", 1000, ["too large", 2048]),
        ([], "too large", 1000, ["no batch was tried: too large"]),
    ]
)
def test_the_last_lines_say_what_was_found_and_whether_it_is_at_the_edge(case):
    found, reason, num_examples, expected = case

    def words(part):
        if isinstance(part, str):
            return f"batch-size finder: {part}"
        best = f"{part:,} is the smallest batch with 95 % of the highest speed; begin with batch={part}"
        return f"batch-size finder: {best}"

    assert verdict(found, reason, BatchFinder(), num_examples) == [words(part) for part in expected]


class Run:
    """A run on some ranks, of which this is rank 0 and the others say the same."""

    def __init__(self, folder, num_examples=100, size=1, group=1, **settings):
        self.config = SimpleNamespace(batch_finder=BatchFinder(**settings), batch_norm=SimpleNamespace(group=group))
        self.comm = SimpleNamespace(
            rank=0, size=size, intra_size=size, bcast_obj=lambda x: x, allgather_obj=lambda x: [x, True]
        )
        self.parts = SimpleNamespace(data=SimpleNamespace(train=range(num_examples)), device=None)
        self.folder, self.origin, self.said, self.ended = SimpleNamespace(path=str(folder)), None, [], []
        self.trainer = SimpleNamespace(updater=SimpleNamespace(finalize=lambda: self.ended.append("updater")))
        self.stop = Stop(self)

    def say(self, words):
        self.said.append(words)


def found_by(run, monkeypatch, need=None, fails_at=None):
    """What is measured: 4, 8 and more examples at 100, 190 and more examples per second; the last word on each."""
    speeds = {4: 100.0, 8: 190.0, 16: 200.0, 32: 199.0, 64: 0.5}
    given = run.config, run.origin, run.parts
    monkeypatch.setattr(memory, "measure", lambda *args: need if args == given else memory.Need(0.0, 0.0))
    monkeypatch.setattr(memory, "free_bytes", lambda: 100_000_000)
    monkeypatch.setattr(memory, "try_step", lambda config, origin, parts, share: run.ended.append(share) or share < 20)
    monkeypatch.setattr(
        batch_finder, "_measured",
        lambda run, batch: None if batch == fails_at else TimedBatch(batch, batch / speeds[batch], speeds[batch]),
    )  # fmt: skip
    batch_finder.find(run)
    return run.said


class Stop:
    """The extension that ends a run on request."""

    def __init__(self, run):
        self.run, self.calls = run, 0

    def __call__(self, trainer):
        assert trainer is self.run.trainer
        self.calls += 1

    def finalize(self):
        self.run.ended.append(f"stop after {self.calls}")


LINES = [
    "batch-size finder: batch       4: 40 ms per step, 100 examples/s",
    "batch-size finder: batch       8: 42.1 ms per step, 190 examples/s",
    "batch-size finder: batch      16: 80 ms per step, 200 examples/s",
    "batch-size finder: batch      32: 161 ms per step, 199 examples/s",
    "batch-size finder: batch      64: 128 s per step, 0 examples/s",
]
BEST = "batch-size finder: 8 is the smallest batch with 95 % of the highest speed; begin with batch=8"


def test_all_that_a_finder_says_and_writes(tmp_path, monkeypatch):
    run = Run(tmp_path, lowest=4)
    assert found_by(run, monkeypatch) == [*LINES, BEST]
    table = "batch,seconds_per_step,examples_per_second\r\n4,0.04,100.0\r\n8,0.042105263157894736,190.0\r\n"
    table += "16,0.08,200.0\r\n32,0.16080402010050251,199.0\r\n64,128.0,0.5\r\n"
    assert (tmp_path / "batch_finder.csv").read_bytes().decode() == table
    assert run.ended == ["stop after 5", "updater"]


def test_where_a_finder_ends(tmp_path, monkeypatch):
    """At a batch that needs more than 90 % of what is free, by measure or by trial, or that fails."""
    need = memory.Need(10e6, 5e6)  # 90 MB with 16 examples
    small = "batch-size finder: a step with 32 examples per rank needs about 170 MB, and 100 MB is free"
    assert found_by(Run(tmp_path, lowest=4), monkeypatch, need) == [*LINES[:3], small, BEST]
    lack = "batch-size finder: a step with 32 examples needs more memory than there is"
    assert found_by(Run(tmp_path, lowest=4), monkeypatch, fails_at=32) == [*LINES[:3], lack, BEST]
    run = Run(tmp_path, size=2, lowest=4)
    assert found_by(run, monkeypatch) == [*LINES[:4], lack.replace("32", "64"), BEST]
    assert run.ended == [2, 4, 8, 16, 32, "stop after 4", "updater"]
    run = Run(tmp_path, size=2, group=2, lowest=4)  # statistics over ranks: nobody tries alone
    assert found_by(run, monkeypatch) == [*LINES, BEST] and run.ended == ["stop after 5", "updater"]
    run = Run(tmp_path / "gone", lowest=4, highest=4)
    where = f"{tmp_path}/gone: the table of batch sizes could not be written: "
    said = found_by(run, monkeypatch)
    assert said[0] == LINES[0] and said[-1].startswith(where) and said[-1].endswith("No such file or directory")
    with pytest.raises(Refused) as caught:
        found_by(Run(tmp_path, num_examples=1, size=2), monkeypatch)
    assert (str(caught.value), caught.value.code) == (
        "batch_finder: no batch of 8 to 65,536 examples fits 1 training example and 2 ranks; choose a lower "
        "batch_finder.lowest or a higher batch_finder.highest",
        2,
    )


def test_a_batch_is_timed_without_its_first_step(monkeypatch):
    """The median of the slowest ranks' speeds; a last batch that is short counts with its own examples."""
    clock, ends = [0.0], []
    seconds, examples = iter([9.0, 0.25, 0.25, 0.5]), iter([8, 8, 4, 8])
    batches, waited = SimpleNamespace(num_samples_global=8), []
    seen = SimpleNamespace(observation={"loss": "a value of a GPU", "other": 2})

    def update():
        clock[0] += next(seconds)
        batches.num_samples_global = next(examples)

    updater = SimpleNamespace(update=update, finalize=lambda: ends.append(1))
    monkeypatch.setattr(batch_finder.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(batch_finder, "reporter", lambda task: contextlib.nullcontext(seen))
    monkeypatch.setattr(batch_finder, "as_number", waited.append)
    monkeypatch.setattr(batch_finder, "iterator", lambda config, data, comm, train: (config, train) and batches)
    monkeypatch.setattr(batch_finder.build_updates, "updater", lambda *args: updater)
    settings = SimpleNamespace(batch_finder=BatchFinder(steps=3), model_copy=lambda update: settings)
    run = SimpleNamespace(
        config=settings, comm=SimpleNamespace(size=2, allgather_obj=lambda s: [s, 2 * s]), origin=None,
        parts=SimpleNamespace(data=SimpleNamespace(train=[]), convert=None, device=None, task=None),
        trainer=SimpleNamespace(updater=SimpleNamespace(get_optimizer=lambda name: None)),
    )  # fmt: skip
    assert batch_finder._measured(run, 8) == TimedBatch(8, 1.0, 8.0)  # of 16, 8 and 8 per second
    assert ends == [1] and waited == ["a value of a GPU", 2] * 4
    monkeypatch.setattr(updater, "update", lambda: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        batch_finder._measured(run, 8)
    run.comm.size = 1
    assert batch_finder._measured(run, 8) is None and ends == [1, 1, 1]


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
