"""Arguments of optimizers, hooks and schedules away from their defaults, and models of more than one type.

The formulas are written out for a single parameter; ``test_optimizers.py`` has those over several steps.
"""

from __future__ import annotations

import copy
import inspect
import math
import pickle

import numpy as np
import pytest

import dbrdist
from dbrdist import Parameter, optimizers
from dbrdist.core.backend import as_dtype
from dbrdist.core.update_rule import Hyperparameter
from dbrdist.optimizers import LARS, SGD, Adam, GradientClipping, GradientHardClipping, MomentumSGD, schedules
from tests.each import each

W = np.array([[3.0, -4.0], [1.0, 2.0]])
G = np.array([[0.5, 0.25], [-1.5, 2.0]])


def make(**arrays):
    link = dbrdist.Link()
    with link.init_scope():
        for name, a in arrays.items():
            setattr(link, name, Parameter(np.array(a)))
    return link


def norm(a):
    return math.sqrt((np.asarray(a, np.float64) ** 2).sum())


# ---- LARS -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [0.0, 0.5, 10.0])
@pytest.mark.parametrize("trust", [0.001, 0.02])
def test_eps_of_lars_stands_in_the_denominator(eps, trust):
    link = make(w=W)
    optimizer = LARS(lr=0.5, momentum=0.0, weight_decay=0.1, trust_coefficient=trust, eps=eps).setup(link)
    link.w.grad = G.copy()
    optimizer.update()
    rate = 0.5 * trust * norm(W) / (norm(G) + 0.1 * norm(W) + eps)
    np.testing.assert_allclose(link.w.array, W - rate * (G + 0.1 * W), rtol=1e-13)


@pytest.mark.parametrize("skip", [True, False])
def test_lars_without_skipping_treats_vectors_as_matrices(skip):
    link = make(w=W, v=W[0], scalar=W[0, 0])
    optimizer = LARS(lr=0.5, momentum=0.0, weight_decay=0.1, trust_coefficient=0.02, skip_vectors=skip).setup(link)
    link.w.grad, link.v.grad, link.scalar.grad = G.copy(), G[0].copy(), np.array(0.25)
    optimizer.update()
    for p, w, g in ((link.w, W, G), (link.v, W[0], G[0]), (link.scalar, W[0, 0], 0.25)):
        plain = skip and np.ndim(w) < 2
        rate = 0.5 if plain else 0.5 * 0.02 * norm(w) / (norm(g) + 0.1 * norm(w))
        np.testing.assert_allclose(p.array, w - rate * (g + (0 if plain else 0.1 * w)), rtol=1e-13)


def test_adam_keeps_eps_apart_from_the_root():
    link = make(w=W)
    optimizer = Adam(alpha=0.5, beta1=0.5, beta2=0.75, eps=2.0).setup(link)
    link.w.grad = G.copy()
    optimizer.update()
    step = 0.5 * math.sqrt(0.25) / 0.5 * (0.5 * G) / (np.sqrt(0.25 * G * G) + 2.0)
    np.testing.assert_allclose(link.w.array, W - step, rtol=1e-13)


@pytest.mark.parametrize("name", [n for n in optimizers.__all__ if hasattr(getattr(optimizers, n), "setup")])
def test_every_argument_arrives_as_a_hyperparameter(name):
    cls = getattr(optimizers, name)
    parameters = inspect.signature(cls).parameters
    given = {k: (not p.default if isinstance(p.default, bool) else p.default * 0.5 + 0.03)
             for k, p in parameters.items()}  # fmt: skip
    assert {k: getattr(cls(**given).hyperparam, k) for k in given} == given
    for i, (k, v) in enumerate(given.items()):  # by position, too
        assert getattr(cls(*list(given.values())[: i + 1]).hyperparam, k) == v


