"""How long the ranks of a host compute, measured on this machine by as many processes at the same time.

Ranks share cores, caches and memory: one process alone is faster than each of several. A step of a job lasts as long as
that of its slowest rank; ``of_slowest`` is what that takes on average, if ranks draw their times from those measured.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from dbrdist_launch.cores import available_cores

from dbrdist.cli.builders import assemble, build_updates
from dbrdist.cli.builders.probe import reporter
from dbrdist.cli.configuration.load import Origin
from dbrdist.cli.configuration.schema import Config
from dbrdist.datasets.loading.base import get_batch
from dbrdist.errors import ConfigError

_NUM_FIRST, _NUM_STEPS, _MAX_STEPS = 2, 5, 100  # steps that choose kernels and make the optimizer's state; of the rest
_SECONDS = 1.0  # at least, so that a pause of the machine is one step of many
# The places of the user's own modules are those of this process, but a `queue.py` among them is no part of Python.
_START = "import sys; given = {!r}; sys.path += given; from {} import serve; sys.path[:] = given; serve()"


class Times(NamedTuple):
    """Of steps that were timed, over all processes together."""

    computation: tuple[float, ...]  # reading the examples (without threads and workers), forward and backward
    update: tuple[float, ...]
    num_examples: int  # in a step
    num_processes: int = 1
    num_threads: int = 0  # of each; 0 for those that one process takes


def of_slowest(times: Sequence[float], ranks: int, parts: float = 1.0) -> float:
    """What the slowest of ``ranks`` takes for a part, where each has so many in a step.

    The mean of the largest of ``ranks`` draws from ``times``; differences from the mean shrink with the root of the
    number of parts, for a rank that is slow in one of them need not be so in the next.
    """
    n, mean = len(times), sum(times) / len(times)
    below = [(k / n) ** ranks for k in range(n + 1)]
    largest = sum(t * (b - a) for t, a, b in zip(sorted(times), below, below[1:]))
    return float(mean + (largest - mean) / math.sqrt(max(parts, 1.0)))


def measure(config: Config, origin: Origin, made: assemble.Parts, per_host: int, num_examples: int) -> Times:
    """Time steps of ``num_examples``, with as many processes as a host has ranks, or as this one has cores.

    Args:
        config: of a run whose data is there; every process reads it.
        origin: where the configuration was written.
        made: the parts of the run, with which this process measures where it is the only one.
        per_host: ranks of a host.
        num_examples: in a step of each process.

    Raises:
        ConfigError: a process has failed.
    """
    cores = available_cores()
    num_processes = min(per_host, cores) if config.device == "cpu" else 1
    if num_processes == 1:
        return Times(*_steps(config, origin, made, num_examples), num_examples)
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    num_threads = int(given) if given.isdigit() and int(given) else max(cores // num_processes, 1)
    with contextlib.ExitStack() as stack:
        words = [stack.enter_context(_process(num_threads)) for _ in range(num_processes)]
        for process in words:
            _tell(process, pickle.dumps((config.model_dump(mode="python"), origin, num_examples)))
        for process in words:  # all are ready before the first one begins
            _hear(process)
        for process in words:
            _tell(process, b"")
        found = [json.loads(_hear(process)) for process in words]
    computation, update = (tuple(t for both in found for t in both[k]) for k in (0, 1))
    return Times(computation, update, num_examples, num_processes, num_threads)


def _steps(config: Config, origin: Origin, made: Any, num_examples: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of computation and of updates, step by step."""
    optimizer = build_updates.optimizer(config, origin, made.task)
    reads = config.threads == config.workers == 0
    wanted = np.arange(num_examples) % len(made.data.train)
    batch = made.convert(get_batch(made.data.train, wanted, 0, 0, []), made.device)
    computation, update, began = [], [], 0.0
    for k in range(_NUM_FIRST + _MAX_STEPS):
        start = time.perf_counter()
        if k == _NUM_FIRST:
            began = start
        if k >= _NUM_FIRST + _NUM_STEPS and start - began > _SECONDS:
            break
        if reads:
            batch = made.convert(get_batch(made.data.train, wanted, 0, k, []), made.device)
        made.task.cleargrads()
        with reporter(made.task):
            made.task(*batch).backward()
        computed = time.perf_counter()
        optimizer.update()
        computation.append(computed - start)
        update.append(time.perf_counter() - computed)
    return tuple(computation[_NUM_FIRST:]), tuple(update[_NUM_FIRST:])


# ---- processes ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _process(num_threads: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for what to measure; it ends with the block, and a Ctrl-C is for this process alone."""
    env = {"OMP_NUM_THREADS": str(num_threads), **os.environ}
    start = _START.format([place for place in sys.path if isinstance(place, str)], __name__)
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, bufsize=0,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _tell(process: Any, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # its answer is missing too
        process.stdin.write(len(data).to_bytes(8) + data)


def _hear(process: Any) -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        more = process.stdout.read(1 << 16)
        if not more:
            raise ConfigError(
                f"dbrdist-train: --rehearse: a process that measures has ended with code {process.wait()}; its own "
                "message stands above; with --examples-per-second nothing is measured"
            )
        line += more
    return bytes(line)


def serve() -> None:
    """The main function of a process: read what to measure, say that it is ready, measure when told to."""
    source, answers = sys.stdin.buffer, os.dup(1)
    os.dup2(2, 1)  # what a program of the user's prints is no answer
    given = source.read(int.from_bytes(source.read(8)))
    if not given:
        return
    entries, origin, num_examples = pickle.loads(given)
    config = Config.model_validate(entries)
    made = assemble.parts(config, origin, 0, 1)
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more
        os.write(answers, b"ready\n")
        if source.read(8):
            os.write(answers, json.dumps(_steps(config, origin, made, num_examples)).encode() + b"\n")
