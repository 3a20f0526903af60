"""Convolution, normalization, addition and ReLU as one function on a device: the bits of the separate calls.

Plans of blocks are kept by what they depend on: whatever changes between calls, the next one must be that of new
links. So each case changes something in a trained network and compares it with separate calls of a copy.
"""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest
from support import images, put

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Chain, optimizers, using_config
from dbrdist.core.array import backend
from dbrdist.functions.residual import NormalizedConvolution
from dbrdist.links import convolution_bn

SHAPE = (4, 8, 12, 14)


class Net(Chain):
    """Blocks of each kind: rectified, with a projection of stride 2, and with the input itself as residual."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.one, self.bn1 = L.Convolution2D(8, 16, 3, pad=1, nobias=True), L.BatchNormalization(16)
            self.two, self.bn2 = L.Convolution2D(16, 16, 1, 2, nobias=True), L.BatchNormalization(16)
            self.side, self.bn3 = L.Convolution2D(16, 16, 1, 2, nobias=True), L.BatchNormalization(16)
            self.three, self.bn4 = L.Convolution2D(16, 16, 3, pad=1, nobias=True), L.BatchNormalization(16)

    def forward(self, x):
        h = L.conv_bn(self.one, self.bn1, x, relu=True)
        h = L.conv_bn(self.two, self.bn2, h, relu=True, residual=lambda: L.conv_bn(self.side, self.bn3, h))
        return L.conv_bn(self.three, self.bn4, h, relu=True, residual=h)


def made(device, mode):
    numbers = np.random.default_rng(3)
    with using_config("dtype", mode if mode == "mixed16" else np.dtype(mode)):
        net = Net()
    for _, p in sorted(net.namedparams()):
        p.array[...] = numbers.standard_normal(p.shape) / (2 if p.ndim == 1 else 6)
    return net.to_device(device)


def drawn(device, mode, shape=SHAPE, seed=5):
    return put(device, images(np.random.default_rng(seed), shape, np.float16 if mode == "mixed16" else mode))


def kinds(y):
    """How many functions of each class are behind an output."""
    names, stack, seen = [], [y.creator], set()
    while stack:
        function = stack.pop()
        if function is not None and id(function) not in seen:
            seen.add(id(function))
            names.append(type(function).__name__)
            stack += [node.creator for node in function.inputs]
    return names


class Side:
    """A network in training, in blocks or by separate calls."""

    def __init__(self, device, mode, is_separate, monkeypatch, setup=True):
        self.device, self.mode, self.is_separate, self.monkeypatch = device, mode, is_separate, monkeypatch
        self.x, self.net = drawn(device, mode), made(device, mode)
        self.optimizer = optimizers.MomentumSGD(0.01).setup(self.net) if setup else None
        self.names = []

    def forward(self):
        with self.monkeypatch.context() as m:
            if self.is_separate:
                m.setattr(convolution_bn, "_is_training", lambda conv, bn: False)
            y = self.net(self.x)
        self.names = kinds(y)
        return y

    def found(self, *more):
        """What is in the network."""
        values = [None if p.grad is None else p.grad for _, p in sorted(self.net.namedparams())]
        values += [p.array for _, p in sorted(self.net.namedparams())]
        links = [link for _, link in sorted(self.net.namedlinks())]
        values += [getattr(link, n) for link in links for n in link._persistent]
        return [backend.to_cpu(a) if backend.is_array(a) else a for a in (*more, *values)]

    def step(self):
        y = self.forward()
        self.net.cleargrads()
        F.sum(y * y).backward()
        before = self.found(y.array, *([self.x.grad] if isinstance(self.x, dbrdist.Variable) else []))
        if self.optimizer is not None:
            self.optimizer.update()
        return before


@pytest.fixture
def sides(device, on, monkeypatch):
    if on != "whole":
        pytest.skip("runs with --on whole")
    with using_config("cudnn_deterministic", True):
        yield lambda *args, **kwargs: [Side(device, *args, k, monkeypatch, **kwargs) for k in (False, True)]


def assert_same_bits(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert type(a) is type(b)
        np.testing.assert_array_equal(a, b, strict=isinstance(a, np.ndarray))


BLOCKS = sorted(["NormalizedConvolution"] + 3 * ["RectifiedConvolution"])


@pytest.mark.parametrize("setup", [True, False])
@pytest.mark.parametrize("mode", ["float32", "float16", "mixed16"])
def test_steps_have_the_bits_of_separate_calls(mode, setup, sides):
    block, separate = sides(mode, setup=setup)
    for _ in range(3):
        assert_same_bits(block.step(), separate.step())
        assert sorted(block.names) == BLOCKS
        assert not {*separate.names} & {*BLOCKS}


# ---- changes between two steps: what each does to a side; whether blocks go on


def _batch(side):
    side.x = drawn(side.device, side.mode, (3, *SHAPE[1:]))


def _size(side):
    side.x = drawn(side.device, side.mode, (4, 8, 15, 14))


def _small(side):
    side.x = drawn(side.device, side.mode, (2, 8, 4, 3))


def _planar(side):
    side.x = side.device.xp.asarray(np.ascontiguousarray(backend.to_cpu(side.x)))
    assert side.x.flags.c_contiguous


def _misaligned(side):
    wide = drawn(side.device, side.mode, (4, 9, 12, 14))
    side.x = wide[:, 1:]


def _type(side):
    side.x = drawn(side.device, "float16")


def _wider_type(side):
    side.x = drawn(side.device, "float64")


def _gradient_of_images(side):
    side.x = dbrdist.Variable(side.x)


def _assigned(side):
    for p in side.net.params():
        p.array = p.array * 2


def _replaced(side):
    W = side.net.one.W
    with side.net.one.init_scope():
        side.net.one.W = dbrdist.Parameter(-W.array)
    side.optimizer = optimizers.MomentumSGD(0.01).setup(side.net)


def _plain_weights(side):
    W = dbrdist.Variable(side.net.one.W.array * 2)
    del side.net.one.W
    side.net.one.W = W


def _frozen(side):
    for link in (side.net.one, side.net.bn2, side.net.side):
        link.disable_update()


def _statistics(side):
    side.net.bn1.avg_mean = side.net.bn1.avg_mean + 1
    side.net.bn2.avg_var = side.net.bn2.avg_var.astype("d")


def _numbers(side):
    side.net.bn1.eps, side.net.bn2.decay, side.net.bn4.decay = 0.5, 0.25, 0.0


def _geometry(side):
    side.net.two.stride, side.net.side.stride, side.net.three.pad = (1, 1), (1, 1), (2, 2)
    side.net.three.dilate = (2, 2)


def _without_scale(side):
    with side.net.init_scope():
        side.net.bn1 = L.BatchNormalization(16, use_gamma=False).to_device(side.device)
    side.optimizer = optimizers.MomentumSGD(0.01).setup(side.net)


def _axis(side):
    side.net.bn1.axis = (0, 2, 3)


def _last_batch(side):
    L.use_last_batch(side.net)


def _shared(side):
    side.net.three, side.net.bn4 = side.net.three, side.net.bn4
    forward = Net.forward

    def twice(x):
        h = forward(side.net, x)
        return L.conv_bn(side.net.three, side.net.bn4, h, relu=True, residual=h)

    side.net.forward = twice


def _deep_copy(side):
    side.net = copy.deepcopy(side.net)
    side.optimizer = optimizers.MomentumSGD(0.01).setup(side.net)


def _pickled(side):
    side.net = pickle.loads(pickle.dumps(side.net))
    side.optimizer = optimizers.MomentumSGD(0.01).setup(side.net)


def _to_host_and_back(side):
    side.net.to_device("@numpy")
    side.net.to_device(side.device)


def _failing(side):
    good, side.x = side.x, drawn(side.device, side.mode, (4, 7, 12, 14))
    with pytest.raises(ValueError, match=r"one \(Convolution2D\): convolution_2d: x: expected shape \(N, 8, H, W\)"):
        side.forward()
    side.x = good


def _kept_gradients(side):
    side.net.cleargrads()
    for _ in range(2):
        F.sum(side.forward()).backward()


def _cleared_to_none(side):
    y = side.forward()
    side.net.cleargrads()
    y.unchain_backward()
    del y


GO_ON = [_batch, _size, _planar, _misaligned, _type, _gradient_of_images, _assigned, _replaced, _frozen, _statistics,
         _numbers, _geometry, _axis, _shared, _deep_copy, _pickled, _to_host_and_back, _failing, _kept_gradients,
         _cleared_to_none]  # fmt: skip
IN_PART = [_small, _wider_type, _plain_weights, _without_scale, _last_batch]


@pytest.mark.parametrize("change", GO_ON + IN_PART, ids=lambda f: f.__name__)
def test_changes_between_steps(change, sides):
    block, separate = sides("float32")
    for side in (block, separate):
        side.step()
        change(side)
    for _ in range(2):
        assert_same_bits(block.step(), separate.step())
    if change in GO_ON and change is not _shared:
        assert sorted(block.names) == BLOCKS


@pytest.mark.parametrize(
    "switch, value",
    [("use_cudnn", "never"), ("use_cudnn_tensor_core", "always"), ("debug", True)],
)
@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_switches(switch, value, when, sides):
    results = []
    for side in sides("float32"):
        side.step()
        with using_config(switch, value if when == "before" else getattr(dbrdist.config, switch)):
            y = side.forward()
            side.net.cleargrads()
            with using_config(switch, value if when == "between" else getattr(dbrdist.config, switch)):
                F.sum(y * y).backward()
        results.append(side.found(y.array) + side.step())
    assert_same_bits(*results)


class Notes(dbrdist.FunctionHook):
    name = "notes"

    def __init__(self):
        self.forward, self.backward = [], []

    def forward_postprocess(self, function, in_data):
        self.forward.append(function.label)

    def backward_postprocess(self, function, in_data, out_grad):
        self.backward.append(function.label)


class LinkNotes(dbrdist.LinkHook):
    name = "link notes"

    def __init__(self):
        self.called = []

    def forward_postprocess(self, args):
        self.called.append(args.link.name)


def test_hooks_see_the_separate_calls(sides):
    block, _ = sides("float32")
    block.step()
    with Notes() as notes:
        block.step()
    assert notes.forward.count("Convolution2D") == notes.backward.count("Convolution2D") == 4
    with LinkNotes() as notes:
        block.step()
    assert set(notes.called) >= {"one", "bn1", "two", "bn2", "side", "bn3", "three", "bn4"}
    notes = LinkNotes()
    block.net.bn1.add_hook(notes)
    block.step()
    assert notes.called == ["bn1"]
    assert block.names.count("Convolution2D") == 1  # the other blocks go on
    block.net.bn1.delete_hook(notes.name)
    block.step()
    assert sorted(block.names) == BLOCKS


def test_a_hook_of_backward_alone_sees_finite_gradients(sides):
    results = []
    for side in sides("float32"):
        side.step()
        y = side.forward()
        side.net.cleargrads()
        with Notes() as notes:
            F.sum(y * y).backward()
        results.append(side.found(y.array))
    assert_same_bits(*results)
    assert "ReLU" in notes.backward


def test_a_method_of_the_program_is_called(sides):
    block, _ = sides("float32")
    block.step()
    calls = []
    forward = block.net.bn1.forward
    block.net.bn1.forward = lambda x: calls.append(x) or forward(x)
    block.step()
    assert len(calls) == 1


class Scaled(L.BatchNormalization):
    def forward(self, x):
        return super().forward(x) * 2.0


def test_a_subclass_is_called(sides):
    block, separate = sides("float32", setup=False)
    for side in (block, separate):
        side.net.bn1.__class__ = Scaled
    assert_same_bits(block.step(), separate.step())
    assert block.names.count("NormalizedConvolution") + block.names.count("RectifiedConvolution") == 3


def test_another_thread_goes_backward(sides):
    results = []
    for side in sides("float32"):
        side.step()
        y = side.forward()
        side.net.cleargrads()
        loss = F.sum(y * y)

        def backward(loss=loss):
            with using_config("cudnn_deterministic", True):
                loss.backward()

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        assert all(p.grad is not None for p in side.net.params())
        results.append(side.found(y.array) + side.step())
    assert_same_bits(*results)


def test_backward_twice_and_of_two_losses(sides):
    results = []
    for side in sides("float32"):
        side.step()
        y = side.forward()
        side.net.cleargrads()
        (F.sum(y * y) + F.sum(y * 3.0)).backward()
        F.sum(y).backward()
        results.append(side.found(y.array))
    assert_same_bits(*results)


def test_second_derivatives(sides):
    results = []
    for side in sides("float32"):
        side.step()
        y, params = side.forward(), list(side.net.params())
        grads = dbrdist.grad([F.sum(y * y)], params, enable_double_backprop=True)
        side.net.cleargrads()
        sum(F.sum(g * g) for g in grads).backward()
        results.append(side.found(y.array, *[g.array for g in grads]))
    for a, b in zip(*results):  # more than two gradients of a variable are added in another order
        np.testing.assert_allclose(a, b, 0, 1e-5 * np.abs(b).max())


def test_statistics_of_evaluation_stay(sides):
    results = []
    for side in sides("float32"):
        side.step()
        with using_config("train", False):
            y = side.forward()
        with dbrdist.no_backprop_mode():
            z = side.forward()
        results.append(side.found(y.array, z.array) + side.step())
    assert_same_bits(*results)


def test_forgotten_blocks_are_computed_again(sides):
    results = []
    for side in sides("float32"):
        side.step()
        x = dbrdist.Variable(side.x)
        with side.monkeypatch.context() as m:
            if side.is_separate:
                m.setattr(convolution_bn, "_is_training", lambda conv, bn: False)
            y = F.forget(side.net, x)
            side.net.cleargrads()
            F.sum(y * y).backward()
        results.append(side.found(y.array, x.grad))
    assert_same_bits(*results)


def test_gradients_in_flat_memory_are_written_by_the_plan(sides, monkeypatch):
    """So that the cases above have compared plans: here the separate kernels are not asked."""
    block, _ = sides("mixed16")
    block.step()
    monkeypatch.setattr(NormalizedConvolution, "_by_parts", None)
    monkeypatch.setattr(NormalizedConvolution, "_forward_by_parts", None)
    block.step()
