"""oneDNN's C API (version 3) through ctypes: loading, memory descriptors, primitives and their caches.

The library is loaded at first use. A primitive's execution costs one ``set_data_handle`` per moved array and one
``execute``. Everything that an execution touches besides the arrays (memory objects, scratchpad, stream) belongs to
one thread: ctypes releases the interpreter lock during ``execute``, and two threads that shared one cached convolution
got wrong results, silently.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from ctypes import byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.core.array.types import Array, DType
from dbrdist.kernels.unsupported import Unsupported as Unsupported

if TYPE_CHECKING:
    from dbrdist.kernels.geometry import ConvGeometry, PoolGeometry

try:
    from dbrdist.kernels.cpu.onednn_executor import Executor
except ImportError:  # not compiled
    Executor = None

ENVIRONMENT_VARIABLE = "DBRDIST_ONEDNN"
CACHE_SIZE = 1024  # primitives per thread; a large network's training step uses some 300
_WHEEL = "onednn-cpu-gomp"

# Values of the C enumerations, named as in dnnl_types.h.
F32, BF16 = 3, 2
TYPES = {"float32": F32, "bfloat16": BF16}
FORWARD_TRAINING, FORWARD_INFERENCE, BACKWARD = 64, 96, 128
CONVOLUTION_DIRECT = 1
POOLING_MAX, POOLING_AVERAGE_WITH_PADDING = 0x1FF, 0x2FF
SUM = -1  # no value of the library's
BINARY = 0x1FFF0  # its algorithms lie from here on
SOFTMAX_ACCURATE, SOFTMAX_LOG = 0x30000, 0x30001
USE_GLOBAL_STATS, USE_SCALE, USE_SHIFT, FUSE_RELU = 1, 2, 4, 8
SRC, SRC_1, DST, WEIGHTS, BIAS, MEAN, VARIANCE, SCALE, SHIFT = 1, 2, 17, 33, 41, 49, 50, 51, 52
WORKSPACE, SCRATCHPAD = 64, 80
DIFF_SRC, DIFF_DST, DIFF_WEIGHTS, DIFF_SCALE, DIFF_SHIFT = 129, 145, 161, 255, 256
QUERY_WEIGHTS, QUERY_DIFF_WEIGHTS, QUERY_WORKSPACE, QUERY_SCRATCHPAD, QUERY_IMPLEMENTATION = 131, 132, 135, 136, 8
_AVX512, _BFLOAT16 = 0x27, 0xE7  # bits of dnnl_cpu_isa_t: AVX-512, and its instructions for bfloat16, as AMX has
_UNIMPLEMENTED = 3
_MOST_AXES = 12
_Dims = c_int64 * _MOST_AXES
_OWN_SCRATCH_BYTES = 1 << 14  # up to here a primitive keeps its own, which takes a call less than to share one
_pointer_at = c_void_p.from_address
_POINTER_OFFSET = object.__basicsize__  # PyArrayObject's first field is its data pointer


class Unavailable(Exception):
    """The library cannot be loaded or must not be used; the message says why."""


class _Argument(ctypes.Structure):
    _fields_ = [("index", c_int), ("memory", c_void_p)]


def address(a: np.ndarray) -> int:
    """The address of an array's first element, read from the array object: 0.08 us, a.ctypes.data takes 0.8 us."""
    return _pointer_at(id(a) + _POINTER_OFFSET).value or 0


# ---- the library


def _candidates() -> list[str]:
    """Where the library may lie: the user's choice alone, else the system's, else the wheel's."""
    chosen = os.environ.get(ENVIRONMENT_VARIABLE)
    if chosen:
        return [chosen]
    return ["libdnnl.so.3", *_wheel_libraries()]


def _wheel_libraries() -> list[str]:
    from importlib.metadata import PackageNotFoundError, files

    try:
        listed = files(_WHEEL) or []
    except PackageNotFoundError:
        return []
    return [str(f.locate()) for f in listed if f.name == "libdnnl.so.3"]


