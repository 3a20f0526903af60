"""Virtual workers: means over the workers of all ranks, of gradients, statistics and observed values."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from dbrdist.comm.gradients import model as models
from dbrdist.comm.gradients import tree_sum
from dbrdist.comm.gradients.reduction_plan import ReductionPlan, reduce_gradients
from dbrdist.comm.gradients.tree_sum import TreeSum
from dbrdist.comm.protocol import agree
from dbrdist.comm.protocol.gate import Passage
from dbrdist.comm.protocol.wire_type import round_to
from dbrdist.comm.steps.header import Header
from dbrdist.comm.steps.policies.policy import StepPolicy, Work
from dbrdist.comm.steps.worker_state import Statistics, Values
from dbrdist.core.array import random
from dbrdist.core.array.backend import Array
from dbrdist.core.array.types import DType
from dbrdist.core.model import flat
from dbrdist.core.model.reporter import get_current_reporter, report, report_scope
from dbrdist.errors import CommunicatorError

if TYPE_CHECKING:
    from dbrdist.core.model.link import Link
    from dbrdist.datasets.loading.base import Batch

_AFTER_ALL = 1 << 32  # draws after the workers', by extensions say, repeat none of theirs


class VirtualWorkers(StepPolicy):
    """The workers of a rank work one after the other; ``lossfun`` is called with the batch of each that has one.

    ``update`` is called with ``lossfun``, (worker, its first row in the global batch, its examples) for each worker
    of this rank, the epoch, and the number of the step.

    Args:
        parts: those of every policy.
        num_workers: of all ranks.
        reproducible: add in one order on any number of ranks.
        grad_dtype: the type that each worker's gradients are rounded to; None leaves them.
    """

    def __init__(self, *parts: Any, num_workers: int, reproducible: bool, grad_dtype: DType | None) -> None:
        super().__init__(*parts)
        self._num_workers = num_workers
        self._is_reproducible = reproducible
        self._grad_dtype = grad_dtype
        self._statistics = Statistics(self.optimizer.target)
        self._values = Values(self.comm, num_workers)
        self._sum = TreeSum()
        self._error: Exception | None = None  # of this rank in this step, which all ranks raise together

    def bring_together(self, target: Link) -> None:
        """Give all ranks rank 0's parameters and persistent values, once they draw the same random numbers."""
        words = f"seed {random.get_seed()} (dbrdist.random.set_seed)"
        agree.same_everywhere(self.comm, words, "the same random numbers for virtual workers")
        models.bcast_data(self.comm, target)

    def gradients(self, work: Work, is_first: bool) -> bool:
        lossfun, args, _, num_samples = work
        batches: tuple[Any, ...] = args
        parts, epoch, step = batches
        self._error = None
        self._sum.clear()
        self._statistics.begin()
        self._values.begin()
        self.headers.post(num_samples, bool(num_samples), True)
        plan = self.headers.plan()
        assert plan is not None
        try:
            for worker, row, batch in parts:
                random.set_stream(random.get_seed(), epoch, step, row)
                self._work(lossfun, worker, batch, plan)
            random.set_stream(random.get_seed(), epoch, step, draw=_AFTER_ALL)
            return self._average(plan)
        except BaseException:
            self._statistics.restore()  # a step that fails changes nothing
            raise

    def _work(self, lossfun: Any, worker: int, batch: Batch | Sequence[tuple[Array, ...]], plan: ReductionPlan) -> None:
        """Forward and backward for one virtual worker, whose gradients and statistics are added to the others'."""
        observed: dict[str, Any] = {}
        self._statistics.restore()
        if len(batch):
            with _observing(observed):
                loss = lossfun(batch)
            self.optimizer.target.cleargrads()
            loss.backward(loss_scale=self.optimizer.loss_scale)
            statistics = self._statistics.read()
        else:
            self.optimizer.target.cleargrads()
            statistics = self._statistics.nothing()
        if self.headers.plan() is not plan:
            self._error = RuntimeError(
                "the forward pass has added, removed or replaced a parameter; do so between steps"
            )
            return
        flat.collect_gradients(plan.params)
        if self._grad_dtype is not None and len(batch):
            round_to(self._grad_dtype, [run.grad for run in plan.runs])
        self._sum.add(worker, [*(run.grad for run in plan.runs), statistics], float(len(batch)))
        self._values.add(observed, len(batch))

    def _average(self, plan: ReductionPlan) -> bool:
        """Put the means over all workers in place; False where no worker has an example, which changes nothing."""
        with self.headers.meet() as call:
            header = self.headers.wait(call)
            rows = call.agree([self._values.has_new], self._error)
            num_samples = sum(header.counts)
            if not num_samples:
                return False
            *gradients, statistics = self._add(call, header)
            values = self._values.average(call, bool(rows[:, 0].any()))
        for run, total in zip(plan.runs, gradients):
            total /= total.dtype.type(num_samples)
            run.grad[...] = total
        self._statistics.write(statistics / num_samples)
        report(values)
        return True

    def _add(self, call: Passage, header: Header) -> list[Array]:
        """The sums over the workers of all ranks."""
        comm = self.comm
        if not header.same_runs:
            raise CommunicatorError("the ranks' parameters differ in their order in memory; make the models alike")
        if self._is_reproducible:
            return tree_sum.add_over_ranks(comm, call, self._num_workers, self._sum)
        totals = self._sum.total()
        reduce_gradients(comm, call, totals[:-1], None, None)
        with call.moving():
            comm.reducer.reduce(call, totals[-1])
        return totals


def _observing(observed: dict[str, Any]) -> AbstractContextManager[object]:
    """Collect what is reported, with the current reporter's names; nothing where there is none."""
    try:
        get_current_reporter()
    except RuntimeError:
        return contextlib.nullcontext()
    return report_scope(observed)
