"""Elementwise hooks within the pass of an update have the bits of hooks that make a pass each."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import dbrdist
from dbrdist import Parameter, optimizers, random
from dbrdist.core.array.backend import as_dtype
from dbrdist.core.model.flat import Run
from dbrdist.core.update import elementwise_hook, fused_update
from dbrdist.core.update.elementwise_hook import ElementwiseHook
from dbrdist.optimizers import DecoupledWeightDecay, GradientClipping, GradientHardClipping, Lasso, WeightDecay
from tests.each import each

SHAPES = {"small": ((7, 5), (5,), (3, 2, 2), ()), "large": ((250, 271), (37,), (130, 130), (3, 3))}
RULES = {
    "SGD": lambda: optimizers.SGD(0.1),
    "MomentumSGD": lambda: optimizers.MomentumSGD(0.1),
    "Adam": lambda: optimizers.Adam(0.01),
    "AMSGrad": lambda: optimizers.AMSGrad(0.01),
    "RMSprop": lambda: optimizers.RMSprop(0.01),
    "AdaDelta": lambda: optimizers.AdaDelta(),  # without a loop
    "LARS": lambda: optimizers.LARS(0.1),  # with norms of layers
}


class Doubling(ElementwiseHook):
    """A program's own, which is no loop and keeps no zeros."""

    name = "Doubling"

    def piece(self, p, g, *numbers):
        g *= 2
        g += 0.125


class Watching:
    """Makes hooks before it a pass each."""

    name = "Watching"

    def __call__(self, optimizer):
        self.seen = [p.grad.copy() for p in optimizer.target.params()]


HOOKS = {
    "decay": lambda ps: [WeightDecay(0.01)],
    "decay of some": lambda ps: [WeightDecay(0.01, ps[::2]), (WeightDecay(0.02, ps[1:2]), "b")],
    "three": lambda ps: [WeightDecay(0.01), Lasso(0.02, ps[1:]), GradientHardClipping(-0.5, 0.5)],
    "own": lambda ps: [Lasso(0.01), Doubling()],
    "after a norm": lambda ps: [GradientClipping(0.5), WeightDecay(0.01), Doubling(ps[2:])],
    "no zeros": lambda ps: [GradientHardClipping(0.25, 0.5), WeightDecay(0.01)],
}


def link_of(shapes, dtype):
    rng, link = np.random.default_rng(1), dbrdist.Link()
    with link.init_scope():
        for i, shape in enumerate(shapes):
            setattr(link, f"p{i}", Parameter(rng.normal(size=shape).astype(dtype)))
    return link


def everything(make, hooks, shapes, dtype="f", prepare=lambda optimizer, params: None, num_steps=3):
    """All bytes after some steps: parameters, gradients, states, and what lies between the parameters."""
    random.set_seed(0)
    link = link_of(shapes, dtype)
    optimizer, params = make().setup(link), list(link.params())
    for hook in hooks(params):
        optimizer.add_hook(*(hook if isinstance(hook, tuple) else (hook,)))
    prepare(optimizer, params)
    for t in range(num_steps):
        rng = np.random.default_rng(100 + t)
        for p in params:
            g = rng.normal(size=p.shape).astype(dtype)
            if g.size > 8:
                g.reshape(-1)[:5] = 0, -0.0, 1e-42, np.inf, np.nan
            p.grad = g
        optimizer.update()
    arena = params[0].slot.arena
    states = [a for p in params for _, a in sorted((p.update_rule.state or {}).items())]
    return [a.tobytes() for a in (arena.data, arena.grad, *[p.grad for p in params], *states)]


