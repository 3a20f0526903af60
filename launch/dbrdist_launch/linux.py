"""The few Linux calls that Python does not wrap, and what /proc tells about processes."""

from __future__ import annotations

import os
import time

from .signals import signal

TYPE_CHECKING = False  # see channel.py
if TYPE_CHECKING:
    from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_call: Callable[..., None] | None = None  # prctl


def load() -> None:
    """Load what `prctl` needs, so that a child need not."""
    global _call
    if _call is None:
        try:
            import _ctypes  # a quarter of what the package around it takes

            class Function(_ctypes.CFuncPtr):  # returns nothing that is looked at, and takes C ints
                _flags_, _restype_ = _ctypes.FUNCFLAG_CDECL, None

            _call = Function(_ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl"))  # type: ignore[arg-type,unused-ignore]
        except (ImportError, OSError, AttributeError):
            pass  # not Linux: the callers have a second way to notice the death of a parent


def _prctl(option: int, value: int) -> None:
    load()
    if _call is not None:
        _call(option, value, 0, 0, 0)


def die_with_parent(parent: int, signal_number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent ends; one that it handles tells it so."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal_number)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent dies, so that none can escape."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children(pid: int) -> list[int]:
    """Process ids of the children of all threads of a process; empty where /proc does not tell."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found.extend(int(word) for word in file.read().split())
    except (OSError, ValueError):
        pass
    return found


def descendants(pid: int) -> list[int]:
    """All processes below one, parents before children."""
    found: list[int] = []
    rest = children(pid)
    while rest:
        child = rest.pop()
        found.append(child)
        rest.extend(children(child))
    return found


def stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on (index 0 is the state), or None for no such process."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def state(pid: int) -> str:
    """R running, S sleeping, D waiting for a disk, T stopped, t traced, Z ended but not fetched; '' when gone."""
    fields = stat(pid)
    return fields[0] if fields else ""


def state_and_tracer(pid: int) -> tuple[str, bool]:
    """The state, and whether a debugger or a tracer is attached."""
    letter, traced = "", False
    try:
        with open(f"/proc/{pid}/status", errors="replace") as file:
            for line in file:
                if line.startswith("State:"):
                    letter = line.split()[1]
                elif line.startswith("TracerPid:"):
                    traced = line.split()[1] != "0"
                    break
    except (OSError, IndexError):
        pass
    return letter, traced


def catches(pid: int, signal_number: int) -> bool:
    """Whether a process has a handler for a signal: a signal without one would kill it."""
    return _is_in(pid, signal_number, ("SigCgt:",))


def expects(pid: int, signal_number: int) -> bool:
    """Whether a process handles, blocks, ignores or waits for a signal: it does not die of it."""
    return _is_in(pid, signal_number, ("SigCgt:", "SigBlk:", "SigIgn:")) or _is_in_sigwait(pid)


def hears(pid: int, signal_number: int) -> bool:
    """Whether a program expects a signal: itself, or the one for which it waits, as a shell does.

    A helper that it has started beside itself, and that happens to have a handler, does not count.
    """
    if expects(pid, signal_number):
        return True
    where = _waits_in(pid)
    is_hidden = where in ("", "0") and state(pid) != "R"  # not everybody may see it
    is_waiting = is_hidden or where == "do_wait" or any(call in where for call in ("pipe", "poll", "select"))
    return is_waiting and any(hears(child, signal_number) for child in children(pid))


def _waits_in(pid: int) -> str:
    """The kernel's function in which a process sleeps."""
    try:
        with open(f"/proc/{pid}/wchan") as file:
            return file.read()
    except OSError:
        return ""


def _is_in_sigwait(pid: int) -> bool:
    """Whether a process is in `sigwait`, in which the kernel shows nothing as blocked."""
    return "sigtimedwait" in _waits_in(pid)


def ignores(pid: int, signal_number: int) -> bool:
    """Whether a process ignores a signal."""
    return _is_in(pid, signal_number, ("SigIgn:",))


def _is_in(pid: int, signal_number: int, sets: tuple[str, ...]) -> bool:
    """Whether a signal is in one of the sets that the kernel shows for a process."""
    found = 0
    try:
        with open(f"/proc/{pid}/status", errors="replace") as file:
            for line in file:
                if line.startswith(sets):
                    found |= int(line.split()[1], 16)
    except (OSError, ValueError):
        return False
    return bool(found >> (signal_number - 1) & 1)


def is_python(pid: int) -> bool:
    """Whether a process is a Python, by the name of its program."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith(("python", "pypy"))
    except OSError:
        return False


def mapped_files(pid: int, prefix: str) -> set[str]:
    """The files that a process has mapped and whose paths begin so."""
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as file:
            words = [line.split(None, 5) for line in file]
    except OSError:
        return set()
    return {row[5].strip() for row in words if len(row) == 6 and row[5].startswith(prefix)}


def kill(pid: int, signal_number: int) -> bool:
    """Send a signal; False when there is no such process (or it is not ours)."""
    try:
        os.kill(pid, signal_number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill_group(pid: int, signal_number: int) -> None:
    """Send a signal to a process group, or to its first process that has not made it yet; nothing to an ended one."""
    try:
        os.killpg(pid, signal_number)
    except (ProcessLookupError, PermissionError):
        kill(pid, signal_number)


def end_descendants(seconds: float = 5.0) -> None:
    """SIGKILL every process below this one and fetch their statuses, until none is left or the time is over.

    A busy kernel takes a while to end a process; one that waits for a dead disk does not end at all.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return  # without a child of its own it has no descendants: the usual case, which reads nothing in /proc
        if time.monotonic() > until:
            return
        for pid in descendants(os.getpid()):
            kill(pid, signal.SIGKILL)
        time.sleep(0.001)
