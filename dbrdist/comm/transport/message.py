"""How an array is sent: a fixed header of 64-bit integers, then its bytes. Nothing is pickled.

The header holds the element type, the shape, and the order of the axes in memory, so the receiver needs to know
nothing beforehand and a channels-last array arrives as one.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from dbrdist import kernels
from dbrdist.core.array import backend
from dbrdist.core.array.backend import Array
from dbrdist.core.array.types import HostArray as HostArray
from dbrdist.core.array.types import IntArray, Number

MAX_NDIM = 32
_PLAIN_KINDS = "biufcmMSU"
_NAME_WORDS = 3  # a type's name in 24 bytes: '<M8[ns]', 'float8_e4m3fnuz' and '<U12' all fit
_SHAPE = 1 + _NAME_WORDS
NUM_SAME_WORDS = _SHAPE + MAX_NDIM  # ndim, name, shape: what arrays that are added have in common
_ON_DEVICE = NUM_SAME_WORDS
_AXES = _ON_DEVICE + 1
HEADER_WORDS = _AXES + MAX_NDIM // 8  # and the order of the axes in memory, a byte each

Header: TypeAlias = IntArray


def as_array(x: Any, verb: str) -> Array:
    """``x`` if it is an array that can be sent as bytes; NumPy scalars and subclasses of its arrays become plain ones.

    Raises:
        TypeError: for anything else, naming the verb that takes objects; for masks, which would stay behind.
        ValueError: for more than 32 dimensions.
    """
    if type(x) is np.ndarray and x.dtype.kind in _PLAIN_KINDS and x.ndim <= MAX_NDIM:
        return x
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{verb} expected a plain array, got a masked one: masks are not sent, so fill it first")
    if type(x) is not np.ndarray and isinstance(x, (np.generic, np.ndarray)):
        x = np.asarray(x)  # what a subclass makes of a view may be wrong here: a matrix has 2 axes in any shape
    if not backend.is_array(x):
        hint = (
            f"write x.array, or for a gradient {verb} of dbrdist.comm.functions"
            if hasattr(x, "requires_grad")
            else (f"use {verb}_obj for objects")
        )
        raise TypeError(f"{verb} expected an array, got {type(x).__name__}; {hint}")
    if x.dtype.hasobject or x.dtype.names is not None or (x.dtype.kind == "V" and x.dtype.name.startswith("void")):
        raise TypeError(f"{verb} expected an array of numbers, got dtype {x.dtype}; use {verb}_obj for objects")
    if x.ndim > MAX_NDIM:
        raise ValueError(f"{verb} expected at most {MAX_NDIM} dimensions, got {x.ndim}")
    array: Array = x
    return array


def dense(x: Array) -> tuple[HostArray, tuple[int, ...]]:
    """The elements of ``x`` as a 1-d array in host memory, in the order in which they lie, and that order of axes.

    Copies only where ``x`` has gaps, overlaps, or is on a device.
    """
    if type(x) is np.ndarray and x.ndim == 1 and x.flags.c_contiguous and x.dtype.isnative:
        return x, (0,)
    host = backend.to_cpu(x)
    if not host.dtype.isnative:
        host = host.astype(host.dtype.newbyteorder("="))
    if 0 in host.strides or not _is_dense(host):
        host = host.copy(order="K")
    axes = _memory_order(host)
    return host.transpose(axes).reshape(-1), axes


def _memory_order(x: HostArray) -> tuple[int, ...]:
    return tuple(sorted(range(x.ndim), key=lambda axis: -abs(x.strides[axis])))


def is_dense(x: HostArray) -> bool:
    """Whether :func:`dense` gives the memory of ``x`` itself."""
    return x.dtype.isnative and (x.size == 0 or 0 not in x.strides) and _is_dense(x)


def _is_dense(x: HostArray) -> bool:
    return bool(x.transpose(_memory_order(x)).flags.c_contiguous)


def empty_like_header(header: Header, buffer: HostArray | None = None) -> tuple[HostArray, HostArray]:
    """Memory for the array that ``header`` describes, taken from ``buffer`` if given: (its bytes, 1-d; the array)."""
    shape, dtype, axes = _decode(header.tobytes())
    num_bytes = dtype.itemsize * math.prod(shape)
    raw = np.empty(num_bytes, np.uint8) if buffer is None else buffer[:num_bytes]
    if len(shape) == 1:
        return raw, raw.view(dtype)
    in_memory = raw.view(dtype).reshape([shape[axis] for axis in axes])
    return raw, in_memory.transpose(np.argsort(axes)) if axes else in_memory


def encode(x: Array, axes: Sequence[int]) -> Header:
    """The header of an array whose axes lie in memory in the order ``axes``; () where that does not matter."""
    return _header(x.dtype, x.shape, not isinstance(x, np.ndarray), tuple(axes))


@functools.lru_cache(maxsize=256)
def _header(dtype: np.dtype[np.generic], shape: tuple[int, ...], is_on_device: bool, axes: tuple[int, ...]) -> Header:
    header = np.zeros(HEADER_WORDS, np.int64)
    name = dtype.name if dtype.kind == "V" else dtype.newbyteorder("=").str
    encoded = name.encode().ljust(8 * _NAME_WORDS, b"\0")
    header[0], header[_ON_DEVICE] = len(shape), is_on_device
    header[1:_SHAPE] = np.frombuffer(encoded, np.int64)
    header[_SHAPE : _SHAPE + len(shape)] = shape
    header[_AXES:].view(np.uint8)[: len(axes)] = axes
    header.flags.writeable = False
    return header


def no_header() -> Header:
    """In place of a header where there is no array."""
    return np.zeros(HEADER_WORDS, np.int64)


def is_on_device(header: Header) -> bool:
    """True if the sender's array was on a GPU."""
    return bool(header[_ON_DEVICE])


