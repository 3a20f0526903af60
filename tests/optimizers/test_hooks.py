"""Lasso, GradientLARS and GradientNoise against their formulas, on flat memory and for one rule alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

import dbrdist
from dbrdist import Parameter, optimizers, random
from dbrdist.core.array.backend import as_dtype
from dbrdist.optimizers import (
    SGD,
    CorrectedMomentumSGD,
    DecoupledWeightDecay,
    GradientClipping,
    GradientHardClipping,
    GradientLARS,
    GradientNoise,
    Lasso,
    MomentumSGD,
    WeightDecay,
)
from tests.each import each
from tests.optimizers.optimizer_helpers import KINDS_OF_NUMBERS, SHAPES, G, W, link_of, make, steps_of

LARGE_SHAPES = ((40, 30), (5,), (2, 3, 2, 2), ())


@pytest.fixture
def restore():
    state = random.get_state()
    random.set_seed(0)
    yield
    random.set_state(state)


def large_link(dtype=np.float64, shapes=LARGE_SHAPES):
    rng = np.random.default_rng(0)
    link = dbrdist.Link()
    with link.init_scope():
        for i, shape in enumerate(shapes):
            setattr(link, f"p{i}", Parameter(rng.normal(size=shape).astype(dtype)))
    return link


def gradients_for(link, t=0):
    rng = np.random.default_rng(100 + t)
    return [rng.normal(size=p.shape).astype(p.dtype) for p in link.params()]


def seen_by_the_update(link, hook, alone=False, steps=1, prepare=lambda link: None):
    """The gradients after the hook, in float64, of the last of some updates that move nothing."""
    optimizer = SGD(lr=0.0).setup(link)
    for one in [p.update_rule for p in link.params()] if alone else [optimizer]:
        one.add_hook(hook)
    prepare(link)
    for t in range(steps):
        for p, g in zip(link.params(), gradients_for(link, t)):
            p.grad = g
        optimizer.update()
    return [p.grad.astype(float) for p in link.params()]


@pytest.mark.usefixtures("restore")
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_lasso_adds_the_sign(alone, dtype):
    dtype = as_dtype(dtype)
    link = large_link(dtype)
    link.p0.array[:5] = 0
    before = [p.array.astype(float) for p in link.params()]
    tolerance = {8: 1e-14, 4: 1e-6, 2: 2.0**-6}[dtype.itemsize]
    for g, h, w in zip(seen_by_the_update(link, Lasso(0.25), alone), gradients_for(link), before):
        np.testing.assert_allclose(g, h.astype(float) + 0.25 * np.sign(w), rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("restore")
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("threshold", "decay", "eps"), [(0.01, 0.0, 1e-9), (3.0, 0.5, 0.25), (0.0, 0.1, 0.0)])
def test_lars_scales_to_the_norm_of_the_parameter(alone, dtype, threshold, decay, eps):
    dtype = as_dtype(dtype)
    link = large_link(dtype)
    weights = [p.array.astype(float) for p in link.params()]
    seen = seen_by_the_update(link, GradientLARS(threshold, decay, eps), alone)
    scaled = 0
    for g, h, w in zip(seen, gradients_for(link), weights):
        h, norm = h.astype(float), np.linalg.norm(w)
        rate = norm / (np.linalg.norm(h) + decay * norm + eps) if norm > threshold else 1.0
        scaled += norm > threshold
        tolerance = {8: 1e-13, 4: 1e-5, 2: 2.0**-5}[dtype.itemsize]
        np.testing.assert_allclose(g, rate * (h + decay * w), rtol=tolerance, atol=tolerance)
    assert scaled == {0.01: 4, 3.0: 2, 0.0: 4}[threshold]


@pytest.mark.usefixtures("restore")
def test_lars_leaves_a_gradient_of_zero():
    link = large_link(shapes=((3, 2),))
    optimizer = SGD(lr=1.0).setup(link)
    optimizer.add_hook(GradientLARS(eps=0.0))
    link.p0.grad = np.zeros((3, 2))
    before = link.p0.array.copy()
    optimizer.update()
    np.testing.assert_array_equal(link.p0.array, before)


# ---- noise ----------------------------------------------------------------------------------------------------------
def noise(link, hook=None, **options):
    given = gradients_for(link, options.get("steps", 1) - 1)
    hook = GradientNoise(0.3) if hook is None else hook
    return [g - h.astype(float) for g, h in zip(seen_by_the_update(link, hook, **options), given)]


@pytest.mark.slow
@pytest.mark.usefixtures("restore")
@pytest.mark.parametrize("steps", [1, 2, 50])
def test_noise_has_the_variance_of_the_paper(steps):
    made = noise(large_link(shapes=((300, 400), (50_000,))), steps=steps)
    for n in made:
        expected = 0.3 / steps**0.55  # t counts from 0
        assert n.mean() == pytest.approx(0, abs=5 * math.sqrt(expected / n.size))
        assert n.var() == pytest.approx(expected, rel=5 * math.sqrt(2 / n.size))
        assert (abs(n) < 2 * math.sqrt(expected)).mean() == pytest.approx(0.9545, abs=0.004)
    a, b = made[0].ravel()[:50_000], made[1]
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.03


@pytest.mark.usefixtures("restore")
def test_noise_differs_by_step_seed_and_parameter():
    link = large_link(shapes=((3, 3), (3, 3)))
    first, second = noise(link)
    later = noise(large_link(shapes=((3, 3), (3, 3))), steps=2)[0]
    random.set_seed(5)
    other_seed = noise(large_link(shapes=((3, 3), (3, 3))))[0]
    for a in (second, later * 2**0.275, other_seed):
        assert (np.abs(a - first) > 1e-6).all()
    types = dbrdist.Link()
    with types.init_scope():
        types.a, types.b = Parameter(np.ones(4)), Parameter(np.ones(4, np.float32))
    a, b = noise(types)
    assert (np.abs(a - b) > 1e-6).all()


@pytest.mark.usefixtures("restore")
def test_noise_is_the_same_on_every_rank():
    """Ranks differ in their rows of the batch and in what they have drawn for it."""
    made = []
    for rank in range(3):
        random.set_stream(7, epoch=rank, iteration=5, row=4 * rank)
        for _ in range(rank):
            random.raw_words(2, 3)
        np.random.seed(rank)
        made.append(noise(large_link(), steps=2))
    for others in made[1:]:
        for a, b in zip(made[0], others):
            np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("restore")
def test_noise_of_one_parameter_does_not_depend_on_its_neighbours():
    def freeze(link):
        link.p1.update_rule.enabled = False

    for a, b in list(zip(noise(large_link()), noise(large_link(), prepare=freeze)))[::2]:
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15)


@pytest.mark.usefixtures("restore")
def test_noise_goes_on_after_a_restart():
    def trained(steps, link, optimizer):
        for t in steps:
            for p, g in zip(link.params(), gradients_for(link, t)):
                p.grad = g
            optimizer.update()
        return [p.array.copy() for p in link.params()]

    def begin():
        link = large_link()
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


@pytest.mark.usefixtures("restore")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_noise_on_16_bits_and_in_float32(dtype):
    dtype = as_dtype(dtype)
    narrow = noise(large_link(dtype))
    link = large_link(dtype)
    optimizer = SGD(lr=1.0).setup(link)
    optimizer.use_fp32_update()
    optimizer.add_hook(GradientNoise(0.3))
    before, given = [p.array.astype(float) for p in link.params()], gradients_for(link)
    for p, g in zip(link.params(), given):
        p.grad = g
    optimizer.update()
    for n, p, w, g in zip(narrow, link.params(), before, given):
        wide = w - p.update_rule.state["fp32_param"] - g.astype(float)  # the same noise, not rounded
        np.testing.assert_allclose(n, wide, atol=0.05)
        assert wide.size < 100 or wide.std() == pytest.approx(math.sqrt(0.3), rel=0.1)


@pytest.mark.usefixtures("restore")
def test_a_noise_function_of_ones_own():
    calls = []

    def uniform(xp, shape, dtype, hook, rule):
        calls.append((xp, shape, dtype, hook.eta, rule.t))
        return hook.generator.uniform(1.0, 2.0, shape).astype(dtype)

    link = large_link(np.float32)
    made = noise(link, GradientNoise(0.3, uniform), alone=True)
    assert [(c[1], c[2]) for c in calls] == [(shape, np.float32) for shape in LARGE_SHAPES]
    assert {(c[0], c[3]) for c in calls} == {(np, 0.3)}
    for n in made:
        assert (n > 0.99).all() and (n < 2.01).all()


@pytest.mark.usefixtures("restore")
def test_noise_for_one_rule_alone():
    link = large_link(np.float32)
    optimizer = SGD(lr=0.0).setup(link)
    link.p0.update_rule.add_hook(GradientNoise(0.3))
    given = gradients_for(link)
    for p, g in zip(link.params(), given):
        p.grad = g
    optimizer.update()
    assert (link.p0.grad != given[0]).mean() > 0.99
    np.testing.assert_array_equal(link.p2.grad, given[2])


@pytest.mark.usefixtures("restore")
@pytest.mark.parametrize("eta", [-1.0, math.nan])
def test_noise_needs_a_variance(eta):
    with pytest.raises(ValueError, match="GradientNoise: eta: expected a number of 0 or more, got"):
        GradientNoise(eta)


@pytest.mark.usefixtures("restore")
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


@pytest.mark.usefixtures("restore")
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_hooks_work_where_each_rank_has_a_part(hook):
    optimizer = SGD().setup(large_link())
    optimizer.add_hook(hook)
    optimizer.check_divisible(list(optimizer.target.params()))
    optimizer.add_hook(lambda optimizer: None, "looks")
    with pytest.raises(ValueError, match="the hook 'looks' may need whole gradients"):
        optimizer.check_divisible(list(optimizer.target.params()))


@pytest.mark.usefixtures("restore")
@pytest.mark.parametrize("hook", [h for h in HOOKS if hasattr(h, "flat")], ids=lambda hook: hook.name)
def test_zeros_between_parameters_are_filled_again_after_hooks_that_change_them(hook, monkeypatch):
    """Only those are looked after: the others leave them as they are."""
    link = large_link(np.float32)
    optimizer = SGD(lr=0.0).setup(link)
    for p, g in zip(link.params(), gradients_for(link)):
        p.grad = g
    optimizer.update()
    (part,) = optimizer._plan()
    for p, g in zip(link.params(), gradients_for(link)):
        p.grad = g
    part.collect()
    cleared = []
    monkeypatch.setattr(type(part.joint), "clear_gaps", lambda run, *others: cleared.append(run))
    optimizer.call_hook(hook)
    assert part.joint.gaps.size
    is_changed = part.joint.grad[part.joint.gaps].any()
    assert is_changed == (isinstance(hook, GradientHardClipping) and hook.lower_bound > 0)
    assert bool(cleared) == is_changed


WEIGHTS, GRADIENTS = np.array([[3.0, -4.0], [0.0, 2.0]]), np.array([[0.5, -0.25], [1.5, 2.0]])
B, GB = np.array([1.0, -2.0]), np.array([0.25, 0.5])


def link():
    made = dbrdist.Link()
    with made.init_scope():
        made.w, made.b = Parameter(WEIGHTS.copy()), Parameter(B.copy())
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
    made.w.grad, made.b.grad = GRADIENTS.copy(), GB.copy()
    own.update()
    return WEIGHTS - made.w.array, B - made.b.array


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
    "at the threshold": (lambda m: GradientLARS(float(np.linalg.norm(WEIGHTS)), 0.2), lambda p, g: g + 0.2 * p),
    "without decay": (lambda m: GradientLARS(), lars),
    "no noise": (lambda m: GradientNoise(0), lambda p, g: g),
}


@each(name=FORMULAS, on_rules=[True, False])
def test_hooks_follow_their_formulas(name, on_rules):
    hook, formula = FORMULAS[name]
    for found, p, g in zip(stepped(hook, on_rules), (WEIGHTS, B), (GRADIENTS, GB)):
        np.testing.assert_allclose(found, formula(p, g), rtol=1e-12, atol=1e-14)


@each(kind=[WeightDecay, Lasso], on_rules=[True, False], whom=["w", "b", "both", "none"])
def test_penalties_for_some_parameters(kind, on_rules, whom):
    chosen = {"w": ["w"], "b": ["b"], "both": ["w", "b"], "none": []}[whom]
    found = stepped(lambda m: kind(0.1, [getattr(m, name) for name in chosen]), on_rules)
    for name, difference, p, g in zip("wb", found, (WEIGHTS, B), (GRADIENTS, GB)):
        penalty = 0.1 * (p if kind is WeightDecay else np.sign(p)) * (name in chosen)
        np.testing.assert_allclose(difference, g + penalty, rtol=1e-12, atol=1e-14)


@each(threshold=[0.5, 1.0, 1.0001, 10.0])
def test_clipping_leaves_gradients_of_at_most_its_norm(threshold):
    whole = np.sqrt((GRADIENTS**2).sum() + (GB**2).sum())
    rate = min(1.0, threshold)
    for found, g in zip(stepped(lambda m: GradientClipping(threshold * whole), False), (GRADIENTS, GB)):
        np.testing.assert_allclose(found, g * rate, rtol=1e-12)


def test_clipping_of_no_gradient():
    made = link()
    own = MomentumSGD(1.0).setup(made)
    own.add_hook(GradientClipping(1.0))
    for p in made.params():
        p.grad = np.zeros_like(p.array)
    own.update()
    np.testing.assert_array_equal(made.w.array, WEIGHTS)


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
        for a, b, c, g in zip(first, second, third, (GRADIENTS, GB)):
            np.testing.assert_array_equal(a, b)
            assert (np.abs(a - g) > 0).all() and (a != c).all() and np.abs(a - g).max() < 5


def norm(a):
    return math.sqrt((np.asarray(a, np.float64) ** 2).sum())


@pytest.mark.parametrize("types", [("float32", "float64"), ("float64", "float16", "float32"), ("bfloat16", "float32")])
@pytest.mark.parametrize("threshold", [1.0, 3.0, 1e3])
def test_clipping_looks_at_the_parameters_of_all_types(types, threshold):
    link = link_of(**{f"p{i}": np.ones((2, 2)).astype(as_dtype(t)) for i, t in enumerate(types)})
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
    link = link_of(w=W)
    optimizer = SGD(lr=1.0).setup(link)
    optimizer.add_hook(GradientClipping(part * (size or 1.0)))
    link.w.grad = G / norm(G) * size
    optimizer.update()
    np.testing.assert_allclose(link.w.array, W - G / norm(G) * size * min(1.0, part), rtol=1e-13)


def test_clipping_counts_what_is_updated_and_nothing_else():
    link = link_of(a=W, frozen=W, b=W)
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
    link = link_of(a=W, b=W.astype(np.float32))
    optimizer = SGD(lr=1.0).setup(link)
    for one in (p.update_rule for p in link.params()) if alone else (optimizer,):
        one.add_hook(GradientHardClipping(*bounds))
    for p in link.params():
        p.grad = G.astype(p.dtype)
    optimizer.update()
    for p in link.params():
        np.testing.assert_allclose(p.array, W - np.minimum(np.maximum(G, bounds[0]), bounds[1]), rtol=1e-6)


HOOKS_OF_NUMBERS = {
    "WeightDecay": lambda n: optimizers.WeightDecay(n(0.25)),
    "Lasso": lambda n: optimizers.Lasso(n(0.25)),
    "GradientClipping": lambda n: GradientClipping(n(0.5)),
    "GradientHardClipping": lambda n: GradientHardClipping(n(-0.25), n(0.5)),
    "GradientLARS": lambda n: optimizers.GradientLARS(n(0.5), n(0.25), n(0.125)),
}


@pytest.mark.parametrize("hook", HOOKS_OF_NUMBERS)
@each(number=["0-d", "float64", "one element"], dtype=["float32", "float64"])
def test_numbers_of_hooks_may_be_numpys(hook, number, dtype):
    made, plain = (HOOKS_OF_NUMBERS[hook](n) for n in (KINDS_OF_NUMBERS[number], float))
    for a, b in zip(steps_of(SGD(0.5), dtype, made), steps_of(SGD(0.5), dtype, plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6 if dtype == "float32" else 1e-14)


def gradients(step, shapes=SHAPES):
    random = np.random.default_rng(100 + step)
    return [random.normal(size=shape) for shape in shapes]


def test_weight_decay_adds_to_the_gradient():
    link = make()
    optimizer = SGD(lr=0.1).setup(link)
    optimizer.add_hook(WeightDecay(0.5))
    before = [p.array.copy() for p in link.params()]
    for p, g in zip(link.params(), gradients(0)):
        p.grad = g
    optimizer.update()
    for p, w, g in zip(link.params(), before, gradients(0)):
        np.testing.assert_allclose(p.array, w - 0.1 * (g + 0.5 * w), rtol=1e-14)


def test_weight_decay_of_one_rule_alone():
    link = make()
    optimizer = SGD(lr=0.1).setup(link)
    link.p0.update_rule.add_hook(WeightDecay(0.5))
    before = [p.array.copy() for p in link.params()]
    for p, g in zip(link.params(), gradients(0)):
        p.grad = g
    optimizer.update()
    for i, (p, w, g) in enumerate(zip(link.params(), before, gradients(0))):
        np.testing.assert_allclose(p.array, w - 0.1 * (g + (0.5 * w if i == 0 else 0)), rtol=1e-14)


@pytest.mark.parametrize("threshold", [0.5, 1e9])
def test_gradient_clipping_by_the_joint_norm(threshold):
    link = make()
    optimizer = SGD(lr=1.0).setup(link)
    optimizer.add_hook(GradientClipping(threshold))
    for p, g in zip(link.params(), gradients(0)):
        p.grad = g
    optimizer.update()
    total = math.sqrt(sum(float((g**2).sum()) for g in gradients(0)))
    for p, g in zip(link.params(), gradients(0)):
        np.testing.assert_allclose(p.grad, g * min(1.0, threshold / total), rtol=1e-13)


def test_gradient_hard_clipping():
    link = make()
    optimizer = SGD(lr=1.0).setup(link)
    optimizer.add_hook(GradientHardClipping(-0.1, 0.2))
    for p, g in zip(link.params(), gradients(0)):
        p.grad = g
    optimizer.update()
    for p, g in zip(link.params(), gradients(0)):
        np.testing.assert_array_equal(p.grad, np.clip(g, -0.1, 0.2))


# ---- Decoupled weight decay against PyTorch's formula by hand ----


@each(on_rules=[False, True], dtype=["float64", "float32"])
def test_decoupled_weight_decay_follows_the_schedule_but_not_the_size_of_the_rate(on_rules, dtype):
    """SGDW: w <- (1 - rate lr / initial_lr) w - lr (momentum u + g); a skipped parameter does not decay."""
    rng = np.random.default_rng(0)
    link = dbrdist.Link()
    with link.init_scope():
        link.W, link.b = Parameter(rng.normal(size=(3, 4)).astype(dtype)), Parameter(np.ones(4, dtype))
    optimizer = CorrectedMomentumSGD(2.0, 0.875).setup(link)
    hook = DecoupledWeightDecay(0.1, 2.0, [link.W])
    for one in [p.update_rule for p in link.params()] if on_rules else [optimizer]:
        one.add_hook(hook)
    expected = {"W": link.W.array.astype(float), "b": link.b.array.astype(float)}
    u = dict.fromkeys(expected, 0.0)
    for lr in (2.0, 1.0, 0.5, 0.0):
        optimizer.lr = lr
        for name in expected:
            g = rng.normal(size=expected[name].shape).astype(dtype)
            getattr(link, name).grad = g
            u[name] = 0.875 * u[name] + g.astype(float)
            decay = 0.1 * lr / 2 if name == "W" else 0.0
            expected[name] = (1 - decay) * expected[name] - lr * u[name]
        optimizer.update()
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(link, name).array, value, rtol=1e-5 if dtype == "float32" else 1e-13)


def test_an_initial_rate_of_zero_is_refused():
    with pytest.raises(ValueError, match="initial_lr: expected a number above 0, got 0"):
        DecoupledWeightDecay(0.1, 0)


OURS = [WeightDecay, Lasso, GradientLARS, DecoupledWeightDecay, GradientNoise, GradientHardClipping]


def with_gradients():
    link = large_link()
    for p, g in zip(link.params(), gradients_for(link)):
        p.grad = g
    return link


@pytest.mark.parametrize("kind", OURS)
def test_a_subclass_is_called_as_it_calls_itself(kind):
    """What its base does on flat memory, or on a rank's part, is not what it does."""
    seen = []

    class Own(kind):
        def __call__(self, rule, param):
            seen.append(param)

    class Further(Own):
        pass

    for made in (Own, Further):
        link = with_gradients()
        optimizer = SGD(0.5).setup(link)
        before = [p.array - 0.5 * p.grad for p in link.params()]
        two = kind in (GradientHardClipping, DecoupledWeightDecay)
        hook = made(0.1, 0.5) if two else made(0.1)
        optimizer.add_hook(hook)
        optimizer.update()
        assert seen == list(link.params())
        seen.clear()
        for p, expected in zip(link.params(), before):
            np.testing.assert_allclose(p.array, expected)
        with pytest.raises(ValueError, match="may need whole gradients"):
            optimizer.check_divisible(link.params())
        hook.works_on_shards = True
        optimizer.check_divisible(link.params())


def test_a_subclass_with_a_way_of_its_own_on_flat_memory():
    class Own(WeightDecay):
        def __call__(self, rule, param):
            raise AssertionError

        def flat(self, run):
            run.grad[...] = 1

    link = with_gradients()
    optimizer = SGD(0.5).setup(link)
    before = [p.array - 0.5 for p in link.params()]
    optimizer.add_hook(Own(0.1))
    optimizer.update()
    for p, expected in zip(link.params(), before):
        np.testing.assert_allclose(p.array, expected)
