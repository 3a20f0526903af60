"""Stream capture of the stand-in, with ``--on whole``: CUDA's rules, and graphs that can be replayed.

While a stream is captured, nothing happens on the device: what is launched becomes a node of a graph, with the numbers
and addresses of its arguments. So the stand-in computes, as its results have to have shapes, and puts memory outside of
the private pool back at the end. CUDA and CuPy refuse, and so does the stand-in: waits and reads of the host, copies of
memory that is not pinned, work on other streams, CuPy's products of matrices. Memory of another pool than a private one
is refused as well, since that would be given to others before the graph is replayed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import clocks
import numpy as np


class CaptureRefused(RuntimeError):
    """CUDA's error where a captured stream cannot do something."""


class Node(NamedTuple):
    """One launch: its name and arguments, the blocks that it reads and writes, and what does it again."""

    name: str
    arguments: tuple[Any, ...]
    reads: list[Any]
    writes: list[Any]
    again: Callable[[], Any]


class _Block(NamedTuple):
    """What stands for a lease, or a part of one, after it ended: a graph holds no memory, its pool does."""

    block: Any
    bytes: tuple[int, int]


class Pool:
    """CuPy's MemoryPool: what is freed is given out again on the stream that had it."""

    def __init__(self) -> None:
        self.free: dict[Any, list[Any]] = {}
        self.blocks: list[Any] = []

    def malloc(self, num_bytes: int) -> Any:
        import whole

        with using(self):
            return whole.alloc(num_bytes)

    def used_bytes(self) -> int:
        return self.total_bytes() - sum(b.num_bytes for some in self.free.values() for b in some)

    def total_bytes(self) -> int:
        return sum(b.num_bytes for b in self.blocks)

    def free_all_blocks(self) -> None:
        self.free.clear()


@contextlib.contextmanager
def using(pool: Pool) -> Iterator[None]:
    """Allocate from this pool within the block."""
    before = clocks.pools.current
    clocks.pools.current = pool
    try:
        yield
    finally:
        clocks.pools.current = before


@contextlib.contextmanager
def using_allocator(malloc: Any = None) -> Iterator[None]:
    """``cupy.cuda.using_allocator`` for the ``malloc`` of a pool."""
    with using(None if malloc is None else malloc.__self__):
        yield


class Capture:
    """A stream that is captured."""

    def __init__(self, stream: Any) -> None:
        import whole

        self.stream = stream
        self.nodes: list[Node] = []
        self.reads: list[Any] = []
        self.writes: list[Any] = []
        self.order: dict[int, int] = {}  # allocations of the step by the address of their block
        self.num_allocated = 0
        self.written: set[int] = set()  # of them, those that a node has written
        self._before = []
        for ref in list(whole._blocks.values()):
            lease = ref()
            if lease is not None:
                memory = lease.block.memory
                self._before.append((lease, memory.bytes[: memory.used].copy()))

    def refuse(self, what: str) -> None:
        """What CUDA or CuPy refuses now."""
        raise CaptureRefused(f"cudaErrorStreamCaptureUnsupported: {what} is not permitted when stream is capturing")

    def look(self, reads: Any, writes: Any, stream: Any) -> None:
        """A piece of work is about to be launched."""
        if stream is not self.stream:
            self.refuse(f"work on stream {stream.number}, which is not captured,")
        self.reads, self.writes = list(reads), list(writes)
        for part in self.reads:
            start = part.block.memory.start
            assert start not in self.order or start in self.written, "it reads memory that no node of the graph wrote"
        self.written |= {part.block.memory.start for part in self.writes}

    def allocated(self, lease: Any, num_bytes: int) -> None:
        """Memory of the private pool; a replay finds it as it was left by whoever had it before."""
        memory = lease.block.memory
        self.num_allocated += 1
        self.order[memory.start] = self.num_allocated
        self.written.discard(memory.start)
        self.nodes.append(Node("", (), [], [], lambda: memory.bytes[:num_bytes].fill(255)))

    def add(self, name: str, arguments: Any, again: Callable[[], Any]) -> None:
        """The node of the work that :meth:`look` saw."""
        reads, writes = ([_Block(x.block, clocks.bytes_of(x)) for x in parts] for parts in (self.reads, self.writes))
        self.nodes.append(Node(name, tuple(self.plain(arguments)), reads, writes, again))

    def plain(self, arguments: Any) -> Iterator[Any]:
        """Numbers as they are; addresses in the private pool by the number of the allocation, others as they are."""
        import whole
        from stand_in import ndarray

        for a in arguments:
            if isinstance(a, ndarray):
                start = a.lease.block.memory.start
                offset = a.host.__array_interface__["data"][0] - start
                yield ("of the step", self.order[start], offset) if start in self.order else ("at", start + offset)
            elif isinstance(a, whole.Address):
                start = a.lease.block.memory.start
                yield ("of the step", self.order[start], a - start) if start in self.order else ("at", int(a))
            elif isinstance(a, (tuple, list)):
                yield from self.plain(a)
            elif isinstance(a, np.generic):
                yield a.item()
            else:
                yield repr(a) if not isinstance(a, (int, float)) else a

    def end(self) -> Graph:
        """Nothing has happened: memory that was there before is as it was."""
        for lease, values in self._before:
            memory = lease.block.memory
            memory.bytes[: len(values)] = values
        return Graph([node for node in self.nodes if node.name or node.again])


class Graph:
    """What was captured."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.blocks = {id(b.block): b.block for node in nodes for b in (*node.reads, *node.writes)}
        self.num_launches = 0

    def upload(self, stream: Any = None) -> None:
        """Nothing has to be prepared."""

    def launch(self, stream: Any = None) -> None:
        """Do it all again, on a stream."""
        import whole

        assert clocks.capture is None, "a graph is launched while a stream is captured"
        stream = clocks.current_stream() if stream is None else stream
        self.num_launches += 1
        with whole.all_of(self.blocks.values()):
            for node in self.nodes:
                if node.name:
                    clocks.touch(node.reads, node.writes, stream)
                node.again()

    @property
    def launches(self) -> list[tuple[Any, ...]]:
        """Names and arguments of all launches."""
        return [(node.name, *node.arguments) for node in self.nodes if node.name]
