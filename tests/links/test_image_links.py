"""Links around convolution and batch normalization."""

import gc

import numpy as np
import pytest

import dbrdist
from dbrdist import Variable, kernels
from dbrdist import functions as F
from dbrdist import links as L

LARGE = (4, 16, 10, 10)


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype("f")


def test_convolution_calls_the_function():
    link = L.Convolution2D(4, 6, 3, stride=2, pad=1, dilate=(1, 2), groups=2, initial_bias=0.5)
    x = draw(0, 2, 4, 7, 9)
    expected = F.convolution_2d(x, link.W, np.full(6, 0.5, "f"), 2, 1, dilate=(1, 2), groups=2)
    np.testing.assert_array_equal(link(x).array, expected.array)
    assert [(name, p.shape) for name, p in link.namedparams()] == [("/W", (6, 2, 3, 3)), ("/b", (6,))]


@pytest.mark.parametrize("arguments", [(None, 6, 3), (6, 3)])
def test_convolution_learns_its_input_size(arguments):
    link = L.Convolution2D(*arguments, nobias=True)
    assert not link.W.is_initialized
    assert link(draw(0, 1, 5, 4, 4)).shape == (1, 6, 2, 2)
    assert link.W.shape == (6, 5, 3, 3)
    assert link.b is None
    assert "in_channels=5" in repr(link)


def test_deconvolution_calls_the_function():
    link = L.Deconvolution2D(None, 3, 4, stride=2, pad=1)
    x = draw(0, 2, 8, 4, 4)
    assert link(x).shape == (2, 3, 8, 8)
    np.testing.assert_array_equal(link(x).array, F.deconvolution_2d(x, link.W, link.b, 2, 1).array)


def test_channels_that_groups_do_not_divide():
    with pytest.raises(ValueError, match="Convolution2D: out_channels: expected a multiple of groups=4, got 6"):
        L.Convolution2D(4, 6, 3, groups=4)
    with pytest.raises(ValueError, match="Convolution2D: in_channels: expected a multiple of groups=2, got 5"):
        L.Convolution2D(None, 6, 3, groups=2)(draw(0, 1, 5, 4, 4))


