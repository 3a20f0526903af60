"""Tests of dbrdist.core.tape.backprop."""

from __future__ import annotations

import gc
import tracemalloc
import weakref

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import FunctionNode, Parameter, Variable
from dbrdist.core.tape import ops
from dbrdist.core.tape.node import VariableNode, note_assignment
from tests.core.core_helpers import Notes
from tests.core.tape.tape_helpers import Square
from tests.each import each


@each(used=[(0,), (1,), (2, 0)])
def test_some_outputs_of_a_function_are_enough(used):
    x = Variable(np.ones(2, "f"))
    ys = Notes("three", [], 3).apply((x,))
    for k in used:
        ys[k].grad = np.full(2, 10, "f")
    dbrdist.core.tape.backprop.backward([ys[k] for k in used])
    assert x.grad.tolist() == [10 * sum(k + 1 for k in used)] * 2


def var(*values, dtype=np.float64):
    return Variable(np.array(values, dtype))


class Split(FunctionNode):
    """Three outputs, of which some may stay unused."""

    seen = None

    def forward(self, xs):
        return tuple(xs[0] * k for k in (1.0, 10.0, 100.0))

    def derive(self, wanted, gys):
        self.seen = [g is not None for g in gys]
        parts = [ops.mul(g, k) for g, k in zip(gys, (1.0, 10.0, 100.0)) if g is not None]
        total = parts[0]
        for part in parts[1:]:
            total = ops.add(total, part)
        return (total,)


def steps(model, n):
    for _ in range(n):
        x = Variable(np.ones((8, 64)))
        h = ops.tanh(ops.matmul(x, model["W"]))
        loss = ops.sum(h * h)
        for p in model.values():
            p.cleargrad()
        loss.backward()


def num_graph_objects():
    return sum(isinstance(o, (FunctionNode, VariableNode, Variable)) for o in gc.get_objects())


@pytest.mark.slow
def test_no_reference_cycles_over_100_steps_without_gc():
    model = {"W": Parameter(np.full((64, 64), 0.01))}
    gc.collect()
    gc.disable()
    try:
        steps(model, 5)
        model["W"].cleargrad()
        before_objects = num_graph_objects()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        steps(model, 100)
        model["W"].cleargrad()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        # CPython keeps up to 2000 freed tuples of each length, which counts here; one array a step would be 400 KB
        assert grown < 40_000, f"100 steps left {grown} bytes behind"
        assert num_graph_objects() == before_objects
    finally:
        gc.enable()


def test_no_reference_cycles_after_double_backprop_and_grad():
    gc.collect()
    gc.disable()
    try:
        x = var(1.0, 2.0)
        y = ops.sum(ops.exp(x) * x)
        (gx,) = dbrdist.grad([y], [x], enable_double_backprop=True)
        ops.sum(gx * gx).backward(enable_double_backprop=True)
        ends = [weakref.ref(y), weakref.ref(gx), weakref.ref(gx.creator), weakref.ref(x.grad_var)]
        del y, gx
        x.cleargrad()
        assert [r() for r in ends] == [None] * 4
    finally:
        gc.enable()


class Branches(FunctionNode):
    """y = a + b, whose rule gives each its own array, of which it keeps weak references"""

    def __init__(self, given):
        self.given = given

    def forward(self, xs):
        return (xs[0] + xs[1],)

    def derive(self, wanted, gys):
        gxs = gys[0].copy(), gys[0].copy()
        self.given += map(weakref.ref, gxs)
        return gxs


class Living(FunctionNode):
    """y = x; its rule notes how many of the arrays live"""

    def __init__(self, given, counts):
        self.given, self.counts = given, counts

    def forward(self, xs):
        return (xs[0].copy(),)

    def derive(self, wanted, gys):
        self.counts.append(sum(r() is not None for r in self.given))
        return (gys[0].copy(),)


def test_a_gradient_that_waited_dies_once_its_function_has_run():
    given, counts = [], []
    a, b = Variable(np.ones(3, "f")), Variable(np.ones(3, "f"))
    (b,) = Living(given, counts).apply((b,))
    for _ in range(3):
        (a,) = Living(given, counts).apply((a,))
    (y,) = Branches(given).apply((a, b))
    dbrdist.backward([y], [np.ones(3, "f")])
    assert counts == [2, 1, 1, 0]  # that of b waits beside the second function of the other branch


