"""Images stay channels-last on the device: outputs, and the gradients of what lies between."""

from __future__ import annotations

import numpy as np
import pytest
from support import images, is_on, put

import dbrdist.functions as F
from dbrdist import Variable, kernels, using_config
from dbrdist.core.array import backend
from dbrdist.core.tape import ops

SHAPE = (2, 16, 12, 10)  # large enough for sums and normalizations to wait for a ReLU
C = SHAPE[1]

OPERATIONS = {
    "convolution": (lambda x, W, b: F.convolution_2d(x, W, b, 2, 1), (8, C, 3, 3), (8,)),
    "convolution 1x1": (F.convolution_2d, (8, C, 1, 1)),
    "convolution in groups": (lambda x, W: F.convolution_2d(x, W, groups=4, dilate=2), (8, C // 4, 3, 3)),
    "deconvolution": (lambda x, W, b: F.deconvolution_2d(x, W, b, 2, 1), (C, 8, 4, 4), (8,)),
    "max pooling": (lambda x: F.max_pooling_2d(x, 3, 2, 1),),
    "average pooling": (lambda x: F.average_pooling_2d(x, 3, 2, 1),),
    "batch normalization": (F.batch_normalization, (C,), (C,)),
    "batch normalization and relu": (lambda x, g, b: F.relu(F.batch_normalization(x, g, b)), (C,), (C,)),
    "sum and relu": (lambda x: F.relu(x + ops.neg(x)),),
    "relu": (F.relu,),
    "sigmoid": (F.sigmoid,),
    "softmax": (F.softmax,),
    "dropout": (F.dropout,),
    "difference": (lambda x: x - 2 * x,),
    "channel scale": (F.scale, (C,)),
    "concatenation": (lambda x: F.concat((x, x * 2)),),
    "selection": (lambda x: F.where(x.array > 0, x, ops.neg(x)),),
    "cast": (lambda x: F.cast(F.cast(x, np.float64), np.float32),),
    "pad": (lambda x: F.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), "constant"),),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_layout(name, device, rng):
    function, *shapes = OPERATIONS[name]
    x = Variable(put(device, images(rng, SHAPE)))
    h = x * 1.5
    y = function(h, *[put(device, rng.standard_normal(s).astype(np.float32)) for s in shapes])
    assert is_on(device, y.array) and backend.is_channels_last(y.array)
    y.grad = put(device, images(rng, y.shape))
    y.backward(retain_grad=True)
    assert backend.is_channels_last(h.grad) and backend.is_channels_last(x.grad)


def test_moves_keep_the_layout(device, rng, on):
    a = images(rng, SHAPE)
    there = backend.to_device(a, device)
    assert is_on(device, there) and backend.is_channels_last(there)
    assert backend.to_device(there, device) is there
    back = backend.to_cpu(there)
    assert backend.is_channels_last(back)
    np.testing.assert_array_equal(back, a)
    from_nchw = device.send(np.ascontiguousarray(a))
    assert on == "numpy" or backend.is_channels_last(from_nchw)
    np.testing.assert_array_equal(backend.to_cpu(from_nchw), a)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 3, 4), (0, 3, 4, 5), (2, 3, 1, 1), (2, 3, 4, 5, 2)])
def test_moves_of_any_shape(shape, device, rng):
    a = np.asarray(rng.standard_normal(shape))
    for array in (a, a.T):
        there = backend.to_device(array, device)
        assert is_on(device, there)
        back = backend.to_cpu(there)
        assert isinstance(back, np.ndarray) and back.dtype == a.dtype
        np.testing.assert_array_equal(back, array)


def test_what_waits_for_a_relu_gives_the_same_numbers(device, rng):
    """Batch normalization and relu in one, and apart."""
    x, (gamma, beta) = images(rng, SHAPE), rng.standard_normal((2, C)).astype(np.float32)

    def step(read_between):
        v = Variable(put(device, x))
        h = F.batch_normalization(v, put(device, gamma), put(device, beta))
        if read_between:
            h.array  # noqa: B018
        y = F.relu(h + v if read_between is None else h)
        y.grad = put(device, x)
        y.backward()
        return backend.to_cpu(y.array), backend.to_cpu(v.grad)

    for a, b in zip(step(False), step(True), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    with using_config("enable_backprop", False):
        F.relu(F.batch_normalization(put(device, x), put(device, gamma), put(device, beta)))


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (2, 8, 3, 3), (3, 5, 32, 32)])
def test_means_of_images_are_those_of_numpy_both_ways(device, rng, on, shape):
    if on not in ("whole", "cupy"):
        pytest.skip("own kernels run with --on whole and on a GPU")
    x, gy = images(rng, shape), rng.standard_normal(shape[:2], np.float32)
    y = kernels.mean_of_images(put(device, x))
    np.testing.assert_allclose(backend.to_cpu(y), x.mean((2, 3), dtype="d"), rtol=1e-6, atol=1e-6)
    gx = kernels.mean_of_images_backward(put(device, gy), shape)
    wanted = np.broadcast_to(gy.astype("d")[:, :, None, None] / (shape[2] * shape[3]), shape)
    np.testing.assert_allclose(backend.to_cpu(gx), wanted, rtol=1e-6, atol=1e-8)
