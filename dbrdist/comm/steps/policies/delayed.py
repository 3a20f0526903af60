"""Double buffering: each step sends its gradients and updates with the means of the step before."""

from __future__ import annotations

from dbrdist.comm.gradients.overlap import Overlap
from dbrdist.comm.gradients.reduction_plan import ReductionPlan
from dbrdist.comm.protocol.gate import Passage
from dbrdist.comm.steps.buffering import Buffers
from dbrdist.comm.steps.header import Header
from dbrdist.comm.steps.policies.all_ranks import AllRanks


class Delayed(AllRanks):
    """There is nothing to update with in the first step, nor in the first after parameters have changed."""

    may_enclose = False
    needs_constant_loss_scale = True

    def listener(self) -> Overlap | None:
        return None

    def reduce(self, call: Passage, plan: ReductionPlan, header: Header, listener: Overlap | None) -> bool:
        return self._buffers.swap(plan, *self.weights(header), self.headers.place)

    def is_whole_anew(self) -> bool:
        return self._buffers.hold(self.headers.current_plan())

    @property
    def _buffers(self) -> Buffers:
        assert self.carried.buffers is not None
        return self.carried.buffers
