"""A batch normalization that expects a ReLU, and the gradients that the rules of both leave to each other.

Normalization and ReLU are one pass in oneDNN, forward and backward, but the user calls them one after the other. Where
the last output of the same gamma went straight into a ReLU, or where a parameter gamma is met for the first time, the
next normalization computes the rectified output at once and leaves its own output unwritten (see ``core.tape.fusion``).
The ReLU that follows takes the rectified one. An output is written from the input, which nobody else can have changed
meanwhile (``is_private``), and from copies of the small vectors.

The normalization keeps which elements the ReLU let through, so that the ReLU need not keep its output.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from dbrdist.core.array.backend import Array, DType, is_of_own_class, zeros
from dbrdist.core.tape import ops
from dbrdist.core.tape.deferred import Deferred
from dbrdist.core.tape.fusion import Pending, pending_of, settle
from dbrdist.functions.recomputed import offer_normalized

Mask: TypeAlias = Callable[[], Array]  # gives 0 where a ReLU stopped an element, and 1 elsewhere

_LARGE = 1 << 18  # elements of a gradient that does not stay in the cache
_went_into_relu: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()  # the last output of each gamma


class PendingNormalization(Pending):
    """The output of a normalization, whose ReLU may exist already.

    Args:
        output: the array.
        taker: the class of the ReLU.
        gamma: what the expectation of a ReLU is kept for.
        rectified: the ReLU of the output, until a ReLU takes it; None where it does not exist.
        write: writes the output; None where it has been written.
        mask: of the rectified output, if that is kept anyway.
        recipe: how to make the rectified output again, see ``functions.recomputed``; None for not at all.
    """

    __slots__ = ("gamma", "mask", "recipe", "rectified")

    def __init__(
        self,
        output: Array,
        taker: type,
        gamma: Any,
        rectified: Array | None = None,
        write: Callable[[Array], None] | None = None,
        mask: Mask | None = None,
        recipe: Any = None,
    ) -> None:
        super().__init__(output, taker, write)
        self.gamma = gamma
        self.rectified = rectified
        self.mask = mask
        self.recipe = recipe

    def left(self) -> None:
        _went_into_relu[self.gamma] = False


def take(x: Array) -> tuple[Array | None, Mask | None]:
    """The ReLU of ``x`` if it exists already, else None, and then ``x`` is written; and its mask, if that was kept."""
    pending: Any = pending_of(x)
    if pending is None:
        return None, None
    pending.taken = True
    _went_into_relu[pending.gamma] = True
    rectified, pending.rectified = pending.rectified, None  # a second ReLU gets an array of its own
    if rectified is None:
        settle()
    elif pending.recipe is not None:
        offer_normalized(rectified, *pending.recipe, True)
    return rectified, pending.mask


def expects_relu(gamma: Any, at_first: bool) -> bool:
    """True if the last output of this gamma went straight into a ReLU; ``at_first`` if there was none."""
    return _went_into_relu.get(gamma, at_first)


# ---- gradients ------------------------------------------------------------------------------------------------------


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

    def taken(self) -> tuple[Array, Array]:
        """Both gradients, which are forgotten here: the memory of one is free once the other has taken the sum."""
        gradients = self.a, self.b
        del self.a, self.b
        return gradients


def defer_sum(a: Any, b: Any, is_ours: bool) -> SummedGradient | None:
    """The sum of gradients of large images, for a ReLU to add and mask in one pass; None for others."""
    if type(a) is not type(b) or not is_of_own_class(a) or a.ndim != 4 or a.size < _LARGE:
        return None
    return SummedGradient(a, b, ops.add, is_ours) if a.shape == b.shape and a.dtype == b.dtype else None


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
        return self._add_to(zeros(self.shape, self.seen.dtype, self.seen))

    def plus(self, g: Any, is_ours: bool) -> Any:
        return self._add_to(g) if is_ours and is_of_own_class(g) else None

    def _add_to(self, g: Array) -> Array:
        sh, sw = self.step
        part = g[:, :, ::sh, ::sw]
        part += self.seen  # CuPy would copy the part to itself if it was added to in one statement
        return g
