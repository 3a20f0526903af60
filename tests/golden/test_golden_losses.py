"""Losses of a tiny net to full precision over 10 steps: a refactor of the engine repeats them.

``losses.json`` was written by :func:`reference`, plain NumPy that shares no code with the package:
``python tests/golden/test_golden_losses.py`` writes it again.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

FILE = Path(__file__).with_name("losses.json")
STEPS, LR, MOMENTUM, DECAY = 10, 0.05, 0.9, 0.001


def data():
    """Inputs (12, 6), targets (12, 3) and weights from a formula, free of any random generator."""
    x = np.sin(np.arange(72.0).reshape(12, 6) * 0.7)
    target = np.cos(np.arange(36.0).reshape(12, 3) * 1.3)
    shapes = {"W1": (6, 5), "b1": (5,), "W2": (5, 4), "b2": (4,), "W3": (4, 3)}
    weights = {
        k: 0.6 * np.sin(np.arange(float(np.prod(s))).reshape(s) * (i + 1.1)) for i, (k, s) in enumerate(shapes.items())
    }
    return x, target, weights


def reference():
    """Mean squared error of a net with tanh, sigmoid-like exp and division; momentum and weight decay by hand."""
    x, target, w = data()
    velocity = {k: np.zeros_like(v) for k, v in w.items()}
    losses = []
    for _ in range(STEPS):
        a1 = x @ w["W1"] + w["b1"]
        h1 = np.tanh(a1)
        a2 = h1 @ w["W2"] + w["b2"]
        h2 = 1 / (1 + np.exp(-a2))
        y = h2 @ w["W3"]
        d = y - target
        losses.append(float((d * d).sum() / d.size))
        gy = 2 * d / d.size
        g = {"W3": h2.T @ gy}
        ga2 = (gy @ w["W3"].T) * h2 * (1 - h2)
        g["W2"], g["b2"] = h1.T @ ga2, ga2.sum(0)
        ga1 = (ga2 @ w["W2"].T) * (1 - h1 * h1)
        g["W1"], g["b1"] = x.T @ ga1, ga1.sum(0)
        for k in w:
            velocity[k] = MOMENTUM * velocity[k] - LR * (g[k] + DECAY * w[k])
            w[k] = w[k] + velocity[k]
    return losses


def run(dtype, flat_first=False):
    import dbrdist
    from dbrdist.core import flat, ops
    from dbrdist.optimizers import MomentumSGD, WeightDecay

    x, target, weights = data()
    x, target = x.astype(dtype), target.astype(dtype)
    net = dbrdist.Link()
    with net.init_scope():
        for k, v in weights.items():
            setattr(net, k, dbrdist.Parameter(v.astype(dtype)))
    if flat_first:
        flat.gather(net.params())

    def loss():
        h1 = ops.tanh(ops.matmul(x, net.W1) + net.b1)
        h2 = 1.0 / (1.0 + ops.exp(-(ops.matmul(h1, net.W2) + net.b2)))
        d = ops.matmul(h2, net.W3) - target
        value = (d * d).mean()
        losses.append(float(value.array))
        return value

    losses: list[float] = []
    optimizer = MomentumSGD(LR, MOMENTUM).setup(net)
    optimizer.add_hook(WeightDecay(DECAY))
    for _ in range(STEPS):
        optimizer.update(loss)
    return losses


def test_the_stored_losses_are_those_of_the_reference():
    np.testing.assert_allclose(reference(), json.loads(FILE.read_text()), rtol=1e-13)


@pytest.mark.parametrize("flat_first", [False, True])
def test_ten_steps_repeat_the_golden_losses(flat_first):
    """Sums of a matrix product may be in another order on another machine: the last digits are free."""
    expected = json.loads(FILE.read_text())
    assert len(expected) == STEPS and expected[-1] < 0.9 * expected[0]
    np.testing.assert_allclose(run(np.float64, flat_first), expected, rtol=1e-13)


def test_float32_follows_them():
    np.testing.assert_allclose(run(np.float32), json.loads(FILE.read_text()), rtol=2e-6)


if __name__ == "__main__":
    FILE.write_text(json.dumps(reference(), indent=1) + "\n")
