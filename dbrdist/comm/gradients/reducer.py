"""How a communicator adds arrays over its ranks: the base of all ways, with what most of them share."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from dbrdist.comm.gradients.communication_thread import Courier
from dbrdist.comm.gradients.overlap import Overlap
from dbrdist.comm.gradients.reduction_plan import ReductionPlan
from dbrdist.comm.protocol.gate import Gate, Passage
from dbrdist.comm.protocol.wire_type import Codec
from dbrdist.comm.transport import message
from dbrdist.comm.transport.call_log import Call
from dbrdist.core.array import backend
from dbrdist.core.array.backend import Array

if TYPE_CHECKING:
    from collections.abc import Hashable

    from dbrdist.comm.gradients.shared_gradients import SharedGradients, SharedValues
    from dbrdist.comm.protocol.primitives import Ranks
    from dbrdist.comm.protocol.settings import ConfigValue

_SCATTERED_BYTES = 1 << 22  # of each rank at a time in a reduce-scatter


class Configurable(Protocol):
    """What a reducer needs of its communicator."""

    @property
    def ranks(self) -> Ranks: ...

    gate: Gate

    def get_config(self, name: str) -> Any: ...

    def barrier(self) -> None: ...

    def split(self, color: int | None, key: int) -> Any: ...


class Reducer(ABC):
    """Adds the arrays and gradients of one communicator.

    Args:
        comm: the communicator; its ranks are not connected yet, see :meth:`prepare`.
    """

    settings: ClassVar[dict[str, ConfigValue]] = {}  # configuration entries of its own, with their defaults
    one_by_one = False  # whether gradients are reduced parameter by parameter
    leaves_gradients = False  # whether they stay as they are
    added_first: Sequence[int] = ()  # ranks, this one among them, whose sum is sent to the others; empty is each alone

    def __init__(self, comm: Configurable) -> None:
        self.comm = comm
        self.ranks: Ranks = comm.ranks
        self.plans: dict[Hashable, ReductionPlan] = {}  # of the last models whose gradients were reduced
        self._num_places = 0  # how often ranks have brought gradients to their places together

    def misfit(self) -> Exception | None:
        """Why these ranks cannot communicate in this way, as far as this rank sees."""
        return None

    def prepare(self) -> None:  # noqa: B027 - most need nothing
        """Make what it needs, now that the ranks are connected. Collective."""

    def free(self) -> None:
        """Give back what it holds. Collective."""
        self.plans.clear()

    # ---- arrays ----

    @abstractmethod
    def reduce_host(
        self, call: Call, x: message.HostArray, factors: Sequence[float] | None, divisor: float | None
    ) -> None:
        """Replace the 1-d contiguous ``x`` by ``sum(factors[k] * x of rank k) / divisor`` on every rank.

        16-bit types are summed and divided in float32. Every rank gets the same bits.
        """

    def reduce(
        self, call: Call, x: Array, factors: Sequence[float] | None = None, divisor: float | None = None
    ) -> None:
        """As :meth:`reduce_host`, also for arrays on a device and in foreign byte order."""
        self.on_host(call, x, lambda host: self.reduce_host(call, host, factors, divisor))

    def on_host(self, call: Call, x: Array, work: Callable[[message.HostArray], None]) -> None:
        """Have ``work`` change what is in ``x``, in host memory and in native byte order."""
        if x.size == 0:
            return
        call.num_bytes += x.nbytes
        call.kind = x.dtype
        if isinstance(x, np.ndarray) and x.dtype.isnative:
            work(x)
            return
        host = backend.to_cpu(x).astype(x.dtype.newbyteorder("="))
        work(host)
        with backend.on(x):
            x[...] = message.to_place(host, x)

    def reduce_in(
        self, call: Call, codec: Codec, x: Array, factors: Sequence[float] | None, divisor: float | None
    ) -> None:
        """As :meth:`reduce`, sent as ``codec`` says."""
        codec.carry(x, lambda travelling: self.reduce(call, travelling, factors, divisor))

    def reduce_scatter(
        self, call: Call, x: Array, borders: Sequence[int], factors: Sequence[float] | None, divisor: float | None
    ) -> None:
        """As :meth:`reduce`, but rank r gets the elements borders[r] to borders[r + 1] alone: half the bytes.

        The terms are added in the order of ranks. What is elsewhere has no meaning afterwards.
        """
        call.num_bytes += x.nbytes
        call.kind = x.dtype
        ranks = self.ranks
        ranks.meet(call)
        host = backend.to_cpu(x)
        host = host if host.dtype.isnative else host.astype(host.dtype.newbyteorder("="))
        stretches = list(itertools.pairwise(borders))
        step = max(_SCATTERED_BYTES // (ranks.size * x.itemsize), 1)
        for first in range(0, max(b - a for a, b in stretches), step):
            parts = [(min(a + first, b), min(a + first + step, b)) for a, b in stretches]
            begin, end = parts[ranks.rank]
            theirs = np.empty((ranks.size, end - begin), host.dtype)
            ranks.exchange_bytes(
                message.as_bytes(host),
                [(b - a) * x.itemsize for a, b in parts],
                [a * x.itemsize for a, _ in parts],
                message.as_bytes(theirs.reshape(-1)),
                [theirs[0].nbytes] * ranks.size,
                [theirs[0].nbytes * k for k in range(ranks.size)],
            )
            host[begin:end] = message.weighted_sum(list(theirs), factors, divisor)
        if host is not x:
            own = slice(borders[ranks.rank], borders[ranks.rank + 1])
            with backend.on(x):
                x[own] = message.to_place(host[own], x)

    def share_parts(self, call: Call, x: Array, borders: Sequence[int]) -> None:
        """Give every rank the elements borders[r] to borders[r + 1] of each rank r."""
        call.num_bytes += x.nbytes
        call.kind = x.dtype
        self.ranks.meet(call)
        host = backend.to_cpu(x)
        raw = message.as_bytes(host)
        starts = [border * x.itemsize for border in borders[:-1]]
        counts = [(b - a) * x.itemsize for a, b in itertools.pairwise(borders)]
        self.ranks.allgather_own(raw, counts, starts)
        if host is not x:
            with backend.on(x):
                x[...] = message.to_place(host, x)

    def for_arrays_like(self, call: Passage, x: Array) -> Callable[[Call, Array], None]:
        """What adds arrays like ``x``, of one shape and type on all ranks, in place. Collective."""
        return self.reduce

    # ---- gradients of a plan ----

    @property
    def is_on_one_host(self) -> bool:
        """Whether ranks share memory, and all of them are on one host."""
        return False

    def encloses(self, arrays: Sequence[Array]) -> bool:
        """Whether these gradients come with a row; the same on ranks whose arrays are alike."""
        return bool(self.ranks.takes(arrays))

    def share_gradients(self, call: Passage, plan: ReductionPlan) -> SharedGradients | None:
        """Bring the gradients of a plan where ranks reach each other's; None where they do not. Collective."""
        return None

    def share_values(self, call: Passage, plan: ReductionPlan) -> SharedValues | None:
        """Bring the parameters of a plan there too, so that each rank takes the others' parts. Collective."""
        return None

    def why_staged(self, plan: ReductionPlan | None) -> str | None:
        """Why a device's gradients of a plan go through the host, which waits for them; the same on all ranks.

        None where they are reduced on the device, or ranks have not yet reduced gradients of this plan.
        """
        return (
            f"the communicator {type(self.comm).__name__} sends gradients through host memory, and waits for the "
            "device in each step; 'pure_nccl' does not"
        )

    def overlap(self, call: Passage, plan: ReductionPlan) -> Overlap | None:
        """What reduces the gradients of a plan while backward runs; None where that does not pay. Collective."""
        return None

    def thread(self) -> Courier | None:
        """What reduces while the rank computes (``communication_thread.py``); None where there is none. Collective."""
        return None

    def next_place(self) -> int:
        """A number for the places to which all ranks have just brought gradients."""
        self._num_places += 1
        return self._num_places
