"""Work with GPUs through CuPy, under Chainer's names. CuPy is loaded when it is first needed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from dbrdist.core.array import backend
from dbrdist.core.array.backend import Array, GpuDevice, get_array_module
from dbrdist.core.array.backend import get_device as _device_of_spec
from dbrdist.core.array.config import config
from dbrdist.core.names.missing_names import error as _error

if TYPE_CHECKING:
    from dbrdist.core.array.backend import DeviceSpec

__all__ = [
    "DummyDevice",
    "DummyDeviceType",
    "GpuDevice",
    "check_cuda_available",
    "clear_memo",
    "copy",
    "elementwise",
    "fuse",
    "get_array_module",
    "get_device",
    "get_device_from_array",
    "get_device_from_id",
    "memoize",
    "raw",
    "reduce",
    "should_use_cudnn",
    "should_use_cudnn_tensor_core",
    "to_cpu",
    "to_gpu",
]


@functools.cache
def _is_available() -> bool:
    if "cupy" not in sys.modules and importlib.util.find_spec("cupy") is None:  # a stand-in has no spec
        return False
    try:
        return bool(backend.import_cupy().cuda.runtime.getDeviceCount() > 0)
    except Exception:  # no driver, no library: CuPy raises errors of its own
        return False


def __getattr__(name: str) -> Any:
    if name == "available":
        return _is_available()
    if name == "cudnn_enabled":
        return _is_available() and config.use_cudnn != "never"
    if name in ("cupy", "cupyx"):
        return _cupy(name)
    if name in ("ndarray", "Event", "Stream", "Device"):
        if not _is_available():
            return {"ndarray": _NoArray, "Device": DummyDeviceType}.get(name, _NoStream)
        cupy = backend.import_cupy()
        return cupy.ndarray if name == "ndarray" else getattr(cupy.cuda, name)
    raise _error(__name__, name)


class _NoCupy:
    """What ``cuda.cupy`` is where CuPy is not installed, so that programs can write ``xp is cuda.cupy``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        name = f"{self._name}.{attribute}"
        if attribute.startswith("__"):  # asked for by Python itself
            raise AttributeError(name)
        raise AttributeError(
            f"{name}: CuPy is not installed; install dbrdist[cuda12x] or dbrdist[cuda13x] on a machine with an NVIDIA "
            "GPU, or take the functions of the array's own module, `xp = chainer.get_array_module(x)`"
        )

    def __repr__(self) -> str:
        return f"<no {self._name}>"


@functools.cache
def _cupy(name: str) -> Any:
    """The module ``cupy`` or ``cupyx``, or what stands for it."""
    try:
        backend.import_cupy()
        return importlib.import_module(name)
    except ImportError:
        return _NoCupy(name)


class _NoArray:
    """What ``cuda.ndarray`` is where there is no GPU: no object is one of them."""


class _NoStream:
    """What ``cuda.Stream`` is where there is no GPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_cuda_available()


def check_cuda_available() -> None:
    """Raise RuntimeError where no GPU can be used."""
    if not _is_available():
        raise RuntimeError(
            "no GPU or no CuPy was found; install dbrdist[cuda12x] or dbrdist[cuda13x] on a machine with an NVIDIA "
            f"GPU, or choose the device -1 (CPU): {backend.why_no_gpu() or 'CuPy finds no GPU'}"
        )


class DummyDeviceType(contextlib.AbstractContextManager["DummyDeviceType"]):
    """Stands for the CPU where code asks for the device of an array."""

    id = -1

    def __int__(self) -> int:
        return -1

    def __exit__(self, *exc: object) -> None:
        pass

    def use(self) -> None:
        """Nothing to do."""

    def synchronize(self) -> None:
        """Nothing to do."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DummyDeviceType)

    def __hash__(self) -> int:
        return -1


DummyDevice = DummyDeviceType()


def get_device_from_id(device_id: int | None) -> DummyDeviceType:
    """CuPy's device with this number; :data:`DummyDevice` for None and negative numbers."""
    if device_id is None or device_id < 0:
        return DummyDevice
    check_cuda_available()
    return backend.import_cupy().cuda.Device(int(device_id))


