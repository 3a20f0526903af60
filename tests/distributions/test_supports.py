"""Quantiles at their ends, in the tails and outside of [0, 1], and densities outside of the support, against SciPy."""

import warnings

import numpy as np
import pytest

from dbrdist import distributions as D
from tests.each import each

scipy = pytest.importorskip("scipy")

QUANTILES = {
    "Normal": (lambda a, b: D.Normal(a - 1, b), lambda a, b: scipy.stats.norm(a - 1, b)),
    "Laplace": (lambda a, b: D.Laplace(a - 1, b), lambda a, b: scipy.stats.laplace(a - 1, b)),
    "Cauchy": (lambda a, b: D.Cauchy(a - 1, b), lambda a, b: scipy.stats.cauchy(a - 1, b)),
    "Gumbel": (lambda a, b: D.Gumbel(a - 1, b), lambda a, b: scipy.stats.gumbel_r(a - 1, b)),
    "LogNormal": (lambda a, b: D.LogNormal(a - 1, b), lambda a, b: scipy.stats.lognorm(s=b, scale=np.exp(a - 1))),
    "Uniform": (lambda a, b: D.Uniform(loc=a - 1, scale=b), lambda a, b: scipy.stats.uniform(a - 1, b)),
    "Exponential": (lambda a, b: D.Exponential(b), lambda a, b: scipy.stats.expon(scale=1 / b)),
    "Pareto": (lambda a, b: D.Pareto(a, b), lambda a, b: scipy.stats.pareto(b, scale=a)),
}
DENSITIES = {
    **QUANTILES,
    "Gamma": (D.Gamma, lambda a, b: scipy.stats.gamma(a, scale=b)),
    "Chisquare": (lambda a, b: D.Chisquare(a + 2), lambda a, b: scipy.stats.chi2(a + 2)),
    "Beta": (lambda a, b: D.Beta(a + 1, b + 1), lambda a, b: scipy.stats.beta(a + 1, b + 1)),
    "Bernoulli": (lambda a, b: D.Bernoulli(b / 3, binary_check=True), lambda a, b: scipy.stats.bernoulli(b / 3)),
    "Geometric": (lambda a, b: D.Geometric(b / 3), lambda a, b: scipy.stats.geom(b / 3)),
    "Poisson": (lambda a, b: D.Poisson(b), lambda a, b: scipy.stats.poisson(b)),
}
ENDS = [0.0, 1.0, -0.0, -1e-9, -0.1, 1.0000001, 1.2, np.inf, -np.inf, np.nan]
INNER = [1e-38, 1e-30, 1e-20, 1e-12, 1e-8, 3e-8, 1e-7, 1e-5, 1e-3, 0.1, 0.25, 0.4, 0.49999, 0.5]


def probabilities(dtype):
    inner = np.array(INNER, dtype)
    return np.concatenate([np.array(ENDS, dtype), inner, 1 - inner, [np.nextafter(dtype(1), dtype(0))]]).astype(dtype)


@pytest.mark.parametrize("name", sorted(QUANTILES))
@each(dtype=[np.float32, np.float64], numbers=[(1.0, 1.0), (1.0, 2.5)])
def test_quantiles(name, dtype, numbers):
    ours, theirs = QUANTILES[name]
    p = probabilities(dtype)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("error")
        found = ours(*(np.full(1, v, dtype) for v in numbers)).icdf(p)
        wanted = theirs(*numbers).ppf(p.astype("d")).astype(dtype)
    assert found.dtype == dtype
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(found.array, wanted, rtol=64 * eps, atol=4 * eps, equal_nan=True)


@pytest.mark.parametrize("name", sorted(DENSITIES))
@each(dtype=[np.float32, np.float64], numbers=[(1.0, 1.0), (2.0, 2.5)])
def test_densities_everywhere(name, dtype, numbers):
    ours, theirs = DENSITIES[name]
    x = np.array([-np.inf, -1e30, -200.0, -1.0, -0.5, 0.0, 0.3, 1.0, 1.5, 2.0, 7.0, 60.0, 1e30, np.inf, np.nan], dtype)
    if name == "Beta":  # SciPy and we agree on the open interval alone
        x = x[(x != 0) & (x != 1)]
    d, reference = ours(*(np.full(1, v, dtype) for v in numbers)), theirs(*numbers)
    with np.errstate(all="ignore"):
        wanted = (reference.logpmf if name in ("Bernoulli", "Geometric", "Poisson")
                  else reference.logpdf)(x.astype("d"))  # fmt: skip
        if name == "Laplace":  # SciPy's density underflows
            wanted = np.where(abs(x) == dtype(1e30), -abs(x.astype("d")) / numbers[1], wanted)
        wanted = np.where(np.isinf(x), -np.inf, wanted)  # where SciPy sometimes has NaN
        rtol = 1e-4 if dtype is np.float32 else 1e-9
        # What float32 cannot hold is infinite there.
        np.testing.assert_allclose(d.log_prob(x).array, wanted.astype(dtype), rtol=rtol, atol=rtol, equal_nan=True)
        np.testing.assert_allclose(d.prob(x).array, np.exp(wanted), rtol=10 * rtol, atol=1e-30, equal_nan=True)


HAVE_CDF = sorted(set(QUANTILES))


