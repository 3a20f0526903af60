"""Ends of a run that every rank comes to alike, said in one sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dbrdist.cli.output.words import said
from dbrdist.comm.protocol.agree import together
from dbrdist.errors import CommunicatorError, ConfigError, DbrdistError, LoaderError, NonFiniteLossError

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase

WRONG = 2  # the exit code for a configuration, a command line, a file or data that is wrong, and for a full disk
_FAILURES = (CommunicatorError, LoaderError, NonFiniteLossError)  # which nothing that was given explains by itself


class Refused(Exception):
    """The run cannot continue, for a reason that every rank knows: rank 0 says it, all end with `code`."""

    def __init__(self, words: str, code: int = 1):
        super().__init__(words)
        self.code = code


class RefusedHere(Refused):
    """As Refused, for a reason that only this rank knows: it says so itself."""


def code_of(error: BaseException) -> int:
    """The exit code that an error with a sentence deserves: WRONG, or 1 for a failure of the run itself."""
    return 1 if isinstance(error, _FAILURES) else WRONG


def told(error: Exception, words: str | None = None) -> str:
    """What to say of an error, or `words`: after the program's name, where no position begins the sentence."""
    words = said(error) if words is None else words
    return words if isinstance(error, ConfigError) or code_of(error) != WRONG else f"dbrdist-train: {words}"


def refusal(error: Exception) -> Refused | None:
    """What a user can mend, as a sentence and an exit code; None for what needs its traceback."""
    if isinstance(error, DbrdistError | OSError | ValueError):
        return Refused(told(error), code_of(error))
    return None


@contextlib.contextmanager
def alike(comm: CommunicatorBase) -> Iterator[None]:
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
