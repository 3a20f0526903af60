"""What the ranks observe in a step, such as the loss, made the same on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from dbrdist.core.array.types import Array

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase

_KEYS_PER_ROW = 32


class Observations:
    """Means over the ranks, weighted by examples: one exchange of a few numbers a step.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: CommunicatorBase) -> None:
        self._comm = comm
        self._keys: list[str] = []  # all that any rank has observed, the same list on every rank

    def average(
        self, observed: Mapping[str, float], num_samples: int, error: Exception | None = None
    ) -> dict[str, float]:
        """The mean of each value over the ranks that observed it, each weighing its number of examples.

        A rank without examples has observed nothing. NaN on one rank makes the mean NaN. The ranks need not observe the
        same values. Sums are added in the order of ranks.

        Args:
            observed: values by name.
            num_samples: how many examples they are means of.
            error: what went wrong on this rank, if anything; every rank raises it.
        """
        observed = observed if num_samples else {}
        if self._comm.size == 1:
            if error is not None:
                raise error
            return dict(observed)
        with self._comm.gate.call("average") as call:
            flags = call.agree([any(key not in self._keys for key in observed), num_samples], error)
        if flags[:, 0].any():
            everyone = self._comm.allgather_obj(list(observed))
            self._keys = sorted(set(self._keys).union(*everyone))
        means: dict[str, float] = {}
        for begin in range(0, len(self._keys), _KEYS_PER_ROW):
            keys = self._keys[begin : begin + _KEYS_PER_ROW]
            there = sum(1 << i for i, key in enumerate(keys) if key in observed)
            values = np.array([observed.get(key, 0.0) for key in keys], np.float64)
            rows = self._comm.gate.allgather_rows(np.array([there, *values.view(np.int64)], np.int64))
            means |= _means(keys, rows, flags[:, 1].tolist())
        return means


def _means(keys: list[str], rows: Array, weights: list[int]) -> dict[str, float]:
    means = {}
    masks, values = rows[:, 0].tolist(), np.ascontiguousarray(rows[:, 1:]).view(np.float64).tolist()
    for i, key in enumerate(keys):
        ranks = [r for r, mask in enumerate(masks) if mask >> i & 1]
        total = sum(weights[r] for r in ranks)
        if total:
            means[key] = sum(values[r][i] * weights[r] for r in ranks) / total
    return means
