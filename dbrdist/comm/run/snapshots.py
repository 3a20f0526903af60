"""Saving a run of several ranks as one file, although ranks differ a little."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.gradients.mean_network import may_differ, mean_over_ranks, mean_parameters
from dbrdist.comm.protocol.agree import on_root, together
from dbrdist.comm.protocol.roster import check_same, roster_of
from dbrdist.comm.steps.optimizer import MultiNodeOptimizer
from dbrdist.core.array.backend import is_array, to_cpu
from dbrdist.core.array.types import Array, Number
from dbrdist.core.files.serializer import AbstractSerializer, described
from dbrdist.training import PRIORITY_WRITER, Extension
from dbrdist.training.extensions import snapshots
from dbrdist.training.extensions.snapshots import PRIORITY_SNAPSHOT, Snapshot
from dbrdist.training.extensions.weight_average import WeightAverage
from dbrdist.training.runs import CONSTANTS, DATA, constants_of

if TYPE_CHECKING:
    from dbrdist.core.array.types import JSON, HostArray
    from dbrdist.core.model.link import Link
    from dbrdist.training.trainer import Trainer

_LONG_BYTES = 1 << 16  # entries of snapshots that are sent one by one; the others are one object
_MOST_ROWS_BYTES, _MOST_ROWS = 1_000_000, 0.1  # of all ranks' statistics; and of the parameters' bytes


class LocalState(Extension):
    """The state in which ranks differ: running statistics of the network, and the examples left out.

    It also saves the constants that belong to the network's weights (:func:`dbrdist.training.runs.constants_of`), and
    what `data` says of the data that it is trained on.

    It is gathered on rank 0 for a snapshot, which one rank writes: one array for each value, with a row for each rank.
    A run that is resumed on as many ranks gives each its own again; on another number all get the means. Where the rows
    of all ranks would take more than 1 MB and a tenth of the trained parameters, the means alone are saved: at 1,024
    ranks the statistics of a ResNet-50 would take twice the memory of its weights. With virtual workers all ranks have
    the same, saved once.

    Args:
        comm: the ranks.
        model: the network.
        iterator: the training iterator; what it has in ``skipped``, if anything, is kept too.
        data: facts about the data as plain values: what a later start compares with its own.
    """

    def __init__(self, comm: CommunicatorBase, model: Link, iterator: Any, data: Mapping[str, JSON] | None = None):
        self._data = dict(data or {})
        self._comm = comm
        self._model = model
        self._iterator = iterator
        self._is_shared = getattr(iterator, "virtual_workers", None) is not None
        self._skipped_before: list[str] = []
        self._gathered: list[dict[str, Any]] = []  # of each rank; with virtual workers, or where it is large, of one
        self._skipped_of_ranks: list[list[str]] = []
        self._size = 0  # of the ranks that were gathered
        self.saved_constants: dict[str, float] = {}  # of a loaded snapshot
        self.saved_data: dict[str, JSON] = {}

    trigger = None

    @property
    def skipped(self) -> list[str]:
        """What was said of each training example that this rank left out, earlier parts of the run included."""
        return list(dict.fromkeys([*self._skipped_before, *getattr(self._iterator, "skipped", ())]))

    def gather(self) -> None:
        """Collect every rank's state on rank 0. Collective."""
        mine = _persistents(self._model)
        self._skipped_of_ranks = self._comm.gather_obj(self.skipped) or []
        self._size = self._comm.size
        if self._is_shared:  # as one rank would save it: the same bytes on any number of ranks
            self._skipped_of_ranks = [_all_of(self._skipped_of_ranks)]
            self._size = 1
        if self._is_shared or self._are_large(mine):
            means = mine if self._is_shared else _means_of_ranks(self._comm, mine)
            self._gathered = [means] if self._comm.rank == 0 else []
        else:
            self._gathered = self._comm.gather_obj(mine) or []

    def _are_large(self, mine: dict[str, Array]) -> bool:
        """Whether the rows of all ranks take so much room that their means have to do; the same on every rank."""
        num_bytes = self._comm.size * sum(value.nbytes for value in mine.values())
        of_params = sum(p.lend().nbytes for p in self._model.params() if p.is_initialized)
        return bool(self._comm.size > 1 and num_bytes > max(_MOST_ROWS_BYTES, of_params * _MOST_ROWS))

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within the block, on rank 0, the network has the means of all ranks' statistics: what others load."""
        own = _persistents(self._model)
        for path, value in own.items():
            if value.dtype.kind == "f" and (len(self._gathered) > 1 or (self._gathered and self._size > 1)):
                _set_persistent(self._model, path, _mean(self._gathered, path))
        try:
            yield
        finally:
            for path, value in own.items():
                _set_persistent(self._model, path, value)

    def serialize(self, serializer: AbstractSerializer) -> None:
        constants = described(serializer, CONSTANTS, json.dumps(constants_of(self._model)))
        self.saved_constants = json.loads(constants) if serializer.is_loading and constants else {}
        data = described(serializer, DATA, json.dumps(self._data))
        self.saved_data = json.loads(data) if serializer.is_loading and data else {}
        size = int(serializer("size", self._size))
        if not serializer.is_loading:
            serializer(
                "skipped", json.dumps({rank: words for rank, words in enumerate(self._skipped_of_ranks) if words})
            )
            for path in self._gathered[0] if self._gathered else ():
                serializer["rows"](path, np.stack([state[path] for state in self._gathered]))
            return
        skipped = described(serializer, "skipped", "")
        names = list(_persistents(self._model))
        if skipped is None:  # of an earlier version: each rank's values apart
            saved, of_ranks = _saved_apart(serializer, names, size)
        else:
            rows = {name: serializer["rows"](name, None) for name in names}
            found = json.loads(skipped)
            of_ranks = [found.get(str(rank), []) for rank in range(size)]
            saved = [dict(zip(rows, values)) for values in zip(*rows.values())] or [{}] * bool(size)
        if size == self._comm.size and not (self._is_shared and size > 1):
            own = saved[self._comm.rank] if len(saved) == size else saved[0]
            self._take(own, of_ranks[self._comm.rank])
        elif size:
            all_skipped = _all_of(of_ranks) if self._comm.rank == 0 else []
            self._take({name: _mean(saved, name) for name in names}, all_skipped)

    def _take(self, state: dict[str, HostArray], skipped: list[str]) -> None:
        self._skipped_before = skipped
        for path, value in state.items():
            _set_persistent(self._model, path, value)


