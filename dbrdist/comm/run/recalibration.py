"""Statistics of batch normalization that are measured anew before an evaluation."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.protocol.roster import check_same, roster_of
from dbrdist.comm.steps.worker_state import Statistics
from dbrdist.core.array import random
from dbrdist.core.array.backend import DeviceSpec
from dbrdist.core.array.config import no_backprop_mode, using_config
from dbrdist.core.array.types import FloatArray
from dbrdist.core.model.reporter import Reporter, get_current_reporter, report_scope
from dbrdist.datasets.loading.convert import concat_examples
from dbrdist.links import BatchNormalization
from dbrdist.training import PRIORITY_WRITER, Extension
from dbrdist.training.updater import as_arguments

if TYPE_CHECKING:
    from dbrdist.core.model.link import Link
    from dbrdist.training.trainer import Trainer


class RecalibrateStatistics(Extension):
    """Replaces running statistics by the means over some training batches with the weights of the moment. Collective.

    Goyal et al. 2017 note that curves of the test error match sooner so. The batches are the same at each call; ranks
    or virtual workers each normalize their own part, and their statistics are averaged with their numbers of examples
    as weights, the same on all ranks.

    Args:
        comm: the ranks.
        model: the network.
        make_iterator: makes an iterator of training batches, of this rank or of its virtual workers.
        num_batches: how many are gone through.
        converter, device: as for StandardUpdater.

    Example:
        >>> comm = dbrdist.comm.create_communicator("single")
        >>> train = datasets.get_digits()[0]
        >>> model = dbrdist.Sequential(L.Linear(64, 8), L.BatchNormalization(8))
        >>> make = lambda: iterators.SerialIterator(train, 32, rank=comm.rank, size=comm.size)
        >>> recalibrate = dbrdist.comm.RecalibrateStatistics(comm, model, make)
    """

    trigger = (1, "epoch")
    priority = PRIORITY_WRITER + 2  # before averages over ranks, and before the evaluation

    def __init__(
        self,
        comm: CommunicatorBase,
        model: Link,
        make_iterator: Callable[[], Any],
        num_batches: int = 100,
        converter: Callable[..., Any] = concat_examples,
        device: DeviceSpec | None = None,
    ):
        if num_batches < 1:
            raise ValueError(f"expected num_batches of 1 or more, got {num_batches}")
        self._comm = comm
        self._entry = roster_of(comm, "recalibrations").enter(sys._getframe(1))
        self._model = model
        self._make_iterator = make_iterator
        self._num_batches = num_batches
        self._converter = converter
        self._device = device

    def __call__(self, trainer: Trainer | None = None) -> None:
        check_same(self._comm, self._entry, "recalibrations", "recalibration")
        links = [link for link in self._model.links() if isinstance(link, BatchNormalization)]
        if not links:
            return
        decays = [link.decay for link in links]
        state = random.get_state()
        try:
            for link in links:
                link.decay = 0.0
            self._recalibrate()
        finally:
            random.set_state(state)
            for link, decay in zip(links, decays):
                link.decay = decay

    def _recalibrate(self) -> None:
        statistics = Statistics(self._model)
        statistics.begin()
        sums = np.append(statistics.nothing(), 0.0)  # of float32 numbers in float64: exact, in any order
        for row, batch in self._parts():
            random.set_stream(random.get_seed(), 0, 0, row)
            args, named = as_arguments(self._converter(batch, self._device))
            with using_config("train", True), no_backprop_mode(), _unheard():
                self._model(*args, **named)
            sums += len(batch) * np.append(statistics.read(), 1.0)
        total: FloatArray = np.asarray(self._comm.allreduce(sums))
        statistics.write(total[:-1] / total[-1])

    def _parts(self) -> Iterator[tuple[int, Any]]:
        """The batches of this rank, or of each of its virtual workers, with their first rows in the global batch."""
        iterator = self._make_iterator()
        has_workers = getattr(iterator, "virtual_workers", None) is not None
        try:
            for _ in range(self._num_batches):
                batch = iterator.next()
                parts = zip(iterator.rows, batch) if has_workers else [(0, batch)]
                yield from ((row, part) for row, part in parts if len(part))
        finally:
            iterator.finalize()


def _unheard() -> contextlib.AbstractContextManager[object]:
    """Within the block, what the network reports is no observation of the run."""
    try:
        get_current_reporter()
    except RuntimeError:
        return Reporter()
    return report_scope({})
