"""Devices as objects: what Chainer documents of them."""

import numpy as np
import pytest

import dbrdist
from dbrdist import backend
from dbrdist.backends import cuda, intel64


def test_a_device_says_which_arrays_it_takes():
    device = dbrdist.get_device("@numpy")
    assert isinstance(device, backend.CpuDevice) and isinstance(device, backend.Device)
    assert device.supported_array_types == (np.ndarray,)
    assert device.is_array_supported(np.zeros(2)) and not device.is_array_supported([0.0])
    assert backend.CpuDevice.from_array(np.zeros(1)) == device and backend.CpuDevice.from_array([1]) is None
    assert backend.GpuDevice.from_array(np.zeros(1)) is None
    assert backend.get_device_from_array(np.zeros(1)) == device


@pytest.mark.parametrize("name", ["name", "xp", "supported_array_types"])
def test_the_base_asks_for_what_it_lacks(name):
    with pytest.raises(NotImplementedError, match=name):
        getattr(backend.Device(), name)
    with pytest.raises(NotImplementedError, match="is_array_supported"):
        backend.Device().is_array_supported(np.zeros(1))


def test_send_keeps_containers_and_sends_each_object_once():
    device = dbrdist.get_device("@numpy")
    a = np.arange(3.0)
    sent = device.send((a, [a, None], {"b": a, "n": 3}))
    assert sent[0] is a and sent[1] == [a, None] and sent[1][0] is a and sent[2]["b"] is a
    assert isinstance(sent[2]["n"], np.ndarray) and sent[2]["n"] == 3
    for wrong in ("text", dbrdist.Variable(a), object()):
        with pytest.raises(TypeError, match="expected an array or a number to send to @numpy"):
            device.send(wrong)


def test_a_device_is_no_context_but_makes_one():
    device = dbrdist.get_device("@numpy")
    with pytest.raises(RuntimeError, match=r"dbrdist\.using_device"), device:
        pass
    with device.create_context(), dbrdist.using_device(device) as used:
        assert used is device


def test_copyto_copies_elements_and_refuses_what_is_no_array():
    a = np.zeros(3, np.float32)
    backend.copyto(a, np.arange(3.0))
    assert a.tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="src: expected an array, got list"):
        backend.copyto(a, [1, 2, 3])


def test_numbers_of_gpus_are_checked():
    assert backend.GpuDevice.from_device_id(2).name == "@cupy:2"
    for wrong in (-1, "0", 1.5):
        with pytest.raises(ValueError, match="the number of a GPU"):
            backend.GpuDevice.from_device_id(wrong)


def test_what_is_not_there_is_named(monkeypatch):
    """``xp is cuda.cupy`` is asked by programs on machines without CuPy; to use it is an error in words."""
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    assert cuda.cupy is not np and cuda.cupy is cuda.cupy
    with pytest.raises(DeprecationWarning, match="get_device is deprecated"):
        cuda.get_device(-1)


def test_ideep_is_absent_in_words():
    assert not intel64.is_ideep_available() and not intel64.should_use_ideep(">=auto")
    assert not isinstance(np.zeros(1), intel64.mdarray) and intel64.Intel64Device.from_array(np.zeros(1)) is None
    for call in (intel64.Intel64Device, intel64.check_ideep_available):
        with pytest.raises(RuntimeError, match="there is no iDeep here; the device '@numpy'"):
            call()
    with pytest.raises(RuntimeError, match="there is no iDeep here"):
        dbrdist.get_device("@intel64")
