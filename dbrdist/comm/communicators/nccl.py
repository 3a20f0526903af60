"""Sums of device arrays by NCCL, over CuPy's bindings; objects, host arrays and agreement go over MPI.

Written against CuPy 14 and tested on a stand-in and on one GPU, never on several (docs/gpu-status.md).
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dbrdist.comm.communicators.shared_memory import FlatCommunicator, FlatReducer
from dbrdist.comm.gradients.reducer import Reducer
from dbrdist.comm.gradients.reduction_plan import ReductionPlan
from dbrdist.comm.gradients.stream_overlap import SideStream, StreamOverlap
from dbrdist.comm.protocol.arguments import attempt
from dbrdist.comm.protocol.gate import Passage, digest
from dbrdist.comm.protocol.primitives import Row
from dbrdist.comm.protocol.wire_type import Scaled, codec_for, growth, largest_number
from dbrdist.comm.transport import message
from dbrdist.comm.transport.call_log import Call
from dbrdist.core.array import backend
from dbrdist.core.array.backend import Array
from dbrdist.core.array.gpu.presence import driver_cuda
from dbrdist.core.array.types import DType
from dbrdist.errors import CommunicatorError

if TYPE_CHECKING:
    from dbrdist.comm.gradients.overlap import Overlap
    from dbrdist.core.array.types import Module

# NumPy's types that NCCL adds, and as which of its own; other numbers are added here. Complex ones are pairs.
_TYPES = {
    "float32": ("NCCL_FLOAT32", 1), "float64": ("NCCL_FLOAT64", 1), "int8": ("NCCL_INT8", 1),
    "uint8": ("NCCL_UINT8", 1), "int32": ("NCCL_INT32", 1), "uint32": ("NCCL_UINT32", 1), "int64": ("NCCL_INT64", 1),
    "uint64": ("NCCL_UINT64", 1), "complex64": ("NCCL_FLOAT32", 2), "complex128": ("NCCL_FLOAT64", 2),
}  # fmt: skip
_LOOK_SECONDS = 0.5  # between two looks for errors
_OVERLAP_FROM_BYTES = 1 << 20  # below, a sum takes no longer than starting it
_ID_WORDS = 16  # a unique id has 128 bytes

Adder: TypeAlias = Callable[[Call, Array], None]


class _ErrorWatch:
    """Asks NCCL for errors of collectives under way, which it reports to nobody: whoever waits for them waits forever.

    On an error the communicator is aborted, which ends that wait, and the thread raises: that ends the job with a
    report of this rank, as any exception of a thread does (``failure/abort.py``).
    """

    def __init__(self, comm: Module, rank: int) -> None:
        self._comm, self._rank = comm, rank
        self.is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"NCCL errors of rank {rank}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop asking."""
        self.is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self.is_over.wait(_LOOK_SECONDS):
            try:
                self._comm.check_async_error()
            except Exception as error:  # CuPy's class comes with NCCL alone
                with contextlib.suppress(Exception):
                    self._comm.abort()
                raise CommunicatorError(
                    f"rank {self._rank}: NCCL reports an error in a collective that was under way: {error}; another "
                    "rank or its GPU was lost, or the network; NCCL_DEBUG=INFO says more"
                ) from error


