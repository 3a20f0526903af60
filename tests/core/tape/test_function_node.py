"""Tests of dbrdist.core.tape.function_node."""

from __future__ import annotations

import contextlib
import copy
import pickle
import weakref

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import FunctionHook, FunctionNode, Variable, function_node
from dbrdist.core.tape import call, ops
from dbrdist.functions.activation import Softmax
from dbrdist.functions.math import LogSumExp
from dbrdist.functions.rectifier import ReLU
from dbrdist.utils import type_check
from tests.core.core_helpers import Twice
from tests.core.tape.tape_helpers import Square
from tests.each import each


def test_layouts_are_none():
    x = dbrdist.Variable(np.zeros((1, 2, 3, 3), np.float32))
    y = x + x
    assert y.as_layout(None) is y and y.layout is None
    assert y.creator_node.input_layouts == (None, None) and y.creator_node.output_layouts == (None,)
    y.creator_node.check_layout_forward((x.array, x.array))
    with pytest.raises(ValueError, match="as_layout: expected None, got 3; shapes are NCHW"):
        y.as_layout(3)


def test_type_checks_of_nodes_run_before_forward():
    class Node(function_node.FunctionNode):
        def check_type_forward(self, in_types):
            type_check.expect(in_types.size() == 1, in_types[0].ndim == 2)

        def forward(self, xs):
            assert xs[0].ndim == 2
            return xs

    Node().apply((np.ones((2, 2)),))
    with pytest.raises(
        type_check.InvalidType, match=r"Node \(Forward\)\n\nExpect: in_types\[0\].ndim == 2\nActual: 1 != 2"
    ):
        Node().apply((np.ones(2),))
    with dbrdist.using_config("type_check", False), pytest.raises(AssertionError):
        Node().apply((np.ones(2),))


def test_what_a_class_reads_a_copy_of_is_not_known_of_those_below_it():
    class Reads(function_node.FunctionNode):
        reads_copy_of = 1

        def forward(self, xs):
            return (xs[0],)

    class Below(Reads):
        pass

    class Again(Below):
        reads_copy_of = 0

    class Plain(function_node.FunctionNode):
        pass

    kinds = (Reads, Below, Again, Plain)
    assert [kind.reads_copy_of for kind in kinds] == [1, None, 0, None]
    assert Reads.written == (Reads.forward,) and Again.written == (Again.forward,)


@pytest.mark.parametrize("is_chainers", [False, True])
def test_variables_without_a_history_are_of_rank_0(is_chainers, monkeypatch):
    class Two(function_node.FunctionNode):
        def forward(self, xs):
            return (xs[0] * 2, None) if is_chainers else (xs[0] * 2, np.float64(3))

    monkeypatch.setattr(call, "as_chainer", [is_chainers])
    x = Variable(np.ones(3)) * 2
    with dbrdist.no_backprop_mode():
        y, other = Two().apply((x,))
    assert [v.array is None for v in (y, other)] == [False, is_chainers]
    if not is_chainers:
        assert all((v.node.rank, v.node.index, v.requires_grad, v.creator) == (0, 0, False, None) for v in (y, other))
    y, other = Two().apply((x,))
    assert (x.node.rank, y.node.rank, other.node.rank, y.node.index, other.node.index) == (1, 2, 2, 0, 1)


def test_a_node_that_was_pickled_has_all_that_it_had():
    x = Variable(np.array([[1.0, 2.0]]), name="x", requires_grad=False)
    for again in (pickle.loads(pickle.dumps(x.node)), copy.deepcopy(x.node)):
        assert again is not x.node
        for name in ("name", "shape", "dtype", "requires_grad", "rank", "index", "assigned", "gradient", "view"):
            assert getattr(again, name) == getattr(x.node, name)
        assert again.ndim == 2 and again.creator_node is None


@pytest.mark.parametrize("num", [0, 1, 3])
@pytest.mark.parametrize("way", ["backward", "grad", "grad of grads", "debug", "retain"])
def test_a_rule_with_another_number_of_gradients_is_named(num, way):
    class Counted(dbrdist.FunctionNode):
        def forward(self, xs):
            return (xs[0] + xs[1],)

        def backward(self, indexes, gys):
            return (gys[0],) * num

    xs = [Variable(np.array([1.0])), Variable(np.array([2.0]))]
    (y,) = Counted().apply(xs)
    words = rf"number of gradients returned from backward is incorrect: expected 2, one for each .* got {num}"
    with dbrdist.using_config("debug", way == "debug"), pytest.raises(ValueError, match=words):
        if way.startswith("grad"):
            dbrdist.grad([y], xs, enable_double_backprop=way == "grad of grads")
        else:
            y.backward(retain_grad=way == "retain")


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
    with pytest.raises(TypeError, match=r"Bare: .* expected a Variable \(or None\)"):
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


def test_ranks_count_the_functions_on_the_way():
    x = Variable(np.ones(3, "f"))
    y = F.relu(x) + np.ones(3, "f")
    assert (x.rank, F.relu(x).rank, y.rank, (2.0 - x).rank) == (0, 1, 2, 1)
    assert (np.ones(3, "f") * x).rank == 1
    with dbrdist.no_backprop_mode():
        assert F.relu(x).rank == 0


def test_outputs_of_numbers_become_arrays_of_no_axes():
    f = Twice()
    f.given = lambda x: (x.sum(), 2.5, 3)
    ys = f.apply((np.ones(3),))
    assert [y.array.item() for y in ys] == [3, 2.5, 3] and all(y.shape == () for y in ys)


