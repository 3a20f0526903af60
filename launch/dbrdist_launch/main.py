"""Entry point of `dbrdist-launch`: it turns an error of the launcher itself into an exit code."""

from __future__ import annotations

import os
import signal
import sys

from . import codes
from .errors import place_of
from .inherited import restore_environment


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with the job's code."""
    _open_standard_files()
    restore_environment()
    try:
        from .launcher.cli import run

        code = run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        code = codes.from_signal(signal.SIGINT)
    except Exception as error:
        print(f"dbrdist-launch: internal error: {error!r} at {place_of(error)}", file=sys.stderr)
        code = codes.NOT_STARTED
    _leave(code)


def _open_standard_files() -> None:
    """Where one of the three is closed (`>&-`), the next file that is opened would take its number, and its output."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


def _leave(code: int) -> None:
    """Where the reader has gone, Python's own last flush would fail, and turn the exit code into 120."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        os._exit(code)
    sys.exit(code)
