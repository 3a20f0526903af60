"""Residual networks: sizes, strides, initial state, and gradients against float64."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
from dbrdist import functions as F
from dbrdist import links as L
from dbrdist.models.blocks import Basic, Bottleneck, Options, blur, halved
from dbrdist.models.resnet import (
    ResNet,
    ResNet18,
    ResNet20,
    ResNet34,
    ResNet50,
    ResNet56,
    ResNet101,
    ResNet152,
    ResNetCIFAR,
)
from tests.each import each

LABELS = np.array([1, 3, 5, 7])


def images(size, num=4, dtype=np.float32):
    return np.random.default_rng(0).standard_normal((num, 3, size, size)).astype(dtype)


@pytest.fixture(scope="module")
def resnet50():
    return ResNet50()


@pytest.mark.slow
def test_resnet50_has_the_known_size(resnet50):
    assert resnet50.count_params() == 25_557_032
    norms = [link for link in resnet50.links() if isinstance(link, L.BatchNormalization)]
    assert len(norms) == 53
    assert sum(link.gamma.size + link.beta.size for link in norms) == 53_120
    assert sum(link.avg_mean.size + link.avg_var.size for link in norms) == 53_120
    assert sum(p.size for p in resnet50.params() if p.ndim > 1) == 25_502_912


@pytest.mark.parametrize(("model", "size"), [(ResNet20, 272_474), (ResNet56, 855_770)])
def test_cifar_networks_have_the_known_size(model, size):
    """Of 6 n + 2 layers, with two projections of 16 x 32 and 32 x 64 weights and their normalizations."""
    assert model().count_params() == size


@pytest.mark.slow
@pytest.mark.parametrize("stride_in_3x3", [True, False])
def test_stride_lies_where_it_is_asked_for(stride_in_3x3):
    model = ResNet50(num_classes=10, stride_in_3x3=stride_in_3x3)
    strides = [(block.conv1.stride[0], block.conv2.stride[0]) for block in model.blocks]
    halving = (1, 2) if stride_in_3x3 else (2, 1)
    expected = [(1, 1)] * 16
    for first in (3, 7, 13):
        expected[first] = halving
    assert strides == expected


@pytest.mark.slow
def test_last_map_has_7_rows(resnet50):
    seen = {}

    class Shapes(dbrdist.LinkHook):
        name = "Shapes"

        def forward_postprocess(self, args):
            seen[id(args.link)] = args.out.shape

    with dbrdist.no_backprop_mode(), dbrdist.using_config("train", False), Shapes():
        y = resnet50(images(224, 1))
    assert y.shape == (1, 1000)
    assert seen[id(resnet50.conv)] == (1, 64, 112, 112)
    assert [seen[id(resnet50.blocks[i])][2] for i in (2, 6, 12, 15)] == [56, 28, 14, 7]


@pytest.mark.slow
def test_zero_gamma_makes_blocks_their_shortcuts():
    model = ResNet50(num_classes=10, zero_gamma=True)
    gammas = [block.bn3.gamma.array for block in model.blocks]
    assert len(gammas) == 16
    assert sum(g.size for g in gammas) == 15_104
    block = model.blocks[1]
    x = np.abs(images(8, 2)[:, :1]) * np.ones((1, 256, 1, 1), np.float32)
    np.testing.assert_array_equal(block(x).array, x)  # relu(0 + x) with x >= 0
    F.softmax_cross_entropy(model(images(32)), LABELS).backward()
    for block in model.blocks:
        assert not any(np.any(c.W.grad) for c in (block.conv1, block.conv2, block.conv3))
        assert np.any(block.bn3.gamma.grad)
        assert np.any(block.bn3.beta.grad)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, size",
    [
        (ResNet18, 11_689_512),
        (ResNet34, 21_797_672),
        (ResNet101, 44_549_160),
        (ResNet152, 60_192_808),
        (lambda: ResNet50(variant="d"), 25_576_264),
        (lambda: ResNet50(variant="chainer"), 25_557_096),
    ],
)
def test_other_depths_and_variants_have_the_known_sizes(make, size):
    """Those of torchvision and timm (ResNet-50-D); Chainer's has a bias of 64 in the stem."""
    assert make().count_params() == size


