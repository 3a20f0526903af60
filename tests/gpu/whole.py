"""Whole steps without a GPU: ``--on whole`` lets arrays of the stand-in pass for CuPy's own, so that under the tape
dbrdist's kernels run, compiled by g++, and a cuDNN that computes by definition.

Kernels run with g++'s address and undefined-behaviour sanitizers: each array has bounds, and memory that was freed is
out of bounds. Each array is in memory of a pool with a list of free blocks by stream, as CuPy's; fresh memory holds
NaN. Vector clocks (clocks.py) see what each kernel reads and writes, and cuDNN too.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import ctypes
import functools
import math
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import capture
import clocks
import host_cuda
import host_cudnn
import numpy as np
import stand_in
from numpy.lib.array_utils import byte_bounds
from stand_in import ndarray

from dbrdist.kernels.gpu import cublaslt, cuda_source
from dbrdist.kernels.gpu.cuda_layout import FilterPieces

_ZONE = 512  # bytes before and behind a block that nobody may touch


class Guard:
    """The sanitizers, and what they have reported."""

    def __init__(self) -> None:
        text = (host_cuda.HERE / "sanitizers.cpp").read_text()
        first = host_cuda.built_once("ears", text, ())._name
        self.ears = ctypes.CDLL(first, ctypes.RTLD_GLOBAL)
        self.ears.report.restype = ctypes.c_char_p
        self.memory = host_cuda.built_once("poison", text, ("-DPOISON", "-fsanitize=address,undefined"))
        for call in (self.memory.poison, self.memory.unpoison):
            call.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self.memory.listen(self.ears.heard)

    def check(self, what: str) -> None:
        """Raise an error if something was reported since the last time."""
        if self.ears.reports():
            text = self.ears.report().decode(errors="replace")
            self.ears.forget()
            raise AssertionError(f"{what}: {text}")


_is_over: list[bool] = []  # not empty at the end of the process, when modules are taken apart
atexit.register(_is_over.append, True)


class Memory:
    """The memory of a block, from an address that is a multiple of 512 on."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.held = np.empty(num_bytes + 3 * _ZONE, np.uint8)
        self.start = -(-int(self.held.ctypes.data) // _ZONE) * _ZONE + _ZONE
        offset = self.start - int(self.held.ctypes.data)
        self.bytes = self.held[offset : offset + num_bytes]
        self.used = 0
        # By the array and not by a __del__ of this: where the collector finds a cycle, a lease in it gives its block
        # back to the pool, and the memory would have been finalized and be used again.
        _ends[self.start] = weakref.ref(self.held, functools.partial(_gone, self.start, num_bytes))
        if guard is not None:
            guard.memory.poison(self.start - _ZONE, num_bytes + 2 * _ZONE)

    def use(self, num_bytes: int) -> None:
        """Only so many bytes belong to somebody now, and nobody has written them."""
        self.used = num_bytes
        if guard is None:
            return
        guard.memory.poison(self.start, self.num_bytes)
        guard.memory.unpoison(self.start, num_bytes)
        self.bytes[:num_bytes] = 255


def _gone(start: int, num_bytes: int, ref: Any, is_over: list[bool] = _is_over) -> None:
    """The memory is about to be freed. No container is made here: the collector would come, and call this again."""
    if is_over:
        return
    if guard is not None:
        guard.memory.unpoison(start - _ZONE, num_bytes + 2 * _ZONE)
    at = bisect.bisect_left(_starts, start)
    if at < len(_starts) and _starts[at] == start:
        del _starts[at]
    _blocks.pop(start, None)
    _ends.pop(start, None)


guard: Guard | None = None  # None where nothing is computed, but counted
_starts: list[int] = []  # of the memory of all blocks
_blocks: dict[int, weakref.ref[Any]] = {}
_ends: dict[int, weakref.ref[Any]] = {}  # what is called as memory is freed


class Limit:
    """How many bytes of all devices may be in use; more raise CuPy's error."""

    num_bytes: int | None = None

    def check(self, wanted: int) -> None:
        if self.num_bytes is not None and used_bytes() + wanted > self.num_bytes:
            raise stand_in.OutOfMemoryError(wanted, used_bytes())


limit = Limit()


def used_bytes() -> int:
    """Bytes of all blocks that somebody holds."""
    return sum(lease.block.num_bytes for ref in list(_blocks.values()) if (lease := ref()) is not None)


def _total_bytes() -> int:
    return used_bytes() + sum(block.num_bytes for some in clocks._free.values() for block in some)


def _memory_info() -> tuple[int, int]:
    whole = 80_000_000_000 if limit.num_bytes is None else limit.num_bytes
    return max(whole - _total_bytes(), 0), whole


def _lease(num_bytes: int, device: int | None = None) -> Any:
    """Memory of the pool."""
    limit.check(num_bytes)
    before = clocks.current_device()
    if device is not None:
        clocks.use_device(device)
    lease = clocks.allocate(num_bytes)
    clocks.use_device(before)
    block = lease.block
    memory = block.memory
    if memory is None:
        memory = block.memory = Memory(block.num_bytes)
        bisect.insort(_starts, memory.start)
    memory.use(num_bytes)
    _blocks[memory.start] = weakref.ref(lease)
    if clocks.capture is not None:
        clocks.capture.allocated(lease, num_bytes)
    return lease


class Address(int):
    """An address, and what holds its memory."""

    lease: Any = None

    @classmethod
    def of(cls, number: int) -> Address:
        """Of a number that is in an array."""
        made = cls(number)
        made.lease = lease_at(number)
        return made


@contextlib.contextmanager
def all_of(blocks: Any) -> Iterator[None]:
    """Within the block all memory of these blocks may be used, as what a graph replays has freed it before."""
    blocks = [block for block in blocks if block.memory is not None]
    if guard is not None:
        for block in blocks:
            guard.memory.unpoison(block.memory.start, block.num_bytes)
    yield
    if guard is not None:
        for block in blocks:
            guard.memory.poison(block.memory.start, block.num_bytes)
            guard.memory.unpoison(block.memory.start, block.memory.used)


def lease_at(address: int) -> Any:
    """The memory that contains an address, which somebody must hold."""
    start = _starts[bisect.bisect_right(_starts, address) - 1]
    lease = _blocks[start]()
    assert lease is not None, f"address {address:#x} is in memory that was freed"
    assert address < start + lease.block.memory.used, f"address {address:#x} is in no array"
    return lease


class MemoryPointer:
    """What CuPy's pool gives: an address, and what holds its memory."""

    def __init__(self, lease: Any, device_id: int) -> None:
        self.mem, self.device_id, self.ptr = lease, device_id, lease.block.memory.start


def part_at(address: int, num_bytes: int) -> clocks.Part:
    """In the place of ``stand_in.part_at``."""
    lease = lease_at(address)
    begin = address - lease.block.memory.start
    assert begin + num_bytes <= lease.block.memory.used, f"{num_bytes} bytes at {address:#x} go beyond an array's end"
    return clocks.Part(lease, begin, begin + num_bytes)


def part_of(a: Any) -> Any:
    """What an array has of its memory: the gradients of two layers may be neighbours in one block."""
    if not 0 < a.host.nbytes < a.lease.block.memory.used:
        return a.lease
    first, last = byte_bounds(a.host)
    start = a.lease.block.memory.start
    return clocks.Part(a.lease, first - start, last - start)


def alloc(num_bytes: int) -> MemoryPointer:
    """``cupy.cuda.alloc``."""
    return MemoryPointer(_lease(num_bytes), clocks.current_device())


_made_from_host = ndarray.__init__


def _init(self: Any, host: Any, device: Any = None, lease: Any = None, base: Any = None) -> None:
    """Also CuPy's constructor: shape, type, memory, strides."""
    if not isinstance(host, np.ndarray):
        shape, dtype, pointer, strides = host, np.dtype(float if device is None else device), lease, base
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        lease = _lease(math.prod(shape) * dtype.itemsize) if pointer is None else pointer.mem
        array = np.ndarray(shape, dtype, lease.block.memory.bytes, 0, strides)
        _made_from_host(self, array, clocks.current_device(), lease)
    elif lease is None:
        lease = _lease(host.nbytes, device)
        strides = np.empty_like(host).strides if host.size else None
        array = np.ndarray(host.shape, host.dtype, lease.block.memory.bytes, 0, strides)
        array[...] = host
        _made_from_host(self, array, device, lease)
    else:
        _made_from_host(self, host, device, lease, base)


def _flags(self: Any) -> Any:
    flags = self.host.flags
    return stand_in.Flags(flags.c_contiguous, flags.f_contiguous, self.base is None)


def _data(self: Any) -> Any:
    return types.SimpleNamespace(ptr=self.host.__array_interface__["data"][0], device_id=self.device_id, mem=self.lease)


def _compiled(device: int, file: str, name: str) -> Any:
    """In the place of ``cuda_source._compiled``."""
    run = host_cuda.compiled(device, file, name)
    is_written = host_cuda.writes(file)[name.partition("<")[0]]

    def kernel(grid: Any, block: Any, arguments: Any, shared_mem: int = 0) -> None:
        assert clocks.current_device() == device, f"{name}: made for device {device}, which is not the current one"
        arrays = [(part_of(a), w) for a, w in zip(arguments, is_written, strict=True) if isinstance(a, ndarray)]
        for a in arguments:
            if isinstance(a, FilterPieces):
                arrays += [(part_of(x), False) for x in a.sources] + [(part_of(x), True) for x in a.targets]
        clocks.touch([a for a, w in arrays if not w], [a for a, w in arrays if w])
        run(grid, block, arguments, shared_mem)
        assert guard is not None
        guard.check(name)
        if clocks.capture is not None:
            plain = tuple([np.uint64(a.data.ptr) if isinstance(a, ndarray) else a for a in arguments])
            seen = [
                x
                for a in arguments
                for x in ((a.sources, a.targets, a.numbers) if isinstance(a, FilterPieces) else (a,))
            ]
            clocks.capture.add(name, (grid, block, shared_mem, *seen), lambda: again(grid, block, plain, shared_mem))

    def again(*launch: Any) -> None:
        run(*launch)
        guard.check(name)

    return kernel


def _execute(graph: Any, addresses: Any, workspace: int, handle: Any) -> None:
    """In the place of ``host_cudnn.Graph.execute``: looks at bounds and at clocks first."""
    leases = []
    for t in graph.all_tensors:
        leases.append(part_at(addresses[t.uid], t.num_bytes))
    room = [lease_at(workspace)] if workspace else []
    clocks.touch(leases[: graph.num_read], [*leases[graph.num_read :], *room])
    _computed(graph, addresses, workspace, handle)
    if clocks.capture is not None:
        at = {uid: int(address) for uid, address in addresses.items()}
        arrays = [*[at[t.uid] for t in graph.all_tensors], *[workspace] * bool(workspace)]
        clocks.capture.add(
            f"cuDNN's {graph.kind}", list(map(Address.of, arrays)), lambda: _replayed(graph, at, workspace, handle)
        )


def _replayed(graph: Any, *call: Any) -> None:
    graph.is_replayed = True
    _computed(graph, *call)
    graph.is_replayed = False


_computed = host_cudnn.Graph.execute


def load_cublaslt() -> Any:
    """In the place of ``cublaslt._load``: a library for host memory."""
    text = (host_cuda.HERE / "fake_cublaslt.cpp").read_text()
    return ctypes.CDLL(host_cuda.built_once("cublaslt", text, ())._name)


def _multiply(planned: Any, a: Any, b: Any, y: Any, room: Any, stream: int, sums: Any) -> None:
    """In the place of ``cublaslt._run``: looks at clocks first."""
    assert stream == clocks.current_stream().ptr
    written = [y] if sums is None else [y, sums]
    clocks.touch([part_of(a), part_of(b)], [*map(part_of, written), *[room.mem] * (room is not None)])
    at = a.data.ptr, b.data.ptr, y.data.ptr, 0 if room is None else room.ptr, 0, 0 if sums is None else sums.data.ptr
    planned.run(*at)
    products.append((a.shape, b.shape))
    if clocks.capture is not None:
        arguments = a, b, *written, *[Address.of(room.ptr)] * (room is not None)
        clocks.capture.add("cuBLASLt's product", arguments, lambda: planned.run(*at))


products: list[Any] = []  # shapes of what cuBLASLt has multiplied


def install() -> None:
    """Let dbrdist take the stand-in for CuPy, with kernels and cuDNN of the host."""
    global guard
    cublaslt._load, cublaslt._run = load_cublaslt, _multiply
    for module in (stand_in, clocks, capture):  # lines in them are CuPy's
        module.__dict__["__name__"] = f"cupy.{module.__name__}"
    host_cuda.is_sanitized = True
    guard = Guard()
    take_place()
    cuda_source._compiled = _compiled
    host_cudnn.Graph.execute = _execute


def take_place() -> None:
    """Arrays of the stand-in pass for CuPy's own, and cuDNN is there."""
    ndarray.__module__ = "cupy"
    stand_in.part_at = part_at
    ndarray.__init__ = _init
    ndarray.flags = property(_flags)
    ndarray.data = property(_data)
    cuda = stand_in.module.cuda
    pool = types.SimpleNamespace(used_bytes=used_bytes, total_bytes=_total_bytes)
    stand_in.module.get_default_memory_pool = lambda: pool
    cuda.runtime.memGetInfo = _memory_info
    cuda.alloc, cuda.MemoryPool, cuda.using_allocator = alloc, capture.Pool, capture.using_allocator
    sys.modules["cupy"] = stand_in.module
    sys.modules["cupyx.scipy"] = stand_in.cupyx_scipy
    sys.modules["cudnn"] = host_cudnn.module