def test_arrays_live_only_while_retained_or_held():
    class Owner(np.ndarray):
        pass

    x = Variable(np.arange(3.0).view(Owner))
    h = x + 1.0  # nobody retains what an addition gives or takes
    kept = ops.exp(h)
    dropped, retained = weakref.ref(h.array), weakref.ref(kept.array)
    y = ops.sum(kept)
    del h, kept
    assert dropped() is None, "the sum's array is held by the graph although no rule needs it"
    assert retained() is not None, "exp needs its output"
    y.backward()
    np.testing.assert_array_equal(x.grad, np.exp(np.arange(3.0) + 1))
    del y
    assert retained() is None


@pytest.mark.slow
def test_graph_of_30000_nodes_without_recursion_and_its_deallocation():
    x = var(1.0)
    y = x
    for _ in range(30_000):  # thirty times Python's stack
        y = y + 1.0
    assert y.rank == 30_000
    y.backward()
    assert x.grad == [1.0]
    (gx,) = dbrdist.grad([y], [x])
    assert gx.array == [1.0]
    gone = weakref.ref(y.creator)
    del y
    assert gone() is None


def test_two_losses_on_one_graph():
    x = var(2.0, 3.0)
    h = x * x
    a, b = ops.sum(h), ops.sum(h * 10.0)
    a.backward()
    np.testing.assert_array_equal(x.grad, [4.0, 6.0])
    b.backward()
    np.testing.assert_array_equal(x.grad, [44.0, 66.0])


def test_backward_twice_adds_and_leaves_the_output_alone():
    x = var(3.0)
    y = x * x
    y.backward()
    y.backward()
    assert x.grad == [12.0] and y.grad == [1.0]


def test_a_variable_used_many_times():
    x = var(1.0, 2.0)
    y = ops.sum(x * x * x + x + x)
    y.backward()
    np.testing.assert_allclose(x.grad, [5.0, 14.0], rtol=1e-15)


def test_ranks_order_a_diamond_of_unequal_arms():
    x = var(2.0)
    long = x
    for _ in range(5):
        long = long * 1.5
    y = long * x + x
    y.backward()
    np.testing.assert_allclose(x.grad, 2 * 2.0 * 1.5**5 + 1, rtol=1e-15)


class Traced(FunctionNode):
    """The sum of weighted inputs, which says when its rule runs."""

    def __init__(self, weights, visits):
        self.weights, self.visits = weights, visits

    def forward(self, xs):
        return (sum(w * x for w, x in zip(self.weights, xs)),)

    def derive(self, wanted, gys):
        self.visits.append(self)
        return tuple(self.weights[i] * gys[0] for i in wanted)


def test_each_function_of_any_graph_is_visited_once_after_all_that_use_it():
    rng = np.random.default_rng(0)
    for _ in range(60):
        x, visits, functions = var(1.0), [], []
        values, slopes = [x], [1.0]  # and their derivatives by x, in closed form
        for _ in range(rng.integers(1, 25)):
            chosen = rng.integers(max(len(values) - 5, 0), len(values), rng.integers(1, 4))
            weights = rng.integers(-2, 3, len(chosen)).astype(float)
            functions.append(Traced(weights, visits))
            values.append(functions[-1].apply(tuple(values[i] for i in chosen))[0])
            slopes.append(sum(w * slopes[i] for w, i in zip(weights, chosen)))
        values[-1].backward()
        assert visits[0] is functions[-1] and len(visits) == len(set(visits))
        for function in visits:
            users = [v for v in visits if any(node.creator_node is function for node in v.inputs)]
            assert all(visits.index(v) < visits.index(function) for v in users)
        assert x.grad == slopes[-1]  # small integers: exact


def test_given_gradient_of_the_output():
    x = var(1.0, 2.0)
    y = x * 3.0
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        y.backward()
    y.grad = np.array([10.0, 100.0])
    y.backward()
    np.testing.assert_array_equal(x.grad, [30.0, 300.0])
    with pytest.raises(ValueError, match=r"grad: expected shape \(2,\)"):
        y.grad = np.zeros(3)
    with pytest.raises(ValueError, match="float32"):
        y.grad = np.zeros(2, np.float32)


