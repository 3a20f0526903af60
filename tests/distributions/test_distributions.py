"""Each distribution against SciPy's in float64: densities, moments, entropies, quantiles, samples, divergences."""

from __future__ import annotations

import contextlib
import math
import pickle

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable, distribution, gradient_check
from dbrdist import distributions as D
from tests.each import each

scipy = pytest.importorskip("scipy")  # its rooms are loaded at their first use: scipy.stats takes 0.7 s
# Name, how it is made from arrays, two sets of parameters (a batch of three each), SciPy's own, where to look.
LOC, SCALE = np.array([0.3, -1.2, 2.0]), np.array([0.7, 1.5, 2.5])
LOC2, SCALE2 = np.array([0.1, -0.5, 1.0]), np.array([1.1, 0.9, 3.0])
A, B = np.array([2.5, 1.3, 4.0]), np.array([1.7, 3.1, 2.2])
REAL = np.linspace(-4.0, 5.0, 7)[:, None]
POSITIVE = np.array([-0.5, 0.1, 0.8, 1.9, 4.0])[:, None]
UNIT = np.array([-0.1, 0.05, 0.4, 0.9, 1.2])[:, None]
COUNT = np.array([-1.0, 0.0, 1.0, 2.0, 2.5, 7.0])[:, None]
P, P2 = np.array([0.2, 0.5, 0.9]), np.array([0.3, 0.4, 0.7])
ROWS = {
    "Normal": (D.Normal, (LOC, SCALE), (LOC2, SCALE2), lambda m, s: scipy.stats.norm(m, s), REAL),
    "Laplace": (D.Laplace, (LOC, SCALE), (LOC2, SCALE2), lambda m, s: scipy.stats.laplace(m, s), REAL),
    "Cauchy": (D.Cauchy, (LOC, SCALE), None, lambda m, s: scipy.stats.cauchy(m, s), REAL),
    "Gumbel": (D.Gumbel, (LOC, SCALE), (LOC2, SCALE2), lambda m, s: scipy.stats.gumbel_r(m, s), REAL),
    "LogNormal": (D.LogNormal, (LOC, SCALE / 2), (LOC2, SCALE2 / 2),
                  lambda m, s: scipy.stats.lognorm(s=s, scale=np.exp(m)), POSITIVE),
    "Uniform": (lambda a, b: D.Uniform(low=a, high=b), (LOC, LOC + SCALE), (LOC - 1, LOC + SCALE + 2),
                lambda a, b: scipy.stats.uniform(a, b - a), REAL),
    "Exponential": (D.Exponential, (SCALE,), (SCALE2,), lambda r: scipy.stats.expon(scale=1 / r), POSITIVE),
    "Gamma": (D.Gamma, (A, B), (B, A), lambda k, t: scipy.stats.gamma(k, scale=t), POSITIVE),
    "Chisquare": (D.Chisquare, (A,), (B,), lambda k: scipy.stats.chi2(k), POSITIVE),
    "Beta": (D.Beta, (A, B), (B, A), lambda a, b: scipy.stats.beta(a, b), UNIT),
    "Pareto": (D.Pareto, (SCALE, A + 2), (SCALE * 0.8, B + 1),
               lambda s, a: scipy.stats.pareto(a, scale=s), POSITIVE + 1),
    "Bernoulli": (lambda p: D.Bernoulli(p, binary_check=True), (P,), (P2,), lambda p: scipy.stats.bernoulli(p), COUNT),
    "Geometric": (D.Geometric, (P,), (P2,), lambda p: scipy.stats.geom(p), COUNT),
    "Poisson": (D.Poisson, (A,), (B,), lambda r: scipy.stats.poisson(r), COUNT),
}  # fmt: skip
DISCRETE = ("Bernoulli", "Geometric", "Poisson")


def close(got, wanted, rtol=1e-9, **more):
    np.testing.assert_allclose(got.array if isinstance(got, Variable) else got, wanted, rtol=rtol, **more)


