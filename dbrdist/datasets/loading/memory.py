"""Memory for the images of batches, used again, and shared by the threads that make a batch together.

Fresh memory costs a page fault per 4 KiB: at 224x224 pixels as much as the copy of an image into it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dbrdist.core.array.backend import Array


class Canvas:
    """One array for a batch of which several threads make a part each; it is there once the first image is."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._array: Any = None
        self._lock = threading.Lock()

    def rows(self, start: int, shape: tuple[int, ...], dtype: Any) -> Array | None:
        """The rows from ``start`` on, of undefined values; None where the batch began with another shape or type."""
        with self._lock:
            if self._array is None:
                self._array = reused.fresh((self._num_rows, *shape[1:]), dtype)
        fits = self._array.shape[1:] == shape[1:] and self._array.dtype == dtype
        return self._array[start : start + shape[0]] if fits else None

    def begun(self, start: int, num_rows: int) -> Array | None:
        """The rows from ``start`` on, where the array is there: what they hold is known only to who has begun it."""
        array = self._array
        return None if array is None else array[start : start + num_rows]


class _Place(threading.local):
    """Where on a canvas this thread's next images go: the rows from ``start`` to ``end``."""

    canvas: Canvas | None = None
    start = end = 0


class Reused:
    """Arrays for the images of batches, used again once nobody holds them or a view of them."""

    _MAX_KEPT = 4  # two batches in the making or ready, the one just handed out, and the one before it
    _FREE = 3  # references to an array that nobody else holds: our list's, the loop variable's, the question's

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._lock = threading.Lock()
        self._place = _Place()

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """An array of undefined values: a part of this thread's canvas, as long as that has rows left."""
        place = self._place
        if place.canvas is not None and place.start + shape[0] <= place.end:
            rows = place.canvas.rows(place.start, shape, dtype)
            if rows is not None:
                place.start += shape[0]
                return rows
        return self.fresh(shape, dtype)

    def begun(self, num_rows: int) -> Array | None:
        """The next rows of this thread's canvas, as whoever came first has shaped it; None where nobody has."""
        place = self._place
        if place.canvas is None or place.start + num_rows > place.end:
            return None
        rows = place.canvas.begun(place.start, num_rows)
        if rows is not None:
            place.start += num_rows
        return rows

    def fresh(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array of undefined values that nobody else has."""
        with self._lock:
            for a in self._kept:
                fits = a.shape[1:] == shape[1:] and a.dtype == dtype and len(a) >= shape[0]
                if fits and sys.getrefcount(a) == self._FREE:
                    return a[: shape[0]]
            made = np.empty(shape, dtype)
            self._kept = [*self._kept, made][-self._MAX_KEPT :]
            return made[:]

    @contextmanager
    def on(self, canvas: Canvas, start: int, num_rows: int) -> Iterator[None]:
        """Within the block, this thread's images go to these rows of a canvas."""
        place = self._place
        place.canvas, place.start, place.end = canvas, start, start + num_rows
        try:
            yield
        finally:
            place.canvas = None

    def concatenated(self, arrays: Sequence[Array]) -> Array:
        """Arrays concatenated; without a copy if they are contiguous on a canvas."""
        first = arrays[0]
        if first.dtype != np.uint8 or first.ndim != 4 or not first.flags.c_contiguous:
            return np.concatenate(arrays)
        found = self._neighbours(arrays)
        if found is not None:
            return found
        return np.concatenate(arrays, out=self.fresh((sum(map(len, arrays)), *first.shape[1:]), first.dtype))

    def _neighbours(self, arrays: Sequence[Array]) -> Array | None:
        """The part of one of our arrays that these are, if they follow each other in it."""
        whole: Any = arrays[0].base
        if not any(a is whole for a in self._kept) or any(a.base is not whole for a in arrays):
            return None
        row_bytes, origin = whole.strides[0], _address(whole)
        starts = [(_address(a) - origin) // row_bytes for a in arrays]
        ends = [start + len(a) for start, a in zip(starts, arrays)]
        return whole[starts[0] : ends[-1]] if starts[1:] == ends[:-1] else None


def _address(a: Array) -> int:
    return int(a.__array_interface__["data"][0])


reused = Reused()
