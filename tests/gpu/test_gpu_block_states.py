"""Blocks (test_gpu_blocks.py) whose weights, devices or memory change on the way, and what their plans hold."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref

import numpy as np
import pytest
import test_gpu_graphs
from support import images, put
from test_gpu_blocks import SHAPE, Net, Side, assert_same_bits, drawn, kinds, made

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import kernels, optimizers, using_config
from dbrdist.comm import run_threads
from dbrdist.comm.links import create_mnbn_model
from dbrdist.core.array import backend
from dbrdist.core.array.current_device import is_of_gpu
from dbrdist.core.tape import backprop
from dbrdist.functions import residual
from dbrdist.functions.residual import NormalizedConvolution
from dbrdist.kernels import Block, ConvGeometry, table
from dbrdist.kernels.gpu import cudnn
from dbrdist.links import convolution_bn


@pytest.fixture(autouse=True)
def is_whole(on):
    if on != "whole":
        pytest.skip("runs with --on whole")
    with using_config("cudnn_deterministic", True):
        yield


@pytest.fixture
def sides(device, monkeypatch):
    return lambda *args, **kwargs: [Side(device, *args, k, monkeypatch, **kwargs) for k in (False, True)]


# ---- weights that are assigned between forward and backward


def layer(kind, where, dtype):
    """A layer as a function, its weights, and images or vectors for it."""
    numbers = np.random.default_rng(7)
    with using_config("dtype", np.dtype(np.float32)):
        link = L.Linear(32, 24) if kind == "linear" else L.Convolution2D(16, 16, 3, pad=1, nobias=True)
        bn = L.BatchNormalization(16)
    link.W.array[...] = numbers.standard_normal(link.W.shape) / 8
    link.to_device(where), bn.to_device(where)
    x = numbers.standard_normal((16, 32)).astype(dtype) if kind == "linear" else images(numbers, (4, 16, 12, 14), dtype)
    run = (lambda x: L.conv_bn(link, bn, x, relu=True)) if kind == "block" else link
    return run, link, dbrdist.Variable(put(where, x))


def assert_close(found, expected, dtype):
    for a, b in zip(found, expected):
        a, b = [backend.to_cpu(v).astype("d") for v in (a, b)]
        assert np.abs(a - b).max() < (1e-4 if dtype == "float32" else 2e-2) * np.abs(b).max()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", ["linear", "convolution", "block"])
def test_backward_has_the_values_that_were_assigned(kind, dtype, device):
    """With ``stale_parameters`` "warn", on a device as on the host: not those that forward had laid out."""
    found = []
    for where in (device, dbrdist.get_device("@numpy")):
        run, link, x = layer(kind, where, dtype)
        y, W = run(x), link.W
        assert (type(y.creator).__name__ == "RectifiedConvolution") == (kind == "block" and where is device)
        W.array = -3 * W.array
        with using_config("stale_parameters", "warn"), pytest.warns(RuntimeWarning, match="was assigned new values"):
            F.sum(y * y).backward()
        found.append((x.grad, W.grad))
    assert_close(*found, dtype)


# ---- failures


def test_a_shortcut_does_not_move_where_the_convolution_before_it_fails(sides):
    results = []
    for side in sides("float32"):
        side.step()
        h = drawn(side.device, "float32", (4, 15, 12, 14))  # one channel less than weights have
        with pytest.raises(ValueError, match="x: expected shape"):
            L.conv_bn(
                side.net.two, side.net.bn2, h, relu=True,
                residual=lambda side=side: L.conv_bn(side.net.one, side.net.bn1, side.x),
            )  # fmt: skip
        results.append(side.found())
    assert_same_bits(*results)


def test_a_shortcut_does_not_move_without_memory_for_the_convolution_before_it(device):
    import whole

    before, shortcut = [L.Convolution2D(64, 64, k, pad=k // 2, nobias=True).to_device(device) for k in (3, 1)]
    bn, bn_of_shortcut = [L.BatchNormalization(64).to_device(device) for _ in range(2)]
    x = drawn(device, "float32", (1, 64, 2, 2))

    def step():
        with_shortcut = lambda: L.conv_bn(shortcut, bn_of_shortcut, x)  # noqa: E731
        return L.conv_bn(before, bn, x, relu=True, residual=with_shortcut)

    step()
    found = [backend.to_cpu(v).copy() for v in (bn.avg_mean, bn_of_shortcut.avg_mean)]
    gc.collect()
    whole.limit.num_bytes = whole.used_bytes() + before.W.array.nbytes // 2
    try:
        with pytest.raises(MemoryError):
            step()
    finally:
        whole.limit.num_bytes = None
    for v, old in zip((bn.avg_mean, bn_of_shortcut.avg_mean), found):
        np.testing.assert_array_equal(backend.to_cpu(v), old)


@pytest.mark.parametrize("mode", ["float32", "mixed16"])
@pytest.mark.parametrize("change", ["nothing", "weights", "scale", "shape", "array", "hook"])
def test_a_shortcut_that_changes_what_it_is_added_to(change, mode, sides):
    """A shortcut is called after the convolution and before the normalization, whatever it does to both."""
    results, names = [], []
    for side in sides(mode):
        net, x = side.net, dbrdist.Variable(side.x)

        def shortcut(net=net, x=x, side=side):
            if change == "weights":
                net.one.W.array = net.one.W.array * 2
            elif change == "scale":
                net.bn1.gamma.array = net.bn1.gamma.array * 2
            elif change == "hook":
                net.bn1.add_hook(dbrdist.link_hooks.TimerHook())
            y = drawn(side.device, mode, (*x.shape[:1], 16, *(SHAPE[2:] if change != "shape" else (1, 1))), 9)
            return y if change == "array" else dbrdist.Variable(y) * 3

        with side.monkeypatch.context() as m:
            if side.is_separate:
                m.setattr(convolution_bn, "_is_training", lambda conv, bn: False)
            y = L.conv_bn(net.one, net.bn1, x, relu=True, residual=shortcut)
        names.append(kinds(y))
        net.cleargrads()
        with using_config("stale_parameters", "warn"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            F.sum(y * y).backward()
        if change == "hook":
            net.bn1.delete_hook("TimerHook")
        results.append(side.found(y.array, x.grad))
    assert_same_bits(*results)
    assert ("Convolution2D" not in names[0]) == (change in ("nothing", "array"))
    assert "Convolution2D" in names[1]


def test_settings_that_cannot_be_hashed(sides):
    """Convolutions take pairs in lists, too."""
    results = []
    for side in sides("float32"):
        side.net.one.pad, side.net.three.stride = [1, 1], [1, 1]
        results.append(side.step())
    assert_same_bits(*results)


# ---- plans


def test_plans_are_those_of_the_switches(sides, monkeypatch):
    build, used = cudnn.Graph.build, []

    def watched(graph, notes):
        run = build(graph, notes)
        return lambda *args: used.append(tuple(notes.unwanted)) or run(*args)

    monkeypatch.setattr(cudnn.Graph, "build", watched)
    table.forget()
    block, _ = sides("float32")
    for is_deterministic in (True, False, True):
        for use in ("always", "never"):
            used.clear()
            with using_config("cudnn_deterministic", is_deterministic), using_config("use_cudnn_tensor_core", use):
                block.step()
                assert {*used} == {tuple(cudnn.Notes(use == "always", is_deterministic).unwanted)}
    table.forget()


def operands(number):
    """What a block is called with on a device."""
    where = dbrdist.get_device(("@cupy", number))
    numbers = np.random.default_rng(2)
    x = put(where, images(numbers, (16, 8, 6, 6)))
    W, *vectors = [put(where, numbers.standard_normal(s).astype("f")) for s in [(8, 8, 3, 3), (8,), (8,), (8,), (8,)]]
    assert is_of_gpu(type(x))  # so that its class is known as one
    return where, (x, W, *vectors[:2]), tuple(vectors[2:])


BLOCK = Block(ConvGeometry(1, 1, 1, 1), 1e-5, True, False)
MOVED = 0.9, (0.1, 0.1)


def forward(xs, running):
    _, plan = residual._decided((1, 1, 1, 1, False), BLOCK.eps, BLOCK.relu, True, xs, running, MOVED[0])
    return None if plan is None else plan(xs, None, None, running, *MOVED)


def test_plans_are_those_of_a_device(device):
    """Arrays of another device than the current one are for the separate calls, whatever ran before."""
    first, xs, running = operands(0)
    second, others, running_there = operands(1)
    with dbrdist.using_device(second):
        assert forward(others, running_there) is not None
    with dbrdist.using_device(first):
        assert forward(others, running_there) is None  # the plan is of that device being the current one
        assert forward(xs, running) is not None
        assert forward(xs[:1] + others[1:], running) is None
        assert forward(xs, running_there) is None
        assert forward(xs, running) is not None
    with dbrdist.using_device(second):
        assert forward(xs, running) is None
        assert forward(others, running_there) is not None


def test_blocks_follow_the_device_of_their_arrays(device):
    """Whichever device is current, a block there is one function with a plan."""
    link, bn = L.Convolution2D(8, 8, 3, pad=1, nobias=True), L.BatchNormalization(8)
    numbers = images(np.random.default_rng(2), (16, 8, 6, 6), "f")
    for number in (0, 1, 0):
        where = dbrdist.get_device(f"@cupy:{number}")
        link.to_device(where), bn.to_device(where)
        x = dbrdist.Variable(put(where, numbers))
        for current in (1, 0):
            with dbrdist.using_device(dbrdist.get_device(f"@cupy:{current}")):
                creator = L.conv_bn(link, bn, x, relu=True).creator
                assert type(creator) is residual.RectifiedConvolution and not creator.by_parts
                assert {a.device.id for a in (creator.left.h, creator.left.mean, *creator._kept_ys)} == {number}


def test_backward_plans_are_those_of_a_device(device):
    def backward(xs, kept, gy, outs):
        return kernels.conv_bn_backward(xs[:3], None, kept, (gy,), BLOCK, outs, False, True, False)

    made_there = []
    for number in (0, 1):
        where, xs, running = operands(number)
        with dbrdist.using_device(where):
            y, kept = forward(xs, running)
            outs = tuple([backend.zeros(a.shape, a.dtype, a) for a in xs[1:]])
            made_there.append((where, (xs, kept, y, outs)))
    (first, here), (second, there) = made_there
    with dbrdist.using_device(second):
        assert backward(*there) is not None
    with dbrdist.using_device(first):
        assert backward(*there) is None
        assert backward(*here) is not None
        assert backward(*here[:3], there[3]) is None
        assert backward(*here) is not None


def test_networks_on_two_devices_by_turns(device, monkeypatch):
    results = []
    for is_separate in (False, True):
        both = [Side(dbrdist.get_device(("@cupy", n)), "float32", is_separate, monkeypatch) for n in (0, 1)]
        results.append([v for _ in range(2) for side in both for v in side.step()])
        assert not any(v is None for v in results[-1])
    assert_same_bits(*results)
    half = len(results[0]) // 4
    assert_same_bits(results[0][:half], results[0][half : 2 * half])


def test_plans_hold_neither_networks_nor_arrays(device, monkeypatch):
    import whole

    Side(device, "float32", False, monkeypatch).step()  # counters of the stream stay
    gc.collect()
    before = whole.used_bytes()
    side = Side(device, "float32", False, monkeypatch)
    side.x = drawn(device, "float32", (5, *SHAPE[1:]))
    side.step()
    net = weakref.ref(side.net)
    del side
    gc.collect()
    assert net() is None
    assert whole.used_bytes() == before


def test_plans_that_are_not_used_are_forgotten(sides, monkeypatch):
    monkeypatch.setattr(table, "_GENERATION", 12)
    table.forget()
    block, separate = sides("float32")
    for k in range(6):
        for side in (block, separate):
            side.x = drawn(side.device, "float32", (2 + k % 5, *SHAPE[1:]))
        assert_same_bits(block.step(), separate.step())
        local = table._local
        assert max(len(local.plans), len(local.older)) <= 12
        assert len(local.names) <= 24
    table.forget()


# ---- programs: what each does between and within steps


def _tied(side):
    with side.net.init_scope():
        side.net.side.W = side.net.two.W
    side.optimizer = optimizers.MomentumSGD(0.01).setup(side.net)


def _shared_with_another(side):
    other = made(side.device, side.mode)
    with other.init_scope():
        other.one.W = side.net.one.W
    other_optimizer = optimizers.Adam().setup(other)
    net, side.net = side.net, other
    y = side.forward()
    side.net = net
    other.cleargrads()
    F.sum(y * y).backward()
    other_optimizer.update()


def _cast_weights(side):
    side.net.three.W.array = side.net.three.W.array.astype("e")


def _deleted(side):
    del side.net.bn4.gamma
    side.net.bn4.gamma = dbrdist.Parameter(side.device.xp.full(16, 2, "f"))


def _two_forwards(side):
    a, b = side.forward(), side.forward()
    side.net.cleargrads()
    F.sum(a * b).backward()


def _update_within(side):
    y = side.forward()
    side.net.cleargrads()
    F.sum(y * y).backward()
    side.optimizer.update()
    z = side.forward()
    F.sum(y * z).backward()
    side.optimizer.update()


def _unchained(side):
    y = side.forward()
    y.creator.inputs[-1].get_variable_or_none()
    h = y.creator.inputs[0]
    side.net.cleargrads()
    h.unchain()
    F.sum(y * y).backward()


def _hook_within(side):
    seen = []

    class Hook(dbrdist.FunctionHook):
        name = "seen"

        def backward_postprocess(self, function, in_data, out_grad):
            seen.append(function.label)

    y = side.forward()
    side.net.cleargrads()
    with Hook():
        z = side.forward()
        F.sum(z * y).backward()
    assert seen


def _inf(side):
    y = side.forward()
    side.net.cleargrads()
    F.sum(y * np.inf).backward()


def _one_image(side):
    side.x = drawn(side.device, side.mode, (1, *SHAPE[1:]))


def _tiny(side):
    side.x = drawn(side.device, side.mode, (1, 8, 1, 1))


def _no_image(side):
    side.x = drawn(side.device, side.mode, (0, *SHAPE[1:]))


def _in_float32(side):
    for p in side.net.params():
        p.array = p.array.astype("f")


def _without_loss(side):
    with dbrdist.no_backprop_mode():
        side.forward()
    with using_config("train", False):
        side.forward()


def _grad_of_inner(side):
    y = side.forward()
    x = dbrdist.Variable(side.x)
    z = side.net(x)
    (gx,) = dbrdist.grad([F.sum(z * y)], [x], retain_grad=True)
    side.x = gx.array


PROGRAMS = [_tied, _shared_with_another, _cast_weights, _deleted, _two_forwards, _update_within, _unchained,
            _hook_within, _inf, _one_image, _tiny, _no_image, _in_float32, _without_loss, _grad_of_inner]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["float32", "mixed16"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_programs(program, mode, sides):
    block, separate = sides(mode)
    errors = []
    for side in (block, separate):
        side.step()
        try:
            program(side)
            side.found()
            side.result = [side.step(), side.step()]
        except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as e:
            errors.append(str(e))
    assert len(errors) in (0, 2), errors
    if errors:
        assert errors[0] == errors[1]
    else:
        for a, b in zip(block.result, separate.result):
            assert_same_bits(a, b)


# ---- types, streams, threads, ranks


@pytest.mark.parametrize("mode", ["bfloat16", "float64"])
def test_other_types(mode, sides):
    block, separate = sides(mode)
    for _ in range(2):
        assert_same_bits(block.step(), separate.step())


def test_streams_by_turns(sides):
    """The clocks (clocks.py) find what streams do not order."""
    results = []
    for side in sides("mixed16"):
        streams = [side.device.xp.cuda.Stream(non_blocking=True) for _ in range(2)]
        found = []
        for k in (0, 1, 0):
            side.device.xp.cuda.Device().synchronize()
            with streams[k]:
                found += side.step()
                streams[k].synchronize()
        results.append(found)
    assert_same_bits(*results)


def test_threads_at_once(sides):
    block, separate = sides("float32")
    expected = separate.step() + separate.step()
    other = Side(block.device, "float32", False, block.monkeypatch)
    barrier, found = threading.Barrier(2), {}

    def run(side):
        with using_config("cudnn_deterministic", True):
            steps = []
            for _ in range(2):
                barrier.wait()
                steps += side.step()
            found[side] = steps

    threads = [threading.Thread(target=run, args=(side,)) for side in (block, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for side in (block, other):
        assert_same_bits(found[side], expected)


def test_statistics_of_all_ranks_are_no_part_of_a_block(device):
    def run(comm):
        net = create_mnbn_model(made(device, "float32"), comm)
        y = net(drawn(device, "float32", seed=comm.rank))
        F.sum(y * y).backward()
        return kinds(y), [backend.to_cpu(v) for v in (net.bn1.avg_mean, net.bn4.avg_var)]

    (names, values), (_, others) = run_threads(2, run)
    assert not {"NormalizedConvolution", "RectifiedConvolution"} & {*names}
    assert_same_bits(values, others)


class Reporting(dbrdist.Chain):
    """Blocks with a loss, as an updater takes them."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.blocks = Net()

    def forward(self, x, t):
        loss = F.softmax_cross_entropy(F.mean(self.blocks(x), (2, 3)), t)
        dbrdist.report({"loss": loss}, self)
        return loss


