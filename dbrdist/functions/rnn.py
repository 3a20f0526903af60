"""Recurrent functions of a single step.

N examples, U units. Gates are linear in the input and in the state before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dbrdist.core.array.backend import Array, get_array_module, zeros_as
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import Operands, expected
from dbrdist.core.tape.elementwise_table import together
from dbrdist.core.tape.function_node import FunctionNode
from dbrdist.core.tape.variable import Operand, Variable, as_array
from dbrdist.functions.activation import sigmoid, tanh
from dbrdist.functions.array import separate, split_axis

_tanh, _sigmoid = tanh.primitive, sigmoid.primitive


def gates_in_place(z: Array, first: int) -> None:
    """In place over the last axis but one, (..., gates, U): tanh of the gates before ``first``, sigmoid of the rest."""
    xp = get_array_module(z)
    new, rest = z[..., :first, :], z[..., first:, :]
    if first:
        xp.tanh(new, out=new)
    if z.dtype.itemsize == 2:  # exp would overflow where the sigmoid is not 0
        rest[...] = _sigmoid(rest)
        return
    rest *= -1
    with np.errstate(over="ignore"):  # 1 / inf is the right result
        xp.exp(rest, out=rest)
    rest += 1
    xp.reciprocal(rest, out=rest)


def _slope(y: Operand) -> Operand:
    """The derivative of the sigmoid whose value is y."""
    return ops.mul(y, ops.sub(1.0, y))


def _tanh_slope(y: Operand) -> Any:
    """The derivative of the tanh whose value is y."""
    return ops.sub(1.0, ops.mul(y, y))


def _total(*terms: Operand | None) -> Any | None:
    """The sum of those that are there; None where none is."""
    found = None
    for term in terms:
        if term is not None:
            found = term if found is None else ops.add(found, term)
    return found


def zeros_like(x: Operand) -> Array:
    a = as_array(x)
    return zeros_as(a, a.shape, a.dtype)


def _interleaved(x: Variable, n: int) -> list[Variable]:
    """The n gates of x (N, n U, ...), which stand side by side for each unit."""
    return list(separate(ops.reshape(x, (x.shape[0], x.shape[1] // n, n, *x.shape[2:])), 2))


def _interleave(parts: Sequence[Operand]) -> Operand:
    """The inverse of :func:`_interleaved`."""
    shape = parts[0].shape
    joined = ops.concat([ops.reshape(p, (*shape[:2], 1, *shape[2:])) for p in parts], axis=2)
    return ops.reshape(joined, (shape[0], shape[1] * len(parts), *shape[2:]))


class LSTM(FunctionNode):
    """c = tanh(a) s(i) + c_prev s(f), h = tanh(c) s(o), with a, i, f, o beside each other in x and s the sigmoid

    Rows of c_prev beyond those of x pass through."""

    operands = Operands("lstm", c_prev="float", x="float")

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        c_prev, x = xs
        n = len(x)
        self.retain_inputs((0, 1))
        gates = x.reshape(n, c_prev.shape[1], 4, *x.shape[2:])
        z = gates.transpose(2, 0, 1, *range(3, gates.ndim)).copy().reshape(4, -1)
        gates_in_place(z, 1)
        a, i, f, o = z.reshape(4, n, *c_prev.shape[1:])
        c = a * i
        c += f * c_prev[:n]
        t = _tanh(c)
        self.saved = a, i, f, o, t
        return (c if n == len(c_prev) else ops.concat([c, c_prev[n:]], axis=0)), o * t

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        c_prev, x = self.retained_inputs()
        n = x.shape[0]
        c_new = ops.getitem(c_prev, slice(n)) if n < c_prev.shape[0] else c_prev
        if self._on_variables:
            a, i, f, o = (rule(part) for rule, part in zip((_tanh, *[_sigmoid] * 3), _interleaved(x, 4)))
            t = _tanh(ops.add(ops.mul(a, i), ops.mul(f, c_new)))
        else:
            a, i, f, o, t = self.saved
        gc, gh = gys
        g = gc if gc is None or n == c_prev.shape[0] else ops.getitem(gc, slice(n))
        if gh is None:
            go = zeros_like(t)
        else:
            go = ops.mul(ops.mul(gh, t), _slope(o))
            g = _total(ops.mul(ops.mul(gh, o), _tanh_slope(t)), g)
        gxs: dict[int, Any] = {}
        if 0 in wanted:
            gxs[0] = ops.mul(g, f)
            if n < c_prev.shape[0]:
                rest = slice(n, None)
                beyond = zeros_like(ops.getitem(c_prev, rest)) if gc is None else ops.getitem(gc, rest)
                gxs[0] = ops.concat([gxs[0], beyond], axis=0)
        if 1 in wanted:
            ga = ops.mul(ops.mul(g, i), _tanh_slope(a))
            gi = ops.mul(ops.mul(g, a), _slope(i))
            gf = ops.mul(ops.mul(g, c_new), _slope(f))
            gxs[1] = _interleave([ga, gi, gf, go])
        return tuple(gxs[k] for k in wanted)


def lstm(c_prev: Operand, x: Operand) -> tuple[Variable, Variable]:
    """One step of long short-term memory with forget gates (Gers et al. 2000): c = tanh(a) s(i) + c_prev s(f),
    h = tanh(c) s(o), with s the sigmoid.

    Args:
        c_prev: the cell before, shape (N, U, ...). Where x has fewer rows M, the rows from M on pass through to the new
            cell (sequences sorted by descending length).
        x: the inputs of the gates, shape (M, 4 U, ...): for each unit the cell input a and the input, forget and output
            gates i, f, o, in this order.

    Returns:
        The new cell c (N, U, ...) and the output h (M, U, ...).

    Raises:
        ValueError: axis 1 of x is no multiple of 4, or ``c_prev`` does not match x.

    Example:
        >>> c, h = F.lstm(np.ones((1, 2)), np.zeros((1, 8)))
        >>> c.array
        array([[0.5, 0.5]])
    """
    c_prev, x = together("lstm", c_prev=c_prev, x=x)
    if x.ndim < 2 or x.shape[1] % 4:
        raise expected("lstm", "x", "shape (N, 4 U, ...)", x)
    if c_prev.shape[1:] != (x.shape[1] // 4, *x.shape[2:]) or len(c_prev) < len(x):
        shape = (x.shape[1] // 4, *x.shape[2:])
        raise expected("lstm", "c_prev", f"shape {(len(x), *shape)} to match x, or more rows", c_prev)
    c, h = LSTM().apply((c_prev, x))
    return c, h


class GatedSum(FunctionNode):
    """c = u_1 s(z_1) + ... + u_n s(z_n), h = tanh(c) s(o), with s the sigmoid and u_k = x_k, or tanh(x_k) where k is at
    most ``num_new``. The inputs are x_1, ..., x_n, z_1, ..., z_n and o, all of one shape."""

    def __init__(self, num_new: int) -> None:
        self.num_new = num_new

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs(tuple(range(len(xs))))
        c, us, gates, t = self.parts(xs)
        self.saved = us, gates, t
        return c, ops.mul(t, gates[-1])

    def parts(self, xs: tuple[Operand, ...]) -> tuple[Any, ...]:
        """c, all u, all gates between 0 and 1, and tanh(c)."""
        n = len(xs) // 2
        us = [_tanh(x) if k < self.num_new else x for k, x in enumerate(xs[:n])]
        gates = [_sigmoid(z) for z in xs[n:]]
        c = _total(*map(ops.mul, us, gates))
        return c, us, gates, _tanh(c)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        us, gates, t = self.parts(self.retained_inputs())[1:] if self._on_variables else self.saved
        gc, gh = gys
        n, g = len(us), gc
        if gh is not None:
            g = _total(ops.mul(ops.mul(gh, gates[n]), _tanh_slope(t)), gc)

        def gradient(i: int) -> Any:
            if i < n:
                gu = ops.mul(g, gates[i])
                return ops.mul(gu, _tanh_slope(us[i])) if i < self.num_new else gu
            if i == 2 * n:
                return zeros_like(t) if gh is None else ops.mul(ops.mul(gh, t), _slope(gates[n]))
            return ops.mul(ops.mul(g, us[i - n]), _slope(gates[i - n]))

        return tuple([gradient(i) for i in wanted])


def slstm(c_prev1: Operand, c_prev2: Operand, x1: Operand, x2: Operand) -> tuple[Variable, Variable]:
    """One step of S-LSTM, which joins two cells (Zhu et al. 2015, arXiv:1503.04881).

    c = tanh(a1) s(i1) + tanh(a2) s(i2) + c_prev1 s(f1) + c_prev2 s(f2), h = tanh(c) s(o1 + o2), s is the sigmoid.

    Args:
        c_prev1, c_prev2: the cells of the two children, shape (N, U, ...).
        x1, x2: the inputs of the gates, shape (N, 4 U, ...): a, i, f, o for each unit, as in :func:`lstm`.

    Returns:
        The new cell c and the output h, both (N, U, ...).

    Raises:
        ValueError: axis 1 of x1 is no multiple of 4, or a shape does not match x1.

    Example:
        >>> c, h = F.slstm(np.ones((1, 2)), np.ones((1, 2)), np.zeros((1, 8)), np.zeros((1, 8)))
        >>> c.array
        array([[1., 1.]])
    """
    c1, c2, x1, x2 = together("slstm", c_prev1=c_prev1, c_prev2=c_prev2, x1=x1, x2=x2)
    if x1.ndim < 2 or x1.shape[1] % 4:
        raise expected("slstm", "x1", "shape (N, 4 U, ...)", x1)
    cell = (len(x1), x1.shape[1] // 4, *x1.shape[2:])
    for name, value, shape in (("x2", x2, x1.shape), ("c_prev1", c1, cell), ("c_prev2", c2, cell)):
        if value.shape != shape:
            raise expected("slstm", name, f"shape {shape} to match x1", value)
    a1, i1, f1, o1 = _interleaved(x1, 4)
    a2, i2, f2, o2 = _interleaved(x2, 4)
    c, h = GatedSum(2).apply((a1, a2, c1, c2, i1, i2, f1, f2, ops.add(o1, o2)))
    return c, h


def tree_lstm(*inputs: Any) -> tuple[Any, Any]:
    """One step of Tree-LSTM over any number of children (Tai et al. 2015, arXiv:1503.00075).

    c = tanh(a) s(i) + c_1 s(f_1) + ... + c_n s(f_n), h = tanh(c) s(o), with s the sigmoid.

    Args:
        inputs: the cells c_1, ..., c_n of the children, shape (N, U, ...), then the inputs of the gates, shape
            (N, (3 + n) U, ...): a, i, o, f_1, ..., f_n follow each other.

    Returns:
        The new cell c and the output h, both (N, U, ...).

    Raises:
        ValueError: the shapes of the cells do not match that of the last input.

    Example:
        >>> c, h = F.tree_lstm(np.ones((1, 2)), np.ones((1, 2)), np.zeros((1, 10)))
        >>> c.array
        array([[1., 1.]])
    """
    if len(inputs) < 2:
        raise TypeError(f"tree_lstm: expected at least one cell and x, got {len(inputs)} arguments")
    names = [*[f"c_{k + 1}" for k in range(len(inputs) - 1)], "x"]
    *cells, x = together("tree_lstm", **dict(zip(names, inputs)))
    parts = 3 + len(cells)
    if x.ndim < 2 or x.shape[1] % parts:
        raise expected("tree_lstm", "x", f"shape (N, {parts} U, ...) with {len(cells)} cells", x)
    units = x.shape[1] // parts
    for name, c in zip(names, cells):
        if c.shape != (len(x), units, *x.shape[2:]):
            raise expected("tree_lstm", name, f"shape {(len(x), units, *x.shape[2:])} to match x", c)
    a, i, o, *fs = split_axis(x, parts, 1)
    c, h = GatedSum(1).apply((a, *cells, i, *fs, o))
    return c, h
