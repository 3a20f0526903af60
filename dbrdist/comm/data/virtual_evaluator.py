"""Evaluation by virtual workers: the same means, to the bit, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.protocol import agree
from dbrdist.core.model.reporter import DictSummary, as_number, is_number

if TYPE_CHECKING:
    from dbrdist.training.extensions.evaluator import Evaluator

Entry = tuple[int, int, int, dict[str, float]]  # batch, worker, examples, values


def means(comm: CommunicatorBase, evaluator: Evaluator) -> dict[str, float]:
    """The means over all examples, which the ranks add in the order of batches and workers. Collective."""
    mine: list[Entry] = []
    evaluator.knows_its_part = True
    with agree.together(comm):
        mine = list(_entries(evaluator))
    summary = DictSummary()
    for _, _, num_samples, values in sorted((e for theirs in comm.allgather_obj(mine) for e in theirs), key=_place):
        summary.add({key: (value, num_samples) for key, value in values.items()})
    return summary.compute_mean()


def _entries(evaluator: Evaluator) -> Iterator[Entry]:
    """What the virtual workers of this rank observe in one pass over the data."""
    if evaluator.eval_hook is not None:
        evaluator.eval_hook(evaluator)
    workers = evaluator.get_iterator("main").workers
    for number, batches in enumerate(evaluator.one_pass()):
        for worker, batch in zip(workers, batches):
            if len(batch):
                observed = evaluator.observe(batch)
                numbers = {k: as_number(v) for k, v in observed.items() if is_number(v)}
                yield number, worker, len(batch), numbers


def _place(entry: Entry) -> tuple[int, int]:
    return entry[:2]