# ---- hooks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("types", [("float32", "float64"), ("float64", "float16", "float32"), ("bfloat16", "float32")])
@pytest.mark.parametrize("threshold", [1.0, 3.0, 1e3])
def test_clipping_looks_at_the_parameters_of_all_types(types, threshold):
    link = make(**{f"p{i}": np.ones((2, 2)).astype(as_dtype(t)) for i, t in enumerate(types)})
    optimizer = SGD(lr=0.0).setup(link)
    optimizer.add_hook(GradientClipping(threshold))
    values = [G * (i + 1) for i in range(len(types))]
    for p, g in zip(link.params(), values):
        p.grad = g.astype(p.dtype)
    optimizer.update()
    rate = min(1.0, threshold / norm([norm(g) for g in values]))
    for p, g in zip(link.params(), values):
        np.testing.assert_allclose(p.grad.astype(float), g * rate, rtol=1e-2 if p.dtype.itemsize == 2 else 1e-6)


@each(size=[0.0, 0.01, 0.9, 1.0, 1.1, 50.0], part=[0.5, 0.99, 1.01, 3.0])
def test_clipping_takes_gradients_of_any_size(size, part):
    link = make(w=W)
    optimizer = SGD(lr=1.0).setup(link)
    optimizer.add_hook(GradientClipping(part * (size or 1.0)))
    link.w.grad = G / norm(G) * size
    optimizer.update()
    np.testing.assert_allclose(link.w.array, W - G / norm(G) * size * min(1.0, part), rtol=1e-13)


def test_clipping_counts_what_is_updated_and_nothing_else():
    link = make(a=W, frozen=W, b=W)
    optimizer = SGD(lr=1.0).setup(link)
    optimizer.add_hook(GradientClipping(1.0))
    link.frozen.update_rule.enabled = False
    for p in link.params():
        p.grad = G.copy()
    optimizer.update()
    for p in (link.a, link.b):
        np.testing.assert_allclose(p.array, W - G / (norm(G) * math.sqrt(2)), rtol=1e-13)
    np.testing.assert_array_equal(link.frozen.array, W)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("bounds", [(-1.0, 0.3), (-0.3, 1.0), (0.1, 0.2)])
def test_hard_clipping_has_two_bounds(alone, bounds):
    link = make(a=W, b=W.astype(np.float32))
    optimizer = SGD(lr=1.0).setup(link)
    for one in (p.update_rule for p in link.params()) if alone else (optimizer,):
        one.add_hook(GradientHardClipping(*bounds))
    for p in link.params():
        p.grad = G.astype(p.dtype)
    optimizer.update()
    for p in link.params():
        np.testing.assert_allclose(p.array, W - np.minimum(np.maximum(G, bounds[0]), bounds[1]), rtol=1e-6)


def test_setup_begins_anew():
    optimizer, calls = MomentumSGD(lr=0.5, momentum=0.5), []
    optimizer.setup(make(w=W))
    optimizer.add_hook(lambda o: calls.append("pre"), name="pre")
    optimizer.add_hook(lambda o: calls.append("post"), name="post", timing="post")
    optimizer.target.w.grad = G.copy()
    optimizer.update()
    optimizer.new_epoch()
    assert calls == ["pre", "post"]
    optimizer.setup(link := make(w=W))
    assert (optimizer.t, optimizer.epoch) == (0, 0)
    link.w.grad = G.copy()
    optimizer.update()
    assert calls == ["pre", "post"]
    np.testing.assert_allclose(link.w.array, W - 0.5 * G, rtol=1e-15)
    optimizer.add_hook(print, name="pre")  # the name is free again


# ---- loss scale and 16 bits -----------------------------------------------------------------------------------------


