"""Double buffering: gradients are sent during the next step, and are one step old when they are used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.gradients.communication_thread import PAUSE_SECONDS
from dbrdist.comm.gradients.reduction_plan import ReductionPlan, reduce_gradients
from dbrdist.core.array.backend import Array, copy, fill, to_device, zeros
from dbrdist.core.model import flat
from dbrdist.core.model.parameter import Parameter

if TYPE_CHECKING:
    from dbrdist.comm.gradients.communication_thread import Courier

Layers: TypeAlias = list[tuple[Parameter, slice]]


class Buffers:
    """The gradients of the step before, on their way.

    Args:
        comm: the ranks. Where it has a thread that reduces (``flat`` over MPI), they are sent while the rank computes.
    """

    def __init__(self, comm: CommunicatorBase) -> None:
        self._comm = comm
        self._courier: Courier | None = None
        self._travelling: list[Array] = []
        self._key: Any = None
        self._layers: list[Layers] = []  # what lies where in each of them
        self._resumed: dict[Parameter, Array] = {}

    def arriving(self) -> list[tuple[Parameter, Array]]:
        """The mean gradients that the next step updates with. Waits until they are there."""
        if self._courier is not None:
            self._courier.wait()
        if self._key is None:
            return list(self._resumed.items())
        return [(p, mean[where]) for mean, layers in zip(self._travelling, self._layers) for p, where in layers]

    def resume(self, means: Mapping[Parameter, Array]) -> None:
        """Let the next step update with these, as :meth:`arriving` gave them."""
        self._resumed = dict(means)

    def forget(self) -> None:
        """Let no gradient arrive that is on its way: the next step only sends."""
        self._key, self._resumed = None, {}

    def swap(
        self, plan: ReductionPlan, factors: Sequence[float] | None, divisor: float | None, place: tuple[str, int],
    ) -> bool:  # fmt: skip
        """Send this step's gradients off, and put the means of the step before in their place. Collective.

        False where there are none: in the first step, and in the first after parameters or their places changed.
        """
        flat.collect_gradients(plan.params)
        if self._courier is None:
            self._courier = self._comm.reducer.thread()
        if self._courier is not None:
            self._courier.wait()
        key = (plan.runs_digest, *plan.params)
        arrived = self._travelling if key == self._key else self._as_runs(plan)
        self._travelling, self._key, self._resumed = [copy(run.grad) for run in plan.runs], key, {}
        self._layers = [run.layers() for run in plan.runs]
        for run, mean in zip(plan.runs, arrived):
            fill(run.grad, mean)
        travelling = self._travelling

        def reduce(comm: CommunicatorBase) -> None:
            with comm.gate.call("reduce", place) as call:
                call.pause_seconds = PAUSE_SECONDS
                call.meet_without_row()
                reduce_gradients(comm, call, travelling, factors, divisor)

        if self._courier is None:
            reduce(self._comm)
        else:
            self._courier.put(reduce)
        return bool(arrived)

    def hold(self, plan: ReductionPlan) -> bool:
        """The same of gradients that are means already, in a step that could not know before what it sends."""
        arriving = dict(self.arriving())
        self._key, self._resumed = None, {p: copy(p.grad.reshape(-1)) for p in plan.params}
        if not all(p in arriving for p in plan.params):
            return False
        for p in plan.params:
            fill(p.grad, to_device(arriving[p], p.device).reshape(p.shape))
        return True

    def _as_runs(self, plan: ReductionPlan) -> list[Array]:
        """The gradients of :meth:`resume` as they are stored in flat memory; none where some parameter has none."""
        if not all(p in self._resumed for p in plan.params):
            return []
        means = [zeros((run.size,), run.grad.dtype, run.grad) for run in plan.runs]
        for run, mean in zip(plan.runs, means):
            for p, where in run.layers():
                fill(mean[where], to_device(self._resumed[p], p.device))
        return means
