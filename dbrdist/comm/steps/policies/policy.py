"""What all policies share: the parts of a step, and its forward and backward pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.gradients import model as models
from dbrdist.comm.gradients.overlap import Overlap
from dbrdist.comm.gradients.sharding import ZeroSharding
from dbrdist.comm.protocol import arguments
from dbrdist.comm.protocol.arguments import attempt
from dbrdist.comm.steps.header import Steps
from dbrdist.comm.steps.step_options import StepOptions
from dbrdist.comm.steps.step_state import StepState
from dbrdist.core.array import spans
from dbrdist.core.tape import backprop
from dbrdist.core.tape.variable import Operand, Variable
from dbrdist.core.update.targets import loss_of

if TYPE_CHECKING:
    from dbrdist.core.model.link import Link
    from dbrdist.core.update.optimizer import GradientMethod

# The arguments of one call of ``update``: lossfun, args, kwds, num_samples. A tuple, as each step makes one.
Work: TypeAlias = tuple[Callable[..., Variable] | None, tuple[Operand, ...], Mapping[str, Operand], int | None]


class Passes(Protocol):
    """Runs the passes of a step in another way than by calling them: from CUDA graphs (``training/``)."""

    def backward(self, run: Callable[..., None], listener: Overlap | None) -> None:
        """Do what ``run(lossfun, args, kwds, listener)`` does: forward and backward."""

    def update(self, run: Callable[[], None]) -> None:
        """Do what ``run()`` does: the update."""


class StepPolicy:
    """How the gradients of a step come about, and what follows the update.

    Args:
        comm: the ranks.
        optimizer: the wrapped one.
        zero_fill: whether a parameter without a gradient on any rank counts as gradient zero.
        way: the settings.
        headers: of this optimizer's steps.
        carried: what goes from one step into the next.
    """

    needs_constant_loss_scale = False
    has_more_to_do = False  # after the update
    sharding: ZeroSharding | None = None

    def __init__(
        self,
        comm: CommunicatorBase,
        optimizer: GradientMethod,
        zero_fill: bool,
        way: StepOptions,
        headers: Steps,
        carried: StepState,
    ) -> None:
        self.comm = comm
        self.optimizer = optimizer
        self.zero_fill = bool(zero_fill)
        self.way = way
        self.headers = headers
        self.carried = carried
        self.is_sum = way.accumulate > 1  # backward adds up sums over examples, of several calls
        self._name = f"MultiNode{type(optimizer).__name__}"
        self.passes: Passes | None = None  # that run those of the step under way
        self.exposed_seconds = 0.0  # after backward, in reductions and in waiting for other ranks, so far

    def bring_together(self, target: Link) -> None:
        """Give all ranks rank 0's parameters. Collective."""
        # Not persistent values: after a resume each rank has its own batch-norm statistics.
        models.bcast_params(self.comm, target)

    def gradients(self, work: Work, is_first: bool) -> bool:
        """Forward, backward, and all that must happen before the update; False if there is nothing to update with."""
        raise NotImplementedError

    def after_update(self, is_first: bool) -> None:
        """What follows the update, if it :attr:`has_more_to_do`."""

    def work_alone(self, work: Work) -> None:
        """Forward and backward of a call whose gradients stay on this rank."""
        lossfun, _, _, num_samples = work
        if lossfun is not None and num_samples != 0:
            self.backward(work)

    def backward(
        self, work: Work, after_forward: Callable[..., None] | None = None, listener: Overlap | None = None
    ) -> None:
        """Forward and backward pass; the gradients are added to those of the step's earlier calls."""
        passes, (lossfun, args, kwds, num_samples) = self.passes, work
        if passes is not None:
            self.passes = None  # who runs this pass comes here again
            try:
                passes.backward(lambda f, a, k, by: self.backward((f, a, k, num_samples), after_forward, by), listener)
            finally:
                self.passes = passes
            return
        optimizer = self.optimizer
        target = optimizer.target
        began = time.perf_counter() if spans.recorders else None
        loss = loss_of(self._name, target, lossfun, args, kwds)
        if began is not None:
            spans.note("forward", began)
        if after_forward is not None:
            after_forward()
        if not self.carried.gathered:
            target.cleargrads()
        scale: Any = None if optimizer.loss_scale is None else optimizer.scale_of_step()
        if self.is_sum and num_samples is not None:
            scale = num_samples * (1.0 if scale is None else scale)
        began = time.perf_counter() if spans.recorders else None
        if type(loss) is Variable:  # as nearly always
            backprop.backward_of_variables([loss], None, False, False, scale, listener)
        else:
            backprop.backward([loss], loss_scale=scale, listener=listener)
        if began is not None:
            spans.note("backward", began)

    def counted(self, num_samples: float | None) -> int:
        """A number of samples of another type than int. What is wrong with it all ranks raise at their next meeting."""
        if isinstance(num_samples, (bool, np.bool_)):  # whether this rank has any
            return int(num_samples)
        count, error = attempt(arguments.num_samples, num_samples, "update")
        if error is not None and self.comm.size == 1:
            raise error
        self.headers.error = self.headers.error or error
        return count or 0
