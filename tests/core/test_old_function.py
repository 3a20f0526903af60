"""chainer.Function: the old style, whose backward computes with arrays."""

import gc
import weakref

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable, function_node, gradient_check
from dbrdist.utils import type_check


class Product(dbrdist.Function):
    def forward_cpu(self, xs):
        return (xs[0] * xs[1],)

    def backward_cpu(self, xs, gys):
        return gys[0] * xs[1], gys[0] * xs[0]


class Both(dbrdist.Function):
    """Sum and difference."""

    def forward(self, xs):
        self.retain_inputs(())
        return xs[0] + xs[1], xs[0] - xs[1]

    def backward(self, xs, gys):
        assert xs == (None, None)
        gs, gd = (0 if g is None else g for g in gys)
        return gs + gd, gs - gd


def arrays(n, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((3, 2)) for _ in range(n)]


def test_gradients():
    x, y, g = arrays(3)
    gradient_check.check_backward(lambda *xs: Product()(*xs), (x, y), g)
    gradient_check.check_backward(lambda *xs: Both()(*xs), (x, y), (g, g * 2))


def test_one_output_is_a_variable_and_several_are_a_tuple():
    x, y = arrays(2)
    assert isinstance(Product()(x, y), Variable)
    assert isinstance(Product().apply((x, y)), tuple)
    s, d = Both()(x, y)
    np.testing.assert_array_equal(s.array - d.array, (x + y) - (x - y))


def test_missing_gradient_of_an_output_is_none():
    x, y = map(Variable, arrays(2))
    F.sum(Both()(x, y)[1]).backward()
    np.testing.assert_array_equal(x.grad, np.ones((3, 2)))
    np.testing.assert_array_equal(y.grad, -np.ones((3, 2)))


def test_a_function_may_be_called_twice():
    f = Product()
    x = Variable(np.full(2, 3.0))
    F.sum(f(x, x) + f(x, np.full(2, 5.0))).backward()
    np.testing.assert_array_equal(x.grad, [11.0, 11.0])


def test_the_graph_dies_by_reference_count():
    class Kept(np.ndarray):
        pass

    gc.disable()
    try:
        x = Variable(np.ones(2))
        f = Product()
        y = f(x, x)
        died = weakref.ref(y.creator_node)
        del y, f
        assert died() is None
    finally:
        gc.enable()


def test_node_rank_inputs_and_label():
    f = Product()
    x = Variable(np.ones(2))
    y = f(F.exp(x), x)
    assert y.creator_node is f.node and f.rank == 1 and len(f.inputs) == 2 and f.label == "Product"
    assert isinstance(f.node, dbrdist.FunctionAdapter) and f.node.function is f


def test_no_second_order():
    x = Variable(np.ones(2))
    with pytest.raises(RuntimeError, match=r"Product is a chainer.Function of the old style"):
        dbrdist.grad([F.sum(Product()(x, x))], [x], enable_double_backprop=True)


@pytest.mark.parametrize("gxs, error, message", [
    (np.ones(2), TypeError, "Wrong.backward: expected a tuple with a gradient .* got ndarray"),
    ((np.ones(2),), ValueError, "Wrong.backward: expected 2 gradients, one for each input, got 1"),
    ((np.ones(3), None), ValueError, "Wrong"),
])  # fmt: skip
def test_a_wrong_backward_is_named(gxs, error, message):
    class Wrong(Product):
        def backward(self, xs, gys):
            return gxs

    with pytest.raises(error, match=message):
        F.sum(Wrong()(Variable(np.ones(2)), np.ones(2))).backward()


def test_a_function_without_forward_is_named():
    class Empty(dbrdist.Function):
        pass

    with pytest.raises(NotImplementedError, match=r"Empty defines neither forward\(inputs\) nor forward_cpu\(inputs\)"):
        Empty()(np.ones(2))


def test_default_backward_gives_no_gradients():
    class Constant(dbrdist.Function):
        def forward(self, xs):
            return (xs[0] * 0,)

    x = Variable(np.ones(2))
    F.sum(Constant()(x)).backward()
    assert x.grad is None


def test_hooks_of_one_function():
    calls = []

    class Hook(dbrdist.FunctionHook):
        def forward_postprocess(self, function, in_data):
            calls.append((function.label, len(in_data)))

    f = Product()
    f.add_hook(Hook())
    f(np.ones(2), np.ones(2))
    assert calls == [("Product", 2)]


def test_type_checks_of_nodes_run_before_forward():
    class Node(function_node.FunctionNode):
        def check_type_forward(self, in_types):
            type_check.expect(in_types.size() == 1, in_types[0].ndim == 2)

        def forward(self, xs):
            assert xs[0].ndim == 2
            return xs

    Node().apply((np.ones((2, 2)),))
    with pytest.raises(type_check.InvalidType, match=r"Expect: in_types\[0\].ndim == 2\nActual: 1 != 2"):
        Node().apply((np.ones(2),))
    with dbrdist.using_config("type_check", False), pytest.raises(AssertionError):
        Node().apply((np.ones(2),))
