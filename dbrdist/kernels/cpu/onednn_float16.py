"""16 bits by way of float32, where oneDNN has no fast convolution or product of its own for them.

It has none for float16 on most processors, and for bfloat16 only where the processor has instructions for it: without
them its kernels take up to 2.6 times as long as those of float32.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from dbrdist.core.array.types import DType, HostArray
from dbrdist.errors import UsageWarning
from dbrdist.kernels.cpu import onednn
from dbrdist.kernels.cpu.onednn_bfloat16 import narrow

_FLOAT16, _FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)


def _widened_type(arguments: tuple[Any, ...]) -> DType | None:
    """The type that is served as float32, or None."""
    if type(arguments[0]) is not np.ndarray:
        return None
    if arguments[0].dtype == _FLOAT16:
        return _FLOAT16
    narrow = [a.dtype for a in arguments[:2] if isinstance(a, np.ndarray) and a.dtype.name == "bfloat16"]
    return narrow[0] if narrow and not onednn.has_bfloat16() else None


@functools.cache
def _say_that_it_takes_longer() -> None:
    words = (
        "bfloat16 takes longer than float32 on this processor, 1.3 to 1.7 times for a ResNet: it has no AVX-512; "
        "use float32 here, unless it is the memory that counts"
    )
    warnings.warn(words, UsageWarning, stacklevel=2)


def _narrower(dtype: DType) -> Callable[[HostArray], HostArray]:
    """What rounds float32 to ``dtype``; to bfloat16 in a fifth of NumPy's time, where the library has code for it."""
    if dtype != _FLOAT16 and onednn.has_avx512():
        return narrow
    return lambda y: y.astype(dtype)


def _wide(arguments: tuple[Any, ...], dtype: DType) -> list[Any]:
    """Arrays of a type, and the type, as float32, everything else as it is."""
    wide = [a.astype(_FLOAT32) if isinstance(a, np.ndarray) and a.dtype == dtype else a for a in arguments]
    return [_FLOAT32 if isinstance(a, np.dtype) and a == dtype else a for a in wide]


def also_float16(planner: Callable[..., Any], out: int | None = None) -> Callable[..., Any]:
    """A planner that serves 16 bits with the plan for float32, where that is meant; ``out`` is the index of an array to
    write into.
    """

    def plan(*arguments: Any, **how: DType) -> Any:
        dtype = _widened_type(arguments)
        if dtype is None:
            return planner(*arguments, **how)
        if dtype != _FLOAT16 and not onednn.has_avx512():
            _say_that_it_takes_longer()
        target = None if out is None or len(arguments) <= out else arguments[out]
        if target is not None and target.dtype == dtype:
            raise onednn.Unsupported("16 bits to write into")
        inner, narrowed = planner(*_wide(arguments, dtype)), _narrower(dtype)
        is_narrow = target is None and all(a == dtype for a in (arguments[0].dtype, *_types_in(arguments)))

        def run(*arguments: Any) -> Any:
            y = inner(*_wide(arguments, dtype))
            return narrowed(y) if is_narrow else y

        return run

    return plan


def _types_in(arguments: tuple[Any, ...]) -> list[DType]:
    return [a for a in arguments if isinstance(a, np.dtype)]
