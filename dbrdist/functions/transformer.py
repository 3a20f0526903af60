"""Parts of a Transformer that a GPU does in one pass each: a bias with what follows it, and attention of several heads.

A linear map may leave out its bias for the function that comes next, which then adds it on the way: to the tape the
result is what it would be with the bias, whose gradient the map takes. Legend: N rows, K columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dbrdist import kernels
from dbrdist.core.array.backend import Array, get_array_module, is_on_gpu, zeros_as
from dbrdist.core.array.config import config, no_backprop_mode
from dbrdist.core.array.random import Drop, drawn, next_draw
from dbrdist.core.array.types import Destinations
from dbrdist.core.tape import ops
from dbrdist.core.tape.call import revive
from dbrdist.core.tape.function_node import FunctionNode
from dbrdist.core.tape.variable import Operand, Variable
from dbrdist.functions.blockwise_attention import Attention, Dropped, Seen
from dbrdist.functions.connection import LinearFunction
from dbrdist.functions.example_normalization import LayerNormalizationGradient, layer_normalization
from dbrdist.functions.noise import dropout
from dbrdist.functions.normalization import in_types_of_inputs
from dbrdist.functions.rectifier import relu


class LinearBeforeBias(LinearFunction):
    """y = x W^T + b of which b has not been added yet, for the function that comes next"""

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return LinearFunction.forward(self, xs[:2])


def linear_before_bias(x: Operand, W: Variable, b: Variable | None) -> Variable:
    """x W^T of x (N, I) and W (O, I), to be given to one of the functions below together with b (O)."""
    return LinearBeforeBias().apply((x, W) if b is None else (x, W, b))[0]


def with_bias(z: Variable, b: Variable | None) -> Variable:
    """z + b, where no kernel adds it on the way; the gradient of b is that of the linear map."""
    return z if b is None else ops.add(z, b.array.astype(z.dtype, copy=False))


def _drop(z: Array, ratio: float) -> Drop:
    if not (ratio and config.train):
        return None, 0, 1.0
    draw = next_draw(len(z), -(-z.shape[1] // 2))
    return draw, int(np.uint32(ratio * 2.0**32)), float(z.dtype.type(1.0 / (1.0 - ratio)))


def _array_of(b: Variable | None) -> Array | None:
    return None if b is None else b.array


def _factors(kept: Array, like: Any, scale: float) -> Array:
    """The mask of a dropout as numbers of the type of ``like``."""
    return kept.astype(like.dtype) * like.dtype.type(scale)


def _dropped_gradient(gy: Any, kept: Array | None, scale: float) -> Any:
    """gy times the mask of a dropout, arrays or Variables."""
    if kept is None:
        return gy
    made = None if isinstance(gy, Variable) else kernels.masked(gy, kept, scale)
    return ops.mul(gy, _factors(kept, gy, scale)) if made is None else made


# ---- ReLU and dropout


class RectifiedDropout(FunctionNode):
    """y = max(z + b, 0) m of a dropout's mask m, written over z; gz = gy m where y is not 0, which tells it all"""

    def __init__(self, y: Array, scale: float) -> None:
        self.y = y
        self.scale = scale

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (self.y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...]) -> tuple[Any, ...]:
        [gy] = gys
        gz = None if self._on_variables else kernels.relu_dropout_backward(self.y, gy, self.scale)
        return (ops.mul(gy, _factors(self.y != 0, gy, self.scale)) if gz is None else gz,)


def rectified_dropout(z: Variable, b: Variable | None, ratio: float) -> Variable:
    """Dropout of the ReLU of a linear map, z of :func:`linear_before_bias` and b its bias."""
    drop = _drop(z.array, ratio)
    y = kernels.relu_dropout(z.array, _array_of(b), *drop)
    if y is None:
        return dropout(relu(with_bias(z, b)), ratio)
    _note_draw(drop)
    return RectifiedDropout(y, drop[2]).apply((z,))[0]


def _note_draw(drop: Drop) -> None:
    if drop[0] is not None:
        drawn()


# ---- dropout, addition, layer normalization


class DroppedSum(FunctionNode):
    """y = (z + b) m + r of a dropout's mask m, written over z; gz = gy m, gr = gy"""

    def __init__(self, y: Array, kept: Array | None, scale: float) -> None:
        self.y = y
        self.kept = kept
        self.scale = scale

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (self.y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...]) -> tuple[Any, ...]:
        [gy] = gys
        return tuple([gy if i else _dropped_gradient(gy, self.kept, self.scale) for i in wanted])


