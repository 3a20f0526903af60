"""Optimizer state, gradients and updates divided over the ranks (ZeRO)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dbrdist.comm.gradients.reduction_plan import ReductionPlan
from dbrdist.comm.gradients.sharding import ZeroSharding
from dbrdist.comm.protocol.gate import Passage
from dbrdist.comm.steps.policies.all_ranks import AllRanks
from dbrdist.core.array import spans


class Sharded(AllRanks):
    """Each rank gets its part of the mean gradients, updates its part of the parameters, and gives it to the others."""

    may_enclose = False
    has_more_to_do = True
    sharding: ZeroSharding

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.sharding = ZeroSharding(self.comm, self.optimizer, self.way.zero)

    def average(
        self, call: Passage, plan: ReductionPlan, factors: Sequence[float] | None, divisor: float | None,
    ) -> None:  # fmt: skip
        self._divide(plan)
        with spans.span("reduce"):
            plan.reduce_scatter(self.comm, call, factors, divisor)

    def reduce_anew(self, num_samples: int | None) -> None:
        super().reduce_anew(num_samples)
        self._divide(self.headers.current_plan())

    def after_update(self, is_first: bool) -> None:
        if self.optimizer.is_safe_to_update():
            with self.headers.meet() as call, spans.span("spread values"):
                self.sharding.share_values(call, self.headers.current_plan())

    def _divide(self, plan: ReductionPlan) -> None:
        if self.sharding.place != plan.place:
            self.sharding.settle(plan)
