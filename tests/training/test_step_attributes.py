"""What a step leaves in links, for and against a capture; all of it on the host."""

from __future__ import annotations

import collections

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist.errors import CaptureError
from dbrdist.training.step_attributes import Attributes, _holds_the_same, words_of
from tests.each import each


class Net(dbrdist.Chain):
    def __init__(self):
        super().__init__()
        self.count, self.rate, self.word = 0, 0.5, "a" * 60
        self.seen, self.table, self.last = [1], {"a": 1, "b": 2}, collections.deque([1, 2])
        self.kept = dbrdist.Variable(np.ones(2, "f4"))
        self.none = None
        with self.init_scope():
            self.fc = L.Linear(2, 2)
            self.bn = L.BatchNormalization(2)


def change(path, name, value):
    def do(net):
        link = net if path == "/" else getattr(net, path[1:])
        setattr(link, name, value(getattr(link, name)))

    return do


@each(
    **{
        "do, words": [
            (lambda net: None, None),
            (change("/", "count", lambda n: n + 1), "it changes the attribute 'count' of the link /, from 0 to 1"),
            (change("/", "rate", lambda _: float("0.5")), None),
            (change("/", "rate", lambda _: 1), "it changes the attribute 'rate' of the link /, from 0.5 to 1"),
            (change("/", "count", lambda _: 0.0), "it changes the attribute 'count' of the link /, from 0 to 0.0"),
            (change("/", "none", lambda _: 3), "it changes the attribute 'none' of the link /, from None to 3"),
            (
                change("/", "word", lambda _: "b" * 60),
                f"it changes the attribute 'word' of the link /, from '{'a' * 39} to '{'b' * 39}",
            ),
            (change("/", "rate", lambda _: None), None),
            (change("/", "kept", lambda _: dbrdist.Variable(np.zeros(2, "f4"))), None),
            (lambda net: net.seen.append(2), "it changes what the attribute 'seen' of the link / holds"),
            (change("/", "seen", lambda _: [1]), "it changes what the attribute 'seen' of the link / holds"),
            (change("/", "seen", lambda _: (1,)), "it changes the attribute 'seen' of the link /, from [1] to (1,)"),
            (lambda net: net.last.rotate(), "it changes what the attribute 'last' of the link / holds"),
            (lambda net: net.table.update(a=3), "it changes what the attribute 'table' of the link / holds"),
            (lambda net: net.table.update(a=1), None),
            (change("/bn", "avg_mean", lambda a: a + 1), "it rebinds the array 'avg_mean' of the link /bn"),
            (lambda net: net.bn.avg_mean.fill(3), None),
            (lambda net: setattr(net.fc, "b", dbrdist.Parameter(np.zeros(2, "f4"))), None),
        ]
    }
)
def test_what_a_step_may_not_change(do, words):
    net = Net()
    before = Attributes(net)
    do(net)
    assert before.why_not() == words


def test_links_get_their_attributes_back():
    net = Net()
    before, mean = Attributes(net), net.bn.avg_mean
    net.count, net.bn.avg_mean = 7, mean + 1
    net.seen.append(2)
    net.fc.more = 3
    before.go_back()
    assert (net.count, net.seen, net.bn.avg_mean is mean, net.fc.more) == (0, [1], True, None)


def test_arrays_that_are_saved_with_links():
    net = Net()
    net.bn.add_persistent("steps", 3)  # no array
    found = list(Attributes(net).persistent_arrays())
    assert [(values is vars(net.bn), name) for values, name, _ in found] == [(True, "avg_mean"), (True, "avg_var")]
    assert all(array is getattr(net.bn, name) for _, name, array in found)


def test_a_loss_that_computes_with_the_last_step_is_refused():
    net = Net()
    x = np.ones((2, 2), "f4")

    def fresh(x, scale):
        return scale * F.sum(net.fc(x))

    def stale(x):
        return F.sum(F.relu(net.fc(x)) * 2.0 * net.kept)

    watched = Attributes(net).watched
    assert float(watched(fresh)(x, scale=2.0).array) == pytest.approx(2 * float(F.sum(net.fc(x)).array))
    assert watched(lambda: 3.0)() == 3.0  # no Variable: the optimizer says so
    doubled = net.fc(x)
    for _ in range(100):  # each Variable is looked at once, not once for each of 2^100 ways to it
        doubled = doubled + doubled
    assert watched(lambda: doubled)() is doubled
    with pytest.raises(CaptureError) as caught:
        watched(stale)(x)
    assert str(caught.value) == "it computes with the Variable 'kept' of the link /, from the step before"
    net.fc.kept, net.kept = net.kept, None
    with pytest.raises(CaptureError, match="'kept' of the link /fc, from"):
        Attributes(net).watched(lambda x: F.sum(net.fc(x) * net.fc.kept))(x)


ONE, OTHER = np.ones(1), np.ones(1)


@each(
    **{
        "one, other, same": [
            ([], [], True), ([1], [1], True), ([1], [2], False), ([1], [1, 1], False), ([ONE], [ONE], True),
            ([ONE], [OTHER], False), ([1, ONE], [1, OTHER], False), ({"a": 1}, {"a": 1}, True),
            ({"a": 1}, {"b": 1}, False), ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False), ({"a": 1}, {"a": 2}, False),
            ([dbrdist.Variable(ONE)], [dbrdist.Variable(OTHER)], True), ([dbrdist.Variable(ONE)], [1], False),
            ([float("0.5")], [float("0.5")], True), ([1], [dbrdist.Variable(ONE)], False), ([1], [ONE], False),
        ]
    }
)  # fmt: skip
def test_containers_that_hold_the_same(one, other, same):
    assert _holds_the_same(one, other) is same


def raised(call):
    try:
        call()
    except Exception as error:
        return words_of(error)


def my_loss():
    raise ValueError("  a first line\nand a second")


def test_an_error_names_the_line_of_the_program():
    """That of the program where there is one, else the last one of dbrdist, else none."""
    line = my_loss.__code__.co_firstlineno + 1
    code = 'raise ValueError("  a first line\\nand a second")'
    assert raised(my_loss) == f"a first line ({__file__}, line {line}, in my_loss: {code})"
    in_library = raised(lambda: F.relu("x"))
    assert f"({__file__}, line " in in_library and in_library.endswith('raised(lambda: F.relu("x")))')
    names = {"__name__": "dbrdist.made_up"}
    exec(compile("def fail():\n    raise KeyError('')\n", "<made up>", "exec"), names)
    try:
        exec("fail()", names)
    except KeyError as error:
        error.__traceback__ = error.__traceback__.tb_next  # without this function
        assert words_of(error) == "'' (<made up>, line 2, in fail: )"
    assert words_of(RuntimeError()) == "RuntimeError"
    assert words_of(RuntimeError("no memory")) == "no memory"