def test_a_dynamic_loss_scale_stays_within_1_and_the_largest_float16():
    link = make(w=np.ones(2))
    optimizer = SGD(lr=0.0).setup(link)
    optimizer.loss_scaling(interval=1000)

    def scale_after(factor):
        optimizer.update(lambda: dbrdist.functions.sum(link.w) * factor)
        saved = dbrdist.serializers.DictionarySerializer()
        optimizer.serialize(saved)
        return float(saved.target["loss_scale"])

    assert [scale_after(1.0) for _ in range(18)] == [*(2.0**i for i in range(1, 16)), *[65504.0] * 3]
    with pytest.warns(RuntimeWarning, match="NaN or infinity in the gradient of /w"):
        falling = [scale_after(math.inf) for _ in range(18)]
    assert falling[:2] == [32752.0, 16376.0]
    assert falling[-2:] == [1.0, 1.0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("in_fp32", [True, False])
def test_gradients_of_16_bits_are_unscaled_for_whoever_looks(dtype, in_fp32):
    link, seen = make(w=W.astype(as_dtype(dtype))), []
    optimizer = SGD(lr=0.5).setup(link)
    optimizer.use_fp32_update(in_fp32)
    optimizer.set_loss_scale(16.0)
    for timing in ("pre", "post"):
        optimizer.add_hook(lambda o: seen.append(link.w.grad.astype(float)), name=timing, timing=timing)
    link.w.grad = (G * 16).astype(as_dtype(dtype))
    optimizer.update()
    for g in (*seen, link.w.grad.astype(float)):
        np.testing.assert_array_equal(g, G)
    np.testing.assert_array_equal(link.w.array.astype(float), W - 0.5 * G)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_without_hooks_too(dtype):
    link = make(w=W.astype(as_dtype(dtype)))
    optimizer = SGD(lr=0.5).setup(link)
    optimizer.use_fp32_update()
    optimizer.set_loss_scale(16.0)
    link.w.grad = (G * 16).astype(as_dtype(dtype))
    optimizer.update()
    np.testing.assert_array_equal(link.w.grad.astype(float), G)


# ---- schedules ------------------------------------------------------------------------------------------------------


def test_a_cosine_begins_where_the_warm_up_ends():
    f = schedules.cosine(2.0, 10.0, end=0.5, begin=4.0)
    expected = {0: 2.0, 4: 2.0, 5: 0.5 + 0.75 * (1 + math.cos(math.pi / 6)), 7: 1.25, 10: 0.5, 12: 0.5}
    assert {e: f(e) for e in expected} == pytest.approx(expected, rel=1e-14)


def test_a_polynomial_has_power_end_and_begin():
    f = schedules.polynomial(2.0, 10.0, power=3.0, end=0.5, begin=2.0)
    expected = {0: 2.0, 2: 2.0, 4: 0.5 + 1.5 * 0.75**3, 6: 0.5 + 1.5 * 0.125, 10: 0.5, 99: 0.5}
    assert {e: f(e) for e in expected} == pytest.approx(expected, rel=1e-14)


def test_steps_and_warm_up_at_their_edges():
    f = schedules.step(3.0, 0.5, [2.0, 4.0])
    assert [f(e) for e in (0, 1.999, 2, 3.999, 4, 100)] == [3, 3, 1.5, 1.5, 0.75, 0.75]
    g = schedules.warmup(f, 2.0, start=0.5)  # its peak is the rate at the end of the climb
    assert [g(e) for e in (0, 1, 2, 4)] == [0.5, 1.0, 1.5, 0.75]


# ---- hyperparameters that are arrays --------------------------------------------------------------------------------


def of_numpy(kind, value):
    """A number as one of NumPy's; others stay what they are."""
    return kind(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


KINDS_OF_NUMBERS = {
    "0-d": np.array,
    "0-d float32": lambda x: np.array(x, np.float32),
    "one element": lambda x: np.array([x]),
    "float64": np.float64,
    "read-only": lambda x: np.broadcast_to(np.float64(x), (1, 1)),
}
OPTIMIZERS = [
    optimizers.AdaBound, optimizers.AdaDelta, optimizers.AdaGrad, optimizers.Adam, optimizers.AdamW,
    optimizers.AMSBound, optimizers.AMSGrad, optimizers.CorrectedMomentumSGD, optimizers.LAMB, LARS, optimizers.MSVAG,
    MomentumSGD, optimizers.NesterovAG, optimizers.RMSprop, optimizers.RMSpropGraves, SGD, optimizers.SMORMS3,
]  # fmt: skip


def steps_of(optimizer, dtype, hook=None, num_steps=3):
    """The parameters after some steps."""
    link = make(w=W.astype(dtype), v=W[0].astype(dtype))
    optimizer.setup(link)
    optimizer.use_fp32_update()
    if hook is not None:
        optimizer.add_hook(hook)
    for k in range(num_steps):
        link.w.grad, link.v.grad = ((k + 1) * G).astype(dtype), G[0].astype(dtype)
        optimizer.update()
    return [p.array for p in link.params()]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@each(number=list(KINDS_OF_NUMBERS), dtype=["float16", "float32", "float64"])
def test_hyperparameters_may_be_numbers_of_numpy(kind, number, dtype):
    made, plain = kind(), kind()
    for name, value in plain.hyperparam.get_dict().items():
        setattr(made, name, of_numpy(KINDS_OF_NUMBERS[number], value))
        setattr(plain, name, of_numpy(lambda x: float(np.float32(x)) if number == "0-d float32" else x, value))
    for a, b in zip(steps_of(made, dtype), steps_of(plain, dtype), strict=True):
        assert a.dtype == dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("of_rule", [False, True])
@each(dtype=["float32", "float64"])
def test_an_array_as_a_hyperparameter_is_read_at_each_update(of_rule, dtype):
    link = make(w=W.astype(dtype))
    optimizer = MomentumSGD(9.0, momentum=np.array(0.0)).setup(link)
    lr = np.array(0.5)
    (link.w.update_rule.hyperparam if of_rule else optimizer).lr = lr
    expected = W
    for rate in (0.5, 0.25, 2.0):
        lr[...] = rate
        link.w.grad = G.astype(dtype)
        optimizer.update()
        expected = expected - rate * G
        np.testing.assert_array_equal(link.w.array, expected)
    assert optimizer.momentum.shape == ()
    assert (link.w.update_rule.hyperparam if of_rule else optimizer).lr is lr


HOOKS = {
    "WeightDecay": lambda n: optimizers.WeightDecay(n(0.25)),
    "Lasso": lambda n: optimizers.Lasso(n(0.25)),
    "GradientClipping": lambda n: GradientClipping(n(0.5)),
    "GradientHardClipping": lambda n: GradientHardClipping(n(-0.25), n(0.5)),
    "GradientLARS": lambda n: optimizers.GradientLARS(n(0.5), n(0.25), n(0.125)),
}


@pytest.mark.parametrize("hook", HOOKS)
@each(number=["0-d", "float64", "one element"], dtype=["float32", "float64"])
def test_numbers_of_hooks_may_be_numpys(hook, number, dtype):
    made, plain = (HOOKS[hook](n) for n in (KINDS_OF_NUMBERS[number], float))
    for a, b in zip(steps_of(SGD(0.5), dtype, made), steps_of(SGD(0.5), dtype, plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6 if dtype == "float32" else 1e-14)


def test_arrays_as_hyperparameters_go_through_a_snapshot_a_copy_and_a_pickle(tmp_path):
    link = make(w=W)
    optimizer = MomentumSGD(np.array(0.5), np.float64(0.25)).setup(link)
    dbrdist.serializers.save_npz(tmp_path / "state.npz", optimizer)
    loaded = MomentumSGD(np.array(1.0)).setup(make(w=W))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), loaded):
        if other is loaded:
            dbrdist.serializers.load_npz(tmp_path / "state.npz", other)
        assert (float(other.lr), float(other.momentum)) == (0.5, 0.25)
        other.target.w.grad = G.copy()
        before = other.target.w.array.copy()
        other.update()
        np.testing.assert_array_equal(other.target.w.array, before - 0.5 * G)


def test_arrays_are_found_among_the_values_of_any_ancestor():
    oldest = Hyperparameter()
    oldest.lr = np.array([0.5])
    youngest = Hyperparameter(Hyperparameter(oldest))
    assert type(youngest.in_numbers().lr) is float
    oldest.lr[:] = 0.25
    assert youngest.in_numbers().lr == 0.25
