"""One rank's failure ends the job, with the rank in front of each line of the report.

Under a plain mpiexec, MPICH, Open MPI and Intel MPI all leave the other ranks waiting for ever when one raises or calls
``sys.exit``. This room ends the job for

- an exception that nobody catches, in the main thread or another one,
- a ``sys.exit(n)`` or ``raise SystemExit(n)`` with n other than 0 that nobody catches (``exit_status.py``),
- a rank that has left in any other way while another waits for it in a verb (``leaving.py``).

``dbrdist-train`` guards its whole main with :func:`guard`. In library use, creating an MPI communicator with several
ranks does it, but never in a loader's worker, in IPython or at an interactive prompt.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from dbrdist.comm import environment, exit_status, leaving, mpi

INTERRUPTED = 130
_MEETING_SECONDS = 1.0  # ranks that fail alike have this time to say so before the first ends the job

_installed_in: int | None = None  # the process id: a forked child inherits the hooks, but must not use them
_earlier_hook: Callable[..., Any] = sys.__excepthook__
_earlier_thread_hook: Callable[..., Any] = threading.excepthook


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
        code, text = INTERRUPTED, "interrupted"
    except BaseException:
        text = traceback.format_exc()
    if text:
        report(text)
    if code != 0:
        _fail(code)
    sys.exit(code)


def guard_library_use(comm: mpi.MpiCommunicator) -> None:
    """From now on a failure of this process ends the job, if it is a script that a launcher started on several ranks."""
    if comm.size == 1 or _is_interactive_or_worker():
        return
    leaving.join(comm)
    if _installed_in != os.getpid():
        _install()
        exit_status.watch(_on_system_exit)


def _is_interactive_or_worker() -> bool:
    if multiprocessing.parent_process() is not None:
        return True
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "IPython" in sys.modules and _in_ipython()


def _in_ipython() -> bool:
    get = getattr(sys.modules["IPython"], "get_ipython", None)
    return get is not None and get() is not None


def _install() -> None:
    global _installed_in, _earlier_hook, _earlier_thread_hook
    if _installed_in == os.getpid():
        return
    _installed_in = os.getpid()
    _earlier_hook, sys.excepthook = sys.excepthook, _on_exception
    _earlier_thread_hook, threading.excepthook = threading.excepthook, _on_thread_exception


# ---- the hooks ----


def _on_exception(kind: type[BaseException], value: BaseException, tb: Any) -> None:
    if _installed_in != os.getpid():
        _earlier_hook(kind, value, tb)
        return
    if _earlier_hook is not sys.__excepthook__:
        _earlier_hook(kind, value, tb)
        report(f"{kind.__name__}: {value}")
    elif issubclass(kind, KeyboardInterrupt):
        report("interrupted")
    else:
        report("".join(traceback.format_exception(kind, value, tb)))
    _fail(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)


def _on_thread_exception(args: Any) -> None:
    if _installed_in != os.getpid() or issubclass(args.exc_type, SystemExit):  # a thread's own exit ends it alone
        _earlier_thread_hook(args)
        return
    if _earlier_thread_hook is not threading.__excepthook__:
        _earlier_thread_hook(args)
    name = args.thread.name if args.thread is not None else "unknown"
    lines = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
    report(f"thread {name!r} died:\n" + "".join(lines))
    _end(1)  # at once: the main thread is alive and will not come to a meeting


def _on_system_exit(status: Any) -> Any:
    code, text = _status(status)
    if code == 0 or _installed_in != os.getpid() or leaving.is_over():
        return status
    report(text or f"exit status {code}")
    _fail(code)
    return code  # not the text, which the interpreter would print again


def _status(status: Any) -> tuple[int, str]:
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


def _fail(code: int) -> None:
    """End the job with ``code``. Returns where no other rank waits: all are at their exit, or there is one."""
    if mpi.started() is None:
        _fail_before_mpi(code)
        return
    if mpi.world()[1] > 1 and not leaving.all_leave_within(_MEETING_SECONDS):
        _end(code)


def _fail_before_mpi(code: int) -> None:
    """Tell the launcher to end the job: other ranks may wait for this one in MPI_Init."""
    size, rank, _ = environment.launched()
    if size == 1 or leaving.is_over():
        return
    if rank > 0:
        time.sleep(_MEETING_SECONDS)  # where all fail alike, rank 0 says so for all
    pmi = os.environ.get("PMI_FD", "")
    if pmi.isdigit():
        # PMI version 1 of hydra (MPICH, Intel MPI), which otherwise goes on when a rank ends before MPI_Init. Open MPI
        # ends the job by itself then.
        try:
            os.write(int(pmi), f"cmd=abort exitcode={code}\n".encode())
        except OSError:  # the launcher is gone, and the other ranks with it
            return


def _end(code: int) -> NoReturn:
    mpi.end_job(code)
    os._exit(code)
