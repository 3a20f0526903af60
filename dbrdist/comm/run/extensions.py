"""Trainer extensions that need all ranks."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.data.evaluator import GenericMultiNodeEvaluator as GenericMultiNodeEvaluator
from dbrdist.comm.data.evaluator import create_multi_node_evaluator as create_multi_node_evaluator
from dbrdist.comm.protocol.agree import on_root
from dbrdist.comm.protocol.arguments import attempt
from dbrdist.comm.protocol.observations import Observations
from dbrdist.comm.protocol.shares import check_shares
from dbrdist.comm.run.checkpoints import create_multi_node_checkpointer as create_multi_node_checkpointer
from dbrdist.comm.run.checkpoints import multi_node_snapshot as multi_node_snapshot
from dbrdist.comm.run.snapshots import AllreducePersistent as AllreducePersistent
from dbrdist.core.array.types import Array
from dbrdist.core.files.serializer import AbstractSerializer, is_about
from dbrdist.core.model.reporter import as_number, is_number
from dbrdist.core.names.missing_names import explained as _explained
from dbrdist.errors import NonFiniteLossError, StopRequested
from dbrdist.training.extension import PRIORITY_EDITOR, Extension
from dbrdist.training.extensions.observe import FailOnNonNumber, is_loss
from dbrdist.training.triggers import EarlyStoppingTrigger, get_trigger

if TYPE_CHECKING:
    from dbrdist.core.model.reporter import Reported
    from dbrdist.datasets.loading.serial import SerialIterator
    from dbrdist.training.trainer import Trainer

_SECONDS = "elapsed seconds of rank 0"  # sent with the observed values and taken out again


class StepAgreement(Extension):
    """One exchange of a few numbers per step, after which all ranks know the same.

    Observed values become their means over the ranks, weighted by samples. A loss that is not finite on any rank
    raises NonFiniteLossError on all. It comes before all other extensions: nothing is evaluated, logged or saved
    after a step that went wrong, and triggers that look at observed values fire on all ranks alike. Before the first
    step, ranks whose iterators do not divide the same batches raise CommunicatorError together.

    With virtual workers observed values are the same on all ranks already, and are only looked at.

    Args:
        comm: the ranks.
        iterator: the training iterator, whose ``num_read`` says how many examples this rank had in the step.
        shares_time: let the ranks agree on the elapsed time too (:meth:`elapsed_time`).
    """

    trigger = (1, "iteration")
    priority = 1000

    def __init__(self, comm: CommunicatorBase, iterator: SerialIterator, shares_time: bool = False) -> None:
        self._comm = comm
        self._observations = Observations(comm)
        self._tells_time = shares_time and comm.rank == 0
        self._iterator = iterator
        self._is_done = getattr(iterator, "virtual_workers", None) is not None
        self._is_alone = comm.size == 1 and not self._is_done and not shares_time  # nothing to exchange
        self._shares_time = shares_time
        self._failure = FailOnNonNumber()
        self._seconds = 0.0

    def initialize(self, trainer: Trainer) -> None:
        """Compare the iterators of the ranks."""
        check_shares(self._comm, self._iterator)

    def __call__(self, trainer: Trainer) -> None:
        observation = trainer.observation
        if self._is_alone and self._iterator.num_read and _become_numbers(observation):
            return
        numbers: dict[str, float] = {}
        is_finite = True  # every loss
        for key, value in observation.items():
            if is_number(value):
                numbers[key] = number = as_number(value)
                if not isfinite(number) and is_loss(key):
                    is_finite = False
            elif is_loss(key):
                is_finite = False
        if is_finite and self._is_alone:
            return
        if self._is_done:
            numbers = {}
        if self._tells_time:
            numbers[_SECONDS] = trainer.elapsed_time
        complaint = None if is_finite else self._failure.complaint(trainer)
        error = NonFiniteLossError(complaint) if complaint else None
        if self._is_done and not self._shares_time:
            if error is not None:
                raise error
            return
        means = self._observations.average(numbers, self._iterator.num_read, error)
        self._seconds = means.pop(_SECONDS, self._seconds)
        observation.update(means)

    def elapsed_time(self, trainer: Trainer) -> float:
        """Rank 0's elapsed seconds after the step, the same on all ranks: the clock of a shared TimeTrigger.

        A step in which rank 0 had no example does not advance it.
        """
        return self._seconds


def _become_numbers(observation: dict[str, Reported]) -> bool:
    """Make floats of the values that are numbers, in place; False where a loss is none that is finite."""
    for key, value in observation.items():
        if type(value) is np.ndarray and not value.ndim and value.dtype.kind == "f":
            observation[key] = value = float(value)
        elif type(value) is not float:
            if not is_number(value):
                if is_loss(key):
                    return False
                continue
            observation[key] = value = as_number(value)
        if not isfinite(value) and is_loss(key):
            return False
    return True


class StopOnRequest(Extension):
    """At SIGTERM or SIGUSR1 on any rank, all ranks save after the same step, and the run ends with StopRequested.

    SIGHUP (the terminal was closed) and SIGXCPU (the limit of processor time is over) count too, unless the program
    handles or ignores them (`nohup`), and under dbrdist-launch SIGINT: Ctrl-C reaches the ranks through it.

    Schedulers send these signals some time before they end a job. Launchers may deliver them to one rank or to all,
    and never at the same moment, so the ranks tell each other: in the header of each step of a multi-node optimizer
    (a request that comes after it was shown waits for the next step), and without one in an exchange of their own.

    Args:
        comm: the ranks.
        save: called with the trainer on every rank, before StopRequested is raised. None saves nothing.

    A program ends with ``sys.exit(75)`` on StopRequested, to say "saved, start me again", or with 130 if its ``signal``
    is SIGINT: somebody wants it to end.
    """

    trigger = (1, "iteration")
    priority = -1000  # after the step's own snapshot and reports

    def __init__(self, comm: CommunicatorBase, save: Callable[[Trainer], object] | None = None) -> None:
        self._comm = comm
        self._is_alone = comm.size == 1
        self._save = save
        self._received = 0
        self._earlier: dict[int, Any] = {}

    def initialize(self, trainer: Trainer) -> None:
        """Take the signals; where ranks are threads, only the program itself can (:meth:`request`)."""
        if threading.current_thread() is threading.main_thread():
            # dbrdist-launch passes a Ctrl-C on as what it is, once, and itself sees to a second one.
            interrupt = (signal.SIGINT,) if os.environ.get("DBRDIST_LAUNCH") else ()
            deadly = [one for one in (signal.SIGHUP, signal.SIGXCPU) if signal.getsignal(one) is signal.SIG_DFL]
            for number in (signal.SIGTERM, signal.SIGUSR1, *deadly, *interrupt):
                before = signal.signal(number, lambda number, frame: self.request(number))
                self._earlier.setdefault(number, before)  # a run takes the signals before its trainer does

    def request(self, number: int = signal.SIGTERM) -> None:
        """Ask all ranks to stop after the step that they are in, or the next."""
        self._received = self._comm.stop.request = number

    def __call__(self, trainer: Trainer) -> None:
        if self._is_alone and not self._received:
            return
        numbers = self._numbers()
        if not numbers.any():
            return
        if self._save is not None:
            self._save(trainer)
        rank = int((numbers != 0).argmax())
        number = int(numbers[rank])
        text = f"{signal.Signals(number).name} arrived on rank {rank}; all ranks stopped after step "
        raise StopRequested(
            f"{text}{trainer.updater.iteration}" + (" and saved" if self._save is not None else ""), number
        )

    def _numbers(self) -> Array:
        """The signal that each rank has, 0 for none: from the header of the step, or asked now where there was none."""
        answers, self._comm.stop.answers = self._comm.stop.answers, None
        if answers is not None and self._comm.size > 1:
            return answers
        return self._comm.gate.allgather_rows(np.array([self._received], np.int64))[:, 0]

    def finalize(self) -> None:
        """Give the signals back."""
        while self._earlier:
            signal.signal(*self._earlier.popitem())


class ObservationAggregator(Extension):
    """Makes one observed value of all ranks' values, on all ranks.

    It collects what each rank observes as ``original_key``; when ``comm_trigger`` fires the ranks exchange that.

    Args:
        comm: the ranks.
        original_key: what is collected.
        aggregated_key: what the result is observed as; None is ``original_key``.
        comm_trigger: when ranks communicate; it must fire on all of them alike.
        aggregator: called on rank 0 with a list of values for each rank. None is the mean of all values.

    A value that a rank did not observe is not in its list. Without any the result is not observed. An error of the
    aggregator is raised on every rank.
    """

    trigger = (1, "iteration")
    priority = PRIORITY_EDITOR

    def __init__(
        self,
        comm: CommunicatorBase,
        original_key: str,
        aggregated_key: str | None = None,
        *,
        comm_trigger: Any = (1, "iteration"),
        aggregator: Callable[[list[list[float]]], float] | None = None,
    ) -> None:
        self._comm = comm
        self._original_key = original_key
        self._aggregated_key = original_key if aggregated_key is None else aggregated_key
        self._comm_trigger = get_trigger(comm_trigger)
        self._aggregator = _mean_of_all if aggregator is None else aggregator
        self._collected: list[float] = []
        self._error: Exception | None = None  # of this rank, which all ranks raise together

    def __call__(self, trainer: Trainer) -> None:
        observation = trainer.observation
        if self._original_key in observation:
            value, error = attempt(as_number, observation[self._original_key])
            self._collected += [] if value is None else [value]
            self._error = self._error or error
        if not self._comm_trigger(trainer):
            return
        error, self._error = self._error, None
        mine = self._collected if error is None else f"{type(error).__name__}: {error}"
        everyone = self._comm.gather_obj((self._original_key, self._aggregated_key, mine))
        self._collected = []
        result = on_root(self._comm, lambda: self._aggregated(everyone or []))
        if result is not None:
            observation[self._aggregated_key] = result

    def _aggregated(self, everyone: list[tuple[str, str, list[float]]]) -> float | list[list[float]] | None:
        """What the aggregator makes of all ranks' values, None where there are none."""
        for rank, (*keys, _) in enumerate(everyone):
            if keys != [self._original_key, self._aggregated_key]:
                raise ValueError(
                    "ObservationAggregator expected the same keys on every rank, got "
                    f"{self._original_key!r} as {self._aggregated_key!r} on rank 0, {keys[0]!r} as {keys[1]!r} on "
                    f"rank {rank}"
                )
        values = [theirs for *_, theirs in everyone]
        for rank, theirs in enumerate(values):
            if isinstance(theirs, str):
                raise TypeError(
                    f"ObservationAggregator expected a number as {self._original_key!r}, got another value on rank "
                    f"{rank}: {theirs}"
                )
        return self._aggregator(values) if any(values) else None

    def serialize(self, serializer: AbstractSerializer) -> None:
        if is_about(serializer["values"], self._original_key):
            mine = None if serializer.is_loading else np.array(self._collected, np.float64)
            saved = serializer("collected", mine)
            self._collected = [] if saved is None else np.asarray(saved).tolist()
        if hasattr(self._comm_trigger, "serialize"):
            self._comm_trigger.serialize(serializer["comm_trigger"])


