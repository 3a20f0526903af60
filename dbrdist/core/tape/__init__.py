"""The record of calls and its way back: variables, function nodes, primitives, backward passes."""

from collections.abc import Callable
from typing import Any

from dbrdist.core.tape import arithmetic, backprop, elementwise_table, ops, variable


def bind(operators: Any, backward: Callable[..., None]) -> None:
    """Give Variables and rows of elementwise functions what stands above them: nothing else here is bound late."""
    arithmetic.operators = variable.operators = elementwise_table.operators = operators
    variable.backward = backward


bind(ops, backprop.backward_of_variables)