@each(name=ROWS)
def test_log_prob_and_prob(name):
    make, params, _, scipys, x = ROWS[name]
    theirs = scipys(*params)
    with np.errstate(divide="ignore"):
        wanted = theirs.logpmf(x) if name in DISCRETE else theirs.logpdf(x)
        close(make(*params).log_prob(x), wanted)
        close(make(*params).prob(x), np.exp(wanted), atol=1e-300)
        close(make(*params).perplexity(x[1:3]), np.exp(-wanted[1:3]))


@each(name=ROWS)
def test_moments_and_entropy(name):
    make, params, _, scipys, _ = ROWS[name]
    ours, theirs = make(*params), scipys(*params)
    assert ours.batch_shape == (3,) and ours.event_shape == () and ours.xp is np
    undefined = pytest.warns(RuntimeWarning, match="undefined: NaN") if name == "Cauchy" else contextlib.nullcontext()
    with np.errstate(invalid="ignore"), undefined:
        close(ours.mean, theirs.mean())
        close(ours.variance, theirs.var())
        close(ours.stddev, theirs.std())
    if name == "Poisson":
        with pytest.raises(NotImplementedError, match="Poisson does not define entropy"):
            _ = ours.entropy
    else:
        close(ours.entropy, [float(scipys(*(p[i] for p in params)).entropy()) for i in range(3)], rtol=1e-8)


@each(name=ROWS)
def test_cumulative_probabilities_and_quantiles(name):
    make, params, _, scipys, x = ROWS[name]
    ours, theirs = make(*params), scipys(*params)
    q = np.array([0.01, 0.3, 0.5, 0.8])[:, None]
    if type(ours).cdf is distribution.Distribution.cdf:
        with pytest.raises(NotImplementedError, match=f"{name} does not define cdf"):
            ours.cdf(x)
        return
    close(ours.cdf(x), theirs.cdf(x), atol=1e-15)
    close(ours.survival_function(x), theirs.sf(x), rtol=1e-7, atol=1e-12)
    close(ours.icdf(q), theirs.ppf(q), rtol=1e-7)
    inside = theirs.ppf(q)
    close(ours.log_cdf(inside), np.log(q * np.ones(3)), rtol=1e-7)
    close(ours.log_survival_function(inside), np.log1p(-q * np.ones(3)), rtol=1e-7)


@each(name=ROWS)
def test_the_mode_has_the_highest_density(name):
    make, params, *_ = ROWS[name]
    ours = make(*params)
    mode = ours.mode.array
    sampled = ours.sample(300).array
    inside = mode > 0 if name == "Chisquare" else np.full(3, True)  # below two degrees the density at 0 is infinite
    with np.errstate(divide="ignore"):
        assert (ours.log_prob(mode).array >= ours.log_prob(sampled).array - 1e-9)[..., inside].all()


@pytest.mark.slow
@each(name=ROWS)
def test_samples_follow_the_distribution(name):
    make, params, _, scipys, _ = ROWS[name]
    dbrdist.random.set_seed(0)
    ours = make(*params)
    drawn = ours.sample((200, 20)).array
    assert drawn.shape == (200, 20, 3) and drawn.dtype == np.float64
    for i in range(3):
        theirs = scipys(*(p[i] for p in params))
        values = drawn[..., i].ravel()
        if name in DISCRETE:
            top = int(theirs.ppf(0.999)) + 1
            counts = np.array([(values == k).sum() for k in range(top)])
            expected = np.array([theirs.pmf(k) for k in range(top)]) * values.size
            chi2 = (((counts - expected) ** 2)[expected > 0] / expected[expected > 0]).sum()
            assert chi2 < top + 6 * math.sqrt(2 * top) and (counts[expected == 0] == 0).all()
        else:
            assert scipy.stats.kstest(values, theirs.cdf).pvalue > 1e-4
    assert ours.sample().shape == (3,) and ours.sample_n(0).shape == (0, 3)


def _gain(x, p, q):
    return p.pdf(x) * (p.logpdf(x) - q.logpdf(x))


