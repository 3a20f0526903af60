"""Tests of dbrdist.comm.data.evaluator."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist import Chain, Sequential, Variable, links, optimizers, random
from dbrdist import functions as F
from dbrdist.comm import create_multi_node_evaluator, create_multi_node_optimizer, run_threads, scatter_dataset
from dbrdist.comm import functions as comm_functions
from dbrdist.comm.data import evaluator
from dbrdist.comm.data.datasets import Shard
from dbrdist.comm.run import trace
from dbrdist.core.array.config import config
from dbrdist.datasets import SubDataset, TupleDataset
from dbrdist.datasets.loading.serial import SerialIterator
from dbrdist.errors import CommunicatorError
from dbrdist.links import BatchNormalization, Classifier, Linear
from dbrdist.training import extensions
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
    own = SimpleNamespace(get_iterator=lambda name: iterator, one_pass=lambda: iter(iterator))
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
    found = evaluator._merged(mine)
    assert found == {"a": 2.0, "b": 3.0} and list(found) == ["a", "b"]


@pytest.mark.parametrize("num_examples", [1, 2])
def test_a_rank_without_examples_takes_part(num_examples):
    """Of a dataset of fewer examples than ranks, some have an empty part; the means are those of one process."""
    examples = [(np.full(3, k, np.float32), np.int32(k % 2)) for k in range(num_examples)]

    def evaluate(comm):
        random.set_seed(0)
        model = links.Classifier(links.Linear(3, 2))
        part = scatter_dataset(examples if comm.rank == 0 else None, comm, force_equal_length=False)
        iterator = SerialIterator(part, 4, repeat=False, shuffle=False)
        found = create_multi_node_evaluator(extensions.Evaluator(iterator, model), comm)()
        return len(part), {name: float(value) for name, value in found.items()}

    ((_, expected),) = run_threads(1, evaluate, timeout_seconds=60)
    everyone = run_threads(3, evaluate, timeout_seconds=60)
    assert min(length for length, _ in everyone) == 0
    for _, found in everyone:
        assert found == pytest.approx(expected, rel=1e-6)


def apart(comm, num_steps=3):
    """A classifier of which each rank has made steps by itself, on examples of its own."""
    random.set_seed(0)
    model = links.Classifier(links.Linear(3, 2))
    optimizer = create_multi_node_optimizer(optimizers.SGD(1.0), comm, local_steps=4).setup(model)
    for _ in range(num_steps):
        x = np.full((2, 3), comm.rank - 1.0, np.float32)
        optimizer.update(model, x, np.array([0, 1], np.int32) if comm.rank else np.array([1, 1], np.int32))
    return model


def test_ranks_whose_parameters_differ_for_a_while_evaluate_the_mean_of_them():
    """Else each evaluates another network on its part, and the sum belongs to none."""
    examples = [(np.arange(3, dtype=np.float32) * k, np.int32(k % 2)) for k in range(7)]

    def evaluate(comm):
        model = apart(comm)  # the first step is one of all ranks
        own = model.predictor.W.array.copy()
        values = [p.array.copy() for p in model.params()]
        part = scatter_dataset(examples if comm.rank == 0 else None, comm, force_equal_length=False)
        iterator = SerialIterator(part, 4, repeat=False, shuffle=False)
        found = create_multi_node_evaluator(extensions.Evaluator(iterator, model), comm)()
        np.testing.assert_array_equal(model.predictor.W.array, own)  # each continues with its own
        return values, {name: float(value) for name, value in found.items()}

    everyone = run_threads(3, evaluate, timeout_seconds=60)
    assert not np.allclose(everyone[0][0][0], everyone[1][0][0])
    model = links.Classifier(links.Linear(3, 2))
    for p, *values in zip(model.params(), *(values for values, _ in everyone), strict=True):
        p.array[...] = np.mean(values, 0)
    expected = extensions.Evaluator(SerialIterator(examples, 4, repeat=False, shuffle=False), model)()
    for _, found in everyone:
        assert found == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-5)


class Normalized(Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.bn, self.l = BatchNormalization(3), Linear(3, 2, initialW=np.arange(6, dtype="f").reshape(2, 3))

    def forward(self, x):
        return self.l(self.bn(x))


def loss_of(model, examples, comm=None):
    part = examples if comm is None else examples[comm.rank :: comm.size]
    found = extensions.Evaluator(SerialIterator(part, 2, repeat=False, shuffle=False), model)
    return float((found if comm is None else create_multi_node_evaluator(found, comm))()["main/loss"])


def test_running_statistics_are_means_in_an_evaluation():
    """Each rank has its own before they are averaged: an evaluation of several would belong to no network."""
    rng = np.random.default_rng(0)
    examples = [(x, np.int32(k % 2)) for k, x in enumerate(rng.standard_normal((8, 3)).astype(np.float32))]
    means = [rng.standard_normal(3).astype(np.float32) for _ in range(2)]
    variances = [rng.uniform(0.5, 2, 3).astype(np.float32) for _ in range(2)]

    def body(comm):
        model = Classifier(Normalized())
        bn = model.predictor.bn
        bn.avg_mean[...], bn.avg_var[...] = means[comm.rank], variances[comm.rank]
        found = loss_of(model, examples, comm)
        np.testing.assert_array_equal(bn.avg_mean, means[comm.rank])
        np.testing.assert_array_equal(bn.avg_var, variances[comm.rank])
        return found

    one = Classifier(Normalized())
    one.predictor.bn.avg_mean[...], one.predictor.bn.avg_var[...] = np.mean(means, 0), np.mean(variances, 0)
    np.testing.assert_allclose(run_threads(2, body), loss_of(one, examples), rtol=1e-6)


class Counts(Chain):
    """Counts in persistent values what it was called with, beside a table that cannot be written."""

    def __init__(self, begin):
        super().__init__()
        with self.init_scope():
            self.l = Linear(3, 2, initialW=0)
        self.add_persistent("seen", np.full((), begin, np.float32))
        self.add_persistent("table", np.broadcast_to(np.float32(1), (3,)))

    def forward(self, x):
        self.seen += len(x)
        return self.l(x)


def test_what_an_evaluation_writes_into_persistent_values_stays():
    examples = [(np.zeros(3, np.float32), np.int32(0))] * 6

    def body(comm):
        model = Classifier(Counts(0))
        for _ in range(2):  # equal on all ranks, as before the first one, and not
            loss_of(model, examples, comm)
            model.predictor.seen += comm.rank
        return float(model.predictor.seen)

    assert sum(run_threads(2, body)) == 2 * 6 + 2


def test_a_rank_without_examples_may_have_parameters_without_values():
    """They get them at the first input; no mean belongs to its network."""

    def body(comm):
        model = Classifier(Linear(None, 2))
        examples = [(np.zeros(3, np.float32), np.int32(0))] * (1 - comm.rank)
        evaluator = extensions.Evaluator(SerialIterator(examples, 2, repeat=False, shuffle=False), model)
        together = create_multi_node_evaluator(evaluator, comm)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return [together()["main/loss"] for _ in range(2)]

    np.testing.assert_allclose(run_threads(2, body), np.log(2), rtol=1e-6)


class Halves(Chain):
    """A layer whose units are divided over the ranks, each of which has parameters of its own."""

    def __init__(self, comm):
        super().__init__()
        self.comm = comm
        with self.init_scope():
            self.l = Linear(3, 1, initialW=comm.rank)

    def forward(self, x):
        return F.concat(comm_functions.allgather(self.comm, self.l(x)), axis=1)


def different(comm):
    return Linear(3, 2, initialW=comm.rank)


def of_another_shape(comm):
    return Linear(3, 2 + comm.rank, initialW=0)


def with_another_layer(comm):
    return Sequential(Linear(3, 2, initialW=0), *[F.relu, Linear(2, 2)][: 2 * comm.rank])


def rounded_otherwise(comm):
    return Linear(3, 2, initialW=1 + comm.rank * 1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (different, "/predictor/W on rank 1 of 2 differs from that of rank 0"),
        (of_another_shape, "/predictor/W on rank 1"),
        (with_another_layer, "/predictor/"), (rounded_otherwise, ""),
        (Halves, ""), (lambda comm: Linear(3, 2, initialW=1), ""),
    ],
)  # fmt: skip
def test_an_evaluation_of_different_networks_is_warned_of(make, words):
    examples = [(np.full(3, k, np.float32), np.int32(k % 2)) for k in range(4)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run_threads(2, lambda comm: loss_of(Classifier(make(comm)), examples, comm))
    texts = [str(one.message) for one in seen]
    assert len(texts) == bool(words) and all(words in text and "belong to none" in text for text in texts), texts


class Program:
    """Evaluators that a function makes at one line, so that ranks tell them apart by number and content alone."""

    def __init__(self, is_scattered, num_more=0, order=(0, 1), has_two_networks=False):
        self.is_scattered, self.num_more = is_scattered, num_more
        self.order, self.has_two_networks = order, has_two_networks

    def __call__(self, comm):
        random.set_seed(1)
        x = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
        t = np.arange(12) % 3
        first, second = Classifier(Linear(4, 3)), Classifier(Linear(4, 3))
        what = [(first, TupleDataset(x, t)), (first, TupleDataset(x + 1, t))]
        if self.has_two_networks:
            what[1] = (second, what[0][1])
        if comm.rank == 0:
            for _ in range(self.num_more):
                self.made(comm, first, SubDataset(what[0][1], 0, 6), False)
        made = [self.made(comm, *each, self.is_scattered) for each in what]
        return [made[k]()["main/loss"] for k in (self.order if comm.rank == 0 else (0, 1))]

    @staticmethod
    def made(comm, model, data, is_scattered):
        if is_scattered:
            iterator = SerialIterator(scatter_dataset(data, comm), 4, repeat=False, shuffle=False)
        else:
            iterator = SerialIterator(data, 4, repeat=False, shuffle=False, rank=comm.rank, size=comm.size)
        return create_multi_node_evaluator(extensions.Evaluator(iterator, model), comm)


@pytest.mark.parametrize("is_scattered", [False, True])
def test_a_rank_may_make_one_evaluator_more(is_scattered):
    expected = run_threads(2, Program(is_scattered), timeout_seconds=30)
    assert run_threads(2, Program(is_scattered, num_more=1), timeout_seconds=30) == expected


@pytest.mark.parametrize("num_more", [0, 1])
@pytest.mark.parametrize("is_scattered", [False, True])
@pytest.mark.parametrize("has_two_networks", [False, True])
def test_evaluators_in_another_order_are_refused(is_scattered, num_more, has_two_networks):
    with pytest.raises(CommunicatorError, match="expected the same eval"):
        run_threads(2, Program(is_scattered, num_more, (1, 0), has_two_networks), timeout_seconds=30)


class Stream:
    """A program's own iterator, of examples whose number nobody knows."""

    dataset = property(lambda self: self)

    def __len__(self):
        raise RuntimeError("no length")

    def __iter__(self):
        return iter([[(np.ones(4, np.float32), np.int32(0))]])

    __next__ = next = reset = __iter__


