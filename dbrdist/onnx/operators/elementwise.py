"""Elementwise functions: the rows of ``core.tape.elementwise_table``, and computations that hooks observe."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dbrdist.onnx.conversion import CONVERTERS, Conversion, OperatorError, converts
from dbrdist.onnx.graph import OnnxGraph

# Functions with an operator that takes the same operands and no attributes.
_SAME = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "neg": "Neg", "exp": "Exp", "log": "Log", "sqrt": "Sqrt",
    "tanh": "Tanh", "absolute": "Abs", "pow": "Pow", "sin": "Sin", "cos": "Cos", "tan": "Tan", "sinh": "Sinh",
    "cosh": "Cosh", "arcsin": "Asin", "arccos": "Acos", "arctan": "Atan", "arctanh": "Atanh", "maximum": "Max",
    "minimum": "Min", "erf": "Erf", "sigmoid": "Sigmoid", "mish": "Mish", "hardswish": "HardSwish", "ReLU": "Relu",
    "floor": "Floor", "ceil": "Ceil", "sign": "Sign", "greater_equal": "GreaterOrEqual", "greater": "Greater",
    "less": "Less", "less_equal": "LessOrEqual", "equal": "Equal", "logical_not": "Not",
}  # fmt: skip


def _same(kind: str) -> Any:
    return lambda g, c: g.op(kind, *c.names)


for _name, _kind in _SAME.items():
    CONVERTERS[_name] = _same(_kind)


def value(c: Conversion, name: str) -> Any:
    """A number that the row takes besides its operands."""
    return dict(zip(c.node.row.numbers, c.node.values))[name]


@converts("not_equal")
def _not_equal(g: OnnxGraph, c: Conversion) -> str:
    return g.op("Not", g.op("Equal", *c.names))


@converts("multiply")
def _multiply(g: OnnxGraph, c: Conversion) -> str:
    """Of an observed product: integers times booleans."""
    return g.op("Mul", *(n if x.dtype == c.dtype else g.cast(n, c.dtype) for n, x in zip(c.names, c.call.xs)))


@converts("trunc")
def _trunc(g: OnnxGraph, c: Conversion) -> str:
    (x,) = c.names
    return g.op("Mul", g.op("Sign", x), g.op("Floor", g.op("Abs", x)))


@converts("argmax", "argmin")
def _index(g: OnnxGraph, c: Conversion) -> str:
    (x,), axis = c.names, c.node["axis"]
    if axis is None:
        x, axis = g.reshape(x, (-1,)), 0
    kind = "ArgMax" if c.call.kind == "argmax" else "ArgMin"
    return g.cast(g.op(kind, x, axis=axis, keepdims=0), c.dtype)


@converts("pow_number")
def _power(g: OnnxGraph, c: Conversion) -> str:
    (x,), exponent = c.names, value(c, "c")
    return g.op("Mul", x, x) if exponent == 2 else g.op("Pow", x, c.number(exponent))


@converts("expm1")
def _expm1(g: OnnxGraph, c: Conversion) -> str:
    """tanh(x / 2) (exp(x) + 1): accurate near 0, where exp(x) - 1 is not."""
    (x,) = c.names
    half = g.op("Tanh", g.op("Mul", x, c.number(0.5)))
    accurate = g.op("Mul", half, g.op("Add", g.op("Exp", x), c.number(1)))
    plain = g.op("Sub", g.op("Exp", x), c.number(1))
    return g.op("Where", g.op("Less", x, c.number(1)), accurate, plain)


@converts("log1p")
def _log1p(g: OnnxGraph, c: Conversion) -> str:
    return g.op("Log", g.op("Add", c.names[0], c.number(1)))


@converts("log2", "log10")
def _log_to_base(g: OnnxGraph, c: Conversion) -> str:
    scale = 1 / math.log(2 if c.call.kind == "log2" else 10)
    return g.op("Mul", g.op("Log", c.names[0]), c.number(scale))


@converts("rsqrt")
def _rsqrt(g: OnnxGraph, c: Conversion) -> str:
    return g.op("Reciprocal", g.op("Sqrt", c.names[0]))


@converts("square")
def _square(g: OnnxGraph, c: Conversion) -> str:
    return g.op("Mul", c.names[0], c.names[0])


@converts("squared_difference")
def _squared_difference(g: OnnxGraph, c: Conversion) -> str:
    d = g.op("Sub", *c.names)
    return g.op("Mul", d, d)


@converts("distance")
def _distance(g: OnnxGraph, c: Conversion) -> str:
    return g.op("Abs", g.op("Sub", *c.names))


@converts("huber")
def _huber(g: OnnxGraph, c: Conversion) -> str:
    """With q = min(|x - t|, delta): q (|x - t| - q / 2)."""
    a = g.op("Abs", g.op("Sub", *c.names))
    q = g.op("Min", a, c.number(value(c, "delta")))
    return g.op("Mul", q, g.op("Sub", a, g.op("Mul", q, c.number(0.5))))


@converts("exp_difference")
def _exp_difference(g: OnnxGraph, c: Conversion) -> str:
    return g.op("Exp", g.op("Sub", *c.names))


@converts("linear_interpolate")
def _interpolate(g: OnnxGraph, c: Conversion) -> str:
    p, x, y = c.names
    return g.op("Add", g.op("Mul", p, x), g.op("Mul", g.op("Sub", c.number(1), p), y))


@converts("arctan2")
def _arctan2(g: OnnxGraph, c: Conversion) -> str:
    """atan(y / x), plus or minus pi where x < 0; half of that where x is 0."""
    y, x = c.names
    zero = c.number(0)
    upper = g.op("Where", g.op("Less", y, zero), c.number(-math.pi), c.number(math.pi))
    turn = g.op("Where", g.op("Less", x, zero), upper, zero)
    there = g.op("Equal", x, zero)
    safe = g.op("Where", there, c.number(1), x)
    plain = g.op("Add", g.op("Atan", g.op("Div", y, safe)), turn)
    return g.op("Where", there, g.op("Mul", g.op("Sign", y), c.number(math.pi / 2)), plain)


@converts("clip", "clipped_relu", "relu6")
def _clip(g: OnnxGraph, c: Conversion) -> str:
    if c.call.kind == "clip":
        low, high = value(c, "x_min"), value(c, "x_max")
    else:
        low, high = 0.0, value(c, "z") if c.call.kind == "clipped_relu" else 6.0
    bounds = ["" if v is None else c.number(v) for v in (low, high)]
    return g.op("Clip", c.names[0], *bounds)


@converts("erfc")
def _erfc(g: OnnxGraph, c: Conversion) -> str:
    return g.op("Sub", c.number(1), g.op("Erf", c.names[0]))


def _normal_cdf(g: OnnxGraph, c: Conversion, x: str) -> str:
    e = g.op("Erf", g.op("Mul", x, c.number(math.sqrt(0.5))))
    return g.op("Mul", g.op("Add", e, c.number(1)), c.number(0.5))


@converts("ndtr")
def _ndtr(g: OnnxGraph, c: Conversion) -> str:
    return _normal_cdf(g, c, c.names[0])


@converts("gelu")
def _gelu(g: OnnxGraph, c: Conversion) -> str:
    (x,) = c.names
    return g.op("Mul", x, _normal_cdf(g, c, x))


@converts("gelu_by_tanh")
def _gelu_by_tanh(g: OnnxGraph, c: Conversion) -> str:
    (x,) = c.names
    factor = math.sqrt(2 / math.pi)
    cube = g.op("Mul", g.op("Mul", x, x), x)
    inner = g.op("Add", g.op("Mul", x, c.number(factor)), g.op("Mul", cube, c.number(0.044715 * factor)))
    return g.op("Mul", g.op("Mul", x, c.number(0.5)), g.op("Add", g.op("Tanh", inner), c.number(1)))


def softplus(g: OnnxGraph, c: Conversion, x: str) -> str:
    """ln(1 + exp x) without overflow."""
    rest = g.op("Log", g.op("Add", g.op("Exp", g.op("Neg", g.op("Abs", x))), c.number(1)))
    return g.op("Add", g.op("Relu", x), rest)


@converts("softplus")
def _softplus(g: OnnxGraph, c: Conversion) -> str:
    (x,), beta = c.names, value(c, "beta")
    if beta == 1:
        return softplus(g, c, x)
    return g.op("Div", softplus(g, c, g.op("Mul", x, c.number(beta))), c.number(beta))


@converts("bernoulli")
def _bernoulli(g: OnnxGraph, c: Conversion) -> str:
    p, x = c.names
    return g.op("Sub", softplus(g, c, x), g.op("Mul", p, x))


@converts("focal")
def _focal(g: OnnxGraph, c: Conversion) -> str:
    x, t = c.names
    zero, is_one, is_ignored = c.number(0), g.op("Equal", t, c.number(1)), g.op("Equal", t, c.number(-1))
    weight = g.op("Where", is_one, c.number(value(c, "of_ones")), c.number(value(c, "of_zeros")))
    score = g.op("Where", is_ignored, zero, g.op("Where", is_one, x, g.op("Neg", x)))
    damped = g.op("Exp", g.op("Mul", softplus(g, c, score), c.number(-value(c, "gamma"))))
    loss = g.op("Mul", softplus(g, c, g.op("Neg", score)), damped)
    return g.op("Mul", loss, g.op("Where", is_ignored, zero, weight))


@converts("normal_loss")
def _normal_loss(g: OnnxGraph, c: Conversion) -> str:
    x, mean, ln_var = c.names
    d = g.op("Sub", x, mean)
    scaled = g.op("Mul", g.op("Mul", d, d), g.op("Exp", g.op("Neg", ln_var)))
    total = g.op("Add", g.op("Add", scaled, ln_var), c.number(math.log(2 * math.pi)))
    return g.op("Mul", total, c.number(0.5))


@converts("laplace_loss")
def _laplace_loss(g: OnnxGraph, c: Conversion) -> str:
    x, loc, ln_scale = c.names
    scaled = g.op("Mul", g.op("Abs", g.op("Sub", x, loc)), g.op("Exp", g.op("Neg", ln_scale)))
    return g.op("Add", g.op("Add", scaled, ln_scale), c.number(math.log(2)))


@converts("leaky_relu")
def _leaky_relu(g: OnnxGraph, c: Conversion) -> str:
    return g.op("LeakyRelu", c.names[0], alpha=float(value(c, "slope")))


@converts("elu")
def _elu(g: OnnxGraph, c: Conversion) -> str:
    return g.op("Elu", c.names[0], alpha=float(value(c, "alpha")))


@converts("selu")
def _selu(g: OnnxGraph, c: Conversion) -> str:
    return g.op("Selu", c.names[0], alpha=float(value(c, "alpha")), gamma=float(value(c, "scale")))


@converts("hard_sigmoid")
def _hard_sigmoid(g: OnnxGraph, c: Conversion) -> str:
    return g.op("HardSigmoid", c.names[0], alpha=0.2, beta=0.5)


@converts("silu")
def _silu(g: OnnxGraph, c: Conversion) -> str:
    (x,), beta = c.names, np.asarray(value(c, "beta"))
    scaled = x if beta == 1 else g.op("Mul", x, c.number(beta))
    return g.op("Mul", x, g.op("Sigmoid", scaled))


@converts("Swish")
def _swish(g: OnnxGraph, c: Conversion) -> str:
    x, beta = c.names
    return g.op("Mul", x, g.op("Sigmoid", g.op("Mul", x, beta)))


@converts("Remainder")
def _remainder(g: OnnxGraph, c: Conversion) -> str:
    """fmod has an operator; the remainder with the divisor's sign is x - floor(x / y) y."""
    if c.node.function is np.fmod or c.dtype.kind in "iu":
        return g.op("Mod", *c.names, fmod=int(c.node.function is np.fmod))
    x, y = c.names
    return g.op("Sub", x, g.op("Mul", g.op("Floor", g.op("Div", x, y)), y))


@converts("Dropout", "Zoneout")
def _random(g: OnnxGraph, c: Conversion) -> str:
    raise OperatorError("random numbers of training would become constants: export with train=False")
