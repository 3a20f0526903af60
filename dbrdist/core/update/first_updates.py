"""What an optimizer looks for at its first updates: gradients that are missing, or of an earlier step.

Between the first two updates one parameter's node is watched. Later updates look at nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dbrdist.core.array.config import config
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.tape.node import VariableNode
from dbrdist.core.usage.mistakes import warn

_plain_gradient: Any = VariableNode.__dict__["gradient"]


class _Events:
    """What happened to a watched gradient since an update."""

    has_been_read = False  # while it held something: what backward does before it adds
    has_been_cleared = False
    has_been_added_to = False


def _watched_class(events: _Events) -> type[VariableNode]:
    """A class of nodes that note what happens to their gradient."""

    class WatchedNode(VariableNode):
        __slots__ = ()

        @property
        def gradient(self) -> Any:  # type: ignore[override]
            g = _plain_gradient.__get__(self)
            if g is not None:
                events.has_been_read = True
                if hasattr(g, "any") and not g.any():  # filled with zeros by hand
                    events.has_been_cleared = True
            return g

        @gradient.setter
        def gradient(self, g: Any) -> None:
            if g is None:
                events.has_been_cleared = True
            elif events.has_been_read:
                events.has_been_added_to = True
            _plain_gradient.__set__(self, g)

    return WatchedNode


class FirstUpdates:
    """The first updates of one optimizer: ``are_over`` once there is nothing to look for any more."""

    def __init__(self, optimizer: str) -> None:
        self._optimizer = optimizer
        self._node: Any = None
        self._events = _Events()

    def begin(self, params: Sequence[Parameter], computes_gradients: bool) -> bool:
        """Look at the gradients before an update; True if the next update need not."""
        if not config.train:
            warn(
                f"{self._optimizer}.update: config.train is False, so dropout and batch normalization work as in "
                "evaluation while the network is trained; set it only around evaluation: "
                "with dbrdist.using_config('train', False):"
            )
        if self._node is not None:
            self._end()
            return True
        if not any(p.grad is not None for p in params):
            warn(
                f"{self._optimizer}.update: no parameter of the target has a gradient: the loss does not depend on "
                "any, or loss.backward() was not called before update()"
            )
            return False
        return computes_gradients

    def watch(self, params: Sequence[Parameter]) -> None:
        """Watch a small gradient from an update that was given gradients to the next."""
        candidates = [p.node for p in params if p.grad is not None and type(p.node) is VariableNode]
        if candidates:
            self._node = min(candidates, key=lambda node: int(node.gradient.size))
            self._events = _Events()
            self._node.__class__ = _watched_class(self._events)

    def _end(self) -> None:
        node, events = self._node, self._events
        self._node = None
        node.__class__ = VariableNode
        if events.has_been_added_to and not events.has_been_cleared:
            warn(
                f"{self._optimizer}.update: the gradients are added to those of the update before: call "
                "model.cleargrads() before loss.backward() in each step, or update(loss_function, *inputs)"
            )
