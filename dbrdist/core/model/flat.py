"""Flat memory: all parameters of one type and device in one contiguous array, and likewise their gradients.

Packing, casting, reduction over ranks, clipping and updates are then each one pass over memory. An ``Arena`` is built
by ``optimizer.setup`` where every parameter has a shape by then, else by the first update or reduction, in the order of
registration; a parameter lies in at most one. A ``Run`` is a contiguous stretch of it whose parameters are treated
alike: frozen parameters and those with their own rules cut runs.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from dbrdist.core.array.backend import Array, DType, aligned_zeros, device_of, empty, fill, on, to_device
from dbrdist.core.array.current_device import number_of
from dbrdist.core.array.pages import release_free
from dbrdist.core.model.parameter import Parameter, Slot
from dbrdist.core.model.weight_copies import is_captured_by_program

if TYPE_CHECKING:
    from collections.abc import Hashable

ALIGNMENT_BYTES = 64
_MANY_BYTES = 1 << 24  # of parameters that move into an arena: what they leave is worth giving back

Piece: TypeAlias = tuple[int, int]  # (first, last + 1) of the elements of a flattened parameter
Allocate: TypeAlias = Callable[[int, DType, Array], Array]  # (count, dtype, like): zeros in a 1-d array where like is


class Arena:
    """Two contiguous arrays, ``data`` and ``grad``, and the parameters that are views into them.

    Parameters start at multiples of 64 bytes. The gaps between them hold zeros: after whatever may write there, such as
    a hook, :meth:`Run.clear_gaps` is called. The arena does not own its parameters: it dies with the last view.
    """

    def __init__(self, params: Sequence[Parameter], allocate: Allocate, memory: Array | None = None) -> None:
        """Lay out ``params`` in new memory; or one of them in ``memory``, which it shares with another parameter."""
        dtype = params[0].dtype
        step = ALIGNMENT_BYTES // dtype.itemsize or 1
        starts, total = [], 0
        for p in params:
            starts.append(total)
            total += -(-p.size // step) * step
        self.num_writes = 0  # how often somebody may have written to the parameters
        self.is_handed_out = False  # whether a program may hold the memory, and write there unnoticed
        self._data: Array = allocate(total, dtype, params[0].lend()) if memory is None else memory
        self.grad: Array = allocate(total, dtype, params[0].lend())
        self._members = [weakref.ref(p) for p in params]
        for i, (p, start) in enumerate(zip(params, starts)):  # each array is freed before the next one moves
            stop = start + p.size
            shape = p.shape
            views = self._data[start:stop].reshape(shape), self.grad[start:stop].reshape(shape)
            p.enter_arena(Slot(self, i, start, stop), *views, is_guest=memory is not None)

    @property
    def data(self) -> Array:
        """The parameters, shape (size,). Whoever asks may keep it, and write there at any time."""
        self.hand_out()
        return self._data

    @data.setter
    def data(self, memory: Array) -> None:
        self.hand_out()
        self._data = memory

    def lend(self) -> Array:
        """The parameters, for code that keeps no reference to them and does not write there."""
        return self._data

    def hand_out(self) -> None:
        """From now on a program may write to the parameters at any time."""
        self.is_handed_out = True
        self.num_writes += 1

    def note_write(self) -> None:
        """Somebody writes to the parameters now; where a program captures that in a graph, with each replay, too."""
        self.num_writes += 1
        if number_of(self._data) is not None and is_captured_by_program():
            self.hand_out()

    def move_gradients(self, memory: Array) -> None:
        """Keep the gradients in ``memory`` from now on, of the same size and type; those that are there come along."""
        fill(memory, self.grad)
        self.grad = memory
        for p, slot in self._placed():
            p.move_gradient(memory[slot.start : slot.stop].reshape(p.shape))

    def move_data(self, memory: Array) -> None:
        """Keep the parameters in ``memory`` from now on, of the same size and type. None may share its array."""
        fill(memory, self._data)
        self._data = memory
        self.num_writes += 1
        for p, slot in self._placed():
            p.move_array(memory[slot.start : slot.stop].reshape(p.shape))

    @property
    def is_shared(self) -> bool:
        """True if a parameter that is elsewhere uses one of the arrays."""
        return any(p.is_shared for p, _ in self._placed())

    def _placed(self) -> list[tuple[Parameter, Slot]]:
        """The parameters that lie here."""
        found = [member() for member in self._members]
        return [(p, p.slot) for p in found if p is not None and p.slot is not None and p.slot.arena is self]


class Run:
    """A contiguous stretch of one arena: ``data`` and ``grad`` as 1-d views, and its parameters in order.

    Args:
        params: neighbours in the arena.
        is_lent: whether all who ask for ``data`` write there at once and keep none of it, as dbrdist itself does.
    """

    __slots__ = ("_gaps", "_is_lent", "_layers", "arena", "grad", "memory", "params", "start", "stop")

    def __init__(self, params: list[Parameter], is_lent: bool = False) -> None:
        self.params = params
        self._is_lent = is_lent
        slots = [p.slot for p in params if p.slot is not None]
        self.arena: Arena = slots[0].arena
        self.start = start = slots[0].start
        self.stop = slots[-1].stop
        self._layers = [(p, slice(slot.start - start, slot.stop - start)) for p, slot in zip(params, slots)]
        # The parameters, for code that keeps no reference to them, and does not write to those of a device.
        self.memory: Array = self.arena.lend()[self.start : self.stop]
        self.grad: Array = self.arena.grad[self.start : self.stop]  # the gradients; valid after collect_gradients
        self._gaps: Array | None = None

    @property
    def data(self) -> Array:
        """The parameters, shape (size,). Whoever asks may write there."""
        if self._is_lent:
            self.arena.num_writes += 1
        else:
            self.arena.hand_out()
        return self.memory

    @data.setter
    def data(self, memory: Array) -> None:  # for run.data -= 1, too
        self.arena.num_writes += 1
        self.memory = memory

    @property
    def size(self) -> int:
        """The number of elements, gaps between parameters included."""
        return self.stop - self.start

    def widened(self, data: Array) -> Run:
        """The same stretch with its elements in ``data``, of a wider type, and room for their gradients beside it."""
        run = copy.copy(self)
        run.memory, run.grad = data, empty(data.shape, data.dtype, data)
        return run

    @property
    def gaps(self) -> Array:
        """The elements that belong to no parameter, as indexes, shape (count,), where the run lies."""
        if self._gaps is None:
            places = [where for _, where in self._layers]
            pieces = [np.arange(a.stop, b.start) for a, b in itertools.pairwise(places)]
            host = np.concatenate(pieces) if pieces else np.arange(0)
            self._gaps = to_device(host, device_of(self.data))
        return self._gaps

    def clear_gaps(self, *arrays: Array) -> None:
        """Make the gaps zero again, in data, gradients and further arrays of the run's size."""
        if self.gaps.size:
            with on(self.data):
                for a in (self.data, self.grad, *arrays):
                    a[self._gaps] = 0

    def layers(self) -> list[tuple[Parameter, slice]]:
        """Each parameter with its elements, counted from the start of the run."""
        return self._layers

    def groups(self) -> Iterable[list[tuple[Parameter, slice]]]:
        """The layers in groups whose norms are taken together: here one by one."""
        return ([layer] for layer in self._layers)

    def total(self, values: Sequence[float | np.generic]) -> Sequence[float | np.generic]:
        """Sums over all elements of the layers, of those over the elements here."""
        return values

    def piece(self, p: Parameter, where: slice) -> Piece | None:
        """Which elements of the flattened parameter lie here; None is all of them."""
        return None


