"""What the tests of `dbrdist-train` share."""

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
