"""Chainer's ``backward`` in a class that inherits from a function of ours takes the place of the inherited rule."""

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import FunctionHook, Variable
from dbrdist.core import ops
from dbrdist.functions.activation import Softmax
from dbrdist.functions.math import LogSumExp
from dbrdist.functions.rectifier import ReLU


class Threefold:
    """Three times the rule of the class that stands behind it"""

    def backward(self, indexes, grad_outputs):
        assert all(isinstance(g, Variable) for g in grad_outputs)
        return tuple(g * 3.0 for g in super().backward(indexes, grad_outputs))


def threefold(base):
    return type(f"Threefold{base.__name__}", (Threefold, base), {})


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


# what makes a node, its inputs, and whether forward mode moves it along partials, tangents, or its rule
NODES = {
    "elementwise, of its output": (ops.tanh.row.node, (), [(3, 4)]),
    "elementwise, of two": (ops.mul.row.node, (), [(3, 4), (4,)]),
    "linear": (ops.Transpose, ((1, 0),), [(3, 4)]),
    "writes into flat memory": (ops.MatMul, (), [(3, 4), (4, 2)]),
    "gives new arrays": (LogSumExp, ((1,),), [(3, 4)]),
    "has a kernel": (Softmax, (1,), [(3, 4)]),
    "takes over what waits": (ReLU, (), [(3, 4)]),
}


@pytest.mark.parametrize("way", ["backward", "hooked", "grad", "higher", "jvp"])
@pytest.mark.parametrize("name", NODES)
def test_the_rule_of_the_user_is_asked(name, way):
    base, arguments, shapes = NODES[name]
    arrays = [draw(i, *shape) for i, shape in enumerate(shapes)]

    def found(node_class):
        xs = [Variable(a) for a in arrays]
        (y,) = node_class(*arguments).apply(tuple(xs))
        gy = draw(9, *y.shape)
        if way == "jvp":
            change = dbrdist.jvp(lambda *xs: node_class(*arguments).apply(xs)[0], arrays, [a * 0.5 for a in arrays])[1]
            return [change.array]
        if way in ("backward", "hooked"):
            y.grad = gy.copy()
            if way == "hooked":
                with FunctionHook():
                    y.backward()
            else:
                y.backward()
            np.testing.assert_array_equal(y.grad, gy)
            return [x.grad for x in xs]
        gxs = dbrdist.grad([y], xs, [Variable(gy)], enable_double_backprop=way == "higher")
        if way == "grad":
            return [g.array for g in gxs]
        second = dbrdist.grad([F.sum(g * draw(8, *g.shape)) for g in gxs], xs)
        return [np.zeros(1) if g is None else g.array for g in second]

    # where the rule takes the output, the next derivative is that of the output by the user's rule as well
    factor = 9 if way == "higher" and base in (ops.tanh.row.node, Softmax) else 3
    for ours, theirs in zip(found(base), found(threefold(base)), strict=True):
        np.testing.assert_allclose(theirs, factor * ours, rtol=1e-12, atol=1e-12)


def test_it_is_asked_behind_a_normalization_that_computed_the_relu_along():
    normalize = L.BatchNormalization(64)
    x = draw(0, 4, 64, 8, 8).astype(np.float32)
    expected = None
    for relu in (F.relu, F.relu, lambda h: threefold(ReLU)().apply((h,))[0]):
        normalize.cleargrads()
        v = Variable(x * 1)
        h = v * 1.0
        y = relu(normalize(h))
        y.grad = draw(1, *y.shape).astype(np.float32)
        y.backward()
        found = [v.grad, normalize.gamma.grad.copy(), normalize.beta.grad.copy()]
        expected = expected or found
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, 3 * b, rtol=1e-5, atol=1e-5)


class Stopped(ReLU):
    def backward(self, indexes, grad_outputs):
        return (None,)


class Passing(Stopped):
    def backward(self, indexes, grad_outputs):
        return grad_outputs


class Halved(Passing):
    def derive(self, wanted, gys):
        return (gys[0] * 0.5,)


@pytest.mark.parametrize(("node_class", "expected"), [(Stopped, None), (Passing, 1.0), (Halved, 0.5)])
def test_the_nearest_rule_counts(node_class, expected):
    """Of a class, of one below it, and where a rule of arrays replaces that of Variables again."""
    for higher in (False, True):
        x, gy = Variable(np.full((2, 2), -1, np.float32)), np.ones((2, 2), np.float32)
        (y,) = node_class().apply((x,))
        y.grad = gy
        y.backward(enable_double_backprop=higher)
        assert higher or x.grad is not gy  # a leaf owns its gradient
        np.testing.assert_array_equal(x.grad, None if expected is None else np.full((2, 2), expected))


def test_what_it_returns_is_checked():
    class Bare(ReLU):
        def backward(self, indexes, grad_outputs):
            return (grad_outputs[0].array,)

    (y,) = Bare().apply((Variable(np.ones((2, 2), np.float32)),))
    y.grad = np.ones((2, 2), np.float32)
    with pytest.raises(TypeError, match=r"Bare.backward: expected a Variable \(or None\)"):
        y.backward()


@pytest.mark.parametrize("way", ["backward", "grad", "jvp"])
@pytest.mark.parametrize("factor", [5, 15])
def test_a_derive_may_ask_the_rule_that_it_inherits(factor, way):
    base = ops.tanh.row.node

    class Fivefold(threefold(base) if factor == 15 else base):
        def derive(self, wanted, gys):
            return tuple(g * 5.0 for g in super().derive(wanted, gys))

    v = Variable(draw(0, 3))
    (y,) = Fivefold().apply((v,))
    if way == "jvp":
        found = dbrdist.jvp(lambda x: Fivefold().apply((x,))[0], [v], [np.ones(3)])[1].array
    elif way == "grad":
        found = dbrdist.grad([F.sum(y)], [v], enable_double_backprop=True)[0].array
    else:
        F.sum(y).backward()
        found = v.grad
    np.testing.assert_allclose(found, factor * (1 - np.tanh(v.array) ** 2), rtol=1e-12)