class Shard(Run):
    """The elements ``begin`` to ``end`` of a run, where the ranks divide an update among themselves.

    It has all parameters of the run; those that are elsewhere have no elements here. ``total`` adds numbers over the
    ranks, so that norms are those of whole parameters.
    """

    __slots__ = ("_total", "_whole")

    def __init__(
        self, run: Run, begin: int, end: int, total: Callable[[Sequence[float | np.generic]], list[float]]
    ) -> None:
        self.params = run.params
        self._is_lent = run._is_lent
        self.arena = run.arena
        self.start = run.start + begin
        self.stop = run.start + end
        self.memory = run.data[begin:end]
        self.grad = run.grad[begin:end]
        self._layers = [
            (p, slice(min(max(where.start, begin), end) - begin, min(max(where.stop, begin), end) - begin))
            for p, where in run.layers()
        ]
        self._gaps = None
        self._whole = run
        self._total = total

    @property
    def gaps(self) -> Array:
        if self._gaps is None:
            begin = self.start - self._whole.start
            gaps = self._whole.gaps
            self._gaps = gaps[(gaps >= begin) & (gaps < begin + self.size)] - begin
        return self._gaps

    def groups(self) -> Iterable[list[tuple[Parameter, slice]]]:
        """All layers in one group: their norms are added over the ranks in one go."""
        return [self._layers]

    def total(self, values: Sequence[float | np.generic]) -> list[float]:
        return self._total(values)

    def piece(self, p: Parameter, where: slice) -> Piece | None:
        if where.start == where.stop:
            return 0, 0
        assert p.slot is not None
        first = self.start + where.start - p.slot.start
        return first, first + where.stop - where.start


