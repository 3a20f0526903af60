"""The checks of arguments, one for all communicators. What they raise on one rank, the gate raises on all."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from dbrdist.comm.transport import message
from dbrdist.core.array.backend import Array

T = TypeVar("T")
MAX_TAG = 2**15 - 1  # the largest that every MPI has
_UNDEFINED = -32766  # MPI.UNDEFINED of MPICH and of Open MPI
_ERRORS = (TypeError, ValueError, MemoryError)


def attempt(function: Callable[..., T], *args: Any) -> tuple[T | None, Exception | None]:
    """(what the function returns, None), or (None, what was wrong with its arguments)."""
    try:
        return function(*args), None
    except _ERRORS as e:
        return None, e


def whole_number(value: Any, what: str) -> int:
    """``value`` as an int, if it is one."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{what} expected a whole number, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what} expected a whole number, got {type(value).__name__}") from None


def rank_of(value: int | None, size: int, what: str) -> int:
    """A rank of a communicator of ``size`` ranks."""
    rank = whole_number(value, what)
    if not 0 <= rank < size:
        raise ValueError(f"{what} expected a rank from 0 to {size - 1}, got {rank}")
    return rank


def tag(value: int | np.generic, what: str) -> int:
    """The tag of a message."""
    number = whole_number(value, f"{what}: tag")
    if not 0 <= number <= MAX_TAG:
        raise ValueError(f"{what} expected a tag from 0 to {MAX_TAG}, got {number}")
    return number


def piece_bytes(value: int | None, what: str) -> int:
    """The argument ``max_buf_len``; 0 for None, which leaves it to the communicator."""
    if value is None:
        return 0
    number = whole_number(value, f"{what}: max_buf_len")
    if number < 1:
        raise ValueError(f"{what} expected max_buf_len of 1 byte or more, or None, got {number}")
    return number


def num_samples(value: float | np.generic | str | None, what: str) -> int | None:
    """A number of examples, of any type that has whole numbers, or None."""
    if value is None:
        return None
    try:
        number = int(value)
        is_whole = bool(number == value) and not isinstance(value, (bool, np.bool_))
    except (TypeError, ValueError, OverflowError):
        is_whole = False
    if not is_whole:
        raise TypeError(f"{what}: num_samples expected a whole number, got {value!r}")
    if number < 0:
        raise ValueError(f"{what} expected num_samples of 0 or more, or None, got {number}")
    return number


def color_and_key(color: int | np.generic | None, key: int) -> tuple[int, int, int]:
    """The arguments of ``split``: (is there a colour, the colour, the key)."""
    if type(color) is int and color == _UNDEFINED:
        color = None
    return int(color is not None), _word(0 if color is None else color, "color"), _word(key, "key")


def _word(value: int | np.generic, what: str) -> int:
    """A number, or a truth value, that fits into 64 bits."""
    number = int(value) if isinstance(value, (bool, np.bool_)) else whole_number(value, f"split: {what}")
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"split: {what} expected a number of 64 bits, got {number}")
    return number


Prepared = tuple[message.Header, message.HostArray]


def prepared(x: Any, verb: str) -> Prepared:
    """An array to send: its header and its elements in host memory."""
    x = message.as_array(x, verb)
    flat, axes = message.dense(x)
    return message.encode(x, axes), flat


def prepared_for_each(xs: Sequence[Array] | None, size: int, verb: str) -> list[Prepared]:
    """What goes to each of ``size`` ranks: a sequence of arrays, or the rows of one."""
    if xs is None or not hasattr(xs, "__len__") or getattr(xs, "ndim", 1) == 0:
        raise TypeError(f"{verb} expected {size} arrays, one for each rank, got {type(xs).__name__}")
    if len(xs) != size:
        raise ValueError(f"{verb} expected {size} arrays, one for each rank, got {len(xs)}")
    return [prepared(x, verb) for x in xs]


def summable(x: Any) -> Array:
    """An array that has a sum."""
    a = message.as_array(x, "allreduce")
    if a.dtype.kind not in "biufcV":
        raise TypeError(f"allreduce expected numbers, got dtype {a.dtype}")
    return a if a.dtype.isnative else a.astype(a.dtype.newbyteorder("="))


def pickled(obj: object) -> message.HostArray:
    """An object as bytes."""
    try:
        raw = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except MemoryError:
        raise
    except Exception as e:  # pickling runs the object's own code
        raise TypeError(f"expected an object that can be pickled, got {type(obj).__name__}: {e}") from e
    return np.frombuffer(raw, np.uint8)


def pickled_for_each(objs: Sequence[object] | None, size: int) -> list[message.HostArray]:
    """The ``size`` objects of a scatter as bytes."""
    if objs is None or not hasattr(objs, "__len__") or len(objs) != size:
        count = len(objs) if hasattr(objs, "__len__") else type(objs).__name__  # type: ignore[arg-type]
        raise ValueError(f"scatter_obj expected {size} objects, one for each rank, got {count}")
    return [pickled(obj) for obj in objs]


def unpickled(raw: Array) -> Any:
    """The object behind the bytes."""
    try:
        return pickle.loads(raw.data)
    except MemoryError:
        raise
    except Exception as e:  # unpickling runs the object's own code, and imports its module
        raise TypeError(f"expected an object that can be unpickled here: {type(e).__name__}: {e}") from e