@pytest.mark.parametrize("mode", ["float32", "mixed16"])
def test_captured_steps(mode, device, monkeypatch):
    monkeypatch.setattr(NormalizedConvolution, "_forward_by_parts", None)  # so that blocks are what is captured
    data = test_gpu_graphs.examples(shape=(8, 10, 12), dtype="e" if mode == "mixed16" else "f")
    (eager, _), (captured, updater) = [
        test_gpu_graphs.train(device, capture, make=Reporting, mode=mode, data=data) for capture in (False, True)
    ]
    test_gpu_graphs.assert_same(captured, eager)
    assert updater._captured.num_graphs >= 1


class Listener:
    """Which gradients were announced, with their values at that moment."""

    def __init__(self, net):
        self.names = {p.node: name for name, p in net.namedparams()}
        self.params = dict(net.namedparams())
        self.expected, self.heard = set(), {}

    def expect(self, used):
        self.expected = {self.names[node] for node in used}

    def ready(self, node):
        name = self.names[node]
        assert name not in self.heard
        self.heard[name] = backend.to_cpu(self.params[name].grad).copy()


@pytest.mark.parametrize("mode", ["float32", "mixed16"])
def test_gradients_are_complete_when_they_are_announced(mode, sides):
    found = []
    for side in sides(mode):
        side.step()
        y, listener = side.forward(), Listener(side.net)
        side.net.cleargrads()
        backprop.backward([F.sum(y * y)], listener=listener)
        assert listener.heard.keys() == listener.expected == listener.params.keys()
        for name, value in listener.heard.items():
            np.testing.assert_array_equal(value, backend.to_cpu(listener.params[name].grad))
        found.append(list(listener.heard))
    links = [[name.split("/")[1] for name in found[0][k : k + 3]] for k in (0, 9)]
    assert [{*some} for some in links] == [{"bn4", "three"}, {"bn1", "one"}]
