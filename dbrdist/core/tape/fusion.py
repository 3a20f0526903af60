"""A batch normalization that expects a ReLU.

Normalization and ReLU are one pass in oneDNN, forward and backward, but the user calls them one after the other. Where
the last output of the same gamma went straight into a ReLU, or where a parameter gamma is met for the first time, the
next normalization computes the rectified output at once and leaves its own output unwritten. The ReLU that follows
takes the rectified one. Whoever else comes first, any function or any read of any Variable's array in any thread, has
the output written before it goes on: from the input, which nobody else can have changed meanwhile (``is_private``), and
from copies of the small vectors. An output that dies unread is never written. So each thread has at most one unwritten
output, and every value is that of the call.

The normalization keeps which elements the ReLU let through, so that the ReLU need not keep its output.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from sys import getrefcount
from threading import get_ident
from typing import Any, TypeAlias

import numpy as np

from dbrdist.core.array.backend import Array, DType, is_on_gpu, zeros
from dbrdist.core.array.current_device import MakerStream

Mask: TypeAlias = Callable[[], Array]  # gives 0 where a ReLU stopped an element, and 1 elsewhere


class Pending:
    """An output that a ReLU may take over, and how to write it otherwise."""

    __slots__ = ("gamma", "mask", "origin", "output", "rectified", "taken", "write")

    def __init__(
        self,
        output: Array,
        gamma: Any,
        rectified: Array | None,
        write: Callable[[Array], None] | None,
        mask: Mask | None,
    ) -> None:
        self.output = weakref.ref(output, _forget)
        self.gamma = gamma
        self.rectified = rectified  # the ReLU of the output, until a ReLU takes it
        self.write = write  # None where the output has been written
        self.mask = mask
        self.taken = False  # by a ReLU
        self.origin = None if type(output) is np.ndarray else MakerStream.of(output)

    def finish(self) -> None:
        """Write the output, unless nobody can read it any more."""
        output, write = self.output(), self.write
        if output is not None and write is not None:
            if self.origin is None:
                write(output)
            else:
                self.origin.run(partial(write, output))
            self.write = None


waiting: dict[int, Pending] = {}  # by thread; empty nearly always
_lock = threading.RLock()
_went_into_relu: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()  # the last output of each gamma


def wait(
    output: Array, gamma: Any, rectified: Array | None = None, write: Callable[[Array], None] | None = None,
    mask: Mask | None = None,
) -> None:  # fmt: skip
    """Let ``output`` be taken over by a ReLU that comes next in this thread."""
    waiting[get_ident()] = Pending(output, gamma, rectified, write, mask)


def settle() -> None:
    """Write what is unwritten; called where ``waiting`` is not empty, before anybody can look."""
    with _lock:
        for thread, pending in list(waiting.items()):
            pending.finish()
            if not pending.taken:
                _went_into_relu[pending.gamma] = False
            if waiting.get(thread) is pending:
                del waiting[thread]


def take(x: Array) -> tuple[Array | None, Mask | None]:
    """The ReLU of ``x`` if it exists already, else None, and then ``x`` is written; and its mask, if that was kept."""
    pending = waiting.get(get_ident())
    if pending is None or pending.output() is not x:
        settle()
        return None, None
    pending.taken = True
    _went_into_relu[pending.gamma] = True
    rectified, pending.rectified = pending.rectified, None  # a second ReLU gets an array of its own
    if rectified is None:
        settle()
    return rectified, pending.mask


def expects_relu(gamma: Any, at_first: bool) -> bool:
    """True if the last output of this gamma went straight into a ReLU; ``at_first`` if there was none."""
    return _went_into_relu.get(gamma, at_first)


def _forget(output: weakref.ref[Any]) -> None:
    """An output died: nobody needs it written."""
    for thread, pending in list(waiting.items()):
        if pending.output is output and waiting.get(thread) is pending:
            del waiting[thread]


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()  # another thread may have held it at the fork


os.register_at_fork(before=lambda: settle() if waiting else None, after_in_child=_renew_lock)


class Deferred:
    """A gradient that its receiver completes, in fewer passes over memory than ``force``.

    ``part`` is an array that it is made from: on the device on which it is completed.
    """

    __slots__ = ()

    def force(self) -> Array:
        """The gradient as an array."""
        raise NotImplementedError


class MaskedGradient(Deferred):
    """The gradient of a fused ReLU's output, which the receiver masks by what it kept (or ``force``).

    ``is_ours``: nobody else has ``gy``, so that the result may be written there.
    """

    __slots__ = ("gy", "is_ours", "masked")

    def __init__(self, gy: Array, masked: Callable[[Array], Array], is_ours: bool) -> None:
        self.gy = gy
        self.masked = masked
        self.is_ours = is_ours

    @property
    def shape(self) -> Any:
        return self.gy.shape

    @property
    def dtype(self) -> DType:
        return self.gy.dtype

    @property
    def part(self) -> Array:
        return self.gy

    def force(self) -> Array:
        return self.masked(self.gy)


class SummedGradient(Deferred):
    """Two gradients of a ReLU's output, which its backward adds and masks in one pass over memory (or ``force``).

    ``is_ours``: nobody else has ``b``, so that the result may be written there.
    """

    __slots__ = ("a", "add", "b", "is_ours")

    def __init__(self, a: Array, b: Array, add: Callable[[Array, Array], Array], is_ours: bool) -> None:
        self.a = a
        self.b = b
        self.add = add
        self.is_ours = is_ours

    @property
    def shape(self) -> Any:
        return self.a.shape

    @property
    def dtype(self) -> DType:
        return self.a.dtype

    @property
    def part(self) -> Array:
        return self.a

    def force(self) -> Array:
        return self.add(self.a, self.b)


class SpreadGradient(Deferred):
    """The gradient of images of which only every sh-th row and sw-th column was seen; it is 0 elsewhere."""

    __slots__ = ("seen", "shape", "step")

    def __init__(self, seen: Array, shape: tuple[int, ...], step: tuple[int, int]) -> None:
        self.seen = seen
        self.shape = shape
        self.step = step

    @property
    def dtype(self) -> DType:
        return self.seen.dtype

    @property
    def part(self) -> Array:
        return self.seen

    def force(self) -> Array:
        return self.add_to(zeros(self.shape, self.seen.dtype, self.seen))

    def add_to(self, g: Array) -> Array:
        """Add the gradient to an array, in place."""
        sh, sw = self.step
        g[:, :, ::sh, ::sw] += self.seen
        return g


# ---- who else can reach an array ------------------------------------------------------------------------------------


def _holders(variable: Any) -> tuple[int, int]:
    """How many references there are to a Variable's array and to the array that owns its memory."""
    owner = variable._array.base
    return getrefcount(variable._array), getrefcount(owner)


class _Probe:
    """What a Variable looks like whose array nobody else holds."""

    __slots__ = ("_array",)

    def __init__(self) -> None:
        self._array = np.empty(2)[:1]


_ALONE = _holders(_Probe())  # counted rather than known: compiled code and newer interpreters borrow references


def is_private(variable: Any) -> bool:
    """True if the memory of a Variable's array can be reached through the Variable alone: no view, no raw reference."""
    if _owns_memory(variable._array):
        return _holders(variable)[0] == _ALONE[0]
    is_view = type(variable._array) is np.ndarray and not weakref.getweakrefcount(variable._array)
    return is_view and _owns_memory(variable._array.base) and _holders(variable) == _ALONE


def _owns_memory(a: Any) -> bool:
    """True for an array of NumPy or CuPy with memory of its own, to which there are no weak references."""
    return (type(a) is np.ndarray or is_on_gpu(a)) and a.flags.owndata and not weakref.getweakrefcount(a)