@pytest.mark.slow
@each(name=ROWS)
def test_divergence(name):
    make, params, others, scipys, _ = ROWS[name]
    if others is None:
        with pytest.raises(NotImplementedError, match=r"no divergence of Cauchy and Cauchy is known; .*register_kl"):
            distribution.kl_divergence(make(*params), make(*params))
        return
    wanted = []
    for i in range(3):
        p, q = scipys(*(a[i] for a in params)), scipys(*(a[i] for a in others))
        if name in DISCRETE:
            k = np.array([k for k in range(400) if p.pmf(k) > 0])
            wanted.append((p.pmf(k) * (p.logpmf(k) - q.logpmf(k))).sum())
        else:
            low, high = p.ppf(1e-15), p.isf(1e-15)
            kinks = [float(at) for at in (p.median(), q.median()) if low < at < high]
            wanted.append(scipy.integrate.quad(_gain, low, high, (p, q), points=kinks, limit=400)[0])
    p, q = make(*params), make(*others)
    close(distribution.kl_divergence(p, q), wanted, rtol=2e-6, atol=1e-9)
    close(distribution.kl_divergence(p, p), np.zeros(3), atol=1e-12)
    if name != "Poisson":
        close(distribution.cross_entropy(p, q), p.entropy.array + np.array(wanted), rtol=2e-6)


