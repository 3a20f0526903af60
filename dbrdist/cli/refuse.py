"""Ends of a run that every rank comes to alike, said in one sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from dbrdist.comm.agree import together
from dbrdist.errors import ConfigError, DbrdistError

WRONG = 2  # the exit code for a configuration, a command line or data that is wrong


class Refused(Exception):
    """The run cannot go on, for a reason that every rank knows: rank 0 says it, all end with `code`."""

    def __init__(self, words: str, code: int = 1):
        super().__init__(words)
        self.code = code


def refusal(error: Exception) -> Refused | None:
    """What a user can mend, as a sentence and an exit code; None for what needs its traceback."""
    if isinstance(error, DbrdistError | OSError | ValueError):
        return Refused(str(error), WRONG if isinstance(error, ConfigError) else 1)
    return None


@contextlib.contextmanager
def alike(comm: Any) -> Iterator[None]:
    """What fails inside the block on any rank ends all in the same way; the block does not communicate.

    What a user can mend is said in a sentence; anything else with the traceback of the lowest rank that has one.
    """
    own: Exception | None = None
    try:
        with together(comm):
            try:
                yield
            except Exception as error:
                own = error
                raise
    except Exception as error:
        refused = refusal(error)
        if refused is not None:
            raise refused from own
        failed = comm.allgather_obj(own is not None)
        if own is not None and failed.index(True) == comm.rank:
            raise own from own.__cause__
        raise Refused("") from own
