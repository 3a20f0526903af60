"""Steps as CUDA graphs: forward, backward and update are captured once, and replayed with new inputs and numbers.

A graph repeats its kernels with the addresses and numbers that they had. So inputs are copied to where they were,
memory comes from a pool that nobody else uses, and numbers that change are declared (dbrdist/core/array/declared.py).
What is reported is copied out after each replay. A step that cannot be captured runs eagerly, and a warning says why.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import threading
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from copy import copy
from typing import Any, TypeAlias

import numpy as np

from dbrdist.core.array import backend, random
from dbrdist.core.array.config import config
from dbrdist.core.array.declared import DeclaredBlock, declaring
from dbrdist.core.array.gpu.device_memory import PrivatePool
from dbrdist.core.array.types import Array, CudaGraph, CudaStream
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.model.reporter import Reporter, get_current_reporter
from dbrdist.core.tape.node import VariableNode
from dbrdist.core.tape.variable import Variable
from dbrdist.core.update.optimizer import GradientMethod
from dbrdist.core.update.replayed_update import ReplayedUpdate, plain_values, switches_of, why_not_captured
from dbrdist.core.usage.mistakes import warn
from dbrdist.errors import CaptureError
from dbrdist.kernels.gpu import cublaslt

_WARM_UP = 3  # eager steps before a capture, the last one on its stream and with its memory
_MOST_GRAPHS = 8  # of one updater, each with memory of its own
_LIBRARIES = ("", "dbrdist", "cupy", "cupyx", "cupy_backends", "numpy", "contextlib")

Args: TypeAlias = tuple[Array, ...]
Named: TypeAlias = Mapping[str, Array]
Attribute: TypeAlias = tuple[dict[str, Any], str, Array]  # of which object, its name and value
Loss: TypeAlias = Callable[..., Variable]


class CapturedSteps:
    """The steps of one updater: ``update(optimizer, loss function, arguments)`` instead of the optimizer's.

    A step is captured for the shapes and types of its inputs and the switches of the configuration, after three eager
    steps of the same kind.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[object, ...], _Step] = {}
        self._said: set[str] = set()
        self._is_first = True
        self._stream: CudaStream | None = None

    def update(
        self, optimizer: GradientMethod, loss_func: Loss, args: Args, named: Named, told: Mapping[str, int]
    ) -> None:
        """One step: replayed if it was captured, captured if it is time to, otherwise eager.

        ``told``: what the optimizer is told besides, where it takes that.
        """
        is_first, self._is_first = self._is_first, False
        if is_first:  # a multi-node optimizer brings ranks together
            optimizer.update(loss_func, *args, **named, **told)
            return
        alone = getattr(optimizer, "optimizer_of_one_rank", None)
        if alone is not None:
            optimizer.num_samples = told.get("num_samples")
            optimizer, told = alone, {}
        reason = why_not_captured(optimizer) or _why_not_inputs((*args, *named.values())) or cublaslt.why_not()
        if reason is not None:
            self._run_eagerly(reason, optimizer, loss_func, args, {**named, **told})
            return
        step = self._step_of(optimizer, loss_func, args, named)
        if step is None:
            reason = f"there are {_MOST_GRAPHS} graphs already, for other shapes of inputs or values of hooks"
            self._run_eagerly(reason, optimizer, loss_func, args, named)
        elif step.reason is not None:
            self._run_eagerly(step.reason, optimizer, loss_func, args, named)
        else:
            try:
                step.run(optimizer, loss_func, args, named)
            except _NotCaptured as e:
                step.reason = str(e)
                self._run_eagerly(step.reason, optimizer, loss_func, args, named)

    def look(self, updater: type) -> None:
        """Called after each step: say in one line that an updater's own ``update_core`` never asks for a capture."""
        if self._is_first and not self._said:
            self._said.add("own")
            warn(
                "the step is not captured as a CUDA graph and runs eagerly: update_core of "
                f"{updater.__name__} is the program's own; give StandardUpdater a loss function instead"
            )

    def _step_of(self, optimizer: GradientMethod, loss_func: Loss, args: Args, named: Named) -> _Step | None:
        which = loss_func if isinstance(loss_func, Hashable) else id(loss_func)
        key = id(optimizer), which, _kinds(args), tuple(named), _kinds(named.values()), switches_of(optimizer)
        key = *key, plain_values(config.__dict__.values())
        step = self._steps.get(key)
        if step is not None and step.is_stale:
            step = None
        if step is None:
            self._steps = {k: s for k, s in self._steps.items() if not s.is_stale}
        if step is None and len(self._steps) < _MOST_GRAPHS:
            if self._stream is None:
                self._stream = backend.import_cupy().cuda.Stream(non_blocking=True)
            step = self._steps[key] = _Step(self._stream, loss_func)
        return step

    def _run_eagerly(self, reason: str, optimizer: GradientMethod, loss_func: Loss, args: Args, named: Named) -> None:
        if reason not in self._said:
            self._said.add(reason)
            warn(f"the step is not captured as a CUDA graph and runs eagerly: {reason}")
        optimizer.update(loss_func, *args, **named)

    @property
    def num_graphs(self) -> int:
        """How many steps have been captured."""
        return sum(step.graph is not None for step in self._steps.values())


