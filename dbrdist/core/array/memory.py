"""Which module owns an array, where memory comes from, and how wide sums are; without devices.

Images are N C H W to the user and channels-last in memory, as convolutions and pooling leave them: the strides say so,
and other arrays of four axes, such as attention heads, stay as they are. Only this file allocates images, and
:mod:`dbrdist.core.array.elementwise` alone runs elementwise formulas on them, because neither NumPy nor CuPy keeps that
layout by itself: NumPy turns a mixture of both layouts into NCHW, and CuPy's elementwise kernels always allocate
C-contiguous results.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import sys
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from dbrdist.core.array.current_device import on
from dbrdist.core.array.pages import own_pages
from dbrdist.core.array.user_line import warn_user
from dbrdist.errors import UsageWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable
    from typing import TypeGuard

    from numpy.typing import DTypeLike

    from dbrdist.core.array.types import Array, DType, HostArray, Module, Number
    from dbrdist.core.tape.variable import Operand


_BIG_BYTES = 1 << 16  # from here on an allocation is aligned to a cache line
_OWN_PAGES_BYTES = 1 << 20  # from here on what lives long gets pages of its own, which takes 10 us
_heap_is_tuned = False


def get_array_module(*xs: Operand | Number) -> Module:
    """``cupy`` if any of ``xs`` (arrays or Variables) is on a GPU, otherwise ``numpy``. Never imports CuPy.

    Args:
        xs: arrays or Variables.

    Example:
        >>> dbrdist.get_array_module(np.zeros(1)).__name__
        'numpy'
    """
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        for x in xs:
            if isinstance(getattr(x, "array", x), cupy.ndarray):
                return cupy
    return np


def is_array(x: object) -> TypeGuard[Array]:
    """True for arrays of NumPy and CuPy."""
    if isinstance(x, np.ndarray):
        return True
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def is_on_gpu(a: object) -> bool:
    """True for arrays of CuPy itself, which CUDA's libraries take; nothing that stands in for it."""
    return type(a).__module__.partition(".")[0] == "cupy"


def place_of(a: Array) -> tuple[int, int] | None:
    """The numbers of an array's device and of this thread's; None in host memory. What is made for one differs."""
    if isinstance(a, np.ndarray):
        return None
    return int(a.data.device_id), int(sys.modules["cupy"].cuda.runtime.getDevice())


_number = operator.attrgetter("data.device_id")
_is_there = functools.partial(operator.is_not, None)


def places_of(*arrays: Array | None) -> Hashable:
    """This thread's device where all arrays (or None) are there, which is asked for once; else the place of each."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return None
    here = cupy.cuda.runtime.getDevice()
    try:
        if {here}.issuperset(map(_number, filter(_is_there, arrays))):
            return here
    except (AttributeError, ValueError):  # an array of the host, whose data of bfloat16 Python cannot show
        pass
    for a in arrays:
        if a is not None and (isinstance(a, np.ndarray) or a.data.device_id != here):
            return tuple([None if a is None else place_of(a) for a in arrays])
    return here


def get_cpu_array_types() -> tuple[type, ...]:
    """The types of arrays in host memory.

    Example:
        >>> dbrdist.get_cpu_array_types()
        (<class 'numpy.ndarray'>,)
    """
    return (np.ndarray,)


def get_array_types() -> tuple[type, ...]:
    """The types of arrays: NumPy's, and CuPy's where it is loaded.

    Example:
        >>> np.ndarray in dbrdist.get_array_types()
        True
    """
    cupy = sys.modules.get("cupy")
    return get_cpu_array_types() + (() if cupy is None else (cupy.ndarray,))


def is_of_own_class(a: object) -> bool:
    """True for an array of NumPy's or CuPy's own class, False for one of a derived class."""
    return type(a) is np.ndarray or type(a) in get_array_types()


def is_arrays_compatible(arrays: Iterable[Operand | None]) -> bool:
    """True if all arrays (None is left out) are of one module, so that one function can take them together.

    Args:
        arrays: arrays, or None.

    Example:
        >>> dbrdist.is_arrays_compatible([np.zeros(1), None])
        True
    """
    return len({get_array_module(a) for a in arrays if a is not None}) < 2


def as_dtype(dtype: DTypeLike) -> DType:
    """A NumPy dtype from a name or type; ``'bfloat16'`` needs ml_dtypes."""
    if isinstance(dtype, str) and dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    if isinstance(dtype, str) and dtype == "f16":
        warn_user("'f16' is NumPy's name of a type of 16 bytes, float128; write 'float16', or 'f2'", UsageWarning)
    return np.dtype(dtype)


def is_floating(dtype: DType) -> bool:
    """True for float16, bfloat16, float32, float64 and wider."""
    kind = dtype.kind
    return kind == "f" or (
        kind not in "biuc" and dtype.name == "bfloat16"
    )  # NumPy builds the name each time it is asked


# The one table of accumulation types: sums, means and scales of a 16-bit type run in float32.
def accumulation_dtype(dtype: DType) -> DType:
    """The type in which sums over arrays of ``dtype`` run."""
    dtype = np.dtype(dtype)
    if dtype.itemsize == 2 and is_floating(dtype):
        return np.dtype(np.float32)
    return dtype if dtype.isnative else dtype.newbyteorder("=")  # in which ufuncs refuse to add up


# ---- memory ---------------------------------------------------------------------------------------------------------


def tune_heap() -> None:
    """Keep freed memory in the process, from the first call on.

    glibc gives blocks over 32 MB back to the kernel at once, and fresh pages are expensive: a convolution whose output
    is reallocated at every step ran 2 to 4 times slower. Without mmap and trimming the heap recycles them.
    """
    global _heap_is_tuned
    if _heap_is_tuned:
        return
    _heap_is_tuned = True
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library: nothing to tune
        return
    m_trim_threshold, m_mmap_max = -1, -4
    mallopt(m_mmap_max, 0)
    mallopt(m_trim_threshold, -1)


def address(a: HostArray) -> int:
    """The address of an array's first element (half the price of ``a.ctypes.data``)."""
    return int(a.__array_interface__["data"][0])


