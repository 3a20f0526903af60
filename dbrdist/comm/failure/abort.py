"""A failure on one rank ends the job; each line of the report begins with the rank.

Under a plain mpiexec, MPICH, Open MPI and Intel MPI all leave the other ranks waiting forever when one raises or calls
``sys.exit``. This room ends the job for

- an exception that nobody catches, in the main thread or another one,
- a ``sys.exit(n)`` or ``raise SystemExit(n)`` with n other than 0 that nobody catches (``exit_status.py``),
- a rank that has left in any other way while another waits for it in a verb (``watch.py``).

``dbrdist-train`` guards its whole main with :func:`guard`. In library use the import of this package does it in a
process that a launcher started as one of several ranks, and so does creating an MPI communicator with several ranks;
but never in a loader's worker, in IPython or at an interactive prompt.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, Protocol

from dbrdist.comm.failure import exit_status, watch
from dbrdist.comm.transport import environment, mpi

if TYPE_CHECKING:
    from types import TracebackType

    from mpi4py.MPI import Comm

INTERRUPTED = 130
_MEETING_SECONDS = 1.0  # ranks that fail alike have this time to say so before the first ends the job

_installed_in: int | None = None  # the process id: a forked child inherits the hooks, but must not use them
_is_within_hook = threading.Event()
_earlier_hook: Callable[..., object] = sys.__excepthook__
_earlier_thread_hook: Callable[..., object] = threading.excepthook


class OverMpi(Protocol):
    """A communicator of ranks that are MPI processes."""

    @property
    def size(self) -> int: ...

    @property
    def mpi_comm(self) -> Comm: ...

    def world_ranks(self) -> tuple[int, ...]: ...


def guard(main: Callable[[], int | None]) -> NoReturn:
    """Call ``main()`` and end the process with the status it returns; any failure in it ends the job.

    Also before MPI is started: ranks that wait for this one in MPI_Init are ended through the launcher.
    """
    _install()
    code, text = 1, ""
    try:
        code = main() or 0
    except SystemExit as e:
        code, text = _status(e.code)
    except KeyboardInterrupt:
        # rank 0 says so for all; where this one alone was interrupted, its exit status is said
        code, text = INTERRUPTED, "interrupted" if mpi.world()[0] == 0 else ""
    except BaseException:
        text = traceback.format_exc()
    if text:
        report(text)
    if code != 0 and _installed_in == os.getpid():  # a child that main forked, and that comes out here, is no rank
        _fail(code, text)
    sys.exit(code)


def guard_library_use(comm: OverMpi) -> None:
    """From now on a failure of this process ends the job, if it is a program running on several ranks. Collective."""
    if comm.size == 1 or _is_interactive_or_worker():
        return
    watch.join(comm.mpi_comm, comm.world_ranks())
    _watch_over_process()


def guard_launched() -> None:
    """The same from the import of this package on, where a launcher started this process as one of several ranks.

    A rank that fails before its first communicator leaves the others waiting in MPI_Init.
    """
    if environment.launched()[0] > 1 and not environment.is_helper() and not _is_interactive_or_worker():
        _watch_over_process()


def _watch_over_process() -> None:
    _install()
    exit_status.watch(_on_system_exit)


def _is_interactive_or_worker() -> bool:
    if multiprocessing.parent_process() is not None:
        return True
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or _in_ipython()


def _in_ipython() -> bool:
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get is not None and get() is not None


def _install() -> None:
    """Take the hooks, also from a program that has set its own since the last time; those are called first."""
    global _installed_in, _earlier_hook, _earlier_thread_hook
    _installed_in = os.getpid()
    if sys.excepthook is not _on_exception:
        _earlier_hook, sys.excepthook = sys.excepthook, _on_exception
    if threading.excepthook is not _on_thread_exception:
        _earlier_thread_hook, threading.excepthook = threading.excepthook, _on_thread_exception


# ---- the hooks ----


def _on_exception(kind: type[BaseException], value: BaseException, tb: TracebackType | None) -> None:
    if _installed_in != os.getpid():
        _earlier_hook(kind, value, tb)
        return
    if _is_within_hook.is_set():  # a hook that was set after ours calls ours as the one before it
        report("".join(traceback.format_exception(kind, value, tb)))
        return
    if _earlier_hook is not sys.__excepthook__:
        _is_within_hook.set()
        _earlier_hook(kind, value, tb)
        report(f"{kind.__name__}: {value}")
    elif issubclass(kind, KeyboardInterrupt):
        report("interrupted")
    else:
        report("".join(traceback.format_exception(kind, value, tb)))
    _fail(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1, kind.__name__)


def _on_thread_exception(args: threading.ExceptHookArgs) -> None:
    if _installed_in != os.getpid() or issubclass(args.exc_type, SystemExit):  # a thread's own exit ends it alone
        _earlier_thread_hook(args)
        return
    if _earlier_thread_hook is not threading.__excepthook__ and not _is_within_hook.is_set():
        _is_within_hook.set()
        _earlier_thread_hook(args)
    name = args.thread.name if args.thread is not None else "unknown"
    lines = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
    report(f"thread {name!r} died:\n" + "".join(lines))
    watch.tell_that_this_rank_fails()
    _end(1)  # at once: the main thread is alive and will not come to a meeting


def _on_system_exit(status: int | str | None) -> int | str | None:
    code, text = _status(status)
    if code == 0 or _installed_in != os.getpid() or watch.is_over():
        return status
    if text:
        report(text)
    _fail(code, text)
    return code  # not the text, which the interpreter would print again


def _status(status: int | str | None) -> tuple[int, str]:
    """What the interpreter makes of SystemExit's argument: (exit code, text to print)."""
    if status is None:
        return 0, ""
    if isinstance(status, int):
        return status & 0xFF or int(status != 0), ""
    return 1, str(status)


