"""Tests of a distribution against SciPy's."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np

from dbrdist.core.array.backend import to_cpu
from dbrdist.core.tape.gradient_check import assert_allclose
from dbrdist.core.tape.variable import Variable
from dbrdist.testing import attr
from dbrdist.testing.backend import BackendConfig

_NUM_SAMPLES = 100_000
_DEVICES = {"cpu": (BackendConfig({}), lambda test: test), "gpu": (BackendConfig({"use_cuda": True}), attr.gpu)}
# Target -> the name in the distribution, and in SciPy's for continuous and discrete ones.
_MOMENTS = {"entropy": "entropy", "mean": "mean", "stddev": "std", "variance": "var"}
_OF_SAMPLES = {
    "cdf": ("cdf", "cdf", "cdf"),
    "log_cdf": ("log_cdf", "logcdf", "logcdf"),
    "log_survival": ("log_survival_function", "logsf", "logsf"),
    "survival": ("survival_function", "sf", "sf"),
    "prob": ("prob", "pdf", "pmf"),
    "log_prob": ("log_prob", "logpdf", "logpmf"),
}
_ATTRIBUTES = ("batch_shape", "event_shape", "support")
_TARGETS = {*_MOMENTS, *_OF_SAMPLES, *_ATTRIBUTES, "icdf", "sample"}


class distribution_unittest(unittest.TestCase):
    """The base of test cases of distributions, each compared with one of SciPy.

    ``setUp_configure()`` sets ``dist`` (a class), ``scipy_dist``, ``params`` and ``scipy_params`` (dictionaries of
    arrays), and ``test_targets``: some of batch_shape, cdf, entropy, event_shape, icdf, log_cdf, log_prob,
    log_survival, mean, prob, sample, stddev, support, survival, variance. It may set ``event_shape``, ``support``
    ('real'), ``continuous`` (True), ``options`` (further arguments of ``dist``) and ``scipy_onebyone`` for a
    distribution of SciPy that takes one set of parameters at a time. ``sample_for_test()`` returns an array of shape
    (*sample_shape, *shape, *event_shape). ``shape``, ``sample_shape`` and ``is_variable`` come from
    :func:`parameterize`.

    Args:
        methodName: the name of the test method; a test runner passes it.
    """

    scipy_onebyone = False
    shape: tuple[int, ...] = ()
    sample_shape: tuple[int, ...] = ()
    is_variable = False
    event_shape: tuple[int, ...] = ()
    dist: Any
    scipy_dist: Any
    params: dict[str, Any]
    scipy_params: dict[str, Any]

    def setUp(self) -> None:
        if type(self) is distribution_unittest:
            self.skipTest("the base of test cases")
        self.support = "real"
        self.continuous = True
        self.test_targets: set[str] = set()
        self.options: dict[str, Any] = {}
        self.setUp_configure()
        unknown = set(self.test_targets) - _TARGETS
        if unknown:
            raise ValueError(f"test_targets: expected some of {sorted(_TARGETS)}, got {sorted(unknown)}")

    def setUp_configure(self) -> None:
        """Set what is tested."""
        raise NotImplementedError(f"{type(self).__name__} defines no setUp_configure()")

    def sample_for_test(self) -> Any:
        """Outcomes at which probabilities are compared."""
        raise NotImplementedError(f"{type(self).__name__} defines no sample_for_test()")

    def _on(self, config: BackendConfig) -> Any:
        params = {k: config.get_array(np.asarray(v)) for k, v in self.params.items()}
        return self.dist(**{k: Variable(v) if self.is_variable else v for k, v in params.items()}, **self.options)

    @property
    def cpu_dist(self) -> Any:
        """The distribution on the CPU."""
        return self._on(_DEVICES["cpu"][0])

    @property
    def gpu_dist(self) -> Any:
        """The distribution on a GPU."""
        return self._on(_DEVICES["gpu"][0])

    def scipy_onebyone_params_iter(self) -> Iterator[dict[str, Any]]:
        """SciPy's parameters of each distribution of the batch."""
        for index in np.ndindex(self.shape):
            yield {k: v[index] for k, v in self.scipy_params.items()}

    def _check_attribute(self, target: str, config: BackendConfig) -> None:
        expected = self.shape if target == "batch_shape" else getattr(self, target)
        self.assertEqual(getattr(self._on(config), target), expected)

    def _check_moment(self, target: str, config: BackendConfig) -> None:
        found, function = getattr(self._on(config), target), getattr(self.scipy_dist, _MOMENTS[target])
        if not self.scipy_onebyone:
            expected = function(**self.scipy_params)
        else:
            each = [function(**params) for params in self.scipy_onebyone_params_iter()]
            expected = np.reshape(each, found.shape)
        assert_allclose(found, expected)

    def _check_of_samples(self, target: str, config: BackendConfig) -> None:
        ours, continuous, discrete = _OF_SAMPLES[target]
        samples = self.sample_for_test()
        function = getattr(self.scipy_dist, continuous if self.continuous else discrete)
        if not self.scipy_onebyone:
            expected = function(samples, **self.scipy_params)
        else:
            rows = samples.reshape(*self.sample_shape, prod(self.shape), *self.event_shape)
            rows = np.moveaxis(rows, len(self.sample_shape), 0)
            each = [function(row, **p) for row, p in zip(rows, self.scipy_onebyone_params_iter(), strict=True)]
            expected = np.stack([np.reshape(e, self.sample_shape) for e in each], -1)
            expected = expected.reshape(self.sample_shape + self.shape)
        assert_allclose(getattr(self._on(config), ours)(config.get_array(samples)), expected)

    def _check_icdf(self, target: str, config: BackendConfig) -> None:
        p = np.random.uniform(1e-5, 1 - 1e-5, self.sample_shape + self.shape).astype(np.float32)
        assert_allclose(self._on(config).icdf(config.get_array(p)), self.scipy_dist.ppf(p, **self.scipy_params))

    def _check_sample(self, target: str, config: BackendConfig) -> None:
        """Mean and deviation of many samples."""
        shape = (_NUM_SAMPLES, *self.sample_shape)
        found = _on_host(self._on(config).sample(sample_shape=shape))
        if not self.scipy_onebyone:
            expected = self.scipy_dist.rvs(size=shape + self.shape, **self.scipy_params)
        else:
            each = [self.scipy_dist.rvs(size=shape, **p) for p in self.scipy_onebyone_params_iter()]
            expected = np.stack([np.reshape(e, shape + self.event_shape) for e in each], len(shape))
            expected = expected.reshape(found.shape)
        assert_allclose(found.mean(axis=0), expected.mean(axis=0), atol=3e-2, rtol=3e-2)
        assert_allclose(found.std(axis=0), expected.std(axis=0), atol=3e-2, rtol=3e-2)


def _on_host(y: Variable) -> Any:
    """The values in float64 in host memory."""
    return np.asarray(to_cpu(y.array), np.float64)


def _test(target: str, check: Callable[..., None], config: BackendConfig) -> Callable[[Any], None]:
    def test(self: Any) -> None:
        if target not in self.test_targets:
            self.skipTest(f"{target!r} is not in test_targets")
        check(self, target, config)

    return test


def _fill(case: Any) -> None:
    """Give the test case the tests of each target on each device."""
    for target in sorted(_TARGETS):
        if target in _ATTRIBUTES:
            check = case._check_attribute
        elif target in _MOMENTS:
            check = case._check_moment
        else:
            check = case._check_of_samples if target in _OF_SAMPLES else getattr(case, f"_check_{target}")
        for place, (config, needs) in _DEVICES.items():
            setattr(case, f"test_{target}_{place}", needs(_test(target, check, config)))


_fill(distribution_unittest)