def aligned(count: int, dtype: DType, make: Callable[..., HostArray] = np.empty) -> HostArray:
    """``count`` uninitialised elements in host memory, on a cache line where they are many; zeros with ``np.zeros``."""
    num_bytes = count * dtype.itemsize
    if num_bytes < _BIG_BYTES:
        return make(count, dtype)
    if not _heap_is_tuned:
        tune_heap()
    raw = make(num_bytes + 64, np.uint8)
    start = -address(raw) & 63
    return raw[start : start + num_bytes].view(dtype)


def empty(shape: tuple[int, ...], dtype: DTypeLike, like: Array | None = None) -> Array:
    """Uninitialised memory on the device of ``like`` (host: None); 4-d shapes are images, N C H W in channels-last.

    For kernels of images; what follows the layout of its operands takes :func:`empty_as`.
    """
    return _made(shape, dtype, like, np.empty)


def _made(shape: tuple[int, ...], dtype: DTypeLike, like: Array | None, make: Callable[..., HostArray]) -> Array:
    """As :func:`empty`; on the host by ``make``, a function of NumPy."""
    dtype = np.dtype(dtype)
    count = 1
    for n in shape:
        count *= n
    if like is None or isinstance(like, np.ndarray):
        flat: Array = aligned(count, dtype, make)
        if like is not None and type(like) is not np.ndarray:
            flat = flat.view(type(like))
    else:
        with on(like):
            flat = get_array_module(like).empty(count, dtype)
    return _laid_out(flat, shape)


def _laid_out(flat: Array, shape: tuple[int, ...]) -> Array:
    """Elements in a row as an array of ``shape``, channels-last where that has four axes."""
    if len(shape) == 4:
        n, c, h, w = shape
        return flat.reshape(n, h, w, c).transpose(0, 3, 1, 2)
    return flat.reshape(shape)


def allocator(shape: tuple[int, ...], dtype: DType) -> Callable[[], Array]:
    """A function that makes what ``empty(shape, dtype)`` makes on the host: 0.3 us for small arrays instead of 0.9."""
    dtype = np.dtype(dtype)
    if prod(shape) * dtype.itemsize >= _BIG_BYTES:  # not made to look at: it would count in a step's peak
        return functools.partial(empty, shape, dtype)
    make: Callable[..., HostArray] = np.ndarray
    return functools.partial(make, shape, dtype, None, 0, empty(shape, dtype).strides)


def plain_allocator(shape: tuple[int, ...], dtype: DType) -> Callable[[], Array]:
    """As :func:`allocator` for arrays in C order, such as weights."""
    new = allocator((math.prod(shape),), dtype)
    return lambda: new().reshape(shape)


