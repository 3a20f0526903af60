"""Links and models: every argument away from its default is seen in what they compute.

What is expected comes from the plain formulas of ``tests/functions/references``, with the link's own parameters.
"""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
from dbrdist import Variable, models
from dbrdist import functions as F
from dbrdist import links as L
from tests.functions import references as R

X4 = np.random.default_rng(0).standard_normal((3, 4, 6, 5)).astype("f")
X2 = np.random.default_rng(1).standard_normal((5, 4)).astype("f")


def close(y, expected, tolerance=1e-5):
    expected = np.asarray(expected)
    assert y.shape == expected.shape
    np.testing.assert_allclose(y.array, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def wide(*arrays):
    return [None if a is None else np.asarray(getattr(a, "array", a), np.float64) for a in arrays]


GEOMETRY = [
    {"stride": (2, 1)},
    {"pad": (1, 2)},
    {"dilate": (1, 2)},
    {"groups": 2},
    {"nobias": True},
    {"stride": 2, "pad": 1, "dilate": 2, "groups": 2},
]


@pytest.mark.parametrize("options", GEOMETRY, ids=str)
def test_convolution(options):
    link = L.Convolution2D(4, 6, (3, 2), initial_bias=0.5, **options)
    assert (link.b is None) == options.get("nobias", False)
    given = {k: v for k, v in options.items() if k != "nobias"}
    close(link(X4), R.convolution_2d(*wide(X4, link.W, link.b), **given))


@pytest.mark.parametrize(
    "options", [*GEOMETRY, {"stride": 2, "outsize": (14, 11)}, {"stride": 2, "outsize": (13, 10)}], ids=str
)
def test_deconvolution(options):
    link = L.Deconvolution2D(4, 6, (3, 2), initial_bias=0.5, **options)
    assert (link.b is None) == options.get("nobias", False)
    given = {k: v for k, v in options.items() if k != "nobias"}
    close(link(X4), R.deconvolution_2d(*wide(X4, link.W, link.b), **given))


@pytest.mark.parametrize("make", [L.Convolution2D, L.Deconvolution2D])
def test_initial_values_of_convolutions(make):
    link = make(4, 6, 3, initialW=0.25, initial_bias=np.arange(6.0))
    assert (link.W.array == 0.25).all()
    np.testing.assert_array_equal(link.b.array, np.arange(6))


def test_linear_and_its_relatives():
    link = L.Linear(4, 3, initialW=0.5, initial_bias=np.arange(3.0))
    close(link(X2), 0.5 * X2.sum(1, keepdims=True) + np.arange(3))
    link = L.Linear(4, 3, nobias=True)
    assert link.b is None
    close(link(X2), R.linear(*wide(X2, link.W)))
    close(L.Linear(4, 3, initialW=np.eye(3, 4))(X2[:, None, :], n_batch_axes=2), X2[:, None, :3])
    link = L.Bilinear(4, 4, 2, nobias=True)
    close(link(X2, X2 + 1), R.bilinear(*wide(X2, X2 + 1, link.W)))
    link = L.Bilinear(4, 4, 2, initialW=0.5, initial_bias=(np.full((4, 2), 2.0), np.full((4, 2), 3.0), np.arange(2.0)))
    close(
        link(X2, X2 + 1),
        R.bilinear(*wide(X2, X2 + 1, np.full((4, 4, 2), 0.5), *map(wide_one, (link.V1, link.V2, link.b)))),
    )
    assert [float(v.array.flat[0]) for v in (link.V1, link.V2, link.b)] == [2, 3, 0]
    ids = np.array([[0, 3], [1, 3]])
    link = L.EmbedID(4, 3, initialW=np.arange(12.0).reshape(4, 3), ignore_label=3)
    close(link(ids), R.embed_id(ids, np.arange(12.0).reshape(4, 3), 3))


def wide_one(a):
    return np.asarray(a.array, np.float64)


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


def test_a_classifier_uses_its_functions():
    t = np.array([0, 1, 2, 0, 1])
    predictor = L.Linear(4, 3)
    model = L.Classifier(predictor, lossfun=lambda y, t: F.sum(y) * 2.0, accfun=lambda y, t: F.max(y))
    y = R.linear(*wide(X2, predictor.W, predictor.b))
    np.testing.assert_allclose(model(X2, t).array, 2 * y.sum(), rtol=1e-4)
    np.testing.assert_allclose(model.accuracy.array, y.max(), rtol=1e-5)
    model = L.Classifier(predictor, accfun=None)
    np.testing.assert_allclose(model(X2, t).array, R.softmax_cross_entropy(y, t), rtol=1e-5)
    assert model.accuracy is None
    assert model.y.shape == (5, 3)


# ---- models ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def dropped(monkeypatch):
    """Dropout's ratios in the order of calls; in its place x is multiplied by 2 + ratio."""
    ratios = []

    def dropout(x, ratio=0.5, **options):
        ratios.append(ratio)
        return x * np.float32(2 + ratio)

    monkeypatch.setattr(F, "dropout", dropout)
    return ratios


@pytest.mark.parametrize("ratio", [0.0, 0.25])
def test_mlp_follows_its_formula(dropped, ratio):
    model = models.MLP((7, 6), 3, dropout=ratio)
    h = np.asarray(X4, np.float64).reshape(3, -1)
    y = model(X4)
    layers = list(model)
    assert [layer.W.shape[0] for layer in layers] == [7, 6, 3]
    for layer in layers[:-1]:
        h = R.relu(R.linear(h, *wide(layer.W, layer.b))) * ((2 + ratio) if ratio else 1)
    close(y, R.linear(h, *wide(layers[-1].W, layers[-1].b)))
    assert dropped == [ratio] * (2 if ratio else 0)


@pytest.mark.parametrize("ratio", [0.0, 0.25])
def test_lenet_follows_its_formula(dropped, ratio):
    model = models.LeNet(3, (2, 5), 7, dropout=ratio)
    x = np.random.default_rng(0).standard_normal((2, 1, 9, 7)).astype("f")
    y, h = model(x), np.asarray(x, np.float64)
    assert [p.shape[0] for p in (model.conv1.W, model.conv2.W, model.fc1.W, model.fc2.W)] == [2, 5, 7, 3]
    for conv in (model.conv1, model.conv2):
        assert conv.W.shape[2:] == (3, 3)
        h = R.max_pooling_2d(R.relu(R.convolution_2d(h, *wide(conv.W, conv.b), pad=1)), 2)
    h = R.relu(R.linear(h.reshape(2, -1), *wide(model.fc1.W, model.fc1.b))) * ((2 + ratio) if ratio else 1)
    close(y, R.linear(h, *wide(model.fc2.W, model.fc2.b)))
    assert dropped == [ratio] * (1 if ratio else 0)


def test_the_sizes_of_the_models_where_none_are_given():
    x = np.zeros((1, 1, 8, 8), np.float32)
    sizes = {models.MLP: [100, 100, 10], models.LeNet: [32, 64, 128, 10]}
    for make, expected in sizes.items():
        model = make()
        model(x)
        assert [p.shape[0] for p in model.params() if p.name == "W"] == expected
        assert model.dropout == 0


def test_models_really_drop_in_training_and_not_in_evaluation():
    for model in (models.MLP((50,), 3, dropout=0.5), models.LeNet(3, dropout=0.5)):
        a, b = model(X4), model(X4)
        assert (a.array != b.array).any()
        with dbrdist.using_config("train", False):
            np.testing.assert_array_equal(model(X4).array, model(X4).array)
