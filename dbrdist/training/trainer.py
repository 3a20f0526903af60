"""The training loop."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.core.array import random
from dbrdist.core.files.serializer import SUBJECT, AbstractSerializer, is_about, loads, saved_entry
from dbrdist.core.model.reporter import Reporter, as_number, is_number
from dbrdist.core.usage.foreign_names import refuse_unknown
from dbrdist.core.usage.mistakes import given_a_class
from dbrdist.training.extension import Extension, as_extension, class_of, subject_of, what_is_called
from dbrdist.training.first_look import FirstSteps, see_triggers
from dbrdist.training.triggers import can_fire, get_trigger, position_if_each_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from dbrdist.training.triggers import TriggerLike
    from dbrdist.training.updater import Updater


@dataclass
class _Entry:
    """An extension with when and in which order it is called."""

    name: str
    extension: Any
    trigger: Any
    priority: int
    before_training: bool
    is_told_when: bool  # by who added it
    was_called: bool = False  # in this run


class Trainer:
    """The training loop: calls the updater until the stop trigger fires, and the extensions after each step.

    Args:
        updater: what makes a step, such as a :class:`StandardUpdater`.
        stop_trigger: a trigger or a pair `(period, unit)` with the unit `"epoch"` or `"iteration"`; None continues
            until
            an exception ends the run.
        out: the folder that extensions write to; it is made when the run starts.
        extensions: extensions to begin with; :meth:`extend` adds more.

    Raises:
        TypeError: `updater` is no updater.

    Example:
        >>> model = L.Classifier(L.Linear(64, 10))
        >>> iterator = iterators.SerialIterator(datasets.get_digits()[0], 32)
        >>> updater = training.StandardUpdater(iterator, optimizers.SGD(0.1).setup(model))
        >>> with dbrdist.utils.tempdir() as folder:
        ...     trainer = training.Trainer(updater, (1, "epoch"), out=folder)
        ...     trainer.extend(extensions.LogReport())
        ...     trainer.run()
        >>> updater.iteration, updater.epoch
        (46, 1)
    """

    def __init__(
        self,
        updater: Updater,
        stop_trigger: Any = None,
        out: str | os.PathLike[str] = "result",
        extensions: Sequence[Any] | None = None,
    ):
        if isinstance(updater, type):
            raise given_a_class("Trainer", updater, "an updater")
        if not hasattr(updater, "get_all_optimizers"):
            raise TypeError(
                f"Trainer: expected an updater, got {type(updater).__name__}; write "
                "Trainer(StandardUpdater(iterator, optimizer), (20, 'epoch'))"
            )
        self.updater = updater
        self.stop_trigger = get_trigger(stop_trigger)
        self.out = os.fspath(out)
        self.observation: dict[str, Any] = {}
        self.reporter = Reporter()
        for name, optimizer in updater.get_all_optimizers().items():
            self.reporter.add_observer(name, optimizer.target)
            self.reporter.add_observers(name, optimizer.target.namedlinks(skipself=True))
        self._extensions: dict[str, _Entry] = {}
        self._started_seconds: float | None = None
        self._earlier_seconds = 0.0  # the time of the runs that this one continues
        self._final_seconds: float | None = None
        updater.connect_trainer(self)
        for extension in extensions or ():
            self.extend(extension)

    def run(self, show_loop_exception_msg: bool = True) -> None:
        """Train. A trainer runs once; to continue, load its snapshot into a new one.

        Args:
            show_loop_exception_msg: print a line about an exception in the loop before it is raised.

        Raises:
            RuntimeError: the trainer has run before.
        """
        if self._started_seconds is not None:
            raise RuntimeError("a Trainer can run only once; load its snapshot into a new one to continue")
        try:
            os.makedirs(self.out, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as e:
            raise type(e)(
                f"Trainer: out: expected a folder, and {os.fspath(self.out)!r} is a file, or below one"
            ) from e
        entries = sorted(self._extensions.values(), key=lambda entry: -entry.priority)
        self._started_seconds = time.monotonic()
        try:
            self._loop(entries)
        except Exception as error:
            self._on_error(entries, error, show_loop_exception_msg)
            raise
        finally:
            self._finalize(entries)

    def _loop(self, entries: Sequence[_Entry]) -> None:
        self._start(entries)
        asked = [
            (e, what_is_called(e.extension), e.trigger, position_if_each_step(e.trigger))
            for e in entries
            if can_fire(e.trigger)
        ]
        first_steps: FirstSteps | None = FirstSteps(self.updater)
        with self.reporter.scope({}):
            while not self.stop_trigger(self):
                self.observation = self.reporter.observation = {}
                updater = self.updater
                updater.update()
                if first_steps is not None:
                    first_steps = first_steps.after_update()
                for entry, call, trigger, position in asked:
                    if position is None:
                        if not trigger(self):
                            continue
                    elif position.iteration == updater.iteration:
                        continue
                    else:
                        position.iteration = updater.iteration
                    entry.was_called = True
                    call(self)
        if first_steps is not None:
            first_steps.end()

    def _finalize(self, entries: Sequence[_Entry]) -> None:
        """Finalize all of them in order, even where one raises."""
        with contextlib.ExitStack() as last_first:
            last_first.callback(self.updater.finalize)
            for entry in reversed(entries):
                last_first.callback(entry.extension.finalize)
            self._final_seconds = self.elapsed_time

    def _start(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            entry.extension.resume(self)
        for entry in entries:
            if not getattr(entry.trigger, "finished", False):
                entry.extension.initialize(self)
        if self.is_before_training:
            see_triggers(self, entries)
            self.observation = {}
            with self.reporter.scope(self.observation):
                for entry in entries:
                    if entry.before_training:
                        entry.extension(self)

    def _on_error(self, entries: Sequence[_Entry], error: Exception, show: bool) -> None:
        if show:  # with the traceback, where the words of the error stand already
            error.add_note(f"in the training loop at iteration {self.updater.iteration}")
        for entry in entries:
            try:
                entry.extension.on_error(self, error, error.__traceback__)
            except Exception as another:  # the others are told, and the first error is the one that is raised
                error.add_note(f"on_error of the extension {entry.name} failed: {type(another).__name__}: {another}")

    @property
    def elapsed_time(self) -> float:
        """Seconds of training, those before a resume included."""
        if self._final_seconds is not None:
            return self._final_seconds
        if self._started_seconds is None:
            raise RuntimeError("the training has not started yet, so there is no elapsed time")
        return time.monotonic() - self._started_seconds + self._earlier_seconds

    @property
    def is_before_training(self) -> bool:
        """True until the first step."""
        return self.updater.iteration == 0  # type: ignore[no-any-return]

    def extend(
        self,
        extension: Callable[[Trainer], object],
        name: str | None = None,
        trigger: TriggerLike = None,
        priority: int | None = None,
        *,
        call_before_training: bool = False,
        **kwargs: Any,
    ) -> None:
        """Add an extension: an Extension or any function of the trainer.

        What is not given is read from the extension.

        Args:
            extension: an Extension, or a function of the trainer.
            name: the name in the trainer; a name that is taken gets a number, as in `LogReport_1`.
            trigger: when it is called: a trigger or a pair `(period, unit)` such as `(1, "epoch")`.
            priority: extensions with a higher one are called first after a step.
            call_before_training: call it once before the first step, too.
            kwargs: none; a name of another library raises a TypeError with a hint.
        """
        refuse_unknown("extend", Trainer.extend, kwargs)
        extension = as_extension(extension)
        if priority is not None and not isinstance(priority, (int, float, np.integer)):
            raise TypeError(f"extend: priority: expected a number, such as extension.PRIORITY_READER, got {priority!r}")
        name = name or extension.name or extension.default_name
        if name == "training":
            raise ValueError("expected another name for an extension: 'training' is the loop itself")
        extension.name = unique = self._unique(name)
        self._extensions[unique] = _Entry(
            unique,
            extension,
            get_trigger(extension.trigger if trigger is None else trigger),
            extension.priority if priority is None else priority,
            call_before_training,
            trigger is not None,
        )

    def _unique(self, name: str) -> str:
        number, unique = 0, name
        while unique in self._extensions:
            number += 1
            unique = f"{name}_{number}"
        return unique

    def get_extension(self, name: str) -> Extension:
        """The extension called ``name``; a ValueError where there is none."""
        if name not in self._extensions:
            raise ValueError(
                f"expected the name of an extension ({', '.join(self._extensions) or 'none'}), got {name!r}"
            )
        return self._extensions[name].extension

    def all_extensions(self) -> list[Extension]:
        """Every extension, in the order in which they were added."""
        return [entry.extension for entry in self._extensions.values()]

    def serialize(self, serializer: AbstractSerializer) -> None:
        """List the state of the whole run for ``serializer``: updater, triggers, extensions, elapsed time."""
        self.updater.serialize(serializer["updater"])
        is_same = is_about(serializer["stop_trigger"]["__class__"], type(self.stop_trigger).__name__)
        if is_same and hasattr(self.stop_trigger, "serialize"):
            self.stop_trigger.serialize(serializer["stop_trigger"])
        for name, entry in self._extensions.items():  # a name may be another extension's at the next start
            name = _saved_name(serializer["extensions"], name, entry.extension)
            place = serializer["extensions"][name]
            if is_about(place["__class__"], subject_of(entry.extension), class_of(entry.extension)):
                entry.extension.serialize(place)
            if hasattr(entry.trigger, "serialize"):
                place = serializer["extension_triggers"][name]
                if is_about(place["__class__"], type(entry.trigger).__name__):
                    entry.trigger.serialize(place)
        fresh = self._started_seconds is None
        if serializer.is_loading and saved_entry(serializer, "random_state") is None:  # a snapshot of Chainer
            self._earlier_seconds = float(serializer("_snapshot_elapsed_time", self._earlier_seconds))
            return
        state = serializer("random_state", np.array(random.get_state(), np.uint64))
        elapsed = serializer("_snapshot_elapsed_time", self._earlier_seconds if fresh else self.elapsed_time)
        # The stop trigger has not seen the last step yet when a snapshot is taken: it asks first after a resume.
        observed = {k: as_number(v) for k, v in self.observation.items() if is_number(v)}
        observed = json.loads(str(serializer("observation", json.dumps(observed))))
        if serializer.is_loading:
            self.observation = observed
            random.set_state(tuple(int(word) for word in state))
            self._earlier_seconds = float(elapsed)


_MOST_NUMBERS = 1000  # of extensions of one name


def _saved_name(places: AbstractSerializer, name: str, extension: Extension) -> str:
    """The name under which an extension was saved: one of several with a subject may have had another's number."""
    if extension.subject is None or not loads(places):
        return name
    base = re.sub(r"_\d+$", "", name)
    for other in (name, base, *(f"{base}_{number}" for number in range(1, _MOST_NUMBERS))):
        saved = saved_entry(places[other]["__class__"], SUBJECT)
        if saved is not None and str(saved) == subject_of(extension):
            return other
        if saved is None and other != name:
            break
    return name  # nothing is about the same, or an earlier version saved
