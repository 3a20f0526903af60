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
from dbrdist.kernels.cpu import loops, onednn
from tests.each import each

compiled = pytest.mark.skipif(not loops._PLACES, reason="dbrdist is not compiled")


def hooked(hook, optimizer=lambda: optimizers.SGD(0.1)):
    """Makes an optimizer with its hook, which can only be added once there is a link."""

    def make():
        made = optimizer()
        setup = made.setup

        def set_up(link):
            setup(link)
            made.add_hook(hook(link))
            return made

        made.setup = set_up
        return made

    return make


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
    "WeightDecay": (hooked(lambda link: optimizers.WeightDecay(0.01)), "weight_decay"),
    "WeightDecay of some": (hooked(lambda link: optimizers.WeightDecay(0.01, [link.W])), "weight_decay"),
    "DecoupledWeightDecay": (hooked(lambda link: optimizers.DecoupledWeightDecay(0.01, 0.1)), "decoupled_weight_decay"),
    "Lasso": (hooked(lambda link: optimizers.Lasso(0.01), lambda: optimizers.Adam(0.01)), "lasso"),
    "GradientHardClipping": (hooked(lambda link: optimizers.GradientHardClipping(-0.5, 0.5)), "hard_clipping"),
    "clipping up to 0": (hooked(lambda link: optimizers.GradientHardClipping(-0.5, 0.0)), "hard_clipping"),
    "clipping at 0": (hooked(lambda link: optimizers.GradientHardClipping(0.0, 0.5)), "hard_clipping"),
    "RMSprop": (lambda: optimizers.RMSprop(0.01), "rmsprop"),
}


def trained(make, size, dtype):
    """A parameter and its state after updates with gradients that are zero, tiny, infinite and no numbers in places."""
    rng = np.random.default_rng(0)
    link = dbrdist.Link()
    with link.init_scope():
        link.before = Parameter(np.ones(5, dtype))
        link.W = Parameter(rng.standard_normal(size).astype(dtype))
        link.W.array[10:14] = 0.0, -0.0, np.inf, np.nan
    optimizer = make().setup(link)
    is_hooked = bool([*optimizer.hooks])
    for i in range(66):  # past a sweep of velocities
        g = rng.standard_normal(size).astype(dtype)
        g[:5] = 0
        g[4] = -0.0
        g[5] = 1e-42
        if i == 3:
            g[6:9] = np.nan, np.inf, -np.inf
        link.W.grad = g
        optimizer.update()
        assert is_hooked or link.W.grad.tobytes() == g.tobytes()
    return [link.W.array, link.W.grad, *(link.W.update_rule.state or {}).values()]


@compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(name=list(RULES), dtype=["f", "d"])
def test_rules_in_one_pass_have_the_bits_of_numpys_formula(name, dtype, monkeypatch):
    make, row = RULES[name]
    served = []
    run = loops._found.run

    def recorded(place, is_double, arrays, numbers, before=()):
        served.extend([place, *[own for own, _, _ in before]])
        return run(place, is_double, arrays, numbers, before)

    monkeypatch.setattr(loops, "_found", Recorder(recorded))
    kernels.table.forget()
    ours = trained(make, 70_001, dtype)
    kernels.table.forget()
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
    rows = {loop.name for some in loops.TABLE.values() for loop in (some if type(some) is tuple else (some,))}
    kernels_of_their_own = {
        name for name in loops._PLACES if name.startswith(("relu_", "sum_of_")) or name in loops._found.ROWS
    }
    assert {row for _, row in RULES.values()} | rows | kernels_of_their_own == set(loops._PLACES)


def numbers(dtype, seed):
    """An array of 20,000 numbers with all that is special among them."""
    x = np.random.default_rng(seed).standard_normal(20_000).astype(dtype) * dtype(3)
    special = np.nan, np.inf, -np.inf, 2.5, -2.5, 0.0, -0.0, 1e-40, 0.6, -0.6, 3.0, -3.0, 6.0
    x[: 2 * len(special)] = np.resize(np.roll(special, seed), 2 * len(special))
    return x


# By row: the public function, and the row's numbers.
FUNCTIONS = {
    "hard_sigmoid": (lambda x, t: F.hard_sigmoid(x), ()),
    "huber": (lambda x, t: F.huber_loss(x, t, 0.6, "no"), (0.6,)),
    "distance": (F.absolute_error, ()),
    "leaky_relu": (lambda x, t: F.leaky_relu(x, 0.3), (0.3,)),
    "hardswish": (lambda x, t: F.hardswish(x), ()),
    "clipped_relu": (lambda x, t: F.clipped_relu(x, 2.5), (2.5,)),
    "relu6": (lambda x, t: F.relu6(x), ()),
    "absolute": (lambda x, t: F.absolute(x), ()),
}


