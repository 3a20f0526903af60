"""Memory of GPUs: what CuPy's pools of this process hold there, the most they have held, and what is free."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import NamedTuple

from dbrdist.core.array.gpu.presence import import_cupy
from dbrdist.core.array.types import CudaPointer, CudaPool


class PrivatePool:
    """A pool of CuPy's that counts as memory of this process, such as that of a captured step."""

    def __init__(self) -> None:
        self.pool: CudaPool = import_cupy().cuda.MemoryPool()
        _private.add(self)

    @property
    def malloc(self) -> Callable[[int], CudaPointer]:
        """What ``cupy.cuda.using_allocator`` takes."""
        return self.pool.malloc


_private: weakref.WeakSet[PrivatePool] = weakref.WeakSet()
_peaks: dict[int, int] = {}  # the most that was held on a device at any look


class DeviceMemory(NamedTuple):
    """Bytes of the current device."""

    used: int  # by arrays of this process
    held: int  # by its pools: these arrays, and freed memory that the next arrays get
    free: int  # what nobody holds
    whole: int


def held_bytes() -> int:
    """What the pools of this process hold on the current device. They grow, and give nothing back by themselves."""
    pools = [import_cupy().get_default_memory_pool(), *(private.pool for private in _private)]
    held = sum(int(pool.total_bytes()) for pool in pools)
    number = int(import_cupy().cuda.runtime.getDevice())
    _peaks[number] = max(_peaks.get(number, 0), held)
    return held


def peak_bytes() -> int:
    """The most that pools of this process have held on the current device: memory freed in between counts as held.

    CuPy's pools give memory back only where ``free_all_blocks`` is called, and where there is no other.
    """
    held_bytes()
    return _peaks[int(import_cupy().cuda.runtime.getDevice())]


def look() -> DeviceMemory:
    """The memory of the current device now."""
    pools = [import_cupy().get_default_memory_pool(), *(private.pool for private in _private)]
    free, whole = import_cupy().cuda.runtime.memGetInfo()
    return DeviceMemory(sum(int(pool.used_bytes()) for pool in pools), held_bytes(), int(free), int(whole))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the memory of a GPU was exhausted, by CuPy's pool or by another allocation of CUDA's."""
    if not type(error).__module__.startswith("cupy"):
        return False
    said = str(error)
    return isinstance(error, MemoryError) or "cudaErrorMemoryAllocation" in said or "ALLOC_FAILED" in said


def wanted_bytes(error: BaseException) -> int:
    """How many bytes an allocation that failed asked for; 0 if it does not say."""
    found = re.search(r"allocating ([\d,]+) bytes", str(error))
    return int(found[1].replace(",", "")) if found else 0
