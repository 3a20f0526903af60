"""OpenCV, where it is installed, and whether a library is."""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading

from dbrdist.core.array.types import Module


@functools.cache
def _loaded() -> Module:
    users_own = "cv2" in sys.modules
    import cv2

    if not users_own:
        cv2.setNumThreads(1)  # images are spread over workers; threads inside one image would only get in their way
    return cv2


_loading = threading.Lock()


def cv2() -> Module:
    """The library, loaded once."""
    with _loading:  # OpenCV imports itself twice, and not for several threads
        return _loaded()


@functools.cache
def cv2_or_none() -> Module | None:
    """The library; None where it is not installed."""
    return cv2() if is_installed("cv2") else None


def is_installed(module: str) -> bool:
    """Whether a module is there to be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # another thread is importing it
        return True