@pytest.mark.parametrize("shape", [LARGE, (3, 16, 2, 2)])
def test_running_statistics(shape):
    """Seen at once although a large output is still pending, and used in evaluation."""
    link, x = L.BatchNormalization(16, decay=0.75), draw(0, *shape) + 3
    y = link(x)
    np.testing.assert_allclose(link.avg_mean, 0.25 * x.mean((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(link.avg_var, 0.75 + 0.25 * x.var((0, 2, 3), ddof=1), rtol=1e-5)
    before = link.avg_mean.copy()
    F.relu(y)
    np.testing.assert_array_equal(link.avg_mean, before)
    with dbrdist.using_config("train", False):
        fixed = link(x)
    np.testing.assert_array_equal(link.avg_mean, before)
    expand = (slice(None), None, None)
    np.testing.assert_allclose(
        fixed.array, (x - link.avg_mean[expand]) / np.sqrt(link.avg_var[expand] + 2e-5), rtol=1e-4, atol=1e-5
    )


def test_statistics_move_once_however_the_output_is_used():
    def statistics(use):
        link = L.BatchNormalization(16)
        use(link(Variable(draw(0, *LARGE) + 1)))
        return np.stack([link.avg_mean, link.avg_var])

    def relu_and_read(y):
        F.relu(y)
        assert y.array is not None

    expected = statistics(lambda y: y.array)
    for use in (lambda y: None, F.relu, relu_and_read, lambda y: y + y):
        np.testing.assert_array_equal(statistics(use), expected)
    assert not np.array_equal(expected[0], np.zeros(16))


def test_dropped_output_without_a_graph_counts():
    link = L.BatchNormalization(16)
    with dbrdist.no_backprop_mode():
        link(draw(0, *LARGE) + 1)
    assert abs(link.avg_mean).min() > 0


def test_a_normalization_that_fails_is_not_tried_again(monkeypatch):
    calls = []

    def fail(*args):
        calls.append(args)
        raise ValueError("broken on purpose")

    monkeypatch.setattr(kernels, "bn_forward", fail)
    with pytest.raises(ValueError, match="on purpose"):
        L.BatchNormalization(3)(np.ones((2, 3), np.float32))
    gc.collect()
    assert len(calls) == 1


def test_finetuning_averages_all_batches_alike():
    link = L.BatchNormalization(3)
    batches = [draw(i, 4, 3, 5, 5) for i in range(3)]
    link.start_finetuning()
    for x in batches:
        link(x, finetune=True)
    np.testing.assert_allclose(
        link.avg_mean, np.mean([x.mean((0, 2, 3)) for x in batches], axis=0), rtol=1e-4, atol=1e-7
    )
    assert link.N == 3


@pytest.mark.parametrize(("axis", "kept"), [(None, (3,)), ((0,), (3, 4, 5)), ((0, 3), (3, 4))])
def test_size_from_the_first_batch(axis, kept):
    link = L.BatchNormalization(axis=axis)
    y = link(draw(0, 6, 3, 4, 5))
    assert link.gamma.shape == link.beta.shape == link.avg_mean.shape == kept
    axes = (0, 2, 3) if axis is None else axis
    np.testing.assert_allclose(y.array.mean(axes), np.zeros(kept), atol=1e-5)


def test_parameters_may_be_left_out():
    link, x = L.BatchNormalization(3, use_gamma=False, use_beta=False), draw(0, 4, 3, 2, 2)
    assert list(link.params()) == []
    np.testing.assert_allclose(link(x).array.std((0, 2, 3)), np.ones(3), rtol=1e-4)


def test_mixed_precision_keeps_statistics_in_float32():
    with dbrdist.using_config("dtype", "mixed16"):
        link = L.BatchNormalization(3)
    y = link(draw(0, 4, 3, 2, 2).astype(np.float16))
    assert y.dtype == np.float16
    assert link.avg_mean.dtype == link.gamma.dtype == np.float32


def test_initial_values():
    link = L.BatchNormalization(
        2, initial_gamma=3, initial_beta=np.array([1, 2]), initial_avg_mean=4, initial_avg_var=np.array([5.0, 6.0])
    )
    assert [list(a) for a in (link.gamma.array, link.beta.array, link.avg_mean, link.avg_var)] == [
        [3, 3], [1, 2], [4, 4], [5, 6]
    ]  # fmt: skip


def test_saving_keeps_statistics(tmp_path):
    link, other, late = L.BatchNormalization(16), L.BatchNormalization(16), L.BatchNormalization()
    held = link(draw(0, *LARGE))  # pending while it is saved
    dbrdist.serializers.save_npz(tmp_path / "bn.npz", link)
    assert held.shape == LARGE
    for target in (other, late):
        dbrdist.serializers.load_npz(tmp_path / "bn.npz", target)
        np.testing.assert_array_equal(target.avg_mean, link.avg_mean)
        np.testing.assert_array_equal(target.avg_var, link.avg_var)
        assert target.gamma.shape == (16,)
    assert abs(other.avg_mean).min() > 0


# ---- layer and group normalization


@pytest.mark.parametrize("size", [5, None])
def test_layer_normalization_link(size):
    link, x = L.LayerNormalization(size, eps=0.5, initial_gamma=2.0, initial_beta=1.0), draw(0, 3, 5)
    y = link(x)
    expected = 2 * (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 0.5) + 1
    np.testing.assert_allclose(y.array, expected, rtol=1e-5, atol=1e-6)
    assert {name: p.shape for name, p in link.namedparams()} == {"/gamma": (5,), "/beta": (5,)}
    np.testing.assert_allclose(L.LayerNormalization(5).gamma.array, np.ones(5))
    assert L.LayerNormalization().eps == 1e-6


@pytest.mark.parametrize("size", [6, None])
def test_group_normalization_link(size):
    link, x = L.GroupNormalization(3, size, eps=0.5, initial_gamma=2.0, initial_beta=1.0), draw(0, 2, 6, 4, 5)
    y = link(x)
    rows = x.reshape(2, 3, -1)
    scaled = (rows - rows.mean(2, keepdims=True)) / np.sqrt(rows.var(2, keepdims=True) + 0.5)
    np.testing.assert_allclose(y.array, 2 * scaled.reshape(x.shape) + 1, rtol=1e-5, atol=1e-5)
    assert {name: p.shape for name, p in link.namedparams()} == {"/gamma": (6,), "/beta": (6,)}
    assert (L.GroupNormalization(2).eps, L.GroupNormalization(2, 4).beta.array.tolist()) == (1e-5, [0.0] * 4)


def test_arguments_of_layer_and_group_normalization_are_checked():
    one = np.ones(4, np.float32)
    with pytest.raises(ValueError, match=r"layer_normalization: x: expected 2 axes, got .*; reshape it"):
        F.layer_normalization(np.ones((2, 4, 3), np.float32), one, one)
    with pytest.raises(ValueError, match=r"layer_normalization: beta: expected shape \(4,\)"):
        F.layer_normalization(np.ones((2, 4), np.float32), one, one[:3])
    with pytest.raises(ValueError, match="group_normalization: groups: expected a divisor of the 4 channels"):
        F.group_normalization(np.ones((2, 4), np.float32), 3, one, one)
    with pytest.raises(ValueError, match=r"group_normalization: gamma: expected shape \(4,\)"):
        F.group_normalization(np.ones((2, 4), np.float32), 2, one[:2], one)
    with pytest.raises(ValueError, match="group_normalization: x: expected at least 2 axes"):
        F.group_normalization(one, 2, one, one)
    with pytest.raises(TypeError, match="group_normalization"):
        F.group_normalization(np.ones((2, 4), int), 2, one, one)
    with pytest.raises(TypeError, match="layer_normalization"):
        F.layer_normalization(np.ones((2, 4), int), one, one)