@compiled
@each(name=list(FUNCTIONS), dtype=[np.float32, np.float64])
def test_functions_and_gradients_have_the_bits_of_numpys_formula(name, dtype):
    call, values = FUNCTIONS[name]

    def step():
        x, t = (dbrdist.Variable(numbers(dtype, seed)) for seed in (0, 1))
        y = call(x, t)
        y.grad = numbers(dtype, 2)
        y.backward()
        return [a.tobytes() for a in (y.array, x.grad, t.grad) if a is not None]

    with np.errstate(all="ignore"):
        key = name if name in loops.TABLE else (name, 0)
        assert kernels.provider_of("row", key, loops.TABLE[key].operands, (numbers(dtype, 0),) * 3, values) == "loops"
        ours = step()
        with kernels.use("columns"):
            assert step() == ours


def exact(name, x, alpha=1.0, scale=1.0, beta=1.0):
    """Values and derivatives in float64, by SciPy."""
    special = pytest.importorskip("scipy.special")
    bell, s = np.exp(-x * x / 2) / np.sqrt(2 * np.pi), special.expit(beta * x)
    error_bell, below = 2 / np.sqrt(np.pi) * np.exp(-x * x), np.minimum(x, 0)
    return {
        "sigmoid": (s, s * (1 - s)),
        "silu": (x * s, s * (1 + beta * x * (1 - s))),
        "softplus": (np.logaddexp(0, beta * x) / beta, s),
        "elu": (np.where(x > 0, x, alpha * np.expm1(below)), np.where(x >= 0, 1, alpha * np.exp(below))),
        "selu": tuple(scale * v for v in exact("elu", x, alpha)) if name == "selu" else None,
        "gelu": (x * special.ndtr(x), special.ndtr(x) + x * bell),
        "ndtr": (special.ndtr(x), bell),
        "erf": (special.erf(x), error_bell),
        "erfc": (special.erfc(x), -error_bell),
    }[name]


# By row: numbers by name, and the largest errors of values and derivatives, in units in the last place.
EXPONENTIALS = {
    "sigmoid": ({}, 3, 20),
    "silu": ({"beta": 1.0}, 4, 8),
    "softplus": ({"beta": 1.0}, 4, 3),
    "softplus of 2 x": ({"beta": 2.0}, 4, 3),
    "elu": ({"alpha": 1.0}, 2, 2),
    "elu with alpha": ({"alpha": 0.7}, 3, 3),
    "selu": ({"alpha": 1.6732632423543772, "scale": 1.0507009873554805}, 4, 4),
    "gelu": ({}, 10, 20),
    "ndtr": ({}, 10, 5),
    "erf": ({}, 4, 5),
    "erfc": ({}, 10, 5),
}


@compiled
@each(name=list(EXPONENTIALS))
def test_what_takes_exponentials_is_near_the_exact_value(name):
    """Derivatives that are differences are judged by the unit of 0.1."""
    (values, *limits), row = EXPONENTIALS[name], name.split()[0]
    x = np.concatenate([np.linspace(-12, 12, 40_001), np.geomspace(1e-30, 1, 999), np.linspace(-40, 40, 999), [0.0]])
    x = x.astype(np.float32)
    v = dbrdist.Variable(x)
    assert kernels.provider_of("row", row, ("x",), (x,), tuple(values.values())) == "loops"
    y = getattr(F, row)(v, **values)
    y.grad = np.ones_like(x)
    y.backward()
    for i, (found, wanted) in enumerate(zip((y.array, v.grad), exact(row, x.astype(np.float64), **values))):
        unit = np.spacing(np.maximum(np.abs(wanted).astype(np.float32), 1e-37)).astype(np.float64)
        if i and row in ("gelu", "silu", "sigmoid"):
            unit = np.maximum(unit, np.spacing(np.float32(0.1)))
        assert (np.abs(found - wanted) / unit).max() < limits[i], (i, x[(np.abs(found - wanted) / unit).argmax()])


@compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(name=list(EXPONENTIALS))
def test_exponentials_of_what_is_not_finite_are_those_of_numpys_formula(name):
    values, row = EXPONENTIALS[name][0], name.split()[0]
    special = np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-42, -1e-42, 3e38, -3e38

    def step():
        v = dbrdist.Variable(np.resize(np.array(special, np.float32), 9_000))
        y = getattr(F, row)(v, **values)
        y.grad = np.resize(np.array([1, 0, np.inf, np.nan, -2], np.float32), 9_000)
        y.backward()
        return y.array, v.grad

    ours = step()
    with kernels.use("columns"):
        theirs = step()
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-44)


