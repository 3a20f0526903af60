"""Sequences against PyTorch's layers with copied weights; wrong arguments; dropout between layers."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable, config
from tests.each import each

I, U = 3, 4


@pytest.mark.torch
@pytest.mark.parametrize("kind, gates", [("lstm", 4), ("gru", 3), ("rnn", 1)])
@pytest.mark.parametrize("layers, both", [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("lengths", [(3, 3), (4, 2, 1)])
def test_values_and_gradients_are_those_of_pytorch(kind, gates, layers, both, lengths):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    module = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn": torch.nn.RNN}[kind]
    module = module(I, U, layers, bidirectional=both, dtype=torch.float64)
    names = [f"l{k}{end}" for k in range(layers) for end in ("", "_reverse")[: 2 if both else 1]]

    def split(start, name):
        parts = np.split(getattr(module, start + name).detach().numpy(), gates)
        return [Variable(part.copy()) for part in parts]

    ws = [split("weight_ih_", name) + split("weight_hh_", name) for name in names]
    bs = [split("bias_ih_", name) + split("bias_hh_", name) for name in names]
    sequences = [rng.standard_normal((n, I)) for n in lengths]
    xs = [Variable(np.stack([s[t] for s in sequences if len(s) > t])) for t in range(max(lengths))]
    states = [Variable(rng.standard_normal((len(names), len(lengths), U))) for _ in range(2 if kind == "lstm" else 1)]

    theirs_x = [torch.tensor(s, requires_grad=True) for s in sequences]
    theirs_states = [torch.tensor(s.array, requires_grad=True) for s in states]
    packed = torch.nn.utils.rnn.pack_sequence(theirs_x)
    y, last = module(packed, tuple(theirs_states) if kind == "lstm" else theirs_states[0])
    last = last if kind == "lstm" else (last,)
    *ours_last, ours = getattr(F, f"n_step_{'bi' if both else ''}{kind}")(layers, 0.0, *states, ws, bs, xs)

    def close(a, b):
        np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-9, atol=1e-11)

    close(np.concatenate([v.array for v in ours]), y.data)
    outputs = [F.concat(ours, axis=0), *ours_last]
    weights = [rng.standard_normal(v.shape) for v in outputs]
    sum(F.sum(v * g) for v, g in zip(outputs, weights)).backward()
    sum((v * torch.tensor(g)).sum() for v, g in zip([y.data, *last], weights)).backward()
    for a, b in zip(ours_last, last):
        close(a.array, b)
    for a, b in zip(states, theirs_states):
        close(a.grad, b.grad)
    for t, x in enumerate(xs):
        close(x.grad, torch.stack([s.grad[t] for s in theirs_x if len(s) > t]))
    for name, w, b in zip(names, ws, bs):
        for start, table, part in (
            ("weight_", w, "ih_"),
            ("weight_", w, "hh_"),
            ("bias_", b, "ih_"),
            ("bias_", b, "hh_"),
        ):
            values = table[:gates] if part == "ih_" else table[gates:]
            close(np.concatenate([v.grad for v in values]), getattr(module, start + part + name).grad)


def arguments(layers=1, gates=4, both=False, examples=2):
    rng = np.random.default_rng(0)
    num = layers * (2 if both else 1)
    state = rng.standard_normal((num, examples, U))
    ws = [
        [rng.standard_normal((U, (I if k == 0 else U) if j < gates else U)) for j in range(2 * gates)]
        for k in range(num)
    ]
    bs = [[rng.standard_normal(U) for _ in range(2 * gates)] for _ in range(num)]
    return state, ws, bs, [rng.standard_normal((n, I)) for n in (examples, examples, 1)]


def test_dropout_lies_between_layers_and_in_training_alone():
    h, ws, bs, xs = arguments(layers=2)
    plain = F.n_step_lstm(2, 0.0, h, h, ws, bs, xs)
    dropped = F.n_step_lstm(2, 0.9, h, h, ws, bs, xs)
    np.testing.assert_array_equal(plain[0].array[0], dropped[0].array[0])  # the first layer sees all of x
    assert (plain[0].array[1] != dropped[0].array[1]).any()
    with dbrdist.using_config("train", False):
        tested = F.n_step_lstm(2, 0.9, h, h, ws, bs, xs)
    np.testing.assert_array_equal(plain[0].array, tested[0].array)


def test_states_that_end_early_stay():
    h, ws, bs, xs = arguments()
    hy, _, ys = F.n_step_lstm(1, 0.0, h, h, ws, bs, xs)
    np.testing.assert_array_equal(hy.array[0, 1], ys[1].array[1])
    np.testing.assert_array_equal(hy.array[0, 0], ys[2].array[0])


def test_no_steps_at_all():
    h, ws, bs, _ = arguments()
    hy, cy, ys = F.n_step_lstm(1, 0.0, h, h + 1, ws, bs, [])
    assert ys == [] and hy.array is h and (cy.array == h + 1).all()


def test_inputs_are_left_alone():
    h, ws, bs, xs = arguments(gates=3)
    copies = [a.copy() for a in (h, *xs)]
    variables = [Variable(x) for x in xs]
    _, ys = F.n_step_gru(1, 0.0, Variable(h), ws, bs, variables)
    F.sum(F.concat(ys, axis=0)).backward()
    for a, copied in zip((h, *xs), copies):
        np.testing.assert_array_equal(a, copied)


@pytest.mark.parametrize("change, message", [
    (lambda a: a.update(xs=a["xs"][::-1]), r"n_step_lstm: xs: expected steps with a falling number .* got \[1, 2, 2\]"),
    (lambda a: a.update(hx=a["hx"][0]), r"n_step_lstm: hx: expected shape \(1, 2, U\): 1 layers, got"),
    (lambda a: a.update(hx=a["hx"][:, :1]), r"n_step_lstm: hx: expected shape \(1, 2, U\)"),
    (lambda a: a.update(cx=a["cx"][..., :2]), r"n_step_lstm: cx: expected"),
    (lambda a: a.update(ws=[a["ws"][0][:7]]), r"n_step_lstm: ws: expected 1 lists of 8, got lists of \[7\]"),
    (lambda a: a.update(bs=a["bs"] * 2), r"n_step_lstm: bs: expected 1 lists of 8, got lists of \[8, 8\]"),
    (lambda a: a["ws"][0].__setitem__(5, a["ws"][0][0]), r"n_step_lstm: ws\[0\]\[5\]: expected shape \(4, 4\)"),
    (lambda a: a["bs"][0].__setitem__(2, np.ones(3)), r"n_step_lstm: bs\[0\]\[2\]: expected shape \(4,\)"),
])  # fmt: skip
def test_wrong_arguments_are_named(change, message):
    h, ws, bs, xs = arguments()
    given = {"n_layers": 1, "dropout_ratio": 0.0, "hx": h, "cx": h, "ws": ws, "bs": bs, "xs": xs}
    change(given)
    with pytest.raises(ValueError, match=message):
        F.n_step_lstm(**given)


def test_wrong_steps_are_named():
    ones = np.ones
    with pytest.raises(ValueError, match=r"lstm: x: expected shape \(N, 4 U, ...\)"):
        F.lstm(ones((2, 3)), ones((2, 10)))
    with pytest.raises(ValueError, match=r"lstm: c_prev: expected shape \(2, 3\) to match x, or more rows"):
        F.lstm(ones((1, 3)), ones((2, 12)))
    with pytest.raises(ValueError, match=r"slstm: c_prev2: expected shape \(2, 3\) to match x1"):
        F.slstm(ones((2, 3)), ones((2, 2)), ones((2, 12)), ones((2, 12)))
    with pytest.raises(ValueError, match=r"tree_lstm: x: expected shape \(N, 5 U, ...\) with 2 cells"):
        F.tree_lstm(ones((2, 3)), ones((2, 3)), ones((2, 12)))
    with pytest.raises(ValueError, match=r"tree_lstm: c_1: expected shape \(2, 3\) to match x"):
        F.tree_lstm(ones((2, 2)), ones((2, 12)))
    with pytest.raises(TypeError, match="tree_lstm: expected at least one cell and x, got 1 arguments"):
        F.tree_lstm(ones((2, 12)))
    h, ws, bs, xs = arguments(gates=1)
    with pytest.raises(ValueError, match="activation: expected 'tanh' or 'relu', got 'sigmoid'"):
        F.n_step_rnn(1, 0.0, h, ws, bs, xs, activation="sigmoid")
    with pytest.raises(TypeError, match="n_step_rnn: unexpected argument 'use_cudnn'"):
        F.n_step_rnn(1, 0.0, h, ws, bs, xs, use_cudnn=True)


@each(**{"name, has_cell": [("lstm", True), ("gru", False), ("rnn", False)]})
def test_documentation_says_what_the_shapes_are(name, has_cell):
    one, both = (" ".join(getattr(F, f"n_step_{kind}{name}").__doc__.split()) for kind in ("", "bi"))
    num = {"lstm": 8, "gru": 6, "rnn": 2}[name]
    assert one.startswith("Layers of ") and both.startswith("Layers in both directions of ")
    assert "for each layer a list" in one and "for each layer and direction a list" in both
    assert f"{num} weights" in one and f"{num} weights" in both
    assert "shape (n_layers, N, U)" in one and "shape (2 n_layers, N, U)" in both
    assert "I is U from" in one and "I is 2 U from" in both
    assert "(N_t, U) arrays" in one and "(N_t, 2 U) arrays" in both
    for text in (one, both):
        assert ("hx, cx: outputs and cells before" in text) == has_cell == ("Returns: (hy, cy, ys)" in text)
        assert ("hx: outputs before" in text) != has_cell


RNG = np.random.default_rng(0)


def ones_of(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def test_steps_without_examples_keep_their_state():
    h = ones_of(1, 0, 3)
    w = [[ones_of(3, 3)] * 2]
    b = [[ones_of(3)] * 2]
    hy, ys = F.n_step_rnn(1, 0.0, h, w, b, [])
    assert hy.shape == (1, 0, 3) and len(ys) == 0
    with pytest.raises(ValueError, match="n_step_rnn: xs: expected steps with a falling number of examples"):
        F.n_step_rnn(1, 0.0, ones_of(1, 2, 3), w, b, [ones_of(1, 3), ones_of(2, 3)])


def test_double_backward_of_a_recurrent_net_with_relu():
    x, h = RNG.standard_normal((2, 3)), RNG.standard_normal((1, 2, 3))
    w, b = RNG.standard_normal((2, 3, 3)), RNG.standard_normal((2, 3))

    def last(x, h, w0, w1, b0, b1):
        return F.n_step_rnn(1, 0.0, h, [[w0, w1]], [[b0, b1]], [x], activation="relu")[0] ** 2.0

    xs = (x, h, *w, *b)
    g = RNG.standard_normal((1, 2, 3))
    dbrdist.gradient_check.check_double_backward(last, xs, g, xs, atol=1e-5, rtol=1e-4, dtype=np.float64)
    assert not config.debug
