"""Double buffering: gradients travel during the whole next step, and are one step old when they are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dbrdist.comm.courier import PAUSE_SECONDS
from dbrdist.comm.reduction import Plan, reduce_gradients
from dbrdist.core import flat
from dbrdist.core.backend import Array


class Buffers:
    """The gradients of the step before, on their way.

    Args:
        comm: the ranks. Where it has a thread that reduces (``flat`` over MPI), they travel while the rank computes.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._courier: Any = None
        self._travelling: list[Array] = []
        self._key: Any = None

    def forget(self) -> None:
        """Let no gradient arrive that is on its way: the next step only sends."""
        self._key = None

    def swap(self, plan: Plan, factors: Sequence[float] | None, divisor: float | None, place: tuple[str, int]) -> bool:
        """Send this step's gradients off, and put the means of the step before in their place. Collective.

        False where there are none: in the first step, and in the first after parameters or their places changed.
        """
        flat.collect_gradients(plan.params)
        if self._courier is None:
            self._courier = self._comm._background()
        if self._courier is not None:
            self._courier.wait()
        arrived, key = self._travelling, (plan.runs_digest, *plan.params)
        is_there = bool(arrived) and key == self._key
        self._travelling, self._key = [run.grad.copy() for run in plan.runs], key
        if is_there:
            for run, mean in zip(plan.runs, arrived):
                run.grad[...] = mean
        travelling = self._travelling

        def reduce(comm: Any) -> None:
            with comm._gate.call("reduce", place) as call:
                call.pause_seconds = PAUSE_SECONDS
                call.meet_without_row()
                reduce_gradients(comm, call, travelling, factors, divisor)

        if self._courier is None:
            reduce(self._comm)
        else:
            self._courier.put(reduce)
        return is_there