def test_evaluators_of_examples_of_which_nothing_is_known_are_refused():
    def program(comm):
        made = [
            create_multi_node_evaluator(extensions.Evaluator(Stream(), Classifier(Linear(4, 3))), comm)
            for _ in range(1 + comm.rank)
        ]
        made[-1]()

    with pytest.raises(CommunicatorError, match="expected the same eval") as caught:
        run_threads(2, program, timeout_seconds=30)
    line = program.__code__.co_firstlineno + 2
    got = f"got evaluator 1 (made at test_evaluator.py:{line}, number 1 there) on rank 0; evaluator 2 (made at "
    assert got + f"test_evaluator.py:{line}, number 2 there) on rank 1: the ranks call" in str(caught.value)


def test_what_is_no_evaluator_is_refused():
    def program(comm):
        iterator = SerialIterator([1, 2], 1, repeat=False)
        with pytest.raises(TypeError, match=r"got SerialIterator; write create_multi_node_evaluator\(Evaluator"):
            create_multi_node_evaluator(iterator, comm)
        with pytest.raises(TypeError, match="expected an evaluator, got ThreadCommunicator"):
            create_multi_node_evaluator(comm, extensions.Evaluator(iterator, Classifier(Linear(4, 3))))
        with pytest.raises(TypeError, match="expected a communicator, got str"):
            create_multi_node_evaluator(extensions.Evaluator(iterator, Classifier(Linear(4, 3))), "flat")

    run_threads(1, program)