class NcclRing:
    """The ranks of a communicator as NCCL knows them. What it does is ordered by the device's current stream.

    Args:
        nccl: CuPy's module.
        size: the number of ranks.
        unique_id: of rank 0, the same everywhere.
        rank: this one.
    """

    def __init__(self, nccl: Module, size: int, unique_id: bytes, rank: int) -> None:
        self._nccl = nccl
        self.size = size
        self._rank = rank
        self._comm = nccl.NcclCommunicator(size, unique_id, rank)
        self.device = backend.current_device()
        self._errors = _ErrorWatch(self._comm, rank) if hasattr(self._comm, "check_async_error") else None
        if self._errors is not None:
            # Where nobody frees it: the thread would keep NCCL's part until the program ends.
            weakref.finalize(self, self._errors.is_over.set).atexit = False

    def free(self) -> None:
        """Give it back. Collective."""
        if self._errors is not None:
            self._errors.end()
        self._comm.destroy()

    def reduce(self, x: Array, factors: Sequence[float] | None = None, divisor: float | None = None) -> None:
        """Replace the 1-d dense ``x`` by ``sum(factors[k] * x of rank k) / divisor``; 16-bit types in float32."""
        if x.size == 0:
            return
        with backend.on(x):  # on the device of the ring, whichever is current now: streams belong to a device
            if x.dtype.name in _TYPES:
                if factors is not None:
                    x *= x.dtype.type(factors[self._rank])
                if divisor == self.size and x.dtype.kind in "fc" and hasattr(self._nccl, "NCCL_AVG"):
                    self._combine(x, self._nccl.NCCL_AVG)  # NCCL divides in its own pass over memory
                    return
                self._combine(x, self._nccl.NCCL_SUM)
                message.divide(x, divisor)
            else:
                self._add_here(x, factors, divisor)

    def largest(self, x: Array) -> None:
        """Replace ``x``, of a type that NCCL has, by the largest of all ranks, element by element."""
        with backend.on(x):
            self._combine(x, self._nccl.NCCL_MAX)

    def _combine(self, x: Array, how: int) -> None:
        """By NCCL's own sum, mean or maximum."""
        name, width = _TYPES[x.dtype.name]
        kind, place = getattr(self._nccl, name), x.data.ptr
        self._comm.allReduce(place, place, x.size * width, kind, how, backend.current_stream())

    def _add_here(self, x: Array, factors: Sequence[float] | None, divisor: float | None) -> None:
        """Each rank adds one block of all ranks, in float32 if it is narrow, and gives the narrowed sum to all."""
        borders = message.blocks(x.size, self.size)
        blocks = [x[begin:end] for begin, end in itertools.pairwise(borders)]
        own = blocks[self._rank]
        pieces = [own] + [backend.empty(own.shape, own.dtype, own) for _ in range(self.size - 1)]
        order = [self._rank, *(k for k in range(self.size) if k != self._rank)]
        theirs = dict(zip(order, pieces))
        self._together(
            lambda k, stream: self._move(self._comm.send, blocks[k], k, stream),
            lambda k, stream: self._move(self._comm.recv, theirs[k], k, stream),
        )
        total = message.weighted_sum([theirs[k] for k in range(self.size)], factors, divisor)
        own[...] = total.astype(own.dtype)
        self._together(
            lambda k, stream: self._move(self._comm.send, own, k, stream),
            lambda k, stream: self._move(self._comm.recv, blocks[k], k, stream),
        )

    def _together(self, send: Callable[[int, int], None], recv: Callable[[int, int], None]) -> None:
        """Send to and receive from every other rank at once."""
        stream = backend.current_stream()
        self._nccl.groupStart()
        try:
            for k in range(self.size):
                if k != self._rank:
                    send(k, stream)
                    recv(k, stream)
        finally:
            self._nccl.groupEnd()

    def _move(self, verb: Callable[..., None], x: Array, peer: int, stream: int) -> None:
        if x.size:
            verb(x.data.ptr, x.nbytes, self._nccl.NCCL_UINT8, peer, stream)


class NcclGradients:
    """Reduces the gradients of a plan, which are on the device of the ring on every rank."""

    def __init__(self, ring: NcclRing, plan: ReductionPlan) -> None:
        self._ring = ring
        self._grads = [run.grad for run in plan.runs]

    def reduce(
        self,
        reducer: Reducer,
        call: Passage,
        factors: Sequence[float] | None,
        divisor: float | None,
        parts: Sequence[tuple[int, int, int]] | None = None,
    ) -> None:
        """As ``arenas.SharedGradients.reduce``, sent in the configured type if there is one."""
        grads = self._grads if parts is None else [self._grads[k][begin:end] for k, begin, end in parts]
        for grad in grads:
            call.num_bytes += grad.nbytes
            call.kind = grad.dtype
            reduce_as(reducer.comm.get_config("allreduce_grad_dtype"), self._ring, grad, factors, divisor)

    def reduce_scatter(
        self,
        reducer: Reducer,
        call: Passage,
        factors: Sequence[float] | None,
        divisor: float | None,
        parts: Sequence[tuple[int, int, int]],
    ) -> None:
        """As ``arenas.SharedGradients.reduce_scatter``; every rank gets all of it, for twice the bytes."""
        self.reduce(reducer, call, factors, divisor)


def reduce_as(
    dtype: DType | None, ring: NcclRing, grad: Array, factors: Sequence[float] | None, divisor: float | None
) -> None:
    """Reduce a 1-d array, sent in another type if one is given; on the current stream, and without a wait."""
    if dtype is None or dtype == grad.dtype:
        ring.reduce(grad, factors, divisor)
        return
    with backend.on(grad):
        scale = None
        if isinstance(codec_for(dtype), Scaled) and grad.size:
            scale = _scale_for(dtype, ring, grad, growth(ring.size, factors, divisor))
        travelling = (grad if scale is None else grad * scale).astype(dtype)
        ring.reduce(travelling, factors, divisor)
        grad[...] = travelling
        if scale is not None:
            grad /= scale