def _all_of(skipped_of_ranks: list[list[str]]) -> list[str]:
    """What all ranks left out, each once."""
    return list(dict.fromkeys(itertools.chain(*skipped_of_ranks)))


def _saved_apart(
    serializer: AbstractSerializer, names: list[str], size: int
) -> tuple[list[dict[str, HostArray]], list[list[str]]]:
    """(the values of each rank, the examples that each left out) of an earlier version's snapshot."""
    saved: list[dict[str, Any]] = [
        {name: serializer[f"rank{rank}"](name, None) for name in ["skipped", *names]} for rank in range(size)
    ]
    return saved, [json.loads(str(state.pop("skipped"))) for state in saved]


def _means_of_ranks(comm: CommunicatorBase, mine: dict[str, Array]) -> dict[str, Array]:
    """The means of floats, and rank 0's values of the rest, without all ranks' values in one memory. Collective."""
    return {
        path: (comm.allreduce(value.astype(np.float64)) / comm.size).astype(value.dtype)
        if value.dtype.kind == "f"
        else value
        for path, value in sorted(mine.items())
    }


def _mean(states: list[dict[str, Any]], path: str) -> Any:
    return np.mean([state[path] for state in states], 0)


def _persistents(model: Link) -> dict[str, Array]:
    """The numbers of a network that are saved but not trained, by path."""
    return {
        f"{path.strip('/')}/{name}": np.array(_on_host(getattr(link, name)))
        for path, link in model.namedlinks()
        for name in link.persistent_names
        if isinstance(getattr(link, name), int | float | np.number) or is_array(getattr(link, name))
    }


def _on_host(value: Array | int) -> Array | int:
    return to_cpu(value) if is_array(value) else value


def _set_persistent(model: Link, path: str, value: Array | Number) -> None:
    prefix, _, name = path.rpartition("/")
    link = next(link for p, link in model.namedlinks() if p.strip("/") == prefix)
    old = getattr(link, name)
    if is_array(old):
        old[...] = link.xp.asarray(value, old.dtype)
    else:
        setattr(link, name, type(old)(value))


