"""Entry point of `dbrdist-launch`: it turns an error of the launcher itself into an exit code."""

from __future__ import annotations

import signal
import sys

from . import codes, entry
from .errors import place_of
from .inherited import restore_environment


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with the job's code."""
    entry.protect_streams()
    restore_environment()
    try:
        from .launcher.cli import run

        code = run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        code = codes.from_signal(signal.SIGINT)
    except Exception as error:
        print(f"dbrdist-launch: internal error: {error!r} at {place_of(error)}", file=sys.stderr)
        code = codes.NOT_STARTED
    entry.say_what_was_lost("dbrdist-launch")
    sys.exit(code)
