"""Fewer bytes for gradients: PowerSGD and top-k, both with error feedback.

What a rank does not send in one step it keeps, and adds to its gradient in the next: over time nothing is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from dbrdist.comm.gradients.reduction_plan import ReductionPlan
from dbrdist.comm.protocol.gate import Passage
from dbrdist.comm.transport import message
from dbrdist.core.array import random
from dbrdist.core.array.backend import fill, on, to_cpu, to_device
from dbrdist.core.array.types import RealArray
from dbrdist.core.model import flat
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.names.constructors import explain_constructors
from dbrdist.core.names.limits import count, part

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase

Matrix: TypeAlias = RealArray
Layers: TypeAlias = list[tuple[Parameter, slice]]


class Compression:
    """The base: ``reduce`` replaces the gradients of a plan by something near their means."""

    num_bytes = 0  # that this rank has sent so far

    def __init__(self) -> None:
        self.kept: dict[Parameter, Matrix] = {}  # what this rank did not send, in one dimension
        self.right: dict[Parameter, Matrix] = {}  # of PowerSGD: Q, the same on all ranks

    def words(self) -> str:
        """The settings, which all ranks must have in common."""
        raise NotImplementedError

    def forget(self) -> None:
        """Keep nothing, and start over."""
        self.kept.clear()
        self.right.clear()

    def spend(self, plan: ReductionPlan) -> None:
        """Add to the gradients what was kept of them in a run of several ranks; one alone sends nothing."""
        plan.collect()
        for p in plan.params:
            if p in self.kept:
                p.grad += to_device(self.kept.pop(p).astype(p.dtype).reshape(p.shape), p.device)

    def reduce(
        self,
        comm: CommunicatorBase,
        call: Passage,
        plan: ReductionPlan,
        factors: Sequence[float] | None,
        divisor: float | None,
    ) -> None:
        """Collective; every rank gets the same bits."""
        flat.collect_gradients(plan.params)
        # What a rank keeps has its weight already: in a later step this rank may have another, or none.
        weight = (1.0 if factors is None else factors[comm.rank]) * comm.size / (1.0 if divisor is None else divisor)
        with call.moving():
            for number, run in enumerate(plan.runs):
                layers = list(run.layers())
                grad: Matrix = np.array(to_cpu(run.grad), np.float64 if run.grad.dtype == np.float64 else np.float32)
                np.multiply(grad, grad.dtype.type(weight), out=grad)
                for p, where in layers:
                    if p in self.kept:
                        grad[where] += self.kept[p]
                error = grad.copy()
                self._reduce(comm, call, number, layers, grad, error)
                self.kept.update((p, error[where]) for p, where in layers)
                with on(run.grad):
                    run.grad[...] = message.to_place(grad.astype(run.grad.dtype), run.grad)

    def _reduce(
        self, comm: CommunicatorBase, call: Passage, number: int, layers: Layers, grad: Matrix, error: Matrix
    ) -> None:
        """Replace ``grad`` by the mean of what the ranks send, and take that from ``error``, its copy."""
        raise NotImplementedError


_RANK = "Columns of the two thin matrices that are sent for each parameter; the paper takes 1 to 4."


class PowerSGD(Compression):
    """Gradients as products of two thin matrices (Vogels et al. 2019, arXiv 1905.13727, algorithm 1), warm-started.

    The gradient M of a parameter, its first axis by all others, is sent as P = M Q and Q = M' P, where the mean of P is
    made orthonormal in between; the mean gradient is then P Q'. What is missing from it, by rank, is added to the next
    gradient. Parameters for which that would be no fewer numbers, such as biases, are sent as they are.

    Args:
        rank: the number of columns of P and Q; the paper takes 1 to 4.
    """

    def __init__(self, rank: Annotated[int, count, _RANK] = 2) -> None:
        super().__init__()
        self.rank = rank

    def words(self) -> str:
        return f"PowerSGD rank {self.rank}"

    def _reduce(
        self, comm: CommunicatorBase, call: Passage, number: int, layers: Layers, grad: Matrix, error: Matrix
    ) -> None:
        thin, whole = [], []
        for i, (p, where) in enumerate(layers):
            rows = p.shape[0] if p.ndim > 1 else 0
            columns = p.size // rows if rows else 0
            r = min(self.rank, rows, columns)
            if r * (rows + columns) < rows * columns:
                matrix = grad[where].reshape(rows, columns)
                thin.append((p, where, matrix, self._begin(p, number, i, matrix, r)))
            else:
                whole.append(where)
        sent = [matrix @ right for _, _, matrix, right in thin] + [grad[where] for where in whole]
        means = self._mean(comm, call, sent, grad.dtype)
        left = [np.linalg.qr(p)[0] for p in means[: len(thin)]]
        for where, mean in zip(whole, means[len(thin) :]):
            grad[where], error[where] = mean, 0
        rights = [matrix.T @ basis for (_, _, matrix, _), basis in zip(thin, left)]
        for (p, where, matrix, _), basis, right in zip(thin, left, self._mean(comm, call, rights, grad.dtype)):
            self.right[p] = right
            matrix[...] = basis @ right.T
            error[where] -= grad[where]

    def _begin(self, p: Parameter, number: int, layer: int, matrix: Matrix, r: int) -> Matrix:
        right = self.right.get(p)
        if right is None or right.shape != (matrix.shape[1], r):
            generator = random.generator(0, "PowerSGD", sample=layer, part=number)
            right = generator.standard_normal((matrix.shape[1], r)).astype(matrix.dtype)
        return right

    def _mean(self, comm: CommunicatorBase, call: Passage, arrays: Sequence[Matrix], dtype: DTypeLike) -> list[Matrix]:
        """The means of some arrays over the ranks, in one reduction."""
        if not arrays:
            return []
        together = np.concatenate([a.reshape(-1) for a in arrays]).astype(dtype, copy=False)
        self.num_bytes += together.nbytes
        comm.reducer.reduce(call, together, None, float(comm.size))
        borders = np.cumsum([a.size for a in arrays])[:-1]
        return [part.reshape(a.shape) for part, a in zip(np.split(together, borders), arrays)]


class TopK(Compression):
    """Only the elements of largest magnitude are sent (Stich et al. 2018, arXiv 1809.07599; Aji and Heafield 2017).

    Each rank sends those of its own gradient, as 32-bit indices and values; the mean counts what a rank did not send as
    zero, and the rank adds it to its next gradient.

    Args:
        fraction: of the elements of each type, above 0 and at most 1.
    """

    def __init__(self, fraction: Annotated[float, part, "The fraction of the elements that is sent."] = 0.01) -> None:
        super().__init__()
        self.fraction = float(fraction)

    def words(self) -> str:
        return f"TopK fraction {self.fraction}"

    def _reduce(
        self, comm: CommunicatorBase, call: Passage, number: int, layers: Layers, grad: Matrix, error: Matrix
    ) -> None:
        count = max(math.ceil(self.fraction * grad.size), 1)
        chosen = np.sort(np.argpartition(np.abs(grad), grad.size - count)[grad.size - count :]).astype(np.int32)
        values = grad[chosen]
        error[chosen] = 0
        mine = np.concatenate([message.as_bytes(chosen), message.as_bytes(values)])
        self.num_bytes += mine.nbytes
        call.num_bytes += mine.nbytes
        found = np.empty((comm.size, mine.nbytes), np.uint8)
        comm.ranks.meet(call)
        places = [mine.nbytes * k for k in range(comm.size)]
        comm.ranks.allgather_bytes(mine, found.reshape(-1), [mine.nbytes] * comm.size, places)
        fill(grad, 0)
        for raw in found:
            grad[raw[: chosen.nbytes].view(np.int32)] += raw[chosen.nbytes :].view(grad.dtype)
        message.divide(grad, float(comm.size))


explain_constructors({"PowerSGD": PowerSGD, "TopK": TopK})  # and not what is imported: verbs are made in each step