def _open() -> tuple[ctypes.CDLL, str]:
    failures = []
    for path in _candidates():
        try:
            library = ctypes.CDLL(path)
            library.dnnl_version.restype = ctypes.POINTER(c_int)
            major, minor = library.dnnl_version()[0:2]
        except (OSError, AttributeError) as e:
            failures.append(str(e))
            continue
        if major == 3:
            return library, path
        failures.append(f"{path} is oneDNN {major}.{minor}, expected version 3")
    raise Unavailable("; ".join(failures))


class _Library:
    """The loaded library, its CPU engine and the two functions of the hot path."""

    def __init__(self) -> None:
        self.c, self.path = _open()
        held = ctypes.PyDLL(self.path)  # keeps the interpreter lock: cheaper for calls that return at once
        self.set_handle = held.dnnl_memory_set_data_handle
        self.set_handle.argtypes = [c_void_p, c_void_p]
        self.set_handle.restype = None  # a status that is success for any memory object
        self.execute = self.c.dnnl_primitive_execute
        self.execute.argtypes = [c_void_p, c_void_p, c_int, c_void_p]
        self.c.dnnl_memory_desc_get_size.restype = c_size_t
        self.c.dnnl_memory_desc_get_size.argtypes = [c_void_p]
        self.c.dnnl_primitive_desc_query_md.restype = c_void_p
        self.c.dnnl_memory_desc_equal.argtypes = [c_void_p, c_void_p]
        self.isa = self.c.dnnl_get_effective_cpu_isa()
        self.engine = c_void_p()
        check(self.c.dnnl_engine_create(byref(self.engine), 1, c_size_t(0)), "engine")
        probe = np.zeros(1)
        if address(probe) != probe.ctypes.data:
            raise Unavailable("this interpreter's arrays do not begin with their data pointer")


def check(status: int, what: str) -> None:
    """Raise unless ``status`` is success."""
    if status == _UNIMPLEMENTED:
        raise Unsupported(what)
    if status:
        raise RuntimeError(f"oneDNN returned status {status} for {what}")


_library: _Library | None = None
_reason: str | None = None  # why the library is not available
_lock = threading.Lock()


def library() -> _Library:
    """The library, loaded at the first call; raises Unavailable, always for the same reason."""
    global _library, _reason
    if _library is None:
        with _lock:
            if _library is None:
                if _reason is not None:
                    raise Unavailable(_reason)
                try:
                    _library = _Library()
                except Unavailable as e:
                    _reason = str(e)
                    raise
                os.register_at_fork(after_in_child=_leave_to_parent)
    return _library


def has_avx512() -> bool:
    """Whether the library uses AVX-512."""
    return library().isa & _AVX512 == _AVX512


def has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 with instructions of its own: those of AVX-512 or AMX."""
    return library().isa & _BFLOAT16 == _BFLOAT16


def is_available() -> bool:
    """Whether :func:`library` returns."""
    try:
        library()
    except Unavailable:
        return False
    return True


def _leave_to_parent() -> None:
    """After a fork: drop everything. A child of a parent that used several threads would hang in the library."""
    global _library, _reason, _state
    _library, _reason = None, "the parent process used oneDNN before the fork"
    _state = _ThreadState()


# ---- state of one thread


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.cache: OrderedDict[Hashable, Any] = OrderedDict()
        self.scratch: dict[str, np.ndarray] = {}
        self.stream = 0


_state = _ThreadState()


def _stream() -> int:
    if not _state.stream:
        stream, lib = c_void_p(), library()
        check(lib.c.dnnl_stream_create(byref(stream), lib.engine, 1), "stream")
        _state.stream = stream.value or 0
    return _state.stream


def scratch(role: str, num_bytes: int) -> np.ndarray:
    """This thread's grow-only buffer for ``role``, on a cache line; its content is lost at the next call for it."""
    buffer = _state.scratch.get(role)
    if buffer is None or buffer.nbytes < num_bytes:
        buffer = _state.scratch[role] = _on_a_cache_line(num_bytes)
    return buffer


