"""What is said where a step runs out of a GPU's memory; a module stands for CuPy, and arrays are small."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

import dbrdist.links as L
from dbrdist import optimizers, training
from dbrdist.core.array import backend
from dbrdist.core.array.gpu import device_memory
from dbrdist.training import extensions, out_of_memory
from dbrdist.training.out_of_memory import Held, most_examples, words
from tests.each import each

GB = 1_000_000_000
MEMORY = device_memory.DeviceMemory(used=70 * GB, held=72 * GB, free=4 * GB, whole=80 * GB)
HELD = Held(parameters=4 * GB, gradients=4 * GB, state=2 * GB)


class OutOfMemoryError(MemoryError):
    """As CuPy's."""

    def __init__(self, size, total):
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes).")


OutOfMemoryError.__module__ = "cupy.cuda.memory"


@pytest.fixture
def cupy(monkeypatch):
    """CuPy with one GPU whose memory is :data:`MEMORY`."""
    module = types.ModuleType("cupy")
    module.ndarray = type("ndarray", (), {})
    runtime = types.SimpleNamespace(memGetInfo=lambda: (MEMORY.free, MEMORY.whole), getDevice=lambda: 0)
    module.cuda = types.SimpleNamespace(runtime=runtime, Device=lambda: types.SimpleNamespace(id=0))
    pool = types.SimpleNamespace(used_bytes=lambda: MEMORY.used, total_bytes=lambda: MEMORY.held)
    module.get_default_memory_pool = lambda: pool
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(device_memory, "_peaks", {})
    return module


def test_sizes_what_held_them_and_a_batch_are_named(cupy):
    said = words(OutOfMemoryError(8 * GB, 70 * GB), MEMORY, HELD, 256)
    assert said == (
        "@cupy:0: a step with 256 examples asked for 8 GB more. Of 80 GB, parameters hold 4 GB, gradients 4 GB, the "
        "optimizer's state 2 GB, activations and other arrays 60 GB; 2 GB is free in CuPy's pool, 4 GB on the device, "
        "and CUDA and other processes hold 4 GB. A batch above 248 cannot fit, since the step had not ended; try 128. "
        "Numbers of 16 bits (dtype: mixed16) take half of the activations' memory."
    )
    alone = words(OutOfMemoryError(8 * GB, 70 * GB), MEMORY, HELD, 1)
    assert "a step with 1 example asked" in alone and "Even one example does not fit" in alone
    assert "asked for 0 bytes more" in words(MemoryError("nothing said"), MEMORY, HELD, 2)


@each(case=[(256, 8, 248), (256, 60, 140), (2, 600, 0), (100, 0, 99), (1, 8, 0)])
def test_the_bound_follows_from_what_the_step_needed_at_least(case):
    num_examples, wanted, most = case
    assert most_examples(MEMORY, HELD, wanted * GB, num_examples) == most
    fixed = HELD._replace(parameters=64 * GB)
    for asked in (0, -1):  # as where nothing says what was asked for, and nothing else was there
        assert most_examples(MEMORY, fixed, asked, num_examples) == num_examples - 1


def test_errors_of_a_gpus_memory_are_told_from_others():
    assert device_memory.is_out_of_memory(OutOfMemoryError(1, 1))
    runtime = type("CUDARuntimeError", (RuntimeError,), {"__module__": "cupy_backends.cuda.api.runtime"})
    assert device_memory.is_out_of_memory(runtime("cudaErrorMemoryAllocation: out of memory"))
    assert not device_memory.is_out_of_memory(runtime("cudaErrorIllegalAddress"))
    assert not device_memory.is_out_of_memory(MemoryError()) and not device_memory.is_out_of_memory(ValueError())
    assert device_memory.wanted_bytes(OutOfMemoryError(12_345, 9)) == 12_345
    assert device_memory.wanted_bytes(MemoryError("no")) == 0


def test_the_largest_memory_is_kept_after_it_was_given_back(cupy, monkeypatch):
    pool = cupy.get_default_memory_pool()
    assert device_memory.peak_bytes() == MEMORY.held
    monkeypatch.setattr(pool, "total_bytes", lambda: 5)
    assert device_memory.held_bytes() == 5 and device_memory.peak_bytes() == MEMORY.held
    cupy.cuda.MemoryPool = lambda: types.SimpleNamespace(total_bytes=lambda: 7, malloc=None)
    private = device_memory.PrivatePool()
    assert device_memory.held_bytes() == 12 and private.malloc is None
    del private
    assert device_memory.held_bytes() == 5


class Exhausting(L.Linear):
    """A network for which there is no memory."""

    def forward(self, x):
        raise OutOfMemoryError(8 * GB, 70 * GB)