def test_loss_scale_multiplies_the_gradients():
    x = var(3.0)
    (x * x).backward(loss_scale=128)
    assert x.grad == [768.0]


def test_retain_grad():
    x = var(2.0)
    h = x * x
    y = ops.exp(h)
    y.backward()
    assert h.grad is None
    x.cleargrad()
    y.backward(retain_grad=True)
    np.testing.assert_allclose(h.grad, np.exp(4.0))
    np.testing.assert_allclose(x.grad, 4 * np.exp(4.0))


def test_retain_grad_reaches_a_variable_whose_function_retained_it():
    """exp retains its output, and a higher-order pass revives it under a node of its own."""
    x = var(0.5)
    h = ops.exp(x)
    y = h * h
    (gx,) = dbrdist.grad([y], [x], enable_double_backprop=True)  # 2 h h: depends on h twice and on the revived h
    gx.backward(retain_grad=True)
    assert h.grad is not None
    np.testing.assert_allclose(x.grad, 4 * np.exp(1.0))


def test_multiple_outputs_with_unused_ones():
    x = var(1.0, 2.0)
    node = Split()
    a, b, c = node.apply((x,))
    ops.sum(a + c * 2.0).backward()
    np.testing.assert_array_equal(x.grad, [201.0, 201.0])
    assert node.seen == [True, False, True]
    assert b.grad is None
    x.cleargrad()
    (b * 1.0 + b).grad = None
    y = b + b
    y.grad = np.ones(2)
    y.backward()
    np.testing.assert_array_equal(x.grad, [20.0, 20.0])


def test_backward_from_several_outputs():
    x = var(1.0)
    a = x * 2.0
    b = a * 3.0
    dbrdist.backward([a, b], [np.array([10.0]), np.array([1.0])])
    assert x.grad == [26.0]


def test_a_gradient_of_another_shape_is_refused():
    class Wrong(Square):
        def backward(self, indexes, grad_outputs):
            return (ops.sum(grad_outputs[0]),)

    (y,) = Wrong().apply((var(1.0, 2.0),))
    y.grad = np.ones(2)
    with pytest.raises(
        ValueError, match=r"Wrong: shape of gradients returned from backward is incorrect: expected \(2,\) for input 0"
    ):
        y.backward()


def test_grad_equals_backward_and_touches_nothing():
    x, w = var(1.0, 2.0), var(3.0, 4.0)
    y = ops.sum(ops.exp(x * w) * x)
    y.backward()
    expected = x.grad, w.grad
    x.cleargrad()
    w.cleargrad()
    got = dbrdist.grad([y], [x, w])
    assert x.grad is None and w.grad is None
    for g, e in zip(got, expected):
        np.testing.assert_array_equal(g.array, e)


def test_grad_through_and_with_respect_to_intermediates():
    x = var(2.0)
    h = x * x
    y = h * h
    gh, gx, gy = dbrdist.grad([y], [h, x, y])
    assert (gh.array, gx.array, gy.array) == ([8.0], [32.0], [1.0])
    assert dbrdist.grad([y], [var(1.0)]) == [None]


def test_grad_visits_only_functions_on_the_way():
    x, other = var(1.0), var(1.0)
    node = Split()
    a, _, _ = node.apply((other,))
    dbrdist.grad([x * 2.0 + a], [x])
    assert node.seen is None


def test_grad_arguments():
    x = var(3.0)
    y = x * x
    (g,) = dbrdist.grad([y], [x], grad_outputs=[var(10.0)], grad_inputs=[var(0.5)], set_grad=True)
    assert g.array == [60.5] and x.grad == [60.5]
    h = x * 2.0
    dbrdist.grad([h * h], [x], retain_grad=True)
    assert h.grad == [12.0]
    with pytest.raises(TypeError, match="outputs: expected a tuple or list"):
        dbrdist.grad(y, [x])
    (scaled,) = dbrdist.grad([y], [x], loss_scale=8)
    assert scaled.array == [48.0]


