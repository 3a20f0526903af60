"""How ranks end: what an exit means while a stop is asked for, and the code of a job without a failure."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

from ... import codes, messages
from .ranks import Rank


def is_answer(rank: Rank, end: messages.Exit, asked: int, passed_on: int) -> bool:
    """Whether a rank ended for the request to stop: by the signal passed on, or by an exit code that stands for it."""
    if end.signal or end.code == codes.from_signal(passed_on):
        return True
    # A Python that is still starting ends with 1 at an interrupt.
    return asked == signal.SIGINT and b"KeyboardInterrupt" in rank.tails["err"][-200:]


def common_code(ranks: Iterable[Rank], size: int, asked: int) -> int:
    """0, 75, or the signal that asked for the end and that a rank did not survive."""
    ends = [rank.exit for rank in ranks if rank.exit is not None]
    good = (codes.DONE, codes.PREEMPTED)
    if len(ends) < size or any(end.signal or (asked and end.code not in good) for end in ends):
        return codes.from_signal(asked or signal.SIGTERM)
    return max(end.code for end in ends)


def working_folder() -> str | None:
    """Where the ranks are to run; None where it has been deleted: then they stay where mpiexec starts them."""
    try:
        return os.getcwd()
    except OSError:
        return None
