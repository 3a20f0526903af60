"""Batch normalization of a batch of which every rank has a part."""

from __future__ import annotations

import zlib
from math import prod
from typing import TYPE_CHECKING

from dbrdist import kernels
from dbrdist.comm.functions.collective import AllReduce
from dbrdist.comm.functions.graph import applied, going_back_through, in_order, number_of_call
from dbrdist.comm.protocol import agree
from dbrdist.comm.protocol.roster import RosterName, are_same
from dbrdist.core.array.backend import Array, accumulation_dtype, get_array_module, to_cpu
from dbrdist.core.array.declared import refuse_in_capture
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import expected
from dbrdist.functions.normalization import SharedBatchNormalization, checked_axis, move_running

if TYPE_CHECKING:
    from typing import Any

    from dbrdist.comm.communicators.communicator import CommunicatorBase
    from dbrdist.core.array.types import Axes, Destinations
    from dbrdist.core.tape.variable import Operand, Variable

_BACKENDS = ("auto", "mpi", "nccl")
# Marks of settings travel as floats with the sums. Those of 2^13 ranks add up exactly, squares too; sum and sum of
# squares are those of equal marks only where all are equal.
_MARKS = (1 << 20) - 1


def get_communication_backend(comm: CommunicatorBase, communication_backend: str = "auto") -> str:
    """What carries the statistics of a multi-node batch normalization: the communicator itself, whatever is asked.

    Args:
        comm: the ranks.
        communication_backend: ``'auto'``, ``'mpi'`` or ``'nccl'``.

    Raises:
        ValueError: unless ``communication_backend`` is ``'auto'``, ``'mpi'`` or ``'nccl'``.

    Example:
        >>> comm = dbrdist.comm.create_communicator("single")
        >>> dbrdist.comm.functions.get_communication_backend(comm)
        'mpi'
    """
    if communication_backend not in _BACKENDS:
        raise expected("batch normalization", "communication_backend", "'auto', 'mpi' or 'nccl'", communication_backend)
    return "mpi" if communication_backend == "auto" else communication_backend


