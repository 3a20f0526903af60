"""Which provider serves a kernel: asked once per kernel, type, shape and geometry, and remembered.

``onednn`` takes float32 and bfloat16 on the CPU where the library is there and has an implementation; ``numpy`` takes
the rest: every float type, every device, every geometry. What a forward kernel returns as ``saved`` names its provider,
and its backward runs there.
"""

from __future__ import annotations

import contextlib
import os
import platform
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
from numpy import ndarray

from dbrdist.core import backend
from dbrdist.core.backend import number
from dbrdist.kernels import numpy_, onednn, onednn_ops
from dbrdist.kernels.geometry import ConvGeometry, PoolGeometry

Array = Any

_NAMES = {"numpy": numpy_, "onednn": onednn_ops}
_MEMORY = 4096  # choices; a program whose shapes never repeat must not fill the memory
_SMALL = 1024  # elements up to which an elementwise kernel is one call of NumPy
_SPATIAL = (0, 2, 3)
_maximum, _sign = np.maximum, np.sign
_chosen: dict[Any, ModuleType] = {}
_forced: ModuleType | None = None
_warned = False
_LIGHT = ("elementwise", "matmul")  # NumPy's own code is not much slower


def _provider(kernel: str, x: Array, geometry: Any = None) -> ModuleType:
    key = (kernel, x.shape, x.dtype, geometry, type(x))
    provider = _chosen.get(key)
    if provider is None:
        provider = _choose(kernel, x, geometry)
        _remember(key, provider)
    return provider


def _remember(key: Any, provider: ModuleType) -> None:
    if len(_chosen) >= _MEMORY:
        _chosen.clear()
    _chosen[key] = provider


def _choose(kernel: str, x: Array, geometry: Any) -> ModuleType:
    if _forced is numpy_ or not onednn_ops.serves(kernel, x, geometry):
        return numpy_
    try:
        onednn.library()
    except onednn.Unavailable as e:
        if kernel not in _LIGHT:
            _warn(str(e))
        return numpy_
    return onednn_ops


def _warn(reason: str) -> None:
    """Say once what the missing library costs, where it could be installed."""
    global _warned
    if _warned or not (platform.system() == "Linux" and platform.machine() == "x86_64"):
        return
    _warned = True
    warnings.warn(
        f"oneDNN is not available ({reason}), so NumPy computes convolutions, pooling and batch normalization, 2 to 10 "
        f"times slower; install the package onednn-cpu-gomp, or name a libdnnl.so.3 in {onednn.ENVIRONMENT_VARIABLE}",
        RuntimeWarning,
        stacklevel=2,
    )


def _run(kernel: str, function: str, x: Array, geometry: Any, *arguments: Any) -> tuple[ModuleType, Any]:
    """Call ``function`` of the provider of ``kernel``; where it declines, NumPy serves now and from now on."""
    provider = _provider(kernel, x, geometry)
    try:
        return provider, getattr(provider, function)(*arguments)
    except onednn.Unsupported:
        _remember((kernel, x.shape, x.dtype, geometry, type(x)), numpy_)
        return numpy_, getattr(numpy_, function)(*arguments)


@contextlib.contextmanager
def use(name: str) -> Iterator[None]:
    """Let the provider ``name`` serve all threads where it can, for comparisons: ``'numpy'`` or ``'onednn'``."""
    global _forced
    if name not in _NAMES:
        raise ValueError(f"expected a provider out of {sorted(_NAMES)}, got {name!r}")
    before = _forced
    _forced = _NAMES[name]
    _chosen.clear()
    try:
        yield
    finally:
        _forced = before
        _chosen.clear()


def provider_of(kernel: str, x: Any, geometry: Any = None) -> str:
    """Name of the provider of ``kernel``: 'conv', 'bn', 'pool', 'matmul' or 'elementwise', for arrays like ``x``.

    ``x`` is an array, or a type, which stands for a large batch on the CPU. ``geometry`` is a ConvGeometry, a
    PoolGeometry, for 'bn' the axes, for 'matmul' the other's shape and type; by default the commonest. Where oneDNN
    turns out not to have an implementation, the answer changes with the first call.
    """
    if not backend.is_array(x):
        shape = [256, 256] if kernel == "matmul" else [8, 64, 32, 32]
        x = np.broadcast_to(np.zeros((), backend.as_dtype(x)), shape)
    if geometry is None:
        usual = {
            "conv": ConvGeometry(),
            "bn": _SPATIAL if x.ndim == 4 else (0,),
            "pool": PoolGeometry("max", 2, 2, 2, 2),
            "matmul": (x.shape[::-1], x.dtype),
        }
        geometry = usual.get(kernel)
    provider = _provider(kernel, x, geometry)
    return next(name for name, module in _NAMES.items() if module is provider)


def _forget() -> None:
    _chosen.clear()


os.register_at_fork(after_in_child=_forget)


# ---- the interface


def conv_forward(x: Array, W: Array, b: Array | None, geometry: ConvGeometry) -> Array:
    """2-d convolution of x (N, C, H, W) with W (O, C/G, kh, kw) and bias b (O) or None: (N, O, OH, OW)."""
    return _run("conv", "conv_forward", x, geometry, x, W, b, geometry)[1]


