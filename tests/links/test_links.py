"""Links against plain NumPy, their initial values, lazy sizes, and what their errors say."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Chain, Reporter, Sequential, Variable, initializers, optimizers
from tests.each import each


def test_linear_is_a_matrix_product(xp):
    link = L.Linear(3, 2).to_device("@numpy" if xp is np else "@cupy:0")
    x = xp.asarray(np.random.default_rng(0).normal(size=(4, 3)), xp.float32)
    y = link(x)
    assert y.dtype == xp.float32
    dbrdist.gradient_check.assert_allclose(y, x @ link.W.array.T + link.b.array, 1e-6)


def test_linear_takes_its_input_size_from_the_first_input():
    link = L.Linear(5)
    assert not link.W.is_initialized
    assert link(np.ones((2, 3, 4), np.float32)).shape == (2, 5)
    assert link.W.shape == (5, 12)
    assert link.in_size == 12
    assert not link.b.array.any()


def test_linear_over_several_batch_axes():
    link = L.Linear(None, 5, initial_bias=1.0)
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    y = link(x, n_batch_axes=2)
    assert y.shape == (2, 3, 5)
    np.testing.assert_allclose(y.array, x @ link.W.array.T + 1, rtol=1e-5, atol=1e-6)


def test_linear_without_bias():
    link = L.Linear(3, 2, nobias=True)
    assert [p.name for p in link.params()] == ["W"]
    assert not link(np.zeros((1, 3), np.float32)).array.any()


def test_given_arrays_and_numbers_are_initial_values():
    W = np.arange(6, dtype=np.float32).reshape(2, 3)
    link = L.Linear(3, 2, initialW=W, initial_bias=0.5)
    np.testing.assert_array_equal(link.W.array, W)
    np.testing.assert_array_equal(link.b.array, [0.5, 0.5])


def test_equal_seeds_give_equal_links_and_other_seeds_others():
    made = []
    for seed in (0, 0, 1):
        dbrdist.random.set_seed(seed)
        made.append(L.Linear(3, 4).W.array)
    dbrdist.random.set_seed(0)
    np.testing.assert_array_equal(made[0], made[1])
    assert (made[0] != made[2]).all()


def test_an_error_names_the_link_the_argument_and_both_shapes():
    class Net(Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.l1 = L.Linear(784, 10)

        def forward(self, x):
            return self.l1(x)

    with pytest.raises(ValueError) as e:
        L.Classifier(Net())(np.zeros((8, 5), np.float32), np.zeros(8, np.int32))
    assert str(e.value) == (
        "link Classifier/predictor/l1 (Linear): linear: x: expected 784 elements per example for W of shape (10, 784), "
        "got shape (8, 5) and dtype float32"
    )


def test_embed_id_looks_up_and_ignores():
    link = L.EmbedID(5, 3, ignore_label=-1)
    y = link(np.array([[4, -1], [0, 4]]))
    np.testing.assert_array_equal(y.array[0, 0], link.W.array[4])
    assert not y.array[0, 1].any()
    F.sum(y).backward()
    np.testing.assert_array_equal(link.W.grad, np.array([1, 0, 0, 0, 2])[:, None] * np.ones((5, 3)))
    assert 0.6 < L.EmbedID(200, 50).W.array.std() < 1.4


@pytest.mark.parametrize("ids", [[5], [-1]])
def test_embed_id_refuses_unknown_ids(ids):
    with pytest.raises(ValueError, match=r"EmbedID: embed_id: x: expected ids from 0 to 4 .* got ids from"):
        L.EmbedID(5, 3)(np.array(ids))


def test_classifier_reports_loss_and_accuracy():
    model = L.Classifier(L.Linear(3, 2))
    x, t = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32), np.array([0, 1, 0, 1, 1, 0])
    reporter = Reporter()
    reporter.add_observer("main", model)
    with reporter:
        loss = model(x, t)
    assert model.y.shape == (6, 2)
    assert reporter.observation["main/loss"] == loss.array
    expected = (model.y.array.argmax(1) == t).mean()
    assert reporter.observation["main/accuracy"] == pytest.approx(expected)
    assert model.loss is loss


def test_classifier_finds_its_label_by_position_or_name():
    x, t = np.ones((2, 3), np.float32), np.array([0, 1])
    predictor = L.Linear(3, 2)
    first = L.Classifier(predictor, label_key=0)(t, x)
    named = L.Classifier(predictor, label_key="t")(x, t=t)
    assert first.array == named.array
    with pytest.raises(ValueError, match="expected a label as keyword 't'"):
        L.Classifier(predictor, label_key="t")(x)
    with pytest.raises(ValueError, match="expected a label at position 3, got 2"):
        L.Classifier(predictor, label_key=3)(x, t)


def test_classifier_without_accuracy():
    model = L.Classifier(L.Linear(3, 2))
    model.compute_accuracy = False
    model(np.ones((2, 3), np.float32), np.array([0, 1]))
    assert model.accuracy is None


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


def test_bilinear_against_einsum():
    link = L.Bilinear(3, 4, 5)
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 3)).astype(np.float32), rng.normal(size=(2, 4)).astype(np.float32)
    expected = np.einsum("ni,nj,ijk->nk", a, b, link.W.array) + a @ link.V1.array + b @ link.V2.array
    np.testing.assert_allclose(link(a, b).array, expected, rtol=1e-5, atol=1e-6)


def test_a_parameter_link_returns_its_parameter():
    link = L.Parameter(np.ones(3, np.float32))
    assert link() is link.W


def test_an_mlp_follows_plain_numpy_over_several_steps():
    """Three layers, momentum; the reference shares no code with the library."""
    rng = np.random.default_rng(0)
    model = Sequential(L.Linear(4, 5), F.relu, L.Linear(5, 3))
    for p in model.params():
        p.array = p.array.astype(np.float64)
    weights = [p.array.copy() for p in model.params()]
    velocity = [np.zeros_like(w) for w in weights]
    optimizer = optimizers.MomentumSGD(0.1, 0.9).setup(model)
    for _ in range(5):
        x, t = rng.normal(size=(6, 4)), rng.integers(0, 3, 6)
        optimizer.update(lambda x=x, t=t: F.softmax_cross_entropy(model(x), t))
        W1, b1, W2, b2 = weights
        h = np.maximum(x @ W1.T + b1, 0)
        s = h @ W2.T + b2
        p = np.exp(s - s.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        gs = (p - np.eye(3)[t]) / 6
        gh = gs @ W2 * (h > 0)
        for w, v, g in zip(weights, velocity, (gh.T @ x, gh.sum(0), gs.T @ h, gs.sum(0))):
            v *= 0.9
            v -= 0.1 * g
            w += v
    for p, w in zip(model.params(), weights, strict=True):
        np.testing.assert_allclose(p.array, w, rtol=1e-12, atol=1e-14)


def test_narrow_parameters_are_initialised_and_trained():
    with dbrdist.using_config("dtype", "bfloat16"):
        link = L.Linear(3, 2)
    assert link.W.dtype.name == "bfloat16"
    F.sum(link(Variable(np.ones((4, 3), link.W.dtype)))).backward()
    assert link.W.grad.dtype == link.W.dtype
    np.testing.assert_array_equal(link.W.grad.astype(np.float32), np.full((2, 3), 4.0))


def test_defaults_are_those_of_chainer():
    link = L.Linear(3, 2)
    assert isinstance(link.W.initializer, initializers.LeCunNormal)
    assert not link.b.array.any()


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
