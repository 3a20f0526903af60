"""The tape: what backward computes, what the graph keeps alive, and how it dies."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Parameter, Variable
from dbrdist.core.tape import ops
from tests.core.core_helpers import Twice
from tests.each import each


def var(*values, dtype=np.float64):
    return Variable(np.array(values, dtype))


def test_x_plus_x():
    x = var(1.0, 2.0)
    y = x + x
    y.grad = np.ones(2)
    y.backward()
    np.testing.assert_array_equal(x.grad, [2.0, 2.0])
    np.testing.assert_array_equal(y.grad, [1.0, 1.0])


def test_accumulating_does_not_change_an_array_that_was_given():
    x = var(1.0)
    mine = np.array([5.0])
    x.grad = mine
    (x * 2.0).backward()
    assert x.grad == [7.0] and mine == [5.0]


def test_zero_dimensional_gradients_are_arrays():
    x = Variable(np.array(3.0, np.float32))
    (x * x + x).backward()
    assert type(x.grad) is np.ndarray and x.grad.shape == () and x.grad.dtype == np.float32
    x.grad[...] = 1
    y = x**2
    assert isinstance(y.array, np.ndarray)


# ---- numbers and operators ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [2, 2.0, np.float64(2), np.float32(2), np.int64(2)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numbers_keep_the_dtype_of_the_array(number, dtype):
    x = Variable(np.array([1.0, 4.0], dtype))
    results = [
        x + number,
        number + x,
        x - number,
        number - x,
        x * number,
        number * x,
        x / number,
        number / x,
        x**number,
    ]
    expected = [[3, 6], [3, 6], [-1, 2], [1, -2], [2, 8], [2, 8], [0.5, 2], [2, 0.5], [1, 16]]
    for y, e in zip(results, expected):
        assert y.dtype == dtype
        np.testing.assert_array_equal(y.array, e)
        y.grad = np.ones(2, dtype)
        x.cleargrad()
        y.backward()
        assert x.grad.dtype == dtype
    assert (number**x).dtype == dtype
    assert ops.mul(x.array, number).dtype == dtype


def test_ndarray_operators_give_variables():
    x, a = var(1.0, 2.0), np.array([3.0, 4.0])
    for y, e in ((a * x, [3, 8]), (a + x, [4, 6]), (a - x, [2, 2]), (a / x, [3, 2])):
        assert isinstance(y, Variable)
        np.testing.assert_array_equal(y.array, e)
    y = np.ones((2, 2)) @ x
    assert isinstance(y, Variable) and y.shape == (2,)


def test_broadcasting_on_both_sides():
    a, b = Variable(np.arange(3.0).reshape(3, 1)), Variable(np.arange(4.0))
    y = ops.sum(a * b + b)
    y.backward()
    np.testing.assert_array_equal(a.grad, np.full((3, 1), 6.0))
    np.testing.assert_array_equal(b.grad, np.full(4, 3.0 + 3.0))


def test_variable_is_careful():
    x = Variable(np.ones((2, 3), np.float32), name="x")
    with pytest.raises(TypeError, match="truth value"):
        bool(x)
    with pytest.raises(TypeError, match="got list"):
        Variable([1.0])
    assert x.summary() == "<variable x shape=(2, 3) dtype=float32>"
    assert "mean=1.0" in x.debug_print() and "grad: None" in x.debug_print()
    assert "None" in Variable().debug_print()
    with pytest.raises(ValueError, match="mul: argument 0 is a Variable without an array"):
        _ = Variable() * 2.0
    assert (x.T.shape, x.transpose(1, 0).shape, x.reshape(3, -1).shape, len(x), x.size) == (
        (3, 2),
        (3, 2),
        (3, 2),
        2,
        6,
    )
    assert x.label == "(2, 3), float32"


def test_mean_with_weights():
    x = Variable(np.arange(6.0).reshape(2, 3))
    w = np.array([1.0, 0.0, 3.0])
    np.testing.assert_allclose(x.mean(axis=1, weights=w).array, [1.5, 4.5])
    np.testing.assert_allclose(x.mean().array, 2.5)
    assert x.mean(axis=0, keepdims=True).shape == (1, 3)


def test_addgrad_copydata_zerograd():
    a, b = var(1.0), var(2.0)
    b.grad = np.array([5.0])
    a.addgrad(b)
    a.addgrad(b)
    assert a.grad == [10.0] and b.grad == [5.0]
    a.copydata(b)
    assert a.array == [2.0]
    with pytest.deprecated_call():
        a.zerograd()
    assert a.grad == [0.0]


def test_a_variable_takes_its_gradient_along():
    v = Variable(np.ones(2))
    v.to_cpu()
    assert v.grad is None
    v.grad = np.array([1.0, 2.0])
    v.to_device("@numpy")
    assert v.grad.tolist() == [1, 2] and v.array.tolist() == [1, 1]


def test_what_has_no_gradient_takes_none():
    x = Variable(np.array([7.0]))
    assert not (x // 2.0).requires_grad and (x // 2.0).array == 3
    _, pull = dbrdist.vjp(lambda a, b: a * 2.0, x, Variable(np.array([[1.0]])))
    gxs = pull(Variable(np.array([1.0])))
    assert gxs[0].array == 2 and gxs[1].array.tolist() == [[0.0]] and not gxs[1].requires_grad


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def test_a_gradient_given_at_the_start_is_kept_and_checked():
    assert Variable(ones(2), grad=2 * ones(2)).grad.tolist() == [2, 2]
    assert Variable(ones(2)).grad is None
    with pytest.raises(
        ValueError, match=r"grad: expected shape \(2,\) and dtype float32 to match the array, got shape \(3"
    ):
        Variable(ones(2), grad=ones(3))


@each(kind=[Variable, Parameter])
def test_gradients_are_refused_by_kind_shape_and_type(kind):
    x = kind(ones(2))
    for name in ("grad", "grad_var"):
        with pytest.raises(TypeError, match="grad: expected an array or None, got list"):
            setattr(x, name, [1.0, 1.0])
        with pytest.raises(ValueError, match=r"grad: expected shape \(2,\)"):
            setattr(x, name, ones(1))
        with pytest.raises(ValueError, match=r"grad: .* got shape .* and dtype float64"):
            setattr(x, name, ones(2, dtype=np.float64))
        setattr(x, name, None)
        assert x.grad is None and x.grad_var is None


def test_grad_var_is_one_variable_around_the_gradient():
    x = Variable(ones(2))
    x.grad = g = 3 * ones(2)
    assert x.grad_var.array is g and x.grad_var is x.grad_var and x.grad is g
    x.grad_var = v = Variable(g)
    assert x.grad_var is v and x.grad is g


def test_a_variable_without_an_array_has_words_of_its_own():
    x = Variable()
    assert repr(x) == "<variable>" and x.label == "(None)" and x.is_initialized
    assert x.summary() == "<variable  None>"
    assert x.debug_print().splitlines()[1:] == [
        f"- {name}: None" for name in ("device", "backend", "shape", "dtype", "statistics", "grad")
    ]
    x.retain_data()
    assert x.node.data is None and x.node.shape is None
    x.grad = ones(3)  # nothing to compare it with
    x.name = "x"
    assert repr(x) == "<variable x>" and x.summary() == "<variable x None>"


def test_words_of_a_variable():
    x = Variable(np.arange(2, dtype=np.float32), name="x")
    assert repr(x) == "variable x([0. 1.])" and repr(Variable(x.array)) == "variable([0. 1.])"
    assert x.label == "(2,), float32"
    assert x.summary() == "<variable x shape=(2,) dtype=float32>"
    assert Variable(x.array).summary() == "<variable  shape=(2,) dtype=float32>"
    assert "mean=0.50000000, std=0.50000000" in x.debug_print()
    assert Variable(ones(0)).debug_print().splitlines()[5] == "- statistics: empty"
    with pytest.raises(TypeError, match="a Variable has no truth value"):
        bool(x)


def test_data_and_raw_array_are_the_array():
    x = Variable(ones(2))
    x.data = a = ones(3, dtype=np.float64)
    assert x.array is a and x.data is a and x.raw_array is a
    assert x.node.shape == (3,) and x.node.dtype == np.float64
    x.array = None
    assert x.array is None and x.node.shape == (3,)


def test_addgrad_and_copydata_take_what_is_there():
    x, other = Variable(ones(2)), Variable(5 * ones(2))
    x.addgrad(other)
    assert x.grad is None
    other.grad = 2 * ones(2)
    x.addgrad(other)
    assert x.grad.tolist() == [2, 2] and x.grad is not other.grad
    x.addgrad(other)
    assert x.grad.tolist() == [4, 4] and other.grad.tolist() == [2, 2]
    x.copydata(Variable())
    assert x.array.tolist() == [1, 1]
    x.copydata(other)
    assert x.array.tolist() == [5, 5] and x.array is not other.array


def test_a_pickled_variable_has_its_name_gradient_and_whether_it_takes_one():
    x = Variable(ones(2), name="x", grad=2 * ones(2), requires_grad=True)
    y = pickle.loads(pickle.dumps(x))
    assert (y.name, y.requires_grad, y.grad.tolist()) == ("x", True, [2, 2])
    assert not pickle.loads(pickle.dumps(Variable(ones(2), requires_grad=False))).requires_grad


@each(kind=["i", "b", "U"])
def test_only_numbers_with_fractions_take_gradients(kind):
    assert not Variable(np.zeros(2, {"i": int, "b": bool, "U": str}[kind])).requires_grad
    assert Variable(np.zeros(2, complex)).requires_grad and Variable().requires_grad


def test_a_creator_is_set_by_hand():
    f, x = Twice(), Variable(ones(1))
    f.apply((Variable(ones(1)),))
    for set_creator in (Variable.set_creator, Variable.set_creator_node):
        f.rank = 4
        set_creator(x, f)
        assert x.creator is f and x.creator_node is f and x.rank == 5
        x.unchain()
        assert x.creator is None and x.creator_node is None and x.rank == 0


def test_operators_that_are_seldom_written():
    x, a = Variable(np.array([[-2.0, 3.0]])), np.array([[1.0], [4.0]])
    assert abs(x).array.tolist() == [[2, 3]]
    assert (x @ a).array.tolist() == [[10]] and (Variable(a) @ x).array.tolist() == [[-2, 3], [-8, 12]]
    assert (a @ x).array.tolist() == [[-2, 3], [-8, 12]]
    assert (7.0 // x).array.tolist() == [[-4, 2]] and (x // 2.0).array.tolist() == [[-1, 1]]
    assert (2.0**x).array.tolist() == [[0.25, 8]]
    assert len(x) == 1 and x.size == 2 and x.ndim == 2


def test_shapes_and_axes_are_given_in_any_form():
    x = Variable(np.arange(6.0).reshape(2, 3))
    for y in (x.reshape(3, 2), x.reshape((3, 2)), x.reshape([3, 2]), x.reshape(-1, 2)):
        assert y.shape == (3, 2)
    assert x.reshape(6).shape == x.reshape((6,)).shape == (6,)
    for y in (x.transpose(), x.transpose(None), x.transpose(1, 0), x.transpose((1, 0)), x.transpose([1, 0]), x.T):
        np.testing.assert_array_equal(y.array, x.array.T)
    assert x.transpose(0, 1).shape == (2, 3) and Variable(ones(4)).transpose(0).shape == (4,)


@each(axis=[None, 0, 1, -1, (0,), [1], (0, 1)], keepdims=[False, True])
def test_weighted_means(axis, keepdims):
    a = np.random.default_rng(0).random((2, 3))
    axes = (0, 1) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    w = np.random.default_rng(1).random([a.shape[i] for i in axes])
    y = Variable(a).mean(axis, weights=w, keepdims=keepdims)
    wide = w.reshape([n if i in [k % 2 for k in axes] else 1 for i, n in enumerate(a.shape)])
    expected = (a * wide).sum(axes, keepdims=keepdims) / np.broadcast_to(wide, a.shape).sum(axes, keepdims=keepdims)
    np.testing.assert_allclose(y.array, expected, rtol=1e-12)
    assert y.shape == expected.shape
    np.testing.assert_allclose(Variable(a).mean(axes, keepdims=keepdims).array, a.mean(axes, keepdims=keepdims))


def test_layouts_are_none():
    x = Variable(ones(1))
    assert x.layout is None and x.as_layout(None) is x
    with pytest.raises(ValueError, match="as_layout: expected None, got 'NHWC'"):
        x.as_layout("NHWC")
    with pytest.raises(ValueError, match="layout: dbrdist keeps layouts in strides; expected None, got 'NHWC'"):
        Parameter(0.0, (1,), layout="NHWC")


def test_gradients_that_are_variables_are_added_to():
    x = Variable(np.ones(2))
    x.grad_var = Variable(np.full(2, 3.0))
    F.sum(x * 2.0).backward()
    assert x.grad.tolist() == [5, 5]


def test_outputs_may_be_lists_and_gradients_single():
    x = Variable(np.ones(3))
    (y,) = Twice().apply((x,))
    y.grad = np.arange(3.0)
    y.backward()
    assert y.array.tolist() == [2, 2, 2] and x.grad.tolist() == [0, 2, 4]


def test_backward_accumulate_adds_to_what_is_there():
    f = Twice()
    f.apply((Variable(np.ones(1)),))
    g, old = Variable(np.full(1, 3.0)), Variable(np.full(1, 10.0))

    class Rule(Twice):
        def backward(self, indexes, gys):
            return tuple(None if i else gys[0] * 2 for i in indexes)

    rule = Rule()
    (new,) = rule.backward_accumulate((0,), (g,), (None,))
    (both,) = rule.backward_accumulate((0,), (g,), (old,))
    (kept,) = rule.backward_accumulate((1,), (g,), (old,))
    (none,) = rule.backward_accumulate((1,), (g,), (None,))
    assert new.array == 6 and both.array == 16 and kept is old and none is None


def test_formats_are_those_of_the_number():
    assert f"{dbrdist.Variable(np.array([[7]])):4d}|{dbrdist.Variable(np.array(1.5)):.2f}" == "   7|1.50"
    for x, got in ((dbrdist.Parameter(), "without an array"), (dbrdist.Variable(np.zeros((2, 3), "f")), r"\(2, 3\)")):
        with pytest.raises(TypeError, match=rf"format '>9': .*got .*{got}"):
            f"{x:>9}"


def test_a_variable_of_one_number_has_no_elements():
    for run in (list, sum, tuple, max, lambda x: next(iter(x))):
        with pytest.raises(TypeError, match=r"no elements to iterate over; float\(x\) is its number"):
            run(Variable(np.array(3.0)))
    x = Variable(np.arange(6.0).reshape(3, 2))
    rows = list(x)
    assert [row.array.tolist() for row in rows] == [[0, 1], [2, 3], [4, 5]]
    a, _, c = x
    (a[0] + c[1] * 2 + rows[1][0] * 3).backward()
    assert x.grad.tolist() == [[1, 0], [3, 0], [0, 2]]
    assert list(Variable(np.zeros((0, 2)))) == []


def test_what_is_no_array_leaves_a_variable_as_it_is():
    x = Variable(np.ones(2))
    with pytest.raises(TypeError, match="array: expected an array of NumPy or CuPy, got list; convert it first"):
        x.array = [1.0]
    assert x.array.tolist() == [1, 1]


def test_numpy_writes_no_variable_into_an_array():
    """It wrote nothing, silently; of ``a += x``, whose value is a Variable, the array stays as it is."""
    array, x, out = np.ones(3), Variable(np.full(3, 2.0)), np.zeros(3)
    for function in (np.add, np.multiply, np.matmul):
        with pytest.raises(TypeError, match=f"numpy.{function.__name__}: out: .* write out.* = y.array"):
            function(array, x, out=out)
    total = array
    total += x
    assert isinstance(total, Variable) and (total.array == 3).all() and (array == 1).all()
