"""Layer normalization on oneDNN: the rows of a matrix."""

from __future__ import annotations

from ctypes import c_float
from typing import Any

import numpy as np

from dbrdist.core.array import backend
from dbrdist.core.array.types import DType, HostArray
from dbrdist.kernels.cpu import onednn
from dbrdist.kernels.cpu.onednn import Builder, Primitive, address, cached
from dbrdist.kernels.reference import numpy_normalization
from dbrdist.kernels.reference.numpy_normalization import coarse_from, is_coarse

_FLAGS = onednn.USE_SCALE | onednn.USE_SHIFT
_LONG = 1 << 14  # elements of a row; oneDNN adds them one after another, and the mean of fewer loses little


def _build_forward(shape: tuple[int, ...], dtype: DType, eps: float) -> Primitive:
    with Builder() as b:
        x, statistics, scale = _memories(b, shape, dtype)
        description = _describe(b, x, statistics, eps)
        memories = {
            onednn.SRC: x, onednn.SCALE: scale, onednn.SHIFT: scale, onednn.MEAN: statistics,
            onednn.VARIANCE: statistics, onednn.DST: x,
        }  # fmt: skip
        return b.primitive(description, memories)


def _memories(b: Builder, shape: tuple[int, ...], dtype: DType) -> tuple[Any, Any, Any]:
    """Descriptors of the matrix, the statistics of its rows, and a vector beside a row."""
    return b.memory(shape, onednn.data_type(dtype)), b.memory(shape[:1], onednn.F32), b.memory(shape[1:], onednn.F32)


def _describe(b: Builder, x: Any, statistics: Any, eps: float) -> Any:
    return b.describe(
        "layer_normalization_forward", onednn.FORWARD_TRAINING, x, x, statistics, c_float(eps), _FLAGS, b.attributes()
    )


def _build_backward(shape: tuple[int, ...], dtype: DType, eps: float) -> Primitive:
    with Builder() as b:
        x, statistics, scale = _memories(b, shape, dtype)
        description = b.describe(
            "layer_normalization_backward", onednn.BACKWARD, x, x, x, statistics, c_float(eps), _FLAGS,
            _describe(b, x, statistics, eps), b.attributes(),
        )  # fmt: skip
        memories = {
            onednn.SRC: x, onednn.DIFF_DST: x, onednn.SCALE: scale, onednn.SHIFT: scale, onednn.MEAN: statistics,
            onednn.VARIANCE: statistics, onednn.DIFF_SRC: x, onednn.DIFF_SCALE: scale, onednn.DIFF_SHIFT: scale,
        }  # fmt: skip
        return b.primitive(description, memories)


def _f32(a: HostArray) -> HostArray:
    return np.ascontiguousarray(a, np.float32)


def ln_forward(x: HostArray, gamma: HostArray, beta: HostArray, eps: float) -> tuple[HostArray, HostArray, HostArray]:
    """See numpy_normalization.ln_forward."""
    x, gamma, beta = np.ascontiguousarray(x), _f32(gamma), _f32(beta)
    primitive = cached(("ln_forward", x.shape, x.dtype, eps), lambda: _build_forward(x.shape, x.dtype, eps))
    y, (mean, var) = backend.empty(x.shape, x.dtype, x), np.empty((2, len(x)), np.float32)
    primitive(*[address(a) for a in (x, gamma, beta, mean, var, y)])
    if x.shape[1] >= _LONG and is_coarse(mean, var, eps, coarse_from(x.shape[1])):
        return numpy_normalization.ln_forward(x, gamma, beta, eps)  # which adds in pairs
    return y, mean, var


def ln_backward(
    x: HostArray, gamma: HostArray, mean: HostArray, var: HostArray, gy: HostArray, eps: float,
) -> tuple[HostArray, HostArray, HostArray]:  # fmt: skip
    """See numpy_normalization.ln_backward."""
    x, gy, scale = np.ascontiguousarray(x), np.ascontiguousarray(gy), _f32(gamma)
    primitive = cached(("ln_backward", x.shape, x.dtype, eps), lambda: _build_backward(x.shape, x.dtype, eps))
    gx, ggamma, gbeta = backend.empty(x.shape, x.dtype, x), *(np.empty(x.shape[1], np.float32) for _ in range(2))
    primitive(*[address(a) for a in (x, gy, scale, scale, mean, var, gx, ggamma, gbeta)])  # the shift is not read
    return gx, ggamma.astype(gamma.dtype, copy=False), gbeta.astype(gamma.dtype, copy=False)


def _plan_forward(x: HostArray, gamma: HostArray, beta: HostArray, eps: float) -> Any:
    onednn.require(x)
    _build_forward(x.shape, x.dtype, eps)
    return ln_forward


def _plan_backward(x: HostArray, gamma: HostArray, mean: HostArray, var: HostArray, gy: HostArray, eps: float) -> Any:
    onednn.require(x, gy)
    if mean.dtype != np.float32 or var.dtype != np.float32:
        raise onednn.Unsupported(f"statistics of {mean.dtype}")
    _build_backward(x.shape, x.dtype, eps)
    return ln_backward


ROWS = {"ln_forward": _plan_forward, "ln_backward": _plan_backward}
