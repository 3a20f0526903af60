"""The record of calls and its way back: variables, function nodes, primitives, backward passes."""

from collections.abc import Callable
from typing import Any

from dbrdist.core.tape import arithmetic, backprop, call, elementwise_table, node, ops, variable


def bind(operators: Any, backward: Callable[..., None], revive: Callable[..., Any]) -> None:
    """Give Variables, nodes and elementwise rows what stands above them: nothing else here is bound late."""
    arithmetic.operators = variable.operators = elementwise_table.operators = operators
    variable.backward = backward
    node.revive = revive


bind(ops, backprop.backward_of_variables, call.revive)