def _mean_of_all(values: list[list[float]]) -> float:
    return float(np.mean([value for theirs in values for value in theirs]))


class MultiNodeEarlyStoppingTrigger:
    """A stop trigger, the same on all ranks: fires when the ranks' mean of ``monitor`` no longer improves.

    The mean is observed as ``monitor + suffix``; the other arguments are those of
    :class:`dbrdist.training.triggers.EarlyStoppingTrigger`.
    """

    def __init__(
        self,
        comm: CommunicatorBase,
        *,
        check_trigger: Any = (1, "epoch"),
        monitor: str = "main/loss",
        patience: int | None = None,
        mode: str = "auto",
        verbose: bool = False,
        max_trigger: Any = (100, "epoch"),
        suffix: str = "_aggregated",
        **kwargs: Any,
    ) -> None:
        aggregated = monitor + suffix
        own_trigger = copy.deepcopy(check_trigger)  # a trigger keeps count of its calls
        self._aggregator = ObservationAggregator(comm, monitor, aggregated, comm_trigger=own_trigger)
        is_speaker = verbose and comm.rank == 0
        self._actual = EarlyStoppingTrigger(
            check_trigger, aggregated, patience, mode, is_speaker, max_trigger, **kwargs
        )

    def __call__(self, trainer: Trainer) -> bool:
        self._aggregator(trainer)
        return self._actual(trainer)

    def get_training_length(self) -> tuple[float, str]:
        """The longest run: that of ``max_trigger``."""
        return self._actual.get_training_length()

    def serialize(self, serializer: AbstractSerializer) -> None:
        self._aggregator.serialize(serializer["aggregator"])
        self._actual.serialize(serializer["actual"])


__getattr__ = _explained(__name__, "dbrdist.comm.extensions")
