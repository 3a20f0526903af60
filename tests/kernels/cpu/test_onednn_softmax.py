"""Tests of dbrdist.kernels.cpu.onednn_softmax."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import Variable, kernels
from dbrdist.core.array import backend
from dbrdist.kernels.cpu import onednn, onednn_softmax
from tests.each import each
from tests.kernels.provider_helpers import needs_onednn

BF16 = backend.as_dtype("bfloat16")


def refuses(planner, *arguments):
    with pytest.raises(onednn.Unsupported):
        planner(*arguments)


@each(axis=[0, 1, 2, 3, -1, -3], function=["softmax", "log_softmax"])
def test_softmax_along_each_axis_of_images(axis, function):
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype("f")
    gy = np.random.default_rng(1).standard_normal(x.shape).astype("f")
    wide = x.astype("d")
    p = np.exp(wide) / np.exp(wide).sum(axis, keepdims=True)
    if function == "softmax":
        y, gx = p, p * (gy - (gy * p).sum(axis, keepdims=True))
    else:
        y, gx = np.log(p), gy - p * gy.sum(axis, keepdims=True, dtype="d")
    for lay in (np.ascontiguousarray, backend.channels_last):
        v = Variable(lay(x))
        with kernels.use("numpy"):
            made = getattr(F, function)(v, axis=axis)
            made.grad = lay(gy)
            made.backward()
        np.testing.assert_allclose(made.array, y, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(v.grad, gx, rtol=1e-5, atol=1e-6)
        assert made.array.strides == v.array.strides


@needs_onednn
@each(shape=[(7, 6), (2, 25), (1, 6), (2, 6, 3, 3)], log=[False, True])
def test_softmax_goes_by_rows_in_blocks(shape, log, monkeypatch):
    monkeypatch.setattr(onednn_softmax, "_SMALL", 1)
    monkeypatch.setattr(onednn_softmax, "_BLOCK", 20)  # elements: 3 rows of 6, or one of 25
    rng = np.random.default_rng(0)
    lay = backend.channels_last if len(shape) == 4 else np.asarray
    x, gy = (lay(rng.standard_normal(shape).astype("f")) for _ in range(2))
    columns, num_rows = shape[1], x.size // shape[1]
    blocks, new = onednn_softmax._plan(1, log, x)
    step = 3 if columns == 6 else 1
    assert [b[:2] for b in blocks] == [(i, min(i + step, num_rows)) for i in range(0, num_rows, step)]
    assert new().strides == x.strides
    e = np.exp(x.astype("d"))
    p = e / e.sum(1, keepdims=True)
    y = onednn_softmax._forward_planner(log)(x, 1)(x, 1)
    np.testing.assert_allclose(y, np.log(p) if log else p, rtol=1e-5, atol=1e-6)
    gx = onednn_softmax._backward_planner(log)(y, gy, 1)(y, gy, 1)
    expected = gy - p * gy.sum(1, keepdims=True) if log else p * (gy - (gy * p).sum(1, keepdims=True))
    np.testing.assert_allclose(gx, expected, rtol=1e-4, atol=1e-5)


@needs_onednn
def test_softmax_over_other_axes_types_and_layouts_is_left_to_numpy(monkeypatch):
    monkeypatch.setattr(onednn_softmax, "_SMALL", 42)
    x, rows = np.ones((7, 6), "f"), np.ones((2, 3, 7), "f")
    plane, pixels = np.ones((2, 3, 4, 5), "f"), backend.channels_last(np.ones((2, 3, 4, 5), "f"))
    for arrays, axes in (((x, x), [1]), ((rows,), [2]), ((plane,), [3]), ((pixels, pixels), [1])):
        for axis in range(arrays[0].ndim):
            if axis in axes:
                onednn_softmax._plan(axis, False, *arrays)
            else:
                refuses(onednn_softmax._plan, axis, False, *arrays)
    for arrays in ((x[:6],), (x.astype(BF16),), (np.ones((6, 7), "f").T,), (x, np.ones((6, 7), "f").T)):
        refuses(onednn_softmax._plan, 1, False, *arrays)
    refuses(onednn_softmax._plan, 1, False, pixels[:, :, ::2])
    refuses(onednn_softmax._plan, 3, False, plane, pixels)
