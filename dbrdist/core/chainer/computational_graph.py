"""The graph behind Variables as a drawing: text in the language DOT, which Graphviz turns into pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from dbrdist.core.tape.function_node import FunctionNode
from dbrdist.core.tape.node import VariableNode
from dbrdist.core.tape.variable import Variable

if TYPE_CHECKING:
    from collections.abc import Sequence

GraphNode: TypeAlias = VariableNode | FunctionNode

_VARIABLE = {"shape": "octagon", "fillcolor": "#E0E0E0", "style": "filled"}
_FUNCTION = {"shape": "record", "fillcolor": "#6495ED", "style": "filled"}
_DIRECTIONS = ("TB", "BT", "LR", "RL")


class DotNode:
    """A variable or function as a line of DOT: its number, and attributes of which `label` is one."""

    def __init__(self, node: GraphNode, attribute: Mapping[str, str] | None = None, show_name: bool = True) -> None:
        self.node = node
        self.id_ = id(node)
        default = _FUNCTION if isinstance(node, FunctionNode) else _VARIABLE
        self.attribute = {**default, **(attribute or {}), "label": _label(node, show_name)}

    @property
    def label(self) -> str:
        """What is written into the node."""
        return self.attribute["label"]

    def __str__(self) -> str:
        is_record = self.attribute.get("shape") == "record"
        pairs = [f"{key}={_quoted(value, is_record and key == 'label')}" for key, value in self.attribute.items()]
        return f"{self.id_} [{','.join(pairs)}];"


def _label(node: GraphNode, show_name: bool) -> str:
    if isinstance(node, FunctionNode):
        return node.label
    shape = "" if not node.shape else f"({', '.join(map(str, node.shape))}), "
    name = f"{node.name}: " if show_name and node.name else ""
    return f"{name}{shape}{'' if node.dtype is None else node.dtype}"


def _quoted(value: str, is_record: bool) -> str:
    text = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    if is_record:  # these part a record into fields
        for letter in "{}|<>":
            text = text.replace(letter, "\\" + letter)
    return f'"{text}"'


class ComputationalGraph:
    """Nodes (variables and functions) and edges (pairs of nodes) of a graph.

    Args:
        nodes: the nodes.
        edges: pairs of the node where an edge begins and the one where it ends.
        variable_style, function_style: attributes of DOT that replace or join the default ones.
        rankdir: the direction of the drawing: TB (top to bottom), BT, LR or RL.
        remove_variable: leave out variables; edges run from function to function.
        show_name: write the names of variables that have one.
    """

    def __init__(
        self,
        nodes: Iterable[GraphNode],
        edges: Iterable[tuple[GraphNode, GraphNode]],
        variable_style: Mapping[str, str] | None = None,
        function_style: Mapping[str, str] | None = None,
        rankdir: str = "TB",
        remove_variable: bool = False,
        show_name: bool = True,
    ) -> None:
        if rankdir not in _DIRECTIONS:
            raise ValueError(f"computational graph: rankdir: expected one of {', '.join(_DIRECTIONS)}, got {rankdir!r}")
        self.nodes = list(nodes)
        self.edges = list(edges)
        self.variable_style = variable_style
        self.function_style = function_style
        self.rankdir = rankdir
        self.show_name = show_name
        if remove_variable:
            self.nodes, self.edges = _functions_alone(self.nodes, self.edges)

    def dump(self, format: str = "dot") -> str:
        """The graph as text; the one `format` is "dot"."""
        if format != "dot":
            raise ValueError(f"computational graph: format: expected 'dot', got {format!r}")
        lines = [f"digraph graphname{{rankdir={self.rankdir};"]
        for node in self.nodes:
            style = self.function_style if isinstance(node, FunctionNode) else self.variable_style
            lines.append(str(DotNode(node, style, self.show_name)))
        lines += [f"{id(start)} -> {id(end)};" for start, end in self.edges]
        return "\n".join([*lines, "}"])


def _functions_alone(
    nodes: list[GraphNode], edges: list[tuple[GraphNode, GraphNode]]
) -> tuple[list[GraphNode], list[tuple[GraphNode, GraphNode]]]:
    makers = {id(end): start for start, end in edges if isinstance(start, FunctionNode)}
    between: list[tuple[GraphNode, GraphNode]] = [
        (makers[id(x)], f) for x, f in edges if isinstance(f, FunctionNode) and id(x) in makers
    ]
    return [node for node in nodes if isinstance(node, FunctionNode)], between


def build_computational_graph(
    outputs: Iterable[Variable],
    remove_split: bool = True,
    variable_style: Mapping[str, str] | None = None,
    function_style: Mapping[str, str] | None = None,
    rankdir: str = "TB",
    remove_variable: bool = False,
    show_name: bool = True,
) -> ComputationalGraph:
    """The graph of everything that the outputs were computed from.

    Args:
        outputs: Variables.
        remove_split: must be True, as in Chainer 7.
        variable_style, function_style, rankdir, remove_variable, show_name: see :class:`ComputationalGraph`.

    Example:

        graph = build_computational_graph([loss])
        with open("graph.dot", "w") as file:
            file.write(graph.dump())

    and `dot -Tpng graph.dot -o graph.png` draws it.
    """
    if not remove_split:
        raise ValueError("build_computational_graph: remove_split: expected True: the graph has no split functions")
    outputs = [outputs] if isinstance(outputs, Variable) else list(outputs)
    nodes, edges = _walk(outputs)
    return ComputationalGraph(nodes, edges, variable_style, function_style, rankdir, remove_variable, show_name)


def _walk(outputs: Sequence[Variable | VariableNode]) -> tuple[list[GraphNode], list[tuple[GraphNode, GraphNode]]]:
    known: dict[tuple[int, int], VariableNode] = {}  # a rule may make a second node of one output
    nodes: dict[int, GraphNode] = {}
    edges: list[tuple[GraphNode, GraphNode]] = []
    ahead: list[FunctionNode] = []

    def see(node: VariableNode) -> VariableNode:
        creator = node.living_creator()
        node = node if creator is None else known.setdefault((id(creator), node.index), node)
        if id(node) not in nodes:
            nodes[id(node)] = node
            if creator is not None:
                edges.append((creator, node))
                ahead.append(creator)
        return node

    for output in outputs:
        if not isinstance(output, Variable | VariableNode):
            raise TypeError(f"build_computational_graph: expected Variables as outputs, got {type(output).__name__}")
        see(output.node if isinstance(output, Variable) else output)
    while ahead:
        function = ahead.pop()
        if id(function) not in nodes:
            nodes[id(function)] = function
            edges += [(see(x), function) for x in function.inputs]
    return list(nodes.values()), edges
