"""Tests of dbrdist.testing.random."""

import unittest

import numpy as np
import pytest

import dbrdist
from dbrdist import testing
from tests.testing.testing_helpers import run


def test_fix_random_of_a_class_and_of_a_method():
    seen = []

    def draw():
        seen.append((np.random.rand(), testing.generate_seed(), dbrdist.random.raw_words(1, 1)[0, 0]))

    @testing.fix_random()
    class Case(unittest.TestCase):
        def test_a(self):
            draw()

        def test_b(self):
            draw()

    class Other(unittest.TestCase):
        @testing.fix_random()
        def test_it(self):
            draw()

    before = np.random.get_state()[1].copy(), dbrdist.random.get_state()
    assert run(Case, Other).wasSuccessful()
    assert len(seen) == 3 and len(set(seen)) == 1 and 0 <= seen[0][1] < 2**32
    assert np.array_equal(np.random.get_state()[1], before[0]) and dbrdist.random.get_state() == before[1]
    with pytest.raises(RuntimeError, match="under @fix_random"):
        testing.generate_seed()


def test_fix_random_after_a_set_up_that_fails():
    @testing.fix_random()
    class Case(unittest.TestCase):
        def setUp(self):
            raise KeyError("no")

        def test_it(self):
            pass

    assert not run(Case).wasSuccessful()
    with pytest.raises(RuntimeError, match="under @fix_random"):
        testing.generate_seed()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
@pytest.mark.parametrize("shape", [(3, 3), (2, 4, 3), (3, 5)])
def test_generate_matrix(shape, dtype):
    a = testing.generate_matrix(shape, dtype, singular_values=[1, 2, 0.5])
    assert a.shape == shape and a.dtype == dtype
    s = np.linalg.svd(a, compute_uv=False)
    np.testing.assert_allclose(s, np.broadcast_to([2, 1, 0.5], s.shape), rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "words"),
    [
        (((2, 2),), {}, TypeError, "expected singular_values and no other keyword, got none"),
        (((2, 2),), {"singular_values": 1, "rank": 2}, TypeError, "rank"),
        (((2,),), {"singular_values": 1}, ValueError, "two axes or more"),
        (((2, 2), int), {"singular_values": 1}, TypeError, "floating or complex"),
        (((2, 2),), {"singular_values": 1j}, TypeError, "real numbers"),
        (((2, 2),), {"singular_values": [1, -1]}, ValueError, "none below 0, got -1"),
    ],
)
def test_what_generate_matrix_refuses(arguments, keywords, error, words):
    with pytest.raises(error, match=words):
        testing.generate_matrix(*arguments, **keywords)