class MultiNodeBatchNormalization(SharedBatchNormalization):
    """y = gamma x_hat + beta with the statistics of all ranks' x; the gradients of gamma and beta are of this rank

    Mean and variance are merged from those of the ranks by differences of means, which cancel nothing: with n_k, mu_k,
    v_k of rank k, mu = sum n_k mu_k / N and v = sum n_k (v_k + (mu_k - mu)^2) / N.
    """

    def __init__(
        self, comm: CommunicatorBase, eps: float, axis: tuple[int, ...], settings: str = "", name: str | RosterName = ""
    ) -> None:
        super().__init__(eps, axis, comm.allreduce)
        self.comm = comm
        self.settings = settings
        self.name = name  # which the link of a batch normalization in no chain shares
        self.number: int  # of the call, once it has passed the gate

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        refuse_in_capture("batch normalization over ranks reads their sums on the host")
        self.retain_inputs((0, 1))
        x, gamma, beta = xs
        xp = get_array_module(x)
        own, var = (v.astype("d").reshape(-1) for v in kernels.bn_statistics(x, self.axis))
        m = prod(x.shape[i] for i in self.axis)
        settings = f"name {self.name or None}, eps {self.eps:.6g}, {x.dtype.name}, {self.settings}"
        mark = float(zlib.crc32(settings.encode()) & _MARKS)
        total = self.share(xp.concatenate((xp.array((m, mark, mark * mark)), m * own)))
        self.num_averaged, sum_of_marks, sum_of_squares = to_cpu(total[:3]).tolist()
        if sum_of_marks != mark * self.comm.size or sum_of_squares != mark * mark * self.comm.size:
            self._settle_name(settings.removeprefix(f"name {self.name or None}, "))
            settings = f"name {self.name or None}, eps {self.eps:.6g}, {x.dtype.name}, {self.settings}"
            agree.same_everywhere(self.comm, settings, "the same batch normalization")
        self.count = max(self.num_averaged, 1.0)
        mean = total[3:] / self.count
        var = self.share(m * (var + (own - mean) ** 2)) / self.count
        wide = accumulation_dtype(x.dtype)
        self.mean, self.var = mean.astype(wide).reshape(gamma.shape), var.astype(wide).reshape(gamma.shape)
        return (kernels.bn_inference(x, gamma, beta, self.mean, self.var, self.eps, False, self.axis),)

    def _settle_name(self, settings: str) -> None:
        """Where ranks number one batch normalization differently, but made it at one line, all take one name."""
        own = self.name if isinstance(self.name, RosterName) else None
        everyone = self.comm.allgather_obj((settings, None if own is None else (own.entry, own.words)))
        entries = [made[0] for _, made in everyone if made is not None]
        is_one = len(entries) == len(everyone) and are_same(entries) and len({words for words, _ in everyone}) == 1
        if own is not None and is_one:
            own.words = f"{everyone[0][1][1]} of rank 0"

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...], out: Destinations = None) -> tuple[Array, ...]:
        with going_back_through(self.comm, self.number):
            if not self._on_variables:
                return super().derive(wanted, gys, out)
            x, gamma = self.retained_inputs()
            grads = self._composed(x, gamma, gys[0])
        nodes = self.inputs
        return tuple([ops.cast(grads[i], nodes[i].dtype) for i in wanted])

    def _composed(self, x: Array, gamma: Array, gy: Array) -> tuple[Array, Array, Array]:
        """The gradients of x, gamma and beta in primitives, of which the tape makes all higher orders."""
        wide = self.mean.dtype
        x, gy, g = ops.cast(x, wide), ops.cast(gy, wide), ops.cast(gamma, wide)
        kept = tuple(1 if i in self.axis else n for i, n in enumerate(x.shape))
        centered = ops.sub(x, self._mean_over_ranks(self._sum(x)))
        var = self._mean_over_ranks(self._sum(ops.mul(centered, centered)))
        s = ops.power(ops.add(var, self.eps), -0.5)
        x_hat = ops.mul(centered, s)
        ggamma, gbeta = self._sum(ops.mul(gy, x_hat)), self._sum(gy)
        spread = ops.add(self._mean_over_ranks(gbeta), ops.mul(x_hat, self._mean_over_ranks(ggamma)))
        gx = ops.mul(ops.mul(ops.reshape(g, kept), s), ops.sub(gy, spread))
        return gx, ops.reshape(ggamma, g.shape), ops.reshape(gbeta, g.shape)

    def _sum(self, v: Array) -> Any:
        return ops.sum(v, self.axis, True)

    def _mean_over_ranks(self, v: Array) -> Any:
        return ops.mul(applied(AllReduce(self.comm), (v,))[0], 1.0 / self.count)


def multi_node_batch_normalization(
    comm: CommunicatorBase, x: Array, gamma: Operand, beta: Operand, *, eps: float = 2e-5,
    running_mean: Array | None = None, running_var: Array | None = None, decay: float = 0.9, axis: Axes = None,
    name: str | RosterName = "",
) -> Variable:  # fmt: skip
    """:func:`dbrdist.functions.batch_normalization` over the batches of all ranks together.

    Batches may differ in length between ranks, and be empty on some. All other arguments are the same on all ranks,
    ``name`` too, which tells one batch normalization from another of the same size.

    Raises:
        CommunicatorError: on every rank, if ``eps``, ``decay``, ``name`` or the type of ``x`` differ.
    """
    if (running_mean is None) != (running_var is None):
        raise expected("multi_node_batch_normalization", "running_mean, running_var", "both or neither", "one of them")
    axis = checked_axis("multi_node_batch_normalization", x, gamma, axis, beta=beta)
    node = MultiNodeBatchNormalization(comm, eps, axis, f"decay {decay:.6g}", name)
    ys = node.apply((x, gamma, beta))
    node.number = number_of_call(comm)
    in_order(node, ys)
    if running_mean is not None and running_var is not None:
        move_running(running_mean, running_var, node.mean, node.var, decay, int(node.num_averaged))
    return ys[0]
