"""Last passes that wait for their reader.

A batch normalization or an addition may return before its last pass has run. A following ``relu`` takes that pass over
and does both in one; any other reader, the start of backward and a change of parameters make it run as it stands. In
backward the ReLU hands on its gradient with the mask still to be applied, for the fused kernel to do. Values and
gradients are those of the separate calls.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from dbrdist.core.backend import Array, DType, elementwise


class Finisher(Protocol):
    """The operation whose last pass is pending."""

    def finish(self, add_relu: Callable[[Array, Array], Array] | None) -> Array:
        """Run the last pass; where a kernel for ``max(a + b, 0)`` is handed down, followed by a ReLU.

        May be called once without and once with a ReLU, in either order.
        """


class Pending:
    """An output that has not been computed yet: shape and dtype are known, ``force`` gives the array."""

    __slots__ = ("__weakref__", "_array", "_finisher", "dtype", "fuses_gradient", "shape")

    def __init__(self, finisher: Finisher, shape: tuple[int, ...], dtype: DType, fuses_gradient: bool) -> None:
        self._finisher: Finisher | None = finisher
        self._array: Array = None
        self.shape = shape
        self.dtype = dtype
        self.fuses_gradient = fuses_gradient  # its backward kernel can apply the ReLU's mask
        _register(self)

    def force(self) -> Array:
        """The array; computed at the first call."""
        finisher = self._finisher
        if finisher is not None:
            self._array = finisher.finish(None)
            self._finisher = None
        return self._array

    def take_relu(self, add_relu: Callable[[Array, Array], Array]) -> Array:
        """``relu`` of the output in the same pass, or None if the output was read before."""
        finisher = self._finisher
        return None if finisher is None else finisher.finish(add_relu)


class MaskedGradient:
    """The gradient of a fused ReLU's output, whose mask ``y > 0`` the receiver applies (or ``force``)."""

    __slots__ = ("gy", "kernel", "y")

    def __init__(self, gy: Array, y: Array, kernel: Any) -> None:
        self.gy = gy
        self.y = y
        self.kernel = kernel

    @property
    def shape(self) -> Any:
        return self.gy.shape

    @property
    def dtype(self) -> DType:
        return self.gy.dtype

    def force(self) -> Array:
        return self.kernel(self.y, self.gy)


class PendingSum:
    """a + b for two activations of equal shape and type."""

    def __init__(self, a: Array, b: Array) -> None:
        self.a = a
        self.b = b

    def finish(self, add_relu: Callable[[Array, Array], Array] | None) -> Array:
        return elementwise(np.add, self.a, self.b) if add_relu is None else add_relu(self.a, self.b)


class _Waiting(threading.local):
    def __init__(self) -> None:
        self.refs: list[weakref.ref[Pending]] = []


_waiting = _Waiting()
_PRUNE_LENGTH = 256


def _register(pending: Pending) -> None:
    refs = _waiting.refs
    refs.append(weakref.ref(pending))
    if len(refs) > _PRUNE_LENGTH:  # inference loops never flush: forget the dead
        refs[:] = [r for r in refs if r() is not None]


def flush() -> None:
    """Compute every pending output that somebody still holds; called before gradients flow or parameters change."""
    refs = _waiting.refs
    if refs:
        _waiting.refs = []
        for ref in refs:
            pending = ref()
            if pending is not None:
                pending.force()
