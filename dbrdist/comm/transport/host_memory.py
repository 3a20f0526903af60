"""Memory that processes of one host share, without a name in any file system.

A segment is an anonymous file (``memfd_create``) that the kernel frees with the last process that maps it: nothing is
left behind, however the processes end, and the size of ``/dev/shm`` (64 MB in many containers) is no limit. Others open
it through ``/proc/PID/fd/N``, and tell by its inode that it is the right one. That needs Linux, one PID namespace and
one user; where it fails there is an OSError, which says why. A forked child keeps the values, in memory of its own.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import weakref
from typing import Any, NamedTuple, TypeAlias

import numpy as np

RawMemory: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]


class Ticket(NamedTuple):
    """What another process of the host needs to map a segment: integers, so that it fits into a row."""

    pid: int
    fd: int
    device: int
    inode: int
    num_bytes: int


_MAP_FIXED = 0x10  # on Linux, whatever the processor
_segments: weakref.WeakSet[Segment] = weakref.WeakSet()


class Segment:
    """Memory that this process has made, as bytes in ``raw``: zeros at first, on a page border.

    Raises:
        OSError: where there is not enough memory, or the system has no anonymous files.
    """

    def __init__(self, num_bytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no anonymous files (memfd_create)")
        self._fd = os.memfd_create("dbrdist", os.MFD_CLOEXEC)
        try:
            _allocate(self._fd, num_bytes)
            self.raw = _mapped(self._fd, num_bytes)
            about = os.fstat(self._fd)
        except BaseException:
            os.close(self._fd)
            raise
        self.ticket = Ticket(os.getpid(), self._fd, about.st_dev, about.st_ino, num_bytes)
        _segments.add(self)

    def part(self) -> None:
        """Let this process have the memory for itself from now on: what it writes, the others no longer see."""
        address, size = self.raw.ctypes.data, self.ticket.num_bytes
        flags = mmap.MAP_PRIVATE | _MAP_FIXED
        found = _libc().mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, self._fd, 0)
        if found != address:
            raise OSError(f"expected private memory at {address:#x} in a forked child, got {found:#x}")

    def release(self, begin: int, end: int) -> None:
        """Give the whole pages between these bytes back to the system; they read as zeros until written again."""
        first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(mmap, "MADV_REMOVE"):
            _libc().madvise(self.raw.ctypes.data + first, last - first, mmap.MADV_REMOVE)

    def resident_bytes(self) -> int:
        """How much memory it takes now."""
        return os.fstat(self._fd).st_blocks * 512

    def __del__(self) -> None:
        if hasattr(self, "ticket"):
            os.close(self._fd)


def attach(ticket: Ticket) -> RawMemory:
    """Another process's segment; it lives as long as the array and its views.

    Raises:
        OSError: where it cannot be reached from this process.
    """
    path = f"/proc/{ticket.pid}/fd/{ticket.fd}"
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        about = os.fstat(fd)
        if (about.st_dev, about.st_ino, about.st_size) != ticket[2:]:
            raise OSError(f"{path} is not the memory of that rank; ranks in containers need one PID namespace")
        return _mapped(fd, ticket.num_bytes)
    finally:
        os.close(fd)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _part_from_parent() -> None:
    """A forked child that computes gradients must not write into its parent's."""
    for segment in list(_segments):
        segment.part()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_part_from_parent)


def _allocate(fd: int, num_bytes: int) -> None:
    """Take the memory now: a page that is missing later kills the process."""
    free = _free_bytes()
    if num_bytes > free:
        raise OSError(errno.ENOMEM, f"expected {num_bytes} bytes of free memory, but there are {free}")
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as e:
        raise OSError(e.errno, f"{e.strerror}, for {num_bytes} bytes of shared memory") from None


def _free_bytes() -> int:
    """What the system can give without swapping."""
    with open("/proc/meminfo") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return 1 << 62


def _mapped(fd: int, num_bytes: int) -> RawMemory:
    populate = getattr(mmap, "MAP_POPULATE", 0)
    return np.frombuffer(mmap.mmap(fd, num_bytes, mmap.MAP_SHARED | populate), np.uint8)