# ---- the end ----


def report(text: str) -> None:
    """Write lines to stderr with the rank in front, each by one system call, so that ranks do not mix within a line."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed or missing: the report matters more
            continue
    rank, size = mpi.world()
    if size == 1:
        size, rank, _ = environment.launched()
    prefix = environment.prefix(rank) if size > 1 else ""
    for line in text.rstrip("\n").splitlines() or [""]:
        try:
            os.write(2, f"{prefix}{line}\n".encode(errors="backslashreplace"))
        except OSError:  # stderr is gone; ending the job still matters
            return


def _fail(code: int, said: str) -> None:
    """End the job with ``code``. Returns where no other rank waits: all are at their exit, or there is one.

    ``said`` is what was reported; where that is nothing, the exit status is, if the job has to be ended for it.
    """
    if mpi.started() is None:
        _fail_before_mpi(code, said)
        return
    if mpi.world()[1] > 1 and not watch.all_leave_within(_MEETING_SECONDS):
        _say_status(code, said)
        watch.tell_that_this_rank_fails()
        _end(code)


def _fail_before_mpi(code: int, said: str) -> None:
    """Tell the launcher to end the job: other ranks may wait for this one in MPI_Init."""
    size, rank, _ = environment.launched()
    if size == 1 or watch.is_over():
        return
    if rank > 0:
        time.sleep(_MEETING_SECONDS)  # where all fail alike, rank 0 says so for all and ends them here
        _say_status(code, said)
    time.sleep(mpi.FORWARDING_SECONDS)
    socket = environment.launcher_socket()
    if socket and "DBRDIST_LAUNCH" not in os.environ:
        # PMI version 1 of hydra (MPICH, Intel MPI), which otherwise continues when a rank ends before MPI_Init. Open
        # MPI ends the job by itself then, and dbrdist-launch with any MPI, by the exit code: Slurm's PMI 2 takes these
        # words for a reason to crash, and kills the rank before it has one.
        try:
            os.write(socket, f"cmd=abort exitcode={code}\n".encode())
        except OSError:  # the launcher is gone, and the other ranks with it
            return


def _say_status(code: int, said: str) -> None:
    if not said:
        report(f"exit status {code}")


def _end(code: int) -> NoReturn:
    mpi.end_job(code)
    os._exit(code)
