"""Warnings that point to the user's program, however deep inside the package their reason was found."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_NOT_THE_USERS = ("dbrdist", "contextlib", "functools", "importlib")


def warn_user(words: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the program that led here; Python shows a warning once for each line."""
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(words, category, stacklevel=level)
