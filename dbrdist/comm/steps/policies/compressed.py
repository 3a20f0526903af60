"""Compressed gradients: something near their means, in fewer bytes."""

from __future__ import annotations

from dbrdist.comm.gradients.overlap import Overlap
from dbrdist.comm.gradients.reduction_plan import ReductionPlan
from dbrdist.comm.protocol.gate import Passage
from dbrdist.comm.steps.header import Header
from dbrdist.comm.steps.policies.all_ranks import AllRanks
from dbrdist.core.array import spans


class Compressed(AllRanks):
    """What a rank does not send, it keeps and adds to its next gradient."""

    may_enclose = False
    needs_constant_loss_scale = True

    def listener(self) -> Overlap | None:
        return None

    def reduce(self, call: Passage, plan: ReductionPlan, header: Header, listener: Overlap | None) -> bool:
        assert self.way.compression is not None
        factors, divisor = self.weights(header)
        call.meet_without_row()
        with spans.span("reduce"):
            self.way.compression.reduce(self.comm, call, plan, factors, divisor)
        return True
