"""The batch-size finder: real steps with growing batches, until the host's memory or the data has no more."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

from dbrdist.cli.builders import build_updates, memory
from dbrdist.cli.builders.assemble import iterator
from dbrdist.cli.builders.probe import reporter
from dbrdist.cli.configuration.finders import BatchFinder
from dbrdist.cli.output.folder import BATCH_SIZES
from dbrdist.cli.output.refuse import Refused
from dbrdist.cli.output.words import counted, said
from dbrdist.core.files.serializer import write_atomically
from dbrdist.core.model.reporter import as_number

_ENOUGH = 0.95  # of the highest speed: a batch that reaches it is not worth enlarging
_PART_OF_MEMORY = 0.9  # of what is free: the rest is for what a measurement of two small steps does not see


class TimedBatch(NamedTuple):
    """A batch over all ranks, the seconds of a step and the examples per second."""

    batch: int
    seconds: float
    speed: float


def sizes(settings: BatchFinder, num_ranks: int, num_examples: int) -> Iterator[int]:
    """The batches to try: each rank has an example at least, and no batch has more than there are."""
    batch = max(settings.lowest, num_ranks)
    while batch <= min(settings.highest, num_examples):
        yield batch
        batch *= 2


def find(run: Any) -> None:
    """Try the batches, write the table, and say which batch to begin with. Collective; the weights change."""
    settings, comm, num_examples = run.config.batch_finder, run.comm, len(run.parts.data.train)
    tried = list(sizes(settings, comm.size, num_examples))
    if not tried:
        words = f"{counted(f'{num_examples:,}', 'training example')} and {counted(comm.size, 'rank')}"
        raise Refused(
            f"batch_finder: no batch of {settings.lowest:,} to {settings.highest:,} examples fits {words}; "
            "choose a lower batch_finder.lowest or a higher batch_finder.highest", 2,
        )  # fmt: skip
    need = memory.measure(run.config, run.origin, run.parts) if comm.rank == 0 else None
    found: list[TimedBatch] = []
    reason = None
    try:
        for batch in tried:
            reason = comm.bcast_obj(_lack(need, -(-batch // comm.size), comm.intra_size, run.parts.device))
            if reason is not None:
                break
            step = _measured(run, batch) if _fits(run, batch) else None
            if step is None:
                reason = f"a step with {batch:,} examples needs more memory than there is"
                break
            found.append(step)
            run.say(
                f"batch-size finder: batch {step.batch:>7,}: {_milliseconds(step.seconds)} per step, "
                f"{step.speed:,.0f} examples/s"
            )
            run.stop(run.trainer)
    finally:
        run.stop.finalize()
        run.trainer.updater.finalize()
    if comm.rank == 0:
        for line in verdict(found, reason, settings, num_examples):
            run.say(line)
        _write(run, found)


def _lack(need: memory.Need | None, share: int, num_local: int, device: Any = None) -> str | None:
    """Why a step with so many examples per rank should not be tried; None where nothing speaks against it."""
    free = memory.free_bytes() if device is None else memory.free_on_gpu()
    if need is None or free is None:
        return None
    own = need.of(share) * (num_local if device is None else 1)
    if own <= free * _PART_OF_MEMORY:
        return None
    return f"a step with {share:,} examples per rank needs about {memory.size(own)}, and {memory.size(free)} is free"


def _fits(run: Any, batch: int) -> bool:
    """Whether each of several ranks has memory for its share of a batch, tried by each alone. Collective.

    Where memory runs out in a step of all ranks, the others are in a collective already. Batch normalization over ranks
    has some in forward, too: it is not tried.
    """
    config = run.config
    if run.comm.size == 1 or config.batch_norm.group > 1:
        return True
    share = -(-batch // run.comm.size)
    return all(run.comm.allgather_obj(memory.try_step(config, run.origin, run.parts, share)))


def _measured(run: Any, batch: int) -> TimedBatch | None:
    """A few steps with a batch; None where memory ran out. The slowest rank counts."""
    config = run.config.model_copy(update={"batch": batch})
    batches = iterator(config, run.parts.data.train, run.comm, train=True)
    optimizer = run.trainer.updater.get_optimizer("main")
    updater = build_updates.updater(config, run.origin, batches, optimizer, run.parts.convert, run.parts.device)
    speeds = []
    try:
        for k in range(config.batch_finder.steps + 1):
            began = time.perf_counter()
            with reporter(run.parts.task) as seen:
                updater.update()
                for value in seen.observation.values():
                    as_number(value)  # a GPU has computed it by then
            passed = max(run.comm.allgather_obj(time.perf_counter() - began))
            if k:  # the first step allocates
                speeds.append(batches.num_samples_global / passed)
    except MemoryError:
        if run.comm.size > 1:  # the others are in a collective already
            raise
        return None
    finally:
        updater.finalize()
    speed = median(speeds)
    return TimedBatch(batch, batch / speed, speed)


def suggestion(found: list[TimedBatch]) -> TimedBatch:
    """The smallest batch that is nearly as fast as the fastest."""
    highest = max(step.speed for step in found)
    return next(step for step in found if step.speed >= _ENOUGH * highest)


def verdict(found: list[TimedBatch], reason: str | None, settings: BatchFinder, num_examples: int) -> list[str]:
    """What the measurements say, in sentences; where the suggestion is the first or last batch, what that means."""
    if not found:
        return [f"batch-size finder: no batch was tried: {reason}"]
    best, last = suggestion(found), found[-1]
    lines = [f"batch-size finder: {reason}"] if reason else []
    lines.append(
        f"batch-size finder: {best.batch:,} is the smallest batch with {100 * _ENOUGH:.0f} % of the highest speed; "
        f"begin with batch={best.batch}"
    )
    if best is last and len(found) > 1 and reason is None:
        whole = f"the training set has {counted(f'{num_examples:,}', 'example')}"
        why = whole if last.batch * 2 > num_examples else "try a higher batch_finder.highest"
        lines.append(f"batch-size finder: larger batches may be faster still; {why}")
    elif best is found[0] and best.batch == settings.lowest and len(found) > 1:
        lines.append("batch-size finder: a smaller batch may be as fast; try a lower batch_finder.lowest")
    return lines


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"


def _write(run: Any, found: list[TimedBatch]) -> None:
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(("batch", "seconds_per_step", "examples_per_second"))
    rows.writerows(found)
    try:
        write_atomically(os.path.join(run.folder.path, BATCH_SIZES), lambda file: file.write(text.getvalue().encode()))
    except OSError as error:
        run.say(f"{run.folder.path}: the table of batch sizes could not be written: {said(error)}")
