"""Hooks on the rule of one parameter do what they do on flat memory, for the parameters that they are for."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
from dbrdist import Parameter, optimizers
from dbrdist.optimizers import (
    SGD,
    GradientClipping,
    GradientHardClipping,
    GradientLARS,
    GradientNoise,
    Lasso,
    MomentumSGD,
    WeightDecay,
)
from tests.each import each

W, G = np.array([[3.0, -4.0], [0.0, 2.0]]), np.array([[0.5, -0.25], [1.5, 2.0]])
B, GB = np.array([1.0, -2.0]), np.array([0.25, 0.5])


def link():
    made = dbrdist.Link()
    with made.init_scope():
        made.w, made.b = Parameter(W.copy()), Parameter(B.copy())
    return made


def stepped(hook, on_rules, optimizer=None):
    """Values after one step of SGD with rate 1: parameters minus what the hook makes of the gradients."""
    made = link()
    own = (optimizer or SGD(1.0)).setup(made)
    for p in made.params():
        if on_rules:
            p.update_rule.add_hook(hook(made))
    if not on_rules:
        own.add_hook(hook(made))
    made.w.grad, made.b.grad = G.copy(), GB.copy()
    own.update()
    return W - made.w.array, B - made.b.array


def lars(p, g, threshold=0.01, decay=0.0, eps=1e-9):
    norms = np.linalg.norm(p), np.linalg.norm(g)
    whole = norms[1] + decay * norms[0] + eps
    rate = norms[0] / whole if norms[0] > threshold and whole > 0 else 1.0
    return (g + decay * p) * rate


FORMULAS = {
    "weight decay": (lambda m: WeightDecay(0.1), lambda p, g: g + 0.1 * p),
    "lasso": (lambda m: Lasso(0.1), lambda p, g: g + 0.1 * np.sign(p)),
    "hard clipping": (lambda m: GradientHardClipping(-0.2, 0.4), lambda p, g: np.clip(g, -0.2, 0.4)),
    "norms": (lambda m: GradientLARS(0.5, 0.2, 0.1), lambda p, g: lars(p, g, 0.5, 0.2, 0.1)),
    "at the threshold": (lambda m: GradientLARS(float(np.linalg.norm(W)), 0.2), lambda p, g: g + 0.2 * p),
    "without decay": (lambda m: GradientLARS(), lars),
    "no noise": (lambda m: GradientNoise(0), lambda p, g: g),
}


@each(name=FORMULAS, on_rules=[True, False])
def test_hooks_follow_their_formulas(name, on_rules):
    hook, formula = FORMULAS[name]
    for found, p, g in zip(stepped(hook, on_rules), (W, B), (G, GB)):
        np.testing.assert_allclose(found, formula(p, g), rtol=1e-12, atol=1e-14)


@each(kind=[WeightDecay, Lasso], on_rules=[True, False], whom=["w", "b", "both", "none"])
def test_penalties_for_some_parameters(kind, on_rules, whom):
    chosen = {"w": ["w"], "b": ["b"], "both": ["w", "b"], "none": []}[whom]
    found = stepped(lambda m: kind(0.1, [getattr(m, name) for name in chosen]), on_rules)
    for name, difference, p, g in zip("wb", found, (W, B), (G, GB)):
        penalty = 0.1 * (p if kind is WeightDecay else np.sign(p)) * (name in chosen)
        np.testing.assert_allclose(difference, g + penalty, rtol=1e-12, atol=1e-14)


@each(threshold=[0.5, 1.0, 1.0001, 10.0])
def test_clipping_leaves_gradients_of_at_most_its_norm(threshold):
    whole = np.sqrt((G**2).sum() + (GB**2).sum())
    rate = min(1.0, threshold)
    for found, g in zip(stepped(lambda m: GradientClipping(threshold * whole), False), (G, GB)):
        np.testing.assert_allclose(found, g * rate, rtol=1e-12)


def test_clipping_of_no_gradient():
    made = link()
    own = MomentumSGD(1.0).setup(made)
    own.add_hook(GradientClipping(1.0))
    for p in made.params():
        p.grad = np.zeros_like(p.array)
    own.update()
    np.testing.assert_array_equal(made.w.array, W)


def test_hooks_pass_over_parameters_without_a_gradient():
    for hook in (WeightDecay(0.1), Lasso(0.1), GradientHardClipping(-1, 1), GradientLARS(), GradientNoise(1.0)):
        made = link()
        optimizers.SGD(1.0).setup(made)
        hook(made.w.update_rule, made.w)
        assert made.w.grad is None
    with pytest.raises(ValueError, match=r"GradientNoise: eta: expected a number of 0 or more, got -0.1"):
        GradientNoise(-0.1)


def test_noise_is_drawn_for_each_parameter_and_update():
    for on_rules in (True, False):
        dbrdist.random.set_seed(3)
        first, second = (stepped(lambda m: GradientNoise(0.5), on_rules) for _ in range(2))
        dbrdist.random.set_seed(4)
        third = stepped(lambda m: GradientNoise(0.5), on_rules)
        for a, b, c, g in zip(first, second, third, (G, GB)):
            np.testing.assert_array_equal(a, b)
            assert (np.abs(a - g) > 0).all() and (a != c).all() and np.abs(a - g).max() < 5
