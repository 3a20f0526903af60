"""Memory that loader processes write batches into, and that this process reads them from without a copy.

A ring has some slots, each an anonymous file (``memfd_create``) that the workers inherit: it has no name, so nothing
is left behind, however the processes end. A request names a free slot, which is that worker's alone until it answers.
What it stores there becomes arrays here, and the slot is free again when the last of them is gone, so that somebody
who keeps batches keeps their values. Slots that were used last are used first: memory grows with what is in use.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import warnings
import weakref
from collections.abc import Iterator

import numpy as np

from dbrdist.core.array import backend
from dbrdist.core.array.backend import Array
from dbrdist.datasets.loading.files import Descriptor

FROM_BYTES = 1 << 16  # smaller batches go through the pipe, which takes 25 us for this much, as a slot does
_MAX_SLOTS = 128
_ALIGNMENT = 64

_rings: weakref.WeakSet[Ring] = weakref.WeakSet()


class Ring:
    """The slots of a pool of workers, seen from the parent.

    Args:
        num_slots: at most so many batches are in shared memory at a time, 128 at most.
    """

    def __init__(self, num_slots: int) -> None:
        self._files: list[Descriptor] = []
        self._maps: dict[int, mmap.mmap] = {}
        self._leases: dict[int, weakref.finalize[..., Array]] = {}
        self._free: list[int] = []
        self._has_failed = False
        try:
            self._files = [Descriptor(os.memfd_create("dbrdist-batch")) for _ in range(min(num_slots, _MAX_SLOTS))]
        except (AttributeError, OSError) as e:  # AttributeError: outside of Linux
            self.fail(str(e))
        self._free += reversed(range(len(self._files)))
        _rings.add(self)

    @property
    def fds(self) -> tuple[int, ...]:
        """The open files of the slots, for workers to inherit."""
        return tuple(f.number for f in self._files)

    def take(self) -> int | None:
        """A free slot, or None."""
        with contextlib.suppress(IndexError):  # arrays die in any thread: a check first could be too old
            return None if self._has_failed else self._free.pop()
        return None

    def give_back(self, slot: int) -> None:
        """Free a slot in which nothing was stored."""
        self._free.append(slot)

    def lend(self, slot: int, sizes: list[int]) -> list[Array]:
        """What a worker stored in ``slot``, as arrays of bytes; the slot is free when they and their views are gone."""
        places = list(_places(sizes))
        try:
            base = self._mapped(slot, places[-1].stop)
        except OSError as e:  # too many maps, or a limit on addresses
            self.fail(str(e))
            return [_read(self._files[slot].number, place) for place in places]
        lease = self._leases[slot] = weakref.finalize(base, self._free.append, slot)
        lease.atexit = False
        return [base[place] for place in places]

    def _mapped(self, slot: int, num_bytes: int) -> Array:
        found = self._maps.get(slot)
        if found is None or len(found) < num_bytes:
            found = self._maps[slot] = mmap.mmap(self._files[slot].number, 0)
        return np.frombuffer(found, np.uint8)

    def fail(self, why: str) -> None:
        """Use no slots from now on, and say so once."""
        if not self._has_failed:
            self._has_failed = True
            warnings.warn(
                f"no shared memory for the batches of loader processes: {why}; they go through pipes, which is slower",
                RuntimeWarning,
                stacklevel=2,
            )

    def leave_to_children(self) -> None:
        """Never reuse slots that have arrays now: a forked child sees them too, and keeps their values."""
        for lease in list(self._leases.values()):
            lease.detach()


def _leave_all() -> None:
    for ring in list(_rings):
        ring.leave_to_children()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_leave_all)


def _places(sizes: list[int]) -> Iterator[slice]:
    """The offsets of buffers of ``sizes`` bytes in a slot: contiguous, each on a cache line."""
    padded = [size + -size % _ALIGNMENT for size in sizes]
    for start, size in zip(itertools.accumulate(padded, initial=0), sizes):
        yield slice(start, start + size)


def _read(fd: int, place: slice) -> Array:
    """A buffer's bytes, in memory of this process."""
    found = backend.empty((place.stop - place.start,), np.uint8)
    view, position = memoryview(found), place.start
    while view.nbytes:
        count = os.preadv(fd, [view], position)
        view, position = view[count:], position + count
    return found


# ---- in the worker --------------------------------------------------------------------------------------------------


def store(fd: int, views: list[memoryview]) -> str | None:
    """Write buffers into a slot. Returns None, or why it has no memory; it is empty then.

    They are written rather than mapped: where memory is missing, that is an error here and not a SIGBUS.
    """
    try:
        for view, place in zip(views, _places([v.nbytes for v in views])):
            position = place.start
            while view.nbytes:
                count = os.pwrite(fd, view, position)
                view, position = view[count:], position + count
    except OSError as e:
        os.ftruncate(fd, 0)
        return str(e)
    return None
