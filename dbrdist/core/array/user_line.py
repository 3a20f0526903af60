"""Warnings that point to the user's program, however deep inside the package their reason was found."""

from __future__ import annotations

import sys
import threading
import warnings
from types import FrameType
from typing import Any

_given: dict[Any, Any] = {}  # the warnings so far, and under which filters
_MAX_GIVEN = 1000
_NOT_THE_USERS = ("dbrdist", "contextlib", "functools", "importlib")


def warn_user(words: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the program that led here: once for each line, whatever the filters of warnings say."""
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    filters = warnings.filters
    now = filters, filters[0] if filters else None  # within catch_warnings it is another list
    place = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    key = words, category, place, threading.current_thread()  # others may be ranks; idents are used again
    before = _given.get(key)
    if before is not None and before[0] is now[0] and before[1] is now[1]:
        return
    if len(_given) >= _MAX_GIVEN:
        _given.clear()
    _given[key] = now
    warnings.warn(words, category, stacklevel=level)
