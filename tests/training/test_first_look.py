"""What the first steps of a run are warned of, and what they are not."""

from __future__ import annotations

import warnings

import pytest

import dbrdist.links as L
from dbrdist import iterators, optimizers, testing, training
from dbrdist.comm import create_communicator, create_multi_node_optimizer
from tests.training.mistaken import DATA, Net


def without_optimizers(tmp_path):
    return testing.get_trainer_with_mock_updater((3, "iteration"))


def of_many_calls(tmp_path):
    """The optimizer adds up gradients over more calls than this run has."""
    comm = create_communicator("single")
    optimizer = create_multi_node_optimizer(optimizers.SGD(0.1), comm, accumulate=4).setup(L.Classifier(Net()))
    updater = training.StandardUpdater(iterators.SerialIterator(DATA, 5), optimizer)
    return training.Trainer(updater, (3, "iteration"), tmp_path)


@pytest.mark.parametrize("made", [without_optimizers, of_many_calls])
def test_steps_that_need_not_update_are_not_warned_of(made, tmp_path):
    trainer = made(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.run()