def _kinds(values: Iterable[Array]) -> tuple[object, ...]:
    """Shapes, strides and types of arrays; numbers as they are."""
    return tuple([(v.shape, v.strides, v.dtype) if backend.is_array(v) else v for v in values])


def _why_not_inputs(values: Args) -> str | None:
    for v in values:
        if isinstance(v, np.ndarray):
            return "an input of the step is in host memory; name a device for the updater"
        if not backend.is_array(v) and not isinstance(v, bool | int | float | str | None):
            return f"an input of the step is a {type(v).__name__}, expected arrays on the GPU"
    return None


class _NotCaptured(Exception):
    """A step cannot be captured; nothing has happened on the device."""


class _Step:
    """One kind of step: how often it ran, then its graph."""

    def __init__(self, stream: CudaStream, loss_func: Loss) -> None:
        self.loss_func = loss_func  # kept, as its address may be the key
        self.reason: str | None = None
        self.graph: CudaGraph | None = None
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

    @property
    def is_stale(self) -> bool:
        """Whether what was captured is no longer the step, for example after parameters were frozen."""
        if self._host is None:
            return False
        return not self._host.is_current or any(values[name] is not a for values, name, a in self._persistent)

    def run(self, optimizer: GradientMethod, loss_func: Loss, args: Args, named: Named) -> None:
        """Warm up, capture or replay."""
        if self.graph is None:
            if self._num_eager < _WARM_UP - 1 or not optimizer.updates_jointly:
                self._num_eager += 1
                optimizer.update(loss_func, *args, **named)
                return
            if self._num_eager < _WARM_UP or self._pool is None:
                self._num_eager += 1
                self._warm_up(optimizer, loss_func, args, named)
                return
            self._capture(optimizer, loss_func, args, named)
        self._replay(args, named)

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

    def _warm_up(self, optimizer: GradientMethod, loss_func: Loss, args: Args, named: Named) -> None:
        """An eager step with the memory of the graph, and a look at what it leaves in the links."""
        cuda = backend.import_cupy().cuda
        self._pool = PrivatePool()
        links = _Attributes(optimizer.target)
        with self._here(), cuda.using_allocator(self._pool.malloc), _own_products():
            optimizer.update(loss_func, *args, **named)
        self.reason = links.why_not()

    def _capture(self, optimizer: GradientMethod, loss_func: Loss, args: Args, named: Named) -> None:
        with _one_at_a_time:
            self._capture_alone(optimizer, loss_func, args, named)

    def _capture_alone(self, optimizer: GradientMethod, loss_func: Loss, args: Args, named: Named) -> None:
        """Within one process: what is switched off meanwhile is switched off for all threads."""
        cuda = backend.import_cupy().cuda
        self._host = ReplayedUpdate(optimizer)
        draws, links = random.get_state(), _Attributes(optimizer.target)
        self._persistent = list(links.persistent_arrays())
        with self._here(), cuda.using_allocator(self._pool.malloc):
            self._args = tuple([backend.copy_as_it_lies(a) if backend.is_array(a) else a for a in args])
            self._named = {k: backend.copy_as_it_lies(a) if backend.is_array(a) else a for k, a in named.items()}
            self._block = DeclaredBlock()
            try:
                self._record(optimizer, links.watched(loss_func))
            except Exception as e:
                links.go_back()
                raise _NotCaptured(_words(e)) from e
            finally:
                self._num_draws = random.get_state()[_DRAW]
                random.set_state(draws)
                self._host.go_back()
        if not self._host.is_current:
            self._host, self.graph = None, None
            raise _NotCaptured("the step changes the rules of its own update")

    def _record(self, optimizer: GradientMethod, loss_func: Loss) -> None:
        assert self._block is not None
        was_collecting, graph = gc.isenabled(), None
        gc.collect()  # what is destroyed later could disturb the capture
        gc.disable()
        self._stream.begin_capture()
        try:
            with declaring(self._block), _own_products(), _observing() as self._reported:
                optimizer.update(loss_func, *self._args, **self._named)
            graph = self._stream.end_capture()
        finally:
            if graph is None:
                with contextlib.suppress(Exception):  # the capture is invalid already
                    self._stream.end_capture()
            if was_collecting:
                gc.enable()
        for name, value in self._reported.items():
            if not backend.is_array(value) or isinstance(value, np.ndarray):
                raise CaptureError(f"{name!r} is reported as a {type(value).__name__} of the host")
        self.graph = graph

    def _replay(self, args: Args, named: Named) -> None:
        assert self._host is not None and self._block is not None
        self._host.begin()
        with self._here():
            for place, a in zip((*self._args, *self._named.values()), (*args, *named.values())):
                if backend.is_array(a):
                    place[...] = a
            self._block.send(self._stream)
            self.graph.launch(self._stream)
        reporter = _current_reporter() if self._reported else None
        if reporter is not None:
            reporter.observation.update({name: value.copy() for name, value in self._reported.items()})
        state = list(random.get_state())
        state[_DRAW] = self._num_draws
        random.set_state(tuple(state))
        self._host.end(self._block.overflow)


