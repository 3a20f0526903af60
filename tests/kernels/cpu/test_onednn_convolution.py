"""Tests of dbrdist.kernels.cpu.onednn_convolution."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist import kernels
from dbrdist.core.array import backend
from dbrdist.kernels import ConvGeometry
from dbrdist.kernels.cpu import onednn, onednn_convolution, onednn_taps
from dbrdist.kernels.reference import numpy_
from tests.each import each

try:
    onednn.library()
except onednn.Unavailable:
    pytest.skip("oneDNN is not installed", allow_module_level=True)


STRIDED, POINTWISE, SAME = ConvGeometry(2, 2, 1, 1), ConvGeometry(), ConvGeometry(1, 1, 1, 1)
# direction, images, weights, geometry, and the implementation that is the fastest with AVX-512
CHOSEN = [
    ("forward", (2, 16, 9, 8), (32, 16, 3, 3), STRIDED, "jit:avx512_core"),
    ("forward", (2, 17, 9, 8), (32, 17, 3, 3), STRIDED, None),
    ("forward", (2, 64, 9, 8), (128, 64, 1, 1), ConvGeometry(2, 2), "jit:avx512_core"),
    ("forward", (2, 65, 9, 8), (128, 65, 1, 1), ConvGeometry(2, 2), None),
    ("forward", (1, 3, 7, 5), (5, 3, 3, 3), ConvGeometry(1, 3, 1, 0), "jit:avx512_core"),
    ("data", (2, 48, 9, 8), (64, 48, 3, 3), STRIDED, "jit:avx512_core"),
    ("data", (2, 3, 9, 8), (5, 3, 3, 2), ConvGeometry(2, 1, 0, 1), "jit:avx512_core"),
    ("data", (2, 49, 9, 8), (64, 49, 3, 3), STRIDED, None),
    ("forward", (2, 128, 14, 14), (512, 128, 1, 1), POINTWISE, "jit_1x1:avx512_core"),
    ("forward", (2, 256, 14, 14), (1024, 256, 1, 1), POINTWISE, "jit_1x1:avx512_core"),
    ("forward", (2, 272, 14, 14), (512, 272, 1, 1), POINTWISE, None),
    ("forward", (2, 128, 14, 14), (496, 128, 1, 1), POINTWISE, None),
    ("data", (2, 512, 14, 14), (256, 512, 1, 1), POINTWISE, "jit_1x1:avx512_core"),
    ("data", (2, 256, 14, 14), (512, 256, 1, 1), POINTWISE, None),
    ("forward", (2, 128, 14, 14), (512, 128, 3, 3), ConvGeometry(1, 1, 1, 1), None),
    ("forward", (2, 128, 14, 14), (512, 128, 1, 1), ConvGeometry(1, 1, 1, 1), None),
    ("forward", (2, 16, 9, 8), (32, 8, 3, 3), STRIDED._replace(groups=2), None),
    ("forward", (2, 32, 5, 28), (32, 32, 3, 3), SAME, "jit:avx512_core"),
    ("forward", (2, 32, 5, 29), (16, 32, 3, 3), SAME, None),
    ("forward", (2, 33, 5, 28), (16, 33, 3, 3), SAME, None),
    ("forward", (2, 32, 5, 28), (33, 32, 3, 3), SAME, None),
    ("forward", (2, 3, 5, 9), (8, 3, 3, 3), ConvGeometry(1, 1, 0, 2), "jit:avx512_core"),
    ("forward", (2, 3, 5, 9), (8, 3, 3, 3), ConvGeometry(1, 1, 2, 2, 2, 2), None),
    ("forward", (2, 3, 5, 9), (8, 3, 5, 5), SAME, None),
    ("data", (2, 32, 5, 28), (32, 32, 3, 3), SAME, "jit:avx512_core"),
    ("data", (2, 33, 5, 28), (32, 33, 3, 3), SAME, None),
    ("data", (2, 32, 5, 28), (33, 32, 3, 3), SAME, None),
    ("data", (2, 16, 5, 64), (32, 16, 3, 3), SAME, "jit:avx512_core"),
    ("data", (2, 16, 5, 65), (32, 16, 3, 3), SAME, None),
    ("data", (2, 16, 5, 64), (33, 16, 3, 3), SAME, None),
    ("data", (2, 17, 5, 64), (32, 17, 3, 3), SAME, None),
]
# images, weights and geometry of a forward convolution, and whether the kernel for data takes less time
NARROW = [
    ((2, 16, 64, 32), (12, 16, 3, 3), SAME, True),
    ((1, 32, 142, 29), (16, 32, 3, 3), SAME, True),
    ((1, 32, 64, 64), (3, 32, 3, 3), SAME, True),
    ((1, 32, 64, 65), (16, 32, 3, 3), SAME, False),
    ((1, 32, 147, 28), (16, 32, 3, 3), SAME, False),
    ((1, 32, 127, 32), (16, 32, 3, 3), SAME, False),
    ((1, 33, 128, 32), (16, 33, 3, 3), SAME, False),
    ((1, 32, 128, 32), (17, 32, 3, 3), SAME, False),
    ((1, 16, 128, 32), (16, 16, 3, 3), ConvGeometry(1, 1, 0, 0), False),
    ((1, 16, 128, 32), (16, 8, 3, 3), SAME._replace(groups=2), False),
]


def arrays(x_shape, W_shape, g):
    rng = np.random.default_rng(0)
    y_shape = (x_shape[0], W_shape[0], *g.out_hw(*x_shape[2:], *W_shape[2:]))
    x, gy = (backend.channels_last(rng.standard_normal(s, np.float32)) for s in (x_shape, y_shape))
    return x, gy, rng.standard_normal(W_shape, np.float32)


def wide(*values):
    return [v.astype("d") for v in values]


def results(direction, x, gy, W, g):
    """What serves, and what the definition gives in float64."""
    if direction == "forward":
        return kernels.conv_forward(x, W, None, g), numpy_.conv_forward(*wide(x, W), None, g)
    return kernels.conv_backward_data(gy, W, x.shape, g), numpy_.conv_backward_data(*wide(gy, W), x.shape, g)


@pytest.mark.slow
@each(**{"direction, x_shape, W_shape, geometry, chosen": CHOSEN})
def test_the_fastest_implementation_serves_and_is_right(direction, x_shape, W_shape, geometry, chosen):
    assert onednn_convolution._fastest(direction, x_shape, W_shape, geometry) == chosen
    x, gy, W = arrays(x_shape, W_shape, geometry)
    served = onednn_convolution._build(direction, x_shape, W, gy.shape, geometry, x.dtype)[0].implementation
    if chosen and "avx512_core" in served:
        assert served == chosen
    with kernels.use("onednn"):
        actual, expected = results(direction, x, gy, W, geometry)
    bound = 4 * np.finfo("f").eps * results(direction, *map(np.abs, (x, gy, W)), geometry)[1].max()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=bound)


@each(
    **{"direction, x_shape, W_shape, geometry, chosen": [case for case in CHOSEN if case[-1]]}, value=[np.nan, np.inf]
)
def test_what_is_not_finite_goes_where_the_definition_takes_it(
    direction, x_shape, W_shape, geometry, chosen, value
):  # fmt: skip
    x, gy, W = arrays(x_shape, W_shape, geometry)
    x[0, 1, 2, 3] = gy[0, 1, 2, -1] = value
    with kernels.use("onednn"), np.errstate(invalid="ignore"):
        actual, expected = results(direction, x, gy, W, geometry)
    np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(expected))


@each(**{"x_shape, W_shape, geometry, is_turned": NARROW}, has_bias=[False, True])
def test_the_kernel_for_data_makes_images_where_it_is_faster(
    x_shape, W_shape, geometry, is_turned, has_bias, monkeypatch
):  # fmt: skip
    x, _, W = arrays(x_shape, W_shape, geometry)
    b = np.arange(W_shape[0], dtype=np.float32) if has_bias else None
    directions, build = [], onednn_convolution._build
    monkeypatch.setattr(
        onednn_convolution, "_build", lambda d, *rest, **how: directions.append(d) or build(d, *rest, **how)
    )
    monkeypatch.setattr(onednn, "has_avx512", lambda: True)
    with kernels.use("onednn"):
        actual = onednn_convolution._plan_forward(x, W, b, geometry)(x, W, b, geometry)
    assert directions == ["data" if is_turned and not has_bias else "forward"]
    expected = numpy_.conv_forward(*wide(x, W), None if b is None else b.astype("d"), geometry)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)
    assert backend.is_channels_last(actual) and actual.dtype == np.float32
    x[0, 1, 2, 3] = np.nan
    with np.errstate(invalid="ignore"):
        actual = onednn_convolution._plan_forward(x, W, b, geometry)(x, W, b, geometry)
        expected = numpy_.conv_forward(*wide(x, W), b, geometry)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))


def test_without_avx512_images_are_made_forward(monkeypatch):
    x, _, W = arrays(*NARROW[0][:3])
    assert not onednn_convolution._is_faster_turned(x, W.astype("d"), SAME)
    assert not onednn_convolution._is_faster_turned(np.ascontiguousarray(x), W, SAME)
    monkeypatch.setattr(onednn, "has_avx512", lambda: False)
    assert not onednn_convolution._is_faster_turned(x, W, SAME)


def test_an_implementation_that_is_not_offered_leaves_the_first_choice():
    with onednn.Builder() as b:
        row = b.memory((64,), onednn.F32)
        arguments = "binary", 0x1FFF0, row, row, row, b.attributes()
        first = b.implementation(b.describe(*arguments))
        assert b.implementation(b.describe_as("none:such", *arguments)) == first
        assert b.implementation(b.describe_as(None, *arguments)) == first


@each(has_bias=[False, True])
def test_large_weights_leave_no_memory_behind(has_bias, monkeypatch):
    g = ConvGeometry(1, 1, 1, 1)
    x, gy, W = arrays((1, 256, 3, 3), (264, 256, 3, 3), g)
    b = np.ones(264, np.float32) if has_bias else None
    monkeypatch.setattr(onednn_taps, "_MANY_CHANNELS", 256)
    monkeypatch.setattr(onednn, "_state", onednn._ThreadState())
    with kernels.use("onednn"):
        y, gx = kernels.conv_forward(x, W, b, g), kernels.conv_backward_data(gy, W, x.shape, g)
        gW = kernels.conv_backward_weight(x, gy, W.shape, g)
        assert (
            max((a.nbytes for role, a in onednn._state.scratch.items() if role != "scratchpad"), default=0) < W.nbytes
        )
    np.testing.assert_allclose(y, numpy_.conv_forward(*wide(x, W), b, g), rtol=0, atol=1e-3)
    np.testing.assert_allclose(gx, numpy_.conv_backward_data(*wide(gy, W), x.shape, g), rtol=0, atol=1e-3)
    np.testing.assert_allclose(gW, numpy_.conv_backward_weight(*wide(x, gy), W.shape, g, np.dtype("d")), atol=1e-4)


@each(shape=[(2, 3, 5, 7), (1, 3, 1, 1), (3, 16, 4, 4)], dtype=["float32", "bfloat16"])
def test_planes_become_images(shape, dtype):
    x = np.random.default_rng(0).standard_normal(shape).astype(backend.as_dtype(dtype))
    for given in (x, x[::-1], x[:, ::-1], x[..., ::2], backend.channels_last(x)):
        made = onednn_convolution._to_images(given)(given)
        assert backend.is_channels_last(made)
        np.testing.assert_array_equal(made.astype("f"), given.astype("f"))


@each(**{"i, o": [(2, 3), (1, 1), (1, 5), (5, 1)]}, has_out=[False, True])
def test_gradients_of_pointwise_weights_over_many_pixels(i, o, has_out):
    rng = np.random.default_rng(0)
    x, gy = (backend.channels_last(rng.standard_normal((2, c, 16, 16), np.float32)) for c in (i, o))
    out = np.empty((o, i, 1, 1), np.float32) if has_out else None
    with kernels.use("onednn"):
        gW = kernels.conv_backward_weight(x, gy, (o, i, 1, 1), POINTWISE, out=out)
    assert out is None or gW is out
    expected = numpy_.conv_backward_weight(*wide(x, gy), gW.shape, POINTWISE, np.dtype("d"))
    np.testing.assert_allclose(gW, expected, rtol=0, atol=1e-4)


def images(*shape):
    return backend.channels_last(np.ones(shape, np.float32))


# pixels, channels of x and of gy, and whether the product for the weights' gradient is turned
TURNED = [
    (12, 2, 5, True),
    (11, 2, 5, False),
    (40, 4, 5, True),
    (40, 5, 5, False),
    (40, 2, 2, False),
    (40, 1, 5, False),
]


@each(**{"pixels, i, o, expected": TURNED})
def test_products_for_weights_are_turned_where_gradients_have_more_channels_and_pixels_are_many(pixels, i, o, expected):
    x, gy = images(1, i, 1, pixels), images(1, o, 1, pixels)
    like = np.empty((o, i, 1, 1), np.float32)
    assert (onednn_convolution._plan_turned(x, gy, like) is not None) == expected
    bfloat16 = backend.as_dtype("bfloat16")
    assert onednn_convolution._plan_turned(x, gy, like.astype(bfloat16)) is None
    assert onednn_convolution._plan_turned(x.astype(bfloat16), gy, like) is None


def test_few_pixels_are_a_product_with_the_weights_as_they_lie():
    def is_small(pixels, W, g=POINTWISE):
        return onednn_convolution.is_small_product(images(1, 3, 1, pixels), W, g)

    W = np.ones((5, 3, 1, 1), np.float32)
    assert is_small(256, W) and not is_small(257, W)
    assert not is_small(256, np.ones((5, 3, 1, 2), np.float32))
    assert not is_small(256, np.asfortranarray(W)) and not is_small(256, W[::-1])
    assert not is_small(256, W.astype(backend.as_dtype("bfloat16")))
    assert not is_small(256, W, ConvGeometry(1, 2)) and not is_small(256, W, ConvGeometry(1, 1, 0, 1))


def test_a_convolution_that_skips_pixels_is_one_of_the_others_alone():
    def skips(*window, kernel=(1, 1), dtype="float32", **others):
        g = ConvGeometry(*window, **others)
        return onednn_convolution._is_strided_pointwise((5, 3, *kernel), g, np.dtype(dtype))

    assert skips(2, 1) and skips(1, 2) and skips(3, 2)
    assert not skips(1, 1) and not skips(2, 2, kernel=(1, 2)) and not skips(2, 2, dtype="float64")
    assert not skips(2, 2, 1, 0) and not skips(2, 2, groups=3) and not skips(2, 2, cover_all=True)


@each(num_channels=[511, 512])
def test_the_pixels_that_strides_see_are_copied_from_many_channels_on(num_channels, monkeypatch):
    asked = []

    def plan(x, gy, like):
        asked.append(x.shape)

    monkeypatch.setattr(onednn_convolution, "_plan_pointwise_weight", plan)
    x, gy, W_shape = images(1, num_channels, 4, 5), images(1, 3, 2, 3), (3, num_channels, 1, 1)
    arguments = x, gy, W_shape, ConvGeometry(2, 2), x.dtype, None
    if num_channels == 512:
        onednn_convolution._plan_backward_weight(*arguments)
        assert asked == [(1, 512, 2, 3)]
    else:
        with pytest.raises(onednn.Unsupported, match="scratchpad"):  # 511 channels fill no vectors
            onednn_convolution._plan_backward_weight(*arguments)
        assert not asked


def test_memory_for_small_weights_stays_and_that_for_large_ones_does_not():
    for num_bytes, stays in (((1 << 20) - 1, True), (1 << 20, False)):
        one, other = (onednn_convolution._for_weights(num_bytes) for _ in range(2))
        assert np.shares_memory(one, other) == stays
        assert min(one.nbytes, other.nbytes) >= num_bytes


def test_weights_are_copied_only_where_they_are_turned_around():
    W = np.ones((4, 3, 2, 2), np.float32)
    for given in (W, np.asfortranarray(W), W[:, ::2], backend.channels_last(W)):
        assert onednn_convolution._readable(given) is given
    for given in (W[::-1], W[..., ::-1], np.broadcast_to(W[:1], W.shape)):
        made = onednn_convolution._readable(given)
        assert min(made.strides) > 0
        np.testing.assert_array_equal(made, given)


BF16 = backend.as_dtype("bfloat16")


def test_images_of_channels_in_pairs_are_looked_at_for_what_is_not_finite():
    served = lambda x, *arguments: "served"  # noqa: E731
    plan = onednn_convolution.in_pairs(lambda x: served, lambda x: "reference", lambda x: x.shape[1])
    x = np.ones((1, 3, 2, 2), np.float32)
    assert plan(x) is served and plan(x[:, :2].astype(BF16)) is served
    odd = x.astype(BF16)
    convolution = plan(odd)
    assert convolution is not served
    odd[0, 2, 1, 1] = np.nan
    for layout in (np.ascontiguousarray, backend.channels_last):
        assert convolution(layout(x.astype(BF16))) == "served"
        assert convolution(layout(odd)) == "reference"


def test_a_filter_sees_the_channels_of_its_group():
    W, gy = np.ones((12, 5, 2, 3), "f"), np.ones((1, 12, 4, 4), "f")
    assert onednn_convolution.channels_in(np.ones((1, 20, 7, 7), "f"), W, None, ConvGeometry(groups=4)) == 5
    assert onednn_convolution._channels_out(gy, W, (1, 20, 7, 7), ConvGeometry(groups=4)) == 3
