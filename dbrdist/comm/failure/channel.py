"""Short messages between the watches of all ranks, on a duplicate of a communicator. Nobody waits for one."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.comm.transport import mpi

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpi4py.MPI import Comm, Request

    from dbrdist.core.array.types import JSON

_TAG = 1
_FOR = "pass on to"
_FAN = 32  # ranks to which one rank sends what is for all


class FailureChannel:
    """The channel of one group of ranks. Making it is collective over them.

    Args:
        mpi_comm: is duplicated.
        members: its ranks, as numbered in the whole job.
    """

    def __init__(self, mpi_comm: Comm, members: tuple[int, ...]) -> None:
        self.members = members
        self._MPI = mpi.start()
        self._comm = mpi_comm.Dup()
        self._place = {rank: place for place, rank in enumerate(members)}
        self._sent: list[Request] = []
        self._arrival: Request | None = None
        self._lock = threading.Lock()  # the watch and the end of the program both send

    @property
    def judge(self) -> int:
        """The rank, as numbered in the job, that hears who waits."""
        return self.members[0]

    def tell(self, rank: int, words: Mapping[str, object]) -> None:
        """Send to one rank, as numbered in the job."""
        self.tell_each([rank], words)

    def tell_each(self, ranks: Iterable[int], words: Mapping[str, object]) -> None:
        """Send the same to some ranks."""
        raw = np.frombuffer(json.dumps(words).encode(), np.uint8)
        with self._lock:
            self._sent = [request for request in self._sent if not request.Test()]
            self._sent += [self._comm.Isend([raw, self._MPI.BYTE], self._place[rank], _TAG) for rank in ranks]

    def tell_all(self, words: dict[str, str]) -> None:
        """Have every rank but this one hear something.

        In a large job it goes to a few, each of which passes it on to its part: a rank has a connection to each that
        it speaks to, and the number of descriptors is limited.
        """
        me = self.members[self._comm.rank]
        self._spread([rank for rank in self.members if rank != me], words)

    def _spread(self, ranks: Sequence[int], words: dict[str, str]) -> None:
        if len(ranks) <= 2 * _FAN:
            self.tell_each(ranks, words)
            return
        for begin, end in itertools.pairwise(len(ranks) * k // _FAN for k in range(_FAN + 1)):
            self.tell(ranks[begin], {**words, _FOR: list(ranks[begin + 1 : end])})

    def _pass_on(self, words: dict[str, Any]) -> dict[str, JSON]:
        ranks = words.pop(_FOR, ())
        if ranks:
            self._spread(ranks, words)
        return words

    def hear(self) -> list[dict[str, JSON]]:
        """What has come since the last call."""
        heard = []
        status = self._MPI.Status()
        # MPI takes in messages while it looks, and may find them at the next look only; nothing else may call it.
        self._comm.Iprobe(self._MPI.ANY_SOURCE, _TAG)
        while (matched := self._comm.Improbe(self._MPI.ANY_SOURCE, _TAG, status)) is not None:
            raw = np.empty(status.Get_count(self._MPI.BYTE), np.uint8)
            matched.Recv([raw, self._MPI.BYTE])
            heard.append(self._pass_on(json.loads(raw.tobytes())))
        return heard

    def arrive(self) -> bool:
        """Say that this rank is at its exit; True once every rank is."""
        if self._arrival is None:
            self._arrival = self._comm.Ibarrier()
        return bool(self._arrival.Test())
