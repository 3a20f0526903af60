"""Special functions: the standard library's, and series for what it lacks."""

from __future__ import annotations

import math
import statistics

import numpy as np

from .arrays import each


def erf(x):
    return each(math.erf, x)


def erfc(x):
    return each(math.erfc, x)


def erfcx(x):
    def one(v):
        if v < 25:
            return math.exp(v * v) * math.erfc(v)
        return series(v * math.sqrt(2)) / (v * math.sqrt(math.pi))

    return each(one, x)


def series(v):
    """1 - 1 / v^2 + 1 3 / v^4 - 1 3 5 / v^6 + ...: what is left of Mills' ratio for large v."""
    return 1 - 1 / v**2 + 3 / v**4 - 15 / v**6 + 105 / v**8


def erfinv(x):
    return each(lambda v: statistics.NormalDist().inv_cdf((1 + v) / 2) / math.sqrt(2), x)


def erfcinv(x):
    return each(lambda v: -statistics.NormalDist().inv_cdf(v / 2) / math.sqrt(2), x)


def ndtr(x):
    return each(statistics.NormalDist().cdf, x)


def ndtri(x):
    return each(statistics.NormalDist().inv_cdf, x)


def log_ndtr(x):
    def one(v):
        if v < -25:
            return -v * v / 2 - math.log(-v * math.sqrt(2 * math.pi)) + math.log(series(v))
        below = math.erfc(-v / math.sqrt(2)) / 2
        return math.log(below) if v < 0 else math.log1p(-math.erfc(v / math.sqrt(2)) / 2)

    return each(one, x)


def lgamma(x):
    return each(math.lgamma, x)


# Euler and Maclaurin: the terms below TERMS one by one, the others by their integral and Bernoulli's numbers.
TERMS = 25
BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66)


def digamma(x):
    def one(v):
        end = v + TERMS
        rest = math.fsum(b / (2 * j * end ** (2 * j)) for j, b in enumerate(BERNOULLI, 1))
        return math.log(end) - 1 / (2 * end) - rest - math.fsum(1 / (v + k) for k in range(TERMS))

    return each(one, x)


def polygamma(n, x):
    def one(order, v):
        order = int(order)
        if order == 0:
            return float(digamma(np.array(v)))
        return (-1) ** (order + 1) * math.factorial(order) * float(zeta(np.array(order + 1), np.array(v)))

    return each(one, n, x)


def zeta(x, q):
    def one(s, v):
        end = v + TERMS
        total = math.fsum((v + k) ** -s for k in range(TERMS)) + end ** (1 - s) / (s - 1) + end**-s / 2
        for j, b in enumerate(BERNOULLI, 1):
            rising = math.prod(s + i for i in range(2 * j - 1))
            total += b / math.factorial(2 * j) * rising * end ** (-s - 2 * j + 1)
        return total

    return each(one, x, q)
