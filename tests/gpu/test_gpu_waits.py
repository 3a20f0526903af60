"""Where the host does not wait for the device: in forward, backward and update."""

from __future__ import annotations

import contextlib
import gc

import numpy as np
import pytest
import stand_in
from support import put

import dbrdist.functions as F
import dbrdist.links as L
from dbrdist.core.array.backend import as_dtype
from dbrdist.core.model import reporter
from dbrdist.core.model.chain import Sequential
from dbrdist.core.tape.variable import Variable
from dbrdist.models import LeNet
from dbrdist.models.resnet import ResNet20
from dbrdist.optimizers import LARS, SGD, Adam, GradientClipping, GradientHardClipping, MomentumSGD, WeightDecay

NETS = {
    "MLP": (lambda: Sequential(L.Linear(6, 5), F.relu, L.Linear(5, 3)), (4, 6)),
    "LeNet": (lambda: LeNet(3, channels=(4, 6), units=16, dropout=0.5), (4, 1, 12, 12)),
    "ResNet-20": (lambda: ResNet20(3), (4, 3, 16, 16)),
}


@pytest.mark.parametrize("method", [SGD, MomentumSGD, Adam, LARS])
@pytest.mark.parametrize("name", NETS)
def test_a_step(name, method, device, no_waits, rng):
    """After a first step, which initialises and plans."""
    make, shape = NETS[name]
    net = make().to_device(device)
    optimizer = method().setup(net)
    optimizer.add_hook(WeightDecay(1e-4))
    optimizer.add_hook(GradientHardClipping(-1, 1))
    optimizer.add_hook(GradientClipping(1.0))
    x, t = put(device, rng.standard_normal(shape).astype(np.float32), np.array([0, 1, 2, 1], np.int32))

    def loss():
        return F.softmax_cross_entropy(net(x), t)

    optimizer.update(loss)
    with no_waits():
        for _ in range(2):
            optimizer.update(loss)
        gc.collect()


def test_reporting_a_loss(device, no_waits, rng):
    """Reports keep numbers on the device until somebody reads them."""
    net = L.Classifier(L.Linear(6, 3)).to_device(device)
    optimizer = SGD().setup(net)
    observer = reporter.Reporter()
    observer.add_observer("main", net)
    x, t = put(device, rng.standard_normal((4, 6)).astype(np.float32), np.array([0, 1, 2, 1], np.int32))
    optimizer.update(net, x, t)
    with no_waits(), observer.scope({}):
        optimizer.update(net, x, t)


def test_scaled_loss(device, no_waits, rng):
    """A fixed scale needs no look at the gradients."""
    net = L.Linear(6, 3).to_device(device)
    optimizer = SGD().setup(net)
    optimizer.set_loss_scale(128.0)
    x = put(device, rng.standard_normal((4, 6)).astype(np.float32))
    optimizer.update(lambda: F.sum(net(x)))
    with no_waits():
        optimizer.update(lambda: F.sum(net(x)))


LOSSES = {
    "labels to be ignored": (lambda x, t: F.softmax_cross_entropy(x, t), (4, 5)),
    "weights and smoothing": (
        lambda x, t: F.softmax_cross_entropy(x, t, class_weight=x.array[0] * x.array[0], label_smoothing=0.1), (4, 5)
    ),
    "a loss for each": (lambda x, t: F.sum(F.softmax_cross_entropy(x, t, reduce="no")), (4, 5)),
    "pixels": (lambda x, t: F.softmax_cross_entropy(x, x.xp.broadcast_to(t[:, None, None], (4, 2, 3))), (4, 5, 2, 3)),
    "largest of windows": (lambda x, t: F.sum(F.max_pooling_2d(x, 2)), (4, 5, 4, 4)),
    "places in windows": (lambda x, t: F.sum(F.max_pooling_nd(x, 2, return_indices=True)[0]), (4, 2, 4, 4, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_forward_and_backward(name, device, no_waits, rng):
    """Also with labels to be ignored, which a mask marks."""
    loss, shape = LOSSES[name]
    x, t = put(device, rng.standard_normal(shape).astype(np.float32), np.array([0, 2, -1, 1], np.int32))

    def step():
        v = Variable(x)
        loss(v, t).backward()
        return v.grad

    step()
    with no_waits():
        step()


def test_adam_without_eps(device, no_waits, xp):
    """The elements that had no gradient so far are found by a mask."""
    net = L.Linear(6, 3).to_device(device)
    optimizer = Adam(eps=0).setup(net)
    for _ in range(2):
        for p in net.params():
            p.grad = xp.ones(p.shape, p.dtype)
        with no_waits() if optimizer.t else contextlib.nullcontext():
            optimizer.update()


def test_a_dynamic_loss_scale_waits_once(device, on, xp):
    """For one look at all gradients, however many there are."""
    if on != "stand-in":
        pytest.skip("the stand-in counts")
    net = Sequential(*[L.Linear(3, 3) for _ in range(5)]).to_device(device)
    optimizer = SGD().setup(net)
    optimizer.loss_scaling()
    for _ in range(3):
        for p in net.params():
            p.grad = xp.ones(p.shape, p.dtype)
        before = stand_in.waits.count
        optimizer.update()
        assert stand_in.waits.count == before + 1


def test_what_waits_is_found(device, no_waits, on, xp):
    """The check itself: a number read from the device."""
    if on == "numpy":
        pytest.skip("nothing waits on the host")
    with pytest.raises(RuntimeError), no_waits():
        float(xp.ones(()))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_updates_in_float32(dtype, device, no_waits, xp):
    """With a hook in Chainer's form too, after which the 16-bit values are compared with those before."""

    def looks(rule, p):
        pass

    looks.call_for_each_param = True
    net = L.Linear(6, 3).to_device(device)
    for p in net.params():
        p.array = p.array.astype(as_dtype(dtype))
    optimizer = MomentumSGD().setup(net)
    optimizer.use_fp32_update()
    optimizer.add_hook(looks, name="looks")
    optimizer.add_hook(WeightDecay(1e-4))
    for p in net.params():
        p.grad = xp.ones(p.shape, p.dtype)
    optimizer.update()
    with no_waits():
        for p in net.params():
            p.grad = xp.ones(p.shape, p.dtype)
        optimizer.update()
