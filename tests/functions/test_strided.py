"""Tests of dbrdist.functions.strided."""

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import Variable
from dbrdist.functions import strided
from tests.each import each


@pytest.mark.slow
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


WINDOWS = {
    "rows twice": ((40, 2, 30), (30, 30, 1)),
    "windows of a row": ((500, 7), (3, 1)),
    "windows that end at each element": ((500, 7), (3, -1)),
    "windows of an image": ((30, 31, 3, 4), (40, 1, 40, 1)),
    "whole windows first": ((3, 4, 30, 31), (40, 1, 40, 1)),
    "repeated at the end": ((400, 5), (2, 0)),
    "repeated at first": ((5, 400), (0, 3)),
    "rows that overlap by most of their length": ((8, 200), (7, 1)),
    "many short rows, of which each element is in many": ((1200, 2, 5), (1, 3, 1)),
    "backwards": ((300, 6), (-4, 3)),
}


@each(name=list(WINDOWS))
def test_terms_of_an_element_are_added_in_c_order(name):
    """Bit for bit as np.add.at adds them, in float32."""
    shape, strides = WINDOWS[name]
    rng = np.random.default_rng(1)
    index = sum(i * step for i, step in zip(np.indices(shape), strides, strict=True))
    index -= (start := index.min())
    x = Variable(rng.standard_normal(index.max() + 1).astype("f"))
    y = F.as_strided(x, shape, strides, -start)
    y.grad = (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3, shape)).astype("f")
    y.backward()
    wanted = np.zeros(x.shape, "f")
    np.add.at(wanted, index, y.grad)
    np.testing.assert_array_equal(y.array, x.array[index])
    np.testing.assert_array_equal(x.grad, wanted)


def test_sums_of_half_precision_are_narrowed_once():
    x = Variable(np.zeros(5, np.float16))
    y = F.as_strided(x, (5, 4), (1, 0))
    y.grad = np.tile(np.array([1.0, 2.0**-11, 2.0**-11, 2.0**-11], np.float16), (5, 1))
    y.backward()
    assert x.grad.dtype == np.float16 and (x.grad == np.float16(1 + 3 * 2.0**-11)).all()  # one by one: 1


def test_no_long_list_of_turns_is_remembered():
    """A million of them took a second at the first call, and 100 MB from then on."""
    assert strided._turns((1_000_000, 64), (0, 1)) is None
    assert len(strided._turns((4000, 64), (0, 1))) == 4000


def test_lengths_may_be_zero_and_not_less():
    x = np.arange(3.0)
    assert F.as_strided(x, (0, 2), (1, 1)).shape == (0, 2) and F.as_strided(x, (), (), 2).array == 2.0
    with pytest.raises(ValueError) as caught:
        F.as_strided(x, (2, -1), (1, 1))
    assert str(caught.value) == "as_strided: shape: expected lengths from 0 on, got (2, -1)"
