"""Initial values: statistics, fans, determinism, and what cannot be filled."""

from __future__ import annotations

import math

import numpy as np
import pytest

import dbrdist
from dbrdist import Variable, initializers
from dbrdist import links as L
from dbrdist.links import initializers as I
from tests.each import each

SHAPE = (60, 40, 3, 3)  # out, in, then the filter: fan_in 360, fan_out 540
NORMAL = {
    "Normal": (I.Normal(0.3), 0.3),
    "LeCunNormal": (I.LeCunNormal(2.0), 2 * math.sqrt(1 / 360)),
    "GlorotNormal": (I.GlorotNormal(), math.sqrt(2 / 900)),
    "HeNormal": (I.HeNormal(), math.sqrt(2 / 360)),
    "HeNormal fan_out": (I.HeNormal(fan_option="fan_out"), math.sqrt(2 / 540)),
}
UNIFORM = {
    "Uniform": (I.Uniform(0.3), 0.3),
    "LeCunUniform": (I.LeCunUniform(), math.sqrt(3 / 360)),
    "GlorotUniform": (I.GlorotUniform(2.0), 2 * math.sqrt(6 / 900)),
    "HeUniform": (I.HeUniform(), math.sqrt(6 / 360)),
}


def drawn(initializer, shape=SHAPE, dtype=np.float32):
    return I.generate_array(initializer, shape, np, dtype)


@pytest.mark.parametrize("name", NORMAL)
def test_normal_values_have_the_deviation(name):
    initializer, deviation = NORMAL[name]
    a = drawn(initializer)
    assert a.dtype == np.float32
    n = a.size
    assert abs(a.mean()) < 5 * deviation / math.sqrt(n)
    assert a.std() == pytest.approx(deviation, rel=5 / math.sqrt(2 * n))
    assert abs(a).max() > 3 * deviation


@pytest.mark.parametrize("name", UNIFORM)
def test_uniform_values_fill_the_interval(name):
    initializer, width = UNIFORM[name]
    a = drawn(initializer)
    assert -width <= a.min() < -0.999 * width
    assert 0.999 * width < a.max() <= width
    assert a.std() == pytest.approx(width / math.sqrt(3), rel=0.02)


def test_fans():
    assert I.get_fans((5, 3)) == (3, 5)
    assert I.get_fans(SHAPE) == (360, 540)
    with pytest.raises(ValueError, match="at least two axes"):
        I.get_fans((5,))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_constants(dtype):
    for initializer, value in ((I.Zero(), 0), (I.One(), 1), (I.Constant(2.5), 2.5)):
        a = drawn(initializer, (2, 3), dtype)
        assert a.dtype == dtype
        assert (a == value).all()
    assert np.isnan(drawn(I.NaN(), (2,))).all()
    with pytest.raises(ValueError, match=r"fill_value: expected shape \(2, 3\)"):
        drawn(I.Constant(np.ones(3)), (2, 3))


def test_identity():
    np.testing.assert_array_equal(drawn(I.Identity(2.0), (3, 3)), 2 * np.eye(3))
    with pytest.raises(ValueError, match="square matrix"):
        drawn(I.Identity(), (2, 3))


@pytest.mark.parametrize("shape", [(4, 4), (3, 6), (6, 3), (3, 2, 2, 2)])
def test_orthogonal_rows_or_columns(shape):
    a = drawn(I.Orthogonal(1.5), shape, np.float64).reshape(shape[0], -1)
    small = a @ a.T if a.shape[0] <= a.shape[1] else a.T @ a
    np.testing.assert_allclose(small, 1.5**2 * np.eye(len(small)), atol=1e-12)


@pytest.mark.parametrize("shape", [(4, 4), (3, 6), (6, 3), (2, 3, 4), (1,), ()])
def test_orthogonal_values_follow_from_normal_ones(shape):
    """Those of the generator, as columns, are the longer side of the result times a triangle with positive diagonal."""
    a = drawn(I.Orthogonal(1.0, rng=np.random.default_rng(5)), shape, np.float64)
    a = a.reshape(shape[0] if shape else 1, -1)
    q = a if a.shape[0] >= a.shape[1] else a.T
    normal = np.random.default_rng(5).standard_normal(q.shape)
    triangle = q.T @ normal
    np.testing.assert_allclose(np.tril(triangle, -1), 0, atol=1e-12)
    assert (np.diagonal(triangle) > 0).all()


@pytest.mark.parametrize(
    "mode, shape", [("embedding", (4, 4)), ("embedding", (6, 3)), ("projection", (4, 4)), ("projection", (3, 6)),
                    ("basis", (4, 4)), ("basis", (4, 2, 2))],
)  # fmt: skip
def test_orthogonal_fills_shapes_of_its_mode(mode, shape):
    rng = np.random.default_rng
    np.testing.assert_array_equal(
        drawn(I.Orthogonal(mode=mode, rng=rng(1)), shape), drawn(I.Orthogonal(rng=rng(1)), shape)
    )


@pytest.mark.parametrize("mode, shape", [("embedding", (3, 6)), ("projection", (6, 3)), ("basis", (6, 3))])
def test_orthogonal_refuses_shapes_that_its_mode_cannot_fill(mode, shape):
    with pytest.raises(ValueError, match=mode):
        drawn(I.Orthogonal(mode=mode), shape)


