"""How an array travels: a fixed header of 64-bit integers, then its bytes. Nothing is pickled.

The header holds the element type, the shape, and the order of the axes in memory, so the receiver needs to know
nothing beforehand and a channels-last array arrives as one. It can also say "this rank has an error", which lets every
rank raise the same one instead of waiting for data that never comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dbrdist.core import backend
from dbrdist.core.backend import Array

MAX_NDIM = 32
_NAME_WORDS = 3  # a type's name in 24 bytes: '<M8[ns]', 'float8_e4m3fnuz' and '<U12' all fit
# is there an array, does it lie on a device, ndim, name, shape, order of axes in memory
HEADER_WORDS = 3 + _NAME_WORDS + 2 * MAX_NDIM

Header = np.ndarray[Any, np.dtype[np.int64]]
HostArray = np.ndarray[Any, Any]


def as_array(x: Any, verb: str) -> Array:
    """``x`` if it is an array that can travel as bytes; NumPy scalars become 0-d arrays.

    Raises:
        TypeError: for anything else, naming the verb that takes objects.
        ValueError: for more than 32 dimensions.
    """
    if isinstance(x, np.generic):
        x = np.asarray(x)
    if not backend.is_array(x):
        raise TypeError(f"{verb} expected an array, got {type(x).__name__}; objects travel by {verb}_obj")
    if x.dtype.hasobject or x.dtype.names is not None or (x.dtype.kind == "V" and x.dtype.name.startswith("void")):
        raise TypeError(f"{verb} expected an array of numbers, got dtype {x.dtype}; objects travel by {verb}_obj")
    if x.ndim > MAX_NDIM:
        raise ValueError(f"{verb} expected at most {MAX_NDIM} dimensions, got {x.ndim}")
    return x


def dense(x: Array) -> tuple[HostArray, tuple[int, ...]]:
    """The elements of ``x`` as a 1-d array in host memory, in the order in which they lie, and that order of axes.

    Copies only where ``x`` has gaps, overlaps, or lies on a device.
    """
    host = backend.to_cpu(x)
    if not host.dtype.isnative:
        host = host.astype(host.dtype.newbyteorder("="))
    if 0 in host.strides or not _is_dense(host):
        host = host.copy(order="K")
    axes = _memory_order(host)
    flat = host.transpose(axes)
    if not flat.flags.c_contiguous:
        axes = tuple(range(host.ndim))
        flat = np.ascontiguousarray(host)
    return flat.reshape(-1), axes


def _memory_order(x: HostArray) -> tuple[int, ...]:
    return tuple(sorted(range(x.ndim), key=lambda axis: -abs(x.strides[axis])))


def _is_dense(x: HostArray) -> bool:
    return bool(x.transpose(_memory_order(x)).flags.c_contiguous)


def empty_like_header(header: Header, buffer: HostArray | None = None) -> tuple[HostArray, HostArray]:
    """Memory for the array that ``header`` describes: (its bytes, 1-d; the array on them). Taken from ``buffer`` if given."""
    shape, dtype, axes = _decode(header)
    num_bytes = count_bytes(header)
    raw = np.empty(num_bytes, np.uint8) if buffer is None else buffer[:num_bytes]
    in_memory = raw.view(dtype).reshape([shape[axis] for axis in axes])
    return raw, in_memory.transpose(np.argsort(axes)) if axes else in_memory


def encode(x: Array, axes: Sequence[int]) -> Header:
    """The header of an array whose axes lie in memory in the order ``axes``."""
    header = np.zeros(HEADER_WORDS, np.int64)
    name = x.dtype.name if x.dtype.kind == "V" else x.dtype.newbyteorder("=").str
    header[:3] = 1, not isinstance(x, np.ndarray), x.ndim
    encoded = name.encode().ljust(8 * _NAME_WORDS, b"\0")
    header[3 : 3 + _NAME_WORDS] = np.frombuffer(encoded, np.int64)
    start = 3 + _NAME_WORDS
    header[start : start + x.ndim] = x.shape
    header[start + MAX_NDIM : start + MAX_NDIM + x.ndim] = axes
    return header


def error_header() -> Header:
    """A header that says that this rank has no array to send, because its argument is wrong."""
    header = np.zeros(HEADER_WORDS, np.int64)
    header[0] = -1
    return header


def is_error(header: Header) -> bool:
    """True for a header made by :func:`error_header`."""
    return int(header[0]) < 0


def is_on_device(header: Header) -> bool:
    """True where the sender's array lay on a GPU."""
    return bool(header[1])


