"""Tests of dbrdist.testing.backend."""

import unittest

import numpy as np
import pytest

import dbrdist
from dbrdist import testing
from tests.testing.testing_helpers import run


def test_backend_config():
    config = testing.BackendConfig({"use_cudnn": "always", "autotune": True})
    assert config.xp is np and str(config.device) == "@numpy"
    with config:
        assert dbrdist.config.use_cudnn == "always" and dbrdist.config.autotune
        with config:
            pass
    assert dbrdist.config.use_cudnn == "auto" and not dbrdist.config.autotune
    x = np.ones(2)
    assert isinstance(config.get_array([x, None]), list) and config.get_array((x, None))[1] is None
    assert "use_cudnn='always'" in repr(config)
    with pytest.raises(ValueError, match=r"expected some of use_cuda.*got 'use_gpu'"):
        testing.BackendConfig({"use_gpu": True})
    with pytest.raises(TypeError, match="expected a dictionary"):
        testing.BackendConfig([])
    assert str(testing.BackendConfig({"use_cuda": True, "cuda_device": 1}).device) == "@cupy:1"


def test_inject_backend_tests_skips_what_is_missing():
    configs = [{}, {"use_cuda": True, "cuda_device": 9}, {"use_ideep": "always"}, {"use_chainerx": True}]
    seen = []

    @testing.inject_backend_tests(None, configs)
    class Case(unittest.TestCase):
        def test_it(self, backend_config):
            seen.append(backend_config)

        def test_other(self):
            seen.append("other")

    result = run(Case)
    assert result.testsRun == 5 and len(seen) == 2 and "other" in seen
    reasons = " ".join(reason for _, reason in result.skipped)
    assert "needs 10 GPUs" in reasons or "needs a GPU" in reasons
    assert "ChainerX" in reasons and "iDeep" in reasons


def test_what_inject_backend_tests_refuses():
    class Case(unittest.TestCase):
        def test_it(self, backend_config):
            pass

    with pytest.raises(RuntimeError, match="two of the configurations are equal"):
        testing.inject_backend_tests(None, [{}, {}])(Case)
    for arguments in (("test_it", [{}]), (None, {}), (None, [1])):
        with pytest.raises(TypeError, match="expected a list"):
            testing.inject_backend_tests(*arguments)