@each(stride=[1, 2], size=[5, 6])
def test_blur_filters_each_channel_by_itself(stride, size):
    x = np.random.default_rng(3).normal(size=(2, 3, size, size + 1)).astype("f")
    framed = np.pad(x.astype("d"), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(framed, (3, 3), (2, 3))[:, :, ::stride, ::stride]
    expected = (windows * np.outer([1, 2, 1], [1, 2, 1]) / 16).sum((4, 5))
    np.testing.assert_allclose(blur(x, stride).array, expected, rtol=1e-5, atol=1e-6)


@each(h=[4, 5], w=[6, 3])
def test_halved_images_are_means_of_what_is_there(h, w):
    x = np.random.default_rng(3).normal(size=(2, 3, h, w)).astype("f")
    expected = [[x[:, :, i : i + 2, j : j + 2].mean((2, 3)) for j in range(0, w, 2)] for i in range(0, h, 2)]
    np.testing.assert_allclose(halved(x).array, np.array(expected).transpose(2, 3, 0, 1), rtol=1e-5, atol=1e-6)


@each(kind=[Basic, Bottleneck], in_channels=[16, 12])
def test_what_strided_convolutions_read_is_blurred_from_16_channels_on(kind, in_channels):
    """The same numbers as a block without, on blurred inputs of the strided convolutions."""
    block = stirred(kind(in_channels, 16, 2, Options(blurs=True)))
    x = np.random.default_rng(2).normal(size=(3, in_channels, 6, 6)).astype("f")
    is_basic = kind is Basic
    seen = blur(x).array if in_channels == 16 else x
    h = np.maximum(normalized(block.conv1, block.bn1, seen if is_basic else x, 2 if is_basic else 1), 0)
    if not is_basic:
        h = np.maximum(normalized(block.conv2, block.bn2, blur(h).array, 2), 0)
    last = (block.conv2, block.bn2) if is_basic else (block.conv3, block.bn3)
    expected = normalized(*last, h) + normalized(block.shortcut.conv, block.shortcut.bn, seen, 2)
    np.testing.assert_allclose(block(x).array, np.maximum(expected, 0), rtol=1e-4, atol=1e-4)


def test_resnet_d_takes_means_in_front_of_its_shortcuts():
    block, x = stirred(Bottleneck(4, 2, 2, Options(average_shortcut=True))), images(5)[:, :1].repeat(4, 1)
    assert block.shortcut.conv.stride == (1, 1)
    h = np.maximum(normalized(block.conv1, block.bn1, x), 0)
    h = np.maximum(normalized(block.conv2, block.bn2, h, 2), 0)
    shortcut = normalized(block.shortcut.conv, block.shortcut.bn, halved(x).array)
    expected = np.maximum(normalized(block.conv3, block.bn3, h) + shortcut, 0)
    np.testing.assert_allclose(block(x).array, expected, rtol=1e-4, atol=1e-4)


def test_stochastic_depth_drops_residuals_of_whole_images():
    """Of a dropped image the shortcut is left, of others the residual counts 1 / (1 - ratio); none in evaluation."""
    model = ResNet(10, (2, 2, 1, 0), stochastic_depth=0.8)
    assert [block.drop_path for block in model.blocks] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    block = stirred(Basic(4, 4, 1))
    x = images(6, 64)[:, :1].repeat(4, 1)
    before = block(x).array
    residual = normalized(block.conv2, block.bn2, np.maximum(normalized(block.conv1, block.bn1, x), 0))
    block.drop_path = 0.25
    y = block(x).array
    is_dropped = np.isclose(y, np.maximum(x, 0), atol=1e-4).all((1, 2, 3))
    assert 4 <= is_dropped.sum() <= 30
    np.testing.assert_allclose(y[~is_dropped], np.maximum(x + residual / 0.75, 0)[~is_dropped], rtol=1e-3, atol=1e-3)
    block.drop_path = 0.0
    np.testing.assert_array_equal(block(x).array, before)
    block.drop_path = 0.25
    with dbrdist.using_config("train", False):
        first, second = block(x).array, block(x).array
    np.testing.assert_array_equal(first, second)


@each(**{"fan, channels": [("fan_out", 0), ("fan_in", 1)]}, variant=["plain", "d"])
def test_the_variance_of_initial_weights_is_two_over_the_fan(fan, channels, variant):
    """By the shapes (out, in, k, k): out k k or in k k numbers; of 3 or more standard errors of 2 / fan nothing is."""
    model = ResNet(10, (1, 1, 0, 0), fan=fan, variant=variant)
    kernels = [p.array for path, p in model.namedparams() if p.ndim == 4]
    assert len(kernels) == (9 if variant == "plain" else 11)
    for W in kernels:
        expected = 2 / (W.shape[channels] * W.shape[2] * W.shape[3])
        assert W.var() == pytest.approx(expected, rel=4.5 * (2 / W.size) ** 0.5)


def test_weights_of_the_last_layer_begin_with_a_deviation_of_a_hundredth():
    """Goyal et al. 2017, section 5.1: drawn with a standard deviation of 0.01; 4.5 standard errors of it."""
    W = ResNet(1000, (1, 1, 0, 0)).fc.W.array
    assert W.std() == pytest.approx(0.01, rel=4.5 / (2 * W.size) ** 0.5)


def test_scales_start_uniformly_where_that_is_asked_for():
    gammas = [p.array for path, p in ResNet(10, (1, 1, 1, 0), uniform_gamma=True).namedparams() if "gamma" in path]
    values = np.concatenate(gammas)
    assert 0 <= values.min() < 0.01 < 0.99 < values.max() <= 1
    assert values.mean() == pytest.approx(0.5, abs=0.03)
    assert values.var() == pytest.approx(1 / 12, rel=0.1)
    model = ResNet(10, (1, 0, 0, 0), uniform_gamma=True, zero_gamma=True)
    assert not model.blocks[0].bn3.gamma.array.any()
    assert model.blocks[0].bn2.gamma.array.all()


def test_a_log_constant_bias_makes_the_first_binary_cross_entropy_small():
    model = ResNet(1000, (1, 0, 0, 0), log_constant_bias=True)
    np.testing.assert_allclose(model.fc.b.array, -6.907755279, rtol=1e-7)
    assert not ResNet(10, (1, 0, 0, 0)).fc.b.array.any()


def test_pooling_of_chainers_example_has_no_padding_and_covers_all():
    seen = {}
    for variant in ("plain", "chainer"):
        model = ResNet(10, (1, 0, 0, 0), variant=variant)
        model.blocks[0].forward = lambda h, key=variant: seen.setdefault(key, h)
        model.fc.forward = lambda h: h
        model(images(224, 1))
    assert [h.shape for h in seen.values()] == [(1, 64, 56, 56)] * 2
    assert model.conv.b is not None


def test_blurred_pooling_takes_maxima_at_stride_1():
    model = ResNet(10, (1, 0, 0, 0), blur_pooling="all")
    model.blocks[0].forward = lambda h: h
    model.fc.forward = lambda h: h
    x = images(32)
    h = np.maximum(normalized(model.conv, model.bn, x, 2), 0)
    framed = np.pad(h, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    maxima = np.lib.stride_tricks.sliding_window_view(framed, (3, 3), (2, 3)).max((4, 5))
    np.testing.assert_allclose(model(x).array, blur(maxima, 2).array.mean((2, 3)), rtol=1e-4, atol=1e-5)


@each(
    **{
        "settings, words": [
            ({"variant": "e"}, "variant: expected 'plain', 'd', 'chainer', got 'e'"),
            ({"blur_pooling": True}, "blur_pooling: expected 'none', 'convolutions', 'all', got True"),
            ({"fan": "both"}, "fan: expected 'fan_out', 'fan_in', got 'both'"),
            ({"stochastic_depth": 1.0}, "stochastic_depth: expected a number from 0 to below 1, got 1.0"),
        ]
    }
)
def test_settings_that_there_are_not_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        ResNet(10, (1, 0, 0, 0), **settings)


def stirred(model):
    """With scales and shifts at which each ReLU cuts some off and lets some pass."""
    rng = np.random.default_rng(1)
    for p in model.params():
        if p.ndim == 1:
            p.array[...] = rng.normal(0, 1, p.shape)
    return model


def normalized(conv, bn, x, stride=1):
    h = F.convolution_2d(x, conv.W.array, None, stride, conv.W.shape[2] // 2).array.astype("d")
    h = (h - h.mean((0, 2, 3), keepdims=True)) / np.sqrt(h.var((0, 2, 3), keepdims=True) + 2e-5)
    return (h * bn.gamma.array[:, None, None] + bn.beta.array[:, None, None]).astype("f")


def through(block, x, strides, projects):
    """A block of convolutions with these strides."""
    h, last = x, len(strides)
    for i, stride in enumerate(strides, 1):
        h = normalized(getattr(block, f"conv{i}"), getattr(block, f"bn{i}"), h, stride)
        h = h if i == last else np.maximum(h, 0)
    shortcut = block.shortcut if projects else None
    return np.maximum(h + (normalized(shortcut.conv, shortcut.bn, x, max(strides)) if projects else x), 0)


@each(
    **{
        "make, strides, projects": [
            (lambda: Basic(4, 4, 1), (1, 1), False),
            (lambda: Basic(4, 6, 1), (1, 1), True),
            (lambda: Basic(4, 4, 2), (2, 1), True),
            (lambda: Bottleneck(4, 1, 1), (1, 1, 1), False),
            (lambda: Bottleneck(4, 2, 1), (1, 1, 1), True),
            (lambda: Bottleneck(4, 1, 2), (1, 2, 1), True),
            (lambda: Bottleneck(4, 1, 2, Options(stride_in_3x3=False)), (2, 1, 1), True),
        ]
    }
)
def test_a_block_is_its_convolutions_and_its_shortcut(make, strides, projects):
    block, x = stirred(make()), np.random.default_rng(2).normal(size=(3, 4, 6, 6)).astype("f")
    np.testing.assert_allclose(block(x).array, through(block, x, strides, projects), rtol=1e-4, atol=1e-4)


def test_the_network_for_small_images_is_its_layers():
    model, x = stirred(ResNetCIFAR(7, 14)), images(12)
    h = np.maximum(normalized(model.conv, model.bn, x), 0)
    for i, block in enumerate(model.blocks):
        h = through(block, h, (2 if i in (2, 4) else 1, 1), i in (2, 4))
    assert [b.conv2.W.shape for b in model.blocks] == [(n, n, 3, 3) for n in (16, 16, 32, 32, 64, 64)]
    expected = h.mean((2, 3)) @ model.fc.W.array.T + model.fc.b.array
    np.testing.assert_allclose(model(x).array, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@each(stride_in_3x3=[True, False])
def test_the_network_for_large_images_is_its_layers(stride_in_3x3):
    model, x = stirred(ResNet(7, (2, 1, 0, 0), stride_in_3x3)), images(20)
    h = np.maximum(normalized(model.conv, model.bn, x, 2), 0)
    framed = np.pad(h, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    h = np.lib.stride_tricks.sliding_window_view(framed, (3, 3), (2, 3))[:, :, ::2, ::2].max((4, 5))
    halving = (1, 2, 1) if stride_in_3x3 else (2, 1, 1)
    for i, block in enumerate(model.blocks):
        h = through(block, h, halving if i == 2 else (1, 1, 1), i != 1)
    assert [b.conv2.W.shape[0] for b in model.blocks] == [64, 64, 128]
    expected = h.mean((2, 3)) @ model.fc.W.array.T + model.fc.b.array
    np.testing.assert_allclose(model(x).array, expected, rtol=1e-3, atol=1e-3)


@each(depth=[7, 2, 9, 21, 0])
def test_other_depths_are_refused(depth):
    with pytest.raises(ValueError, match=f"ResNetCIFAR: expected a depth of 6 n [+] 2, such as 20 or 56, got {depth}"):
        ResNetCIFAR(10, depth)


@pytest.mark.slow
@each(make=[lambda **kw: ResNetCIFAR(10, 8, **kw), ResNet20, ResNet56, lambda **kw: ResNet(10, (1, 1, 1, 0), **kw)])
def test_last_scales_are_one_unless_zero_is_asked_for(make):
    for options, expected in (({}, 1), ({"zero_gamma": False}, 1), ({"zero_gamma": True}, 0)):
        blocks = make(**options).blocks
        for block in (blocks[0], blocks[-1]):
            norms = [link for name, link in sorted(vars(block).items()) if name.startswith("bn")]
            assert [np.unique(bn.gamma.array).tolist() for bn in norms] == [[1]] * (len(norms) - 1) + [[expected]]


def gradients(initial, x, dtype):
    """Loss and gradients of a ResNet-20 with given parameters."""
    with dbrdist.using_config("dtype", dtype):
        model = ResNet20()
    for p, values in zip(model.params(), initial):
        p.array = values.astype(dtype)
    loss = F.softmax_cross_entropy(model(x.astype(dtype)), LABELS)
    loss.backward()
    return loss.item(), [p.grad for p in model.params()]


@pytest.mark.slow
def test_gradients_of_a_whole_network_agree_with_float64():
    """float32 on the fastest kernels and float64 on the reference: layers, fusion and accumulation together.

    In about one of twenty draws an input of some ReLU lies so near zero that both types see it on different sides,
    which moves gradients by per cents: of three draws, two have to agree closely.
    """
    errors = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        initial = [p.array + 0.01 * rng.standard_normal(p.shape, np.float32) for p in ResNet20().params()]
        x = rng.standard_normal((4, 3, 16, 16))
        loss, grads = gradients(initial, x, np.float32)
        expected_loss, expected = gradients(initial, x, np.float64)
        assert loss == pytest.approx(expected_loss, rel=1e-4)
        errors.append(max(np.abs(g - e).max() / np.abs(e).max() for g, e in zip(grads, expected)))
    assert sorted(errors)[1] < 1e-4
    assert max(errors) < 0.2


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def test_a_block_has_a_projection_where_the_shape_changes():
    from dbrdist.models.resnet import Basic

    for in_channels, stride, projected in ((4, 1, False), (4, 2, True), (3, 1, True), (3, 2, True)):
        block = Basic(in_channels, 4, stride)
        assert block.is_projected == projected == hasattr(block, "shortcut")
        assert block(ones(1, in_channels, 4, 4)).shape == (1, 4, 4 // stride, 4 // stride)
