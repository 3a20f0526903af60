"""Which elements are compared, and what counts as different."""

import ml_dtypes
import numpy as np

from dbrdist.comm.protocol import samples
from tests.each import each


@each(shape=[(), (1,), (3,), (64,), (65,), (4, 50), (2, 3, 30, 2), (0, 4)])
def test_some_elements_of_any_shape(shape):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    found = samples.some(array)
    assert found.shape == (min(array.size, 64),) and (found[:1] == 0).all()
    np.testing.assert_array_equal(found, samples.some(np.asfortranarray(array)))
    assert len(set(found.tolist())) == found.size


@each(kind=["f4", "f8", "c8", "f2", "bf16", "i4", "?"])
def test_differences_beyond_rounding(kind):
    kind = np.dtype(ml_dtypes.bfloat16 if kind == "bf16" else kind)
    is_narrow = kind.itemsize == 2
    one = np.array([1, 0, 100], kind)
    assert not samples.differ(one, one.copy()) and not samples.differ(one[:0], one[:0])
    assert samples.differ(one, one[:2]) and samples.differ(one, ~one if kind.kind == "b" else one + one)
    if kind.kind in "fc":
        assert not samples.differ(one, one * kind.type(1 + 1e-4)) and not samples.differ(one, one + kind.type(1e-3))
        assert samples.differ(one, one * kind.type(1 + 0.01)) == (not is_narrow)
        assert samples.differ(one, one + kind.type(8))
        nan = np.array([np.nan, np.inf, 1], kind)
        assert not samples.differ(nan, nan) and samples.differ(nan, one)
