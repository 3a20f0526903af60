"""What a step needs of the host's memory: measured on a few examples before the run, and extrapolated to its batch."""

from __future__ import annotations

import contextlib
import copy
import tracemalloc
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dbrdist.cli.builders.assemble import Parts
from dbrdist.cli.builders.probe import Look, reporter
from dbrdist.cli.configuration.load import Origin
from dbrdist.cli.configuration.schema import Config, VirtualBatch
from dbrdist.core.array import random
from dbrdist.core.array.config import using_config

if TYPE_CHECKING:
    from dbrdist.cli.builders.task import Task

NUM_EXAMPLES = (2, 4)  # of the two steps that are measured: the difference is what an example needs
_NUM_STATES = 2  # of an optimizer for each parameter: no built-in one has more


class Need(NamedTuple):
    """What a rank's step needs beside the parameters and the process itself, in bytes."""

    fixed_bytes: float  # gradients and optimizer state
    bytes_per_example: float  # activations, their gradients, the batch

    def of(self, num_examples: float) -> float:
        """The bytes of a step with that many examples."""
        return max(self.fixed_bytes + self.bytes_per_example * num_examples, 0.0)


def measure(config: Config, origin: Origin, made: Parts) -> Need | None:
    """What a training step needs on the host, from two steps of a copy of the network; the run is as without.

    It counts what NumPy allocates. None where the network is on a GPU, or cannot be copied or trained by a few
    examples; the run itself says then what is wrong.
    """
    if made.device is not None or tracemalloc.is_tracing():
        return None
    with contextlib.suppress(Exception), _undisturbed():
        look = Look(config, origin, "train", made.data.train, made.convert, None)
        task = copy.deepcopy(made.task)
        few, more = (_peak_bytes(look, task, number) for number in NUM_EXAMPLES)
        slope = max((more - few) / (NUM_EXAMPLES[1] - NUM_EXAMPLES[0]), 0.0)
        states = _NUM_STATES * sum(p.array.nbytes for p in task.params(include_uninit=False))
        return Need(more - slope * NUM_EXAMPLES[1] + states, slope)
    return None


def _peak_bytes(look: Look, task: Task, number: int) -> float:
    """The largest memory that one step with `number` examples had at a time, gradients included."""
    task.cleargrads()
    tracemalloc.start()
    try:
        found = look.arguments(number)
        assert found is not None
        args, named = found
        with reporter(task):
            task(*args, **named).backward()
        return float(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


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


def sentence(need: Need | None, config: Config, num_ranks: int, num_local: int) -> list[str]:
    """What the plan says of it: nothing where nothing could be measured."""
    if need is None:
        return []
    together = config.batch.per_worker if isinstance(config.batch, VirtualBatch) else -(-config.batch // num_ranks)
    own = need.of(together)
    few, more = NUM_EXAMPLES
    per = "per step and rank" if num_ranks > 1 else "per step"
    words = f"memory: about {size(own)} {per} (estimated from batches of {few} and {more})"
    free = free_bytes()
    if free is None:
        return [words]
    here = f" for {num_local} ranks" if num_local > 1 else ""
    words = f"{words}; {size(free)} free here{here}"
    if own * num_local > free:
        words += ": not enough; use a smaller batch, or fewer ranks on a host"
    return [words]


def size(num_bytes: float) -> str:
    """A number of bytes with three digits and its unit."""
    for unit in ("kB", "MB"):
        num_bytes /= 1000
        if num_bytes < 999.5:
            return f"{max(num_bytes, 1):.3g} {unit}"
    return f"{num_bytes / 1000:.3g} GB"
