"""Activations that are made again for backward: the bits are those of forward, whoever reads or changes what meanwhile.

The oracle is the definition in float64: the gradient of the weights of a 1x1 convolution is a sum of products of what
the convolution has seen.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Parameter, Variable, using_config
from dbrdist.core.array.backend import channels_last, is_channels_last
from dbrdist.core.tape import fusion
from dbrdist.functions import recomputed
from dbrdist.functions.rectifier import ReLU
from dbrdist.functions.residual import batch_normalization_add_relu
from tests.each import each

SHAPE = (4, 16, 64, 64)  # as few elements as are made again
CHANNELS, EPS, BYTES = 16, 2e-5, 1 << 20


def draw(seed, shape=SHAPE):
    a = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return channels_last(a) if len(shape) == 4 else a


def per_channel(v):
    return np.asarray(v, np.float64).reshape(-1, 1, 1)


def normalized(x, gamma, beta):
    x = np.asarray(x, np.float64)
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
    return (x - per_channel(mean)) / np.sqrt(per_channel(var) + EPS) * per_channel(gamma) + per_channel(beta)


class Layer:
    """A normalization, a ReLU and a 1x1 convolution of what nobody else has."""

    def __init__(self):
        self.leaf = Variable(draw(0))
        self.gamma, self.beta = Parameter(draw(1, (CHANNELS,))), Parameter(draw(2, (CHANNELS,)))
        self.W, self.gy = Parameter(draw(3, (8, CHANNELS, 1, 1))), draw(4, (4, 8, 64, 64))
        self.seen = np.maximum(normalized(self.leaf.array, self.gamma.array, self.beta.array), 0)

    def call(self, before=lambda h, y: None, holds=()):
        """The output; ``before`` is called before the convolution, and ``holds`` gets h, n, y, of which it may keep."""
        h = self.leaf * 1.0
        n = F.batch_normalization(h, self.gamma, self.beta)
        y = F.relu(n)
        before(h, y)
        self.held = [{"h": h, "n": n, "y": y}[name] for name in holds]
        del h, n
        return F.convolution_2d(y, self.W)

    def check(self, seen=None, times=1):
        """The gradient of the weights is that of what was seen."""
        expected = np.einsum("nohw,nchw->oc", self.gy.astype(np.float64), self.seen if seen is None else seen) * times
        np.testing.assert_allclose(self.W.grad[:, :, 0, 0], expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.fixture(autouse=True)
def nothing_left():
    fusion.settle()
    yield
    fusion.settle()


def has_recipe(z):
    return z.creator.recipe is not None


class InPlace(dbrdist.FunctionNode):
    """A function that breaks the rules and changes its input"""

    def forward(self, xs):
        xs[0][...] = 7
        return (np.zeros(1, np.float32),)


def overwrite(a):
    a[...] = 7


BEFORE = {
    "a read": (lambda h, y: y.array.sum(), None),
    "a read of another": (lambda h, y: Variable(np.ones(1)).array, None),
    "a change in place": (lambda h, y: overwrite(y.array), 7.0),
    "a change of a view": (lambda h, y: overwrite(F.transpose(y).array), 7.0),
    "a function that changes its input": (lambda h, y: InPlace().apply((y,)), 7.0),
    "a change of what was normalized": (lambda h, y: overwrite(h.array), None),
    "a function that changes what was normalized": (lambda h, y: InPlace().apply((h,)), None),
}


@each(way=BEFORE)
def test_what_comes_between_lets_the_convolution_keep_its_input(way):
    layer, (before, seen) = Layer(), BEFORE[way]
    z = layer.call(before)
    assert not has_recipe(z)
    dbrdist.backward([z], [layer.gy])
    layer.check(None if seen is None else np.full(SHAPE, seen))


@each(name=["h", "n", "y"])
def test_who_holds_an_array_may_change_it_later(name):
    layer = Layer()
    z = layer.call(holds=[name])
    assert has_recipe(z) == (name == "y")  # the others lead to what the recipe starts from
    overwrite(layer.held[0].array)
    dbrdist.backward([z], [layer.gy])
    layer.check()


def frozen(layer):
    """What records no call at all."""
    layer.leaf, layer.gamma, layer.beta = (
        Variable(v.array, requires_grad=False) for v in (layer.leaf, layer.gamma, layer.beta)
    )


CUTS = {"frozen": None, "unchain": lambda y: y.unchain(), "unchain_backward": lambda y: y.unchain_backward()}


@each(way=CUTS, rectifies=[False, True])
def test_who_holds_what_a_normalization_outside_the_graph_has_read(way, rectifies):
    layer = Layer()
    if way == "frozen":
        frozen(layer)
    h = layer.leaf * 1.0
    y = F.batch_normalization(h, layer.gamma, layer.beta)
    if rectifies:
        y = F.relu(y)
    else:
        layer.seen = normalized(layer.leaf.array, layer.gamma.array, layer.beta.array)
    if way != "frozen":
        CUTS[way](y)
    z = F.convolution_2d(y, layer.W)
    overwrite(h.array)
    dbrdist.backward([z], [layer.gy])
    layer.check()


@each(comes=["between", "later"])
def test_who_asks_the_normalization_for_its_inputs_gets_its_own(comes):
    layer = Layer()
    h = layer.leaf * 1.0
    n = F.batch_normalization(h, layer.gamma, layer.beta)
    node, y = n.creator, F.relu(n)
    del h, n
    if comes == "between":
        overwrite(node.input_data[0])
    z = F.convolution_2d(y, layer.W)
    del y
    if comes == "later":
        assert has_recipe(z)
        overwrite(node.input_data[0])
    dbrdist.backward([z], [layer.gy])
    layer.check()


@each(of_node=[False, True])
def test_a_forward_of_the_program_in_the_place_of_ours(of_node, monkeypatch):
    def in_place(self, xs):
        self.retain_outputs((0,))
        return (np.maximum(xs[0], 0, out=xs[0]),)

    layer = Layer()
    n = F.batch_normalization(layer.leaf * 1.0, layer.gamma, layer.beta)  # which expects a ReLU
    node = ReLU()
    if of_node:
        node.forward = partial(in_place, node)
    else:
        monkeypatch.setattr(ReLU, "forward", in_place)
    (y,) = node.apply((n,))
    del n
    dbrdist.backward([F.convolution_2d(y, layer.W)], [layer.gy])
    layer.check()


def test_references_are_counted_as_they_are_then():
    """A debugger that asks for locals at the import holds more."""

    def trace(frame, event, argument):
        assert frame.f_locals is not None
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        fresh = importlib.util.module_from_spec(recomputed.__spec__)
        recomputed.__spec__.loader.exec_module(fresh)
    finally:
        sys.settrace(before)
    kept = fresh.KeptOutput(np.empty(3))
    kept.held = np.empty(3)
    another = [kept.held]
    found = [kept.is_sound()]
    another.clear()
    found.append(kept.is_sound())
    assert found == [False, True]


def test_a_class_below_a_relu_sees_what_the_normalization_gives():
    class Seen(ReLU):
        def forward(self, xs):
            self.seen = xs[0].copy()
            return super().forward(xs)

    layer, node = Layer(), Seen()
    n = F.batch_normalization(layer.leaf * 1.0, layer.gamma, layer.beta)
    node.apply((n,))
    expected = normalized(layer.leaf.array, layer.gamma.array, layer.beta.array)
    np.testing.assert_allclose(node.seen, expected, rtol=0, atol=1e-5)


def test_a_rule_below_a_relu_asks_for_the_output_behind_a_normalization():
    class Stopping(ReLU):
        def backward(self, indexes, gys):
            self.found = self.get_retained_outputs()[0].array
            return (gys[0],)

    layer, node = Layer(), Stopping()
    (y,) = node.apply((F.batch_normalization(layer.leaf * 1.0, layer.gamma, layer.beta),))
    dbrdist.backward([y], [draw(4)])
    np.testing.assert_allclose(node.found, layer.seen, rtol=0, atol=1e-5)


def restated(layer, z):
    layer.gamma.array[...], layer.beta.array[...] = 7, 7


def assigned(layer, z):
    layer.beta.array = np.full(CHANNELS, 7, np.float32)


def evaluated(layer, z):
    with using_config("train", False), dbrdist.no_backprop_mode():
        layer.call()


def cut(layer, z):
    z.creator.inputs[0].creator_node.inputs[0].creator_node.unchain()


AFTER = {"nothing": lambda layer, z: None, "new values": restated, "assigned": assigned, "another call": evaluated,
         "a training call": lambda layer, z: layer.call(), "a cut graph": cut,
         "a copied node": lambda layer, z: copy.copy(z.creator)}  # fmt: skip


@each(way=AFTER)
def test_values_are_those_of_the_call(way):
    layer = Layer()
    z = layer.call()
    assert has_recipe(z) and z.creator._keep_inputs == (1,)
    AFTER[way](layer, z)
    dbrdist.backward([z], [layer.gy])
    layer.check()
    dbrdist.backward([z], [layer.gy])
    layer.check(times=2)


def test_another_thread_goes_backward():
    layer = Layer()
    z = layer.call()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(dbrdist.backward, [z], [layer.gy]).result()
    layer.check()


@each(reads=["retained", "data", "hook", "pickle"])
def test_who_asks_a_call_for_its_inputs_gets_them(reads):
    layer = Layer()
    z = layer.call()
    node, found = z.creator, []
    assert has_recipe(z)
    if reads == "retained":
        found.append(node.get_retained_inputs()[0].array)
    elif reads == "data":
        found.append(node.input_data[0])
    elif reads == "pickle":
        found.append(node.__getstate__()["_kept_xs"][0])
    else:

        class Seen(dbrdist.FunctionHook):
            def backward_preprocess(self, function, in_data, out_grad):
                found.extend(in_data[:1] if function is node else ())

        with Seen():
            dbrdist.backward([z], [layer.gy])
        layer.check()
    np.testing.assert_allclose(found[0], layer.seen, rtol=0, atol=1e-5)
    assert is_channels_last(found[0]) and not has_recipe(z)


def test_gradients_of_gradients():
    grads = []
    for is_held in (False, True):
        layer = Layer()
        z = layer.call(holds=["h"] * is_held)
        assert has_recipe(z) != is_held
        (gx,) = dbrdist.grad([z], [layer.leaf], [layer.gy], enable_double_backprop=True)
        dbrdist.backward([F.sum(gx * gx)])
        grads.append((gx.array, layer.W.grad, layer.gamma.grad))
    for a, b in zip(*grads):
        assert a.tobytes() == b.tobytes()


def test_hooks_inference_and_small_arrays_offer_nothing():
    layer = Layer()
    with dbrdist.function_hooks.TimerHook():
        assert not has_recipe(layer.call())
    with dbrdist.no_backprop_mode():
        layer.call()
        assert not any(p.is_offer for p in fusion.waiting.values())
    assert not recomputed._suits(draw(0, (4, 16, 64, 63))) and not recomputed._suits(draw(0).astype(np.float64))
    assert not recomputed._suits(np.ascontiguousarray(draw(0)))
    assert recomputed._suits(draw(0, (16, 16, 32, 33))) and not recomputed._suits(draw(0, (16, 16, 32, 32)))


# ---- sums


class Stages:
    """Four residual blocks of a 1x1 convolution each, the first of a normalization in its shortcut, and a last one."""

    def __init__(self, holds=None):
        one = np.ones(CHANNELS, np.float32)
        self.leaf, self.Ws, self.convolutions, self.held = Variable(draw(0)), [], [], None
        h = self.leaf * 0.5
        y = F.batch_normalization(self.leaf * 1.0, Parameter(one), Parameter(one))
        for k in range(4):
            y = batch_normalization_add_relu(h, Parameter(one * 0.5), Parameter(one * np.float32(0.2 * k - 0.3)), y)
            del h  # as where blocks are links
            if k == holds:
                self.held = y
            self.Ws.append(Parameter(draw(10 + k, (CHANNELS, CHANNELS, 1, 1)) * np.float32(0.3)))
            h = F.convolution_2d(y, self.Ws[-1])
            self.convolutions.append(h.creator)
        self.z, self.gz = h, draw(20)

    def recipes(self):
        return [type(node.recipe).__name__ for node in self.convolutions]

    def backward(self):
        dbrdist.backward([self.z], [self.gz])
        return [self.leaf.grad.tobytes(), *(W.grad.tobytes() for W in self.Ws)]


def without_recipes(monkeypatch):
    with monkeypatch.context() as m:
        m.setattr(recomputed, "_LARGE", 1 << 30)
        net = Stages()
    assert net.recipes() == ["NoneType"] * 4
    return net


def test_sums_are_made_again_bit_for_bit(monkeypatch):
    expected, net = without_recipes(monkeypatch).backward(), Stages()
    assert net.recipes() == ["RepeatedSum", "RepeatedSum", "KeptOutput", "RepeatedSum"]  # two in a row at most
    assert net.backward() == expected
    for W in (net.leaf, *net.Ws):
        W.cleargrad()
    assert net.backward() == expected  # the graph stays


@each(holds=range(4))
def test_changes_of_a_held_sum_reach_no_other_one(holds, monkeypatch):
    expected, net = without_recipes(monkeypatch).backward(), Stages(holds)
    overwrite(net.held.array)
    got = net.backward()
    del got[holds + 1], expected[holds + 1]  # of the convolution that saw it, which may have kept the array
    assert got == expected


def test_changes_of_what_a_convolution_hands_out_reach_no_other_one(monkeypatch):
    expected, net = without_recipes(monkeypatch).backward(), Stages()
    kept = net.recipes().index("KeptOutput")
    overwrite(net.convolutions[kept].input_data[0])
    got = net.backward()
    del got[kept + 1], expected[kept + 1]
    assert got == expected


def test_gradients_of_gradients_of_sums(monkeypatch):
    found = []
    for net in (without_recipes(monkeypatch), Stages()):
        (gx,) = dbrdist.grad([net.z], [net.leaf], [net.gz], enable_double_backprop=True)
        dbrdist.backward([F.sum(gx * gx)])
        found.append([gx.array.tobytes(), *(W.grad.tobytes() for W in net.Ws)])
    assert found[0] == found[1]


def test_a_second_call_of_the_operation_offers_nothing():
    net = Stages()
    first = net.convolutions[0].inputs[0].creator_node
    other = first.twin()
    small = [Variable(np.ones((2, CHANNELS, 3, 3), np.float64)), *(Variable(np.ones(CHANNELS)) for _ in range(2))]
    (y,) = other.apply((*small, small[0]))
    assert first.marks is not None and other.marks is None and y.array.tolist() == (np.ones(y.shape) * 2).tolist()
    conv, x = net.convolutions[0].twin(), Variable(draw(5))
    (z,) = conv.apply((x, net.Ws[0]))
    dbrdist.backward([F.sum(z)])
    expected = np.broadcast_to(draw(5).sum((0, 2, 3), np.float64), (CHANNELS, CHANNELS))
    np.testing.assert_allclose(net.Ws[0].grad[:, :, 0, 0], expected, rtol=0, atol=0.02)


def test_memory_of_a_graph_and_of_its_backward(monkeypatch):
    Stages().backward()  # builds the plans
    kept, peaks = [], []
    for make in (Stages, lambda: without_recipes(monkeypatch)):
        tracemalloc.start()
        net = make()
        fusion.settle()
        gradients = 2 * net.leaf.array.nbytes  # the leaf and gz
        kept.append(tracemalloc.get_traced_memory()[0] - gradients)
        net.backward()
        peaks.append(tracemalloc.get_traced_memory()[1] - gradients)
        tracemalloc.stop()
    # what three normalizations of images and two of the leaf take, one sum, z, and four times a bit for each element
    assert 7 * BYTES < kept[0] < 7.2 * BYTES
    assert 10 * BYTES < kept[1] < 10.1 * BYTES
    assert peaks[0] - kept[0] < 5.3 * BYTES  # with the copies of gradients that a leaf owns


def test_a_link_of_blocks_is_made_of_recipes():
    bn, conv = L.BatchNormalization(CHANNELS), L.Convolution2D(CHANNELS, CHANNELS, 3, pad=1, nobias=True)
    y = L.conv_bn(conv, bn, Variable(draw(0)) * 1.0, relu=True)
    assert has_recipe(conv(y))
