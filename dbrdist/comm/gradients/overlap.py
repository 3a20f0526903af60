"""Reductions that begin while backward still runs.

The arena is cut into buckets from its end, for backward finishes roughly in the reverse of the order of parameters.
Before backward the uses of each parameter are counted; when the last has come, its gradient is complete, and a bucket
of complete gradients is sent. Buckets are sent in one order on all ranks, whatever their graphs are: a bucket that is
not complete on this rank holds up those behind it, and what backward never reaches counts as gradient zero. The first
backward shows in what order buckets become complete; from the next step on they are sent in rank 0's order. Each is
added by itself, so that the order changes no bit.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dbrdist.comm.gradients.communication_thread import PAUSE_SECONDS, Courier
from dbrdist.comm.gradients.reduction_plan import ReductionPlan
from dbrdist.core.array import spans
from dbrdist.core.model import flat
from dbrdist.core.model.flat import Run
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.tape.node import VariableNode

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase
    from dbrdist.comm.protocol.gate import Passage

Weights: TypeAlias = tuple[Sequence[float] | None, float | None]  # factor of each rank, divisor of the sum

_LINE = 64  # elements: a bucket begins where a parameter may
_LAST_PART = 8  # of a bucket is what is sent last
_PAUSES_PER_BUCKET = 40
_LONGEST_PAUSE_SECONDS = 2e-4  # messages move when someone looks: with 1 ms a reduction over TCP took twice the time


def _nothing() -> None: ...


class Bucket:
    """A stretch of a run, from element ``begin`` to ``end``, with the parameters that lie in it."""

    def __init__(self, number: int, run: Run, begin: int, end: int) -> None:
        self.run_number = number
        self.begin = begin
        self.end = end
        self.params = [p for p, where in run.layers() if where.start < end and where.stop > begin]


def cut(runs: Sequence[Run], num_bytes: int) -> list[Bucket]:
    """Buckets of about this size, the last parameters first.

    The one that is sent last is smaller: it is complete only when backward ends, and nothing hides its time.
    """
    buckets = []
    for number in reversed(range(len(runs))):
        run = runs[number]
        step = max(num_bytes // run.data.itemsize // _LINE, 1) * _LINE
        first = max(step // _LAST_PART // _LINE, 1) * _LINE if run.size > step else step
        borders = [*range(first, run.size, step), run.size] if run.size else []
        starts = [0, *borders[:-1]]
        buckets += [Bucket(number, run, begin, end) for begin, end in zip(reversed(starts), reversed(borders))]
    return buckets


class Overlap:
    """The gradients of a plan, reduced bucket by bucket on a courier.

    Args:
        courier: does the work.
        plan: says what lies where.
        num_bytes: the size of a bucket.
    """

    def __init__(self, courier: Courier | None, plan: ReductionPlan, num_bytes: int) -> None:
        self._courier: Any = courier  # None where another way of sending needs none
        self._plan = weakref.ref(plan)  # which has this reduction
        self._of_param: dict[Parameter, list[int]] = {p: [] for p in plan.params}
        self._travel_as(cut(plan.runs, num_bytes))
        self._is_ordered = False  # by a backward pass; the same on all ranks
        self._completed: list[int] = []  # of this step, one after the other
        self._of_node: dict[VariableNode, list[int]] = {}
        self._missing: list[int] = []
        self._num_started = 0
        self._weights: Callable[[], Weights | None] = lambda: None
        self._agree: Callable[[], None] = _nothing
        self._known: Weights | None = None
        self._place = ("", 0)
        self._took: list[float] = []  # seconds of each bucket of the last step
        self._pause_seconds = PAUSE_SECONDS
        self._call: Passage | None = None  # of the bucket that is being sent

    def _travel_as(self, buckets: list[Bucket]) -> None:
        """Send them one after the other."""
        self.buckets = buckets
        for p in self._of_param:
            self._of_param[p] = []
        for i, bucket in enumerate(buckets):
            for p in bucket.params:
                self._of_param[p].append(i)

    def open(
        self, weights: Callable[[], Weights | None], place: tuple[str, int], agree: Callable[[], None] = _nothing
    ) -> None:
        """Begin a step.

        Args:
            weights: gives (factors, divisor) once the ranks have agreed on the step, None before.
            place: the line of the call, for the record.
            agree: waits until they have.
        """
        self._missing = [len(bucket.params) for bucket in self.buckets]
        self._num_started, self._known, self._completed = 0, None, []
        self._of_node = {}
        self._weights, self._place, self._agree = weights, place, agree
        if self._took:
            # Each look takes the core from backward: on a slow network it looks less often.
            pause = statistics.median(self._took) / _PAUSES_PER_BUCKET
            self._pause_seconds = min(max(pause, PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
        self._took = []

    @property
    def may_have_started(self) -> bool:
        """Whether a bucket may be sent already: from :meth:`expect` on."""
        return bool(self._of_node)

    @property
    def num_complete(self) -> int:
        """The number of buckets whose gradients are all complete."""
        return len(self._completed)

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Within the block buckets are counted, and none is sent, as backward is captured; then the step begins."""
        weights, agree = self._weights, self._agree
        self.open(lambda: None, self._place)
        try:
            yield
        finally:
            self.open(weights, self._place, agree)

    def agree(self) -> None:
        """Wait until the ranks have agreed on the step.

        Who launches a whole backward pass at once does so after its first part: a bucket that begins later waits on
        the device for all that was launched before.
        """
        if self._known is None:
            self._agree()

    def expect(self, used: set[VariableNode]) -> None:
        """Backward will reach these leaves alone: the gradients of all others are zero."""
        for p in self._of_param:
            if p.node not in used:
                p.collect_gradient()
        self.expect_in_place(used)

    def expect_in_place(self, used: set[VariableNode]) -> None:
        """The same where the gradients of all others are zero in flat memory already."""
        self._of_node = {p.node: buckets for p, buckets in self._of_param.items()}
        for p in self._of_param:
            if p.node not in used:
                self._count_down(p.node)
        self._start_complete()

    def ready(self, node: VariableNode) -> None:
        """The gradient of a leaf is complete."""
        if node in self._of_node:
            self._count_down(node)
            self._start_complete()

    def _count_down(self, node: VariableNode) -> None:
        for i in self._of_node[node]:
            self._missing[i] -= 1
            if self._missing[i] == 0:
                self._completed.append(i)

    def _start_complete(self) -> None:
        while self._num_started < len(self.buckets) and self._missing[self._num_started] <= 0:
            if self._known is None:
                self._known = self._weights()
            if self._known is None:
                return
            self._start(*self._known)

    def _start(self, factors: Sequence[float] | None, divisor: float | None) -> None:
        number = self._num_started
        self._num_started += 1
        plan = self._plan()
        assert plan is not None
        self._send(number, self.buckets[number], plan, factors, divisor)

    def _send(
        self, number: int, bucket: Bucket, plan: ReductionPlan, factors: Sequence[float] | None, divisor: float | None
    ) -> None:
        """Begin to reduce a bucket: on the courier."""
        place = self._place

        def reduce(comm: CommunicatorBase) -> None:
            began = time.perf_counter()
            with comm.gate.call("reduce", place) as call:
                self._call = call
                call.pause_seconds = self._pause_seconds
                with spans.span(f"reduce bucket {number}"):
                    plan.reduce_part(comm, call, bucket.run_number, bucket.begin, bucket.end, factors, divisor)
            self._call = None
            self._took.append(time.perf_counter() - began)

        self._courier.put(reduce)

    def wait(self, factors: Sequence[float] | None, divisor: float | None, passage: Passage | None = None) -> None:
        """Reduce what is left, and return when all is done. ``passage``: the verb in which all ranks come here."""
        flat.collect_gradients(self._of_param)
        self._pause_seconds = PAUSE_SECONDS  # nothing else needs the core now
        call = self._call
        if call is not None:
            call.pause_seconds = PAUSE_SECONDS
        while self._num_started < len(self.buckets):
            self._start(factors, divisor)
        self._weights, self._agree = lambda: None, _nothing  # the optimizer's, which has this reduction too
        self._finish(passage)

    def give_up(self) -> None:
        """Backward has failed after buckets were sent: other ranks find out when they next meet."""

    def _finish(self, passage: Passage | None) -> None:
        if self._is_ordered:
            self._courier.wait()
        else:
            self._order()

    def _order(self) -> None:
        """Wait, and send the next steps' buckets in the order in which they became complete on rank 0. Collective.

        Where rank 0 had no backward pass the next step tries again.
        """
        agreed: list[int] = []
        own = np.array(self._order_of_completion(), np.int64)
        self._courier.put(lambda comm: agreed.extend(comm.bcast(own if comm.rank == 0 else None).tolist()))
        self._courier.wait()
        self._take_order(agreed)

    def _take_order(self, agreed: list[int]) -> None:
        if agreed:
            self._travel_as([self.buckets[i] for i in agreed])
            self._is_ordered = True

    def _order_of_completion(self) -> list[int]:
        """All buckets: without parameters first, never complete last. Empty where there was no backward pass."""
        if not self._completed:
            return []
        found = set(self._completed)
        empty = [i for i, bucket in enumerate(self.buckets) if not bucket.params]
        never = [i for i, bucket in enumerate(self.buckets) if bucket.params and i not in found]
        return [*empty, *self._completed, *never]
