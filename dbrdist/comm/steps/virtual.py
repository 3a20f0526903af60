"""Virtual workers: a recipe for V workers on any number of ranks up to V.

A global batch is divided over V virtual workers, and each rank works for a contiguous block of them, one after the
other. A worker's examples, its random numbers and its batch-norm statistics follow from (seed, step, worker), never
from the rank. Gradients, running statistics and observed values are means over the workers, weighted by examples;
reproducibly they are added in one fixed tree over the workers (``leaves.py``), so that any number of ranks gives the
same bits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.gradients import model as models
from dbrdist.comm.gradients import tree_sum
from dbrdist.comm.gradients.reduction_plan import Plan, reduce_gradients
from dbrdist.comm.gradients.tree_sum import TreeSum
from dbrdist.comm.protocol import agree
from dbrdist.comm.protocol.gate import Passage
from dbrdist.comm.protocol.shares import check_shares
from dbrdist.comm.protocol.wire_type import round_to
from dbrdist.comm.steps.header import Header, Steps
from dbrdist.comm.steps.optimizer import MultiNodeOptimizer
from dbrdist.comm.steps.worker_state import Statistics, Values
from dbrdist.core.array import random, thread_pools
from dbrdist.core.array.backend import Array, as_dtype
from dbrdist.core.model import flat
from dbrdist.core.model.reporter import get_current_reporter, report, report_scope
from dbrdist.datasets.loading.convert import call_converter, concat_examples
from dbrdist.errors import CommunicatorError
from dbrdist.training.updater import StandardUpdater, as_arguments

_AFTER_ALL = 1 << 32  # draws after the workers', by extensions say, repeat none of theirs


class VirtualUpdater(StandardUpdater):
    """A :class:`~dbrdist.training.StandardUpdater` for virtual workers.

    Example, for 8 workers of 32 examples each on any number of ranks up to 8:

        iterator = SerialIterator(train, 8 * 32, rank=comm.rank, size=comm.size, virtual_workers=8, last="short")
        updater = VirtualUpdater(iterator, optimizer, comm, reproducible=True)

    Args:
        iterator: of this rank, with ``virtual_workers``.
        optimizer: any optimizer with a target whose parameters have their shapes; not a multi-node one, for the updater
            does what that would do.
        communicator: the ranks. The first step gives all of them rank 0's parameters and persistent values.
        converter, device, loss_func, loss_scale, auto_new_epoch, input_device: as for StandardUpdater. ``loss_func``
            is called once for each virtual worker with examples and returns the mean over them.
        reproducible: add in an order that does not depend on the ranks, with one thread per rank, so that weights,
            optimizer state, running statistics and observed values are the same bits on any number of ranks.
        grad_dtype: ``'float16'`` or ``'bfloat16'``: round each worker's gradients to this type before they are added,
            in float32, as if the workers were ranks that send 16 bits. The result depends neither on ranks nor on
            hosts. For float16 they are scaled by a power of two meanwhile, so that none overflows.

    Persistent values of the target (the running statistics of batch normalization) move in each step to the mean of
    what the workers, each from the values before the step, would make of them. Reported numbers become means over all
    workers, the same on all ranks.

    Raises:
        ValueError: on every rank, if the iterator of one has no virtual workers, or a parameter has no shape yet.
        CommunicatorError: on every rank, if ranks differ in virtual workers, batch, data, model or optimizer.
    """

    def __init__(
        self,
        iterator: Any,
        optimizer: Any,
        communicator: CommunicatorBase,
        converter: Callable[..., Any] = concat_examples,
        device: Any = None,
        loss_func: Callable[..., Any] | None = None,
        loss_scale: float | None = None,
        auto_new_epoch: bool = True,
        *,
        reproducible: bool = False,
        input_device: Any = None,
        grad_dtype: Any = None,
    ) -> None:
        options = {} if input_device is None else {"input_device": input_device}
        with agree.together(communicator):
            super().__init__(iterator, optimizer, converter, device, loss_func, loss_scale, auto_new_epoch, **options)
            _check(self._iterators, self._optimizers, communicator)
            if reproducible and communicator.get_config("allreduce_grad_dtype") is not None:
                raise ValueError("reproducible sums keep their type: expected allreduce_grad_dtype of None")
        own, actual = self._iterators["main"], self._optimizers["main"]
        check_shares(communicator, own)
        words = f"reproducible {reproducible}, grad_dtype {grad_dtype}\n"
        agree.same_everywhere(communicator, words, "the same virtual workers")
        self.communicator = communicator
        self.reproducible = reproducible
        self._steps = Steps(communicator, actual)
        self._statistics = Statistics(actual.target)
        self._values = Values(communicator, own.virtual_workers)
        self._sum = TreeSum()
        self._num_limited = 0  # steps before which the number of threads was set
        self._is_synchronized = False
        self._grad_dtype = None if grad_dtype is None else as_dtype(grad_dtype)
        self._error: Exception | None = None  # of this rank in this step, which all ranks raise together

    # ---- the step ----

    def update_core(self) -> None:
        """One step of all ranks."""
        iterator, optimizer = self._iterators["main"], self._optimizers["main"]
        epoch = iterator.epoch
        began = time.perf_counter()
        batches = iterator.next()
        self.data_seconds += time.perf_counter() - began
        self._prepare(optimizer.target)
        num_samples = sum(map(len, batches))
        self._steps.post(num_samples, num_samples > 0, True)
        plan = self._steps.plan()
        assert plan is not None
        try:
            for worker, row, batch in zip(iterator.workers, iterator.rows, batches):
                random.set_stream(random.get_seed(), epoch, self.iteration, row)
                self._work(worker, batch, plan)
            random.set_stream(random.get_seed(), epoch, self.iteration, draw=_AFTER_ALL)
            is_whole = self._average(plan)
        except BaseException:
            self._statistics.restore()  # a step that fails changes nothing
            raise
        if is_whole:
            optimizer.update()
        if self.auto_new_epoch and iterator.is_new_epoch:
            optimizer.new_epoch(auto=True)

    def _prepare(self, target: Any) -> None:
        if self.reproducible and self._num_limited < 2:  # again after the first step, which loads libraries
            thread_pools.use_one()
            self._num_limited += 1
        if not self._is_synchronized:
            self._steps.introduction.meet(())
            words = f"seed {random.get_seed()} (dbrdist.random.set_seed)"
            agree.same_everywhere(self.communicator, words, "the same random numbers for virtual workers")
            models.bcast_data(self.communicator, target)
            self._is_synchronized = True
        self._error = None
        self._sum.clear()
        self._statistics.begin()
        self._values.begin()

    def _work(self, worker: int, batch: Any, plan: Plan) -> None:
        """Forward and backward for one virtual worker, whose gradients and statistics are added to the others'."""
        optimizer = self._optimizers["main"]
        observed: dict[str, Any] = {}
        self._statistics.restore()
        if len(batch):
            args, named = as_arguments(call_converter(self.converter, batch, self.input_device))
            function = optimizer.target if self.loss_func is None else self.loss_func
            with _observing(observed):
                loss = function(*args, **named)
            optimizer.target.cleargrads()
            loss.backward(loss_scale=optimizer.loss_scale)
            statistics = self._statistics.read()
        else:
            optimizer.target.cleargrads()
            statistics = self._statistics.nothing()
        if self._steps.plan() is not plan:
            self._error = RuntimeError(
                "the forward pass has added, removed or replaced a parameter; do so between steps"
            )
            return
        flat.collect_gradients(plan.params)
        if self._grad_dtype is not None and len(batch):
            round_to(self._grad_dtype, [run.grad for run in plan.runs])
        self._sum.add(worker, [*(run.grad for run in plan.runs), statistics], float(len(batch)))
        self._values.add(observed, len(batch))

    def _average(self, plan: Plan) -> bool:
        """Put the means over all workers in place; False where no worker has an example, which changes nothing."""
        with self._steps.meet() as call:
            header = self._steps.wait(call)
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
        comm = self.communicator
        if not header.same_runs:
            raise CommunicatorError("the ranks' parameters differ in their order in memory; make the models alike")
        if self.reproducible:
            return tree_sum.add_over_ranks(comm, call, self._iterators["main"].virtual_workers, self._sum)
        totals = self._sum.total()
        reduce_gradients(comm, call, totals[:-1], None, None)
        with call.moving():
            comm.reducer.reduce(call, totals[-1])
        return totals