@functools.lru_cache(maxsize=256)
def _decode(raw: bytes) -> tuple[tuple[int, ...], np.dtype[np.generic], tuple[int, ...]]:
    header = np.frombuffer(raw, np.int64)
    ndim = int(header[0])
    name = header[1:_SHAPE].tobytes().rstrip(b"\0").decode()
    shape = tuple(header[_SHAPE : _SHAPE + ndim].tolist())
    axes = tuple(header[_AXES:].view(np.uint8)[:ndim].tolist())
    return shape, dtype_from_name(name), axes


def dtype_from_name(name: str) -> np.dtype[np.generic]:
    """A dtype from its NumPy string or, for the types of ml_dtypes, from its name."""
    if name[0] in "<>|=":
        return np.dtype(name)
    import ml_dtypes  # here, so that runs without such arrays do not pay for it

    dtype: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def count_bytes(header: Header) -> int:
    """How many bytes follow this header."""
    shape, dtype, _ = _decode(header.tobytes())
    return dtype.itemsize * math.prod(shape)


def clone(x: Array) -> Array:
    """A copy with its own dense memory and the same order of axes."""
    flat, axes = dense(x)
    raw, y = empty_like_header(encode(x, axes))
    raw[...] = as_bytes(flat)
    return to_place(y, x)


def as_bytes(flat: Array) -> HostArray:
    """The bytes of a 1-d array in host memory, without a copy."""
    raw: Any = flat.view(np.uint8)
    return raw  # type: ignore[no-any-return]


def to_place(host: HostArray, like: Array) -> Array:
    """``host`` on the device where ``like`` lies."""
    return host if isinstance(like, np.ndarray) else backend.to_device(host, backend.device_of(like))


def to_current_device(host: HostArray, header: Header) -> Array:
    """A received array: on this thread's GPU if the sender's was on one, else in host memory."""
    if not is_on_device(header):
        return host
    cupy = backend.import_cupy()
    there: Array = backend.to_device(host, backend.get_device(f"@cupy:{cupy.cuda.Device().id}"))
    return there


def is_narrow(dtype: np.dtype[np.generic]) -> bool:
    """True for float types that are summed in a wider one: float16, bfloat16 and the 8-bit floats."""
    return dtype.kind == "V" or backend.accumulation_dtype(dtype) != dtype


_MANY = 1 << 15  # elements of each piece, from which on a compiled loop takes less time, by threads or by fewer passes


def _sum_by_loop(pieces: Sequence[Array], out: Array | None) -> Array | None:
    """The sum of pieces in order, by a compiled loop; None where NumPy has to do."""
    first = pieces[0]
    if type(first) is not np.ndarray:
        return None
    total = backend.plain_allocator(first.shape, first.dtype)() if out is None else out
    return total if kernels.sum_of(tuple(pieces), total) else None


