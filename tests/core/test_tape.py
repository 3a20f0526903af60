"""The tape: what backward computes, what the graph keeps alive, and how it dies."""

from __future__ import annotations

import copy
import gc
import pickle
import tracemalloc
import weakref

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import FunctionHook, FunctionNode, Parameter, Variable
from dbrdist.core import ops
from dbrdist.core.node import VariableNode, note_assignment


def var(*values, dtype=np.float64):
    return Variable(np.array(values, dtype))


class Square(FunctionNode):
    """A user's function in Chainer's form."""

    def forward(self, inputs):
        self.retain_inputs((0,))
        (x,) = inputs
        return (x * x,)

    def backward(self, target_input_indexes, grad_outputs):
        (x,) = self.get_retained_inputs()
        (gy,) = grad_outputs
        return (2.0 * x * gy,)


class Ratio(FunctionNode):
    """x / y, which retains its inputs in another order than they came."""

    def forward(self, inputs):
        self.retain_inputs((1, 0))
        x, y = inputs
        return (x / y,)

    def backward(self, target_input_indexes, grad_outputs):
        y, x = self.get_retained_inputs()
        (gy,) = grad_outputs
        gradients = (gy / y, -gy * x / (y * y))
        return tuple(gradients[i] for i in target_input_indexes)


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


# ---- how the graph dies ---------------------------------------------------------------------------------------------


class Marked(Square):
    """A user's function with attributes of its own."""

    def __init__(self, mark=None):
        self.mark = mark


def test_a_function_has_no_record_before_its_call():
    function = Marked(3)
    assert function.inputs is None and function.rank == 0 and function.input_data == () == function.retained_inputs()
    (y,) = function.apply((var(2.0),))
    assert len(function.inputs) == 1 and function.mark == 3 and weakref.ref(function)() is y.creator


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))])
def test_copies_of_a_function_have_its_attributes_and_its_record(duplicate):
    function = Marked([1])
    (y,) = function.apply((var(2.0, 3.0),))
    other = duplicate(function)
    assert type(other) is Marked and other.mark == [1] and other.rank == 0 and other.wanted == (0,)
    np.testing.assert_array_equal(other.input_data[0], [2.0, 3.0])
    assert duplicate(Marked(2)).apply((var(3.0),))[0].array == 9.0
    assert [v.array for v in other.twin().apply((y,))] == [pytest.approx([16.0, 81.0])]


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


@pytest.mark.parametrize("higher", [False, True])
def test_inputs_are_retained_in_the_order_that_was_asked_for(higher):
    x, y = var(3.0), var(2.0)
    Ratio().apply((x, y))[0].backward(enable_double_backprop=higher)
    assert (x.grad[0], y.grad[0]) == (0.5, -0.75)
    z = var(2.0)
    Ratio().apply((np.array([3.0]), z))[0].backward(enable_double_backprop=higher)
    assert z.grad[0] == -0.75


@pytest.mark.parametrize("num_outputs", [1, 2])
@pytest.mark.parametrize("verb", ["retain_inputs", "retain_outputs"])
@pytest.mark.parametrize("places", [(2,), (0, 1, 2), ("x",)])
def test_places_to_retain_that_are_not_there(verb, places, num_outputs):
    class Wrong(FunctionNode):
        def forward(self, xs):
            getattr(self, verb)(places)
            return xs[:num_outputs]

    with pytest.raises(IndexError, match=rf"Wrong\.{verb}: expected places from 0 to \d, got \("):
        Wrong().apply((var(1.0), var(2.0)))


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


# ---- backward -------------------------------------------------------------------------------------------------------


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


# ---- a user's function in Chainer's form ----------------------------------------------------------------------------


def test_chainer_function_node_unchanged():
    x = var(1.0, -2.0, 3.0)
    (y,) = Square().apply((x,))
    y.grad = np.ones(3)
    y.backward()
    np.testing.assert_array_equal(x.grad, [2.0, -4.0, 6.0])
    (gx,) = dbrdist.grad([Square().apply((x,))[0]], [x], enable_double_backprop=True)
    (ggx,) = dbrdist.grad([gx], [x])
    np.testing.assert_array_equal(ggx.array, [2.0, 2.0, 2.0])


def test_chainer_backward_records_only_in_a_higher_order_pass():
    modes = []

    class Watch(Square):
        def backward(self, indexes, grad_outputs):
            modes.append((dbrdist.config.enable_backprop, (grad_outputs[0] * 1.0).creator is not None))
            return super().backward(indexes, grad_outputs)

    x = var(1.0)
    (y,) = Watch().apply((x,))
    y.grad_var = Variable(np.ones(1))  # a Variable that takes a gradient
    y.backward()
    y.backward(enable_double_backprop=True)
    assert modes == [(False, False), (True, True)]


def test_chainer_backward_sees_only_wanted_inputs():
    class Mul(FunctionNode):
        def forward_cpu(self, inputs):
            self.retain_inputs((0, 1))
            return (inputs[0] * inputs[1],)

        def backward(self, indexes, grad_outputs):
            self.asked = indexes
            a, b = self.get_retained_inputs()
            assert isinstance(a, Variable) and isinstance(grad_outputs[0], Variable)
            return tuple((b * grad_outputs[0], a * grad_outputs[0])[i] for i in indexes)

    node, b = Mul(), var(5.0)
    (y,) = node.apply((np.array([2.0]), b))
    y.backward()
    assert node.asked == (1,) and b.grad == [2.0]
    assert node.output_data == (None,)
    assert node.backward_accumulate((1,), (Variable(np.ones(1)),), (b,))[0].array == [7.0]


