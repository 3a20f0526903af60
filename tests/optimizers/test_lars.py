"""Tests of dbrdist.optimizers.lars."""

from __future__ import annotations

import math

import numpy as np
import pytest

import dbrdist
from dbrdist import Parameter
from dbrdist.optimizers import LARS, CorrectedLARS, CorrectedMomentumSGD, MomentumSGD
from dbrdist.optimizers.lars import joint_norms
from tests.each import each
from tests.optimizers.optimizer_helpers import G, W, link_of


def test_norms_of_several_pairs_stay_in_pairs():
    arrays = [np.array([3.0 * k, 4.0 * k], np.float32) for k in range(1, 7)]
    found = joint_norms(None, list(zip(arrays[::2], arrays[1::2])))
    assert found == [(5.0, 10.0), (15.0, 20.0), (25.0, 30.0)]


def norm(a):
    return math.sqrt((np.asarray(a, np.float64) ** 2).sum())


@pytest.mark.parametrize("eps", [0.0, 0.5, 10.0])
@pytest.mark.parametrize("trust", [0.001, 0.02])
def test_eps_of_lars_stands_in_the_denominator(eps, trust):
    link = link_of(w=W)
    optimizer = LARS(lr=0.5, momentum=0.0, weight_decay=0.1, trust_coefficient=trust, eps=eps).setup(link)
    link.w.grad = G.copy()
    optimizer.update()
    rate = 0.5 * trust * norm(W) / (norm(G) + 0.1 * norm(W) + eps)
    np.testing.assert_allclose(link.w.array, W - rate * (G + 0.1 * W), rtol=1e-13)


@pytest.mark.parametrize("skip", [True, False])
def test_lars_without_skipping_treats_vectors_as_matrices(skip):
    link = link_of(w=W, v=W[0], scalar=W[0, 0])
    optimizer = LARS(lr=0.5, momentum=0.0, weight_decay=0.1, trust_coefficient=0.02, skip_vectors=skip).setup(link)
    link.w.grad, link.v.grad, link.scalar.grad = G.copy(), G[0].copy(), np.array(0.25)
    optimizer.update()
    for p, w, g in ((link.w, W, G), (link.v, W[0], G[0]), (link.scalar, W[0, 0], 0.25)):
        plain = skip and np.ndim(w) < 2
        rate = 0.5 if plain else 0.5 * 0.02 * norm(w) / (norm(g) + 0.1 * norm(w))
        np.testing.assert_allclose(p.array, w - rate * (g + (0 if plain else 0.1 * w)), rtol=1e-13)


@pytest.mark.parametrize(
    ("lr", "w", "rate"), [(1.0, (3.0, 4.0), 0.00499875031242), (11.0, (3.0, 4.0), 0.0549862534), (1.0, (0.0, 0.0), 1.0)]
)
def test_lars_trust_ratio(lr, w, rate):
    g = (0.6, 0.8)
    link = dbrdist.Link()
    with link.init_scope():
        link.W = Parameter(np.array([w]))
        link.b = Parameter(np.array(w))
    optimizer = LARS(lr=lr, momentum=0.9, weight_decay=5e-5, trust_coefficient=0.001).setup(link)
    link.W.grad, link.b.grad = np.array([g]), np.array(g)
    optimizer.update()
    w, g = np.array(w), np.array(g)
    np.testing.assert_allclose(link.W.array[0], w - rate * (g + 5e-5 * w), rtol=1e-9)
    np.testing.assert_allclose(link.b.array, w - lr * g, rtol=1e-14)  # a bias: trust 1, no decay
    with pytest.deprecated_call():
        link.W.zerograd()
    before = link.W.array.copy()
    v = link.W.update_rule.state["v"].copy()
    optimizer.update()
    np.testing.assert_allclose(link.W.array, before + 0.9 * v - lr * 5e-5 * before, rtol=1e-12)  # zero g: trust 1


# ---- LARS in both forms of MLPerf, and momentum correction, against numbers worked out by hand ----


def trained(optimizer, value, gradients, rates):
    link = dbrdist.Link()
    with link.init_scope():
        link.p = Parameter(np.array(value, np.float64))
    optimizer.setup(link)
    seen = []
    for g, lr in zip(gradients, rates):
        optimizer.lr = lr
        link.p.grad = np.array(g, np.float64)
        optimizer.update()
        seen.append(link.p.array.copy())
    return seen


@each(kind=[LARS, CorrectedLARS], lr=[1.0, 11.0])
def test_the_trust_ratio(kind, lr):
    w, g = np.array([[3.0, 4.0]]), np.array([[0.6, 0.8]])
    [after] = trained(kind(weight_decay=5e-5), w, [g], [lr])
    rate = (w - after) / (g + 5e-5 * w)
    assert rate == pytest.approx(np.full((1, 2), lr * 0.00499875031242), rel=1e-11)
    assert lr != 11 or rate[0, 0] == pytest.approx(0.0549862534, rel=1e-8)


@each(kind=[LARS, CorrectedLARS], **{"w, g": [([[0.0, 0.0]], [[0.6, 0.8]]), ([3.0, 4.0], [0.6, 0.8])]})
def test_trust_is_one_without_a_norm_and_vectors_do_not_decay(kind, w, g):
    [after] = trained(kind(weight_decay=0.5), w, [g], [2.0])
    assert after == pytest.approx(np.array(w) - 2 * np.array(g), rel=1e-14)


@each(kind=[LARS, CorrectedLARS])
def test_a_gradient_of_zero_leaves_the_decay_with_trust_one(kind):
    [after] = trained(kind(weight_decay=0.5), [[3.0, 4.0]], [[[0.0, 0.0]]], [0.1])
    assert after == pytest.approx(np.array([[3.0, 4.0]]) * (1 - 0.1 * 0.5), rel=1e-14)


@each(
    **{
        "kind, expected": [
            (CorrectedMomentumSGD, (-0.1, -0.29, -3.0, -6.439)),
            (MomentumSGD, (-0.1, -0.29, -1.461, -3.5149)),
            (CorrectedLARS, (-0.1, -0.29, -3.0, -6.439)),
            (LARS, (-0.1, -0.29, -1.461, -3.5149)),
        ]
    }
)
def test_momentum_when_the_rate_changes(kind, expected):
    """Goyal et al. 2017, remark 2: lr 0.1, 0.1, 1, 1 and gradients of 1; a vector, so that LARS has trust 1."""
    seen = trained(kind(), [0.0], [[1.0]] * 4, (0.1, 0.1, 1.0, 1.0))
    assert [float(p[0]) for p in seen] == pytest.approx(expected, rel=1e-13)


def test_corrected_lars_equals_equation_10_with_the_correction():
    """NVIDIA's form: v <- momentum lr / last_lr v + lr trust (g + wd w), written out in NumPy."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(3, 4))
    gradients, rates = rng.normal(size=(6, 3, 4)), (0.5, 1.0, 1.5, 1.5, 0.7, 0.1)
    expected, v, last = w.copy(), 0.0, rates[0]
    for g, lr in zip(gradients, rates):
        trust = 1e-3 * np.linalg.norm(expected) / (np.linalg.norm(g) + 1e-4 * np.linalg.norm(expected))
        v = 0.9 * lr / last * v + lr * trust * (g + 1e-4 * expected)
        expected, last = expected - v, lr
    assert trained(CorrectedLARS(), w, gradients, rates)[-1] == pytest.approx(expected, rel=1e-12)
