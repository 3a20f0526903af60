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
import pathlib
import weakref
from typing import Any, NamedTuple, TypeAlias

import numpy as np

RawMemory: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


class SegmentTicket(NamedTuple):
    """What another process of the host needs to map a segment: integers, so that it fits into a row."""

    pid: int
    fd: int
    device: int
    inode: int
    num_bytes: int


_MAP_FIXED = 0x10  # on Linux, whatever the processor
_MAP_FAILED = ctypes.c_void_p(-1).value
_GROUPS = pathlib.Path("/sys/fs/cgroup")
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
        self.ticket = SegmentTicket(os.getpid(), self._fd, about.st_dev, about.st_ino, num_bytes)
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


def attach(ticket: SegmentTicket) -> RawMemory:
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
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
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
    """What the system can give without swapping, within the limits of this process's control groups."""
    return min([_available_bytes(), *(limit - used for limit, used in _group_limits())])


def _available_bytes() -> int:
    with open("/proc/meminfo") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return 1 << 62


def _group_limits() -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be given back) of each control group around this process that has a limit.

    A container that goes over its limit is killed, though the machine has memory left.
    """
    found = []
    for folder, limit_name, used_name, cache_name in _group_folders():
        for group in [folder, *folder.parents]:
            try:
                limit = int((group / limit_name).read_text())
                used = int((group / used_name).read_text())
                kinds = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # no limit ("max"), or not a control group
                continue
            found.append((limit, max(used - int(kinds.get(cache_name, 0)), 0)))
    return found


def _group_folders() -> list[tuple[pathlib.Path, str, str, str]]:
    """(folder, and the names of its files) of this process's control group for memory, in both versions of them."""
    try:
        lines = [line.split(":", 2) for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    found = []
    for number, controllers, path in lines:
        if number == "0":
            names = "memory.max", "memory.current", "inactive_file"
            found += [(root / path.lstrip("/"), *names) for root in (_GROUPS, _GROUPS / "unified")]
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            found += [(_GROUPS / "memory" / path.lstrip("/"), *names)]
    return found


def _mapped(fd: int, num_bytes: int) -> RawMemory:
    """The memory behind a descriptor, which may be closed afterwards: Python's own mmap would keep a duplicate of it,
    one for each rank of the host and each communicator."""
    libc, flags = _libc(), mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    address = libc.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}, for {num_bytes} bytes of shared memory")
    buffer: Any = (ctypes.c_ubyte * num_bytes).from_address(address)
    at_end = weakref.finalize(buffer, libc.munmap, address, num_bytes)
    at_end.atexit = False  # at the exit of the process arrays may still be in use
    raw: RawMemory = np.frombuffer(buffer, np.uint8)
    return raw