@functools.lru_cache(maxsize=256)
def number(value: float, dtype: DType) -> HostArray:
    """A number as a 0-d array on the host, which NumPy's functions take in half the time of a Python float."""
    a = np.array(value, dtype)
    a.flags.writeable = False
    return a


def full(shape: tuple[int, ...], value: Array | Number, dtype: DTypeLike, like: Array | None = None) -> Array:
    """As :func:`empty`, filled with ``value``."""
    a = empty(shape, dtype, like)
    fill(a, value)
    return a


def fill(a: Array, value: Array | Number) -> None:
    """Copy a number, or an array of the same device, to all elements of ``a``."""
    if type(a) is np.ndarray:
        if a.size < _MANY_REPEATS or not any(copies(a, value) for copies in _FASTER):
            a[...] = value
        return
    with on(a):
        a[...] = value


_MANY_REPEATS = 1 << 18  # elements from which on the call of a kernel costs less than NumPy's stores of 16 bytes each
_repeat: list[Callable[[HostArray, HostArray], bool]] = []


def hand_down_repeat(kernel: Callable[[HostArray, HostArray], bool]) -> None:
    """Called by ``kernels``, which imports this, with what copies a broadcast view to an array, or says False."""
    _repeat[:] = [kernel]


def _is_repeated_by_kernel(a: HostArray, value: Array | Number) -> bool:
    """Of values one for each row."""
    if type(value) is not np.ndarray or value.dtype != a.dtype or value.shape != a.shape or not _repeat:
        return False
    return 0 in value.strides and any(value.strides) and _repeat[0](a, value)


_CACHED_BYTES = 1 << 24  # beyond, NumPy stores a value a tenth faster than it copies rows of it
_ROW_BYTES = 1 << 14


