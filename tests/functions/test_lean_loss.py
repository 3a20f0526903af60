"""Tests of dbrdist.functions.lean_loss."""

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist.functions import lean_loss


def test_a_loss_goes_backward_twice_and_to_the_second_order():
    rng = np.random.default_rng(2)
    x, t = rng.standard_normal((5, 4)), np.array([0, 3, 1, 1, 2])
    p = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    want = (p - np.eye(4)[t]) / 5
    v = dbrdist.Variable(x.copy())
    loss = F.softmax_cross_entropy(v, t)
    for times in (1, 2):
        loss.backward()
        assert np.allclose(v.grad, times * want, atol=1e-12)
    v.cleargrad()
    loss.grad = np.array(3.0)
    loss.backward()
    assert np.allclose(v.grad, 3 * want, atol=1e-12)
    (g,) = dbrdist.grad([loss], [v], enable_double_backprop=True)
    F.sum(g * g).backward()  # v.grad was 3 want
    H = [(np.diag(q) - np.outer(q, q)) / 5 for q in p]
    assert np.allclose(v.grad - 3 * want, [2 * h @ w for h, w in zip(H, want)], atol=1e-12)
    assert loss.array == pytest.approx(-np.log(p[np.arange(5), t]).mean(), abs=1e-12)


@pytest.mark.parametrize("dtype", [">f4", ">f8"])
def test_scores_of_the_other_byte_order(dtype):
    x, t = np.log([[1, 3], [4, 1], [1, 1]]).astype(dtype), np.array([0, 0, 1])
    v = dbrdist.Variable(x)
    loss = F.softmax_cross_entropy(v, t)
    loss.backward()
    assert float(loss.array) == pytest.approx(-np.log([1 / 4, 4 / 5, 1 / 2]).mean(), abs=1e-6)
    assert np.allclose(v.grad, np.array([[-3 / 4, 3 / 4], [-1 / 5, 1 / 5], [1 / 2, -1 / 2]]) / 3, atol=1e-6)


def test_what_is_changed_after_the_call_does_not_change_the_loss_or_its_gradient():
    rng = np.random.default_rng(3)
    x, t = rng.standard_normal((5, 4)).astype(np.float32), np.array([0, 3, 1, 1, 2])
    plain, changed = dbrdist.Variable(x.copy()), dbrdist.Variable(x.copy())
    labels = t.copy()
    losses = F.softmax_cross_entropy(plain, t), F.softmax_cross_entropy(changed, labels)
    changed.array[...] = 7
    labels[...] = 0
    for loss in losses:
        loss.backward()
    assert np.array_equal(plain.grad, changed.grad)


def test_a_cut_function_lets_go_of_its_probabilities():
    loss = F.softmax_cross_entropy(dbrdist.Variable(np.ones((2, 3), np.float32)), np.array([0, 1]))
    function = loss.creator
    loss.unchain_backward()
    assert function._for_rule is None


@pytest.mark.parametrize(
    "shape, is_lean", [((32, 64), True), ((1, 2048), True), ((1, 2049), False), ((683, 3), False), ((0, 3), False)]
)
def test_losses_of_few_scores_take_the_lean_path(shape, is_lean):
    y = F.softmax_cross_entropy(dbrdist.Variable(np.zeros(shape)), np.zeros(shape[0], int))
    assert isinstance(y.creator_node, lean_loss.MeanCrossEntropy) == is_lean
    assert y.array == pytest.approx(np.log(shape[1]) if shape[0] else 0)
