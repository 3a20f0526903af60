"""The full key of a call: everything that a plan for it depends on, and nothing else.

Types, shapes, strides and numbers; a call whose key is found in the table runs the plan that was made for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from numpy import ndarray

from dbrdist.core.array.backend import place_of, places_of
from dbrdist.core.array.config import config
from dbrdist.core.array.types import Array
from dbrdist.kernels.geometry import ConvGeometry, PoolGeometry


def _place(x: Array) -> Any:
    """The device, for what is compiled for one."""
    return None if type(x) is ndarray else place_of(x)


def _places(x: Array, *others: Array | None) -> Any:
    """The devices of all operands: a kernel of our own, unlike CuPy's, does not see that one lies elsewhere."""
    return None if type(x) is ndarray else places_of(x, *others)


def _switches(x: Array, *others: Array | None) -> Any:
    """The switches that decide about a convolution, on a GPU with the devices."""
    if type(x) is ndarray:
        return config.float32_products
    return _places(x, *others), config.use_cudnn, config.use_cudnn_tensor_core, config.cudnn_deterministic


def conv_forward_key(x: Array, W: Array, b: Array | None, geometry: ConvGeometry) -> Any:
    return (
        "conv_forward", type(x), x.shape, x.strides, x.dtype, W.shape, W.strides, W.dtype, b is None, geometry,
        _switches(x, W, b),
    )  # fmt: skip


def conv_inference_key(x: Array, W: Array, b: Array | None, geometry: ConvGeometry, kept: Any) -> Any:
    return "conv_inference", *conv_forward_key(x, W, b, geometry)


def conv_bn_inference_key(
    x: Array, W: Array, b: Array | None, vectors: tuple[Any, ...], eps: float, added: Array | None,
    geometry: ConvGeometry, kept: Any,
) -> Any:  # fmt: skip
    other = None if added is None else (type(added), added.shape, added.dtype)
    return "conv_bn_inference", *conv_forward_key(x, W, b, geometry), other, kept is None


def conv_backward_data_key(gy: Array, W: Array, x_shape: tuple[int, ...], geometry: ConvGeometry) -> Any:
    return (
        "conv_backward_data", type(gy), gy.shape, gy.strides, gy.dtype, W.shape, W.strides, W.dtype, x_shape, geometry,
        _switches(gy, W),
    )  # fmt: skip


def conv_backward_weight_key(
    x: Array, gy: Array, W_shape: tuple[int, ...], geometry: ConvGeometry, dtype: Any, out: Array | None
) -> Any:
    return (
        "conv_backward_weight", type(x), x.shape, x.strides, x.dtype, gy.shape, gy.strides, gy.dtype, W_shape, geometry,
        dtype, out is None, None if out is None else out.dtype, _switches(x, gy, out),
    )  # fmt: skip


def _products(x: Array, *others: Array | None) -> Any:
    """The devices of the operands of a product, and on the host in which type it multiplies float32."""
    return config.float32_products if type(x) is ndarray else places_of(x, *others)


def matmul_key(a: Array, b: Array, out: Array | None = None) -> Any:
    strides = None if out is None else (out.strides, out.dtype)
    return "matmul", type(a), a.shape, a.strides, a.dtype, b.shape, b.strides, b.dtype, strides, _products(a, b, out)


def stacked_matmul_key(a: Array, b: Array) -> Any:
    return "stacked_matmul", *matmul_key(a, b)


def linear_key(x: Array, W: Array, b: Array | None) -> Any:
    return "linear", type(x), x.shape, x.strides, x.dtype, W.shape, W.strides, W.dtype, b is None, _products(x, W, b)


def column_sums_key(x: Array, dtype: Any, out: Array | None) -> Any:
    strides = None if out is None else (out.strides, out.dtype)
    return "column_sums", type(x), x.shape, x.strides, x.dtype, dtype, strides, _places(x, out)


def packed_key(b: Array, rows: int, is_often: bool) -> Any:
    return "packed", type(b), b.shape, b.strides, b.dtype, rows, is_often, _products(b)


def bn_forward_key(x: Array, gamma: Array, beta: Array, eps: float, axis: tuple[int, ...], relu: bool) -> Any:
    return "bn_forward", type(x), x.shape, x.strides, x.dtype, eps, axis, relu, _places(x, gamma, beta)


def bn_inference_key(
    x: Array, gamma: Array, beta: Array, mean: Array, var: Array, eps: float, axis: tuple[int, ...], relu: bool,
    out: Array | None = None,
) -> Any:  # fmt: skip
    places = _places(x, gamma, beta, mean, var, out)
    return "bn_inference", type(x), x.shape, x.strides, x.dtype, eps, axis, relu, places


def bn_statistics_key(x: Array, axis: tuple[int, ...]) -> Any:
    return "bn_statistics", type(x), x.shape, x.strides, x.dtype, axis, _place(x)


def bn_sums_key(x: Array, mean: Array, var: Array, gy: Array, eps: float, axis: tuple[int, ...]) -> Any:
    return "bn_sums", type(x), x.shape, x.strides, x.dtype, gy.strides, eps, axis, _places(x, mean, var, gy)


