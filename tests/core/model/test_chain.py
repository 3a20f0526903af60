"""Tests of dbrdist.core.model.chain."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Chain
from dbrdist.errors import UsageWarning


def test_nothing_is_registered_before_a_link_is_made():
    class Early(dbrdist.Chain):
        def __init__(self):
            assert not self.within_init_scope
            self.before = 1
            super().__init__()
            with self.init_scope():
                assert self.within_init_scope
            assert not self.within_init_scope

    assert Early().before == 1


@pytest.mark.parametrize("replacement", [None, F.identity])
def test_a_child_that_is_replaced_by_none_or_a_function_is_one_no_more_until_there_is_a_link_again(replacement):
    net = Chain(body=L.Linear(2, 2), head=L.Linear(2, 2))
    optimizer = dbrdist.optimizers.SGD(1.0).setup(net)
    net.cleargrads()
    head, net.head = net.head, replacement
    assert [name for name, _ in net.namedparams()] == ["/body/W", "/body/b"] and net.children().__next__() is net.body
    assert [name for name, _ in net.copy("init").namedparams()] == ["/body/W", "/body/b"]
    before = net.body.b.array.copy()
    optimizer.update(lambda: F.sum(net.body(np.ones((3, 2), np.float32))))
    assert net.body.b.array.tolist() == (before - 3).tolist()
    net.head = head
    assert len(list(net.params())) == 4 and head.name == "head"


def test_a_parameter_that_is_replaced_by_none_is_one_no_more_until_there_is_one_again():
    net = Chain(layer=L.Linear(2, 2))
    optimizer = dbrdist.optimizers.SGD(1.0).setup(net)
    net.layer.b.array = np.ones(2, np.float32)
    b, net.layer.b = net.layer.b, None
    assert [name for name, _ in copy.deepcopy(net).namedparams()] == ["/layer/W"]
    before, x = net.layer.W.array.copy(), np.ones((3, 2), np.float32)
    optimizer.update(lambda: F.sum(net.layer(x)))
    assert net.layer.W.array.tolist() == (before - 3).tolist()
    np.testing.assert_allclose(net.layer(x).array, x @ (before - 3).T, rtol=1e-6)
    net.layer.b = b
    assert [name for name, _ in net.namedparams()] == ["/layer/W", "/layer/b"]
    np.testing.assert_allclose(net.layer(x).array, x @ (before - 3).T + 1, rtol=1e-6)


def test_shared_parameters_are_added_and_counted_once():
    one = Chain(a=L.Linear(2, 2))
    one.add_link("b", one.a)
    other = copy.deepcopy(one)
    for p in other.params():
        p.grad = np.ones_like(p.array)
    one.addgrads(other)
    assert one.a.b.grad.tolist() == [1, 1] and one.count_params() == 6
    with pytest.deprecated_call():
        one.zerograds()
    assert one.a.b.grad.tolist() == [0, 0]
    one.cleargrads()
    assert one.a.b.grad is None


def double(x):
    return x * 2


def test_sequentials_are_added_and_shown_with_their_functions():
    link = L.Linear(2, 2)
    a, b = dbrdist.Sequential(link, double), dbrdist.Sequential(lambda x: x + 1)
    both = a + b
    assert [len(s) for s in (a, b, both)] == [2, 1, 3] and both[0] is link
    x = np.ones((1, 2), "f")
    np.testing.assert_allclose(both(x).array, link(x).array * 2 + 1)
    a += b
    assert len(a) == 3
    for refused in (0, [double]):
        with pytest.raises(ValueError, match=r"\+ expects another Sequential"):
            a + refused
    assert repr(dbrdist.Sequential()) == "Sequential()"
    assert "(0): Linear(" in repr(both) and "(1): <function double" in repr(both) and "lambda x: x + 1" in repr(both)
    assert "\n    (0): Linear(" in repr(dbrdist.Sequential(dbrdist.Sequential(link)))


def test_mistakes_with_a_sequential():
    with pytest.raises(RuntimeError, match="no layers"):
        dbrdist.Sequential()(np.ones((1, 2), "f"))
    with pytest.raises(ValueError, match="layer 0: expected a link or a function, got int"):
        dbrdist.Sequential(0)
    s = dbrdist.Sequential(double)
    for place in (2, -2):
        with pytest.raises(IndexError, match="a place from 0 to 1"):
            s.insert(place, double)
    s.insert(-1, L.Linear(2, 2))
    assert isinstance(s[0], L.Linear)


def test_a_link_may_also_stand_in_a_tuple_alone():
    class Net(dbrdist.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.first = L.Linear(2, 2)
                self.hidden = (self.first,)

    assert [name for name, _ in Net().namedparams()] == ["/first/W", "/first/b"]


@pytest.mark.parametrize(
    ("layers", "places"), [("aa", "0 and 1"), ("ara", "0 and 2"), ("rara", "1 and 3"), ("aaa", "0 and 1")]
)
def test_one_link_that_stands_for_all_is_warned_of(layers, places):
    known = {"a": L.Linear(3, 3), "r": F.relu}
    with pytest.warns(UsageWarning) as caught:
        dbrdist.Sequential(*(known[letter] for letter in layers))
    assert [str(one.message) for one in caught] == [
        f"Sequential: layers {places} are the same Linear, so that they share their weights; link.repeat(n) makes "
        "layers with weights of their own; to share, call a link several times"
    ]


@pytest.mark.parametrize("layers", ["", "a", "ar", "ab", "aba", "rr"])
def test_other_layers_are_not_warned_of(layers):
    """Where another link has weights too, the repetition is meant."""
    known = {"a": L.Linear(3, 3), "b": L.Linear(3, 3), "r": F.relu}
    dbrdist.Sequential(*(known[letter] for letter in layers))
