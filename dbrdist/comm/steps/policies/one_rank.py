"""One rank: nothing is sent, and each step is one of the wrapped optimizer."""

from __future__ import annotations

from dbrdist.comm.gradients.reduction_plan import weights
from dbrdist.comm.steps.policies.policy import StepPolicy, Work


class OneRank(StepPolicy):
    """The gradients are those of this rank, with what it carries: of earlier calls, or kept by a compression."""

    def gradients(self, work: Work, is_first: bool) -> bool:
        lossfun, _, _, num_samples = work
        total = self.carried.samples(num_samples) if self.is_sum else num_samples
        if total is not None and total < 1:
            weights([total])  # which says what is wrong with it
        if lossfun is not None and num_samples != 0:
            self.backward(work)
        if self.is_sum:
            self.carried.divide(self.headers.current_plan(), total)
        if self.way.compression is not None and self.way.compression.kept:
            self.way.compression.spend(self.headers.current_plan())
        return True
