"""Tests of dbrdist.core.tape.walk."""

from __future__ import annotations

import numpy as np

import dbrdist.functions as F
from dbrdist import FunctionNode, Parameter, Variable
from dbrdist.core.model import flat
from dbrdist.core.tape import backprop, walk
from dbrdist.core.tape.node import make_node
from tests.core.core_helpers import Notes, Old
from tests.each import each


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


def node(view=None, gradient=None):
    made = make_node(None, 0, 0, True, (), np.dtype("f"))
    made.view, made.gradient = view, gradient
    return made


def test_a_gradient_is_written_where_it_belongs_once():
    plain, first, second, full = node(), node("a"), node("b"), node("c", "there")
    assert walk.views((plain, full), (0, 1)) is None
    assert walk.views((plain, first), (0, 1)) == [None, "a"]
    assert walk.views((first, plain, second), (0, 2)) == ["a", "b"]
    assert walk.views((first, second, second, first), (0, 1, 2, 3)) == ["a", "b", None, None]
    assert walk.views((first, second), (1,)) == ["b"]


def test_functions_of_one_rank_come_in_the_order_in_which_they_were_reached():
    noted, x = [], Variable(np.ones(2, "f"))
    parts = [Notes(name, noted).apply((x,))[0] for name in "abcd"]
    total = Notes("sum", noted).apply((F.concat([F.stack(parts[:2]), F.stack(parts[2:])], 0),))[0]
    F.sum(total).backward()
    assert noted == ["sum", "a", "b", "c", "d"]
    assert x.grad.tolist() == [4, 4]
