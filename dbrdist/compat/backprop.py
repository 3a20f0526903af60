"""The backward pass of several outputs, which begins elsewhere under Chainer's path than natively."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dbrdist.core.array.user_line import warn_user
from dbrdist.core.tape import backprop

if TYPE_CHECKING:
    from dbrdist.core.tape.variable import Variable


def backward(outputs: Sequence[Variable], grad_outputs: Sequence[Any] | None = None, **kwargs: Any) -> None:
    """As :func:`dbrdist.backward`, but an output without a gradient gets none of one: it is left out."""
    if grad_outputs is None:
        backprop.see_that_all_are_variables("outputs", outputs)
        outputs, grad_outputs = _starts(outputs)
    backprop.backward(outputs, grad_outputs, **kwargs)


def _starts(outputs: Sequence[Variable]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Outputs that have a gradient, each once, and these gradients, which Chainer takes out of them."""
    starts = [(y, y.node.gradient) for y in dict.fromkeys(outputs) if y.node.gradient is not None]
    is_short = len(starts) < len(outputs)
    starts = [(y, g) for y, g in starts if y.node.living_creator() is not None]  # a leaf's own gradient is there
    if is_short:
        warn_user(
            "backward: outputs contains a Variable without a gradient, or one twice; chainer.backward sets no default "
            "gradient: set y.grad first, or call y.backward()",
            RuntimeWarning,
        )
    for y, _ in starts:
        y.node.gradient = None
    return [y for y, _ in starts], [g for _, g in starts]
