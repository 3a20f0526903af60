"""The terminal that the launcher may read from: mpiexec, in a session of its own, cannot."""

from __future__ import annotations

import fcntl
import os
import struct
import termios

from ... import linux

_TIOCGDEV = 0x80045432  # the number of a terminal, as in /proc/PID/stat

_MAKER = os.makedev(5, 2)  # /dev/ptmx


def is_terminal() -> bool:
    """Whether stdin is one. The end of the program that made it is none: a read there stops nobody, and what opens it
    once more makes another terminal.
    """
    return os.isatty(0) and os.fstat(0).st_rdev != _MAKER


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


def is_free() -> bool:
    """Whether it is no session's terminal: a read stops nobody, and takes nothing from a shell that reads there."""
    try:
        os.tcgetpgrp(0)
        return False  # it is ours
    except OSError:
        pass
    try:
        (number,) = struct.unpack("I", fcntl.ioctl(0, _TIOCGDEV, bytes(4)))
    except OSError:
        return False  # it has gone
    every = (linux.stat(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return all(fields is None or fields[4] != str(number) for fields in every)
