"""Tests of dbrdist.kernels.cpu.loops: rules in one pass, the same bits as NumPy's formulas."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import kernels, optimizers
from dbrdist.core.array import backend
from dbrdist.core.model.parameter import Parameter
from dbrdist.kernels.cpu import loops
from tests.each import each

compiled = pytest.mark.skipif(not loops._PLACES, reason="dbrdist is not compiled")


def decaying():
    """An optimizer, and its hook, which can only be added once there is a link."""
    optimizer = optimizers.SGD(0.1)
    setup, hook = optimizer.setup, optimizers.WeightDecay(0.01)

    def set_up(link):
        setup(link)
        optimizer.add_hook(hook)
        return optimizer

    optimizer.setup = set_up
    return optimizer


RULES = {
    "SGD": (lambda: optimizers.SGD(0.1), "sgd"),
    "MomentumSGD": (lambda: optimizers.MomentumSGD(0.1, 0.9), "momentum_sgd"),
    "CorrectedMomentumSGD": (lambda: optimizers.CorrectedMomentumSGD(0.1, 0.9), "corrected_momentum_sgd"),
    "NesterovAG": (lambda: optimizers.NesterovAG(0.1, 0.9), "nesterov_ag"),
    "Adam": (lambda: optimizers.Adam(0.01), "adam"),
    "Adam without eps": (lambda: optimizers.Adam(0.01, eps=0), "adam"),
    "AdamW": (lambda: optimizers.AdamW(0.01, weight_decay_rate=0.1, eta=0.5), "adam"),
    "AMSGrad": (lambda: optimizers.AMSGrad(0.01), "amsgrad"),
    "AdaGrad": (lambda: optimizers.AdaGrad(0.1), "ada_grad"),
    "AdaGrad without eps": (lambda: optimizers.AdaGrad(0.1, eps=0), "ada_grad"),
    "WeightDecay": (decaying, "weight_decay"),
    "RMSprop": (lambda: optimizers.RMSprop(0.01), "rmsprop"),
}


def trained(make, size, dtype):
    """A parameter and its state after updates with gradients that are zero, tiny, infinite and no numbers in places."""
    rng = np.random.default_rng(0)
    link = dbrdist.Link()
    with link.init_scope():
        link.W = Parameter(rng.standard_normal(size).astype(dtype))
    optimizer = make().setup(link)
    for i in range(66):  # past a sweep of velocities
        g = rng.standard_normal(size).astype(dtype)
        g[:5] = 0
        g[5] = 1e-42
        if i == 3:
            g[6:9] = np.nan, np.inf, -np.inf
        link.W.grad = g
        optimizer.update()
        assert make is decaying or link.W.grad.tobytes() == g.tobytes()
    return [link.W.array, *(link.W.update_rule.state or {}).values()]


@compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(name=list(RULES), dtype=["f", "d"])
def test_rules_in_one_pass_have_the_bits_of_numpys_formula(name, dtype, monkeypatch):
    make, row = RULES[name]
    served = []
    run = loops._found.run
    monkeypatch.setattr(loops, "_found", Recorder(lambda place, *rest: (served.append(place), run(place, *rest))[1]))
    kernels.dispatch._forget()
    ours = trained(make, 70_001, dtype)
    kernels.dispatch._forget()
    assert loops._PLACES[row] in served
    with kernels.use("onednn"):
        theirs = trained(make, 70_001, dtype)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        assert a.tobytes() == b.tobytes()


class Recorder:
    def __init__(self, run):
        self.run = run


@compiled
def test_every_loop_has_a_rule():
    rows = {name for name, _ in loops.TABLE.values()}
    masks = {name for name in loops._PLACES if name.startswith("relu_backward")}
    assert {row for _, row in RULES.values()} | rows | masks == set(loops._PLACES)


def numbers(dtype, seed):
    """An array of 20,000 numbers with all that is special among them."""
    x = np.random.default_rng(seed).standard_normal(20_000).astype(dtype) * dtype(3)
    special = np.nan, np.inf, -np.inf, 2.5, -2.5, 0.0, -0.0, 1e-40, 0.6, -0.6
    x[: 2 * len(special)] = np.resize(np.roll(special, seed), 2 * len(special))
    return x


FUNCTIONS = {
    "hard_sigmoid": lambda x, t: F.hard_sigmoid(x),
    "huber": lambda x, t: F.huber_loss(x, t, 0.6, "no"),
}


@compiled
@each(name=list(FUNCTIONS), dtype=[np.float32, np.float64])
def test_functions_and_gradients_have_the_bits_of_numpys_formula(name, dtype):
    def step():
        x, t = (dbrdist.Variable(numbers(dtype, seed)) for seed in (0, 1))
        y = FUNCTIONS[name](x, t)
        y.grad = numbers(dtype, 2)
        y.backward()
        return [a.tobytes() for a in (y.array, x.grad, t.grad) if a is not None]

    with np.errstate(all="ignore"):
        assert kernels.provider_of("row", name, loops.TABLE[name][1], (numbers(dtype, 0),) * 2, (0.6,)) == "loops"
        ours = step()
        with kernels.use("columns"):
            assert step() == ours


@compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(dtype=[np.float32, np.float64], lay=[backend.channels_last, np.ascontiguousarray], out=[None, 1, 2])
def test_what_passes_a_relu_backwards(dtype, lay, out):
    """NaN and infinity stop where the output is 0, in new arrays and over the gradients."""
    y, a, b = (lay(numbers(dtype, seed).reshape(2, 50, 10, 20)) for seed in range(3))
    y = np.maximum(y, 0)
    expected, of_sum = np.where(y != 0, a, 0), np.where(y != 0, a + b, 0)
    assert kernels.provider_of("relu_backward", y, a) == "loops"
    np.testing.assert_array_equal(kernels.relu_backward(y, a), expected)
    assert kernels.provider_of("relu_backward_of_sum", y, a, b) == "loops"
    target = (None, a, b)[out or 0]
    found = kernels.relu_backward_of_sum(y, a, b, target)
    assert target is None or found is target
    np.testing.assert_array_equal(found, of_sum)
    wide_y, wide_a = (lay(np.tile(v, (16, 1, 1, 1))) for v in (y, expected))
    assert kernels.relu_backward_over(wide_y, wide_a) is wide_a
    np.testing.assert_array_equal(wide_a, np.tile(expected, (16, 1, 1, 1)))


@compiled
def test_arrays_that_share_memory_or_may_not_be_written_are_left_to_numpy():
    p = np.ones(100, "f")
    assert not kernels.update("sgd", (p, p), (0.1,))
    assert not kernels.update("sgd", (p[:60], p[40:]), (0.1,))
    assert not kernels.update("sgd", (p[::2], np.ones(50, "f")), (0.1,))
    assert not kernels.update("sgd", (p, np.ones(99, "f")), (0.1,))
    p.flags.writeable = False
    assert not kernels.update("sgd", (p, np.ones(100, "f")), (0.1,))
    assert p.tolist() == [1] * 100


@compiled
def test_a_rule_with_a_formula_of_its_own_keeps_it():
    class Own(type(optimizers.SGD().create_update_rule())):
        def step(self, hp, t, p, g, *state):
            p += 1

    p = Parameter(np.zeros(10_000, "f"))
    rule = Own(optimizers.SGD(0.1).hyperparam)
    p.grad = np.ones(10_000, "f")
    rule.update(p)
    assert (p.array == 1).all()


@compiled
@pytest.mark.programs
@each(threads=[1, 3])
def test_threads_change_no_bit_and_children_of_a_fork_go_on(threads):
    """A child of a fork has none of its parent's threads; without them it must neither hang nor compute less."""
    program = """
import hashlib, os
import numpy as np
from dbrdist import kernels
def update():
    rng = np.random.default_rng(1)
    p, g, m, v = (rng.random(300_001, np.float32) for _ in range(4))
    assert kernels.update("adam", (p, g, m, v, None), (0.9, 0.1, 0.99, 0.01, 0.1, 1e-8, 1.0))
    return hashlib.sha256(p.tobytes() + m.tobytes() + v.tobytes()).hexdigest()
first = update()
child = os.fork()
if not child:
    os._exit(update() != first)
assert os.waitpid(child, 0)[1] == 0
print(first)
"""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-W", "ignore", "-c", program]
    said = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    rng = np.random.default_rng(1)
    p, g, m, v = (rng.random(300_001, np.float32) for _ in range(4))
    m = m * np.float32(0.9) + g * np.float32(0.1)
    v = v * np.float32(0.99) + g * g * np.float32(0.01)
    p = p - m / (np.sqrt(v) + np.float32(1e-8)) * np.float32(0.1)
    assert said.stdout.split() == [hashlib.sha256(p.tobytes() + m.tobytes() + v.tobytes()).hexdigest()], said.stderr