def _on_a_cache_line(num_bytes: int) -> np.ndarray:
    raw = np.empty(num_bytes + 64, np.uint8)
    start = -address(raw) & 63
    return raw[start : start + num_bytes]


def cached(key: Hashable, build: Callable[[], Any]) -> Any:
    """This thread's operation for ``key``; the least recently used goes when the cache is full."""
    cache = _state.cache
    operation = cache.get(key)
    if operation is None:
        operation = cache[key] = build()
        if len(cache) > CACHE_SIZE:
            cache.popitem(last=False)
    else:
        cache.move_to_end(key)
    return operation


def cache_length() -> int:
    """Number of operations in this thread's cache."""
    return len(_state.cache)


# ---- descriptors and primitives


def dims(values: Sequence[int]) -> Any:
    """A dnnl_dims_t."""
    if len(values) > _MOST_AXES:
        raise Unsupported("more axes than the library takes")
    return _Dims(*values)


def data_type(dtype: DType) -> int:
    """The library's name of a NumPy dtype; raises Unsupported for those it does not have."""
    found = TYPES.get(dtype.name)
    if found is None or not dtype.isnative:  # the name does not tell which byte comes first
        raise Unsupported(f"arrays of {dtype}")
    return found


def require(*arrays: Array) -> None:
    """Raise Unsupported unless these are NumPy arrays that are not empty, of one type that the library has."""
    for a in arrays:
        if type(a) is not np.ndarray or not a.size or a.dtype != arrays[0].dtype:
            raise Unsupported("other arrays, empty ones or several types")
    data_type(arrays[0].dtype)


def post_operand(i: int) -> int:
    """The index of the operand of the i-th post-operation."""
    return 32768 * (i + 1) | SRC_1


