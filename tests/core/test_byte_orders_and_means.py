"""Arrays of the other byte order in functions of every kernel, and weighted means of 16 bits."""

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Variable
from tests.each import each

RNG = np.random.default_rng(0)


def draw(*shape):
    return RNG.normal(size=shape)


CASES = {}
for c, size in ((3, 8), (32, 32)):
    CASES |= {
        f"convolution_2d {c}": (
            lambda x, w, b: F.convolution_2d(x, w, b, 1, 1), draw(2, c, size, size), draw(c, c, 3, 3), draw(c),
        ),
        f"deconvolution_2d {c}": (
            lambda x, w, b: F.deconvolution_2d(x, w, b, 1, 1), draw(2, c, 8, 8), draw(c, c, 3, 3), draw(c),
        ),
        f"convolution_1d {c}": (F.convolution_1d, draw(2, c, 16), draw(c, c, 3)),
        f"convolution_3d {c}": (F.convolution_3d, draw(2, c, 5, 5, 5), draw(c, c, 3, 3, 3)),
        f"linear {c}": (F.linear, draw(8 * c, 4 * c), draw(c, 4 * c), draw(c)),
        f"matmul {c}": (F.matmul, draw(8 * c, 4 * c), draw(4 * c, c)),
        f"batch_normalization {c}": (F.batch_normalization, draw(4, c, 8, 8), draw(c), draw(c)),
        f"layer_normalization {c}": (F.layer_normalization, draw(16 * c, c), draw(c), draw(c)),
        f"max_pooling_2d {c}": (lambda x: F.max_pooling_2d(x, 2), draw(4, c, 8, 8)),
        f"average_pooling_2d {c}": (lambda x: F.average_pooling_2d(x, 2), draw(4, c, 8, 8)),
        f"softmax {c}": (F.softmax, draw(16 * c, c)),
        f"log_softmax {c}": (F.log_softmax, draw(16 * c, c)),
        f"softmax_cross_entropy {c}": (
            lambda x: F.softmax_cross_entropy(x, np.zeros(len(x), ">i4")), draw(16 * c, c),
        ),
        f"sum {c}": (lambda x: F.sum(x, 0), draw(64 * c, c)),
        f"lstm {c}": (lambda s, x: F.lstm(s, x)[1], draw(c, c), draw(c, 4 * c)),
        **{f"{f.__name__} {c}": (f, draw(c, 16 * c)) for f in (F.relu, F.sigmoid, F.gelu, F.mish, F.tanh, F.elu)},
    }  # fmt: skip


@pytest.mark.slow
@each(name=CASES, dtype=["f", "d"])
def test_the_other_byte_order(name, dtype):
    function, *arrays = CASES[name]
    results = []
    for order in "=><":
        xs = [Variable(a.astype(order + dtype)) for a in arrays]
        y = function(*xs)
        gradients = dbrdist.grad([F.sum(y * y * y)], xs)
        results.append([y.array.astype("d"), *(g.array.astype("d") for g in gradients)])
    for other in results[1:]:
        for a, b in zip(results[0], other):
            scale = abs(a).max() + 1
            np.testing.assert_allclose(b / scale, a / scale, atol=2e-5 if dtype == "f" else 1e-10, err_msg=name)


@each(dtype=["float16", "float32", "float64"], axis=[None, 0, 1, (0, 1)])
def test_weighted_means(dtype, axis):
    x = np.full((300, 400), 100.0, dtype)
    weights = np.full((300, 400) if axis in (None, (0, 1)) else (300, 400)[axis], 50.0, dtype)
    y = Variable(x).mean(axis, weights=weights)
    assert y.dtype == dtype
    np.testing.assert_allclose(y.array.astype("d"), 100.0, rtol=1e-3)
    np.testing.assert_array_equal(y.array, F.average(x, axis, weights).array)


def test_the_variance_of_depthwise_convolutions_can_be_that_of_their_inputs():
    x = np.random.default_rng(0).normal(size=(8, 32, 12, 12)).astype("f")
    link = L.DepthwiseConvolution2D(32, 2, 3, initialW=dbrdist.initializers.LeCunNormal(scale=32**0.5))
    assert 0.8 < float(link(x).array.var()) < 1.2
    assert 0.02 < float(L.DepthwiseConvolution2D(32, 2, 3)(x).array.var()) < 0.05  # Chainer's default
