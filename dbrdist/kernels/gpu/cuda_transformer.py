"""What stands between the products of a Transformer on a GPU, each in one kernel of our own.

Heads, weights of attention, and a bias with the activation, dropout, addition or layer normalization that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dbrdist.core.array import backend
from dbrdist.core.array.random import Draw
from dbrdist.core.array.types import Array, DType
from dbrdist.kernels.gpu import cuda_source
from dbrdist.kernels.gpu.cuda_rows import bits_of, over_rows, require_rows
from dbrdist.kernels.gpu.cuda_source import NULL, over
from dbrdist.kernels.unsupported import Unsupported

Plan = Callable[..., object]

_GROUP = 8  # elements of a line whose random bits a thread makes
_PACK = 16  # bytes that a thread moves at once
_bool = np.dtype(bool)


def _or_null(a: Array | None) -> Array | int:
    return NULL if a is None else a


def _of_map(z: Array, b: Array | None, *others: Array | None) -> tuple[DType, DType, DType]:
    """Types of a linear map's result (N, K) and of its bias, and the type of sums."""
    require_rows(z, *[a for a in (b, *others) if a is not None])
    if z.ndim != 2 or (b is not None and b.shape != z.shape[1:]):
        raise Unsupported("no matrix, or a bias of another shape")
    return z.dtype, z.dtype if b is None else b.dtype, backend.accumulation_dtype(z.dtype)


