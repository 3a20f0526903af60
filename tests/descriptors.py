"""Which files this process has open, for tests that leave none behind."""

from __future__ import annotations

import contextlib
import os


def open_files() -> set[tuple[int, str]]:
    """Each descriptor with the name of its file.

    Compare what is there afterwards and was not before, never their number: what earlier tests left may be closed in
    between, when its garbage is collected.
    """
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found
