"""What variables, nodes and links do besides forward and backward: each member, each condition both ways."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Chain, ChainList, Function, FunctionHook, FunctionNode, Link, Parameter, Variable
from tests.each import each


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


# ---- variables ------------------------------------------------------------------------------------------------------


def test_a_gradient_given_at_the_start_is_kept_and_checked():
    assert Variable(ones(2), grad=2 * ones(2)).grad.tolist() == [2, 2]
    assert Variable(ones(2)).grad is None
    with pytest.raises(
        ValueError, match=r"grad: expected shape \(2,\) and dtype float32 to match the array, got shape \(3"
    ):
        Variable(ones(2), grad=ones(3))


def test_gradients_are_refused_by_kind_shape_and_type():
    x = Variable(ones(2))
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
    assert x.debug_print().splitlines()[1:] == ["- data: None", "- grad: None"]
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
    assert Variable(ones(0)).debug_print().splitlines()[1].endswith("empty")
    with pytest.raises(NotImplementedError, match="a Variable has no truth value"):
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


# ---- functions of users ---------------------------------------------------------------------------------------------


class Twice(FunctionNode):
    given: object = None

    def forward(self, xs):
        self.retain_inputs((0,))
        return [xs[0] * 2] if self.given is None else self.given(xs[0])

    def backward(self, indexes, gys):
        return gys[0] * 2


def test_outputs_may_be_lists_and_gradients_single():
    x = Variable(np.ones(3))
    (y,) = Twice().apply((x,))
    y.grad = np.arange(3.0)
    y.backward()
    assert y.array.tolist() == [2, 2, 2] and x.grad.tolist() == [0, 2, 4]


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
        with pytest.raises(TypeError, match=r"Twice.forward: expected a tuple of arrays, got " + got):
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
    with pytest.raises(TypeError, match=r"Arrays.backward: expected a Variable \(or None\) as the gradient of input 0"):
        y.backward()


def test_a_rule_that_returns_too_many_is_refused():
    class Three(Twice):
        def backward(self, indexes, gys):
            return gys[0], gys[0], gys[0]

    (y,) = Three().apply((Variable(np.ones(1)),))
    with pytest.raises(ValueError, match=r"Three: expected 1 gradients, .* inputs \(0,\), but its rule returned 3"):
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


# ---- functions of the old style -------------------------------------------------------------------------------------


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


# ---- links ----------------------------------------------------------------------------------------------------------


def test_a_persistent_value_that_becomes_a_parameter_is_listed_once():
    link = Link()
    link.add_persistent("W", ones(2))
    link.register_persistent("W")
    assert link._persistent == ["W"]
    with link.init_scope():
        link.W = Parameter(ones(2))
    assert link._persistent == [] and [n for n, _ in link.namedparams()] == ["/W"]
    with link.init_scope():
        link.W = Parameter(ones(3))
    assert [p.shape for p in link.params()] == [(3,)]
    del link.W
    assert list(link.params()) == []
    with pytest.raises(AttributeError, match="Link: expected an attribute 'W' to register, there is none"):
        link.register_persistent("W")


def test_a_single_link_lists_itself_unless_it_is_left_out():
    link = L.Linear(2, 3)
    assert list(link.links()) == [link] and list(link.links(skipself=True)) == []
    assert list(link.namedlinks()) == [("/", link)] and list(link.namedlinks(skipself=True)) == []
    assert list(link.children()) == []
    chain = Chain(a=link)
    assert list(chain.links(skipself=True)) == [link] and list(chain.links()) == [chain, link]
    assert list(chain.namedlinks(skipself=True)) == [("/a", link)]


def test_updates_are_enabled_and_disabled_where_there_is_a_rule():
    link = L.Linear(2, 3)
    link.enable_update()
    link.disable_update()
    assert not link.update_enabled
    dbrdist.optimizers.SGD().setup(link)
    assert link.update_enabled
    link.W.update_rule.enabled = False
    assert link.update_enabled
    link.disable_update()
    assert not link.update_enabled and not link.b.update_rule.enabled
    link.enable_update()
    assert link.W.update_rule.enabled and link.b.update_rule.enabled


@each(kind=[Chain, ChainList, L.Linear])
def test_modes_of_copies(kind):
    link = kind(2, 3) if kind is L.Linear else kind()
    for mode in ("share", "copy", "init"):
        assert type(link.copy(mode)) is kind
        assert len(link.repeat(2, mode)) == 2
    for call in (link.copy, lambda mode: link.repeat(1, mode)):
        with pytest.raises(ValueError, match="mode: expected 'share', 'copy' or 'init', got 'deep'"):
            call("deep")
    assert len(link.repeat(0)) == len(link.repeat(-1)) == 0


def test_copyparams_waits_for_what_has_no_values_and_leaves_statistics_out():
    source, target = L.Linear(None, 3), L.Linear(None, 3)
    target.copyparams(source)
    assert not target.W.is_initialized
    source(ones(1, 2))
    target.copyparams(source)
    np.testing.assert_array_equal(target.W.array, source.W.array)
    mine, theirs = L.BatchNormalization(2), L.BatchNormalization(2)
    theirs.avg_mean[...] = 3
    theirs.N = 7
    mine.copyparams(theirs, copy_persistent=False)
    assert mine.avg_mean.tolist() == [0, 0] and mine.N == 0
    mine.copyparams(theirs)
    assert mine.avg_mean.tolist() == [3, 3] and mine.N == 7 and mine.avg_mean is not theirs.avg_mean
    with pytest.raises(ValueError, match=r"copyparams: avg_mean: expected shape \(2,\), got \(3,\)"):
        mine.avg_mean, theirs.avg_mean = mine.avg_mean, ones(3)
        mine.copyparams(theirs)


def test_parameters_given_to_a_link_have_types():
    link = Link(a=(2, 3), b=((4,), np.float64), c=5)
    assert [(p.name, p.shape, p.dtype.name) for p in link.params()] == [
        ("a", (2, 3), "float32"), ("b", (4,), "float64"), ("c", (5,), "float32")
    ]  # fmt: skip
    with pytest.raises(AttributeError, match="Link: cannot register parameter 'a': the attribute exists"):
        link.add_param("a", (1,))
    with pytest.raises(NotImplementedError, match=r"Link defines no from_params\(\)"):
        Link.from_params()
    with pytest.raises(TypeError, match=r"Link defines no forward\(\), so it cannot be called"):
        link(1)


def test_shared_parameters_are_added_and_counted_once():
    one = Chain(a=L.Linear(2, 2))
    one.add_link("b", one.a)
    other = copy.deepcopy(one)
    for p in other.params():
        p.grad = np.ones_like(p.array)
    one.addgrads(other)
    assert one.a.b.grad.tolist() == [1, 1] and one.count_params() == 6
    one.zerograds()
    assert one.a.b.grad.tolist() == [0, 0]
    one.cleargrads()
    assert one.a.b.grad is None