def _decode(header: Header) -> tuple[tuple[int, ...], np.dtype[Any], tuple[int, ...]]:
    ndim = int(header[2])
    name = header[3 : 3 + _NAME_WORDS].tobytes().rstrip(b"\0").decode()
    start = 3 + _NAME_WORDS
    shape = tuple(int(n) for n in header[start : start + ndim])
    axes = tuple(int(n) for n in header[start + MAX_NDIM : start + MAX_NDIM + ndim])
    return shape, dtype_from_name(name), axes


def dtype_from_name(name: str) -> np.dtype[Any]:
    """A dtype from its NumPy string or, for the types of ml_dtypes, from its name."""
    if name[0] in "<>|=":
        return np.dtype(name)
    import ml_dtypes  # here, so that runs without such arrays do not pay for it

    return np.dtype(getattr(ml_dtypes, name))


def count_bytes(header: Header) -> int:
    """How many bytes follow this header."""
    shape, dtype, _ = _decode(header)
    count = dtype.itemsize
    for n in shape:
        count *= n
    return count


def describe(header: Header) -> str:
    """Shape and type in words, for messages."""
    shape, dtype, _ = _decode(header)
    return f"shape {shape} of {dtype.name}"


def clone(x: Array) -> Array:
    """A copy with its own dense memory and the same order of axes."""
    flat, axes = dense(x)
    raw, y = empty_like_header(encode(x, axes))
    raw[...] = as_bytes(flat)
    return to_place(y, x)


def as_bytes(flat: HostArray) -> HostArray:
    """The bytes of a 1-d array, without a copy."""
    return flat.view(np.uint8)


def to_place(host: HostArray, like: Array) -> Array:
    """``host`` on the device where ``like`` lies."""
    return host if isinstance(like, np.ndarray) else backend.to_device(host, backend.device_of(like))


def to_current_device(host: HostArray, header: Header) -> Array:
    """A received array: on this thread's GPU if the sender's lay on one, else in host memory."""
    if not is_on_device(header):
        return host
    cupy = backend.import_cupy()
    return backend.to_device(host, backend.get_device(f"@cupy:{cupy.cuda.Device().id}"))


def check_summable(x: Array) -> None:
    """Raise TypeError for element types that have no sum."""
    if x.dtype.kind not in "biufcV":
        raise TypeError(f"allreduce expected numbers, got dtype {x.dtype}")


def is_narrow(dtype: np.dtype[Any]) -> bool:
    """True for float types that are summed in a wider one: float16, bfloat16 and the 8-bit floats."""
    return dtype.kind == "V" or backend.accumulation_dtype(dtype) != dtype


def weighted_sum(
    pieces: Sequence[HostArray], factors: Sequence[float] | None = None, divisor: float | None = None
) -> HostArray:
    """``sum(factors[k] * pieces[k]) / divisor``, added in order, in the type in which sums of these arrays run."""
    dtype = pieces[0].dtype
    wide = np.dtype(np.float32) if dtype.kind == "V" else backend.accumulation_dtype(dtype)
    total = pieces[0].astype(wide)
    if factors is not None:
        total *= wide.type(factors[0])
    for k, piece in enumerate(pieces[1:], 1):
        term = piece.astype(wide, copy=False)
        total += term if factors is None else term * wide.type(factors[k])
    if divisor is not None:
        total /= wide.type(divisor)
    return total


def blocks(n: int, size: int) -> list[int]:
    """Borders of ``size`` nearly equal blocks of ``n`` elements: block k lies from entry k to entry k + 1."""
    return [n * k // size for k in range(size + 1)]
