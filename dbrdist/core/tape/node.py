"""What the tape consists of: values, their nodes, and the records of calls.

A graph holds nodes, not arrays. A ``VariableNode`` knows the call that made it and the shape; a ``Record`` knows the
nodes of its inputs and the arrays that its rule retained. References run from outputs to inputs only, so a graph dies
by reference count as soon as nobody holds its end.

Every operation writes and reads these attributes some thirty times. Where dbrdist is compiled, ``node.pxd`` makes them
fields of C structures; ``Variable`` and ``FunctionNode``, which users see and subclass, stay classes of Python.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbrdist.core.array.types import Array, DType, Shape
    from dbrdist.core.chainer.function import Function
    from dbrdist.core.tape.function_node import FunctionNode
    from dbrdist.core.tape.variable import Operand, Variable

assignments = [0]  # how often parameters got new values from outside an update, in this process


_NODE = (
    "assigned", "creator_node", "dtype", "gradient", "index", "name", "rank", "requires_grad", "shape", "view",
)  # fmt: skip


class VariableNode:
    """A variable's place in the graph: who made it, its shape, and the gradient that arrived."""

    __slots__ = ("__weakref__", "is_handed_out", *_NODE)

    creator_node: Any  # it stays when the graph is cut there: see living_creator
    index: int  # which output of the creator
    rank: int
    requires_grad: bool
    shape: Any
    dtype: Any
    gradient: Any  # an array, or a Variable after a differentiable backward
    view: Any  # where a parameter's gradient is stored in flat memory
    name: str | None
    assigned: int  # the count of assignments when a parameter last got new values from outside an update
    is_handed_out: bool  # whether a program may have got a parameter's array since that entered flat memory

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def creator(self) -> FunctionNode | Function | None:
        """What the program called to make it, or None."""
        creator = self.living_creator()
        return None if creator is None else creator.as_called

    def living_creator(self) -> FunctionNode | None:
        """The function that made it, or None for a leaf and where the graph was cut."""
        creator = self.creator_node
        return None if creator is None or not creator.inputs else creator

    @property
    def label(self) -> str:
        """Shape and type, as in graphs: ``(2, 3), float32``."""
        return f"{self.shape}, {self.dtype}" if self.shape is not None else "(None)"

    @property
    def grad(self) -> Array | None:
        """The gradient as an array, or None."""
        return getattr(self.gradient, "array", self.gradient)

    @property
    def grad_var(self) -> Variable | None:
        """The gradient as a Variable, or None."""
        return self.get_variable().grad_var

    @property
    def data(self) -> Array | None:
        """The array if it is known, else None: of a Variable that a program of Chainer made, or a retained one."""
        variable = self.get_variable_or_none()
        if variable is not None:
            return variable.array
        creator = self.living_creator()
        if creator is not None and creator._keep_outputs and self.index in creator._keep_outputs:
            return creator._kept_ys[creator._keep_outputs.index(self.index)]
        return retained_arrays.get(self)

    @data.setter
    def data(self, array: Array | None) -> None:
        retained_arrays[self] = array
        self.shape, self.dtype = (None, None) if array is None else (array.shape, array.dtype)

    def get_variable(self) -> Variable:
        """The Variable of this node, or another one that shares it."""
        variable = self.get_variable_or_none()
        return revive(self, self.data) if variable is None else variable

    def get_variable_or_none(self) -> Variable | None:
        """The Variable of this node that a program of Chainer made, while it lives."""
        reference = made_variables.get(self)
        return None if reference is None else reference()

    def set_creator_node(self, creator_node: FunctionNode) -> None:
        """Make this the first output of a function."""
        self.creator_node, self.rank = creator_node, creator_node.rank + 1

    def unchain(self) -> None:
        """Cut the graph here: the node becomes a leaf."""
        self.creator_node = None

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in _NODE}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.is_handed_out = True
        for name, value in state.items():
            setattr(self, name, value)


def make_node(
    creator: FunctionNode | None, index: int, rank: int, requires_grad: bool, shape: Shape | None, dtype: DType | None
) -> VariableNode:
    """A node; a function, since a class without ``__init__`` takes a quarter of the time to call."""
    node = VariableNode()
    node.creator_node = creator
    node.index = index
    node.rank = rank
    node.requires_grad = requires_grad
    node.shape = shape
    node.dtype = dtype
    node.gradient = node.view = node.name = None
    node.assigned = 0
    node.is_handed_out = False
    return node


revive: Any = None  # call.revive, bound by the package (__init__.py)
# For programs of Chainer: the Variables that they made, and arrays that they gave to nodes.
made_variables: weakref.WeakKeyDictionary[VariableNode, weakref.ref[Variable]] = weakref.WeakKeyDictionary()
retained_arrays: weakref.WeakKeyDictionary[VariableNode, Array | None] = weakref.WeakKeyDictionary()

# The parameters that were assigned, by their nodes, for backward passes that take the new values.
assigned_parameters: weakref.WeakKeyDictionary[VariableNode, weakref.ref[Variable]] = weakref.WeakKeyDictionary()


def note_assignment(parameter: Variable) -> None:
    """A parameter gets new values: graphs that retained the old ones must not go backward through it."""
    assignments[0] += 1
    parameter.node.assigned = assignments[0]
    assigned_parameters[parameter.node] = weakref.ref(parameter)
    slot = getattr(parameter, "slot", None)
    if slot is not None:
        slot.arena.num_writes += 1


class Value:
    """What a Variable holds: an array and its node."""

    __slots__ = ("__weakref__", "_array", "node")

    node: VariableNode
    _array: Any


def form(x: Operand) -> tuple[Shape, DType]:
    """Shape and type of an array or a Variable; a parameter without an array is asked itself."""
    a = x._array if isinstance(x, Value) else x
    if a is None:
        a = x
    return a.shape, a.dtype


class Record:
    """What a call leaves in its function. All tuples are None before the call, as ``UNCALLED`` says."""

    inputs: tuple[VariableNode, ...]  # empty where the graph was cut
    wanted: tuple[int, ...]
    rank: int
    num_outputs: int
    recorded_at: int  # the number of assignments to parameters before the call
    _kept_xs: tuple[Array, ...]  # the arrays that the rule retained
    _kept_ys: tuple[Array, ...]
    _keep_inputs: tuple[int, ...]  # and their places
    _keep_outputs: tuple[int, ...]
    owns_gy: bool  # nobody else has the gradient of the only output, so that the rule may write there; set by the walk
    _on_variables: bool
    _for_rule: Any  # what forward leaves for the rule besides inputs and outputs


UNCALLED: dict[str, int | None] = {
    "inputs": None, "wanted": None, "rank": 0, "num_outputs": 0, "recorded_at": 0, "_kept_xs": None, "_kept_ys": None,
    "_keep_inputs": None, "_keep_outputs": None, "owns_gy": False, "_on_variables": False, "_for_rule": None,
}  # fmt: skip
for _name, _value in UNCALLED.items():
    if not hasattr(Record, _name):  # the fields of a C structure begin so by themselves
        setattr(Record, _name, _value)
