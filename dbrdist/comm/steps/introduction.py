"""What ranks compare once, before the first step of an optimizer: that it is the same one everywhere, and its batches.

The header of each step has what comes of it: a number for the optimizer, and how far the shared batches have come.
"""

from __future__ import annotations

import copy
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.protocol import agree
from dbrdist.comm.protocol.gate import digest
from dbrdist.comm.protocol.primitives import Row
from dbrdist.comm.protocol.roster import roster_of
from dbrdist.comm.protocol.shares import batches_in_words, check_examples, refuse_doubled
from dbrdist.comm.transport.disagreement import name_ranks
from dbrdist.core.array.backend import is_array, to_cpu
from dbrdist.core.array.types import Array
from dbrdist.core.tape.variable import Variable
from dbrdist.core.usage.mistakes import warn
from dbrdist.datasets.loading.divided import divided_iterators
from dbrdist.datasets.loading.serial import Iterator, SerialIterator
from dbrdist.errors import CommunicatorError

if TYPE_CHECKING:
    from typing import Any

# What the iterators of a rank read: its share of each batch, or whole batches; or, and how many of them in which
# epochs, its share in a loop of the program's own.
_UNKNOWN, _DIVIDED, _WHOLE, _READ = range(4)
_EPOCH_BITS = 16
_MAX_COMPARED_BYTES = 1 << 20  # of a first batch


