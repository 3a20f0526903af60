"""Tests of dbrdist.core.array.backend."""

from __future__ import annotations

import contextlib
import sys
import types

import numpy as np
import pytest

import dbrdist
from dbrdist import Variable
from dbrdist.core.array import backend
from tests.each import each


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def test_devices_by_name_and_number():
    for spec in ("@numpy", "cpu", "native", None, np, -1, "-1", np.int64(-1), backend.CpuDevice()):
        assert dbrdist.get_device(spec) == backend.CpuDevice()
    for spec, n in ((0, 0), ("0", 0), ("@cupy:1", 1), ("cuda", 0), ("gpu:2", 2), (("@cupy", 3), 3), (np.int32(4), 4)):
        device = dbrdist.get_device(spec)
        assert (device.module, device.index, device.name) == ("cupy", n, f"@cupy:{n}")
    for spec in ("tpu", "@cupy:x", "@numpy:0", "cuda:-1", ("@cupy", 0, 0), (), 1.5, ["@numpy"]):
        with pytest.raises(
            ValueError if isinstance(spec, str) else TypeError,
            match="expected a device such as '@numpy', '@cupy:0' or a GPU number, got",
        ):
            dbrdist.get_device(spec)


def test_a_device_of_a_program_is_shown_by_its_text():
    class Own(backend.Device):
        def __str__(self):
            return "@own:3"

    assert repr(Own()) == "<Own (own):3>"
    with pytest.raises(NotImplementedError, match="Device must define name"):
        str(backend.Device())


def test_devices_are_values():
    cpu, gpu = backend.CpuDevice(), backend.GpuDevice(1)
    assert cpu == backend.CpuDevice() != gpu and cpu != "@numpy" and gpu != backend.GpuDevice(0)
    assert len({cpu, backend.CpuDevice(), gpu, backend.GpuDevice(1)}) == 2
    assert (repr(gpu), repr(cpu)) == ("<GpuDevice (cupy):1>", "<CpuDevice (numpy)>")
    assert str(cpu) == "@numpy" and cpu.xp is np
    cpu.use()
    a, b = ones(2), ones(3)
    sent = cpu.send({"a": a, "b": [b, (a,)]})
    assert sent["a"] is a and sent["b"][0] is b and sent["b"][1][0] is a and type(sent["b"][1]) is tuple
    with dbrdist.using_device("@numpy") as used:
        assert used == cpu


def test_what_goes_together():
    assert backend.is_arrays_compatible([]) and backend.is_arrays_compatible([None, ones(1), ones(2)])
    assert not backend.lies_as_images(ones(2, 3, 4, 5))
    assert backend.lies_as_images(ones(2, 4, 5, 3).transpose(0, 3, 1, 2))
    assert not backend.lies_as_images(ones(2, 4, 5, 1).transpose(0, 3, 1, 2))
    assert not backend.lies_as_images(ones(2, 1, 1, 3).transpose(0, 3, 1, 2))
    assert backend.lies_as_images(ones(2, 5, 1, 3).transpose(0, 3, 1, 2))
    assert backend.lies_as_images(ones(2, 1, 5, 3).transpose(0, 3, 1, 2))


def test_no_cupy_is_said_in_words(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"CuPy|cupy"):
        backend.import_cupy()
    assert "upy" in backend.why_no_nccl().lower()


def test_types_of_arrays():
    assert dbrdist.get_cpu_array_types() == (np.ndarray,)
    assert np.ndarray in dbrdist.get_array_types()
    assert dbrdist.is_arrays_compatible([np.zeros(1), None, np.zeros((2, 2), np.int8)])
    assert dbrdist.is_arrays_compatible([]) and dbrdist.is_arrays_compatible(iter([None]))


class FakeArray:
    """What lies on a GPU, as far as it is asked."""

    def __init__(self):
        self.device = contextlib.nullcontext()


@pytest.fixture
def cupy(monkeypatch):
    """A module in the place of CuPy, with the third of several devices in use."""
    done = []
    device = lambda: types.SimpleNamespace(id=np.int32(2))  # noqa: E731
    stream = types.SimpleNamespace(ptr=np.int64(77), synchronize=lambda: done.append("waited"))
    runtime = types.SimpleNamespace(getDevice=lambda: 2, deviceGetPCIBusId=lambda n: f"bus {n}")
    module = types.ModuleType("cupy")
    module.ndarray, module.done = FakeArray, done
    module.cuda = types.SimpleNamespace(
        Device=device, get_current_stream=lambda: stream, runtime=runtime, is_available=lambda: True,
        alloc_pinned_memory=bytearray, nccl=types.SimpleNamespace(available=True),
    )  # fmt: skip
    monkeypatch.setitem(__import__("sys").modules, "cupy", module)
    monkeypatch.setitem(__import__("sys").modules, "cupy.cuda", module.cuda)
    return module


