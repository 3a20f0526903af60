"""One kind of step as a CUDA graph: eager steps first, then a capture, then replays."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dbrdist.core.array import backend, random
from dbrdist.core.array.declared import DeclaredBlock, declaring
from dbrdist.core.array.gpu.device_memory import PrivatePool
from dbrdist.core.model.reporter import Reporter, get_current_reporter
from dbrdist.core.update.replayed_update import ReplayedUpdate
from dbrdist.errors import CaptureError
from dbrdist.kernels.gpu import cublaslt
from dbrdist.training.step_attributes import Attribute, Attributes, Loss, words_of

if TYPE_CHECKING:
    from dbrdist.core.array.types import Array, CudaGraph, CudaStream
    from dbrdist.core.model.parameter import Parameter
    from dbrdist.core.tape.node import VariableNode
    from dbrdist.core.update.optimizer import GradientMethod

NUM_EAGER = 3  # steps before a capture, the last one on its stream and with its memory

Args: TypeAlias = "tuple[Array, ...]"
Named: TypeAlias = "Mapping[str, Array]"


class NotCaptured(Exception):
    """A step cannot be captured; nothing has happened on the device."""


class GraphOfStep:
    """One kind of step: how often it ran, then its graph.

    Args:
        stream: on which it is captured and replayed.
        loss_func: of the step.
    """

    def __init__(self, stream: CudaStream, loss_func: Loss) -> None:
        self.loss_func = loss_func  # kept, as its address may be the key
        self.reason: str | None = None  # why it is not captured
        self.graphs: list[CudaGraph] = []  # one, or the parts of a step of several ranks
        self._stream = stream
        self._num_eager = 0
        self._pool: PrivatePool | None = None
        self._args: Args = ()
        self._named: dict[str, Array] = {}
        self._block: DeclaredBlock | None = None
        self._host: ReplayedUpdate | None = None
        self._reported: dict[str, Array] = {}
        self._num_draws = 0
        self._persistent: list[Attribute] = []  # arrays of links, such as running statistics
        self._gradients: list[tuple[VariableNode, Array | None]] = []  # in flat memory, where backward leaves them

    @property
    def is_stale(self) -> bool:
        """Whether what was captured is no longer the step, for example after parameters were frozen."""
        if self._host is None:
            return False
        return not self._host.is_current or any(values[name] is not a for values, name, a in self._persistent)

    def run(self, optimizer: Any, loss_func: Loss, args: Args, named: Named, told: Mapping[str, int]) -> None:
        """Warm up, capture or replay. ``told``: what the optimizer takes besides, see ``captured_step.py``."""
        if not self.graphs:
            if self._num_eager < NUM_EAGER - 1 or not optimizer.updates_jointly:
                self._num_eager += 1
                optimizer.update(loss_func, *args, **named, **told)
                return
            if self._num_eager < NUM_EAGER or self._pool is None:
                self._num_eager += 1
                links = Attributes(optimizer.target)
                with self._warming_up():
                    optimizer.update(loss_func, *args, **named, **told)
                self.reason = links.why_not()
                return
            self._capture(optimizer, loss_func, args, named)
        self._replay(args, named)

    def give_back_memory(self) -> None:
        """Let go of what a graph would have needed: the step will not be captured."""
        self._pool, self._block, self._args, self._named, self._reported = None, None, (), {}, {}

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        """On the stream of the capture, after what the program has begun, and before what it begins next."""
        cuda = backend.import_cupy().cuda
        outer, before, after = cuda.get_current_stream(), cuda.Event(), cuda.Event()
        before.record(outer)
        try:
            with self._stream:
                self._stream.wait_event(before)
                try:
                    yield
                finally:
                    after.record(self._stream)
        finally:
            outer.wait_event(after)

    @contextlib.contextmanager
    def _warming_up(self) -> Iterator[None]:
        """The block is an eager step, or a part of one, on the stream and with the memory of the graph."""
        if self._pool is None:
            self._pool = PrivatePool()
        with self._here(), backend.import_cupy().cuda.using_allocator(self._pool.malloc), _own_products():
            yield

    def _capture(self, optimizer: GradientMethod, loss_func: Loss, args: Args, named: Named) -> None:
        with self._capturing(optimizer, args, named) as links, self._recording() as self._block:
            optimizer.update(links.watched(loss_func), *self._args, **self._named)
            self._note_gradients(optimizer.target.params())

    @contextlib.contextmanager
    def _capturing(self, optimizer: GradientMethod, args: Args, named: Named) -> Iterator[Attributes]:
        """The block captures; afterwards the host is as before it, with graphs, or NotCaptured is raised."""
        with _one_at_a_time, self._here():  # what is switched off meanwhile is switched off for all threads
            host = self._host = ReplayedUpdate(optimizer)
            draws, links = random.get_state(), Attributes(optimizer.target)
            self._persistent = list(links.persistent_arrays())
            with backend.import_cupy().cuda.using_allocator(self._pool.malloc):  # type: ignore[union-attr]
                self._args = tuple([_copied(a) for a in args])
                self._named = {name: _copied(a) for name, a in named.items()}
                try:
                    yield links
                    self._check_reports()
                except BaseException as e:  # after an interrupt, too, there is no part of a step to replay
                    links.go_back()
                    self.graphs = []
                    if not isinstance(e, Exception):
                        raise
                    raise NotCaptured(words_of(e)) from e
                finally:
                    self._num_draws = random.get_state()[_DRAW]
                    random.set_state(draws)
                    host.go_back()
            if not host.is_current:
                self._host, self.graphs = None, []
                raise NotCaptured("the step changes the rules of its own update")

    @contextlib.contextmanager
    def _recording(self) -> Iterator[DeclaredBlock]:
        """What is launched within the block becomes a graph; gives where numbers that change are declared."""
        was_collecting, block = gc.isenabled(), DeclaredBlock()
        gc.collect()  # what is destroyed later could disturb the capture
        gc.disable()
        self._stream.begin_capture()
        is_done = False
        try:
            with declaring(block), _own_products(), _observing() as reported:
                yield block
            self.graphs.append(self._stream.end_capture())
            self._reported |= reported
            is_done = True
        finally:
            if not is_done:
                with contextlib.suppress(Exception):  # the capture is invalid already
                    self._stream.end_capture()
            if was_collecting:
                gc.enable()

    def _check_reports(self) -> None:
        for name, value in self._reported.items():
            if not backend.is_array(value) or isinstance(value, np.ndarray):
                raise CaptureError(f"{name!r} is reported as a {type(value).__name__} of the host")

    def _replay(self, args: Args, named: Named) -> None:
        assert self._host is not None and self._block is not None
        self._host.begin()
        self._give_gradients()
        with self._here():
            self._send(args, named)
            self.graphs[0].launch(self._stream)
        self._hand_on()
        self._host.end(self._block.overflow)

    def _send(self, args: Args, named: Named) -> None:
        """Copy the inputs of this step, and the numbers that change, to where the graph reads them."""
        assert self._block is not None
        for place, a in zip((*self._args, *self._named.values()), (*args, *named.values())):
            if backend.is_array(a):
                place[...] = a
        self._block.send(self._stream)

    def _note_gradients(self, params: Iterable[Parameter]) -> None:
        """Which parameters, frozen ones among them, have a gradient after the backward pass that was captured."""
        nodes = [p.node for p in params if p.node.view is not None]
        self._gradients = [(node, node.view if node.gradient is node.view else None) for node in nodes]

    def _give_gradients(self) -> None:
        for node, gradient in self._gradients:
            node.gradient = gradient

    def _hand_on(self) -> None:
        """What forward leaves on the host: copies of what it reported, and the number of draws."""
        reporter = _current_reporter() if self._reported else None
        if reporter is not None:
            reporter.observation.update({name: value.copy() for name, value in self._reported.items()})
        state = list(random.get_state())
        state[_DRAW] = self._num_draws
        random.set_state(tuple(state))


_one_at_a_time = threading.RLock()
_DRAW = 4  # the place of the number of draws in the state of random numbers


def _copied(a: Array) -> Array:
    """An input at an address of its own; numbers as they are."""
    return backend.copy_as_it_lies(a) if backend.is_array(a) else a


@contextlib.contextmanager
def _own_products() -> Iterator[None]:
    """Multiply matrices by cuBLASLt within the block, as CuPy refuses to during a capture."""
    before, backend.capturing.product = backend.capturing.product, cublaslt.serve
    try:
        yield
    finally:
        backend.capturing.product = before


@contextlib.contextmanager
def _observing() -> Iterator[dict[str, Array]]:
    """What is reported within the block, apart from what was reported before."""
    observation: dict[str, Array] = {}
    reporter = _current_reporter()
    with contextlib.nullcontext() if reporter is None else reporter.scope(observation):
        yield observation


def _current_reporter() -> Reporter | None:
    try:
        return get_current_reporter()
    except RuntimeError:  # nobody wants to know
        return None
