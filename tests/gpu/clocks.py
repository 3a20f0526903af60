"""Streams, events and memory of a GPU's stand-in: everything is computed at once, and vector clocks tell what a real
GPU may do in another order.

A stream counts its work and knows, for each other stream, how much of that is done before its own next piece: through
events, through waits of the host, and through the legacy stream, which waits for all streams of its device but those
made with ``non_blocking``, as they wait for it. A block of memory remembers who wrote and read it. What reads or
overwrites a block before that is ordered is a race: :class:`Race` is raised where it happens.

Memory that is given back lies in a list of its device and of the stream on which it was allocated, as in CuPy's pool:
work of that stream gets it back without any wait.
"""

from __future__ import annotations

import itertools
import threading
from time import perf_counter
from typing import Any, TypeAlias

_numbers = itertools.count(1)
capture: Any = None  # of a stream, see capture.py
_host: dict[int, int] = {}  # what the host has waited for, by stream


class Race(AssertionError):
    """Two pieces of work that nothing orders touch the same memory."""


def _merge(into: dict[int, int], other: dict[int, int]) -> None:
    for stream, count in other.items():
        if into.get(stream, 0) < count:
            into[stream] = count


class Stream:
    """CuPy's class: a queue of work on one device."""

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False, device: int | None = None):
        self.device_id = _thread.device if device is None else device
        self.number = next(_numbers)
        self.ptr = 0 if null else 4096 * self.number
        self.is_blocking = not non_blocking
        self.clock: dict[int, int] = {}
        _streams.setdefault(self.device_id, []).append(self)

    def begin(self) -> int:
        """Begin a piece of work; returns its number."""
        _merge(self.clock, _host)
        if self.ptr == 0:
            for other in _streams[self.device_id]:
                if other.is_blocking:
                    _merge(self.clock, other.clock)
        elif self.is_blocking:
            _merge(self.clock, legacy(self.device_id).clock)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number]

    def begin_capture(self, mode: int | None = None) -> None:
        """From now on nothing is done on this stream, but noted; see capture.py."""
        global capture
        import capture as captures

        assert capture is None, "another stream is captured"
        if self.ptr == 0:
            raise RuntimeError("cudaErrorStreamCaptureUnsupported: the legacy stream cannot be captured")
        self.begin()
        capture = captures.Capture(self)

    def end_capture(self) -> Any:
        """The graph of what was noted."""
        global capture
        assert capture is not None and capture.stream is self, "this stream is not captured"
        capture, ended = None, capture
        return ended.end()

    def is_capturing(self) -> bool:
        return capture is not None and capture.stream is self

    def wait_event(self, event: Event) -> None:
        if capture is not None:
            if self is not capture.stream or event.capture is not capture:
                capture.refuse("a wait for work outside of the capture")
            return
        if event.clock is not None:
            self.begin()
            _merge(self.clock, event.clock)

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        if capture is not None:
            capture.refuse("a wait for a stream")
        self.begin()
        _merge(_host, self.clock)

    def use(self) -> Stream:
        _thread.streams[self.device_id] = self
        return self

    def __enter__(self) -> Stream:
        _thread.outer.append((self.device_id, current_stream(self.device_id)))
        return self.use()

    def __exit__(self, *exc: object) -> None:
        device, stream = _thread.outer.pop()
        _thread.streams[device] = stream

    @property
    def done(self) -> bool:
        return False


class Event:
    """CuPy's class: a point in a stream's work."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.clock: dict[int, int] | None = None
        self.capture: Any = None  # in which it was recorded
        self.is_timed, self.seconds = not disable_timing, 0.0

    def record(self, stream: Any = None) -> None:
        stream = current_stream() if stream is None else stream
        self.capture = capture
        if capture is not None:
            if stream is not capture.stream:
                capture.refuse("an event on another stream")
            return
        assert stream.device_id == _thread.device, "an event of another device than the current one"
        stream.begin()
        self.clock, self.seconds = dict(stream.clock), perf_counter()

    def synchronize(self) -> None:
        if capture is not None:
            capture.refuse("a wait for an event")
        if self.clock is not None:
            _merge(_host, self.clock)


def get_elapsed_time(start: Event, end: Event) -> float:
    """CuPy's function: milliseconds between two points."""
    for event in (start, end):
        assert event.is_timed and event.clock is not None, "an event that was not recorded, or without its time"
    return (end.seconds - start.seconds) * 1e3


class _Thread(threading.local):
    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}
        self.outer: list[tuple[int, Stream]] = []


_thread = _Thread()
_streams: dict[int, list[Stream]] = {}
_legacy: dict[int, Stream] = {}


