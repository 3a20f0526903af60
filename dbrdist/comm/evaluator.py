"""An evaluation shared by the ranks: each example counts once, whoever evaluates it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from dbrdist.comm import agree, virtual_evaluator
from dbrdist.comm.communicator import CommunicatorBase
from dbrdist.comm.datasets import Shard
from dbrdist.core.reporter import Summary
from dbrdist.datasets.serial import SerialIterator
from dbrdist.training.extensions.evaluator import Evaluator


def create_multi_node_evaluator(actual_evaluator: Any, communicator: CommunicatorBase) -> Any:
    """An evaluator like ``actual_evaluator`` that reports, on every rank, the means over the examples of all ranks.

    Each rank evaluates its own part without communicating, so parts may differ in length and be empty. Sums over
    examples are then added in the order of ranks. The padding of a scattered dataset is left out.

    Over an iterator with virtual workers the means are the same to the bit on any number of ranks.

    An evaluator with its own ``evaluate`` method gives means without weights; they are averaged over the ranks whose
    result has the key, each rank weighing the same.

    Raises:
        Whatever one rank raises while it evaluates, on every rank.
    """
    evaluator = copy.copy(actual_evaluator)
    is_plain = isinstance(actual_evaluator, Evaluator) and type(actual_evaluator).evaluate is Evaluator.evaluate
    if is_plain and getattr(actual_evaluator.get_iterator("main"), "virtual_workers", None) is not None:
        evaluator.evaluate = lambda: virtual_evaluator.means(communicator, evaluator)
    elif is_plain:
        evaluator._one_pass = lambda: _without_padding(actual_evaluator)
        evaluator.evaluate = lambda: _merged(communicator, _weighted_means(communicator, evaluator))
    else:
        evaluator.evaluate = lambda: _merged(communicator, _plain_means(communicator, actual_evaluator))
    return evaluator


Means = dict[str, tuple[float, float]]  # key -> (mean, weight)


def _weighted_means(comm: CommunicatorBase, evaluator: Any) -> Means:
    means: Means = {}
    with agree.together(comm):
        summary = evaluator.summarize()
        means = {key: (one.compute_mean(), one._weight) for key, one in summary._summaries.items()}
    return means


def _plain_means(comm: CommunicatorBase, evaluator: Any) -> Means:
    means: Means = {}
    with agree.together(comm):
        means = {key: (float(value), 1.0) for key, value in evaluator.evaluate().items()}
    return means


def _merged(comm: CommunicatorBase, mine: Means) -> dict[str, float]:
    """The weighted means over all ranks, the same on each; keys in the order in which ranks came to them."""
    total: dict[str, Summary] = {}
    for theirs in comm.allgather_obj(mine):
        for key, (mean, weight) in theirs.items():
            if weight:
                total.setdefault(key, Summary()).add(mean, weight)
    return {key: summary.compute_mean() for key, summary in total.items()}


def _without_padding(evaluator: Any) -> Iterator[Any]:
    """The batches of one pass; of a scattered dataset, without the examples that only fill up a rank's part."""
    iterator = evaluator.get_iterator("main")
    dataset = getattr(iterator, "dataset", None)
    if not isinstance(dataset, Shard) or not dataset.num_padding:
        batches: Iterator[Any] = evaluator._one_pass()
        return batches
    own = dataset.without_padding()
    if not len(own):
        return iter(())
    return iter(SerialIterator(own, iterator.batch_size, repeat=False, shuffle=False, seed=0))
