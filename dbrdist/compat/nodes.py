"""The classes behind Chainer's functions, such as ``functions.activation.relu.ReLU``: the classes of our graph's nodes.

Programs tell the nodes of a graph apart by them. A function that consists of several nodes here has no class of its
own: its nodes are instances of the classes that it consists of.
"""

from __future__ import annotations

from typing import Any

from dbrdist.compat import function_classes
from dbrdist.core.tape import ops
from dbrdist.core.tape.elementwise_table import ROWS
from dbrdist.functions import (
    activation,
    array,
    connection,
    convolution,
    cumulative,
    image,
    lean_loss,
    linalg,
    loss,
    math,
    noise,
    normalization,
    padding,
    pooling,
    recompute,
    rectifier,
    rnn,
    sequence,
    strided,
)

# By Chainer's path below chainer.functions: names of rows, or classes.
_BY_ROW = {
    "activation.clipped_relu.ClippedReLU": "clipped_relu",
    "activation.elu.ELU": "elu",
    "activation.hard_sigmoid.HardSigmoid": "hard_sigmoid",
    "activation.leaky_relu.LeakyReLU": "leaky_relu",
    "activation.sigmoid.Sigmoid": "sigmoid",
    "activation.softplus.Softplus": "softplus",
    "activation.tanh.Tanh": "tanh",
    "loss.squared_error.SquaredError": "squared_difference",
    "math.arctanh.Arctanh": "arctanh",
    "math.basic_math.Absolute": "absolute",
    "math.basic_math.Add": "add",
    "math.basic_math.AddConstant": "add",
    "math.basic_math.Div": "div",
    "math.basic_math.DivFromConstant": "div",
    "math.basic_math.Mul": "mul",
    "math.basic_math.MulConstant": "mul",
    "math.basic_math.Neg": "neg",
    "math.basic_math.PowConstVar": "pow",
    "math.basic_math.PowVarConst": "pow_number",
    "math.basic_math.PowVarVar": "pow",
    "math.basic_math.Sub": "sub",
    "math.basic_math.SubFromConstant": "sub",
    "math.clip.Clip": "clip",
    "math.digamma.DiGamma": "digamma",
    "math.erf.Erf": "erf",
    "math.erfc.Erfc": "erfc",
    "math.erfcinv.ErfcInv": "erfcinv",
    "math.erfcx.Erfcx": "erfcx",
    "math.erfinv.ErfInv": "erfinv",
    "math.exponential.Exp": "exp",
    "math.exponential.Log": "log",
    "math.exponential.Log10": "log10",
    "math.exponential.Log2": "log2",
    "math.exponential_m1.Expm1": "expm1",
    "math.hyperbolic.Cosh": "cosh",
    "math.hyperbolic.Sinh": "sinh",
    "math.lgamma.LGamma": "lgamma",
    "math.linear_interpolate.LinearInterpolate": "linear_interpolate",
    "math.log_ndtr.LogNdtr": "log_ndtr",
    "math.logarithm_1p.Log1p": "log1p",
    "math.maximum.Maximum": "maximum",
    "math.minimum.Minimum": "minimum",
    "math.ndtr.Ndtr": "ndtr",
    "math.ndtri.Ndtri": "ndtri",
    "math.polygamma.PolyGamma": "polygamma",
    "math.sqrt.Sqrt": "sqrt",
    "math.square.Square": "square",
    "math.trigonometric.Arccos": "arccos",
    "math.trigonometric.Arcsin": "arcsin",
    "math.trigonometric.Arctan": "arctan",
    "math.trigonometric.Arctan2": "arctan2",
    "math.trigonometric.Cos": "cos",
    "math.trigonometric.Sin": "sin",
    "math.trigonometric.Tan": "tan",
    "math.zeta.Zeta": "zeta",
}
_BY_CLASS: dict[str, type] = {
    "activation.crelu.CReLU": activation.CReLU,
    "activation.log_softmax.LogSoftmax": activation.LogSoftmax,
    "activation.relu.ReLU": rectifier.ReLU,
    "activation.softmax.Softmax": activation.Softmax,
    "array.as_strided.AsStrided": strided.Strided,
    "array.broadcast.BroadcastTo": ops.BroadcastTo,
    "array.cast.Cast": ops.Cast,
    "array.concat.Concat": ops.Concat,
    "array.copy.Copy": array.Copy,
    "array.get_item.GetItem": ops.GetItem,
    "array.im2col.Im2Col": image.Im2Col,
    "array.pad.Pad": padding.Pad,
    "array.pad_sequence.PadSequence": sequence.PadSequence,
    "array.permutate.Permutate": array.Permutation,
    "array.reshape.Reshape": ops.Reshape,
    "array.split_axis.SplitAxis": array.SplitAxis,
    "array.transpose.Transpose": ops.Transpose,
    "array.transpose_sequence.TransposeSequence": sequence.TransposeSequence,
    "array.where.Where": ops.Where,
    "connection.convolution_2d.Convolution2DFunction": convolution.Convolution2D,
    "connection.deconvolution_2d.Deconvolution2DFunction": convolution.ConvolutionData,
    "connection.linear.LinearFunction": connection.LinearFunction,
    "loss.mean_squared_error.MeanSquaredError": loss.MeanSquaredError,
    "loss.softmax_cross_entropy.SoftmaxCrossEntropy": lean_loss.MeanCrossEntropy,
    "math.average.Mean": ops.Mean,
    "math.cholesky.Cholesky": linalg.Cholesky,
    "math.cumprod.Cumprod": cumulative.CumProd,
    "math.cumsum.Cumsum": cumulative.CumSum,
    "math.det.BatchDet": linalg.Det,
    "math.einsum.EinSum": linalg.EinSum,
    "math.fft.FFT": linalg.Fourier,
    "math.inv.BatchInv": linalg.Inv,
    "math.inv.Inv": linalg.Inv,
    "math.logsumexp.LogSumExp": math.LogSumExp,
    "math.matmul.MatMul": ops.MatMul,
    "math.minmax.Max": math.Extremum,
    "math.minmax.Min": math.Extremum,
    "math.prod.Prod": cumulative.Prod,
    "math.sum.Sum": ops.Sum,
    "math.sum.SumTo": ops.SumTo,
    "noise.dropout.Dropout": noise.Dropout,
    "normalization.batch_normalization.BatchNormalization": normalization.BatchNormalization,
    "normalization.batch_normalization.FixedBatchNormalization": normalization.FixedBatchNormalization,
    "pooling.average_pooling_2d.AveragePooling2D": pooling.AveragePooling2D,
    "pooling.max_pooling_nd.MaxPoolingND": pooling.MaxPooling2D,
    "rnn.lstm.LSTM": rnn.LSTM,
    "util.forget.Forget": recompute.Forget,
}


_LABELS = {
    "add": "_ + _", "sub": "_ - _", "mul": "_ * _", "div": "_ / _", "neg": "-_", "absolute": "|_|", "pow": "_ ** _",
    "pow_number": "_ ** _",
}  # fmt: skip


def chainer_labels() -> dict[type, str]:
    """By class, the label that Chainer gives its nodes."""
    found = {cls: path.rpartition(".")[2] for path, cls in _BY_CLASS.items()}
    found |= {ROWS[row].node: path.rpartition(".")[2] for path, row in _BY_ROW.items()}
    del found[math.Extremum]  # Max or Min
    found |= {ROWS[row].node: label for row, label in _LABELS.items()}
    return found


def find(path: str, name: str) -> Any:
    """The class ``name`` of Chainer's module ``path``, or None."""
    below = f"{path}.{name}".removeprefix("chainer.functions.")
    row = _BY_ROW.get(below)
    found = ROWS[row].node if row is not None else _BY_CLASS.get(below)
    return function_classes.find(f"{path}.{name}".removeprefix("chainer.")) if found is None else found