def test_arrays_of_two_modules_do_not_go_together(cupy):
    one, other = np.zeros(1), FakeArray()
    assert backend.is_arrays_compatible([one, None, one]) and backend.is_arrays_compatible([other, other])
    assert not backend.is_arrays_compatible([one, other]) and not backend.is_arrays_compatible([other, None, one])
    assert backend.get_array_module(one, other) is cupy and backend.get_array_module(one) is np
    assert backend.is_array(other) and not backend.is_array([1])
    assert backend.get_array_types() == (np.ndarray, FakeArray) and backend.get_cpu_array_types() == (np.ndarray,)
    assert backend.is_of_own_class(other) and not backend.is_of_own_class(np.ma.zeros(1))


def test_what_a_thread_uses_on_a_gpu(cupy):
    device = backend.current_device()
    assert (device.module, device.index, type(device.index)) == ("cupy", 2, int)
    assert backend.current_stream() == 77 and backend.bus_id_of_device() == "bus 2"
    memory = backend.pinned_bytes(5)
    assert memory.dtype == np.uint8 and memory.shape == (5,)
    backend.wait_for(np.zeros(1))
    assert cupy.done == []
    backend.wait_for(FakeArray())
    assert cupy.done == ["waited"]


def test_without_a_library_of_nccl_arrays_cannot_travel_by_it(cupy):
    assert backend.import_nccl() is cupy.cuda.nccl and backend.why_no_nccl() == ""
    cupy.cuda.nccl.available = False
    with pytest.raises(ImportError, match="no NCCL library"):
        backend.import_nccl()
    assert "no NCCL library" in backend.why_no_nccl()
    cupy.cuda.is_available = lambda: False
    assert "no GPU" in backend.why_no_nccl()


@each(kind=["link", "variable"])
def test_a_gpu_is_the_first_one_unless_a_number_is_given(kind):
    asked = []

    class Watched(dbrdist.Link if kind == "link" else Variable):
        def to_device(self, device):
            asked.append(device)
            return self

    x = Watched() if kind == "link" else Watched(np.zeros(1))
    with pytest.deprecated_call() if kind == "link" else contextlib.nullcontext():
        for device in (None, 0, 3):
            x.to_gpu(device)
        x.to_gpu()
        x.to_cpu()
    assert asked == [*(backend.get_device(number) for number in (0, 0, 3, 0)), "@numpy"]


def test_the_memory_of_images_has_channels_last():
    x = np.arange(120.0).reshape(2, 3, 4, 5)
    memory = backend._memory_of(backend.channels_last(x))
    assert memory.shape == (2, 4, 5, 3) and memory.flags.c_contiguous
    np.testing.assert_array_equal(memory, x.transpose(0, 2, 3, 1))
    for other in (x[0], x[None]):
        assert backend._memory_of(other) is other


@each(lay=[
    lambda a: a, lambda a: a.T, lambda a: a.transpose(1, 0, 2), lambda a: a.transpose(2, 0, 1), lambda a: a[:, ::2],
    lambda a: a[::-1].T, lambda a: a[..., :0], lambda a: a[0, 0, 0, ...],
])  # fmt: skip
def test_copies_lie_as_what_is_copied(lay):
    a = lay(np.arange(24.0).reshape(2, 3, 4))
    b = backend.copy_as_it_lies(a)
    np.testing.assert_array_equal(b, a)
    order, again = (np.argsort([-abs(s) for s in x.strides], kind="stable").tolist() for x in (a, b))
    assert order == again and not np.shares_memory(a, b)
    assert b.transpose(order).flags.c_contiguous


@each(shape=[(3, 4), (2, 3, 4)], at=[np.s_[:1], np.s_[:, :1]])
def test_copies_of_what_is_repeated_have_whole_memory(shape, at):
    a = np.broadcast_to(np.arange(float(np.prod(shape))).reshape(shape)[at], shape)
    b = backend.copy_as_it_lies(a)
    np.testing.assert_array_equal(b, a)
    assert b.flags.c_contiguous and b.flags.writeable


@each(count=[1 << 14, (1 << 14) + 1, 1 << 16], dtype=["f4", "f8", "u1"])
def test_large_memory_begins_on_a_cache_line(count, dtype):
    made = [backend.aligned(count + i, np.dtype(dtype)) for i in range(8)]
    assert [a.size for a in made] == [count + i for i in range(8)]
    assert all(a.ctypes.data % 64 == 0 for a in made if a.nbytes >= 1 << 16)


def test_what_lies_as_images_has_its_channels_innermost():
    planes = np.zeros((2, 3, 4, 5), "f")
    pixels = np.ascontiguousarray(planes.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    for a, is_so in (
        (planes, False), (pixels, True), (pixels[:, :, :, :1], True), (pixels[:, :, :1], True),
        (pixels[:, :, :1, :1], False), (pixels[:, :1], False), (planes[..., ::4][..., :1], False),
        (np.zeros((2, 3, 3, 5), "f")[..., ::5], False), (np.zeros((2, 3, 5, 3), "f")[:, :, ::5], False),
        (np.broadcast_to(pixels[:, :, :1, :1], planes.shape), True), (pixels[:, ::-1], False),
        (np.zeros((5, 2, 3, 3), "f").transpose(1, 2, 3, 0)[..., :1], False),
        (np.broadcast_to(planes[:, :, :1, :1], planes.shape), False),
    ):  # fmt: skip
        assert backend.lies_as_images(a) == is_so, (a.shape, a.strides)
