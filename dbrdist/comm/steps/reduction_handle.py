"""Averaging of gradients while the program does something else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.gradients import model as models
from dbrdist.comm.gradients.communication_thread import PAUSE_SECONDS, Courier
from dbrdist.comm.gradients.reduction_plan import EQUAL_WEIGHT, ReductionPlan, weights
from dbrdist.comm.protocol import agree, arguments
from dbrdist.comm.protocol.arguments import attempt
from dbrdist.comm.protocol.gate import Passage
from dbrdist.comm.protocol.primitives import Row
from dbrdist.comm.protocol.roster import roster_of
from dbrdist.comm.transport import message
from dbrdist.core.array.backend import Array

if TYPE_CHECKING:
    from dbrdist.core.model.link import Link

_NUM_SAME = 2  # parameters, which reduction this is and how often it was started
_RUNS, _COUNT, _PLACE, _SHOWN = range(_NUM_SAME, _NUM_SAME + 4)
_NEVER, _LATER, _NOW = range(3)  # whether the gradients come with the row: with none, with one in the wait, with this


class Reduction:
    """The mean gradients of one model over the ranks, in two halves: :meth:`start` and :meth:`wait`.

    In between the program continues: it computes another model's gradients, reads data, writes a snapshot. Example, two
    models whose reductions overlap with the other's backward pass::

        of_generator, of_critic = Reduction(comm, generator), Reduction(comm, critic)
        loss_g.backward()
        of_generator.start()
        loss_c.backward()
        of_critic.start()
        of_generator.wait()
        generator_optimizer.update()
        of_critic.wait()
        critic_optimizer.update()

    Every rank creates, starts and waits for its reductions in the same order. Parameters without a gradient count as
    gradient zero, and have the mean afterwards. How gradients are added depends on the communicator: its name and its
    configuration (``allreduce_grad_dtype``, ``overlap``, ``shared_memory``). ``flat`` over MPI adds long ones in a
    thread and short ones in :meth:`wait`; without such a thread, :meth:`wait` does all of the work. So it does in
    the first reduction of a model, and in the first after its parameters changed.

    Args:
        communicator: the ranks.
        model: a link whose parameters have their shapes.

    Raises:
        CommunicatorError: on every rank, if the parameters differ between ranks.
        ValueError: on every rank, if a parameter of one has no shape yet.
        TypeError: if an argument is of another type.

    Example:
        >>> model = L.Linear(2, 1)
        >>> reduction = dbrdist.comm.Reduction(dbrdist.comm.create_communicator("single"), model)
    """

    def __init__(self, communicator: CommunicatorBase, model: Link) -> None:
        if not isinstance(communicator, CommunicatorBase):
            raise TypeError(f"Reduction: expected a communicator, got {type(communicator).__name__}")
        self.communicator = communicator
        self._model = model
        self._started: _Started | None = None
        self._num_starts = 0
        self._number = roster_of(communicator, "reductions").enter(sys._getframe(1)).ordinal  # ranks make them together
        with agree.together(communicator):
            self._plan = self._current_plan()
        agree.same_everywhere(communicator, self._plan.text, "the same parameters")
        self._courier = communicator.reducer.thread()
        self._agree_on(self._plan)

    @property
    def is_started(self) -> bool:
        """Whether :meth:`wait` is due."""
        return self._started is not None

    def start(self, num_samples: int | None = None) -> None:
        """Begin to average the current gradients, and return at once. Do not change them until :meth:`wait`.

        Args:
            num_samples: how many examples this rank's gradients are the mean of: its weight. None, on every rank, is
                equal weights.

        Raises:
            RuntimeError: if it was started before and :meth:`wait` is due. What else is wrong here on any rank,
                :meth:`wait` raises on all.
        """
        if self._started is not None:
            raise RuntimeError(
                f"start: expected one reduction of a model at a time, but the one started at {self._started.where()} "
                "is on its way; call wait() first"
            )
        count, error = attempt(arguments.num_samples, num_samples, "start")
        plan, wrong = attempt(self._current_plan)
        self._plan = self._plan if plan is None else plan
        self._num_starts += 1
        started = self._way(self.communicator, self._plan, (self._number, self._num_starts), count, error or wrong)
        started.begin(self._courier)
        self._started = started

    def wait(self) -> None:
        """Return when this rank has the means in its gradients.

        Raises:
            RuntimeError: if nothing was started; on every rank, if the gradients of one were changed after
                :meth:`start`. They have no meaning then. (In long gradients only a ``cleargrads``, or a gradient that
                takes the place of another, is noticed.)
            TypeError, ValueError: on every rank, if ``num_samples`` of one is no number of examples, or one of its
                parameters has no shape.
            CommunicatorError: on every rank, if they differ in parameters, or some gave ``num_samples`` and some not.
        """
        if self._started is None:
            raise RuntimeError("wait: expected start() before it, but no reduction of this model is on its way")
        started, self._started = self._started, None
        started.finish()
        if started.plan.digest != self._agreed:
            self._agree_on(models.plan_for(self.communicator, started.plan.named))

    def _agree_on(self, plan: ReductionPlan) -> None:
        """Choose how to reduce, once all ranks have these parameters: one that has others by then still meets them."""
        self._agreed = plan.digest
        self._way: type[_Started] = _Started if self._courier is None else _ByThread
        if self.communicator.reducer.encloses([run.grad for run in plan.runs]):
            self._way = _Enclosed

    def _current_plan(self) -> ReductionPlan:
        named = list(self._model.namedparams())
        for name, p in named:
            if not p.is_initialized:
                raise ValueError(
                    f"Reduction: expected parameters with shapes, but {name} waits for its first input; call the "
                    "model once before"
                )
        return models.plan_for(self.communicator, named)


class _Started:
    """One reduction on its way; this one begins in the wait."""

    def __init__(
        self,
        comm: CommunicatorBase,
        plan: ReductionPlan,
        numbers: tuple[int, int],
        count: int | None,
        error: Exception | None,
    ) -> None:
        self.comm = comm
        self.plan = plan
        self.numbers = numbers  # of the reduction in its communicator, and of this start
        self.count = count
        self.error = error
        self.grads: Sequence[Array] = plan.collect()
        self.call: Any = None

    def begin(self, courier: Courier | None) -> None:
        """What :meth:`Reduction.start` does."""
        with self.comm.gate.call("reduction") as self.call:
            self.set_out(courier)

    def set_out(self, courier: Courier | None) -> None:
        """What happens before the wait."""

    def finish(self) -> None:
        """What :meth:`Reduction.wait` does."""
        change = self.change()
        is_done = self.arrive()
        if not is_done:  # the first time, or parameters have moved
            self.comm.weighted_mean_grad(self.plan.named, True, self.count)
        agree.raise_together(self.comm, change or self.change_of_values() if is_done else change)

    def arrive(self) -> bool:
        """What happens in the wait. False where the ranks have yet to bring the gradients to their places."""
        with self.comm.gate.again(self.call) as call:
            self.post(call)
            call.wait()
        return False

    def post(self, call: Passage, enclosed: Sequence[Array] = (), shown: int = _NEVER) -> None:
        """Show what the ranks must have in common."""
        plan, (number, num_starts) = self.plan, self.numbers
        count = EQUAL_WEIGHT if self.count is None else self.count
        row = [plan.digest, number << 32 | num_starts, plan.runs_digest, count, plan.place, shown]
        words = f"start number {num_starts} of reduction {number} of the communicator\n{plan.text}"
        call.post(row, self.error, num_same=_NUM_SAME, what="the same reduction", detail=words, enclosed=enclosed)

    def where(self) -> str:
        """The line of the start."""
        return str(self.call.where())

    def change(self) -> Exception | None:
        """What is wrong where gradients are others than at the start."""
        for name, p in self.plan.named:
            if p.node.gradient is None or p.node.gradient is not p.node.view:
                return self.changed(f"that of {name} was cleared or replaced")
        return None

    def change_of_values(self) -> Exception | None:
        """The same, as far as only their values tell."""
        return None

    def changed(self, how: str) -> Exception:
        """The error."""
        return RuntimeError(
            f"wait: expected the gradients that were there at start(), at {self.where()}, but {how} since; leave them "
            "alone in between"
        )


class _Enclosed(_Started):
    """Gradients that are sent with the row."""

    _is_changed = False
    _then: Sequence[Array] = ()  # the gradients at the start, where they could not be shown without waiting

    def set_out(self, courier: Courier | None) -> None:
        if not self.comm.reducer.encloses(self.grads):  # those of other parameters than before
            self.post(self.call)
        elif self.comm.ranks.has_room():
            self.post(self.call, self.grads, _NOW)
        else:
            self._then = [x.copy() for x in self.grads]
            self.post(self.call, shown=_LATER)

    def arrive(self) -> bool:
        with self.comm.gate.again(self.call) as call:
            rows = call.wait()
            if not _are_alike(rows, _RUNS) or (rows[:, _SHOWN] == _NEVER).any():
                return False
            own = self._then or [pieces[self.comm.rank] for pieces in call.enclosed]
            if (rows[:, _SHOWN] == _LATER).any():
                self.post(call, own, _NOW)
                call.wait()
            self._is_changed = any((message.as_bytes(a) != message.as_bytes(b)).any() for a, b in zip(own, self.grads))
            self.plan.add_up(call, call.enclosed, *weights(rows[:, _COUNT].tolist()))
        return True

    def change_of_values(self) -> Exception | None:
        return self.changed("they were written") if self._is_changed else None


class _ByThread(_Started):
    """Gradients that a thread reduces, over a communicator of its own."""

    _is_done = False
    _failure: BaseException | None = None

    def set_out(self, courier: Courier | None) -> None:
        assert courier is not None
        self._courier = courier
        courier.put(self._work)

    def _work(self, comm: CommunicatorBase) -> None:
        try:
            with comm.gate.call("reduction", self.call.place) as call:
                call.pause_seconds = PAUSE_SECONDS
                self.post(call)
                rows = call.wait()
                if _are_alike(rows, _RUNS) and _are_alike(rows, _PLACE) and rows[0, _PLACE]:
                    self.plan.reduce(comm, call, self.plan.params, *weights(rows[:, _COUNT].tolist()))
                    self._is_done = True
        except BaseException as e:
            self._failure = e

    def arrive(self) -> bool:
        self._courier.wait()
        if self._failure is not None:
            raise self._failure
        return self._is_done


def _are_alike(rows: Row, column: int) -> bool:
    return bool((rows[:, column] == rows[0, column]).all())
