"""Tests of dbrdist.utils.arrays."""

import numpy as np

from dbrdist import utils


def test_arrays():
    assert isinstance(utils.force_array(np.sum(np.ones(3))), np.ndarray)
    assert utils.force_array(2, np.float32).dtype == np.float32
    x = np.ones(2)
    assert utils.force_array(x) is x and utils.force_array(x, np.float32).dtype == np.float32
    assert utils.force_type(np.dtype("f"), 2.5) == np.float32(2.5) and utils.force_type(np.dtype("d"), x) is x
    assert utils.force_type(np.dtype("f"), x).dtype == np.float32
    assert utils.size_of_shape((2, 3)) == 6 and utils.size_of_shape(()) == 1
    np.testing.assert_array_equal(utils.sum_to(np.ones((4, 2, 3)), (2, 1)), np.full((2, 1), 12.0))