_one_at_a_time = threading.RLock()
_DRAW = 4  # the place of the number of draws in the state of random numbers


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


class _Attributes:
    """The attributes of all links at one time: what a step changes there, and reads again, is state of the host."""

    def __init__(self, target: Link) -> None:
        self._links = list(target.namedlinks())
        self._before = [dict(vars(link)) for _, link in self._links]
        self._held = [{n: copy(v) for n, v in before.items() if type(v) in _CONTAINERS} for before in self._before]
        self._stale: dict[VariableNode, str] = {}

    def why_not(self) -> str | None:
        """Why a step that has just run cannot be captured: it counts, or rebinds arrays."""
        for path, name, old, new in self._changed():
            if type(new) in _CONTAINERS and type(old) is type(new):
                return f"it changes what the attribute {name!r} of the link {path} holds"
            if backend.is_array(new):
                return f"it rebinds the array {name!r} of the link {path}"
            if new is not None and not isinstance(new, Variable):
                return f"it changes the attribute {name!r} of the link {path}, from {old!r:.40} to {new!r:.40}"
        return None

    def _changed(self) -> Iterator[tuple[str, str, Any, Any]]:
        for (path, link), before, held in zip(self._links, self._before, self._held):
            for name, new in vars(link).items():
                old = before.get(name)
                if new is old and name in held and not _holds_the_same(new, held[name]):
                    yield path or "/", name, held[name], new
                if new is old or name == "_changed_at" or isinstance(new, Parameter):
                    continue
                if type(new) is type(old) and plain_values([new]) and new == old:
                    continue
                yield path or "/", name, old, new

    def persistent_arrays(self) -> Iterator[Attribute]:
        """Arrays that are saved with the links: the attributes of which, the name and the array."""
        for (_, link), before in zip(self._links, self._before):
            for name in vars(link).get("_persistent", ()):
                if backend.is_array(before.get(name)):
                    yield vars(link), name, before[name]

    def go_back(self) -> None:
        """Give links their attributes back."""
        links = {path or "/": link for path, link in self._links}
        for path, name, old, _ in list(self._changed()):
            vars(links[path])[name] = old

    def watched(self, loss_func: Loss) -> Loss:
        """A loss function that refuses a graph in which a Variable of the last step takes part."""
        for (path, _), before in zip(self._links, self._before):
            for name, value in before.items():
                if isinstance(value, Variable) and not isinstance(value, Parameter):
                    self._stale[value.node] = f"{name!r} of the link {path or '/'}"

        def call(*args: Array, **kwargs: Array) -> Variable:
            loss = loss_func(*args, **kwargs)
            for node in _nodes_behind(loss):
                if node in self._stale:
                    raise CaptureError(f"it computes with the Variable {self._stale[node]}, from the step before")
            return loss

        return call


_CONTAINERS = (list, dict, set, deque)


def _holds_the_same(one: Any, other: Any) -> bool:
    """Whether two containers hold the same objects, or equal numbers; Variables may be others."""
    if len(one) != len(other) or (isinstance(one, dict) and list(one) != list(other)):
        return False
    pairs = zip(one.values(), other.values()) if isinstance(one, dict) else zip(one, other)
    return all(
        a is b or (isinstance(a, Variable) and isinstance(b, Variable)) or (len(plain_values([a, b])) == 2 and a == b)
        for a, b in pairs
    )


def _nodes_behind(loss: Variable) -> Iterator[VariableNode]:
    seen: set[VariableNode] = set()
    waiting = [loss.node] if isinstance(loss, Variable) else []
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            creator = node.living_creator()
            if creator is not None:
                waiting += [n for n in creator.inputs if n is not None]


def _words(error: Exception) -> str:
    """What an error during a capture says, and the line of the program that led there."""
    said = str(error).strip().split("\n")[0] or type(error).__name__
    frames = list(traceback.walk_tb(error.__traceback__))
    users = [f for f in frames if str(f[0].f_globals.get("__name__", "")).partition(".")[0] not in _LIBRARIES]
    own = [f for f in frames if str(f[0].f_globals.get("__name__", "")).startswith("dbrdist.")]
    if not users and not own:
        return said
    frame, line = (users or own)[-1]
    file = frame.f_code.co_filename
    code = linecache.getline(file, line, frame.f_globals).strip()
    return f"{said} ({file}, line {line}, in {frame.f_code.co_name}: {code})"
