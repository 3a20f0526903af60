"""Tests of dbrdist.functions.noise."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable
from dbrdist.core.array import random


def ones(*shape):
    return np.ones(shape, np.float32)


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.8])
def test_zoneout_takes_as_many_as_it_says(ratio):
    h, x = Variable(ones(500, 40)), Variable(ones(500, 40) * 3)
    y = F.zoneout(h, x, ratio)
    assert abs((y.array == 1).mean() - ratio) < 0.02
    y.grad = ones(500, 40)
    y.backward()
    np.testing.assert_array_equal(h.grad, y.array == 1)
    np.testing.assert_array_equal(x.grad, y.array == 3)


def test_zoneout_gives_the_mean_outside_of_training():
    with dbrdist.using_config("train", False):
        np.testing.assert_allclose(F.zoneout(ones(2), ones(2) * 3, 0.25).array, [2.5, 2.5])


@pytest.mark.parametrize("shared", [True, False])
def test_dropconnect_keeps_the_mean(shared):
    x, W = ones(200, 30), ones(40, 30)
    y = F.simplified_dropconnect(x, W, ratio=0.3, use_batchwise_mask=not shared).array
    assert abs(y.mean() - 30) < 0.6
    assert np.allclose(y, y[0], rtol=1e-5) == shared  # products add up in another order at the edge of blocks
    np.testing.assert_allclose(F.simplified_dropconnect(x, W, train=False).array, x @ W.T)


def test_masks_do_not_depend_on_the_number_of_ranks():
    x, W = ones(6, 5), ones(4, 5)
    for shared in (True, False):
        parts = []
        for row, rows in ((0, x), (0, x[:2]), (2, x[2:])):
            random.set_stream(7, 1, 3, row)
            parts.append(F.simplified_dropconnect(rows, W, use_batchwise_mask=not shared).array)
        np.testing.assert_array_equal(parts[0], np.concatenate(parts[1:]))


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.9])
def test_dropout_keeps_the_mean(ratio):
    y = F.dropout(ones(1000, 50), ratio).array
    assert set(np.unique(y)) <= {np.float32(0), np.float32(1 / (1 - ratio))}
    assert (y == 0).mean() == pytest.approx(ratio, abs=0.01)


def test_dropout_does_not_depend_on_the_number_of_ranks():
    for shape in ((6,), (6, 5), (6, 3, 4, 5)):
        x = ones(*shape)
        random.set_stream(3, 1, 7)
        whole = F.dropout(x).array
        parts = []
        for row in (0, 2):  # two ranks, with two and four rows
            random.set_stream(3, 1, 7, row)
            parts.append(F.dropout(x[:2] if row == 0 else x[2:]).array)
        np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_dropout_draws_anew_at_each_call_and_repeats_a_step():
    x = ones(20, 20)
    random.set_stream(0, 0, 0)
    a, b = F.dropout(x).array, F.dropout(x).array
    random.set_stream(0, 0, 0)
    np.testing.assert_array_equal(F.dropout(x).array, a)
    random.set_stream(0, 0, 1)
    assert (F.dropout(x).array != a).any()
    assert (a != b).any()


def test_dropout_is_nothing_outside_of_training():
    x = Variable(ones(3, 3))
    with dbrdist.using_config("train", False):
        assert F.dropout(x) is x
        assert F.dropout(x, return_mask=True) == (x, None)


def test_dropout_of_no_element_draws_nothing():
    x, before = Variable(ones(3, 3)), random.get_state()
    assert F.dropout(x, 0.0) is x and random.get_state() == before
    y, mask = F.dropout(x, 0.0, return_mask=True)
    np.testing.assert_array_equal([y.array, mask], np.ones((2, 3, 3)))


def test_dropout_gives_its_mask():
    x = ones(4, 4)
    y, mask = F.dropout(x, return_mask=True)
    np.testing.assert_array_equal(y.array, x * mask)
    np.testing.assert_array_equal(F.dropout(x, mask=mask).array, y.array)


def test_gaussian_has_the_mean_and_the_variance():
    mean, ln_var = np.full((500, 100), 2.0, np.float32), np.full((500, 100), np.log(9.0), np.float32)
    y, eps = F.gaussian(mean, ln_var, return_eps=True)
    assert y.array.mean() == pytest.approx(2, abs=0.1)
    assert y.array.std() == pytest.approx(3, abs=0.1)
    np.testing.assert_allclose(y.array, 2 + 3 * eps, rtol=1e-4, atol=1e-4)


def test_rrelu_draws_its_slopes_between_the_bounds():
    x = Variable(-ones(200, 300))
    y, r = F.rrelu(x, 0.1, 0.7, return_r=True)
    assert r.dtype == np.float32 and r.min() >= 0.1 and r.max() <= 0.7
    assert r.mean() == pytest.approx(0.4, abs=0.005)
    assert r.std() == pytest.approx(0.6 / 12**0.5, rel=0.01)
    np.testing.assert_array_equal(y.array, -r)
    F.sum(y).backward()
    np.testing.assert_array_equal(x.grad, r)
    np.testing.assert_array_equal(F.rrelu(ones(3, 4)).array, ones(3, 4))


def test_rrelu_outside_of_training_takes_the_mean_slope():
    x = np.array([-2.0, 0.0, 3.0], np.float32)
    with dbrdist.using_config("train", False):
        y, r = F.rrelu(x, 0.25, 0.75, r=np.zeros(3, np.float32), return_r=True)
    assert r.tolist() == [0.5, 0.5, 0.5]
    assert y.array.tolist() == [-1.0, 0.0, 3.0]


def test_rrelu_does_not_depend_on_the_number_of_ranks():
    for shape in ((6,), (6, 5), (6, 3, 4, 5)):
        random.set_stream(3, 1, 7)
        whole = F.rrelu(-ones(*shape)).array
        parts = []
        for row, stop in ((0, 2), (2, 6)):
            random.set_stream(3, 1, 7, row)
            parts.append(F.rrelu(-ones(*shape)[row:stop]).array)
        np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_rrelu_repeats_with_its_slopes():
    x = -ones(4, 5)
    y, r = F.rrelu(x, return_r=True)
    np.testing.assert_array_equal(F.rrelu(x, r=r).array, y.array)
    assert (F.rrelu(x).array != y.array).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"l": 0.5, "u": 0.5}, "rrelu: l, u: expected 0 <= l < u < 1, got 0.5 and 0.5"),
        ({"l": -0.1}, "rrelu: l, u: expected 0 <= l < u < 1"),
        ({"u": 1.0}, "rrelu: l, u: expected 0 <= l < u < 1"),
        ({"r": np.ones(3)}, r"rrelu: r: expected shape \(2, 3\) to match x"),
    ],
)
def test_rrelu_refuses_what_is_no_slope(options, message):
    with pytest.raises(ValueError, match=message):
        F.rrelu(ones(2, 3), **options)


def with_bits(monkeypatch, *bits):
    from dbrdist.functions import noise

    monkeypatch.setattr(noise, "_bits", lambda *given: np.array(bits, np.uint32))


def test_elements_are_dropped_below_the_threshold(monkeypatch):
    x = np.array([1.0, 2.0, 3.0, 4.0])
    with_bits(monkeypatch, 0, 2**30 - 1, 2**30, 2**32 - 1)
    np.testing.assert_allclose(F.dropout(x, 0.25).array, [0, 0, 4, 16 / 3])
    np.testing.assert_allclose(F.zoneout(-x, x, 0.25).array, [-1, -2, 3, 4])
    assert (
        F.zoneout(-x, x, 1.0).array.tolist() == [-1, -2, -3, -4] and F.zoneout(-x, x, 0.0).array.tolist() == x.tolist()
    )
    y, mask = F.dropout(x, 0.0, return_mask=True)
    assert y.array.tolist() == x.tolist() and mask.tolist() == [1, 1, 1, 1]
    for call in (lambda: F.dropout(x, 1.0), lambda: F.dropout(x, -0.1)):
        with pytest.raises(ValueError, match="dropout: ratio: expected a number from 0 to less than 1"):
            call()
    for ratio in (-0.1, 1.1):
        with pytest.raises(ValueError, match="zoneout: ratio: expected a number from 0 to 1"):
            F.zoneout(x, x, ratio)


def test_connections_are_dropped_below_the_threshold(monkeypatch):
    from dbrdist.functions import noise

    x, w = np.array([[1.0, 2.0]]), np.array([[1.0, 10.0]])
    monkeypatch.setattr(noise, "_bits", lambda a, shape, once: np.array([2**30 - 1, 2**30], np.uint32).reshape(shape))
    np.testing.assert_allclose(F.simplified_dropconnect(x, w, ratio=0.25).array, [[20 / 0.75]])
    with pytest.raises(ValueError, match="simplified_dropconnect: ratio: expected a number from 0 to less than 1"):
        F.simplified_dropconnect(x, w, ratio=1.0)
    with pytest.raises(ValueError, match="simplified_dropconnect: x: expected rows of 2 elements"):
        F.simplified_dropconnect(np.ones((1, 3)), w)
    with pytest.raises(ValueError, match=r"simplified_dropconnect: b: expected shape \(1,\)"):
        F.simplified_dropconnect(x, w, np.ones(2))


def test_samples_of_the_gumbel_softmax_are_as_likely_as_said():
    """At a low temperature nearly all is in one class, chosen with probability pi."""
    pi = np.array([0.5, 0.3, 0.2])
    y = F.gumbel_softmax(np.log(np.broadcast_to(pi, (4000, 3))), 0.01).array
    np.testing.assert_allclose(y.sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(np.bincount(y.argmax(1)) / 4000, pi, atol=0.03)


def test_what_is_drawn_for_one_number_is_an_array():
    x = np.zeros((), "f")
    for drawn in (F.gaussian(x, x, return_eps=True)[1], F.rrelu(x, return_r=True)[1]):
        assert isinstance(drawn, np.ndarray) and drawn.shape == ()


def test_one_class_is_chosen_with_certainty():
    y = F.gumbel_softmax(np.array(-3, np.float16))
    assert (y.shape, y.dtype, y.array) == ((), np.float16, 1)
