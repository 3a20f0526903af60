"""The verbs that move objects, pickled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dbrdist.comm.protocol import arguments
from dbrdist.comm.protocol.arguments import attempt
from dbrdist.comm.protocol.gate import Passage
from dbrdist.comm.protocol.group import RankGroup
from dbrdist.comm.transport import message


class ObjectVerbs(RankGroup):
    """Verbs that end in ``_obj``."""

    def bcast_obj(self, obj: object, max_buf_len: int | None = None, root: int = 0) -> Any:
        """The object of ``root``, on every rank; the root gets its own object back.

        Args:
            obj: on ``root`` anything that pickle takes; ignored on the others.
            max_buf_len: bytes sent at a time, the same on every rank; None for as many as MPI takes.
            root: the rank that sends, the same on every rank; default 0.
        """
        with self.gate.call("bcast_obj") as call:
            (own, piece), error = self._prepare_bcast(call, root, max_buf_len, arguments.pickled, obj)
            row = [piece, 0 if own is None else own.size]
            rows = call.agree(row, error, num_same=1, what="the same max_buf_len", detail=f"{piece} bytes")
            call.num_bytes = int(rows[call.root, 1])
            with call.moving():
                raw = np.empty(call.num_bytes, np.uint8) if own is None else own
                self.ranks.bcast_in_pieces(call, raw, piece)
            return self._unpickle_together(call, lambda: obj if self.rank == root else arguments.unpickled(raw))

    def allgather_obj(self, obj: object) -> list[Any]:
        """Every rank's object, in order of ranks.

        Args:
            obj: this rank's object; anything that pickle takes.
        """
        with self.gate.call("allgather_obj") as call:
            raws = self._gather_objects(call, obj)
            found: list[Any] = self._unpickle_together(call, lambda: [arguments.unpickled(raw) for raw in raws])
            return found

    def gather_obj(self, obj: object, root: int = 0) -> list[Any] | None:
        """On ``root`` every rank's object, in order of ranks; None on the others.

        Args:
            obj: this rank's object; anything that pickle takes.
            root: the rank that receives, the same on every rank; default 0.
        """
        with self.gate.call("gather_obj") as call:
            raws = self._gather_objects(call, obj, root)
            found = self._unpickle_together(call, lambda: [arguments.unpickled(raw) for raw in raws])
            return found if self.rank == root else None

    def _gather_objects(self, call: Passage, obj: object, root: int | None = None) -> list[message.HostArray]:
        bad_root = self._take_root(call, root) if root is not None else None
        own, error = attempt(arguments.pickled, obj)
        mine = np.empty(0, np.uint8) if own is None else own
        counts = call.agree([mine.size], bad_root or error)[:, 0].tolist()
        call.num_bytes = mine.size
        if root is not None and self.rank != root:
            counts = []
        starts = [sum(counts[:k]) for k in range(len(counts))]
        with call.moving():
            raw = np.empty(sum(counts), np.uint8)
            if root is None:
                self.ranks.allgather_bytes(mine, raw, counts, starts)
            else:
                self.ranks.gather_bytes(call, mine, raw, counts, starts)
        return [raw[start : start + count] for start, count in zip(starts, counts)]

    def scatter_obj(self, objs: Sequence[object] | None, root: int = 0) -> Any:
        """Entry ``rank`` of the ``size`` objects that ``root`` passes.

        Args:
            objs: on ``root`` one object for each rank; ignored on the others, which may pass None.
            root: the rank that sends, the same on every rank; default 0.
        """
        with self.gate.call("scatter_obj") as call:
            bad_root = self._take_root(call, root)
            raws, error = None, None
            if call.root == self.rank:
                raws, error = attempt(arguments.pickled_for_each, objs, self.size)
            call.agree((), bad_root or error)
            with call.moving():
                each = [arguments.prepared(raw, "scatter_obj") for raw in raws or ()]
                raw = self.ranks.exchange_arrays(call, each, [call.root])[0]
            return self._unpickle_together(call, lambda: arguments.unpickled(raw))

    def allreduce_obj(self, obj: object) -> Any:
        """The sum (``+``) of every rank's object, added in order of ranks.

        Args:
            obj: this rank's summand: a number, an array, or anything with ``+`` that pickle takes.
        """
        first, *others = self.allgather_obj(obj)
        for other in others:
            first = first + other
        return first

    def _unpickle_together(self, call: Passage, unpickle: Callable[[], Any]) -> Any:
        """What ``unpickle()`` returns; if it raises on one rank, all raise that."""
        result, error = attempt(unpickle)
        call.agree((), error)
        return result
