"""What a provider of ranks fills in: who is where, and a few primitives that move bytes. Nothing is checked here."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dbrdist.comm.protocol import arguments
from dbrdist.comm.protocol.arguments import attempt
from dbrdist.comm.protocol.gate import PAYLOAD_WORDS, Gate, Pending, Row
from dbrdist.comm.protocol.settings import Configured
from dbrdist.comm.protocol.wire_type import Codec
from dbrdist.comm.transport import message
from dbrdist.comm.transport.call_log import Call
from dbrdist.core.array import backend
from dbrdist.core.array.backend import Array

_SCATTERED_BYTES = 1 << 22  # of each rank at a time in a reduce-scatter


class Provider(Configured, ABC):
    """One rank of a communicator. ``mpi_communicator.py`` and ``threads.py`` fill in the abstract methods."""

    _gate: Gate  # made by the provider's constructor

    def __init__(self) -> None:
        super().__init__()
        self._own_mail: dict[int, deque[Any]] = {}  # tag -> what this rank has sent to itself
        self._plans: dict[Any, Any] = {}  # of the last models whose gradients were reduced
        self._num_differentiable = 0  # collective calls of comm.functions, the same on all ranks
        self._num_places = 0  # how often ranks have brought gradients to their places together
        self._stop_request = 0  # a signal's number, which the next header tells the other ranks
        self._stop_answers: Any = None  # what they said in the last
        self._finalized_at = ""
        self._seats: Sequence[Any] = ()  # where each rank of this host runs, as far as they have told each other

    def __copy__(self) -> Any:
        """Itself: there is no second communicator without all ranks making it."""
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        """Itself: a copy of a link that communicates does so with the same ranks."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: a communicator belongs to the processes that created it; create "
            "one there with create_communicator, and save models with dbrdist.serializers"
        )

    def _config_changed(self) -> None:
        gate = self.__dict__.get("_gate")
        if gate is not None:
            gate.config_changed()

    # ---- who and where ----

    @property
    @abstractmethod
    def rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many ranks there are."""

    @property
    @abstractmethod
    def intra_rank(self) -> int:
        """The number of this rank among those on its host."""

    @property
    @abstractmethod
    def intra_size(self) -> int:
        """How many ranks are on this host."""

    @property
    @abstractmethod
    def inter_rank(self) -> int:
        """The number of this host among the hosts, in the order of their lowest ranks."""

    @property
    @abstractmethod
    def inter_size(self) -> int:
        """How many hosts there are."""

    # ---- primitives ----

    _reduces_one_by_one = False  # True in providers that reduce parameter by parameter
    _leaves_gradients = False  # True in one that does not reduce them at all
    _added_first: Sequence[int] = ()  # ranks, this one among them, whose sum is sent to the others; empty is each alone

    @abstractmethod
    def _post_row(self, call: Call, row: bytes, enclosed: Sequence[message.HostArray] = ()) -> Pending:
        """Show a row of fixed length to all ranks, without waiting for theirs; enclosed arrays may be written again."""

    def _exchange_row(
        self, call: Call, row: bytes, enclosed: Sequence[message.HostArray] = ()
    ) -> tuple[list[bytes], list[list[Any]]]:
        """Show a row and wait: (the rows of all ranks, for each enclosed array what every rank enclosed)."""
        pending = self._post_row(call, row, enclosed)
        return pending.wait(call), pending.pieces()

    def _encloses(self, arrays: Sequence[Array]) -> bool:
        """Whether these arrays can be enclosed in a row; the same on ranks whose arrays are alike."""
        return False

    def _has_room(self) -> bool:
        """Whether arrays can be enclosed in the next row without waiting for another rank."""
        return False

    def _release_enclosed(self) -> None:
        """What was enclosed in the rows that this rank has waited for may be overwritten."""

    @abstractmethod
    def _bcast_bytes(self, raw: message.HostArray, root: int) -> None:
        """Fill ``raw`` with the root's."""

    @abstractmethod
    def _allgather_bytes(
        self, mine: message.HostArray, raw: message.HostArray, counts: Sequence[int], starts: Sequence[int]
    ) -> None:
        """Put rank k's ``mine`` into ``raw`` from ``starts[k]`` on."""

    @abstractmethod
    def _exchange_bytes(
        self,
        sent: message.HostArray,
        sent_counts: Sequence[int],
        sent_starts: Sequence[int],
        raw: message.HostArray,
        counts: Sequence[int],
        starts: Sequence[int],
    ) -> None:
        """Send each rank its stretch of ``sent``, and receive its into ``raw``."""

    @abstractmethod
    def _send_parts(self, call: Call, head: Row, parts: list[message.HostArray]) -> None:
        """Send a message to ``call.peer``; entries 2 to 2 + head[1] of its head are the sizes of the parts."""

    @abstractmethod
    def _recv_parts(self, call: Call) -> tuple[Row, list[message.HostArray]]:
        """Receive one from ``call.peer``."""

    @abstractmethod
    def _reduce_host(
        self, call: Call, x: message.HostArray, factors: Sequence[float] | None, divisor: float | None
    ) -> None:
        """Replace the 1-d contiguous ``x`` by ``sum(factors[k] * x of rank k) / divisor`` on every rank.

        16-bit types are summed and divided in float32. Every rank gets the same bits.
        """

    def _share_gradients(self, call: Any, plan: Any) -> Any:
        """Bring the gradients of a plan where ranks reach each other's; None where they do not. Collective."""
        return None

    def _share_values(self, call: Any, plan: Any) -> Any:
        """Bring the parameters of a plan there too, so that each rank takes the others' parts. Collective."""
        return None

    def _overlap(self, call: Any, plan: Any) -> Any:
        """What reduces the gradients of a plan while backward runs; None where that does not pay. Collective."""
        return None

    def _background(self) -> Any:
        """A courier (``courier.py``); None where there is none. Collective."""
        return None

    @abstractmethod
    def _make_part(self, call: Call, ranks: list[int]) -> Any:
        """A communicator of these ranks of this one, in this order; None where there are none. Collective."""

    def _refusal(self) -> str:
        """Why no verb can run in this process at all, or an empty text."""
        return ""

    def _failed_half_way(self, call: Call, reason: str) -> None:
        """This rank failed while all move bytes: the others wait for it in vain."""

    def _free(self) -> None:
        """Give back what the communicator holds. Collective."""

    # ---- what verbs make of them ----

    def _next_place(self) -> int:
        self._num_places += 1
        return self._num_places

    def _reduce(
        self, call: Call, x: Array, factors: Sequence[float] | None = None, divisor: float | None = None
    ) -> None:
        """As :meth:`_reduce_host`, also for arrays on a device and in foreign byte order."""
        self._on_host(call, x, lambda host: self._reduce_host(call, host, factors, divisor))

    def _on_host(self, call: Call, x: Array, work: Callable[[message.HostArray], None]) -> None:
        """Have ``work`` change what is in ``x``, in host memory and in native byte order."""
        if x.size == 0:
            return
        call.num_bytes += x.nbytes
        call.kind = x.dtype
        if isinstance(x, np.ndarray) and x.dtype.isnative:
            work(x)
            return
        host = backend.to_cpu(x).astype(x.dtype.newbyteorder("="))
        work(host)
        x[...] = message.to_place(host, x)

    def _reduce_in(
        self, call: Call, codec: Codec, x: Array, factors: Sequence[float] | None, divisor: float | None
    ) -> None:
        """As :meth:`_reduce`, sent as ``codec`` says."""
        codec.carry(x, lambda travelling: self._reduce(call, travelling, factors, divisor))

    def _reduce_scatter(
        self, call: Call, x: Array, borders: Sequence[int], factors: Sequence[float] | None, divisor: float | None
    ) -> None:
        """As :meth:`_reduce`, but rank r gets the elements borders[r] to borders[r + 1] alone: half the bytes.

        The terms are added in the order of ranks. What lies elsewhere has no meaning afterwards.
        """
        call.num_bytes += x.nbytes
        call.kind = x.dtype
        self._meet(call)
        host = backend.to_cpu(x)
        host = host if host.dtype.isnative else host.astype(host.dtype.newbyteorder("="))
        stretches = list(itertools.pairwise(borders))
        step = max(_SCATTERED_BYTES // (self.size * x.itemsize), 1)
        for first in range(0, max(b - a for a, b in stretches), step):
            parts = [(min(a + first, b), min(a + first + step, b)) for a, b in stretches]
            begin, end = parts[self.rank]
            theirs = np.empty((self.size, end - begin), host.dtype)
            self._exchange_bytes(
                message.as_bytes(host),
                [(b - a) * x.itemsize for a, b in parts],
                [a * x.itemsize for a, _ in parts],
                message.as_bytes(theirs.reshape(-1)),
                [theirs[0].nbytes] * self.size,
                [theirs[0].nbytes * k for k in range(self.size)],
            )
            host[begin:end] = message.weighted_sum(list(theirs), factors, divisor)
        if host is not x:
            own = slice(borders[self.rank], borders[self.rank + 1])
            x[own] = message.to_place(host[own], x)

    def _share_parts(self, call: Call, x: Array, borders: Sequence[int]) -> None:
        """Give every rank the elements borders[r] to borders[r + 1] of each rank r."""
        call.num_bytes += x.nbytes
        call.kind = x.dtype
        self._meet(call)
        host = backend.to_cpu(x)
        raw = message.as_bytes(host)
        starts = [border * x.itemsize for border in borders[:-1]]
        counts = [(b - a) * x.itemsize for a, b in itertools.pairwise(borders)]
        self._allgather_own(raw, counts, starts)
        if host is not x:
            x[...] = message.to_place(host, x)

    def _allgather_own(self, raw: message.HostArray, counts: Sequence[int], starts: Sequence[int]) -> None:
        """Fill ``raw`` with each rank's stretch of it."""
        begin = starts[self.rank]
        self._allgather_bytes(raw[begin : begin + counts[self.rank]].copy(), raw, counts, starts)

    def _meet(self, call: Call) -> None:
        """Wait for all ranks where no row came before."""

    def _reducer(self, call: Any, x: Array) -> Callable[[Call, Array], None]:
        """What adds arrays like ``x``, of one shape and type on all ranks, in place. Collective."""
        return self._reduce

    def _prepare_bcast(self, call: Call, root: Any, max_buf_len: Any, prepare: Any, *args: Any) -> Any:
        """((what the root sends, bytes at a time), what is wrong)."""
        error = self._take_root(call, root)
        piece, wrong = attempt(arguments.piece_bytes, max_buf_len, call.verb)
        own = None
        if call.root == self.rank:
            own, bad = attempt(prepare, *args)
            error = error or bad
        return (own, piece or 0), error or wrong

    def _take_root(self, call: Call, root: Any) -> Exception | None:
        number, error = attempt(arguments.rank_of, root, self.size, call.verb)
        call.root = -1 if number is None else number
        return error

    def _bcast_in_pieces(self, call: Call, raw: message.HostArray, piece: int) -> None:
        step = piece or max(raw.size, 1)
        for begin in range(0, raw.size, step):
            self._bcast_bytes(raw[begin : begin + step], call.root)

    def _gather_bytes(
        self, call: Call, mine: message.HostArray, raw: message.HostArray, counts: Sequence[int], starts: Sequence[int]
    ) -> None:
        nothing = [0] * self.size
        sent = [mine.size if k == call.root else 0 for k in range(self.size)]
        self._exchange_bytes(mine, sent, nothing, raw, counts or nothing, starts or nothing)

    def _exchange(
        self,
        call: Call,
        sent: message.HostArray,
        counts: Sequence[int],
        starts: Sequence[int],
        raw: message.HostArray,
        sources: Sequence[int],
        raw_counts: Sequence[int] = (),
        raw_starts: Sequence[int] = (),
    ) -> None:
        """All-to-all of bytes in which some ranks send nothing; without counts, all sources send equally much."""
        step = raw.size // max(len(sources), 1)
        raw_counts = raw_counts or [step] * len(sources)
        raw_starts = raw_starts or [step * k for k in range(len(sources))]
        all_counts, all_starts = [0] * self.size, [0] * self.size
        for source, count, start in zip(sources, raw_counts, raw_starts):
            all_counts[source], all_starts[source] = count, start
        nothing = [0] * self.size
        self._exchange_bytes(sent, counts or nothing, starts or nothing, raw, all_counts, all_starts)

    def _exchange_arrays(self, call: Call, each: list[arguments.Prepared], sources: Sequence[int]) -> tuple[Array, ...]:
        """Send entry k of ``each`` to rank k, and return what the ``sources`` sent to this rank."""
        words = message.HEADER_WORDS
        headers = np.array([header for header, _ in each], np.int64).reshape(len(each), words)
        theirs = np.empty((len(sources), words), np.int64)
        step = 8 * words
        sizes = [step] * len(each), [step * k for k in range(len(each))]
        self._exchange(call, headers.view(np.uint8).reshape(-1), *sizes, theirs.view(np.uint8).reshape(-1), sources)
        sent = message.pack(headers, [flat for _, flat in each])
        raw, counts, starts = message.room_for(theirs)
        call.num_bytes = sum(counts)
        self._exchange(call, *sent, raw, sources, counts, starts)
        return message.unpack(raw, theirs, starts)

    def _allgather_rows(self, row: Row) -> Row:
        """Some 64-bit integers of every rank, as many on each, as an array of ``size`` rows."""
        with self._gate.call("agree") as call:
            if row.size <= PAYLOAD_WORDS:
                return call.agree(row)[:, : row.size].copy()
            call.agree([row.size], num_same=1, what="the same number of integers", detail=str(row.size))
            rows = np.empty((self.size, row.size), np.int64)
            counts = [row.nbytes] * self.size
            with call.moving():
                starts = [row.nbytes * k for k in range(self.size)]
                self._allgather_bytes(row.view(np.uint8), rows.view(np.uint8).reshape(-1), counts, starts)
            return rows
