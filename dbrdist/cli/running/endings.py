"""How a run ends that does not reach its end: exit codes, and the error that each reason deserves."""

from __future__ import annotations

import errno

from dbrdist.cli.output.folder import RunFolder
from dbrdist.cli.output.refuse import Refused, RefusedHere, code_of, told
from dbrdist.cli.output.words import said
from dbrdist.core.array.gpu.device_memory import is_out_of_memory
from dbrdist.errors import CheckpointError, CommunicatorError, DbrdistError, NonFiniteLossError

STOPPED = 75  # EX_TEMPFAIL: saved, to be started again with --resume
INTERRUPTED = 130  # by Ctrl-C: saved too, but nobody is to start it again by itself

# what every rank raises: the ranks agree on it first
_AGREED = (NonFiniteLossError, CheckpointError, CommunicatorError)
# what a disk says that takes no more
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def as_ending(error: BaseException, folder: RunFolder, writes_behind: bool) -> BaseException:
    """The exception that ends the process as its reason deserves.

    ``writes_behind``: this rank writes snapshots while it trains.
    """
    if isinstance(error, CheckpointError) and writes_behind:
        return RefusedHere(reason_of(error), code_of(error))  # at the end of the run only this rank knows
    if isinstance(error, _AGREED):
        return Refused(told(error, reason_of(error)), code_of(error))
    if isinstance(error, DbrdistError):  # such as one of this rank's data: a traceback adds nothing to its message
        return RefusedHere(reason_of(error), code_of(error))
    if isinstance(error, OSError) and error.errno in _FULL:
        return RefusedHere(f"{folder.path}: {said(error)}; the snapshots in it are unharmed", code_of(error))
    if isinstance(error, OSError) and folder.has(error.filename):  # a pipe or a folder instead of a file, say
        return RefusedHere(said(error), code_of(error))
    if is_out_of_memory(error):
        return RefusedHere(" ".join([reason_of(error), *getattr(error, "__notes__", ())]), code_of(error))
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return SystemExit(f"dbrdist-train: {reason_of(error)} before the run was over")
    return error


def reason_of(error: BaseException) -> str:
    """What ended a run, in a line."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted (Ctrl-C)"
    if isinstance(error, SystemExit):
        return f"the program called sys.exit({'' if error.code is None else repr(error.code)})"
    return f"{type(error).__name__}: {said(error) if isinstance(error, Exception) else error}"
