"""Objects that have a device and move as a whole: links, and whatever else owns arrays."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, TypeVar

from dbrdist.core.array.backend import CpuDevice, Device, DeviceSpec, GpuDevice, get_device, to_device
from dbrdist.core.array.types import Array

if TYPE_CHECKING:
    from dbrdist.core.array.types import Module
    from dbrdist.core.model.parameter import Parameter

D = TypeVar("D", bound="DeviceResident")


class DeviceResident:
    """Base class of objects that hold arrays on a device. A subclass hands each of them to the visitor::

        class Table(dbrdist.DeviceResident):
            def __init__(self, values):
                self.values = values

            def device_resident_accept(self, visitor):
                super().device_resident_accept(visitor)
                self.values = visitor.visit_array(self.values)

    A link that owns such an object calls its ``device_resident_accept`` in its own, so that both move together.

    Example:
        >>> L.Linear(2, 1).device.name
        '@numpy'
    """

    _device: Device = CpuDevice()
    _gpu: int | None = None  # the number of the GPU that it was moved to

    @property
    def device(self) -> Device:
        """Where the arrays lie."""
        return self._device

    @property
    def xp(self) -> Module:
        """The array module of the device."""
        return self._device.xp

    def device_resident_accept(self, visitor: DeviceResidentsVisitor) -> None:
        """Let a ``visitor`` go through this object and the arrays that it owns."""
        visitor.visit_device_resident(self)

    def to_device(self: D, device: DeviceSpec | None) -> D:
        """Move all arrays to ``device``, a Device or a name such as ``"@cupy:0"``; returns the object."""
        self.device_resident_accept(_Mover(get_device(device)))
        return self

    def to_cpu(self: D) -> D:
        """Move to host memory; deprecated, as in Chainer: :meth:`to_device` does it."""
        _warn_of("to_cpu", "@numpy")
        return self.to_device("@numpy")

    def to_gpu(self: D, device: int | None = None) -> D:
        """Move to the GPU number ``device`` (None: the first); deprecated, as in Chainer: use :meth:`to_device`."""
        _warn_of("to_gpu", "@cupy:N")
        return self.to_device(get_device(0 if device is None else device))


def _warn_of(method: str, device: str) -> None:
    warnings.warn(
        f"{method} is deprecated. Please use to_device({device!r}) instead.", DeprecationWarning, stacklevel=3
    )


class DeviceResidentsVisitor:
    """What goes through the objects with a device, their Parameters, and their arrays."""

    def visit_device_resident(self, device_resident: DeviceResident) -> None:
        """Called with each object, before its parts."""
        raise NotImplementedError(f"{type(self).__name__} must define visit_device_resident(self, device_resident)")

    def visit_variable(self, param: Parameter) -> None:
        """Called with each Variable."""
        raise NotImplementedError(f"{type(self).__name__} must define visit_variable(self, param)")

    def visit_array(self, arr: Array) -> Array:
        """Called with each array; returns what takes its place."""
        raise NotImplementedError(f"{type(self).__name__} must define visit_array(self, arr)")


class _Mover(DeviceResidentsVisitor):
    """Moves what it visits to a device."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def visit_device_resident(self, device_resident: DeviceResident) -> None:
        device_resident._device = self._device
        device_resident._gpu = self._device.index if isinstance(self._device, GpuDevice) else None

    def visit_variable(self, param: Parameter) -> None:
        param.to_device(self._device)

    def visit_array(self, arr: Array) -> Array:
        return to_device(arr, self._device)