def _over_groups(z: Array) -> tuple[tuple[int], tuple[int]]:
    return over(len(z) * -(-z.shape[1] // _GROUP))


def relu_dropout(z: Array, b: Array | None, draw: Draw | None, threshold: int, scale: float) -> Plan:
    """See device_dispatch.relu_dropout."""
    run = cuda_source.kernel("rows", "relu_dropout", *_of_map(z, b))
    (grid, block), sizes = _over_groups(z), (len(z), np.int32(z.shape[1]))

    def plan(z: Array, b: Array | None, draw: Draw | None, threshold: int, scale: float) -> Array:
        run(grid, block, (z, _or_null(b), *sizes, *bits_of(draw, threshold, scale)))
        return z

    return plan


def relu_dropout_backward(y: Array, gy: Array, scale: float) -> Plan:
    """See device_dispatch.relu_dropout_backward."""
    require_rows(y, gy)
    if gy.dtype != y.dtype or gy.shape != y.shape:
        raise Unsupported("a gradient of another type")
    run, new = cuda_source.kernel("elementwise", "relu_dropout_backward", y.dtype), cuda_source.plain(y.shape, y.dtype)
    grid, block = over(-(-y.nbytes // _PACK))

    def plan(y: Array, gy: Array, scale: float) -> Array:
        gx = new()
        run(grid, block, (y, gy, gx, y.size, float(scale)))
        return gx

    return plan


def _require_sum(z: Array, r: Array) -> None:
    if r.shape != z.shape or r.dtype != z.dtype:
        raise Unsupported("what is added is of another type")


def dropout_add(z: Array, b: Array | None, r: Array, draw: Draw | None, threshold: int, scale: float) -> Plan:
    """See device_dispatch.dropout_add."""
    run = cuda_source.kernel("rows", "dropout_add", *_of_map(z, b, r))
    _require_sum(z, r)
    (grid, block), sizes, new_mask = _over_groups(z), (len(z), np.int32(z.shape[1])), cuda_source.plain(z.shape, _bool)

    def plan(
        z: Array, b: Array | None, r: Array, draw: Draw | None, threshold: int, scale: float
    ) -> tuple[Array, Array | None]:
        mask = None if draw is None else new_mask()
        run(grid, block, (z, _or_null(b), r, _or_null(mask), *sizes, *bits_of(draw, threshold, scale)))
        return z, mask

    return plan


def masked(gy: Array, mask: Array, scale: float) -> Plan:
    """See device_dispatch.masked."""
    require_rows(gy)
    cuda_source.require_here(mask)
    wide = backend.accumulation_dtype(gy.dtype)
    run, new = cuda_source.kernel("rows", "masked", gy.dtype, wide), cuda_source.plain(gy.shape, gy.dtype)
    grid, block = over(gy.size)

    def plan(gy: Array, mask: Array, scale: float) -> Array:
        gz = new()
        run(grid, block, (gy, mask, gz, gy.size, float(scale)))
        return gz

    return plan


def ln_of_sum(
    z: Array, b: Array | None, r: Array, gamma: Array, beta: Array, eps: float, draw: Draw | None, threshold: int,
    scale: float,
) -> Plan:  # fmt: skip
    """See device_dispatch.ln_of_sum."""
    dtype, of_bias, wide = _of_map(z, b, r, gamma, beta)
    _require_sum(z, r)
    if gamma.dtype not in (dtype, wide) or beta.dtype != gamma.dtype:
        raise Unsupported("scale and shift of other types")
    run, (grid, block) = cuda_source.kernel("rows", "ln_of_sum", dtype, of_bias, gamma.dtype, wide), over_rows(len(z))
    new, new_mask = cuda_source.plain(z.shape, dtype), cuda_source.plain(z.shape, _bool)
    new_vector, sizes = cuda_source.plain(z.shape[:1], wide), (len(z), np.int32(z.shape[1]))

    def plan(
        z: Array, b: Array | None, r: Array, gamma: Array, beta: Array, eps: float, draw: Draw | None, threshold: int,
        scale: float,
    ) -> tuple[Array, Array, Array, Array | None]:  # fmt: skip
        y, mean, var, mask = new(), new_vector(), new_vector(), None if draw is None else new_mask()
        arrays = z, _or_null(b), r, _or_null(mask), gamma, beta, y, mean, var
        run(grid, block, (*arrays, *sizes, float(eps), *bits_of(draw, threshold, scale)))
        return y, mean, var, mask

    return plan


def ln_of_sum_backward(
    x: Array, gamma: Array, mean: Array, var: Array, gy: Array, eps: float, mask: Array, scale: float,
    out_gamma: Array | None, out_beta: Array | None,
) -> Plan:  # fmt: skip
    """See device_dispatch.ln_of_sum_backward."""
    require_rows(x, gamma, mean, var, gy, *[a for a in (out_gamma, out_beta) if a is not None])
    cuda_source.require_here(mask)
    if gy.dtype != x.dtype or any(a is not None and a.dtype != gamma.dtype for a in (out_gamma, out_beta)):
        raise Unsupported("a gradient or room of another type")
    types, (rows, columns) = (x.dtype, gamma.dtype, mean.dtype), x.shape
    run, (grid, block) = cuda_source.kernel("rows", "ln_of_sum_backward", *types), over_rows(rows)
    add, by_columns = cuda_source.kernel("rows", "ln_columns", *types), ((-(-columns // 32),), (32, 32))
    new, new_vector = cuda_source.plain(x.shape, x.dtype), cuda_source.plain((columns,), gamma.dtype)
    sizes = rows, np.int32(columns)

    def plan(
        x: Array, gamma: Array, mean: Array, var: Array, gy: Array, eps: float, mask: Array, scale: float,
        out_gamma: Array | None, out_beta: Array | None,
    ) -> tuple[Array, Array, Array, Array]:  # fmt: skip
        gx, gz = new(), new()
        ggamma, gbeta = (new_vector() if out is None else out for out in (out_gamma, out_beta))
        run(grid, block, (x, gamma, mean, var, gy, mask, gx, gz, *sizes, float(eps), float(scale)))
        add(*by_columns, (x, mean, var, gy, ggamma, gbeta, *sizes, float(eps)))
        return gz, gx, ggamma, gbeta

    return plan


# ---- attention


def attention_weights(
    s: Array, keys: Array | None, added: Array | None, is_causal: bool, draw: Draw | None, threshold: int, scale: float
) -> Plan:
    """See device_dispatch.attention_weights."""
    require_rows(s)
    cuda_source.require_here(keys, added)
    if s.ndim != 4 or (keys is not None and keys.dtype != bool) or (added is not None and added.dtype != s.dtype):
        raise Unsupported("other axes or types")
    wide, (_, heads, queries, size) = backend.accumulation_dtype(s.dtype), s.shape
    run, new = cuda_source.kernel("rows", "attention_weights", s.dtype, wide), cuda_source.plain(s.shape, s.dtype)
    rows = s.size // size
    (grid, block), sizes = over_rows(rows), (rows, *[np.int32(n) for n in (size, queries, heads, is_causal)])
    steps = *_steps(keys, s), *_steps(added, s)

    def plan(
        s: Array, keys: Array | None, added: Array | None, is_causal: bool, draw: Draw | None, threshold: int,
        scale: float,
    ) -> tuple[Array, Array]:  # fmt: skip
        w = None if draw is None else new()
        arrays = s, _or_null(w), _or_null(keys), _or_null(added)
        run(grid, block, (*arrays, *sizes, *steps, *bits_of(draw, threshold, scale)))
        return s, s if w is None else w

    return plan


def mask_of_weights(q: Array, size: int) -> Callable[[Draw, int, float], Array]:
    """A function that makes the mask of a dropout of weights (B, H, L, size), 0 or the scale, in the type of ``q``."""
    shape = (*q.shape[:3], size)
    run = cuda_source.kernel("rows", "attention_mask", q.dtype, backend.accumulation_dtype(q.dtype))
    new, rows, columns = cuda_source.plain(shape, q.dtype), q.size // q.shape[3], np.int32(size)
    grid, block = over_rows(rows)

    def made(draw: Draw, threshold: int, scale: float) -> Array:
        mask = new()
        run(grid, block, (mask, rows, columns, *bits_of(draw, threshold, scale)))
        return mask

    return made


def _steps(a: Array | None, s: Array) -> tuple[int, ...]:
    """From one element to the next along each axis of the scores, in elements of an array that broadcasts to them."""
    if a is None:
        return (0,) * 4
    missing = 4 - a.ndim
    if missing < 0 or any(n not in (1, m) for n, m in zip(a.shape, s.shape[missing:])):
        raise Unsupported("a mask of another shape")
    return *(0,) * missing, *[0 if n == 1 else step // a.itemsize for n, step in zip(a.shape, a.strides)]


def attention_weights_backward(p: Array, w: Array, g: Array) -> Plan:
    """See device_dispatch.attention_weights_backward."""
    require_rows(p, w, g)
    if any(a.dtype != p.dtype or a.shape != p.shape for a in (w, g)):
        raise Unsupported("several types or shapes")
    size = p.shape[-1]
    rows = p.size // size
    run = cuda_source.kernel("rows", "attention_weights_backward", p.dtype, backend.accumulation_dtype(p.dtype))
    (grid, block), sizes = over_rows(rows), (rows, np.int32(size))

    def plan(p: Array, w: Array, g: Array) -> Array:
        run(grid, block, (p, w, g, *sizes))
        return g

    return plan


def _at_once(xs: tuple[Array, ...], widths: list[int]) -> int:
    """How many neighbours of a head a thread moves at once."""
    n = _PACK // xs[0].itemsize
    return n if all(d % n == 0 for d in widths) and all(map(cuda_source.is_aligned, xs)) else 1


def _padded(arrays: Sequence[Array | None]) -> list[Array | int]:
    return [*map(_or_null, arrays), *[NULL] * (3 - len(arrays))]


def _sizes(xs: tuple[Array, ...], lengths: list[int], num_heads: int, widths: list[int]) -> tuple[int | np.int32, ...]:
    """Elements, lengths, the number of heads and widths, as the kernels take them."""
    more = [1] * (3 - len(xs))
    counts = [*[x.size for x in xs], *[0] * len(more)]
    return *counts, *lengths, *more, np.int32(num_heads), *[np.int32(d) for d in (*widths, *more)]


def split_heads(xs: tuple[Array, ...], biases: tuple[Array | None, ...], num_heads: int) -> Plan:
    """See device_dispatch.split_heads."""
    first, given = xs[0], [b for b in biases if b is not None]
    require_rows(*xs, *given)
    kinds = {b.dtype for b in given}
    if any(x.ndim != 3 or x.dtype != first.dtype for x in xs) or len(kinds) > 1:
        raise Unsupported("several types, or other axes")
    if any(b is not None and b.shape != x.shape[2:] for x, b in zip(xs, biases)):
        raise Unsupported("biases of another shape")
    widths, of_bias = [x.shape[2] // num_heads for x in xs], kinds.pop() if kinds else first.dtype
    at_once, sizes = _at_once(xs, widths), _sizes(xs, [x.shape[1] for x in xs], num_heads, widths)
    run = cuda_source.kernel("rows", "split_heads", first.dtype, of_bias, backend.accumulation_dtype(first.dtype))
    makers = [cuda_source.plain((len(x), num_heads, x.shape[1], d), x.dtype) for x, d in zip(xs, widths)]
    grid, block = over(sum(sizes[:3]) // at_once)

    def plan(xs: tuple[Array, ...], biases: tuple[Array | None, ...], num_heads: int) -> tuple[Array, ...]:
        ys = tuple([new() for new in makers])
        together = at_once if all(map(cuda_source.is_aligned, xs)) else 1
        arrays = *_padded(xs), *_padded(biases), *_padded(ys)
        run(grid, block, (*arrays, *sizes, np.int32(together)))
        return ys

    return plan


def merge_heads(ys: tuple[Array, ...]) -> Plan:
    """See device_dispatch.merge_heads."""
    first = ys[0]
    require_rows(*ys)
    if any(y.ndim != 4 or y.dtype != first.dtype for y in ys):
        raise Unsupported("several types, or other axes")
    widths, num_heads = [y.shape[3] for y in ys], first.shape[1]
    at_once, sizes = _at_once(ys, widths), _sizes(ys, [y.shape[2] for y in ys], num_heads, widths)
    run = cuda_source.kernel("rows", "merge_heads", first.dtype)
    makers = [cuda_source.plain((len(y), y.shape[2], num_heads * d), y.dtype) for y, d in zip(ys, widths)]
    grid, block = over(sum(sizes[:3]) // at_once)

    def plan(ys: tuple[Array, ...]) -> tuple[Array, ...]:
        xs = tuple([new() for new in makers])
        together = at_once if all(map(cuda_source.is_aligned, ys)) else 1
        run(grid, block, (*_padded(ys), *_padded(xs), *sizes, np.int32(together)))
        return xs

    return plan


ROWS: dict[str, Callable[..., Plan]] = {
    planner.__name__: planner
    for planner in (
        relu_dropout, relu_dropout_backward, dropout_add, masked, ln_of_sum, ln_of_sum_backward, attention_weights,
        attention_weights_backward, split_heads, merge_heads,
    )
}  # fmt: skip