def unique(params: Iterable[Parameter]) -> list[Parameter]:
    """``params`` without repetitions, since a parameter may belong to several links."""
    return list(dict.fromkeys(params))


def gather(params: Iterable[Parameter], allocate: Allocate = aligned_zeros) -> list[Parameter]:
    """The initialised parameters among ``params``, each once and each in an arena.

    Where one has no place yet, an arena is planned over all of the given parameters of its type and device, in memory
    from ``allocate``.
    """
    settled = [p for p in unique(params) if p.is_initialized]
    moving = [p for p in settled if p.slot is None]
    if not moving:
        return settled
    groups: dict[Hashable, list[Parameter]] = {}
    for p in settled:
        key = (p.dtype, "numpy") if isinstance(p.lend(), np.ndarray) else (p.dtype, device_of(p.lend()).name)
        groups.setdefault(key, []).append(p)
    for group in groups.values():
        if any(p.slot is None for p in group):
            _settle(group, allocate)
    if sum(p.lend().nbytes for p in moving if isinstance(p.lend(), np.ndarray)) >= _MANY_BYTES:
        release_free()  # where they lay before: activations would fill it only in part, and the rest count in each peak
    return settled


def _settle(group: list[Parameter], allocate: Allocate) -> None:
    """Give each of ``group`` a place. Of those that share an array, the first brings it along, others are guests."""
    hosts, shared = [], set()
    for p in group:
        is_guest = id(p.peers) in shared or (p.slot is None and p.host() is not None)
        if p.peers is not None:
            shared.add(id(p.peers))
        if not is_guest:
            hosts.append(p)
    if any(p.slot is None for p in hosts):
        Arena(hosts, allocate)
    for p in group:
        host = p.host() if p.slot is None else None
        if host is not None:
            assert host.slot is not None
            Arena([p], allocate, host.slot.arena.lend()[host.slot.start : host.slot.stop])


def runs(
    params: Iterable[Parameter], key: Callable[[Parameter], Hashable] | None = None, is_lent: bool = False
) -> list[Run]:
    """Contiguous runs that cover all initialised parameters; neighbours with another ``key`` begin a new run.

    ``is_lent``: see :class:`Run`.
    """
    settled = gather(params)
    arenas: dict[int, int] = {}  # in the order of the parameters, which is the same on every rank
    for p in settled:
        assert p.slot is not None
        arenas.setdefault(id(p.slot.arena), len(arenas))
    ordered = sorted(settled, key=lambda p: (arenas[id(p.slot.arena)], p.slot.index))  # type: ignore[union-attr]
    stretches: list[list[Parameter]] = []
    last_key = None
    for p in ordered:
        own_key = None if key is None else key(p)
        if not stretches or own_key != last_key or not _follows(stretches[-1][-1], p):
            stretches.append([])
        stretches[-1].append(p)
        last_key = own_key
    return [Run(stretch, is_lent) for stretch in stretches]


def collect_gradients(params: Iterable[Parameter]) -> None:
    """Make the gradients in flat memory valid: a parameter that got none counts as gradient zero."""
    for p in params:
        node = p.node
        if node.gradient is None or node.gradient is not node.view:
            p.collect_gradient()


def _follows(a: Parameter, b: Parameter) -> bool:
    assert a.slot is not None and b.slot is not None
    return a.slot.arena is b.slot.arena and b.slot.index == a.slot.index + 1
