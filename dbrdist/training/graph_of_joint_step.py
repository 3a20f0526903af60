"""One kind of step of several ranks as CUDA graphs: the parts between which gradients are reduced.

NCCL's calls are not captured. It asks that all ranks capture a call together and replay that graph together, so that a
rank with another batch, or one that cannot capture, would leave the others waiting. Here each rank replays by itself
what it would launch by itself: forward and backward, cut where a bucket of gradients is complete, and the update. All
that ranks do together is as in an eager step, in the same order, so that some ranks may replay and others not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from dbrdist.core.array import spans
from dbrdist.core.array.declared import DeclaredBlock
from dbrdist.core.model import flat
from dbrdist.core.tape.backprop import Listener
from dbrdist.training.graph_of_step import NUM_EAGER, Args, GraphOfStep, Named, NotCaptured
from dbrdist.training.step_attributes import Attributes, Loss

if TYPE_CHECKING:
    from dbrdist.core.array.types import CudaGraph, CudaStream
    from dbrdist.core.tape.node import VariableNode
    from dbrdist.core.update.optimizer import GradientMethod


class Reductions(Listener, Protocol):
    """Starts the reduction of a bucket once all of its gradients are complete: ``comm/gradients/overlap.py``."""

    num_complete: int  # buckets

    def rehearsing(self) -> AbstractContextManager[None]:
        """Within the block buckets are counted, and none is sent."""

    def agree(self) -> None:
        """Wait until the ranks have agreed on the step, so that what is complete begins."""

    def expect_in_place(self, used: set[VariableNode]) -> None:
        """As ``expect``, where the gradients of all other leaves are zero in flat memory already."""


class CapturedPart(NamedTuple):
    """A graph of a backward pass, and what the listener is told after it."""

    graph: CudaGraph
    used: set[VariableNode] | None  # what the pass reaches, if it began to tell in this part
    complete: list[VariableNode]


# Forward and backward: called with the loss function, its arguments, and what listens to backward.
Run: TypeAlias = "Callable[[Loss, Args, Named, Listener | None], None]"


class GraphOfJointStep(GraphOfStep):
    """One kind of step of this rank, while others make theirs; also what runs the passes of the optimizer's step."""

    def __init__(self, stream: CudaStream, loss_func: Loss) -> None:
        super().__init__(stream, loss_func)
        self._parts: list[CapturedPart] = []
        self._update_block: DeclaredBlock | None = None
        self._inputs: tuple[GradientMethod, Args, Named] | None = None  # of the step under way
        self._is_replayed = False  # the step under way

    def run(self, optimizer: Any, loss_func: Loss, args: Args, named: Named, told: Mapping[str, int]) -> None:
        one: GradientMethod = optimizer.actual_optimizer
        if not self.graphs and (self._num_eager < NUM_EAGER - 1 or not one.updates_jointly):
            self._num_eager += 1
            optimizer.update(loss_func, *args, **named, **told)
            return
        self._inputs, self._is_replayed = (one, args, named), False
        try:
            optimizer.update_in_passes(self, loss_func, *args, **named, **told)
        finally:
            self._inputs = None

    def backward(self, run: Run, listener: Reductions | None) -> None:
        """Forward and backward of the step under way, or what replays them. Afterwards gradients are in flat memory."""
        assert self._inputs is not None
        one, args, named = self._inputs
        if self._num_eager < NUM_EAGER or self._pool is None:
            self._num_eager += 1
            links = Attributes(one.target)
            with self._warming_up():
                run(self.loss_func, args, named, listener)
            self.reason = links.why_not()
            return
        if not self.graphs:
            try:
                self._capture_parts(one, args, named, run, listener)
            except NotCaptured as e:
                self.reason = str(e)
                run(self.loss_func, args, named, listener)
                return
        self._is_replayed = True
        self._replay_parts(args, named, listener)

    def give_back_memory(self) -> None:
        super().give_back_memory()
        self._parts, self._update_block = [], None

    def update(self, run: Callable[[], None]) -> None:
        """The update of the step under way."""
        if self._is_replayed:
            assert self._host is not None and self._update_block is not None
            self._host.begin()
            with self._here():
                self._update_block.send(self._stream)
                self.graphs[-1].launch(self._stream)
            self._host.end(self._update_block.overflow)
        elif self._pool is not None and self.reason is None:
            with self._warming_up():
                run()
        else:
            run()

    def _capture_parts(
        self, one: GradientMethod, args: Args, named: Named, run: Run, listener: Reductions | None
    ) -> None:
        cuts = _Cuts(listener, self._cut)
        with self._capturing(one, args, named) as links:
            loss_func, rehearsal = links.watched(self.loss_func), listener and listener.rehearsing()
            with rehearsal or nullcontext(), self._recording() as self._block:
                run(loss_func, self._args, self._named, cuts if listener else None)
                params = [p for p in flat.unique(one.target.params()) if p.node.view is not None]
                updated = [p for p in params if p.update_rule is None or p.update_rule.enabled]
                flat.collect_gradients(updated)
            cuts.end()
            self._parts = [CapturedPart(graph, *told) for graph, told in zip(self.graphs, cuts.told, strict=True)]
            self._note_gradients(params)
            with self._recording() as self._update_block:
                one.update()

    def _cut(self) -> None:
        """End a graph, and begin the next."""
        self.graphs.append(self._stream.end_capture())
        self._stream.begin_capture()

    def _replay_parts(self, args: Args, named: Named, listener: Reductions | None) -> None:
        self._give_gradients()
        with self._here():
            with spans.span("forward"):  # and as much of backward as is in the same graph
                self._send(args, named)
                self._parts[0].graph.launch(self._stream)
            for number, (graph, used, complete) in enumerate(self._parts):
                if number:
                    with spans.span("backward"):
                        graph.launch(self._stream)
                if listener is None:
                    continue
                listener.agree()
                if used is not None:
                    listener.expect_in_place(used)
                for node in complete:
                    listener.ready(node)
        self._hand_on()


class _Cuts:
    """Listens to a backward pass that is captured, and cuts where buckets are complete."""

    def __init__(self, listener: Reductions | None, cut: Callable[[], None]) -> None:
        self._listener, self._cut = listener, cut
        self.told: list[tuple[set[VariableNode] | None, list[VariableNode]]] = []  # of each part
        self._used: set[VariableNode] | None = None
        self._complete: list[VariableNode] = []

    def expect(self, used: set[VariableNode]) -> None:
        """The pass may reach these leaves, and no others."""
        assert self._listener is not None
        before = self._listener.num_complete
        self._listener.expect(used)
        self._used = used
        self._look(before)

    def ready(self, node: VariableNode) -> None:
        """The gradient of a leaf is complete."""
        assert self._listener is not None
        before = self._listener.num_complete
        self._listener.ready(node)
        self._complete.append(node)
        self._look(before)

    def _look(self, before: int) -> None:
        assert self._listener is not None
        if self._listener.num_complete > before:
            self._cut()
            self.end()

    def end(self) -> None:
        """Of a part."""
        self.told.append((self._used, self._complete))
        self._used, self._complete = None, []