def _check(iterators: dict[str, Any], optimizers: dict[str, Any], comm: CommunicatorBase) -> None:
    """Raise ValueError for what virtual workers cannot train with."""
    if set(iterators) != {"main"} or set(optimizers) != {"main"}:
        raise ValueError("VirtualUpdater expected one iterator and one optimizer, got dictionaries of several")
    iterator, optimizer = iterators["main"], optimizers["main"]
    kind = type(iterator).__name__
    if getattr(iterator, "virtual_workers", None) is None:
        raise ValueError(
            f"VirtualUpdater expected an iterator with virtual workers, got {kind} without; create it as "
            f"{kind}(dataset, batch_size, rank=comm.rank, size=comm.size, virtual_workers=8)"
        )
    if (iterator.rank, iterator.size) != (comm.rank, comm.size):
        raise ValueError(
            f"VirtualUpdater expected an iterator with rank={comm.rank}, size={comm.size} as the communicator has, "
            f"got rank={iterator.rank}, size={iterator.size}"
        )
    if isinstance(optimizer, MultiNodeOptimizer):
        raise ValueError("VirtualUpdater averages gradients itself: expected the plain optimizer, got a multi-node one")
    waiting = [name for name, p in optimizer.target.namedparams() if not p.is_initialized]
    if waiting:
        raise ValueError(
            f"VirtualUpdater expected parameters with shapes, but {waiting[0]} waits for its first input; give the "
            "link its input size, or call the network once, before"
        )


def _observing(observed: dict[str, Any]) -> AbstractContextManager[Any]:
    """Collect what is reported, with the current reporter's names; nothing where there is none."""
    try:
        get_current_reporter()
    except RuntimeError:
        return contextlib.nullcontext()
    return report_scope(observed)
