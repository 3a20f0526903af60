"""Divided data, shared evaluation and agreed stops, as functions of a communicator; see contract.py."""

from __future__ import annotations

import functools
import operator
import os
import shutil
import tempfile
from types import SimpleNamespace

import numpy as np

from dbrdist import datasets, optimizers
from dbrdist import links as L
from dbrdist.comm import (
    create_empty_dataset,
    create_multi_node_evaluator,
    create_multi_node_optimizer,
    open_images_once,
    scatter_dataset,
    scatter_index,
)
from dbrdist.comm.data import iterators
from dbrdist.comm.protocol import shares
from dbrdist.comm.protocol.observations import Observations
from dbrdist.comm.run import extensions
from dbrdist.core.model.chain import Chain
from dbrdist.core.model.reporter import report
from dbrdist.datasets.loading.base import block_bounds
from dbrdist.datasets.loading.convert import concat_examples
from dbrdist.errors import CommunicatorError, DataSizeError, StopRequested
from dbrdist.iterators import SerialIterator
from dbrdist.training import StandardUpdater, Trainer
from dbrdist.training.extensions import Evaluator
from tests.comm.contract import raises


def check_scatter_index(comm):
    for n in (1, 2, 7, 12, 13):
        ranges = comm.allgather_obj(scatter_index(n if comm.rank == comm.size - 1 else 0, comm, comm.size - 1))
        assert {end - begin for begin, end in ranges} == {-(-n // comm.size)}
        assert set().union(*(range(begin, end) for begin, end in ranges)) == set(range(n))
        exact = comm.allgather_obj(scatter_index(n, comm, force_equal_length=False))
        assert [i for begin, end in exact for i in range(begin, end)] == list(range(n))
    assert scatter_index(0, comm, force_equal_length=False) == (0, 0)
    raises(DataSizeError, "at least 1 sample", lambda: scatter_index(0, comm))


def check_scatter_dataset(comm):
    for n in (1, 7, 12):
        data = [f"example {i}" for i in range(n)]
        for has_data, root in ((True, 0), (comm.rank == comm.size - 1, comm.size - 1)):
            for shuffle, seed in ((False, None), (True, None), (True, 5)):
                shard = scatter_dataset(data if has_data else None, comm, root, shuffle, seed)
                assert len(shard) == -(-n // comm.size)
                own = comm.allgather_obj(list(shard.without_padding()[:]))
                together = [example for part in own for example in part]
                assert sorted(together) == sorted(data)
                if not shuffle:
                    assert together == data
                again = scatter_dataset(data, comm, shuffle=shuffle, seed=seed)
                assert again[:] == shard[:]
        exact = scatter_dataset(data, comm, force_equal_length=False)
        assert exact.num_padding == 0
        assert exact[:] == data[slice(*block_bounds(n, comm.rank, comm.size))]
    orders = [scatter_dataset(list(range(100)), comm, shuffle=True, seed=s)[:] for s in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def check_open_images_once(comm):
    """One rank alone looks; all have the same images, whose memory a host has once."""
    folder = comm.bcast_obj(tempfile.mkdtemp() if comm.rank == 0 else None)
    if comm.rank == 0:
        for label in ("ant", "bee"):
            os.mkdir(f"{folder}/{label}")
            with open(f"{folder}/{label}/0.jpg", "wb") as file:
                file.write(label.encode())
    index = open_images_once(folder if comm.rank == 0 else "not looked at", comm)
    assert (index.classes, index.labels.tolist()) == (["ant", "bee"], [0, 1])
    assert index.path(1) == f"{folder}/bee/0.jpg" and index.read(1) == b"bee"
    pages = os.stat(f"/proc/self/fd/{index._descriptor.number}")
    assert comm.intra_size < 2 or len(set(comm.allgather_obj((pages.st_dev, pages.st_ino)))) == 1
    comm.allgather_obj(None)
    if comm.rank == 0:
        shutil.rmtree(folder)
    comm.allgather_obj(None)
    raises(FileNotFoundError, "is not a folder", lambda: open_images_once(folder, comm))


def check_bad_datasets_raise_on_every_rank(comm):
    raises(TypeError, "expected a dataset on the root", lambda: scatter_dataset(None, comm))
    raises(DataSizeError, "at least 1 sample", lambda: scatter_dataset([], comm))
    if comm.size > 1:
        raises(
            ValueError,
            "expected 4 examples as rank 0 has, got 5",
            lambda: scatter_dataset([0] * (4 + (comm.rank == 1)), comm),
        )
        unsized = iter(()) if comm.rank == 1 else [0] * 4
        raises(TypeError, "has no len", lambda: scatter_dataset(unsized, comm))


def check_empty_dataset(comm):
    assert create_empty_dataset(range(3)) == [(), (), ()]


class Score(Chain):
    """Reports the mean of its inputs and, from inputs over 3, of their squares."""

    def forward(self, x):
        report({"mean": x.mean()}, self)
        if (x > 3).any():
            report({"square": (x**2).mean()}, self)


def evaluate(comm, iterator, kind=Evaluator):
    actual = kind(iterator, Score())
    evaluator = create_multi_node_evaluator(actual, comm)
    assert evaluator.default_name == "validation"
    assert evaluator.trigger == (1, "epoch")
    results = [evaluator(), evaluator()]
    assert results[0] == results[1]
    assert comm.allgather_obj(results[0]) == [results[0]] * comm.size
    return results[0]


def check_each_example_counts_once(comm):
    """Also with parts of different length, empty parts, padding, and a last batch that is short."""
    for n in (1, 5, 7, 23):
        values = np.arange(n, dtype=np.float64) ** 2
        expected = values.mean()
        for batch_size in (1, 3, 8):
            blocks = SerialIterator(values, batch_size + comm.size, False, False, rank=comm.rank, size=comm.size)
            padded = SerialIterator(scatter_dataset(values, comm), batch_size, False, False)
            exact = (
                SerialIterator(
                    scatter_dataset(values, comm, shuffle=True, force_equal_length=False), batch_size, False, False
                )
                if n >= comm.size
                else padded
            )
            for iterator in (blocks, padded, exact):
                result = evaluate(comm, iterator)
                assert abs(result["main/mean"] - expected) <= 1e-13 * max(expected, 1)


def check_keys_that_only_some_ranks_have(comm):
    values = np.array([comm.rank * 4.0])
    result = evaluate(comm, SerialIterator(values, 1, False, False))
    expected = [(4.0 * r) ** 2 for r in range(1, comm.size)]
    if expected:
        assert abs(result["main/square"] - np.mean(expected)) < 1e-12
    else:
        assert "main/square" not in result


class Own(Evaluator):
    """An evaluator with its own method."""

    def evaluate(self):
        return {"own": self.get_iterator("main").value}


class Holder:
    """In place of an iterator."""

    def __init__(self, value):
        self.value = value

    def finalize(self):
        """Nothing to do."""


def check_an_evaluator_with_its_own_method(comm):
    assert evaluate(comm, Holder(comm.rank), Own) == {"own": (comm.size - 1) / 2}


def check_an_evaluation_that_fails_on_one_rank_raises_on_all(comm):
    values = np.array(["text"] if comm.rank == comm.size - 1 else [1.0])
    evaluator = create_multi_node_evaluator(Evaluator(SerialIterator(values, 1, False, False), Score()), comm)
    try:
        evaluator()
    except TypeError as e:
        assert comm.size == 1 or f"rank {comm.size - 1} of {comm.size}" in str(e)
        return
    raise AssertionError("expected an error")


class FakeTrainer:
    """What StopOnRequest needs of a trainer."""

    class updater:
        iteration = 4


def check_a_stop_is_agreed(comm):
    saved = []
    stop = extensions.StopOnRequest(comm, saved.append)
    stop(FakeTrainer)
    assert not saved
    if comm.rank == comm.size - 1:
        stop.request()
    try:
        stop(FakeTrainer)
    except StopRequested as e:
        assert str(e) == f"SIGTERM arrived on rank {comm.size - 1}; all ranks stopped after step 4 and saved"
        assert saved == [FakeTrainer]
        return
    raise AssertionError("expected StopRequested")


def check_observations(comm):
    """Weighted by examples; values that come late or on some ranks only; NaN and errors of one rank reach all."""
    last, total = comm.size - 1, sum(range(comm.size))
    observations = Observations(comm)
    assert observations.average({}, 3) == {}
    result = observations.average({"loss": float(comm.rank)}, comm.rank)
    expected = {"loss": sum(r * r for r in range(comm.size)) / total} if total else {}
    assert result == expected
    result = observations.average({"loss": 2.0, **({"extra": 7.0} if comm.rank == last else {})}, 4)
    assert result == {"loss": 2.0, "extra": 7.0}
    result = observations.average({"loss": np.nan if comm.rank == last else 1.0}, 4)
    assert list(result) == ["loss"]
    assert np.isnan(result["loss"])
    many = {f"value {i}": float(i + comm.rank) for i in range(100)}
    result = observations.average(many, 1)
    assert result == {f"value {i}": i + total / comm.size for i in range(100)}
    error = ArithmeticError("the loss is nan") if comm.rank == last else None
    raises(ArithmeticError, "the loss is nan", lambda: observations.average({}, 1, error))


# ---- data in which ranks differ ----


def examples_of(comm, is_other):
    """The examples 0 to 9 in several kinds of datasets; on the last rank in another order, if ``is_other``."""
    numbers = list(range(10))
    if is_other and comm.rank == comm.size - 1:
        numbers = numbers[::-1]
    array = np.array(numbers)
    pairs = [(f"{comm.rank}/{n}.png", n) for n in numbers]  # in a folder of each rank's own
    return {
        "list": numbers, "array": array, "words": [str(n) for n in numbers], "tuple": tuple(numbers),
        "floats": (array / 3).tolist(), "rows": [(np.full(3, n), {"label": n}) for n in numbers],
        "columns": datasets.TupleDataset(array, numbers), "named": datasets.DictDataset(x=array, y=numbers),
        "joined": datasets.ConcatenatedDataset(numbers[:5], numbers[5:]),
        "changed": datasets.TransformDataset(numbers, lambda n: n + comm.rank),
        "augmented": datasets.AugmentedDataset(numbers, lambda n, rng: n + comm.rank),
        "part": datasets.SubDataset([*numbers, 10, 11], 0, 10), "images": datasets.ImageDataset([p for p, _ in pairs]),
        "labelled images": datasets.LabeledImageDataset(pairs), "of the program": Opaque(numbers),
    }  # fmt: skip


class Opaque:
    """A dataset of a program's own, of which nothing is known before an example is read."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        raise AssertionError("reads nothing before its time")


class Repeated(datasets.TupleDataset):
    """Says more examples than those that it is made of."""

    def __len__(self):
        return 5 * super().__len__()


def check_scattered_datasets_in_another_order(comm):
    """Each example is in one part: all ranks get the root's, as in ChainerMN."""
    root = comm.size - 1
    for name, dataset in examples_of(comm, True).items():
        is_told = comm.size > 1 and name != "of the program"
        assert shares.ranks_with_others(comm, dataset) == [root] * is_told, name
    for name, dataset in examples_of(comm, False).items():
        assert not shares.ranks_with_others(comm, dataset), name
        scatter_dataset(dataset, comm, root)
    for dataset in ([10**400] * 10, Repeated(range(2))):  # of which nothing can be told, on one rank or on all
        assert not shares.ranks_with_others(comm, dataset)
        assert not shares.ranks_with_others(comm, dataset if comm.rank == root else Opaque(range(10)))


def check_divided_batches_of_other_examples(comm):
    """In a trainer's loop, in one of the program's own, and in an evaluation."""
    odd = comm.size > 1 and comm.rank == comm.size - 1
    for is_other in (False, True):
        told = "examples in the same order" if is_other and comm.size > 1 else ""
        values = np.arange(10, dtype=np.float32)[:: -1 if is_other and odd else 1]
        rows = [(v[np.newaxis], np.int32(0)) for v in values.copy()]
        share = {"rank": comm.rank, "size": comm.size}
        said(comm, told, functools.partial(shares.check_shares, comm, SerialIterator(rows, 5, seed=1, **share)))
        said(comm, told, functools.partial(own_loop, comm, rows))
        iterator = SerialIterator(rows, 5, repeat=False, shuffle=False, **share)
        evaluator = create_multi_node_evaluator(Evaluator(iterator, L.Classifier(L.Linear(1, 2, initialW=1))), comm)
        said(comm, told, evaluator)


def own_loop(comm, rows, num_ahead=0, **options):
    """Steps without a trainer: who reads what is known from the iterator alone."""
    model = L.Classifier(L.Linear(1, 2, initialW=1))
    optimizer = create_multi_node_optimizer(optimizers.SGD(0.1).setup(model), comm)
    options = {"rank": comm.rank, "size": comm.size, "seed": 3, **options}
    iterator = SerialIterator(rows, 2 * comm.size, **options)
    waiting = [next(iterator) for _ in range(num_ahead)]
    for _ in range(2):
        waiting.append(next(iterator))
        optimizer.update(model, *concat_examples(waiting.pop(0)))


def said(comm, words, function):
    """All ranks raise the same error with ``words``; or none, if these are empty."""
    error = ""
    try:
        function()
    except (CommunicatorError, ValueError) as e:
        error = str(e)
    assert set(comm.allgather_obj(error)) == {error}
    assert words in error and bool(words) == bool(error), error


def check_divided_batches_in_another_order(comm):
    rows = [(np.ones(1, np.float32), np.int32(0))] * (6 * comm.size)
    is_odd = comm.size > 1 and comm.rank == comm.size - 1
    told = "the same training batches" if comm.size > 1 else ""
    said(comm, "", lambda: own_loop(comm, rows))
    for options in ({"seed": 4}, {"shuffle": False}, {"repeat": False}, {"last": "short"}):
        said(comm, told, functools.partial(own_loop, comm, rows, **(options if is_odd else {})))
    sampler = Turned(is_odd)
    said(comm, told, lambda: own_loop(comm, rows, order_sampler=sampler))
    said(comm, "", lambda: own_loop(comm, rows, order_sampler=Turned(False)))
    for num_ahead in (comm.rank, 3 * comm.rank):  # as a thread of the program reads, here into the next epoch
        said(comm, "", functools.partial(own_loop, comm, rows, num_ahead))


class Turned:
    """An order of the program's own."""

    def __init__(self, is_turned):
        self.is_turned = is_turned

    def __call__(self, order, position):
        return order[::-1] if self.is_turned else order


def check_orders_that_differ_from_the_second_epoch_on(comm):
    """A sampler may draw from a generator that each rank has seeded in its own way."""
    if comm.size == 1:
        return

    class Late(Turned):
        num_calls = 0

        def __call__(self, order, position):
            self.num_calls += 1
            return super().__call__(order, position) if self.num_calls > 1 else order

    rows = [(np.ones(1, np.float32), np.int32(0))] * (2 * comm.size)
    model = L.Classifier(L.Linear(1, 2, initialW=1))
    optimizer = create_multi_node_optimizer(optimizers.SGD(0.1).setup(model), comm)
    options = {"rank": comm.rank, "size": comm.size, "order_sampler": Late(comm.rank == 1)}
    iterator = SerialIterator(rows, comm.size, **options)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(StandardUpdater(iterator, optimizer), (9, "iteration"), out=folder)
        said(comm, "the same step on every rank", trainer.run)


def check_some_ranks_divide_batches_and_others_do_not(comm):
    if comm.size == 1:
        return
    rows = [(np.ones(1, np.float32), np.int32(0))] * (6 * comm.size)
    model = L.Classifier(L.Linear(1, 2, initialW=1))
    optimizer = create_multi_node_optimizer(optimizers.SGD(0.1).setup(model), comm)
    options = {} if comm.rank else {"rank": comm.rank, "size": comm.size}
    updater = StandardUpdater(SerialIterator(rows, 2 * comm.size, **options), optimizer)
    said(comm, "rank 0 divides batches (rank=, size=) and rank", updater.update)


def check_synchronized_iterators_that_differ(comm):
    if comm.size == 1:
        return
    for options in ({"repeat": bool(comm.rank)}, {"rank": comm.rank, "size": comm.size}):
        iterator = SerialIterator(list(range(4 * comm.size)), comm.size, **options)
        function = functools.partial(iterators.create_synchronized_iterator, iterator, comm)
        said(comm, "iterators of the same kind", function)


def check_iterators_synchronized_in_another_order(comm):
    """Each would have the order of another one of its size. The lines of the calls tell, or seeds, or examples."""
    if comm.size == 1:
        return

    def first(iterator):
        iterators.create_synchronized_iterator(iterator, comm)

    def second(iterator):
        iterators.create_synchronized_iterator(iterator, comm)

    size = 4 * comm.size
    text = f"rank {comm.size - 1} gives its iterators in another order than rank 0"
    own = [100 * comm.rank + k for k in range(9)]  # seeds of this rank
    for calls, seeds, starts in [
        ([first, second], own, [0, 0]),
        ([first, first], [7, 8], [0, 0]),
        ([first, first], own[2:], [0, size]),
    ]:
        both = [
            functools.partial(call, SerialIterator(list(range(start, start + size)), comm.size, seed=seed))
            for call, seed, start in zip(calls, seeds, starts)
        ]
        for words, one in zip(["", text], both[:: -1 if comm.rank == comm.size - 1 else 1]):
            said(comm, words, one)
        for one in both:
            said(comm, "", one)
    for call, seed in ([first, comm.rank], [second, (comm.rank + 1) % comm.size]):  # lines say that this is right
        said(comm, "", functools.partial(call, SerialIterator([0] * size, comm.size, seed=seed)))
    for call, start in ([first, comm.rank], [second, (comm.rank + 1) % comm.size]):  # and this: each has another part
        examples = list(range(start * 1000, start * 1000 + size))
        said(comm, "", functools.partial(call, SerialIterator(examples, comm.size)))


def check_models_given_in_another_order(comm):
    """Two of equal shapes would have each other's parameters."""
    if comm.size == 1:
        return

    def first(model):
        comm.bcast_data(model)

    def second(model):
        comm.bcast_data(model)

    both = [functools.partial(call, L.Linear(2, 3)) for call in (first, second)]
    text = f"bcast_data: rank {comm.size - 1} gives its models in another order than rank 0"
    for words, one in zip(["", text], both[:: -1 if comm.rank == comm.size - 1 else 1]):
        said(comm, words, one)
    for one in both:
        said(comm, "", one)
    for one in (first, second) if comm.rank == 0 else (second, second):  # as where one rank reads a file before
        said(comm, "", functools.partial(one, L.Linear(2, 3)))


def check_evaluations_of_other_shares(comm):
    if comm.size == 1:
        return
    model = L.Classifier(L.Linear(1, 2, initialW=1))
    for num, rank in ((0, 0), (comm.rank, comm.rank)):
        rows = [(np.ones(1, np.float32), np.int32(0))] * (6 * comm.size + num)
        iterator = SerialIterator(rows, comm.size, repeat=False, shuffle=False, rank=rank, size=comm.size)
        evaluator = create_multi_node_evaluator(Evaluator(iterator, model), comm)
        said(comm, "evaluation", evaluator)


def check_evaluators_in_another_order(comm):
    """Each rank's means would be of another network or dataset."""
    made = []
    for value in (1, 2):
        rows = [(np.ones(1, np.float32), np.int32(0))] * value
        iterator = SerialIterator(rows, 2, repeat=False, shuffle=False)
        made.append(create_multi_node_evaluator(Evaluator(iterator, L.Classifier(L.Linear(1, 2, initialW=1))), comm))
    for _ in range(2):
        for evaluator in made:
            evaluator()
    is_turned = comm.size > 1 and comm.rank == 1
    told = "expected the same evaluator on every rank" if comm.size > 1 else ""
    said(comm, told, lambda: [evaluator() for evaluator in (made[::-1] if is_turned else made)])


def check_aggregated_keys_that_differ(comm):
    key = "main/accuracy" if comm.size > 1 and comm.rank == 1 else "main/loss"
    aggregator = extensions.ObservationAggregator(comm, key, "mean", comm_trigger=lambda trainer: True)
    trainer = SimpleNamespace(observation={"main/loss": 1.0, "main/accuracy": 0.5})
    told = "'main/accuracy' as 'mean' on rank 1" if comm.size > 1 else ""
    said(comm, told, lambda: aggregator(trainer))


CHECKS = [function for name, function in sorted(globals().items()) if name.startswith("check_")]
by_name = operator.attrgetter("__name__")
