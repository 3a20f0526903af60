"""Sums in two levels: among the ranks of a host, and between hosts.

A network between hosts carries each gradient once for a host, not once for a rank. ``hierarchical`` has one rank of
each host speak for it: the least traffic between hosts. ``two_dimensional`` lets the ranks of a host share that work:
each has a part of the sum, and all links between hosts are used at a time. What is sent between hosts is in the
configured type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dbrdist.comm.communicators.messages import MessageReducer
from dbrdist.comm.communicators.mpi_communicator import MpiCommunicator
from dbrdist.comm.protocol.wire_type import Codec
from dbrdist.comm.transport import message
from dbrdist.comm.transport.call_log import Call
from dbrdist.comm.transport.hosts import Hosts
from dbrdist.core.array import backend
from dbrdist.core.array.backend import Array

_PIECE_BYTES = 1 << 22  # of a long array at a time: what one level leaves in the cache, the next finds there


class TwoLevelReducer(MessageReducer):
    """Sums of arrays go through two levels, by messages."""

    _most_owners: int | None = None  # of a host; None is as many ranks as the smallest host has

    def prepare(self) -> None:
        self._hosts = Hosts(self.ranks.MPI, self.ranks.comm, self.ranks.leaders, self._most_owners)
        if not self._hosts.is_only_one:
            self.added_first = self._hosts.ranks

    def free(self) -> None:
        self._hosts.free()
        super().free()

    def reduce_host(
        self, call: Call, x: message.HostArray, factors: Sequence[float] | None, divisor: float | None
    ) -> None:
        self._reduce_levels(call, Codec(), x, factors, divisor)

    def reduce_in(
        self, call: Call, codec: Codec, x: Array, factors: Sequence[float] | None, divisor: float | None
    ) -> None:
        """On a host in the type in which sums of these arrays run, between hosts as ``codec`` says."""
        self.on_host(call, x, lambda host: self._reduce_levels(call, codec, host, factors, divisor))

    def _reduce_levels(
        self, call: Call, codec: Codec, x: message.HostArray, factors: Sequence[float] | None, divisor: float | None
    ) -> None:
        if self.ranks.size == 1:
            super().reduce_host(call, x, factors, divisor)
            return
        # A host's sum of 16-bit terms is not rounded before the hosts' sums are added, unless the codec wants it.
        is_wider = message.is_narrow(x.dtype) and (factors is not None or not self._hosts.has_one_each)
        step = _PIECE_BYTES // x.itemsize
        for begin in range(0, x.size, step):
            piece = x[begin : begin + step]
            total: Any = piece.astype(np.float32) if is_wider else piece
            if factors is not None:
                total *= total.dtype.type(factors[self.ranks.rank])
            if self._hosts.has_one_each:
                self._between_hosts(call, codec, piece, total, divisor)
            else:
                self._reduce_piece(call, codec, piece, total, divisor)

    def _reduce_piece(
        self, call: Call, codec: Codec, x: message.HostArray, total: message.HostArray, divisor: float | None
    ) -> None:
        """Put the sum of all ranks' ``total``, divided and narrowed once, into ``x`` (which may be the same memory)."""
        raise NotImplementedError

    def _between_hosts(
        self, call: Call, codec: Codec, x: message.HostArray, own: message.HostArray, divisor: float | None
    ) -> None:
        """The second level: from the sums ``own`` of the hosts to ``x``, on a rank that takes part in it."""
        if self._hosts.between is None:
            message.divide(own, divisor)
        else:
            self.reduce_over(self._hosts.between, call, own, codec, None, divisor)
        if own.ctypes.data != x.ctypes.data:
            x[...] = own

    def _sum_of(self, x: message.HostArray) -> Any:
        return self.ranks.MPI.LOR if x.dtype == bool else self.ranks.MPI.SUM


class HierarchicalReducer(TwoLevelReducer):
    """The first rank of each host adds what its host has, exchanges that with the other hosts, and hands it out."""

    _most_owners = 1

    def _reduce_piece(
        self, call: Call, codec: Codec, x: message.HostArray, total: message.HostArray, divisor: float | None
    ) -> None:
        local, op = self._hosts.local, self._sum_of(total)
        if self._hosts.place == 0:
            self.ranks.wait(call, local.Ireduce(self.ranks.MPI.IN_PLACE, total, op, 0))
            self._between_hosts(call, codec, x, total, divisor)
        else:
            self.ranks.wait(call, local.Ireduce(total, None, op, 0))
        self.ranks.wait(call, local.Ibcast([message.as_bytes(x), self.ranks.MPI.BYTE], 0))


class TwoDimensionalReducer(TwoLevelReducer):
    """Each rank of a host adds a part of what its host has, exchanges that with its counterparts, and shares it.

    Where hosts differ in size, as many ranks of each do so as the smallest host has.
    """

    def _reduce_piece(
        self, call: Call, codec: Codec, x: message.HostArray, total: message.HostArray, divisor: float | None
    ) -> None:
        hosts, byte = self._hosts, self.ranks.MPI.BYTE
        borders = message.blocks(x.size, hosts.num_owners)
        borders += [x.size] * (len(hosts.ranks) - hosts.num_owners)  # the others have an empty part
        counts = np.diff(borders)
        mine = slice(borders[hosts.place], borders[hosts.place + 1])
        own = np.empty(mine.stop - mine.start, total.dtype)
        self.ranks.wait(call, hosts.local.Ireduce_scatter(total, own, counts, self._sum_of(total)))
        if hosts.place < hosts.num_owners:
            self._between_hosts(call, codec, x[mine], own, divisor)
        places = (counts * x.itemsize, np.array(borders[:-1]) * x.itemsize)
        self.ranks.wait(call, hosts.local.Iallgatherv(self.ranks.MPI.IN_PLACE, [message.as_bytes(x), places, byte]))


class NonCudaAwareReducer(HierarchicalReducer):
    """As hierarchical; device arrays go through one buffer in host memory, which is kept, piece by piece."""

    _stage: message.HostArray | None = None

    def on_host(self, call: Call, x: Array, work: Callable[[message.HostArray], None]) -> None:
        if isinstance(x, np.ndarray) or x.size == 0:
            super().on_host(call, x, work)
            return
        call.num_bytes += x.nbytes
        call.kind = x.dtype
        if self._stage is None:
            self._stage = backend.pinned_bytes(_PIECE_BYTES)
        step = _PIECE_BYTES // x.itemsize
        for begin in range(0, x.size, step):
            piece: Any = x[begin : begin + step]  # an array of CuPy
            host = self._stage[: piece.nbytes].view(x.dtype)
            piece.get(out=host)
            work(host)
            piece.set(host)
            backend.wait_for(piece)  # the next piece takes its place in the buffer

    def free(self) -> None:
        self._stage = None
        super().free()


class HierarchicalCommunicator(MpiCommunicator):
    """One rank of each host speaks for it."""

    reducer_type = HierarchicalReducer


class TwoDimensionalCommunicator(MpiCommunicator):
    """The ranks of a host share the exchange with other hosts."""

    reducer_type = TwoDimensionalReducer


class NonCudaAwareCommunicator(HierarchicalCommunicator):
    """As hierarchical, with one buffer for device arrays."""

    reducer_type = NonCudaAwareReducer
