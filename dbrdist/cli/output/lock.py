"""A lock on a run's folder, which outlives no process.

The kernel's lock on the file ends with the process that holds it, and on most network file systems it holds between
hosts. The file also names host and process. Where the kernel's lock cannot tell (a file system without locks, or with
locks for each host alone), the holder is looked up: on this host by its number and start time, on another by whether it
still touches the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from typing import Any

from dbrdist.core.files.regular_file import regular
from dbrdist.errors import ConfigError

TOUCH_SECONDS = 10.0  # how often the holder shows that it is alive
WAIT_SECONDS = 3.5 * TOUCH_SECONDS  # after so long without that, a holder on another host is gone


class Lock:
    """At most one process at a time has a given file locked."""

    def __init__(self, path: str):
        self.path = path
        self._descriptor = -1
        self._ended = threading.Event()

    def acquire(self) -> None:
        """Take the lock. Raises ConfigError where another process has it."""
        self._descriptor, kernel_locks = _open_locked(self.path)
        try:
            holder = _read(self._descriptor)
            if holder and _is_alive(holder, self.path, kernel_locks):
                raise ConfigError(_held(self.path, holder))
            mine = _myself()
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(mine).encode(), 0)
            if not kernel_locks:
                time.sleep(0.3)  # another process may have come to the same point: the last to write has it
                holder = _read_path(self.path)
                if holder != mine:
                    raise ConfigError(_held(self.path, holder))
        except BaseException:
            os.close(self._descriptor)
            self._descriptor = -1
            raise
        threading.Thread(target=self._touch, name="dbrdist lock", daemon=True).start()

    def release(self) -> None:
        """Give it back; without it, nothing happens."""
        self._ended.set()
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):  # the file is gone, or the program has closed all descriptors
            if _is_at(self.path, self._descriptor):
                os.remove(self.path)
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        self._descriptor = -1

    def _touch(self) -> None:
        while not self._ended.wait(TOUCH_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self.path)


def holder_of(path: str) -> dict[str, Any] | None:
    """Who has the lock at `path`, as far as this host can tell without waiting; None where nobody has."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        holder = _read(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return holder or {}
        return holder if holder and holder.get("host") != socket.gethostname() else None
    finally:
        os.close(descriptor)


def seems_held(path: str) -> bool:
    """Whether a process has the lock at `path`, by what the file says alone: nothing is locked to find out.

    On this host its holder is looked up, which has no copy of the file open; one on another host has touched the file
    not long ago.
    """
    try:
        with open(path, "rb", opener=regular) as file:
            holder, status = _read(file.fileno()), os.fstat(file.fileno())
    except OSError:
        return False
    if holder.get("host") == socket.gethostname() and holder.get("started") is not None:
        return _start_of(holder.get("pid")) == holder.get("started") and _may_have_open(holder.get("pid"), status)
    return bool(holder) and time.time() - status.st_mtime < 2 * WAIT_SECONDS  # clocks of hosts differ


def _may_have_open(pid: int | str, status: os.stat_result) -> bool:
    """Whether a process of this host has a file open; True where nobody but its user may know."""
    found = True
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as files:
        found = any(_is_file(file.path, status) for file in files)
    return found


def _is_file(path: str, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), status)
    except OSError:
        return False


def _open_locked(path: str) -> tuple[int, bool]:
    """A descriptor of the file with the kernel's lock on it, and whether there is such a lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read(descriptor)
            os.close(descriptor)
            raise ConfigError(_held(path, holder)) from None
        except OSError:  # a file system without locks
            return descriptor, False
        if _is_at(path, descriptor):
            return descriptor, True
        os.close(descriptor)  # its holder has just removed it


def _is_at(path: str, descriptor: int) -> bool:
    return _is_file(path, os.fstat(descriptor))


def _read(descriptor: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_path(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        return _read(file.fileno())


def _myself() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "started": _start_of(pid), "since": time.strftime("%F %T")}


def _start_of(pid: Any) -> int | None:
    """When a process of this host started, in ticks since the boot; None where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _is_alive(holder: dict[str, Any], path: str, kernel_locks: bool) -> bool:
    if holder.get("host") == socket.gethostname():  # a lock that we got from the kernel, nobody else here has
        started = _start_of(holder.get("pid"))
        return not kernel_locks and started is not None and started == holder.get("started")
    print(
        f"{path} names process {holder.get('pid')} on {holder.get('host')}; checking for {WAIT_SECONDS:.0f} s whether "
        "it is alive",
        flush=True,
    )
    before, end = _touched(path), time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        time.sleep(1.0)
        if _touched(path) != before:
            return True
    return False


def _touched(path: str) -> int:
    with open(path, "rb") as file:  # opening asks a network file system again
        return os.fstat(file.fileno()).st_mtime_ns


def _held(path: str, holder: dict[str, Any]) -> str:
    who = f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}" if holder else "now"
    return (
        f"{os.path.dirname(path) or '.'}: a run is writing to this folder ({who}); wait until it ends, or use "
        "another folder with out=..."
    )
