"""distribution_unittest passes what agrees with SciPy and notices what does not."""

import unittest

import numpy as np
import pytest

from dbrdist import distributions, testing

pytestmark = pytest.mark.slow  # each worker would load scipy.stats


@pytest.fixture(scope="module", autouse=True)
def stats():
    """SciPy's, which takes half a second: imported where these tests run, not wherever they are collected."""
    globals()["stats"] = pytest.importorskip("scipy.stats")


def failing(case, **members):
    """The names of the failing tests of a variant of a test case, and how many ran unskipped."""
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(type("Case", (case,), members)).run(result)
    failed = {test._testMethodName for test, _ in result.failures + result.errors}
    return failed, result.testsRun - len(result.skipped)


class Normal(testing.distribution_unittest):
    __test__ = False  # the variants are run by the tests below
    shape, sample_shape = (3, 2), (4,)
    targets = testing.distribution_case._TARGETS
    wrong_by = 0.0

    def setUp_configure(self):
        np.random.seed(0)
        self.dist, self.scipy_dist = distributions.Normal, stats.norm
        self.test_targets = set(self.targets)
        loc = np.random.uniform(-1, 1, self.shape).astype(np.float32)
        scale = np.random.uniform(0.5, 1, self.shape).astype(np.float32)
        self.params = {"loc": loc, "scale": scale}
        self.scipy_params = {"loc": loc + self.wrong_by, "scale": scale * (1 + self.wrong_by)}

    def sample_for_test(self):
        return np.random.normal(size=self.sample_shape + self.shape).astype(np.float32)


class MultivariateNormal(Normal):
    def setUp_configure(self):
        np.random.seed(0)
        self.dist, self.scipy_dist, self.scipy_onebyone = (
            distributions.MultivariateNormal,
            stats.multivariate_normal,
            True,
        )
        self.event_shape = (2,)
        self.test_targets = {"batch_shape", "event_shape", "log_prob", "sample", "entropy"}
        loc = np.random.uniform(-1, 1, (*self.shape, 2)).astype(np.float32)
        tril = np.broadcast_to(np.array([[1, 0], [0.5, 0.8]], np.float32), (*self.shape, 2, 2)).copy()
        self.params = {"loc": loc, "scale_tril": tril}
        self.scipy_params = {"mean": loc, "cov": tril @ tril.swapaxes(-1, -2) * (1 + self.wrong_by)}

    def sample_for_test(self):
        return np.random.normal(size=(*self.sample_shape, *self.shape, 2)).astype(np.float32)


class Bernoulli(Normal):
    def setUp_configure(self):
        np.random.seed(0)
        self.dist, self.scipy_dist, self.continuous = distributions.Bernoulli, stats.bernoulli, False
        self.test_targets = {"log_prob", "prob", "mean", "variance", "stddev", "entropy", "support", "sample"}
        self.support = "{0, 1}"
        self.params = {"p": np.random.uniform(0.2, 0.8, self.shape).astype(np.float32)}
        self.scipy_params = {"p": self.params["p"] + self.wrong_by}

    def sample_for_test(self):
        return np.random.randint(0, 2, self.sample_shape + self.shape).astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "count"), [(Normal, 15), (MultivariateNormal, 5), (Bernoulli, 8)])
def test_right_ones_pass(case, count):
    assert failing(case) == (set(), count)
    assert failing(case, shape=(1,), sample_shape=(), is_variable=True) == (set(), count)


@pytest.mark.slow
def test_wrong_ones_are_noticed():
    shapes = {"batch_shape", "event_shape", "support"}
    assert failing(Normal, wrong_by=0.1)[0] == {f"test_{t}_cpu" for t in set(Normal.targets) - shapes}
    assert failing(MultivariateNormal, wrong_by=0.2)[0] == {f"test_{t}_cpu" for t in ("log_prob", "sample", "entropy")}
    assert failing(Normal, shape=(2,), targets=["batch_shapes"])[1] > 0


def test_the_base_itself_is_skipped():
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(testing.distribution_unittest).run(result)
    assert len(result.skipped) == result.testsRun > 0
