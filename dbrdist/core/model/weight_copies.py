"""Copies of weights in the layouts and types that a device's libraries read, all of them made in one launch.

A convolution in 16 bits reads its float32 weights narrowed, and in another order; laying out those of each layer by
itself takes a launch for each. The copies here are made together, at the first call of a forward pass that reads one,
for all layers that read theirs in the pass before. So a copy may be older than the call that reads it, and a value
must still be that of the moment of the call. Hence:

- Copies are made only between an update and the next write to the flat memory (``Arena.num_writes``), whoever writes:
  an update, a hook, a reduction, a replayed graph, a load, an assignment.
- There are none of memory that a program may hold (``Arena.hand_out``): once runs of it were asked for, or shown to a
  hook or a rule of the program's own, or once a program has captured an update, or another write of dbrdist's, in a
  graph of its own.
- A weight whose array a program may hold is laid out at each call, as the program may write there unnoticed. That is
  one whose ``array`` was asked for since it entered flat memory, one that a function read which is not known to keep
  its inputs to itself, one that a hook was shown, and one that shares its array with another parameter.
- Copies serve the thread and the stream that made them: nothing orders others. Those of a captured step serve that
  step alone, since nothing is computed while it is captured; a graph that a program captures has none.
- Nothing is written to a copy after it was made: graphs keep theirs for backward, whatever is updated meanwhile.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from dbrdist.core.array import declared

if TYPE_CHECKING:
    from collections.abc import Hashable

    from dbrdist.core.array.types import Array, CudaStream
    from dbrdist.core.model.flat import Run
    from dbrdist.core.model.parameter import Parameter, Slot


class Layout(Protocol):
    """How a kernel reads weights: called with them, it makes a copy by itself."""

    key: Hashable  # equal for layouts that make the same of the same weights
    together: Callable[[list[tuple[Any, Array]]], list[Array]]  # makes copies of several weights in one launch

    def __call__(self, W: Array) -> Array: ...


Reader: TypeAlias = "Callable[[Array, Layout], Array]"  # the copy of a parameter's array in a layout, for one call


class _Wanted(NamedTuple):
    """A copy that was read: whose, and in which layout."""

    param: Parameter
    slot: Slot
    layout: Layout


class _Made:
    """Copies by the places of their weights and layouts, and where they were made."""

    __slots__ = ("block", "laid", "num_writes", "stream", "thread")

    def __init__(self, num_writes: int) -> None:
        self.num_writes = num_writes  # before they were made, as another thread may update the weights meanwhile
        self.thread = get_ident()
        self.stream = _current_stream()  # held, so that no other one gets its address
        self.block = declared.current()
        self.laid: dict[Hashable, Array] = {}


class WeightCopies:
    """The copies of the weights in one run of flat memory. It belongs to whoever updates that."""

    def __init__(self, run: Run) -> None:
        self._arena = run.arena
        self._num_writes = -1  # as the last update left it
        self._made: _Made | None = None
        self._wanted: dict[Hashable, _Wanted] = {}  # what was read between the last two updates,
        self._read: dict[Hashable, _Wanted] = {}  # and since the last one
        for p in run.params:
            if p.slot is not None:
                p.slot.give_copies(self)

    def close(self) -> None:
        """An update is about to come: no copies of the memory are of use any longer, another optimizer's neither."""
        self._made, self._num_writes = None, -1
        self._arena.num_writes += 1

    def open(self) -> None:
        """An update is done."""
        if is_captured_by_program():
            self._arena.hand_out()
        if self._arena.is_handed_out:
            return
        self._made, self._num_writes = None, self._arena.num_writes
        if self._read:
            self._wanted, self._read = self._read, {}

    def reader_of(self, param: Parameter, slot: Slot) -> Reader | None:
        """By which a kernel reads its copy, unless it has to lay out the weights itself."""
        if self._num_writes != self._arena.num_writes or not _is_unreachable(param):
            return None
        return functools.partial(self.read, param, slot)

    def read(self, param: Parameter, slot: Slot, W: Array, layout: Layout) -> Array:
        """The copy of ``W`` in a layout."""
        made, block, stream = self._made, declared.current(), _current_stream()
        if stream.ptr and block is None and stream.is_capturing():  # in a graph of the program
            return layout(W)
        if made is not None and made.block is block and made.num_writes == self._num_writes:
            if made.thread != get_ident() or made.stream.ptr != stream.ptr:
                return layout(W)
        else:
            made = self._made = self._make()
        key = slot.index, layout.key
        if key not in self._read:
            self._read[key] = _Wanted(param, slot, layout)
        laid = made.laid.get(key)
        if laid is None:
            laid = made.laid[key] = layout(W)
        return laid

    def _make(self) -> _Made:
        made = _Made(self._num_writes)
        groups: dict[Any, tuple[list[Hashable], list[tuple[Layout, Array]]]] = {}
        for key, (param, slot, layout) in list(self._wanted.items()):
            if param.slot is slot and _is_unreachable(param):
                keys, pieces = groups.setdefault(layout.together, ([], []))
                keys.append(key)
                pieces.append((layout, param.lend()))
        for together, (keys, pieces) in groups.items():
            made.laid.update(zip(keys, together(pieces)))
        return made


def _current_stream() -> CudaStream:
    stream: CudaStream = sys.modules["cupy"].cuda.get_current_stream()
    return stream


def is_captured_by_program() -> bool:
    """Whether work of this thread is captured in a graph that is no captured step: who replays it tells nobody."""
    return _is_captured(_current_stream())


def _is_captured(stream: CudaStream) -> bool:
    return stream.ptr != 0 and declared.current() is None and stream.is_capturing()


def _is_unreachable(param: Parameter) -> bool:
    """Whether no program has got the array."""
    return not param.node.is_handed_out and param.peers is None
