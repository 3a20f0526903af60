"""More kinds of :mod:`tests.fuzz.numerics`: what whole trainings rest on. Each is checked in float64 by its formula."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Variable, kernels, optimizers

# ---- recurrent links ------------------------------------------------------------------------------------------------


def _sigmoid(a: Any) -> Any:
    return 1 / (1 + np.exp(-a))


def _lstm(x: Any, states: list[Any], ws: list[Any], bs: list[Any]) -> list[Any]:
    h, c = states
    i, f, a, o = (x @ ws[k].T + bs[k] + h @ ws[k + 4].T + bs[k + 4] for k in range(4))
    c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(a)
    return [_sigmoid(o) * np.tanh(c), c]


def _gru(x: Any, states: list[Any], ws: list[Any], bs: list[Any]) -> list[Any]:
    (h,) = states
    xs, hs = [x @ ws[k].T + bs[k] for k in range(3)], [h @ ws[k + 3].T + bs[k + 3] for k in range(3)]
    r, z = _sigmoid(xs[0] + hs[0]), _sigmoid(xs[1] + hs[1])
    new = np.tanh(xs[2] + r * hs[2])
    return [(1 - z) * new + z * h]


def _plain(f: Callable[[Any], Any]) -> Callable[..., list[Any]]:
    return lambda x, states, ws, bs: [f(x @ ws[0].T + bs[0] + states[0] @ ws[1].T + bs[1])]


_SEQUENCES: list[tuple[Any, int, int, Callable[..., list[Any]]]] = [  # link, directions, states, step
    (L.NStepLSTM, 1, 2, _lstm), (L.NStepBiLSTM, 2, 2, _lstm), (L.NStepGRU, 1, 1, _gru), (L.NStepBiGRU, 2, 1, _gru),
    (L.NStepRNNTanh, 1, 1, _plain(np.tanh)), (L.NStepBiRNNTanh, 2, 1, _plain(np.tanh)),
    (L.NStepRNNReLU, 1, 1, _plain(lambda a: np.maximum(a, 0))),
]  # fmt: skip


def _run(step: Any, directions: int, ws: Any, bs: Any, states: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
    """The last states (layers x directions, N, U) and the outputs of the last layer, one sequence after the other."""
    ends = [np.zeros_like(s) for s in states]
    for layer in range(len(ws) // directions):
        outputs = [[np.zeros((len(x), states[0].shape[2])) for x in xs] for _ in range(directions)]
        for d in range(directions):
            at = layer * directions + d
            for n, x in enumerate(xs):
                now = [s[at, n : n + 1] for s in states]
                for t in range(len(x)) if d == 0 else reversed(range(len(x))):
                    now = step(x[t : t + 1], now, ws[at], bs[at])
                    outputs[d][n][t] = now[0]
                for end, s in zip(ends, now):
                    end[at, n] = s
        xs = [np.concatenate(parts, axis=1) for parts in zip(*outputs)]
    return ends, xs


def recurrent(rng: Any) -> None:
    """Links over sequences of any lengths and order, against one step after the other, and their gradients."""
    kind, directions, num_states, step = _SEQUENCES[int(rng.integers(len(_SEQUENCES)))]
    layers, size, units = (int(n) for n in rng.integers(1, (4, 5, 5)))
    dtype = str(rng.choice(["f", "d"], p=[0.3, 0.7]))
    with dbrdist.using_config("dtype", np.dtype(dtype)):
        link = kind(layers, size, units, 0.0)
    for p in link.params():
        p.array[...] = rng.normal(size=p.shape)
    xs = [rng.normal(size=(int(n), size)).astype(dtype) for n in rng.integers(1, 7, rng.integers(1, 5))]
    shape = layers * directions, len(xs), units
    given = [rng.normal(size=shape).astype(dtype) if rng.random() < 0.6 else None for _ in range(num_states)]
    ws, bs = ([[p.array.astype("d") for p in ps] for ps in of] for of in (link.ws, link.bs))

    def formula(xs: list[Any], states: list[Any], ws: Any = ws) -> list[Any]:
        full = [np.zeros(shape) if s is None else s.astype("d") for s in states]
        ends, ys = _run(step, directions, ws, bs, full, [x.astype("d") for x in xs])
        return [*ends, *ys]

    inputs = [Variable(x) for x in xs]
    begun = [None if s is None else Variable(s) for s in given]
    *ends, ys = link(*begun, inputs)
    found = [*ends, *ys]
    for a, b in zip(found, formula(xs, given)):
        np.testing.assert_allclose(
            a.array, b, rtol=1e-4 if dtype == "f" else 1e-10, atol=1e-5 if dtype == "f" else 1e-12
        )
    if dtype == "f":
        return
    weights = [rng.normal(size=y.shape) for y in found]
    link.cleargrads()
    sum((F.sum(y * w) for y, w in zip(found, weights)), Variable(np.zeros(()))).backward()
    leaves = [*inputs, *(s for s in begun if s is not None)]
    moves = [rng.normal(size=v.shape) for v in leaves]
    turned = [[rng.normal(size=w.shape) for w in of] for of in ws]

    def loss(h: float) -> float:
        moved = iter([v.array + h * m for v, m in zip(leaves, moves)])
        new_xs = [next(moved) for _ in inputs]
        states = [None if s is None else next(moved) for s in begun]
        new_ws = [[w + h * m for w, m in zip(of, by)] for of, by in zip(ws, turned)]
        return float(sum((y * w).sum() for y, w in zip(formula(new_xs, states, new_ws), weights)))

    slope = (loss(1e-6) - loss(-1e-6)) / 2e-6
    own = sum(float((v.grad * m).sum()) for v, m in zip(leaves, moves) if v.grad is not None)
    own += sum(float((p.grad * m).sum()) for ps, by in zip(link.ws, turned) for p, m in zip(ps, by))
    assert kind is L.NStepRNNReLU or abs(own - slope) < 1e-5 * (1 + abs(slope)), (kind.__name__, own, slope)


# ---- average pooling ------------------------------------------------------------------------------------------------


def averages(rng: Any) -> None:
    """Means of windows and their gradients against loops; NaN and infinity stay within their windows."""
    axes = int(rng.integers(1, 4))
    k, s = (rng.integers(1, 4, axes) for _ in range(2))
    p = np.array([rng.integers(0, n) for n in k])
    x = rng.normal(size=(2, int(rng.choice([1, 3, 16])), *(k + rng.integers(0, 4, axes))))
    if rng.random() < 0.4:
        x[rng.random(x.shape) < 0.1] = rng.choice([np.nan, np.inf, -np.inf])
    dtype = str(rng.choice(["f", "d", "e"]))
    x = x.astype(dtype)
    if rng.random() < 0.5:  # channels last
        x = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)
    args = [tuple(int(n) for n in v) for v in (k, s, p)]
    pad_value = None if axes != 2 and rng.random() < 0.5 else 0
    v = Variable(x)
    more = {} if axes == 2 and rng.random() < 0.5 else {"pad_value": pad_value}
    y = (F.average_pooling_nd if more else F.average_pooling_2d)(v, *args, **more)
    gy = rng.normal(size=y.shape).astype(dtype)
    (g,) = dbrdist.grad([y], [v], [gy])
    wide, wanted, gx = x.astype("d"), np.zeros(y.shape), np.zeros(x.shape)
    sizes = [(n + 2 * q - m) // step + 1 for n, q, m, step in zip(x.shape[2:], p, k, s)]
    assert list(y.shape[2:]) == sizes
    for place in itertools.product(*map(range, sizes)):
        window = tuple(
            slice(max(i * step - q, 0), min(i * step - q + m, n))
            for i, step, q, m, n in zip(place, s, p, k, x.shape[2:])
        )
        seen = wide[(..., *window)]
        count = np.prod(seen.shape[2:]) if pad_value is None and more else np.prod(k)
        wanted[(..., *place)] = seen.sum(axis=tuple(range(2, x.ndim))) / count
        gx[(..., *window)] += (gy.astype("d")[(..., *place)] / count).reshape(*x.shape[:2], *(1,) * axes)
    eps = float(np.finfo(dtype).eps)
    np.testing.assert_allclose(y.array.astype("d"), wanted, rtol=16 * eps, atol=16 * eps)
    np.testing.assert_allclose(g.array.astype("d"), gx, rtol=16 * eps, atol=32 * eps)


# ---- 16 bits --------------------------------------------------------------------------------------------------------


def _normalized(x: Any, axes: Any) -> Any:
    return (x - x.mean(axis=axes, keepdims=True)) / np.sqrt(x.var(axis=axes, keepdims=True) + 1e-3)


def _log_softmax(x: Any) -> Any:
    shifted = x - x.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


# A function, its formula in float64, and how large what is added up to an element of the result is.
_NARROW: list[tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = [
    (lambda a, b: a + b, lambda a, b: a + b, lambda a, b: abs(a + b)),
    (lambda a, b: a * b, lambda a, b: a * b, lambda a, b: abs(a * b)),
    (lambda a, b: F.exp(a), lambda a, b: np.exp(a), lambda a, b: np.exp(a)),
    (lambda a, b: F.tanh(a), lambda a, b: np.tanh(a), lambda a, b: abs(np.tanh(a))),
    (lambda a, b: F.sigmoid(a), lambda a, b: _sigmoid(a), lambda a, b: _sigmoid(a)),
    (lambda a, b: F.sum(a, axis=0), lambda a, b: a.sum(axis=0), lambda a, b: abs(a.sum(axis=0))),
    (lambda a, b: F.mean(a, axis=1), lambda a, b: a.mean(axis=1), lambda a, b: abs(a.mean(axis=1))),
    (lambda a, b: F.linear(a, b), lambda a, b: a @ b.T, lambda a, b: abs(a @ b.T)),
    (lambda a, b: F.matmul(a, b, transb=True), lambda a, b: a @ b.T, lambda a, b: abs(a @ b.T)),
    (lambda a, b: F.softmax(a), lambda a, b: np.exp(_log_softmax(a)), lambda a, b: np.exp(_log_softmax(a))),
    (lambda a, b: F.log_softmax(a), lambda a, b: _log_softmax(a), lambda a, b: abs(_log_softmax(a))),
    (lambda a, b: F.layer_normalization(a, np.ones(a.shape[1], a.dtype), np.zeros(a.shape[1], a.dtype), eps=1e-3),
     lambda a, b: _normalized(a, 1), lambda a, b: abs(_normalized(a, 1)) + 0.1),
    (lambda a, b: F.batch_normalization(a, np.ones(a.shape[1], a.dtype), np.zeros(a.shape[1], a.dtype), eps=1e-3),
     lambda a, b: _normalized(a, 0), lambda a, b: abs(_normalized(a, 0)) + 0.1),
]  # fmt: skip


def narrow(rng: Any) -> None:
    """Functions of 16-bit numbers are those of float64, rounded once: sums are not added up in 16 bits."""
    import ml_dtypes

    dtype = np.dtype([np.float16, ml_dtypes.bfloat16][int(rng.integers(2))])
    n, m = int(rng.choice([2, 5, 64, 500])), int(rng.choice([2, 7, 64, 300]))
    scale = 10.0 ** rng.uniform(-1, 1)
    a, b = ((rng.normal(size=(n, m)) * scale + rng.choice([0, 1])).astype(dtype) for _ in range(2))
    ours, formula, size = _NARROW[int(rng.integers(len(_NARROW)))]
    found = ours(Variable(a), Variable(b)).array
    assert found.dtype == dtype
    wide = [v.astype("d") for v in (a, b)]
    wanted, limit = formula(*wide), float(ml_dtypes.finfo(dtype).max)
    fits = abs(wanted) < limit
    eps = float(ml_dtypes.finfo(dtype).eps)
    rest = 1e-5 * abs(np.asarray(wide)).max() * max(n, m)  # what float32 loses
    error = abs(found.astype("d") - wanted) - rest - float(ml_dtypes.finfo(dtype).tiny)
    assert (error[fits] <= 1.01 * eps * size(*wide)[fits]).all(), (dtype, n, m, float(error[fits].max()))


# ---- optimizers -----------------------------------------------------------------------------------------------------


def _momentum(p: Any, g: Any, s: Any, t: int, lr: float) -> Any:
    s["v"] = 0.9 * s.get("v", 0) - lr * g
    return p + s["v"]


def _nesterov(p: Any, g: Any, s: Any, t: int, lr: float) -> Any:
    s["v"] = 0.9 * s.get("v", 0) - lr * g
    return p + 0.9 * s["v"] - lr * g


def _corrected(p: Any, g: Any, s: Any, t: int, lr: float) -> Any:
    s["v"] = 0.9 * s.get("v", 0) - g
    return p + lr * s["v"]


def _adagrad(p: Any, g: Any, s: Any, t: int, lr: float) -> Any:
    s["h"] = s.get("h", 0) + g**2
    return p - lr * g / (np.sqrt(s["h"]) + 1e-8)


def _rmsprop(p: Any, g: Any, s: Any, t: int, lr: float) -> Any:
    s["ms"] = 0.99 * s.get("ms", 0) + 0.01 * g**2
    return p - lr * g / (np.sqrt(s["ms"]) + 1e-8)


def _adadelta(p: Any, g: Any, s: Any, t: int, lr: float) -> Any:
    s["g2"] = 0.95 * s.get("g2", 0) + 0.05 * g**2
    d = np.sqrt((s.get("d2", 0) + 1e-6) / (s["g2"] + 1e-6)) * g
    s["d2"] = 0.95 * s.get("d2", 0) + 0.05 * d**2
    return p - d


def _adam(p: Any, g: Any, s: Any, t: int, lr: float, decay: float = 0.0, largest: bool = False) -> Any:
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0) + 0.001 * g**2
    s["top"] = np.maximum(s.get("top", 0), s["v"]) if largest else s["v"]
    rate = lr * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    return p - rate * s["m"] / (np.sqrt(s["top"]) + 1e-8) - decay * p


_RULES: list[tuple[Callable[[float], Any], Callable[..., Any]]] = [
    (optimizers.SGD, lambda p, g, s, t, lr: p - lr * g), (optimizers.MomentumSGD, _momentum),
    (optimizers.NesterovAG, _nesterov), (optimizers.CorrectedMomentumSGD, _corrected), (optimizers.AdaGrad, _adagrad),
    (optimizers.RMSprop, _rmsprop), (lambda lr: optimizers.AdaDelta(), _adadelta), (optimizers.Adam, _adam),
    (lambda lr: optimizers.AdamW(lr, weight_decay_rate=0.01), lambda *a: _adam(*a, decay=0.01)),
    (optimizers.AMSGrad, lambda *a: _adam(*a, largest=True)),
]  # fmt: skip


def updates(rng: Any) -> None:
    """Updates of several parameters, with hooks, missing gradients, frozen parts and changed rates, by formula."""
    make, rule = _RULES[int(rng.integers(len(_RULES)))]
    lr = float(10.0 ** rng.uniform(-3, -1))
    dtype = str(rng.choice(["f", "d"]))
    shapes = [(int(rng.choice([1, 3, 100, 5000])), *rng.integers(1, 4, rng.integers(0, 2))) for _ in range(3)]
    chain = dbrdist.Chain()
    with chain.init_scope():
        for i, shape in enumerate(shapes):
            setattr(chain, f"p{i}", dbrdist.Parameter(rng.normal(size=shape).astype(dtype)))
    params = [getattr(chain, f"p{i}") for i in range(3)]
    optimizer = make(lr).setup(chain)
    decay, threshold = rng.choice([0, 0.05]), rng.choice([0, 1.5])
    if decay:
        optimizer.add_hook(optimizers.WeightDecay(decay))
    if threshold:
        optimizer.add_hook(optimizers.GradientClipping(threshold))
    frozen = int(rng.integers(-3, 3))
    if frozen >= 0:
        params[frozen].update_rule.enabled = False
    wanted, states = [p.array.astype("d") for p in params], [dict[str, Any]() for _ in params]
    name = "alpha" if hasattr(optimizer.hyperparam, "beta1") else "lr"
    with kernels.use(*(["numpy"] if rng.random() < 0.3 else [])):
        for t in range(1, int(rng.integers(2, 8))):
            gs = [None if t > 1 and rng.random() < 0.1 else rng.normal(size=p.shape).astype(dtype) for p in params]
            for p, g in zip(params, gs):
                p.grad = g
            if t == 3 and make is not _RULES[6][0]:
                lr *= 0.5
                setattr(optimizer, name, lr)
            optimizer.update()
            wide = [np.zeros(p.shape) if g is None else g.astype("d") for p, g in zip(params, gs)]
            wide = [g + decay * w * (i != frozen) for i, (g, w) in enumerate(zip(wide, wanted))]
            if threshold:
                norm = np.sqrt(sum((g**2).sum() for i, g in enumerate(wide) if i != frozen))
                wide = [g * min(1, threshold / norm) if norm else g for g in wide]
            for i, (g, state) in enumerate(zip(wide, states)):
                if i != frozen:
                    wanted[i] = rule(wanted[i], g, state, t, lr)
    for p, w in zip(params, wanted):
        np.testing.assert_allclose(
            p.array, w, rtol=2e-4 if dtype == "f" else 1e-9, atol=2e-5 if dtype == "f" else 1e-11
        )


KINDS = (recurrent, averages, narrow, updates)
