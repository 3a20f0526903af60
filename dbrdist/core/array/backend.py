"""Devices, how arrays get from one to another, and the public names of ``dbrdist.backend``."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.current_device import on as on
from dbrdist.core.array.gpu.presence import bus_id_of_device as bus_id_of_device
from dbrdist.core.array.gpu.presence import import_cupy as import_cupy
from dbrdist.core.array.gpu.presence import import_cupyx_special as import_cupyx_special
from dbrdist.core.array.gpu.presence import import_nccl as import_nccl
from dbrdist.core.array.gpu.presence import num_gpus as num_gpus
from dbrdist.core.array.gpu.presence import require_gpu as require_gpu
from dbrdist.core.array.gpu.presence import why_no_gpu as why_no_gpu
from dbrdist.core.array.gpu.presence import why_no_nccl as why_no_nccl
from dbrdist.core.array.memory import accumulation_dtype as accumulation_dtype
from dbrdist.core.array.memory import address as address
from dbrdist.core.array.memory import aligned as aligned
from dbrdist.core.array.memory import aligned_zeros as aligned_zeros
from dbrdist.core.array.memory import allocator as allocator
from dbrdist.core.array.memory import as_dtype as as_dtype
from dbrdist.core.array.memory import channels_last as channels_last
from dbrdist.core.array.memory import copy as copy
from dbrdist.core.array.memory import copy_as_it_lies as copy_as_it_lies
from dbrdist.core.array.memory import empty as empty
from dbrdist.core.array.memory import empty_as as empty_as
from dbrdist.core.array.memory import fill as fill
from dbrdist.core.array.memory import full as full
from dbrdist.core.array.memory import full_as as full_as
from dbrdist.core.array.memory import get_array_module as get_array_module
from dbrdist.core.array.memory import get_array_types as get_array_types
from dbrdist.core.array.memory import get_cpu_array_types as get_cpu_array_types
from dbrdist.core.array.memory import is_array as is_array
from dbrdist.core.array.memory import is_arrays_compatible as is_arrays_compatible
from dbrdist.core.array.memory import is_channels_last as is_channels_last
from dbrdist.core.array.memory import is_floating as is_floating
from dbrdist.core.array.memory import is_of_own_class as is_of_own_class
from dbrdist.core.array.memory import is_on_gpu as is_on_gpu
from dbrdist.core.array.memory import lies_as_images as lies_as_images
from dbrdist.core.array.memory import number as number
from dbrdist.core.array.memory import place_of as place_of
from dbrdist.core.array.memory import places_of as places_of
from dbrdist.core.array.memory import plain_allocator as plain_allocator
from dbrdist.core.array.memory import tune_heap as tune_heap
from dbrdist.core.array.memory import unwritten as unwritten
from dbrdist.core.array.memory import zeros as zeros
from dbrdist.core.array.memory import zeros_as as zeros_as
from dbrdist.core.array.types import Array as Array
from dbrdist.core.array.types import DType as DType
from dbrdist.core.array.types import HostArray, Module, Number
from dbrdist.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from typing import TypeVar

    from dbrdist.core.array.types import CudaDevice, Raised
    from dbrdist.core.tape.variable import Operand

    Nested: TypeAlias = Operand | Number | Sequence["Nested"] | Mapping[str, "Nested"] | None
    Sent = TypeVar("Sent", bound=Nested)

# ---- devices --------------------------------------------------------------------------------------------------------


class Device:
    """The base of :class:`CpuDevice` and :class:`GpuDevice`, which :func:`get_device` makes."""

    module = ""
    index = 0

    @property
    def name(self) -> str:
        """``@numpy`` or ``@cupy:0``."""
        raise NotImplementedError(f"{type(self).__name__} must define name")

    @property
    def xp(self) -> Module:
        """The array module of this device."""
        raise NotImplementedError(f"{type(self).__name__} must define xp")

    @property
    def supported_array_types(self) -> tuple[type, ...]:
        """The types of arrays that functions of :attr:`xp` take."""
        raise NotImplementedError(f"{type(self).__name__} must define supported_array_types")

    def is_array_supported(self, array: Array) -> bool:
        """True for an array that is on this device."""
        raise NotImplementedError(f"{type(self).__name__} must define is_array_supported(self, array)")

    def __repr__(self) -> str:
        module, colon, index = str(self).removeprefix("@").partition(":")
        return f"<{type(self).__name__} ({module}){colon}{index}>"

    def __str__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __enter__(self) -> None:
        raise RuntimeError(f"a Device is no context; write `with dbrdist.using_device({self.name!r}):`")

    def __exit__(self, *exc: Raised) -> None:
        """Never called."""

    def use(self) -> None:
        """Make this the current device of the thread."""

    def create_context(self) -> AbstractContextManager[Device]:
        """A context in which this is the current device of the thread, as :func:`using_device` makes it."""
        return nullcontext(self)

    def send(self, arrays: Sent) -> Sent:
        """An array, or nested tuples, lists and dictionaries of arrays, on this device; None stays None.

        What stands there twice is sent once.
        """
        return self._send(arrays, {})

    def _send(self, x: Any, sent: dict[int, Array]) -> Any:
        if isinstance(x, (tuple, list)):
            return type(x)([self._send(v, sent) for v in x])
        if isinstance(x, dict):
            return {k: self._send(v, sent) for k, v in x.items()}
        if x is None:
            return None
        if id(x) not in sent:
            sent[id(x)] = self.send_array(x)
        return sent[id(x)]

    def send_array(self, array: Operand | str | Number) -> Array:
        """One array or number on this device: the same array if it is there."""
        if is_array(array):
            return to_device(array, self)
        if np.isscalar(array) and not isinstance(array, (str, bytes)):
            return to_device(np.asarray(array), self)
        raise TypeError(f"expected an array or a number to send to {self.name}, got {type(array).__name__}")


class CpuDevice(Device):
    """Host memory, with NumPy."""

    module = "numpy"
    name = "@numpy"
    xp = np
    supported_array_types = (np.ndarray,)

    @staticmethod
    def from_array(array: Array | Sequence[int]) -> CpuDevice | None:
        """The device of a NumPy array; None for anything else."""
        return CpuDevice() if isinstance(array, np.ndarray) else None

    def is_array_supported(self, array: Array | Sequence[float]) -> bool:
        return isinstance(array, np.ndarray)


_HOST = CpuDevice()


class GpuDevice(Device):
    """A GPU, with CuPy: made from a ``cupy.cuda.Device`` or its number. CuPy is loaded when it is first needed."""

    module = "cupy"

    def __init__(self, device: Any) -> None:
        self.index = int(getattr(device, "id", device))

    @staticmethod
    def from_device_id(device_id: int) -> GpuDevice:
        """The GPU with this number."""
        if not isinstance(device_id, (int, np.integer)) or device_id < 0:
            raise ValueError(f"expected the number of a GPU, 0 or more, got {device_id!r}")
        return GpuDevice(device_id)

    @staticmethod
    def from_array(array: Array) -> GpuDevice | None:
        """The device of a CuPy array; None for anything else."""
        if isinstance(array, np.ndarray) or not is_array(array):
            return None
        return GpuDevice(array.device)

    @property
    def name(self) -> str:
        return f"@cupy:{self.index}"

    @property
    def xp(self) -> Module:
        return import_cupy()

    @property
    def device(self) -> CudaDevice:
        """CuPy's own object for this device; an error that says what to do where it cannot be used."""
        if self.index not in _usable:
            require_gpu(self.index)
            _usable.add(self.index)
        return self.xp.cuda.Device(self.index)

    @property
    def supported_array_types(self) -> tuple[type, ...]:
        return (self.xp.ndarray,)

    def is_array_supported(self, array: Array) -> bool:
        return self.from_array(array) == self

    def use(self) -> None:
        self.device.use()

    def create_context(self) -> AbstractContextManager[Device]:
        return _current(self)


