"""What Chainer accepts and computes, though dbrdist refuses it natively."""

import numpy as np
import pytest

import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Variable
from tests.each import each

X = np.random.RandomState(0).uniform(0.1, 0.9, (3, 4)).astype("f")


def nll(x, mean, ln_var):
    return (np.log(2 * np.pi) + ln_var + (x - mean) ** 2 / np.exp(ln_var)) / 2


@each(other=[X[:1], X[0], X[:1].astype("d"), X[:1] > 0.5])
def test_likelihoods_broadcast(other, installed):
    wide = [np.asarray(a, "d") for a in (X, other)]
    np.testing.assert_allclose(F.gaussian_nll(X, other, X).array, nll(wide[0], wide[1], wide[0]).sum(), rtol=1e-5)
    kl = (wide[0] ** 2 + np.exp(wide[1]) - wide[1] - 1) / 2
    np.testing.assert_allclose(F.gaussian_kl_divergence(X, other).array, kl.sum(), rtol=1e-5)
    bernoulli = np.log1p(np.exp(wide[0])) - wide[1] * wide[0]
    np.testing.assert_allclose(F.bernoulli_nll(other, Variable(X)).array, bernoulli.sum(), rtol=1e-5)
    mean = Variable(X[:1].copy())
    F.gaussian_nll(X, mean, X).backward()
    np.testing.assert_allclose(mean.grad, ((X[:1] - X) / np.exp(X)).sum(0, keepdims=True), rtol=1e-4)
    with pytest.raises(ValueError, match="gaussian_nll: mean: expected shape"):
        F.gaussian_nll(X, X[:2], X)


def test_natively_likelihoods_want_one_shape():
    with pytest.raises(ValueError, match="gaussian_nll: mean: expected shape"):
        F.gaussian_nll(X, X[:1], X)


def test_negative_ids_count_from_the_end(installed):
    import chainer

    W = Variable(np.arange(6, dtype="f").reshape(3, 2))
    with pytest.warns(UserWarning, match=r"ids from -1 to 1 \(accepted, as Chainer did\)"):
        y = F.embed_id(np.array([-1, 1]), W)
    assert y.array.tolist() == [[4, 5], [2, 3]]
    F.sum(y).backward()
    assert W.grad.tolist() == [[0, 0], [1, 1], [1, 1]]
    with chainer.using_config("debug", True), pytest.raises(ValueError, match="embed_id: x: expected ids from 0 to 2"):
        F.embed_id(np.array([-1]), W)
    for wrong in (-4, 3):
        with pytest.raises(ValueError, match="embed_id: x: expected ids from 0 to 2"):
            F.embed_id(np.array([wrong]), W)


def test_natively_negative_ids_are_refused():
    with pytest.raises(ValueError, match="embed_id: x: expected ids from 0 to 2"):
        F.embed_id(np.array([-1]), np.zeros((3, 2), "f"))


def test_labels_of_other_classes(installed):
    """What Chainer's formulas make of them."""
    t = np.array([3, -2, 1])
    x = X[:, 0]
    with pytest.warns(UserWarning, match="as Chainer did"):
        y = F.sigmoid_cross_entropy(x, t, reduce="no")
    np.testing.assert_allclose(y.array, np.log1p(np.exp(x)) - t * x, rtol=1e-5)
    with pytest.warns(UserWarning, match="as Chainer did"):
        y = F.contrastive(X, X + 1, np.array([2, 0, -1]), reduce="no")
    np.testing.assert_allclose(y.array, np.array([2, 0, -1]) * 4.0 / 2, rtol=1e-5)


@each(size=[4.0, np.float64(4), np.float32(4)])
def test_quotients_as_numbers_of_channels(size, installed):
    x = np.ones((1, 4, 5, 5), "f")
    with pytest.warns(UserWarning, match="in_channels: expected an integer, got float"):
        link = L.Convolution2D(size, 2, 3)
    assert link.W.shape == (2, 4, 3, 3) and link(x).shape == (1, 2, 3, 3)
    with pytest.raises(TypeError):
        L.Convolution2D(4.5, 2, 3)


def test_natively_a_quotient_is_refused():
    with pytest.raises(TypeError, match=r"in_channels: expected an integer, got float 4\.0; write a // b"):
        L.Convolution2D(4.0, 2, 3)


# These are right natively, too.


@each(size=[np.int64(4), np.array(4), (4,), [4]])
def test_sizes_of_other_types(size):
    x = np.random.RandomState(0).normal(size=(8, 4)).astype("f")
    for make in (L.BatchNormalization, L.LayerNormalization) if not isinstance(size, list) else (L.BatchNormalization,):
        np.testing.assert_array_equal(make(size)(x).array, make(4)(x).array)
    assert L.BatchNormalization(4, decay=np.array(0.5), eps=np.array(1e-3)).eps == 1e-3


def test_no_label_is_ignored():
    t = np.array([1, 0, 3])
    np.testing.assert_array_equal(
        F.softmax_cross_entropy(X, t, ignore_label=None).array, F.softmax_cross_entropy(X, t).array
    )
    with pytest.raises(ValueError, match="labels from 0 to 3, got labels from -1 to 1"):
        F.softmax_cross_entropy(X, np.array([1, 0, -1]), ignore_label=None)


def test_zero_dimensional_arrays_as_integers():
    assert [y.array.tolist() for y in F.split_axis(X, np.array(2), np.array(1))] == [
        X[:, :2].tolist(),
        X[:, 2:].tolist(),
    ]
    assert F.swapaxes(X, np.array(0), np.array(1)).shape == (4, 3)
    assert F.sum(X, 1, keepdims=np.True_).shape == (3, 1)
    assert len(L.MLPConvolution2D(2, np.array([3, 4]), 1)) == 2
    with pytest.raises(TypeError, match="axis: expected an int, got bool True"):
        F.expand_dims(X, True)


def test_negative_labels_count_from_the_end(installed):
    scores = X - 0.5
    sign = np.where(np.eye(4)[[0, 3, 2]], -1, 1)
    with pytest.warns(UserWarning, match=r"hinge: t: .* from -1 to 2 \(accepted, as Chainer did\)"):
        y = F.hinge(scores, np.array([0, -1, 2], np.int8), reduce="no")
    np.testing.assert_allclose(y.array, np.maximum(1 + sign * scores, 0), rtol=1e-6)
    t, words = np.array([0, 1]), np.array([[2, -1], [-2, 0]])
    with pytest.warns(UserWarning, match=r"black_out: samples: .* from -2 to 2 \(accepted") as given:
        y = F.black_out(X[:2], t, X.T @ X, words)
    assert len(given) == 1
    np.testing.assert_allclose(y.array, F.black_out(X[:2], t, X.T @ X, words % 4).array, rtol=1e-6)
    samples = np.concatenate([t[:, None], words], axis=1)
    with pytest.warns(UserWarning, match="negative_sampling: samples: .* from -2 to 2"):
        y = F.negative_sampling(X[:2], t, X.T @ X, None, 2, samples=samples)
    expected = F.negative_sampling(X[:2], t, X.T @ X, None, 2, samples=samples % 4)
    np.testing.assert_allclose(y.array, expected.array, rtol=1e-6)


@each(label=[4, -5])
def test_labels_of_no_class_are_refused(label, installed):
    with pytest.raises(ValueError, match="hinge: t: expected labels from 0 to 3"):
        F.hinge(X, np.array([0, label, 1]))
    with pytest.raises(ValueError, match="black_out: samples: expected labels from 0 to 3"):
        F.black_out(X[:2], np.array([0, 1]), X.T @ X, np.array([[label], [0]]))