class Introduction:
    """One optimizer as its communicator knows it.

    Ranks create their optimizers in the same order, or at the same lines. Two of them that ranks step in different
    orders may have networks of equal shapes, so that nothing else tells them apart.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: CommunicatorBase) -> None:
        self._comm = comm
        self._roster = roster_of(comm, "optimizers")
        self._ordinal, self._place = self._roster.enter(sys._getframe(1))
        self._iterators: dict[str, Any] = {}
        self._read_before = self._places_read()
        self.divided: list[SerialIterator] = []  # iterators that divide the same batches over these ranks
        self.number = 0  # 0 until it was introduced

    def reads(self, iterators: Mapping[str, Iterator]) -> None:
        """The iterators that its updater has."""
        self._iterators = dict(iterators)

    def copied(self, moment: int) -> Introduction:
        """That of a copy of the optimizer, made after so many steps."""
        new = copy.copy(self)
        new.be_a_copy(moment)
        return new

    def be_a_copy(self, moment: int) -> None:
        """Speak of a copy, which no updater has yet."""
        self.number = digest(f"copy of {self.number} at step {moment}") if self.number else 0
        self._iterators, self.divided = {}, []
        self._place = f"{self._place}, copied after {moment} steps"

    def meet(self, arguments: Iterable[Any]) -> None:
        """Compare with the other ranks. Collective.

        Args:
            arguments: what the loss of this first step is computed from.

        Raises:
            CommunicatorError: on every rank, if they are about to step different optimizers, or their iterators divide
                different batches.
        """
        if self._comm.size > 1:
            kind, lines, share, read = self._what_is_read()
            with self._comm.gate.call("first update") as call:
                rows = call.agree([self._ordinal, digest(self._place), kind, digest(agree.as_lines(lines)), share])
            if not (_is_one(rows, 0) or _is_one(rows, 1)):
                text = f"optimizer {self._ordinal} of the communicator, created at {self._place}\n"
                agree.same_everywhere(self._comm, text, "to step the same optimizer")
            kinds = set(rows[:, 2].tolist())
            if kinds == {_DIVIDED, _WHOLE}:
                self._refuse_both(rows[:, 2])
            if kinds == {_DIVIDED} or (len(kinds) == 1 and kind > _READ):
                agree.same_everywhere(self._comm, agree.as_lines(lines), "the same training batches")
                refuse_doubled(rows[:, 4].tolist(), "training")
                for iterator in read:
                    check_examples(self._comm, iterator.dataset, "training")
                self.divided = list(self._iterators.values())
            elif (rows[:, 2] == _WHOLE).all() and _is_one(rows, 3):
                self._warn_of_equal_batches(arguments)
        self._roster.num_introduced += 1
        self.number = self._roster.num_introduced

    def position(self) -> int:
        """How far shared batches have come, as one number."""
        return hash(tuple((it.epoch, it.current_position, it.next_index) for it in self.divided)) & (1 << 62) - 1

    def in_words(self) -> str:
        """Both, one line each."""
        places = [
            f"example {it.current_position} of epoch {it.epoch} next\nnumber {it.next_index} of the dataset next\n"
            for it in self.divided
        ]
        return f"optimizer {self.number} by order of first steps, created at {self._place}\n{''.join(places)}"

    def _what_is_read(self) -> tuple[int, Sequence[str], int, Sequence[SerialIterator]]:
        """What the iterators give this rank, in words, its share, and those that divide batches over the ranks."""
        iterators = self._iterators
        if not iterators:
            return self._what_was_read()
        if not all(isinstance(it, SerialIterator) for it in iterators.values()):
            return _UNKNOWN, (), 0, ()
        lines = [line for name, it in iterators.items() for line in batches_in_words(it, f"training {name}")]
        if all(it.size == self._comm.size for it in iterators.values()):
            return _DIVIDED, lines, next(iter(iterators.values())).rank, list(iterators.values())
        if not all(map(_reads_whole_batches, iterators.values())):
            return _UNKNOWN, (), 0, ()
        indices = [zlib.crc32(np.asarray(it.indices, np.int64).tobytes()) for it in iterators.values()]
        return _WHOLE, [*lines, f"batches {indices}"], 0, ()

    def _places_read(self) -> dict[int, tuple[int, int]]:
        """How far the iterators have come that give this rank its part of each batch."""
        found = divided_iterators(self._comm.rank, self._comm.size) if self._comm.size > 1 else ()
        return {id(it): (it.epoch, it.current_position) for it in found}

    def _what_was_read(self) -> tuple[int, Sequence[str], int, Sequence[SerialIterator]]:
        """The same of a loop of the program's own: of iterators that were read since the optimizer was made.

        How far they have come is no matter: a thread of the program's may read ahead, on some ranks further.
        """
        every = divided_iterators(self._comm.rank, self._comm.size)
        found = [it for it in every if self._read_before.get(id(it)) != (it.epoch, it.current_position)]
        if not found:
            return _UNKNOWN, (), 0, ()
        lines = [line for it in found for line in batches_in_words(it, "training", is_moving=False)]
        orders = [f"order {it.order_checksum}" for it in found]
        kind = _READ + len(found) + (sum(it.epoch for it in found) << _EPOCH_BITS)
        return kind, [*lines, *orders], self._comm.rank, found

    def _refuse_both(self, kinds: Row) -> None:
        """Raise where some ranks read a part of each batch, and others all of it."""
        divided, whole = (name_ranks([r for r, kind in enumerate(kinds) if kind == k]) for k in (_DIVIDED, _WHOLE))
        raise CommunicatorError(
            f"expected every rank to read its part of each batch, or every rank its own batches, but {divided} divides "
            f"batches (rank=, size=) and {whole} does not; make all training iterators with rank=comm.rank, "
            "size=comm.size"
        )

    def _warn_of_equal_batches(self, arguments: Iterable[Array]) -> None:
        """Warn once where all ranks have read the same examples, which can only be seen in their values. Collective."""
        checksum, differs = _checksum(arguments)
        rows = self._comm.gate.allgather_rows(np.array([checksum, differs], np.int64))
        if _is_one(rows, 0) and rows[0, 1] and self._comm.rank == 0:
            warn(
                f"all {self._comm.size} ranks read the same examples in the same order, so more ranks learn no more "
                "from a step than one; give the iterator rank=comm.rank, size=comm.size, or divide the dataset with "
                "dbrdist.comm.scatter_dataset"
            )


def _is_one(rows: Row, column: int) -> bool:
    return bool((rows[:, column] == rows[0, column]).all())


def _reads_whole_batches(iterator: SerialIterator) -> bool:
    """Whether this rank reads batches by itself, of a dataset that is not known to be its part."""
    is_part = iterator.is_synchronized or getattr(iterator.dataset, "is_one_ranks", False)
    return iterator.size == 1 and iterator.batch_size > 1 and not is_part


def _checksum(arguments: Iterable[Array]) -> tuple[int, bool]:
    """A checksum of arrays, and whether the examples in one of them differ: made-up data may be all zeros."""
    found, differs = 0, False
    for x in arguments:
        x = x.array if isinstance(x, Variable) else x
        if is_array(x) and x.ndim:
            host = np.ascontiguousarray(to_cpu(x[: max(_MAX_COMPARED_BYTES * len(x) // max(x.nbytes, 1), 2)]))
            found = zlib.crc32(host.tobytes(), found)
            differs = differs or bool((host[1:] != host[:1]).any())
    return found, differs
