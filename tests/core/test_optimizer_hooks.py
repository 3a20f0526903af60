"""Lasso, GradientLARS and GradientNoise against their formulas, on flat memory and for one rule alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

import dbrdist
from dbrdist import Parameter, random
from dbrdist.core.backend import as_dtype
from dbrdist.optimizers import (
    SGD,
    GradientClipping,
    GradientHardClipping,
    GradientLARS,
    GradientNoise,
    Lasso,
    WeightDecay,
)

SHAPES = ((40, 30), (5,), (2, 3, 2, 2), ())


@pytest.fixture(autouse=True)
def restore():
    state = random.get_state()
    random.set_seed(0)
    yield
    random.set_state(state)


def make(dtype=np.float64, shapes=SHAPES):
    rng = np.random.default_rng(0)
    link = dbrdist.Link()
    with link.init_scope():
        for i, shape in enumerate(shapes):
            setattr(link, f"p{i}", Parameter(rng.normal(size=shape).astype(dtype)))
    return link


def gradients(link, t=0):
    rng = np.random.default_rng(100 + t)
    return [rng.normal(size=p.shape).astype(p.dtype) for p in link.params()]


def seen_by_the_update(link, hook, alone=False, steps=1, prepare=lambda link: None):
    """The gradients after the hook, in float64, of the last of some updates that move nothing."""
    optimizer = SGD(lr=0.0).setup(link)
    for one in [p.update_rule for p in link.params()] if alone else [optimizer]:
        one.add_hook(hook)
    prepare(link)
    for t in range(steps):
        for p, g in zip(link.params(), gradients(link, t)):
            p.grad = g
        optimizer.update()
    return [p.grad.astype(float) for p in link.params()]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_lasso_adds_the_sign(alone, dtype):
    dtype = as_dtype(dtype)
    link = make(dtype)
    link.p0.array[:5] = 0
    before = [p.array.astype(float) for p in link.params()]
    tolerance = {8: 1e-14, 4: 1e-6, 2: 2.0**-6}[dtype.itemsize]
    for g, h, w in zip(seen_by_the_update(link, Lasso(0.25), alone), gradients(link), before):
        np.testing.assert_allclose(g, h.astype(float) + 0.25 * np.sign(w), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("threshold", "decay", "eps"), [(0.01, 0.0, 1e-9), (3.0, 0.5, 0.25), (0.0, 0.1, 0.0)])
def test_lars_scales_to_the_norm_of_the_parameter(alone, dtype, threshold, decay, eps):
    dtype = as_dtype(dtype)
    link = make(dtype)
    weights = [p.array.astype(float) for p in link.params()]
    seen = seen_by_the_update(link, GradientLARS(threshold, decay, eps), alone)
    scaled = 0
    for g, h, w in zip(seen, gradients(link), weights):
        h, norm = h.astype(float), np.linalg.norm(w)
        rate = norm / (np.linalg.norm(h) + decay * norm + eps) if norm > threshold else 1.0
        scaled += norm > threshold
        tolerance = {8: 1e-13, 4: 1e-5, 2: 2.0**-5}[dtype.itemsize]
        np.testing.assert_allclose(g, rate * (h + decay * w), rtol=tolerance, atol=tolerance)
    assert scaled == {0.01: 4, 3.0: 2, 0.0: 4}[threshold]


def test_lars_leaves_a_gradient_of_zero():
    link = make(shapes=((3, 2),))
    optimizer = SGD(lr=1.0).setup(link)
    optimizer.add_hook(GradientLARS(eps=0.0))
    link.p0.grad = np.zeros((3, 2))
    before = link.p0.array.copy()
    optimizer.update()
    np.testing.assert_array_equal(link.p0.array, before)


# ---- noise ----------------------------------------------------------------------------------------------------------


def noise(link, hook=None, **options):
    given = gradients(link, options.get("steps", 1) - 1)
    hook = GradientNoise(0.3) if hook is None else hook
    return [g - h.astype(float) for g, h in zip(seen_by_the_update(link, hook, **options), given)]


@pytest.mark.parametrize("steps", [1, 2, 50])
def test_noise_has_the_variance_of_the_paper(steps):
    made = noise(make(shapes=((300, 400), (50_000,))), steps=steps)
    for n in made:
        expected = 0.3 / steps**0.55  # t counts from 0
        assert n.mean() == pytest.approx(0, abs=5 * math.sqrt(expected / n.size))
        assert n.var() == pytest.approx(expected, rel=5 * math.sqrt(2 / n.size))
        assert (abs(n) < 2 * math.sqrt(expected)).mean() == pytest.approx(0.9545, abs=0.004)
    a, b = made[0].ravel()[:50_000], made[1]
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.03


def test_noise_differs_by_step_seed_and_parameter():
    link = make(shapes=((3, 3), (3, 3)))
    first, second = noise(link)
    later = noise(make(shapes=((3, 3), (3, 3))), steps=2)[0]
    random.set_seed(5)
    other_seed = noise(make(shapes=((3, 3), (3, 3))))[0]
    for a in (second, later * 2**0.275, other_seed):
        assert (np.abs(a - first) > 1e-6).all()
    types = dbrdist.Link()
    with types.init_scope():
        types.a, types.b = Parameter(np.ones(4)), Parameter(np.ones(4, np.float32))
    a, b = noise(types)
    assert (np.abs(a - b) > 1e-6).all()


def test_noise_is_the_same_on_every_rank():
    """Ranks differ in their rows of the batch and in what they have drawn for it."""
    made = []
    for rank in range(3):
        random.set_stream(7, epoch=rank, iteration=5, row=4 * rank)
        for _ in range(rank):
            random.raw_words(2, 3)
        np.random.seed(rank)
        made.append(noise(make(), steps=2))
    for others in made[1:]:
        for a, b in zip(made[0], others):
            np.testing.assert_array_equal(a, b)


def test_noise_of_one_parameter_does_not_depend_on_its_neighbours():
    def freeze(link):
        link.p1.update_rule.enabled = False

    for a, b in list(zip(noise(make()), noise(make(), prepare=freeze)))[::2]:
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15)


def test_noise_goes_on_after_a_restart():
    def trained(steps, link, optimizer):
        for t in steps:
            for p, g in zip(link.params(), gradients(link, t)):
                p.grad = g
            optimizer.update()
        return [p.array.copy() for p in link.params()]

    def begin():
        link = make()
        optimizer = SGD(0.1).setup(link)
        optimizer.add_hook(GradientNoise(0.5))
        return link, optimizer

    straight = trained(range(6), *begin())
    link, optimizer = begin()
    trained(range(3), link, optimizer)
    saved = dbrdist.serializers.DictionarySerializer()
    link.serialize(saved["model"])
    optimizer.serialize(saved["optimizer"])
    other, resumed = begin()
    source = dbrdist.serializers.NpzDeserializer(saved.target)
    other.serialize(source["model"])
    resumed.serialize(source["optimizer"])
    for a, b in zip(straight, trained(range(3, 6), other, resumed)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_noise_on_16_bits_and_in_float32(dtype):
    dtype = as_dtype(dtype)
    narrow = noise(make(dtype))
    link = make(dtype)
    optimizer = SGD(lr=1.0).setup(link)
    optimizer.use_fp32_update()
    optimizer.add_hook(GradientNoise(0.3))
    before, given = [p.array.astype(float) for p in link.params()], gradients(link)
    for p, g in zip(link.params(), given):
        p.grad = g
    optimizer.update()
    for n, p, w, g in zip(narrow, link.params(), before, given):
        wide = w - p.update_rule.state["fp32_param"] - g.astype(float)  # the same noise, not rounded
        np.testing.assert_allclose(n, wide, atol=0.05)
        assert wide.size < 100 or wide.std() == pytest.approx(math.sqrt(0.3), rel=0.1)


def test_a_noise_function_of_ones_own():
    calls = []

    def uniform(xp, shape, dtype, hook, rule):
        calls.append((xp, shape, dtype, hook.eta, rule.t))
        return hook.generator.uniform(1.0, 2.0, shape).astype(dtype)

    link = make(np.float32)
    made = noise(link, GradientNoise(0.3, uniform), alone=True)
    assert [(c[1], c[2]) for c in calls] == [(shape, np.float32) for shape in SHAPES]
    assert {(c[0], c[3]) for c in calls} == {(np, 0.3)}
    for n in made:
        assert (n > 0.99).all() and (n < 2.01).all()


def test_noise_for_one_rule_alone():
    link = make(np.float32)
    optimizer = SGD(lr=0.0).setup(link)
    link.p0.update_rule.add_hook(GradientNoise(0.3))
    given = gradients(link)
    for p, g in zip(link.params(), given):
        p.grad = g
    optimizer.update()
    assert (link.p0.grad != given[0]).mean() > 0.99
    np.testing.assert_array_equal(link.p2.grad, given[2])


@pytest.mark.parametrize("eta", [-1.0, math.nan])
def test_noise_needs_a_variance(eta):
    with pytest.raises(ValueError, match="GradientNoise: eta: expected a number of 0 or more, got"):
        GradientNoise(eta)


@pytest.mark.parametrize(
    "hook",
    [WeightDecay(0.1), Lasso(0.1), GradientHardClipping(-1.0, 1.0), GradientLARS(), GradientNoise(0.1)],
    ids=lambda hook: hook.name,
)
def test_parameters_without_a_value_or_a_gradient_are_left_alone(hook):
    """A rule of its own may call its hooks before there is anything to change."""
    for param in (Parameter(np.ones(2)), Parameter(None)):
        hook(None, param)
        assert param.grad is None
        assert param.array is None or param.array.tolist() == [1, 1]


HOOKS = [WeightDecay(0.1), Lasso(0.1), GradientClipping(1.0), GradientLARS(), GradientNoise(0.1)]
HOOKS += [GradientHardClipping(-1.0, 1.0), GradientHardClipping(0.5, 1.0)]


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_hooks_work_where_each_rank_has_a_part(hook):
    optimizer = SGD().setup(make())
    optimizer.add_hook(hook)
    optimizer.check_divisible(list(optimizer.target.params()))
    optimizer.add_hook(lambda optimizer: None, "looks")
    with pytest.raises(ValueError, match="the hook 'looks' may need whole gradients"):
        optimizer.check_divisible(list(optimizer.target.params()))


@pytest.mark.parametrize("hook", [h for h in HOOKS if hasattr(h, "flat")], ids=lambda hook: hook.name)
def test_zeros_between_parameters_are_filled_again_after_hooks_that_change_them(hook, monkeypatch):
    """Only those are looked after: the others leave them as they are."""
    link = make(np.float32)
    optimizer = SGD(lr=0.0).setup(link)
    for p, g in zip(link.params(), gradients(link)):
        p.grad = g
    optimizer.update()
    (part,) = optimizer._plan()
    for p, g in zip(link.params(), gradients(link)):
        p.grad = g
    part.collect()
    cleared = []
    monkeypatch.setattr(type(part.joint), "clear_gaps", lambda run, *others: cleared.append(run))
    optimizer.call_hook(hook)
    assert part.joint.gaps.size
    is_changed = part.joint.grad[part.joint.gaps].any()
    assert is_changed == (isinstance(hook, GradientHardClipping) and hook.lower_bound > 0)
    assert bool(cleared) == isinstance(hook, GradientHardClipping)
