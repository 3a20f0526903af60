"""What a plan costs beside the results of its kernel: nothing of their size, neither while it is made nor afterwards.

A network's activations, gradients and weights make up the peak of a training step; a plan that keeps an array of their
size, or makes one to look at, adds to it once for each shape.
"""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from dbrdist import kernels
from dbrdist.core.array import backend
from dbrdist.kernels.cpu import onednn
from dbrdist.kernels.geometry import ConvGeometry
from tests.each import each
from tests.kernels.provider_helpers import memory_of

Array = np.ndarray
needs_onednn = pytest.mark.skipif(not onednn.is_available(), reason="oneDNN is not installed")


def image(shape: tuple[int, int, int, int]) -> Array:
    a = backend.empty(shape, np.float32)
    a[...] = 1
    return a


def test_an_allocator_of_large_arrays_makes_none_to_look_at():
    tracemalloc.start()
    try:
        new = backend.allocator((16, 64, 56, 56), np.float32)
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()
    assert new().strides == backend.empty((16, 64, 56, 56), np.float32).strides


@needs_onednn
@pytest.mark.parametrize(
    "x_shape, W_shape",
    [
        ((4, 64, 32, 32), (512, 64, 1, 1)),  # more channels out than in: the product is turned
        ((4, 512, 32, 32), (64, 512, 1, 1)),  # fewer: it is not
        ((2, 512, 5, 5), (512, 512, 3, 3)),  # few pixels: a product for each tap
        ((2, 64, 16, 16), (96, 64, 3, 3)),  # the convolution's own kernel
    ],
)  # fmt: skip
def test_weight_gradients_leave_no_array_with_their_plan(x_shape: Any, W_shape: Any):
    pad = W_shape[2] // 2
    x, gy = image(x_shape), image((x_shape[0], W_shape[0], *x_shape[2:]))
    geometry = ConvGeometry(ph=pad, pw=pad)
    out = np.empty(W_shape, np.float32)
    left, _ = memory_of(lambda: kernels.conv_backward_weight(x, gy, W_shape, geometry, np.float32, out))
    assert left < out.nbytes / 2


@needs_onednn
def test_a_pass_that_writes_over_one_of_two_gradients_makes_no_array():
    y, a, b = (image((4, 64, 64, 64)) for _ in range(3))
    _, peak = memory_of(lambda: kernels.relu_backward_of_sum(y, a, b, b))
    assert peak < y.nbytes / 2
    assert (b == 2).all()


@needs_onednn
def test_a_normalization_that_writes_over_its_gradient_makes_no_array():
    x, gy = image((16, 64, 64, 64)), image((16, 64, 64, 64))
    gamma, beta = np.ones(64, np.float32), np.zeros(64, np.float32)
    _y, mean, var, saved = kernels.bn_forward(x, gamma, beta, 1e-5)
    _, peak = memory_of(lambda: kernels.bn_backward(x, gamma, mean, var, gy, 1e-5, saved, is_ours=True)[0])
    assert peak < x.nbytes / 2


@each(**{"size, is_written_over": [((1 << 18) - 8, False), (1 << 18, True)]})
def test_large_gradients_of_a_relu_are_written_over(size, is_written_over):
    y, gy = (backend.channels_last(np.ones((1, 8, size // 8, 1), np.float32)) for _ in range(2))
    assert (kernels.relu_backward_over(y, gy) is gy) == is_written_over
    gy.flags.writeable = False
    assert kernels.relu_backward_over(y, gy) is not gy


def test_a_rule_over_memory_of_the_host_is_left_to_its_formula():
    p, g = np.ones(3, "f"), np.ones(3, "f")
    with kernels.use("onednn"):
        assert kernels.update("sgd", (p, g), (0.1,)) is False
    assert p.tolist() == [1, 1, 1]


def test_normalization_without_a_word_is_of_images_and_not_rectified():
    rng = np.random.default_rng(0)
    x, gy = (backend.channels_last(rng.standard_normal((2, 3, 4, 5)).astype("f")) for _ in range(2))
    gamma, beta = np.array([1, 2, -1], "f"), np.array([0, -1, 0.5], "f")
    wide, per_channel = x.astype("d"), (slice(None), None, None)
    m, v = wide.mean((0, 2, 3)), wide.var((0, 2, 3))
    normal = (wide - m[per_channel]) / np.sqrt(v + 1e-5)[per_channel]
    expected = normal * gamma[per_channel] + beta[per_channel]
    y, mean, var, saved = kernels.bn_forward(x, gamma, beta, 1e-5)
    for a, e in (
        (y, expected), (mean, m), (var, v), (kernels.bn_inference(x, gamma, beta, mean, var, 1e-5), expected),
        (kernels.bn_statistics(x)[0], m), (kernels.bn_statistics(x)[1], v),
    ):  # fmt: skip
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)
    _, ggamma, gbeta = kernels.bn_backward(x, gamma, mean, var, gy, 1e-5, saved)
    np.testing.assert_allclose(ggamma, (gy * normal).sum((0, 2, 3)), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(gbeta, gy.sum((0, 2, 3), dtype="d"), rtol=1e-4, atol=1e-4)
