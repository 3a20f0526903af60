"""Recurrent links against their formulas in NumPy; states; sequences in any order."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Variable, serializers
from dbrdist.links import rnn

N, I, U = 3, 4, 2
RNG = np.random.default_rng(0)
X = [RNG.standard_normal((N, I)).astype(np.float32) for _ in range(3)]


def s(z):
    return 1 / (1 + np.exp(-z))


def close(got, wanted, **more):
    np.testing.assert_allclose(getattr(got, "array", got), wanted, rtol=2e-5, atol=1e-6, **more)


def weights(link, *names):
    found = []
    for name in names:
        child = getattr(link, name)
        found.append(child.W.array)
        if child.b is not None:
            found.append(child.b.array)
    return found


def lstm_step(link, c, h, x, peeps=None):
    W, b, V = weights(link, "upward", "lateral")
    gates = (x @ W.T + b + h @ V.T).reshape(len(x), U, 4)
    a, i, f, o = (gates[:, :, k] for k in range(4))
    if peeps:
        i, f = i + c @ peeps[0].T, f + c @ peeps[1].T
    c = s(i) * np.tanh(a) + s(f) * c
    if peeps:
        o = o + c @ peeps[2].T
    return c, s(o) * np.tanh(c)


def test_lstm_keeps_its_state():
    link = L.LSTM(I, U)
    c = h = np.zeros((N, U))
    for x in X:
        c, h = lstm_step(link, c, h, x)
        close(link(x), h)
        close(link.c, c)
        close(link.h, h)
    link.reset_state()
    assert link.c is None and link.h is None
    close(link(X[0]), lstm_step(link, np.zeros((N, U)), np.zeros((N, U)), X[0])[1])
    link.set_state(c, h)
    close(link(X[0]), lstm_step(link, c, h, X[0])[1])


def test_lstm_with_a_falling_number_of_examples():
    link = L.LSTM(I, U)
    link(X[0])
    c, h = link.c.array.copy(), link.h.array.copy()
    y = link(X[1][:1])
    wanted = lstm_step(link, c[:1], h[:1], X[1][:1])
    assert y.shape == (1, U)
    close(link.c, np.concatenate([wanted[0], c[1:]]))
    close(link.h, np.concatenate([wanted[1], h[1:]]))
    link.reset_state()
    link(X[0][:1])
    with pytest.raises(ValueError, match=r"LSTM: x: expected at most 1 examples, as in the call before"):
        link(X[0])


def test_stateless_lstm():
    link = L.StatelessLSTM(I, U)
    c, h = link(None, None, X[0])
    wanted = lstm_step(link, np.zeros((N, U)), np.zeros((N, U)), X[0])
    close(c, wanted[0])
    close(h, wanted[1])
    close(link(c, h, X[1])[1], lstm_step(link, *wanted, X[1])[1])


def test_lstm_initial_values():
    link = L.LSTM(I, U)
    b = link.upward.b.array.reshape(U, 4)
    np.testing.assert_array_equal(b, [[0, 0, 1, 0]] * U)
    assert len(np.unique(link.upward.W.array)) == 4 * U * I and link.lateral.b is None
    link = L.LSTM(I, U, lateral_init=2.0, upward_init=3.0, bias_init=4.0, forget_bias_init=5.0)
    np.testing.assert_array_equal(link.upward.b.array.reshape(U, 4), [[4, 4, 5, 4]] * U)
    assert (link.lateral.W.array == 2).all() and (link.upward.W.array == 3).all()
    orthogonal = L.LSTM(U, U, lateral_init=dbrdist.initializers.Orthogonal(1.0)).lateral.W.array.reshape(4, U, U)
    for gate in orthogonal:
        close(gate @ gate.T, np.eye(U))


@pytest.mark.parametrize("make", [lambda: L.LSTM(None, U), lambda: L.LSTM(U), lambda: L.StatelessLSTM(U)])
def test_lstm_takes_its_input_size_from_the_first_input(make):
    dbrdist.random.set_seed(3)
    link = make()
    assert not link.upward.W.is_initialized
    y = link(X[0]) if isinstance(link, L.LSTM) else link(None, None, X[0])[1]
    assert y.shape == (N, U) and link.upward.W.shape == (4 * U, I) and link.upward.W.array.any()
    with pytest.raises(ValueError, match="out_size: expected a number of units"):
        L.LSTM(None)


def test_peepholes():
    link = L.StatefulPeepholeLSTM(I, U)
    peeps = weights(link, "peep_i", "peep_f", "peep_o")
    assert len(peeps) == 3
    c = h = np.zeros((N, U))
    for x in X:
        c, h = lstm_step(link, c, h, x, peeps)
        close(link(x), h)


def test_zoneout():
    link, plain = L.StatefulZoneoutLSTM(I, U, c_ratio=0.0, h_ratio=0.0), L.LSTM(I, U)
    plain.copyparams(link)
    for x in X:
        close(link(x), plain(x).array)
    stuck = L.StatefulZoneoutLSTM(I, U, c_ratio=1.0, h_ratio=1.0)
    assert (stuck(X[0]).array == 0).all() and (stuck.c.array == 0).all()
    mixed = L.StatefulZoneoutLSTM(I, U, c_ratio=0.25, h_ratio=0.5)
    with dbrdist.using_config("train", False):
        y = mixed(X[0]).array
    c, h = lstm_step(mixed, np.zeros((N, U)), np.zeros((N, U)), X[0])
    close(mixed.c, 0.75 * c)
    close(y, 0.5 * h)


def gru_step(link, h, x):
    W_r, b, U_r, d, W_z, e, U_z, g, W, p, V, q = weights(link, "W_r", "U_r", "W_z", "U_z", "W", "U")
    r, z = s(x @ W_r.T + b + h @ U_r.T + d), s(x @ W_z.T + e + h @ U_z.T + g)
    return (1 - z) * h + z * np.tanh(x @ W.T + p + (r * h) @ V.T + q)


@pytest.mark.parametrize("make", [L.GRU, L.StatefulGRU])
def test_gru(make):
    link = make(I, U)
    h = np.zeros((N, U))
    for x in X:
        h = gru_step(link, h, x)
        close(link(x), h)
    link.reset_state()
    link.set_state(h)
    close(link(x=X[0]), gru_step(link, h, X[0]))
    with pytest.raises(TypeError, match=r"2 arguments|takes 2 positional"):
        link(h, X[0])
    stateless = L.StatelessGRU(I, U, bias_init=0.5)
    assert (stateless.U_z.b.array == 0.5).all()
    h = RNG.standard_normal((N, U)).astype(np.float32)
    close(stateless(h, X[0]), gru_step(stateless, h, X[0]))
    lazy = L.StatelessGRU(None, U)
    assert lazy(None, X[0]).shape == (N, U)


def test_mgu():
    def step(link, h, x):
        W_f, b, W_h, d = weights(link, "W_f", "W_h")
        f = s(np.concatenate([h, x], 1) @ W_f.T + b)
        return (1 - f) * h + f * np.tanh(np.concatenate([f * h, x], 1) @ W_h.T + d)

    link = L.StatefulMGU(I, U)
    h = np.zeros((N, U))
    for x in X:
        h = step(link, h, x)
        close(link(x), h)
    link.set_state(2 * h)
    close(link(X[0]), step(link, 2 * h, X[0]))
    close(L.StatelessMGU(I, U)(h.astype("f"), X[0]).shape, (N, U))


def test_trees_whose_children_are_summed():
    link = L.ChildSumTreeLSTM(I, U)
    W, b, V, Vf = weights(link, "W_x", "W_h_aio", "W_h_f")
    cs, hs = RNG.standard_normal((2, 3, N, U)).astype(np.float32)
    for n in (0, 1, 3):
        a, i, o, f = np.split(X[0] @ W.T + b, 4, axis=1)
        da, di, do = np.split(sum(hs[:n], np.zeros((N, U))) @ V.T, 3, axis=1)
        c = np.tanh(a + da) * s(i + di) + sum(c * s(f + h @ Vf.T) for c, h in zip(cs[:n], hs))
        found = link(*cs[:n], *hs[:n], X[0])
        close(found[0], c)
        close(found[1], s(o + do) * np.tanh(c))
    with pytest.raises(TypeError, match="as many cells as outputs"):
        link(cs[0], X[0])


def test_trees_with_children_in_order():
    link = L.NaryTreeLSTM(I, U, n_ary=2)
    W, b, V1, V2 = weights(link, "W_x", "W_h1", "W_h2")
    cs, hs = RNG.standard_normal((2, 2, N, U)).astype(np.float32)
    for missing in (False, True):
        c2, h2 = (None, None) if missing else (cs[1], hs[1])
        gates = X[0] @ W.T + b + hs[0] @ V1.T + (0 if missing else h2 @ V2.T)
        a, i, o, f1, f2 = np.split(gates, 5, axis=1)
        c = np.tanh(a) * s(i) + cs[0] * s(f1) + (0 if missing else c2 * s(f2))
        found = link(cs[0], c2, hs[0], h2, X[0])
        close(found[0], c)
        close(found[1], s(o) * np.tanh(c))
    with pytest.raises(TypeError, match="expected 2 cells, 2 outputs and x, got 3 arguments"):
        link(cs[0], hs[0], X[0])
    with pytest.raises(ValueError, match="n_ary: expected at least 1"):
        L.NaryTreeLSTM(I, U, 0)


@pytest.mark.parametrize("make", [
    lambda: L.LSTM(I, U), lambda: L.StatefulGRU(I, U), lambda: L.StatefulMGU(I, U),
    lambda: L.StatefulPeepholeLSTM(I, U), lambda: L.StatefulZoneoutLSTM(I, U, 0.0, 0.0),
])  # fmt: skip
def test_links_are_saved_copied_and_brought_to_a_device(make, tmp_path):
    link, other = make(), make()
    y = link(X[0]).array
    serializers.save_npz(tmp_path / "link.npz", link)
    serializers.load_npz(tmp_path / "link.npz", other)
    np.testing.assert_array_equal(other(X[0]).array, y)
    twin = copy.deepcopy(link)
    np.testing.assert_array_equal(twin(X[1]).array, link(X[1]).array)
    link.to_device("@numpy")
    assert link.h is not None


def test_truncated_backpropagation():
    link = L.LSTM(I, U)
    loss = F.sum(link(X[0]))
    loss += F.sum(link(X[1]))
    link.cleargrads()
    loss.backward()
    loss.unchain_backward()
    assert link.h.creator is None and link.c.creator is None
    F.sum(link(X[2])).backward()


@pytest.mark.parametrize("make", [
    L.StatefulGRU, L.StatefulMGU, L.StatefulPeepholeLSTM, L.StatefulZoneoutLSTM,
])  # fmt: skip
def test_a_state_is_not_stretched_over_another_batch(make):
    link = make(I, U)
    link(X[0][:1])
    with pytest.raises(
        ValueError, match=rf"{make.__name__}: x: expected 1 examples, as in the call before \(or reset_s"
    ):
        link(X[0])
    link.reset_state()
    assert link(X[0]).shape == (len(X[0]), U)


def test_no_state_to_go_on_from():
    with pytest.raises(ValueError, match=r"LSTM: c: expected a state \(N, U\), got None; reset_state\(\) begins"):
        L.LSTM(I, U).set_state(None, None)


@pytest.mark.parametrize("name", [
    "LSTM", "StatelessLSTM", "StatefulPeepholeLSTM", "StatefulZoneoutLSTM", "StatelessGRU", "StatefulGRU", "GRU",
    "StatelessMGU", "StatefulMGU", "ChildSumTreeLSTM", "NaryTreeLSTM",
])  # fmt: skip
def test_links_say_how_many_units_they_have(name):
    assert getattr(L, name)(I, U).state_size == U


def test_the_weights_of_each_gate_are_drawn_by_themselves():
    shapes = []

    class Noted(dbrdist.initializers.Constant):
        def __call__(self, array):
            shapes.append(array.shape)
            super().__call__(array)

    L.LSTM(I, U, lateral_init=Noted(1.0), upward_init=Noted(2.0))
    assert shapes == [(U, U)] * 4 + [(U, I)] * 4


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def test_states_are_arrays_or_variables_and_go_on():
    link, x = L.LSTM(2, 3), ones(1, 2)
    first, second = link(x), link(x)
    c, h = link.c, link.h
    assert h is second
    for wrap in (lambda v: v, lambda v: v.array):
        link.reset_state()
        assert link.c is None and link.h is None
        link(x)
        np.testing.assert_array_equal(link.h.array, first.array)
        link.set_state(wrap(c), wrap(h))
        assert (link.c is c) == (wrap(c) is c) and isinstance(link.h, Variable)
        third = link(x)
    link.reset_state()
    for _ in range(3):
        y = link(x)
    np.testing.assert_array_equal(third.array, y.array)
    zoned = L.StatefulZoneoutLSTM(2, 3)
    zoned.set_state(c, h.array)
    assert zoned.c is c and zoned.h.array is h.array
    with pytest.raises(ValueError, match=r"LSTM: x: expected at most 1 examples, as in the call before"):
        link(ones(2, 2))
    with pytest.deprecated_call():
        link.to_cpu()
    link.reset_state()
    with pytest.deprecated_call():
        link.to_cpu()
    assert link(ones(2, 2)).shape == (2, 3)


def test_a_recurrent_link_knows_its_input_after_the_first_call():
    link = L.LSTM(None, 3)
    assert link(np.ones((2, 5), "f")).shape == (2, 3)
    assert link.upward.in_size == 5 and link.upward.W.shape == (12, 5)


def test_forget_gates_of_zoneout_begin_open_but_for_programs_of_chainer(monkeypatch):
    for is_chainers, bias in ((False, [0, 0, 1, 0]), (True, [0] * 4)):
        monkeypatch.setattr(rnn, "as_chainer", [is_chainers])
        link = L.StatefulZoneoutLSTM(3, 2)
        assert link.upward.b.array.reshape(2, 4).tolist() == [bias] * 2
        assert L.StatefulZoneoutLSTM(3, 2, forget_bias_init=5).upward.b.array.reshape(2, 4)[0].tolist() == [0, 0, 5, 0]
