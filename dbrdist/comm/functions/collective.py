"""Collective communication through which gradients flow. Each function's gradient is another one of them:

==============  ======================================================================
allgather       reduce_scatter
reduce_scatter  allgather
allreduce       allreduce
alltoall        alltoall
bcast           a sum on the root
gather          scatter
scatter         gather
==============  ======================================================================

Arguments that are wrong on one rank, ranks in different functions, and ranks that go backward through different calls
raise the same error on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dbrdist.comm.functions.graph import Communication, applied, as_variables, counted, no_elements
from dbrdist.comm.protocol import arguments
from dbrdist.comm.protocol.arguments import attempt
from dbrdist.comm.protocol.gate import digest
from dbrdist.core.array.backend import Array, accumulation_dtype, is_array

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase
    from dbrdist.comm.functions.graph import SentBack
    from dbrdist.core.tape.variable import Operand, Variable


class AllGather(Communication):
    """Every rank's x, on every rank."""

    def move(self, xs: tuple[Array, ...]) -> Sequence[Array]:
        found: Sequence[Array] = self.comm.allgather(xs[0])
        return found

    def send_back(self, gys: tuple[Array, ...]) -> SentBack:
        return applied(ReduceScatter(self.comm), self.filled(gys)), None


class ReduceScatter(Communication):
    """The sum over ranks of their entry for this rank; in float32 for 16-bit types, added in order of ranks."""

    def move(self, xs: tuple[Array, ...]) -> Sequence[Array]:
        parts = _exchange_alike(self.comm, xs)
        total = parts[0].astype(accumulation_dtype(parts[0].dtype))
        for part in parts[1:]:
            total += part
        return (total.astype(parts[0].dtype, copy=False),)

    def send_back(self, gys: tuple[Array, ...]) -> SentBack:
        return applied(AllGather(self.comm), gys), None


class AllReduce(Communication):
    """The sum of every rank's x, on every rank."""

    def move(self, xs: tuple[Array, ...]) -> Sequence[Array]:
        return (self.comm.allreduce(xs[0]),)

    def send_back(self, gys: tuple[Array, ...]) -> SentBack:
        return applied(AllReduce(self.comm), gys), None


class AllToAll(Communication):
    """Entry k is what rank k had for this rank."""

    def move(self, xs: tuple[Array, ...]) -> Sequence[Array]:
        found: Sequence[Array] = self.comm.alltoall(xs)
        return found

    def send_back(self, gys: tuple[Array, ...]) -> SentBack:
        return applied(AllToAll(self.comm), self.filled(gys)), None


class _Rooted(Communication):
    """Communication in which one rank is apart."""

    def __init__(self, comm: CommunicatorBase, root: int) -> None:
        super().__init__(comm)
        self.root = root

    @property
    def is_root(self) -> bool:
        return bool(self.comm.rank == self.root)

    def to_root(self, node: _Rooted, gys: tuple[Array, ...]) -> SentBack:
        """Send a gradient to the root, where alone an input has one."""
        found = applied(node, gys)
        return (found, None) if self.is_root else ((), found[0])

    def from_root(self, node: _Rooted, gys: tuple[Array, ...]) -> SentBack:
        """Get a gradient from the root; the other ranks' output was a delegate variable."""
        if self.is_root:
            return applied(node, self.filled(gys)), None
        return applied(node, (), gys[0]) if self._on_variables else node.forward((gys[0],)), None


class Bcast(_Rooted):
    """The root's x, on every rank."""

    def move(self, xs: tuple[Array, ...]) -> Sequence[Array]:
        y = self.comm.bcast(xs[0] if self.is_root else None, root=self.root)
        return (y[...] if self.is_root else y,)

    def send_back(self, gys: tuple[Array, ...]) -> SentBack:
        return self.to_root(Reduce(self.comm, self.root), gys)


