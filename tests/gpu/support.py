"""What the tests share: arrays on the device under test, and comparison with host arrays."""

from __future__ import annotations

import numpy as np

from dbrdist.core.array import backend


def put(device, *arrays):
    """Copies on the device, 4-d ones channels-last."""
    moved = [device.send(backend.copy(a)) for a in arrays]
    return moved[0] if len(moved) == 1 else moved


def is_on(device, a):
    """True for an array of the device's own class on it."""
    return isinstance(a, device.xp.ndarray) and backend.device_of(a) == device


def assert_same(device, a, expected, rtol=0.0, atol=0.0):
    """``a`` lies on the device, and has the shape, type and values of the host array ``expected``."""
    assert is_on(device, a), type(a)
    assert (a.shape, a.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(*(np.asarray(v, np.float64) for v in (backend.to_cpu(a), expected)), rtol, atol)


def eps_of(dtype):
    """The distance from 1 to the next number."""
    return 2.0**-7 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)


def assert_close(device, a, exact, num_eps):
    """As :func:`assert_same` for a result of the type of ``a`` and the exact values, within ``num_eps`` roundings."""
    tolerance = num_eps * eps_of(a.dtype)
    scale = max(1.0, float(abs(exact).max())) if exact.size else 1.0
    assert_same(device, a, exact.astype(a.dtype), tolerance, tolerance * scale)


def images(rng, shape, dtype=np.float32):
    """Normal numbers (N, C, H, W), channels-last in host memory."""
    a = backend.empty(shape, dtype)
    a[...] = rng.standard_normal(shape)
    return a
