"""Sums over virtual workers in one binary tree, the same whichever rank holds which leaf.

Floating-point sums depend on the order of additions. Here the order is that of a tree over the virtual workers, its
leaves: neighbours are added first, 0 + 1 and 2 + 3, then these sums, and so on; where the number of leaves is no power
of two, a node without a right neighbour goes up as it is. A rank holds a contiguous block of leaves, which is a few
complete subtrees. It adds each of them as a binary counter carries, so log2(leaves) buffers suffice; then each element
of the sums has an owner among the ranks, who adds the subtrees of all ranks in the order of the tree.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from dbrdist.comm.protocol.gate import Passage
from dbrdist.comm.transport import message
from dbrdist.core.array import backend
from dbrdist.core.array.backend import Array
from dbrdist.datasets.loading.base import block_bounds

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase

T = TypeVar("T")

_PIECE_ELEMENTS = 1 << 14  # of an addition: all three operands stay in the first-level cache
_SHORT_BYTES = 1 << 16  # of all subtrees together: up to this every rank adds everything, with one message, not two
_EXCHANGE_ELEMENTS = 1 << 22  # at a time, so that little memory is needed beside the gradients


class Node(NamedTuple):
    """The subtree over the leaves ``start`` to ``start + 2 ** level - 1``."""

    start: int
    level: int

    def is_left_of(self, other: Node) -> bool:
        """Whether both have the same parent, this one on the left."""
        width = 1 << self.level
        return self.level == other.level and other.start == self.start + width and self.start % (2 * width) == 0

    @property
    def parent(self) -> Node:
        """Of a left node."""
        return Node(self.start, self.level + 1)


def subtrees(start: int, stop: int) -> list[Node]:
    """The largest complete subtrees that make up the leaves ``start`` to ``stop - 1``, from left to right."""
    nodes: list[Node] = []
    for leaf in range(start, stop):
        node = Node(leaf, 0)
        while nodes and nodes[-1].is_left_of(node):
            node = nodes.pop().parent
        nodes.append(node)
    return nodes


def fold(nodes: Sequence[Node], values: Sequence[T], add: Callable[[T, T], T]) -> T:
    """The value of the root, from those of subtrees that make up all leaves; ``add(left, right)`` may reuse left."""
    done: list[tuple[Node, T]] = []
    for node, value in zip(nodes, values, strict=True):
        while done and done[-1][0].is_left_of(node):
            left, total = done.pop()
            node, value = left.parent, add(total, value)
        done.append((node, value))
    _, value = done.pop()
    while done:  # the right edge of a tree that is not full
        value = add(done.pop()[1], value)
    return value


class TreeSum:
    """The sums of this rank's leaves: each leaf is a list of 1-d arrays, of the same lengths on every leaf."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.sums: list[list[Array]] = []  # of each node; 16-bit types are added in float32
        self._spare: list[list[Array]] = []

    def clear(self) -> None:
        """Start over; the buffers are kept."""
        self._spare += self.sums
        self.nodes, self.sums = [], []

    def add(self, leaf: int, arrays: Sequence[Array], weight: float) -> None:
        """Add ``weight`` times ``arrays``, which stay what they are; leaves come in order."""
        node = Node(leaf, 0)
        if self.nodes and self.nodes[-1].is_left_of(node):
            node, total = self.nodes.pop().parent, self.sums.pop()
            for t, a in zip(total, arrays):
                _add_weighted(t, a, weight)
        else:
            total = self._buffers(arrays)
            for t, a in zip(total, arrays):
                out: Any = t
                np.multiply(a, t.dtype.type(weight), out=out, dtype=t.dtype)
        while self.nodes and self.nodes[-1].is_left_of(node):
            node, left = self.nodes.pop().parent, self.sums.pop()
            for a, b in zip(left, total):
                a += b
            self._spare.append(total)
            total = left
        self.nodes.append(node)
        self.sums.append(total)

    def total(self) -> list[Array]:
        """The sum of the leaves of this rank alone."""
        return fold(self.nodes, self.sums, _add_all)

    def _buffers(self, like: Sequence[Array]) -> list[Array]:
        dtypes = [backend.accumulation_dtype(a.dtype) for a in like]
        while self._spare:
            found = self._spare.pop()
            if len(found) == len(like) and all(
                b.shape == a.shape and b.dtype == dtype and type(b) is type(a)
                for a, b, dtype in zip(like, found, dtypes)
            ):
                return found
        return [backend.empty(a.shape, dtype, a) for a, dtype in zip(like, dtypes)]


