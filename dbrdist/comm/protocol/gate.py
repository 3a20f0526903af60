"""The gate that every collective verb passes: each rank shows one row of numbers, and all draw the same conclusion.

The row says in which verb the rank is, its root, its configuration, what its argument is, and whether that is wrong. It
has the same length in every verb, so ranks in different verbs still meet. Where rows disagree, or one has an error,
the ranks exchange words and raise the same error, with what differs, on which ranks, and the lines of the calls.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.comm.protocol import arguments
from dbrdist.comm.protocol.primitives import PendingRow, Ranks, Row
from dbrdist.comm.transport import disagreement
from dbrdist.comm.transport.call_log import Call, CallLog
from dbrdist.core.array.backend import capturing
from dbrdist.errors import CaptureError, CommunicatorError

if TYPE_CHECKING:
    from types import TracebackType


_HEAD = 5  # number, verb, root, configuration, error
PAYLOAD_WORDS = 42
ROW_WORDS = _HEAD + PAYLOAD_WORDS
ROW_BYTES = 8 * ROW_WORDS
_packers = [struct.Struct(f"{n}q{ROW_BYTES - 8 * n}x") for n in range(ROW_WORDS + 1)]  # by the number of words


class Gate:
    """The gate of one communicator on one rank.

    Args:
        ranks: moves rows and bytes.
        record: where this rank's verbs are noted.
        name: of the communicator, the same on all its ranks.
        members: its ranks, as numbered in the whole job.
        describe_config: gives the configuration in words, which must be the same on all ranks.
    """

    def __init__(
        self,
        ranks: Ranks,
        record: CallLog,
        name: str,
        members: tuple[int, ...],
        describe_config: Callable[[], str] = str,
    ) -> None:
        self.record = record
        self.name = name
        self.members = members
        self.closed = ""  # why no verb can run any more
        self.ranks = ranks
        self.backward_of = 0  # in a backward pass the number of the call that it goes through, else 0
        self.owner, self.owner_digest = "", 0  # whose verbs these are, where several things have the same
        self.num_differentiable = 0  # collective calls of comm.functions, the same on all ranks
        self.config: str | None = None
        self.config_digest = 0
        self.one_thread = threading.RLock()  # held by the thread that is in a verb
        self._describe_config = describe_config

    def config_changed(self) -> None:
        """Compare the configuration again at the next verb."""
        self.config = None

    @contextlib.contextmanager
    def of(self, owner: str) -> Iterator[None]:
        """Within the block verbs are those of a thing; ranks whose things have other names are in different verbs."""
        outer = self.owner, self.owner_digest
        self.owner, self.owner_digest = owner, _verb_words[owner]
        try:
            yield
        finally:
            self.owner, self.owner_digest = outer

    def call(self, verb: str, place: tuple[str, int] | None = None) -> Passage:
        """Enter a collective verb: ``with gate.call("bcast") as call``. ``place`` is the line of the call, if known.

        Raises:
            CommunicatorError: if the communicator is closed, or another thread is in a verb of it.
        """
        if self.closed or capturing.is_on or self.ranks.refusal():
            self._check_open(verb)
        if not self.one_thread.acquire(False):
            raise CommunicatorError(self._two_threads(verb))
        call = Passage(self.record, verb, self.name, self.members, place)
        call.gate, call.enclosed = self, ()
        return call

    def again(self, call: Passage) -> Passage:
        """Enter a verb a second time, to wait for the row that was posted in it: ``with gate.again(call)``."""
        self._check_open(call.verb)
        if not self.one_thread.acquire(False):
            raise CommunicatorError(self._two_threads(call.verb))
        call.since, call.thread = time.monotonic(), threading.get_ident()
        return call

    def message(self, verb: str, peer: int, tag: int) -> Passage:
        """Enter a send or receive; what is wrong with these arguments is raised on this rank alone."""
        if self.closed or capturing.is_on or self.ranks.refusal():
            self._check_open(verb)
        call = Passage(self.record, verb, self.name, self.members)
        call.gate, call.enclosed, call.is_collective = self, (), False
        size = len(self.members)
        # Short messages are fast: what is right mostly is looked at first.
        call.peer = peer = peer if type(peer) is int and 0 <= peer < size else arguments.rank_of(peer, size, verb)
        call.tag = tag = tag if type(tag) is int and 0 <= tag <= arguments.MAX_TAG else arguments.tag(tag, verb)
        call.partner = partner = self.members[peer]
        call.number = self.record.count(self.name, verb[:4], partner, tag)
        return call

    def allgather_rows(self, row: Row) -> Row:
        """Some 64-bit integers of every rank, as many on each, as an array of ``size`` rows. Collective."""
        with self.call("agree") as call:
            if row.size <= PAYLOAD_WORDS:
                return call.agree(row)[:, : row.size].copy()
            call.agree([row.size], num_same=1, what="the same number of integers", detail=str(row.size))
            rows = np.empty((self.ranks.size, row.size), np.int64)
            counts = [row.nbytes] * self.ranks.size
            with call.moving():
                starts = [row.nbytes * k for k in range(self.ranks.size)]
                self.ranks.allgather_bytes(row.view(np.uint8), rows.view(np.uint8).reshape(-1), counts, starts)
            return rows

    def _check_open(self, verb: str) -> None:
        if capturing.is_on:  # before other ranks can see it: what is captured has not happened
            raise CaptureError(f"it calls {verb} of a communicator, in which ranks meet through the host")
        reason = self.closed or self.ranks.refusal()
        if reason:
            raise CommunicatorError(f"{verb}: {reason}")

    def _two_threads(self, verb: str) -> str:
        busy = [call for call in list(self.record.last) if call.comm_name == self.name and call.seconds < 0]
        where = f" ({busy[-1].verb} at {busy[-1].where()})" if busy else ""
        return (
            f"{verb}: expected one thread at a time, but another thread is in a verb of this communicator{where}; "
            "give each thread its own by split(0, rank), made in the same order on all ranks"
        )

    def describe_config(self) -> None:
        """Put the configuration into words, for the next row."""
        self.config = self._describe_config()
        self.config_digest = digest(self.config)

    def explain(self, call: Passage, what: str, detail: str, error: Exception | None) -> Exception:
        """What every rank raises, from the words of all. All ranks come here, or none."""
        verb = call.verb + (f" backward through differentiable call {self.backward_of}" if self.backward_of else "")
        mine = disagreement.Words(
            f"{verb} of {self.owner}" if self.owner else verb,
            call.number,
            call.root,
            self.config or "",
            what,
            detail,
            call.where(),
            disagreement.kind_of(error),
            "" if error is None else str(error),
        )
        raw = np.frombuffer(mine.encode(), np.uint8)
        counts = [words_of(row)[0] for row in self.ranks.post_row(call, _packers[1].pack(raw.size)).wait(call)]
        starts = [sum(counts[:k]) for k in range(len(counts))]
        found = np.empty(sum(counts), np.uint8)
        self.ranks.allgather_bytes(raw, found, counts, starts)
        everyone = [disagreement.Words.decode(found[i : i + n].tobytes()) for i, n in zip(starts, counts)]
        return disagreement.judge(everyone)


class Passage(Call):
    """One verb on its way through the gate."""

    enclosed: Sequence[list[Any]]  # for each array enclosed in the row what every rank enclosed
    gate: Gate
    _answer: PendingRow | None = None
    _is_meeting = False  # shows a row and waits for the others'
    is_moving = False  # all ranks have agreed and move bytes

    def __exit__(self, kind: type[BaseException] | None, value: Any, tb: TracebackType | None) -> None:
        if self.enclosed:
            self.enclosed = ()
            self.gate.ranks.release_enclosed()
        Call.__exit__(self, kind, value, tb)  # in half the time of super()
        if kind is not None and (self._answer is not None or self._is_meeting or self.is_moving):
            self.break_off(value)
        if self.is_collective:
            self.gate.one_thread.release()

    def break_off(self, error: BaseException) -> None:
        """Other ranks may still come to this meeting, or wait for bytes: nothing can follow on the communicator."""
        gate = self.gate
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        gate.closed = gate.closed or (
            f"this communicator cannot be used any more, because {self.verb} at {self.where()} ended with {reason}"
        )
        if self.is_moving and not self.error:
            gate.ranks.failed_half_way(self, reason)

    def moving(self) -> _Moving:
        """``with call.moving():`` all ranks have agreed and move bytes; one that fails here leaves the others stuck."""
        return _Moving(self)

    def agree(
        self,
        payload: Sequence[int] | Row = (),
        error: Exception | None = None,
        *,
        num_same: int = 0,
        what: str = "",
        detail: str | Callable[[], str] = "",
    ) -> Row:
        """Show a row and return the payloads of all ranks, shape (size, 42).

        Args:
            payload: up to 42 integers.
            error: what is wrong with this rank's argument; every rank raises it.
            num_same: how many leading integers of the payload must be the same on all ranks.
            what: what these stand for, as in "expected ... on every rank".
            detail: what this rank has.
        """
        rows = self.exchange(payload, error, num_same=num_same, what=what, detail=detail)
        return _payloads(rows)

    def exchange(
        self,
        payload: Sequence[int] | Row = (),
        error: Exception | None = None,
        *,
        num_same: int = 0,
        what: str = "",
        detail: str | Callable[[], str] = "",
        enclosed: Sequence[Any] = (),
    ) -> list[bytes]:
        """As :meth:`agree`, with rows as they came, for :func:`payload_bytes`.

        ``enclosed`` are arrays that are sent with it, where the provider says that they can.
        """
        row = self._fill_in(payload, error)
        self._is_meeting = True
        rows, self.enclosed = self.gate.ranks.exchange_row(self, row, enclosed)
        self._is_meeting = False
        head = row[: 8 * (_HEAD + num_same)]
        for theirs in rows:  # in half the time of all() for a few ranks
            if not theirs.startswith(head):
                break
        else:
            if error is None:
                return rows
        raise self._disagreement(what, detail, error) from error

    def _disagreement(self, what: str, detail: str | Callable[[], str], error: Exception | None) -> Exception:
        words = "" if error is not None else detail if isinstance(detail, str) else detail()
        return self.gate.explain(self, what, words, error)

    def post(
        self,
        payload: Sequence[int] | Row = (),
        error: Exception | None = None,
        *,
        num_same: int = 0,
        what: str = "",
        detail: str | Callable[[], str] = "",
        enclosed: Sequence[Any] = (),
    ) -> None:
        """The first half of :meth:`exchange`: show the row, and return at once."""
        row = self._row = self._fill_in(payload, error)
        self._own_error, self._what, self._detail, self._num_same = error, what, detail, num_same
        self._answer = self.gate.ranks.post_row(self, row, enclosed)

    def _fill_in(self, payload: Sequence[int] | Row, error: Exception | None) -> bytes:
        """The row to show."""
        gate = self.gate
        if gate.config is None:
            gate.describe_config()
        number = self.number = gate.record.count(gate.name)
        self.meets_by = "row"
        verb = _verb_words[self.verb] ^ gate.backward_of ^ gate.owner_digest
        words = (number, verb, self.root, gate.config_digest, error is not None, *payload)
        return _packers[len(words)].pack(*words)

    def is_answered(self) -> bool:
        """Whether :meth:`wait` will return at once."""
        return self._answer is not None and self._answer.is_there()

    def wait(self) -> Row:
        """The second half: everyone's payloads, once all are there."""
        return _payloads(self.wait_for_rows())

    def wait_for_rows(self) -> list[bytes]:
        """The rows as they came, for :func:`payload_bytes`."""
        answer, words, row = self._answer, self._detail, self._row
        assert answer is not None
        rows = answer.wait(self)
        self.enclosed = answer.pieces()
        self._answer, self._detail, self._row = None, "", b""  # the record keeps this passage, not whole models
        own = self._own_error
        if own is None and all(map(bytes.startswith, rows, repeat(row[: 8 * (_HEAD + self._num_same)]))):
            return rows
        raise self._disagreement(self._what, words, own) from own

    def meet_without_row(self) -> None:
        """Count a meeting in which bytes move without a row before them."""
        self.number = self.gate.record.count(self.gate.name)
        self.gate.record.reach(self.number, self.gate.name, "bytes")
        self.meets_by = "bytes"


class _Moving:
    """See :meth:`Passage.moving`."""

    __slots__ = ("_call",)

    def __init__(self, call: Passage) -> None:
        self._call = call

    def __enter__(self) -> None:
        self._call.is_moving = True

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._call.is_moving = False


def _payloads(rows: list[bytes]) -> Row:
    return np.frombuffer(bytearray().join(rows), np.int64).reshape(-1, ROW_WORDS)[:, _HEAD:]


def payload_bytes(begin: int, count: int) -> slice:
    """Where some integers of the payload lie in a row."""
    return slice(8 * (_HEAD + begin), 8 * (_HEAD + begin + count))


def words_of(raw: bytes) -> tuple[int, ...]:
    """The integers."""
    return struct.unpack(f"{len(raw) // 8}q", raw)


def digest(text: str) -> int:
    """A number that is the same for equal texts, on every rank."""
    raw = text.encode()
    return zlib.crc32(raw) << 31 ^ zlib.adler32(raw)


class _Digests(dict[str, int]):
    """The digests of a few texts that come again and again."""

    def __missing__(self, text: str) -> int:
        self[text] = digest(text)
        return self[text]


_verb_words = _Digests()
