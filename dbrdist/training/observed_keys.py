"""Keys of observations that somebody asks for and nobody reports."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dbrdist.core.usage.mistakes import warn

if TYPE_CHECKING:
    from dbrdist.training.trainer import Trainer


def never_reported(key: str, known: Iterable[str]) -> str:
    """What is said of a key that nobody reports, and which ones there are."""
    known = sorted(known)
    close = difflib.get_close_matches(key, known, 1, 0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"nobody has reported {key!r} so far; reported are {', '.join(known) or 'no values'}{hint}"


def is_due(key: str, reported: Iterable[str], trainer: Trainer) -> bool:
    """Whether an extension that reports under the first part of ``key``, such as an evaluator, has not run yet."""
    first = key.partition("/")[0]
    if any(other.startswith(first + "/") for other in reported):
        return False
    try:
        trainer.get_extension(first)
    except (AttributeError, ValueError):
        return False
    return True


def warn_of_keys(where: str, keys: Iterable[str], reported: Iterable[str], trainer: Trainer) -> bool:
    """Warn of keys that are not among those ``reported``; False if some are still due, so that it is asked again."""
    reported, are_all_known = set(reported), True
    for key in keys:
        if key in reported:
            continue
        if is_due(key, reported, trainer):
            are_all_known = False
        else:
            warn(f"{where}: {never_reported(key, reported)}")
    return are_all_known