def test_unchain_makes_a_leaf():
    x = var(2.0)
    h = x * x
    y = h * 3.0
    h.unchain()
    assert h.creator is None and h.rank == 0
    y.backward()
    assert x.grad is None and h.grad == [3.0]


def test_unchain_backward_for_truncated_backpropagation_through_time():
    w = Parameter(np.array([0.5]))
    h = Variable(np.array([1.0]))
    held, total = None, 0.0
    for step in range(6):
        h = ops.tanh(h * w)
        total = total + ops.sum(h)
        if step == 0:
            held = weakref.ref(h.creator)
        if step % 3 == 2:
            w.cleargrad()
            total.backward()
            total.unchain_backward()
            total = 0.0
    assert held() is None, "truncation must free the functions of earlier steps"
    # the second window alone, by hand
    start = np.array(1.0)
    for _ in range(3):
        start = np.tanh(start * 0.5)
    h, dh, expected = start, 0.0, 0.0
    for _ in range(3):
        new = np.tanh(h * 0.5)
        dh = (1 - new**2) * (h + 0.5 * dh)
        h, expected = new, expected + dh
    np.testing.assert_allclose(w.grad, [expected], rtol=1e-13)


def test_unchaining_frees_the_arrays():
    class Owner(np.ndarray):
        pass

    h = Variable(np.ones(3).view(Owner)) * 2.0
    y = ops.log(h)
    array = weakref.ref(h.array)
    del h
    assert array() is not None, "log retains its input"
    function = y.creator
    y.unchain_backward()  # y itself lives on, as a recurrent state does
    assert array() is None and not function.inputs and y.creator is None


def test_no_backprop_and_force_backprop_modes():
    x = var(1.0)
    with dbrdist.no_backprop_mode():
        y = x * 2.0
        assert y.creator is None and not y.requires_grad
        with dbrdist.force_backprop_mode():
            z = x * 2.0
            assert z.creator is not None
            z.backward()
    assert x.grad == [2.0]
    assert (x * 2.0).creator is not None


def test_nothing_is_recorded_without_requires_grad():
    x = Variable(np.ones(2), requires_grad=False)
    y = x * 2.0
    assert y.creator is None and not y.requires_grad
    w = var(1.0, 1.0)
    (w * y).grad = None
    z = ops.sum(w * y)
    z.backward()
    assert x.grad is None


def test_debug_mode_finds_nan_forward_and_backward():
    class BadGradient(Square):
        def backward(self, indexes, grad_outputs):
            return (grad_outputs[0] * float("nan"),)

    class BadRule(Square):
        def derive(self, wanted, gys):
            return (np.full(1, np.nan),)

    x = var(-1.0)
    with np.errstate(invalid="ignore"):
        ops.log(x)
        with dbrdist.DebugMode(True), pytest.raises(RuntimeError, match=r"NaN in output 0 of .* log"):
            ops.log(x)
    (y,) = BadGradient().apply((x,))
    with (
        dbrdist.DebugMode(True),
        pytest.raises(RuntimeError, match="NaN in output 0 of the forward computation of mul"),
    ):
        y.backward()
    (y,) = BadRule().apply((x,))
    with (
        dbrdist.DebugMode(True),
        pytest.raises(RuntimeError, match=r"NaN is detected on backward .* BadRule: .* input 0$"),
    ):
        y.backward()


