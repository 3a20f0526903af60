"""Tests of dbrdist.functions.strided."""

import numpy as np

import dbrdist.functions as F
from dbrdist import Variable


def test_as_strided_against_indices():
    """Strides of all kinds, with elements read once, twice or backwards, from arrays in either order."""
    rng = np.random.default_rng(0)
    num_compared = 0
    for _ in range(400):
        num_axes = int(rng.integers(0, 4))
        shape, strides = tuple(rng.integers(0, 4, num_axes).tolist()), tuple(rng.integers(-7, 8, num_axes).tolist())
        start = int(rng.integers(0, 40))
        index = start + sum(i * step for i, step in zip(np.indices(shape), strides, strict=True))
        index = np.broadcast_to(np.asarray(index, np.int64), shape)
        if index.size and not 0 <= index.min() <= index.max() < 40:
            continue
        x = Variable(np.asarray(rng.standard_normal((5, 8)), order="CF"[num_compared % 2]))
        y = F.as_strided(x, shape, strides, start)
        y.grad = np.asarray(rng.standard_normal(shape))
        y.backward()
        np.testing.assert_array_equal(y.array, x.array.reshape(-1)[index])
        wanted = np.zeros(40)
        np.add.at(wanted, index, y.grad)
        np.testing.assert_allclose(x.grad, wanted.reshape(5, 8), atol=1e-12)
        num_compared += 1
    assert num_compared > 200