def element_strides(a: np.ndarray) -> tuple[int, ...]:
    """Strides in elements."""
    return tuple(s // a.itemsize for s in a.strides)


def paddings(
    hw: tuple[int, ...], kernel: tuple[int, ...], g: ConvGeometry | PoolGeometry, out: tuple[int, ...],
) -> tuple[Any, Any]:  # fmt: skip
    """Left and right padding; the right one is what the output size implies, and more than the left for cover_all."""
    dh, dw = getattr(g, "dh", 1), getattr(g, "dw", 1)
    bottom = (out[0] - 1) * g.sh + (kernel[0] - 1) * dh + 1 - hw[0] - g.ph
    right = (out[1] - 1) * g.sw + (kernel[1] - 1) * dw + 1 - hw[1] - g.pw
    return dims((g.ph, g.pw)), dims((bottom, right))


class Builder:
    """Makes descriptors and primitives; as a context manager it destroys the descriptors at the end."""

    def __init__(self) -> None:
        self.library = library()
        self._owned: list[tuple[Any, c_void_p]] = []

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, *exc: object) -> None:
        for destroy, handle in self._owned:
            destroy(handle)

    def _made(self, function: str, destroy: str, *arguments: Any) -> c_void_p:
        handle, c = c_void_p(), self.library.c
        check(getattr(c, function)(byref(handle), *arguments), function)
        self._owned.append((getattr(c, destroy), handle))
        return handle

    def memory(self, shape: Sequence[int], dtype: int, strides: Sequence[int] | None = None) -> c_void_p:
        """A descriptor with strides in elements; without strides in C order."""
        if strides is None:
            strides = [1] * len(shape)
            for i in range(len(shape) - 2, -1, -1):
                strides[i] = strides[i + 1] * shape[i + 1]
        return self._made(
            "dnnl_memory_desc_create_with_strides", "dnnl_memory_desc_destroy",
            len(shape), dims(shape), dtype, dims(strides),
        )  # fmt: skip

    def image(self, shape: Sequence[int], dtype: int) -> c_void_p:
        """A descriptor of a channels-last (N, C, H, W)."""
        _, c, h, w = shape
        return self.memory(shape, dtype, (h * w * c, 1, w * c, c))

    def any(self, shape: Sequence[int], dtype: int) -> c_void_p:
        """A descriptor whose layout oneDNN chooses."""
        return self._made(
            "dnnl_memory_desc_create_with_tag", "dnnl_memory_desc_destroy", len(shape), dims(shape), dtype, 1
        )

    def attributes(self, post_ops: Sequence[tuple[Any, ...]] = ()) -> c_void_p:
        """Scratchpad from the caller; ``post_ops`` are SUM, which adds what lies in the result before, elementwise
        algorithms with up to two numbers, or binary ones with the descriptor of their second operand.
        """
        attributes, c = self._made("dnnl_primitive_attr_create", "dnnl_primitive_attr_destroy"), self.library.c
        check(c.dnnl_primitive_attr_set_scratchpad_mode(attributes, 1), "scratchpad mode")
        if post_ops:
            chain = self._made("dnnl_post_ops_create", "dnnl_post_ops_destroy")
            for kind, *operands in post_ops:
                if kind == SUM:
                    check(c.dnnl_post_ops_append_sum(chain, c_float(1.0), 0, 0), "a sum as post-operation")
                elif kind >= BINARY:
                    check(c.dnnl_post_ops_append_binary(chain, kind, *operands), "a binary post-operation")
                else:
                    numbers = [c_float(v) for v in (*operands, 0.0, 0.0)[:2]]
                    check(c.dnnl_post_ops_append_eltwise(chain, kind, *numbers), "an elementwise post-operation")
            check(c.dnnl_primitive_attr_set_post_ops(attributes, chain), "post-operations")
        return attributes

    def describe(self, kind: str, *arguments: Any) -> c_void_p:
        """A primitive descriptor; raises Unsupported where no implementation takes these arguments."""
        name = f"dnnl_{kind}_primitive_desc_create"
        return self._made(name, "dnnl_primitive_desc_destroy", self.library.engine, *arguments)

    def describe_as(self, implementation: str | None, kind: str, *arguments: Any) -> c_void_p:
        """As :meth:`describe`, by the implementation of that name where it takes these arguments.

        The library's own choice is the first that does, which is not always the fastest.
        """
        description = self.describe(kind, *arguments)
        while implementation and self.implementation(description) != implementation:
            if self.library.c.dnnl_primitive_desc_next_impl(description):
                return self.describe(kind, *arguments)
        return description

    def implementation(self, description: c_void_p) -> str:
        """Name of the implementation, such as ``jit:avx512_core``."""
        name = c_char_p()
        self.library.c.dnnl_primitive_desc_query(description, QUERY_IMPLEMENTATION, 0, byref(name))
        return (name.value or b"").decode()

    def query(self, description: c_void_p, what: int) -> c_void_p:
        """A memory descriptor that the primitive descriptor owns."""
        return c_void_p(self.library.c.dnnl_primitive_desc_query_md(description, what, 0))

    def size(self, memory: c_void_p) -> int:
        """Bytes behind a descriptor; 0 for none."""
        return self.library.c.dnnl_memory_desc_get_size(memory) if memory else 0

    def equal(self, a: c_void_p, b: c_void_p) -> bool:
        """Do two descriptors mean the same layout?"""
        return bool(self.library.c.dnnl_memory_desc_equal(a, b))

    def primitive(self, description: c_void_p, memories: dict[int, c_void_p]) -> Primitive:
        """A primitive that is called with one address per entry of ``memories``, in that order."""
        scratchpad, name = self.query(description, QUERY_SCRATCHPAD), self.implementation(description)
        return Primitive(self.library, description, memories, scratchpad, name)

    def reorder(self, source: c_void_p, target: c_void_p) -> Primitive | None:
        """A primitive that copies between layouts; None where they are equal."""
        if self.equal(source, target):
            return None
        description = self._made(
            "dnnl_reorder_primitive_desc_create", "dnnl_primitive_desc_destroy",
            source, self.library.engine, target, self.library.engine, self.attributes(),
        )  # fmt: skip
        return self.primitive(description, {SRC: source, DST: target})


