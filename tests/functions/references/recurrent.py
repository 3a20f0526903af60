"""Recurrent functions, one unit, one example and one step at a time."""

from __future__ import annotations

import numpy as np

from .nets import relu, sigmoid

_tanh = np.tanh


def lstm(c_prev, x):
    c, h = np.array(c_prev, np.float64), np.empty((len(x), *c_prev.shape[1:]))
    for n in range(len(x)):
        for u in range(c_prev.shape[1]):
            a, i, f, o = (x[n, 4 * u + k] for k in range(4))
            c[n, u] = _tanh(a) * sigmoid(i) + c_prev[n, u] * sigmoid(f)
            h[n, u] = _tanh(c[n, u]) * sigmoid(o)
    return c, h


def slstm(c_prev1, c_prev2, x1, x2):
    c, h = np.empty(c_prev1.shape), np.empty(c_prev1.shape)
    for n, u in np.ndindex(*c_prev1.shape[:2]):
        a, i, f, o = (x1[n, 4 * u + k] for k in range(4))
        b, j, g, p = (x2[n, 4 * u + k] for k in range(4))
        old = c_prev1[n, u] * sigmoid(f) + c_prev2[n, u] * sigmoid(g)
        c[n, u] = _tanh(a) * sigmoid(i) + _tanh(b) * sigmoid(j) + old
        h[n, u] = _tanh(c[n, u]) * sigmoid(o + p)
    return c, h


def tree_lstm(*inputs):
    *cells, x = inputs
    size = cells[0].shape[1]
    a, i, o, *fs = (x[:, k * size : (k + 1) * size] for k in range(3 + len(cells)))
    c = _tanh(a) * sigmoid(i)
    for cell, f in zip(cells, fs):
        c = c + cell * sigmoid(f)
    return c, _tanh(c) * sigmoid(o)


def _lstm_step(w, b, x, h, c):
    i, f, a, o = (w[k] @ x + w[k + 4] @ h + b[k] + b[k + 4] for k in range(4))
    c = sigmoid(f) * c + sigmoid(i) * _tanh(a)
    return sigmoid(o) * _tanh(c), c


def _gru_step(w, b, x, h):
    r, z = (sigmoid(w[k] @ x + w[k + 3] @ h + b[k] + b[k + 3]) for k in range(2))
    y = _tanh(w[2] @ x + b[2] + r * (w[5] @ h + b[5]))
    return ((1 - z) * y + z * h,)


def _rnn_step(f):
    return lambda w, b, x, h: (f(w[0] @ x + w[1] @ h + b[0] + b[1]),)


def _over_sequences(step, both, n_layers, states, ws, bs, xs):
    sequences = [[x[n] for x in xs if n < len(x)] for n in range(states[0].shape[1])]
    lasts = [np.array(s, np.float64) for s in states]
    for layer in range(n_layers):
        found = [[[] for _ in sequence] for sequence in sequences]
        for direction in range(2 if both else 1):
            k = layer * (2 if both else 1) + direction
            for n, sequence in enumerate(sequences):
                now = [s[k, n] for s in states]
                for t in range(len(sequence))[:: -1 if direction else 1]:
                    now = step(ws[k], bs[k], sequence[t], *now)
                    found[n][t].append(now[0])
                for last, value in zip(lasts, now):
                    last[k, n] = value
        sequences = [[np.concatenate(step) for step in sequence] for sequence in found]
    ys = tuple(np.array([sequences[n][t] for n in range(len(x))]) for t, x in enumerate(xs))
    return (*lasts, list(ys))


def n_step_lstm(n_layers, dropout_ratio, hx, cx, ws, bs, xs, **kwargs):
    return _over_sequences(_lstm_step, False, n_layers, (hx, cx), ws, bs, xs)


def n_step_bilstm(n_layers, dropout_ratio, hx, cx, ws, bs, xs, **kwargs):
    return _over_sequences(_lstm_step, True, n_layers, (hx, cx), ws, bs, xs)


def n_step_gru(n_layers, dropout_ratio, hx, ws, bs, xs, **kwargs):
    return _over_sequences(_gru_step, False, n_layers, (hx,), ws, bs, xs)


def n_step_bigru(n_layers, dropout_ratio, hx, ws, bs, xs, **kwargs):
    return _over_sequences(_gru_step, True, n_layers, (hx,), ws, bs, xs)


def n_step_rnn(n_layers, dropout_ratio, hx, ws, bs, xs, activation="tanh", **kwargs):
    return _over_sequences(_rnn_step({"tanh": _tanh, "relu": relu}[activation]), False, n_layers, (hx,), ws, bs, xs)


def n_step_birnn(n_layers, dropout_ratio, hx, ws, bs, xs, activation="tanh", **kwargs):
    return _over_sequences(_rnn_step({"tanh": _tanh, "relu": relu}[activation]), True, n_layers, (hx,), ws, bs, xs)
