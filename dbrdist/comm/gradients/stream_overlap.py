"""Reductions of device arrays that run beside backward, on a stream of their own.

The host only starts them, in the order of the buckets, while backward launches its kernels. Events order both ways: a
bucket's sum waits for the kernels that made its gradients, and the update waits for all sums. Everything that a sum
allocates, such as gradients in 16 bits, belongs to that stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dbrdist.comm.gradients.overlap import Bucket, Overlap
from dbrdist.core.array import backend, spans

if TYPE_CHECKING:
    from dbrdist.comm.gradients.reduction_plan import ReductionPlan
    from dbrdist.comm.protocol.gate import Passage
    from dbrdist.core.array.types import Array, CudaEvent, CudaStream

# On an H100 with NVLink a sum of 32 MB takes about 0.2 ms; of smaller buckets latency takes a larger part. [estimated]
BUCKET_BYTES = 32 << 20
_MOST_BUCKETS = 38  # about: more of them cost the host more than they hide
_MOST_IN_ROW = 41  # whose order fits into one row; more, such as of many types, go from the last parameter on


class SideStream:
    """A stream beside the current one of a device, and the events that order the two."""

    def __init__(self, device: backend.Device) -> None:
        self.device = device
        with device.create_context():
            cuda = backend.import_cupy().cuda
            self.stream: CudaStream = cuda.Stream(non_blocking=True)
            self._written: CudaEvent = cuda.Event()
            self._done: CudaEvent = cuda.Event()

    def here(self) -> CudaStream:
        """The context of the stream, after what the current one has been given so far."""
        self._written.record(backend.import_cupy().cuda.get_current_stream())
        self.stream.wait_event(self._written)
        return self.stream

    def join(self) -> None:
        """Let the current stream wait for all that this one has been given."""
        self._done.record(self.stream)
        backend.import_cupy().cuda.get_current_stream().wait_event(self._done)


class StreamOverlap(Overlap):
    """The gradients of a plan, reduced bucket by bucket on a stream of their own.

    Args:
        reduce: replaces a 1-d array of the device by its sum over ranks, weighted and divided, on the current stream.
        side: the stream.
        plan: says what lies where.
        num_bytes: the size of a bucket.
    """

    def __init__(
        self,
        reduce: Callable[[Array, Sequence[float] | None, float | None], None],
        side: SideStream,
        plan: ReductionPlan,
        num_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(None, plan, max(num_bytes, -(-plan.num_bytes // _MOST_BUCKETS)))
        self._reduce = reduce
        self._side = side

    def _send(
        self, number: int, bucket: Bucket, plan: ReductionPlan, factors: Sequence[float] | None, divisor: float | None
    ) -> None:
        grad = plan.runs[bucket.run_number].grad[bucket.begin : bucket.end]
        with self._side.device.create_context(), spans.span(f"start bucket {number}"), self._side.here():
            self._reduce(grad, factors, divisor)

    def _finish(self, passage: Passage | None) -> None:
        with self._side.device.create_context():
            self._side.join()
        if self._is_ordered or passage is None or len(self.buckets) > _MOST_IN_ROW:
            return
        own = self._order_of_completion()
        agreed = passage.agree(np.array([len(own), *own], np.int64))[0].tolist()
        self._take_order(agreed[1 : 1 + agreed[0]])

    def give_up(self) -> None:
        """Start what is left after a failure, so that the streams of other ranks do not wait for ever."""
        with contextlib.suppress(Exception):  # what failed may be the device: the first error is the one to report
            if self._known is None:
                self._known = self._weights()
            while self._known is not None and self._num_started < len(self.buckets):
                self._start(*self._known)