@each(name=ROWS)
def test_gradients_in_the_parameters(name):
    make, params, _, scipys, _ = ROWS[name]
    x = scipys(*params).ppf(np.array([[0.3], [0.8]]))
    g = np.linspace(0.5, 1.5, 6).reshape(2, 3)
    gradient_check.check_backward(lambda *ps: make(*ps).log_prob(x), params, g, dtype="d", atol=1e-6, rtol=1e-5)
    if name not in DISCRETE:
        gradient_check.check_backward(
            lambda x, *ps: make(*ps).log_prob(x), (x, *params), g, dtype="d", atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize(
    "name", ["Normal", "Laplace", "Cauchy", "Gumbel", "LogNormal", "Uniform", "Exponential", "Pareto"]
)
def test_samples_move_with_the_parameters(name):
    make, params, _, _, _ = ROWS[name]

    def draw(*ps):
        dbrdist.random.set_seed(5)
        return make(*ps).sample(2)

    gradient_check.check_backward(draw, params, np.ones((2, 3)), dtype="d", atol=1e-5, rtol=1e-4)


def test_outside_of_the_support_gradients_are_zero():
    for name in ("LogNormal", "Gamma", "Chisquare", "Beta", "Pareto", "Exponential", "Geometric", "Poisson"):
        make, params, *_ = ROWS[name]
        variables = [Variable(p) for p in params]
        y = make(*variables).log_prob(np.full(3, -1.0))
        assert (y.array == -np.inf).all()
        F.sum(y).backward()
        assert all(np.isfinite(v.grad).all() for v in variables if v.grad is not None), name


def test_normal_takes_the_logarithm_of_its_scale():
    close(D.Normal(LOC, log_scale=np.log(SCALE)).log_prob(REAL), scipy.stats.norm(LOC, SCALE).logpdf(REAL))
    close(D.Normal(LOC, log_scale=np.log(SCALE)).log_scale, np.log(SCALE))
    close(D.Uniform(loc=LOC, scale=SCALE).mean, LOC + SCALE / 2)
    close(D.Normal(np.zeros(()), 1.0).log_cdf(np.float64(-40.0)), scipy.stats.norm.logcdf(-40.0))
    close(D.Normal(np.zeros(()), 1.0).log_survival_function(np.float64(40.0)), scipy.stats.norm.logsf(40.0))


def test_bernoulli_by_logit():
    logit = np.array([-900.0, 0.4, 900.0])
    p = D.Bernoulli(logit=logit)
    close(p.log_prob(np.array([1, 0, 0])), [-900.0, -math.log1p(math.exp(0.4)), -900.0])
    close(p.log_prob(np.array([0, 1, 1])), [0.0, -math.log1p(math.exp(-0.4)), 0.0], atol=1e-300)
    close(p.entropy, [0.0, scipy.stats.bernoulli(1 / (1 + math.exp(-0.4))).entropy(), 0.0], atol=1e-9)
    close(D.Bernoulli(P).log_prob(np.full(3, 0.25)), 0.25 * np.log(P) + 0.75 * np.log1p(-P))  # grey values
    assert (D.Bernoulli(P, binary_check=True).log_prob(np.full(3, 0.25)).array == -np.inf).all()


def table(shape=(2, 4), seed=0):
    p = np.random.default_rng(seed).random(shape) + 0.1
    return p / p.sum(axis=-1, keepdims=True)


def test_categorical():
    p, q = table(), table(seed=1)
    ours = D.Categorical(p)
    assert ours.batch_shape == (2,) and ours.event_shape == ()
    x = np.array([[0, 3], [2, 1], [3, 3]])
    close(ours.log_prob(x), np.log(np.stack([p[0][x[:, 0]], p[1][x[:, 1]]], 1)))
    assert (ours.log_prob(np.array([[4.0, -1.0], [0.5, 9.0]])).array == -np.inf).all()
    close(ours.entropy, scipy.stats.entropy(p, axis=-1))
    close(distribution.kl_divergence(ours, D.Categorical(q)), scipy.stats.entropy(p, q, axis=-1))
    close(D.Categorical(logit=np.log(p) + 5).log_prob(x), ours.log_prob(x).array)
    np.testing.assert_array_equal(ours.mode.array, p.argmax(axis=-1))
    drawn = ours.sample(20000).array
    assert drawn.dtype == np.int32 and drawn.shape == (20000, 2)
    close(np.stack([np.bincount(drawn[:, i], minlength=4) / 20000 for i in range(2)]), p, rtol=0, atol=0.02)
    gradient_check.check_backward(lambda p: D.Categorical(p).log_prob(x), p, np.ones((3, 2)), dtype="d")
    zero = np.array([0.0, 1.0])
    close(D.Categorical(zero).entropy, 0.0)
    assert (D.Categorical(zero).sample(50).array == 1).all()


def test_one_hot_categorical():
    p = table()
    ours = D.OneHotCategorical(p)
    assert ours.batch_shape == (2,) and ours.event_shape == (4,)
    x = np.eye(4)[[1, 3]]
    close(ours.log_prob(x), np.log([p[0, 1], p[1, 3]]))
    close(ours.mean, p)
    close(ours.variance, p * (1 - p))
    np.testing.assert_array_equal(ours.mode.array, np.eye(4)[p.argmax(-1)])
    drawn = ours.sample(20000).array
    assert drawn.shape == (20000, 2, 4) and (drawn.sum(-1) == 1).all()
    close(drawn.mean(0), p, rtol=0, atol=0.02)


def test_dirichlet():
    a, b = np.array([[1.5, 2.0, 3.5], [4.0, 1.2, 2.2]]), np.array([[1.0, 1.0, 2.0], [2.0, 2.0, 2.0]])
    ours = D.Dirichlet(a)
    x = np.array([[0.2, 0.3, 0.5], [0.6, 0.1, 0.3]])
    theirs = [scipy.stats.dirichlet(row) for row in a]
    close(ours.log_prob(x), [t.logpdf(row) for t, row in zip(theirs, x)])
    close(ours.mean, [t.mean() for t in theirs])
    close(ours.variance, [t.var() for t in theirs])
    close(ours.entropy, [t.entropy() for t in theirs])
    mode = ours.mode.array
    assert (ours.log_prob(mode).array > ours.log_prob(mode + [0.01, -0.01, 0.0]).array).all()
    drawn = ours.sample(20000).array
    close(drawn.sum(-1), 1.0)
    close(drawn.mean(0), ours.mean.array, rtol=0, atol=0.01)
    close(drawn.var(0), ours.variance.array, rtol=0.1)
    q = D.Dirichlet(b)
    difference = (ours.log_prob(drawn) - q.log_prob(drawn)).array
    close(distribution.kl_divergence(ours, q), difference.mean(0), rtol=0, atol=6 * difference.std() / math.sqrt(20000))
    gradient_check.check_backward(lambda a: D.Dirichlet(a).log_prob(x), a, np.ones(2), dtype="d", atol=1e-6)


def covariance(seed):
    m = np.random.default_rng(seed).standard_normal((2, 3, 3))
    return m @ m.transpose(0, 2, 1) + np.eye(3)


def test_multivariate_normal():
    loc, other = np.arange(6.0).reshape(2, 3), np.ones((2, 3))
    c, d = covariance(0), covariance(1)
    lower = np.linalg.cholesky(c)
    ours = D.MultivariateNormal(loc, scale_tril=lower + np.triu(np.ones((3, 3)), 1))  # what is above counts nothing
    assert ours.batch_shape == (2,) and ours.event_shape == (3,)
    theirs = [scipy.stats.multivariate_normal(m, s) for m, s in zip(loc, c)]
    x = loc + np.array([[0.1, -0.4, 2.0], [1.0, 0.0, -1.0]])
    close(ours.log_prob(x), [t.logpdf(row) for t, row in zip(theirs, x)])
    close(ours.entropy, [t.entropy() for t in theirs])
    close(ours.covariance, c)
    close(ours.variance, np.stack([np.diag(s) for s in c]))
    close(ours.mode, loc)
    drawn = ours.sample((100, 300)).array.reshape(-1, 2, 3)
    close(np.stack([np.cov(drawn[:, i].T) for i in range(2)]), c, rtol=0, atol=0.15)
    inverse = np.linalg.inv(d)
    shift = other - loc
    wanted = 0.5 * (
        np.trace(inverse @ c, axis1=1, axis2=2) + np.einsum("ni,nij,nj->n", shift, inverse, shift) - 3
        + np.linalg.slogdet(d)[1] - np.linalg.slogdet(c)[1]
    )  # fmt: skip
    q = D.MultivariateNormal(other, scale_tril=np.linalg.cholesky(d))
    close(distribution.kl_divergence(ours, q), wanted)
    gradient_check.check_backward(
        lambda m, s: D.MultivariateNormal(m, scale_tril=s).log_prob(x), (loc, lower), np.ones(2), dtype="d", atol=1e-5
    )


def test_independent():
    loc, scale = np.arange(6.0).reshape(2, 3), np.full((2, 3), 1.5)
    ours = D.Independent(D.Normal(loc, scale))
    assert ours.batch_shape == (2,) and ours.event_shape == (3,) and ours.support == "real"
    x = loc + 0.3
    close(ours.log_prob(x), scipy.stats.norm(loc, scale).logpdf(x).sum(-1))
    close(ours.cdf(x), scipy.stats.norm(loc, scale).cdf(x).prod(-1))
    close(ours.entropy, scipy.stats.norm(loc, scale).entropy().sum(-1))
    close(ours.mean, loc)
    close(ours.covariance, np.stack([np.eye(3) * 1.5**2] * 2))
    q = D.Independent(D.Normal(np.zeros((2, 3)), scale))
    close(distribution.kl_divergence(ours, q), (loc**2 / (2 * 1.5**2)).sum(-1))
    assert ours.sample((5, 4)).shape == (5, 4, 2, 3)
    assert D.Independent(D.Normal(loc, scale), 2).batch_shape == ()
    assert D.Independent(D.Normal(loc, scale), 0).log_prob(x).shape == (2, 3)
    with pytest.raises(ValueError, match="expected a number from 0 to 2"):
        D.Independent(D.Normal(loc, scale), 3)
    with pytest.raises(ValueError, match="the same reinterpreted_batch_ndims, got 1 and 2"):
        distribution.kl_divergence(ours, D.Independent(D.Normal(loc, scale), 2))


def test_divergences_outside_of_the_other_support_are_infinite():
    close(distribution.kl_divergence(D.Uniform(low=0.0, high=2.0), D.Uniform(low=0.0, high=1.0)), np.inf)
    close(distribution.kl_divergence(D.Pareto(1.0, 2.0), D.Pareto(2.0, 2.0)), np.inf)


def test_a_divergence_of_ones_own():
    class Mine(D.Normal):
        pass

    assert distribution.kl_divergence(Mine(0.0, 1.0), D.Normal(0.0, 1.0)).array == 0  # a subclass counts as its base

    @distribution.register_kl(Mine, D.Laplace)
    def divergence(p, q):
        return p.loc + q.loc

    assert distribution.kl_divergence(Mine(1.0, 1.0), D.Laplace(2.0, 1.0)).array == 3


@pytest.mark.parametrize("make, message", [
    (lambda: D.Normal(0.0), "Normal: expected one of the arguments scale and log_scale, got none"),
    (lambda: D.Normal(0.0, 1.0, log_scale=0.0), "Normal: expected one of .* got both"),
    (lambda: D.Bernoulli(), "Bernoulli: expected one of the arguments p and logit, got none"),
    (lambda: D.Categorical(p=P, logit=P), "Categorical: expected one of .* got both"),
    (lambda: D.Categorical(0.5), "Categorical: p: expected at least one axis"),
    (lambda: D.Dirichlet(1.0), "Dirichlet: alpha: expected at least one axis"),
    (lambda: D.Uniform(low=0.0), "Uniform: expected the arguments low and high, or loc and scale"),
    (lambda: D.Uniform(low=0.0, high=1.0, loc=0.0), "Uniform: expected the arguments"),
    (lambda: D.MultivariateNormal(np.ones(3), scale_tril=np.ones((2, 2))), "MultivariateNormal: scale_tril: expected"),
])  # fmt: skip
def test_wrong_parameters_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_types_and_numbers():
    assert D.Normal(0, 1).sample(3).dtype == np.float32
    assert D.Normal(np.float32(0), np.ones(2, "f")).log_prob(np.zeros(2, "f")).dtype == np.float32
    assert D.Poisson(np.array([1, 2])).log_prob(np.array([1, 2])).dtype == np.float32
    assert D.Normal(np.zeros(3), 1.0).batch_shape == (3,)


def test_samples_follow_the_seed():
    def draw():
        dbrdist.random.set_seed(7)
        p = D.Normal(np.zeros(4), np.ones(4))
        return np.stack([p.sample().array, p.sample().array])

    first, second = draw(), draw()
    np.testing.assert_array_equal(first, second)
    assert (first[0] != first[1]).all()


def test_certain_outcomes_and_plain_numbers():
    certain = D.Bernoulli(np.array([0.0, 1.0]))
    with np.errstate(divide="ignore"):
        close(certain.log_prob(np.array([0.0, 1.0])), [0.0, 0.0], atol=1e-300)
        close(certain.log_prob(np.array([1.0, 0.0])), [-np.inf, -np.inf])
        close(distribution.kl_divergence(certain, certain), [0.0, 0.0], atol=1e-300)
        half = D.Bernoulli(np.array([0.5, 0.5]))
        close(distribution.kl_divergence(certain, half), np.log([2.0, 2.0]))
        close(distribution.kl_divergence(half, certain), [np.inf, np.inf])
        close(D.Poisson(np.zeros(2)).log_prob(np.array([0, 1])), [0.0, -np.inf], atol=1e-300)
    for x in (1.5, np.float32(1.5), np.float64(1.5), [1.5]):
        y = D.Gamma(2.0, 1.0).log_prob(x)
        assert y.dtype == np.float32
        close(y.array.reshape(()), scipy.stats.gamma(2.0).logpdf(1.5), rtol=1e-6)
    assert D.LogNormal(0.0, 1.0).cdf(np.float32(1.0)).array == 0.5


ONE, NONE = np.ones(1), np.zeros(1)


@each(case=[
    (D.Gamma(ONE, 2 * ONE), NONE, -math.log(2)), (D.Gamma(0.5 * ONE, ONE), NONE, np.inf),
    (D.Gamma(2 * ONE, ONE), NONE, -np.inf), (D.Chisquare(2 * ONE), NONE, -math.log(2)),
    (D.Dirichlet(np.ones(3)), np.array([0.0, 0.5, 0.5]), math.log(2)),
    (D.Beta(ONE, 2 * ONE), NONE, math.log(2)), (D.Poisson(NONE), NONE, 0.0), (D.Geometric(ONE), 2 * ONE, -np.inf),
])  # fmt: skip
def test_densities_at_the_ends_of_the_support(case):
    ours, x, wanted = case
    with np.errstate(divide="ignore"):
        close(ours.log_prob(x), np.full(ours.batch_shape, wanted))


@each(case=[
    (D.Geometric(ONE), D.Geometric(0.5 * ONE), math.log(2)), (D.Geometric(ONE), D.Geometric(ONE), 0.0),
    (D.Geometric(0.5 * ONE), D.Geometric(ONE), np.inf), (D.Poisson(NONE), D.Poisson(0.5 * ONE), 0.5),
    (D.Poisson(NONE), D.Poisson(NONE), 0.0), (D.Poisson(ONE), D.Poisson(NONE), np.inf),
])  # fmt: skip
def test_divergences_of_certain_outcomes(case):
    p, q, wanted = case
    with np.errstate(divide="ignore"):
        close(distribution.kl_divergence(p, q), [wanted])


@each(case=lambda: [
    (D.Laplace(NONE, ONE), scipy.stats.laplace, 50.0), (D.Laplace(NONE, ONE), scipy.stats.laplace, -700.0),
    (D.Exponential(ONE), scipy.stats.expon, 50.0), (D.Exponential(ONE), scipy.stats.expon, -1.0),
    (D.Gumbel(NONE, ONE), scipy.stats.gumbel_r, 50.0), (D.Cauchy(NONE, ONE), scipy.stats.cauchy, 1e18),
    (D.Cauchy(NONE, ONE), scipy.stats.cauchy, -1e18), (D.Pareto(ONE, 5 * ONE), scipy.stats.pareto(5.0), 1e5),
    (D.LogNormal(NONE, ONE), scipy.stats.lognorm(s=1.0), math.exp(40.0)),
    (D.LogNormal(NONE, ONE), scipy.stats.lognorm(s=1.0), math.exp(-40.0)),
    (D.LogNormal(NONE, ONE), scipy.stats.lognorm(s=1.0), -1.0),
])  # fmt: skip
def test_tails_are_exact(case):
    ours, theirs, x = case
    at = np.full(1, x)
    with np.errstate(divide="ignore"):
        close(ours.survival_function(at), [theirs.sf(x)])
        close(ours.log_survival_function(at), [theirs.logsf(x)], rtol=1e-8, atol=1e-16)
        close(ours.cdf(at), [theirs.cdf(x)])
        close(ours.log_cdf(at), [theirs.logcdf(x)], rtol=1e-8, atol=1e-16)


GAMMA_AT_1 = [math.log(0.3) + 1.0, math.log(0.7) + 1.0]  # digamma(2) - digamma(1) = 1


@each(case=[
    (lambda a: D.Beta(a[:1], a[1:]).log_prob(np.array([0.3])), [1.0, 1.0], GAMMA_AT_1),
    (lambda a: D.Dirichlet(a).log_prob(np.array([0.3, 0.7])), [1.0, 1.0], GAMMA_AT_1),
    (lambda k: D.Gamma(k, 1.0).log_prob(np.array([0.3])), [1.0], [math.log(0.3) + np.euler_gamma]),
    (lambda p: D.Bernoulli(p).log_prob(np.array([0, 1])), [0.0, 1.0], [-1.0, 1.0]),
    (lambda x: D.Bernoulli(np.full(2, 0.3)).log_prob(x), [0.0, 1.0], [math.log(3 / 7)] * 2),
    (lambda p: D.Categorical(p).log_prob(np.array(1)), [0.0, 0.25, 0.75], [0.0, 4.0, 0.0]),
    (lambda q: distribution.kl_divergence(D.Categorical(np.array([0.0, 0.3, 0.7])), D.Categorical(q)),
     [0.0, 0.5, 0.5], [0.0, -0.6, -1.4]),
    (lambda r: D.Poisson(r).log_prob(NONE), [0.0], [-1.0]), (lambda p: D.Geometric(p).log_prob(ONE), [1.0], [1.0]),
    (lambda m: D.Laplace(m, ONE).cdf(NONE), [0.0], [-0.5]),
])  # fmt: skip
def test_gradients_where_a_factor_is_zero(case):
    function, at, wanted = case
    v = Variable(np.array(at))
    F.sum(function(v)).backward()
    close(v.grad, wanted)


@each(
    name=[*ROWS, "Categorical", "OneHotCategorical"], x=[[1, 0], [1.0, 0.0], np.array([1, 0]), np.array([True, False])]
)
def test_outcomes_are_numbers_of_any_kind(name, x):
    ours = ROWS[name][0](*(p[:2] for p in ROWS[name][1])) if name in ROWS else getattr(D, name)(table((2, 2)))
    with np.errstate(divide="ignore"):
        close(ours.log_prob(x), ours.log_prob(np.array([1.0, 0.0])).array)


@each(name=[name for name in ROWS if name not in ("Bernoulli",)])
def test_the_density_at_nan_is_nan(name):
    make, params, *_ = ROWS[name]
    assert np.isnan(make(*params).log_prob(np.full(3, np.nan)).array).all()


def test_small_parameters_and_narrow_types():
    drawn = D.Dirichlet(np.full(3, 1e-3)).sample(1000).array
    close(drawn.sum(-1), np.ones(1000))
    assert D.Categorical(np.eye(5000, dtype=np.float16)[4097]).sample().array == 4097  # which float16 does not have
    tiny = np.full(1, 1e-8, np.float32)
    close(D.Geometric(tiny).entropy, [1 - math.log(1e-8)], rtol=1e-6)
    close(D.Bernoulli(tiny).entropy, [1e-8 * (1 - math.log(1e-8))], rtol=1e-6)
    close(D.Bernoulli(logit=np.full(1, 50.0)).variance, [math.exp(-50)])
    close(D.Laplace(NONE, ONE).log_cdf(np.full(1, -900.0)), [-900 - math.log(2)])


def test_numbers_take_the_type_of_the_other_parameters():
    close(D.Normal(NONE, 0.1).log_prob(NONE), scipy.stats.norm(0, 0.1).logpdf([0.0]), rtol=1e-14)
    assert D.Normal(np.zeros(1, np.float16), 0.1).scale.dtype == np.float16
    assert D.MultivariateNormal([0, 0], scale_tril=np.eye(2)).loc.dtype == np.float64


def test_independent_parts_that_are_vectors():
    c = covariance(0)
    ours = D.Independent(D.MultivariateNormal(np.zeros((2, 3)), scale_tril=np.linalg.cholesky(c)), 1)
    wanted = np.zeros((6, 6))
    wanted[:3, :3], wanted[3:, 3:] = c
    close(ours.covariance, wanted, atol=1e-12)
    many = D.Independent(D.Normal(np.zeros((1, 500)), np.ones((1, 500))))
    close(many.log_cdf(np.full((1, 500), -2.0)), [500 * scipy.stats.norm.logcdf(-2)])
    close(many.log_survival_function(np.full((1, 500), 2.0)), [500 * scipy.stats.norm.logcdf(-2)])
    close(many.survival_function(np.zeros((1, 500))), [0.5**500])


@each(name=["Cauchy", "Gumbel", "Laplace", "LogNormal", "Normal"])
def test_old_pickles_load(name):
    loc, scale = np.array([0.5, -1.0], np.float32), np.array([2.0, 0.3], np.float32)
    new = pickle.dumps(getattr(D, name)(loc, scale), 0)
    old = new.replace(b"dbrdist.distributions.location_scale", b"dbrdist.distributions.continuous")
    assert old != new
    for content in (new, old):
        found = pickle.loads(content)
        assert type(found) is getattr(D, name)
        values = [v.array for v in found.params.values()]
        np.testing.assert_array_equal(values, [loc, scale])
