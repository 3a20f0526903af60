"""Single parts of what records and walks graphs: announcements, old functions, nodes, rows, checks and drawings."""

from __future__ import annotations

import copy
import pickle
import types

import numpy as np
import pytest
from dbrdist.computational_graph import ComputationalGraph, DotNode, build_computational_graph

import dbrdist
import dbrdist.functions as F
from dbrdist import FunctionNode, Parameter, Variable
from dbrdist.core import backprop, flat, gradient_check, rows
from dbrdist.core.config import DebugMode
from dbrdist.core.hdf5 import HDF5Serializer
from dbrdist.core.sparse import CooMatrix, get_order, to_coo
from dbrdist.core.static_graph import static_code, static_graph
from dbrdist.utils import type_check as T
from tests.each import each

# ---- a pass that announces gradients --------------------------------------------------------------------------------


class Hears:
    """Notes what is announced, with the gradient at that time."""

    def __init__(self, **parameters):
        self.names = {p.node: name for name, p in parameters.items()}
        self.parameters = parameters
        self.heard = []

    def expect(self, used):
        self.heard.append(sorted(self.names[node] for node in used))

    def ready(self, node):
        name = self.names[node]
        self.heard.append((name, self.parameters[name].grad.tolist()))


class Mine(FunctionNode):
    """A user's function: y = 3 x."""

    def forward(self, xs):
        return (xs[0] * 3.0,)

    def backward(self, indexes, gys):
        return (gys[0] * 3.0,)


class Old(dbrdist.Function):
    """The same in the old style."""

    def forward(self, xs):
        return (xs[0] * 3.0,)

    def backward(self, xs, gys):
        return (gys[0] * 3.0,)


Old.__module__ = "dbrdist.of_a_user"  # a program may call itself anything: an old function is still a user's


def parameters(*values):
    made = [Parameter(np.array([value])) for value in values]
    flat.gather(made)
    return made


def test_gradients_are_announced_as_soon_as_they_are_complete():
    a, b, c = parameters(2.0, 5.0, 7.0)
    unused = Parameter(np.array([1.0]))  # and not in flat memory
    hears = Hears(a=a, b=b, c=c)
    h = a * a * unused
    backprop.backward([F.sum(h * b * a + c)], listener=hears)
    assert hears.heard[0] == ["a", "b", "c"]
    assert [name for name, _ in hears.heard[1:]] == ["c", "b", "a"]  # a is in three functions, the last one behind all
    assert dict(hears.heard[1:]) == {"a": [3 * 4 * 5.0], "b": [8.0], "c": [1.0]}
    assert unused.grad == [40.0]


@each(kind=["node", "old"], count=[1, 2])
def test_nothing_is_announced_before_the_last_function_of_a_user(kind, count):
    a, b, c = parameters(2.0, 5.0, 7.0)
    hears = Hears(a=a, b=b, c=c)
    h = a
    for _ in range(count):
        h = (Mine().apply((h,))[0] if kind == "node" else Old()(h)) * b
    backprop.backward([F.sum(h * c)], listener=hears)
    assert hears.heard[0] == ["a", "b", "c"] and len(hears.heard) == 4
    assert dict(hears.heard[1:]) == {
        "a": [7 * 15.0**count], "b": [14 * 3.0**count * count * 5.0 ** (count - 1)], "c": [2 * 15.0**count]
    }  # fmt: skip
    order = [name for name, _ in hears.heard[1:]]
    assert order.index("c") < order.index("b") < order.index("a")


def test_a_shared_gradient_is_nobodys_own_in_a_pass_with_a_listener():
    (a,) = parameters(2.0)
    x = Variable(np.array([[1.0, -2.0], [3.0, 4.0]]))
    y = x * a.array
    z = F.relu(y) + F.relu(y * 1.0) * 3.0 + y
    backprop.backward([F.sum(z * a.array)], listener=Hears(a=a))
    np.testing.assert_array_equal(x.grad, [[20, 4], [20, 20]])


# ---- functions of the old style -------------------------------------------------------------------------------------


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


