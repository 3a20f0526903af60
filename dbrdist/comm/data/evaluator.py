"""An evaluation shared by the ranks: each example counts once, whoever evaluates it."""

from __future__ import annotations

import copy
import itertools
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.data import virtual_evaluator
from dbrdist.comm.data.datasets import Shard
from dbrdist.comm.gradients.mean_network import one_network
from dbrdist.comm.protocol import agree
from dbrdist.comm.protocol.agree import raise_together
from dbrdist.comm.protocol.arguments import attempt, rank_of
from dbrdist.comm.protocol.roster import RosterEntry, are_same, roster_of
from dbrdist.comm.protocol.shares import check_shares, checksum_of
from dbrdist.core.array.backend import DeviceSpec, is_array, to_cpu
from dbrdist.core.array.config import no_backprop_mode, using_config
from dbrdist.core.model.reporter import Reporter, Summary, report
from dbrdist.core.tape.variable import Variable
from dbrdist.core.usage.mistakes import warn
from dbrdist.datasets.loading.contents import known_examples
from dbrdist.datasets.loading.convert import call_converter, concat_examples
from dbrdist.datasets.loading.serial import SerialIterator
from dbrdist.errors import CommunicatorError
from dbrdist.training.extensions.evaluator import Evaluator
from dbrdist.training.updater import as_arguments

if TYPE_CHECKING:
    from typing import TypeVar

    from dbrdist.core.array.types import Array
    from dbrdist.core.model.link import Link
    from dbrdist.datasets.loading import serial
    from dbrdist.datasets.loading.base import Batch
    from dbrdist.training.trainer import Trainer

    E = TypeVar("E", bound=Evaluator)


def create_multi_node_evaluator(actual_evaluator: E, communicator: CommunicatorBase) -> E:
    """An evaluator like ``actual_evaluator`` that reports, on every rank, the means over the examples of all ranks.

    Each rank evaluates its own part without communicating, so parts may differ in length and be empty. Sums over
    examples are then added in the order of ranks. The padding of a scattered dataset is left out.

    Over an iterator with virtual workers the means are bit for bit the same on any number of ranks.

    All ranks evaluate one network: with local steps the mean of theirs, and always with the means of their running
    statistics. A warning says where their parameters differ otherwise, and no part of the model communicates.

    An evaluator with its own ``evaluate`` method gives means without weights; they are averaged over the ranks whose
    result has the key, with equal weights.

    Args:
        actual_evaluator: the evaluator of this rank, over its part of the data.
        communicator: the ranks.

    Raises:
        Whatever one rank raises while it evaluates, on every rank.

    Example:
        >>> comm = dbrdist.comm.create_communicator("single")
        >>> test = iterators.SerialIterator(datasets.get_digits()[1], 100, repeat=False, shuffle=False)
        >>> evaluator = extensions.Evaluator(test, L.Classifier(L.Linear(64, 10)))
        >>> sorted(dbrdist.comm.create_multi_node_evaluator(evaluator, comm)())
        ['main/accuracy', 'main/loss']
    """
    if not hasattr(actual_evaluator, "evaluate"):
        raise TypeError(
            f"create_multi_node_evaluator: expected an evaluator, got {type(actual_evaluator).__name__}; write "
            "create_multi_node_evaluator(Evaluator(iterator, model), comm)"
        )
    if not isinstance(communicator, CommunicatorBase):
        kind = type(communicator).__name__
        raise TypeError(f"create_multi_node_evaluator: expected a communicator, got {kind}")
    evaluator: Any = copy.copy(actual_evaluator)
    evaluator.is_of_all_ranks = True
    entry = roster_of(communicator, "evaluators").enter(sys._getframe(1))
    is_plain = isinstance(actual_evaluator, Evaluator) and type(actual_evaluator).evaluate is Evaluator.evaluate
    if is_plain and getattr(actual_evaluator.get_iterator("main"), "virtual_workers", None) is not None:
        evaluator.evaluate = lambda: virtual_evaluator.means(communicator, evaluator)
    elif is_plain:
        actual_evaluator.knows_its_part = True  # of the ranks' data, whose results are added up here
        evaluator.one_pass = lambda: _without_padding(actual_evaluator)
        checked = _CheckedOnce(communicator, evaluator)
        evaluator.evaluate = lambda: _of_one_network(communicator, entry, evaluator, _weighted_means, checked())
    else:
        evaluator.evaluate = lambda: _of_one_network(communicator, entry, evaluator, _plain_means, actual_evaluator)
    found: E = evaluator
    return found