def bn_backward_key(name: str, arguments: tuple[Any, ...]) -> Any:
    """``name`` is the provider of the forward pass."""
    x, gamma, mean, var, gy, eps, saved, axis, relu, out_gamma, out_beta, _is_ours = arguments
    kind = None if saved is None else saved.dtype
    layout = type(x), x.shape, x.strides, x.dtype, gy.strides
    places = _places(x, gamma, mean, var, gy, saved, out_gamma, out_beta)
    return "bn_backward", name, *layout, eps, axis, relu, kind, places


def bn_move_key(
    running_mean: Array, running_var: Array, mean: Array, var: Array, decay: float, weights: tuple[float, float]
) -> Any:
    layouts = [(a.shape, a.strides, a.dtype) for a in (running_mean, running_var, mean, var)]
    return "bn_move", type(mean), *layouts, _places(mean, var, running_mean, running_var)


def ln_forward_key(x: Array, gamma: Array, beta: Array, eps: float) -> Any:
    return "ln_forward", type(x), x.shape, x.dtype, eps


def ln_backward_key(x: Array, gamma: Array, mean: Array, var: Array, gy: Array, eps: float) -> Any:
    return "ln_backward", type(x), x.shape, x.dtype, gy.dtype, mean.dtype, eps


def pool_forward_key(x: Array, geometry: PoolGeometry) -> Any:
    return "pool_forward", type(x), x.shape, x.dtype, geometry, _place(x)


def pool_backward_key(name: str, gy: Array, x_shape: tuple[int, ...], saved: Any, geometry: PoolGeometry) -> Any:
    kind = None if saved is None else saved.dtype
    return "pool_backward", name, type(gy), gy.shape, gy.dtype, x_shape, kind, geometry, _places(gy, saved)


def softmax_key(kernel: str, x: Array, *rest: Any) -> Any:
    """Of x, or of y and its gradient, and an axis."""
    layouts = [(a.strides, a.dtype) for a in (x, *rest[:-1])]
    return kernel, type(x), x.shape, rest[-1], *layouts


def cross_entropy_key(x: Array, t: Array, ignore_label: int, divisor: int) -> Any:
    return "cross_entropy", type(x), x.shape, x.strides, x.dtype, t.strides, t.dtype, _places(x, t)


def cross_entropy_backward_key(x: Array, t: Array, saved: Any, gy: Array, ignore_label: int) -> Any:
    layouts = x.strides, x.dtype, t.strides, t.dtype, gy.dtype
    return "cross_entropy_backward", type(x), x.shape, *layouts, _places(x, t, *saved, gy)


def update_key(rule: str, arrays: tuple[Array, ...], numbers: tuple[Any, ...], before: tuple[Any, ...] = ()) -> Any:
    kinds = [(a.dtype, a.size > 0) for a in arrays]
    return "update", rule, type(arrays[0]), _places(*arrays), tuple([name for name, _, _ in before]), *kinds


def relu_forward_key(x: Array) -> Any:
    return "relu_forward", type(x), x.shape, x.strides, x.dtype, _place(x)


def pair_key(kernel: str, a: Array, b: Array) -> Any:
    return kernel, type(a), a.shape, a.strides, a.dtype, b.strides, b.dtype, _places(a, b)


def relu_backward_of_sum_key(y: Array, a: Array, b: Array, out: Array | None = None) -> Any:
    layouts = a.strides, a.dtype, b.strides, b.dtype
    return "relu_backward_of_sum", type(y), y.shape, y.strides, y.dtype, *layouts, _places(y, a, b, out)


def scaled_sum_key(terms: tuple[Array, ...], scale: float, out: Array) -> Any:
    return "scaled_sum", scale, type(out), out.shape, out.strides, out.dtype, *[(t.strides, t.dtype) for t in terms]


def row_key(name: Any, names: tuple[str, ...], arrays: tuple[Array, ...], numbers: tuple[Any, ...]) -> Any:
    return "row", name, numbers, *[(type(a), a.shape, a.strides, a.dtype) for a in arrays]


KEYS: dict[str, Callable[..., Any]] = {
    "conv_forward": conv_forward_key,
    "conv_inference": conv_inference_key,
    "conv_bn_inference": conv_bn_inference_key,
    "conv_backward_data": conv_backward_data_key,
    "conv_backward_weight": conv_backward_weight_key,
    "matmul": matmul_key,
    "stacked_matmul": stacked_matmul_key,
    "linear": linear_key,
    "packed": packed_key,
    "column_sums": column_sums_key,
    "cross_entropy": cross_entropy_key,
    "cross_entropy_backward": cross_entropy_backward_key,
    "update": update_key,
    "bn_statistics": bn_statistics_key,
    "bn_sums": bn_sums_key,
    "bn_forward": bn_forward_key,
    "bn_inference": bn_inference_key,
    "bn_move": bn_move_key,
    "ln_forward": ln_forward_key,
    "ln_backward": ln_backward_key,
    "pool_forward": pool_forward_key,
    "relu_forward": relu_forward_key,
    "relu_backward_of_sum": relu_backward_of_sum_key,
    "relu_backward": lambda y, gy: pair_key("relu_backward", y, gy),
    "relu_backward_over": lambda y, gy: pair_key("relu_backward_over", y, gy),
    "add": lambda a, b: pair_key("add", a, b),
    "scaled_sum": scaled_sum_key,
    "row": row_key,
} | {
    name: partial(softmax_key, name) for name in ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")
}
