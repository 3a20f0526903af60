"""What a kind of ranks fills in: who is where, and a few primitives that move bytes. Nothing is checked here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from dbrdist.comm.protocol import arguments
from dbrdist.comm.transport import message
from dbrdist.comm.transport.call_log import Call
from dbrdist.comm.transport.message import HostArray
from dbrdist.core.array.backend import Array
from dbrdist.core.array.types import IntArray

if TYPE_CHECKING:
    from dbrdist.comm.communicators.cores import Seat

Row: TypeAlias = IntArray


class PendingRow(Protocol):
    """A row that was shown and not yet answered."""

    def is_there(self) -> bool:
        """Whether the rows of all ranks are there; it does not wait."""

    def pieces(self) -> list[list[HostArray]]:
        """For each array enclosed in the row what every rank enclosed; for use before the next row is shown."""

    def wait(self, call: Call) -> list[bytes]:
        """The rows of all ranks; raises CommunicatorError where the watch finds that they cannot come."""


class Ranks(ABC):
    """One rank among those of a communicator. ``mpi_communicator.py`` and ``threads.py`` fill in what is abstract."""

    rank: int  # the number of this one, from 0
    size: int  # how many there are
    intra_rank: int  # the number of this rank among those on its host
    intra_size: int  # how many ranks are on this host
    inter_rank: int  # the number of this host among the hosts, in the order of their lowest ranks
    inter_size: int  # how many hosts there are
    seats: Sequence[Seat] = ()  # where each rank of this host runs, as far as they have told each other

    # ---- rows ----

    @abstractmethod
    def post_row(self, call: Call, row: bytes, enclosed: Sequence[HostArray] = ()) -> PendingRow:
        """Show a row of fixed length to all ranks, without waiting for theirs; enclosed arrays may be written again."""

    def exchange_row(
        self, call: Call, row: bytes, enclosed: Sequence[HostArray] = ()
    ) -> tuple[list[bytes], list[list[HostArray]]]:
        """Show a row and wait: (the rows of all ranks, for each enclosed array what every rank enclosed)."""
        pending = self.post_row(call, row, enclosed)
        return pending.wait(call), pending.pieces()

    def takes(self, arrays: Sequence[Array]) -> bool:
        """Whether these arrays can be enclosed in a row; the same on ranks whose arrays are alike."""
        return False

    def has_room(self) -> bool:
        """Whether arrays can be enclosed in the next row without waiting for another rank."""
        return False

    def release_enclosed(self) -> None:  # noqa: B027 - most enclose nothing
        """What was enclosed in the rows that this rank has waited for may be overwritten."""

    # ---- bytes ----

    @abstractmethod
    def bcast_bytes(self, raw: HostArray, root: int) -> None:
        """Fill ``raw`` with the root's."""

    @abstractmethod
    def allgather_bytes(self, mine: HostArray, raw: HostArray, counts: Sequence[int], starts: Sequence[int]) -> None:
        """Put rank k's ``mine`` into ``raw`` from ``starts[k]`` on."""

    @abstractmethod
    def exchange_bytes(
        self,
        sent: HostArray,
        sent_counts: Sequence[int],
        sent_starts: Sequence[int],
        raw: HostArray,
        counts: Sequence[int],
        starts: Sequence[int],
    ) -> None:
        """Send each rank its stretch of ``sent``, and receive its into ``raw``."""

    @abstractmethod
    def send_parts(self, call: Call, head: Row, parts: list[HostArray]) -> None:
        """Send a message to ``call.peer``; entries 2 to 2 + head[1] of its head are the sizes of the parts."""

    @abstractmethod
    def recv_parts(self, call: Call) -> tuple[Row, list[HostArray]]:
        """Receive one from ``call.peer``."""

    def send_small(self, call: Call, x: HostArray) -> bool:
        """Send an array in one message, as :meth:`send_parts` would, if that can be; False if it did not."""
        return False

    def recv_array(self, call: Call) -> Any:
        """As :meth:`recv_parts`; or at once the array that the message holds."""
        return self.recv_parts(call)

    def allgather_own(self, raw: HostArray, counts: Sequence[int], starts: Sequence[int]) -> None:
        """Fill ``raw`` with each rank's stretch of it."""
        begin = starts[self.rank]
        self.allgather_bytes(raw[begin : begin + counts[self.rank]].copy(), raw, counts, starts)

    def meet(self, call: Call) -> None:  # noqa: B027 - threads wait in what follows
        """Wait for all ranks where no row came before."""

    # ---- lifetime ----

    def refusal(self) -> str:
        """Why no verb can run in this process at all, or an empty text."""
        return ""

    def failed_half_way(self, call: Call, reason: str) -> None:  # noqa: B027 - nobody waits where one is alone
        """This rank failed while all move bytes: the others wait for it in vain."""

    def free(self) -> None:  # noqa: B027 - threads hold nothing
        """Give back what the ranks hold. Collective."""

    # ---- what verbs make of them ----

    def bcast_in_pieces(self, call: Call, raw: HostArray, piece: int) -> None:
        """Fill ``raw`` with that of ``call.root``, so many bytes at a time; 0 is all at once."""
        step = piece or max(raw.size, 1)
        for begin in range(0, raw.size, step):
            self.bcast_bytes(raw[begin : begin + step], call.root)

    def gather_bytes(
        self, call: Call, mine: HostArray, raw: HostArray, counts: Sequence[int], starts: Sequence[int]
    ) -> None:
        """As :meth:`allgather_bytes`, for ``call.root`` alone."""
        nothing = [0] * self.size
        sent = [mine.size if k == call.root else 0 for k in range(self.size)]
        self.exchange_bytes(mine, sent, nothing, raw, counts or nothing, starts or nothing)

    def exchange_from(
        self,
        sources: Sequence[int],
        sent: HostArray,
        counts: Sequence[int],
        starts: Sequence[int],
        raw: HostArray,
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
        self.exchange_bytes(sent, counts or nothing, starts or nothing, raw, all_counts, all_starts)

    def exchange_arrays(self, call: Call, each: list[arguments.Prepared], sources: Sequence[int]) -> tuple[Array, ...]:
        """Send entry k of ``each`` to rank k, and return what the ``sources`` sent to this rank."""
        words = message.HEADER_WORDS
        headers = np.array([header for header, _ in each], np.int64).reshape(len(each), words)
        theirs = np.empty((len(sources), words), np.int64)
        step = 8 * words
        sizes = [step] * len(each), [step * k for k in range(len(each))]
        self.exchange_from(sources, headers.view(np.uint8).reshape(-1), *sizes, theirs.view(np.uint8).reshape(-1))
        sent = message.pack(headers, [flat for _, flat in each])
        raw, counts, starts = message.room_for(theirs)
        call.num_bytes = sum(counts)
        self.exchange_from(sources, *sent, raw, counts, starts)
        return message.unpack(raw, theirs, starts)
