"""The mean cross entropy of a few scores on the host: the lean path of ``loss.softmax_cross_entropy``.

N examples, K classes; t are the targets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray

from dbrdist.core.array.array_operations import mean_weights, per_row, row_starts
from dbrdist.core.array.backend import Array, number
from dbrdist.core.tape import ops
from dbrdist.core.tape.function_node import FunctionNode, call
from dbrdist.core.tape.variable import Operand, Variable
from dbrdist.functions.activation import Softmax
from dbrdist.kernels.small_arrays.small import (
    are_classes,
    below_largest,
    cross_entropy_gradient,
    divide_by_sums,
    mean_cross_entropy,
)

_LEAN_SCORES = 1 << 11  # above, the kernels for softmax pay
_LABELS = "bhilqBHI"  # integers that int64 holds; looking for the character takes a tenth of comparing types
_KEPT_PLANS = 64
# by name: to find them in NumPy again takes a tenth of their time on a small batch
_exp, _log = np.exp, np.log
_plans: dict[Any, Any] = {}  # by shapes and types of scores and labels; () where the lean path is not for them


class MeanCrossEntropy(FunctionNode):
    """y = mean of -ln softmax(x)[n, t_n]; x (N, K) on the host, small, every label valid: the lean path.

    gx = (softmax(x) - onehot(t)) gy / N. Before the call ``_for_rule`` holds the labels and their plan.
    """

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        t, (starts, rows, scale, weights) = self._for_rule
        self._keep_inputs = (0,)
        p, at, below = below_largest(xs[0], t, starts, rows)
        _exp(p, p)
        total = divide_by_sums(p, rows)
        self._for_rule = at, p, scale
        return (mean_cross_entropy(_log(total, total), below, p, weights),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        at, p, scale = self._for_rule
        gy = gys[0]
        if self._on_variables:
            p = call(Softmax(1), self.retained_inputs()[0])
            onehot = np.zeros(p.shape, p.dtype)
            onehot.put(at, 1)
            scaled = gy * scale
            return (ops.sub(ops.mul(p, scaled), ops.mul(onehot, scaled)),)
        return (cross_entropy_gradient(p, at, gy, scale),)


def lean_cross_entropy(x: Operand, t: Array) -> Variable | None:
    """The mean of -ln softmax(x)[n, t_n] as a Variable, or None where x and t are not for the lean path."""
    a = x._array if isinstance(x, Variable) else x
    if type(t) is not ndarray or type(a) is not ndarray:
        return None
    key = a.shape, a.dtype, t.shape, t.dtype
    plan = _plans.get(key)
    if plan is None:
        plan = _plan(key)
    if not plan or not are_classes(t, key[0][1]):
        return None
    function = MeanCrossEntropy()
    function._for_rule = t, plan
    return function.apply((x,))[0]


def _plan(key: Any) -> Any:
    """What the lean path needs for a few scores (N, K) and labels (N,), N > 0; () for others, and other types.

    The places where rows start, the index that spreads a vector over columns, 1 / N, and N of it.
    """
    shape, dtype, t_shape, t_dtype = key
    if shape[1:] == (1,):  # the general path warns of it
        return ()
    if len(_plans) >= _KEPT_PLANS:
        _plans.clear()
    is_lean = len(shape) == 2 and t_shape == shape[:1] and 0 < shape[0] * shape[1] <= _LEAN_SCORES
    plan: tuple[Any, ...] = ()
    if is_lean and t_dtype.char in _LABELS and dtype.char in "fd" and dtype.isnative:
        plan = row_starts(*shape), per_row(*shape), number(1.0 / shape[0], dtype), mean_weights(shape[0], dtype)
    _plans[key] = plan
    return plan