class _CheckedOnce:
    """Gives an evaluator, before its first evaluation only if the ranks evaluate parts of the same data. Collective."""

    def __init__(self, comm: CommunicatorBase, evaluator: Evaluator) -> None:
        self._comm = comm
        self._evaluator = evaluator
        self._is_first = comm.size > 1

    def __call__(self) -> Evaluator:
        if self._is_first:
            check_shares(self._comm, self._evaluator.get_iterator("main"), "evaluation", is_moving=False)
            self._is_first = False
        return self._evaluator


class GenericMultiNodeEvaluator(Evaluator):
    """An evaluation whose result is not a mean: each rank computes, and ``root`` sees the results of all.

    Override :meth:`calc_local` and :meth:`aggregate`; what ``aggregate`` reports is observed on the root. Ranks may
    have different numbers of batches, and none.

    Args:
        comm: the ranks.
        iterator: over this rank's part; the padding of a scattered dataset is left out.
        target: the link that ``calc_local`` calls unless it is overridden.
        device: where ``converter`` puts the batches.
        converter: ``converter(batch, device)`` gives the arguments of ``calc_local``.
        root: the rank that calls ``aggregate``.
        **kwargs: ``progress_hook``, called with each batch after it was computed, and what :class:`Evaluator` takes.

    Raises:
        Whatever one rank raises, on every rank.
    """

    knows_its_part = is_of_all_ranks = True

    def __init__(
        self,
        comm: CommunicatorBase,
        iterator: serial.Iterator,
        target: Link,
        device: DeviceSpec | None = None,
        converter: Callable[..., tuple[Array, ...] | dict[str, Array] | Array] = concat_examples,
        root: int = 0,
        **kwargs: Any,
    ) -> None:
        self._progress_hook = kwargs.pop("progress_hook", None)
        super().__init__(iterator, target, converter, device, **kwargs)
        raise_together(comm, attempt(rank_of, root, comm.size, "GenericMultiNodeEvaluator: root")[1])
        self.comm = comm
        self.root = root
        made = roster_of(comm, "generic evaluators").enter(sys._getframe(1))
        self._made = f"generic evaluator {made.ordinal}"  # ranks make them together

    def calc_local(self, *args: Any, **kwargs: Any) -> Any:
        """The result of one batch; anything that can be pickled, but not None."""
        return self.get_target("main")(*args, **kwargs)

    def aggregate(self, results: list[Any]) -> Any:
        """What the root makes of the results of all ranks: the first batch of each in their order, the second, ..."""
        return results

    def evaluate(self) -> Any:
        """What ``aggregate`` returns, on the root; None on the other ranks."""
        mine: list[Any] = []
        with agree.together(self.comm):
            if self.eval_hook is not None:
                self.eval_hook(self)
            mine = [self._result_of(batch) for batch in _without_padding(self)]
        with self.comm.gate.of(self._made):
            everyone = self.comm.gather_obj(mine, self.root)
        total = None
        with agree.together(self.comm):
            if everyone is not None:
                turns = itertools.zip_longest(*everyone)
                total = self.aggregate([result for turn in turns for result in turn if result is not None])
        return total

    def _result_of(self, batch: Batch) -> Any:
        with no_backprop_mode():
            args, named = as_arguments(call_converter(self.converter, batch, self.device))
            result = self.calc_local(*args, **named)
        if result is None:
            raise TypeError("calc_local expected to return a result for each batch, got None")
        if self._progress_hook is not None:
            self._progress_hook(batch)
        return _on_host(result)

    def __call__(self, trainer: Trainer | None = None) -> Any:
        """Evaluate; observed is what ``aggregate`` reports, on the root. Returns its result there, None elsewhere."""
        reporter = Reporter()
        prefix = self.name + "/" if self.name else ""
        for name, target in self.get_all_targets().items():
            reporter.add_observer(prefix + name, target)
            reporter.add_observers(prefix + name, target.namedlinks(skipself=True))
        with reporter, using_config("train", False), one_network(self.comm, self.get_all_targets().values()):
            result = self.evaluate()
        report(reporter.observation)
        return result


def _on_host(result: Any) -> Any:
    """Variables as arrays, arrays of a device in host memory: what another rank can take."""
    if isinstance(result, Variable):
        result = result.array
    if isinstance(result, tuple | list):
        return type(result)(map(_on_host, result)) if type(result) in (tuple, list) else result
    if isinstance(result, dict):
        return {key: _on_host(value) for key, value in result.items()}
    return to_cpu(result) if is_array(result) else result