def conv_backward_data(gy: Array, W: Array, x_shape: tuple[int, ...], geometry: ConvGeometry) -> Array:
    """Gradient of x, of shape ``x_shape``; as a forward operation, the transposed convolution."""
    return _run("conv", "conv_backward_data", gy, geometry, gy, W, tuple(x_shape), geometry)[1]


def conv_backward_weight(
    x: Array, gy: Array, W_shape: tuple[int, ...], geometry: ConvGeometry, dtype: Any = None, out: Array | None = None
) -> Array:
    """Gradient of W in plain OIHW memory: into ``out`` (any shape of that size, C order) where given."""
    dtype = x.dtype if dtype is None else dtype
    target = None if out is None else out.reshape(W_shape)
    gW = _run("conv", "conv_backward_weight", x, geometry, x, gy, tuple(W_shape), geometry, dtype, target)[1]
    return gW if out is None else out


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """a (M, K) times b (K, N), of one type, in any layout; ``out`` (M, N) may be of a wider type.

    oneDNN has kernels for processors on which NumPy's OpenBLAS falls back to older instructions: on a Zen 5 it does
    230 GFLOP/s where NumPy does 120. bfloat16, which NumPy multiplies by way of float32, gains most.
    """
    return _run("matmul", "matmul", a, (b.shape, b.dtype), a, b, out)[1]


def bn_forward(
    x: Array, gamma: Array, beta: Array, eps: float, relu: bool = False, axis: tuple[int, ...] = _SPATIAL
) -> tuple[Array, Array, Array, Any]:
    """Batch normalization over ``axis``, followed by a ReLU where asked: y, mean, biased variance, saved.

    Statistics have the shape of gamma (the axes that are kept) and the accumulation type of x.
    """
    provider, (y, mean, var, saved) = _run("bn", "bn_forward", x, axis, x, gamma, beta, eps, axis, relu)
    return y, mean, var, (provider, saved)


def bn_inference(
    x: Array, gamma: Array, beta: Array, mean: Array, var: Array, eps: float, relu: bool = False,
    axis: tuple[int, ...] = _SPATIAL,
) -> Array:  # fmt: skip
    """Normalization with given statistics, followed by a ReLU where asked."""
    return _run("bn", "bn_inference", x, axis, x, gamma, beta, mean, var, eps, axis, relu)[1]


def bn_backward(
    x: Array, gamma: Array, mean: Array, var: Array, gy: Array, eps: float, saved: Any, relu: bool = False,
    axis: tuple[int, ...] = _SPATIAL, out_gamma: Array | None = None, out_beta: Array | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Gradients of x, gamma, beta. ``relu``: gy belongs to the rectified output of a forward that ran with a ReLU.

    Without ``relu``, gy belongs to the normalization's own output, whichever way forward ran.
    """
    provider, inner = saved
    return provider.bn_backward(x, gamma, mean, var, gy, eps, inner, axis, relu, out_gamma, out_beta)


def pool_forward(x: Array, geometry: PoolGeometry) -> tuple[Array, Any]:
    """Maximum or average over windows: y and saved."""
    provider, (y, saved) = _run("pool", "pool_forward", x, geometry, x, geometry)
    return y, (provider, saved)


def pool_backward(gy: Array, x_shape: tuple[int, ...], saved: Any, geometry: PoolGeometry) -> Array:
    """Gradient of x, of shape ``x_shape``."""
    provider, inner = saved
    return provider.pool_backward(gy, tuple(x_shape), inner, geometry)


def pool_indices(saved: Any, y_shape: tuple[int, ...], geometry: PoolGeometry) -> Array:
    """For a maximum: where in its window each output lies, u * kw + v, as int32 of shape ``y_shape``."""
    provider, inner = saved
    return provider.pool_indices(inner, tuple(y_shape), geometry)


def pool_gather(x: Array, indices: Array, geometry: PoolGeometry) -> Array:
    """The elements of x that the windows' maxima ``indices`` point to, for second derivatives."""
    return numpy_.pool_gather(x, indices, geometry)


def relu_forward(x: Array) -> Array:
    """max(x, 0)."""
    if type(x) is ndarray and x.size <= _SMALL and x.ndim != 4:  # the way through here would cost more
        return _maximum(x, number(0.0, x.dtype))
    return _provider("elementwise", x).relu_forward(x)


def relu_backward(y: Array, gy: Array) -> Array:
    """gy where y > 0, else 0; y is the output of the ReLU."""
    if type(gy) is ndarray and gy.size <= _SMALL and gy.ndim != 4:
        return gy * _sign(y)  # a third of the time of gy * (y > 0), which converts bool
    return _provider("elementwise", y).relu_backward(y, gy)


def add(a: Array, b: Array) -> Array:
    """a + b for equal shapes and types, such as two gradients of one array."""
    return _provider("elementwise", a).add(a, b)


def add_relu(a: Array, b: Array, out: Array | None = None) -> Array:
    """max(a + b, 0) for equal shapes and types; ``out`` may be a or b."""
    return _provider("elementwise", a).add_relu(a, b, out)
