"""Recurrent functions over whole sequences: several layers, in one direction or both.

N examples, U units, I inputs, T steps. Gates are linear in the input and in the state before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from dbrdist import kernels
from dbrdist.core.array.array_operations import product, summed_to
from dbrdist.core.array.backend import Array, get_array_module
from dbrdist.core.array.types import DType
from dbrdist.core.tape import ops
from dbrdist.core.tape.backprop import grad
from dbrdist.core.tape.checks import expected
from dbrdist.core.tape.elementwise_table import together
from dbrdist.core.tape.function_node import FunctionNode
from dbrdist.core.tape.variable import Operand, Variable
from dbrdist.functions.activation import sigmoid, tanh
from dbrdist.functions.array import concat, split_axis
from dbrdist.functions.array import stack as stacked
from dbrdist.functions.noise import dropout
from dbrdist.functions.rectifier import relu
from dbrdist.functions.rnn import gates_in_place, zeros_like

_tanh, _sigmoid = tanh.primitive, sigmoid.primitive
_OFTEN = 4  # steps of as many examples, above which it pays to bring V to the layout that the product likes best


class _Cell:
    """One step on arrays. ``step`` turns zx = x W^T + b and zh = h V^T + d, both (n, gates U), into the new state and
    what ``pull`` needs for the gradients of zx and zh and of the state before. Where the cell ``adds`` zx and zh, both
    are one array, which holds the sum, and so are their gradients.

    ``composed`` is the same step with primitives, for derivatives of higher order.
    """

    kind: ClassVar[str] = ""  # the name of its kernel for devices
    num_gates: ClassVar[int]
    num_states: ClassVar[int] = 1
    adds: ClassVar[bool] = True
    order: ClassVar[tuple[int, ...]]  # of the gates among Chainer's weights


class _LSTMCell(_Cell):
    kind, num_gates, num_states, order = "lstm", 4, 2, (2, 0, 1, 3)  # a, i, f, o

    @staticmethod
    def step(zx: Array, zh: Array, states: list[Array]) -> tuple[list[Array], Any]:
        z = zh.reshape(len(zh), 4, -1).transpose(1, 0, 2).copy()  # NumPy takes half the time for dense gates
        gates_in_place(z.reshape(4, -1), 1)
        a, i, f, o = z
        c = f * states[1]
        c += a * i
        t = get_array_module(c).tanh(c)
        return [o * t, c], (z, t, states[1])

    @staticmethod
    def pull(saved: tuple[Array, ...], gs: list[Array], gzx: Array, gzh: Array) -> list[Any]:
        z, t, c_prev = saved
        (a, i, f, o), (gh, gc) = z, gs
        g = t * t
        g -= 1.0
        g *= o
        g *= gh
        gc = gc - g  # gh o (1 - t^2) + gc
        xp = get_array_module(z)
        out = xp.subtract(1.0, z)
        out *= z  # the slopes of the sigmoids
        ga, gi, gf, go = out
        xp.multiply(a, a, out=ga)
        xp.subtract(1.0, ga, out=ga)
        ga *= i
        gi *= a
        gf *= c_prev
        for part in (ga, gi, gf):
            part *= gc
        go *= t
        go *= gh
        gzx.reshape(len(gzx), 4, -1)[...] = out.transpose(1, 0, 2)
        return [0.0, gc * f]

    @staticmethod
    def composed(zx: Variable, zh: Variable, states: list[Variable]) -> list[Variable]:
        a, i, f, o = _blocks(ops.add(zx, zh), 4)
        c = ops.add(ops.mul(_sigmoid(f), states[1]), ops.mul(_tanh(a), _sigmoid(i)))
        return [ops.mul(_sigmoid(o), _tanh(c)), c]


class _GRUCell(_Cell):
    kind, num_gates, order, adds = "gru", 3, (2, 0, 1), False  # the candidate, r, z

    @staticmethod
    def step(zx: Array, zh: Array, states: list[Array]) -> tuple[list[Array], Any]:
        h = states[0]
        units = h.shape[1]
        w = zh[:, :units]
        zh[:, units:] += zx[:, units:]
        rz = zh[:, units:].reshape(len(h), 2, units)
        gates_in_place(rz, 0)
        r, z = rz[:, 0], rz[:, 1]
        y = r * w
        y += zx[:, :units]
        get_array_module(y).tanh(y, out=y)
        return [y + z * (h - y)], (r, z, w, y, h)

    @staticmethod
    def pull(saved: tuple[Array, ...], gs: list[Array], gzx: Array, gzh: Array) -> list[Array]:
        r, z, w, y, h = saved
        (gh,) = gs
        units = h.shape[1]
        gy = gh * (1.0 - z) * (1.0 - y * y)
        gzx[:, :units] = gy
        gzh[:, :units] = gy * r
        gzx[:, units : 2 * units] = gy * w * r * (1.0 - r)
        gzx[:, 2 * units :] = gh * (h - y) * z * (1.0 - z)
        gzh[:, units:] = gzx[:, units:]
        return [gh * z]

    @staticmethod
    def composed(zx: Variable, zh: Variable, states: list[Variable]) -> list[Variable]:
        (x_new, x_r, x_z), (h_new, h_r, h_z) = _blocks(zx, 3), _blocks(zh, 3)
        r, z = _sigmoid(ops.add(x_r, h_r)), _sigmoid(ops.add(x_z, h_z))
        y = _tanh(ops.add(x_new, ops.mul(r, h_new)))
        return [ops.add(y, ops.mul(z, ops.sub(states[0], y)))]


class _TanhCell(_Cell):
    num_gates, order = 1, (0,)

    @staticmethod
    def step(zx: Array, zh: Array, states: list[Array]) -> tuple[list[Array], Any]:
        y = get_array_module(zh).tanh(zh, out=zh)
        return [y], y

    @staticmethod
    def pull(saved: Any, gs: list[Array], gzx: Array, gzh: Array) -> list[Any]:
        gzx[...] = gs[0] * (1.0 - saved * saved)
        return [0.0]

    @staticmethod
    def composed(zx: Variable, zh: Variable, states: list[Variable]) -> list[Variable]:
        return [_tanh(ops.add(zx, zh))]


class _ReLUCell(_Cell):
    num_gates, order = 1, (0,)

    @staticmethod
    def step(zx: Array, zh: Array, states: list[Array]) -> tuple[list[Array], Any]:
        y = get_array_module(zh).maximum(zh, 0, out=zh)
        return [y], y

    @staticmethod
    def pull(saved: Array, gs: list[Array], gzx: Array, gzh: Array) -> list[Array]:
        gzx[...] = gs[0] * (saved > 0)
        return [0.0]

    @staticmethod
    def composed(zx: Variable, zh: Variable, states: list[Variable]) -> list[Variable]:
        return [relu(ops.add(zx, zh))]


def _blocks(z: Variable, n: int) -> list[Variable]:
    """The n gates of z (N, n U), one after another."""
    units = z.shape[1] // n
    return [ops.getitem(z, (slice(None), slice(k * units, (k + 1) * units))) for k in range(n)]


def _product(a: Array, b: Array) -> Array:
    """The product of two matrices by the fastest kernel where they are of one type."""
    return kernels.matmul(a, b) if type(a) is np.ndarray and a.dtype == b.dtype else product(a, b)


class RecurrentLayer(FunctionNode):
    """One layer over a packed sequence, in one direction.

    Inputs: the states (N, U) before; x (sum of n_t, I), the steps one after another, each with the first n_t <= N
    examples; W (gates U, I), V (gates U, U), b and d (gates U,). Outputs: y (sum of n_t, U) and the last states.
    The products with W take all steps at once, in both passes.
    """

    on_device: list[Array] | None = None  # what kernels for devices have kept for backward

    def __init__(self, cell: Any, counts: Sequence[int], is_backward: bool) -> None:
        self.cell = cell
        starts = [0]
        for n in counts:
            starts.append(starts[-1] + n)
        steps = [(start, n) for start, n in zip(starts, counts) if n]
        self.steps = steps[::-1] if is_backward else steps

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        k, adds = self.cell.num_states, self.cell.adds
        states = list(xs[:k])
        x, W, V, b, d = xs[k:]
        self.retain_inputs(tuple(range(len(xs))))
        xp = get_array_module(x)
        zx = zh = kernels.linear(x, W, b + d if adds else b)
        made = None
        if type(zx) is not np.ndarray:
            made = kernels.recurrent_forward(self.cell.kind, self.steps, zx, V, d, states)
        if made is not None:
            y, states, self.on_device = made
            return (y, *[s.astype(old.dtype, copy=False) for s, old in zip(states, xs)])
        if not adds:
            zh = xp.empty_like(zx)
            zh[...] = d
        y = xp.empty((len(x), states[0].shape[1]), x.dtype)
        before = xp.empty_like(y)
        self.saved: list[Any] = []
        add_product = self._products(V.T, x.dtype)
        for start, n in self.steps:
            here = slice(start, start + n)
            h = before[here]
            h[...] = states[0][:n]
            add_product[n](h, zh[here])
            new, saved = self.cell.step(zx[here], zh[here], [h, *[s[:n] for s in states[1:]]])
            y[here] = new[0]
            states = [value if n == len(s) else xp.concatenate([value, s[n:]]) for s, value in zip(states, new)]
            self.saved.append(saved)
        self.before = before
        return (y, *[s.astype(old.dtype) for s, old in zip(states, xs)])

    def _products(self, V: Array, dtype: DType) -> dict[int, Callable[[Array, Array], None]]:
        """By the number of examples in a step: a function of a and out that adds the product of a and V to out."""
        V = V.astype(dtype, copy=False)
        return {n: kernels.packed(V, n, times > _OFTEN) for n, times in Counter(n for _, n in self.steps).items()}

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Any, ...]:
        if self._on_variables:
            return self._derive_variables(wanted, gys)
        k = self.cell.num_states
        x, W, V = self._kept_xs[k : k + 3]
        xp, dtype = get_array_module(x), x.dtype
        gy = gys[0]
        gs = [xp.zeros(s.shape, dtype) if g is None else g.astype(dtype) for s, g in zip(self._kept_xs, gys[1:])]
        if self.on_device is None:
            gzx, gzh = self._through_steps(V, gy, gs, dtype)
        else:
            self.before = self.on_device[1]
            gs = [g if g.flags.c_contiguous else g.copy() for g in gs]
            gzx, gzh = kernels.recurrent_backward(self.cell.kind, self.steps, self.on_device, V, gy, gs)
        gb = summed_to(gzx, (len(W),))
        rules: tuple[Callable[[], Array], ...] = (
            *[lambda g=g: g for g in gs],
            lambda: _product(gzx, W if xp is np else W.astype(dtype, copy=False)),
            lambda: _product(gzx.T, x),
            lambda: _product(gzh.T, self.before),
            lambda: gb,
            lambda: gb if self.cell.adds else summed_to(gzh, gb.shape),
        )
        return tuple(rules[i]() for i in wanted)

    def _through_steps(self, V: Array, gy: Array | None, gs: list[Array], dtype: Any) -> tuple[Array, Array]:
        """The gradients of zx and zh; ``gs``, those of the last states, become those of the first."""
        xp = get_array_module(V)
        gzx = gzh = xp.empty((len(self.before), len(V)), dtype)
        if not self.cell.adds:
            gzh = xp.empty_like(gzx)
        add_product = self._products(V, dtype)
        for (start, n), saved in zip(self.steps[::-1], self.saved[::-1]):
            here = slice(start, start + n)
            now = [g[:n] for g in gs]
            if gy is not None:
                now[0] += gy[here]
            for g, value in zip(now, self.cell.pull(saved, now, gzx[here], gzh[here])):
                g[...] = value
            add_product[n](gzh[here], now[0])
        return gzx, gzh

    def _derive_variables(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Variable, ...]:
        """The gradient of the same layer made of primitives."""
        inputs = self.retained_inputs()
        k = self.cell.num_states
        states = list(inputs[:k])
        x, W, V, b, d = inputs[k:]
        total = states[0].shape[0]
        zx = ops.add(ops.matmul(x, W.T), b)
        ys: dict[int, Any] = {}
        for start, n in self.steps:
            now = [ops.getitem(s, slice(n)) for s in states]
            zh = ops.add(ops.matmul(now[0], V.T), d)
            new = self.cell.composed(ops.getitem(zx, slice(start, start + n)), zh, now)
            ys[start] = new[0]
            states = [
                s if n == total else ops.concat([s, ops.getitem(old, slice(n, None))], axis=0)
                for s, old in zip(new, states)
            ]
        outputs = [ops.concat([ys[start] for start in sorted(ys)], axis=0), *states]
        given = [(y, g) for y, g in zip(outputs, gys) if g is not None]
        found = grad(
            [y for y, _ in given], [inputs[i] for i in wanted], [g for _, g in given], enable_double_backprop=True
        )
        return tuple(zeros_like(inputs[i]) if g is None else g for i, g in zip(wanted, found))


def _n_step(
    name: str, cell: Any, is_both: bool, n_layers: int, dropout_ratio: float, states: tuple[Any, ...], ws: Any,
    bs: Any, xs: Sequence[Operand], kwargs: dict[str, bool],
) -> tuple[Any, ...]:  # fmt: skip
    """Layers over sequences; see the public functions."""
    if kwargs:
        raise TypeError(f"{name}: unexpected argument {sorted(kwargs)[0]!r}; use dbrdist.using_config in its place")
    directions = 2 if is_both else 1
    num = n_layers * directions
    state_names = ("hx", "cx")
    given = {**dict(zip(state_names, states)), **{f"xs[{t}]": x for t, x in enumerate(xs)}}
    given |= {f"ws[{k}][{j}]": w for k, row in enumerate(ws) for j, w in enumerate(row)}
    given |= {f"bs[{k}][{j}]": b for k, row in enumerate(bs) for j, b in enumerate(row)}
    in_type = iter(together(name, **given))
    states = tuple(next(in_type) for _ in states)
    xs = [next(in_type) for _ in xs]
    ws = [[next(in_type) for _ in row] for row in ws]
    bs = [[next(in_type) for _ in row] for row in bs]
    counts = [len(x) for x in xs]
    if counts != sorted(counts, reverse=True):
        raise expected(name, "xs", "steps with a falling number of examples (the longest sequence first)", str(counts))
    for state_name, s in zip(state_names, states):
        if s.ndim != 3 or s.shape[0] != num or (counts and s.shape[1] < counts[0]) or s.shape != states[0].shape:
            what = f"shape ({num}, {counts[0] if counts else 'N'}, U): {n_layers} layers"
            raise expected(name, state_name, what + (" in both directions" if is_both else ""), s)
    per_layer = 2 * cell.num_gates
    for which, table in (("ws", ws), ("bs", bs)):
        lengths = [len(row) for row in table]
        if lengths != [per_layer] * num:
            raise expected(name, which, f"{num} lists of {per_layer}", f"lists of {lengths}")
    if not xs:
        return (*states, [])
    h = concat(xs, axis=0) if len(xs) > 1 else xs[0]
    lasts: list[list[Any]] = [[] for _ in states]
    for layer in range(n_layers):
        if layer and dropout_ratio:
            h = dropout(h, dropout_ratio)
        ys = []
        for direction in range(directions):
            k = layer * directions + direction
            y, *last = _layer(name, cell, k, counts, bool(direction), [s[k] for s in states], h, ws[k], bs[k])
            ys.append(y)
            for found, s in zip(lasts, last):
                found.append(s)
        h = concat(ys, axis=1) if is_both else ys[0]
    ends = [sum(counts[: t + 1]) for t in range(len(counts) - 1)]
    return (*[stacked(found, axis=0) for found in lasts], list(split_axis(h, ends, axis=0)))


def _layer(
    name: str,
    cell: Any,
    k: int,
    counts: list[int],
    is_backward: bool,
    states: list[Variable],
    x: Any,
    ws: Any,
    bs: Any,
) -> tuple[Any, ...]:
    units, gates = states[0].shape[1], cell.num_gates
    for j, (w, b) in enumerate(zip(ws, bs)):
        width = x.shape[1] if j < gates else units
        if w.shape != (units, width):
            raise expected(name, f"ws[{k}][{j}]", f"shape {(units, width)}", w)
        if b.shape != (units,):
            raise expected(name, f"bs[{k}][{j}]", f"shape {(units,)}", b)
    order = cell.order

    def joined(table: Sequence[Variable], offset: int) -> Variable:
        parts = [table[offset + j] for j in order]
        return concat(parts, axis=0) if len(parts) > 1 else parts[0]

    inputs = (*states, x, joined(ws, 0), joined(ws, gates), joined(bs, 0), joined(bs, gates))
    return RecurrentLayer(cell, counts, is_backward).apply(inputs)


_SHAPES = """

    Args:
        n_layers: number of layers.
        dropout_ratio: the probability that elements of the input of each layer but the first are dropped in training.
        hx{states}: {what} before the first step, shape ({layers}, N, U); both directions of a layer
            stand next to each other.
        ws: for each layer{both} a list of {n} weights, the first half (U, I) for the input and the other
            half (U, U) for the state; I is {width} from the second layer on.
        bs: likewise {n} biases (U,).
        xs: the steps, a list of (N_t, I) arrays with N_t falling: the longest sequences first.{activation}
        kwargs: accepted for no name; Chainer 1's ``train`` and ``use_cudnn`` raise a TypeError with a hint.

    Returns:
        ({result}ys): the last states in the shape of hx, and ys, a list of (N_t, {units}) arrays.

    Raises:
        ValueError: N_t grows, or the number or shape of states, weights or biases does not match.

    Example:
        >>> h, x = np.zeros(({first}, 3, 2)), [np.ones((3, 4)), np.ones((1, 4))]  # lengths 2, 1, 1
        >>> ws, bs = {weights}, {biases}
        >>> *states, ys = F.{name}(1, 0.0, {given}, ws, bs, x)
        >>> states[0].shape, [y.shape for y in ys]
        (({first}, 3, 2), [(3, {twice}), (1, {twice})])
    """
_ACTIVATION = """
        activation: ``"tanh"`` or ``"relu"``."""

_LSTM = """{kind} of long short-term memory (Hochreiter and Schmidhuber 1997) over sequences.

    i = s(W_0 x + W_4 h + b_0 + b_4), f = s(W_1 x + W_5 h + b_1 + b_5), a = tanh(W_2 x + W_6 h + b_2 + b_6),
    o = s(W_3 x + W_7 h + b_3 + b_7); c = f c + i a, h = o tanh(c), with s the sigmoid: the order of cuDNN's weights,
    in which Chainer computes too, whatever its documentation says of W_2 and W_3."""
_GRU = """{kind} of gated recurrent units (Cho et al. 2014, arXiv:1406.1078) over sequences.

    r = s(W_0 x + W_3 h + b_0 + b_3), z = s(W_1 x + W_4 h + b_1 + b_4),
    y = tanh(W_2 x + b_2 + r (W_5 h + b_5)), h = (1 - z) y + z h, with s the sigmoid."""
_RNN = """{kind} of plain recurrent units (Elman 1990) over sequences.

    h = f(W_0 x + W_1 h + b_0 + b_1), with f the ``activation``, ``tanh`` or ``relu``."""


def _documented(function: Any, text: str, is_both: bool, n: int) -> Any:
    has_cell = n == 8
    weights, biases = (f"[np.zeros((2, 4))] * {n // 2} + [np.zeros((2, 2))] * {n // 2}", f"[np.zeros(2)] * {n}")
    function.__doc__ = text.format(kind="Layers in both directions" if is_both else "Layers") + _SHAPES.format(
        states=", cx" if has_cell else "", what="outputs and cells" if has_cell else "outputs", n=n,
        layers="2 n_layers" if is_both else "n_layers", both=" and direction" if is_both else "",
        width="2 U" if is_both else "U", units="2 U" if is_both else "U", result="hy, cy, " if has_cell else "hy, ",
        activation=_ACTIVATION if n == 2 else "", name=function.__name__, given="h, h" if has_cell else "h",
        first=1 + is_both, twice=2 + 2 * is_both, weights=f"[{weights}] * {1 + is_both}",
        biases=f"[{biases}] * {1 + is_both}",
    )  # fmt: skip
    return function


def n_step_lstm(
    n_layers: int,
    dropout_ratio: float,
    hx: Operand,
    cx: Operand,
    ws: Sequence[Sequence[Operand]],
    bs: Sequence[Sequence[Operand]],
    xs: Sequence[Operand],
    **kwargs: Any,
) -> tuple[Variable, Variable, list[Variable]]:
    return _n_step("n_step_lstm", _LSTMCell, False, n_layers, dropout_ratio, (hx, cx), ws, bs, xs, kwargs)


def n_step_bilstm(
    n_layers: int,
    dropout_ratio: float,
    hx: Operand,
    cx: Operand,
    ws: Sequence[Sequence[Operand]],
    bs: Sequence[Sequence[Operand]],
    xs: Sequence[Operand],
    **kwargs: Any,
) -> tuple[Variable, Variable, list[Variable]]:
    return _n_step("n_step_bilstm", _LSTMCell, True, n_layers, dropout_ratio, (hx, cx), ws, bs, xs, kwargs)


def n_step_gru(
    n_layers: int,
    dropout_ratio: float,
    hx: Operand,
    ws: Sequence[Sequence[Operand]],
    bs: Sequence[Sequence[Operand]],
    xs: Sequence[Operand],
    **kwargs: Any,
) -> tuple[Variable, list[Variable]]:
    return _n_step("n_step_gru", _GRUCell, False, n_layers, dropout_ratio, (hx,), ws, bs, xs, kwargs)


def n_step_bigru(
    n_layers: int,
    dropout_ratio: float,
    hx: Operand,
    ws: Sequence[Sequence[Operand]],
    bs: Sequence[Sequence[Operand]],
    xs: Sequence[Operand],
    **kwargs: Any,
) -> tuple[Variable, list[Variable]]:
    return _n_step("n_step_bigru", _GRUCell, True, n_layers, dropout_ratio, (hx,), ws, bs, xs, kwargs)


def n_step_rnn(
    n_layers: int,
    dropout_ratio: float,
    hx: Operand,
    ws: Sequence[Sequence[Operand]],
    bs: Sequence[Sequence[Operand]],
    xs: Sequence[Operand],
    activation: str = "tanh",
    **kwargs: Any,
) -> tuple[Variable, list[Variable]]:
    return _n_step("n_step_rnn", _plain(activation), False, n_layers, dropout_ratio, (hx,), ws, bs, xs, kwargs)


def n_step_birnn(
    n_layers: int,
    dropout_ratio: float,
    hx: Operand,
    ws: Sequence[Sequence[Operand]],
    bs: Sequence[Sequence[Operand]],
    xs: Sequence[Operand],
    activation: str = "tanh",
    **kwargs: Any,
) -> tuple[Variable, list[Variable]]:
    return _n_step("n_step_birnn", _plain(activation), True, n_layers, dropout_ratio, (hx,), ws, bs, xs, kwargs)


def _plain(activation: str) -> Any:
    cells = {"tanh": _TanhCell, "relu": _ReLUCell}
    if activation not in cells:
        raise expected("n_step_rnn", "activation", "'tanh' or 'relu'", repr(activation))
    return cells[activation]


for _function, _text, _is_both, _n in (
    (n_step_lstm, _LSTM, False, 8), (n_step_bilstm, _LSTM, True, 8), (n_step_gru, _GRU, False, 6),
    (n_step_bigru, _GRU, True, 6), (n_step_rnn, _RNN, False, 2), (n_step_birnn, _RNN, True, 2),
):  # fmt: skip
    _documented(_function, _text, _is_both, _n)