def legacy(device: int) -> Stream:
    """The stream with address 0 of a device."""
    if device not in _legacy:
        _legacy[device] = Stream(null=True, device=device)
    return _legacy[device]


def current_stream(device: int | None = None) -> Stream:
    """The stream of this thread on a device, or on the current one."""
    device = _thread.device if device is None else device
    return _thread.streams.get(device) or legacy(device)


def current_device() -> int:
    return _thread.device


def use_device(number: int) -> None:
    _thread.device = number


# ---- memory


Range: TypeAlias = tuple[int, int]  # first byte, last + 1


class Block:
    """Memory of a device: who wrote which bytes last, and who has read them since."""

    def __init__(self, num_bytes: int, device: int, owner: int) -> None:
        self.num_bytes, self.device, self.owner = num_bytes, device, owner
        self.written: dict[tuple[Range, int], int] = {}  # by bytes and stream: the number of its work
        self.read: dict[tuple[Range, int], int] = {}
        self.memory: Any = None  # where somebody gives it some, see whole.py
        self.free: Any = None  # where it is put when it is freed


class Lease:
    """A block while something holds it: arrays, their views, and pointers to them."""

    def __init__(self, block: Block) -> None:
        self.block = block

    def __del__(self, free: Any = None) -> None:
        block = self.block
        if _free is None:  # at the end of the process
            return
        if block.memory is not None:
            block.memory.use(0)
        (_free if block.free is None else block.free).setdefault(
            (block.device, block.owner, block.num_bytes), []
        ).append(block)


_free: dict[tuple[int, int, int], list[Block]] = {}


class _Pools(threading.local):
    current: Any = None  # a private one, see capture.py


pools = _Pools()


def allocate(num_bytes: int) -> Lease:
    """Memory on the current device, for the current stream, as CuPy's pool gives it."""
    stream = current_stream()
    num_bytes = -(-max(num_bytes, 1) // 512) * 512
    pool = pools.current
    if capture is not None and pool is None:
        capture.refuse("memory of the default pool, which gives it to others before the graph is replayed,")
    free = (_free if pool is None else pool.free).get((_thread.device, stream.number, num_bytes))
    block = free.pop() if free else Block(num_bytes, _thread.device, stream.number)
    if pool is not None and block.free is None:
        block.free = pool.free
        pool.blocks.append(block)
    return Lease(block)


def begin_anew() -> None:
    """Wait for everything, forget freed memory, and make device 0 the current one: each test begins so."""
    global capture
    capture, pools.current = None, None
    for streams in _streams.values():
        for stream in streams:
            _merge(_host, stream.clock)
    for device, streams in list(_streams.items()):
        _streams[device] = [stream for stream in streams if stream.ptr == 0]
    _free.clear()
    _thread.streams.clear()
    use_device(0)


class Part:
    """Some bytes of what a lease holds, for :func:`touch`."""

    def __init__(self, lease: Lease, begin: int, end: int) -> None:
        self.lease, self.block, self.bytes = lease, lease.block, (begin, end)


def touch(reads: Any, writes: Any, stream: Stream | None = None) -> None:
    """A piece of work on the current stream, or another one, that reads and writes these leases, or parts of them."""
    stream = current_stream() if stream is None else stream
    if capture is not None:
        capture.look(reads, writes, stream)
        return
    time = stream.begin()
    for lease in reads:
        block, which = lease.block, bytes_of(lease)
        _see(stream, block.written, which, "reads", "wrote", block)
        block.read[which, stream.number] = time
    for lease in writes:
        block, which = lease.block, bytes_of(lease)
        _see(stream, block.written, which, "overwrites", "wrote", block)
        _see(stream, block.read, which, "overwrites", "reads", block)
        for before in (block.written, block.read):
            for key in [key for key in before if which[0] <= key[0][0] and key[0][1] <= which[1]]:
                del before[key]
        block.written[which, stream.number] = time


def bytes_of(part: Any) -> Range:
    """Of a lease, or a part of one."""
    return getattr(part, "bytes", None) or (0, part.block.num_bytes)


def _see(stream: Stream, before: dict[tuple[Range, int], int], which: Range, verb: str, did: str, block: Block) -> None:
    for (bytes_before, number), time in before.items():
        is_ordered = stream.clock.get(number, 0) >= time
        if not is_ordered and bytes_before[0] < which[1] and which[0] < bytes_before[1]:
            raise Race(
                f"stream {stream.number} (device {stream.device_id}) {verb} {block.num_bytes} bytes of device "
                f"{block.device} that stream {number} {did}, and nothing orders the two"
            )