def get_device(*args: int) -> Any:
    """CuPy's device of the first GPU number, device or array of a GPU; :data:`DummyDevice` where there is none.

    Deprecated: take :func:`get_device_from_id` or :func:`get_device_from_array`.
    """
    warnings.warn(
        "cuda.get_device is deprecated; use get_device_from_id or get_device_from_array",
        DeprecationWarning,
        stacklevel=2,
    )
    for a in args:
        if isinstance(a, (int, np.integer)) and not isinstance(a, bool):
            return get_device_from_id(int(a))
        if isinstance(a, GpuDevice):
            return a.device
        if backend.is_array(a) and not isinstance(a, np.ndarray):
            return a.device
        if _is_available() and isinstance(a, backend.import_cupy().cuda.Device):
            return a
    return DummyDevice


def get_device_from_array(*arrays: Any) -> Any:
    """CuPy's device of the first array that is on a GPU; :data:`DummyDevice` where none is."""
    for a in arrays:
        a = getattr(a, "array", a)
        if get_array_module(a) is not np:
            return a.device
    return DummyDevice


def to_gpu(array: Any, device: Any = None, stream: Any = None) -> Any:
    """An array, or nested tuples, lists and dictionaries of arrays, on a GPU: the current one, or ``device``."""
    check_cuda_available()
    if device is None:
        device = backend.import_cupy().cuda.runtime.getDevice()
    return _device_of_spec(getattr(device, "id", device)).send(array)


def to_cpu(array: Any, stream: Any = None) -> Any:
    """An array, or nested tuples, lists and dictionaries of arrays, in host memory."""
    return _device_of_spec("@numpy").send(array)


def copy(array: Array, out: Array | None = None, out_device: DeviceSpec | None = None, stream: Any = None) -> Array:
    """A copy of an array on a GPU, on ``out_device`` or in ``out``."""
    check_cuda_available()
    if out is not None:
        out[...] = to_gpu(array, out.device)
        return out
    copied = to_gpu(array, out_device)
    return copied.copy() if copied is array else copied


def memoize(for_each_device: bool = False) -> Callable[[Any], Any]:
    """A decorator that keeps a function's results: CuPy's, or a plain one where there is no GPU."""
    if _is_available():
        decorator: Callable[[Any], Any] = backend.import_cupy().memoize(for_each_device)
        return decorator
    return functools.cache


def clear_memo() -> None:
    """Forget what CuPy's :func:`memoize` keeps."""
    if _is_available():
        backend.import_cupy().clear_memo()


def elementwise(in_params: str, out_params: str, operation: str, name: str, **kwargs: Any) -> Any:
    """CuPy's ElementwiseKernel, kept for the next call."""
    check_cuda_available()
    return _kernel("ElementwiseKernel", in_params, out_params, operation, name, **kwargs)


def reduce(
    in_params: str, out_params: str, map_expr: str, reduce_expr: str, post_map_expr: str, identity: Any, name: str,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """CuPy's ReductionKernel, kept for the next call."""
    check_cuda_available()
    return _kernel(
        "ReductionKernel", in_params, out_params, map_expr, reduce_expr, post_map_expr, identity, name, **kwargs
    )


def raw(code: str, name: str, *args: Any, **kwargs: Any) -> Any:
    """CuPy's RawKernel, kept for the next call."""
    check_cuda_available()
    return _kernel("RawKernel", code, name, *args, **kwargs)


@functools.cache
def _kernel(kind: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(backend.import_cupy(), kind)(*args, **kwargs)


def fuse(*args: Any, **kwargs: Any) -> Any:
    """CuPy's ``fuse``; where there is no GPU the function stays as it is."""
    if _is_available():
        return backend.import_cupy().fuse(*args, **kwargs)
    return args[0] if args and callable(args[0]) else lambda function: function


def should_use_cudnn(level: str, lowest_version: int = 0) -> bool:
    """Whether cuDNN may serve, by ``config.use_cudnn`` (``'always'``, ``'auto'`` or ``'never'``)."""
    if level not in ("==always", ">=auto"):
        raise ValueError(f"should_use_cudnn: level: expected '==always' or '>=auto', got {level!r}")
    allowed = ("always",) if level == "==always" else ("always", "auto")
    return _is_available() and config.use_cudnn in allowed


def should_use_cudnn_tensor_core(dtype: DTypeLike) -> bool:
    """Whether tensor cores may serve for a type, by ``config.use_cudnn_tensor_core``."""
    use = config.use_cudnn_tensor_core
    return _is_available() and (use == "always" or (use == "auto" and np.dtype(dtype) == np.float16))
