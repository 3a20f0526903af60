"""Elementwise rows and their derivatives, each in a form that keeps its relative accuracy in the tails.

Operands are of ``numpy.longdouble`` (float64 where a function of SciPy is used): the results are right to far less than
a unit in the last place of float32, and where the processor has 80 bits to less than one of float64.
"""

import numpy as np
from scipy import special

L = np.longdouble


def sigmoid(x):
    e = np.exp(-abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-abs(x)))


def _mish_tanh(x):
    """tanh(ln(1 + e)), e = exp(x)"""
    e = np.exp(np.minimum(x, 50))
    return e * (e + 2) / (e * (e + 2) + 2)


def _mish_slope(x):
    t = _mish_tanh(x)
    e = np.exp(np.minimum(x, 50))
    return t + x * 4 * (e + 1) * e / (e * (e + 2) + 2) ** 2


def _ndtr(x):
    return special.ndtr(x.astype("d")).astype(L)


def _density(x):
    return np.exp(-x * x / 2) / np.sqrt(2 * L(np.pi))


_A, _B = L(0.044715), np.sqrt(2 / L("3.14159265358979323846"))


def _gelu_by_tanh_slope(x):
    s = sigmoid(2 * _B * x * (1 + _A * x * x))
    return s + x * s * sigmoid(-2 * _B * x * (1 + _A * x * x)) * 2 * _B * (1 + 3 * _A * x * x)


def _silu_slope(x, beta):
    return sigmoid(beta * x) * (1 + beta * x * sigmoid(-beta * x))


def _elu_slope(x, alpha):
    return np.where(x >= 0, 1, alpha * np.exp(np.minimum(x, 0)))


def _focal(x, t, gamma, of_ones, of_zeros):
    """A label that is neither 1 nor -1 counts as 0."""
    score = np.where(t == 1, x, -x)
    return np.where(t == -1, 0, np.where(t == 1, of_ones, of_zeros) * softplus(-score) * sigmoid(-score) ** gamma)


def _focal_slope(x, t, gamma, of_ones, of_zeros):
    sign = np.where(t == 1, 1, -1)
    q = sigmoid(-sign * x)
    slope = sign * q**gamma * (-gamma * sigmoid(sign * x) * softplus(-sign * x) - q)
    return np.where(t == -1, 0, np.where(t == 1, of_ones, of_zeros) * slope)


def _hazard(x):
    return _B / _of_double(special.erfcx)(-x / np.sqrt(L(2)))


def _of_double(function):
    return lambda *xs: function(*[x.astype("d") for x in xs]).astype(L)


def _polygamma(n, x):
    return special.polygamma(n.astype("l"), x.astype("d")).astype(L)


