"""The numbers of a captured step that change from one step to the next: one declared block of device memory.

A CUDA graph repeats its kernels with the arguments that they had when it was captured. So while a step is captured,
what another step computes anew on the host (learning rate, ``alpha_t``, loss scale, the counters of random numbers) is
*declared*: kernels get the address of a place in the block, and a function that gives the value is kept. Before each
replay all values are computed and sent in one copy from pinned memory. The overflow flag of a dynamic loss scale is in
the block, too: it is 0 at the start of a replay, and kernels set and read it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from dbrdist.core.array import backend
from dbrdist.core.array.types import Array, CudaEvent, CudaPointer, CudaStream, DType, HostArray, Module
from dbrdist.errors import CaptureError

Numbers: TypeAlias = float | np.generic | tuple[float, ...]

_ALIGNMENT = 8  # bytes: the largest type of a value
_NUM_COPIES = 4  # of the block in pinned memory, so that the host need not wait for the last one


class DeclaredBlock:
    """Declared numbers of one step, on the current device.

    Args:
        num_bytes: the room for all numbers.
    """

    def __init__(self, num_bytes: int = 1 << 16) -> None:
        xp = backend.import_cupy()
        self._device: Any = xp.zeros(num_bytes, np.uint8)
        self._host = np.zeros(num_bytes, np.uint8)
        self._pinned = [backend.pinned_bytes(num_bytes) for _ in range(_NUM_COPIES)]
        self._sent: list[CudaEvent | None] = [None] * _NUM_COPIES  # events: when the copy from each was done
        self._turn = 0
        self._end = 0
        self._values: list[tuple[HostArray, Callable[[], Numbers]]] = []
        self.kept: list[Array] = []  # arrays of caches, which a graph uses as long as it lives
        self.overflow: Array | None = None  # the flag: whether gradients hold NaN or infinity

    def declare(self, values: Callable[[], Numbers], count: int, dtype: DTypeLike) -> Array:
        """A device array of ``count`` numbers, which holds what ``values()`` returns before each replay."""
        place, host = self._take(count, np.dtype(dtype))
        self._values.append((host, values))
        return place

    def number(self, value: Callable[[], float]) -> DeclaredNumber:
        """One number, which several types of arrays may be multiplied by."""
        return DeclaredNumber(self, value)

    def declare_overflow(self) -> Array:
        """The overflow flag, a bool: kernels of the update do nothing where it is set."""
        if self.overflow is None:
            self.overflow = self._take(1, np.dtype(bool))[0].reshape(())
        return self.overflow

    def _take(self, count: int, dtype: DType) -> tuple[Array, HostArray]:
        start, stop = self._end, self._end + count * dtype.itemsize
        if stop > self._host.size:
            raise CaptureError(f"the step has more than {self._host.size} bytes of numbers that change")
        self._end = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return self._device[start:stop].view(dtype), self._host[start:stop].view(dtype)

    def send(self, stream: CudaStream) -> None:
        """Compute all values and copy them to the device, on a stream, before what that does next."""
        for place, values in self._values:
            place[...] = values()
        turn = self._turn = (self._turn + 1) % _NUM_COPIES
        done = self._sent[turn]
        if done is None:
            done = self._sent[turn] = backend.import_cupy().cuda.Event()
        else:
            done.synchronize()  # of four steps ago
        pinned = self._pinned[turn]
        pinned[: self._end] = self._host[: self._end]
        self._device.set(pinned, stream)
        done.record(stream)


class DeclaredNumber:
    """A number of the block, in each type that asks for it."""

    def __init__(self, block: DeclaredBlock, value: Callable[[], float]) -> None:
        self._block, self._value = block, value

    def as_type(self, dtype: DTypeLike) -> Array:
        """A 0-d array on the device."""
        value: Callable[[], float] = self._value
        scalar: Callable[[float], np.generic] = np.dtype(dtype).type
        return self._block.declare(lambda: scalar(value()), 1, dtype).reshape(())

    def inverse(self, dtype: DTypeLike) -> Array:
        """1 / the number, computed in float64."""
        value: Callable[[], float] = self._value
        scalar: Callable[[float], np.generic] = np.dtype(dtype).type
        return self._block.declare(lambda: scalar(1.0 / value()), 1, dtype).reshape(())


class _Current(threading.local):
    block: DeclaredBlock | None = None


_current = _Current()


def current() -> DeclaredBlock | None:
    """The block of the step that this thread captures; None while it captures none."""
    return _current.block


@contextlib.contextmanager
def declaring(block: DeclaredBlock) -> Iterator[None]:
    """Capture a step with this block."""
    _current.block, backend.capturing.is_on = block, True
    try:
        with _without_host_copies():
            yield
    finally:
        _current.block, backend.capturing.is_on = None, False


@contextlib.contextmanager
def _without_host_copies() -> Iterator[None]:
    """Refuse CuPy's own copies from the host in this thread: ``asarray`` makes them from pinned memory that it reuses.

    CUDA captures such a copy, and replays would read there whatever it holds then. Afterwards what served before serves
    again.
    """
    cupy = backend.import_cupy()
    malloc, before = _pinned_allocator(cupy)

    def allocate(num_bytes: int) -> CudaPointer:
        refuse_in_capture(backend.HOST_COPY)
        return malloc(num_bytes)

    cupy.cuda.set_pinned_memory_allocator(allocate)
    try:
        yield
    finally:
        cupy.cuda.set_pinned_memory_allocator(before)


def _pinned_allocator(cupy: Module) -> tuple[Callable[[int], CudaPointer], Callable[[int], CudaPointer] | None]:
    """What allocates pinned memory now, and how to set it again. CuPy does not tell, but memory knows its pool."""
    memory = cupy.cuda.alloc_pinned_memory(1).mem
    owner = getattr(memory, "pool", None)
    pool = owner() if callable(owner) else None
    if pool is not None:
        return pool.malloc, pool.malloc
    if type(memory).__name__ == "PinnedMemory":  # no pool, which CuPy calls None
        return lambda num_bytes: cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(num_bytes), 0), None
    raise CaptureError("pinned memory is allocated by a function of the program; use a cupy.cuda.PinnedMemoryPool")


def keep(a: Array) -> Array:
    """The array itself, from a cache; in a captured step it lives as long as the graph does."""
    if _current.block is not None:
        _current.block.kept.append(a)
    return a


def refuse_in_capture(what: str) -> None:
    """Raise CaptureError if this thread captures a step: ``what`` would be repeated as it is now."""
    if _current.block is not None:
        raise CaptureError(what)