def weighted_sum(
    pieces: Sequence[Array], factors: Sequence[float] | None = None, divisor: float | None = None, out: Any = None
) -> Array:
    """``sum(factors[k] * pieces[k]) / divisor``, added in order, in the type in which sums of these arrays run.

    Without factors and in that type the sum may go to ``out``, which may be the first of the pieces.
    """
    dtype = pieces[0].dtype
    if factors is None and dtype.itemsize > 2 and dtype.kind in "fc" and len(pieces) > 1:
        total = _sum_by_loop(pieces, out) if pieces[0].size >= _MANY else None
        if total is None:
            total = np.add(pieces[0], pieces[1], out)
            if len(pieces) > 2:
                for piece in pieces[2:]:
                    total += piece
        divide(total, divisor)
        return total
    wide = np.dtype(np.float32) if dtype.kind == "V" else backend.accumulation_dtype(dtype)
    total = pieces[0].astype(wide)
    if factors is not None:
        total *= wide.type(factors[0])
    for k, piece in enumerate(pieces[1:], 1):
        term = piece.astype(wide, copy=False)
        total += term if factors is None else term * wide.type(factors[k])
    divide(total, divisor)
    return total


def divide(x: Array, divisor: float | None) -> None:
    """Divide in place; by a power of two with a product, which gives the same bits in a third of the time."""
    if divisor is None:
        return
    factor = _factor(divisor, x.dtype)
    if factor is None:
        x /= x.dtype.type(divisor)
    elif isinstance(x, np.ndarray):
        np.multiply(x, factor, x)
    else:  # a device refuses arrays of the host, also those without axes
        x *= 1 / divisor


Scale: TypeAlias = Array | Number | None


def scale_of_short_sum(like: Array, divisor: float | None) -> Scale:
    """By what :func:`weighted_sum` multiplies the sum of arrays of this shape and type, added with NumPy in that type.

    None where it does something else: to long arrays, narrow types, other devices, or divisors.
    """
    is_short = type(like) is np.ndarray and like.size < _MANY
    is_wide = like.dtype.itemsize > 2 and like.dtype.kind in "fc"
    return _factor(divisor, like.dtype) if is_short and is_wide and divisor is not None else None


@functools.lru_cache(maxsize=64)
def _factor(divisor: float, dtype: np.dtype[np.generic]) -> Array | Number | None:
    """The inverse of a power of two; None of another number."""
    if math.frexp(divisor)[0] != 0.5:
        return None
    return backend.number(1 / divisor, dtype) if dtype.kind in "fc" else 1 / divisor


