"""float16 by way of float32: oneDNN has no fast convolution or product of its own for it on most processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dbrdist.kernels.cpu import onednn

_FLOAT16, _FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)


def _wide(a: Any) -> Any:
    """float16 arrays and types as float32, everything else as it is."""
    if isinstance(a, np.ndarray):
        return a.astype(_FLOAT32) if a.dtype == _FLOAT16 else a
    return _FLOAT32 if isinstance(a, np.dtype) and a == _FLOAT16 else a


def also_float16(planner: Callable[..., Any], out: int | None = None) -> Callable[..., Any]:
    """A planner that serves float16 with the plan for float32; ``out`` is the index of an array to write into."""

    def plan(*arguments: Any) -> Any:
        if type(arguments[0]) is not np.ndarray or arguments[0].dtype != _FLOAT16:
            return planner(*arguments)
        target = None if out is None or len(arguments) <= out else arguments[out]
        if target is not None and target.dtype == _FLOAT16:
            raise onednn.Unsupported("float16 to write into")
        inner = planner(*map(_wide, arguments))
        is_narrow = target is None and all(a == _FLOAT16 for a in arguments if isinstance(a, np.dtype))

        def run(*arguments: Any) -> Any:
            y = inner(*map(_wide, arguments))
            return y.astype(_FLOAT16) if is_narrow else y

        return run

    return plan