def dropped_sum(z: Variable, b: Variable | None, r: Variable, ratio: float) -> Variable:
    """r (N, K) plus the dropout of a linear map, z of :func:`linear_before_bias` and b its bias."""
    drop = _drop(z.array, ratio)
    made = kernels.dropout_add(z.array, _array_of(b), r.array, *drop)
    if made is None:
        return ops.add(r, dropout(with_bias(z, b), ratio))
    _note_draw(drop)
    return DroppedSum(*made, drop[2]).apply((z, r))[0]


class NormalizedSum(FunctionNode):
    """The layer normalization of s = (z + b) m + r of a dropout's mask m; s is written over z"""

    writes = True

    def __init__(self, made: tuple[Array, Array, Array, Array | None], scale: float, eps: float) -> None:
        self.y, self.mean, self.var, self.kept = made
        self.scale, self.eps = scale, eps

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 2))
        return (self.y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Destinations) -> tuple[Any, ...]:
        [gy] = gys
        room = {} if out is None else dict(zip(wanted, out))
        grads = self._again(gy) if self._on_variables else self._at_once(gy, room)
        return in_types_of_inputs(self, wanted, [grads[i] for i in wanted])

    def _at_once(self, gy: Array, room: dict[int, Any]) -> tuple[Any, ...]:
        s, gamma = self.retained_inputs()
        operands = s, gamma, self.mean, self.var, gy, self.eps
        rooms = room.get(2), room.get(3)
        if self.kept is not None:
            made = kernels.ln_of_sum_backward(*operands, self.kept, self.scale, *rooms)
            if made is not None:
                return made
        gs, *others = kernels.ln_backward_into(*operands, *rooms) or kernels.ln_backward(*operands)
        return _dropped_gradient(gs, self.kept, self.scale), gs, *others

    def _again(self, gy: Variable) -> tuple[Any, ...]:
        """The same of Variables; s as a function of z and r has the value that it had."""
        z, gamma = self.retained_inputs()
        value = z.array
        z, r = revive(self.inputs[0], zeros_as(value, value.shape, value.dtype)), revive(self.inputs[1], value)
        s = ops.add(_dropped_gradient(z, self.kept, self.scale), r)
        gs, *others = LayerNormalizationGradient(self.mean, self.var, self.eps).apply((s, gamma, gy))
        return _dropped_gradient(gs, self.kept, self.scale), gs, *others


def normalized_sum(
    z: Variable, b: Variable | None, r: Variable, ratio: float, gamma: Variable, beta: Variable, eps: float
) -> Variable:
    """Layer normalization of :func:`dropped_sum`, with a scale gamma and a shift beta."""
    drop = _drop(z.array, ratio)
    made = kernels.ln_of_sum(z.array, _array_of(b), r.array, gamma.array, beta.array, eps, *drop)
    if made is None:
        return layer_normalization(ops.add(r, dropout(with_bias(z, b), ratio)), gamma, beta, eps)
    _note_draw(drop)
    return NormalizedSum(made, drop[2], eps).apply((z, r, gamma, beta))[0]


# ---- attention


def _product(a: Array, b: Array, factor: float = 1.0) -> Array:
    """Of stacks that have a kernel."""
    y = kernels.scaled_matmul(a, b, factor)
    assert y is not None
    return y


def _merged(ys: tuple[Array, ...]) -> tuple[Array, ...]:
    """Heads side by side again."""
    made = kernels.merge_heads(ys)
    assert made is not None
    return made


