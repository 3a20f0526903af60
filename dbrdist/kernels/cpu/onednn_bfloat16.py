"""Products of float32 arrays with operands rounded to bfloat16: ``config.float32_products = "bf16"``.

Products and convolutions round their operands, and add up in float32. They take half of the time on a processor that
multiplies bfloat16 with AVX-512, and less with AMX. The library's own mode for it, which works with AMX alone, gains a
tenth of that.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.core.array import backend
from dbrdist.core.array.config import config
from dbrdist.core.array.types import DType, HostArray
from dbrdist.errors import UsageWarning
from dbrdist.kernels.cpu import onednn
from dbrdist.kernels.cpu.onednn import Builder
from dbrdist.kernels.cpu.onednn_finite import memory_row

if TYPE_CHECKING:
    from dbrdist.core.array.types import Array

_FLOAT32 = np.dtype(np.float32)


@functools.cache
def bfloat16() -> DType:
    """The type, which a package of its own brings."""
    return backend.as_dtype("bfloat16")


def narrow(a: HostArray) -> HostArray:
    """A float32 array in bfloat16: images channels-last, matrices in rows or columns as they lie."""
    if a.ndim == 4:
        a = backend.channels_last(a)
        new = backend.empty(a.shape, bfloat16(), a)
    else:
        is_turned = a.ndim == 2 and a.flags.f_contiguous and not a.flags.c_contiguous
        a = a if is_turned else np.ascontiguousarray(a)
        new = np.empty_like(a, bfloat16())
    source, target = (memory_row(m.T if m.flags.f_contiguous and m.ndim == 2 else m) for m in (a, new))
    if not a.size:
        return new
    onednn.cached(("narrow", a.size), functools.partial(_build_rounding, a.size)).on(source, target)
    return new


def _build_rounding(size: int) -> Any | None:
    with Builder() as b:
        return b.reorder(b.memory((size,), onednn.F32), b.memory((size,), onednn.BF16))


def also_in_bfloat16(
    planner: Callable[..., Any], *places: int, unless: Callable[..., bool] = lambda *_: False
) -> Callable[..., Any]:
    """A planner that, where the switch says so, gives the plan for the operands at ``places`` in bfloat16.

    Args:
        planner: takes a kernel's arguments, and as ``made`` the type of the result where that is not the operands'.
        unless: of a kernel's arguments: True keeps the plan for float32.
    """

    def plan(*arguments: Any) -> Any:
        if not _is_wanted(arguments, places) or unless(*arguments):
            return planner(*arguments)
        with contextlib.suppress(onednn.Unsupported):
            inner = planner(*_rounded(arguments, places), made=_FLOAT32)
            return lambda *arguments: inner(*_rounded(arguments, places))
        return planner(*arguments)

    return plan


def _is_wanted(arguments: tuple[Any, ...], places: tuple[int, ...]) -> bool:
    if config.float32_products != "bf16":
        return False
    if any(type(arguments[i]) is not np.ndarray or arguments[i].dtype != _FLOAT32 for i in places):
        return False
    try:
        has_gain = onednn.has_bfloat16()
    except onednn.Unavailable:
        _say_once("oneDNN is not available")
        raise
    if not has_gain:
        _say_once("this processor has no instructions for bfloat16 (those of AVX-512 or AMX)")
    return has_gain


@functools.cache
def _say_once(reason: str) -> None:
    words = f'config.float32_products = "bf16" has no effect here, and products are computed in float32: {reason}'
    warnings.warn(words, UsageWarning, stacklevel=2)


def _rounded(arguments: tuple[Any, ...], places: tuple[int, ...]) -> list[Array]:
    return [narrow(a) if i in places else a for i, a in enumerate(arguments)]
