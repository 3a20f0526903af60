"""Tests of dbrdist.cli.builders.memory."""

from __future__ import annotations

import contextlib
import io
import math
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist import functions as F
from dbrdist.cli.builders import memory
from dbrdist.core.array.config import config as core_config
from dbrdist.links import Linear
from tests.cli.config_helpers import GOOD, config
from tests.each import each


@each(
    case=[
        (0, "1 kB"), (500, "1 kB"), (1000, "1 kB"), (999_400, "999 kB"), (999_500, "1 MB"), (1e6, "1 MB"),
        (999.4e6, "999 MB"), (999.5e6, "0.999 GB"), (12.34e9, "12.3 GB"),
    ]
)  # fmt: skip
def test_sizes_of_memory(case):
    assert memory.size(case[0]) == case[1].replace("0.999 GB", f"{999.5e6 / 1e9:.3g} GB")


@each(free=[None, 7_999_999, 8_000_000])
def test_the_plan_says_where_memory_does_not_suffice(free):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_bytes", lambda: free)
        need, plan = SimpleNamespace(of=lambda n: 4e6 if n == 8 else math.nan), config(GOOD.replace("64", "16"))
        (line,) = memory.sentence(need, plan, 2, 2)
        assert memory.sentence(None, plan, 2, 2) == []
        (alone,) = memory.sentence(SimpleNamespace(of=lambda n: 4e6), plan, 1, 1)
    few, more = memory.NUM_EXAMPLES
    said = f"memory: about 4 MB per step and rank (estimated from batches of {few} and {more})"
    if free is None:
        assert line == said and alone == said.replace(" and rank", "")
    else:
        assert line.startswith(f"{said}; 8 MB free here for 2 ranks") and alone.startswith(
            said.replace(" and rank", "")
        )
        assert line.endswith(": not enough; use a smaller batch, or fewer ranks on a host") == (free < 8_000_000)


def test_memory_that_a_step_gives_back_counts():
    class Task:
        num_cleared = 0

        def cleargrads(self):
            self.num_cleared += 1

        def __call__(self, inputs, scale):
            assert tracemalloc.is_tracing() and inputs.shape == (3,) and scale == 2
            return self

        def backward(self):
            np.ones(1 << 20)

    look = SimpleNamespace(arguments=lambda number: ((np.ones(number),), {"scale": 2}))
    task = Task()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "reporter", lambda task: memory.contextlib.nullcontext())
        peak = memory._peak_bytes(look, task, 3)
    assert 8 << 20 <= peak < 9 << 20 and task.num_cleared == 1 and not tracemalloc.is_tracing()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [(None, None, None), (None, 7, None), (1 << 70, 7, None), (900, 300, 600), (900, None, None), (300, 900, 0)],
)
def test_free_memory_is_that_of_the_container_where_it_has_a_limit(monkeypatch, limit, used, expected):
    """The lesser of what the host and the container have left, and the host's where the container says nothing."""
    numbers = {"/sys/fs/cgroup/memory.max": limit, "/sys/fs/cgroup/memory.current": used}
    monkeypatch.setattr(memory, "_number", numbers.__getitem__)
    free = memory.free_bytes()
    assert free == expected if expected is not None else free > 1 << 20


@pytest.mark.slow
@each(**{"peaks, slope": [((1020, 1040), 10.0), ((1020, 1020), 0.0), ((1021, 1020), 0.0)]})
def test_what_a_step_needs_is_extrapolated_from_two(monkeypatch, peaks, slope):
    """A network of 3 parameters of 4 bytes: twice that for an optimizer's state."""
    monkeypatch.setattr(memory, "Look", lambda *args: None)
    monkeypatch.setattr(memory, "_peak_bytes", lambda look, task, number: {2: peaks[0], 4: peaks[1]}[number])
    made = SimpleNamespace(device=None, data=SimpleNamespace(train=None), convert=None, task=Linear(2, 1))
    need = memory.measure(None, None, made)
    assert need == (peaks[1] - 4 * slope + 24, slope)
    assert need.of(4) == peaks[1] + 24 and need.of(100) == peaks[1] + 24 + 96 * slope and need.of(0) >= 0
    assert memory.Need(-50.0, 10.0).of(3) == 0.0 and memory.Need(-50.0, 10.0).of(7) == 20.0
    made.device = "gpu"
    assert memory.measure(None, None, made) is None


