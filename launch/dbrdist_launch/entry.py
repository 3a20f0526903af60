"""Entry points of `dbrdist-train` and `dbrdist-data`: what must be done before anything large is imported.

The imports take a second, and minutes on a busy file system. A Ctrl-C in that time ends the program with one line and
exit code 130, and a standard stream that is closed or full ends no run at any time.
"""

from __future__ import annotations

import os
import sys

INTERRUPTED = 130
_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
try:
    import codecs
    import errno
    import importlib
    import io
    import select
    import signal
    import time
    from typing import Any, NoReturn
except KeyboardInterrupt:  # some milliseconds, before there is a handler
    if not os.path.basename(sys.argv[0]).startswith("dbrdist-"):
        raise
    if next((os.environ[name] for name in _RANKS if name in os.environ), "0") == "0":
        os.write(2, f"{os.path.basename(sys.argv[0])}: interrupted\n".encode())
    os._exit(INTERRUPTED)

_LONE_SECONDS = 1.0  # after which the other ranks are ended, if this one alone was interrupted
_GONE = (errno.EPIPE, errno.EBADF, errno.EIO)  # nobody reads any more, which is not worth a word


def train() -> None:
    """`dbrdist-train`."""
    _run("dbrdist-train", "dbrdist.cli.train")


def data() -> None:
    """`dbrdist-data`."""
    _run("dbrdist-data", "dbrdist.cli.data")


def _run(program: str, module: str) -> None:
    protect_streams()
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # in the background, or below nohup
    if not is_ignored:
        signal.signal(signal.SIGINT, lambda number, frame: interrupted(program))
    main = importlib.import_module(module).main
    if not is_ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        interrupted(program)
    finally:
        if not is_ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done and said; the interpreter only ends
        say_what_was_lost(program)


# ---- Ctrl-C ----


def interrupted(program: str) -> NoReturn:
    """End the process at once with code 130; rank 0 says so. MPI must not have been started."""
    if next((os.environ[name] for name in _RANKS if name in os.environ), "0") == "0":
        try:
            os.write(2, f"{program}: interrupted\n".encode())
        except OSError:
            pass
    _end_others_later()
    os._exit(INTERRUPTED)


def _end_others_later() -> None:
    """Where hydra started this rank among others, have it end them if they are still there after some seconds.

    A launcher passes a Ctrl-C on to all ranks. One that was interrupted alone leaves the others waiting in MPI_Init. To
    end the job at once would not do: hydra kills the ranks that are about to end by themselves, and joins the statuses.
    Under dbrdist-launch this is the launcher's task.
    """
    line = os.environ.get("PMI_FD", "")
    is_alone = os.environ.get("PMI_SIZE", "1") == "1" or "DBRDIST_LAUNCH" in os.environ
    if not line.isdigit() or is_alone or os.fork():
        return
    try:
        os.setsid()
        for number in (0, 1, 2):
            os.close(number)
        time.sleep(_LONE_SECONDS)
        os.write(int(line), f"cmd=abort exitcode={INTERRUPTED}\n".encode())
    finally:
        os._exit(0)


# ---- standard streams ----


class Unfailing(io.RawIOBase):
    """A file descriptor that takes everything: what cannot be written is dropped, and the first reason kept."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        while True:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError:  # a pipe that another program made non-blocking, and that is full now
                select.select([], [self._descriptor], [])
            except OSError as error:
                self.error = self.error or error
                return len(data)


_raw: dict[str, Unfailing] = {}


def _forgiving(errors: str) -> str:
    """The name of an error handler as the one given, with an escape for what that one does not write either."""
    handle, escape = codecs.lookup_error(errors), codecs.lookup_error("backslashreplace")

    def both(error: UnicodeError) -> tuple[str | bytes, int]:
        try:
            return handle(error)
        except UnicodeError:
            return escape(error)

    codecs.register_error(f"dbrdist-{errors}", both)
    return f"dbrdist-{errors}"


def protect_streams() -> None:
    """Open descriptors 0 to 2 where they are closed, and make `sys.stdout` and `sys.stderr` streams that never fail.

    Called again it does nothing.
    """
    if _raw:
        return
    for number in (0, 1, 2):  # or else the next file that is opened takes the number, and what is printed
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name, number in (("stdout", 1), ("stderr", 2)):
        before: Any = getattr(sys, name)
        encoding = getattr(before, "encoding", None) or "utf-8"
        errors = getattr(before, "errors", None) if number == 1 else None
        errors = "backslashreplace" if errors in (None, "strict") else _forgiving(errors)
        at_once = number == 2 or getattr(before, "write_through", False)
        _raw[name] = raw = Unfailing(number)
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding, errors, line_buffering=at_once or raw.isatty(), write_through=at_once
        )
        stream.mode = "w"  # type: ignore[misc]
        setattr(sys, name, stream)


def say_what_was_lost(program: str) -> None:
    """A full disk below the standard output, at the end: nothing else would tell."""
    try:
        sys.stdout.flush()
    except Exception:  # what the program has put there instead, or closed, makes no failure of a run that is over
        pass
    error = _raw["stdout"].error if _raw else None
    if error is not None and error.errno not in _GONE:
        print(f"{program}: the standard output is incomplete: {error.strerror}", file=sys.stderr)
