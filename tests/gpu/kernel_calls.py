"""One call of each heavy operation that has kernels of its own on a GPU, for tests that look at all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dbrdist import kernels
from dbrdist.kernels import ConvGeometry, PoolGeometry

F32 = np.float32
AXIS = (0, 2, 3)


class Call(NamedTuple):
    """An operation, its arguments in host memory, and the CUDA kernels that it launches."""

    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    launches: tuple[str, ...]


def _images(rng: Any, *shape: int) -> Any:
    n, c, h, w = shape
    return rng.standard_normal((n, h, w, c)).astype(F32).transpose(0, 3, 1, 2)


def calls(rng: Any, count: int = 4096) -> dict[str, Call]:
    """The calls, with some ``count`` elements in each array, so that few blocks have to work in loops."""
    c = 8
    side = max(int((count / 2 / c) ** 0.5), 4)
    x, gy = _images(rng, 2, c, side, side), _images(rng, 2, c, side, side)
    gamma, beta, mean = (rng.standard_normal(c).astype(F32) for _ in range(3))
    var = rng.random(c).astype(F32) + F32(0.5)
    flat = [rng.standard_normal(count).astype(F32) for _ in range(4)]
    rows = rng.standard_normal((count // 8, 9)).astype(F32)
    t = rng.integers(0, 9, len(rows)).astype(np.int32)
    W, b = rng.standard_normal((5, 9)).astype(F32), rng.standard_normal(5).astype(F32)
    max_pool, average = PoolGeometry("max", 2, 2, 2, 2), PoolGeometry("average", 2, 2, 2, 2)
    made: dict[str, Call] = {
        "relu_forward": Call(kernels.relu_forward, (x,), ("relu_forward",)),
        "relu_backward": Call(kernels.relu_backward, (np.maximum(x, 0), gy), ("relu_backward",)),
        "relu_backward_of_sum": Call(
            kernels.relu_backward_of_sum, (np.maximum(x, 0), gy, x), ("relu_backward_of_sum",)
        ),
        "add": Call(kernels.add, (x, gy), ("add",)),
        "linear": Call(kernels.linear, (rows, W, b), ("add_bias",)),
        "column_sums": Call(kernels.column_sums, (rows, np.dtype(F32)), ("column_sums",)),
        "bn_statistics": Call(kernels.bn_statistics, (x, AXIS), ("bn_statistics",)),
        "bn_inference": Call(kernels.bn_inference, (x, gamma, beta, mean, var, 1e-5), ("bn_apply",)),
        "bn_forward": Call(kernels.bn_forward, (x, gamma, beta, 1e-5), ("bn_statistics", "bn_apply")),
        "bn_sums": Call(kernels.bn_sums, (x, mean, var, gy, 1e-5), ("bn_sums",)),
        "bn_move": Call(
            lambda a, b, *rest: (a, b, kernels.bn_move(a, b, *rest))[:2],
            (flat[0], flat[1], flat[2], flat[3], 0.9, (0.1, 0.2)),
            ("bn_move",),
        ),
        "bn_backward": Call(_bn_backward, (x, gamma, beta, gy), ("bn_sums", "bn_input_gradient")),
        "max pooling": Call(lambda x: _pooled(x, max_pool), (x,), ("max_forward", "backward")),
        "average pooling": Call(lambda x: _pooled(x, average), (x,), ("average_forward", "backward")),
        "cross_entropy": Call(_cross_entropy, (rows, t), ("cross_entropy", "cross_entropy_backward")),
        "conv": Call(_convolution, (x, _plain(rng, 8, c, 3, 3), gy), ("to_channels_last", "to_plain")),
        "conv of few channels": Call(_stem, (_images(rng, 2, 3, side, side), _plain(rng, 8, 3, 3, 3)), ("widen",)),
    }
    layers = ((0, count // 2, True), (count // 2, count, False))
    updates = {
        "sgd": (2, (0.1,)), "momentum_sgd": (3, (0.1, 0.9)),
        "adam": (5, (0.9, 0.1, 0.999, 0.001, 0.01, 1e-8, 0.99)),
        "lars": (3, (layers, 0.1, 0.9, 1e-4, 0.01, 1e-9)),
    }  # fmt: skip
    for rule, (num, numbers) in updates.items():
        arrays = tuple([np.abs(flat[k % 4]) + F32(0.1) for k in range(num)])
        names = ("lars_norms", "lars") if rule == "lars" else (rule,)
        made[f"update by {rule}"] = Call(_update(rule, numbers), arrays, names)
    return made


def _plain(rng: Any, *shape: int) -> Any:
    return rng.standard_normal(shape).astype(F32)


def _bn_backward(x: Any, gamma: Any, beta: Any, gy: Any) -> Any:
    _, mean, var, saved = kernels.bn_forward(x, gamma, beta, 1e-5, True)
    return kernels.bn_backward(x, gamma, mean, var, gy, 1e-5, saved, True)


def _pooled(x: Any, geometry: Any) -> Any:
    y, saved = kernels.pool_forward(x, geometry)
    return y, kernels.pool_backward(y * 0.5, x.shape, saved, geometry)


def _cross_entropy(x: Any, t: Any) -> Any:
    y, saved = kernels.cross_entropy(x, t, -1, 0)
    return y, kernels.cross_entropy_backward(x, t, saved, y * 0 + 1, -1)


_SAME = ConvGeometry(1, 1, 1, 1)


def _convolution(x: Any, W: Any, gy: Any) -> Any:
    y = kernels.conv_forward(x, W, None, _SAME)
    gx = kernels.conv_backward_data(gy, W, x.shape, _SAME)
    return y, gx, kernels.conv_backward_weight(x, gy, W.shape, _SAME)


def _stem(x: Any, W: Any) -> Any:
    return kernels.conv_forward(x, W, None, _SAME)


def _update(rule: str, numbers: Any) -> Callable[..., Any]:
    def run(*arrays: Any) -> Any:
        done = kernels.update(rule, (*arrays,), numbers)
        assert done, f"no kernel of the rule {rule}"
        return arrays

    return run
