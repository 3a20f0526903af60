"""Weights and their gradients brought from one layout and type to another, those of many layers in one launch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dbrdist.core.array.types import Array
from dbrdist.kernels.gpu import cuda_source

if TYPE_CHECKING:
    from dbrdist.core.array.types import DType

_address, _size, _size_of_target = attrgetter("data.ptr"), attrgetter("size"), attrgetter("target.size")
_ALIGNMENT = 256  # bytes, as of memory of its own
_MOST = 96  # pieces of a launch: its arguments may take 4,096 bytes
# struct Piece and struct Pieces of layout.cu
_PIECE = np.dtype([
    ("source", np.uint64), ("target", np.uint64), ("first", np.int64), ("inputs", np.int32), ("places", np.int32),
    ("width", np.int32), ("unused", np.int32),
])  # fmt: skip
_PIECES = np.dtype([("count", np.int32), ("unused", np.int32), ("pieces", _PIECE, (_MOST,))])


class FilterPiece(NamedTuple):
    """Filters (O, I, K) in one array and (O, K, P) in the other one: the arrays, and I, K and P."""

    source: Array
    target: Array
    numbers: tuple[int, int, int]


class FilterPieces(np.ndarray[Any, Any]):
    """An argument of a kernel, which CuPy passes by value: a struct with the addresses of its arrays."""

    sources: list[Array]
    targets: list[Array]

    @staticmethod
    def of(pieces: list[FilterPiece]) -> FilterPieces:
        """That of some pieces; the place where the last one ends is the number of elements."""
        made: Any = np.zeros((), _PIECES).view(FilterPieces)
        sources, targets, numbers = zip(*pieces)
        made.sources, made.targets = list(sources), list(targets)
        count, table = len(pieces), made["pieces"]
        made["count"] = count
        table["source"][:count] = list(map(_address, sources))
        table["target"][:count] = list(map(_address, targets))
        table["first"][1:count] = np.cumsum(list(map(_size, targets[:-1])))
        table["inputs"][:count], table["places"][:count], table["width"][:count] = zip(*numbers)
        return made

    @property
    def numbers(self) -> bytes:
        """What is in it besides addresses."""
        plain = np.array(self)
        plain["pieces"]["source"] = plain["pieces"]["target"] = 0
        return plain.tobytes()


class FilterLayout:
    """Filters (O, I, K) of one type as (O, K, P) of another one: a copy of weights in C order, on a device."""

    __slots__ = ("key", "size", "together")

    def __init__(self, source: DType, target: DType, numbers: tuple[int, int, int, int]) -> None:
        self.key = source, target, numbers  # O, I, K and P
        self.size = numbers[0] * numbers[2] * numbers[3]  # the number of elements of the copy
        self.together = _together(cuda_source.current_device(), source, target)

    def __call__(self, W: Array) -> Array:
        """The copy of weights, in a launch of its own."""
        source, target, (_, *numbers) = self.key
        out = cuda_source.plain((self.size,), target)()
        turn = cuda_source.kernel("layout", "to_channels_last", source, target)
        turn(*cuda_source.over(self.size), (W, out, self.size, *map(np.int32, numbers)))
        return out


@functools.cache
def _together(device: int, source: DType, target: DType) -> Callable[[list[tuple[FilterLayout, Array]]], list[Array]]:
    """A function from weights to their copies, which are slices of one array."""
    run = cuda_source.kernel("layout", "all_to_channels_last", source, target)
    step = _ALIGNMENT // target.itemsize

    def lay(weights: list[tuple[FilterLayout, Array]]) -> list[Array]:
        laid, pieces = [], []
        starts = list(itertools.accumulate([-(-layout.size // step) * step for layout, _ in weights], initial=0))
        memory = cuda_source.plain((starts.pop(),), target)()
        for (layout, W), start in zip(weights, starts):
            out = memory[start : start + layout.size]
            laid.append(out)
            pieces.append(FilterPiece(W, out, layout.key[2][1:]))
        _run_all(run, pieces)
        return laid

    return lay


def _run_all(run: Callable[..., None], pieces: list[FilterPiece]) -> None:
    """Launch a kernel over all elements of the pieces' targets."""
    for start in range(0, len(pieces), _MOST):
        some = pieces[start : start + _MOST]
        size = sum(map(_size_of_target, some))
        run(*cuda_source.over(size), (FilterPieces.of(some), size))


@functools.cache
def to_plain(device: int, source: DType, target: DType) -> Callable[[list[FilterPiece]], None]:
    """A function that brings (O, K, P) in the type ``source`` to (O, I, K) in the type ``target``, on a device."""
    run = cuda_source.kernel("layout", "all_to_plain", source, target)

    return functools.partial(_run_all, run)