def _scale_for(dtype: DType, ring: NcclRing, grad: Array, growth_of_sum: float) -> Array:
    """The power of two of ``wire_type.Scaled``, on which the ranks agree on their devices."""
    xp = backend.get_array_module(grad)
    largest = xp.maximum(grad.max(), -grad.min()).astype(np.float64).reshape(1)
    ring.largest(largest)
    largest *= max(growth_of_sum, 1.0)
    highest = math.frexp(largest_number(dtype))[1] - 2  # the largest number of the type, with room for rounding
    exponent = xp.minimum(highest + 1 - xp.frexp(largest)[1], 120)
    scale: Array = xp.where((largest > 0) & (largest < np.inf), xp.ldexp(xp.ones_like(largest), exponent), 1.0)
    return scale.astype(grad.dtype)


class NcclReducer(FlatReducer):
    """Gradients and sums of device arrays by NCCL, all else as flat.

    Each rank uses the device that is current at its first reduction of a device array, and one that no other rank of
    the host uses.
    """

    _ring: NcclRing | None = None
    _side: SideStream | None = None  # on which gradients are reduced while backward runs
    _side_ring: NcclRing | None = (
        None  # NCCL's calls of one ring have one order on all ranks, so the stream has its own
    )

    def misfit(self) -> Exception | None:
        reason = backend.why_no_nccl()
        if not reason:
            return None
        return RuntimeError(
            f"the communicator 'pure_nccl' expected CuPy with NCCL, and a GPU on every rank, but {reason}; use 'auto' "
            "or 'flat', which stage device arrays through host memory"
        )

    def share_gradients(self, call: Passage, plan: ReductionPlan) -> Any | None:
        are_there = self._are_on_my_device([run.grad for run in plan.runs])
        ring = self._ring_if_all(call, bool(plan.runs) and are_there)
        return super().share_gradients(call, plan) if ring is None else NcclGradients(ring, plan)

    def why_staged(self, plan: ReductionPlan | None) -> str | None:
        if plan is None or not plan.place or isinstance(plan.shared, NcclGradients):
            return None
        return (
            "the parameters of a rank are not on the GPU that it uses for NCCL, so that all gradients go through host "
            "memory; on every rank, call dbrdist.get_device(comm.intra_rank).use() and move the model there"
        )

    def overlap(self, call: Passage, plan: ReductionPlan) -> Overlap | None:
        if not isinstance(plan.shared, NcclGradients):
            return super().overlap(call, plan)
        wanted = self.comm.get_config("overlap")
        is_long = plan.num_bytes >= _OVERLAP_FROM_BYTES if wanted is None else bool(wanted)
        if not is_long or plan.division is not None:
            return None
        if self._side_ring is None:
            self._side_ring = self._make_ring(call)
            self._side = SideStream(self._side_ring.device)
        ring, comm = self._side_ring, self.comm
        assert self._side is not None
        return StreamOverlap(
            lambda grad, factors, divisor: reduce_as(
                comm.get_config("allreduce_grad_dtype"), ring, grad, factors, divisor
            ),
            self._side,
            plan,
        )

    def for_arrays_like(self, call: Passage, x: Array) -> Adder:
        ring = self._ring_if_all(call, self._are_on_my_device([x]))
        if ring is None:
            return super().for_arrays_like(call, x)
        return lambda call, x: ring.reduce(x)

    def _are_on_my_device(self, arrays: Sequence[Array]) -> bool:
        if any(isinstance(a, np.ndarray) for a in arrays):
            return False
        device = backend.current_device() if self._ring is None else self._ring.device
        return all(backend.device_of(a) == device for a in arrays)

    def _ring_if_all(self, call: Passage, is_mine: bool) -> NcclRing | None:
        """The ring where every rank's arrays are on its device; it is made at the first time. Collective."""
        if self.ranks.size == 1 or not all(call.agree([is_mine])[:, 0]):
            return None
        if self._ring is None:
            self._ring = self._make_ring(call)
        return self._ring

    def _make_ring(self, call: Passage) -> NcclRing:
        nccl = backend.import_nccl()
        unique_id, error = attempt(nccl.get_unique_id) if self.ranks.rank == 0 else (bytes(8 * _ID_WORDS), None)
        words = np.frombuffer(unique_id or bytes(8 * _ID_WORDS), np.int64)
        rows = call.agree([self.ranks.inter_rank, digest(backend.bus_id_of_device()), *words], error)
        places = [tuple(row) for row in rows[:, :2].tolist()]
        call.agree((), _shared_device(places, self.ranks.rank, backend.bus_id_of_device()))
        with call.moving():
            return NcclRing(nccl, self.ranks.size, rows[0, 2 : 2 + _ID_WORDS].tobytes(), self.ranks.rank)

    def free(self) -> None:
        for ring in (self._side_ring, self._ring):
            if ring is not None:
                ring.free()
        self._ring = self._side_ring = self._side = None
        super().free()


