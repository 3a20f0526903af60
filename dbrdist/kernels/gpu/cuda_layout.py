"""Weights and their gradients brought from one layout and type to another, those of many layers in one launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dbrdist.core.array.types import Array
from dbrdist.kernels.gpu import cuda_source

if TYPE_CHECKING:
    from dbrdist.core.array.types import DType

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
        made.sources, made.targets = [p.source for p in pieces], [p.target for p in pieces]
        count, table = len(pieces), made["pieces"]
        made["count"] = count
        table["source"][:count] = [a.data.ptr for a in made.sources]
        table["target"][:count] = [a.data.ptr for a in made.targets]
        table["first"][1:count] = np.cumsum([a.size for a in made.targets[:-1]])
        for k, name in enumerate(("inputs", "places", "width")):
            table[name][:count] = [p.numbers[k] for p in pieces]
        return made

    @property
    def numbers(self) -> bytes:
        """What is in it besides addresses."""
        plain = np.array(self)
        plain["pieces"]["source"] = plain["pieces"]["target"] = 0
        return plain.tobytes()


@functools.cache
def to_plain(device: int, source: DType, target: DType) -> Callable[[list[FilterPiece]], None]:
    """A function that brings (O, K, P) in the type ``source`` to (O, I, K) in the type ``target``, on a device."""
    run = cuda_source.kernel("layout", "all_to_plain", source, target)

    def write(pieces: list[FilterPiece]) -> None:
        for start in range(0, len(pieces), _MOST):
            some = pieces[start : start + _MOST]
            size = sum(p.target.size for p in some)
            run(*cuda_source.over(size), (FilterPieces.of(some), size))

    return write
