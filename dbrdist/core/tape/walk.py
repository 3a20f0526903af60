"""The walk of a first-order pass, to leaves to which nobody listens: the way of nearly every step.

``walk.pxd`` has the C types of what is written here as Python.
"""

from __future__ import annotations

from heapq import heappop, heappush
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dbrdist.core.array.backend import copy_as_it_lies
from dbrdist.core.array.current_device import Visitor
from dbrdist.core.tape import deferred, ops
from dbrdist.core.tape.deferred import Deferred, Gradient, SliceGradient, plain
from dbrdist.core.tape.node import VariableNode, assignments
from dbrdist.core.tape.variable import Variable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dbrdist.core.array.types import Array
    from dbrdist.core.tape.function_node import FunctionNode

_ndarray = np.ndarray
_NOTHING = {type(None)}
_gradient_of, _view_of = attrgetter("gradient"), attrgetter("view")
Seeds: TypeAlias = "Sequence[tuple[VariableNode, Gradient]]"


class Walk(Visitor):
    """One backward pass: what waits for which function, and the one place where a gradient lands."""

    is_new = False  # whether nobody else has the gradients that are being delivered

    def __init__(self) -> None:
        self.pending: dict[FunctionNode, Any] = {}
        self.heap: list[tuple[int, int, FunctionNode]] = []
        self.count = 0  # breaks ties of rank in the order of arrival

    def deliver(self, node: VariableNode, g: Gradient) -> None:
        """Add a contribution to a node: at its creator if it has one, else at the leaf itself."""
        creator = node.creator_node
        if creator is None or not creator.inputs:
            self.settle(node, g)
            return
        pending = self.pending
        old = pending.get(creator)
        if old is None:
            self.count += 1
            heappush(self.heap, (-creator.rank, self.count, creator))
            if creator.num_outputs == 1:
                pending[creator] = g
                creator.owns_gy = self.is_new
            else:
                old = pending[creator] = [None] * creator.num_outputs
                old[node.index] = g
        elif creator.num_outputs == 1:
            if type(g) is not _ndarray:
                self.visit((g,))
            pending[creator] = _summed(creator, old, g, self.is_new)
        else:
            i = node.index
            if type(g) is not _ndarray:
                self.visit((g,))
            old[i] = g if old[i] is None else ops.add(plain(old[i]), plain(g))

    def settle(self, node: VariableNode, g: Gradient) -> None:
        """Add a contribution to a leaf's gradient."""
        raise NotImplementedError

    def next(self) -> tuple[Any, tuple[Gradient, ...]]:
        """The function of the highest rank, and the gradients of its outputs."""
        function = heappop(self.heap)[2]
        g = self.pending.pop(function)
        return function, tuple(g) if type(g) is list else (g,)


class PlainWalk(Walk):
    """A first-order pass to the leaves to which nobody listens."""

    of_slices: dict[VariableNode, SliceGradient] | None = None  # the first of each leaf, once there is one

    def run(self, seeds: Seeds) -> None:
        """Walk until nothing is pending."""
        if len(seeds) == 1:
            node, g = seeds[0]
            function = node.creator_node
            if function is not None and function.inputs and function.num_outputs == 1:  # a loss, nearly always
                function.owns_gy = False
                _run_chain(self, function, (g,))
                seeds = []
        for node, g in seeds:
            self.deliver(node, g)
        if self.heap:
            _run_chain(self, None, ())

    def settle(self, node: VariableNode, g: Any) -> None:
        is_new = self.is_new
        if type(g) is not _ndarray:
            if type(g) is SliceGradient and self._settle_slice(node, g):
                return
            self.visit((g,))
            g, is_new = plain(g), type(g) is SliceGradient
        old = node.gradient
        if isinstance(old, Variable):
            old = old.array
        view = node.view
        if view is not None:
            if old is None:
                if g is not view:
                    view[...] = g
            elif old is view:
                if deferred.waiting:
                    deferred.write_all()
                view += g
            else:
                np.add(old, g, out=view)
            node.gradient = view
        elif is_new and type(old) is _ndarray and old.strides == g.strides and old.dtype is g.dtype:
            node.gradient = np.add(old, g, g)
        elif old is not None:
            total = ops.add(old, g)
            node.gradient = np.asarray(total) if isinstance(total, np.generic) else total
        else:  # rules hand gradients on and return views; a leaf owns its own, so that hooks may change it in place
            node.gradient = copy_as_it_lies(g)

    def _settle_slice(self, node: VariableNode, g: SliceGradient) -> bool:
        """Whether the gradient of a slice is settled: the first of a leaf, or one that its array takes."""
        if type(self) is not PlainWalk or node.view is not None:  # a hook may keep the gradient as it is now
            return False
        if node.gradient is None:
            node.gradient = g.force()
            if self.of_slices is None:
                self.of_slices = {}
            self.of_slices[node] = g
            return True
        first = self.of_slices.get(node) if self.of_slices else None
        return first is not None and first.total is node.gradient and first.add(g)


