"""Tests of dbrdist.backends.cuda."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

import dbrdist
from dbrdist.backends import cuda


def test_cudnn_is_asked_for_in_vain_without_a_gpu():
    assert dbrdist.should_use_cudnn is dbrdist.backends.cuda.should_use_cudnn
    assert dbrdist.should_use_cudnn_tensor_core is dbrdist.backends.cuda.should_use_cudnn_tensor_core
    with pytest.raises(ValueError, match="level: expected '==always' or '>=auto'"):
        dbrdist.should_use_cudnn("always")


@pytest.mark.slow
def test_cuda_without_a_gpu():
    if cuda.available:
        pytest.skip("there is a GPU")
    x = np.ones(3)
    assert not cuda.cudnn_enabled and not isinstance(x, cuda.ndarray)
    assert cuda.get_array_module(x) is np and cuda.get_device_from_id(-1) is cuda.get_device_from_array(x)
    with cuda.get_device_from_array(x) as device:
        device.use()
        assert int(device) == device.id == -1 and device == cuda.DummyDevice
    assert cuda.to_cpu([x, (x,)])[0] is x
    assert cuda.fuse()(abs) is abs is cuda.fuse(abs) and cuda.memoize()(abs)(-2) == 2
    assert not cuda.should_use_cudnn(">=auto") and not cuda.should_use_cudnn_tensor_core("f")
    cuda.clear_memo()
    for call in (lambda: cuda.to_gpu(x), lambda: cuda.elementwise("T x", "T y", "y = x", "copy"), cuda.Stream):
        with pytest.raises(RuntimeError, match="no GPU or no CuPy was found; install"):
            call()
    with pytest.raises(ValueError, match="level: expected"):
        cuda.should_use_cudnn("auto")
    with pytest.raises(AttributeError, match="has no attribute 'to_gpuu'"):
        _ = cuda.to_gpuu


def test_a_module_in_the_place_of_cupy_is_no_gpu(monkeypatch):
    """As programs put one there whose parts import CuPy without using it."""
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    cuda._is_available.cache_clear()
    try:
        assert cuda.available is False and cuda.cudnn_enabled is False
    finally:
        cuda._is_available.cache_clear()


def test_devices_as_chainer_spells_them():
    for spec in (-1, "-1", "@numpy", "native", np, None, ("cupy", 1)[:0] or -1):
        assert dbrdist.get_device(spec).name == "@numpy", spec
    for spec in (1, "1", "@cupy:1", ("cupy", 1), np.int64(1)):
        assert dbrdist.get_device(spec).name == "@cupy:1", spec
    with pytest.raises(ValueError, match="got 'one'"):
        dbrdist.get_device("one")
