"""Calls whose arrays are on several devices, on a module that stands for CuPy; real calls are in tests/gpu."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from dbrdist.core.array.gpu.mixed_devices import (
    HOST,
    MIXED,
    MixedDevicesError,
    common_device,
    mixed_devices,
    refuse_mixed,
)
from tests.each import each


class OnGpu:
    """An array of a GPU, as far as it is asked."""

    def __init__(self, number):
        self.data = types.SimpleNamespace(device_id=number)
        self.device = types.SimpleNamespace(id=number)
        self.dtype = np.dtype("f4")


ON_HOST = np.zeros(2, np.float32)


@pytest.fixture(autouse=True)
def cupy(monkeypatch):
    """CuPy, whose arrays are those of this file."""
    module = types.ModuleType("cupy")
    module.ndarray = OnGpu
    monkeypatch.setitem(sys.modules, "cupy", module)


def arrays(*numbers):
    return tuple([ON_HOST if n is None else OnGpu(n) for n in numbers])


@each(
    **{
        "data, held, is_mixed": [
            ((0, 0), (), False), ((0, 1), (), True), ((0, None), (), True), ((None, 0), (), True),
            ((1, 1, 1), (), False), ((0,), (1,), True), ((0,), (0,), False), ((0,), (None,), False),
            ((1, 1), (1, None), False), ((0,), (0, 1), True),
        ]
    }
)  # fmt: skip
def test_what_is_on_several_devices(data, held, is_mixed):
    values = [*arrays(*held), None, 3, "text", 2.5, (1, 2), np.dtype("f4"), {"a": 1}, np.float32(1)]
    assert common_device(arrays(*data), values) == (MIXED if is_mixed else data[0])


def test_an_array_without_axes_is_a_number():
    number = np.array(2.0, np.float32)
    assert common_device((OnGpu(1), number), ()) == common_device((number, OnGpu(1)), ()) == 1
    assert common_device((number, OnGpu(1), ON_HOST), ()) == MIXED
    assert common_device((number, number), ()) is None and common_device((number, ON_HOST), ()) == HOST


def test_the_error_names_each_place():
    call = types.SimpleNamespace(label="GetItem", slices=OnGpu(1), table=ON_HOST, axis=0)
    error = mixed_devices(call, arrays(0, None))
    assert isinstance(error, ValueError) and isinstance(error, TypeError)
    assert str(error).startswith(
        "GetItem: expected all inputs on one device, got input 0 on @cupy:0, 1 on the host, and slices on @cupy:1; "
    )


def test_arguments_that_are_no_operands():
    refuse_mixed("accuracy", y=OnGpu(0), t=OnGpu(0), ignore=None)
    refuse_mixed("accuracy", y=ON_HOST, t=[1, 2])
    with pytest.raises(
        MixedDevicesError, match=r"^accuracy: expected all arguments on one device, got y on @cupy:0, t on"
    ):
        refuse_mixed("accuracy", y=OnGpu(0), t=ON_HOST, ignore=-1)
    with pytest.raises(MixedDevicesError, match="t on @cupy:1; send them to one"):
        refuse_mixed("accuracy", y=types.SimpleNamespace(_array=OnGpu(0)), t=OnGpu(1))


def test_nothing_is_asked_without_cupy(monkeypatch):
    monkeypatch.delitem(sys.modules, "cupy")
    refuse_mixed("accuracy", y=ON_HOST, t=OnGpu(0))
