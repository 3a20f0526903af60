"""What the tests of `dbrdist-train` share."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from dbrdist.training.extensions import snapshots

# what a log says about this machine, not about the run
MEASURED = {
    "elapsed_time",
    "examples_per_second",
    "data_wait_fraction",
    "memory_bytes",
    "time",
    "communication_fraction",
}
ROOT = Path(__file__).parents[2]


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def same_runs(a, b, extra_evaluation_at=None):
    """The same weights, statistics, state and log; an evaluation at a former end does not count."""
    first, second = (dict(np.load(snapshots.newest(f))) for f in (a, b))
    assert set(first) == set(second)
    for key in first:
        if not key.endswith(("/_log", "_snapshot_elapsed_time")):
            assert np.array_equal(first[key], second[key]), key
    logs = [
        [{k: v for k, v in entry.items() if k not in MEASURED} for entry in lines(f"{folder}/log.jsonl")]
        for folder in (a, b)
    ]
    if extra_evaluation_at is not None:
        entry = logs[1][extra_evaluation_at - 1]
        logs[1][extra_evaluation_at - 1] = {k: v for k, v in entry.items() if not k.startswith("validation/")}
    assert logs[0] == logs[1]


def finish(process, seconds=60):
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


OWN_MODULE = """
import os
import signal
import warnings

from usernet import Net

def fill(at, path):
    def fill_up(trainer):
        if trainer.updater.iteration == at:
            with open(path, "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass
    return fill_up

def asked_to_stop(at):
    calls = []
    def look(example, rng):
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return example
    return look

def fails_late(epoch):
    return 1 / 0 if epoch > 0.7 else 0.1

def warns():
    def look(trainer):
        warnings.warn("the cache is cold\\nand slow", RuntimeWarning)
    return look

def net_that_warns():
    warnings.warn("made of old parts")
    return Net()

def becomes_nan(epoch):
    return float("nan") if epoch > 0.7 else 0.1

def between_looks(epoch, value):
    is_looked_at = abs(20 * epoch - round(20 * epoch)) < 1e-3
    return 0.1 if is_looked_at or epoch < 0.2 else float(value) if value in ("nan", "inf") else value
"""
OWN_PARTS = """
import numpy as np
from dbrdist.training import Extension

calls = []

def top2(outputs, labels, k=2):
    order = np.argsort(-outputs.array, axis=1)[:, :k]
    return float((order == labels[:, None]).any(1).mean())

class Note(Extension):
    trigger = (1, "iteration")

    def __init__(self, word):
        self.word = word

    def __call__(self, trainer):
        calls.append((self.word, trainer.updater.iteration))
"""
