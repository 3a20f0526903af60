"""chainer.Function: the old style, whose backward computes with arrays."""

from __future__ import annotations

import gc
import types
import weakref

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Function, FunctionHook, Variable, gradient_check
from dbrdist.core.chainer import function as function_module
from dbrdist.utils import type_check as T
from tests.core.core_helpers import Old


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
    x = Variable(np.array([2.0, 3.0]))
    (gx,) = dbrdist.grad([F.sum(Product()(x, x))], [x], enable_double_backprop=True)
    assert gx.array.tolist() == [4, 6]
    with pytest.raises(RuntimeError, match=r"Product is a chainer.Function of the old style"):
        F.sum(gx * gx).backward()


def test_a_second_order_that_does_not_pass_through_it_is_computed():
    """As the gradient penalty of a network, of which another part has a function of the old style."""
    x, z = Variable(np.array([2.0, 3.0])), Variable(np.array([1.0, 2.0]))
    loss = F.sum(Product()(x, x)) + F.sum(z**3)
    loss.backward(enable_double_backprop=True)
    assert x.grad.tolist() == [4, 6] and z.grad.tolist() == [3, 12]
    (gz,) = dbrdist.grad([F.sum(Product()(x, x)) + F.sum(z**3)], [z], enable_double_backprop=True)
    (ggz,) = dbrdist.grad([F.sum(gz * gz)], [z])
    np.testing.assert_allclose(ggz.array, 36 * z.array**3)


def test_a_gradient_of_none_stays_none_in_a_pass_of_higher_order():
    class First(Product):
        def backward(self, xs, gys):
            return super().backward(xs, gys)[0], None

    x, z = Variable(np.array([2.0])), Variable(np.array([3.0]))
    gx, gz = dbrdist.grad([F.sum(First()(x, z))], [x, z], enable_double_backprop=True)
    assert gx.array.tolist() == [3] and gz is None


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


class Double(dbrdist.Function):
    def forward(self, xs):
        return xs[0] * 2, xs[0] * 3

    def backward(self, xs, gys):
        return (gys[0] * 2 + gys[1] * 3,)


def test_a_function_of_the_old_style_knows_its_outputs_and_its_caller():
    function, x = Double(), dbrdist.Variable(np.ones(2, np.float32))
    assert function.outputs == () and function.stack is None
    y, z = function(x)
    assert [type(r) for r in function.outputs] == [weakref.ref] * 2
    assert [r() for r in function.outputs] == [y.node, z.node]
    assert y.creator_node.function is function is y.creator
    del y
    assert function.outputs[0]() is None and function.outputs[1]() is z.node
    with dbrdist.DebugMode(True):
        y, _ = function(x)
    assert any("function(x)" in frame.line for frame in function.stack)
    with pytest.raises(AttributeError):
        y.creator_node.function = None


class OnGpu:
    """An array that lies elsewhere."""


def test_an_old_function_runs_where_its_arrays_lie(monkeypatch):
    module = types.ModuleType("cupy")
    module.ndarray = OnGpu
    monkeypatch.setitem(__import__("sys").modules, "cupy", module)

    class Two(dbrdist.Function):
        def forward_cpu(self, xs):
            return "forward", "cpu", xs

        def forward_gpu(self, xs):
            return "forward", "gpu", xs

        def backward_cpu(self, xs, gys):
            return "backward", "cpu", xs, gys

        def backward_gpu(self, xs, gys):
            return "backward", "gpu", xs, gys

    here, there = np.zeros(1), OnGpu()
    assert Two().forward((here,)) == ("forward", "cpu", (here,))
    assert Two().forward((here, there)) == ("forward", "gpu", (here, there))
    for xs, gys, place in (
        ((None,), (there,), "gpu"), ((there, None), (None,), "gpu"), ((None, None), (there, None), "gpu"),
        ((None,), (here,), "cpu"), ((here,), (None,), "cpu"),
    ):  # fmt: skip
        assert Two().backward(xs, gys) == ("backward", place, xs, gys)
    nothing = dbrdist.Function()
    assert nothing.backward((there, there), (there,)) == (None, None)
    for name in ("cpu", "gpu"):
        with pytest.raises(NotImplementedError, match=f"forward_{name}"):
            getattr(nothing, f"forward_{name}")((here,))


def test_an_old_function_may_check_its_types():
    class Checked(Old):
        def check_type_forward(self, in_types):
            T.expect(in_types.size() == 1, in_types[0].ndim == 2)

    assert Checked()(np.ones((1, 1))).array == 3
    with pytest.raises(T.InvalidType, match=r"in_types\[0\].ndim == 2"):
        Checked()(np.ones(1))


class OldTwice(Function):
    def forward(self, inputs):
        self.retain_inputs((0,))
        self.retain_outputs((0,))
        return inputs[0] * 2, inputs[0] * 3

    def backward(self, inputs, gys):
        return (sum(n * g for n, g in zip((2, 3), gys) if g is not None),)


def test_an_old_function_hands_on_what_its_node_has():
    class Hook(FunctionHook):
        name = "own"

    f, x = OldTwice(), Variable(np.ones(1))
    f.add_hook(Hook())
    assert list(f.local_function_hooks) == ["own"]
    f.delete_hook("own")
    assert f.local_function_hooks == {}
    y, z = f.apply((x,))
    assert f.output_data[0] is y.array and f.output_data[1] is None
    assert f.rank == 0 and f.inputs[0] is x.node and [o() for o in f.outputs] == [y.node, z.node]
    F.sum(y + z).backward()
    assert x.grad == 5
    x.cleargrad()
    f.unchain()
    F.sum(y).backward()
    assert x.grad is None


def test_an_old_function_with_one_output_applies_to_a_tuple():
    class One(Function):
        def forward_cpu(self, inputs):
            return (inputs[0] + 1,)

    x = Variable(np.ones(1))
    (y,) = One().apply((x,))
    assert isinstance(One()(x), Variable) and y.array == 2
    y.backward()  # its rule gives None
    assert x.grad is None
    with pytest.raises(NotImplementedError, match=r"Function defines neither forward\(inputs\) nor forward_cpu"):
        Function()(x)


@pytest.mark.parametrize("is_chainers", [False, True])
def test_a_gradient_that_the_program_set_counts_in_programs_of_chainer(is_chainers, monkeypatch):
    """Of an output to which backward brings none."""
    seen = []

    class Noted(Both):
        def backward(self, xs, gys):
            seen.append([None if g is None else g.tolist() for g in gys])
            return super().backward(xs, gys)

    monkeypatch.setattr(function_module, "as_chainer", [is_chainers])
    x, y = map(Variable, arrays(2))
    total, difference = Noted()(x, y)
    difference.grad = np.full((3, 2), 2.0)
    F.sum(total).backward()
    ones, set_by_program = [[1.0, 1.0]] * 3, [[2.0, 2.0]] * 3
    assert seen == [[ones, set_by_program if is_chainers else None]]
    assert x.grad.tolist() == ([[3.0, 3.0]] * 3 if is_chainers else ones)
    assert y.grad.tolist() == ([[-1.0, -1.0]] * 3 if is_chainers else ones)