def blocks(n: int, size: int) -> list[int]:
    """Borders of ``size`` nearly equal blocks of ``n`` elements: block k lies from entry k to entry k + 1."""
    return [n * k // size for k in range(size + 1)]


def room_for(headers: Header) -> tuple[HostArray, list[int], list[int]]:
    """One block of memory for the arrays behind ``headers``: (memory, bytes of each, start of each).

    Starts are multiples of 64 bytes.
    """
    counts = [count_bytes(header) for header in headers]
    starts, end = [], 0
    for count in counts:
        starts.append(end)
        end += -(-count // 64) * 64
    return np.empty(end, np.uint8), counts, starts


def pack(headers: Header, flats: Sequence[HostArray]) -> tuple[HostArray, list[int], list[int]]:
    """Arrays in one block of memory: (memory, bytes of each, start of each)."""
    raw, counts, starts = room_for(headers)
    for flat, count, start in zip(flats, counts, starts):
        raw[start : start + count] = as_bytes(flat)
    return raw, counts, starts


def unpack(raw: HostArray, headers: Header, starts: Sequence[int]) -> tuple[Array, ...]:
    """The arrays behind ``headers`` in a block of memory, on this thread's GPU where they came from one."""
    arrays = [empty_like_header(h, raw[start:])[1] for h, start in zip(headers, starts)]
    return tuple(to_current_device(x, h) for x, h in zip(arrays, headers))


_WORD_BYTES, _UNIT_BYTES = 8, 16  # parts begin where elements of any type may


def join(head: Header, parts: Sequence[HostArray]) -> bytes:
    """A message's head, and its parts behind it, as the bytes to send.

    Entries 2 to 2 + head[1] of the head are the sizes of the parts. Where ``parts`` is empty they are sent afterwards.
    """
    raw = [_framed(head.tobytes())]
    for part in parts:
        raw += [part.tobytes(), bytes(-part.size % _UNIT_BYTES)]
    return b"".join(raw)


@functools.lru_cache(maxsize=256)
def _framed(head: bytes) -> bytes:
    """A head behind the number of its words, as an even number of words: the parts are aligned."""
    raw = (len(head) // _WORD_BYTES).to_bytes(_WORD_BYTES, sys.byteorder) + head
    return raw + bytes(-len(raw) % _UNIT_BYTES)


def split(raw: HostArray) -> tuple[Header, list[HostArray] | None]:
    """What :func:`join` was given; None where the parts come afterwards."""
    num_words = int.from_bytes(raw[:_WORD_BYTES].data, sys.byteorder)
    end = -(-_WORD_BYTES * (1 + num_words) // _UNIT_BYTES) * _UNIT_BYTES
    head, sizes, num_bytes = _opened(raw[_WORD_BYTES : _WORD_BYTES * (1 + num_words)].tobytes())
    if end + num_bytes != raw.size:
        return head, None
    parts = []
    for size in sizes:
        parts.append(raw[end : end + size])
        end += -(-size // _UNIT_BYTES) * _UNIT_BYTES
    return head, parts


@functools.lru_cache(maxsize=256)
def _opened(raw: bytes) -> tuple[Header, list[int], int]:
    """A head, the sizes of its parts, and how many bytes they take behind it."""
    head = np.frombuffer(raw, np.int64)
    sizes = head[2 : 2 + int(head[1])].tolist()
    return head, sizes, sum(-(-size // _UNIT_BYTES) * _UNIT_BYTES for size in sizes)


# ---- an array in one message, in less time: its head is the same for all arrays of its type and shape ----

ONE_ARRAY = 0  # the first word of its head


@functools.lru_cache(maxsize=256)
def _head_of_one(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """The framed head of an array in the order of C, and what fills up its bytes."""
    num_bytes = dtype.itemsize * math.prod(shape)
    header = _header(dtype, shape, False, tuple(range(len(shape))))
    head = np.concatenate([np.array([ONE_ARRAY, 1, num_bytes], np.int64), header])
    return _framed(head.tobytes()), bytes(-num_bytes % _UNIT_BYTES)


def whole(x: HostArray) -> bytes:
    """What :func:`join` makes of one array of a plain type, in the order of C, and its head."""
    head, filling = _head_of_one(x.dtype, x.shape)
    return head + x.tobytes() + filling


_ONE_BYTES = -(-_WORD_BYTES * (4 + HEADER_WORDS) // _UNIT_BYTES) * _UNIT_BYTES  # of a framed head of one array


def taken_whole(raw: HostArray) -> HostArray | None:
    """The array of a message as :func:`whole` makes it; None of any other message."""
    described = _described(raw[:_ONE_BYTES].tobytes())
    if described is None or described[2] != raw.size:
        return None
    dtype, shape, _, end = described
    flat = raw[_ONE_BYTES:end].view(dtype)
    return flat if len(shape) == 1 else flat.reshape(shape)


@functools.lru_cache(maxsize=256)
def _described(framed: bytes) -> tuple[np.dtype[np.generic], tuple[int, ...], int, int] | None:
    """(type, shape, bytes of the message, end of the array) of one array in the order of C, by its framed head."""
    words = np.frombuffer(framed, np.int64)
    if len(framed) < _ONE_BYTES or words[0] != 3 + HEADER_WORDS or words[1] != ONE_ARRAY or words[2] != 1:
        return None
    header = words[4 : 4 + HEADER_WORDS]
    shape, dtype, axes = _decode(header.tobytes())
    if is_on_device(header) or axes != tuple(range(len(shape))):
        return None
    num_bytes = int(words[3])
    return dtype, shape, _ONE_BYTES + num_bytes + -num_bytes % _UNIT_BYTES, _ONE_BYTES + num_bytes
