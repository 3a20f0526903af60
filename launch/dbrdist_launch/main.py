"""Entry point of `dbrdist-launch`."""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with the job's code."""
    from .errors import LaunchError
    from .launcher.cli import run

    try:
        code = run(sys.argv[1:] if arguments is None else arguments)
    except LaunchError as error:
        print(f"dbrdist-launch: {error}", file=sys.stderr)
        code = error.code
    sys.exit(code)