class Reduce(_Rooted):
    """The sum of every rank's x, on the root."""

    def move(self, xs: tuple[Array, ...]) -> Sequence[Array]:
        total = self.comm.allreduce(xs[0])
        return (total if self.is_root else no_elements(),)

    def send_back(self, gys: tuple[Array, ...]) -> SentBack:
        return self.from_root(Bcast(self.comm, self.root), gys)


class Gather(_Rooted):
    """Every rank's x, on the root."""

    def move(self, xs: tuple[Array, ...]) -> Sequence[Array]:
        return self.comm.gather(xs[0], self.root) or (no_elements(),)

    def send_back(self, gys: tuple[Array, ...]) -> SentBack:
        return self.from_root(Scatter(self.comm, self.root), gys)


class Scatter(_Rooted):
    """The root's entry for this rank."""

    def move(self, xs: tuple[Array, ...]) -> Sequence[Array]:
        return (self.comm.scatter(xs if self.is_root else None, self.root),)

    def send_back(self, gys: tuple[Array, ...]) -> SentBack:
        return self.to_root(Gather(self.comm, self.root), gys)


def _exchange_alike(comm: CommunicatorBase, xs: Sequence[Array]) -> Sequence[Array]:
    """An all-to-all in which every rank has entries of the same shapes and types."""
    with comm.gate.call("reduce_scatter") as call:
        each, error = attempt(arguments.prepared_for_each, xs, comm.size, "reduce_scatter")
        given = "" if each is None else "; ".join(f"shape {x.shape} of {x.dtype}" for x in xs)
        call.agree([digest(given)], error, num_same=1, what="the same shapes and types", detail=given)
        with call.moving():
            found: Sequence[Array] = comm.ranks.exchange_arrays(call, each or [], range(comm.size))
        return found


def _one(x: Operand) -> Any:
    """What a verb is to refuse on every rank, as it is."""
    return getattr(x, "array", x)


def _all(xs: Any) -> Any:
    return [_one(x) for x in xs] if isinstance(xs, (list, tuple)) else _one(xs)


def _for_each(comm: CommunicatorBase, xs: Any) -> list[Variable] | None:
    """One Variable for each rank; None where ``xs`` is something else."""
    if is_array(getattr(xs, "array", xs)):
        xs = [xs[k] for k in range(len(xs))] if xs.ndim else None
    found = as_variables(xs) if isinstance(xs, (list, tuple)) else None
    return found if found is not None and len(found) == comm.size else None


def allgather(comm: CommunicatorBase, x: Operand) -> tuple[Operand, ...]:
    """Every rank's ``x``, in order of ranks, as a tuple of Variables; shapes may differ between ranks.

    The gradient of ``x`` is the sum of what all ranks have for it.

    Args:
        comm: the ranks.
        x: an array or Variable; shapes may differ between ranks.

    Raises:
        CommunicatorError: on every rank, if the ranks disagree.

    Example:
        >>> comm = dbrdist.comm.create_communicator("single")
        >>> dbrdist.comm.functions.allgather(comm, np.ones(1))[0].array
        array([1.])
    """
    xs = as_variables([x])
    return counted(AllGather(comm), xs) if xs else comm.allgather(_one(x))


def reduce_scatter(comm: CommunicatorBase, xs: Sequence[Operand] | Operand) -> Any:
    """The sum over ranks of entry ``rank`` of ``xs``: ``size`` arrays (or an array with ``size`` rows).

    All ranks pass the same shapes and types. Sums of 16-bit types run in float32 and are narrowed once. The gradient of
    entry k is rank k's.

    Args:
        comm: the ranks.
        xs: ``size`` arrays, or an array with ``size`` rows; the same shapes and types on all ranks.

    Raises:
        CommunicatorError: on every rank, if the ranks disagree.

    Example:
        >>> comm = dbrdist.comm.create_communicator("single")
        >>> dbrdist.comm.functions.reduce_scatter(comm, np.ones((1, 2))).array
        array([1., 1.])
    """
    each = _for_each(comm, xs)
    return counted(ReduceScatter(comm), each)[0] if each is not None else _exchange_alike(comm, _all(xs))


