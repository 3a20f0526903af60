"""The reduction of a model's gradients: a plan of what lies where, weights, the type in which they are sent."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dbrdist.comm.protocol import agree
from dbrdist.comm.protocol.gate import Passage, digest
from dbrdist.comm.protocol.wire_type import codec_for, growth
from dbrdist.comm.transport import message
from dbrdist.core.array.backend import Array
from dbrdist.core.model import flat
from dbrdist.core.model.flat import Arena, Run
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.model.versions import Watch
from dbrdist.errors import CommunicatorError, NoSamplesError
from dbrdist.kernels.small_arrays.small import scale_sum

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase
    from dbrdist.comm.gradients.overlap import Overlap
    from dbrdist.comm.gradients.shared_gradients import SharedGradients

_gradient_of = operator.attrgetter("gradient")
EQUAL_WEIGHT = -(1 << 63)  # instead of a number of samples; nobody has a wrong one like that


class ReductionPlan:
    """The runs of some parameters, and numbers that are equal on ranks whose parameters, and whose runs, are."""

    def __init__(self, named: Sequence[tuple[str, Parameter]]) -> None:
        self.params = flat.gather(p for _, p in named)
        self._place_runs()
        self.named = list(named)
        self.key = key_of(named)
        self.text = agree.as_lines(agree.describe_params(named))
        self.digest = digest(self.text)
        self.place = 0  # equal on ranks that have brought the gradients to their places together; 0 before
        self.shared: SharedGradients | None = None  # reduces them there, where the ranks of a host reach each other's
        self.overlap: Overlap | None = None  # reduces them while backward runs, where that pays
        self.division: Any = None  # says which rank gets which part, where each gets one alone; None is all
        index = {id(p): i for i, p in enumerate(self.params)}
        self.runs_digest = digest(repr([(run.size, [index[id(p)] for p in run.params]) for run in self.runs]))

    @property
    def num_bytes(self) -> int:
        """Of all gradients together."""
        return sum(grad.nbytes for grad in self.grads)

    def _place_runs(self) -> None:
        """The runs where they lie now."""
        self.runs = _runs(self.params)
        self.grads: tuple[Array, ...] = tuple(run.grad for run in self.runs)  # valid after :meth:`collect`
        self._nodes = [p.node for p in self.params]
        self._views = [node.view for node in self._nodes]
        self._watch = Watch(self.params)
        self._scales: tuple[float | None, list[message.Scale]] | None = None  # a divisor, and the factor of each sum

    def move(self, move: Callable[[list[Arena]], None]) -> None:
        """Have what lies in the arenas moved; the plan goes along."""
        move(list({id(run.arena): run.arena for run in self.runs}.values()))
        self._place_runs()

    def settle(self, comm: CommunicatorBase, call: Passage, places: Sequence[int]) -> None:
        """Bring the gradients to their places if a rank says that its are not there. Collective."""
        if not all(place == places[0] != 0 for place in places):
            self.shared = comm.reducer.share_gradients(call, self)
            self.overlap = comm.reducer.overlap(call, self)
            self.place = comm.reducer.next_place()

    def is_for(self, params: list[Parameter]) -> bool:
        """Whether it holds for these parameters, and none has moved since."""
        return self._watch.is_current() and params == [p for _, p in self.named]

    def reduce(
        self,
        comm: CommunicatorBase,
        call: Passage,
        wanted: Sequence[Parameter],
        factors: Sequence[float] | None,
        divisor: float | None,
    ) -> None:
        """Average the gradients of some of the parameters over the ranks."""
        flat.collect_gradients(wanted)
        is_all = len(wanted) == len(self.params)
        if is_all and self.shared is not None:
            with call.moving():
                self.shared.reduce(comm.reducer, call, factors, divisor)
        elif comm.reducer.one_by_one:
            reduce_gradients(comm, call, [p.grad.reshape(-1) for p in wanted], factors, divisor)
        else:
            grads = self.grads if is_all else [run.grad for run in _runs(wanted)]
            reduce_gradients(comm, call, grads, factors, divisor)

    def collect(self) -> tuple[Array, ...]:
        """The gradients of each run, brought to their places."""
        nodes, views = self._nodes, self._views  # as flat.collect_gradients, of parameters that are in place
        if not all(map(operator.is_, map(_gradient_of, nodes), views)):
            for p, node, view in zip(self.params, nodes, views):
                if node.gradient is not view:
                    p.collect_gradient()
        return self.grads

    def add_up(
        self,
        call: Passage,
        everyones: Sequence[Sequence[Array]],
        factors: Sequence[float] | None,
        divisor: float | None,
    ) -> None:
        """Average the gradients: of each run what every rank has, in the order of ranks.

        They are short, so that what follows from types and the divisor is worked out once: as message.weighted_sum does
        it for each array, a step of 10 KB takes 1.5 us more.
        """
        scales = self._scales
        if scales is None or scales[0] != divisor:
            scales = self._scales = divisor, [message.scale_of_short_sum(grad, divisor) for grad in self.grads]
        for grad, pieces, scale in zip(self.grads, everyones, scales[1]):
            call.num_bytes += grad.nbytes
            call.kind = grad.dtype
            if scale is not None and factors is None and len(pieces) > 1:
                scale_sum(pieces, scale, grad)
                continue
            total = message.weighted_sum(pieces, factors, divisor, out=grad)
            if total is not grad:
                grad[...] = total

    def reduce_scatter(
        self, comm: CommunicatorBase, call: Passage, factors: Sequence[float] | None, divisor: float | None
    ) -> None:
        """Average the gradients; each rank gets its part alone."""
        flat.collect_gradients(self.params)
        self._scatter(comm, call, [(n, 0, run.size) for n, run in enumerate(self.runs)], factors, divisor)

    def _scatter(
        self,
        comm: CommunicatorBase,
        call: Passage,
        parts: Sequence[tuple[int, int, int]],
        factors: Sequence[float] | None,
        divisor: float | None,
    ) -> None:
        """The same for parts of runs: (number, first element, last + 1)."""
        borders = [self.division.borders(number, begin, end) for number, begin, end in parts]
        if self.shared is not None and comm.reducer.is_on_one_host:
            own = [(n, begin + b[comm.rank], begin + b[comm.rank + 1]) for (n, begin, _), b in zip(parts, borders)]
            with call.moving():
                self.shared.reduce_scatter(comm.reducer, call, factors, divisor, own)
        else:
            grads = [self.runs[n].grad[begin:end] for n, begin, end in parts]
            reduce_gradients(comm, call, grads, factors, divisor, borders)
        if self.division.releases:
            for (number, begin, end), b in zip(parts, borders):
                self.division.release(self.runs[number], begin, end, b)

    def reduce_part(
        self,
        comm: CommunicatorBase,
        call: Passage,
        number: int,
        begin: int,
        end: int,
        factors: Sequence[float] | None,
        divisor: float | None,
    ) -> None:
        """Average the gradients of one run from element ``begin`` to ``end``."""
        call.meet_without_row()
        if self.division is not None:
            self._scatter(comm, call, [(number, begin, end)], factors, divisor)
            return
        if self.shared is None:
            reduce_gradients(comm, call, [self.runs[number].grad[begin:end]], factors, divisor)
            return
        with call.moving():
            self.shared.reduce(comm.reducer, call, factors, divisor, [(number, begin, end)])


def key_of(named: Sequence[tuple[str, Parameter]]) -> tuple[int, ...]:
    """What finds the plan of some parameters."""
    return tuple(id(p) for _, p in named)


def _runs(params: Sequence[Parameter]) -> list[Run]:
    """The runs of ``params`` in an order that is the same on every rank (``flat`` goes by addresses)."""
    index = {id(p): i for i, p in enumerate(params)}
    return sorted(flat.runs(params, is_lent=True), key=lambda run: index[id(run.params[0])])


def plan_anew(named: Sequence[tuple[str, Parameter]]) -> ReductionPlan:
    """Bring parameters whose places differ between ranks into arenas that do not."""
    for _, p in named:
        p.leave_arena()
    return ReductionPlan(named)


def weights(counts: Sequence[int]) -> tuple[list[float] | None, float | None]:
    """(factor of each rank, divisor of the sum) for these numbers of samples; EQUAL_WEIGHT on all is what it says."""
    if any(n < 0 for n in counts):
        if any(n != EQUAL_WEIGHT for n in counts):
            expected = "of 0 or more" if any(0 > n > EQUAL_WEIGHT for n in counts) else "from every rank or from none"
            raise CommunicatorError(
                f"expected a number of samples {expected}, got {_as_text(counts)} on ranks 0 to {len(counts) - 1}"
            )
        return None, float(len(counts))
    total = sum(counts)
    if total == 0:
        raise NoSamplesError("expected a sample on at least one rank, got none on any")
    if all(n == counts[0] for n in counts):
        return None, float(len(counts))
    return [n / total for n in counts], None


def _as_text(counts: Sequence[int]) -> str:
    return ", ".join("none" if n == EQUAL_WEIGHT else str(n) for n in counts)


def reduce_gradients(
    comm: CommunicatorBase,
    call: Passage,
    grads: Sequence[Array],
    factors: Sequence[float] | None,
    divisor: float | None,
    borders: Sequence[Sequence[int] | None] | None = None,
) -> None:
    """Reduce 1-d arrays in place, sent in the configured type if there is one.

    With ``borders`` for each array, each rank gets its part alone.
    """
    if comm.size == 1 or comm.reducer.leaves_gradients:
        return
    codec = codec_for(comm.get_config("allreduce_grad_dtype"))
    codec.prepare(call, grads, growth(comm.size, factors, divisor, comm.reducer.added_first))
    with call.moving():
        for grad, own in zip(grads, borders or [None] * len(grads)):
            codec.reduce(comm.reducer, call, grad, factors, divisor, own)
