"""A step that all ranks make together: equal parameters at the start, mean gradients at each update.

This is the loop; how gradients come about is the policy's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.gradients import model as models
from dbrdist.comm.steps.delegation import HandsOn
from dbrdist.comm.steps.drift import EVERY, FIRST
from dbrdist.comm.steps.header import Steps
from dbrdist.comm.steps.introduction import Introduction
from dbrdist.comm.steps.policies.accumulation import Accumulation
from dbrdist.comm.steps.policies.all_ranks import AllRanks
from dbrdist.comm.steps.policies.choice import policy_for
from dbrdist.comm.steps.policies.one_rank import OneRank
from dbrdist.comm.steps.policies.policy import Passes, StepPolicy
from dbrdist.comm.steps.step_options import StepOptions
from dbrdist.comm.steps.step_state import StepState
from dbrdist.core.array import spans
from dbrdist.core.model.parameter import Parameter

if TYPE_CHECKING:
    from dbrdist.core.model.link import Link
    from dbrdist.core.update.optimizer import GradientMethod
    from dbrdist.datasets.loading.serial import Iterator


class JointSteps(HandsOn):
    """The steps of a multi-node optimizer, which wraps ``actual_optimizer``."""

    __slots__ = (
        "_accumulation", "_carried", "_has_means", "_has_more_to_do", "_is_one_of_many", "_is_synchronized", "_known",
        "_needs_constant_loss_scale", "_num_plans", "_policy", "_steps", "_target", "_way", "communicator",
        "num_samples",
    )  # fmt: skip

    takes_num_samples = True  # the updater passes num_samples to update()

    def __init__(
        self,
        actual_optimizer: GradientMethod,
        communicator: CommunicatorBase,
        zero_fill: bool,
        way: StepOptions,
        make_policy: Callable[..., StepPolicy] = policy_for,
    ) -> None:
        super().__init__(actual_optimizer)
        self.communicator = communicator
        self.num_samples: int | None = None  # of this rank in the last step
        self._is_one_of_many = communicator.size > 1
        self._is_synchronized = False
        self._target: Any = None  # of the last step
        self._known: set[Parameter] = set()  # its parameters
        self._num_plans = 0  # of its headers when these were looked through
        self._way = way
        # Hooks get the same gradients on all ranks. With local steps or without a reduction each has its own.
        self._has_means = communicator.size > 1 and way.local_steps == 1 and not communicator.reducer.leaves_gradients
        self._steps = Steps(communicator, actual_optimizer, way.words())
        self._carry(StepState(communicator, way), zero_fill, make_policy)

    def _carry(self, carried: StepState, zero_fill: bool, make_policy: Callable[..., StepPolicy] = policy_for) -> None:
        """Go on with what earlier steps have left."""
        self._carried = carried
        parts = self.communicator, self.actual_optimizer, zero_fill, self._way, self._steps, carried
        self._policy = policy = make_policy(*parts)
        self._has_more_to_do, self._needs_constant_loss_scale = policy.has_more_to_do, policy.needs_constant_loss_scale
        num_calls = self._way.accumulate
        self._accumulation = Accumulation(num_calls, policy, carried) if num_calls > 1 else None

    @property
    def zero_fill(self) -> bool:
        """Whether a parameter without a gradient on any rank counts as gradient zero."""
        return self._policy.zero_fill

    @zero_fill.setter
    def zero_fill(self, value: bool) -> None:
        self._policy.zero_fill = bool(value)

    @property
    def exposed_seconds(self) -> float:
        """After backward, in reductions and in waiting for other ranks, so far."""
        return self._policy.exposed_seconds

    @exposed_seconds.setter
    def exposed_seconds(self, value: float) -> None:
        self._policy.exposed_seconds = value

    @property
    def optimizer_of_one_rank(self) -> GradientMethod | None:
        """The wrapped optimizer, where the next step is one of its own: a single rank, and nothing is carried over."""
        is_alone = self.communicator.size == 1 and not self._way.carries and not self._policy.is_sum
        target = self.actual_optimizer.target
        return self.actual_optimizer if is_alone and self._is_in_step(target) and self._carried.loaded is None else None

    def are_synchronized(self) -> None:
        """The ranks have their parameters, each its own maybe: no rank's are given to the others."""
        self._is_synchronized = True

    def continue_from(
        self, carried: StepState, introduction: Introduction, target: Link, known: set[Parameter] | None
    ) -> None:
        """Go on where another optimizer was, which had stepped with these parameters if ``known``."""
        exposed_seconds = self.exposed_seconds
        self._carry(carried, self.zero_fill)
        self.exposed_seconds = exposed_seconds
        self._steps.introduction = introduction
        if known is not None:
            self._is_synchronized, self._target, self._known = True, target, known

    def reads(self, iterators: Mapping[str, Iterator]) -> None:
        """Compare these iterators with those of the other ranks at the first step: an updater tells which it has."""
        self._steps.introduction.reads(iterators)

    def update(
        self, lossfun: Callable[..., Any] | None = None, *args: Any, num_samples: int | None = None, **kwds: Any
    ) -> None:
        """One step of all ranks.

        Args:
            lossfun: called with ``args`` and ``kwds``; its gradients are averaged. None averages those already there.
            num_samples: how many examples this rank's loss is the mean of. The average is weighted by it, which makes
                it the gradient of the mean over all examples. With 0, ``lossfun`` is not called, and this rank only
                takes part in the reduction. None, on every rank, weighs all ranks equally.

        Raises:
            CommunicatorError: on every rank, if steps, parameters, hyperparameters or configurations differ between
                ranks, or no rank has an example.
        """
        optimizer, policy, carried = self.actual_optimizer, self._policy, self._carried
        target, accumulation = optimizer.target, self._accumulation
        if target is None:
            raise RuntimeError("the multi-node optimizer has no target yet; call setup(link) first")
        if num_samples is not None and type(num_samples) is not int:
            num_samples = policy.counted(num_samples)
        if self._needs_constant_loss_scale and optimizer.has_dynamic_loss_scale:
            self._way.check_with(dynamic_loss_scale="a dynamic loss scale")
        is_first = not self._is_in_step(target) and self._synchronize(args, kwds)
        if carried.loaded is not None:
            carried.take_up(target)
            is_first = False
        if is_first:
            policy.passes = None
        self.num_samples = num_samples
        if num_samples == 0 and not carried.gathered:
            target.cleargrads()
        work = lossfun, args, kwds, num_samples
        if accumulation is not None and not accumulation.ends_step(work):
            return
        is_whole = policy.gradients(work, is_first)
        if accumulation is not None:
            accumulation.begin_anew()
        if is_whole:
            began = time.perf_counter() if spans.recorders else None
            if policy.passes is None:
                optimizer.update()
            else:
                policy.passes.update(optimizer.update)
            if began is not None:
                spans.note("update", began)
            if self._has_more_to_do:
                policy.after_update(is_first)
            drift = self._steps.drift
            if drift.is_suspected:  # looked at here: during the step a program may have perturbed them on purpose
                self._steps.compare_parameters()
            elif self._has_means and (not (t := optimizer.t) % EVERY or t <= FIRST):
                drift.look(t)

    # ---- steps whose passes are replayed from CUDA graphs ----

    def why_not_captured(self) -> str | None:
        """Why no passes of these steps can be captured as CUDA graphs, or None."""
        comm, options = self.communicator, ", ".join(self._way.written().values())
        if options or type(self._policy) not in (AllRanks, OneRank):
            return f"steps with {options or type(self._policy).__name__} are not captured yet"
        staged = comm.reducer.why_staged(self._steps.last_plan) if comm.size > 1 else None
        if staged is not None:
            return str(staged)
        return None if self.zero_fill else "with zero_fill=False ranks agree in each step on which gradients there are"

    def update_in_passes(self, passes: Passes, /, lossfun: Callable[..., Any], *args: Any, **kwds: Any) -> None:
        """As :meth:`update`, but forward and backward, and the update, are run by ``passes``.

        The first step with a target is run as always.
        """
        self._policy.passes = passes
        try:
            self.update(lossfun, *args, **kwds)
        finally:
            self._policy.passes = None

    # ---- parameters that all ranks have in common ----

    def _is_in_step(self, target: Link) -> bool:
        """Whether all ranks have the parameters of ``target`` in common already."""
        if not self._is_synchronized or self._target is not target:
            return False
        if not self._is_one_of_many:
            return True
        steps = self._steps
        watch = steps.watch  # a forward pass can change what that speaks of
        return self._num_plans == steps.num_plans and watch is not None and watch.is_current()

    def _synchronize(self, args: Any, kwds: dict[str, int]) -> bool:
        """Rank 0's parameters on all ranks, before the first step with a target; later, those that have come since.

        True before the first step.
        """
        target, steps = self.target, self._steps
        is_other = self._target is not None and self._target is not target
        is_first = is_other or not self._is_synchronized
        if is_first:
            self._carried.forget()
        if self._is_one_of_many:
            if not steps.introduction.number:
                steps.introduction.meet([*args, *kwds.values()])
            if is_first:
                self._policy.bring_together(target)
            elif self._target is not None:
                self._take_new_values([(name, p) for name, p in target.namedparams() if p not in self._known])
            steps.look()
            self._num_plans = steps.num_plans
        self._is_synchronized, self._target, self._known = True, target, set(target.params())
        return is_first

    def _take_new_values(self, new: list[tuple[str, Parameter]]) -> None:
        """Rank 0's, for parameters that have come since the last step. Collective if there are any."""
        if not new:
            return
        self._steps.post(None, False, self.zero_fill, [name for name, _ in new])
        with self._steps.meet() as call:
            self._steps.wait(call)  # which says where they are not new, or not there
        models.bcast_named(self.communicator, new)
