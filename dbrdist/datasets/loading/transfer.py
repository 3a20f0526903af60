"""Batches on their way to a GPU while it still computes with the one before."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dbrdist.core.array.backend import Array, Device, DeviceSpec, get_device, is_array, using_device
from dbrdist.datasets.loading.base import Batch
from dbrdist.datasets.loading.convert import concat_examples


class _PinnedRoom:
    """Host memory from which a device copies by itself, used again once it has."""

    def __init__(self) -> None:
        self._memory: Any = None
        self._copied: Any = None

    def fill(self, a: Array, cupy: Any) -> Array:
        """``a`` in this room; waits until what was in it has been copied."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._memory is None or self._memory.nbytes < a.nbytes:
            self._memory = np.frombuffer(cupy.cuda.alloc_pinned_memory(a.nbytes), np.uint8, a.nbytes)
        there = self._memory[: a.nbytes].view(a.dtype).reshape(a.shape)
        there[...] = a
        return there

    def leave(self, copied: Any) -> None:
        """The room is free when this event has come."""
        self._copied = copied


class Conveyor:
    """Arrays of one kind on their way to a device: :meth:`put` starts a copy, :meth:`get` gives the oldest one.

    Args:
        device: where the arrays go; None and the CPU leave them where they are.
        stream: on which they are copied; None makes one.
        made: called with each new array of the device; nothing but that array and its views hold its memory.
    """

    def __init__(
        self, device: DeviceSpec | None = None, stream: Any = None, made: Callable[[Array], None] | None = None,
    ) -> None:  # fmt: skip
        self._device = None if device is None else get_device(device)
        self._stream = stream
        self._made = made
        self._rooms = deque([_PinnedRoom(), _PinnedRoom()])
        self._waiting: deque[tuple[Array, Any]] = deque()

    def put(self, array: Array) -> None:
        """Start the copy of an array, which may be changed at once; one that stays on the host is not copied."""
        device = self._device
        if device is None or device.module == "numpy" or not isinstance(array, np.ndarray) or not array.size:
            self._waiting.append((array if device is None else device.send(array), None))
            return
        with using_device(device):
            self._waiting.append(self._start(array, device.xp))

    def _start(self, array: Array, cupy: Any) -> tuple[Array, Any]:
        self._stream = self._stream or cupy.cuda.Stream(non_blocking=True)
        is_image = array.ndim == 4
        room = self._rooms[0]
        self._rooms.rotate()
        pinned = room.fill(array.transpose(0, 2, 3, 1) if is_image else array, cupy)
        with self._stream:
            there = cupy.empty(pinned.shape, pinned.dtype)
        there.set(pinned, self._stream)
        copied = cupy.cuda.Event()
        copied.record(self._stream)
        room.leave(copied)
        if self._made is not None:
            self._made(there)
        return there.transpose(0, 3, 1, 2) if is_image else there, copied

    def get(self, sync: bool = True) -> Array:
        """The oldest array that was put. With ``sync`` it is there; else what the device does next waits for it."""
        array, copied = self._waiting.popleft()
        if copied is not None:
            if sync:
                copied.synchronize()
            else:
                with using_device(self._device):
                    self._device.xp.cuda.get_current_stream().wait_event(copied)  # type: ignore[union-attr]
        return array


class _Lent:
    """Memory of the device that the program has in an array, or had: then ``dropped`` says what may still read it."""

    __slots__ = ("dropped", "memory")

    def __init__(self, array: Array) -> None:
        self.memory = array.data  # holds the memory, not the array
        self.dropped: list[Any] | None = None


class _Room:
    """The memory of batches on one device: given back to the copying stream once nothing can read it any more.

    When the program drops an array, an event is recorded on each stream that computes. Before the memory is given back,
    the copying stream waits for these events. That happens two calls after the array was dropped, so that the wait is
    for a step that is over, and copies still overlap with the one that runs.
    """

    def __init__(self, device: Device, stream: Any, compute_stream: Any) -> None:
        self._device, self._stream, self._compute_stream = device, stream, compute_stream
        self._lent: deque[_Lent] = deque()
        self._computing: dict[int, Any] = {}  # streams of programs that asked for batches, by address
        self._resting: list[_Lent] = []  # dropped before the last call

    def start_batch(self) -> None:
        """Give back what was dropped before the last call."""
        stream = self._compute_stream or self._device.xp.cuda.get_current_stream()
        self._computing[_key(stream)] = stream
        for lent in self._resting:
            for event in lent.dropped or ():
                self._stream.wait_event(event)
        self._resting = [lent for lent in self._lent if lent.dropped is not None]
        self._lent = deque(lent for lent in self._lent if lent.dropped is None)

    def lend(self, array: Array) -> None:
        """Keep the memory of an array that the program gets now."""
        lent = _Lent(array)
        self._lent.append(lent)
        weakref.finalize(array, self._note, lent).atexit = False

    def _note(self, lent: _Lent) -> None:
        """The program has dropped an array and all views of it."""
        events = []
        with using_device(self._device):
            cuda = self._device.xp.cuda
            here = cuda.get_current_stream()
            for stream in {**self._computing, _key(here): here}.values():
                event = cuda.Event()
                event.record(stream)
                events.append(event)
        lent.dropped = events


