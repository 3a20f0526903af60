"""Special functions beyond the table of cases: without SciPy, at extremes, with bad arguments."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable
from dbrdist.core.array import scipy_parts


@pytest.fixture
def without_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    scipy_parts.special_function.cache_clear()
    yield
    scipy_parts.special_function.cache_clear()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 4), (300, 301)])
def test_some_run_without_scipy(without_scipy, shape, dtype):
    x = Variable(np.random.default_rng(0).uniform(-3, 3, shape).astype(dtype))
    tolerance = {"float64": 1e-15, "float32": 1e-6, "float16": 2e-3}[dtype]
    wide = x.array.astype(np.float64)
    erfc = np.array([math.erfc(v) for v in wide.ravel()]).reshape(shape)
    below = np.array([math.erfc(-v / math.sqrt(2)) / 2 for v in wide.ravel()]).reshape(shape)
    for function, expected in ((F.erf, 1 - erfc), (F.erfc, erfc), (F.ndtr, below), (F.gelu, wide * below)):
        y = function(x)
        assert y.dtype == x.dtype and y.shape == shape
        np.testing.assert_allclose(y.array, expected, rtol=tolerance, atol=3 * tolerance)
    F.sum(F.gelu(x)).backward()
    assert x.grad.dtype == x.dtype


@pytest.mark.parametrize("name", ["erfcx", "erfinv", "erfcinv", "ndtri", "log_ndtr", "lgamma", "digamma"])
def test_the_others_say_what_to_install(without_scipy, name):
    with pytest.raises(ImportError, match=r"expected SciPy, which computes \w+, .*; install scipy or dbrdist\[scipy\]"):
        getattr(F, name)(np.ones(3))


def test_those_of_two_arguments_say_it_too(without_scipy):
    for call in (lambda: F.zeta(2.0, np.ones(3)), lambda: F.polygamma(1, np.ones(3))):
        with pytest.raises(ImportError, match="install scipy"):
            call()


class TestWithSciPy:
    @pytest.fixture(autouse=True)
    def scipy(self):
        pytest.importorskip("scipy")

    def test_derivatives_of_log_ndtr_stay_finite_at_extremes(self):
        """The hazard h has h' = -h (x + h), which is -1 far below 0 and 0 far above."""
        x = Variable(np.array([-1e4, -40.0, 0.0, 40.0, 1e4]))
        (first,) = dbrdist.grad([F.log_ndtr(x)], [x], [Variable(np.ones(5))], enable_double_backprop=True)
        (second,) = dbrdist.grad([first], [x], [Variable(np.ones(5))])
        np.testing.assert_allclose(first.array, [1e4 + 1e-4, 40.02493, math.sqrt(2 / math.pi), 0, 0], rtol=1e-6)
        np.testing.assert_allclose(second.array, [-1, -0.998755, -2 / math.pi, 0, 0], rtol=1e-3)

    def test_bounds_are_infinite(self):
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(F.erfinv(np.array([-1.0, 1.0])).array, [-np.inf, np.inf])
            np.testing.assert_array_equal(F.ndtri(np.array([0.0, 1.0])).array, [-np.inf, np.inf])
            np.testing.assert_array_equal(F.erfcinv(np.array([0.0, 2.0])).array, [np.inf, -np.inf])
            assert np.isnan(F.erfinv(np.array([1.5])).array).all()

    @pytest.mark.slow
    @pytest.mark.parametrize("function", [lambda x: F.polygamma(2, x), lambda x: F.zeta(3, x), F.lgamma, F.digamma])
    def test_operands_are_read_in_any_order_and_type(self, function):
        x = np.random.default_rng(0).uniform(0.5, 3.0, (300, 400))
        for a in (x.T, x[::-2, 1::3], np.asfortranarray(x), x.astype(np.float32)):
            y = function(a)
            assert y.dtype == a.dtype
            np.testing.assert_allclose(y.array, function(a.astype(np.float64).copy()).array, rtol=1e-5)

    def test_orders_take_no_gradient(self):
        n, x = Variable(np.array([1.0, 2.0])), Variable(np.array([1.0, 2.0]))
        F.sum(F.polygamma(n, x) + F.zeta(n + 1, x)).backward()
        assert n.grad is None
        assert x.grad is not None

    def test_orders_broadcast(self):
        y = F.polygamma(np.arange(3)[:, None], Variable(np.array([1.0, 2.0])))
        assert y.shape == (3, 2)
        np.testing.assert_allclose(y.array[1], [math.pi**2 / 6, math.pi**2 / 6 - 1], rtol=1e-14)


@pytest.mark.parametrize("n", [-1, 1.5, np.array([1, -2]), np.array([0.5])])
def test_orders_that_are_none_are_refused(n):
    with pytest.raises(ValueError, match="polygamma: n: expected integers from 0"):
        F.polygamma(n, np.ones(2))


def test_operands_are_named_by_their_places():
    with pytest.raises(TypeError, match="polygamma: x: expected"):
        F.polygamma(1, np.ones(2) > 0)
    with pytest.raises(TypeError, match="polygamma: n: expected"):
        F.polygamma("1", np.ones(2))


@pytest.mark.parametrize("n", [None, [1], "1"])
def test_orders_are_numbers_or_arrays(n):
    for call, name in ((F.polygamma, "polygamma: n"), (F.zeta, "zeta: x")):
        with pytest.raises(TypeError, match=f"{name}: expected an array or Variable, got"):
            call(n, np.ones(2))


def test_integers_are_refused():
    for call in (lambda: F.polygamma(1, np.ones(2, int)), lambda: F.zeta(2, np.ones(2, int)),
                 lambda: F.erf(np.ones(2, int)), lambda: F.gelu(np.ones(2, int)), lambda: F.silu([1.0])):  # fmt: skip
        with pytest.raises(TypeError, match=r"expected (a floating type|an array or Variable)"):
            call()


def test_gelu_names_its_formulas():
    with pytest.raises(ValueError, match="gelu: approximate: expected 'none' or 'tanh', got 'erf'"):
        F.gelu(np.ones(2), "erf")
