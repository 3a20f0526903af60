"""Tests of dbrdist.training.extensions.observe."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist import Parameter
from dbrdist.errors import NonFiniteLossError
from dbrdist.training import extensions
from dbrdist.training.extensions import observe
from tests.training.training_helpers import Clock, make_trainer


def test_losses_are_known_by_their_last_word():
    for key, is_one in (
        ("loss", True),
        ("main/loss", True),
        ("lossy", False),
        ("main/glass", False),
        ("loss/x", False),
    ):
        assert observe.is_loss(key) is is_one


STEP, EPOCHS = (1, "iteration"), (1, "epoch")


def test_values_are_observed_once_per_epoch_before_they_are_read():
    for extension in (extensions.observe_lr(), extensions.observe_value("a", len)):
        assert (extension.trigger, extension.priority) == (EPOCHS, 300)


def test_graphs_behind_observed_variables_are_let_go():
    extension, clock = extensions.unchain_variables(), Clock()
    kept = Parameter(np.ones(3)) * 2
    assert kept.creator is not None
    extension(clock.tick(loss=kept, other=1.0))
    assert kept.creator is None


def test_a_loss_that_is_nan_ends_the_run(tmp_path):
    trainer = make_trainer(tmp_path, (100, "epoch"), lr=1e200)
    trainer.extend(extensions.FailOnNonNumber())
    with np.errstate(all="ignore"), pytest.raises(NonFiniteLossError, match=r"iteration \d+ \(epoch .*main:/w \(1,\)"):
        trainer.run(show_loop_exception_msg=False)


def test_a_bad_loss_is_named_without_looking_at_parameters(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.observation = {"main/loss": float("inf"), "main/accuracy": float("nan")}
    words = extensions.FailOnNonNumber().complaint(trainer)
    assert "main/loss is inf" in words
    assert "accuracy" not in words
    trainer.observation = {"main/loss": np.array([1, np.nan], np.float32)}
    words = extensions.FailOnNonNumber().complaint(trainer)
    assert "main/loss is an array of shape (2,) with nan or inf in it" in words
    for good in (1.0, np.ones(1, np.float32), np.ones((2, 3)), Parameter(np.ones(1)), np.arange(3), "none", None, {}):
        trainer.observation = {"main/loss": good}
        assert extensions.FailOnNonNumber().complaint(trainer) is None
    trainer.observation = {"main/loss": 1.0}
    assert extensions.FailOnNonNumber().complaint(trainer) is None


def test_observed_values(tmp_path):
    trainer = make_trainer(tmp_path, (1, "epoch"), lr=0.25)
    trainer.extend(extensions.observe_lr())
    trainer.extend(extensions.observe_value("twice", lambda t: 2 * t.updater.iteration))
    trainer.extend(extensions.LogReport())
    trainer.run()
    entry = trainer.get_extension("LogReport").log[0]
    assert (entry["lr"], entry["twice"]) == (0.25, 6)