def test_a_gpu_has_a_memory_of_its_own(monkeypatch):
    """The plan names the device, the error a batch that fits there: at most what the step itself has shown to fit."""
    device, plan = SimpleNamespace(name="@cupy:1"), config(GOOD.replace("64", "16"))
    need = memory.Need(2e6, 1e6)
    for free, words in ((20_000_000, ""), (9_000_000, ": not enough; a batch of about 12 fits, 6 on each rank, as")):
        monkeypatch.setattr(memory, "free_on_gpu", lambda free=free: free)
        (line,) = memory.sentence(need, plan, 2, 2, device)
        assert line.startswith("GPU memory: about 10 MB per step and rank (estimated from batches of 2 and 4); ")
        assert f"{memory.size(free)} free on @cupy:1{words}" in line and ("not enough" in line) == bool(words)
    assert memory.fitting(need, plan, 1, 20_000_000) == "a batch of about 16 fits, as measured before the run"
    assert memory.fitting(need, plan, 1, 20_000_000, 9) == "a batch of 4 is worth a try"
    assert memory.fitting(need, plan, 1, 3_000_000).startswith("not even one example per rank fits")
    assert memory.fitting(need, plan, 1, 3_340_000) == "a batch of about 1 fits, as measured before the run"
    assert memory.fitting(need, plan, 1, 20_000_000, 1) == "a batch of 1 is worth a try"
    assert memory.fitting(memory.Need(2e6, 0.0), plan, 1, 20_000_000) == "use a smaller batch"
    virtual = config(GOOD.replace("64", "{virtual_workers: 8, per_worker: 16}"))
    assert memory.fitting(need, virtual, 2, 20_000_000).startswith("16 examples per virtual worker fit")
    assert memory.fitting(need, virtual, 2, 20_000_000, 9) == "4 examples per virtual worker may be worth a try"
    assert memory.fitting(None, plan, 1, 3) == memory.fitting(need, plan, 1, None) == "use a smaller batch"


def test_the_error_of_a_gpu_gets_the_batch_that_fits():
    plan, need = config(GOOD.replace("64", "16")), memory.Need(2e6, 1e6)
    full = type("OutOfMemoryError", (MemoryError,), {"__module__": "cupy.cuda.memory"})()
    full.most_examples = 7
    memory.note_batch(full, need, plan, 2, 20_000_000)
    assert full.__notes__ == ["For this run: a batch of 6 is worth a try."]
    other = MemoryError()
    memory.note_batch(other, need, plan, 2, 20_000_000)
    assert not hasattr(other, "__notes__")


class Failing(Linear):
    """A network whose forward pass raises."""

    error = None

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return F.sum(super().forward(x))


@each(**{"error, fits": [(None, True), (MemoryError("no room"), False), (ValueError("on purpose"), True)]})
def test_a_tried_step_tells_nothing_but_whether_there_was_memory(error, fits):
    """Any other error is left to the run itself, which reports it; the network of the run gets no gradients."""
    task = Failing(2, 1)
    task.error = error
    made = SimpleNamespace(device=None, data=SimpleNamespace(train=None), convert=None, task=task)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "Look", lambda *args: SimpleNamespace(arguments=lambda n: ((np.ones((n, 2), "f"),), {})))
        patch.setattr(memory, "reporter", lambda task: contextlib.nullcontext())
        assert memory.try_step(None, None, made, 3) == fits
    assert task.W.grad is None


@each(
    **{
        "files, expected": [
            ({"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   7 kB\n"}, 7168),
            ({"/proc/meminfo": "MemAvailable: 7 kB\n", "/sys/fs/cgroup/memory.max": "9000",
              "/sys/fs/cgroup/memory.current": "5000\n"}, 4000),
            ({"/proc/meminfo": "MemAvailable: 7 kB\n", "/sys/fs/cgroup/memory.max": "max\n",
              "/sys/fs/cgroup/memory.current": "5000\n"}, 7168),
            ({"/proc/meminfo": "MemTotal: 9 kB\n"}, None), ({"/proc/meminfo": "MemAvailable: x kB\n"}, None),
            ({"/proc/meminfo": "MemAvailable 7\n"}, None), ({}, None),
        ]
    }
)  # fmt: skip
def test_what_the_host_and_the_container_say_of_their_memory(monkeypatch, files, expected):
    def read(path, encoding):
        if path not in files:
            raise FileNotFoundError(path)
        return io.StringIO(files[path])

    monkeypatch.setattr(memory, "open", read, raising=False)
    assert memory.free_bytes() == expected


