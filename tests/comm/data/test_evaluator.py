"""Tests of dbrdist.comm.data.evaluator."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from dbrdist import Variable
from dbrdist.comm import run_threads
from dbrdist.comm.data import evaluator
from dbrdist.comm.data.datasets import Shard
from dbrdist.comm.run import trace
from dbrdist.core.array.config import config
from dbrdist.datasets.loading.serial import SerialIterator
from dbrdist.links import Linear
from tests.each import each


def test_what_an_evaluation_hands_on_lies_on_the_host():
    a = np.ones(2)
    found = evaluator._on_host({"a": Variable(a), "b": [Variable(a), (a, 3)], "c": "text"})
    assert found["a"] is a and found["b"][0] is a and found["b"][1] == (a, 3) and found["c"] == "text"
    assert type(found["b"]) is list and type(found["b"][1]) is tuple
    named = trace.Clock((0.0, 0.0), (1.0, 1.0))
    assert evaluator._on_host(named) is named


@each(**{"num_padding, batches": [(0, [[3, 4], [5, 6]]), (1, [[3, 4], [5]])]})
def test_evaluations_leave_padding_out_and_keep_the_order(num_padding, batches):
    part = Shard(list(range(10)), 3, 7, None, num_padding)
    iterator = SerialIterator(part, 2, repeat=False, shuffle=False)
    own = SimpleNamespace(get_iterator=lambda name: iterator, _one_pass=lambda: iter(iterator))
    assert [list(batch) for batch in evaluator._without_padding(own)] == batches
    longer = Shard(list(range(40)), 0, 31, None, 1)
    iterator = SerialIterator(longer, 30, repeat=False, shuffle=False)
    assert list(evaluator._without_padding(own)) == [list(range(30))]
    iterator = SerialIterator(Shard([1], 0, 1, None, 1), 2, repeat=False, shuffle=False)
    assert list(evaluator._without_padding(own)) == []


@each(has_hook=[True, False], root=[0, 1])
def test_results_are_gathered_by_turns(has_hook, root):
    """The first batch of each rank in their order, then the second; ranks may have fewer."""

    def body(comm):
        hooked, shown = [], []
        data = [(np.full(1, float(10 * comm.rank + k)),) for k in range(3 - comm.rank)]

        class Own(evaluator.GenericMultiNodeEvaluator):
            def calc_local(self, x):
                assert not config.train
                return {"x": Variable(x.reshape(-1)[:1])}

        one = Own(
            comm, SerialIterator(data, 1, repeat=False, shuffle=False), Linear(1, 1), root=root,
            eval_hook=hooked.append if has_hook else None, progress_hook=shown.append,
        )  # fmt: skip
        found = one()
        assert hooked == [one] * has_hook and len(shown) == 3 - comm.rank
        return found and [result["x"].tolist() for result in found]

    found = run_threads(2, body, timeout_seconds=60)
    assert found[root] == [[0], [10], [1], [11], [2]] and found[1 - root] is None


def test_means_of_all_ranks_are_weighted():
    mine = [{"a": (1.0, 2.0), "b": (5.0, 0.0)}, {"b": (3.0, 1.0), "a": (4.0, 1.0)}]
    comm = SimpleNamespace(allgather_obj=lambda means: mine)
    found = evaluator._merged(comm, mine[0])
    assert found == {"a": 2.0, "b": 3.0} and list(found) == ["a", "b"]
