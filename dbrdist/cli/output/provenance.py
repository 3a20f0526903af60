"""What a run was made of besides its configuration: command line, hosts, versions, the state of the code."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist import __version__
from dbrdist.comm.communicators.create import name_of

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase


def facts(comm: CommunicatorBase) -> dict[str, Any]:
    """What the summary says of this start. Collective."""
    hosts = comm.allgather_obj(socket.gethostname())
    try:
        directory: str | None = os.getcwd()
    except OSError:  # it was removed
        directory = None
    return {
        "command": shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
        "directory": directory,
        "pid": os.getpid(),
        "hosts": dict(Counter(hosts)),  # with the number of ranks on each
        "communicator": name_of(comm),
        "num_ranks": comm.size,
        "version": __version__,
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "commit": None if directory is None else commit(directory),
    }


def commit(folder: str) -> str | None:
    """The commit that is checked out around a folder, `+changes` where files differ from it; None without git."""
    head = _git(folder, "rev-parse", "HEAD")
    if not head:
        return None
    return head + ("+changes" if _git(folder, "diff-index", "--quiet", "HEAD", "--") is None else "")


def _git(folder: str, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