def test_debug_mode_says_where_nan_comes_from():
    class BadRule(dbrdist.FunctionNode):
        def forward(self, xs):
            return (xs[0] + xs[1],)

        def derive(self, wanted, gys):
            return tuple(gys[0] if i == 0 else gys[0] * np.nan for i in wanted)

    def words_of(function):
        with dbrdist.DebugMode(True), pytest.raises(RuntimeError) as raised:
            function()
        return str(raised.value)

    one, nan = var(1.0), var(float("nan"))
    said = words_of(lambda: BadRule().apply((one, nan)))
    assert said.startswith("NaN in output 0 of the forward computation of BadRule; it comes from input 1; called at ")
    assert f"{__file__}:" in said and said.endswith(": said = words_of(lambda: BadRule().apply((one, nan)))")
    with np.errstate(invalid="ignore"):
        assert "log; no input has any; called at" in words_of(lambda: ops.log(var(-1.0)))
    with dbrdist.DebugMode(True):
        (y,) = BadRule().apply((one, var(2.0)))  # the line that made the graph, not that of backward
    said = words_of(y.backward)
    assert (
        said.startswith("NaN is detected on backward computation of BadRule: in the gradient of input 1; called at ")
        and "the line that made" in said
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: a + b,
        lambda a, b: ops.sum(a) + ops.sum(b),
        lambda a, b: ops.reshape(a, (1, 2)) + ops.reshape(b, (1, 2)),
        lambda a, b: ops.concat([a, b], axis=0),
    ],
)
def test_leaf_gradients_share_no_memory(function):
    a, b = var(1.0, 2.0), var(3.0, 4.0)
    y = function(a, b)
    y.grad = seed = np.ones(y.shape)
    y.backward()
    assert not np.shares_memory(a.grad, b.grad) and not np.shares_memory(a.grad, seed)
    a.grad += 7.0  # as a hook that decays weights does
    np.testing.assert_array_equal(b.grad, np.ones(2))
    np.testing.assert_array_equal(y.grad, np.ones(y.shape))


def test_backward_refuses_a_parameter_that_was_assigned_after_forward():
    x, w = Variable(np.ones((2, 3), "f")), Variable(np.ones((4, 3), "f"), name="W")
    y = F.sum(F.linear(x, w))
    other = F.sum(F.linear(x, Variable(np.ones((4, 3), "f"))))
    note_assignment(w)
    other.backward()  # it never saw w
    with pytest.raises(RuntimeError, match=r"parameter W of shape \(4, 3\) \(input 1\) was assigned new values"):
        y.backward()
    x.cleargrad()
    F.sum(F.linear(x, w)).backward()
    np.testing.assert_array_equal(x.grad, np.full((2, 3), 4))


class Widening(dbrdist.FunctionNode):
    """2 x, whose rule gives its gradient in float64, or of another shape."""

    def __init__(self, shape=None):
        self.shape = shape

    def forward(self, xs):
        return (xs[0] * 2,)

    def backward(self, indexes, gys):
        gx = F.cast(gys[0], np.float64) * 2
        return (gx if self.shape is None else F.reshape(gx, self.shape),)


WAYS = {
    "backward": lambda x, y: (y.backward(), x.grad_var)[1],
    "retain_grad": lambda x, y: (y.backward(retain_grad=True), x.grad_var)[1],
    "enable_double_backprop": lambda x, y: (y.backward(enable_double_backprop=True), x.grad_var)[1],
    "grad": lambda x, y: dbrdist.grad([y], [x])[0],
    "grad to be derived": lambda x, y: dbrdist.grad([y], [x], enable_double_backprop=True)[0],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_of_another_type_takes_that_of_its_input_in_every_way_backward(way):
    x = Variable(np.ones((2, 3), np.float32))
    (h,) = Widening().apply((x * 1,))
    gx = WAYS[way](x, F.sum(h))
    assert gx.dtype == np.float32
    np.testing.assert_array_equal(gx.array, np.full((2, 3), 2, np.float32))
    (h,) = Widening().apply((x,))
    assert WAYS[way](x, F.sum(h)).dtype == np.float32


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_gradient_of_another_shape_is_refused_in_every_way_backward(way, dtype):
    x = Variable(np.ones((2, 3), dtype))
    (h,) = Widening((3, 2)).apply((x,))
    with pytest.raises(ValueError, match=r"expected \(2, 3\) for input 0, got \(3, 2\)"):
        WAYS[way](x, F.sum(h))


@each(is_variable=[False, True], higher=[False, True])
def test_a_given_gradient_of_another_type_becomes_one_of_the_outputs(is_variable, higher):
    x = Variable(np.ones(3, np.float32))
    given = np.arange(3, dtype=np.float64)
    (gx,) = dbrdist.grad(
        [x * 2], [x], grad_outputs=[Variable(given) if is_variable else given], enable_double_backprop=higher
    )
    assert gx.dtype == np.float32 and gx.array.tolist() == [0, 2, 4]
