"""Pickles of distributions, also of those whose classes were in another file when they were written."""

from __future__ import annotations

import pickle

import numpy as np

from dbrdist import distributions as D
from tests.each import each


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