Means = dict[str, tuple[float, float]]  # key -> (mean, weight)


def _of_one_network(
    comm: CommunicatorBase,
    entry: RosterEntry,
    evaluator: Evaluator,
    means: Callable[[Evaluator], Means],
    called: Evaluator,
) -> dict[str, float]:
    """The means over all ranks. Where their networks differ for a while, all evaluate the mean of them."""
    targets: dict[str, Link] = getattr(evaluator, "get_all_targets", dict)()
    with one_network(comm, targets.values()) as difference:
        mine: Means = {}
        num_verbs = comm.gate.record.num_entered
        communicates = False
        with agree.together(comm):
            mine = means(called)
            communicates = comm.gate.record.num_entered > num_verbs  # as the parts of one network do
        found = comm.allgather_obj((mine, communicates, entry))
        _check_is_one(comm, evaluator, [theirs for *_, theirs in found])
        everyone = [(theirs, does) for theirs, does, _ in found]
    is_of_several = sum(any(weight for _, weight in theirs.values()) for theirs, _ in everyone) > 1
    if difference and is_of_several and comm.rank == 0 and not any(does for _, does in everyone):
        warn(
            f"{evaluator.name or 'Evaluator'}: the ranks have different networks, so that the means over their "
            f"examples belong to none of them: {difference}; give all rank 0's before (comm.bcast_data(model), or a "
            "first update of a multi-node optimizer)"
        )
    return _merged([theirs for theirs, _ in everyone])


def _check_is_one(comm: CommunicatorBase, evaluator: Any, entries: list[RosterEntry]) -> None:
    """Raise CommunicatorError on every rank where their evaluators are not the same one."""
    if not are_same(entries):
        contents = comm.allgather_obj(_content(evaluator))
        if contents[0] is not None and contents.count(contents[0]) == len(contents):
            return  # one rank has made it once more
        made = "; ".join(f"evaluator {e.ordinal} (made at {e.place}) on rank {r}" for r, e in enumerate(entries[:8]))
        raise CommunicatorError(
            f"expected the same evaluator on every rank, by the order in which they were made, got {made}: the ranks "
            "call their evaluators in different orders, and means over two networks or datasets belong to none"
        )


def _content(evaluator: Evaluator) -> list[Any] | None:
    """What is evaluated: the name, the parameters, and examples of the whole dataset; None where that is not known."""
    try:
        dataset = evaluator.get_iterator("main").dataset
        order, whole = (dataset.order, dataset.whole) if isinstance(dataset, Shard) else (None, dataset)
        examples = known_examples(whole)
        params = [p for target in evaluator.get_all_targets().values() for p in target.namedparams()]
    except Exception:  # what an evaluator or a dataset of the program's own raises here: nothing can be told of it
        return None
    if not examples:
        return None
    values = [
        0 if not p.is_initialized else zlib.crc32(np.ascontiguousarray(to_cpu(p.lend())).tobytes()) for _, p in params
    ]
    crc_of_order = 0 if order is None else zlib.crc32(np.asarray(order).tobytes())
    return [evaluator.name, agree.describe_params(params), values, len(whole), checksum_of(examples), crc_of_order]


def _weighted_means(evaluator: Evaluator) -> Means:
    return {key: (one.compute_mean(), one.weight) for key, one in evaluator.summarize().summaries().items()}


def _plain_means(evaluator: Evaluator) -> Means:
    return {key: (float(value), 1.0) for key, value in evaluator.evaluate().items()}


def _merged(everyone: list[Means]) -> dict[str, float]:
    """The weighted means over all ranks, the same on each; keys in the order in which ranks came to them."""
    total: dict[str, Summary] = {}
    for theirs in everyone:
        for key, (mean, weight) in theirs.items():
            if weight:
                total.setdefault(key, Summary()).add(mean, weight)
    return {key: summary.compute_mean() for key, summary in total.items()}


def _without_padding(evaluator: Evaluator) -> Iterator[Batch]:
    """The batches of one pass; of a scattered dataset, without the examples that only fill up a rank's part."""
    iterator = evaluator.get_iterator("main")
    dataset = getattr(iterator, "dataset", None)
    if not isinstance(dataset, Shard) or not dataset.num_padding:
        batches: Iterator[Batch] = evaluator.one_pass()
        return batches
    own = dataset.without_padding()
    if not len(own):
        return iter(())
    return iter(SerialIterator(own, iterator.batch_size, repeat=False, shuffle=False, seed=0))
