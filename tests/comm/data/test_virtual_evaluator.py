"""Evaluation by virtual workers: what each observes, and the order in which it is added."""

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm import create_communicator
from dbrdist.comm.data import virtual_evaluator
from tests.each import each


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
        assert virtual_evaluator.means(comm, SimpleNamespace()) == {"loss": 1.0}
    assert added == [{}, {"loss": (3.0, 2)}, {"loss": (6.0, 5)}, {"loss": (4.0, 1)}]


def test_a_virtual_worker_observes_its_batches():
    hooked = []
    observed = {"loss": np.float32(0.5), "curve": np.zeros(3), "own": 2.0}
    evaluator = SimpleNamespace(
        eval_hook=hooked.append, get_iterator=lambda name: SimpleNamespace(workers=[4, 5]) if name == "main" else None,
        one_pass=lambda: iter([([1, 2], [3]), ([1], [])]), observe=lambda batch: observed,
    )  # fmt: skip
    numbers = {"loss": 0.5, "own": 2.0}
    assert list(virtual_evaluator._entries(evaluator)) == [(0, 4, 2, numbers), (0, 5, 1, numbers), (1, 4, 1, numbers)]
    assert hooked == [evaluator]


@each(has_hook=[True, False])
def test_virtual_workers_evaluate_in_the_order_of_batches_and_workers(has_hook):
    hooked = []
    evaluator = SimpleNamespace(
        eval_hook=hooked.append if has_hook else None,
        get_iterator=lambda name: SimpleNamespace(workers=[4, 2]),
        one_pass=lambda: [[[1, 2], [3]], [[], [5, 6, 7]]],
        observe=lambda batch: {"m": np.float64(sum(batch)), "array": np.ones(2), "n": 3, "word": "on", "none": None},
    )
    entries = list(virtual_evaluator._entries(evaluator))
    assert hooked == [evaluator] * has_hook
    assert entries == [
        (0, 4, 2, {"m": 3.0, "n": 3.0}),
        (0, 2, 1, {"m": 3.0, "n": 3.0}),
        (1, 2, 3, {"m": 18.0, "n": 3.0}),
    ]
    assert [virtual_evaluator._place(e) for e in sorted(entries, key=virtual_evaluator._place)] == [
        (0, 2),
        (0, 4),
        (1, 2),
    ]
    found = virtual_evaluator.means(create_communicator("single"), evaluator)
    assert found == {"m": (2 * 3.0 + 3.0 + 3 * 18.0) / 6, "n": 3.0}