def one_by_one(monkeypatch, *args, **kwargs):
    """The same with a pass of its own for each hook."""
    with monkeypatch.context() as patch:
        patch.setattr(elementwise_hook, "_is_elementwise", lambda cls: False)
        return everything(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(rule=list(RULES), hooks=list(HOOKS), size=list(SHAPES))
def test_hooks_in_the_pass_have_the_bits_of_a_pass_each(rule, hooks, size, monkeypatch):
    case = RULES[rule], HOOKS[hooks], SHAPES[size]
    assert everything(*case) == one_by_one(monkeypatch, *case)


def frozen(optimizer, params):
    params[1].update_rule.enabled = False


def own_decay(optimizer, params):
    params[0].update_rule.add_hook(WeightDecay(0.05))


def own_rate(optimizer, params):
    params[2].update_rule.hyperparam.lr = 0.03


PREPARED = {
    "frozen": frozen,
    "a hook of one rule": own_decay,
    "a rate of one rule": own_rate,
    "loss scale": lambda optimizer, params: optimizer.set_loss_scale(8.0),
    "unsafe updates": lambda optimizer, params: optimizer.loss_scaling(),
    "float32 updates": lambda optimizer, params: optimizer.use_fp32_update(),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(prepare=list(PREPARED), hooks=["three", "own", "after a norm"], dtype=["float32", "float16", "float64"])
def test_hooks_in_the_pass_of_unusual_updates(prepare, hooks, dtype, monkeypatch):
    case = RULES["MomentumSGD"], HOOKS[hooks], SHAPES["small"], as_dtype(dtype), PREPARED[prepare]
    assert everything(*case) == one_by_one(monkeypatch, *case)


def values_in_float64(rate, decay, start, gradients):
    """Momentum after weight decay and Lasso, in float64, as in the definitions."""
    p, v = start.astype("d"), np.zeros(start.shape)
    for g in gradients:
        g = g + decay * p
        g = g + 0.02 * np.sign(p)
        v = 0.9 * v - rate * g
        p = p + v
    return p


@each(size=[10, 5_000, 100_000])
def test_values_of_hooks_in_the_pass(size):
    rng, link = np.random.default_rng(0), dbrdist.Link()
    with link.init_scope():
        link.W = Parameter(rng.normal(size=size).astype("f"))
    start, gradients = link.W.array.copy(), rng.normal(size=(3, size)).astype("f")
    optimizer = optimizers.MomentumSGD(0.1).setup(link)
    optimizer.add_hook(WeightDecay(0.01))
    optimizer.add_hook(Lasso(0.02))
    for g in gradients:
        link.W.grad = g.copy()
        optimizer.update()
    np.testing.assert_allclose(link.W.array, values_in_float64(0.1, 0.01, start, gradients), rtol=1e-4, atol=1e-5)


def passes(optimizer, link, monkeypatch):
    """Whether an update ran its hooks apart, as flat ones."""
    calls = []
    monkeypatch.setattr(fused_update, "call_flat", lambda hook, *rest: calls.append(hook.name))
    monkeypatch.setattr("dbrdist.core.update.optimizer.call_flat", lambda hook, *rest: calls.append(hook.name))
    for p in link.params():
        p.grad = np.ones_like(p.array)
    optimizer.update()
    return calls


class Renewed(WeightDecay):
    name = "Renewed"

    def flat(self, run):
        run.grad[...] = 3


class PieceByPiece(Lasso):
    name = "PieceByPiece"

    def piece(self, p, g, *numbers):
        g += 1


@pytest.mark.parametrize(("hooks", "apart"), [
    ([WeightDecay(0.1)], []),
    ([WeightDecay(0.1), Lasso(0.1)], []),
    ([WeightDecay(0.1), Watching()], ["WeightDecay"]),
    ([Watching(), WeightDecay(0.1)], []),
    ([Renewed(0.1)], ["Renewed"]),
    ([WeightDecay(0.1), Renewed(0.1), Lasso(0.1)], ["WeightDecay", "Renewed"]),
    ([PieceByPiece(0.1)], []),
])  # fmt: skip
def test_only_the_last_elementwise_hooks_run_in_the_pass(hooks, apart, monkeypatch):
    link = link_of(((3,), (2,)), "f")
    optimizer = optimizers.SGD(0.1).setup(link)
    for hook in hooks:
        optimizer.add_hook(hook)
    assert passes(optimizer, link, monkeypatch) == apart


class OwnOptimizer(optimizers.SGD):
    def call_hook(self, hook):
        self.called = [*getattr(self, "called", []), hook.name]
        super().call_hook(hook)


def test_a_class_that_calls_hooks_itself_calls_all_of_them():
    link = link_of(((3,),), "f")
    optimizer = OwnOptimizer(0.1).setup(link)
    optimizer.add_hook(WeightDecay(0.1))
    link.p0.grad = np.ones(3, "f")
    optimizer.update()
    assert optimizer.called == ["WeightDecay"]


def test_a_formula_on_one_hook_object_replaces_the_loop(monkeypatch):
    link = link_of(((3,),), "f")
    optimizer = optimizers.SGD(1.0).setup(link)
    hook = WeightDecay(0.1)
    hook.flat = lambda run: run.grad.fill(7)
    optimizer.add_hook(hook)
    before = link.p0.array.copy()
    link.p0.grad = np.ones(3, "f")
    optimizer.update()
    np.testing.assert_allclose(before - link.p0.array, 7, rtol=1e-6)


def test_a_piece_of_its_own_inherits_neither_loop_nor_promise():
    assert (PieceByPiece.loop, PieceByPiece.keeps_zero) == (None, False)
    assert (Lasso.loop, Lasso.keeps_zero) == ("lasso", True)

    class Other(Lasso):
        loop = keeps_zero = "mine"

        def piece(self, p, g, *numbers):
            pass

    assert Other.loop == Other.keeps_zero == "mine"


class Mixed:
    """A formula from beside the classes of hooks."""

    def piece(self, p, g, *numbers):
        g += 8


@each(size=[7, 9000])
def test_a_formula_of_a_mixin_or_of_one_object_replaces_the_loop(size):
    mixed = type("MixedDecay", (Mixed, WeightDecay), {})(0.1)
    assert mixed.loop is None and not mixed.keeps_zero
    own = WeightDecay(0.1)
    own.piece = mixed.piece
    for hook in (mixed, own):
        optimizer, (p,) = one_parameter(size)
        optimizer.add_hook(hook)
        optimizer.update()
        assert (p.array == 1 - 8 - 1).all(), hook


def one_parameter(size, make=optimizers.SGD):
    link = dbrdist.Link()
    with link.init_scope():
        link.p = Parameter(np.ones(size, "f"))
    optimizer = make(lr=1.0).setup(link)
    link.p.grad = np.ones(size, "f")
    return optimizer, (link.p,)


@each(hook=[lambda: WeightDecay(1.0), lambda: optimizers.Lasso(0.5)])
def test_hooks_reach_parameters_with_a_rule_that_is_no_class_of_ours(hook):
    class Own:
        enabled = True

        def update(self, param):
            param.array[...] -= param.grad

    link = link_of([(3, 2), (4,)], "f")
    optimizer = optimizers.SGD(1.0).setup(link)
    link.p0.update_rule = Own()
    optimizer.add_hook(hook())
    expected = [p.array - (p.array if optimizer.hooks.pre.get("WeightDecay") else np.sign(p.array) / 2)
                for p in link.params()]  # fmt: skip
    for p in link.params():
        p.grad = np.zeros_like(p.array)
    optimizer.update()
    for p, array in zip(link.params(), expected):
        np.testing.assert_array_equal(p.array, array)


@pytest.mark.filterwarnings("ignore:NaN or infinity")
@each(size=[7, 9000], timing=["pre", "post"], gradient=[0.0, np.inf])
def test_an_update_that_is_left_out_decays_no_parameter(size, timing, gradient):
    optimizer, (p,) = one_parameter(size)
    optimizer.loss_scaling()
    optimizer.add_hook(DecoupledWeightDecay(0.5, 1.0), timing=timing)  # without a warning
    p.grad = np.full(size, gradient, "f")
    optimizer.update()
    assert (p.array == (1 if gradient else 0.5)).all()


@each(size=[7, 9000])
def test_a_rule_of_a_mixin_replaces_the_kernel(size):
    class Constant:
        def step(self, hp, t, p, g, *state):
            p -= 8

    rule = type("ConstantRule", (Constant, optimizers.SGD.rule_class), {})
    assert not rule.keeps_zero
    optimizer, (p,) = one_parameter(size, type("Own", (optimizers.SGD,), {"rule_class": rule}))
    optimizer.update()
    assert (p.array == 1 - 8).all()


def test_a_hook_without_a_formula_says_so():
    link = link_of(((3,),), "f")
    optimizer = optimizers.SGD(0.1).setup(link)
    optimizer.add_hook(type("Empty", (ElementwiseHook,), {"name": "Empty"})())
    link.p0.grad = np.ones(3, "f")
    with pytest.raises(NotImplementedError, match=r"Empty does not define piece\(p, g, \*numbers\)"):
        optimizer.update()


@each(make=[lambda l: l, lambda l: l.p, lambda l: [l], lambda l: "/p", lambda l: ["/p"], lambda l: [l.p, l.p.array]])
def test_what_a_hook_is_for_are_parameters(make):
    link = link_of([(3, 2)], "f")
    link.p = link.p0
    with pytest.raises(TypeError, match=r"WeightDecay: params: expected an iterable of parameters.*got (?!list)"):
        WeightDecay(0.1, make(link))
    assert WeightDecay(0.1, iter([link.p])).params == {link.p} and WeightDecay(0.1, []).params == frozenset()


def test_a_hook_that_fails_leaves_counters_and_parameters_alone():
    link = link_of(((3,), (2,)), "f")
    optimizer = optimizers.Adam().setup(link)
    optimizer.add_hook(DecoupledWeightDecay(0.1, 0.1))  # Adam has no lr
    before = [p.array.copy() for p in link.params()]
    for p in link.params():
        p.grad = np.ones_like(p.array)
    with pytest.raises(AttributeError, match="lr"):
        optimizer.update()
    assert optimizer.t == 0 and [p.update_rule.t for p in link.params()] == [0, 0]
    for p, a in zip(link.params(), before):
        np.testing.assert_array_equal(p.array, a)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(rate=[np.float32(0.01), np.array(0.01), 1])
def test_rates_of_other_types(rate, monkeypatch):
    case = RULES["MomentumSGD"], lambda ps: [WeightDecay(rate), Lasso(rate)], SHAPES["large"]
    assert everything(*case) == one_by_one(monkeypatch, *case)


@pytest.mark.parametrize("kind", [set, frozenset])
def test_parameters_may_be_chosen_anew(kind):
    link = link_of(((3,), (2,)), "f")
    optimizer = optimizers.SGD(1.0).setup(link)
    hook = WeightDecay(1.0, [link.p0])
    optimizer.add_hook(hook)
    moved = []
    for chosen in ([link.p0], [link.p1], []):
        hook.params = kind(chosen)
        for p in link.params():
            p.array = np.ones(p.shape, "f")
            p.grad = np.zeros(p.shape, "f")
        optimizer.update()
        moved.append([float(p.array[0]) for p in (link.p0, link.p1)])
    assert moved == [[0, 1], [1, 0], [1, 1]]


def test_hooks_are_pickled_and_those_of_older_versions_read():
    hook = pickle.loads(pickle.dumps(WeightDecay(0.5)))
    assert (hook.rate, hook.params) == (0.5, None)
    old = WeightDecay.__new__(WeightDecay)
    old.rate = 0.5
    assert old.params is None
    clip = GradientHardClipping.__new__(GradientHardClipping)
    clip.__dict__.update(lower_bound=-1, upper_bound=1)
    assert clip.keeps_zero and clip.params is None


def test_stretches_of_parameters_that_touch_are_joined():
    link = link_of(((16,), (16,), (5,), (16,)), "f")
    optimizers.SGD().setup(link)
    params = list(link.params())
    run = Run(params)
    assert elementwise_hook.spans_of(run, frozenset(params)) == [(0, 37), (48, 64)]
    assert elementwise_hook.spans_of(run, frozenset(params[1:2])) == [(16, 32)]
    assert elementwise_hook.spans_of(run, frozenset()) == []


@each(start=[0, 3, 16, 17, 40], length=[1, 20, 100])
def test_a_hook_changes_its_elements_of_a_piece_alone(start, length):
    spans = [(2, 5), (5, 6), (16, 32), (50, 51)]
    hook = elementwise_hook.HookOfRun(PieceByPiece(0), (), spans)
    g = np.zeros(64)
    hook.change(np.zeros(64), g, start, min(start + length, 64))
    expected = [float(start <= i < start + length and any(a <= i < b for a, b in spans)) for i in range(64)]
    assert g.tolist() == expected


def test_a_removed_hook_is_gone_and_an_added_one_there_at_the_next_update():
    link = link_of(((3,),), "f")
    optimizer = optimizers.SGD(1.0).setup(link)
    optimizer.add_hook(WeightDecay(1.0))
    moved = []
    for change in (lambda: None, lambda: optimizer.remove_hook("WeightDecay"), lambda: optimizer.add_hook(Lasso(4.0))):
        change()
        link.p0.array = np.ones(3, "f")
        link.p0.grad = np.zeros(3, "f")
        optimizer.update()
        moved.append(float(1 - link.p0.array[0]))
    assert moved == [1, 0, 4]
