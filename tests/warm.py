"""Python programs that start without importing: forks of a process that has imported everything.

`import dbrdist.cli.train` takes half a second of processor time, most of what a short run costs. :func:`python` gives
words to put in the place of ``sys.executable``, also behind ``mpiexec``: they start a tiny client, which hands its
arguments, environment, working directory and open files to a server. The server forks, and its child runs the program
as Python would, in a process of its own. The client stays as the process that others know: it forwards signals, ends
as the child ends, and if it is killed, so are the child and what that has started. If the server ends, so do its
children, and their clients end with code 97. A client that reaches no server, or whose words begin with an option of
Python, becomes Python itself: a real start, slower and with the same outcome.

Not for tests of imports, of options of Python or of its hash seed, of thread pools, of limits of processes, or of
process groups (each child has one of its own), nor for those that stop processes: they start Python itself.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLIENT = Path(__file__).with_name("warm_client.py")
SERVER = Path(__file__).with_name("warm_server.py")
_server: _Server | None = None


class _Server:
    """The process that forks; it ends with this one, since it reads from a pipe that only this one holds."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.folder = tempfile.mkdtemp(prefix="warm-")
        env = {n: v for n, v in os.environ.items() if not n.startswith(("PMI_", "PYTEST_", "DBRDIST_"))}
        env |= {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "launch"])), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, SERVER, self.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd=ROOT,
            start_new_session=True,  # a terminal's Ctrl-C is for clients, which forward it
        )  # fmt: skip
        assert self.process.stdout is not None
        ready = self.process.stdout.readline()
        assert ready == b"ready\n", ready
        atexit.register(self.end)

    @property
    def path(self) -> str:
        return os.path.join(self.folder, "socket")

    def end(self) -> None:
        """End it, and its children with it."""
        if os.getpid() == self.owner:
            assert self.process.stdin is not None and self.process.stdout is not None
            self.process.stdin.close()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process.stdout.close()
            shutil.rmtree(self.folder, ignore_errors=True)


def python() -> list[str]:
    """Words that start Python with everything imported; where there is no ``fork`` of this kind, those of Python."""
    global _server
    if sys.platform != "linux":
        return [sys.executable]
    if _server is None or _server.owner != os.getpid() or _server.process.poll() is not None:
        _server = _Server()
    return [sys.executable, "-I", "-S", str(CLIENT), _server.path]
