"""Products, convolutions, pooling, normalization, softmax and losses."""

from __future__ import annotations

from typing import Any

import numpy as np

from dbrdist.onnx.conversion import Conversion, OperatorError, converts, product
from dbrdist.onnx.graph import OnnxGraph


@converts("MatMul")
def _matmul(g: OnnxGraph, c: Conversion) -> str:
    return g.op("MatMul", *c.names)


@converts("LinearFunction")
def _linear(g: OnnxGraph, c: Conversion) -> str:
    return g.op("Gemm", *c.names, transB=1)


@converts("Softmax")
def _softmax(g: OnnxGraph, c: Conversion) -> str:
    return g.op("Softmax", c.names[0], axis=c.node.axis)


@converts("LogSoftmax")
def _log_softmax(g: OnnxGraph, c: Conversion) -> str:
    return g.op("LogSoftmax", c.names[0], axis=c.node.axis)


@converts("CReLU")
def _crelu(g: OnnxGraph, c: Conversion) -> str:
    (x,) = c.names
    return g.op("Concat", g.op("Relu", x), g.op("Relu", g.op("Neg", x)), axis=c.node.axis)


# ---- windows --------------------------------------------------------------------------------------------------------


def _end(size: int, out: int, k: int, s: int, p: int, d: int = 1) -> int:
    """Zeros after an axis, so that there are ``out`` windows and the last is whole."""
    return max((out - 1) * s + d * (k - 1) + 1 - size - p, 0)


@converts("Convolution2D")
def _convolution(g: OnnxGraph, c: Conversion) -> str:
    v, (h, w), (oh, ow) = c.node.geometry, c.shape()[2:], c.out_shape()[2:]
    kh, kw = c.shape(1)[2:]
    ends = (_end(h, oh, kh, v.sh, v.ph, v.dh), _end(w, ow, kw, v.sw, v.pw, v.dw)) if v.cover_all else (v.ph, v.pw)
    return g.op(
        "Conv", *c.names, kernel_shape=(kh, kw), strides=(v.sh, v.sw), pads=(v.ph, v.pw, *ends),
        dilations=(v.dh, v.dw), group=v.groups,
    )  # fmt: skip


@converts("ConvolutionData")
def _transposed_convolution(g: OnnxGraph, c: Conversion) -> str:
    v, sizes, outs, kernel = c.node.geometry, c.shape()[2:], c.out_shape()[2:], c.shape(1)[2:]
    ends, further = [], []
    for n, o, k, s, p, d in zip(sizes, outs, kernel, (v.sh, v.sw), (v.ph, v.pw), (v.dh, v.dw)):
        end = s * (n - 1) + d * (k - 1) + 1 - p - o
        ends.append(max(end, 0))
        further.append(max(-end, 0))
    return g.op(
        "ConvTranspose", *c.names, kernel_shape=kernel, strides=(v.sh, v.sw), pads=(v.ph, v.pw, *ends),
        dilations=(v.dh, v.dw), group=v.groups, output_padding=further,
    )  # fmt: skip


@converts("MaxPooling2D", "AveragePooling2D")
def _pooling(g: OnnxGraph, c: Conversion) -> str:
    v, (h, w), (oh, ow) = c.node.geometry, c.shape()[2:], c.out_shape()[2:]
    pads = (v.ph, v.pw, _end(h, oh, v.kh, v.sh, v.ph), _end(w, ow, v.kw, v.sw, v.pw))
    more: dict[str, Any] = {"kernel_shape": (v.kh, v.kw), "strides": (v.sh, v.sw), "pads": pads}
    if v.kind == "max":
        return g.op("MaxPool", c.names[0], **more)
    return g.op("AveragePool", c.names[0], count_include_pad=1, **more)


def _as_one_axis(c: Conversion, axis: int) -> str:
    """x as (A, 1, length of the axis, B)."""
    s = c.shape()
    return c.reshape(c.names[0], (product(s[:axis]), 1, s[axis], product(s[axis + 1 :])))


def _unchosen(c: Conversion) -> Any:
    if c.node.chosen is not None:
        raise OperatorError("elements at the places of maxima have no operator")
    return c.node.window


@converts("LargestAlong")
def _largest_along(g: OnnxGraph, c: Conversion) -> str:
    v = c.node.window
    end = _end(v.size, v.num, v.k, v.s, v.p)
    y = g.op("MaxPool", _as_one_axis(c, v.axis), kernel_shape=(v.k, 1), strides=(v.s, 1), pads=(v.p, 0, end, 0))
    return c.reshape(y, c.out_shape())


@converts("SumAlong")
def _sum_along(g: OnnxGraph, c: Conversion) -> str:
    v = _unchosen(c)
    pads = (v.p, 0, _end(v.size, v.num, v.k, v.s, v.p), 0)
    ones = g.constant(np.ones((1, 1, v.k, 1), c.dtype))
    return c.reshape(g.op("Conv", _as_one_axis(c, v.axis), ones, strides=(v.s, 1), pads=pads), c.out_shape())


@converts("SpreadAlong")
def _spread_along(g: OnnxGraph, c: Conversion) -> str:
    v = _unchosen(c)
    end = v.s * (v.num - 1) + v.k - v.p - v.size
    ones = g.constant(np.ones((1, 1, v.k, 1), c.dtype))
    y = g.op(
        "ConvTranspose", _as_one_axis(c, v.axis), ones, strides=(v.s, 1), pads=(v.p, 0, max(end, 0), 0),
        output_padding=(max(-end, 0), 0),
    )  # fmt: skip
    return c.reshape(y, c.out_shape())


