"""Ctrl-Z: the program of every rank is stopped, then the launcher, and both go on together at its SIGCONT."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection

from .. import limits, messages
from ..loop import Loop
from .ranks import Rank


def suspend(ranks: Collection[Rank], loop: Loop, say: Callable[[str], None]) -> None:
    """Stop the ranks' programs and this process; returns once somebody continues it."""
    say("suspended with all its ranks; `fg` or SIGCONT continues them")
    _tell(ranks, signal.SIGTSTP)
    until = time.monotonic() + limits.ANSWER_SECONDS
    while any(rank.running and rank.channel.unsent for rank in ranks) and time.monotonic() < until:
        loop.turn(until - time.monotonic())
    time.sleep(limits.SEARCH_SECONDS)  # so that the output's threads have written what the shell's prompt follows
    os.kill(os.getpid(), signal.SIGSTOP)
    _tell(ranks, signal.SIGCONT)


def _tell(ranks: Collection[Rank], number: int) -> None:
    for rank in ranks:
        if rank.running:
            rank.channel.send(messages.Signal(number))