def test_memory_that_a_pool_holds_and_nobody_uses_is_free(monkeypatch):
    found = SimpleNamespace(free=100, held=50, used=20)
    monkeypatch.setattr(memory.device_memory, "look", lambda: found)
    assert memory.free_on_gpu() == 130
    monkeypatch.setattr(memory.device_memory, "look", lambda: 1 // 0)
    assert memory.free_on_gpu() is None


def test_a_step_on_a_gpu_is_measured_by_a_pool_of_its_own(monkeypatch):
    happened = []

    class Pool:
        malloc = "malloc"

        def total_bytes(self):
            happened.append("total")
            return 4096

        def free_all_blocks(self):
            happened.append("freed")

    @contextlib.contextmanager
    def using_allocator(malloc):
        happened.append(malloc)
        yield
        happened.append("back")

    cuda = SimpleNamespace(MemoryPool=Pool, using_allocator=using_allocator)
    monkeypatch.setattr(memory, "import_cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(memory, "_step", lambda look, task, number: happened.append((look, number)))
    task = SimpleNamespace(cleargrads=lambda: happened.append("clear"))
    assert memory._peak_bytes_on_gpu("look", task, 4) == 4096.0
    assert happened == ["clear", "malloc", ("look", 4), "clear", "back", "total", "freed"]


def test_a_measurement_leaves_chance_as_it_was():
    state, numpy_state = memory.random.get_state(), np.random.get_state()[1].copy()
    with memory._undisturbed():
        assert core_config.train
        memory.random.drawn()
        np.random.rand()
        np.float32(1.0) / np.zeros(1, np.float32)  # no warning
    assert memory.random.get_state() == state and np.array_equal(np.random.get_state()[1], numpy_state)


def test_the_plan_says_how_many_ranks_share_the_memory(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: 8_000_000)
    need = SimpleNamespace(of=lambda n: n * 1e6)
    for batch, ranks, local, own, rest in (
        (16, 1, 1, "16 MB per step", "8 MB free here: not enough; use a smaller batch, or fewer ranks on a host"),
        (16, 4, 1, "4 MB per step and rank", "8 MB free here"),
        (17, 4, 2, "5 MB per step and rank", "8 MB free here for 2 ranks: not enough; use a smaller batch, or fewer "
         "ranks on a host"),
        ("{virtual_workers: 8, per_worker: 3}", 2, 2, "3 MB per step and rank", "8 MB free here for 2 ranks"),
    ):  # fmt: skip
        (line,) = memory.sentence(need, config(GOOD.replace("64", str(batch))), ranks, local)
        assert line == f"memory: about {own} (estimated from batches of 2 and 4); {rest}"


ENOUGH, NONE = (
    "a batch of about 6 fits, as measured before the run",
    "not even one example per rank fits: use a smaller ",
)
NONE += "network or input, or dtype: mixed16"


@each(
    **{
        "free, most, words": [
            (9_000_000, math.inf, ENOUGH), (9_000_000, 6, ENOUGH), (9_000_000, 0, ENOUGH),
            (9_000_000, 5, "a batch of 2 is worth a try"), (3_333_000, math.inf, NONE), (0, 5, NONE),
            (3_335_000, math.inf, "a batch of about 1 fits, as measured before the run"),
        ]
    }
)  # fmt: skip
def test_nine_tenths_of_the_free_memory_are_for_the_batch(free, most, words):
    assert memory.fitting(memory.Need(2e6, 1e6), config(GOOD.replace("64", "16")), 1, free, most) == words


def test_parameters_without_values_yet_need_no_memory(monkeypatch):
    monkeypatch.setattr(memory, "Look", lambda *args: None)
    monkeypatch.setattr(memory, "_peak_bytes", lambda look, task, number: 1000 + number)
    made = SimpleNamespace(device=None, data=SimpleNamespace(train=None), convert=None, task=Linear(None, 3))
    assert memory.measure(None, None, made) == (1000 + 2 * 3 * 4, 1.0)
