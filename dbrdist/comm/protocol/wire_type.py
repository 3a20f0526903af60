"""The type in which gradients are sent between ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from dbrdist.comm.protocol.gate import Passage
from dbrdist.comm.transport import message
from dbrdist.core.array.backend import Array, get_array_module, on, to_cpu
from dbrdist.core.array.types import DType, HostArray


class ArrayReducer(Protocol):
    """What adds arrays over ranks."""

    def reduce_in(
        self, call: Passage, codec: Codec, x: Array, factors: Sequence[float] | None, divisor: float | None
    ) -> None:
        """Replace ``x`` by ``sum(factors[k] * x of rank k) / divisor``, sent as ``codec`` says."""

    def reduce_scatter(
        self, call: Passage, x: Array, borders: Sequence[int], factors: Sequence[float] | None, divisor: float | None
    ) -> None:
        """The same for the elements borders[r] to borders[r + 1] on rank r alone."""


class Codec:
    """In their own type."""

    def prepare(self, call: Passage, grads: Sequence[Array], growth: float) -> None:
        """What ranks agree on before the bytes of these 1-d arrays move.

        Args:
            call: the verb in which they do.
            grads: the arrays.
            growth: how many times this rank's largest element a sent value can be, 1 for means.
        """

    def wire_dtype(self, dtype: DType) -> DType:
        """The type in which elements of this one are sent."""
        return dtype

    def encode(self, x: HostArray) -> HostArray:
        """``x`` as it is sent: itself where that is its own type."""
        return x

    def decode(self, came: HostArray, x: HostArray) -> None:
        """Put into ``x`` what was sent in another type."""
        x[...] = came

    def carry(self, grad: Array, add: Callable[[Any], None]) -> None:
        """Have ``add`` replace a 1-d array by a sum over ranks."""
        host = to_cpu(grad)
        travelling = self.encode(host)
        if travelling is host:
            add(grad)
            return
        add(travelling)
        self.decode(travelling, host)
        if host is not grad:
            with on(grad):
                grad[...] = message.to_place(host, grad)

    def reduce(
        self,
        reducer: ArrayReducer,
        call: Passage,
        grad: Array,
        factors: Sequence[float] | None,
        divisor: float | None,
        borders: Sequence[int] | None = None,
    ) -> None:
        """Replace ``grad`` by ``sum(factors[k] * grad of rank k) / divisor``.

        With ``borders`` rank r gets the elements borders[r] to borders[r + 1] alone; the others have no meaning then.
        """
        if borders is None:
            reducer.reduce_in(call, self, grad, factors, divisor)
        else:
            self.carry(grad, lambda x: reducer.reduce_scatter(call, x, borders, factors, divisor))


class Narrowed(Codec):
    """In another type, such as bfloat16; gradients of that type as they are."""

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype
        self.scale = 1.0

    def wire_dtype(self, dtype: DType) -> DType:
        return self.dtype

    def encode(self, x: HostArray) -> HostArray:
        if x.dtype == self.dtype:
            return x
        numbers: Any = x
        sent: HostArray = (numbers if self.scale == 1.0 else numbers * x.dtype.type(self.scale)).astype(self.dtype)
        return sent

    def decode(self, came: HostArray, x: HostArray) -> None:
        x[...] = came
        if self.scale != 1.0:
            np.multiply(x, x.dtype.type(1 / self.scale), out=x)  # a power of two: the same bits as a division


class Scaled(Narrowed):
    """In a type of few orders of magnitude, such as float16: multiplied by a power of two on which the ranks agree.

    It brings the largest result that there can be near the largest number of the type. Without it 70000 becomes
    infinite in float16, and 1e-8 zero.
    """

    def prepare(self, call: Passage, grads: Sequence[Array], growth: float) -> None:
        mine = max((_largest_magnitude(g) for g in grads if g.size), default=0.0)
        word = np.array([mine * max(growth, 1.0)], np.float64).view(np.int64)
        self.fit(float(call.agree(word)[:, :1].copy().view(np.float64).max()))

    def fit(self, largest: float) -> None:
        """Choose the power of two for numbers up to this one."""
        self.scale = 1.0
        if 0 < largest < math.inf:
            exponent = math.floor(math.log2(largest_number(self.dtype))) - 1 - math.floor(math.log2(largest))
            self.scale = 2.0 ** min(exponent, 120)


def round_to(dtype: DType, arrays: Sequence[Any]) -> None:
    """Round 1-d arrays to a narrow type, in place, as if they were sent in it alone.

    For types of few orders of magnitude they are multiplied by one power of two meanwhile, which follows from the
    largest element of all of them.
    """
    codec = codec_for(dtype)
    if isinstance(codec, Scaled):
        codec.fit(max((_largest_magnitude(a) for a in arrays if a.size), default=0.0))
    if isinstance(codec, Narrowed):
        for a in arrays:
            if a.dtype.itemsize > 2:
                codec.decode(codec.encode(a), a)


def growth(size: int, factors: Sequence[float] | None, divisor: float | None, ranks: Sequence[int] = ()) -> float:
    """How many times the largest element the result of ``size`` ranks can be, or the sum of ``ranks`` before it."""
    of_all = size if factors is None else sum(factors)
    of_some = len(ranks) if factors is None else sum(factors[rank] for rank in ranks)
    return float(max(of_all / (divisor or 1.0), of_some))


def codec_for(dtype: DType | None) -> Codec:
    """The codec of the configuration entry ``allreduce_grad_dtype``."""
    if dtype is None:
        return Codec()
    return Scaled(dtype) if dtype.itemsize < 4 and dtype.name != "bfloat16" else Narrowed(dtype)


def _largest_magnitude(x: Array) -> float:
    """Without an array of magnitudes beside it. Not a number if one is there."""
    with on(x):
        return float(get_array_module(x).maximum(x.max(), -x.min()))


def largest_number(dtype: Any) -> float:
    """The largest finite number of a type of floating-point numbers."""
    if issubclass(dtype.type, np.floating):
        return float(np.finfo(dtype).max)
    import ml_dtypes  # at its first use, as everywhere

    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
