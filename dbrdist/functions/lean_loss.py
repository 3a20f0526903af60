"""The mean cross entropy of a few scores on the host: the lean path of ``loss.softmax_cross_entropy``.

N examples, K classes; t are the targets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray

from dbrdist.core import ops
from dbrdist.core.arrays import mean_weights, per_row, row_starts
from dbrdist.core.backend import Array, number
from dbrdist.core.graph import FunctionNode, call
from dbrdist.core.variable import Variable
from dbrdist.functions.activation import Softmax
from dbrdist.kernels.small import are_classes, below_largest, cross_entropy_gradient, divide_rows

_LEAN_SCORES = 1 << 11  # above, the kernels for softmax pay
_LABELS = "bhilqBHI"  # integers that int64 holds; looking for the character takes a tenth of comparing types
_KEPT_CONSTANTS = 64
# by name: to find them in NumPy again takes a tenth of their time on a small batch
_empty, _exp, _log, _subtract, _sum = np.empty, np.exp, np.log, np.subtract, np.add.reduce
_constants: dict[Any, Any] = {}  # by shape and type of the scores


class MeanCrossEntropy(FunctionNode):
    """y = mean of -ln softmax(x)[n, t_n]; x (N, K) on the host, small, every label valid: the lean path.

    gx = (softmax(x) - onehot(t)) gy / N.
    """

    def __init__(self, t: Array) -> None:
        self.t = t

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        x = xs[0]
        self._keep_inputs = (0,)
        dtype = x.dtype
        starts, rows, scale, weights = _constants_of(x.shape, dtype)
        p, at, losses = below_largest(x, self.t, starts, rows)
        _exp(p, p)
        total = _sum(p, 1)  # row by row, so that a row's sum does not depend on its neighbours
        divide_rows(p, total, rows)
        self._for_rule = at, p, scale
        y = _empty((), dtype)
        _subtract(_log(total, total), losses, losses).dot(weights, y)
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...]) -> tuple[Any, ...]:
        at, p, scale = self._for_rule
        gy = gys[0]
        if self._on_variables:
            p = call(Softmax(1), self.retained_inputs()[0])
            onehot = np.zeros(p.shape, p.dtype)
            onehot.put(at, 1)
            scaled = gy * scale
            return (ops.sub(ops.mul(p, scaled), ops.mul(onehot, scaled)),)
        return (cross_entropy_gradient(p, at, gy, scale),)


def _constants_of(shape: tuple[int, ...], dtype: Any) -> Any:
    """The places where rows start, the index that spreads a vector over columns, 1 / N, and N of it."""
    key = shape, dtype
    found = _constants.get(key)
    if found is None:
        if len(_constants) >= _KEPT_CONSTANTS:
            _constants.clear()
        scale = 1.0 / shape[0]
        found = row_starts(*shape), per_row(*shape), number(scale, dtype), mean_weights(shape[0], dtype)
        _constants[key] = found
    return found


def lean_cross_entropy(x: Any, t: Any) -> Any:
    """The mean of -ln softmax(x)[n, t_n] as a Variable, or None where x and t are not for the lean path."""
    if not _is_plain(x._array if isinstance(x, Variable) else x, t):
        return None
    return MeanCrossEntropy(t).apply((x,))[0]


def _is_plain(x: Any, t: Any) -> bool:
    """True for a few scores (N, K) on the host, N > 0, whose labels are all from 0 to K - 1."""
    shape = getattr(x, "shape", ())
    if len(shape) != 2 or type(t) is not ndarray or t.shape != shape[:1] or not 0 < x.size <= _LEAN_SCORES:
        return False
    dtype = x.dtype
    if t.dtype.char not in _LABELS or dtype.char not in "fd" or not dtype.isnative:
        return False
    return are_classes(t, shape[1])
