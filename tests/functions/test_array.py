"""Tests of dbrdist.functions.array."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable
from tests.each import each


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int64"])
@pytest.mark.parametrize("order", [np.arange(300)[::-1] % 100, np.arange(300) % 100 - 100])
def test_permutate_takes_elements_twice_by_indices_of_any_type(order, dtype):
    """300 is more than an index of 8 bits holds; what is taken three times gets three gradients."""
    x = Variable(np.random.default_rng(0).normal(size=(300, 2)))
    y = F.permutate(x, order.astype("int8" if dtype == "uint8" and order.min() < 0 else dtype))
    np.testing.assert_array_equal(y.array, x.array[order])
    y.grad = np.ones_like(y.array)
    y.backward()
    np.testing.assert_array_equal(x.grad[:, 0], np.bincount(order % 300, minlength=300))


def ones_of(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def ints(*values):
    return np.array(values, np.int32)


def test_shapes_of_one_axis_may_be_numbers():
    x = np.arange(6.0).reshape(2, 3)
    assert F.reshape(x, 6).array.tolist() == F.reshape(x, np.int64(6)).array.tolist() == [0, 1, 2, 3, 4, 5]
    assert (
        F.as_strided(x, 3, 2).array.tolist() == F.as_strided(x, np.int32(3), np.int32(2), 0).array.tolist() == [0, 2, 4]
    )
    assert F.as_strided(x, 2, -1, 1).array.tolist() == [1, 0] and F.as_strided(x, 0, 9).shape == (0,)


@each(axis=[0, 1])
def test_a_permutation_of_indices_below_zero_is_undone(axis):
    x, order = np.arange(6.0).reshape(2, 3), (ints(-1, -2), ints(1, -1, 0))[axis]
    y = F.permutate(x, order, axis)
    np.testing.assert_array_equal(y.array, np.take(x, order, axis))
    np.testing.assert_array_equal(F.permutate(y, order, axis, inv=True).array, x)


def test_elements_taken_twice_have_no_inverse_order():
    x = Variable(np.array([5.0, 6.0, 7.0]))
    y = F.permutate(x, ints(2, 2, 0))
    y.grad = np.array([1.0, 10.0, 100.0])
    y.backward()
    assert y.array.tolist() == [7, 7, 5] and x.grad.tolist() == [100, 0, 11]


def test_a_single_number_is_repeated_along_its_one_axis():
    assert F.repeat(np.array(2.0), 3).array.tolist() == F.repeat(np.array(2.0), [3], 0).array.tolist() == [2, 2, 2]
    assert F.repeat(np.array(2.0), 2, -1).array.tolist() == [2, 2]
    with pytest.raises(ValueError, match="repeat: axis"):
        F.repeat(np.array(2.0), 3, 1)
    assert F.repeat(ones_of(2), 0).shape == (0,)


def test_a_single_piece_is_a_tuple_unless_none_is_asked_for():
    x = np.arange(6.0).reshape(2, 3)
    for sections, is_tuple in ((1, False), ([], False), (2, True), ([1], True), ([0], True)):
        assert isinstance(F.split_axis(x, sections, 0, force_tuple=False), tuple) == is_tuple
        assert isinstance(F.split_axis(x, sections, 0), tuple)
    assert F.split_axis(x, 1, 0, force_tuple=False).array.tolist() == x.tolist()


def test_places_are_looked_at_in_debug_mode():
    x = np.arange(6, dtype="f").reshape(2, 3)
    with dbrdist.using_config("debug", True):
        for t in ([-1, 0], [0, 3]):
            with pytest.raises(ValueError, match="select_item: t: expected integers from 0 to 2"):
                F.select_item(x, np.array(t))
        for places in ([0, 0], [-1, 0]):
            with pytest.raises(ValueError, match="permutate: indices: expected each place from 0 to 1 once"):
                F.permutate(x, np.array(places))
        assert F.select_item(x, np.array([0, 2])).array.tolist() == [0, 5]
        assert F.permutate(x, np.array([1, 0])).array.tolist() == x[::-1].tolist()
    assert F.select_item(x, np.array([-1, 0])).array.tolist() == [2, 3]


def test_an_axis_is_a_whole_number():
    x = np.zeros((2, 3))
    assert F.expand_dims(x, np.array(1)).shape == F.expand_dims(x, np.int8(1)).shape == (2, 1, 3)
    for axis in (np.array(1.5), np.array([1]), np.array(True), 1.0, None):
        with pytest.raises(TypeError, match="expand_dims: axis: expected an int"):
            F.expand_dims(x, axis)


@each(name=["softmax", "log_softmax", "crelu", "normalize"], axis=[None, 1.5, 2.0])
def test_an_axis_that_is_no_integer_is_refused_by_its_name(name, axis):
    with pytest.raises(TypeError, match=f"{name}: axis: expected an int, got"):
        getattr(F, name)(np.ones((2, 3)), axis=axis)


@each(name=["precision", "recall", "f1_score", "classification_summary"], label=[2**31 - 1, 2**40])
def test_a_label_far_beyond_the_classes_takes_no_memory(name, label):
    y, t = np.eye(3), np.array([0, label, 1])
    with pytest.raises(ValueError, match=f"t: expected labels below 16777216, or label_num, got labels up to {label}"):
        getattr(F, name)(y, t)
    with pytest.raises(ValueError, match="labels from 0 to 2"):
        getattr(F, name)(y, t, label_num=3)


def test_numpys_mean_of_a_variable():
    x = Variable(np.arange(6.0).reshape(2, 3))
    y = np.mean(x, axis=1)
    np.testing.assert_array_equal(y.array, [1, 4])
    F.sum(y).backward()
    np.testing.assert_allclose(x.grad, np.full((2, 3), 1 / 3))
    with pytest.raises(TypeError, match="mean: dtype and out: expected None"):
        np.mean(x, dtype="f")


@each(**{"shape, axes": [((3,), (-1,)), ((), ()), ((2, 3), (-1, 0)), ((2, 3, 4), (-2, 2, -3))]})
def test_axes_of_a_transpose_may_count_from_the_last(shape, axes):
    x = np.arange(float(np.prod(shape))).reshape(shape)
    np.testing.assert_array_equal(F.transpose(x, axes).array, x.transpose(axes))
