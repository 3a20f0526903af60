"""What a virtual worker leaves behind besides gradients: running statistics of the network, and observed values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.gradients import tree_sum
from dbrdist.comm.gradients.tree_sum import Node
from dbrdist.comm.protocol.gate import Passage
from dbrdist.comm.transport import message
from dbrdist.core.array.backend import is_array, is_floating, to_cpu
from dbrdist.core.array.types import Array, FloatArray
from dbrdist.core.model.reporter import as_number, is_number
from dbrdist.datasets.loading.base import block_bounds

if TYPE_CHECKING:
    from dbrdist.core.model.link import Link

Vector: TypeAlias = FloatArray


class Statistics:
    """The numbers that a network keeps besides its parameters, as one vector of float64.

    Each worker starts a step from the same values; afterwards they become the mean of what the workers made of them.
    Counters, which all workers move alike, stay whole: sums of integers are exact in float64.

    Args:
        model: a link.
    """

    def __init__(self, model: Link) -> None:
        self._model = model
        self._places: list[tuple[Link, str]] = []
        self._before: list[Any] = []

    def begin(self) -> None:
        """Note where the numbers are, and their values."""
        self._places = [
            (link, name)
            for _, link in self._model.namedlinks()
            for name in link.persistent_names
            if _is_number(link, name)
        ]
        self._before = [_copied(getattr(*place)) for place in self._places]

    def restore(self) -> None:
        """Go back to the values before the step."""
        for place, value in zip(self._places, self._before):
            _put(*place, value)

    def read(self) -> Vector:
        """The current values, concatenated."""
        return _joined([getattr(*place) for place in self._places])

    def nothing(self) -> Vector:
        """Zeros in their place, for a worker without examples."""
        return np.zeros(sum(map(np.size, self._before)))

    def write(self, values: Vector) -> None:
        """Put values back where :meth:`read` took them from, each in its own type."""
        position = 0
        for place, old in zip(self._places, self._before):
            count = int(np.size(old))
            _put(*place, _like(old, values[position : position + count]))
            position += count


def _is_number(link: Link, name: str) -> bool:
    value = getattr(link, name)
    if is_array(value):
        return value.dtype.kind in "iu" or is_floating(value.dtype)
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _copied(value: Array) -> Array:
    return value.copy() if is_array(value) else value


def _joined(values: Sequence[Array]) -> Vector:
    parts = [np.asarray(to_cpu(v) if is_array(v) else v).reshape(-1).astype(np.float64) for v in values]
    return np.concatenate(parts) if parts else np.empty(0)


def _like(old: Any, values: Vector) -> Any:
    """Some of the vector in the type and shape of what was there; integers are rounded."""
    if not is_array(old):
        return type(old)(round(values[0]) if isinstance(old, (int, np.integer)) else values[0])
    return (np.rint(values) if old.dtype.kind in "iu" else values).reshape(old.shape)


def _put(link: Link, name: str, value: Array | int) -> None:
    old = getattr(link, name)
    if is_array(old):
        old[...] = link.xp.asarray(value, old.dtype)
    else:
        setattr(link, name, value)


class Values:
    """The numbers that are reported in a step, averaged over the virtual workers: one exchange of a few numbers.

    Args:
        comm: the ranks.
        num_workers: virtual workers of all ranks.
    """

    def __init__(self, comm: CommunicatorBase, num_workers: int) -> None:
        self._comm = comm
        self._blocks = [range(*block_bounds(num_workers, rank, comm.size)) for rank in range(comm.size)]
        self._keys: list[str] = []  # all that any rank has observed, the same list on every rank
        self._mine: list[tuple[dict[str, float], int]] = []

    def begin(self) -> None:
        """Forget the last step's."""
        self._mine = []

    def add(self, observed: Mapping[str, Array], num_samples: int) -> None:
        """What the next worker of this rank has observed, as means over so many examples; only numbers count."""
        self._mine.append(({k: as_number(v) for k, v in observed.items() if is_number(v)}, num_samples))

    @property
    def has_new(self) -> bool:
        """Whether a worker of this rank has observed what none has before."""
        return any(key not in self._keys for numbers, _ in self._mine for key in numbers)

    def average(self, call: Passage, is_any_new: bool) -> dict[str, float]:
        """The mean of each value over the workers that observed it, each weighing its examples.

        Collective, in a verb in which all ranks have agreed on ``is_any_new``: whether one of them ``has_new``.
        """
        if is_any_new:
            everyone = self._comm.allgather_obj([key for numbers, _ in self._mine for key in numbers])
            self._keys = sorted(set(self._keys).union(*everyone))
        if not self._keys:
            return {}
        rows = self._exchange(call)
        sums = tree_sum.fold([Node(i, 0) for i in range(len(rows))], list(rows), np.add).tolist()
        num_keys = len(self._keys)
        return {key: value / n for key, value, n in zip(self._keys, sums[:num_keys], sums[num_keys:]) if n}

    def _exchange(self, call: Passage) -> Vector:
        """A row for each worker: values times numbers of examples, then these numbers."""
        mine = np.array([self._row(numbers, n) for numbers, n in self._mine])
        if self._comm.size == 1:
            return mine
        found = np.empty((sum(map(len, self._blocks)), mine.shape[1]))
        row_bytes = found.shape[1] * found.itemsize
        counts = [len(block) * row_bytes for block in self._blocks]
        starts = [block.start * row_bytes for block in self._blocks]
        with call.moving():
            raw = message.as_bytes(found.reshape(-1))
            self._comm.ranks.allgather_bytes(message.as_bytes(mine.reshape(-1)), raw, counts, starts)
        return found

    def _row(self, numbers: dict[str, float], num_samples: int) -> list[float]:
        values = [numbers[key] * num_samples if key in numbers else 0.0 for key in self._keys]
        return [*values, *(float(num_samples if key in numbers else 0) for key in self._keys)]
