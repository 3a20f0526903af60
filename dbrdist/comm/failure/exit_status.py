"""Notice a ``sys.exit(n)`` or ``raise SystemExit(n)`` that nobody catches.

Python calls no hook for it: ``sys.excepthook`` never sees SystemExit, and when ``atexit`` functions run, the status is
gone. Wrapping ``sys.exit`` would miss ``raise SystemExit`` and fire in programs that catch their own exit. But there is
one thing the interpreter does only with an uncaught SystemExit: it reads its attribute ``code`` from C, with no Python
frame beneath. So this replaces the attribute by a property that looks for that.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any, NoReturn

_watcher: Callable[[int | str | None], int | str | None] | None = None


def watch(function: Callable[[int | str | None], int | str | None]) -> bool:
    """Call ``function(code)`` when the interpreter is about to end for an uncaught SystemExit.

    What the function returns takes the place of the code. Returns False where this interpreter does not allow it
    (anything but CPython).
    """
    global _watcher
    if _watcher is None and not _replace_attribute():
        return False
    _watcher = function
    return True


def _replace_attribute() -> bool:
    if sys.implementation.name != "cpython":
        return False
    attributes = gc.get_referents(SystemExit.__dict__)[0]  # the dictionary behind the read-only view
    original = attributes.get("code")
    if type(original).__name__ != "member_descriptor":
        return False

    def read(self: SystemExit) -> Any:
        code = original.__get__(self, SystemExit)
        try:
            sys._getframe(1)
        except ValueError:  # read by the interpreter itself
            if _watcher is not None:
                return _watcher(code)
        return code

    attributes["code"] = property(read, original.__set__, doc="exception code")
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))
    if sys.version_info < (3, 12):
        sys.exit = _exit  # Python 3.11 raises from C without an instance, so nobody would read its code
    return True


def _exit(status: object = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status)."""
    if isinstance(status, SystemExit):
        raise status
    if isinstance(status, tuple):  # as the original: the arguments of the exception
        raise SystemExit(*status)
    raise SystemExit() if status is None else SystemExit(status)
