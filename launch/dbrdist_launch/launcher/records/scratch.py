"""A folder for the time of a block that is gone afterwards, however this process ends: also by SIGTERM or SIGKILL.

Another process makes the folder, waits until nobody holds the other end of its input any more, and removes it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

_KEEPER = """
import os, shutil, signal, sys, tempfile
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_IGN)
path = tempfile.mkdtemp(prefix=sys.argv[1], dir=sys.argv[2])
try:
    os.chdir("/")
    os.write(1, os.fsencode(path))
    os.close(1)
    os.read(0, 1)
finally:
    shutil.rmtree(path, ignore_errors=True)
"""


@contextlib.contextmanager
def folder(prefix: str) -> Iterator[str]:
    """The path of a new folder where Python makes temporary ones."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _KEEPER, prefix, tempfile.gettempdir()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        start_new_session=True,  # who ends a process group, or types Ctrl-C, leaves it its work
    ) as keeper:  # fmt: skip
        assert keeper.stdin is not None and keeper.stdout is not None
        path = os.fsdecode(keeper.stdout.read())
        if not path:
            raise OSError("no temporary folder can be made; the reason stands above")
        try:
            yield path
        finally:
            with contextlib.suppress(BrokenPipeError):  # somebody has killed it
                keeper.stdin.write(b"\n")  # a child of a fork may hold the end that is closed here, and live on
                keeper.stdin.close()
            keeper.wait()
