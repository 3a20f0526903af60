"""Calls of ``update`` that only add up gradients, and the one of them that ends the step."""

from __future__ import annotations

from dbrdist.comm.steps.policies.policy import StepPolicy, Work
from dbrdist.comm.steps.step_state import StepState


class Accumulation:
    """Which calls end a step.

    Args:
        num_calls: of one step.
        policy: of the call that ends it.
        carried: has the numbers of examples of the calls before.
    """

    def __init__(self, num_calls: int, policy: StepPolicy, carried: StepState) -> None:
        self._num_calls = num_calls
        self._policy = policy
        self._carried = carried

    def ends_step(self, work: Work) -> bool:
        """True for the last call of a step; the gradients of another are added up here."""
        gathered, (lossfun, args, kwds, num_samples) = self._carried.gathered, work
        if gathered and (gathered[0] is None) != (num_samples is None):
            raise ValueError("accumulate: expected num_samples in all calls of update or in none")
        if num_samples is not None and num_samples < 0:
            num_samples = self._policy.counted(float(num_samples))
        if len(gathered) >= self._num_calls - 1:  # more where another number was set before
            return True
        if lossfun is None:
            raise ValueError("accumulate: expected a lossfun in update, got none")
        self._policy.work_alone((lossfun, args, kwds, num_samples))
        gathered.append(num_samples)
        return False

    def begin_anew(self) -> None:
        """After the last call of a step."""
        self._carried.gathered = []
