"""NaN and infinities go through every kernel of every provider as through its definition, on both sides of thresholds.

The definitions are written out here in float64, and share no code with the kernels.
"""

import functools
import math
import types
import warnings

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Variable, kernels, using_config
from dbrdist.core.array import backend
from dbrdist.core.tape import fusion
from dbrdist.kernels import ConvGeometry, PoolGeometry
from tests.each import each
from tests.kernels.provider_helpers import HAS_ONEDNN, PROVIDERS

SPECIAL = {
    "nan": [np.nan],
    "negative nan": [np.copysign(np.nan, -1)],
    "inf": [np.inf],
    "-inf": [-np.inf],
    "all": [np.nan, -np.inf, np.inf, np.copysign(np.nan, -1)],
    "huge": [3e38, -3e38],
    "none": [],
}
# On both sides of 1,024 (one call of NumPy) and of 32,768 (oneDNN's elementwise kernels).
SHAPES = [(1024,), (1025,), (32, 32), (33, 32), (32767,), (32768,), (2, 4, 8, 8), (4, 8, 32, 32), (3, 5, 49, 47)]


@pytest.fixture(autouse=True)
def quiet():
    """NumPy warns of invalid values where they are what is tested."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@functools.cache
def normal(seed, size):
    """Normal numbers, drawn once: thousands of cases begin with the same."""
    return np.random.default_rng(seed).standard_normal(size)


def draw(seed, shape, special, dtype="float32"):
    """Normal numbers with some special ones at places that follow from the seed; images lie as images."""
    rng, a = np.random.default_rng([seed, 1]), normal(seed, math.prod(shape)).copy()
    for i, value in enumerate(SPECIAL[special]):
        a[rng.integers(0, a.size, 2 + i)] = value
    a = a.astype(backend.as_dtype(dtype)).reshape(shape)
    return backend.channels_last(a) if a.ndim == 4 else a


def assert_same(actual, expected, tolerance=1e-4):
    """Equal where not finite, close elsewhere, compared with the largest finite value."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    finite = expected[np.isfinite(expected)]
    scale = max(abs(finite).max(initial=0), 1.0)
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def rectified(x):
    return np.where(np.isnan(x), np.nan, np.where(x > 0, x, 0.0))


ELEMENTWISE = {
    "relu_forward": (lambda a, b: kernels.relu_forward(a), lambda a, b: rectified(a)),
    "relu_backward": (
        lambda a, b: kernels.relu_backward(kernels.relu_forward(a), b),
        lambda a, b: np.where(a <= 0, 0.0, b),
    ),
    "add": (kernels.add, lambda a, b: a + b),
}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ELEMENTWISE)
@pytest.mark.parametrize("provider", PROVIDERS)
@each(special=SPECIAL, dtype=["float32", "bfloat16", "float16", "float64"])
def test_elementwise(provider, kernel, special, dtype):
    run, definition = ELEMENTWISE[kernel]
    for shape in SHAPES:
        a, b = draw(0, shape, special, dtype), draw(1, shape, special, dtype)
        with kernels.use(provider):
            y = run(a, b)
        assert y.dtype == a.dtype
        if special == "huge" and dtype != "float64":  # sums overflow, in bfloat16 after rounding
            continue
        assert_same(y, definition(a.astype("d"), b.astype("d")), 1e-6 if dtype in ("float32", "float64") else 1e-2)


