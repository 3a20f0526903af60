"""Do all ranks still have the same parameters and optimizer state? Checksums, compared every some steps."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.transport.disagreement import name_ranks
from dbrdist.core.array.backend import is_array, to_cpu
from dbrdist.core.array.types import Array
from dbrdist.errors import CommunicatorError
from dbrdist.training.extension import Extension

if TYPE_CHECKING:
    from dbrdist.core.model.link import Link
    from dbrdist.core.update.optimizer import Optimizer
    from dbrdist.training.trainer import Trainer


class ParameterAudit(Extension):
    """Compares checksums of all parameters and of the optimizer's state over the ranks, as its trigger says.

    State that is divided over ranks (``zero``), and values that differ by rank, such as running statistics, are not
    compared. With ``local_steps`` only parameters are, after the first step and after each averaging; at other steps
    nothing is compared. Example: ``trainer.extend(ParameterAudit(comm), trigger=(100, "iteration"))``.

    Args:
        comm: the ranks.

    Raises:
        CommunicatorError: on every rank, where they differ: the first array, the step, and the ranks.
    """

    trigger = (100, "iteration")

    def __init__(self, comm: CommunicatorBase) -> None:
        self._comm = comm

    def __call__(self, trainer: Trainer) -> None:
        for name, optimizer in trainer.updater.get_all_optimizers().items():
            compare(self._comm, optimizer, f"optimizer {name!r}, step {trainer.updater.iteration}")


def compare(comm: CommunicatorBase, optimizer: Optimizer, where: str) -> None:
    """Raise CommunicatorError on every rank unless all have the same parameters and state. Collective."""
    num_local = getattr(optimizer, "num_local_steps", None)
    if num_local:
        return
    names, sums = [], []
    for name, a in _arrays(optimizer.target, has_equal_state=num_local is None):
        names.append(name)
        sums.append(_checksum(a))
    mine = np.array([zlib.crc32("\n".join(names).encode()), *sums], np.int64)
    everyone = comm.allgather(mine)
    if all(theirs.shape == mine.shape and (theirs == everyone[0]).all() for theirs in everyone):
        return
    if any(theirs.shape != mine.shape or theirs[0] != everyone[0][0] for theirs in everyone):
        raise CommunicatorError(_other_names(comm.allgather_obj(names), where))
    table = np.stack(everyone)[:, 1:]
    index = int((table != table[0]).any(0).argmax())
    groups: dict[int, list[int]] = {}
    for rank, value in enumerate(table[:, index].tolist()):
        groups.setdefault(value, []).append(rank)
    words = "; ".join(f"{value:08x} on rank {', '.join(map(str, ranks))}" for value, ranks in groups.items())
    raise CommunicatorError(
        f"expected the same numbers on every rank, but {names[index]} differs ({where}): checksum {words}"
    )


def _other_names(everyone: list[list[str]], where: str) -> str:
    """The first parameter or state that one rank has and another has not, in its place."""
    rows = [dict(enumerate(names)) for names in everyone]
    first = next(i for i in range(max(map(len, rows))) if len({row.get(i) for row in rows}) > 1)
    groups: dict[str, list[int]] = {}
    for rank, row in enumerate(rows):
        groups.setdefault(row.get(first, "nothing more"), []).append(rank)
    words = "; ".join(f"{name} on {name_ranks(ranks)}" for name, ranks in groups.items())
    return f"expected the same parameters and states on every rank ({where}), got {words}"


def _arrays(link: Link, has_equal_state: bool) -> Iterator[tuple[str, Array]]:
    """Parameters, then the states of their rules that are whole on every rank."""
    named = [(name, p) for name, p in link.namedparams() if p.is_initialized]
    for name, p in named:
        yield name, p.lend()
    for name, p in named if has_equal_state else ():
        rule = p.update_rule
        if rule is not None and rule.state is not None and rule.piece is None:
            for entry, a in sorted(rule.state.items()):
                if is_array(a):
                    yield f"{name}, state {entry}", a


def _checksum(a: Array) -> int:
    host = to_cpu(a)
    raw: Any = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
    return zlib.crc32(raw)
