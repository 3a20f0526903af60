"""The terminal that the launcher may read from: mpiexec, in a session of its own, cannot."""

from __future__ import annotations

import os
import termios


def echoes() -> bool:
    """Whether it shows what is typed."""
    try:
        return bool(termios.tcgetattr(0)[3] & termios.ECHO)
    except termios.error:
        return False


def in_foreground() -> bool:
    """Whether the launcher may read: in the background it would be stopped."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