class HeadsOnDevice(FunctionNode):
    """y = w v with w = softmax(scale q k' + added) of the keys that are seen, dropped, for each of H heads of arrays

    (B, L, H D), which may lack their biases, or (B, H, L, D). See :class:`Attention` for the gradients.
    """

    gives_new = True

    def __init__(self, num_heads: int | None, scale: float, seen: Seen, dropped: Dropped | None) -> None:
        self.num_heads = num_heads
        self.scale, self.seen, self.dropped = scale, seen, dropped
        self.fused: list[Array | None] | None = None  # what the backward pass of a fused kernel needs

    def prepare(self, xs: tuple[Array, ...], biases: tuple[Array | None, ...]) -> bool:
        """Compute the result; False where there is no kernel for that."""
        heads: Any = xs if self.num_heads is None else kernels.split_heads(xs, biases, self.num_heads)
        if heads is None:
            return False
        q, k, v = heads
        drop: Drop = (None, 0, 1.0)
        if self.dropped is not None:
            drop = self.dropped.lines.draw, int(self.dropped.threshold), float(q.dtype.type(self.dropped.scale))
        if self.seen.keys is None and self.seen.added is None:
            is_merged = self.num_heads is not None
            fused = kernels.fused_attention(q, k, v, drop, self.scale, self.seen.is_causal, is_merged)
            if fused is not None:
                self.y, *self.fused = fused
                self.kept = q, k, v
                return True
        s, added = kernels.scaled_matmul(q, k.swapaxes(2, 3), self.scale), self.seen.added
        if s is None:
            return False
        weights = kernels.attention_weights(s, self.seen.keys, added, self.seen.is_causal, *drop)
        if weights is None:
            return False
        y = _product(weights[1], v)
        self.y = y if self.num_heads is None else _merged((y,))[0]
        self.kept = q, k, v, *weights
        return True

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (self.y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...]) -> tuple[Any, ...]:
        [gy] = gys
        gxs = self._again(gy) if self._on_variables else self._at_once(wanted, gy)
        return tuple([gxs[i] for i in wanted]) if self._on_variables else gxs

    def _at_once(self, wanted: tuple[int, ...], gy: Array) -> tuple[Any, ...]:
        gy = get_array_module(gy).ascontiguousarray(gy.astype(self.y.dtype, copy=False))
        if self.fused is not None:
            operands = *self.kept, self.y, *self.fused, gy
            made = kernels.fused_attention_backward(
                *operands, self.scale, self.seen.is_causal, self.num_heads is not None
            )
            if made is None:  # as where cuDNN has been switched off since
                with no_backprop_mode():
                    made = tuple([g.array for g in self._again(Variable(gy))])
            return tuple([made[i] for i in wanted])
        q, k, v, p, w = self.kept
        if self.num_heads is not None:
            [gy] = kernels.split_heads((gy,), (None,), self.num_heads) or ()
        grads = {2: lambda: _product(w.swapaxes(2, 3), gy)}
        if wanted != (2,):
            gs: Any = kernels.attention_weights_backward(p, w, _product(gy, v.swapaxes(2, 3)))
            grads[0] = lambda: _product(gs, k, self.scale)
            grads[1] = lambda: _product(gs.swapaxes(2, 3), q, self.scale)
        gxs = tuple([grads[i]() for i in wanted])
        return gxs if self.num_heads is None else _merged(gxs)

    def _again(self, gy: Variable) -> tuple[Any, ...]:
        """The same of Variables."""
        arrays = self.kept[:3] if self.num_heads is None else _merged(self.kept[:3])
        xs = [self._heads(revive(node, a)) for node, a in zip(self.inputs, arrays)]
        made = Attention(self.scale, self.seen, self.dropped)
        return tuple([self._rows(g) for g in made.of_variables(*xs, self._heads(gy))])

    def _heads(self, x: Variable) -> Variable:
        if self.num_heads is None:
            return x
        return ops.transpose(ops.reshape(x, (*x.shape[:2], self.num_heads, x.shape[2] // self.num_heads)), (0, 2, 1, 3))

    def _rows(self, y: Variable) -> Variable:
        if self.num_heads is None:
            return y
        return ops.reshape(ops.transpose(y, (0, 2, 1, 3)), (y.shape[0], y.shape[2], y.shape[1] * y.shape[3]))


def heads_on_device(
    xs: tuple[Variable, ...], biases: tuple[Variable | None, ...], num_heads: int | None, scale: float, seen: Seen,
    dropped: Dropped | None,
) -> Variable | None:  # fmt: skip
    """Attention of queries, keys and values (B, L, H D) on a GPU, plus biases (H D); or of heads (B, H, L, D).

    None where the GPU has no kernels for it.
    """
    arrays = tuple([x.array for x in xs])
    first = arrays[0]
    lead = slice(None, 1 if num_heads is not None else 2)
    if (
        not all(
            is_on_gpu(a) and a.size and a.dtype == first.dtype and a.shape[lead] == first.shape[lead] for a in arrays
        )
        or getattr(seen.added, "requires_grad", False)
        or first.ndim != (4 if num_heads is None else 3)
    ):
        return None
    seen = seen if seen.added is None else seen._replace(added=getattr(seen.added, "array", seen.added))
    node = HeadsOnDevice(num_heads, scale, seen, dropped)
    return node.apply(xs)[0] if node.prepare(arrays, tuple(map(_array_of, biases))) else None
