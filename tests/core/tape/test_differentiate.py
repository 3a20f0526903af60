"""Forward mode of every operation of ``cases.py`` against differences in float64, and against reverse mode."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable
from tests.each import each
from tests.functions.cases import every_case


def listed(ys):
    return list(ys) if isinstance(ys, (tuple, list)) else [ys]


@every_case
@each(shapes=lambda case: case.shapes)
def test_tangents_agree_with_differences(case, shapes, xp):
    xs = [xp.asarray(a) for a in case.inputs(shapes)]
    rng = np.random.default_rng(5)
    ts = [xp.asarray(rng.uniform(-1.0, 1.0, x.shape)) for x in xs]
    ys, tangents = dbrdist.jvp(case.function, xs, ts)
    eps = 1e-5
    ends = [listed(case.function(*[Variable(xp.asarray(x + s * eps * t)) for x, t in zip(xs, ts)])) for s in (1, -1)]
    for y, t, after, before in zip(listed(ys), listed(tangents), *ends, strict=True):
        assert t.shape == y.shape and t.dtype == y.dtype
        numerical = (after.array.astype(np.float64) - before.array.astype(np.float64)) / (2 * eps)
        loose = y.dtype != np.float64  # a cast to float32 rounds the ends of the difference
        np.testing.assert_allclose(
            dbrdist.backend.to_cpu(t.array), dbrdist.backend.to_cpu(numerical), rtol=0.1 if loose else 1e-5,
            atol=0.1 if loose else 1e-7,
        )  # fmt: skip


def test_the_results_can_be_differentiated():
    """Reverse over forward: the gradient of <x, J t> for y = x^3 is the Hessian times t."""
    x, t = Variable(np.array([0.5, -1.5, 2.0])), Variable(np.array([1.0, 2.0, -1.0]))
    _, tangent = dbrdist.jvp(lambda v: F.sum(v * v * v), (x,), (t,))
    np.testing.assert_allclose(tangent.array, (3 * x.array**2 * t.array).sum())
    tangent.backward()
    np.testing.assert_allclose(x.grad, 6 * x.array * t.array)
    np.testing.assert_allclose(t.grad, 3 * x.array**2)


def test_forward_over_forward():
    def slope(v):
        return dbrdist.jvp(F.sin, (v,), (np.ones(3),))[1]

    x = np.array([0.1, 0.7, 2.0])
    _, second = dbrdist.jvp(slope, (x,), (np.ones(3),))
    np.testing.assert_allclose(second.array, -np.sin(x))


def test_an_output_that_does_not_move_has_zeros():
    x, other = np.ones((2, 3)), Variable(np.ones(4))
    _, (ta, tb) = dbrdist.jvp(lambda v: (v * 2.0, F.exp(other)), (x,), (np.full((2, 3), 3.0),))
    np.testing.assert_array_equal(ta.array, np.full((2, 3), 6.0))
    np.testing.assert_array_equal(tb.array, np.zeros(4))
    _, t = dbrdist.jvp(lambda v, w: v * w, (x, x), (None, x))
    np.testing.assert_array_equal(t.array, x)


def test_a_users_function_in_chainers_form():
    class Cube(dbrdist.FunctionNode):
        def forward(self, xs):
            self.retain_inputs((0,))
            return (xs[0] ** 3,)

        def backward(self, indexes, gys):
            (x,) = self.get_retained_inputs()
            return (3.0 * x * x * gys[0],)

    x, t = np.array([1.0, 2.0]), np.array([0.5, -1.0])
    y, tangent = dbrdist.jvp(lambda v: Cube().apply((v,))[0], (x,), (t,))
    np.testing.assert_allclose(y.array, x**3)
    np.testing.assert_allclose(tangent.array, 3 * x**2 * t)


def test_vjp():
    rng = np.random.default_rng(0)
    A, x = rng.normal(size=(3, 4)), rng.normal(size=4)
    y, pull = dbrdist.vjp(lambda a, v: F.matmul(a, v), A, x)
    g = rng.normal(size=3)
    gA, gx = pull(g)
    np.testing.assert_allclose(y.array, A @ x)
    np.testing.assert_allclose(gA.array, np.outer(g, x))
    np.testing.assert_allclose(gx.array, A.T @ g)
    np.testing.assert_allclose(pull(2 * g)[1].array, 2 * A.T @ g)  # the graph stays
    (unused,) = dbrdist.vjp(lambda v: Variable(np.ones(2)), x)[1](np.ones(2))
    np.testing.assert_array_equal(unused.array, np.zeros(4))


def test_both_modes_agree_through_a_network():
    rng = np.random.default_rng(1)
    W, V = rng.normal(size=(5, 4)), rng.normal(size=(3, 5))

    def net(x):
        return F.softmax(F.linear(F.tanh(F.linear(x, W)), V))

    x, t, g = rng.normal(size=(2, 4)), rng.normal(size=(2, 4)), rng.normal(size=(2, 3))
    _, tangent = dbrdist.jvp(net, (x,), (t,))
    (gx,) = dbrdist.vjp(net, x)[1](g)
    np.testing.assert_allclose((tangent.array * g).sum(), (gx.array * t).sum(), rtol=1e-12)


@pytest.mark.parametrize(
    "tangents, error",
    [((np.ones(3),), r"tangents\[0\]: expected shape \(2,\)"), ((), "expected 1 tangents")],
)
def test_wrong_tangents_are_refused(tangents, error):
    with pytest.raises(ValueError, match=error):
        dbrdist.jvp(F.sin, (np.ones(2),), tangents)


def test_what_is_no_variable_is_refused():
    with pytest.raises(TypeError, match=r"primals\[0\]: expected an array or Variable, got list"):
        dbrdist.jvp(F.sin, ([1.0],), (np.ones(1),))
    with pytest.raises(TypeError, match="expected func to return a Variable"):
        dbrdist.jvp(lambda x: x.array, (np.ones(2),), (np.ones(2),))
    with pytest.raises(ValueError, match="expected 1 gradients"):
        dbrdist.vjp(F.sin, np.ones(2))[1](np.ones(2), np.ones(2))
    with pytest.raises(ValueError, match=r"expected a gradient of shape \(2,\)"):
        dbrdist.vjp(F.sin, np.ones(2))[1](np.ones(3))


A, T, S = np.array([0.5, 1.5, 2.0]), np.array([1.0, -2.0, 0.5]), np.array([0.25, 1.0, -1.0])


def both_modes(function, *primals):
    """J t for the tangents T, S, ..., and the gradients of the sum."""
    _, tangent = dbrdist.jvp(function, primals, (T, S)[: len(primals)])
    return tangent.array, *(g.array for g in dbrdist.vjp(function, *primals)[1](np.ones(3)))


def test_one_variable_in_two_places_is_two_arguments():
    x = Variable(A)
    tangent, ga, gb = both_modes(lambda a, b: a * b * b, x, x)
    np.testing.assert_allclose(tangent, T * A**2 + 2 * A**2 * S)
    np.testing.assert_allclose(ga, A**2)
    np.testing.assert_allclose(gb, 2 * A**2)


def test_a_primal_computed_from_another_is_an_argument_of_its_own():
    x = Variable(A)
    y = x * 3.0
    tangent, ga, gb = both_modes(lambda a, b: a * b, x, y)
    np.testing.assert_allclose(tangent, T * 3 * A + A * S)
    np.testing.assert_allclose(ga, 3 * A)
    np.testing.assert_allclose(gb, A)
    _, still = dbrdist.jvp(lambda a, b: a * b, (x, y), (T, None))
    np.testing.assert_allclose(still.array, T * 3 * A)


def test_what_a_closure_holds_is_constant():
    x = Variable(A)
    for found in both_modes(lambda a: a * x, x):
        assert np.allclose(found, T * A) or np.allclose(found, A)
    inner = lambda a: dbrdist.jvp(lambda b: a + b, (a,), (np.ones(3),))[1]  # noqa: E731
    np.testing.assert_allclose(both_modes(lambda a: a * inner(a), x)[0], T)  # d(a + b) / db = 1


def test_a_variable_that_takes_no_gradient_moves_all_the_same():
    tangent, gx = both_modes(lambda a: a * a, Variable(A, requires_grad=False))
    np.testing.assert_allclose(tangent, 2 * A * T)
    np.testing.assert_allclose(gx, 2 * A)


def test_results_can_be_differentiated_by_what_made_the_primal():
    x = Variable(A)
    _, tangent = dbrdist.jvp(lambda v: v * v * v, (x * x,), (T,))  # 3 x^4 t
    F.sum(tangent).backward()
    np.testing.assert_allclose(x.grad, 12 * A**3 * T)
    x.cleargrad()
    F.sum(dbrdist.vjp(lambda v: v * v * v, x * x)[1](T)[0]).backward()
    np.testing.assert_allclose(x.grad, 12 * A**3 * T)


def test_a_graph_cut_within_the_function():
    def cut(v):
        w = v * v
        w.unchain_backward()
        return v * w

    np.testing.assert_allclose(both_modes(cut, Variable(A))[0], T * A**2)


def test_named_tuples_stay_named():
    kind = namedtuple("kind", "once twice")
    ys, tangents = dbrdist.jvp(lambda v: kind(v, v * 2.0), (A,), (T,))
    assert type(ys) is type(tangents) is kind
    np.testing.assert_allclose(tangents.twice.array, 2 * T)


def test_a_rule_that_computes_with_bare_arrays_is_refused():
    class Bare(dbrdist.FunctionNode):
        def forward(self, xs):
            self.retain_inputs((0,))
            return (xs[0] ** 2,)

        def backward(self, indexes, gys):
            return (Variable(2 * self.get_retained_inputs()[0].array * gys[0].array),)

    with pytest.raises(RuntimeError, match=r"Bare\.backward: the gradient of input 0 has no history"):
        dbrdist.jvp(lambda v: Bare().apply((v,))[0], (A,), (T,))
