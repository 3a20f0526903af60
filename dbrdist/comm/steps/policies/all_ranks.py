"""Mean gradients of all ranks in every step: the base of all policies of several ranks."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from dbrdist.comm.gradients.overlap import Overlap, Weights
from dbrdist.comm.gradients.reduction_plan import ReductionPlan
from dbrdist.comm.protocol.gate import Passage
from dbrdist.comm.steps.header import STALE, Header
from dbrdist.comm.steps.lazy_parameters import LateParameters
from dbrdist.comm.steps.policies.policy import StepPolicy, Work
from dbrdist.comm.transport.call_log import place_of
from dbrdist.comm.transport.disagreement import name_ranks
from dbrdist.core.array import spans
from dbrdist.core.array.config import using_config
from dbrdist.core.array.user_line import warn_user
from dbrdist.core.model.parameter import Parameter
from dbrdist.errors import StaleParametersError

if TYPE_CHECKING:
    from collections.abc import Sequence


class AllRanks(StepPolicy):
    """The header, forward and backward, the reduction. Short gradients come with the header, long ones may be sent
    while backward runs."""

    may_enclose = True  # short gradients in the header

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._may_enclose = self.may_enclose  # read in each step: sooner found here than in the class

    def gradients(self, work: Work, is_first: bool) -> bool:
        headers, is_done = self.headers, False
        lossfun, _, _, num_samples = work
        works = 0 if lossfun is None or num_samples == 0 else 1
        if self.is_sum:
            num_samples = self.carried.samples(num_samples)
        if is_first and lossfun is not None and not (self.is_sum or headers.late):
            works, is_done = works and self._backward_after_broadcast(work), True
        is_known = headers.small_plan is not None and headers.small_config is self.comm.gate.config  # as nearly always
        if self._may_enclose and self.zero_fill and (is_known or headers.is_small()):
            if works and not is_done:
                self.backward(work)
            began = time.perf_counter()
            is_whole = self._reduce_with_header(num_samples, works)
        else:
            headers.post(num_samples, works, self.zero_fill)
            if headers.late:
                self._work_together(work, works)
                self.reduce_anew(num_samples)
                return self.is_whole_anew()
            listener = None if is_done else self.listener()
            if works and not is_done:
                self._backward_with(listener, work)
            began = time.perf_counter()
            is_whole = self._reduce(listener, num_samples)
        self.exposed_seconds += time.perf_counter() - began
        if spans.recorders:
            spans.note("exposed wait", began)
        return is_whole

    # ---- what other policies do in another way ----

    def listener(self) -> Overlap | None:
        """What sends gradients while backward runs; None where they are sent after it."""
        overlap: Overlap | None = self.headers.overlap(self.sharding) if self.zero_fill else None
        if overlap is not None:
            overlap.open(self._weights_if_known, self.headers.place, self._wait_early)
        return overlap

    def reduce(self, call: Passage, plan: ReductionPlan, header: Header, listener: Overlap | None) -> bool:
        """Average the gradients of a plan that all ranks have, or what the listener has left of them."""
        if listener is not None and header.is_placed:
            listener.wait(*self.weights(header), call)
            return True
        factors, divisor = self.weights(header)
        call.meet_without_row()
        plan.settle(self.comm, call, header.places)
        self.average(call, plan, factors, divisor)
        return True

    def average(
        self, call: Passage, plan: ReductionPlan, factors: Sequence[float] | None, divisor: float | None
    ) -> None:
        """Add up the gradients, which are at their places on all ranks."""
        with spans.span("reduce"):
            plan.reduce(self.comm, call, plan.params, factors, divisor)

    def reduce_anew(self, num_samples: int | None) -> None:
        """Average the gradients where the headers could not know what there is: all agree on that now."""
        if self.is_sum:
            self.carried.divide(self.headers.current_plan(), num_samples)
        self.comm.weighted_mean_grad(self._updated_params(), self.zero_fill, num_samples)

    def is_whole_anew(self) -> bool:
        """Whether there is something to update with, where parameters have got their shapes in this step."""
        return True

    # ---- parts ----

    def work_alone(self, work: Work) -> None:
        if not self.headers.late:
            super().work_alone(work)
            return
        lossfun, _, _, num_samples = work
        works = int(lossfun is not None and num_samples != 0)
        self.headers.post(num_samples, works, self.zero_fill)
        self._work_together(work, works)

    def weights(self, header: Header) -> Weights:
        """(factor of each rank, divisor of the sum) of the gradients that backward left."""
        found = header.weights()  # with its checks
        if not self.is_sum:
            return found
        num_calls = len(self.carried.gathered) + 1
        total = sum(header.counts) if header.counts[0] >= 0 else self.comm.size * num_calls
        return None, float(total)

    def _weights_if_known(self) -> Weights | None:
        """The weights of this step's ranks, if all have shown their headers and agree on where gradients lie."""
        header = self.headers.poll()
        is_agreed = header is not None and header.is_placed and self.headers.plan() is not None
        return self.weights(header) if header is not None and is_agreed else None

    def _wait_early(self) -> None:
        """Wait for the headers while backward runs on the device; a slower rank is waited for here, not after it."""
        began = time.perf_counter()
        self.headers.wait_early()
        self.exposed_seconds += time.perf_counter() - began
        if spans.recorders:
            spans.note("exposed wait", began)

    def _backward_with(self, listener: Overlap | None, work: Work) -> None:
        """Forward and backward, during which the listener sends gradients."""
        try:
            self.backward(work, None, listener)
        except BaseException as e:
            if listener is not None and listener.may_have_started:
                listener.give_up()
                self.headers.break_off(e)
            raise

    def _backward_after_broadcast(self, work: Work) -> int:
        """Forward and backward of the first step, whose loss may come from a forward pass before the broadcast.

        Returns what the header says: that this rank has worked, or ``STALE`` if its loss was computed with other
        parameters than rank 0's, of which there is no gradient.
        """
        try:
            with using_config("stale_parameters", "refuse"):
                self.backward(work)
        except StaleParametersError:
            return STALE
        return 1

    def _is_stale(self, header: Header) -> bool:
        """Whether a rank has no gradient, so that no rank makes this step; all say so."""
        if header.stale:
            self.optimizer.target.cleargrads()
            warn_user(
                f"the first update made no step: on {name_ranks(header.stale)} of {self.comm.size} the loss was "
                "computed before rank 0's parameters arrived; call comm.bcast_data(model) before the first forward",
                RuntimeWarning,
            )
        return bool(header.stale)

    def _reduce_with_header(self, num_samples: int | None, works: int) -> bool:
        """After backward, where gradients come with the header: the ranks meet once."""
        headers = self.headers
        try:
            caller = sys._getframe(3)  # of the optimizer: a loop does so from the same line
        except ValueError:  # a thread that does but this
            caller = None
        with self.comm.gate.call("update", place_of(caller)) as call:
            header = headers.exchange(call, num_samples, works, self.zero_fill)
            if header.stale and self._is_stale(header):
                return False
            if header.is_enclosed:
                began = time.perf_counter() if spans.recorders else None
                factors, divisor = self.weights(header) if self.is_sum else header.known_weights or header.weights()
                headers.shown_plan().add_up(call, call.enclosed, factors, divisor)
                if began is not None:
                    spans.note("reduce", began)
                return True
            plan = headers.plan()
            if plan is not None and header.same_runs:  # on one they have outgrown the header during its forward pass
                return self.reduce(call, plan, header, None)
        self.reduce_anew(num_samples)
        return True

    def _reduce(self, listener: Overlap | None, num_samples: int | None) -> bool:
        """After backward: what is left of the reduction."""
        with self.headers.meet() as call:
            header = self.headers.wait(call)
            if self._is_stale(header):
                return False
            plan = self.headers.plan()
            if plan is not None and header.same_runs and self.zero_fill:
                return self.reduce(call, plan, header, listener)
        self.reduce_anew(num_samples)
        return True

    def _work_together(self, work: Work, works: int) -> None:
        """A forward pass that may initialise parameters, on all ranks alike."""
        headers = self.headers
        with headers.meet() as call:
            header = headers.wait(call)
        if header.workers:
            late = LateParameters(self.comm, headers.late, header.workers[0])
            if works:
                late.work(lambda after_forward: self.backward(work, after_forward))
            else:
                late.listen()

    def _updated_params(self) -> list[tuple[str, Parameter]]:
        """All but the frozen ones, whose gradients nobody reads."""
        named = self.optimizer.target.namedparams()
        return [(name, p) for name, p in named if p.update_rule is None or getattr(p.update_rule, "enabled", True)]