class NcclCommunicator(FlatCommunicator):
    """Gradients and sums of device arrays by NCCL, all else as flat: see :class:`NcclReducer`."""

    reducer_type = NcclReducer


def _shared_device(places: Sequence[tuple[int, int]], rank: int, bus_id: str) -> Exception | None:
    """What is wrong where two ranks use one GPU, which NCCL allows only on request (from version 2.30 on)."""
    if places.count(places[rank]) == 1 or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return None
    others = [k for k, place in enumerate(places) if place == places[rank] and k != rank]
    return ValueError(
        f"the communicator 'pure_nccl' expected a GPU for each rank, but rank {rank} uses that of rank {others[0]} "
        f"({bus_id}); call dbrdist.get_device(comm.intra_rank).use() before you move the model to the device, or take "
        "the communicator 'flat', which adds gradients in host memory"
    )


# ---- auto -----------------------------------------------------------------------------------------------------------

# An allreduce of 102 MB of a GPU took 64 ms on one H100, of one rank: copies to pageable host memory and back.
STAGING_SECONDS_PER_BYTE = 0.64e-9


class AutoCommunicator(FlatCommunicator):
    """What ``auto`` makes: it becomes pure_nccl where the ranks agree that each has a GPU of its own, else flat.

    ``why``: in a few words, what was chosen for device arrays; empty where this process has no GPU.
    """

    why = ""
    _reason = ""

    @property
    def _kind(self) -> str:
        return FlatCommunicator.__name__  # ranks that ask for 'flat' by name go along

    def _facts(self) -> Sequence[int]:
        self._reason, bus_id = own_gpu(self.ranks.intra_rank)
        return [int(bool(bus_id)), digest(bus_id), int(not self._reason)]

    def _settle(self, rows: Row) -> None:
        leaders = self.ranks.leaders
        has_gpu, bus_ids, can = rows[:, 0].tolist(), rows[:, 1].tolist(), rows[:, 2].tolist()
        are_alone = len(set(zip(leaders, bus_ids))) == len(bus_ids)
        is_nccl = self.ranks.size > 1 and all(can) and are_alone
        self.why = "" if self.ranks.size == 1 or not has_gpu[self.ranks.rank] else _words(can, are_alone, self._reason)
        kind: Any = NcclCommunicator if is_nccl else FlatCommunicator
        self.__class__ = kind
        if is_nccl:
            self.reducer = NcclReducer(self)


def own_gpu(intra_rank: int) -> tuple[str, str]:
    """(why NCCL cannot be used here, the bus id of the GPU that this rank uses or will use), both perhaps empty.

    That is the current one if the program has chosen another than the first, else the one with the number of the rank
    in its host.
    """
    is_installed = "cupy" in sys.modules or importlib.util.find_spec("cupy") is not None
    if not is_installed or not driver_cuda():
        return "there is no GPU", ""
    try:
        reason = backend.why_no_nccl()
        runtime = backend.import_cupy().cuda.runtime
        count = backend.num_gpus()
        if not count:
            return reason, ""
        return reason, str(runtime.deviceGetPCIBusId(runtime.getDevice() or intra_rank % count))
    except Exception as error:  # CuPy's errors have classes of their own
        return f"{type(error).__name__}: {error}", ""


def _words(can: list[int], are_alone: bool, reason: str) -> str:
    if all(can) and are_alone:
        return "each rank has a GPU of its own: device arrays are added by NCCL, host arrays as flat does"
    if not all(can):
        where = reason or f"rank {can.index(0)} cannot use it"
    else:
        where = "there are fewer GPUs than ranks"
    milliseconds = f"{STAGING_SECONDS_PER_BYTE * 1e12:.0f} ms for each GB"
    return f"device arrays go through host memory, {milliseconds} on an H100; NCCL is not used: {where}"


def cost_of_staging(num_bytes: int) -> str:
    """The line of a plan for runs on GPUs whose gradients are not added by NCCL."""
    return (
        f"gradients: {num_bytes / 1e6:,.3g} MB go through host memory in each step, which takes about "
        f"{STAGING_SECONDS_PER_BYTE * num_bytes * 1e3:,.2g} ms by the copies of an H100; NCCL needs a GPU for each rank"
    )