@each(dtype=["float32", "float64"], size=[1, 5, 64, 1024, 1030])
def test_one_gradient_of_nan_or_infinity_at_any_place_of_a_small_image(dtype, size):
    for special in (np.nan, np.inf, -np.inf):
        for place in {0, size // 3, size - 1}:
            y, gy = np.ones(size, dtype), np.full(size, -2, dtype)
            y[::2], gy[place] = 0, special
            images = [backend.channels_last(a.reshape(1, size, 1, 1)) for a in (y, gy)]
            np.testing.assert_array_equal(kernels.relu_backward(*images).reshape(-1), np.where(y > 0, gy, 0))


def test_layouts_stay_where_values_are_repaired():
    for are_images in (False, True):
        x = np.full((4, 8, 32, 32), np.nan, np.float32)
        x = backend.channels_last(x) if are_images else x
        for y in (kernels.relu_forward(x), kernels.relu_backward(x, x), kernels.add(x, x)):
            assert backend.lies_as_images(y) == are_images


def windows_of(x, g, fill):
    """(N, C, OH, OW, kh * kw): what each window sees, ``fill`` where there is no image."""
    (h, w), (oh, ow) = x.shape[2:], g.out_hw(*x.shape[2:])
    bottom = max((oh - 1) * g.sh + g.kh - g.ph - h, 0)
    right = max((ow - 1) * g.sw + g.kw - g.pw - w, 0)
    padded = np.pad(x, ((0, 0), (0, 0), (g.ph, bottom), (g.pw, right)), constant_values=fill)
    seen = sliding_window_view(padded, (g.kh, g.kw), (2, 3))[:, :, :: g.sh, :: g.sw][:, :, :oh, :ow]
    return seen.reshape(*seen.shape[:4], g.kh * g.kw)


def scattered(values, positions, g, x_shape):
    """The transpose: values (N, C, OH, OW, K) added at positions u * kw + v of their windows."""
    gx = np.zeros(x_shape)
    for (n, c, i, j, k), value in np.ndenumerate(values):
        row, col = i * g.sh - g.ph + positions[n, c, i, j, k] // g.kw, j * g.sw - g.pw + positions[n, c, i, j, k] % g.kw
        if 0 <= row < x_shape[2] and 0 <= col < x_shape[3]:
            gx[n, c, row, col] += value
    return gx


POOLINGS = [
    ((2, 3, 8, 9), PoolGeometry("max", 2, 2, 2, 2)),
    ((2, 5, 9, 8), PoolGeometry("max", 3, 3, 2, 2, 1, 1)),
    ((2, 16, 8, 7), PoolGeometry("max", 3, 3, 2, 2, 1, 1, True)),
    ((1, 2, 6, 6), PoolGeometry("max", 2, 2, 4, 4, 1, 1, True)),
    ((1, 2, 5, 5), PoolGeometry("max", 2, 2, 3, 3, 2, 2, True)),  # windows that lie in the padding
    ((1, 2, 6, 6), PoolGeometry("max", 1, 1, 4, 4, 0, 0, True)),
    ((2, 3, 8, 9), PoolGeometry("average", 2, 2, 2, 2)),
    ((2, 16, 9, 8), PoolGeometry("average", 3, 3, 2, 2, 1, 1)),
    ((1, 2, 5, 5), PoolGeometry("average", 2, 2, 3, 3, 2, 2)),
]
CONTENTS = {
    **{special: lambda shape, special=special: draw(0, shape, special) for special in SPECIAL},
    "ties": lambda shape: np.floor(draw(0, shape, "none")),
    "zeros": lambda shape: np.zeros(shape, np.float32),
    "only -inf": lambda shape: np.full(shape, -np.inf, np.float32),
    "only nan": lambda shape: np.full(shape, np.nan, np.float32),
    "lowest": lambda shape: np.full(shape, -3e38, np.float32),
}


@pytest.mark.parametrize(("shape", "geometry"), POOLINGS)
@pytest.mark.parametrize("provider", PROVIDERS)
@each(content=CONTENTS)
def test_pooling(provider, shape, geometry, content):
    """Also ties, of which the first counts, and windows in the padding, for which a maximum is minus infinity."""
    x, is_max = CONTENTS[content](shape), geometry.kind == "max"
    if not is_max and content in ("huge", "lowest"):
        x = x * np.float32(0.01)  # no sum overflows
    seen = windows_of(x.astype("d"), geometry, -np.inf if is_max else 0.0)
    expected = seen.max(-1) if is_max else seen.mean(-1)
    gy = draw(1, expected.shape, "all" if content in SPECIAL else "none")
    with kernels.use(provider):
        y, saved = kernels.pool_forward(x, geometry)
        gx = kernels.pool_backward(gy, shape, saved, geometry)
    assert_same(y, expected)
    if is_max:
        index = seen.argmax(-1)  # the first; NaN counts as the largest
        is_lowest = (seen == -np.inf).all(-1)  # the first pixel, not the padding before it
        index[is_lowest] = windows_of(np.ones(shape), geometry, 0.0).argmax(-1)[is_lowest]
        np.testing.assert_array_equal(kernels.pool_indices(saved, y.shape, geometry), index)
        assert_same(gx, scattered(gy.astype("d")[..., None], index[..., None], geometry, shape))
    else:
        size = geometry.kh * geometry.kw
        values = np.repeat(gy.astype("d")[..., None] / size, size, -1)
        positions = np.broadcast_to(np.arange(size), values.shape)
        assert_same(gx, scattered(values, positions, geometry, shape))


def normalized(x, gamma, beta, mean, var, eps):
    kept = (slice(None), *(None,) * (x.ndim - 2))
    return (x - mean[kept]) / np.sqrt(var[kept] + eps) * gamma[kept] + beta[kept]


def normalization_gradients(x, gamma, mean, var, gy, eps):
    axis, kept = (0, *range(2, x.ndim)), (slice(None), *(None,) * (x.ndim - 2))
    x_hat = normalized(x, np.ones_like(gamma), np.zeros_like(gamma), mean, var, eps)
    gbeta, ggamma, m = gy.sum(axis), (gy * x_hat).sum(axis), x.size // x.shape[1]
    return (gy - (gbeta[kept] + x_hat * ggamma[kept]) / m) * (gamma / np.sqrt(var + eps))[kept], ggamma, gbeta


def softmax_and_gradients(x, gy, axis):
    """Softmax, its logarithm and the gradients of both."""
    e = np.exp(x - x.max(axis, keepdims=True))
    y, total = e / e.sum(axis, keepdims=True), gy.sum(axis, keepdims=True)
    log_y = x - x.max(axis, keepdims=True) - np.log(e.sum(axis, keepdims=True))
    return y, log_y, y * (gy - (y * gy).sum(axis, keepdims=True)), gy - np.exp(log_y) * total


@pytest.mark.slow
@pytest.mark.parametrize("provider", PROVIDERS)
@each(where=["x", "gy"], special=[s for s in SPECIAL if s != "huge"], shape=[(7, 80), (440, 300), (1, 132_000)])
def test_softmax(provider, where, special, shape):
    """Also rows of several blocks of 131,072 elements, and one that is longer."""
    x, gy = (draw(i, shape, special if where == name else "none") for i, name in enumerate(("x", "gy")))
    axis = len(shape) - 1
    with kernels.use(provider):
        y, log_y = kernels.softmax(x, axis), kernels.log_softmax(x, axis)
        grads = kernels.softmax_backward(y, gy, axis), kernels.log_softmax_backward(log_y, gy, axis)
    for actual, expected in zip((y, log_y, *grads), softmax_and_gradients(x.astype("d"), gy.astype("d"), axis)):
        assert_same(actual, expected)


@pytest.mark.parametrize("provider", PROVIDERS)
@each(special=["none", "-inf", "nan"])
def test_softmax_over_channels(provider, special):
    x, gy = draw(0, (2, 24, 60, 61), special), draw(1, (2, 24, 60, 61), "none")
    with kernels.use(provider):
        y, log_y = kernels.softmax(x, 1), kernels.log_softmax(x, 1)
        grads = kernels.softmax_backward(y, gy, 1), kernels.log_softmax_backward(log_y, gy, 1)
    for actual, expected in zip((y, log_y, *grads), softmax_and_gradients(x.astype("d"), gy.astype("d"), 1)):
        assert backend.lies_as_images(actual)
        assert_same(actual, expected)


WHERE = ["x", "gamma", "beta", "gy", "mean", "var", "eps"]


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("provider", PROVIDERS)
@each(
    special=["nan", "negative nan", "inf", "-inf", "all"],
    shape=[(4, 8, 5, 7), (3, 5, 30, 31), (64, 20), (256, 33)],
)
def test_batch_normalization(provider, where, special, shape):
    axis, eps = (0, *range(2, len(shape))), 0.0 if where == "eps" else 2e-5
    x, gy = (draw(i, shape, special if where == name else "none") for i, name in enumerate(("x", "gy")))
    gamma, beta, mean, var = (
        draw(2 + i, shape[1:2], special if where == name else "none")
        for i, name in enumerate(("gamma", "beta", "mean", "var"))
    )
    if where == "eps":
        x[:, 0] = 3.0  # a variance of 0
    var = abs(var)
    x64, gy64, gamma64, beta64, mean64, var64 = (a.astype("d") for a in (x, gy, gamma, beta, mean, var))
    for relu in (False, True):
        final = rectified if relu else np.asarray
        with kernels.use(provider):
            y, m, v, saved = kernels.bn_forward(x, gamma, beta, eps, relu, axis)
            fixed = kernels.bn_inference(x, gamma, beta, mean, var, eps, relu, axis)
            out = backend.empty(shape, x.dtype)
            kernels.bn_inference(x, gamma, beta, mean, var, eps, relu, axis, out)
            grads = kernels.bn_backward(x, gamma, m, v, gy, eps, saved, relu, axis)
        own = normalized(x64, gamma64, beta64, x64.mean(axis), x64.var(axis), eps)
        assert_same(m, x64.mean(axis))
        assert_same(v, x64.var(axis))
        assert_same(y, final(own))
        assert_same(fixed, final(normalized(x64, gamma64, beta64, mean64, var64, eps)))
        np.testing.assert_array_equal(out, fixed)
        g = np.where(own <= 0, 0.0, gy64) if relu else gy64
        expected = normalization_gradients(x64, gamma64, x64.mean(axis), x64.var(axis), g, eps)
        for actual, wanted in zip(grads, expected):
            assert_same(actual, wanted, 1e-3)


@pytest.mark.parametrize("where", ["x", "gamma", "beta", "gy"])
@pytest.mark.parametrize("provider", PROVIDERS)
@each(special=["nan", "inf", "-inf", "all"])
def test_layer_normalization(provider, where, special):
    for shape in ((9, 7), (64, 33), (200, 256)):
        x, gy, gamma, beta = (
            draw(i, shape if name in ("x", "gy") else shape[1:], special if where == name else "none")
            for i, name in enumerate(("x", "gy", "gamma", "beta"))
        )
        with kernels.use(provider):
            y, mean, var = kernels.ln_forward(x, gamma, beta, 1e-5)
            grads = kernels.ln_backward(x, gamma, mean, var, gy, 1e-5)
        wide = [a.astype("d") for a in (x, gy, gamma, beta)]
        m, v = wide[0].mean(1), wide[0].var(1)
        s = 1 / np.sqrt(v + 1e-5)[:, None]
        x_hat, g = (wide[0] - m[:, None]) * s, wide[1] * wide[2]
        gx = s * (g - g.mean(1)[:, None] - x_hat * (g * x_hat).mean(1)[:, None])
        for actual, expected in zip(
            (y, mean, var, *grads), (x_hat * wide[2] + wide[3], m, v, gx, (wide[1] * x_hat).sum(0), wide[1].sum(0))
        ):
            assert_same(actual, expected, 1e-3)


CONVOLUTIONS = [
    ((2, 3, 8, 7), (4, 3, 3, 3), ConvGeometry(1, 1, 1, 1)),
    ((2, 16, 9, 8), (8, 16, 3, 3), ConvGeometry(2, 2, 1, 1)),
    ((2, 5, 6, 7), (7, 5, 1, 1), ConvGeometry()),
    ((2, 8, 9, 9), (12, 2, 3, 3), ConvGeometry(1, 1, 1, 1, 1, 1, 4)),
]


def convolved(x, W, b, g):
    o, per_group = W.shape[0], W.shape[0] // g.groups
    pool = PoolGeometry("max", *W.shape[2:], g.sh, g.sw, g.ph, g.pw)
    seen = windows_of(x, pool, 0.0)  # N C OH OW K
    y = np.empty((x.shape[0], o, *seen.shape[2:4]))
    for k in range(o):
        first = (k // per_group) * W.shape[1]
        part = seen[:, first : first + W.shape[1]] * W[k].reshape(1, W.shape[1], 1, 1, -1)
        y[:, k] = part.sum((1, 4)) + b[k]
    return y


@pytest.mark.parametrize(("x_shape", "W_shape", "geometry"), CONVOLUTIONS)
@pytest.mark.parametrize("provider", PROVIDERS)
@each(where=["x", "W", "b"], special=["nan", "inf", "all"])
def test_convolution(provider, x_shape, W_shape, geometry, where, special):
    x, W, b = (
        draw(i, shape, special if where == name else "none")
        for i, (name, shape) in enumerate((("x", x_shape), ("W", W_shape), ("b", W_shape[:1])))
    )
    W = np.ascontiguousarray(W)
    with kernels.use(provider):
        y = kernels.conv_forward(x, W, b, geometry)
    expected = convolved(x.astype("d"), W.astype("d"), b.astype("d"), geometry)
    if where == "W" and geometry.ph:  # oneDNN does not multiply the padding, where 0 times NaN would be NaN
        y, expected = y[:, :, 1:-1, 1:-1], expected[:, :, 1:-1, 1:-1]
    assert_same(y, expected)


PAIRED = [
    ((2, 3, 7, 7), (8, 3, 3, 3), ConvGeometry()),
    ((2, 1, 7, 3), (16, 1, 1, 1), ConvGeometry(1, 2)),
    ((2, 34, 6, 5), (2, 17, 1, 1), ConvGeometry(groups=2)),
    ((2, 16, 5, 5), (4, 4, 3, 3), ConvGeometry(groups=4)),
    ((2, 8, 5, 5), (32, 8, 3, 3), ConvGeometry(3, 3)),
]


@each(**{"x_shape, W_shape, g": PAIRED}, value=[np.nan, np.inf, -np.inf])
def test_convolutions_in_bfloat16_let_infinity_stay_among_the_outputs_that_see_it(x_shape, W_shape, g, value):
    """oneDNN reads channels and columns in pairs, of which another may be multiplied by 0."""
    y_shape = x_shape[0], W_shape[0], *g.out_hw(*x_shape[2:], *W_shape[2:])
    wide = [np.random.default_rng(i).uniform(0.5, 1, s) for i, s in enumerate((x_shape, W_shape, y_shape))]
    x, W, gy = (a.astype(backend.as_dtype("bfloat16")) for a in wide)
    x[0, 0, 0, -2] = gy[0, 0, 0, -1] = value
    seen, given = (~np.isfinite(a.astype("d")) for a in (x, gy))
    place = types.SimpleNamespace(made=(None, None))  # for weights that stay
    ys = {
        "forward": kernels.conv_forward(x, W, None, g),
        "inference": kernels.conv_inference(x, W, None, g, place),
        "with normalization": kernels.conv_bn_inference(
            x, W, None, (np.ones(W_shape[0], "f"),) * 4, 0.0, None, g, None
        ),
    }
    ones = np.ones(W_shape)
    reached = kernels.conv_forward(seen.astype("d"), ones, None, g) > 0
    for name, y in ys.items():
        if y is not None:
            np.testing.assert_array_equal(np.isfinite(y.astype("d")), ~reached, name)
    gx = kernels.conv_backward_data(gy, W, x_shape, g).astype("d")
    np.testing.assert_array_equal(
        np.isfinite(gx), kernels.conv_backward_data(given.astype("d"), ones, x_shape, g) == 0, "data"
    )
    gy[0, 0, 0, -1] = 1
    gW = kernels.conv_backward_weight(x, gy, W_shape, g).astype("d")
    at = kernels.conv_backward_weight(seen.astype("d"), np.ones(y_shape), W_shape, g) > 0
    np.testing.assert_array_equal(np.isfinite(gW), ~at, "weights")


@pytest.mark.parametrize("shape", [(8, 9, 10), (70, 90, 130), (300, 64, 64)])
@pytest.mark.parametrize("provider", PROVIDERS)
@each(where=[0, 1], special=["nan", "inf", "all"])
def test_matrix_product(provider, shape, where, special):
    m, k, n = shape
    a, b = draw(0, (m, k), special if where == 0 else "none"), draw(1, (k, n), special if where else "none")
    with kernels.use(provider):
        y = kernels.matmul(a, b)
    assert_same(y, (a.astype("d")[:, :, None] * b.astype("d")[None]).sum(1))


# ---- through the functions that people call
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("special", [s for s in SPECIAL if s != "huge"])  # whose variance overflows
@pytest.mark.parametrize("provider", PROVIDERS)
def test_normalization_and_relu(provider, special, train):
    """Whether or not the ReLU was expected."""
    link, x = L.BatchNormalization(8), draw(0, (4, 8, 16, 16), special)
    gy = draw(1, x.shape, special)
    with kernels.use(provider), using_config("train", train):
        F.relu(link(Variable(draw(2, x.shape, "none")) * 1.0))
        results = []
        for expected in (True, False):
            link.avg_mean[...], link.avg_var[...] = 0.5, 2.0
            link.cleargrads()
            leaf = Variable(x)
            h = link(leaf * 1.0)
            assert any(p.write for p in fusion.waiting.values())
            if not expected:
                h.array  # noqa: B018
            y = F.relu(h)
            y.grad = gy
            y.backward()
            results.append([y.array, leaf.grad, link.gamma.grad, link.beta.grad])
    for a, b in zip(*results):
        assert_same(a, b)
    own = (x.astype("d").mean((0, 2, 3)), x.astype("d").var((0, 2, 3))) if train else (np.full(8, 0.5), np.full(8, 2.0))
    assert_same(results[0][0], rectified(normalized(x.astype("d"), np.ones(8), np.zeros(8), *own, 2e-5)))


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_sum_and_relu(provider, special):
    for shape in SHAPES:
        a, b = draw(0, shape, special), draw(1, shape, special)
        p, q = Variable(a), Variable(b)
        with kernels.use(provider):
            y = F.relu(p * 1.0 + q * 1.0)
            y.grad = gy = draw(2, shape, special)
            y.backward()
        s = a + b  # in float32, where it may overflow
        assert_same(y.array, rectified(s))
        assert_same(p.grad, np.where(s <= 0, 0, gy))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_dropout(provider):
    """What is dropped is 0 times the element, as in the definition x mask."""
    for shape in ((100,), (8, 16, 32, 32)):
        x = draw(0, shape, "all")
        with kernels.use(provider):
            y, mask = F.dropout(x, 0.5, return_mask=True)
        assert_same(y.array, x * mask)


@pytest.mark.skipif(not HAS_ONEDNN, reason="oneDNN is not installed")
def test_a_first_layer_of_nan_shows_in_the_loss():
    net = dbrdist.Sequential(L.Convolution2D(3, 8, 3), L.BatchNormalization(8), F.relu, L.Linear(10))
    x, t = draw(0, (16, 3, 16, 16), "none"), np.arange(16, dtype=np.int32) % 10
    for _ in range(2):
        assert np.isfinite(F.softmax_cross_entropy(net(x), t).array)
    net[0].W.array[...] = np.nan
    assert np.isnan(F.softmax_cross_entropy(net(x), t).array)
    with using_config("train", False):
        assert np.isnan(F.softmax_cross_entropy(net(x), t).array)
