"""Tests of plane_loops.h: batch normalization of images in C order."""

import os
import subprocess
import sys

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import kernels
from dbrdist.core.array import backend
from tests.each import each
from tests.kernels.cpu.test_loops import compiled

AXES = (0, 2, 3)
SHAPES = [(4, 5, 30, 30), (2, 3, 64, 65), (16, 64, 7, 7), (1, 7, 50, 41), (3, 2, 1, 1500)]


def given(shape, middle=0.0, seed=0):
    rng = np.random.default_rng(seed)
    x, gy = (rng.standard_normal(shape) * 2 + middle).astype("f"), rng.standard_normal(shape).astype("f")
    return x, rng.uniform(0.5, 2, shape[1]).astype("f"), rng.standard_normal(shape[1]).astype("f"), gy


def exact(x, gamma, beta, gy, eps=1e-5):
    """In float64: output, mean, variance, gradients."""
    x, gy = x.astype("d"), gy.astype("d")
    mean, var = x.mean(AXES, keepdims=True), x.var(AXES, keepdims=True)
    root, hat = np.sqrt(var + eps), (x - mean) / np.sqrt(var + eps)
    scale = gamma.astype("d").reshape(1, -1, 1, 1)
    slopes = gy.mean(AXES, keepdims=True), (gy * hat).mean(AXES, keepdims=True)
    gx = scale / root * (gy - slopes[0] - hat * slopes[1])
    y = hat * scale + beta.reshape(1, -1, 1, 1)
    return y, mean.ravel(), var.ravel(), gx, (gy * hat).sum(AXES), gy.sum(AXES)


@compiled
@each(shape=SHAPES, middle=[0.0, 3.0, 1e4])
def test_values_and_gradients_are_near_those_of_float64(shape, middle):
    x, gamma, beta, gy = given(shape, middle)
    assert kernels.provider_of("bn_forward", x, gamma, beta, 1e-5, AXES, False) == "loops"
    y, mean, var, saved = kernels.bn_forward(x, gamma, beta, 1e-5)
    gx, ggamma, gbeta = kernels.bn_backward(x, gamma, mean, var, gy, 1e-5, saved)
    assert y.flags.c_contiguous and gx.flags.c_contiguous
    wanted = exact(x, gamma, beta, gy)
    rounding = 1e-6 + middle * 1e-7
    np.testing.assert_allclose(y, wanted[0], rtol=1e-5, atol=5 * rounding)
    np.testing.assert_allclose(mean, wanted[1], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(var, wanted[2], rtol=1e-5)
    np.testing.assert_allclose(gx, wanted[3], rtol=1e-4, atol=1e-5 + rounding)
    for a, b in zip((ggamma, gbeta), wanted[4:]):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-4 + rounding * x.size / shape[1])


@compiled
@each(shape=SHAPES)
def test_statistics_apart_and_a_relu_behind_change_no_bit(shape):
    x, gamma, beta, gy = given(shape)
    y, mean, var, _ = kernels.bn_forward(x, gamma, beta, 1e-5)
    for out in (None, backend.empty(shape, y.dtype)):
        again = kernels.bn_inference(x, gamma, beta, mean, var, 1e-5, out=out)
        np.testing.assert_array_equal(again, y)
    rectified, _, _, saved = kernels.bn_forward(x, gamma, beta, 1e-5, relu=True)
    np.testing.assert_array_equal(rectified, np.maximum(y, 0))
    mask = kernels.bn_mask(saved, shape, y.dtype)()
    np.testing.assert_array_equal(mask, y > 0)
    masked = kernels.bn_backward(x, gamma, mean, var, gy, 1e-5, saved, relu=True)
    plain = kernels.bn_backward(x, gamma, mean, var, gy * (y > 0), 1e-5, saved)
    for a, b in zip(masked, plain):
        np.testing.assert_array_equal(a, b)


@compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(value=[np.nan, np.inf, -np.inf])
def test_what_is_not_finite_makes_nan_of_its_channel_alone(value):
    x, gamma, beta, gy = given((4, 5, 30, 30))
    clean = kernels.bn_forward(x, gamma, beta, 1e-5)[0]
    x[1, 2, 3, 4] = value
    y, mean, var, saved = kernels.bn_forward(x, gamma, beta, 1e-5)
    gx = kernels.bn_backward(x, gamma, mean, var, gy, 1e-5, saved)[0]
    others = [0, 1, 3, 4]
    np.testing.assert_array_equal(y[:, others], clean[:, others])
    assert np.isnan(y[:, 2]).all() and np.isnan(gx[:, 2]).all() and np.isfinite(gx[:, others]).all()


@compiled
@each(layout=["channels-last", "planes", "repeated", "unaligned"])
def test_the_gradient_may_lie_in_any_order(layout):
    x, gamma, beta, gy = given((4, 5, 30, 30))
    if layout == "repeated":
        gy = np.broadcast_to(np.float32(0.3), x.shape)
    v, G, B = (dbrdist.Variable(a) for a in (x, gamma, beta))
    if layout == "unaligned":
        v = dbrdist.Variable(np.zeros(x.nbytes + 1, np.uint8)[1:].view("f").reshape(x.shape))
        v.array[...] = x
    y = F.batch_normalization(v, G, B, eps=1e-5)
    dbrdist.backward([y], [backend.channels_last(gy) if layout == "channels-last" else gy])
    wanted = exact(x, gamma, beta, gy)
    for a, b in zip((y.array, v.grad, G.grad, B.grad), (wanted[0], *wanted[3:])):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=3e-4)


@compiled
def test_layouts_of_others_are_not_taken():
    x, gamma, beta, _ = given((4, 5, 30, 30))
    for other in (backend.channels_last(x), x[:, :, ::2], x.astype("d"), x[:1, :, :4, :4].copy(), x[:, :1].copy()):
        vectors = gamma[: other.shape[1]], beta[: other.shape[1]]
        assert kernels.provider_of("bn_forward", other, *vectors, 1e-5, AXES, False) != "loops"


THREADS = """
import numpy as np, hashlib
from dbrdist import kernels
rng = np.random.default_rng(0)
for shape in ((4, 5, 90, 91), (16, 64, 14, 14), (2, 2, 300, 300)):
    x, gy = (rng.standard_normal(shape).astype("f") for _ in range(2))
    ones = np.ones(shape[1], "f")
    y, mean, var, saved = kernels.bn_forward(x, ones, ones, 1e-5)
    for a in (y, mean, var, *kernels.bn_backward(x, ones, mean, var, gy, 1e-5, saved)):
        print(hashlib.md5(a.tobytes()).hexdigest())
from dbrdist.core.array import random
print(hashlib.md5(random.raw_words(100, 5001).tobytes()).hexdigest())
"""


@compiled
@pytest.mark.programs
def test_the_number_of_threads_changes_no_bit():
    found = set()
    for count in "1234":
        env = {**os.environ, "OMP_NUM_THREADS": count}
        found.add(subprocess.run([sys.executable, "-c", THREADS], env=env, check=True, capture_output=True).stdout)
    assert len(found) == 1
