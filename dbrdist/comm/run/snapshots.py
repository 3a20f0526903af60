"""Saving a run of several ranks as one file, although ranks differ a little."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from dbrdist.comm.protocol.agree import on_root, together
from dbrdist.comm.steps.optimizer import MultiNodeOptimizer
from dbrdist.core.array.backend import is_array, to_cpu
from dbrdist.core.files.serializer import described
from dbrdist.training import PRIORITY_WRITER, Extension
from dbrdist.training.extensions import snapshots
from dbrdist.training.extensions.snapshots import PRIORITY_SNAPSHOT, Snapshot
from dbrdist.training.runs import CONSTANTS, constants_of


class LocalState(Extension):
    """The state in which ranks differ: running statistics of the network, and the examples left out.

    It also saves the constants that belong to the network's weights (:func:`dbrdist.training.runs.constants_of`).

    It is gathered on rank 0 for a snapshot, which one rank writes. A run that is resumed on as many ranks gives each
    its own again; on another number all get the means. With virtual workers all ranks have the same, saved once.

    Args:
        comm: the ranks.
        model: the network.
        iterator: the training iterator; what it has in ``skipped``, if anything, is kept too.
    """

    def __init__(self, comm: Any, model: Any, iterator: Any):
        self._comm = comm
        self._model = model
        self._iterator = iterator
        self._is_shared = getattr(iterator, "virtual_workers", None) is not None
        self._skipped_before: list[str] = []
        self._gathered: list[dict[str, Any]] = []
        self.saved_constants: dict[str, float] = {}  # of a loaded snapshot

    trigger = None

    @property
    def skipped(self) -> list[str]:
        """What was said of each training example that this rank left out, earlier parts of the run included."""
        return list(dict.fromkeys([*self._skipped_before, *getattr(self._iterator, "skipped", ())]))

    def gather(self) -> None:
        """Collect every rank's state on rank 0. Collective."""
        mine = {"skipped": json.dumps(self.skipped), **_persistents(self._model)}
        self._gathered = self._comm.gather_obj(mine) or []
        if self._is_shared and self._gathered:
            self._gathered = [{**mine, "skipped": json.dumps(_all_skipped(self._gathered))}]

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within the block, on rank 0, the network has the means of all ranks' statistics: what others load."""
        own = _persistents(self._model)
        for path, value in own.items():
            if value.dtype.kind == "f" and len(self._gathered) > 1:
                _set_persistent(self._model, path, _mean(self._gathered, path))
        try:
            yield
        finally:
            for path, value in own.items():
                _set_persistent(self._model, path, value)

    def serialize(self, serializer: Any) -> None:
        constants = described(serializer, CONSTANTS, json.dumps(constants_of(self._model)))
        self.saved_constants = json.loads(constants) if serializer.is_loading and constants else {}
        size = int(serializer("size", len(self._gathered)))
        if not serializer.is_loading:
            for rank, state in enumerate(self._gathered):
                for path, value in state.items():
                    serializer[f"rank{rank}"](path, value)
            return
        names = ["skipped", *_persistents(self._model)]
        saved = [{name: serializer[f"rank{rank}"](name, None) for name in names} for rank in range(size)]
        if size == self._comm.size and not (self._is_shared and size > 1):
            self._take(saved[self._comm.rank])
        elif size:
            skipped = _all_skipped(saved)
            means = {name: _mean(saved, name) for name in names if name != "skipped"}
            self._take({**means, "skipped": json.dumps(skipped if self._comm.rank == 0 else [])})

    def _take(self, state: dict[str, Any]) -> None:
        self._skipped_before = json.loads(str(state.pop("skipped")))
        for path, value in state.items():
            _set_persistent(self._model, path, value)


def _all_skipped(states: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(words for state in states for words in json.loads(str(state["skipped"]))))


def _mean(states: list[dict[str, Any]], path: str) -> Any:
    return np.mean([state[path] for state in states], 0)


def _persistents(model: Any) -> dict[str, Any]:
    """The numbers of a network that are saved but not trained, by path."""
    return {
        f"{path.strip('/')}/{name}": np.array(_on_host(getattr(link, name)))
        for path, link in model.namedlinks()
        for name in link._persistent
        if isinstance(getattr(link, name), int | float | np.number) or is_array(getattr(link, name))
    }


def _on_host(value: Any) -> Any:
    return to_cpu(value) if is_array(value) else value


def _set_persistent(model: Any, path: str, value: Any) -> None:
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

    def __init__(self, comm: Any, model: Any):
        self._comm = comm
        self._model = model

    def __call__(self, trainer: Any) -> None:
        if self._comm.size == 1:
            return
        for path, value in _persistents(self._model).items():
            if value.dtype.kind == "f":
                _set_persistent(self._model, path, self._comm.allreduce(value) / self._comm.size)


class AllreducePersistent(AverageStatistics):
    """As AverageStatistics, with ChainerMN's name, order of arguments and trigger: once an epoch, before others."""

    trigger = (1, "epoch")

    def __init__(self, model: Any, comm: Any):
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

    def __init__(self, comm: Any, snapshot: Snapshot, local: LocalState):
        self._comm = comm
        self._snapshot = snapshot
        self._local = local

    def __call__(self, trainer: Any) -> None:
        self.save(trainer)

    def resume(self, trainer: Any) -> None:
        path = on_root(self._comm, lambda: self._snapshot.find_newest(trainer))
        if path is not None:
            with together(self._comm):
                snapshots.load(path, trainer)

    def save(self, trainer: Any) -> None:
        """Save now. Collective."""
        self._local.gather()
        with _whole_states(trainer), together(self._comm):
            if self._comm.rank == 0:
                with self._local.averaged():
                    self._snapshot.save(trainer)

    def finalize(self) -> None:
        """End what writes beside the loop."""
        self._snapshot.finalize()


@contextlib.contextmanager
def _whole_states(trainer: Any) -> Iterator[None]:
    """Within the block rank 0 has the state of optimizers that is divided over ranks. Collective."""
    with contextlib.ExitStack() as stack:
        for optimizer in trainer.updater.get_all_optimizers().values():
            if isinstance(optimizer, MultiNodeOptimizer):
                stack.enter_context(optimizer.whole_state())
        yield
