"""Ctrl-Z: the program of every rank is stopped, then the launcher, and both go on together at its SIGCONT."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection

from ... import limits, linux, messages
from ...loop import Loop
from ..judgement.ranks import Rank


def suspend(ranks: Collection[Rank], loop: Loop, say: Callable[[str], None]) -> None:
    """Stop the ranks' programs and this process; returns once somebody continues it."""
    if _is_without_shell():
        say("cannot be suspended: there is no shell at this terminal that could continue it")
        return
    say("suspended with all its ranks; `fg` or SIGCONT continues them")
    _tell(ranks, signal.SIGTSTP)
    try:
        until = time.monotonic() + limits.ANSWER_SECONDS
        while any(rank.running and rank.channel.unsent for rank in ranks) and time.monotonic() < until:
            loop.turn(until - time.monotonic())
        time.sleep(limits.SEARCH_SECONDS)  # so that the output's threads have written what the shell's prompt follows
        os.kill(os.getpid(), signal.SIGSTOP)
    finally:  # also where a message of this turn is faulty: the job continues then
        _tell(ranks, signal.SIGCONT)


def _tell(ranks: Collection[Rank], number: int) -> None:
    for rank in ranks:
        if rank.running:
            rank.channel.send(messages.Signal(number))


def _is_without_shell() -> bool:
    """Whether a terminal's only job is this one, as in `ssh -t host dbrdist-launch ...`: nobody could type `fg`."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False  # without a terminal the signal was sent by somebody who can send SIGCONT too
    try:
        is_in_foreground = os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
    return is_in_foreground and not _has_shell(os.getpid())


def _has_shell(pid: int) -> bool:
    """Whether the first process above this one's group belongs to the same session, as a shell with jobs does."""
    own = linux.stat(pid)
    above = own
    while own and above and above[2] == own[2]:
        above = linux.stat(int(above[1]))
    return bool(own and above and above[3] == own[3])
