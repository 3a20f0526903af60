"""Keys of observations that somebody asks for and nobody reports."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dbrdist.core.usage.mistakes import warn
from dbrdist.training.extension import what_is_called

if TYPE_CHECKING:
    from dbrdist.training.trainer import Trainer


def never_reported(key: str, known: Iterable[str]) -> str:
    """What is said of a key that nobody reports, and which ones there are."""
    known = sorted(known)
    if key in known:
        return f"what was reported as {key!r} has no mean so far; report a number"
    close = difflib.get_close_matches(key, known, 1, 0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"nobody has reported {key!r} so far; reported are {', '.join(known) or 'no values'}{hint}"


def is_due(key: str, reported: Iterable[str], trainer: Trainer) -> bool:
    """Whether an extension that reports under the first part of ``key``, such as an evaluator, or one of the program,
    has not run yet.
    """
    first = key.partition("/")[0]
    if any(other.startswith(first + "/") for other in reported):
        return False
    if not _entries(trainer):  # another kind of trainer
        try:
            trainer.get_extension(first)
        except (AttributeError, ValueError):
            return False
        return True
    return any(
        _is_to_come(entry, entry.name == first) or (entry.name == first and entry.priority > _last_reader(trainer))
        for entry in _entries(trainer)
        if entry.name == first or _is_own(what_is_called(entry.extension))
    )


def _entries(trainer: Trainer) -> list[Any]:
    return list(getattr(trainer, "_extensions", {}).values())


def _last_reader(trainer: Trainer) -> float:
    """The lowest priority of those that read what the others reported; one that is called before may still report."""
    return min((entry.priority for entry in _entries(trainer) if entry.name.startswith("LogReport")), default=math.inf)


def _hint_of_order(trainer: Trainer) -> str:
    """What to do if an extension of the program reports, but only after a LogReport has been called."""
    reader = _last_reader(trainer)
    own = [entry.priority for entry in _entries(trainer) if _is_own(what_is_called(entry.extension))]
    if reader == math.inf or not own or min(own) > reader:
        return ""
    return "; an extension that reports comes before LogReport by extend(..., priority=training.PRIORITY_WRITER)"


def _is_own(extension: Any) -> bool:
    where = extension if hasattr(extension, "__qualname__") else type(extension)
    return not str(getattr(where, "__module__", "")).startswith("dbrdist.")


def _is_to_come(entry: Any, is_named: bool) -> bool:
    """Whether an extension was not called yet in this run, but will be: of an unknown trigger only a named one is."""
    is_known = getattr(entry.trigger, "unit", None) in ("epoch", "iteration")
    return not entry.was_called and (is_named or is_known)


def warn_of_keys(where: str, keys: Iterable[str], reported: Iterable[str], trainer: Trainer) -> bool:
    """Warn of keys that are not among those ``reported``; False if some are still due, so that it is asked again."""
    reported, are_all_known = set(reported), True
    for key in keys:
        if key in reported:
            continue
        if is_due(key, reported, trainer):
            are_all_known = False
        else:
            warn(f"{where}: {never_reported(key, reported)}{_hint_of_order(trainer)}")
    return are_all_known