def test_outputs_of_other_kinds_are_refused():
    f = Twice()
    for given, got in (
        (lambda x: x * 2, r"an array of shape \(3,\); write `return y,`"),
        (lambda x: x.sum(), r"an array of shape \(\); write `return y,`"),
        (lambda x: "text", "str$"),
        (lambda x: ("text",), "str in it$"),
    ):
        f.given = given
        with pytest.raises(TypeError, match=r"Twice: forward output must be a tuple of ndarrays, got " + got):
            f.apply((Variable(np.ones(3)),))


def test_a_node_without_a_rule_says_so():
    class Forwards(FunctionNode):
        def forward(self, xs):
            return (xs[0] + 1,)

    x = Variable(np.ones(1))
    (y,) = Forwards().apply((x,))
    with pytest.raises(NotImplementedError, match="Forwards has no gradient: it defines neither derive nor backward"):
        y.backward()
    with pytest.raises(NotImplementedError, match=r"Nothing defines neither forward\(xs\) nor forward_cpu\(xs\)"):
        type("Nothing", (FunctionNode,), {})().apply((x,))


def test_a_rule_that_returns_arrays_is_refused():
    class Arrays(Twice):
        def backward(self, indexes, gys):
            return (gys[0].array,)

    x = Variable(np.ones(1))
    (y,) = Arrays().apply((x,))
    with pytest.raises(TypeError, match=r"Arrays: type of gradients .* a Variable \(or None\) for input 0"):
        y.backward()


def test_a_rule_that_returns_too_many_is_refused():
    class Three(Twice):
        def backward(self, indexes, gys):
            return gys[0], gys[0], gys[0]

    (y,) = Three().apply((Variable(np.ones(1)),))
    with pytest.raises(ValueError, match=r"Three: number of gradients .* expected 1, .* inputs \(0,\), got 3"):
        y.backward()


@each(what=["input", "output"])
def test_a_rule_that_asks_for_what_was_not_kept_is_refused(what):
    class Forgetful(FunctionNode):
        def forward(self, xs):
            return (xs[0] + 1,)

        def backward(self, indexes, gys):
            return getattr(self, f"get_retained_{what}s")()

    (y,) = Forgetful().apply((Variable(np.ones(1)),))
    with pytest.raises(
        RuntimeError, match=rf"Forgetful: its rule asks for retained {what}s, but .* self.retain_{what}s"
    ):
        y.backward()


def test_what_was_kept_is_shown_by_its_place():
    class Two(FunctionNode):
        def forward(self, xs):
            self.retain_inputs((1,))
            self.retain_outputs((0,))
            return xs[0] * xs[1], xs[0] + xs[1]

    x0, x1 = np.full(1, 2.0), np.full(1, 3.0)
    f = Two()
    assert f.input_data == () and f.output_data == (None,) * f.num_outputs
    ys = f.apply((Variable(x0), Variable(x1)))
    assert f.input_data == (None, x1) and f.output_data[1] is None and f.output_data[0] is ys[0].array
    assert f.input_layouts == (None, None) and f.output_layouts == (None, None)


def test_hooks_of_one_function_have_names():
    class Hook(FunctionHook):
        name = "own"

        def __init__(self):
            self.told = []

        def added(self, function):
            self.told.append(("added", function))

        def deleted(self, function):
            self.told.append(("deleted", function))

    f, hook = Twice(), Hook()
    f.add_hook(hook)
    with pytest.raises(KeyError, match="Twice already has a hook named 'own'"):
        f.add_hook(Hook())
    f.add_hook(Hook(), "another")
    assert list(f.local_function_hooks) == ["own", "another"]
    f.delete_hook("own")
    assert hook.told == [("added", f), ("deleted", f)] and list(f.local_function_hooks) == ["another"]
    with Hook() as hook:
        assert hook.told == [("added", None)]
    assert hook.told == [("added", None), ("deleted", None)]


def var(*values, dtype=np.float64):
    return Variable(np.array(values, dtype))


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


def test_a_rule_that_forgets_a_gradient_is_refused():
    class Short(FunctionNode):
        def forward(self, xs):
            return (xs[0] + xs[1],)

        def derive(self, wanted, gys):
            return (gys[0],)

    (y,) = Short().apply((var(1.0), var(2.0)))
    with pytest.raises(ValueError, match=r"Short: number of gradients .* expected 2"):
        y.backward()


def test_a_function_node_records_one_call():
    node, x = Square(), var(1.0)
    node.apply((x,))
    with pytest.raises(RuntimeError, match="make a new one"):
        node.apply((x,))


def test_retained_outputs_are_shown():
    (y,) = (node := ops.exp.row.node()).apply((var(0.0),))
    assert node.output_data[0] is y.array


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


class Careless(dbrdist.FunctionNode):
    """Returns what it is given as it is told to."""

    def __init__(self, give):
        self.give = give

    def forward(self, xs):
        return self.give(xs[0])


def test_what_forward_returns_is_made_a_tuple_or_refused_while_hooks_look_too():
    x = np.arange(3, dtype=np.float32)
    for hooks in ((), (dbrdist.FunctionHook(),)):
        with contextlib.ExitStack() as stack:
            for hook in hooks:
                stack.enter_context(hook)
            (y,) = Careless(lambda a: [2 * a]).apply((x,))
            assert y.array.tolist() == [0, 2, 4]
            with pytest.raises(TypeError) as caught:
                Careless(lambda a: 2 * a).apply((x,))
            assert str(caught.value) == (
                "Careless: forward output must be a tuple of ndarrays, got an array of shape (3,); write `return y,`"
            )
            with pytest.raises(TypeError, match=r"^Careless: forward output must be a tuple of ndarrays, got str$"):
                Careless(lambda a: "a").apply((x,))
