"""Tests of dbrdist.utils.walker_alias."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
from dbrdist import utils
from dbrdist.utils import WalkerAlias


def test_a_sampler_is_an_object_with_a_device():
    sampler = WalkerAlias([1.0, 3.0])
    with pytest.deprecated_call():
        assert sampler.to_cpu() is sampler and sampler.device.name == "@numpy" and not sampler.use_gpu
    assert sampler.sample((5,)).shape == (5,)


def test_walker_alias_draws_by_probability():
    for probs in ([1, 2, 3, 0, 4], [1.0], [0, 0, 5], np.random.default_rng(0).random(50) ** 4):
        p = np.asarray(probs, float) / np.sum(probs)
        drawn = utils.WalkerAlias(probs).sample((400, 100))
        assert drawn.dtype == np.int32 and drawn.shape == (400, 100)
        counts = np.bincount(drawn.ravel(), minlength=len(p))
        assert (counts[p == 0] == 0).all()
        chi2 = (((counts - p * drawn.size) ** 2)[p > 0] / (p[p > 0] * drawn.size)).sum()
        assert chi2 < len(p) + 5 * np.sqrt(2 * len(p))


def test_walker_alias_follows_the_seed_and_takes_any_shape():
    dbrdist.random.set_seed(3)
    sampler = utils.WalkerAlias(np.ones(7))
    first, second = sampler.sample(20), sampler.sample(20)
    assert first.shape == (20,) and (first != second).any()
    dbrdist.random.set_seed(3)
    np.testing.assert_array_equal(utils.WalkerAlias(np.ones(7)).sample((20,)), first)
    assert sampler.sample(()).shape == () and sampler.sample((0, 3)).shape == (0, 3)
    with pytest.deprecated_call():
        assert sampler.to_cpu() is sampler and sampler.device.name == "@numpy"


@pytest.mark.parametrize("probs", [[], [[1.0]], [0.0, 0.0], [1.0, -1.0], [np.nan, 1.0], [np.inf, 1.0]])
def test_walker_alias_refuses(probs):
    with pytest.raises(ValueError, match="WalkerAlias: probs: expected"):
        utils.WalkerAlias(probs)
