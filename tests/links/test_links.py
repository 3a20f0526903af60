"""Tests of dbrdist.links.links."""

from __future__ import annotations

import re

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Chain, Sequential, Variable, initializers, models, optimizers
from tests.each import each


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


REFUSED = {
    "MultiHeadAttention: n_heads: expected a divisor of n_units=4": [
        lambda: L.MultiHeadAttention(4, 3)],
    "MultiHeadAttention: n_heads: expected an integer of 1 or more, got 0": [lambda: L.MultiHeadAttention(4, 0)],
    "DecorrelatedBatchNormalization: groups: expected an integer of 1 or more, got 0": [
        lambda: L.DecorrelatedBatchNormalization(4, 0)],
    "Maxout: initialW: expected shape (2, 3, 4)": [
        lambda: L.Maxout(4, 2, 3, initialW=ones(2, 3, 5)), lambda: L.Maxout(4, 2, 3, initialW=ones(2, 3)),
        lambda: L.Maxout(4, 2, 3, initialW=ones(3, 2, 4))],
    "Maxout: initial_bias: expected shape (2, 3)": [lambda: L.Maxout(4, 2, 3, initial_bias=ones(6))],
    "Classifier: label_key must be int or str, got float": [
        lambda: L.Classifier(L.Linear(2, 2), label_key=1.0)],
    "Linear: out_size: expected a number of outputs, got None for both sizes": [lambda: L.Linear(None)],
    "Convolution2D: in_channels: expected a multiple of groups=2": [lambda: L.Convolution2D(3, 4, 1, groups=2)],
    "Deconvolution2D: out_channels: expected a multiple of groups=2": [lambda: L.Deconvolution2D(2, 3, 1, groups=2)],
    "Deconvolution2D: in_channels: expected a multiple of groups=2": [lambda: L.Deconvolution2D(3, 2, 1, groups=2)],
    "Scale: bias_shape: expected a shape, since bias_term is True and W_shape is None": [
        lambda: L.Scale(bias_term=True)],
    "Scale: expected x, got 2 arguments": [lambda: L.Scale(W_shape=(3,))(ones(2, 3), ones(3))],
    "Scale: expected x and W, got 1 arguments": [lambda: L.Scale()(ones(2, 3))],
    "Bias: expected x, got 2 arguments": [lambda: L.Bias(shape=(3,))(ones(2, 3), ones(3))],
    "Bias: expected x and b, got 1 arguments": [lambda: L.Bias()(ones(2, 3))],
    "Initializer defines no __call__(array)": [lambda: initializers.Initializer()(ones(1))],
    "Constant: fill_value: expected shape (2,) to match the parameter": [
        lambda: initializers.Constant(ones(3))(ones(2)), lambda: initializers.Constant(ones(1, 2))(ones(2))],
    "Identity: array: expected a square matrix": [
        lambda: initializers.Identity()(ones(2, 3)), lambda: initializers.Identity()(ones(2)),
        lambda: initializers.Identity()(ones(2, 2, 2))],
    "LocalConvolution2D: ksize: expected a number or a pair": [lambda: L.LocalConvolution2D(1, 1, 2)],
    "LocalConvolution2D: in_size: expected at least the window (2, 2)": [
        lambda: L.LocalConvolution2D(1, 1, (1, 2), 2), lambda: L.LocalConvolution2D(1, 1, (2, 1), 2)],
    "DecorrelatedBatchNormalization: groups: expected a divisor of size=4": [
        lambda: L.DecorrelatedBatchNormalization(4, 3)],
    "LSTM: c: expected a state (N, U), got None": [lambda: L.LSTM(2, 3).set_state(None, ones(1, 3))],
    "LSTM: h: expected a state (N, U), got None": [lambda: L.LSTM(2, 3).set_state(ones(1, 3), None)],
    "NaryTreeLSTM: n_ary: expected at least 1, got 0": [lambda: L.NaryTreeLSTM(2, 3, 0)],
    "GRU: out_size: expected an integer, got None": [lambda: L.GRU(2, None)],
    "ResNetCIFAR: expected a depth of 6 n + 2, such as 20 or 56, got": [
        lambda: models.ResNetCIFAR(depth=7), lambda: models.ResNetCIFAR(depth=2), lambda: models.ResNetCIFAR(depth=9)],
}  # fmt: skip


