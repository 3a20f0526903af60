"""Tests of dbrdist.cli.builders.preflight."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.cli.builders import preflight
from dbrdist.core.model.parameter import Parameter
from dbrdist.errors import ConfigError, UsageWarning
from tests.each import each


class Look:
    words, dataset = "training", None

    def __init__(self, loss="softmax_cross_entropy", outputs=(4, 3)):
        self.config = SimpleNamespace(loss=SimpleNamespace(name=loss))
        self.outputs = outputs

    def through(self, function, inputs):
        return np.zeros(self.outputs, "f")

    def mistake(self, key, text):
        return ConfigError(f"{key}: {text}")


@each(
    case=[
        (np.array([[0, 1, 2, -1]]), {"outputs": (1, 3, 4)}, None),
        (np.array([0, 1, 3]), {}, "model: the network has 3 outputs, but a training label"),
        (np.array([-2, 1]), {}, "data: a training label is -2; classes are counted from 0"),
        (np.array([-2, 1]), {"loss": "hinge"}, None), (np.array([5]), {"outputs": (4,)}, None),
        (np.array([1.0]), {}, "data: expected integers as labels for softmax_cross_entropy, got float64"),
        (np.array([[1.0, 0, 0]]), {}, None), (np.array([1.0]), {"loss": "mean_squared_error"}, None),
        (np.array([[True]]), {}, "data: expected integers as labels for softmax_cross_entropy, got bool"),
    ]
)  # fmt: skip
def test_labels_fit_loss_and_network(case):
    labels, look, expected = case
    made = SimpleNamespace(task=SimpleNamespace(predictor=None))
    if expected is None:
        preflight._labels(Look(**look), made, None, labels)
    else:
        with pytest.raises(ConfigError, match=expected):
            preflight._labels(Look(**look), made, None, labels)


def test_ignored_labels_of_a_classification_are_counted():
    made = SimpleNamespace(task=SimpleNamespace(predictor=None))
    with pytest.warns(UsageWarning, match="1 of the first 4 training labels are -1"):
        preflight._labels(Look(), made, None, np.array([0, 1, 2, -1]))


ORIGIN = SimpleNamespace(where=lambda path: f"run.yaml:{'.'.join(map(str, path))}")


@pytest.mark.parametrize(("free", "is_enough"), [(3 * 40 * 4 - 1, False), (3 * 40 * 4, True)])
def test_the_disk_must_have_room_for_the_snapshots_that_are_kept_and_one(monkeypatch, tmp_path, free, is_enough):
    """A snapshot of 10 numbers of 4 bytes has them three times, with the optimizer's states; three are kept."""
    parameter = Parameter(np.zeros(10, np.float32))
    made = SimpleNamespace(task=SimpleNamespace(params=lambda include_uninit: [parameter]))
    settings = SimpleNamespace(out=str(tmp_path / "a" / "b"), snapshot=SimpleNamespace(keep=3))
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    found = list(preflight._disk(settings, ORIGIN, made))
    assert found == ([] if is_enough else [
        f"run.yaml:out: out: 479 bytes are free in {tmp_path}, but 3 snapshots and the next one need about 480; use "
        "another folder, or a smaller snapshot.keep"
    ])  # fmt: skip
    monkeypatch.setattr(preflight.os, "access", lambda path, mode: False)
    assert list(preflight._disk(settings, ORIGIN, made)) == [f"run.yaml:out: out: cannot write to {tmp_path}"]
