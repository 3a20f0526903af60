"""Local SGD: each rank makes steps by itself, and every so many of them the ranks average their parameters."""

from __future__ import annotations

from dbrdist.comm.gradients.mean_network import goes_apart
from dbrdist.comm.steps.policies.all_ranks import AllRanks
from dbrdist.comm.steps.policies.policy import Work
from dbrdist.core.model.apart import go_apart, join
from dbrdist.errors import CommunicatorError


class Local(AllRanks):
    """The first step of all averages gradients, as the parameters are equal still; then ranks go apart."""

    needs_constant_loss_scale = True
    has_more_to_do = True
    _num_samples: int | None = None  # of the last step

    def gradients(self, work: Work, is_first: bool) -> bool:
        self._num_samples = work[-1]
        if is_first:
            return super().gradients(work, is_first)
        self.work_alone(work)
        return True

    def after_update(self, is_first: bool) -> None:
        if is_first:
            return
        goes_apart(self.optimizer.target)
        self.carried.num_local += 1
        go_apart(self.optimizer.target, self.comm.rank)
        if self.carried.num_local >= self.way.local_steps:
            self.carried.num_local = 0
            self._average_parameters()
            join(self.optimizer.target)

    def _average_parameters(self) -> None:
        headers = self.headers
        plan = headers.current_plan()  # of whose runs the header speaks
        headers.post(self._num_samples, True, self.zero_fill)
        with headers.meet() as call:
            header = headers.wait(call)
            if not header.same_runs:
                raise CommunicatorError(
                    "local_steps: expected the parameters in the same order of memory on every rank"
                )
            call.meet_without_row()
            with call.moving():
                for run in plan.runs:
                    self.comm.reducer.reduce(call, run.data, None, float(self.comm.size))