@pytest.mark.parametrize("block", range(3))
@each(words=lambda block: list(REFUSED)[block::3])
def test_refused(block, words):
    for call in REFUSED[words]:
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=f"^{re.escape(words)}"):
            call()


def test_taken():
    assert L.MultiHeadAttention(4, 1)(ones(1, 2, 4)).shape == (1, 2, 4)
    assert L.MultiHeadAttention(4, 4)(ones(1, 2, 4)).shape == (1, 2, 4)
    assert L.LocalConvolution2D(1, 1, (2, 2), 2)(ones(1, 1, 2, 2)).shape == (1, 1, 1, 1)
    assert L.LocalConvolution2D(1, 1, None, 2).W.array is None
    assert L.LocalConvolution2D(None, 1, (3, 3), 2)(ones(1, 2, 3, 3)).shape == (1, 1, 2, 2)
    assert L.DecorrelatedBatchNormalization(4, 1).avg_mean.shape == (1, 4)
    assert L.DecorrelatedBatchNormalization(4, 4).avg_mean.shape == (4, 1)
    assert len(list(L.NaryTreeLSTM(2, 3, 1).children())) == 2
    assert L.Maxout(4, 2, 3, initialW=ones(2, 3, 4)).linear.W.shape == (6, 4)
    assert L.Maxout(None, 2, 3, initialW=ones(2, 3, 4))(ones(1, 4)).shape == (1, 2)
    assert L.Maxout(4, 2, 3, initialW=0.5, initial_bias=np.array(2.0)).linear.b.array.tolist() == [2] * 6
    assert L.Classifier(L.Linear(2, 2), label_key="t").label_key == "t"
    assert sum(1 for _ in models.ResNetCIFAR(depth=8).links()) < sum(1 for _ in models.ResNetCIFAR(depth=14).links())


def test_what_links_say_of_themselves():
    for link, words in (
        (L.Linear(2, 3), "Linear(in_size=2, out_size=3, nobias=False)"),
        (L.Linear(3, nobias=True), "Linear(in_size=None, out_size=3, nobias=True)"),
        (L.EmbedID(4, 3), "EmbedID(in_size=4, out_size=3, ignore_label=None)"),
        (L.EmbedID(4, 3, ignore_label=-1), "EmbedID(in_size=4, out_size=3, ignore_label=-1)"),
    ):
        assert repr(link) == words
    for in_channels, groups in ((4, 1), (None, 1), (4, 2)):
        words = repr(L.Convolution2D(in_channels, 2, 3, 2, 1, groups=groups))
        assert words.startswith(f"Convolution2D(in_channels={in_channels}, out_channels=2, ksize=3, stride=(2, 2)")
        assert f"groups={groups}" in words and "nobias=False" in words


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


def test_nobias_is_a_switch():
    words = r"nobias: expected True or False, got .*; the values of W are initialW, those of b are initial_bias"
    for nobias in (np.zeros(2, "f"), dbrdist.Variable(np.zeros(2, "f")), "False"):
        for cls, args in ((L.Linear, (3, 2)), (L.Convolution2D, (3, 2, 3)), (L.Deconvolution1D, (3, 2, 3))):
            with pytest.raises(TypeError, match=words):
                cls(*args, nobias=nobias)
    for nobias in (True, 1, np.bool_(True), np.array(1), np.array([True])):
        assert L.Linear(3, 2, nobias=nobias).b is None
    for nobias in (False, 0, None, np.bool_(False)):
        assert L.Linear(3, 2, nobias=nobias).b is not None


def test_a_result_in_place_of_a_function_says_so():
    with pytest.raises(TypeError, match=r"layer 1: .* got Variable, the result of a call; write the function itself"):
        dbrdist.Sequential(L.Linear(3, 2), dbrdist.functions.relu(np.ones(2, "f")))