@compiled
def test_the_cross_entropy_of_two_classes():
    rng = np.random.default_rng(0)
    p, x = rng.random(20_000, np.float32), (rng.standard_normal(20_000) * 10).astype(np.float32)
    assert kernels.provider_of("row", "bernoulli", ("p", "x"), (p, x), ()) == "loops"
    a, v = dbrdist.Variable(p), dbrdist.Variable(x)
    y = F.bernoulli_nll(a, v, reduce="no")
    y.grad = np.ones_like(x)
    y.backward()
    wide, share = x.astype(np.float64), p.astype(np.float64)
    np.testing.assert_allclose(y.array, np.logaddexp(0, wide) - share * wide, rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(v.grad, 1 / (1 + np.exp(-wide)) - share, rtol=0, atol=2e-7)
    np.testing.assert_array_equal(a.grad, -x)


@compiled
@each(key=["sigmoid", ("gelu", 0), "erf"], dtype=[np.float64, np.float16])
def test_exponentials_of_other_types_are_left_to_others(key, dtype):
    x = np.ones(10_000, dtype)
    names = loops.TABLE[key].operands
    assert kernels.provider_of("row", key, names, (x,) * len(names), ()) != "loops"


@compiled
@each(case=[("leaky_relu", (1.5,)), ("leaky_relu", (-0.1,)), ("huber", (-1.0,)), ("softplus", (0.0,)),
            ("softplus", (-1.0,)), ("elu", (np.inf,)), ("elu", (np.nan,)), ("elu", ("a",))])  # fmt: skip
def test_numbers_that_a_loop_is_not_meant_for(case):
    name, values = case
    names = loops.TABLE[name].operands
    with pytest.raises(onednn.Unsupported):
        loops._plan_row(name, names, (np.ones(10_000, "f"),) * len(names), values)


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
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(dtype=[np.float32, np.float64], lay=[backend.channels_last, np.ascontiguousarray])
def test_the_relu_of_a_sum_is_written_over_a_summand(dtype, lay):
    a, b = (lay(numbers(dtype, seed).reshape(2, 50, 10, 20)) for seed in range(2))
    a[0, 0, 0, :2], b[0, 0, 0, :2] = (-0.0, np.nan), (-0.0, -1)
    expected, before = np.maximum(a + b, 0), b.copy()
    assert kernels.relu_of_sum_over(a, b)
    np.testing.assert_array_equal(a, expected)
    np.testing.assert_array_equal(b, before)
    assert not np.signbit(a[a == 0]).any()
    assert not kernels.relu_of_sum_over(a, a)
    assert not kernels.relu_of_sum_over(a, np.swapaxes(a, 0, 1))


@compiled
def test_arrays_that_share_memory_or_may_not_be_written_are_left_to_numpy():
    p = np.ones(100, "f")
    assert not kernels.update("sgd", (p, p), (0.1,))
    assert not kernels.update("sgd", (p[:60], p[40:]), (0.1,))
    assert not kernels.update("sgd", (p[::2], np.ones(50, "f")), (0.1,))
    assert not kernels.update("sgd", (p, np.ones(99, "f")), (0.1,))
    g = np.ones(100, "f")
    decay = (("weight_decay", (0.5,), None),)
    assert not kernels.update("sgd", (p, p), (0.1,), decay)
    assert not kernels.update("sgd", (p, g), (0.1,), decay * 9)
    assert not kernels.update("sgd", (p, g), (0.1,), (*decay, ("none of this name", (), None)))
    g.flags.writeable = False  # which the rule only reads
    assert not kernels.update("sgd", (p, g), (0.1,), decay)
    p.flags.writeable = False
    assert not kernels.update("sgd", (p, np.ones(100, "f")), (0.1,))
    assert p.tolist() == g.tolist() == [1] * 100


@compiled
@each(size=[50, 1_024, 1_025, 100_000])
def test_loops_within_the_pass_of_another_see_their_stretches_alone(size):
    rng = np.random.default_rng(0)
    spans = sorted({(int(a), int(min(a + n, size))) for a, n in zip(range(0, size, size // 5 or 1), (1, 3, 0, 2, 1))})
    inside = np.zeros(size, bool)
    for start, stop in spans:
        inside[start:stop] = True
    for given, where in ((spans, inside), ([], inside & False), (None, inside | True)):
        p, g = rng.random((2, size), np.float32)
        wanted_g = np.where(where, g + p * np.float32(0.5), g)
        wanted_p = p - wanted_g * np.float32(0.25)
        assert kernels.update("sgd", (p, g), (0.25,), (("weight_decay", (0.5,), given),))
        np.testing.assert_array_equal(g, wanted_g)
        np.testing.assert_array_equal(p, wanted_p)


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
    decay = ("weight_decay", (0.5,), [(5, 100_000), (150_000, 300_001)])
    assert kernels.update("adam", (p, g, m, v), (0.9, 0.1, 0.99, 0.01, 0.1, 1e-8, 1.0), (decay,))
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
    for decayed in (slice(5, 100_000), slice(150_000, 300_001)):
        g[decayed] += p[decayed] * np.float32(0.5)
    m = m * np.float32(0.9) + g * np.float32(0.1)
    v = v * np.float32(0.99) + g * g * np.float32(0.01)
    p = p - m / (np.sqrt(v) + np.float32(1e-8)) * np.float32(0.1)
    assert said.stdout.split() == [hashlib.sha256(p.tobytes() + m.tobytes() + v.tobytes()).hexdigest()], said.stderr
