"""Iterators that several ranks use together."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.protocol import agree
from dbrdist.comm.protocol.gate import digest
from dbrdist.comm.protocol.roster import check_order, roster_of
from dbrdist.comm.protocol.shares import checksum_of
from dbrdist.core.files.serializer import AbstractSerializer, DictionarySerializer, NpzDeserializer
from dbrdist.core.names.missing_names import explained as _explained
from dbrdist.datasets.loading.contents import known_examples
from dbrdist.datasets.loading.order import ShuffleOrderSampler
from dbrdist.datasets.loading.serial import Iterator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeVar

    from dbrdist.datasets.loading import serial
    from dbrdist.datasets.loading.base import Batch

    R = TypeVar("R")

# What updaters, triggers and extensions read from an iterator.
_PLACE = ("epoch", "epoch_detail", "previous_epoch_detail", "is_new_epoch", "current_position", "row", "num_read")


def create_multi_node_iterator(
    actual_iterator: serial.Iterator, communicator: CommunicatorBase, rank_master: int = 0
) -> MultiNodeIterator:
    """An iterator that gives every rank the batches of one.

    For models whose parts are on different ranks: all of them need the same examples.

    Args:
        actual_iterator: the iterator of ``rank_master``; those of the other ranks are not read (None is enough).
        communicator: the ranks.
        rank_master: the rank that reads.

    Raises:
        TypeError: on every rank, if the master has no iterator.
    """
    return MultiNodeIterator(actual_iterator, communicator, rank_master)


class MultiNodeIterator(Iterator):
    """The batches of one rank's iterator on every rank. Collective: all ranks ask for each batch.

    Batches are sent pickled, with the position of the iterator, so that epochs end on all ranks at once. An error while
    the master reads is raised on every rank.
    """

    def __init__(self, actual_iterator: Any, communicator: CommunicatorBase, rank_master: int) -> None:
        self.actual_iterator = actual_iterator
        self._comm = communicator
        self._rank_master = rank_master
        self._is_master = communicator.rank == rank_master
        made = roster_of(communicator, "multi-node iterators").enter(sys._getframe(1))
        self._name = f"multi-node iterator {made.ordinal}"  # ranks make them together
        with agree.together(communicator):
            if self._is_master and not hasattr(actual_iterator, "__next__"):
                raise TypeError(
                    f"create_multi_node_iterator expected an iterator on rank {rank_master}, got "
                    f"{type(actual_iterator).__name__}"
                )
        self._follow(self._from_master(self._place))

    def __next__(self) -> Any:
        has_ended, batch, place = self._from_master(self._read)
        self._follow(place)
        if has_ended:
            raise StopIteration
        return batch

    next = __next__

    def _from_master(self, function: Callable[[], R]) -> R:
        with self._comm.gate.of(self._name):
            return agree.on_root(self._comm, function, self._rank_master)

    def _read(self) -> tuple[bool, Batch | None, dict[str, float | None]]:
        """(whether there was none, the next batch, where the iterator is now)."""
        try:
            batch = next(self.actual_iterator)
        except StopIteration:
            return True, None, self._place()
        return False, batch, self._place()

    def _place(self) -> dict[str, float | None]:
        actual = self.actual_iterator
        place = {name: getattr(actual, name) for name in _PLACE if hasattr(actual, name)}
        dataset = getattr(actual, "dataset", None)
        place["batch_size"], place["num_examples"] = getattr(actual, "batch_size", None), _length(dataset)
        return place

    def _follow(self, place: Mapping[str, object]) -> None:
        self.__dict__.update(place)

    def reset(self) -> None:
        """Go back to the start on all ranks. Collective."""

        def back() -> dict[str, float | None]:
            self.actual_iterator.reset()
            return self._place()

        self._follow(self._from_master(back))

    def finalize(self) -> None:
        """Give back the master's threads and processes."""
        if self._is_master:
            self.actual_iterator.finalize()

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load the position. The state of the master's iterator is one entry, empty in a file of another rank.

        A file that the master wrote can be loaded by every rank; that of another rank by the same one.
        """
        entries: dict[str, Any] = {}
        if self._is_master and not serializer.is_loading:
            writer = DictionarySerializer()
            self.actual_iterator.serialize(writer)
            entries = writer.target
        for name in (name for name in _PLACE if name in self.__dict__):
            value: Any = serializer(name, None if serializer.is_loading else self.__dict__[name])
            self.__dict__[name] = value.item() if hasattr(value, "item") else value
        names = str(serializer("names", "\n".join(entries)))
        saved: dict[str, Any] = {
            name: serializer["master"](name, entries.get(name)) for name in names.split("\n") if name
        }
        if self._is_master and serializer.is_loading and saved:
            self.actual_iterator.serialize(NpzDeserializer(saved))


def _length(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None


def create_synchronized_iterator(actual_iterator: Any, communicator: CommunicatorBase) -> Any:
    """``actual_iterator``, set to the order of rank 0's: every rank reads the same examples in the same order.

    Each rank reads its own dataset, which must have the same length everywhere. What ranks draw at random for their
    examples follows from the same seed too. The iterator starts over. One that does not shuffle stays as it is; an
    ``order_sampler`` of the caller's own is replaced by a permutation for each epoch, as in ChainerMN.

    Raises:
        TypeError: on every rank, if an iterator has no ``order_sampler``.
        CommunicatorError: on every rank, if datasets or batches differ in size, or only some iterators shuffle or
            repeat, or each gives its rank a part of a batch, or ranks synchronize their iterators in another order.
    """
    with agree.together(communicator):
        if not hasattr(actual_iterator, "order_sampler"):
            raise TypeError(
                f"create_synchronized_iterator expected an iterator with an order_sampler, such as SerialIterator, got "
                f"{type(actual_iterator).__name__}"
            )
    sampler = actual_iterator.order_sampler
    text = (
        f"{_length(actual_iterator.dataset)} examples\nbatches of {actual_iterator.batch_size}\n"
        f"{'index order' if sampler is None else 'shuffled'}\n"
        f"part {getattr(actual_iterator, 'rank', 0)} of {getattr(actual_iterator, 'size', 1)} of each batch\n"
        f"repeat={bool(getattr(actual_iterator, 'repeat', True))}, last={getattr(actual_iterator, 'last', None)!r}\n"
    )
    agree.same_everywhere(communicator, text, "iterators of the same kind")
    evidence = _evidence(actual_iterator)
    check_order(communicator, "create_synchronized_iterator", "iterators", sys._getframe(1), evidence)
    seed = communicator.bcast_obj(getattr(actual_iterator, "seed", 0))
    actual_iterator.is_synchronized = True
    if hasattr(actual_iterator, "reorder"):
        if sampler is not None:
            actual_iterator.reorder(seed)
    elif sampler is not None:  # of another library
        actual_iterator.order_sampler = ShuffleOrderSampler(seed)
        actual_iterator.reset()
    return actual_iterator


def _evidence(iterator: Any) -> list[int]:
    """Numbers of an iterator's examples and of its seed."""
    known = 0
    with contextlib.suppress(Exception):  # what a program's own dataset raises here: its examples say nothing
        known = checksum_of(known_examples(iterator.dataset))
    return [known, digest(repr(getattr(iterator, "seed", 0)))]


__getattr__ = _explained(__name__, "dbrdist.comm.iterators")