def test_a_gradient_of_another_shape_is_refused():
    class Wrong(Square):
        def backward(self, indexes, grad_outputs):
            return (ops.sum(grad_outputs[0]),)

    (y,) = Wrong().apply((var(1.0, 2.0),))
    y.grad = np.ones(2)
    with pytest.raises(ValueError, match=r"Wrong.backward: expected a gradient of shape \(2,\) for input 0"):
        y.backward()


def test_a_rule_that_forgets_a_gradient_is_refused():
    class Short(FunctionNode):
        def forward(self, xs):
            return (xs[0] + xs[1],)

        def derive(self, wanted, gys):
            return (gys[0],)

    (y,) = Short().apply((var(1.0), var(2.0)))
    with pytest.raises(ValueError, match="Short: expected 2 gradients"):
        y.backward()


def test_a_function_node_records_one_call():
    node, x = Square(), var(1.0)
    node.apply((x,))
    with pytest.raises(RuntimeError, match="make a new one"):
        node.apply((x,))


def test_retained_outputs_are_shown():
    (y,) = (node := ops.exp.row.node()).apply((var(0.0),))
    assert node.output_data[0] is y.array


# ---- grad() ---------------------------------------------------------------------------------------------------------


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


# ---- cutting --------------------------------------------------------------------------------------------------------


class NamedAsOurs(FunctionNode):
    """A user's linear function, whose attributes have names that come to mind first."""

    is_linear = True

    def __init__(self, factor):
        self._saved = self._x = factor

    def forward(self, xs):
        self._xs, self._ys, self._inputs = list(xs), "anything", 5
        return (xs[0] * self._saved,)

    def derive(self, wanted, gys):
        assert (len(self._xs), self._ys, self._inputs) == (1, "anything", 5)
        return (gys[0] * self._saved,)


def test_a_function_may_name_its_attributes_as_it_likes():
    x = var(2.0)
    y = NamedAsOurs(3.0).apply((x,))[0]
    y.backward()
    assert y.array.tolist() == [6] and x.grad.tolist() == [3]
    _, tangent = dbrdist.jvp(lambda v: NamedAsOurs(3.0).apply((v,))[0], (x.array,), (np.array([5.0]),))
    assert tangent.array.tolist() == [15]
    again = pickle.loads(pickle.dumps(y.creator))
    assert (again._saved, again._ys) == (3, "anything")
    y.unchain()
    assert y.creator is None


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


# ---- modes ----------------------------------------------------------------------------------------------------------


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
    with dbrdist.DebugMode(True), pytest.raises(RuntimeError, match=r"NaN in the gradient of input 0 of BadRule$"):
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
    assert said.startswith("NaN in the gradient of input 1 of BadRule; called at ") and "the line that made" in said


# ---- hooks ----------------------------------------------------------------------------------------------------------


class Recorder(FunctionHook):
    name = "Recorder"

    def __init__(self):
        self.calls = []

    def forward_preprocess(self, function, in_data):
        self.calls.append(("f<", function.label, len(in_data)))

    def forward_postprocess(self, function, in_data):
        self.calls.append(("f>", function.label, len(in_data)))

    def backward_preprocess(self, function, in_data, out_grad):
        self.calls.append(("b<", function.label, float(out_grad[0][0])))

    def backward_postprocess(self, function, in_data, out_grad):
        self.calls.append(("b>", function.label, float(out_grad[0][0])))


def test_function_hooks_of_the_thread_and_of_one_function():
    hook = Recorder()
    with hook:
        x = var(3.0)
        y = -(x * x)
        y.backward()
        with pytest.raises(KeyError, match="already active"), Recorder():
            pass
    assert hook.calls == [
        ("f<", "mul", 2), ("f>", "mul", 2), ("f<", "neg", 1), ("f>", "neg", 1),
        ("b<", "neg", 1.0), ("b>", "neg", 1.0), ("b<", "mul", -1.0), ("b>", "mul", -1.0),
    ]  # fmt: skip
    _ = x * x
    assert len(hook.calls) == 8
    local, node = Recorder(), Square()
    node.add_hook(local)
    node.apply((x,))[0].backward()
    assert [c[:2] for c in local.calls] == [("f<", "Square"), ("f>", "Square"), ("b<", "Square"), ("b>", "Square")]
    node.delete_hook("Recorder")
    assert node.local_function_hooks == {}


# ---- whose memory a gradient is -------------------------------------------------------------------------------------


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
    with pytest.raises(NotImplementedError, match="truth value"):
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
    a.zerograd()
    assert a.grad == [0.0]


def test_backward_refuses_a_parameter_that_was_assigned_after_forward():
    x, w = Variable(np.ones((2, 3), "f")), Variable(np.ones((4, 3), "f"), name="W")
    y = F.sum(F.linear(x, w))
    other = F.sum(F.linear(x, Variable(np.ones((4, 3), "f"))))
    note_assignment(w.node)
    other.backward()  # it never saw w
    with pytest.raises(RuntimeError, match=r"parameter W of shape \(4, 3\) \(input 1\) was assigned new values"):
        y.backward()
    x.cleargrad()
    F.sum(F.linear(x, w)).backward()
    np.testing.assert_array_equal(x.grad, np.full((2, 3), 4))


def test_a_variable_takes_its_gradient_along():
    v = Variable(np.ones(2))
    v.to_cpu()
    assert v.grad is None
    v.grad = np.array([1.0, 2.0])
    v.to_device("@numpy")
    assert v.grad.tolist() == [1, 2] and v.array.tolist() == [1, 1]


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
    with pytest.raises(ValueError, match=r"expected a gradient of shape \(2, 3\) for input 0, got shape \(3, 2\)"):
        WAYS[way](x, F.sum(h))
