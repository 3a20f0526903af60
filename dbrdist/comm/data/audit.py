"""Proof that each example was used once per epoch: which examples each worker had in each step, and who checks it.

Each rank writes a text file of its own per start of the run, in the folder ``audit``:

    dbrdist audit 1
    start 2 from step 50, rank 0 of 3, workers 0 to 1 of 8, 50000 examples, 50000 per epoch
    51 0 0: 40312 77 1234
    51 0 1: 9 48001 3

After the two lines of the head, each line is a step, an epoch, a worker, and the indices of its examples in this epoch.
A worker without examples has a line too, with a hyphen as its epoch. What a later start does again, because it began
from an earlier snapshot, counts as it was done then. An epoch of ImageNet takes 10 MB.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.protocol.agree import on_root
from dbrdist.core.files.regular_file import regular
from dbrdist.training.extension import Extension
from dbrdist.training.extensions.snapshots import PRIORITY_SNAPSHOT

if TYPE_CHECKING:
    from dbrdist.core.array.types import IntArray
    from dbrdist.datasets.loading.serial import SerialIterator
    from dbrdist.training.trainer import Trainer

FOLDER = "audit"
_VERSION = "dbrdist audit 1"
_N = r"(\d{1,15})"  # more is no number of anything: of a damaged file
_HEAD = re.compile(
    rf"start {_N} from step {_N}, rank {_N} of {_N}, workers {_N} to {_N} of {_N}, {_N} examples, {_N} per epoch"
)
_LINE = re.compile(r"(\d{1,15}) (\d{1,15}|-) (\d{1,15}):((?: \d{1,15})*)")
_MAX_RANKS, _MAX_EXAMPLES = 1 << 24, 1 << 33  # that a head may claim
_TAIL_BYTES = 1 << 16
_MAX_GAP = 1_000_000  # steps without a line that are looked at one by one
_MAX_NAMED = 5  # of examples that are named in a complaint


class AuditLog(Extension):
    """Writes which examples this rank's workers had in each step; every rank's trainer has one.

    Args:
        comm: the ranks.
        iterator: the training iterator.
    """

    trigger = (1, "iteration")
    priority = PRIORITY_SNAPSHOT + 2  # a step that a snapshot holds is in the file

    def __init__(self, comm: CommunicatorBase, iterator: SerialIterator) -> None:
        self._comm = comm
        self._iterator = iterator
        self._file: Any = None

    def initialize(self, trainer: Trainer) -> None:
        """Begin this start's file. Collective."""
        folder = os.path.join(trainer.out, FOLDER)
        start = on_root(self._comm, lambda: _next_start(folder))
        comm, iterator = self._comm, self._iterator
        path = os.path.join(folder, f"start-{start:04d}-rank-{comm.rank:05d}.txt")
        self._file = open(path, "w", encoding="ascii")  # noqa: SIM115 - finalize closes it
        workers = iterator.workers
        self._file.write(
            f"{_VERSION}\nstart {start} from step {trainer.updater.iteration}, rank {comm.rank} of {comm.size}, "
            f"workers {workers[0]} to {workers[-1]} of {iterator.num_workers}, {len(iterator.dataset)} examples, "
            f"{iterator.num_per_epoch} per epoch\n"
        )
        self._file.flush()

    def __call__(self, trainer: Trainer) -> None:
        step = trainer.updater.iteration
        for worker, pieces in zip(self._iterator.workers, self._iterator.pieces):
            for epoch, indices in pieces:
                self._file.write(f"{step} {epoch} {worker}: {' '.join(map(str, indices.tolist()))}\n")
            if not pieces:
                self._file.write(f"{step} - {worker}:\n")
        self._file.flush()

    def finalize(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _next_start(folder: str) -> int:
    os.makedirs(folder, exist_ok=True)
    return 1 + max((int(found[1]) for name in os.listdir(folder) if (found := _named(name))), default=0)


def _named(name: str) -> re.Match[str] | None:
    return re.fullmatch(r"start-(\d+)-rank-(\d+)\.txt", name)


# ---- the check ------------------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """What a check found: a sentence for each epoch, and for each thing that is wrong."""

    findings: list[str]
    problems: list[str]


class _Head(NamedTuple):
    """The second line of a file."""

    start: int
    first_step: int
    rank: int
    num_ranks: int
    first_worker: int
    last_worker: int
    num_workers: int
    num_examples: int
    num_per_epoch: int


class _Line(NamedTuple):
    """One worker's examples in one step; ``epoch`` is -1 where there are none."""

    step: int
    epoch: int
    worker: int
    indices: IntArray


def check(out: str, num_steps: int = 0, is_running: bool = False) -> Verdict:
    """Look through the files of a run whose folder is ``out``, and which has made ``num_steps`` steps at least.

    Of a run that ``is_running`` only the steps count that all ranks have written.

    Raises:
        OSError: if they cannot be read.
        ValueError: if there are none.
    """
    folder = os.path.join(out, FOLDER)
    names = os.listdir(folder) if os.path.isdir(folder) else []
    paths = [os.path.join(folder, name) for name in sorted(names) if _named(name)]
    if not paths:
        raise ValueError(f"{folder}: expected the files of an audit, found none; train with audit: true")
    try:
        return _Check(paths, num_steps, is_running).verdict()
    except MemoryError:
        raise ValueError(f"{folder}: its files claim more examples than there is memory to count them") from None


class _Check:
    """The files of one run."""

    def __init__(self, paths: list[str], num_steps: int, is_running: bool) -> None:
        self._num_steps = 0 if is_running else num_steps
        self._problems: list[str] = []
        self._heads: dict[str, _Head] = {}
        for path in paths:
            head = _read_head(path)
            if head is None:
                self._problems.append(f"{path}:2: expected the head of an audit file")
            else:
                self._heads[path] = head
        self._starts: dict[int, list[_Head]] = defaultdict(list)
        for head in self._heads.values():
            self._starts[head.start].append(head)
        written = [_last_step_in(path) for path, head in self._heads.items() if head.start == max(self._starts)]
        self._written = min(written, default=0) if is_running else float("inf")
        sizes = {head.num_examples for head in self._heads.values()}
        if len(sizes) > 1:
            self._problems.append(f"the number of examples changed: {', '.join(map(str, sorted(sizes)))}")
        self._num_examples = max(sizes, default=0)
        self._used: dict[int, IntArray] = {}  # epoch -> how often each example was used
        self._workers: dict[int, set[int]] = defaultdict(set)  # step -> workers that have a line
        self._epochs: dict[int, set[int]] = defaultdict(set)  # epoch -> its steps

    def verdict(self) -> Verdict:
        """Count everything, then judge."""
        self._look_at_ranks()
        for path in self._heads:
            for line in self._lines(path):
                self._count(path, line)
        self._look_at_steps()
        findings = [self._look_at_epoch(epoch) for epoch in sorted(self._used)]
        return Verdict([*self._describe_starts(), *findings], self._problems)

    def _last_step(self, start: int) -> float:
        """The last step of a start that no later one has done again."""
        return min((heads[0].first_step for s, heads in self._starts.items() if s > start), default=self._written)

    def _lines(self, path: str) -> Iterator[_Line]:
        """The lines that count; a last one that was cut off by the end of its process does not."""
        last = self._last_step(self._heads[path].start)
        with open(path, encoding="ascii", errors="replace", opener=regular) as file:
            for number, text in enumerate(file, 1):
                if number <= 2 or not text.endswith("\n"):
                    continue
                found = _LINE.fullmatch(text[:-1])
                if found is None:
                    self._problems.append(f"{path}:{number}: expected STEP EPOCH WORKER: INDICES")
                elif int(found[1]) <= last:
                    epoch = -1 if found[2] == "-" else int(found[2])
                    yield _Line(int(found[1]), epoch, int(found[3]), np.array(found[4].split(), np.int64))

    def _count(self, path: str, line: _Line) -> None:
        self._workers[line.step].add(line.worker)
        if line.epoch < 0:
            return
        self._epochs[line.epoch].add(line.step)
        inside = (line.indices >= 0) & (line.indices < self._num_examples)
        if not inside.all():
            self._problems.append(f"{path}: step {line.step}: no example has the index {line.indices[~inside][0]}")
        used = self._used.setdefault(line.epoch, np.zeros(self._num_examples, np.int32))
        np.add.at(used, line.indices[inside], 1)

    def _look_at_ranks(self) -> None:
        """Every rank of a start has a file."""
        for start, heads in sorted(self._starts.items()):
            there = {head.rank for head in heads}
            if len(there) < heads[0].num_ranks:
                missing = [rank for rank in range(heads[0].num_ranks) if rank not in there]
                self._problems.append(f"start {start}: the files of ranks {_listed(missing)} are missing")

    def _look_at_steps(self) -> None:
        """Every worker has a line for every step."""
        spans = [(heads[0].first_step, self._last_step(s), heads[0].num_workers) for s, heads in self._starts.items()]
        bad, end = [], max(self._num_steps, *self._workers, 0)
        for step in range(1, min(end, len(self._workers) + _MAX_GAP) + 1):
            num_workers = next((n for first, last, n in spans if first < step <= last), -1)
            there = self._workers.get(step, set())
            if len(there) != num_workers or max(there, default=-1) >= num_workers:
                bad.append(step)
        if end > len(self._workers) + _MAX_GAP:
            self._problems.append(f"there are lines for {len(self._workers):,} steps of {end:,}")
        if bad:
            self._problems.append(f"not every worker has a line for steps {_listed(bad)}")

    def _look_at_epoch(self, epoch: int) -> str:
        used = self._used[epoch]
        steps = self._epochs[epoch]
        per_epoch = next(iter(self._heads.values())).num_per_epoch
        twice, never = np.flatnonzero(used > 1), np.flatnonzero(used == 0)
        if len(twice):
            self._problems.append(f"epoch {epoch}: used more than once: examples {_listed(twice.tolist())}")
        num_used = len(used) - len(never)
        is_last = epoch == max(self._used)
        if num_used < per_epoch and not is_last:
            self._problems.append(f"epoch {epoch}: never used: examples {_listed(never.tolist())}")
        so_far = " so far" if num_used < per_epoch and is_last else ""
        each = ", each once" if not len(twice) else ""
        where = f"step {min(steps)}" if len(steps) == 1 else f"steps {min(steps)} to {max(steps)}"
        return f"epoch {epoch}: {num_used:,} of {per_epoch:,} examples{so_far}{each}, in {where}"

    def _describe_starts(self) -> Iterator[str]:
        for start, heads in sorted(self._starts.items()):
            head = heads[0]
            ranks = "1 rank" if head.num_ranks == 1 else f"{head.num_ranks} ranks"
            workers = "1 worker" if head.num_workers == 1 else f"{head.num_workers} workers"
            yield f"start {start}: from step {head.first_step}, {ranks}, {workers}"


def _read_head(path: str) -> _Head | None:
    with open(path, encoding="ascii", errors="replace", opener=regular) as file:
        version, head = file.readline(), file.readline()
    found = _HEAD.fullmatch(head.rstrip("\n"))
    if not found or version != f"{_VERSION}\n":
        return None
    made = _Head(*map(int, found.groups()))
    is_possible = max(made.num_ranks, made.num_workers) <= _MAX_RANKS and made.num_examples <= _MAX_EXAMPLES
    return made if is_possible else None


def _last_step_in(path: str) -> int:
    """The step before that of a file's last whole line: its own may not be written to its end."""
    with open(path, "rb", opener=regular) as file:
        size, num_bytes = file.seek(0, os.SEEK_END), _TAIL_BYTES
        while True:
            file.seek(max(size - num_bytes, 0))
            before, _, line = file.read(num_bytes).rpartition(b"\n")[0].rpartition(b"\n")
            if before or num_bytes >= size:
                break
            num_bytes *= 2
    found = re.match(rb"(\d{1,15}) ", line)
    return int(found[1]) - 1 if found else 0


def _listed(numbers: list[int]) -> str:
    more = f" and {len(numbers) - _MAX_NAMED:,} more" if len(numbers) > _MAX_NAMED else ""
    return ", ".join(map(str, numbers[:_MAX_NAMED])) + more
