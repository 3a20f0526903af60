"""Fewer bytes for gradients: PowerSGD and top-k, both with error feedback.

What a rank does not send in one step it keeps, and adds to its gradient in the next: over time nothing is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dbrdist.comm import message
from dbrdist.comm.gate import Passage
from dbrdist.comm.reduction import Plan
from dbrdist.core import flat, random
from dbrdist.core.backend import to_cpu
from dbrdist.core.flat import Run

Matrix = np.ndarray[Any, Any]


class Compression:
    """The base: ``reduce`` replaces the gradients of a plan by something near their means."""

    num_bytes = 0  # that this rank has sent so far

    def words(self) -> str:
        """The settings, which all ranks must have in common."""
        raise NotImplementedError

    def reduce(
        self, comm: Any, call: Passage, plan: Plan, factors: Sequence[float] | None, divisor: float | None
    ) -> None:
        """Collective; every rank gets the same bits."""
        flat.collect_gradients(plan.params)
        with call.moving():
            for number, run in enumerate(plan.runs):
                grad = np.array(to_cpu(run.grad), np.float64 if run.grad.dtype == np.float64 else np.float32)
                self._reduce(comm, call, number, run, grad, factors, divisor)
                run.grad[...] = message.to_place(grad.astype(run.grad.dtype), run.grad)

    def _reduce(
        self, comm: Any, call: Passage, number: int, run: Run, grad: Matrix, factors: Any, divisor: Any
    ) -> None:
        raise NotImplementedError


class PowerSGD(Compression):
    """Gradients as products of two thin matrices (Vogels et al. 2019, arXiv 1905.13727, algorithm 1), warm-started.

    The gradient M of a parameter, its first axis by all others, travels as P = M Q and Q = M' P, where the mean of P is
    made orthonormal in between; the mean gradient is then P Q'. What is missing from it, by rank, is added to the next
    gradient. Parameters for which that would be no fewer numbers, such as biases, travel as they are.

    Args:
        rank: the number of columns of P and Q; the paper takes 1 to 4.
    """

    def __init__(self, rank: int = 2) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ValueError(f"PowerSGD: rank: expected an integer of 1 or more, got {rank!r}")
        self.rank = rank
        self._errors: dict[int, Matrix] = {}  # by run
        self._right: dict[tuple[int, int], Matrix] = {}  # Q by run and layer

    def words(self) -> str:
        return f"PowerSGD rank {self.rank}"

    def _reduce(
        self, comm: Any, call: Passage, number: int, run: Run, grad: Matrix, factors: Any, divisor: Any
    ) -> None:
        kept = self._errors.get(number)
        if kept is not None and kept.shape == grad.shape:
            grad += kept
        error = self._errors[number] = grad.copy()
        thin, whole = [], []
        for i, (p, where) in enumerate(run.layers()):
            matrix = grad[where].reshape(p.shape[0] if p.ndim else 1, -1)
            r = min(self.rank, *matrix.shape)
            if p.ndim < 2 or r * sum(matrix.shape) >= matrix.size:
                whole.append(where)
            else:
                thin.append((matrix, self._begin(number, i, matrix, r), (number, i)))
        sent = [matrix @ right for matrix, right, _ in thin] + [grad[where] for where in whole]
        means = self._mean(comm, call, sent, grad.dtype, factors, divisor)
        left = [np.linalg.qr(p)[0] for p in means[: len(thin)]]
        for where, mean in zip(whole, means[len(thin) :]):
            grad[where] = mean
        rights = [matrix.T @ basis for (matrix, _, _), basis in zip(thin, left)]
        averaged = self._mean(comm, call, rights, grad.dtype, factors, divisor)
        for (matrix, _, key), basis, right in zip(thin, left, averaged):
            self._right[key] = right
            matrix[...] = basis @ right.T
        for where in whole:
            error[where] = 0
        for (_, where), is_thin in ((layer, layer[1] not in whole) for layer in run.layers()):
            if is_thin:
                error[where] -= grad[where]

    def _begin(self, number: int, layer: int, matrix: Matrix, r: int) -> Matrix:
        right = self._right.get((number, layer))
        if right is None or right.shape != (matrix.shape[1], r):
            generator = random.generator(0, "PowerSGD", sample=layer, part=number)
            right = generator.standard_normal((matrix.shape[1], r)).astype(matrix.dtype)
        return right

    def _mean(
        self, comm: Any, call: Passage, arrays: Sequence[Matrix], dtype: Any, factors: Any, divisor: Any
    ) -> list[Matrix]:
        """The means of some arrays over the ranks, in one reduction."""
        if not arrays:
            return []
        together = np.concatenate([a.reshape(-1) for a in arrays]).astype(dtype, copy=False)
        self.num_bytes += together.nbytes
        comm._reduce(call, together, factors, divisor)
        borders = np.cumsum([a.size for a in arrays])[:-1]
        return [part.reshape(a.shape) for part, a in zip(np.split(together, borders), arrays)]


class TopK(Compression):
    """Only the elements of largest magnitude travel (Stich et al. 2018, arXiv 1809.07599; Aji and Heafield 2017).

    Each rank sends those of its own gradient, as 32-bit indices and values; the mean counts what a rank did not send as
    zero, and the rank adds it to its next gradient.

    Args:
        fraction: of the elements of each type, above 0 and at most 1.
    """

    def __init__(self, fraction: float = 0.01) -> None:
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
            raise ValueError(f"TopK: fraction: expected a number above 0 and at most 1, got {fraction!r}")
        self.fraction = float(fraction)
        self._errors: dict[int, Matrix] = {}

    def words(self) -> str:
        return f"TopK fraction {self.fraction}"

    def _reduce(
        self, comm: Any, call: Passage, number: int, run: Run, grad: Matrix, factors: Any, divisor: Any
    ) -> None:
        kept = self._errors.get(number)
        if kept is not None and kept.shape == grad.shape:
            grad += kept
        count = max(math.ceil(self.fraction * grad.size), 1)
        chosen = np.sort(np.argpartition(np.abs(grad), grad.size - count)[grad.size - count :]).astype(np.int32)
        values = grad[chosen]
        self._errors[number] = grad.copy()
        self._errors[number][chosen] = 0
        mine = np.concatenate([message.as_bytes(chosen), message.as_bytes(values)])
        self.num_bytes += mine.nbytes
        call.num_bytes += mine.nbytes
        found = np.empty((comm.size, mine.nbytes), np.uint8)
        comm._meet(call)
        places = [mine.nbytes * k for k in range(comm.size)]
        comm._allgather_bytes(mine, found.reshape(-1), [mine.nbytes] * comm.size, places)
        grad[...] = 0
        for k, raw in enumerate(found):
            where, what = raw[: chosen.nbytes].view(np.int32), raw[chosen.nbytes :].view(grad.dtype)
            grad[where] += what if factors is None else what * grad.dtype.type(factors[k])
        message.divide(grad, divisor)
