"""Averages of weights, and the best snapshot by a metric, under mpiexec: against NumPy, for each number of ranks."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from dbrdist.datasets import get_digits
from tests.cli.cli_helpers import finish, lines

pytestmark = pytest.mark.timeout(120)
DECAY = 0.3
CONFIG = f"""\
model: mlp
data: digits
batch: 100
epochs: 1
iterations: 5
optimizer: {{name: momentum_sgd, lr: 2}}
dtype: float64
ema: {{decay: {DECAY}}}
evaluation: {{every: 1 iteration, batch: 90}}
snapshot: {{every: 1 iteration, keep: 9, best: validation/main/loss}}
log: {{every: 1 iteration}}
"""
LAYERS = ("predictor/0", "predictor/1", "predictor/2")


def weights(snapshot, part):
    """Weights and biases of the layers, of the model or of the average."""
    return [(snapshot[f"{part}/{layer}/W"], snapshot[f"{part}/{layer}/b"]) for layer in LAYERS]


def loss_and_accuracy(layers, x, t):
    """The mean cross entropy of an MLP with ReLU, and the fraction of hits."""
    for W, b in layers[:-1]:
        x = np.maximum(x @ W.T + b, 0)
    W, b = layers[-1]
    y = x @ W.T + b
    logs = y - y.max(1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(1, keepdims=True))
    return -logs[np.arange(len(t)), t].mean(), (y.argmax(1) == t).mean()


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_averages_are_evaluated_and_the_best_of_them_is_kept(ranks, run, num_ranks):
    Path("averages.yaml").write_text(CONFIG)
    code, _, err = run("averages.yaml") if num_ranks == 1 else finish(ranks(num_ranks, "averages.yaml"), 110)
    assert code == 0, err
    steps = [dict(np.load(f"result/snapshot_iter_{step}")) for step in range(1, 6)]
    for t, (before, after) in enumerate(itertools.pairwise(steps), 2):
        decay = min(DECAY, (1 + t) / (10 + t))
        own, averages = weights(after, "updater/model:main"), weights(after, "extensions/WeightAverage/weights")
        for old, w, average in zip(weights(before, "extensions/WeightAverage/weights"), own, averages):
            for a, b, c in zip(old, w, average):
                np.testing.assert_allclose(c, decay * a + (1 - decay) * b, rtol=1e-12, atol=1e-15)
    _, test = get_digits(ndim=3)
    x = np.stack([image for image, _ in test]).reshape(len(test), -1).astype(np.float64)
    labels = np.array([label for _, label in test])
    expected = [loss_and_accuracy(weights(s, "extensions/WeightAverage/weights"), x, labels) for s in steps]
    log = lines("result/log.jsonl")
    found = [(entry["validation/main/loss"], entry["validation/main/accuracy"]) for entry in log]
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    best = int(np.argmin([loss for loss, _ in expected])) + 1
    assert best == 3  # neither the first nor the last
    kept = dict(np.load("result/snapshot_best"))
    assert int(kept["updater/iteration"]) == best
    for key, value in steps[best - 1].items():
        if key.startswith(("updater/model", "updater/optimizer", "extensions/WeightAverage")):
            np.testing.assert_array_equal(kept[key], value, key)