# ---- nodes and graphs -----------------------------------------------------------------------------------------------


def test_a_node_that_was_pickled_has_all_that_it_had():
    x = Variable(np.array([[1.0, 2.0]]), name="x", requires_grad=False)
    for again in (pickle.loads(pickle.dumps(x.node)), copy.deepcopy(x.node)):
        assert again is not x.node
        for name in ("name", "shape", "dtype", "requires_grad", "rank", "index", "assigned", "gradient", "view"):
            assert getattr(again, name) == getattr(x.node, name)
        assert again.ndim == 2 and again.creator_node is None


def test_a_drawing_shows_variables_with_names_unless_told_otherwise():
    x = Variable(np.zeros((2, 3), np.float32), name="line\nbreak")
    y = F.sum(F.exp(x))
    node = DotNode(x.node, {"color": "red"})
    assert node.node is x.node and node.id_ == id(x.node)
    assert node.attribute == {
        "shape": "octagon", "fillcolor": "#E0E0E0", "style": "filled", "color": "red",
        "label": "line\nbreak: (2, 3), float32",
    }  # fmt: skip
    assert 'label="line\\nbreak: (2, 3), float32"' in str(node)
    assert DotNode(x.node, show_name=False).label == "(2, 3), float32" == DotNode(F.exp(x).node).label
    assert DotNode(y.node).label == "float32" and DotNode(y.creator_node).attribute["shape"] == "record"
    graph = build_computational_graph([y])
    for plain in (graph, ComputationalGraph(graph.nodes, graph.edges)):
        assert len(plain.nodes) == 5 and "line\\nbreak" in plain.dump() and "rankdir=TB" in plain.dump()
    alone = ComputationalGraph(graph.nodes, graph.edges, remove_variable=True, show_name=False)
    assert len(alone.nodes) == 2 and len(alone.edges) == 1 and "break" not in alone.dump()


