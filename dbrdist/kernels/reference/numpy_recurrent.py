"""The backward pass of recurrent layers from what a device's kernels have kept, in plain array code.

The forward pass on other arrays is that of ``functions.n_step_rnn``, which keeps what it likes.
"""

from __future__ import annotations

from typing import Any

from dbrdist.core.array import backend
from dbrdist.core.array.types import Array


def recurrent_backward(
    kind: str, steps: list[tuple[int, int]], kept: list[Array], V: Array, gy: Array | None, gs: list[Array]
) -> tuple[Array, Array]:
    """See device_dispatch.recurrent_backward."""
    xp, gates, units = backend.get_array_module(V), kept[0], V.shape[1]
    V = V.astype(gates.dtype, copy=False)
    gz = xp.empty((len(gates), len(V)), gates.dtype)
    gzh = gz if kind == "lstm" else xp.empty_like(gz)
    pull = _pull_lstm if kind == "lstm" else _pull_gru
    for start, n in reversed(steps):
        here = slice(start, start + n)
        g = gs[0][:n] if gy is None else gs[0][:n] + gy[here]
        parts = [gates[here, k * units : (k + 1) * units] for k in range(4)]
        of_x, of_h, rest = pull(xp, parts, kept[-1][here], g, [a[:n] for a in gs])
        gz[here] = xp.concatenate(of_x, axis=1)
        if gzh is not gz:
            gzh[here] = xp.concatenate(of_h, axis=1)
        gs[0][:n] = rest + gzh[here].dot(V)
    return gz, gzh


def _pull_lstm(xp: Any, gates: list[Array], was: Array, g: Array, gs: list[Array]) -> tuple[Any, Any, Any]:
    """Gradients of the sources of a, i, f and o; that of the cell is left in ``gs``."""
    a, i, f, o = gates
    t = xp.tanh(f * was + a * i)
    of_cell = gs[1] + g * o * (1 - t * t)
    of_x = [of_cell * i * (1 - a * a), of_cell * a * i * (1 - i), of_cell * was * f * (1 - f), g * t * o * (1 - o)]
    gs[1][...] = of_cell * f
    return of_x, of_x, 0


def _pull_gru(xp: Any, gates: list[Array], was: Array, g: Array, gs: list[Array]) -> tuple[Any, Any, Any]:
    """Gradients of the sources of the candidate, r and z, by way of x and of h, and what reaches h without them."""
    r, keep, fresh, w = gates
    of_fresh = g * (1 - keep) * (1 - fresh * fresh)
    rest = [of_fresh * w * r * (1 - r), g * (was - fresh) * keep * (1 - keep)]
    return [of_fresh, *rest], [of_fresh * r, *rest], g * keep


ROWS = {
    "recurrent_forward": lambda *arguments: lambda *arguments: None,
    "recurrent_backward": lambda *arguments: recurrent_backward,
}
