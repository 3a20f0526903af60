"""Flat memory on the device: parameters and gradients are views of it, and moves take everything along."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from support import assert_same, is_on, put

import dbrdist
import dbrdist.functions as F
from dbrdist import Parameter
from dbrdist.core.array import backend
from dbrdist.core.model import flat
from dbrdist.optimizers import SGD, Adam, MomentumSGD


class Net(dbrdist.Chain):
    """Two layers and a persistent array."""

    def __init__(self, dtype=np.float32):
        super().__init__()
        with self.init_scope():
            self.W = Parameter(np.arange(1.0, 7.0).reshape(2, 3).astype(dtype))
            self.b = Parameter(np.array([2.0, -1.0], dtype))
            self.V = Parameter(np.full((2, 2), 0.5, dtype))
        self.add_persistent("seen", np.zeros(2, dtype))

    def forward(self, x):
        return F.sum(F.square(F.linear(F.relu(F.linear(x, self.W, self.b)), self.V)))


X = np.array([[1, 2, 3], [0.5, -1, 2]])


def pointer(a):
    return a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr


def lies_in(view, whole):
    start = pointer(view) - pointer(whole)
    return start >= 0 and start + view.nbytes <= whole.nbytes


def step(net, optimizer, x):
    optimizer.update(net, x)


def values(net):
    return {name: backend.to_cpu(p.array).copy() for name, p in net.namedparams()}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_parameters_and_gradients_are_views_of_one_buffer(dtype, device):
    dtype = backend.as_dtype(dtype)
    net = Net(dtype)
    before = values(net)
    net.to_device(device)
    (run,) = flat.runs(net.params())
    assert is_on(device, run.data) and is_on(device, run.grad)
    for name, p in net.namedparams():
        assert_same(device, p.array, before[name])
        assert lies_in(p.array, run.data) and lies_in(p.node.view, run.grad)
        assert (pointer(p.array) - pointer(run.data)) % 64 == (pointer(p.node.view) - pointer(run.grad)) % 64 == 0


def test_backward_writes_into_the_buffer_and_adds(device):
    net = Net().to_device(device)
    (run,) = flat.runs(net.params())
    x = put(device, X.astype(np.float32))
    net.cleargrads()
    net(x).backward()
    first = {name: backend.to_cpu(p.grad).copy() for name, p in net.namedparams()}
    assert all(p.grad is p.node.view and lies_in(p.grad, run.grad) for p in net.params())
    net(x).backward()
    for name, p in net.namedparams():
        assert_same(device, p.grad, 2 * first[name])
    host = Net()
    host(X.astype(np.float32)).backward()
    for name, p in host.namedparams():
        np.testing.assert_allclose(first[name], p.grad, rtol=1e-6)


def test_a_parameter_without_a_gradient_counts_as_gradient_zero(device):
    net = Net().to_device(device)
    optimizer = MomentumSGD(0.1).setup(net)
    before = values(net)
    net.W.grad = device.xp.ones((2, 3), np.float32)
    optimizer.update()
    assert_same(device, net.W.array, before["/W"] - np.float32(0.1), 1e-6)
    assert_same(device, net.b.array, before["/b"])
    assert_same(device, net.b.grad, np.zeros(2, np.float32))


@pytest.mark.parametrize("method", [SGD, MomentumSGD, Adam])
def test_a_link_moves_with_its_optimizer(method, device):
    """There after two steps, and back after two more: the numbers are those of a run that stayed on the host."""
    net, host = Net(np.float64), Net(np.float64)
    optimizer, reference = method(0.01).setup(net), method(0.01).setup(host)
    for place in ("@numpy", device, "@numpy", device):
        net.to_device(place)
        x = net.device.send(X)
        for _ in range(2):
            step(net, optimizer, x)
            step(host, reference, X)
        assert all(p.device == net.device for p in net.params())
        for name, p in host.namedparams():
            moved = dict(net.namedparams())[name]
            np.testing.assert_allclose(backend.to_cpu(moved.array), p.array, rtol=1e-12)
            for key, state in (moved.update_rule.state or {}).items():
                assert backend.device_of(state) == net.device
                np.testing.assert_allclose(backend.to_cpu(state), p.update_rule.state[key], rtol=1e-12, atol=1e-14)
    assert is_on(device, net.seen)


def test_assignment_copies_into_the_buffer(device):
    net = Net().to_device(device)
    (run,) = flat.runs(net.params())
    net.W.array = device.xp.full((2, 3), 7, np.float32)
    net.W.grad = device.xp.full((2, 3), 3, np.float32)
    assert lies_in(net.W.array, run.data) and lies_in(net.W.grad, run.grad)
    assert_same(device, run.data[:6], np.full(6, 7, np.float32))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_lie_on_the_device(copied, device, on):
    if on == "stand-in" and copied is not copy.deepcopy:
        pytest.skip("its module has no name to be imported by")
    net = Net().to_device(device)
    step(net, SGD(0.0).setup(net), put(device, X.astype(np.float32)))
    other = copied(net)
    for name, p in other.namedparams():
        assert is_on(device, p.array)
        assert pointer(p.array) != pointer(dict(net.namedparams())[name].array)
        assert_same(device, p.array, values(net)[name])


def test_a_late_parameter_is_made_on_the_device(device):
    p = Parameter(3.0)
    p.to_device(device)
    p.initialize((2, 2))
    assert_same(device, p.array, np.full((2, 2), 3, np.float32))


@pytest.mark.parametrize("mode", ["share", "copy", "init"])
def test_copies_of_a_link_stay_on_the_device(mode, device):
    net = dbrdist.Link()
    with net.init_scope():
        net.W = Parameter(3.0, (2, 2))
        net.late = Parameter(3.0)
    net.to_device(device)
    new = net.copy(mode)
    assert_same(device, new.W.array, np.full((2, 2), 3, np.float32))
    new.late.initialize((2,))
    assert_same(device, new.late.array, np.full(2, 3, np.float32))


def test_links_copy_between_host_and_device(device):
    host, there = Net(), Net().to_device(device)
    host.W.array[...] = 5
    host.seen[...] = 4
    there.copyparams(host)
    assert_same(device, there.W.array, np.full((2, 3), 5, np.float32))
    assert_same(device, there.seen, np.full(2, 4, np.float32))
    there.W.array[...] = 6
    host.copyparams(there)
    assert host.W.array[0, 0] == 6
    host.cleargrads()
    there.W.grad = device.xp.ones((2, 3), np.float32)
    host.W.addgrad(there.W)
    np.testing.assert_array_equal(host.W.grad, np.ones((2, 3)))
