"""Batch normalization around convolutions that leave the sums of their channels: no kernel reads images for statistics.

Where a residual block ends with a projection, both normalizations are made in one pass, and both are summed up in one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.core.array.types import Array, DType
from dbrdist.kernels.cpu.onednn import Unsupported
from dbrdist.kernels.gpu import cuda_source
from dbrdist.kernels.gpu.cuda_normalization import (
    AFTER_SUM,
    STAY,
    Matrix,
    can_move,
    delivered,
    f32,
    is_f32,
    map_grid,
    takes,
)
from dbrdist.kernels.gpu.cuda_source import NULL

if TYPE_CHECKING:
    from dbrdist.kernels.fused_dispatch import Vectors

_FILE = "normalization"
_F32 = np.dtype(np.float32)
_SPATIAL = (0, 2, 3)


def _plan_of_sums(
    sums: Array, gamma: Array, beta: Array, eps: float, count: int, dtype: DType, running: tuple[Array, Array] | None,
    decay: float, weights: tuple[float, float],
) -> Any:  # fmt: skip
    """See fused_dispatch.bn_of_sums."""
    size = gamma.size
    cuda_source.require(sums, gamma, beta, *(running or ()))
    if sums.dtype != _F32 or not sums.flags.c_contiguous or not can_move(running, size):
        raise Unsupported("sums or running statistics of another type, or with gaps")
    run, (grid, block) = cuda_source.kernel(_FILE, "bn_of_sums", dtype), cuda_source.over(size)
    vector, pair, affine = (cuda_source.plain(*of) for of in (((size,), _F32), ((2 * size,), _F32), ((2, size), dtype)))
    numbers = np.int32(size), np.float32(1 / count)
    eps32 = np.float32(eps)

    def bn_of_sums(
        sums: Array, gamma: Array, beta: Array, eps: float, count: int, dtype: DType,
        running: tuple[Array, Array] | None, decay: float, weights: tuple[float, float],
    ) -> tuple[Array, Array, Array, Array]:  # fmt: skip
        made = mean, var, saved, factors = vector(), vector(), pair(), affine()
        moved = STAY if running is None else (*running, np.float32(decay), *map(np.float32, weights))
        run(grid, block, (sums, *numbers, f32(gamma), f32(beta), eps32, *made, *moved))
        return mean, var, saved, factors

    return bn_of_sums


def _plan_relu_of_sum(x: Array, of_x: Vectors, added: Array, of_added: Vectors | None) -> Any:
    """See fused_dispatch.bn_relu_of_sum."""
    matrix = Matrix(x, _SPATIAL, *of_x[:4], added, *(of_added or ())[:4])
    if added.shape != x.shape or added.dtype != x.dtype:
        raise Unsupported("another summand")
    dense, dense_added, new, (grid, block) = matrix.dense(x), matrix.dense(added), matrix.new, map_grid(matrix)
    sizes = matrix.sizes
    apply = matrix.kernel("bn_apply", AFTER_SUM) if of_added is None else matrix.kernel("bn_apply_two")

    def bn_relu_of_sum(x: Array, of_x: Vectors, added: Array, of_added: Vectors | None) -> Array:
        y, vectors = new(), _arguments(of_x)
        if of_added is None:
            apply(grid, block, (dense(x), y, *sizes, *vectors, dense_added(added)))
        else:
            apply(grid, block, (dense(x), dense_added(added), y, *sizes, *vectors, *_arguments(of_added)))
        return y

    return bn_relu_of_sum


def _arguments(vectors: Vectors) -> tuple[Array | np.float32, ...]:
    return *map(f32, vectors[:4]), np.float32(vectors[4])


def _plan_backward_of_two(
    xs: tuple[Array, Array], of_xs: tuple[Vectors, Vectors], y: Array, gys: tuple[Array, ...],
    outs: tuple[Array | None, ...], is_ours: bool,
) -> Any:  # fmt: skip
    """See fused_dispatch.bn_backward_of_two."""
    matrix = Matrix(xs[0], _SPATIAL, xs[1], y, *gys, *of_xs[0][:4], *of_xs[1][:4], *outs)
    if any(a.shape != xs[0].shape or a.dtype != xs[0].dtype for a in (xs[1], y, *gys)):
        raise Unsupported("gradients of another type")
    reduce, gradient = matrix.reduction("bn_sums_of_two", None, 3), matrix.kernel("bn_input_gradient", False)
    (grid, block), new, vector, sizes = map_grid(matrix), matrix.new, matrix.vector, matrix.sizes
    dense = [matrix.dense(a) for a in (*xs, y, *gys)]
    strides, share = new().strides, np.float32(1 / matrix.rows)

    def bn_backward_of_two(
        xs: tuple[Array, Array], of_xs: tuple[Vectors, Vectors], y: Array, gys: tuple[Array, ...],
        outs: tuple[Array | None, ...], is_ours: bool,
    ) -> tuple[tuple[Array, Array, Array], tuple[Array, Array, Array]]:  # fmt: skip
        x, x2, y, *gs = [f(a) for f, a in zip(dense, (*xs, y, *gys))]
        g = gys[-1] if is_ours and takes(gys[-1], strides, matrix.dtype) else new()
        sums = [out if is_f32(out) else vector() for out in outs]
        gammas, statistics = [], []
        for mean, var, gamma, _, eps in of_xs:
            statistics += [mean, var, np.float32(eps)]
            gammas.append(f32(gamma))
        more = gs[1] if len(gs) > 1 else NULL
        reduce((x, gs[0]), x2, y, more, g, *statistics, *sums)
        made = []
        for k, (a, gamma) in enumerate(zip((x, x2), gammas)):
            gx, (mean, var, eps32), (ggamma, gbeta) = new(), statistics[3 * k : 3 * k + 3], sums[2 * k : 2 * k + 2]
            gradient(grid, block, (a, g, gx, *sizes, mean, var, gamma, NULL, ggamma, gbeta, eps32, share))
            own = of_xs[k][2]
            made.append((gx, *(delivered(v, out, own) for v, out in zip((ggamma, gbeta), outs[2 * k : 2 * k + 2]))))
        return made[0], made[1]

    return bn_backward_of_two


ROWS = {
    "bn_of_sums": _plan_of_sums,
    "bn_relu_of_sum": _plan_relu_of_sum,
    "bn_backward_of_two": _plan_backward_of_two,
}
