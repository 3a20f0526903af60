"""Tests of dbrdist.core.chainer.static_graph."""

from __future__ import annotations

import pytest

import dbrdist
from dbrdist.core.chainer.static_graph import static_code, static_graph


def test_static_graphs_are_taken_and_change_nothing():
    def forward(self, x):
        return x

    assert dbrdist.static_graph(forward) is forward is dbrdist.static_graph()(forward)
    assert dbrdist.static_graph(verbosity_level=1, enable_double_backprop=True)(forward) is forward
    assert dbrdist.static_code(forward) is forward is dbrdist.static_code(unused=1)(forward)
    with pytest.raises(TypeError, match=r"static_graph\(\) got unknown arguments: verbose"):
        dbrdist.static_graph(verbose=1)
    for mark in (dbrdist.static_graph, dbrdist.static_code):
        with pytest.raises(TypeError, match=f"{mark.__name__}: expected a function to decorate, got"):
            mark(3)


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