NO_IDEEP = "there is no iDeep here; the device '@numpy' computes with oneDNN's kernels already"


class Intel64Device(Device):
    """The device of iDeep's arrays, which cannot be made; Chainer's name, for programs that ask what a device is."""

    def __init__(self) -> None:
        raise RuntimeError(NO_IDEEP)

    @staticmethod
    def from_array(array: Array) -> None:
        """None, for no array is one of iDeep's."""


@contextmanager
def _current(device: GpuDevice) -> Iterator[GpuDevice]:
    with device.device:
        yield device


_usable: set[int] = set()  # the numbers of GPUs that were asked for and are there


def current_device() -> Device:
    """The device that this thread uses."""
    return GpuDevice(import_cupy().cuda.Device())


def current_stream() -> int:
    """The stream on which this thread computes, as an address."""
    return int(import_cupy().cuda.get_current_stream().ptr)


class UnknownDeviceError(ValueError, RuntimeError):
    """A device of another name; Chainer raises RuntimeError where it might be one of ChainerX."""


def get_device(device_spec: Any) -> Device:
    """A device from its name or number.

    Args:
        device_spec: ``'@numpy'``, ``'@cupy:0'``, ``'cpu'``, ``'cuda:0'``, a GPU's number (negative: the CPU), a device
            of
            CuPy, or a Device, which is returned as it is.

    Raises:
        TypeError, ValueError: this names no device.

    Example:
        >>> dbrdist.get_device("@numpy").name
        '@numpy'
    """
    if isinstance(device_spec, Device):
        return device_spec
    if device_spec is None or device_spec is np:
        return _HOST
    if isinstance(device_spec, (int, np.integer)):
        return _HOST if device_spec < 0 else GpuDevice(device_spec)
    if isinstance(device_spec, tuple) and len(device_spec) == 2 and not as_chainer[0]:
        return GpuDevice(device_spec[1])
    if type(device_spec).__module__.startswith("cupy") and hasattr(device_spec, "id"):
        return GpuDevice(device_spec)
    expected = f"expected a device such as '@numpy', '@cupy:0' or a GPU number, got {device_spec!r}"
    if not isinstance(device_spec, str):
        raise TypeError(expected)
    if device_spec in ("@numpy", "cpu", "native"):
        return _HOST
    if device_spec.removeprefix("-").isdigit():
        return get_device(int(device_spec))
    name, _, index = device_spec.partition(":")
    if name in ("@cupy", "cuda", "gpu") and (index.isdigit() or (not index and not as_chainer[0])):
        return GpuDevice(int(index or 0))
    if name == "@intel64":
        raise RuntimeError(NO_IDEEP)
    if as_chainer[0] and not name.startswith("@"):
        expected += "; ChainerX, whose devices have such names, is not part of dbrdist"
    raise UnknownDeviceError(expected)


