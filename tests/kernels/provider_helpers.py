"""The providers of kernels, and arrays that lie in memory as they may be asked to."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dbrdist import kernels
from dbrdist.core.array import backend
from dbrdist.kernels import table
from dbrdist.kernels.cpu import onednn

try:
    onednn.library()
    HAS_ONEDNN = True
except onednn.Unavailable:
    HAS_ONEDNN = False


needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason="oneDNN is not installed")
PROVIDERS = ["numpy", pytest.param("onednn", marks=needs_onednn)]
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 2e-3}


def laid_out(a, layout):
    """The same numbers in another memory layout."""
    if layout == "channels_last":
        return backend.channels_last(a)
    if layout == "nchw":
        return np.ascontiguousarray(a)
    if layout == "sliced":
        wide = np.zeros((*a.shape[:-1], 2 * a.shape[-1] + 1), a.dtype)
        wide[..., 1::2] = a
        return wide[..., 1::2]
    return np.ascontiguousarray(a[::-1])[::-1]


def draw(seed, shape, dtype="float32"):
    a = np.random.default_rng(seed).standard_normal(shape)
    return a.astype(backend.as_dtype(dtype))


POINT = kernels.ConvGeometry()
IMAGE, WEIGHTS = backend.channels_last(np.ones((1, 8, 4, 4), "f")), np.ones((6, 8, 3, 3), "f")


def serves(x=IMAGE, W=WEIGHTS, g=POINT, gy_dtype="f"):
    """Who takes the three directions."""
    y_shape = (x.shape[0], W.shape[0], *g.out_hw(*x.shape[2:], *W.shape[2:]))
    gy = backend.channels_last(np.ones(y_shape, gy_dtype))
    return [
        kernels.provider_of("conv_forward", x, W, None, g),
        kernels.provider_of("conv_backward_data", gy, W, x.shape, g),
        kernels.provider_of("conv_backward_weight", x, gy, W.shape, g, W.dtype, None),
    ]


def memory_of(run: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that stay after the first call of ``run``, whose result is dropped, and those at its peak."""
    table.forget()
    for role in ("weights", "scratchpad", "sum"):  # one of each for all plans
        onednn.scratch(role, 1 << 20)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        run()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return after - before, peak - before