def test_what_has_no_gradient_takes_none():
    x = Variable(np.array([7.0]))
    assert not (x // 2.0).requires_grad and (x // 2.0).array == 3
    _, pull = dbrdist.vjp(lambda a, b: a * 2.0, x, Variable(np.array([[1.0]])))
    gxs = pull(Variable(np.array([1.0])))
    assert gxs[0].array == 2 and gxs[1].array.tolist() == [[0.0]] and not gxs[1].requires_grad


def test_debug_mode_ends_with_its_block():
    for before in (False, True):
        with dbrdist.using_config("debug", before):
            for inside in (True, False):
                with DebugMode(inside):
                    assert dbrdist.is_debug() is inside
                assert dbrdist.is_debug() is before


def test_marks_of_static_graphs_take_one_function():
    def forward(): ...

    for mark in (static_graph, static_code):
        assert mark(forward) is forward and mark()(forward) is forward
        for given in ((forward, 1), (1,), (forward, forward, forward)):
            with pytest.raises(TypeError, match="expected a function to decorate"):
                mark(*given)
    assert static_graph(verbosity_level=1)(forward) is forward
    with pytest.raises(TypeError, match="unknown arguments: loud"):
        static_graph(loud=True)


# ---- rows -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def made_row(monkeypatch):
    """Makes rows that are forgotten afterwards."""
    monkeypatch.setattr(rows, "ROWS", dict(rows.ROWS))
    return lambda *args, **options: rows.public(rows.row(*args, **options))


def test_a_row_becomes_a_function_with_name_and_signature(made_row):
    scaled = made_row(
        "scaled", lambda x, slope, shift: x * slope + shift, lambda slope: slope, "A line.", slope=2.0, shift=0.5
    )
    assert scaled.__name__ == scaled.__qualname__ == "scaled" and scaled.__doc__ == "A line."
    assert scaled.__module__ == "dbrdist.functions"
    assert str(__import__("inspect").signature(scaled)) == "(x, slope=2.0, shift=0.5)"
    entry = rows.ROWS["scaled"]
    assert entry is scaled.row is scaled.primitive.row and entry.domain == (-1.0, 1.0) and entry.operands.kinds == (
        "float",
    )  # fmt: skip
    assert not entry.runs_at_once and entry.has_steps and not entry.is_one_pass and not entry.of_difference
    assert (entry.keep_in, entry.keep_out, entry.kept_names) == ((), (), ())
    x = Variable(np.array([1.0, -2.0]))
    assert scaled(x).array.tolist() == [2.5, -3.5] and scaled(x, 3.0, shift=1.0).array.tolist() == [4, -5]
    assert scaled.primitive(x.array, 3.0, 1.0).tolist() == [4, -5]
    F.sum(scaled(x, 4.0)).backward()
    assert x.grad.tolist() == [4, 4]


def test_what_a_row_keeps_is_what_its_derivatives_name(made_row):
    both = made_row(
        "both", lambda a, b: a * b + b, lambda b: b, lambda gy, a, y: gy * (a + 1.0 + 0.0 * y), "ab + b.", args="a b",
        domain=((0, 1), (2, 3)), kind="number", has_steps=False,
    )  # fmt: skip
    entry = both.row
    assert (entry.keep_in, entry.keep_out, entry.kept_names) == ((0, 1), (0,), ("a", "b", "y"))
    assert entry.domain == ((0, 1), (2, 3)) and entry.operands.kinds == ("number", "number") and not entry.has_steps
    assert [(p.names, p.takes_gradient) for p in entry.partials] == [(("b",), False), (("a", "y"), True)]
    a, b = Variable(np.array([2.0, 3.0])), Variable(np.array([5.0]))
    gradient_check.check_backward(both, (a.array, b.array), np.array([0.5, -2.0]))
    assert both.primitive(a, b).array.tolist() == [15, 20] and both.primitive(a.array, b.array).tolist() == [15, 20]


def test_a_row_that_hands_its_gradient_on_says_so(made_row):
    plus = made_row("plus", np.add, 1, 1, "a + b.", args="a b")
    minus = made_row("minus", np.negative, -1, "-a.")
    third = made_row("third", lambda x: x / 3, 1 / 3, "x / 3.")
    assert (plus.row.runs_at_once, minus.row.runs_at_once, third.row.runs_at_once) == (True, True, False)
    assert [f.row.node.gives_new for f in (plus, minus, third)] == [False, True, True]
    for f, count in ((plus, 2), (minus, 1), (third, 1)):
        xs = [np.array([1.0, 4.0 + i], np.float32) for i in range(count)]
        assert isinstance(f.primitive(*xs), np.ndarray) and isinstance(f.primitive(*map(Variable, xs)), Variable)
        gradient_check.check_backward(f, xs, np.array([1.0, -2.0]), dtype=np.float64)
    mixed = plus.primitive(Variable(np.ones(2, np.float32)), np.ones(2))
    assert mixed.dtype == np.float32 and plus.primitive(np.ones(2, np.float32), np.ones(2)).dtype == np.float64
    with pytest.raises(TypeError, match="expected a derivative by each of"):
        made_row("none", np.exp, lambda z: z, "words")


# ---- sparse matrices ------------------------------------------------------------------------------------------------


def test_entries_with_a_row_or_a_column_below_zero_are_none():
    row, col = np.array([0, -1, 1, -1], np.int32), np.array([1, 0, -1, -1], np.int32)
    matrix = CooMatrix(np.array([1.0, 2.0, 4.0, 8.0]), row, col, (2, 3), order="other")
    assert matrix.to_dense().tolist() == [[0, 1, 0], [0, 0, 0]] and matrix.order == "other"
    with pytest.raises(ValueError, match="both below 0"):
        get_order(row, col)


def test_matrices_without_entries_have_none():
    empty = to_coo(np.zeros((2, 3)))
    assert empty.data.shape == empty.row.shape == (0,) and empty.to_dense().tolist() == [[0] * 3] * 2
    none = to_coo(np.zeros((0, 2, 3)))
    assert none.data.shape == (0, 0) and none.to_dense().shape == (0, 2, 3) and not none.data.requires_grad
    assert to_coo(np.zeros((0, 2, 3)), 2).data.shape == (0, 2)
    assert to_coo(np.eye(2), requires_grad=True).data.requires_grad


# ---- checks ---------------------------------------------------------------------------------------------------------


def test_arrays_of_one_kind():
    Foreign = type("Foreign", (), {"__module__": "cupy.core"})
    other = type("Other", (), {"__module__": "cupy.elsewhere"})
    assert T.same_types() and T.same_types(np.ones(1), np.float32(1)) and T.same_types(Foreign(), other())
    assert not T.same_types(np.ones(1), Foreign())
    whole = type("Whole", (), {"__module__": "cupy"})
    assert T.same_types(whole(), Foreign()) and not T.same_types(np.ones(1), whole())


def test_numerical_gradients_have_steps_and_tolerances_of_kinks():
    x = np.array([2.0])
    seen = []

    def cubed():
        seen.append(x[0])
        return (x**3,)

    for options, step in (({}, 1e-3), ({"eps": 0.25}, 0.25)):
        seen.clear()
        gradient_check.numerical_grad(cubed, (x,), (np.ones(1),), **options)
        np.testing.assert_allclose(sorted(seen), [2 - 2 * step, 2 - step, 2 + step, 2 + 2 * step], rtol=1e-12)

    def bent(slope):
        return lambda: (np.where(x > 2, 2 + slope * (x - 2), x),)

    def slope_at(slope, **options):
        return gradient_check.numerical_grad(bent(slope), (x,), (np.ones(1),), **options)[0]

    assert slope_at(2.0) == pytest.approx(1.5)  # nobody looks for kinks
    slope_at(1.008, detect_nondifferentiable=True)  # within a hundredth
    slope_at(2.0, detect_nondifferentiable=True, diff_atol=1.1, diff_rtol=0.0)
    slope_at(2.0, detect_nondifferentiable=True, diff_rtol=0.6)
    for options in ({}, {"diff_atol": 0.9, "diff_rtol": 0.0}, {"diff_rtol": 0.4}):
        with pytest.raises(gradient_check.NondifferentiableError):
            slope_at(2.0, detect_nondifferentiable=True, **options)
    with pytest.raises(gradient_check.NondifferentiableError):
        slope_at(1.0115, detect_nondifferentiable=True)


def test_rounding_is_no_kink():
    kinks = gradient_check.Kinks(0.0, 0.0)
    kinks.look({-2: 0.0, -1: 0.0, 1: 0.0, 2: 0.0}, 0.0, 0.1)
    for eps in (0.1, 8.0):
        for scale in (1.0, -64.0):
            values = {-2: scale, -1: scale, 1: scale * (1 + 4e-14), 2: scale}
            kinks.look(values, scale, eps)  # slopes that differ by 0.8e-13 of the values
            values[1] = scale * (1 + 5.6e-14)  # and by 1.1e-13
            with pytest.raises(gradient_check.NondifferentiableError):
                kinks.look(values, scale, eps)


def test_arrays_of_more_than_one_element_are_compressed():
    made = {}

    class Group:
        name = "/"

        def create_dataset(self, key, **options):
            made[key] = options

    serializer = HDF5Serializer.__new__(HDF5Serializer)
    serializer.group, serializer.compression = Group(), 7
    for key, value in (("none", np.zeros(0)), ("one", np.ones(1)), ("two", np.ones(2)), ("number", 3)):
        serializer(key, value)
    assert {key: options["compression"] for key, options in made.items()} == {
        "none": None, "one": None, "two": 7, "number": None
    }  # fmt: skip


# ---- rules that give too many or too few gradients ------------------------------------------------------------------


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
    words = rf"Counted: expected 2 gradients, one for each of the inputs \(0, 1\), but its rule returned {num}"
    with dbrdist.using_config("debug", way == "debug"), pytest.raises(ValueError, match=words):
        if way.startswith("grad"):
            dbrdist.grad([y], xs, enable_double_backprop=way == "grad of grads")
        else:
            y.backward(retain_grad=way == "retain")
