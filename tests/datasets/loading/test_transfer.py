"""Batches on their way to a device whose streams do their work as late as they may: a missing wait shows."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.core.array.backend import get_device
from dbrdist.dataset import ConcatWithAsyncTransfer, concat_examples
from dbrdist.datasets import Batch
from dbrdist.datasets.loading import transfer
from dbrdist.datasets.loading.transfer import Conveyor
from tests.each import each


class Stream:
    """A stream whose work is done when somebody waits for it; ``log`` says what was asked of it."""

    made = []
    current = None

    def __init__(self, non_blocking=False):
        self.non_blocking, self.todo, self.log = non_blocking, [], []
        self.made.append(self)

    def __enter__(self):
        self.before, Stream.current = Stream.current, self

    def __exit__(self, *_):
        Stream.current = self.before

    def wait_event(self, event):
        self.log.append(("wait", event))
        event.synchronize()


class Event:
    def record(self, stream):
        self.stream, self.work = stream, list(stream.todo)
        stream.log.append(("record", self))

    def synchronize(self):
        for work in self.work:
            if work in self.stream.todo:
                self.stream.todo.remove(work)
                work()


class There(np.ndarray):
    """An array on the device."""

    def set(self, a, stream):
        assert a.flags.c_contiguous and a.shape == self.shape and a.dtype == self.dtype
        stream.log.append("copy")
        stream.todo.append(lambda: np.copyto(self, a))


class Gpu:
    module = "cupy"

    def __init__(self, name="@cupy:0"):
        self.name, self.pinned = name, []
        cuda = SimpleNamespace(
            Stream=Stream, Event=Event, get_current_stream=lambda: Stream.current, alloc_pinned_memory=self.allocate
        )
        self.xp = SimpleNamespace(cuda=cuda, empty=self.empty)

    def allocate(self, num_bytes):
        self.pinned.append(num_bytes)
        return bytearray(num_bytes + 512)  # as CUDA does, which rounds up

    def empty(self, shape, dtype):
        return np.full(shape, 99, dtype).view(There)

    def send(self, array):
        return ("sent", array)

    def __str__(self):
        return self.name


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(Stream, "made", [])
    monkeypatch.setattr(transfer, "get_device", lambda device: device)
    monkeypatch.setattr(transfer, "using_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(Stream, "current", Stream())
    Stream.made.clear()
    return Gpu()


@each(sync=[True, False], ndim=[1, 2, 3, 4, 5])
def test_arrays_arrive_in_their_order_whatever_is_refilled(sync, ndim, gpu):
    Stream.made.clear()
    conveyor, a = Conveyor(gpu), np.empty((2, 3, 4, 5, 2)[:ndim], np.float32)
    for i in range(5):
        a[...] = i
        conveyor.put(a)
    (stream,) = Stream.made
    assert stream.non_blocking and len(stream.todo) == 2  # the rooms were used again once they were free
    for i in range(5):
        found = conveyor.get(sync)
        assert found.shape == a.shape and found.dtype == a.dtype and (found == i).all()
        assert found.ndim != 4 or found.transpose(0, 2, 3, 1).flags.c_contiguous
    assert not stream.todo and len(gpu.pinned) % 2 == 0 and set(gpu.pinned[-2:]) == {a.nbytes}


def test_arrays_wait_for_nothing_before_somebody_asks(gpu):
    conveyor = Conveyor(gpu)
    conveyor.put(np.ones(3))
    (stream,) = Stream.made
    assert [x for x in stream.log if x == "copy"] == ["copy"] and len(stream.todo) == 1
    (array, copied) = conveyor._waiting[0]
    assert (array == 99).all()
    conveyor.get(sync=False)
    assert Stream.current.log == [("wait", copied)] and (array == 1).all()


def test_host_memory_grows_with_what_is_sent_and_is_used_again(gpu):
    conveyor, own = Conveyor(gpu, Stream()), []
    for size in (4, 4, 4, 8, 8, 6, 9):
        a = np.arange(float(size))
        conveyor.put(a)
        own.append((conveyor.get(), a))
    assert gpu.pinned == [32, 32, 64, 64, 72] and len(Stream.made) == 1
    for found, a in own:
        assert np.array_equal(found, a)


def test_what_stays_or_is_there_already_is_handed_on(gpu):
    a = np.arange(3.0)
    for device in (None, SimpleNamespace(module="numpy", send=lambda array: array)):
        conveyor = Conveyor(device)
        conveyor.put(a)
        assert conveyor.get() is a
    conveyor = Conveyor(gpu)
    for array in (np.empty((0, 3)), "no array of the host"):
        conveyor.put(array)
        kind, found = conveyor.get(sync=False)
        assert kind == "sent" and found is array
    assert Stream.made == []


def rows(n, start=0):
    return [(np.full((2, 3, 4), i, np.float32), np.int32(i), np.arange(2.0) + i) for i in range(start, start + n)]


@each(kind=["tuple", "dict", "single", "batch"], own=[False, True])
def test_batches_are_those_of_concat_examples(kind, own, gpu):
    Stream.made.clear()
    Stream.current.log.clear()
    stream, compute = (Stream(), Stream()) if own else (None, None)
    convert, held = ConcatWithAsyncTransfer(stream, compute), []
    for k in range(5):
        examples = {
            "tuple": rows(3, 3 * k), "dict": [dict(zip("abc", row)) for row in rows(3, 3 * k)],
            "single": [row[0] for row in rows(3, 3 * k)], "batch": Batch(concat_examples(rows(3, 3 * k))),
        }[kind]  # fmt: skip
        expected = concat_examples(rows(3, 3 * k))
        found = convert(examples, gpu)
        assert isinstance(found, {"dict": dict, "single": There}.get(kind, tuple))
        found = list(found.values()) if kind == "dict" else [found] if kind == "single" else list(found)
        for a, b in zip(found, expected, strict=kind != "single"):
            assert isinstance(a, There) and a.shape == b.shape and a.dtype == b.dtype and np.array_equal(a, b)
        held.append((found, expected))
    (sending,) = [s for s in Stream.made if s is not compute]
    kinds = [x if isinstance(x, str) else x[0] for x in sending.log]
    num = 1 if kind == "single" else 3
    first = ["copy", "record"] * num
    assert kinds == first + (["wait", *first]) * 4
    computing = compute if own else Stream.current
    done = [event for name, event in computing.log if name == "record"]
    assert sum(name == "wait" for name, _ in computing.log) == 5 * num  # and not the host
    waited = [event for name, event in (x for x in sending.log if x[0] == "wait")]
    assert len(done) == 5 and waited == done[:4]  # copies begin when what came before the last call is computed
    assert (sending is stream) == own and sending.non_blocking != own


def test_each_column_has_host_memory_of_its_own(gpu):
    convert = ConcatWithAsyncTransfer()
    for k in range(4):
        convert(rows(2, k), gpu)
    assert len(convert._sender._conveyors) == 3


def test_one_device_each_and_hosts_as_ever(gpu):
    convert = ConcatWithAsyncTransfer()
    host = get_device("@numpy")
    for device in (None, host):
        found = convert(rows(2), device)
        assert [type(a) for a in found] == [np.ndarray] * 3
    padded = convert([np.arange(2), np.arange(3)], gpu, 7)
    assert padded.tolist() == [[0, 1, 7], [0, 1, 2]]
    convert(rows(2), gpu)
    with pytest.raises(ValueError, match="the device @cupy:0 as in the first call, got @cupy:1; make one for each"):
        convert(rows(2), Gpu("@cupy:1"))
    assert convert(rows(2), None)[1].tolist() == [0, 1]
    words = convert([{"x": 1.0, "name": "a"}], gpu)
    assert words["x"].tolist() == [1.0]


def test_a_batch_is_finished_where_it_is_sent(gpu):
    seen = []

    def finish(arrays, dtype):
        seen.append((type(arrays[0]), dtype))
        return (arrays[0] * 2, arrays[1])

    found = ConcatWithAsyncTransfer()(Batch((np.arange(3, dtype=np.uint8), np.arange(3)), finish), gpu)
    assert found[0].tolist() == [0, 2, 4] and seen == [(There, None)]
