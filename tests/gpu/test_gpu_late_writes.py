"""Gradients of convolutions' weights, which are written in one launch at the end of backward: ``--on whole``."""

from __future__ import annotations

import numpy as np
import pytest
from support import images, put

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import optimizers, using_config
from dbrdist.core.array import backend

KINDS = ["float32", "mixed16", "mixedbf16"]


class Net(dbrdist.Chain):
    """Convolutions of several kinds; the first one is used twice where ``again``."""

    def __init__(self, again=False):
        super().__init__()
        self.again = again
        with self.init_scope():
            self.same = L.Convolution2D(8, 8, 3, pad=1)
            self.groups = L.Convolution2D(8, 12, 3, pad=1, groups=2)
            self.point = L.Convolution2D(12, 5, 1)
            self.few = L.Convolution2D(5, 4, 2)

    def forward(self, x):
        h = self.same(x)
        if self.again:
            h = self.same(F.tanh(h))
        return F.sum(self.few(F.tanh(self.point(F.tanh(self.groups(h))))) ** 2)


def gradients(device, mode, again=False, hook=None, backward=lambda loss: loss.backward()):
    dtype = np.dtype(mode) if mode == "float32" else mode
    with using_config("dtype", dtype):
        net = Net(again)
        numbers = np.random.default_rng(1)
        for _, p in sorted(net.namedparams()):
            p.array[...] = numbers.standard_normal(p.shape) / max(p.size // len(p), 1) ** 0.5
        optimizers.SGD().setup(net.to_device(device))
        x = images(np.random.default_rng(2), (2, 8, 6, 7), {"mixed16": np.float16}.get(mode, np.float32))
        if mode == "mixedbf16":
            x = x.astype(backend.as_dtype("bfloat16"))
        net.cleargrads()
        loss = net(put(device, x))
        if hook is None:
            backward(loss)
        else:
            with hook:
                backward(loss)
        return {name: backend.to_cpu(p.grad).astype("d") for name, p in net.namedparams()}


def compare(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, g in found.items():
        np.testing.assert_allclose(g, expected[name], rtol=0, atol=tolerance * abs(expected[name]).max(), err_msg=name)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("mode", KINDS)
def test_gradients_are_those_of_the_host(mode, again, device, launched):
    found = gradients(device, mode, again)
    names = launched()
    assert names.count("all_to_plain") == 1 and ("to_plain" in names) == again
    compare(found, gradients(backend.get_device("@numpy"), "float32", again), {"float32": 1e-5}.get(mode, 0.1))


def test_a_hook_has_each_written_at_once(device, launched):
    found = gradients(device, "mixed16", hook=dbrdist.FunctionHook())
    assert launched().count("all_to_plain") == 4
    compare(found, gradients(device, "mixed16"), 5e-3)  # engines add in any order


def test_double_backprop_and_two_passes(device, launched):
    def twice(loss):
        loss.backward()
        loss.backward()

    once = gradients(device, "float32")
    compare(gradients(device, "float32", backward=twice), {k: 2 * g for k, g in once.items()}, 1e-5)
    higher = gradients(device, "float32", backward=lambda loss: loss.backward(enable_double_backprop=True))
    compare(higher, once, 1e-5)
