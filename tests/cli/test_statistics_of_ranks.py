"""What a snapshot of several ranks holds, what `--dry-run` says of mistakes, and data that workers cannot take."""

from pathlib import Path

import numpy as np
import pytest

from dbrdist.datasets import get_digits
from tests.cli.cli_helpers import lines

pytestmark = pytest.mark.timeout(120)
STATISTICS = ("avg_mean", "avg_var")
OWN = """
import numpy as np

def locked(n):
    rows = [(np.zeros((1, 2, 2), np.float32), np.int32(i % 3)) for i in range(n)]
    return type("Rows", (list,), {"__reduce_ex__": lambda self, protocol: (lambda: 0, ())})(rows), None
"""


@pytest.mark.slow
def test_a_snapshot_between_evaluations_holds_the_means_of_the_ranks(ranks):
    words = ["snapshot.every=1 iteration", "snapshot.keep=9", "iterations=3"]
    process = ranks(3, "run.yaml", *words)
    _, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    snapshot = dict(np.load("result/snapshot_iter_2"))
    for name in STATISTICS:
        own = snapshot[f"extensions/LocalState/rows/predictor/bn/{name}"]
        assert len(own) == 3 and not np.array_equal(own[0], own[1])
        expected = np.mean(np.asarray(own, np.float64), axis=0)
        np.testing.assert_allclose(snapshot[f"updater/model:main/predictor/bn/{name}"], expected, rtol=1e-6)


@pytest.mark.slow
def test_an_evaluation_uses_the_means_of_the_ranks_which_go_on_from_there(ranks):
    """The loss of the test images is that of the network in the snapshot, here in float64."""
    process = ranks(2, "run.yaml", "snapshot.every=3 iterations", "iterations=3")
    _, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    snapshot = dict(np.load("result/snapshot_iter_3"))
    W1, b1, W2, b2, gamma, beta, mean, var = (
        snapshot[f"updater/model:main/predictor/{name}"].astype(np.float64)
        for name in ("l1/W", "l1/b", "l2/W", "l2/b", "bn/gamma", "bn/beta", "bn/avg_mean", "bn/avg_var")
    )
    x, t = map(np.array, zip(*get_digits()[1]))
    h = x.reshape(len(x), -1) @ W1.T + b1
    y = np.maximum(gamma * (h - mean) / np.sqrt(var + 2e-5) + beta, 0) @ W2.T + b2
    loss = np.mean(np.log(np.exp(y).sum(1)) - y[np.arange(len(t)), t])
    for name in STATISTICS:
        own = snapshot[f"extensions/LocalState/rows/predictor/bn/{name}"]
        np.testing.assert_array_equal(own, [snapshot[f"updater/model:main/predictor/bn/{name}"]] * 2)
    assert lines("result/log.jsonl")[-1]["validation/main/loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_dry_run_says_what_a_run_says(run, dry):
    code, _, err = run("run.yaml", "model.args.widht=3", *dry)
    assert code == 2
    assert "takes no 'widht', did you mean 'width'?" in err and "Traceback" not in err


def test_data_that_cannot_be_sent_to_workers(run):
    Path("locked.py").write_text(OWN)
    words = [
        "data=locked:locked",
        "data.args.n=12",
        "transforms.train=[]",
        "model=mlp",
        "model.num_classes=3",
        "batch=4",
    ]
    code, _, err = run("run.yaml", *words, "workers=1")
    assert code == 2
    assert "Traceback" not in err and "workers" in err
