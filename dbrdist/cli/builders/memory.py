"""What a step needs of memory, the host's or the GPU's: measured on a few examples before the run, and extrapolated."""

from __future__ import annotations

import contextlib
import copy
import math
import tracemalloc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dbrdist.cli.builders.assemble import Parts
from dbrdist.cli.builders.probe import Look, reporter
from dbrdist.cli.configuration.load import Origin
from dbrdist.cli.configuration.schema import Config, VirtualBatch
from dbrdist.cli.output.words import counted
from dbrdist.core.array import random
from dbrdist.core.array.backend import import_cupy
from dbrdist.core.array.config import using_config
from dbrdist.core.array.gpu import device_memory

if TYPE_CHECKING:
    from dbrdist.cli.builders.task import Task

NUM_EXAMPLES = (2, 4)  # of the two steps that are measured: the difference is what an example needs
_PART = 0.9  # of what is free: the rest is for what a measurement of two small steps does not see
_NUM_STATES = 2  # of an optimizer for each parameter: no built-in one has more


class Need(NamedTuple):
    """What a rank's step needs beside the parameters and the process itself, in bytes."""

    fixed_bytes: float  # gradients and optimizer state
    bytes_per_example: float  # activations, their gradients, the batch

    def of(self, num_examples: float) -> float:
        """The bytes of a step with that many examples."""
        return max(self.fixed_bytes + self.bytes_per_example * num_examples, 0.0)


def measure(config: Config, origin: Origin, made: Parts) -> Need | None:
    """What a training step needs, from two steps of a copy of the network; the run is as without.

    On the host it counts what NumPy allocates, on a GPU what CuPy takes from a pool of its own. None where the network
    cannot be copied or trained by a few examples; the run itself says then what is wrong.
    """
    if made.device is None and tracemalloc.is_tracing():
        return None
    peak_of = _peak_bytes if made.device is None else _peak_bytes_on_gpu
    with contextlib.suppress(Exception), _undisturbed():
        look = Look(config, origin, "train", made.data.train, made.convert, made.device)
        task = copy.deepcopy(made.task)
        few, more = (peak_of(look, task, number) for number in NUM_EXAMPLES)
        slope = max((more - few) / (NUM_EXAMPLES[1] - NUM_EXAMPLES[0]), 0.0)
        states = _NUM_STATES * sum(p.lend().nbytes for p in task.params(include_uninit=False))
        return Need(more - slope * NUM_EXAMPLES[1] + states, slope)
    return None


