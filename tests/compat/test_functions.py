"""Functions that Chainer checks more strictly, or calls deprecated."""

import warnings

import numpy as np
import pytest

from tests.each import each

X = np.arange(6, dtype="f").reshape(1, 2, 3)


@each(name=["maximum", "minimum"])
def test_operands_of_two_types_are_refused(name, installed):
    import chainer.functions as F
    from chainer.utils import type_check

    function = getattr(F, name)
    with pytest.raises(type_check.InvalidType, match=f"{name}: x2: expected type float32 as that of x1, got float64"):
        function(X, X.astype("d"))
    np.testing.assert_array_equal(function(X, X[:, ::-1]).array, getattr(np, name)(X, X[:, ::-1]))
    np.testing.assert_array_equal(function(X, 2.0).array, getattr(np, name)(X, 2))


def test_the_state_of_an_object_by_path(installed):
    import chainer
    from chainer.serializers import npz

    link = chainer.links.Linear(2, 1)
    state = npz.serialize(link)
    assert sorted(state) == ["W", "b"] and state["W"] is not link.W.array
    np.testing.assert_array_equal(state["W"], link.W.array)


def test_deprecated_functions_warn(installed):
    import chainer.functions as F
    from chainer.functions.math.matmul import batch_matmul

    with pytest.warns(DeprecationWarning, match=r"batch_matmul is deprecated\. Use matmul instead\."):
        y = batch_matmul(X, X, transb=True)
    np.testing.assert_array_equal(y.array, X @ X.transpose(0, 2, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        F.matmul(X, X, transb=True)


def test_a_function_of_the_old_style_gets_gradients_that_were_set_of_its_other_outputs(installed):
    import chainer

    class Both(chainer.Function):
        def forward(self, inputs):
            return inputs[0] * 2, inputs[0] * 3

        def backward(self, inputs, grads):
            self.seen = [None if g is None else g.tolist() for g in grads]
            return (sum(n * g for n, g in zip((2, 3), grads) if g is not None),)

    for is_set, gradient in ((True, [14.0]), (False, [2.0])):
        x, both = chainer.Variable(np.ones(1, "f")), Both()
        a, b = both(x)
        a.grad = np.ones(1, "f")
        if is_set:
            b.grad = np.full(1, 4, "f")
        a.backward()
        assert (both.seen, x.grad.tolist()) == ([[1.0], [4.0] if is_set else None], gradient)


def test_zoneout_outside_of_training_is_the_new_state(installed):
    import chainer
    import chainer.functions as F

    with chainer.using_config("train", False):
        np.testing.assert_array_equal(F.zoneout(X, 2 * X, 0.25).array, 2 * X)


def test_products_of_an_array_and_a_variable_have_chainers_types(installed):
    import chainer
    import chainer.functions as F

    x, wide = chainer.Variable(X[0]), np.ones((3, 2))
    for y, dtype in (
        (F.matmul(x, wide), "d"), (F.matmul(wide, x), "d"), (F.tensordot(x, wide, 1), "d"),
        (F.einsum("ij,jk", x, wide), "d"), (x @ wide, "f"), (wide @ x, "f"), (F.matmul(x, wide.astype("f")), "f"),
    ):  # fmt: skip
        assert y.dtype == np.dtype(dtype)
        x.cleargrad()
        F.sum(y).backward()
        assert x.grad.dtype == np.float32
    with pytest.raises(TypeError, match="b: expected an array or Variable, got str"):
        F.matmul(x, "a")


def test_pad_takes_all_modes_with_chainers_gradient(installed):
    import chainer
    import chainer.functions as F

    for mode, keywords in (("reflect", {}), ("linear_ramp", {"end_values": 3}), ("reflect", {"reflect_type": "odd"})):
        x = chainer.Variable(X[0])
        y = F.pad(x, ((1, 0), (2, 1)), mode, **keywords)
        np.testing.assert_array_equal(y.array, np.pad(X[0], ((1, 0), (2, 1)), mode=mode, **keywords))
        y.grad = np.arange(18, dtype="f").reshape(3, 6)
        y.backward()
        np.testing.assert_array_equal(x.grad, y.grad[1:, 2:-1])


def test_gates_of_stateful_zoneout_begin_without_biases(installed):
    import chainer.links as L

    link = L.StatefulZoneoutLSTM(3, 4)
    assert not link.upward.b.array.any()
    assert L.StatelessLSTM(3, 4).upward.b.array.sum() == 4


def test_margins_that_chainer_refuses_are_refused(installed):
    import chainer.functions as F

    for margin in (-1, 0.0):
        with pytest.raises(ValueError, match="margin: expected a number above 0"):
            F.contrastive(X[0], X[0], np.array([0, 1]), margin)
        with pytest.raises(ValueError, match="margin: expected a number above 0"):
            F.triplet(X[0], X[0], X[0], margin)
