"""A sum between ranks in pieces: while one is sent, the next is encoded and the one before is added.

Each rank adds one block of the array. It gets the others' terms of that block, adds them in the order of ranks,
divides, and sends the sum to all. Elements are independent of each other, so that the pieces change no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dbrdist.comm.protocol.wire_type import Codec
from dbrdist.comm.transport import message
from dbrdist.comm.transport.call_log import Call
from dbrdist.comm.transport.message import HostArray

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Datatype, Request

PIECE_BYTES = 1 << 20  # on the wire, of each block; smaller ones wake a rank more often, amid its backward pass
_AHEAD = 2  # pieces that are on their way before the first comes back


class Messenger(Protocol):
    """How messages go from rank to rank: in order for each pair, in sizes that both know."""

    rank: int
    size: int

    def send(self, peer: int, raw: HostArray) -> None: ...

    def receive(self, peer: int, raw: HostArray) -> Any: ...

    def wait(self, call: Call, ticket: Any) -> None: ...

    def flush(self, call: Call) -> None: ...


class Messages:
    """The ranks of an MPI communicator.

    Args:
        mpi_comm: the ranks.
        wait_for: waits for a request.
        abandoned: keeps what MPI may still read or write after an interrupted wait.
    """

    def __init__(
        self, mpi_comm: Comm, byte: Datatype, wait_for: Callable[[Call, Any], None], abandoned: list[object]
    ) -> None:
        self.rank: int = mpi_comm.rank
        self.size: int = mpi_comm.size
        self._comm, self._byte, self._wait_for, self._abandoned = mpi_comm, byte, wait_for, abandoned
        self._under_way: list[Request] = []

    def send(self, peer: int, raw: HostArray) -> None:
        """Send these bytes."""
        self._under_way.append(self._comm.Isend([raw, self._byte], peer))

    def receive(self, peer: int, raw: HostArray) -> Any:
        """Receive into ``raw``."""
        request = self._comm.Irecv([raw, self._byte], peer)
        self._under_way.append(request)
        return request

    def wait(self, call: Call, ticket: Any) -> None:
        """Return when a message is there."""
        try:
            self._wait_for(call, ticket)
        except BaseException:
            self._abandoned += self._under_way
            raise

    def flush(self, call: Call) -> None:
        """Return when all are."""
        for request in self._under_way:
            self.wait(call, request)
        self._under_way = []


class PipelinedSum:
    """One array on its way: ``sum(factors[k] * x of rank k) / divisor``, sent as ``codec`` says."""

    def __init__(
        self,
        way: Messenger,
        call: Call,
        x: HostArray,
        codec: Codec,
        factors: Sequence[float] | None,
        divisor: float | None,
    ) -> None:
        self._way, self._call, self._x, self._codec = way, call, x, codec
        self._factors, self._divisor = factors, divisor
        self._kind = codec.wire_dtype(x.dtype)
        self._step = max(PIECE_BYTES // self._kind.itemsize, 1)
        self._borders = message.blocks(x.size, way.size)
        self._peers = [(way.rank + k) % way.size for k in range(1, way.size)]
        self._terms: dict[int, list[tuple[int, HostArray, object]]] = {}  # by piece: peer, array, ticket
        self._sums: dict[int, list[tuple[HostArray, HostArray, object]]] = {}  # by piece: where it goes, array, ticket

    def run(self) -> None:
        """Replace the array."""
        num_pieces = -(-max(b - a for a, b in zip(self._borders, self._borders[1:])) // self._step)
        for k in range(min(_AHEAD, num_pieces)):
            self._exchange_terms(k)
        for k in range(num_pieces):
            self._exchange_sums(k, self._add(k))
            if k + _AHEAD < num_pieces:
                self._exchange_terms(k + _AHEAD)
            if k >= _AHEAD:
                self._take_sums(k - _AHEAD)
        for k in sorted(self._sums):
            self._take_sums(k)
        self._way.flush(self._call)

    def _piece(self, rank: int, k: int) -> HostArray:
        """Piece ``k`` of a rank's block; blocks differ in length, and the last piece of one may be empty."""
        begin, end = self._borders[rank : rank + 2]
        return self._x[min(begin + k * self._step, end) : min(begin + (k + 1) * self._step, end)]

    def _exchange_terms(self, k: int) -> None:
        """Send each rank what it adds, and receive what this one does."""
        own, terms = self._piece(self._way.rank, k), self._terms.setdefault(k, [])
        for peer in self._peers:
            theirs = self._piece(peer, k)
            if theirs.size:
                self._way.send(peer, message.as_bytes(self._codec.encode(theirs)))
            if own.size:
                term = np.empty(own.size, self._kind)
                terms.append((peer, term, self._way.receive(peer, message.as_bytes(term))))

    def _add(self, k: int) -> HostArray:
        """The sum of this rank's piece as it is sent; it is in its place already."""
        own, found = self._piece(self._way.rank, k), self._terms.pop(k)
        if not own.size:
            return own
        terms = {self._way.rank: self._codec.encode(own)}
        for peer, term, ticket in found:
            self._way.wait(self._call, ticket)
            terms[peer] = term
        in_place = self._way.rank < 2 and terms[self._way.rank] is own  # read before it is written
        ordered = [terms[rank] for rank in range(self._way.size)]
        total = message.weighted_sum(ordered, self._factors, self._divisor, out=own if in_place else None)
        if self._kind == own.dtype:
            if total is not own:
                own[...] = total
            return own
        sent = np.asarray(total).astype(self._kind)
        self._codec.decode(sent, own)
        return sent

    def _exchange_sums(self, k: int, own: HostArray) -> None:
        sums = self._sums.setdefault(k, [])
        for peer in self._peers:
            if own.size:
                self._way.send(peer, message.as_bytes(own))
            place = self._piece(peer, k)
            if place.size:
                came = place if self._kind == place.dtype else np.empty(place.size, self._kind)
                sums.append((place, came, self._way.receive(peer, message.as_bytes(came))))

    def _take_sums(self, k: int) -> None:
        for place, came, ticket in self._sums.pop(k):
            self._way.wait(self._call, ticket)
            if came is not place:
                self._codec.decode(came, place)