def using_device(device_spec: DeviceSpec | None) -> AbstractContextManager[Device]:
    """Make a device the current one of the thread within a ``with`` block; for the CPU nothing changes.

    Args:
        device_spec: the device, as :func:`get_device` takes it.

    Example:
        >>> with dbrdist.using_device("@numpy"):
        ...     L.Linear(2, 1).device.name
        '@numpy'
    """
    return get_device(device_spec).create_context()


def device_of(a: Array) -> Device:
    """The Device on which an array lies."""
    if isinstance(a, np.ndarray):
        return _HOST
    return GpuDevice(a.device)


def get_device_from_array(*arrays: Array) -> Device:
    """The Device of the first of ``arrays`` that is on a GPU; where none is, that of the CPU."""
    for a in arrays:
        device = GpuDevice.from_array(a)
        if device is not None:
            return device
    return _HOST


def copyto(dst: Array, src: Array) -> None:
    """Copy the elements of ``src`` (NumPy's or CuPy's) to those of ``dst``, whatever device each is on."""
    for name, a in (("src", src), ("dst", dst)):
        if not is_array(a):
            raise TypeError(f"copyto: {name}: expected an array, got {type(a).__name__}")
    device = device_of(dst)
    moved = to_device(src, device)
    with on(dst):
        device.xp.copyto(dst, moved)


class _Capturing(threading.local):
    is_on = False  # whether this thread captures a step, see declared.py
    # what multiplies matrices on a GPU instead of CuPy, which refuses it in a capture
    product: Callable[..., Array] | None = None


capturing = _Capturing()
HOST_COPY = "it copies an array from the host, which a graph would repeat as it is now"


def to_device(a: Any, device: Device) -> Any:
    """``a`` on ``device``: itself if it is there, else one copy, channels-last where it has four axes."""
    if device.module == "numpy":
        if not is_array(a) or isinstance(a, np.ndarray):
            return a
        host = empty(a.shape, a.dtype)
        if a.size:
            there: Any = _memory_of(channels_last(a) if a.ndim == 4 else a)
            there.get(out=_memory_of(host))
        return host
    cupy = device.xp
    is_there = isinstance(a, cupy.ndarray)
    if is_there and a.device.id == device.index:
        return a
    memory = _memory_of(channels_last(a)) if a.ndim == 4 else a
    if is_there:
        there = _from_gpu_to_gpu(memory, cupy.cuda, device.index)
    else:
        if capturing.is_on:
            raise CaptureError(HOST_COPY)
        with device.device:  # type: ignore[attr-defined]
            there = cupy.asarray(memory, order="C")
    return there.transpose(0, 3, 1, 2) if a.ndim == 4 else there


def _from_gpu_to_gpu(a: Array, cuda: Module, index: int) -> Array:
    """A copy on another GPU, made on a stream of that: after what wrote ``a``, and before what overwrites it."""
    with cuda.Device(a.device.id):
        dense = a if a.flags.c_contiguous else a.copy()
        written = cuda.Event()
        written.record(cuda.get_current_stream())
    with cuda.Device(index):
        stream = cuda.get_current_stream()
        stream.wait_event(written)
        there = dense.copy()
        read = cuda.Event()
        read.record(stream)
    with cuda.Device(a.device.id):
        cuda.get_current_stream().wait_event(read)
    return there


def _memory_of(a: Array) -> Array:
    """A channels-last array as it lies in memory, in C order; others as they are."""
    return a.transpose(0, 2, 3, 1) if a.ndim == 4 else a


def pinned_bytes(num_bytes: int) -> HostArray:
    """Host memory that the device reads and writes by itself, faster than other memory."""
    return np.frombuffer(import_cupy().cuda.alloc_pinned_memory(num_bytes), np.uint8, num_bytes)


def wait_for(a: Array) -> None:
    """Return when what was begun on the device of ``a`` is done."""
    if not isinstance(a, np.ndarray):
        with a.device:
            import_cupy().cuda.get_current_stream().synchronize()


def to_cpu(a: Array) -> HostArray:
    """``a`` in host memory."""
    return to_device(a, _HOST)


DeviceSpec: TypeAlias = Device | str | int | tuple[str, int]  # what get_device takes
