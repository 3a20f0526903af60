"""With mixed16 and mixedbf16 matrices are multiplied in 16 bits, forward and backward, also after an embedding."""

from __future__ import annotations

import numpy as np
import pytest
from support import put

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Variable, using_config
from dbrdist.core.array import backend


@pytest.fixture
def products(on, xp, monkeypatch):
    """The types of the operands of all products of two matrices that the provider ``cuda`` asks CuPy for."""
    if on != "host-cuda":
        pytest.skip("arrays of the host show what is multiplied")
    seen = []

    def dot(self, b, out=None):
        seen.append((self.dtype.name, b.dtype.name))
        y = np.dot(np.asarray(self), np.asarray(b), out)
        return y.view(xp.ndarray) if out is None else out

    monkeypatch.setattr(xp.ndarray, "dot", dot, raising=False)
    return seen


KINDS = {"mixed16": ("float16", 2.0**-9), "mixedbf16": ("bfloat16", 2.0**-6)}
IDS = np.random.default_rng(0).integers(0, 7, (4, 5)).astype(np.int32)
NETS = {
    "Linear": (lambda: L.Linear(6, 3), lambda net, e: net(e[:, 0])),
    "LSTM": (lambda: L.LSTM(6, 3), lambda net, e: net(e[:, 0]) + net(e[:, 1])),
    "StatefulGRU": (lambda: L.StatefulGRU(6, 3), lambda net, e: net(e[:, 0]) + net(e[:, 1])),
    "NStepLSTM": (lambda: L.NStepLSTM(2, 6, 3, 0.0), lambda net, e: F.concat(net(None, None, [e[0], e[1]])[2], 0)),
    "TransformerBlock": (lambda: L.TransformerBlock(6, 2, dropout=0.0), lambda net, e: net(e)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NETS)
def test_layers_after_an_embedding(name, kind, products, device):
    make, call = NETS[name]
    narrow, _ = KINDS[kind]
    with using_config("dtype", getattr(dbrdist, kind)):
        embed, net = L.EmbedID(7, 6).to_device(device), make().to_device(device)
        rows = embed(put(device, IDS))
        y = call(net, rows)
        net.cleargrads()
        embed.cleargrads()
        F.sum(F.cast(y, np.float32) ** 2).backward()
    assert {rows.dtype.name, y.dtype.name} == {narrow}
    assert {p.grad.dtype.name for link in (embed, net) for p in link.params()} == {"float32"}
    if name != "NStepLSTM":  # whose arrays of the host take the way of the host here
        assert products
    assert set(products) <= {(narrow, narrow)}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_linear_layer(kind, device, rng):
    narrow, tolerance = KINDS[kind]
    x, gy = (rng.standard_normal(shape).astype(backend.as_dtype(narrow)) for shape in ((16, 8), (16, 5)))
    W, b = rng.standard_normal((5, 8)).astype(np.float32), np.zeros(5, np.float32)
    vx, vW, vb = (Variable(a) for a in put(device, x, W, b))
    y = F.linear(vx, vW, vb)
    y.grad = put(device, gy)
    y.backward()
    wide = [a.astype(np.float64) for a in (x, W.astype(x.dtype), gy)]
    for found, exact in ((vx, wide[2] @ wide[1]), (vW, wide[2].T @ wide[0]), (vb, wide[2].sum(0))):
        error = abs(backend.to_cpu(found.grad).astype(np.float64) - exact).max()
        assert error <= 2 * tolerance * abs(exact).max()


@pytest.mark.parametrize("kind", KINDS)
def test_training_a_table(kind, device):
    """The table itself is float32, and so is its gradient; ignored ids give zeros and none."""
    with using_config("dtype", getattr(dbrdist, kind)):
        embed = L.EmbedID(5, 3, ignore_label=-1).to_device(device)
        y = embed(put(device, np.array([1, -1, 1], np.int32)))
        F.sum(y).backward()
    assert embed.W.dtype == np.float32 and not backend.to_cpu(y.array)[1].any()
    assert backend.to_cpu(embed.W.grad).tolist() == [[0] * 3, [2] * 3, *[[0] * 3] * 3]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_a_recurrent_layer(kind, on, xp, device, monkeypatch):
    if on != "stand-in":
        pytest.skip("the stand-in shows what is multiplied")
    narrow, seen, dot = KINDS[kind][0], [], xp.ndarray.dot

    def seen_dot(self, b, out=None):
        seen.append((self.dtype.name, b.dtype.name))
        return dot(self, b, out)

    for make in (lambda: L.NStepLSTM(2, 6, 3, 0.0), lambda: L.NStepBiGRU(1, 6, 3, 0.0)):
        with using_config("dtype", getattr(dbrdist, kind)):
            net, embed = make().to_device(device), L.EmbedID(7, 6).to_device(device)
            e = embed(put(device, IDS))
            states = [None] * (2 if isinstance(net, L.NStepLSTM) else 1)
            with monkeypatch.context() as patch:
                patch.setattr(xp.ndarray, "dot", seen_dot)
                ys = net(*states, [e[0], e[1]])[-1]
                F.sum(F.cast(F.concat(ys, 0), np.float32)).backward()
    steps = [pair for pair in seen if "float32" not in pair]
    assert len(steps) > 20 and set(steps) == {(narrow, narrow)}
    assert sum("float32" in pair for pair in seen) <= 6  # of the formula that takes the place of the kernel of Linear