def test_values_depend_on_the_seed_and_the_order_of_initialisation_only():
    def twice(seed):
        dbrdist.random.set_seed(seed)
        return drawn(I.Normal()), drawn(I.Normal())

    first, second = twice(0)
    again, _ = twice(0)
    other, _ = twice(1)
    dbrdist.random.set_seed(0)
    np.testing.assert_array_equal(first, again)
    assert (first != second).mean() > 0.99
    assert (first != other).mean() > 0.99


def test_narrow_types_are_the_rounded_values_of_float32():
    dbrdist.random.set_seed(0)
    wide = drawn(I.Normal(1.0))
    dbrdist.random.set_seed(0)
    np.testing.assert_array_equal(drawn(I.Normal(1.0), dtype="float16"), wide.astype(np.float16))


def test_a_generator_of_ones_own_is_used():
    a = drawn(I.Normal(1.0, rng=np.random.default_rng(7)))
    np.testing.assert_array_equal(a, drawn(I.Normal(1.0, rng=np.random.default_rng(7))))


def test_types_come_from_argument_initializer_or_configuration():
    assert I.generate_array(I.Zero("float16"), (2,), np).dtype == np.float16
    with dbrdist.using_config("dtype", "float64"):
        assert I.generate_array(I.Zero(), 3, np).dtype == np.float64
    with pytest.raises(ValueError, match="expected the initializer's float16, got float32"):
        I.generate_array(I.Zero("float16"), (2,), np, "float32")


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def test_initializers_have_types_by_name():
    for dtype in (None, "mixed16", "mixedbf16"):
        assert initializers.Constant(1, dtype).dtype == dtype
    assert initializers.Constant(1, "float16").dtype == np.float16
    a = np.empty((2, 2), np.float64)
    initializers.Identity(3.0)(a)
    assert a.tolist() == [[3, 0], [0, 3]]
    initializers.Constant(np.array(2.0))(a)
    assert a.tolist() == [[2, 2], [2, 2]]
    initializers.Constant(Variable(ones(2, 2)).array)(a)
    assert a.tolist() == [[1, 1], [1, 1]]


@each(size=[1, 2, 3, 4, 5])
def test_upsampling_filters_interpolate(size):
    """A constant stays one, and a slope stays one inside."""
    step = (size + 1) // 2
    link = L.Deconvolution2D(3, 3, size, step, initialW=initializers.UpsamplingDeconvFilter())
    y = link(np.ones((1, 3, 8, 8), np.float32)).array
    np.testing.assert_allclose(y[:, :, size:-size, size:-size], 1, rtol=1e-6)
    grouped = np.zeros((3, 1, size, size), np.float32)
    initializers.UpsamplingDeconvFilter()(grouped)
    np.testing.assert_array_equal(grouped[:, 0], link.W.array[[0, 1, 2], [0, 1, 2]])
    assert not link.W.array[0, 1].any()


@each(size=[1, 2, 3, 4, 5], ndim=[1, 2, 3])
def test_downsampling_filters_are_means(size, ndim):
    W = np.zeros((2, 2, *(size,) * ndim))
    initializers.DownsamplingConvFilter()(W)
    np.testing.assert_allclose(W.sum(tuple(range(2, ndim + 2))), np.eye(2), rtol=1e-12)
    np.testing.assert_array_equal(W, np.flip(W, tuple(range(2, ndim + 2))))
    assert initializers.DownsamplingConvFilter("linear", "float64").dtype == np.float64


# fan_in and fan_out to the variance (normal) or a third of the squared half width (uniform)
VARIANCES = {
    "LeCun": lambda fan_in, fan_out: 1 / fan_in,
    "Glorot": lambda fan_in, fan_out: 2 / (fan_in + fan_out),
    "He": lambda fan_in, fan_out: 2 / fan_in,
}


@each(name=VARIANCES, shape=[(1, 1), (5, 1), (1, 5), (3, 2, 1, 1), (4, 3, 2, 5)], scale=[None, 0.5])
def test_scales_of_initial_values_are_those_of_their_fans(name, shape, scale):
    space = math.prod(shape[2:])
    variance = VARIANCES[name](shape[1] * space, shape[0] * space)
    given = {} if scale is None else {"scale": scale}
    normal, uniform = (getattr(initializers, name + kind)(**given) for kind in ("Normal", "Uniform"))
    np.testing.assert_allclose(normal.deviation(shape), (scale or 1) * math.sqrt(variance))
    np.testing.assert_allclose(uniform.deviation(shape), (scale or 1) * math.sqrt(3 * variance))


@each(name=VARIANCES, kind=["Normal", "Uniform"], shape=[(0, 0), (3, 0), (0, 3)])
def test_parameters_without_elements_are_initialized(name, kind, shape):
    """A fan of 0 counts as 1."""
    one, x = getattr(initializers, name + kind)(), np.empty(shape, "f")
    one(x)
    fans = sum(shape) if name == "Glorot" else shape[1]
    variance = (1 if name == "LeCun" else 2) / max(fans, 1)
    np.testing.assert_allclose(one.deviation(x.shape), math.sqrt(variance * (3 if kind == "Uniform" else 1)))