def _peak_bytes(look: Look, task: Task, number: int) -> float:
    """The largest memory that one step with `number` examples had at a time, gradients included."""
    task.cleargrads()
    tracemalloc.start()
    try:
        _step(look, task, number)
        return float(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def _peak_bytes_on_gpu(look: Look, task: Task, number: int) -> float:
    """The same on the current GPU: a pool that is new takes from the device as much as was in use at a time."""
    cuda = import_cupy().cuda
    pool = cuda.MemoryPool()
    task.cleargrads()
    with cuda.using_allocator(pool.malloc):
        _step(look, task, number)
        task.cleargrads()
    taken = float(pool.total_bytes())
    pool.free_all_blocks()
    return taken


def _step(look: Look, task: Task, number: int) -> None:
    found = look.arguments(number)
    assert found is not None
    args, named = found
    with reporter(task):
        task(*args, **named).backward()


def try_step(config: Config, origin: Origin, made: Parts, number: int) -> bool:
    """Whether there is memory for a step of a copy of the network with `number` examples; the run is as without.

    No rank waits for another in it.
    """
    try:
        with _undisturbed():
            look = Look(config, origin, "train", made.data.train, made.convert, made.device)
            task = copy.deepcopy(made.task)
            task.cleargrads()
            found = look.arguments(number)
            if found is not None:
                args, named = found
                with reporter(task):
                    task(*args, **named).backward()
    except MemoryError:
        return False
    except Exception:  # what else goes wrong, the run itself says
        return True
    return True


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Chance as it was, afterwards; NumPy's own too, which a user's code may draw from."""
    state, numpy_state = random.get_state(), np.random.get_state()
    try:
        with using_config("train", True), np.errstate(all="ignore"):
            yield
    finally:
        random.set_state(state)
        np.random.set_state(numpy_state)


def free_on_gpu() -> int | None:
    """The memory that the current GPU still has for this process; None where it does not say."""
    with contextlib.suppress(Exception):  # CuPy's errors have classes of their own
        memory = device_memory.look()
        return memory.free + memory.held - memory.used
    return None


def free_bytes() -> int | None:
    """The memory that this host, or this container, still has; None where it does not say."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        free = int(lines["MemAvailable"].split()[0]) * 1024
        limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
        return free if limit is None or used is None else max(min(free, limit - used), 0)
    return None


def _number(path: str) -> int | None:
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        return int(file.read())
    return None


def sentence(need: Need | None, config: Config, num_ranks: int, num_local: int, device: Any = None) -> list[str]:
    """What the plan says of it: nothing where nothing could be measured."""
    if need is None:
        return []
    own = need.of(_share(config, num_ranks))
    few, more = NUM_EXAMPLES
    per = "per step and rank" if num_ranks > 1 else "per step"
    of = "memory" if device is None else "GPU memory"
    words = f"{of}: about {size(own)} {per} (estimated from batches of {few} and {more})"
    free = free_bytes() if device is None else free_on_gpu()
    if free is None:
        return [words]
    if device is not None:
        words = f"{words}; {size(free)} free on {device.name}"
        return [f"{words}: not enough; {fitting(need, config, num_ranks, free)}" if own > free else words]
    here = f" for {num_local} ranks" if num_local > 1 else ""
    words = f"{words}; {size(free)} free here{here}"
    if own * num_local > free:
        words += ": not enough; use a smaller batch, or fewer ranks on a host"
    return [words]


def _share(config: Config, num_ranks: int) -> int:
    """The examples that a rank holds in memory at a time."""
    return config.batch.per_worker if isinstance(config.batch, VirtualBatch) else -(-config.batch // num_ranks)


def fitting(need: Need | None, config: Config, num_ranks: int, free: int | None, most: float = math.inf) -> str:
    """The batch that fits into so many bytes, by what was measured before the run; a rank's share is at most `most`."""
    if need is None or free is None or not need.bytes_per_example > 0:
        return "use a smaller batch"
    own = int((free * _PART - need.fixed_bytes) / need.bytes_per_example)
    if own > most >= 1:  # small steps need another share of memory than large ones
        half = max(int(most) // 2, 1)
        if isinstance(config.batch, VirtualBatch):
            return f"{counted(half, 'example')} per virtual worker may be worth a try"
        return f"a batch of {half * num_ranks:,} is worth a try"
    if own < 1:
        return "not even one example per rank fits: use a smaller network or input, or dtype: mixed16"
    if isinstance(config.batch, VirtualBatch):
        return f"{own:,} examples per virtual worker fit, as measured before the run"
    ranks = f", {own:,} on each rank" if num_ranks > 1 else ""
    return f"a batch of about {own * num_ranks:,} fits{ranks}, as measured before the run"


def note_batch(error: BaseException, need: Need | None, config: Config, num_ranks: int, free: int | None) -> None:
    """Add to an error of a GPU's memory the batch that would fit."""
    if device_memory.is_out_of_memory(error):
        most = getattr(error, "most_examples", math.inf)
        error.add_note(f"For this run: {fitting(need, config, num_ranks, free, most)}.")


def size(num_bytes: float) -> str:
    """A number of bytes with three digits and its unit."""
    for unit in ("kB", "MB"):
        num_bytes /= 1000
        if num_bytes < 999.5:
            return f"{max(num_bytes, 1):.3g} {unit}"
    return f"{num_bytes / 1000:.3g} GB"
