"""Saving a run of several ranks as files of several ranks: those of one moment belong together.

Where all ranks hold the same model, ``snapshots.SharedSnapshot`` saves it once, for any number of ranks. These here are
for ranks whose models differ, and for programs written for ChainerMN.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.protocol.agree import raise_together, together
from dbrdist.comm.protocol.arguments import attempt, rank_of, whole_number
from dbrdist.comm.steps.joint_steps import JointSteps
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.files.regular_file import regular
from dbrdist.core.files.serializer import AbstractSerializer, read_npz
from dbrdist.errors import CheckpointError
from dbrdist.training import Extension
from dbrdist.training.extensions import snapshots
from dbrdist.training.extensions.snapshots import PRIORITY_SNAPSHOT, Snapshot

if TYPE_CHECKING:
    from dbrdist.core.update.optimizer import Optimizer
    from dbrdist.training.trainer import Trainer


def create_multi_node_checkpointer(
    name: str, comm: CommunicatorBase, cp_interval: int = 5, gc_interval: int = 5, path: str | None = None
) -> MultiNodeCheckpointer:
    """An extension that saves the trainer of every rank, and loads the newest state that all ranks have.

    Each call makes a generation: a file ``snapshot_<name>_<rank>_<iteration>`` on each rank. One that a job's end has
    left incomplete is skipped. Example:

        checkpointer = create_multi_node_checkpointer("digits", comm, path="checkpoints")
        checkpointer.maybe_load(trainer, optimizer)
        trainer.extend(checkpointer, trigger=(1000, "iteration"))

    Args:
        name: of the run; a file's name has it.
        comm: the ranks.
        cp_interval: how many generations are kept.
        gc_interval: after how many calls the older ones are removed.
        path: the folder; it may differ between ranks (local disks). None is the trainer's ``out``.

    Files are kept when the run ends; ChainerMN removes them then, even after an error.

    Raises:
        ValueError, TypeError: on every rank, for a number below 1, or a name that cannot be part of a file's.

    Example:
        >>> comm = dbrdist.comm.create_communicator("single")
        >>> checkpointer = dbrdist.comm.create_multi_node_checkpointer("run", comm)  # doctest: +SKIP
    """
    error = None
    for number, what in ((cp_interval, "cp_interval"), (gc_interval, "gc_interval")):
        error = error or attempt(_positive, number, f"create_multi_node_checkpointer: {what}")[1]
    if not isinstance(name, str) or os.sep in name or not name:
        error = error or ValueError(f"create_multi_node_checkpointer expected a name without {os.sep!r}, got {name!r}")
    raise_together(comm, error)
    return MultiNodeCheckpointer(name, comm, cp_interval, gc_interval, path)


def _positive(value: int, what: str) -> None:
    if whole_number(value, what) < 1:
        raise ValueError(f"{what} expected 1 or more, got {value}")


class MultiNodeCheckpointer(Extension):
    """See :func:`create_multi_node_checkpointer`."""

    priority = PRIORITY_SNAPSHOT
    trigger = (1, "epoch")

    def __init__(self, name: str, comm: CommunicatorBase, num_kept: int, gc_interval: int, path: str | None) -> None:
        self._run_name = name
        self._comm = comm
        self._num_kept = num_kept
        self._gc_interval = gc_interval
        self._path = path
        self._num_calls = 0

    def _folder(self, trainer: Trainer) -> str:
        return str(trainer.out if self._path is None else self._path)

    def _file(self, folder: str, iteration: int) -> str:
        return os.path.join(folder, f"snapshot_{self._run_name}_{self._comm.rank}_{iteration}")

    def _iterations(self, folder: str) -> list[int]:
        """Of this rank's files, the oldest first."""
        start = f"snapshot_{self._run_name}_{self._comm.rank}_"
        names = os.listdir(folder) if os.path.isdir(folder) else []
        return sorted(int(n[len(start) :]) for n in names if n.startswith(start) and n[len(start) :].isdecimal())

    def __call__(self, trainer: Trainer) -> None:
        self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Save a generation now. Collective; an error while one rank writes is raised on all."""
        folder = self._folder(trainer)
        with together(self._comm):
            os.makedirs(folder, exist_ok=True)
            snapshots.write(self._file(folder, trainer.updater.iteration), _OfRank(self._comm, trainer))
        self._num_calls += 1
        if self._num_calls % self._gc_interval == 0:
            with together(self._comm):
                self._remove_old(folder, trainer.updater.iteration)

    def _remove_old(self, folder: str, iteration: int) -> None:
        """This generation is whole on all ranks: what is older than the last ones may go."""
        before = [i for i in self._iterations(folder) if i < iteration]
        for old in before[: max(len(before) + 1 - self._num_kept, 0)]:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._file(folder, old))

    def maybe_load(self, trainer: Trainer, optimizer: Optimizer | None = None, path: str | None = None) -> bool:
        """Load the newest generation of which every rank has a complete file; True if there was one. Collective.

        Args:
            trainer: takes the state.
            optimizer: a multi-node optimizer whose first update shall not broadcast rank 0's parameters, where ranks
                hold different ones.
            path: another folder to load from.

        Raises:
            CheckpointError: on every rank, if the files are of another number of ranks or of another architecture.
        """
        folder = path or self._folder(trainer)
        iteration = self._newest(folder)
        if iteration is None:
            return False
        with together(self._comm):
            snapshots.load(self._file(folder, iteration), _OfRank(self._comm, trainer))
        if isinstance(optimizer, JointSteps):
            optimizer.are_synchronized()
        return True

    def _newest(self, folder: str) -> int | None:
        """The newest iteration of which all ranks have a whole file."""
        mine: list[int] = []
        with together(self._comm):
            mine = self._iterations(folder)
        everyone = self._comm.allgather_obj(mine)
        common: list[int] = sorted(set(everyone[0]).intersection(*everyone))
        for iteration in reversed(common):
            is_whole = self._comm.allgather_obj(snapshots.is_whole(self._file(folder, iteration)))
            if all(is_whole):
                return iteration
            if self._comm.rank == 0:
                damaged = [rank for rank, good in enumerate(is_whole) if not good]
                text = f"{self._file(folder, iteration)}: damaged on ranks {damaged}; an earlier one is used"
                warnings.warn(text, stacklevel=3)
        missing = [rank for rank, theirs in enumerate(everyone) if not theirs]
        if self._comm.rank == 0 and any(everyone):
            where = f"ranks {missing} have none" if missing else "no generation is complete on all ranks"
            text = f"no checkpoint of {self._run_name!r} is loaded: {where}; the run starts from the beginning"
            warnings.warn(text, stacklevel=3)
        return None


class _OfRank:
    """A trainer, and of how many ranks the file is."""

    def __init__(self, comm: CommunicatorBase, trainer: Trainer) -> None:
        self._comm = comm
        self._trainer = trainer

    def serialize(self, serializer: AbstractSerializer) -> None:
        size = int(serializer("num_ranks", self._comm.size))
        if size != self._comm.size:
            raise CheckpointError(
                f"expected the checkpoint of a run of {self._comm.size} ranks, got one of {size}; start {size} ranks, "
                "or save by SharedSnapshot, which any number of ranks can load"
            )
        self._trainer.serialize(serializer)


# ---- replicas -------------------------------------------------------------------------------------------------------


def multi_node_snapshot(
    comm: CommunicatorBase, snapshot: Snapshot, replica_sets: Iterable[int | Iterable[int]]
) -> MultiNodeSnapshot:
    """A snapshot of which one rank of each set of replicas writes the file, and all of them load it.

    Args:
        comm: the ranks.
        snapshot: ``extensions.snapshot(...)``, whose file name gets ``.<rank>``. With ``autoload=True`` all ranks go
            on from the newest snapshot that every set has whole.
        replica_sets: sets of ranks with the same state, the lowest of which writes; a number is a set of one. A rank
            that is in no set is one of its own. ``[range(comm.size)]`` is plain data-parallel training, ``[]`` a file
            for each rank.

    Raises:
        ValueError, TypeError: on every rank, for a rank that there is not, or that is in two sets.
    """
    sets, error = attempt(_parse_sets, replica_sets, comm.size)
    raise_together(comm, error)
    assert sets is not None
    return MultiNodeSnapshot(comm, snapshot, sets)


def _parse_sets(replica_sets: Iterable[int | Iterable[int]], size: int) -> list[list[int]]:
    what = "multi_node_snapshot: replica_sets"
    sets = [[s] if np.ndim(s) == 0 and not isinstance(s, Iterable) else list(s) for s in replica_sets]  # type: ignore[arg-type]
    seen: set[int] = set()
    for rank in (rank for ranks in sets for rank in ranks):
        if rank_of(rank, size, what) in seen:
            raise ValueError(f"{what} expected each rank in one set, got rank {rank} twice")
        seen.add(int(rank))
    others = [rank for rank in range(size) if rank not in seen]
    rest = [others] if others and as_chainer[0] else [[rank] for rank in others]  # in ChainerMN they are one set
    return [sorted(ranks) for ranks in sets if ranks] + rest


class MultiNodeSnapshot(Extension):
    """See :func:`multi_node_snapshot`."""

    default_name = "multi_node_snapshot"

    def __init__(self, comm: CommunicatorBase, snapshot: Snapshot, sets: Sequence[Sequence[int]]) -> None:
        self._comm = comm
        self._number = next(i for i, ranks in enumerate(sets) if comm.rank in ranks)
        writer = sets[self._number][0]
        self._is_writer = comm.rank == writer
        self._snapshot = copy.copy(snapshot)
        self.may_come_later = snapshot.may_come_later
        self._snapshot.filename = _of_rank(snapshot.filename, writer)
        self.priority, self.trigger = snapshot.priority, snapshot.trigger

    @property
    def is_master(self) -> bool:
        """Whether this rank writes the snapshot of its set."""
        return self._is_writer

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot of this rank's set, with the writer's rank in its file name."""
        return self._snapshot

    def __call__(self, trainer: Trainer) -> None:
        with together(self._comm):
            if self._is_writer:
                self._snapshot(trainer)

    def on_error(self, trainer: Trainer, exc: BaseException, tb: str) -> None:
        if self._is_writer:
            self._snapshot.on_error(trainer, exc, tb)

    def resume(self, trainer: Trainer) -> None:
        """Load the newest snapshot that all writers have whole."""
        path = self._newest(trainer)
        if not any(self._comm.allgather_obj(path is not None)):
            return
        content = None
        with together(self._comm):
            if path is not None:
                with open(path, "rb", opener=regular) as file:
                    content = np.frombuffer(file.read(), np.uint8)
        replicas = self._comm.split(self._number, self._comm.rank)
        content = replicas.bcast(content)
        replicas.finalize()
        target = self._snapshot.target
        with together(self._comm):
            saved = read_npz(io.BytesIO(content.tobytes()))
            snapshots.load_entries(path or "the writer's snapshot", saved, trainer if target is None else target)

    def _newest(self, trainer: Trainer) -> str | None:
        """On a writer, its file of the newest snapshot that all writers have whole; None where there is none."""
        mine = self._files(trainer)
        everyone = [names for names in self._comm.allgather_obj(list(mine) if self._is_writer else None) if names]
        num_writers = sum(self._comm.allgather_obj(self._is_writer))
        if len(everyone) < num_writers:
            return None
        for name in reversed(everyone[0]):
            if all(name in names for names in everyone):
                is_whole = not self._is_writer or snapshots.is_whole(mine[name])
                if all(self._comm.allgather_obj(is_whole)):
                    return mine.get(name)
        return None

    def _files(self, trainer: Trainer) -> dict[str, str]:
        """The writer's files, the oldest first, by their names without the rank; none without ``autoload``."""
        filename = self._snapshot.filename
        if not self._snapshot.autoload or callable(filename) or not self._is_writer:
            return {}
        found = snapshots.find(trainer.out, filename)
        return {os.path.basename(path).rpartition(".")[0]: path for path in found}


def _of_rank(filename: str | Callable[[Trainer], str], rank: int) -> str | Callable[[Trainer], str]:
    """A snapshot's file name with a rank behind it."""
    if callable(filename):
        return lambda trainer: f"{filename(trainer)}.{rank}"
    return f"{filename}.{rank}"
