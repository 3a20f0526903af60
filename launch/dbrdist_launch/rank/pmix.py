"""Keeps srun's PMIx plugin from killing a step before its supervisors have spoken.

The plugin kills all processes of the step, supervisors too, about 10 ms after the connection of a rank breaks. While
the supervisor holds a copy of that connection, it does not break before the supervisor has reported and ended.
"""

from __future__ import annotations

import os
import time
from _socket import AF_INET, socket  # see channel.py

from .. import limits
from ..wire import whole

TYPE_CHECKING = False  # see channel.py
if TYPE_CHECKING:
    from collections.abc import Mapping

_PIDFD_GETFD = 438  # on all architectures


class ConnectionHolder:
    """Looks for the program's connection to its PMIx server and copies it, once."""

    def __init__(self, pid: int, environment: Mapping[str, str]) -> None:
        self.pid = pid
        self.held: socket | None = None
        uris = [value for name, value in environment.items() if name.startswith("PMIX_SERVER_URI")]
        ports = {port for uri in uris if (port := whole(uri.rpartition(":")[2])) is not None and ":" in uri}
        self.until = time.monotonic() + limits.SEARCH_MOST_SECONDS
        self.ports = ports if "SLURM_STEP_ID" in environment else set()  # Open MPI's own mpiexec waits for its children

    @property
    def searching(self) -> bool:
        """Whether the connection may still appear: it is made in MPI_Init."""
        return bool(self.ports) and self.held is None and time.monotonic() < self.until

    def look(self) -> None:
        """Copy the connection if it is there by now; without the right to do so nothing happens."""
        try:
            process = os.pidfd_open(self.pid)
        except OSError:
            return
        try:
            for name in os.listdir(f"/proc/{self.pid}/fd"):
                if os.readlink(f"/proc/{self.pid}/fd/{name}").startswith("socket:") and self._take(process, int(name)):
                    return
        except OSError:
            pass  # the program has ended, or closed a file meanwhile
        finally:
            os.close(process)

    def _take(self, process: int, descriptor: int) -> bool:
        import ctypes

        copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, descriptor, 0)
        if copy < 0:
            return False
        connection = socket(fileno=copy)
        try:
            if connection.family == AF_INET and connection.getpeername()[1] in self.ports:
                self.held = connection
                return True
        except OSError:
            pass  # not connected
        connection.close()
        return False