def _run_chain(walk: Any, function: Any, gys: tuple[Gradient, ...]) -> None:
    """Visit a function, or None, and all that wait: the next is not queued if it has the highest rank of them.

    Gradients are taken from the queue here, since a caller would hold the first ones until the end.
    """
    heap = walk.heap
    while True:
        if function is None:
            if not heap:
                return
            function, gys = walk.next()
        nodes, wanted = function.inputs, function.wanted
        is_of_host = type(gys[0]) is _ndarray
        if not is_of_host:
            walk.visit(gys)
        if function.recorded_at != assignments[0]:
            function.heed_new_values()
        if function.writes:
            given = function.derive(wanted, gys, views(nodes, wanted) if is_of_host else _views_there(nodes, wanted))
        else:
            given = function.derive(wanted, gys)
        gxs = given if type(given) is tuple else tuple(given)
        if len(gxs) != len(wanted):
            raise miscount(function, wanted, gxs)
        following = None  # the node whose creator comes next
        for k, i in enumerate(wanted):
            gx = gxs[k]
            if gx is None:
                continue
            node = nodes[i]
            if gx is node.view:  # the rule wrote the first contribution where it belongs
                node.gradient = gx
                continue
            dtype = gx.dtype
            if gx.shape != node.shape or (dtype is not node.dtype and dtype != node.dtype):
                walk.visit((gx,))
                gx = fitted(function, i, gx)
            creator = node.creator_node
            if creator is None:
                is_taken = node.view is None and node.gradient is None and type(gx) is _ndarray
                if is_taken and (function.gives_new or (function.hands_on and gx is not gys[0])):
                    node.gradient = gx  # nobody else has it: the leaf takes it as its own
                    continue
            elif (
                following is None
                and creator.inputs
                and creator.num_outputs == 1
                and (not heap or creator.rank > -heap[0][0])  # of the same rank it may be what is waiting
            ):
                following, g = node, gx
                continue
            walk.is_new = function.gives_new
            if following is not None:
                walk.deliver(following, g)
                following = None
            walk.deliver(node, gx)
        if following is None:
            given, gxs, gx, g, function = (), (), None, None, None  # a sum may take the place of gradients that wait
            continue
        creator = following.creator_node
        creator.owns_gy = function.gives_new
        function = creator
        gys = (g,)


def views(nodes: tuple[VariableNode, ...], wanted: tuple[int, ...]) -> list[Array | None] | None:
    """Where in flat memory a rule may write the first contributions."""
    out: list[Array | None] | None = None
    for k, i in enumerate(wanted):
        node = nodes[i]
        view = node.view
        if view is not None and node.gradient is None:
            if out is None:
                out = [None] * len(wanted)
                out[k] = view
            elif nodes.index(node) == i:  # what comes to it a second time is added
                out[k] = view
    return out


def _views_there(nodes: tuple[VariableNode, ...], wanted: tuple[int, ...]) -> list[Array | None] | None:
    """:func:`views`, sooner for what most functions on a device were given, where this is not compiled."""
    if len(wanted) == len(nodes) == len({*nodes}) and _NOTHING.issuperset(map(type, map(_gradient_of, nodes))):
        out = [*map(_view_of, nodes)]
        return None if _NOTHING.issuperset(map(type, out)) else out
    return views(nodes, wanted)


def fitted(function: FunctionNode, i: int, gx: Gradient) -> Gradient:
    """A gradient in the type of its input; one of another shape is refused, for it would be broadcast silently."""
    node = function.inputs[i]
    if gx.shape != node.shape:
        raise ValueError(
            f"{function.label}: shape of gradients returned from backward is incorrect: expected {node.shape} for "
            f"input {i}, got {gx.shape}"
        )
    return ops.cast(plain(gx), node.dtype)


def miscount(function: FunctionNode, wanted: tuple[int, ...], gxs: Sequence[Gradient | None]) -> ValueError:
    return ValueError(
        f"{function.label}: number of gradients returned from backward is incorrect: expected {len(wanted)}, one for "
        f"each of the inputs {wanted}, got {len(gxs)}"
    )


def _summed(function: Any, a: Any, b: Any, is_new: bool) -> Gradient:
    """The sum of two gradients of a function's output: by what deferred one of them, or by the function's rule."""
    if isinstance(a, Deferred) or isinstance(b, Deferred):
        total = a.plus(b, is_new) if isinstance(a, Deferred) else b.plus(a, function.owns_gy)
        if total is not None:
            return total
        a, b = plain(a), plain(b)
    total = None if function.defer_sum is None else function.defer_sum(a, b, is_new)
    return ops.add(a, b) if total is None else total
