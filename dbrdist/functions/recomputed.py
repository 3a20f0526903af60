"""Activations that convolutions do not keep for backward, since one pass over memory makes them again, bit for bit.

The output of a normalization, with or without a ReLU or a sum that follow it, is a function of what the normalization
keeps anyway: its input, the statistics, gamma and beta. So a convolution that reads it keeps the recipe alone, and a
residual block a bit for each element that its ReLU has let through. In a step of ResNet-50 with 16 images these are
440 of the 1,280 MiB of activations.

A recipe is good as long as it makes what the function has seen. It is offered with the output, and taken back as soon
as a function is called that could change or show arrays, or anybody reads the array of any Variable (``core.tape.
fusion``). The vectors are copies. Where somebody but the normalization's call holds the memory of its input when the
convolution is called, that keeps its own input. Who asks that call for its input later gets a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from sys import getrefcount
from typing import Any, TypeAlias
from weakref import ref

import numpy as np

from dbrdist import kernels
from dbrdist.core.array.backend import Array, DType, copy_as_it_lies, empty, is_channels_last
from dbrdist.core.array.config import config
from dbrdist.core.array.ownership import is_private
from dbrdist.core.array.types import Shape
from dbrdist.core.tape.function_node import is_observed
from dbrdist.core.tape.fusion import Pending, offer, offered
from dbrdist.core.tape.variable import Variable
from dbrdist.kernels.host_dispatch import MARKS

Maker: TypeAlias = Callable[[slice, Array], None]

_PART = 1 << 17  # elements of an output that is made with others: of more, what was made first has left the cache
_LARGE = 1 << 18  # elements of an array that does not stay in the cache; of smaller ones, calls cost more than memory
_OF_EXAMPLE = 1 << 14  # elements that an image has at most if its activations are few: making them again takes a
# fortieth of the time of ResNet-20 on images of 32 pixels, whose batches memory seldom limits
_MOST_SUMS = 2  # residual blocks in a row whose outputs are made from one another: a third would take three passes


class Recomputed(Pending):
    """An output of a function that may be made again.

    Args:
        output: the array.
        num_sums: how many sums have to be made for it.
    """

    __slots__ = ("num_sums",)
    is_offer = True

    def __init__(self, output: Array, num_sums: int = 0) -> None:
        super().__init__(output, object, None)
        self.num_sums = num_sums

    def array(self, shape: Shape, dtype: DType) -> Array:
        """The output, made again by parts that stay in the cache from one step of a sum to the next."""
        y = empty(shape, dtype)
        rows, make = as_rows(y), self.maker()
        step = max(_PART // (shape[1] * shape[3]), 1)
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            make(part, rows[part])
        return y

    def handed_out(self, shape: Shape, dtype: DType) -> Array:
        """The output, for somebody who may write to it."""
        return self.array(shape, dtype)

    def maker(self) -> Maker:
        """A function that makes a part of the rows of it, as :func:`as_rows` gives them."""
        raise NotImplementedError

    def is_sound(self) -> bool:
        """Whether nobody but the graph can change what it is made from."""
        raise NotImplementedError


class KeptOutput(Recomputed):
    """An output that is kept, ``held``, as soon as somebody needs it for backward."""

    __slots__ = ("held",)

    def __init__(self, output: Array) -> None:
        super().__init__(output)
        self.held: Array | None = None

    def array(self, shape: Shape, dtype: DType) -> Array:
        assert self.held is not None
        return self.held

    def handed_out(self, shape: Shape, dtype: DType) -> Array:
        return copy_as_it_lies(self.array(shape, dtype))  # sums may be made from it

    def maker(self) -> Maker:
        assert self.held is not None
        return partial(_copy, as_rows(self.held))

    def is_sound(self) -> bool:
        return self.held is not None and _has_holders(self.held, 1)


class RepeatedNormalization(Recomputed):
    """The output of a normalization, rectified or not.

    Args:
        output: the array.
        call: the function that normalizes, in a weak reference.
        x: what was normalized.
        vectors: a function that gives gamma, beta, mean and variance as they were.
        saved: what the kernel kept.
        eps: added to the variance.
        axis: what was averaged over.
        rectifies: whether a ReLU follows.
    """

    __slots__ = ("axis", "call", "eps", "rectifies", "saved", "vectors", "x")

    def __init__(
        self, output: Array, call: ref[Any], x: Array, vectors: Callable[[], Any], saved: Any, eps: float, axis: Shape,
        rectifies: bool,
    ) -> None:  # fmt: skip
        super().__init__(output)
        self.call = call
        self.x = x
        self.vectors = vectors
        self.saved = saved
        self.eps = eps
        self.axis = axis
        self.rectifies = rectifies

    def array(self, shape: Shape, dtype: DType) -> Array:
        y = empty(shape, dtype)
        self._again(self.x, y)
        return y

    def maker(self) -> Maker:
        rows, again = as_rows(self.x), self._again
        return lambda part, out: again(rows[part], out)

    def packed(self) -> Array:
        """Mean, factor and offset of each channel, as :func:`dbrdist.kernels.rectified_sum` takes them."""
        gamma, beta, mean, var = (v.reshape(-1).astype(np.float32, copy=False) for v in self.vectors())
        with np.errstate(all="ignore"):
            return np.stack((mean, gamma / np.sqrt(var + np.float32(self.eps)), beta))

    @property
    def _again(self) -> Callable[[Array, Array], None]:
        gamma, beta, mean, var = self.vectors()
        return kernels.bn_again(self.saved, gamma, beta, mean, var, self.eps, self.rectifies, self.axis)

    def is_sound(self) -> bool:
        call = self.call()  # which keeps x if it was recorded and is not cut out
        if call is None or not call._kept_xs or call._kept_xs[0] is not self.x:
            return _has_holders(self.x, 1)
        call.shares_x = True
        return _has_holders(self.x, 2)


class RepeatedSum(Recomputed):
    """The rectified sum of a normalization and what may be made again itself."""

    __slots__ = ("added", "normalized")

    def __init__(self, output: Array, normalized: RepeatedNormalization, added: Recomputed) -> None:
        super().__init__(output, added.num_sums + 1)
        self.normalized = normalized
        self.added = added

    def maker(self) -> Maker:
        normalize, added = self.normalized.maker(), self.added
        rows, vectors = as_rows(self.normalized.x), self.normalized.packed()
        held = as_rows(added.held) if isinstance(added, KeptOutput) and added.held is not None else None
        is_pair = isinstance(added, RepeatedNormalization) and not added.rectifies
        pair = (as_rows(added.x), added.packed()) if is_pair else None
        make_added, room = added.maker(), empty((1, 1, 1, 0), np.float32)

        def make(part: slice, out: Array) -> None:
            nonlocal room
            y, x = _matrix(out), _matrix(rows[part])
            if pair is not None and kernels.rectified_sum(y, x, vectors, _matrix(pair[0][part]), pair[1]):
                return
            if held is not None:
                other = held[part]
            else:
                if room.size < out.size:
                    room = empty(out.shape, out.dtype)
                other = room[: len(out)]
                make_added(part, other)
            if kernels.rectified_sum(y, x, vectors, _matrix(other), None):
                return
            normalize(part, out)
            a, b = y.reshape(-1), _matrix(other).reshape(-1)
            if not kernels.relu_of_sum_over(a, b):
                np.maximum(np.add(a, b, out=a), 0, out=a)

        return make

    def is_sound(self) -> bool:
        return self.normalized.is_sound() and self.added.is_sound()


def as_rows(x: Array) -> Array:
    """Images in channels-last memory, (N, C, H, W), as (N H, C, 1, W)."""
    n, c, h, w = x.shape
    return x.transpose(0, 2, 3, 1).reshape(n * h, 1, w, c).transpose(0, 3, 1, 2)


def _matrix(rows: Array) -> Array:
    """Images in channels-last memory as (N H W, C)."""
    return rows.transpose(0, 2, 3, 1).reshape(-1, rows.shape[1])


def _copy(rows: Array, part: slice, out: Array) -> None:
    out[...] = rows[part]


# ---- who else holds an array


def _references(a: Array) -> tuple[int, int]:
    """How many references there are to an array and to the one that owns its memory."""
    return getrefcount(a), 0 if a.base is None else getrefcount(a.base)


def _has_holders(a: Array, count: int) -> bool:
    """Is a NumPy array held so many times at most, and nothing else a view of its memory?"""
    (of_array, of_owner), (once, owner_once) = _references(a), _PROBE.references()
    is_alone = a.base is None or (type(a.base) is np.ndarray and a.base.base is None and of_owner <= owner_once)
    return type(a) is np.ndarray and is_alone and of_array <= once + count - 1


class _Probe:
    """What holds an array once."""

    def __init__(self) -> None:
        self.x = np.empty(2)[:1]

    def references(self) -> tuple[int, int]:
        return self._through(self.x)

    @staticmethod
    def _through(a: Array) -> tuple[int, int]:
        return _references(a)


_PROBE = _Probe()  # asked at each count: references depend on the interpreter, and on debuggers that look on


# ---- offers


def may_be_offered(x: Any) -> bool:
    """Whether what a function makes of images ``x`` may be made again: of large ones on the host that it alone has."""
    if not isinstance(x, Variable) or not config.enable_backprop or is_observed():
        return False
    return _suits(x._array) and is_private(x)


def _suits(a: Array) -> bool:
    is_large = type(a) is np.ndarray and a.ndim == 4 and a.dtype == np.float32 and a.size >= _LARGE
    return is_large and a.size > _OF_EXAMPLE * len(a) and a.size % MARKS == 0 and is_channels_last(a)


def offer_normalized(y: Array, *recipe: Any) -> None:
    """Offer the output of a normalization, whose ``recipe`` is as of :class:`RepeatedNormalization`."""
    if kernels.may_be_repeated(recipe[3]):
        offer(RepeatedNormalization(y, *recipe))


def offer_sum(y: Array, added: Array, *recipe: Any) -> None:
    """Offer a rectified sum of an array and a normalization, of such a ``recipe`` as :func:`offer_normalized` takes."""
    of_added = _offered(added)
    if of_added is None or of_added.num_sums >= _MOST_SUMS or not kernels.may_be_repeated(recipe[3]):
        offer(KeptOutput(y))
    else:
        if isinstance(of_added, KeptOutput):
            of_added.held = added
        offer(RepeatedSum(y, RepeatedNormalization(y, *recipe), of_added))


def taken(x: Array) -> Recomputed | None:
    """How to make an array again, for a function that need not keep it then; None where it has to."""
    found = _offered(x)
    if isinstance(found, KeptOutput):  # in one place for all, so that others can see that nobody else has it
        found.held = x
        return found
    return found if found is not None and found.is_sound() else None


def _offered(x: Array) -> Recomputed | None:
    found = offered(x)
    return found if isinstance(found, Recomputed) else None
