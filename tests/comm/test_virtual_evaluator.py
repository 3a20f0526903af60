"""Evaluation by virtual workers: what each observes, and the order in which it is added."""

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm import create_communicator, virtual_evaluator


def test_values_of_virtual_workers_are_added_in_the_order_of_batches_and_workers():
    added = []

    class Summary:
        def add(self, values):
            added.append(values)

        def compute_mean(self):
            return {"loss": 1.0}

    theirs = [[(0, 1, 2, {"loss": 3.0}), (1, 1, 1, {"loss": 4.0})], [(1, 0, 5, {"loss": 6.0}), (0, 0, 7, {})]]
    comm = create_communicator("naive")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(virtual_evaluator, "DictSummary", Summary)
        patch.setattr(virtual_evaluator, "_entries", lambda evaluator: iter(()))
        patch.setattr(type(comm), "allgather_obj", lambda self, mine: theirs if mine == [] else [mine])
        assert virtual_evaluator.means(comm, None) == {"loss": 1.0}
    assert added == [{}, {"loss": (3.0, 2)}, {"loss": (6.0, 5)}, {"loss": (4.0, 1)}]


def test_a_virtual_worker_observes_its_batches():
    hooked = []
    observed = {"loss": np.float32(0.5), "curve": np.zeros(3), "own": 2.0}
    evaluator = SimpleNamespace(
        eval_hook=hooked.append, get_iterator=lambda name: SimpleNamespace(workers=[4, 5]) if name == "main" else None,
        _one_pass=lambda: iter([([1, 2], [3]), ([1], [])]), observe=lambda batch: observed,
    )  # fmt: skip
    numbers = {"loss": 0.5, "own": 2.0}
    assert list(virtual_evaluator._entries(evaluator)) == [(0, 4, 2, numbers), (0, 5, 1, numbers), (1, 4, 1, numbers)]
    assert hooked == [evaluator]
