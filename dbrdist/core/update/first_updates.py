"""What an optimizer looks for at its first updates: gradients that are missing, or of an earlier step.

Between the first two updates, backward passes are watched. Later nobody looks at anything.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from dbrdist.core.array.config import config
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.tape.backprop import called_before_backward
from dbrdist.core.tape.node import VariableNode
from dbrdist.core.usage.mistakes import warn


class _WatchedGradient:
    """Whether a gradient that an update has used was removed before the next backward pass that adds to it."""

    def __init__(self, node: VariableNode) -> None:
        self._node = node
        self._thread = threading.get_ident()
        self.is_added_to = False

    def __call__(self) -> None:
        """Look before a backward pass: what is there is added to, unless it was filled with zeros by hand.

        The passes of other threads, which may be ranks, are not this optimizer's.
        """
        if threading.get_ident() != self._thread:
            return
        g = self._node.gradient
        self.is_added_to = g is not None and bool(getattr(g, "array", g).any())
        if not self.is_added_to:
            self.end()

    def end(self) -> None:
        if self in called_before_backward:
            called_before_backward.remove(self)


class FirstUpdates:
    """The first updates of one optimizer, until there is nothing to look for any more."""

    def __init__(self, optimizer: str) -> None:
        self._optimizer = optimizer
        self._watched: _WatchedGradient | None = None

    def __del__(self) -> None:
        if self._watched is not None:
            self._watched.end()

    def begin(self, params: Sequence[Parameter], has_lossfun: bool) -> bool:
        """Look at the gradients before an update; True if later updates need not."""
        if self._watched is not None:
            if self._watched.is_added_to:
                warn(
                    f"{self._optimizer}.update: the gradients are added to those of the update before: call "
                    "model.cleargrads() before loss.backward() in each step, or update(loss_function, *inputs)"
                )
            self._watched.end()
            return True
        if not config.train:
            warn(
                f"{self._optimizer}.update: config.train is False, so dropout and batch normalization work as in "
                "evaluation while the network is trained; set it only around evaluation: "
                "with dbrdist.using_config('train', False):"
            )
        if any(p.grad is not None for p in params):
            return has_lossfun
        warn(
            f"{self._optimizer}.update: no parameter of the target has a gradient: the loss does not depend on any, "
            "or loss.backward() was not called before update()"
        )
        return False

    def watch(self, params: Sequence[Parameter]) -> None:
        """Watch a small gradient from this update to the next."""
        nodes = [p.node for p in params if p.grad is not None]
        if nodes:
            self._watched = _WatchedGradient(min(nodes, key=lambda node: int(node.gradient.size)))
            called_before_backward.append(self._watched)