class AverageStatistics(Extension):
    """Gives all ranks the mean of their running statistics, so that an evaluation sees one network."""

    priority = PRIORITY_WRITER + 1  # before the evaluation that it is for

    def __init__(self, comm: CommunicatorBase, model: Link):
        self._comm = comm
        self._model = model
        self._entry = roster_of(comm, "averages of statistics").enter(sys._getframe(1))

    def __call__(self, trainer: Trainer) -> None:
        if self._comm.size == 1:
            return
        check_same(self._comm, self._entry, "averages of statistics", "average of running statistics")
        for path, value in _persistents(self._model).items():
            if value.dtype.kind == "f":
                _set_persistent(self._model, path, self._comm.allreduce(value) / self._comm.size)


class AllreducePersistent(AverageStatistics):
    """As AverageStatistics, with ChainerMN's name, order of arguments and trigger: once an epoch, before others."""

    trigger = (1, "epoch")

    def __init__(self, model: Link, comm: CommunicatorBase):
        super().__init__(comm, model)


class SharedSnapshot(Extension):
    """Rank 0 saves for all; where it cannot, the error is the same on all.

    Args:
        comm: the ranks.
        snapshot: how: ``extensions.snapshot(...)``, which has the file's name and how many stay. With
            ``autoload=True`` all ranks load the newest whole snapshot when the run starts.
        local: what ranks differ in; it is an extension of the same trainer.

    Every rank's trainer has the same extensions but for those that only report. Example:

        local = LocalState(comm, model, iterator)
        trainer.extend(local)
        trainer.extend(SharedSnapshot(comm, extensions.snapshot(n_retains=2, autoload=True), local))
    """

    priority = PRIORITY_SNAPSHOT
    trigger = (1, "epoch")

    def __init__(self, comm: CommunicatorBase, snapshot: Snapshot, local: LocalState):
        self._comm = comm
        self._snapshot = snapshot
        self.may_come_later = snapshot.may_come_later
        self._local = local

    def __call__(self, trainer: Trainer) -> None:
        self.save(trainer)

    def initialize(self, trainer: Trainer) -> None:
        if self._comm.rank == 0:
            self._snapshot.initialize(trainer)

    def resume(self, trainer: Trainer) -> None:
        path = on_root(self._comm, lambda: self._snapshot.find_newest(trainer))
        if path is None:
            return
        entries = _read_on_root(self._comm, path)
        with together(self._comm):
            snapshots.load_entries(path, entries, trainer)

    def save(self, trainer: Trainer) -> None:
        """Save now. Collective."""
        self._local.gather()
        with _whole_states(trainer), _mean_networks(self._comm, trainer), together(self._comm):
            if self._comm.rank == 0:
                with self._local.averaged():
                    self._snapshot.save(trainer)

    def finalize(self) -> None:
        """End what writes beside the loop."""
        self._snapshot.finalize()


def _read_on_root(comm: CommunicatorBase, path: str) -> dict[str, Array]:
    """What is in a snapshot, read by rank 0 alone: a thousand ranks would read the same file a thousand times."""
    entries: dict[str, Array] = {}
    with together(comm):
        if comm.rank == 0:
            entries = snapshots.read(path)
    long = [name for name, value in entries.items() if getattr(value, "nbytes", 0) >= _LONG_BYTES]
    found: dict[str, Array]
    found, long = comm.bcast_obj(({name: None if name in long else entries[name] for name in entries}, long))
    for name in long:
        found[name] = comm.bcast(entries.get(name))
    return found


@contextlib.contextmanager
def _mean_networks(comm: CommunicatorBase, trainer: Trainer) -> Iterator[None]:
    """Within the block the networks are those that all ranks evaluate: between two averages of local SGD the means.

    What each rank has for itself is in the state of its optimizer by then. Collective.
    """
    targets = [optimizer.target for optimizer in trainer.updater.get_all_optimizers().values()]
    averages = [found for found in trainer.all_extensions() if isinstance(found, WeightAverage) and comm.size > 1]
    with mean_parameters(comm, targets), contextlib.ExitStack() as stack:
        for average in averages:
            if may_differ(average.model):
                means = {path: mean_over_ranks(comm, value) for path, value in average.averages.items()}
                stack.enter_context(average.replaced(means))
        yield


@contextlib.contextmanager
def _whole_states(trainer: Trainer) -> Iterator[None]:
    """Within the block rank 0 has the state of optimizers that is divided over ranks. Collective."""
    with contextlib.ExitStack() as stack:
        for optimizer in trainer.updater.get_all_optimizers().values():
            if isinstance(optimizer, MultiNodeOptimizer):
                stack.enter_context(optimizer.whole_state())
        yield