@pytest.mark.parametrize("name", HAVE_CDF)
@each(dtype=[np.float32, np.float64])
def test_cumulative_probabilities_everywhere(name, dtype):
    ours, theirs = QUANTILES[name]
    x = np.array(
        [-np.inf, -1e6, -20.0, -5.0, -0.1, 0.0, 1e-6, 0.3, 1.0, 1.2, 5.0, 20.0, 40.0, 1e6, np.inf, np.nan], dtype
    )
    d, reference = ours(*(np.ones(1, dtype) for _ in range(2))), theirs(1.0, 1.0)
    rtol = 1e-4 if dtype is np.float32 else 1e-9
    pairs = (("cdf", "cdf"), ("log_cdf", "logcdf"), ("survival_function", "sf"), ("log_survival_function", "logsf"))
    with np.errstate(all="ignore"):
        for own, their in pairs:
            wanted = getattr(reference, their)(x.astype("d"))
            if name == "Laplace":  # SciPy's logarithms underflow
                wanted = np.where(np.isinf(wanted) & np.isfinite(x), np.log(0.5) - abs(x), wanted)
            if name == "Gumbel":
                wanted = np.where((wanted == 0) & (own == "log_survival_function"), -reference.cdf(x), wanted)
                wanted = np.where((x == 1e6) & (own == "log_survival_function"), -x, wanted)  # it underflows
            found = getattr(d, own)(x).array
            np.testing.assert_allclose(
                found, wanted.astype(dtype), rtol=rtol, atol=np.finfo(dtype).tiny, equal_nan=True,
                err_msg=own,
            )  # fmt: skip


@each(dtype=["float32", "float64"])
def test_only_unit_vectors_are_outcomes_of_one_hot_categories(dtype):
    p = np.array([0.2, 0.3, 0.5], dtype)
    x = np.array(
        [[1, 0, 0], [0, 0, 1], [0, 0, 0], [1, 1, 0], [0.5, 0.5, 0], [2, 0, 0], [1, 0, np.nan], [-1, 1, 1]], dtype
    )
    found = D.OneHotCategorical(p).log_prob(x).array
    wanted = np.array([np.log(0.2), np.log(0.5), *[-np.inf] * 4, np.nan, -np.inf])
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@each(dtype=["float32", "float64"])
def test_only_probabilities_are_outcomes_of_a_dirichlet_distribution(dtype):
    alpha = np.array([1.5, 2.0, 0.7], dtype)
    x = np.array([[0.2, 0.3, 0.5], [0.25, 0.25, 0.5], [-0.2, 0.7, 0.5], [0.5, 0.5, 0.5], [1.2, -0.1, -0.1]], dtype)
    found = D.Dirichlet(alpha).log_prob(x).array
    wanted = [*(scipy.stats.dirichlet(alpha.astype("d")).logpdf(v.astype("d") / v.astype("d").sum()) for v in x[:2]),
              *[-np.inf] * 3]  # fmt: skip
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    rounded = np.array([0.333, 0.333, 0.333], dtype)  # to three digits: still an outcome
    assert np.isfinite(D.Dirichlet(alpha).log_prob(rounded).array)


def test_infinite_vectors_of_a_multivariate_normal_distribution():
    d = D.MultivariateNormal(np.zeros(2), scale_tril=np.array([[1.0, 0.0], [0.5, 2.0]]))
    x = np.array([[np.inf, 0.0], [0.0, -np.inf], [0.0, 0.0]])
    found = d.log_prob(x).array
    assert (found[:2] == -np.inf).all()
    assert np.isfinite(found[2])


NO_PARAMETERS = {
    "Normal": lambda: D.Normal(0.0, -1.0),
    "Laplace": lambda: D.Laplace(0.0, -1.0),
    "LogNormal": lambda: D.LogNormal(0.0, -1.0),
    "Uniform": lambda: D.Uniform(low=2.0, high=1.0),
    "Uniform of scale": lambda: D.Uniform(loc=2.0, scale=-1.0),
    "Exponential": lambda: D.Exponential(-1.0),
    "Gamma": lambda: D.Gamma(2.0, -1.0),
    "Chisquare": lambda: D.Chisquare(-1.0),
    "Beta": lambda: D.Beta(np.array([1.0, -1.0]), 1.0),
    "Pareto": lambda: D.Pareto(1.0, -1.0),
    "Geometric": lambda: D.Geometric(1.5),
    "Poisson": lambda: D.Poisson(-1.0),
    "Bernoulli": lambda: D.Bernoulli(np.array([0.5, 1.5])),
    "Categorical": lambda: D.Categorical(np.array([-0.5, 1.5])),
}


@pytest.mark.parametrize("name", NO_PARAMETERS)
def test_parameters_of_no_distribution_are_refused(name):
    with pytest.raises(ValueError, match=f"{name.split()[0]}: .*expected"):
        NO_PARAMETERS[name]()


def test_parameters_at_their_bounds_are_taken():
    D.Normal(0.0, 0.0), D.Bernoulli(1.0), D.Bernoulli(np.float32(1 + 1e-7))
    D.Normal(0.0, np.array([np.nan])), D.Uniform(low=1.0, high=1.0)


def test_grey_values_are_outcomes_of_bernoulli_and_numbers_beyond_are_not():
    d = D.Bernoulli(np.array(0.3))
    np.testing.assert_allclose(d.log_prob(np.array(0.5)).array, 0.5 * np.log(0.3) + 0.5 * np.log(0.7))
    for x in (-1.0, 2.0, np.inf):
        assert d.log_prob(np.array(x)).array == -np.inf
        assert d.prob(np.array(x)).array == 0
