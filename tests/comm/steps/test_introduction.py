"""Tests of dbrdist.comm.steps.introduction, and of what else ranks must have in common in a step."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import dbrdist.links as L
from dbrdist import functions as F
from dbrdist import optimizers
from dbrdist.comm import create_multi_node_optimizer, run_threads
from dbrdist.comm.steps import introduction
from dbrdist.core.array import random
from dbrdist.datasets.loading.serial import SerialIterator
from dbrdist.errors import UsageWarning
from dbrdist.training import StandardUpdater
from tests.comm.comm_helpers import said
from tests.each import each


class Net(L.Classifier):
    """A layer that takes its width from its first input."""

    def __init__(self):
        super().__init__(L.Linear(None, 2))


def optimizer_of(comm, hook=None, **options):
    model = L.Linear(2, 2)
    optimizer = create_multi_node_optimizer(optimizers.SGD(0.5).setup(model), comm, **options)
    if hook is not None:
        optimizer.add_hook(hook)
    return optimizer


def step(optimizer, **options):
    model, x = optimizer.target, np.ones((1, 2), "f")
    optimizer.update(lambda: F.sum(model(x)), **options)


@pytest.mark.parametrize("is_started", [True, False])
def test_two_optimizers_of_equal_networks_in_different_orders(is_started):
    def run(comm):
        both = [optimizer_of(comm) for _ in range(2)]
        for optimizer in both if is_started else ():
            step(optimizer)
        for optimizer in both if comm.rank else both[::-1]:
            step(optimizer)

    words = said(run)
    assert "optimizer" in words and "ranks 1, 2: " in words, words


def test_noise_of_ranks_with_different_seeds():
    def run(comm):
        random.set_seed(comm.rank)
        step(optimizer_of(comm, optimizers.GradientNoise(0.1)))

    words = said(run)
    assert "rank 1: seed 1 " in words and "instead of seed 0 " in words, words


def test_seeds_of_ranks_matter_to_no_other_hook():
    def run(comm):
        random.set_seed(comm.rank)
        step(optimizer_of(comm, optimizers.WeightDecay(0.1)))

    assert said(run) == "nothing"


def test_parameters_that_decay_on_one_rank_only():
    def run(comm):
        optimizer = optimizer_of(comm)
        link = optimizer.target
        optimizer.add_hook(optimizers.WeightDecay(0.1, [link.W] if comm.rank else [link.W, link.b]))
        step(optimizer)

    words = said(run)
    assert "params (/W) rate 0.1 instead of hook WeightDecay params (/W, /b)" in words, words


@each(accumulate=[1, 2])
def test_numbers_of_samples_that_are_no_whole_numbers(accumulate):
    def run(comm):
        optimizer = optimizer_of(comm, accumulate=accumulate)
        for _ in range(accumulate):
            step(optimizer, num_samples=0.5 if comm.rank == 1 else 2.0)

    words = said(run)
    assert words.startswith("TypeError: update: num_samples expected a whole number, got 0.5 (on rank 1 of 3"), words


def examples(num):
    rng = np.random.default_rng(0)
    return [(x, np.int32(k % 2)) for k, x in enumerate(rng.normal(size=(num, 3)).astype("f"))]


def test_shares_of_batches_with_different_seeds():
    def run(comm):
        optimizer = create_multi_node_optimizer(optimizers.SGD(0.5).setup(Net()), comm)
        iterator = SerialIterator(examples(12), 6, seed=comm.rank, rank=comm.rank, size=comm.size)
        StandardUpdater(iterator, optimizer).update()

    assert "with seed 1" in said(run)


def test_a_rank_that_has_read_a_batch_more_than_others():
    def run(comm):
        optimizer = create_multi_node_optimizer(optimizers.SGD(0.5).setup(Net()), comm)
        iterator = SerialIterator(examples(12), 3, seed=0, rank=comm.rank, size=comm.size)
        updater = StandardUpdater(iterator, optimizer)
        updater.update()
        if comm.rank == 1:
            next(iterator)
        updater.update()

    words = said(run)
    assert "rank 1: example 9 of epoch 0 next instead of example 6 of epoch 0 next" in words, words


@each(**{"kind, is_warned": [("whole", True), ("divided", False), ("seeds", False), ("own", False), ("zeros", False)]})
def test_all_ranks_that_read_the_same_examples_are_warned_of(kind, is_warned):
    def run(comm):
        data = examples(12) if kind != "zeros" else [(np.zeros(3, "f"), np.int32(0))] * 12
        data = [(x + comm.rank, t) for x, t in data] if kind == "own" else data
        options = {"rank": comm.rank, "size": comm.size} if kind == "divided" else {}
        optimizer = create_multi_node_optimizer(optimizers.SGD(0.5).setup(Net()), comm)
        iterator = SerialIterator(data, 6, seed=comm.rank if kind == "seeds" else 0, **options)
        updater = StandardUpdater(iterator, optimizer)
        updater.update()
        updater.update()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run_threads(2, run)
    found = [w for w in found if issubclass(w.category, UsageWarning)]
    assert len(found) == is_warned and all("read the same examples" in str(w.message) for w in found)


@each(options=[{"accumulate": 2}, {"accumulate": 3}, {"zero": 1}, {"zero": 2}, {"local_steps": 2}])
def test_lazy_parameters_where_a_rank_has_no_examples(options):
    def run(comm):
        model = L.Linear(None, 2)
        optimizer = create_multi_node_optimizer(optimizers.SGD(0.5).setup(model), comm, **options)
        calls = 2 * options.get("accumulate", 1)
        for k in range(calls):
            x = np.full((2, 3), k + 1, "f")
            has = comm.rank == 0 or k >= calls - 1
            optimizer.update(lambda x=x: F.sum(model(x)), num_samples=2 if has else 0)
        assert optimizer.t == (2 if "local_steps" not in options else optimizer.t)
        return model.W.array.tolist()

    found = run_threads(3, run)
    assert found[0] == found[1] == found[2]


def test_a_mebibyte_of_a_batch_is_compared_and_two_examples_at_least():
    x = np.zeros((1 << 18, 1))  # 2 MiB
    found = introduction._checksum([x])
    assert found == introduction._checksum([x]) and found[1] is False
    for row, is_compared in ((1, True), ((1 << 17) - 1, True), (1 << 17, False), ((1 << 18) - 1, False)):
        other = x.copy()
        other[row] = 1
        checksum, differs = introduction._checksum([other])
        assert (checksum != found[0], differs) == (is_compared, is_compared)
    large = np.zeros((3, 1 << 18))
    for row, is_compared in ((1, True), (2, False)):
        other = large.copy()
        other[row] = 1
        assert introduction._checksum([other])[1] is is_compared


def test_all_arrays_of_a_batch_are_compared():
    a, b, same = np.arange(3), np.arange(3.0), np.ones(3)
    assert introduction._checksum([a, b]) != introduction._checksum([b, a])
    assert introduction._checksum([F.relu(b)]) == introduction._checksum([b])
    assert introduction._checksum([same, a])[1] and introduction._checksum([a, same])[1]
    assert introduction._checksum([same, 3, "text", np.array(5)]) == introduction._checksum([same])
    assert introduction._checksum([]) == (0, False) and introduction._checksum([np.zeros((0, 2))])[1] is False


@each(
    case=[
        ({}, True), ({"size": 2}, False), ({"batch_size": 1}, False), ({"batch_size": 2}, True),
        ({"is_synchronized": True}, False), ({"is_part": True}, False),
    ]
)  # fmt: skip
def test_who_reads_whole_batches(case):
    changes, expected = case
    given = {"size": 1, "batch_size": 4, "is_synchronized": False, "is_part": False, **changes}
    dataset = SimpleNamespace(is_one_ranks=True) if given.pop("is_part") else SimpleNamespace()
    assert introduction._reads_whole_batches(SimpleNamespace(dataset=dataset, **given)) is expected


def test_what_is_one_in_all_rows():
    rows = np.array([[1, 2], [1, 3], [1, 2]])
    assert introduction._is_one(rows, 0) and not introduction._is_one(rows, 1) and introduction._is_one(rows[:1], 1)
