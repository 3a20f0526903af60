"""Tests of dbrdist.links.normalization."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import dbrdist
import dbrdist.links as L
from dbrdist import Variable, initializers, kernels, optimizers, serializers
from dbrdist import functions as F
from tests.each import each
from tests.functions import references as R


@each(given=[None, 2.0, 2, np.array([1.0, 2.0], "f"), "callable"])
def test_scales_and_shifts_given_in_any_form(given):
    if isinstance(given, str):
        given = initializers.Constant(3.0)
    for make in (
        lambda: L.BatchNormalization(2, initial_gamma=given, initial_beta=given),
        lambda: L.LayerNormalization(2, initial_gamma=given, initial_beta=given),
        lambda: L.GroupNormalization(1, 2, initial_gamma=given, initial_beta=given),
    ):
        link = make()
        value = 3.0 if callable(given) else given
        assert link.gamma.array.tolist() == (np.ones(2) if given is None else np.ones(2) * value).tolist()
        assert link.beta.array.tolist() == (np.zeros(2) if given is None else np.ones(2) * value).tolist()
    rms = L.RMSNormalization(2, initial_gamma=given)
    assert (
        rms.gamma.array.tolist() == (np.ones(2) * (1 if given is None else 3.0 if callable(given) else given)).tolist()
    )


LARGE = (4, 16, 10, 10)


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype("f")


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


@pytest.mark.slow
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


X4 = np.random.default_rng(0).standard_normal((3, 4, 6, 5)).astype("f")
X2 = np.random.default_rng(1).standard_normal((5, 4)).astype("f")


def close(y, expected, tolerance=1e-5):
    expected = np.asarray(expected)
    assert y.shape == expected.shape
    np.testing.assert_allclose(y.array, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def wide(*arrays):
    return [None if a is None else np.asarray(getattr(a, "array", a), np.float64) for a in arrays]


@pytest.mark.parametrize("eps", [2e-5, 0.5])
@pytest.mark.parametrize("axis, kept", [(None, (4,)), ((0, 3), (4, 6)), (0, (4, 6, 5))])
@pytest.mark.parametrize("size", [True, False])
def test_batch_normalization_in_training_and_evaluation(eps, axis, kept, size):
    x = 3 + 0.25 * X4
    initial = {f"initial_{name}": np.linspace(0.5, 2, int(np.prod(kept))).reshape(kept) + i
               for i, name in enumerate(("gamma", "beta", "avg_mean", "avg_var"))}  # fmt: skip
    link = L.BatchNormalization(kept if size else None, decay=0.75, eps=eps, axis=axis, **initial)
    gamma, beta, mean, var = initial.values()
    axes = (0, 2, 3) if axis is None else axis
    with dbrdist.using_config("train", False):
        close(link(x), R.fixed_batch_normalization(*wide(x, gamma, beta, mean, var), eps, axes))
    expected = R.batch_normalization(
        *wide(x, gamma, beta), eps=eps, running_mean=mean, running_var=var, decay=0.75, axis=axes
    )
    close(link(x), expected, 2e-4)
    close(Variable(link.avg_mean), mean)
    close(Variable(link.avg_var), var)


def test_a_large_batch_normalization_uses_its_eps_too():
    """Large enough for a pass that may wait for the ReLU behind it."""
    x = 1e-3 * np.random.default_rng(0).standard_normal((4, 16, 10, 10)).astype("f")
    link, ones = L.BatchNormalization(16, eps=0.1), np.ones(16)
    close(F.relu(link(x)), np.maximum(R.batch_normalization(*wide(x), ones, 0 * ones, eps=0.1), 0))
    with dbrdist.using_config("train", False):
        expected = R.fixed_batch_normalization(*wide(x), ones, 0 * ones, *wide(link.avg_mean, link.avg_var), 0.1)
        close(link(x), expected)


def test_batch_normalization_without_gamma_or_beta():
    for options, gamma, beta in (({"use_gamma": False}, 1, 3), ({"use_beta": False}, 2, 0)):
        link = L.BatchNormalization(4, initial_gamma=2, initial_beta=3, **options)
        assert len(list(link.params())) == 1
        close(link(X2), R.batch_normalization(*wide(X2), gamma * np.ones(4), beta * np.ones(4)), 1e-4)
    assert L.BatchNormalization(4, dtype="float64").gamma.dtype == np.float64


@each(use_gamma=[True, False], use_beta=[True, False], is_input_wanted=[True, False])
def test_a_normalization_writes_its_gradients_where_updates_read_them(use_gamma, use_beta, is_input_wanted):
    bn = L.BatchNormalization(3, use_gamma=use_gamma, use_beta=use_beta)
    if use_gamma or use_beta:
        optimizers.SGD(0.5).setup(bn).update(lambda: F.sum(bn(np.ones((2, 3), np.float32))))
    rng = np.random.default_rng(0)
    x, gy = rng.normal(size=(2, 6, 3)).astype(np.float32)
    v = Variable(x, requires_grad=is_input_wanted)
    bn.cleargrads()
    y = bn(v)
    if y.creator is not None:
        y.grad = gy
        y.backward()
    x_hat = (x - x.mean(0)) / np.sqrt(x.var(0) + 2e-5)
    gamma = bn.gamma.array if use_gamma else 1
    for is_used, name, expected in ((use_gamma, "gamma", (gy * x_hat).sum(0)), (use_beta, "beta", gy.sum(0))):
        if is_used:
            np.testing.assert_allclose(getattr(bn, name).grad, expected, rtol=1e-4, atol=1e-5)
    if is_input_wanted:
        expected = gamma * (gy - gy.mean(0) - x_hat * (gy * x_hat).mean(0)) / np.sqrt(x.var(0) + 2e-5)
        np.testing.assert_allclose(v.grad, expected, rtol=1e-4, atol=1e-5)


X = np.random.default_rng(0).standard_normal((3, 4, 6, 5)).astype("f")


def close_to(y, expected, tolerance=1e-4):
    np.testing.assert_allclose(y.array, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def test_renormalization_follows_its_running_statistics():
    link = L.BatchRenormalization(
        4, 1.5, 0.25, 0.75, 0.1, initial_gamma=2, initial_beta=1, initial_avg_mean=0.5, initial_avg_var=3
    )
    mean, var = np.full(4, 0.5), np.full(4, 3.0)
    for _ in range(2):
        expected = R.batch_renormalization(*wide(X, link.gamma, link.beta), 1.5, 0.25, 0.1, mean, var, 0.75, True)
        close_to(link(X), expected)
        np.testing.assert_allclose(link.avg_mean, mean, rtol=1e-4)
        np.testing.assert_allclose(link.avg_var, var, rtol=1e-4)
    with dbrdist.using_config("train", False):
        close_to(link(X), R.fixed_batch_renormalization(*wide(X, link.gamma, link.beta), mean, var, 0.1))


def test_renormalization_without_bounds_to_correct_is_batch_normalization():
    plain, link = L.BatchNormalization(4), L.BatchRenormalization(4)
    np.testing.assert_allclose(link(X).array, plain(X).array, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(link.avg_var, plain.avg_var)
    assert sorted(name for name, _ in link.namedparams()) == ["/beta", "/gamma"]
    assert list(L.BatchRenormalization(4, use_gamma=False, use_beta=False).params()) == []


def test_whitening_as_a_link(tmp_path):
    link = L.DecorrelatedBatchNormalization(4, 2, 0.75, 0.1)
    np.testing.assert_array_equal(link.avg_projection, np.tile(np.eye(2), (2, 1, 1)))
    mean, projection = np.zeros((2, 2)), np.tile(np.eye(2), (2, 1, 1))
    options = {"groups": 2, "eps": 0.1, "running_mean": mean, "running_projection": projection, "decay": 0.75}
    for _ in range(2):
        close_to(link(X), R.decorrelated_batch_normalization(*wide(X), **options))
        np.testing.assert_allclose(link.avg_mean, mean, atol=1e-5)
        np.testing.assert_allclose(link.avg_projection, projection, atol=1e-5)
    serializers.save_npz(tmp_path / "a.npz", link)
    other = L.DecorrelatedBatchNormalization(4, 2)
    serializers.load_npz(tmp_path / "a.npz", other)
    with dbrdist.using_config("train", False):
        close_to(other(X), R.fixed_decorrelated_batch_normalization(*wide(X), mean, projection, 2))


def test_finetuning_and_repetition_of_whitening():
    link = L.DecorrelatedBatchNormalization(4, 1)
    link(X + 7)
    link.start_finetuning()
    batches = [X, X + 1, 2 * X]
    for x in batches:
        F.sum(F.forget(lambda v: link(v, finetune=True), Variable(x))).backward()
    np.testing.assert_allclose(link.avg_mean[0], np.mean([x.mean((0, 2, 3)) for x in batches], 0), rtol=1e-3, atol=1e-5)
    assert link.N == 3
