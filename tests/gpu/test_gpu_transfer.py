"""Batches sent on a stream of their own arrive whole, whatever is refilled meanwhile.

On the stand-in, streams do their work as late as they may, so that a wait that is missing shows.
"""

from __future__ import annotations

import types

import numpy as np
import pytest

import dbrdist
from dbrdist.core.array.backend import get_device, to_cpu
from dbrdist.dataset import ConcatWithAsyncTransfer, concat_examples
from dbrdist.datasets import Batch, Normalize, ToCHW, TupleDataset
from dbrdist.datasets.image.transforms import Finisher
from dbrdist.datasets.loading.transfer import Conveyor


class LateStream:
    """A stream whose work is done when somebody waits for it."""

    made: list[LateStream] = []

    def __init__(self, non_blocking=False):
        assert non_blocking
        self.todo, self.log = [], []
        self.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait_event(self, event):
        self.log.append("wait")
        self.todo.append(event.synchronize)

    def do(self, work):
        self.log.append("copy")
        self.todo.append(work)


class Now:
    """The stream of the computations, which the stand-in does at once."""

    ptr = 0  # the default one

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait_event(self, event):
        event.synchronize()


class Event:
    def record(self, stream=None):
        self.before = list(stream.todo) if isinstance(stream, LateStream) else []
        self.stream = stream

    def synchronize(self):
        for work in self.before:
            if work in self.stream.todo:
                self.stream.todo.remove(work)
                work()


@pytest.fixture
def late(on, monkeypatch):
    """With the stand-in, streams that are late."""
    if on != "stand-in":
        return
    import cupy

    true_set = cupy.ndarray.set
    monkeypatch.setattr(LateStream, "made", [])

    def set_(self, a, stream=None):
        assert a.flags.c_contiguous and a.shape == self.shape and a.dtype == self.dtype
        stream.do(lambda: true_set(self, a))

    monkeypatch.setattr(cupy.ndarray, "set", set_)
    pinned = {"alloc_pinned_memory": lambda size: bytearray(size), "Stream": LateStream, "Event": Event}
    streams = {"get_current_stream": Now, **pinned}
    monkeypatch.setattr(cupy, "cuda", types.SimpleNamespace(**{**vars(cupy.cuda), **streams}))


def rows(n):
    return [(np.full((3, 4, 5), i, np.float32), np.int32(i), np.arange(2.0) + i) for i in range(n)]


def equal(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert np.array_equal(to_cpu(a), b)


@pytest.mark.parametrize("kind", ["list", "batch", "dict"])
def test_batches_arrive_whole(late, on, device, kind):
    convert, seen = ConcatWithAsyncTransfer(), []
    for k in range(6):
        examples = rows(4 * (k + 1))[4 * k :]
        expected = concat_examples(examples)
        if kind == "batch":
            examples = Batch(expected)
        if kind == "dict":
            examples = [dict(enumerate(e)) for e in examples]
        found = convert(examples, device)
        found = tuple(found.values()) if kind == "dict" else found
        equal(found, expected)
        seen.append((found, expected))
    for found, expected in seen:  # those that are still held are what they were
        equal(found, expected)
    if on == "stand-in":
        (stream,) = LateStream.made
        assert stream.log[:8] == ["copy"] * 3 + ["wait"] + ["copy"] * 3 + ["wait"]


def test_arrays_wait_in_a_row_while_the_host_refills_them(late, device):
    conveyor, a = Conveyor(device), np.empty((2, 3), np.float32)
    for i in range(5):
        a[...] = i
        conveyor.put(a if device.module == "cupy" else a.copy())  # on the host it is handed over as it is
    a = np.ones((2, 3, 4, 5), np.float32).transpose(0, 3, 1, 2)
    conveyor.put(a)
    conveyor.put(np.empty((0, 3)))
    for i in range(5):
        assert (to_cpu(conveyor.get(sync=bool(i % 2))) == i).all()
    assert conveyor.get().shape == (2, 5, 3, 4) and conveyor.get().shape == (0, 3)


def test_a_batch_is_finished_on_the_device(late, device):
    x = np.random.default_rng(0).integers(0, 256, (3, 5, 4, 3), np.uint8)
    finish = Finisher([Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)), ToCHW()])
    (expected,) = [np.asarray(finish(x))]
    found, labels = ConcatWithAsyncTransfer()(Batch((x, np.arange(3)), finish), device)
    np.testing.assert_allclose(to_cpu(found), expected, rtol=1e-6, atol=1e-6)
    assert to_cpu(labels).tolist() == [0, 1, 2]


def test_one_device_each(late, on, device):
    convert = ConcatWithAsyncTransfer()
    assert isinstance(convert(rows(2))[0], np.ndarray) and isinstance(convert(rows(2), -1)[0], np.ndarray)
    with pytest.raises(ValueError, match="at least one example"):
        convert([], device)
    padded = convert([np.arange(2), np.arange(3)], device, 7)
    assert to_cpu(padded).tolist() == [[0, 1, 7], [0, 1, 2]]
    if on == "stand-in":
        with pytest.raises(
            ValueError, match=r"the device @cupy:0 as in the first call, got @cupy:1; make one for each"
        ):
            convert(rows(2), get_device("@cupy:1"))


def test_in_a_trainer(late, device, tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    losses = []
    for convert in (concat_examples, ConcatWithAsyncTransfer()):
        dbrdist.random.set_seed(0)
        model = dbrdist.links.Linear(3, 1)
        model.to_device(device)
        optimizer = dbrdist.optimizers.SGD(0.1).setup(model)
        iterator = dbrdist.iterators.SerialIterator(TupleDataset(x, x.sum(1, keepdims=True)), 8, seed=1)

        def loss(x, t, model=model):
            return dbrdist.functions.mean_squared_error(model(x), t)

        updater = dbrdist.training.updaters.StandardUpdater(iterator, optimizer, convert, device=device, loss_func=loss)
        for _ in range(12):
            updater.update()
        losses.append(to_cpu(model.W.array).tolist())
    assert losses[0] == losses[1]