@converts("ChannelWindow")
def _channel_window(g: OnnxGraph, c: Conversion) -> str:
    """The sum over neighbouring channels, as a product with a band of ones."""
    n, channels, *rest = c.shape()
    at = np.arange(channels)
    band = (abs(at[:, None] - at) <= c.node.reach).astype(c.dtype)
    return c.reshape(
        g.op("MatMul", g.constant(band), c.reshape(c.names[0], (n, channels, product(rest)))), c.out_shape()
    )


# ---- normalization --------------------------------------------------------------------------------------------------


def _kept(c: Conversion) -> list[int]:
    return [1 if i in c.node.axis else int(n) for i, n in enumerate(c.shape())]


def _normalized(g: OnnxGraph, c: Conversion, mean: str, var: str) -> str:
    """gamma (x - mean) / sqrt(var + eps) + beta, with statistics in the shape of x."""
    x = c.names[0]
    gamma, beta = (g.reshape(n, _kept(c)) for n in c.names[1:3])
    scale = g.op("Div", gamma, g.op("Sqrt", g.op("Add", var, c.number(c.node.eps))))
    return g.op("Add", g.op("Mul", g.op("Sub", x, mean), scale), beta)


@converts("FixedBatchNormalization")
def _fixed_batch_normalization(g: OnnxGraph, c: Conversion) -> str:
    ndim = len(c.shape())
    if ndim > 1 and tuple(c.node.axis) == (0, *range(2, ndim)):
        return g.op("BatchNormalization", *c.names, epsilon=float(c.node.eps))
    return _normalized(g, c, *(g.reshape(n, _kept(c)) for n in c.names[3:5]))


@converts("BatchNormalization")
def _batch_normalization(g: OnnxGraph, c: Conversion) -> str:
    x, axes = c.names[0], c.node.axis
    mean = g.mean(x, axes, True)
    d = g.op("Sub", x, mean)
    return _normalized(g, c, mean, g.mean(g.op("Mul", d, d), axes, True))


@converts("LayerNormalization")
def _layer_normalization(g: OnnxGraph, c: Conversion) -> str:
    return g.op("LayerNormalization", *c.names, axis=-1, epsilon=float(c.node.eps))


@converts("RMSNormalization")
def _rms_normalization(g: OnnxGraph, c: Conversion) -> str:
    x, gamma = c.names
    square = g.op("Add", g.mean(g.op("Mul", x, x), [1], True), c.number(c.node.eps))
    return g.op("Mul", g.op("Div", x, g.op("Sqrt", square)), gamma)


@converts("GroupNormalization")
def _group_normalization(g: OnnxGraph, c: Conversion) -> str:
    x, gamma, beta = c.names
    shape, v = c.out_shape(), c.node
    rows = c.reshape(x, (shape[0], v.groups, v.length))
    centered = g.op("Sub", rows, g.mean(rows, [2], True))
    variance = g.mean(g.op("Mul", centered, centered), [2], True)
    y = c.reshape(g.op("Div", centered, g.op("Sqrt", g.op("Add", variance, c.number(v.eps)))), shape)
    each = (1, -1, *(1,) * (len(shape) - 2))
    return g.op("Add", g.op("Mul", y, g.reshape(gamma, each)), g.reshape(beta, each))


# ---- losses ---------------------------------------------------------------------------------------------------------


@converts("MeanSquaredError")
def _mean_squared_error(g: OnnxGraph, c: Conversion) -> str:
    d = g.op("Sub", *c.names)
    return g.mean(g.op("Mul", d, d), range(len(c.shape())), False)


def _of_label(g: OnnxGraph, logs: str, t: str) -> str:
    """logs[n, t[n, d...], d...]"""
    chosen = g.op("GatherElements", logs, g.op("Unsqueeze", g.cast(t, np.int64), g.ints([1])), axis=1)
    return g.op("Squeeze", chosen, g.ints([1]))


@converts("MeanCrossEntropy")
def _mean_cross_entropy(g: OnnxGraph, c: Conversion) -> str:
    t = c.name_of(c.call.given[0])
    return g.op("Neg", g.mean(_of_label(g, g.op("LogSoftmax", c.names[0], axis=1), t), [0], False))


@converts("LabelCrossEntropy")
def _label_cross_entropy(g: OnnxGraph, c: Conversion) -> str:
    node = c.node
    if node.valid is not None:
        raise OperatorError("a loss with ignored labels has no operator")
    logs, t = g.op("LogSoftmax", c.names[0], axis=1), c.name_of(node.t)
    ndim = len(c.shape())
    losses = g.op("Mul", _of_label(g, logs, t), c.number(node.smoothing - 1))
    if node.weight is not None:
        weights = g.constant(node.weight.astype(c.dtype))
        losses = g.op("Mul", losses, g.op("Gather", weights, t))
        logs = g.op("Mul", logs, g.reshape(weights, (-1, *(1,) * (ndim - 2))))
    if node.smoothing:
        spread = g.op("Mul", g.sum(logs, [1], False), c.number(-node.smoothing / c.shape()[1]))
        losses = g.op("Add", losses, spread)
    return losses


@converts("WeightedCrossEntropy")
def _weighted_cross_entropy(g: OnnxGraph, c: Conversion) -> str:
    logs = g.op("LogSoftmax", c.names[0], axis=1)
    return g.op("Neg", g.sum(g.op("Mul", c.name_of(c.node.q), logs), [1], False))
