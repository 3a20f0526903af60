"""Batch normalization on a GPU: own kernels over channels-last memory, with statistics and sums in float32.

Forward reads the input twice and writes once, backward reads input and gradient twice and writes once; a ReLU in the
same pass costs nothing, since its mask is computed again from the input. Sums have one order, whatever the device does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dbrdist.core.array import backend
from dbrdist.core.array.types import Array, Shape
from dbrdist.kernels.cpu.onednn import Unsupported
from dbrdist.kernels.gpu import cuda_source
from dbrdist.kernels.gpu.cuda_source import NULL

_FILE = "normalization"
_F32 = np.dtype(np.float32)
_TYPES = ("float32", "float16", "bfloat16")
_SUM_THREADS, _SUM_BLOCKS = 512, 264  # two blocks on each of 132 multiprocessors
_MAP_THREADS, _MAP_BLOCKS = 256, 1056
_MAP_ROWS = 4  # in a thread at least
_BYTES = 16  # that a thread reads at once, where channels allow it
_COLUMNS = 4096  # of blocks at most: each needs a counter


class _Counters(threading.local):
    """What the blocks of a kernel count in, by device and stream: kernels of one stream run one after the other, but
    two threads may both call their streams 2 (``cudaStreamPerThread``).
    """

    def __init__(self) -> None:
        self.made: dict[tuple[int, int], Array] = {}


_counters = _Counters()


class Matrix:
    """What the kernels of one array need: M rows and C channels, and how blocks share them."""

    def __init__(self, x: Array, axis: Shape, *others: Array | None) -> None:
        cuda_source.require(x, *others)
        if (x.ndim, axis) not in ((4, (0, 2, 3)), (2, (0,))) or x.dtype.name not in _TYPES:
            raise Unsupported(f"axes {axis} of {x.ndim}, or another type")
        self.shape, self.dtype, self.channels = x.shape, x.dtype, x.shape[1]
        self.rows = x.size // self.channels
        self.pack = cuda_source.pack(self.channels, _BYTES // x.dtype.itemsize)
        groups = self.channels // self.pack
        self.across = min(32, 1 << (groups - 1).bit_length())
        self.columns = -(-groups // self.across)
        if self.columns > _COLUMNS:
            raise Unsupported("very many channels")
        self.new = cuda_source.images(x.shape, x.dtype) if x.ndim == 4 else cuda_source.plain(x.shape, x.dtype)
        self.vector = cuda_source.plain((self.channels,), _F32)
        self.sizes = self.rows, np.int32(self.channels)

    def dense(self, x: Array, has_type: bool = True) -> Callable[[Array], Array]:
        """A function from arrays like x to memory of this matrix, in its type; without ``has_type`` of any type."""
        inner, dtype = cuda_source.aligned_images(x) if x.ndim == 4 else _rows, self.dtype
        if has_type and x.dtype == dtype:
            return inner
        return lambda x: inner(x if x.dtype == dtype else x.astype(dtype))

    def grid(self, threads: int, blocks: int, rows: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Grid and block, with so many rows in a thread at least."""
        down = threads // self.across
        most = max(1, blocks // self.columns)
        return (self.columns, min(most, -(-self.rows // (down * rows)))), (self.across, down)

    def kernel(self, name: str, relu: int | None = None) -> Any:
        """One of the file's kernels for this type and width."""
        parameters = (self.dtype, self.pack) if relu is None else (self.dtype, self.pack, int(relu))
        return cuda_source.kernel(_FILE, name, *parameters)

    def reduction(self, name: str, relu: int | None, num_sums: int = 2) -> Callable[..., None]:
        """A kernel that puts parts of blocks together: called with matrices, and with what comes after the parts."""
        threads = _SUM_THREADS * 4 // max(self.pack, 4)  # with twice the channels each needs twice the registers
        run, (grid, block) = self.kernel(name, relu), self.grid(threads, _SUM_BLOCKS, 1)
        shared = 4 * block[1] * (1 + num_sums * block[0] * self.pack)
        parts = cuda_source.plain((num_sums * grid[1] * self.channels,), _F32)
        get_stream, sizes = backend.import_cupy().cuda.get_current_stream, self.sizes

        def reduce(arrays: tuple[Array, ...], *rest: Any) -> None:
            place = arrays[0].data.device_id, get_stream().ptr
            counters = _counters.made.get(place)
            if counters is None:
                counters = _counters.made[place] = backend.zeros((_COLUMNS,), np.uint32, arrays[0])
            run(grid, block, (*arrays, *sizes, parts(), counters, *rest), shared_mem=shared)

        return reduce


def _rows(x: Array) -> Array:
    """A matrix in C order and aligned."""
    if x.flags.c_contiguous and cuda_source.is_aligned(x):
        return x
    return backend.copy(x)


def f32(a: Array) -> Array:
    """A vector as the kernels read it."""
    if a.dtype == _F32 and a.flags.c_contiguous:
        return a
    dense = backend.empty((a.size,), _F32, a)
    dense[...] = a.reshape(-1)
    return dense


def _address(a: Array | None) -> Any:
    """An argument of a kernel that may be missing."""
    return NULL if a is None else a


# ---- rows


# No running statistics, their decay and the weights of mean and variance.
STAY = 0, 0, np.float32(0), np.float32(0), np.float32(0)
AFTER_SUM = 2  # a ReLU of the sum with another array
# No sum that was rectified, no second gradient, and no room for what counts of both.
_NO_SUM = NULL, NULL, NULL


def _plan_statistics(x: Array, axis: Shape) -> Any:
    """See numpy_normalization.bn_statistics."""
    matrix = Matrix(x, axis)
    reduce, dense, vector = matrix.reduction("bn_statistics", None), matrix.dense(x), matrix.vector

    def bn_statistics(x: Array, axis: Shape) -> tuple[Array, Array]:
        mean, var = vector(), vector()
        reduce((dense(x),), mean, var, NULL, NULL, NULL, *STAY)
        return mean, var

    return bn_statistics


def _plan_forward(x: Array, gamma: Array, beta: Array, eps: float, axis: Shape, relu: bool) -> Any:
    """See numpy_normalization.bn_forward; saved are gamma and beta as they were, from which backward finds where the
    ReLU passed.
    """
    forward = _forward(x, gamma, beta, eps, axis, relu)

    def bn_forward(
        x: Array, gamma: Array, beta: Array, eps: float, axis: Shape, relu: bool
    ) -> tuple[Array, Array, Array, Any]:
        return forward(x, gamma, beta, STAY)

    return bn_forward


def _plan_forward_and_move(
    x: Array, gamma: Array, beta: Array, eps: float, axis: Shape, relu: bool, running: tuple[Array, Array],
    decay: float, weights: tuple[float, float],
) -> Any:  # fmt: skip
    """See device_dispatch.bn_forward_and_move."""
    forward = _forward(x, gamma, beta, eps, axis, relu)
    cuda_source.require(*running)
    if not can_move(running, x.shape[1]):
        raise Unsupported("running statistics of another type, or with gaps")

    def bn_forward_and_move(
        x: Array, gamma: Array, beta: Array, eps: float, axis: Shape, relu: bool, running: tuple[Array, Array],
        decay: float, weights: tuple[float, float],
    ) -> tuple[Array, Array, Array, Any]:  # fmt: skip
        return forward(x, gamma, beta, (*running, np.float32(decay), *map(np.float32, weights)))

    return bn_forward_and_move


def _forward(x: Array, gamma: Array, beta: Array, eps: float, axis: Shape, relu: bool) -> Callable[..., Any]:
    """Normalization as a function of x, gamma, beta, and of running statistics, their decay and the batch's weights."""
    matrix = Matrix(x, axis, gamma, beta)
    reduce, dense, vector = matrix.reduction("bn_statistics", None), matrix.dense(x), matrix.vector
    apply, new, (grid, block) = matrix.kernel("bn_apply", relu), matrix.new, map_grid(matrix)
    new_saved, sizes, eps32 = cuda_source.plain((2 * matrix.channels,), _F32), matrix.sizes, np.float32(eps)

    def forward(x: Array, gamma: Array, beta: Array, moved: tuple[Any, ...]) -> tuple[Array, Array, Array, Any]:
        x, y, mean, var, saved = dense(x), new(), vector(), vector(), new_saved() if relu else None
        gamma, beta = f32(gamma), f32(beta)
        reduce((x,), mean, var, gamma, beta, _address(saved), *moved)
        apply(grid, block, (x, y, *sizes, mean, var, gamma, beta, eps32, NULL))
        return y, mean, var, saved

    return forward


def _plan_add_relu(
    x: Array, gamma: Array, beta: Array, added: Array, eps: float, axis: Shape, running: tuple[Array, Array] | None,
    decay: float, weights: tuple[float, float],
) -> Any:  # fmt: skip
    """See device_dispatch.bn_add_relu."""
    matrix = Matrix(x, axis, gamma, beta, added, *(running or ()))
    if added.shape != x.shape or added.dtype != x.dtype or not can_move(running, matrix.channels):
        raise Unsupported("another summand, or running statistics of another type, or with gaps")
    reduce, dense, dense_added = matrix.reduction("bn_statistics", None), matrix.dense(x), matrix.dense(added)
    apply, new, (grid, block) = matrix.kernel("bn_apply", AFTER_SUM), matrix.new, map_grid(matrix)
    vector, sizes, eps32 = matrix.vector, matrix.sizes, np.float32(eps)

    def bn_add_relu(
        x: Array, gamma: Array, beta: Array, added: Array, eps: float, axis: Shape, running: tuple[Array, Array] | None,
        decay: float, weights: tuple[float, float],
    ) -> tuple[Array, Array, Array]:  # fmt: skip
        x, y, mean, var = dense(x), new(), vector(), vector()
        moved = STAY if running is None else (*running, np.float32(decay), *map(np.float32, weights))
        reduce((x,), mean, var, NULL, NULL, NULL, *moved)
        apply(grid, block, (x, y, *sizes, mean, var, f32(gamma), f32(beta), eps32, dense_added(added)))
        return y, mean, var

    return bn_add_relu


def can_move(running: tuple[Array, Array] | None, channels: int) -> bool:
    """Does bn_statistics move these statistics of so many channels, if there are any?"""
    return all(v.dtype == _F32 and v.flags.c_contiguous and v.size == channels for v in running or ())


def _plan_vectors(saved: Array) -> Callable[..., tuple[Array, ...]]:
    """gamma and beta of a rectified forward pass, with its statistics, which nobody else has."""
    return lambda saved, mean, var: (saved[: mean.size], saved[mean.size :], mean, var)


def map_grid(matrix: Matrix) -> tuple[tuple[int, int], tuple[int, int]]:
    return matrix.grid(_MAP_THREADS, _MAP_BLOCKS, _MAP_ROWS)


def _plan_inference(
    x: Array, gamma: Array, beta: Array, mean: Array, var: Array, eps: float, axis: Shape, relu: bool,
    out: Array | None = None,
) -> Any:  # fmt: skip
    """See numpy_normalization.bn_inference."""
    matrix = Matrix(x, axis, gamma, beta, mean, var, out)
    apply, dense, (grid, block) = matrix.kernel("bn_apply", relu), matrix.dense(x), map_grid(matrix)
    new, sizes, eps32 = matrix.new, matrix.sizes, np.float32(eps)

    def bn_inference(
        x: Array, gamma: Array, beta: Array, mean: Array, var: Array, eps: float, axis: Shape, relu: bool,
        out: Array | None = None,
    ) -> Array:  # fmt: skip
        y = new() if out is None or not takes(out, y_like, matrix.dtype) else out
        apply(grid, block, (dense(x), y, *sizes, *map(f32, (mean, var, gamma, beta)), eps32, NULL))
        if out is None or y is out:
            return y
        out[...] = y
        return out

    y_like = new().strides
    return bn_inference


def takes(out: Array, strides: tuple[int, ...], dtype: DTypeLike) -> bool:
    """Can a kernel write there, as into an array of these strides and this type?"""
    return bool(out.dtype == dtype and out.strides == strides and cuda_source.is_aligned(out))


def _plan_sums(x: Array, mean: Array, var: Array, gy: Array, eps: float, axis: Shape) -> Any:
    """See numpy_normalization.bn_sums."""
    matrix = Matrix(x, axis, mean, var, gy)
    reduce, eps32, vector = matrix.reduction("bn_sums", False), np.float32(eps), matrix.vector
    dense, dense_gradient = matrix.dense(x), matrix.dense(gy, False)

    def bn_sums(x: Array, mean: Array, var: Array, gy: Array, eps: float, axis: Shape) -> tuple[Array, Array]:
        ggamma, gbeta = vector(), vector()
        reduce((dense(x), dense_gradient(gy)), f32(mean), f32(var), NULL, ggamma, gbeta, eps32, *_NO_SUM)
        return ggamma, gbeta

    return bn_sums


def _plan_backward(
    x: Array, gamma: Array, mean: Array, var: Array, gy: Array, eps: float, saved: Any, axis: Shape, relu: bool,
    out_gamma: Array | None = None, out_beta: Array | None = None, is_ours: bool = False,
) -> Any:  # fmt: skip
    """See numpy_normalization.bn_backward."""
    matrix = Matrix(x, axis, gamma, mean, var, gy, saved, out_gamma, out_beta)
    reduce, gradient = matrix.reduction("bn_sums", relu), matrix.kernel("bn_input_gradient", relu)
    dense, dense_gradient, (grid, block) = matrix.dense(x), matrix.dense(gy), map_grid(matrix)
    new, vector, sizes = matrix.new, matrix.vector, matrix.sizes
    eps32, share = np.float32(eps), np.float32(1 / matrix.rows)

    def bn_backward(
        x: Array, gamma: Array, mean: Array, var: Array, gy: Array, eps: float, saved: Any, axis: Shape, relu: bool,
        out_gamma: Array | None = None, out_beta: Array | None = None, is_ours: bool = False,
    ) -> tuple[Array, Array, Array]:  # fmt: skip
        x, gy, gx = dense(x), dense_gradient(gy), new()
        ggamma = out_gamma if is_f32(out_gamma) else vector()
        gbeta = out_beta if is_f32(out_beta) else vector()
        saved = _address(saved)
        reduce((x, gy), mean, var, saved, ggamma, gbeta, eps32, *_NO_SUM)
        gradient(grid, block, (x, gy, gx, *sizes, mean, var, f32(gamma), saved, ggamma, gbeta, eps32, share))
        if ggamma is out_gamma and gbeta is out_beta:
            return gx, ggamma, gbeta
        return gx, delivered(ggamma, out_gamma, gamma), delivered(gbeta, out_beta, gamma)

    return bn_backward


def _plan_backward_of_sum(
    x: Array, gamma: Array, mean: Array, var: Array, y: Array, gys: tuple[Array, ...], eps: float, axis: Shape,
    out_gamma: Array | None = None, out_beta: Array | None = None, is_ours: bool = False,
) -> Any:  # fmt: skip
    """See device_dispatch.bn_backward_of_sum."""
    matrix = Matrix(x, axis, gamma, mean, var, y, *gys, out_gamma, out_beta)
    if any(a.shape != x.shape or a.dtype != x.dtype for a in (y, *gys)):
        raise Unsupported("gradients of another type")
    reduce, gradient = matrix.reduction("bn_sums", AFTER_SUM), matrix.kernel("bn_input_gradient", False)
    dense, dense_y, (grid, block) = matrix.dense(x), matrix.dense(y), map_grid(matrix)
    dense_gradients = [matrix.dense(g) for g in gys]
    new, vector, sizes = matrix.new, matrix.vector, matrix.sizes
    strides, eps32, share = new().strides, np.float32(eps), np.float32(1 / matrix.rows)

    def bn_backward_of_sum(
        x: Array, gamma: Array, mean: Array, var: Array, y: Array, gys: tuple[Array, ...], eps: float, axis: Shape,
        out_gamma: Array | None = None, out_beta: Array | None = None, is_ours: bool = False,
    ) -> tuple[Array, Array, Array, Array]:  # fmt: skip
        x, gx, gamma = dense(x), new(), f32(gamma)
        g = gys[-1] if is_ours and takes(gys[-1], strides, matrix.dtype) else new()
        gy, more = [f(a) for f, a in zip(dense_gradients, gys)] + [NULL] * (2 - len(gys))
        ggamma = out_gamma if is_f32(out_gamma) else vector()
        gbeta = out_beta if is_f32(out_beta) else vector()
        reduce((x, gy), mean, var, NULL, ggamma, gbeta, eps32, dense_y(y), more, g)
        gradient(grid, block, (x, g, gx, *sizes, mean, var, gamma, NULL, ggamma, gbeta, eps32, share))
        if ggamma is out_gamma and gbeta is out_beta:
            return gx, ggamma, gbeta, g
        return gx, delivered(ggamma, out_gamma, gamma), delivered(gbeta, out_beta, gamma), g

    return bn_backward_of_sum


def is_f32(out: Array | None) -> bool:
    return out is not None and out.dtype == _F32 and out.flags.c_contiguous


def delivered(value: Array, out: Array | None, like: Array) -> Array:
    if out is value:
        return value
    if out is None:
        return value.astype(like.dtype, copy=False)
    out[...] = value.reshape(out.shape)
    return out


def _plan_move(
    running_mean: Array, running_var: Array, mean: Array, var: Array, decay: float, weights: tuple[float, float]
) -> Any:
    """See numpy_normalization.bn_move: one launch instead of six."""
    vectors = running_mean, running_var, mean, var
    cuda_source.require(*vectors)
    dtype, size = running_mean.dtype, running_mean.size
    if running_var.dtype != dtype or any(v.dtype != _F32 for v in (mean, var)) or dtype.name not in _TYPES:
        raise Unsupported("statistics of other types")
    if any(not v.flags.c_contiguous or v.size != size for v in vectors):
        raise Unsupported("statistics that are not in C order")
    run, (grid, block), count = cuda_source.kernel(_FILE, "bn_move", dtype), cuda_source.over(size), np.int32(size)

    def bn_move(
        running_mean: Array, running_var: Array, mean: Array, var: Array, decay: float, weights: tuple[float, float]
    ) -> None:
        numbers = np.float32(decay), np.float32(weights[0]), np.float32(weights[1])
        run(grid, block, (running_mean, running_var, mean, var, count, *numbers))

    return bn_move


ROWS = {
    "bn_statistics": _plan_statistics,
    "bn_forward": _plan_forward,
    "bn_forward_and_move": _plan_forward_and_move,
    "bn_add_relu": _plan_add_relu,
    "bn_backward_of_sum": _plan_backward_of_sum,
    "bn_inference": _plan_inference,
    "bn_sums": _plan_sums,
    "bn_backward": _plan_backward,
    "bn_move": _plan_move,
    "bn_vectors": _plan_vectors,
}
