"""Divided data, shared evaluation and agreed stops, as functions of a communicator; see contract.py."""

from __future__ import annotations

import operator
import os
import shutil
import tempfile

import numpy as np

from dbrdist.comm import (
    create_empty_dataset,
    create_multi_node_evaluator,
    open_images_once,
    scatter_dataset,
    scatter_index,
)
from dbrdist.comm.protocol.observations import Observations
from dbrdist.comm.run import extensions
from dbrdist.core.model.chain import Chain
from dbrdist.core.model.reporter import report
from dbrdist.datasets.loading.base import block_bounds
from dbrdist.errors import DataSizeError, StopRequested
from dbrdist.iterators import SerialIterator
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


CHECKS = [function for name, function in sorted(globals().items()) if name.startswith("check_")]
by_name = operator.attrgetter("__name__")
