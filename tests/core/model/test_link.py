"""Links and chains: registration, walks, copies, hooks."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref

import numpy as np
import pytest

import dbrdist
import dbrdist.links as L
from dbrdist import Chain, ChainList, Link, LinkHook, Parameter, Sequential
from dbrdist.core.model import versions
from dbrdist.core.tape import ops
from dbrdist.errors import UsageWarning
from dbrdist.optimizers import SGD
from tests.each import each


class Scale(Link):
    def __init__(self, factor=1.0, size=2):
        super().__init__()
        with self.init_scope():
            self.w = Parameter(factor, (size,))

    def forward(self, x):
        return x * self.w


class Two(Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.second = Scale(2.0)
            self.bias = Parameter(0.0, (2,))
            self.first = Scale(3.0)
        self.add_persistent("mean", np.zeros(2))

    def forward(self, x):
        return self.first(self.second(x)) + self.bias


def names(link):
    return [name for name, _ in link.namedparams()]


# ---- registration ---------------------------------------------------------------------------------------------------
def test_parameters_and_links_in_order_of_registration():
    net = Two()
    assert names(net) == ["/bias", "/second/w", "/first/w"]
    assert list(net.params()) == [net.bias, net.second.w, net.first.w]
    assert [n for n, _ in net.namedlinks()] == ["/", "/second", "/first"]
    assert list(net.children()) == [net.second, net.first]
    assert list(net.links(skipself=True)) == [net.second, net.first]
    assert (net.second.name, net.bias.name, net["first"]) == ("second", "bias", net.first)
    assert net.count_params() == 6


def test_only_what_is_assigned_within_init_scope_is_registered():
    net = Two()
    net.stray = Parameter(0.0, (2,))
    net.other = Scale()
    assert names(net) == ["/bias", "/second/w", "/first/w"]
    with pytest.raises(RuntimeError), net.init_scope():
        assert net.within_init_scope
        raise RuntimeError
    assert not net.within_init_scope

    class Forgot(Link):
        def __init__(self):
            with self.init_scope():
                pass

    with pytest.raises(RuntimeError, match="super") as forgotten:
        Forgot()
    assert str(forgotten.value) == "Link.__init__() has not been called."


def test_reassignment_and_deletion():
    net = Two()
    with net.init_scope():
        net.bias = Parameter(1.0, (2,))
        net.first = Scale(9.0)
    assert names(net) == ["/bias", "/second/w", "/first/w"]
    assert net.first.w.array[0] == 9
    del net.bias, net.second
    assert names(net) == ["/first/w"]


def test_keyword_parameters_add_param_and_add_link():
    link = Link(W=(3, 4), b=((2,), np.float64), lazy=None, one=5, scalar=())
    assert link.W.shape == (3, 4) and link.W.dtype == np.float32 and np.isnan(link.W.array).all()
    assert link.b.dtype == np.float64 and not link.lazy.is_initialized
    assert link.one.shape == (5,) and link.scalar.shape == ()
    link.add_param("c", (2,), np.float16, initializer=0.5)
    assert link.c.array.tolist() == [0.5, 0.5]
    for add in (lambda: link.add_param("c"), lambda: link.add_persistent("c", 1)):
        with pytest.raises(AttributeError, match="'c': the attribute exists"):
            add()
    chain = Chain(a=Scale())
    chain.add_link("b", Scale())
    assert names(chain) == ["/a/w", "/b/w"]
    with pytest.raises(AttributeError, match="'b': the attribute exists"):
        chain.add_link("b", Scale())
    with pytest.raises(TypeError, match="x: expected a Link, got int"):
        chain.add_link("x", 3)
    with pytest.raises(AttributeError, match="there is none"):
        chain.register_persistent("absent")
    with pytest.raises(NotImplementedError, match="from_params"):
        Link.from_params()


def test_calls():
    net = Two()
    np.testing.assert_array_equal(net(np.ones(2, np.float32)).array, [6.0, 6.0])
    with pytest.raises(TypeError, match=r"Link defines no forward\(\)"):
        Link()(1)


def test_uninitialised_parameters():
    link = Link(a=None, b=(2,))
    assert [p.name for p in link.params(include_uninit=False)] == ["b"]
    assert [n for n, _ in link.namedparams(include_uninit=False)] == ["/b"]
    with pytest.warns(UserWarning, match="not counted, since they have no shape yet: /a"):
        assert link.count_params() == 2
    assert link.a.array is None and link.a.shape is None
    calls = []
    link.a.on_initialize = calls.append
    link.a.initialize(3)
    assert link.a.shape == (3,) and calls == [link.a]
    with pytest.raises(ValueError, match=r"expected an array of shape \(3,\), got \(2,\)"):
        Parameter(np.ones(2), shape=3)


# ---- gradients ------------------------------------------------------------------------------------------------------
def test_gradients_of_links():
    net, other = Two(), Two()
    ops.sum(net(np.ones(2, np.float32))).backward()
    with pytest.deprecated_call():
        other.zerograds()
    other.addgrads(net)
    other.addgrads(net)
    np.testing.assert_array_equal(other.second.w.grad, 2 * net.second.w.grad)
    assert other.second.w.grad.tolist() == [6.0, 6.0]
    net.cleargrads()
    assert all(p.grad is None for p in net.params())


# ---- copies ---------------------------------------------------------------------------------------------------------
def test_copy_modes():
    net = Two()
    net.bias.grad = np.ones(2, np.float32)
    shared, copied, anew = net.copy(), net.copy("copy"), net.copy("init")
    net.second.w.array[...] = 77
    net.mean[...] = 5
    assert shared.second.w.array[0] == 77 and shared.mean[0] == 5
    assert copied.second.w.array[0] == 2 and copied.mean[0] == 0
    assert anew.first.w.array[0] == 3 and anew.mean[0] == 0
    assert shared.bias.grad is None and shared.second is not net.second
    assert names(shared) == names(copied) == names(net)
    with shared.init_scope():
        shared.extra = Parameter(0.0, (1,))
    assert "/extra" not in names(net), "a copy has its own registers"
    with pytest.raises(ValueError, match="mode: expected"):
        net.copy("deep")


def test_copy_init_of_an_array_is_refused_and_of_an_initializer_drawn_anew():
    def initializer(array):
        array[...] = dbrdist.random.next_initializer_generator().random(array.shape)

    link = Link()
    with link.init_scope():
        link.w = Parameter(initializer, (3,))
    assert not np.array_equal(link.copy("init").w.array, link.w.array)
    with link.init_scope():
        link.w = Parameter(np.ones(3))
    with pytest.raises(ValueError, match="parameter w: mode 'init' needs an initializer"):
        link.copy("init")


def test_copyparams():
    source, target = Two(), Two()
    source.mean[...] = 4
    source.first.w.array[...] = 8
    kept = target.first.w.array
    target.copyparams(source)
    assert target.first.w.array is kept and kept[0] == 8 and target.mean[0] == 4
    target.mean[...] = 0
    target.copyparams(source, copy_persistent=False)
    assert target.mean[0] == 0
    source.add_persistent("steps", 7)
    target.add_persistent("steps", 0)
    target.copyparams(source)
    assert target.steps == 7
    lazy = Link(w=None)
    full = Link(w=(2,))
    full.w.array[...] = 3
    lazy.copyparams(full)
    assert lazy.w.array.tolist() == [3, 3]


def test_a_copy_initialised_anew_has_the_same_types():
    net = Chain()
    with net.init_scope(), dbrdist.using_config("dtype", np.float64):
        net.w = Parameter(dbrdist.initializers.Normal(), (2, 3), name="w")
        net.late = Parameter(dbrdist.initializers.Normal())
        net.child = Scale(2.0)
        net.half = Parameter(dbrdist.initializers.Normal(dtype=np.float16), (2,))
    new = net.copy("init")
    assert new.w.dtype == np.float64 and new.w.shape == (2, 3) and not np.array_equal(new.w.array, net.w.array)
    assert new.half.dtype == np.float16 and new.child.w.dtype == net.child.w.dtype
    assert not new.late.is_initialized and new.late is not net.late
    assert new.w.name == "w" and new.w.grad is None and new.w.update_rule is None


@pytest.mark.filterwarnings("ignore:.* are the same Scale")
def test_links_that_stand_in_several_places_do_so_in_a_copy():
    child = Scale(2.0)
    chain, items, layers = Chain(a=child, b=child), ChainList(child, child), Sequential(child, twice, child)
    for mode in ("share", "copy", "init"):
        new = chain.copy(mode)
        assert new.a is new.b is not child and new.count_params() == 2
        new = items.copy(mode)
        assert new[0] is new[1] is not child and [link.name for link in new][1:] == ["1"]
        new = layers.copy(mode)
        assert new[0] is new[2] is not child and new[1] is twice and new.count_params() == 2


class Blocks(Sequential):
    """A Sequential with a parameter, a persistent value and an attribute of its own."""

    def __init__(self, *layers, factor=3.0):
        super().__init__(*layers)
        self.factor = factor
        with self.init_scope():
            self.scale = Parameter(5.0, (2,))
        self.add_persistent("seen", np.zeros(2))

    def forward(self, x):
        return super().forward(x) * self.factor * self.scale


@pytest.mark.parametrize("mode", ["share", "copy", "init"])
def test_copies_of_a_sequential_keep_class_parameters_and_attributes(mode):
    model = Blocks(Scale(2.0), twice, factor=7.0)
    model.name = "model"
    new = model.copy(mode)
    assert type(new) is Blocks and new.factor == 7.0 and names(new) == names(model) == ["/scale", "/0/w"]
    np.testing.assert_array_equal(new(np.ones(2)).array, np.full(2, 1 * 2.0 * 2 * 7 * 5))
    model[0].w.array[...] = 0
    model.scale.array[...] = 0
    model.seen[...] = 1
    is_shared = mode == "share"
    assert (new[0].w.array == 0).all() == (new.scale.array == 0).all() == (new.seen == 1).all() == is_shared
    assert new[0] is not model[0] and new.scale is not model.scale
    new.append(twice)
    assert len(model) == 2 and len(new) == 3
    many = model.repeat(2, mode)
    assert type(many[0]) is Blocks and len(many) == 2


def test_values_of_another_shape_are_not_broadcast():
    one, three = Link(w=(1,)), Link(w=(3,))
    with pytest.raises(ValueError, match=r"parameter w: copydata expected an array of shape \(3,\), got \(1,\)"):
        three.copyparams(one)
    one, three = Link(), Link()
    one.add_persistent("mean", np.zeros(1))
    three.add_persistent("mean", np.zeros(3))
    with pytest.raises(ValueError, match=r"copyparams: mean: expected shape \(3,\), got \(1,\)"):
        three.copyparams(one)
    p = Parameter(np.ones(3), name="w")
    with pytest.deprecated_call():
        p.zerograd()
    q = Parameter(np.ones(1))
    q.grad = np.ones(1)
    with pytest.raises(ValueError, match=r"parameter w: addgrad expected a gradient of shape \(3,\), got \(1,\)"):
        p.addgrad(q)


def test_gradients_of_a_parameter_without_a_shape():
    p, q = Parameter(2.0), Parameter(np.ones(3, np.float32))
    with pytest.deprecated_call():
        p.zerograd()
    assert p.grad is None
    p.addgrad(q)
    assert not p.is_initialized
    q.grad = np.full(3, 4, np.float32)
    p.addgrad(q)
    assert p.array.tolist() == [2, 2, 2] and p.grad.tolist() == [4, 4, 4]


def test_repeat():
    many = Scale(2.0).repeat(3, "copy")
    assert isinstance(many, Sequential) and names(many) == ["/0/w", "/1/w", "/2/w"]
    np.testing.assert_array_equal(many(np.ones(2)).array, [8.0, 8.0])
    many[0].w.array[...] = 1
    assert many[1].w.array[0] == 2
    assert len(Scale().repeat(0)) == 0
    shared = Scale(2.0).repeat(2, "share")
    shared[0].w.array[...] = 5
    assert shared[1].w.array[0] == 5


def test_update_switches():
    net = Two()
    assert not net.update_enabled
    for p in net.params():
        p.update_rule = dbrdist.UpdateRule()
    net.second.disable_update()
    assert net.update_enabled and not net.second.update_enabled
    net.disable_update()
    assert not net.update_enabled
    net.enable_update()
    assert net.second.update_enabled


def test_a_rule_with_nothing_but_an_update_is_enabled():
    class Halved:
        def update(self, param):
            param.array = param.array - 0.5 * param.grad

    link = L.Linear(2, 1)
    optimizer = SGD(1.0).setup(link)
    for p in link.params():
        p.update_rule = Halved()
    assert link.update_enabled
    optimizer.setup(link)
    assert link.update_enabled and type(link.W.update_rule) is not Halved


# ---- ChainList ------------------------------------------------------------------------------------------------------
def test_chain_list():
    chain = ChainList(Scale(1.0), Scale(2.0))
    chain.append(Scale(3.0))
    chain.add_link(Scale(4.0))
    chain.insert(1, Scale(5.0))
    assert [link.w.array[0] for link in chain] == [1, 5, 2, 3, 4]
    assert [link.name for link in chain] == list("01234")
    assert names(chain) == [f"/{i}/w" for i in range(5)] and len(chain) == 5
    chain[0] = Scale(9.0)
    assert chain[0].name == "0" and [link.w.array[0] for link in chain[:2]] == [9, 5]
    with pytest.raises(TypeError, match="children have no names"), chain.init_scope():
        chain.x = Scale()
    shared = chain.copy()
    chain[1].w.array[...] = 6
    assert shared[1].w.array[0] == 6 and shared[1] is not chain[1]
    shared.append(Scale())
    assert len(chain) == 5
    assert "(1): Scale()" in repr(chain)


# ---- Sequential -----------------------------------------------------------------------------------------------------
def twice(x):
    return x * 2.0


def test_sequential_calls_in_order_and_spreads_tuples():
    model = Sequential(Scale(3.0), twice, lambda x: (x, x + 1.0), lambda a, b: a + b)
    np.testing.assert_array_equal(model(np.ones(2)).array, [13.0, 13.0])
    assert names(model) == ["/0/w"] and len(model) == 4
    pair = Sequential(lambda x: (x, x))
    assert pair(1) == (1, 1)


def test_sequential_is_a_list():
    a, b = Scale(1.0), Scale(2.0)
    model = Sequential(a, twice)
    model.insert(0, b)
    model.extend(Sequential(a, twice))
    assert list(model) == [b, a, twice, a, twice]
    assert (model.count(a), model.index(a), model.index(a, 2), model.count_by_layer_type("twice")) == (2, 1, 3, 2)
    assert model.count_by_layer_type("Scale") == 3 and twice in model
    assert names(model) == ["/0/w", "/1/w", "/2/w"]
    model.remove(a)
    assert model.pop() is twice and list(model) == [b, twice, a]
    assert isinstance(model[:2], Sequential) and list(model[:2]) == [b, twice] and model[0] is b
    model.remove_by_layer_type("twice")
    model[0] = a
    del model[1]
    assert list(model) == [a] and names(model) == ["/0/w"]
    model.clear()
    assert len(model) == 0 and list(model.params()) == []
    with pytest.raises(TypeError, match="layer 0: expected a link or a function, got int"):
        model.append(3)


AS_LISTS = {
    "append": lambda s, draw, layers: s.append(draw.choice(layers)),
    "insert": lambda s, draw, layers: s.insert(draw.randint(-len(s), len(s)), draw.choice(layers)),
    "extend": lambda s, draw, layers: s.extend(type(s)(*layers[:2]) if isinstance(s, Sequential) else layers[:2]),
    "replace": lambda s, draw, layers: s.__setitem__(draw.randrange(len(s)), draw.choice(layers)),
    "delete": lambda s, draw, layers: s.__delitem__(draw.randrange(-len(s), len(s))),
    "delete a part": lambda s, draw, layers: s.__delitem__(slice(draw.randrange(len(s)), None, 2)),
    "pop": lambda s, draw, layers: s.pop(),
    "pop a place": lambda s, draw, layers: s.pop(draw.randrange(len(s))),
    "remove": lambda s, draw, layers: s.remove(s[draw.randrange(len(s))]),
    "clear": lambda s, draw, layers: s.clear() if draw.random() < 0.2 else None,
}


@pytest.mark.parametrize("seed", range(8))
def test_sequential_does_what_a_list_does(seed):
    """The links in it are its children, and plans over its parameters learn of every change."""
    draw, layers = random.Random(seed), [Scale(1.0), twice, Scale(2.0), np.tanh, Scale(3.0)]
    model, expected = Sequential(*layers), list(layers)
    for _ in range(60):
        name = draw.choice(list(AS_LISTS) if expected else ["append", "insert", "extend"])
        watch, state, before = versions.Watch([model]), draw.getstate(), list(expected)
        result = AS_LISTS[name](model, draw, layers)
        draw.setstate(state)
        assert result is AS_LISTS[name](expected, draw, layers), name
        assert list(model) == expected and len(model) == len(expected), name
        links = [layer for layer in expected if isinstance(layer, Link)]
        assert list(model.children()) == links, name
        assert [model.count(layer) for layer in layers] == [expected.count(layer) for layer in layers]
        assert expected == before or not watch.is_current(), name
        if expected:
            start, end = sorted(draw.choices(range(len(expected) + 1), k=2))
            assert list(model[start:end]) == expected[start:end]
            at = draw.randrange(len(expected))
            assert model.index(expected[at], at) == at and model.index(expected[at], 0, at + 1) <= at


def test_sequential_flatten_and_copy():
    inner = Sequential(Scale(2.0), twice)
    model = Sequential(inner, Sequential(inner, Scale(3.0)))
    flat = model.flatten()
    assert [type(layer).__name__ for layer in flat] == ["Scale", "function", "Scale", "function", "Scale"]
    copied = model.copy("copy")
    inner[0].w.array[...] = 0
    assert copied[0][0].w.array[0] == 2
    shared = Sequential(Scale(2.0), twice).copy()
    assert isinstance(shared, Sequential) and shared[1] is twice


# ---- devices and hooks ----------------------------------------------------------------------------------------------
def test_devices_on_the_cpu():
    net = Two()
    with pytest.deprecated_call():
        assert net.to_device("@numpy") is net and net.to_cpu().xp is np
    assert str(net.device) == "@numpy" and net.bias.device == net.device
    with pytest.raises(ValueError, match="expected a device"):
        net.to_device("@abacus")


class Recorder(LinkHook):
    name = "Recorder"

    def __init__(self):
        self.calls = []

    def added(self, link):
        self.calls.append(("added", link))

    def deleted(self, link):
        self.calls.append(("deleted", link))

    def forward_preprocess(self, args):
        self.calls.append(("before", args.link.name, args.forward_name, len(args.args)))

    def forward_postprocess(self, args):
        self.calls.append(("after", args.link.name, args.out.shape))


def test_link_hooks_of_the_thread_and_of_one_link():
    net, x = Two(), np.ones(2, np.float32)
    with Recorder() as hook:
        net(x)
        with pytest.raises(KeyError, match="already active"), Recorder():
            pass
    assert [c[:2] for c in hook.calls] == [
        ("added", None), ("before", None), ("before", "second"), ("after", "second"), ("before", "first"),
        ("after", "first"), ("after", None), ("deleted", None),
    ]  # fmt: skip
    local = Recorder()
    assert net.first.add_hook(local) is net.first
    with pytest.raises(KeyError, match="already has a hook"):
        net.first.add_hook(local)
    net(x)
    net.first.delete_hook("Recorder")
    net(x)
    assert [c[0] for c in local.calls] == ["added", "before", "after", "deleted"]
    with pytest.raises(KeyError, match="no hook named"):
        net.first.delete_hook("Recorder")


@pytest.mark.parametrize("make", [lambda link: Chain(a=link), lambda link: Chain(a=ChainList(link))])
def test_a_chain_that_cleared_gradients_dies_with_its_last_reference(make):
    gc.collect()
    gc.disable()
    try:
        chain = make(L.Linear(2, 2))
        chain.cleargrads()
        chain.add_param("extra", (2,))
        chain.cleargrads()
        kept = weakref.ref(chain.extra)
        del chain
        assert kept() is None
    finally:
        gc.enable()


class Counting(L.Linear):
    """A link that clears gradients in its own way."""

    count = 0

    def cleargrads(self):
        self.count += 1
        super().cleargrads()


CHANGES = {
    "append": lambda c, made: c.b.append(made),
    "insert": lambda c, made: c.b.insert(0, made),
    "replace": lambda c, made: c.b.__setitem__(0, made),
    "append to a sequence": lambda c, made: c.s.append(made),
    "take from a sequence": lambda c, made: c.s.pop() if len(c.s) > 1 else None,
    "extend a sequence": lambda c, made: c.s.extend(Sequential(made, L.Linear(2, 2))),
    "delete a child": lambda c, made: delattr(c, "x") if hasattr(c, "x") else None,
    "add a child": lambda c, made: None if hasattr(c, "x") else c.add_link("x", made),
    "freeze": lambda c, made: c.disable_update(),
    "copy": lambda c, made: c.copy("share"),
    "copy anew": lambda c, made: c.copy("init"),
    "deepcopy": lambda c, made: copy.deepcopy(c),
    "pickle": lambda c, made: pickle.loads(pickle.dumps(c)),
}


@pytest.mark.parametrize("seed", range(20))
def test_chains_clear_all_gradients_whatever_was_changed_before(seed):
    draw, done = random.Random(seed), []
    chain = Chain(b=ChainList(L.Linear(2, 2)), s=Sequential(L.Linear(2, 2), np.tanh))
    for _ in range(15):
        done.append(draw.choice(list(CHANGES)))
        chain.cleargrads()
        changed = CHANGES[done[-1]](chain, L.Linear(2, 2))
        chain = changed if isinstance(changed, Chain) else chain
        for p in chain.params():
            p.grad = np.ones_like(p.array)
        chain.cleargrads()
        assert all(p.grad is None for p in chain.params()), done


def test_chains_clear_the_gradients_of_what_they_hold_now():
    own = Counting(2, 2)
    chain = Chain(a=L.Linear(2, 2), b=ChainList(own))

    def cleared(link):
        for p in link.params():
            p.grad = np.ones_like(p.array)
        link.cleargrads()
        return all(p.grad is None for p in link.params())

    assert cleared(chain) and own.count == 1
    with chain.a.init_scope():
        chain.a.extra = Parameter(0.0, (3,))
    assert cleared(chain) and own.count == 2
    chain.b.append(ChainList(L.Linear(2, 2)))
    assert cleared(chain)
    chain.b[1].append(L.Linear(2, 2))
    assert cleared(chain)
    with chain.init_scope():
        chain.a = L.Linear(2, 3)
    assert cleared(chain) and own.count == 5
    for other in (chain.copy("share"), chain.copy("copy"), chain.copy("init"), pickle.loads(pickle.dumps(chain))):
        for p in chain.params():
            p.grad = np.ones_like(p.array)
        assert cleared(other)
        assert all(p.grad is not None for p in chain.params())


def test_hooks_that_were_taken_away_are_not_called():
    called = []
    for timing in ("pre", "post"):
        link = dbrdist.Link(w=(2,))
        one = SGD(lr=0.0).setup(link)
        link.w.array, link.w.grad = np.zeros(2, "f"), np.zeros(2, "f")
        for owner in (one, link.w.update_rule):
            owner.add_hook(lambda *given, timing=timing: called.append(timing), "hook", timing)
            owner.remove_hook("hook")
            owner.add_hook(lambda *given: None, "hook", timing)  # the name is free again
            owner.remove_hook("hook")
            with pytest.raises(KeyError, match="no hook named 'hook'"):
                owner.remove_hook("hook")
        one.update()
    assert called == []


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def test_a_persistent_value_that_becomes_a_parameter_is_listed_once():
    link = Link()
    link.add_persistent("W", ones(2))
    link.register_persistent("W")
    assert link._persistent == ["W"]
    with link.init_scope():
        link.W = Parameter(ones(2))
    assert link._persistent == [] and [n for n, _ in link.namedparams()] == ["/W"]
    with link.init_scope():
        link.W = Parameter(ones(3))
    assert [p.shape for p in link.params()] == [(3,)]
    del link.W
    assert list(link.params()) == []
    with pytest.raises(AttributeError, match="Link: expected an attribute 'W' to register, there is none"):
        link.register_persistent("W")


def test_a_single_link_lists_itself_unless_it_is_left_out():
    link = L.Linear(2, 3)
    assert list(link.links()) == [link] and list(link.links(skipself=True)) == []
    assert list(link.namedlinks()) == [("/", link)] and list(link.namedlinks(skipself=True)) == []
    assert list(link.children()) == []
    chain = Chain(a=link)
    assert list(chain.links(skipself=True)) == [link] and list(chain.links()) == [chain, link]
    assert list(chain.namedlinks(skipself=True)) == [("/a", link)]


def test_updates_are_enabled_and_disabled_where_there_is_a_rule():
    link = L.Linear(2, 3)
    link.enable_update()
    link.disable_update()
    assert not link.update_enabled
    dbrdist.optimizers.SGD().setup(link)
    assert not link.update_enabled  # whatever the order
    link.enable_update()
    assert link.update_enabled
    link.W.update_rule.enabled = False
    assert link.update_enabled
    link.disable_update()
    assert not link.update_enabled and not link.b.update_rule.enabled
    link.enable_update()
    assert link.W.update_rule.enabled and link.b.update_rule.enabled


@each(kind=[Chain, ChainList, L.Linear])
def test_modes_of_copies(kind):
    link = kind(2, 3) if kind is L.Linear else kind()
    for mode in ("share", "copy", "init"):
        assert type(link.copy(mode)) is kind
        assert len(link.repeat(2, mode)) == 2
    for call in (link.copy, lambda mode: link.repeat(1, mode)):
        with pytest.raises(ValueError, match="mode: expected 'share', 'copy' or 'init', got 'deep'"):
            call("deep")
    assert len(link.repeat(0)) == 0
    with pytest.warns(UsageWarning, match="n_repeat: expected an integer of 0 or more, got -1"):
        assert len(link.repeat(-1)) == 0


def test_copyparams_waits_for_what_has_no_values_and_leaves_statistics_out():
    source, target = L.Linear(None, 3), L.Linear(None, 3)
    target.copyparams(source)
    assert not target.W.is_initialized
    source(ones(1, 2))
    target.copyparams(source)
    np.testing.assert_array_equal(target.W.array, source.W.array)
    mine, theirs = L.BatchNormalization(2), L.BatchNormalization(2)
    theirs.avg_mean[...] = 3
    theirs.N = 7
    mine.copyparams(theirs, copy_persistent=False)
    assert mine.avg_mean.tolist() == [0, 0] and mine.N == 0
    mine.copyparams(theirs)
    assert mine.avg_mean.tolist() == [3, 3] and mine.N == 7 and mine.avg_mean is not theirs.avg_mean
    with pytest.raises(ValueError, match=r"copyparams: avg_mean: expected shape \(2,\), got \(3,\)"):
        mine.avg_mean, theirs.avg_mean = mine.avg_mean, ones(3)
        mine.copyparams(theirs)


def test_parameters_given_to_a_link_have_types():
    link = Link(a=(2, 3), b=((4,), np.float64), c=5)
    assert [(p.name, p.shape, p.dtype.name) for p in link.params()] == [
        ("a", (2, 3), "float32"), ("b", (4,), "float64"), ("c", (5,), "float32")
    ]  # fmt: skip
    with pytest.raises(AttributeError, match="Link: cannot register parameter 'a': the attribute exists"):
        link.add_param("a", (1,))
    with pytest.raises(NotImplementedError, match=r"Link defines no from_params\(\)"):
        Link.from_params()
    with pytest.raises(TypeError, match=r"Link defines no forward\(\), so it cannot be called"):
        link(1)


def test_parameters_by_keywords_may_have_no_shape():
    link = dbrdist.Link(x=(2, 3), d=((2,), "d"), n=(2, "d"), u=(None, "d"), v=None)
    assert [(p.shape, p.dtype) for p in (link.x, link.d, link.n)] == [((2, 3), "f"), ((2,), "d"), ((2,), "d")]
    assert not link.u.is_initialized and not link.v.is_initialized
    link.u.initialize((2,))
    assert link.u.dtype == "d"
    with pytest.warns(UserWarning, match=r"Link\.count_params: not counted, since they have no shape yet: /v"):
        assert link.count_params() == 12