def _execute_on(set_handle: Any, memories: list[c_void_p], run: Callable[[], int], *arrays: np.ndarray) -> int:
    """What ``onednn_executor.pyx`` does where dbrdist is compiled."""
    for memory, a in zip(memories, arrays):
        set_handle(memory, _pointer_at(id(a) + _POINTER_OFFSET))
    return run()


class Primitive:
    """One compiled operation with its memory objects; belongs to the thread that made it.

    The caller keeps the arrays behind the addresses alive until the call returns.
    """

    __slots__ = (
        "_arguments", "_execute_on", "_handle", "_library", "_memories", "_own_scratch", "_run", "_scratch_bytes",
        "_scratch_start", "_set", "implementation",
    )  # fmt: skip

    def __init__(
        self, lib: _Library, description: c_void_p, memories: dict[int, c_void_p], scratchpad: c_void_p,
        implementation: str,
    ) -> None:  # fmt: skip
        handle = c_void_p()
        self._library, self._handle, self._memories = lib, handle, []
        check(lib.c.dnnl_primitive_create(byref(handle), description), "primitive")
        self._set = lib.set_handle
        num_bytes = lib.c.dnnl_memory_desc_get_size(scratchpad) if scratchpad else 0
        if num_bytes:
            memories = {**memories, SCRATCHPAD: scratchpad}
        self._arguments = (_Argument * len(memories))()
        for argument, (index, descriptor) in zip(self._arguments, memories.items()):
            memory = c_void_p()
            check(lib.c.dnnl_memory_create(byref(memory), descriptor, lib.engine, c_void_p(None)), "memory")
            self._memories.append(memory)
            argument.index, argument.memory = index, memory.value
        call = handle.value, _stream(), len(memories), ctypes.addressof(self._arguments)
        self._run = partial(lib.execute, *call)
        if Executor is None:
            self._execute_on: Any = partial(_execute_on, self._set, self._memories, self._run)
        else:
            self._execute_on = Executor(*[ctypes.cast(f, c_void_p).value for f in (self._set, lib.execute)], *call)
        self._scratch_bytes, self._scratch_start, self._own_scratch = num_bytes, 0, None
        if 0 < num_bytes <= _OWN_SCRATCH_BYTES:
            self._own_scratch = _on_a_cache_line(num_bytes)
            self._set(self._memories[-1], address(self._own_scratch))
            self._scratch_bytes = 0
        self.implementation = implementation

    def __call__(self, *addresses: int) -> None:
        """Execute on arrays given by their addresses."""
        for memory, start in zip(self._memories, addresses):
            self._set(memory, start)
        if self._scratch_bytes:
            self._place_scratch()
        self._see(self._run())

    def on(self, *arrays: np.ndarray) -> None:
        """Execute on arrays."""
        if self._scratch_bytes:
            self._place_scratch()
        self._see(self._execute_on(*arrays))

    def _place_scratch(self) -> None:
        start = address(scratch("scratchpad", self._scratch_bytes))
        if start != self._scratch_start:
            self._set(self._memories[-1], start)
            self._scratch_start = start

    def _see(self, status: int) -> None:
        if status:
            raise RuntimeError(f"oneDNN returned status {status} from {self.implementation}")

    def __del__(self) -> None:
        if _library is not self._library:  # after a fork the parent's objects are left alone
            return
        for memory in self._memories:
            self._library.c.dnnl_memory_destroy(memory)
        self._library.c.dnnl_primitive_destroy(self._handle)
