"""Updates piece by piece: stretches of memory that stay in cache, and arrays to work in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dbrdist.core.array.backend import (
    Array,
    accumulation_dtype,
    empty,
    get_array_module,
)

if TYPE_CHECKING:
    from dbrdist.core.array.types import DType

# One pass of an update reads and writes several arrays; pieces of this many elements stay in the second-level cache
# between the passes of a formula.
CHUNK_ELEMENTS = 1 << 15
SMALL_ELEMENTS = 1 << 12  # elements of a host's array up to which NumPy takes less time than a kernel's plan
_MAX_LENT = 256


def pieces(a: Array) -> Iterator[slice]:
    """Slices of a 1-d array that stay in cache between the passes of a formula; on a GPU a single one."""
    step = CHUNK_ELEMENTS if isinstance(a, np.ndarray) else max(a.size, 1)
    for i in range(0, a.size, step):
        yield slice(i, i + step)


def in_pieces(
    step: Callable[..., None], p: Array, g: Array, state: list[Array], before: Sequence[Callable[..., None]] = ()
) -> None:
    """Call ``step(p, g, *state)`` piece by piece; 16-bit values are widened for it, and narrowed once.

    ``before`` are called first, with p, g, and the first and last + 1 element of the piece.
    """
    wide = accumulation_dtype(p.dtype)
    for i in pieces(p):
        for change in before:
            change(p, g, i.start, min(i.stop, p.size))
        if wide == p.dtype:
            step(p[i], g[i], *[s[i] for s in state])
        else:
            moved = p[i].astype(wide)
            step(moved, g[i].astype(wide), *[s[i] for s in state])
            p[i] = moved


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[DType, Array] = {}  # by type
        self.lent: dict[int, Array] = {}  # by size, the stretch of a buffer that was lent last


_scratch = _Scratch()


def workspace(like: Array) -> Array:
    """Uninitialised memory like a 1-d array, for one term of a formula; valid until this thread asks again."""
    size = like.size
    if not isinstance(like, np.ndarray) or size > CHUNK_ELEMENTS:
        return empty(like.shape, like.dtype, like)
    lent = _scratch.lent.get(size)
    if lent is not None and lent.dtype is like.dtype:
        return lent
    return _lend(size, like.dtype)


def _lend(size: int, dtype: DType) -> Array:
    buffer = _scratch.buffers.get(dtype)
    if buffer is None:
        buffer = _scratch.buffers[dtype] = empty((CHUNK_ELEMENTS,), dtype)
    if len(_scratch.lent) >= _MAX_LENT:
        _scratch.lent.clear()
    lent = _scratch.lent[size] = buffer[:size]
    return lent


def denominator(w: Array, eps: float) -> Array:
    """``w`` with ``eps`` added in place, and 1 where that is 0: no gradient so far, and the gaps in flat memory."""
    w += eps
    if not eps:
        get_array_module(w).copyto(w, 1, where=w == 0)
    return w


# The entry of a rule's state that holds a 16-bit parameter in float32; the name is Chainer's.
FP32_PARAM = "fp32_param"


def follow(wide: Array, a: Array, before: Array) -> None:
    """Copy into ``wide`` the elements of the 16-bit array ``a`` that differ from ``before``."""
    changed = a.view(np.uint16) != before.view(np.uint16)
    if not isinstance(a, np.ndarray) or changed.any():  # looking at the result would wait for a GPU
        wide[...] = get_array_module(a).where(changed, a.astype(wide.dtype), wide)
