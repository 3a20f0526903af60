"""Processes that tests start to look at, and to wait for."""

import os
import time

GONE = 1 << 22  # above the greatest process id


def until(condition, seconds=60.0):
    """Wait for what another process is about to do."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def in_child(act):
    """What `act` returns in a process of its own, as an exit code."""
    pid = os.fork()
    if not pid:
        code = 99
        try:
            code = act()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
