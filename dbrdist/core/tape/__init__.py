"""The record of calls and its way back: variables, function nodes, primitives, backward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dbrdist.core.tape import arithmetic, backprop, call, elementwise_table, node, ops, variable

if TYPE_CHECKING:
    from dbrdist.core.array.types import Module


def bind(operators: Module, backward: Callable[..., None], revive: Callable[..., Any]) -> None:
    """Give Variables, nodes and elementwise rows what stands above them: nothing else here is bound late."""
    arithmetic.operators = variable.operators = elementwise_table.operators = operators
    variable.backward = backward
    node.revive = revive


bind(ops, backprop.backward_of_variables, call.revive)
