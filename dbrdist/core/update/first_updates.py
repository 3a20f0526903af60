"""What an optimizer looks for at its first updates: gradients that are missing, or of an earlier step.

Between the first two updates, backward passes are watched. Later nobody looks at anything.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from dbrdist.core.array.backend import copy
from dbrdist.core.array.config import config
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.tape.backprop import watching_backward
from dbrdist.core.tape.node import VariableNode
from dbrdist.core.usage.mistakes import warn


class _WatchedGradient:
    """Whether a backward pass has added to a gradient that an update had used already."""

    def __init__(self, node: VariableNode) -> None:
        self._node = node
        self._before: Any = None
        self._thread = threading.get_ident()  # other threads may be ranks, with optimizers of their own
        self.is_added_to = False

    def before(self) -> None:
        """What is there may be added to, unless it was removed or filled with zeros by hand."""
        if threading.get_ident() != self._thread:
            return
        g = self._array()
        if g is not None and bool(g.any()):
            self._before = copy(g)
        else:
            self.is_added_to = False
            self.end()

    def after(self) -> None:
        """A pass through another network leaves it as it was."""
        if threading.get_ident() != self._thread or self._before is None:
            return
        g = self._array()
        if g is not None and bool(((g != self._before) & (g == g)).any()):  # NaN is no other number
            self.is_added_to = True

    def _array(self) -> Any:
        g = self._node.gradient
        return getattr(g, "array", g)

    def end(self) -> None:
        self._before = None
        if self in watching_backward:
            watching_backward.remove(self)


class FirstUpdates:
    """The first updates of one optimizer, until there is nothing to look for any more."""

    def __init__(self, optimizer: str) -> None:
        self._optimizer = optimizer
        self._watched: _WatchedGradient | None = None

    def __del__(self) -> None:
        if self._watched is not None:
            self._watched.end()

    def begin(self, target: Any, has_lossfun: bool) -> bool:
        """Look at the gradients before an update; True if later updates need not."""
        if self._watched is not None:
            if self._watched.is_added_to:
                warn(
                    f"{self._optimizer}.update: the gradients are added to those of the update before: call "
                    "model.cleargrads() before loss.backward() in each step, or update(loss_function, *inputs)"
                )
            self._watched.end()
            return True
        if not config.train and any(True for _ in target.links(skipself=True)):  # no layer or array by itself
            warn(
                f"{self._optimizer}.update: config.train is False, so dropout and batch normalization work as in "
                "evaluation while the network is trained; set it only around evaluation: "
                "with dbrdist.using_config('train', False):"
            )
        if any(p.grad is not None for p in target.params()):
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
            watching_backward.append(self._watched)