def _key(stream: Any) -> int:
    return int(getattr(stream, "ptr", id(stream)))


class _Sender:
    """What a Batch takes for a device: sends its arrays one after the other by conveyors."""

    def __init__(self, device: Device, stream: Any, compute_stream: Any) -> None:
        self.xp = device.xp
        self._compute_stream = compute_stream
        self._room = room = _Room(device, stream, compute_stream)
        self._conveyors: dict[int, Conveyor] = defaultdict(lambda: Conveyor(device, stream, room.lend))
        self._count = 0  # arrays of this batch so far

    def start_batch(self) -> None:
        self._room.start_batch()
        self._count = 0

    def send(self, array: Array) -> Array:
        conveyor = self._conveyors[self._count]
        self._count += 1
        conveyor.put(array)
        if self._compute_stream is None:
            there = conveyor.get(sync=False)
        else:
            with self._compute_stream:
                there = conveyor.get(sync=False)
        return there


class ConcatWithAsyncTransfer:
    """As :func:`~dbrdist.dataset.concat_examples`, for a converter that sends to a GPU while it computes.

    The batch goes to the device on a stream of its own, out of memory from which the device copies by itself. The
    computations that come next wait for it; the host does not, nor do those that were started before. Each instance
    serves one device. A batch may be kept and used as often as the program likes: its memory is used for another one
    only when the program has dropped it, and after the computations that were started until then.

    Args:
        stream: on which batches are sent (a ``cupy.cuda.Stream``); None makes one at the first call.
        compute_stream: on which computations run; None is the current one.

    Example:
        >>> convert = dbrdist.dataset.ConcatWithAsyncTransfer()
        >>> convert([(np.ones(2), 0), (np.zeros(2), 1)])[0].shape
        (2, 2)
    """

    def __init__(self, stream: Any = None, compute_stream: Any = None) -> None:
        self._stream = stream
        self._compute_stream = compute_stream
        self._device: Device | None = None
        self._sender: Any = None
        self._computed: Any = None

    def __call__(self, batch: Any, device: DeviceSpec | None = None, padding: int | None = None) -> Any:
        """The arrays of a batch on ``device``; None and the CPU: as ``concat_examples`` gives them."""
        return self.convert(batch, device, padding)

    def convert(
        self, batch: Any, device: DeviceSpec | None, padding: int | None = None, dtype: DTypeLike | None = None
    ) -> Any:
        """As a call; images that become floating numbers on the device only are of ``dtype`` then.

        Args:
            batch: a list of examples, or a :class:`~dbrdist.datasets.Batch`.
            device: where the arrays go.
            padding: fills arrays of several sizes up, as in ``concat_examples``.
            dtype: the floating type of images that are sent as uint8; None is float32.
        """
        found = None if device is None else get_device(device)
        if found is None or found.module == "numpy":
            return concat_examples(batch, found, padding)
        if self._device is None:
            self._device = found
        if found != self._device:
            raise ValueError(f"expected the device {self._device} as in the first call, got {found}; make one for each")
        with using_device(found):
            self._follow(found.xp.cuda)
            if isinstance(batch, Batch):
                return batch.to_device(self._sender, dtype)
            return _each(self._sender.send, concat_examples(batch, None, padding))

    def _follow(self, cuda: Any) -> None:
        """Let copies begin when what was computed before the call before is done."""
        self._stream = self._stream or cuda.Stream(non_blocking=True)
        if self._sender is None:
            self._sender = _Sender(self._device, self._stream, self._compute_stream)  # type: ignore[arg-type]
        if self._computed is not None:
            self._stream.wait_event(self._computed)
        self._computed = cuda.Event()
        self._computed.record(self._compute_stream or cuda.get_current_stream())
        self._sender.start_batch()


def _each(send: Any, arrays: Any) -> Any:
    if isinstance(arrays, tuple):
        return tuple(send(a) for a in arrays)
    if isinstance(arrays, dict):
        return {k: send(a) for k, a in arrays.items()}
    return send(arrays) if is_array(arrays) else arrays
