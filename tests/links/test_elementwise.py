"""Tests of dbrdist.links.elementwise."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import dbrdist
import dbrdist.links as L
from dbrdist import serializers
from tests.each import each
from tests.functions import references as R


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def test_scale_and_bias_along_axes():
    x, w = np.arange(6, dtype="f").reshape(1, 2, 3), np.array([2, 3], "f")
    np.testing.assert_array_equal(L.Scale()(x, w).array, x * w[:, None])
    np.testing.assert_array_equal(L.Scale(axis=2)(x, ones(3) * 2).array, x * 2)
    np.testing.assert_array_equal(L.Bias()(x, w).array, x + w[:, None])
    link = L.Scale(W_shape=(2,), bias_term=True)
    link.W.array[:], link.b.array[:] = w, [1, 2]
    np.testing.assert_array_equal(link(x).array, x * w[:, None] + np.array([[1], [2]]))
    assert L.Scale(W_shape=(2,), bias_term=True, bias_shape=(2, 3)).b.shape == (2, 3)
    given = L.Scale(bias_term=True, bias_shape=(2,))
    given.b.array[:] = [1, 2]
    np.testing.assert_array_equal(given(x, w).array, x * w[:, None] + np.array([[1], [2]]))


def test_a_file_with_a_bias_fills_a_scale_without_one(tmp_path):
    np.savez(tmp_path / "file.npz", W=np.array([3.0, 4.0], "f"), b=np.array([5.0, 6.0], "f"))
    link = L.Scale(W_shape=(2,))
    serializers.load_npz(tmp_path / "file.npz", link)
    assert link.W.array.tolist() == [3.0, 4.0] and not hasattr(link, "bias")


X4 = np.random.default_rng(0).standard_normal((3, 4, 6, 5)).astype("f")


def close(y, expected, tolerance=1e-5):
    expected = np.asarray(expected)
    assert y.shape == expected.shape
    np.testing.assert_allclose(y.array, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def test_elementwise_links():
    W, b = np.arange(1.0, 7).reshape(6), np.arange(6.0)
    scale = L.Scale(axis=2, W_shape=(6,), bias_term=True)
    scale.W.array[...], scale.b.array[...] = W, b
    close(scale(X4), R.bias(R.scale(X4, W, 2), b, 2))
    close(L.Scale(axis=2)(X4, W.astype("f")), R.scale(X4, W, 2))
    close(L.Scale(axis=2, bias_term=True, bias_shape=(6,))(X4, W.astype("f")), R.scale(X4, W, 2))
    bias = L.Bias(axis=3, shape=(5,))
    bias.b.array[...] = np.arange(5)
    close(bias(X4), X4 + np.arange(5))
    close(L.PReLU((4,), 0.5)(X4), R.prelu(X4, np.full(4, 0.5)))
    close(L.Swish((4,), 2.0)(X4), R.swish(X4, np.full(4, 2.0)))


def test_scale_and_bias():
    x = np.ones((2, 3, 4), np.float32)
    scaled = L.Scale(W_shape=(3,), bias_term=True)
    scaled.W.array[...] = [1, 2, 3]
    scaled.b.array[...] = [10, 20, 30]
    np.testing.assert_array_equal(scaled(x).array[0, :, 0], [11, 22, 33])
    np.testing.assert_array_equal(L.Bias()(x, np.array([1, 2, 3], np.float32)).array[0, :, 0], [2, 3, 4])
    assert sorted(p.name for p in scaled.params()) == ["W", "b"]
    with pytest.raises(TypeError, match="Scale: expected x, got 2 arguments"):
        scaled(x, x)


def test_learned_activations():
    x = np.array([[-2.0, 3.0]], np.float32)
    np.testing.assert_array_equal(L.PReLU()(x).array, [[-0.5, 3.0]])
    swish = L.Swish(None)
    np.testing.assert_allclose(swish(x).array, x / (1 + np.exp(-x)), rtol=1e-6)
    assert swish.beta.shape == (2,)


def test_a_parameter_link_returns_its_parameter():
    link = L.Parameter(np.ones(3, np.float32))
    assert link() is link.W


def test_the_bias_of_scale_is_a_child_as_in_chainer(tmp_path):
    link = L.Scale(W_shape=(3,), bias_term=True)
    link.bias.b.array[:] = [1, 2, 3]
    assert [name for name, _ in sorted(link.namedparams())] == ["/W", "/bias/b"] and link.b is link.bias.b
    path = str(tmp_path / "a.npz")
    for names in ({"W": ones(3) * 4, "bias/b": ones(3) * 5}, {"W": ones(3) * 4, "b": ones(3) * 5}):  # then, an old file
        np.savez(path, **names)
        new = L.Scale(W_shape=(3,), bias_term=True)
        dbrdist.serializers.load_npz(path, new)
        assert new.W.array.tolist() == [4.0] * 3 and new.bias.b.array.tolist() == [5.0] * 3
    np.savez(path, W=ones(3), b=ones(4))
    with pytest.raises(dbrdist.errors.CheckpointError, match=r"b: expected shape \(3,\) .* found \(4,\)"):
        dbrdist.serializers.load_npz(path, L.Scale(W_shape=(3,), bias_term=True))


@pytest.mark.parametrize("is_child", [False, True])
def test_the_state_of_an_optimizer_from_when_its_bias_was_its_own_loads(tmp_path, is_child):
    def made():
        link = L.Scale(W_shape=(3,), bias_term=True)
        model = dbrdist.Chain(scale=link) if is_child else link
        return link, dbrdist.optimizers.MomentumSGD(0.5).setup(model)

    link, optimizer = made()
    link.W.grad, link.bias.b.grad = ones(3) * 2, ones(3) * 3
    optimizer.update()
    path = str(tmp_path / "a.npz")
    dbrdist.serializers.save_npz(path, optimizer)
    with np.load(path) as file:
        entries = {name.replace("bias/b", "b"): file[name] for name in file.files}
    np.savez(path, **entries)
    new, loaded = made()
    dbrdist.serializers.load_npz(path, loaded)
    assert loaded.t == 1 and new.bias.b.update_rule.t == 1
    for p, old in ((new.W, link.W), (new.bias.b, link.bias.b)):
        np.testing.assert_array_equal(p.update_rule.state["v"], old.update_rule.state["v"])
    del entries["scale/b/t" if is_child else "b/t"]
    np.savez(path, **entries)
    with pytest.raises(dbrdist.errors.CheckpointError, match="b/t"):
        dbrdist.serializers.load_npz(path, made()[1])


def test_a_pickle_of_scale_from_when_its_bias_was_its_own_loads():
    link = L.Scale(W_shape=(3,), bias_term=True)
    state = link.__getstate__()
    b = dbrdist.Parameter(np.array([1, 2, 3], "f"))
    state = {**state, "_params": ["W", "b"], "b": b}
    del state["bias"], state["_children"]
    old = L.Scale.__new__(L.Scale)
    old.__setstate__(state)
    assert (
        old.bias.b is b
        and old.bias.b.array.tolist() == [1, 2, 3]
        and [n for n, _ in sorted(old.namedparams())] == ["/W", "/bias/b"]
    )
    x = np.ones((2, 3), "f")
    np.testing.assert_array_equal(old(x).array, x + [1, 2, 3])
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(old))(x).array, old(x).array)


@each(with_bias=[False, True])
def test_a_pickle_of_chainers_scale_has_a_bias_where_it_has_that_child(with_bias):
    state = L.Scale(W_shape=(3,), bias_term=with_bias).__getstate__()
    del state["with_bias"]  # which Chainer's lacks
    made = L.Scale.__new__(L.Scale)
    made.__setstate__(dict(state))
    assert made.with_bias is with_bias
    np.testing.assert_array_equal(made(np.full((2, 3), 2, "f")).array, np.full((2, 3), 2, "f"))
