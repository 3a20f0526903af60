"""Graphs as DOT: nodes, edges, styles, and text that Graphviz can read."""

from __future__ import annotations

import re

import numpy as np
import pytest
from dbrdist.computational_graph import ComputationalGraph, DotNode, build_computational_graph

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable


def edges_of(graph):
    """Pairs of labels."""
    names = {id(node): DotNode(node).label for node in graph.nodes}
    return sorted((names[id(start)], names[id(end)]) for start, end in graph.edges)


def example():
    x = dbrdist.Variable(np.zeros((2, 3), np.float32), name="x")
    h = F.tanh(x)
    return x, h, F.sum(h * h)


def test_nodes_and_edges_of_a_graph():
    _, _, y = example()
    graph = build_computational_graph([y])
    labels = sorted(DotNode(node).label for node in graph.nodes)
    tanh, mul, total = sorted(
        (label for label in labels if "float" not in label), key=lambda n: "tms".index(n[0].lower())
    )
    mid = "(2, 3), float32"
    assert labels == sorted([tanh, mul, total, "x: (2, 3), float32", mid, mid, "float32"])
    into = [("x: (2, 3), float32", tanh), (mid, mul), (mid, mul), (mid, total)]
    assert edges_of(graph) == sorted([*into, (tanh, mid), (mul, mid), (total, "float32")])


def test_functions_alone():
    _, _, y = example()
    graph = build_computational_graph([y], remove_variable=True)
    assert all(isinstance(node, dbrdist.FunctionNode) for node in graph.nodes) and len(graph.nodes) == 3
    assert len(graph.edges) == 3  # tanh twice into the product, the product into the sum


def test_graphs_that_share_a_part_are_drawn_once():
    x, h, y = example()
    both = build_computational_graph([y, F.sum(h)])
    alone = build_computational_graph([y])
    assert len(both.nodes) == len(alone.nodes) + 2
    assert len({id(node) for node in both.nodes}) == len(both.nodes)
    leaf = build_computational_graph(x)
    assert leaf.nodes == [x.node] and leaf.edges == []


def test_a_graph_of_second_order_holds_each_output_once():
    x, h, _ = example()
    y = F.exp(h)
    (gx,) = dbrdist.grad([F.sum(y)], [x], enable_double_backprop=True)
    graph = build_computational_graph([gx])
    made = [(id(node.creator_node), node.index) for node in graph.nodes if getattr(node, "creator_node", None)]
    assert len(set(made)) == len(made)


def test_the_text_can_be_read_by_graphviz():
    class Odd(dbrdist.FunctionNode):
        label = 'a "b" {c|<d>}\\'

        def forward(self, xs):
            return xs

    x = dbrdist.Variable(np.zeros(2, np.float32), name='x "1"')
    (y,) = Odd().apply((x,))
    graph = build_computational_graph(
        [y], variable_style={"fillcolor": "red"}, function_style={"color": "blue"}, rankdir="LR"
    )
    lines = graph.dump().splitlines()
    assert lines[0] == "digraph graphname{rankdir=LR;" and lines[-1] == "}"
    statement = re.compile(r'\d+ \[(\w+="(\\.|[^"\\])*",?)+\];|\d+ -> \d+;')
    assert all(statement.fullmatch(line) for line in lines[1:-1]), lines
    (odd,) = [line for line in lines if 'color="blue"' in line and "record" in line]
    assert r'label="a \"b\" \{c\|\<d\>\}\\"' in odd
    assert sum('fillcolor="red"' in line for line in lines) == 2
    assert r'label="x \"1\": (2), float32"' in graph.dump()
    assert r"x \"1\"" not in build_computational_graph([y], show_name=False).dump()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda y: build_computational_graph([y], remove_split=False), ValueError, "remove_split: expected True"),
        (
            lambda y: build_computational_graph([y], rankdir="UP"),
            ValueError,
            "expected one of TB, BT, LR, RL, got 'UP'",
        ),
        (lambda y: build_computational_graph([y.array]), TypeError, "expected Variables as outputs, got ndarray"),
        (lambda y: ComputationalGraph([], []).dump("svg"), ValueError, "format: expected 'dot', got 'svg'"),
    ],
)
def test_bad_arguments_are_refused(make, error, words):
    with pytest.raises(error, match=words):
        make(example()[2])


@pytest.mark.slow
def test_deep_graphs_need_no_recursion():
    y = dbrdist.Variable(np.zeros(1, np.float32))
    for _ in range(3000):
        y = y + 1
    assert len(build_computational_graph([y]).edges) >= 6000


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
