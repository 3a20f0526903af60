"""Tests of dbrdist.functions.padding."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable
from dbrdist.core.array import backend
from tests.each import each

MODES = ["edge", "reflect", "symmetric", "wrap"]


@each(mode=["edge", "reflect", "symmetric", "wrap"], widths=[1, ((0, 3), (7, 2)), ((4, 0), (0, 9))])
def test_padding_with_elements_is_numpys_and_sends_gradients_to_all_places(mode, widths):
    x = Variable(np.arange(12.0).reshape(3, 4))
    y = F.pad(x, widths, mode)
    np.testing.assert_array_equal(y.array, np.pad(x.array, widths, mode=mode))
    weights = np.random.RandomState(0).randn(*y.shape)
    F.sum(y * weights).backward()
    expected = np.zeros(12)
    np.add.at(expected, np.pad(np.arange(12).reshape(3, 4), widths, mode=mode), weights)
    np.testing.assert_allclose(x.grad.ravel(), expected, atol=1e-12)
    with pytest.raises(ValueError, match="pad: mode: expected 'constant' with constant_values, or 'edge', 'reflect'"):
        F.pad(x, widths, "mean")


@each(mode=MODES, shape=[(5,), (3, 4), (2, 3, 4), (2, 3, 5, 4), (1, 3)], widest=[0, 1, 4, 11], layout=["C", "images"])
def test_frames_of_any_widths_are_numpys(mode, shape, widest, layout):
    rng = np.random.default_rng(widest)
    x = rng.standard_normal(shape)
    if layout == "images":
        x = backend.channels_last(x) if len(shape) == 4 else x[::-1]
    widths = tuple(map(tuple, rng.integers(0, widest + 1, (len(shape), 2)).tolist()))
    v = Variable(x)
    y = F.pad(v, widths, mode)
    np.testing.assert_array_equal(y.array, np.pad(x, widths, mode=mode))
    weights = rng.standard_normal(y.shape)
    F.sum(y * weights).backward()
    expected = np.zeros(x.size)
    np.add.at(expected, np.pad(np.arange(x.size).reshape(shape), widths, mode=mode), weights)
    np.testing.assert_allclose(v.grad.ravel(), expected, atol=1e-12)


def test_terms_of_a_gradient_are_added_from_the_first_place_on():
    """In float32 the order matters: two places before, the element, two behind."""
    x = Variable(np.array([1.0], "f"))
    gy = np.array([1e8, 1, -1e8, 3, 1e-3], "f")
    dbrdist.backward([F.pad(x, 2, "edge")], [gy])
    total = gy[0]
    for term in gy[1:]:
        total = total + term
    assert x.grad.tolist() == [total]


def test_the_gradient_of_a_frame_is_the_leafs_own():
    x, gy = Variable(np.ones((3, 4), "f")), np.ones((5, 6), "f")
    dbrdist.backward([F.pad(x, 1, "edge")], [gy])
    x.grad[...] = 7
    assert (gy == 1).all() and x.grad.flags.c_contiguous


def test_second_derivatives_of_frames():
    x = Variable(np.array([1.0, 2.0, 3.0]))
    F.sum(F.pad(x, 1, "edge") ** 3).backward(enable_double_backprop=True)
    gx = x.grad_var
    np.testing.assert_allclose(gx.array, [6, 12, 54])
    x.cleargrad()
    F.sum(gx).backward()
    np.testing.assert_allclose(x.grad, [12, 12, 36])
