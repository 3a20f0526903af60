"""Recurrent functions: single steps, and layers over packed sequences."""

from __future__ import annotations

from typing import Any

import numpy as np

from dbrdist.onnx.conversion import Conversion, converts, product
from dbrdist.onnx.graph import OnnxGraph

# ONNX's operator of each cell, and the order of its gates among ours.
_CELLS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "_LSTMCell": ("LSTM", (1, 3, 2, 0), {}),  # ours a, i, f, o; ONNX i, o, f, c
    "_GRUCell": ("GRU", (2, 1, 0), {"linear_before_reset": 1}),  # ours candidate, r, z; ONNX z, r, h
    "_TanhCell": ("RNN", (0,), {"activations": ["Tanh"]}),
    "_ReLUCell": ("RNN", (0,), {"activations": ["Relu"]}),
}


def _gated(g: OnnxGraph, terms: list[tuple[str, str]]) -> str:
    """The sum of the products of values and sigmoids of gates."""
    total = ""
    for u, z in terms:
        part = g.op("Mul", u, g.op("Sigmoid", z))
        total = g.op("Add", total, part) if total else part
    return total


def _output(g: OnnxGraph, c: str, o: str) -> str:
    return g.op("Mul", g.op("Tanh", c), g.op("Sigmoid", o))


@converts("LSTM")
def _lstm(g: OnnxGraph, c: Conversion) -> list[str]:
    before, x = c.names
    (rows, units, *rest), (n, *_) = c.shape(0), c.shape(1)
    gates = c.reshape(x, (n, units, 4, *rest))
    a, i, f, o = (g.take(gates, 2, k) for k in range(4))
    first = before if n == rows else g.part(before, 0, 0, c.fixed("the number of sequences", int(n), n.other))
    cell = _gated(g, [(g.op("Tanh", a), i), (first, f)])
    whole = cell if n == rows else g.op("Concat", cell, g.part(before, 0, int(n), 2**31), axis=0)
    return [whole, _output(g, cell, o)]


@converts("GatedSum")
def _gated_sum(g: OnnxGraph, c: Conversion) -> list[str]:
    n = len(c.names) // 2
    us = [g.op("Tanh", u) if k < c.node.num_new else u for k, u in enumerate(c.names[:n])]
    cell = _gated(g, list(zip(us, c.names[n : 2 * n])))
    return [cell, _output(g, cell, c.names[2 * n])]


class _Steps:
    """The steps of a packed sequence: how many examples each has, and where they are."""

    def __init__(self, steps: list[tuple[int, int]]) -> None:
        self.starts, self.counts = zip(*sorted(steps))
        self.rows = self.counts[0]  # the examples of the first step, the longest sequences first

    @property
    def is_dense(self) -> bool:
        return set(self.counts) == {self.rows}

    def table(self) -> Any:
        """(T, N): the packed place of each example at each step, or the first place where it has none."""
        found = np.zeros((len(self.counts), self.rows), np.int64)
        for row, start, count in zip(found, self.starts, self.counts):
            row[:count] = start + np.arange(count)
        return found

    def lengths(self) -> Any:
        """The number of steps of each example."""
        return (np.asarray(self.counts)[:, None] > np.arange(self.rows)).sum(axis=0).astype(np.int32)

    def places(self) -> Any:
        """For each packed place its position in a flat (T N) table."""
        return np.concatenate([t * self.rows + np.arange(n) for t, n in enumerate(self.counts)])


def _reordered(g: OnnxGraph, x: str, num: int, units: int, order: tuple[int, ...]) -> str:
    """The blocks of a vector or matrix of gates in another order, behind an axis for directions."""
    if num > 1:
        blocks = [g.part(x, 0, k * units, (k + 1) * units) for k in order]
        x = g.op("Concat", *blocks, axis=0)
    return g.op("Unsqueeze", x, g.ints([0]))


@converts("RecurrentLayer")
def _layer(g: OnnxGraph, c: Conversion) -> list[str]:
    cell, steps = c.node.cell, _Steps(c.node.steps)
    kind, order, attributes = _CELLS[cell.__name__]
    num = cell.num_states
    states, (x, W, V, b, d) = c.names[:num], c.names[num:]
    (total, units), (_, width) = c.shape(0), c.shape(num)
    gates = len(order)
    weights = [_reordered(g, w, gates, units, order) for w in (W, V)]
    bias = g.op("Concat", *(_reordered(g, v, gates, units, order) for v in (b, d)), axis=1)
    T, lengths = len(steps.counts), ""
    if steps.is_dense:
        rows: Any = total if steps.rows == total else steps.rows
        x = c.reshape(x, (T, rows, width))
    else:
        rows = c.fixed("the lengths of sequences", steps.rows, steps.rows)
        c.fixed("the lengths of sequences", list(c.node.steps), list(c.other.node.steps))
        x, lengths = g.op("Gather", x, g.constant(steps.table()), axis=0), g.constant(steps.lengths())
    given = [g.op("Unsqueeze", s if rows == total else g.part(s, 0, 0, int(rows)), g.ints([0])) for s in states]
    found = g.ops(
        kind, (x, *weights, bias, lengths, *given), 1 + num, hidden_size=int(units),
        direction="reverse" if _is_backward(c.node.steps) else "forward", **attributes,
    )  # fmt: skip
    y = c.reshape(found[0], (product((T, rows)), units))
    if not steps.is_dense:
        y = g.op("Gather", y, g.constant(steps.places()), axis=0)
    last = [g.op("Squeeze", s, g.ints([0])) for s in found[1:]]
    if rows != total:  # examples without a step keep their state
        last = [g.op("Concat", s, g.part(old, 0, int(rows), 2**31), axis=0) for s, old in zip(last, states)]
    return [y, *last]


def _is_backward(steps: list[tuple[int, int]]) -> bool:
    return len(steps) > 1 and steps[0][0] > steps[-1][0]