def _is_copied_by_rows(a: HostArray, value: Array | Number) -> bool:
    """A single value: zero by the C library, in half of the time of storing it, and others to what a cache may hold by
    rows, in 0.6 of that."""
    if np.ndim(value):
        if not isinstance(value, np.ndarray) or value.shape != a.shape or any(value.strides):
            return False
        value = value[(0,) * value.ndim]
    laid = a.transpose(0, 2, 3, 1) if a.ndim == 4 and not a.flags.c_contiguous else a
    if not laid.flags.c_contiguous or a.dtype.hasobject:
        return False
    flat, row = laid.reshape(-1), np.empty(_ROW_BYTES // a.itemsize, a.dtype)
    row[...] = value  # np.full takes what an assignment refuses
    if not row[:1].view(np.uint8).any():
        flat.view(np.uint8).fill(0)
        return True
    if a.nbytes > _CACHED_BYTES:
        return False
    whole = flat.size // row.size * row.size
    flat[:whole].reshape(-1, row.size)[...] = row
    flat[whole:] = value
    return True


_TILE_BYTES = 1 << 11


def _is_copied_by_tiles(a: HostArray, value: Array | Number) -> bool:
    """Short rows, each of which follows upon itself, as sums between axes hand them on: NumPy copies several at once in
    0.8 of the time of rows of 128 numbers, and in half of that of 16."""
    if type(value) is not np.ndarray or value.shape != a.shape or not a.flags.c_contiguous or a.nbytes > _CACHED_BYTES:
        return False
    repeated = [i for i, n in enumerate(a.shape) if n > 1 and not value.strides[i]]
    if len(repeated) != 1:
        return False
    (i,) = repeated
    rows = value[(slice(None),) * i + (0,)]
    count, width = a.shape[i], prod(a.shape[i + 1 :])
    num = 1  # rows of a tile
    while count % (2 * num) == 0 and 2 * num * width * a.itemsize <= _TILE_BYTES and 8 * num <= count:
        num *= 2
    if width == 1 or num == 1 or 4 * num * width * a.itemsize < _TILE_BYTES:
        return False
    tiles = np.empty((rows.size // width, num, width), a.dtype)
    tiles[...] = rows.reshape(-1, 1, width)
    a.reshape(len(tiles), -1, num * width)[...] = tiles.reshape(-1, 1, num * width)
    return True


_FASTER = _is_repeated_by_kernel, _is_copied_by_rows, _is_copied_by_tiles


def zeros(shape: tuple[int, ...], dtype: DTypeLike, like: Array | None = None) -> Array:
    """As :func:`empty`, filled with zeros: on the host by the C library, in half of a store's time."""
    if like is None or isinstance(like, np.ndarray):
        return _made(shape, dtype, like, np.zeros)
    return full(shape, 0, dtype, like)


def empty_as(x: Array, shape: tuple[int, ...], dtype: DType) -> Array:
    """Uninitialised memory of another shape on the device of ``x``: as images where ``x`` lies so, else in C order."""
    if len(shape) == 4 and x.ndim == 4 and lies_as_images(x):
        return empty(shape, dtype, x)
    return empty((prod(shape),), dtype, x).reshape(shape)


def full_as(x: Array, shape: tuple[int, ...], dtype: DType, value: Number) -> Array:
    """As :func:`empty_as`, filled with ``value``."""
    a = empty_as(x, shape, dtype)
    fill(a, value)
    return a


def zeros_as(x: Array, shape: tuple[int, ...], dtype: DType) -> Array:
    """As :func:`empty_as`, filled with zeros."""
    if len(shape) == 4 and x.ndim == 4 and lies_as_images(x):
        return zeros(shape, dtype, x)
    return zeros((prod(shape),), dtype, x).reshape(shape)


def aligned_zeros(count: int, dtype: DTypeLike, like: Array) -> Array:
    """``count`` zeros on the device of ``like`` that start on a cache line, however few they are."""
    if not isinstance(like, np.ndarray):
        with on(like):
            return get_array_module(like).zeros(count, dtype)
    dtype = np.dtype(dtype)
    num_bytes = count * dtype.itemsize
    if num_bytes >= _OWN_PAGES_BYTES:
        return own_pages(num_bytes).view(dtype)
    raw = np.zeros(num_bytes + 64, np.uint8)
    start = -address(raw) & 63
    return raw[start : start + num_bytes].view(dtype)


def unwritten(shape: tuple[int, ...], dtype: DTypeLike, like: Array) -> Array:
    """As :func:`empty`, for what will most probably not be written, and then takes no memory."""
    num_bytes = prod(shape) * np.dtype(dtype).itemsize
    if type(like) is not np.ndarray or num_bytes < _OWN_PAGES_BYTES:
        return empty(shape, dtype, like)
    return _laid_out(own_pages(num_bytes).view(dtype), shape)


def is_channels_last(a: Array) -> bool:
    """True if a 4-d array lies densely as N H W C; where both layouts fit (C = 1, or H = W = 1) it counts as such."""
    n, c, h, w = a.shape
    if a.size == 0:
        return True
    sn, sc, sh, sw = a.strides
    item = a.itemsize
    return bool(
        (c == 1 or sc == item)
        and (w == 1 or sw == c * item)
        and (h == 1 or sh == w * c * item)
        and (n == 1 or sn == h * w * c * item)
    )


def channels_last(a: Array) -> Array:
    """``a`` itself where it is channels-last, else a copy that is."""
    if is_channels_last(a):
        return a
    out = empty(a.shape, a.dtype, a)
    fill(out, a)
    return out


def copy(a: Array) -> Array:
    """A copy with its own memory; that of images is channels-last, any other in C order."""
    out = empty_as(a, a.shape, a.dtype)
    fill(out, a)
    return out


def copy_as_it_lies(a: Array) -> Array:
    """A copy with its own memory, with the axes in the same order there: a third of the time where they are permuted.

    What is repeated by strides of 0 is copied as by :func:`copy`.
    """
    if type(a) is not np.ndarray or a.flags.c_contiguous or 0 in a.strides:
        return copy(a)
    order = np.argsort([-abs(s) for s in a.strides], kind="stable")
    laid = a.transpose(order)
    out = aligned(a.size, a.dtype).reshape(laid.shape)
    out[...] = laid
    return out.transpose(np.argsort(order))


def lies_as_images(a: Array) -> bool:
    """True if four axes lie in memory as N H W C, as convolutions leave them; False where either order fits."""
    _, c, h, w = a.shape
    if c == 1 or (h == 1 and w == 1):
        return False
    _, sc, sh, sw = a.strides
    beyond = sw if w > 1 else sh
    return bool(0 < sc < beyond or (beyond == 0 and sc == a.itemsize))  # the latter: a sum over H and W, repeated