def _add_all(left: list[Array], right: list[Array]) -> list[Array]:
    for a, b in zip(left, right):
        a += b
    return left


def _add_weighted(total: Array, a: Array, weight: float) -> None:
    """total += weight a; the product is rounded before it is added, so that each leaf counts as if it stood alone."""
    w = total.dtype.type(weight)
    step = _PIECE_ELEMENTS if isinstance(a, np.ndarray) else max(a.size, 1)
    for begin in range(0, a.size, step):
        piece = slice(begin, begin + step)
        total[piece] += np.multiply(a[piece], w, dtype=total.dtype)


# ---- over ranks -----------------------------------------------------------------------------------------------------


def add_over_ranks(comm: CommunicatorBase, call: Passage, num_leaves: int, mine: TreeSum) -> list[Array]:
    """The sums over all leaves of all ranks, the same bits on every rank. Collective; all ranks have agreed."""
    if comm.size == 1:
        return mine.total()
    nodes = [subtrees(*block_bounds(num_leaves, rank, comm.size)) for rank in range(comm.size)]
    like = mine.sums[0]
    with call.moving():
        return [_added(comm, call, nodes, [total[i] for total in mine.sums]) for i in range(len(like))]


def _added(comm: CommunicatorBase, call: Passage, nodes: list[list[Node]], mine: list[Array]) -> Array:
    """The root's value of one array, from this rank's subtrees, whose memory is used for it."""
    place = mine[0]
    hosts = [backend.to_cpu(a) for a in mine]
    result = hosts[0]
    call.num_bytes += result.nbytes
    call.kind = result.dtype
    is_short = result.nbytes * sum(map(len, nodes)) <= _SHORT_BYTES
    for begin in range(0, result.size, _EXCHANGE_ELEMENTS):
        pieces = [a[begin : begin + _EXCHANGE_ELEMENTS] for a in hosts]
        (_add_everywhere if is_short else _add_by_owners)(comm, nodes, pieces)
    return message.to_place(result, place)


def _add_everywhere(comm: CommunicatorBase, nodes: list[list[Node]], mine: list[message.HostArray]) -> None:
    """Give all subtrees to all ranks, each of which adds everything, into its first."""
    size = mine[0].size
    found = np.empty((sum(map(len, nodes)), size), mine[0].dtype)
    row_bytes = mine[0].nbytes
    counts = [len(theirs) * row_bytes for theirs in nodes]
    raw = message.as_bytes(found.reshape(-1))
    comm.ranks.allgather_bytes(message.as_bytes(np.concatenate(mine)), raw, counts, _starts(counts))
    mine[0][...] = _folded(nodes, found)


def _add_by_owners(comm: CommunicatorBase, nodes: list[list[Node]], mine: list[message.HostArray]) -> None:
    """Each rank adds its block of elements of all subtrees, and gives it to all, into their first."""
    result = mine[0]
    borders = message.blocks(result.size, comm.size)
    cuts = [slice(a, b) for a, b in itertools.pairwise(borders)]
    sent = np.concatenate([a[cut] for cut in cuts for a in mine])
    sent_counts = [(cut.stop - cut.start) * len(mine) * result.itemsize for cut in cuts]
    own = cuts[comm.rank]
    found = np.empty((sum(map(len, nodes)), own.stop - own.start), result.dtype)
    counts = [len(theirs) * found.shape[1] * result.itemsize for theirs in nodes]
    raw = message.as_bytes(found.reshape(-1))
    comm.ranks.exchange_bytes(message.as_bytes(sent), sent_counts, _starts(sent_counts), raw, counts, _starts(counts))
    total = _folded(nodes, found)
    block_bytes = [(cut.stop - cut.start) * result.itemsize for cut in cuts]
    comm.ranks.allgather_bytes(message.as_bytes(total), message.as_bytes(result), block_bytes, _starts(block_bytes))


def _folded(nodes: list[list[Node]], rows: message.HostArray) -> message.HostArray:
    everyone = list(itertools.chain.from_iterable(nodes))
    total: message.HostArray = fold(everyone, list(rows), lambda a, b: np.add(a, b, out=a))
    return total


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(counts)][:-1]