@pytest.fixture
def updater():
    """An updater whose network is on the host, and runs out of a GPU's memory."""
    model = L.Classifier(Exhausting(2, 2))
    optimizer = optimizers.SGD().setup(model)
    iterator = dbrdist_iterator(6)
    return training.StandardUpdater(iterator, optimizer)


def dbrdist_iterator(batch, repeat=True):
    from dbrdist import datasets, iterators

    data = datasets.TupleDataset(np.zeros((8, 2), np.float32), np.zeros(8, np.int32))
    return iterators.SerialIterator(data, batch, repeat=repeat, shuffle=False)


def test_an_updater_adds_what_held_the_memory_once(cupy, updater):
    with pytest.raises(OutOfMemoryError, match=r"^Out of memory allocating 8,000,000,000 bytes") as info:
        updater.update()
    (note,) = info.value.__notes__
    assert "a step with 6 examples" in note and "parameters hold 0 bytes" in note  # they are on the host


def test_an_own_update_is_explained_by_the_iterators_batch(cupy, updater):
    def update_core():
        raise OutOfMemoryError(8 * GB, 70 * GB)

    updater.update_core = update_core
    with pytest.raises(OutOfMemoryError) as info:
        updater.update()
    assert "a step with 6 examples" in info.value.__notes__[0]


def test_an_evaluation_is_named(cupy, updater):
    evaluator = extensions.Evaluator(dbrdist_iterator(5, repeat=False), updater.get_optimizer("main").target)
    with pytest.raises(OutOfMemoryError) as info:
        evaluator()
    assert "an evaluation with 5 examples" in info.value.__notes__[0]


def test_other_errors_are_left_alone(updater):
    def update_core():
        raise MemoryError("of the host")

    updater.update_core = update_core
    with pytest.raises(MemoryError) as info:
        updater.update()
    assert not hasattr(info.value, "__notes__")


def test_nothing_hides_the_error_where_the_device_answers_nothing(cupy, updater):
    del cupy.cuda.runtime.memGetInfo
    with pytest.raises(OutOfMemoryError):
        updater.update()


def test_parts_are_counted_on_their_device(cupy):
    def array(number, size):
        a = cupy.ndarray()
        a.nbytes, a.device, a.dtype = size, types.SimpleNamespace(id=number), np.dtype("f4")
        return a

    def parameter(number, size):
        rule = types.SimpleNamespace(state={"m": array(number, 3 * size), "t": 7})
        node = types.SimpleNamespace(gradient=array(number, size))
        held = array(number, size)
        return types.SimpleNamespace(array=held, lend=lambda: held, node=node, update_rule=rule)

    params = [parameter(0, 10), parameter(1, 1000), parameter(0, 100)]
    target = types.SimpleNamespace(params=lambda include_uninit: [*params, params[0]])
    optimizer = types.SimpleNamespace(target=target)
    assert backend.is_array(params[0].array)
    assert out_of_memory.held_by([optimizer, optimizer]) == Held(110, 110, 330)


def test_an_updater_without_a_main_iterator_raises_its_own_error():
    class Own(training.StandardUpdater):
        def update_core(self):
            raise StopIteration("the end")

    updater = Own({"main": dbrdist_iterator(6)}, optimizers.SGD().setup(L.Linear(2, 2)))
    del updater._iterators["main"]
    with pytest.raises(StopIteration, match="the end"):
        updater.update()


@each(
    case=[
        (2, 8, "A batch above 1 cannot fit, since the step had not ended; try 1."),
        (1, 1, "Even one example does not fit beside the rest: use a smaller network or input."),
        (2, 600, "Even one example does not fit beside the rest: use a smaller network or input."),
        (0, 8, "Even one example does not fit beside the rest: use a smaller network or input."),
        (2000, 10, "A batch above 1,885 cannot fit, since the step had not ended; try 1,024."),
    ]
)  # fmt: skip
def test_what_is_advised_follows_from_the_bound(case):
    num_examples, wanted, advice = case
    less = "Numbers of 16 bits (dtype: mixed16) take half of the activations' memory."
    assert out_of_memory._advice(MEMORY, HELD, wanted * GB, num_examples) == f"{advice} {less}"


@each(case=[(0, "0 bytes"), (-1, "0 bytes"), (1, "1 kB"), (999_499, "999 kB"), (1e6, "1 MB"), (1.234e11, "123 GB")])
def test_bytes_in_words(case):
    assert out_of_memory.size(case[0]) == case[1]


def test_an_own_iterator_without_a_batch_size_counts_as_none(cupy, updater):
    def update_core():
        raise OutOfMemoryError(8 * GB, 70 * GB)

    updater.update_core = update_core
    updater._iterators["main"] = object()
    with pytest.raises(OutOfMemoryError) as info:
        updater.update()
    assert "a step with 0 examples asked" in info.value.__notes__[0] and info.value.num_examples == 0
