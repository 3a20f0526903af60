"""Virtual workers: a recipe for V workers on any number of ranks up to V.

A global batch is divided over V virtual workers, and each rank works for a contiguous block of them, one after the
other. A worker's examples, its random numbers and its batch-norm statistics follow from (seed, step, worker), never
from the rank. Gradients, running statistics and observed values are means over the workers, weighted by examples;
reproducibly they are added in one fixed tree over the workers (``gradients/tree_sum.py``), so that any number of ranks
gives the same bits.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.protocol import agree
from dbrdist.comm.protocol.shares import check_shares
from dbrdist.comm.steps.joint_steps import JointSteps
from dbrdist.comm.steps.optimizer import MultiNodeOptimizer
from dbrdist.comm.steps.policies.virtual_workers import VirtualWorkers
from dbrdist.comm.steps.step_options import StepOptions
from dbrdist.core.array import thread_pools
from dbrdist.core.array.backend import DeviceSpec, as_dtype
from dbrdist.core.array.types import Array
from dbrdist.datasets.loading.convert import call_converter, concat_examples
from dbrdist.training.updater import StandardUpdater, as_arguments

if TYPE_CHECKING:
    from dbrdist.core.update.optimizer import GradientMethod
    from dbrdist.datasets.loading.base import Batch
    from dbrdist.datasets.loading.serial import Iterator


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

    Example:
        >>> comm = dbrdist.comm.create_communicator("single")
        >>> optimizer = optimizers.SGD(0.1).setup(L.Classifier(L.Linear(64, 10)))
        >>> iterator = iterators.SerialIterator(datasets.get_digits()[0], 32, last="short", virtual_workers=4)
        >>> updater = dbrdist.comm.VirtualUpdater(iterator, optimizer, comm)
    """

    def __init__(
        self,
        iterator: Iterator,
        optimizer: GradientMethod,
        communicator: CommunicatorBase,
        converter: Callable[..., Any] = concat_examples,
        device: DeviceSpec | None = None,
        loss_func: Callable[..., Any] | None = None,
        loss_scale: float | None = None,
        auto_new_epoch: bool = True,
        *,
        reproducible: bool = False,
        input_device: DeviceSpec | None = None,
        grad_dtype: str | None = None,
    ) -> None:
        rest = loss_func, loss_scale, auto_new_epoch
        with agree.together(communicator):
            super().__init__(iterator, optimizer, converter, device, *rest, input_device=input_device)
            _check(self._iterators, self._optimizers, communicator)
            if reproducible and communicator.get_config("allreduce_grad_dtype") is not None:
                raise ValueError("reproducible sums keep their type: expected allreduce_grad_dtype of None")
        own, actual = self._iterators["main"], self._optimizers["main"]
        check_shares(communicator, own)
        words = f"reproducible {reproducible}, grad_dtype {grad_dtype}\n"
        agree.same_everywhere(communicator, words, "the same virtual workers")
        self.communicator = communicator
        self.reproducible = reproducible
        self._num_limited = 0  # steps before which the number of threads was set
        settings = {
            "num_workers": own.virtual_workers,
            "reproducible": reproducible,
            "grad_dtype": None if grad_dtype is None else as_dtype(grad_dtype),
        }
        make_policy = functools.partial(VirtualWorkers, **settings)
        self._steps = JointSteps(actual, communicator, True, StepOptions(), make_policy)

    def update_core(self) -> None:
        """One step of all ranks."""
        iterator = self._iterators["main"]
        epoch = iterator.epoch
        began = time.perf_counter()
        batches = iterator.next()
        self.data_seconds += time.perf_counter() - began
        if self.reproducible and self._num_limited < 2:  # again after the first step, which loads libraries
            thread_pools.use_one()
            self._num_limited += 1
        parts = list(zip(iterator.workers, iterator.rows, batches))
        self._steps.update(self._loss, parts, epoch, self.iteration, num_samples=sum(map(len, batches)))
        if self.auto_new_epoch and iterator.is_new_epoch:
            self._optimizers["main"].new_epoch(auto=True)

    def _loss(self, batch: Batch | Sequence[tuple[Array, ...]]) -> Any:
        """The mean over the examples of one worker."""
        args, named = as_arguments(call_converter(self.converter, batch, self.input_device))
        function = self._optimizers["main"].target if self.loss_func is None else self.loss_func
        return function(*args, **named)


def _check(iterators: dict[str, Any], optimizers: dict[str, GradientMethod], comm: CommunicatorBase) -> None:
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
