"""A step that all ranks make together: equal parameters at the start, mean gradients at each update."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.gradients import model as models
from dbrdist.comm.gradients.mean_network import goes_apart
from dbrdist.comm.gradients.overlap import Overlap, Weights
from dbrdist.comm.gradients.reduction_plan import Plan, weights
from dbrdist.comm.gradients.sharding import Sharding
from dbrdist.comm.protocol import arguments
from dbrdist.comm.protocol.arguments import attempt
from dbrdist.comm.protocol.gate import Passage
from dbrdist.comm.steps.delegation import HandsOn
from dbrdist.comm.steps.header import STALE, Header, Steps
from dbrdist.comm.steps.introduction import Introduction
from dbrdist.comm.steps.lazy_parameters import LateParameters
from dbrdist.comm.steps.step_options import Way
from dbrdist.comm.steps.step_state import Carried
from dbrdist.comm.transport.call_log import place_of
from dbrdist.comm.transport.disagreement import name_ranks
from dbrdist.core.array import spans
from dbrdist.core.array.config import using_config
from dbrdist.core.array.user_line import warn_user
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.tape import backprop
from dbrdist.core.update.targets import loss_of
from dbrdist.errors import CommunicatorError, StaleParametersError


class JointSteps(HandsOn):
    """The steps of a multi-node optimizer, which wraps ``actual_optimizer``."""

    __slots__ = (
        "_carried", "_is_alone", "_is_one_of_many", "_is_plain", "_is_synchronized", "_known", "_num_plans",
        "_sharding", "_steps", "_target", "_way", "communicator", "exposed_seconds", "num_samples", "zero_fill",
    )  # fmt: skip

    takes_num_samples = True  # the updater passes num_samples to update()

    def __init__(self, actual_optimizer: Any, communicator: CommunicatorBase, zero_fill: bool, way: Way) -> None:
        super().__init__(actual_optimizer)
        self.communicator = communicator
        self.zero_fill = zero_fill
        self.num_samples: int | None = None  # of this rank in the last step
        self.exposed_seconds = 0.0  # after backward, in reductions and in waiting for other ranks, so far
        self._is_one_of_many = communicator.size > 1
        self._is_plain = self._is_one_of_many and not (way.carries or way.zero)  # each step sends its own gradients
        self._is_alone = not self._is_one_of_many and not way.carries  # nothing is sent, nothing is added up
        self._is_synchronized = False
        self._target: Any = None  # of the last step
        self._known: set[Parameter] = set()  # its parameters
        self._num_plans = 0  # of its headers when these were looked through
        self._way = way
        self._steps = Steps(communicator, actual_optimizer, way.words())
        divides = way.zero and communicator.size > 1
        self._sharding = Sharding(communicator, actual_optimizer, way.zero) if divides else None
        self._carried = Carried(communicator, way)

    def are_synchronized(self) -> None:
        """The ranks have their parameters, each its own maybe: no rank's are given to the others."""
        self._is_synchronized = True

    def continue_from(
        self, carried: Carried, introduction: Introduction, target: Any, known: set[Parameter] | None
    ) -> None:
        """Go on where another optimizer was, which had stepped with these parameters if ``known``."""
        self._carried, self._steps.introduction = carried, introduction
        if known is not None:
            self._is_synchronized, self._target, self._known = True, target, known

    def reads(self, iterators: Mapping[str, Any]) -> None:
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
        target = self.actual_optimizer.target
        if target is None:
            raise RuntimeError("the multi-node optimizer has no target yet; call setup(link) first")
        if num_samples is not None and type(num_samples) is not int:
            num_samples = self._counted(num_samples)
        if self._is_alone and lossfun is not None and (num_samples is None or num_samples >= 1):
            if not (self._is_synchronized and self._target is target):
                self._synchronize(args, kwds)
            self.num_samples = num_samples  # and the rest is a step of the wrapped optimizer
            self._go_backward(target, lossfun, args, kwds)
            self._apply()
            return
        if self._is_plain and self._is_in_step(target) and self._encloses_gradients():
            self._update_at_once(target, lossfun, args, kwds, num_samples, place_of(sys._getframe().f_back))
            return
        self._update_in_full(target, lossfun, args, kwds, num_samples)

    def _update_in_full(
        self, target: Any, lossfun: Callable[..., Any] | None, args: Any, kwds: Any, num_samples: int | None
    ) -> None:
        """A step with all that may come with it: a first meeting, what is carried, shards, local steps."""
        if self.actual_optimizer.has_dynamic_loss_scale and self._is_one_of_many:
            self._way.check_with(dynamic_loss_scale="a dynamic loss scale")
        is_first = False
        if not self._is_in_step(target):
            is_first = self._synchronize(args, kwds)
            if self._is_one_of_many:
                self._steps.look()
                self._num_plans = self._steps.num_plans
        if self._carried.loaded is not None and self._carried.take_up(target):
            is_first = False
        self.num_samples = num_samples
        if num_samples == 0 and not self._carried.gathered:
            target.cleargrads()
        if self._way.accumulate > 1 and self._gathers(lossfun, args, kwds, num_samples):
            return
        if self._way.local_steps > 1 and not is_first and self._is_one_of_many:
            self._update_alone(lossfun, args, kwds, num_samples)
            return
        is_whole, works = True, None
        is_usual = lossfun is not None and self._way.accumulate == 1 and not self._steps.late
        if is_first and self._is_one_of_many and is_usual:
            works = self._backward_after_broadcast(lossfun, args, kwds, num_samples)
        if self._is_one_of_many:
            is_whole = self._update_together(lossfun, args, kwds, num_samples, works)
        else:
            self._gather_on_one_rank(lossfun, args, kwds, num_samples)
        self._carried.gathered = []
        if not is_whole:
            return
        self._apply()
        if self._sharding is not None and self.actual_optimizer.is_safe_to_update():
            with self._steps.meet() as call, spans.span("spread values"):
                self._sharding.share_values(call, self._steps.current_plan())

    def _counted(self, num_samples: Any) -> int:
        """A number of samples of another type than int. What is wrong with it all ranks raise at their next meeting."""
        if isinstance(num_samples, (bool, np.bool_)):  # whether this rank has any
            return int(num_samples)
        count, error = attempt(arguments.num_samples, num_samples, "update")
        if error is not None and not self._is_one_of_many:
            raise error
        self._steps.error = self._steps.error or error
        return count or 0

    def _go_backward(self, target: Any, lossfun: Callable[..., Any], args: Any, kwds: Any) -> None:
        """As :meth:`_backward` where nobody listens and nothing is carried, in less time."""
        if spans.recorders:
            self._backward(lossfun, args, kwds)
            return
        loss = loss_of(type(self).__name__, target, lossfun, args, kwds)
        target.cleargrads()
        backprop.backward([loss], loss_scale=self.actual_optimizer.loss_scale)

    def _encloses_gradients(self) -> bool:
        """Whether those of this step alone come with its header, and all of them."""
        carried = self._carried  # what may have come from a snapshot
        return self._steps.is_small() and self.zero_fill and carried.loaded is None and not carried.gathered

    def _update_at_once(
        self, target: Any, lossfun: Any, args: Any, kwds: Any, num_samples: int | None, place: tuple[str, int]
    ) -> None:
        """A whole step where gradients come with the header: what :meth:`update` does anyway, in less time."""
        self.num_samples = num_samples
        works = lossfun is not None and num_samples != 0
        if works:
            self._go_backward(target, lossfun, args, kwds)
        elif num_samples == 0:
            target.cleargrads()
        began = time.perf_counter()
        self._reduce_at_once(num_samples, works, place)
        self.exposed_seconds += time.perf_counter() - began
        if spans.recorders:
            spans.note("exposed wait", began)
        self._apply()

    def _apply(self) -> None:
        """Update with the gradients that are there."""
        if not spans.recorders:
            self.actual_optimizer.update()
            return
        began = time.perf_counter()
        self.actual_optimizer.update()
        spans.note("update", began)

    def _gather_on_one_rank(self, lossfun: Any, args: Any, kwds: Any, num_samples: int | None) -> None:
        """Mean gradients on one rank, with what it carries: of earlier calls, or kept by a compression."""
        total = self._carried.samples(num_samples)
        if total is not None and total < 1:
            weights([total])  # which says what is wrong with it
        if lossfun is not None and num_samples != 0:
            self._backward(lossfun, args, kwds, weight=num_samples)
        self._divide_gathered()
        if self._way.compression is not None and self._way.compression.kept:
            self._way.compression.spend(self._steps.current_plan())

    def _gathers(self, lossfun: Any, args: Any, kwds: Any, num_samples: int | None) -> bool:
        """Add up gradients alone, unless this call ends a step."""
        if self._carried.gathered and (self._carried.gathered[0] is None) != (num_samples is None):
            raise ValueError("accumulate: expected num_samples in all calls of update or in none")
        if num_samples is not None and num_samples < 0:
            num_samples = self._counted(float(num_samples))
        is_last = len(self._carried.gathered) >= self._way.accumulate - 1  # more where another number was set before
        if not is_last:
            if lossfun is None:
                raise ValueError("accumulate: expected a lossfun in update, got none")
            if self._is_one_of_many and self._steps.late:
                self._forward_together(lossfun, args, kwds, num_samples)
            elif num_samples != 0:
                self._backward(lossfun, args, kwds, weight=num_samples)
            self._carried.gathered.append(num_samples)
        return not is_last

    def _update_alone(self, lossfun: Any, args: Any, kwds: Any, num_samples: int | None) -> None:
        """A step of this rank by itself, and every so many steps the means of all ranks' parameters."""
        if self._steps.late:
            self._forward_together(lossfun, args, kwds, num_samples)
        elif lossfun is not None and num_samples != 0:
            self._backward(lossfun, args, kwds)
        self._apply()
        goes_apart(self.target)
        self._carried.num_local += 1
        if self._carried.num_local < self._way.local_steps:
            return
        self._carried.num_local = 0
        plan = self._steps.current_plan()  # of whose runs the header speaks
        self._steps.post(num_samples, True, self.zero_fill)
        with self._steps.meet() as call:
            header = self._steps.wait(call)
            if not header.same_runs:
                raise CommunicatorError(
                    "local_steps: expected the parameters in the same order of memory on every rank"
                )
            call.meet_without_row()
            with call.moving():
                for run in plan.runs:
                    self.communicator.reducer.reduce(call, run.data, None, float(self.communicator.size))

    def _backward_after_broadcast(self, lossfun: Any, args: Any, kwds: Any, num_samples: int | None) -> int:
        """Forward and backward of the first step, whose loss may come from a forward pass before the broadcast.

        Returns what the header says: whether this rank has worked, or ``STALE`` if its loss was computed with other
        parameters than rank 0's, of which there is no gradient.
        """
        if num_samples == 0:
            return 0
        try:
            with using_config("stale_parameters", "refuse"):
                self._backward(lossfun, args, kwds, weight=num_samples)
        except StaleParametersError:
            return STALE
        return 1

    def _is_stale(self, header: Header) -> bool:
        """Whether a rank has no gradient, so that no rank makes this step; all say so."""
        if header.stale:
            self.target.cleargrads()
            warn_user(
                f"the first update made no step: on {name_ranks(header.stale)} of {self.communicator.size} the loss "
                "was computed before rank 0's parameters arrived; call comm.bcast_data(model) before the first forward",
                RuntimeWarning,
            )
        return bool(header.stale)

    def _is_in_step(self, target: Any) -> bool:
        """Whether all ranks have the parameters of ``target`` in common already."""
        if not self._is_synchronized or self._target is not target:
            return False
        if not self._is_one_of_many:
            return True
        steps = self._steps
        return self._num_plans == steps.num_plans and steps.is_current(target)  # a forward pass can change it

    def _synchronize(self, args: Any, kwds: Any) -> bool:
        """Rank 0's parameters on all ranks, before the first step with a target; later, those that have come since.

        True before the first step.
        """
        target = self.target
        is_other = self._target is not None and self._target is not target
        is_first = is_other or not self._is_synchronized
        if is_first:
            self._carried.forget()
        if self._is_one_of_many:
            if not self._steps.introduction.number:
                self._steps.introduction.meet([*args, *kwds.values()])
            if is_first:
                # Not persistent values: after a resume each rank has its own batch-norm statistics.
                models.bcast_params(self.communicator, target)
            elif self._target is not None:
                self._take_new_values([(name, p) for name, p in target.namedparams() if p not in self._known])
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

    def _weights(self, header: Header) -> Weights:
        """(factor of each rank, divisor of the sum) of the gradients that backward left."""
        found = header.weights()  # with its checks
        if self._way.accumulate == 1:
            return found
        num_calls = len(self._carried.gathered) + 1
        total = sum(header.counts) if header.counts[0] >= 0 else self.communicator.size * num_calls
        return None, float(total)

    def _divide_gathered(self) -> None:
        if self._way.accumulate > 1:
            self._carried.divide(self._steps.current_plan(), self.num_samples)

    def _update_together(
        self, lossfun: Any, args: Any, kwds: Any, num_samples: int | None, done: int | None = None
    ) -> bool:
        """Mean gradients on all ranks: the header, forward and backward, the reduction.

        ``done`` is what the header says of forward and backward where these are over. False where there is nothing to
        update with yet.
        """
        weight = num_samples
        if self._carried.gathered:
            num_samples = self._carried.samples(num_samples)
        steps, is_done = self._steps, done is not None
        works = int(lossfun is not None and weight != 0) if done is None else done
        is_plain = self.zero_fill and self._carried.buffers is None and self._way.compression is None
        is_small = is_plain and self._sharding is None and steps.is_small()
        if not is_small:
            steps.post(num_samples, works, self.zero_fill)
        if steps.late:
            self._late_step(lossfun, args, kwds, works)
            self._reduce_anew(num_samples)
            return self._carried.buffers is None or self._carried.buffers.hold(steps.current_plan())
        overlap = steps.overlap(self._sharding) if is_plain and not (is_small or is_done) else None
        if overlap is not None:
            overlap.open(self._weights_if_known, steps.place)
        if works and not is_done:
            try:
                self._backward(lossfun, args, kwds, listener=overlap, weight=weight)
            except BaseException as e:
                if overlap is not None and overlap.may_have_started:
                    steps.break_off(e)
                raise
        began = time.perf_counter()
        is_whole = self._reduce_at_once(num_samples, works) if is_small else self._reduce_all(overlap, num_samples)
        self.exposed_seconds += time.perf_counter() - began
        if spans.recorders:
            spans.note("exposed wait", began)
        return is_whole

    def _reduce_all(self, overlap: Any, num_samples: int | None) -> bool:
        """After backward: what is left of the reduction."""
        steps = self._steps
        with steps.meet() as call:
            header = steps.wait(call)
            if self._is_stale(header):
                return False
            plan = steps.plan()
            if plan is not None and header.same_runs and self.zero_fill:
                if self._carried.buffers is not None:
                    return self._carried.buffers.swap(plan, *self._weights(header), steps.place)
                if overlap is not None and header.is_placed:
                    overlap.wait(*self._weights(header))
                else:
                    self._reduce(call, plan, header)
                return True
        self._reduce_anew(num_samples)
        return True

    def _reduce_at_once(self, num_samples: int | None, works: int, place: tuple[str, int] | None = None) -> bool:
        """After backward, where gradients come with the header: the ranks meet once."""
        steps = self._steps
        with self.communicator.gate.call("update", place) as call:
            header = steps.exchange(call, num_samples, works, self.zero_fill)
            if header.stale and self._is_stale(header):
                return False
            if header.is_enclosed:
                began = time.perf_counter()
                found = header.weights() if self._way.accumulate == 1 else self._weights(header)
                steps.shown_plan.add_up(call, call.enclosed, *found)
                if spans.recorders:
                    spans.note("reduce", began)
                return True
            plan = steps.plan()
            if plan is not None and header.same_runs:  # on one they have outgrown the header during its forward pass
                self._reduce(call, plan, header)
                return True
        self._reduce_anew(num_samples)
        return True

    def _weights_if_known(self) -> Weights | None:
        """The weights of this step's ranks, if all have shown their headers and agree on where gradients lie."""
        header = self._steps.poll()
        is_agreed = header is not None and header.is_placed and self._steps.plan() is not None
        return self._weights(header) if header is not None and is_agreed else None

    def _forward_together(self, lossfun: Any, args: Any, kwds: Any, num_samples: int | None) -> None:
        """Forward and backward of a call without a reduction, in which parameters may get their shapes."""
        works = int(lossfun is not None and num_samples != 0)
        self._steps.post(num_samples, works, self.zero_fill)
        self._late_step(lossfun, args, kwds, works)

    def _late_step(self, lossfun: Any, args: Any, kwds: Any, works: int) -> None:
        """A forward pass that may initialise parameters, on all ranks alike."""
        steps = self._steps
        with steps.meet() as call:
            header = steps.wait(call)
        if header.workers:
            late = LateParameters(self.communicator, steps.late, header.workers[0])
            if works:
                late.work(
                    lambda after_forward: self._backward(lossfun, args, kwds, after_forward, weight=self.num_samples)
                )
            else:
                late.listen()

    def _reduce(self, call: Passage, plan: Plan, header: Header) -> None:
        """Average the gradients as the headers say."""
        factors, divisor = self._weights(header)
        call.meet_without_row()
        if self._way.compression is not None:
            with spans.span("reduce"):
                self._way.compression.reduce(self.communicator, call, plan, factors, divisor)
            return
        plan.settle(self.communicator, call, header.places)
        if self._sharding is not None and self._sharding.place != plan.place:
            self._sharding.settle(plan)
        with spans.span("reduce"):
            if self._sharding is None:
                plan.reduce(self.communicator, call, plan.params, factors, divisor)
            else:
                plan.reduce_scatter(self.communicator, call, factors, divisor)

    def _reduce_anew(self, num_samples: int | None) -> None:
        """Average the gradients where the headers could not know what there is: all agree on that now."""
        self._divide_gathered()
        self.communicator.weighted_mean_grad(self._updated_params(), self.zero_fill, num_samples)
        if self._sharding is not None and self._sharding.place != self._steps.current_plan().place:
            self._sharding.settle(self._steps.current_plan())

    def _backward(
        self,
        lossfun: Any,
        args: Any,
        kwds: Any,
        after_forward: Any = None,
        listener: Overlap | None = None,
        weight: int | None = None,
    ) -> None:
        began = time.perf_counter()
        loss = loss_of(type(self).__name__, self.actual_optimizer.target, lossfun, args, kwds)
        if spans.recorders:
            spans.note("forward", began)
        if after_forward is not None:
            after_forward()
        if not self._carried.gathered:
            self.actual_optimizer.target.cleargrads()
        scale = self.actual_optimizer.loss_scale
        if self._way.accumulate > 1 and weight is not None:
            scale = weight * (1.0 if scale is None else scale)
        began = time.perf_counter()
        backprop.backward([loss], loss_scale=scale, listener=listener)
        if spans.recorders:
            spans.note("backward", began)

    def _updated_params(self) -> list[tuple[str, Parameter]]:
        """All but the frozen ones, whose gradients nobody reads."""
        return [(name, p) for name, p in self.target.namedparams() if p.update_rule is None or p.update_rule.enabled]