def allreduce(comm: CommunicatorBase, x: Variable) -> Any:
    """The sum of every rank's ``x``, which all have the same shape and type. The gradient of ``x`` is that of the sum,
    added up over ranks.

    Args:
        comm: the ranks.
        x: an array or Variable, of the same shape and type on all ranks.

    Raises:
        CommunicatorError: on every rank, if the ranks disagree.

    Example:
        >>> comm = dbrdist.comm.create_communicator("single")
        >>> dbrdist.comm.functions.allreduce(comm, np.ones(1)).array
        array([1.])
    """
    xs = as_variables([x])
    return counted(AllReduce(comm), xs)[0] if xs else comm.allreduce(_one(x))


def alltoall(comm: CommunicatorBase, xs: Sequence[Operand] | Operand) -> tuple[Operand, ...]:
    """Entry k of the result is what rank k had at this rank's place of its ``xs``, which are ``size`` arrays.

    Args:
        comm: the ranks.
        xs: ``size`` arrays or Variables, entry k for rank k.

    Raises:
        CommunicatorError: on every rank, if the ranks disagree.

    Example:
        >>> comm = dbrdist.comm.create_communicator("single")
        >>> dbrdist.comm.functions.alltoall(comm, (np.ones(1),))[0].array
        array([1.])
    """
    each = _for_each(comm, xs)
    return counted(AllToAll(comm), each) if each is not None else comm.alltoall(_all(xs))


def bcast(comm: CommunicatorBase, x: Variable, root: int = 0) -> Any:
    """The ``x`` of ``root``, on every rank; its gradient is the sum of all ranks'.

    On the other ranks ``x`` is None, or a delegate variable, through which backward continues.

    Args:
        comm: the ranks.
        x: on the root an array or Variable; elsewhere None or a delegate variable.
        root: the rank whose x is sent.

    Raises:
        CommunicatorError: on every rank, if the ranks disagree.

    Example:
        >>> comm = dbrdist.comm.create_communicator("single")
        >>> dbrdist.comm.functions.bcast(comm, np.ones(1)).array
        array([1.])
    """
    if comm.rank != root:
        return counted(Bcast(comm, root), (), x)[0]
    xs = as_variables([x])
    return counted(Bcast(comm, root), xs)[0] if xs else comm.bcast(_one(x), root=root)


def gather(comm: CommunicatorBase, x: Variable, root: int = 0) -> Any:
    """On ``root`` every rank's ``x``, as a tuple of Variables; on the others a delegate variable, from which or through
    which (:func:`pseudo_connect`) backward must go.

    Args:
        comm: the ranks.
        x: an array or Variable.
        root: the rank that receives.

    Raises:
        CommunicatorError: on every rank, if the ranks disagree.

    Example:
        >>> comm = dbrdist.comm.create_communicator("single")
        >>> dbrdist.comm.functions.gather(comm, np.ones(1))[0].array
        array([1.])
    """
    xs = as_variables([x])
    if not xs:
        return comm.gather(_one(x), root)
    found = counted(Gather(comm, root), xs)
    return found if comm.rank == root else found[0]


def scatter(comm: CommunicatorBase, xs: Any, root: int = 0) -> Any:
    """Entry ``rank`` of the ``xs`` of ``root``: ``size`` arrays, or an array with ``size`` rows.

    On the other ranks ``xs`` is None, or a delegate variable, through which backward continues.

    Args:
        comm: the ranks.
        xs: on the root ``size`` arrays, or an array with ``size`` rows; elsewhere None or a delegate variable.
        root: the rank whose entries are sent.

    Raises:
        CommunicatorError: on every rank, if the ranks disagree.

    Example:
        >>> comm = dbrdist.comm.create_communicator("single")
        >>> dbrdist.comm.functions.scatter(comm, np.ones((1, 2))).array
        array([1., 1.])
    """
    if comm.rank != root:
        return counted(Scatter(comm, root), (), xs)[0]
    each = _for_each(comm, xs)
    return counted(Scatter(comm, root), each)[0] if each is not None else comm.scatter(_all(xs), root)