# By the name of a row: the function, and its derivatives by each operand.
VALUES = {
    "add": (lambda a, b: a + b, lambda a, b: 1 + 0 * a, lambda a, b: 1 + 0 * a),
    "sub": (lambda a, b: a - b, lambda a, b: 1 + 0 * a, lambda a, b: -1 + 0 * a),
    "mul": (lambda a, b: a * b, lambda a, b: b, lambda a, b: a),
    "div": (lambda a, b: a / b, lambda a, b: 1 / b, lambda a, b: -a / b / b),
    "neg": (lambda x: -x, lambda x: -1 + 0 * x),
    "exp": (np.exp, np.exp),
    "log": (np.log, lambda x: 1 / x),
    "sqrt": (np.sqrt, lambda x: 1 / (2 * np.sqrt(x))),
    "tanh": (np.tanh, lambda x: 1 / np.cosh(x) ** 2),
    "absolute": (abs, np.sign),
    "pow": (np.power, lambda a, b: b * a ** (b - 1), lambda a, b: a**b * np.log(a)),
    "pow_number": (lambda x, c: x**c, lambda x, c: c * x ** (c - 1)),
    "sin": (np.sin, np.cos),
    "cos": (np.cos, lambda x: -np.sin(x)),
    "tan": (np.tan, lambda x: 1 / np.cos(x) ** 2),
    "sinh": (np.sinh, np.cosh),
    "cosh": (np.cosh, np.sinh),
    "arcsin": (np.arcsin, lambda x: 1 / np.sqrt((1 - x) * (1 + x))),
    "arccos": (np.arccos, lambda x: -1 / np.sqrt((1 - x) * (1 + x))),
    "arctan": (np.arctan, lambda x: 1 / (1 + x * x)),
    "arctan2": (np.arctan2, lambda y, x: x / (x * x + y * y), lambda y, x: -y / (x * x + y * y)),
    "arctanh": (np.arctanh, lambda x: 1 / ((1 - x) * (1 + x))),
    "expm1": (np.expm1, np.exp),
    "log1p": (np.log1p, lambda x: 1 / (1 + x)),
    "log2": (np.log2, lambda x: 1 / (x * np.log(L(2)))),
    "log10": (np.log10, lambda x: 1 / (x * np.log(L(10)))),
    "rsqrt": (lambda x: 1 / np.sqrt(x), lambda x: -0.5 / np.sqrt(x) / x),
    "square": (np.square, lambda x: 2 * x),
    "squared_difference": (
        lambda a, b: (a - b) ** 2, lambda a, b: 2 * (a - b), lambda a, b: 2 * (b - a),
    ),
    "maximum": (np.maximum, lambda a, b: (a >= b) + 0 * a, lambda a, b: (a < b) + 0 * a),
    "minimum": (np.minimum, lambda a, b: (a <= b) + 0 * a, lambda a, b: (a > b) + 0 * a),
    "clip": (lambda x, low, high: np.clip(x, low, high), lambda x, low, high: ((x >= low) & (x <= high)) + 0 * x),
    "exp_difference": (
        lambda a, b: np.exp(a - b), lambda a, b: np.exp(a - b), lambda a, b: -np.exp(a - b),
    ),
    "scaled_exp_difference": (
        lambda a, b, c: np.exp(a - b) * c, lambda a, b, c: np.exp(a - b) * c, lambda a, b, c: -np.exp(a - b) * c,
        lambda a, b, c: np.exp(a - b),
    ),
    "linear_interpolate": (
        lambda p, x, y: p * x + (1 - p) * y, lambda p, x, y: x - y, lambda p, x, y: p, lambda p, x, y: 1 - p,
    ),
    "erf": (_of_double(special.erf), lambda x: 2 * _B / np.sqrt(L(2)) * np.exp(-x * x)),
    "erfc": (_of_double(special.erfc), lambda x: -2 * _B / np.sqrt(L(2)) * np.exp(-x * x)),
    "erfcx": (_of_double(special.erfcx), lambda x: 2 * x * _of_double(special.erfcx)(x) - 2 * _B / np.sqrt(L(2))),
    "erfinv": (_of_double(special.erfinv), lambda x: np.exp(_of_double(special.erfinv)(x) ** 2) / (_B * np.sqrt(L(2)))),
    "erfcinv": (
        _of_double(special.erfcinv), lambda x: -np.exp(_of_double(special.erfcinv)(x) ** 2) / (_B * np.sqrt(L(2))),
    ),
    "ndtr": (_ndtr, _density),
    "ndtri": (_of_double(special.ndtri), lambda x: 1 / _density(_of_double(special.ndtri)(x))),
    "log_ndtr": (_of_double(special.log_ndtr), lambda x: _hazard(x)),
    "hazard": (lambda x: _hazard(x), lambda x: -_hazard(x) * (x + _hazard(x))),
    "lgamma": (_of_double(special.gammaln), _of_double(special.digamma)),
    "digamma": (_of_double(special.digamma), lambda x: special.polygamma(1, x.astype("d")).astype(L)),
    "polygamma": (_polygamma, None, lambda n, x: _polygamma(n + 1, x)),
    "zeta": (_of_double(special.zeta), None, lambda x, q: -x * _of_double(special.zeta)(x + 1, q)),
    "sigmoid": (sigmoid, lambda x: sigmoid(x) * sigmoid(-x)),
    "softplus": (lambda x, beta: softplus(beta * x) / beta, lambda x, beta: sigmoid(beta * x)),
    "leaky_relu": (lambda x, s: np.where(x >= 0, x, s * x), lambda x, s: np.where(x >= 0, 1 + 0 * x, s)),
    "elu": (lambda x, alpha: np.where(x >= 0, x, alpha * np.expm1(np.minimum(x, 0))), _elu_slope),
    "selu": (
        lambda x, alpha, scale: scale * np.where(x >= 0, x, alpha * np.expm1(np.minimum(x, 0))),
        lambda x, alpha, scale: scale * _elu_slope(x, alpha),
    ),
    "clipped_relu": (lambda x, z: np.clip(x, 0, z), lambda x, z: ((x > 0) & (x < z)) + 0 * x),
    "relu6": (lambda x: np.clip(x, 0, 6), lambda x: ((x > 0) & (x < 6)) + 0 * x),
    "hard_sigmoid": (lambda x: np.clip(x / 5 + 0.5, 0, 1), lambda x: (abs(x) < 2.5) / L(5)),
    "silu": (lambda x, beta: x * sigmoid(beta * x), _silu_slope),
    "mish": (lambda x: x * _mish_tanh(x), _mish_slope),
    "hardswish": (
        lambda x: x * np.clip(x / 6 + 0.5, 0, 1), lambda x: np.where(abs(x) < 3, x / 3 + 0.5, (x > 0) + 0 * x),
    ),
    "gelu": (lambda x: x * _ndtr(x), lambda x: _ndtr(x) + x * _density(x)),
    "gelu_by_tanh": (lambda x: x * sigmoid(2 * _B * x * (1 + _A * x * x)), _gelu_by_tanh_slope),
    "bernoulli": (lambda p, x: softplus(x) - p * x, lambda p, x: -x, lambda p, x: sigmoid(x) - p),
    "focal": (_focal, _focal_slope, None),
    "normal_loss": (
        lambda x, m, s: (np.log(8 * np.arctan(L(1))) + s + (x - m) ** 2 / np.exp(s)) / 2,
        lambda x, m, s: (x - m) / np.exp(s),
        lambda x, m, s: (m - x) / np.exp(s),
        lambda x, m, s: (1 - (x - m) ** 2 / np.exp(s)) / 2,
    ),
    "laplace_loss": (
        lambda x, m, s: np.log(L(2)) + s + abs(x - m) / np.exp(s),
        lambda x, m, s: np.sign(x - m) / np.exp(s),
        lambda x, m, s: np.sign(m - x) / np.exp(s),
        lambda x, m, s: 1 - abs(x - m) / np.exp(s),
    ),
    "distance": (lambda a, b: abs(a - b), lambda a, b: np.sign(a - b), lambda a, b: np.sign(b - a)),
    "huber": (
        lambda x, t, d: np.where(abs(x - t) <= d, (x - t) ** 2 / 2, d * (abs(x - t) - d / 2)),
        lambda x, t, d: np.clip(x - t, -d, d),
        lambda x, t, d: -np.clip(x - t, -d, d),
    ),
}  # fmt: skip

# Of a derivative that is computed from the rounded output y: how much a rounding of y moves it, in units of y's.
OF_OUTPUT = {
    "tanh": lambda y: 2 * y * y,
    "sigmoid": lambda y: y * abs(1 - 2 * y),
    "erfcx": lambda y: 1.2 + 0 * y,
    "erfinv": lambda y: y * y * np.exp(y * y),
    "erfcinv": lambda y: y * y * np.exp(y * y),
    "ndtri": lambda y: 2.5 * y * y * np.exp(y * y / 2),
    "hazard": lambda y: 2 * y * y,
}
