"""What an optimizer looks for at its first updates: gradients that are missing, or graphs of an earlier step.

Between the first three updates, backward passes are watched. Later nobody looks at anything, unless graphs grow.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dbrdist.core.array.backend import copy
from dbrdist.core.array.config import config
from dbrdist.core.array.current_device import on
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.tape.backprop import watching_backward
from dbrdist.core.tape.node import VariableNode
from dbrdist.core.update.first_graphs import FirstGraphs
from dbrdist.core.usage.mistakes import warn

if TYPE_CHECKING:
    from dbrdist.core.array.types import Array
    from dbrdist.core.model.link import Link
    from dbrdist.core.tape.variable import Operand, Variable


class _WatchedGradient:
    """Whether a backward pass has added to a gradient that an update had used already."""

    def __init__(self, node: VariableNode) -> None:
        self._node = node
        self._before: Array | None = None
        self._thread = threading.get_ident()  # other threads may be ranks, with optimizers of their own
        self.is_added_to = False

    def before(self, outputs: Sequence[Variable]) -> None:
        """What is there may be added to, unless it was removed or filled with zeros by hand."""
        if threading.get_ident() != self._thread:
            return
        g = self._array()
        with on(g):  # the pass may be another network's, on another device
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
        with on(g):
            if g is not None and bool(((g != self._before) & (g == g)).any()):  # NaN is no other number
                self.is_added_to = True

    def _array(self) -> Array | None:
        g = self._node.gradient
        return getattr(g, "array", g)

    def end(self) -> None:
        self._before = None
        if self in watching_backward:
            watching_backward.remove(self)


class _WatchedPasses:
    """Whether two backward passes start at one loss, and add to a gradient that was not cleared in between."""

    def __init__(self, node: VariableNode) -> None:
        self._node = node
        self._thread = threading.get_ident()
        self._seen: weakref.WeakKeyDictionary[VariableNode, float | None] = weakref.WeakKeyDictionary()
        self._now: list[VariableNode] = []
        self.is_repeated = False

    def before(self, outputs: Sequence[Variable]) -> None:
        """Note the losses of this pass; what begins with another gradient than before is no repetition."""
        if threading.get_ident() != self._thread:
            return
        g = self._node.gradient
        g = getattr(g, "array", g)
        self._now = [y.node for y in outputs if y.size == 1]  # of others a program gives the gradients
        are_again = any(node in self._seen and self._seen[node] == _number(node.gradient) for node in self._now)
        if are_again and g is not None and bool(g.any()):
            self.is_repeated = True

    def after(self) -> None:
        """Note the gradients that the losses have now."""
        if threading.get_ident() == self._thread:
            self._seen.update({node: _number(node.gradient) for node in self._now})
            self._now = []


def _number(gradient: Operand | None) -> float | None:
    array = getattr(gradient, "array", gradient)
    return None if array is None else float(array.reshape(()))


_STEPS_OF_GROWTH = 4
_MANY_PASSES = 16  # of one step: further ones are not looked at, as of a program that makes no second update


class _WatchedDepth:
    """Whether the graphs of successive updates become deeper, and reach back to the calls of the earlier ones."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._depths = [0]  # of the deepest graph before each update
        self._first: weakref.WeakSet[VariableNode] = weakref.WeakSet()  # what the graphs of the first one consist of
        self._num_passes = 0  # between the first two updates
        self._reaches_back = False

    def before(self, outputs: Sequence[Variable]) -> None:
        """Note how deep a graph is, and at the end of a series of deeper ones, where it comes from."""
        if threading.get_ident() != self._thread:
            return
        ends = [y.node for y in outputs]
        self._depths[-1] = max([self._depths[-1], *(node.rank for node in ends)])
        if len(self._depths) == 1:
            self._num_passes += 1
            if self._num_passes <= _MANY_PASSES:
                self._first.update(_computed(ends))
        elif len(self._depths) == _STEPS_OF_GROWTH and not self._reaches_back and self._grows():
            self._reaches_back = any(node in self._first for node in _computed(ends))

    def after(self) -> None:
        """The pass changes nothing in the graph."""

    def is_over(self) -> bool:
        """Called at each update: whether it is known now that graphs do, or do not, reach back."""
        if not self._grows() or len(self._depths) == _STEPS_OF_GROWTH or not self._first:
            return True
        self._depths.append(0)
        return False

    def reaches_back(self) -> bool:
        return self._reaches_back

    def _grows(self) -> bool:
        return all(a < b for a, b in zip(self._depths, self._depths[1:]))


def _computed(ends: Sequence[VariableNode]) -> Iterator[VariableNode]:
    """The nodes behind ``ends`` that a function has made."""
    seen, waiting = set(ends), list(ends)
    while waiting:
        node = waiting.pop()
        creator = node.living_creator()
        if creator is not None:
            yield node
            waiting += (behind := set(creator.inputs) - seen)
            seen |= behind


class FirstUpdates:
    """The first updates of one optimizer, until there is nothing to look for any more."""

    def __init__(self, optimizer: str, target: Link) -> None:
        self._optimizer = optimizer
        self._watched: _WatchedGradient | None = None
        self._passes: _WatchedPasses | None = None
        self._depth: _WatchedDepth | None = None
        self._gradients_are_known = False
        self._graphs = FirstGraphs(target)

    def __del__(self) -> None:
        self._graphs.end()
        if self._watched is not None:
            self._watched.end()
        self._end_passes()
        self._end_depth()

    def begin(self, target: Link, has_lossfun: bool) -> bool:
        """Look at gradients and graphs before an update; True if later updates need not."""
        self._graphs.end()
        if not self._gradients_are_known:
            self._gradients_are_known = self._begin_gradients(target, has_lossfun)
        if self._depth is None:
            self._depth = _WatchedDepth()
            watching_backward.append(self._depth)
        elif self._depth.is_over():
            if self._depth.reaches_back():
                warn(
                    f"{self._optimizer}.update: loss.backward() goes through the calls of earlier steps, more in each "
                    "step, because a state of the network, or a sum of losses, still has its graph: call "
                    "loss.unchain_backward() after each backward pass, or reset_state() at the start of each sequence"
                )
            self._end_depth()
            return self._gradients_are_known
        return False

    def _end_passes(self) -> bool:
        """End watching for repeated passes; True where there were some."""
        if self._passes in watching_backward:
            watching_backward.remove(self._passes)
        return self._passes is not None and self._passes.is_repeated

    def _end_depth(self) -> None:
        if self._depth in watching_backward:
            watching_backward.remove(self._depth)

    def _begin_gradients(self, target: Link, has_lossfun: bool) -> bool:
        """Look at the gradients; True if later updates need not."""
        if self._watched is not None:
            if self._end_passes():
                warn(
                    f"{self._optimizer}.update: backward() was called twice from the same loss, so that its gradients "
                    "count twice; call it once in each step"
                )
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
        if nodes and not self._gradients_are_known:
            least = min(nodes, key=lambda node: int(node.gradient.size))
            self._watched, self._passes = _WatchedGradient(least), _WatchedPasses(least)
            watching_backward.extend((self._watched, self._passes))
