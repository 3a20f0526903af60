"""How far the run is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from dbrdist.core.files import standard_streams
from dbrdist.core.names.limits import count, count_or_zero, threshold
from dbrdist.training.extension import Extension

if TYPE_CHECKING:
    from dbrdist.training.trainer import Trainer

_WORDS, _SHORTEST_BAR = 72, 10  # characters


def duration(seconds: float) -> str:
    """Seconds as hours, minutes and seconds: 1:02:03, or 0:42."""
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class ProgressBar(Extension):
    """Shows epochs, steps, speed and the estimated time left.

    On a terminal, where rich is installed, it is a bar; otherwise one plain line each time. Only one process can own a
    terminal: several ranks use `live=False` on rank 0.

    Args:
        training_length: a pair `(length, unit)`; None is that of the trainer's stop trigger.
        update_interval: steps between two updates.
        bar_length: characters of the bar.
        out: the stream; None is the standard output.
        live: True for a bar, False for plain lines; None decides by `out`.
        min_seconds: the least time between two updates.
        details: `details(trainer)` returns words to add.

    Raises:
        ValueError: `update_interval` is less than 1.

    Example:
        >>> bar = extensions.ProgressBar(update_interval=10, live=False)
    """

    def __init__(
        self,
        training_length: tuple[float, str] | None = None,
        update_interval: Annotated[int, count, "Steps between two updates."] = 100,
        bar_length: Annotated[int, count_or_zero, "Characters of the bar."] = 50,
        out: Any = None,
        live: bool | None = None,
        min_seconds: Annotated[float, threshold, "The least time between two updates."] = 0.0,
        details: Callable[[Any], str] | None = None,
    ):
        self._training_length = training_length
        self._update_interval = update_interval
        self._bar_length = bar_length
        self._out = out
        self._live = live
        self._min_seconds = min_seconds
        self._details = details
        self._bar: Any = None
        self._task: Any = None
        self._width: int | None = None  # of the words on a terminal

    def initialize(self, trainer: Trainer) -> None:
        if self._training_length is None and hasattr(trainer.stop_trigger, "get_training_length"):
            self._training_length = trainer.stop_trigger.get_training_length()
        self._first_iteration = trainer.updater.iteration
        self._first_epoch = trainer.updater.epoch_detail
        self._first_seconds = self._last_seconds = time.monotonic()
        out = standard_streams.stdout if self._out is None else self._out
        if self._live if self._live is not None else out.isatty():
            self._start_bar(out)

    def _start_bar(self, out: Any) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn
        except ImportError:  # the plain lines say the same
            return
        below = out.below_bars() if isinstance(out, standard_streams.StandardStream) else out
        console = Console(file=below, markup=False, emoji=False, highlight=False)  # words above it stay as they are
        # The words come first; the bar takes what is left, or nothing on a narrow terminal.
        room = min(self._bar_length, console.width - _WORDS)
        bar = (BarColumn(room),) if room >= _SHORTEST_BAR else ()
        self._width = console.width - (room + 1 if bar else 0)
        # What is printed appears above the bar where both go to one terminal; a file gets its words itself.
        above = {f"redirect_{name}": standard_streams.ends_at(name, out) for name in ("stdout", "stderr")}
        self._bar = Progress(*bar, TextColumn("{task.description}", markup=False), console=console, **above)
        self._task = self._bar.add_task("", total=self._total())
        self._bar.start()

    def __call__(self, trainer: Trainer) -> None:
        iteration = trainer.updater.iteration
        if iteration % self._update_interval or time.monotonic() - self._last_seconds < self._min_seconds:
            return
        self._last_seconds = time.monotonic()
        done = trainer.updater.epoch_detail if self._unit() == "epoch" else iteration
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=self._words(trainer))
            return
        out = standard_streams.stdout if self._out is None else self._out
        out.write(self._words(trainer) + "\n")
        out.flush()

    def _words(self, trainer: Trainer) -> str:
        updater = trainer.updater
        seconds = max(time.monotonic() - self._first_seconds, 1e-9)
        speed = (updater.iteration - self._first_iteration) / seconds
        epochs = f"epoch {updater.epoch_detail:.2f}{self._of('epoch')}"
        words = {"epoch": epochs, "step": f"step {updater.iteration}{self._of('iteration')}"}
        words["speed"] = f"{speed:.3g} steps/s"
        if self._details is not None:
            words["details"] = self._details(trainer)
        left = self._seconds_left(trainer, seconds)
        if left is not None:
            words["left"] = f"{duration(left)} left"
        for name in ("speed", "step", "details", "epoch"):  # what a narrow terminal does without, the time left last
            if self._width is not None and len(", ".join(words.values())) > self._width and len(words) > 1:
                words.pop(name, None)
        return ", ".join(words.values())

    def _seconds_left(self, trainer: Trainer, seconds: float) -> float | None:
        """By the mean speed since the start, evaluations and snapshots included."""
        if self._training_length is None:
            return None
        total, unit = self._training_length
        now, first = (
            (trainer.updater.epoch_detail, self._first_epoch)
            if unit == "epoch"
            else (trainer.updater.iteration, self._first_iteration)
        )
        return (total - now) * seconds / (now - first) if now > first else None

    def _of(self, unit: str) -> str:
        return f" of {self._total():g}" if self._unit() == unit else ""

    def _unit(self) -> str:
        return self._training_length[1] if self._training_length else ""

    def _total(self) -> float | None:
        return self._training_length[0] if self._training_length else None

    def finalize(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
