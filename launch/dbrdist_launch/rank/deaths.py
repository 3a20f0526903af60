"""Why a process died by SIGKILL: whether the kernel's out-of-memory killer did it."""

import os

_KERNEL_LOG = "/dev/kmsg"
_KILLED = "illed process "


def _cgroup_files(pid: int) -> list[str]:
    """The files that count out-of-memory kills in a process's control group (version 2, then version 1)."""
    found = []
    try:
        with open(f"/proc/{pid}/cgroup") as file:
            for line in file:
                _, controllers, path = line.rstrip("\n").split(":", 2)
                if not controllers:
                    found += [f"{root}{path}/memory.events" for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")]
                elif "memory" in controllers.split(","):
                    found.append(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    except (OSError, ValueError):
        pass
    return found


def _counter(path: str, name: str) -> int | None:
    try:
        with open(path) as file:
            for line in file:
                words = line.split()
                if len(words) == 2 and words[0] == name:
                    return int(words[1])
    except (OSError, ValueError):
        pass
    return None


class OomWatch:
    """Remembers the kernel's counters while a process lives, to compare them after its death."""

    def __init__(self) -> None:
        self._groups: dict[str, int] = {}
        self._machine = _counter("/proc/vmstat", "oom_kill")

    def look(self, pid: int) -> None:
        """Remember the counters; the process may have moved to another control group since the last look."""
        for path in _cgroup_files(pid):
            if path not in self._groups:
                count = _counter(path, "oom_kill")
                if count is not None:
                    self._groups[path] = count

    def verdict(self, pid: int) -> str | None:
        """What says that the out-of-memory killer ended `pid`, which died by SIGKILL; None when nothing does."""
        return _in_kernel_log(pid) or self.counted(pid)

    def counted(self, pid: int) -> str | None:
        """What the counters say: well under a millisecond, where the kernel's log may take ten.

        The machine's own count says nothing of `pid`: another job may have run out of memory. The kernel's log decides
        where we may read it.
        """
        for path, before in self._groups.items():
            if (_counter(path, "oom_kill") or 0) > before:
                return f"out-of-memory kill counted in {path}"
        if self._machine is not None and (_counter("/proc/vmstat", "oom_kill") or 0) > self._machine:
            if os.access(_KERNEL_LOG, os.R_OK):
                return _in_kernel_log(pid)
            return "the machine's count of out-of-memory kills rose while the process ran"
        return None


def _in_kernel_log(pid: int) -> str | None:
    """The kernel's own line about this process, where we may read its log."""
    try:
        descriptor = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    line = None
    try:
        while True:
            try:
                record = os.read(descriptor, 8192).decode(errors="replace")
            except BrokenPipeError:  # overwritten while we read: the next read gives a later record
                continue
            said = record.partition(_KILLED)[2].split()
            if said and said[0].rstrip(",") == str(pid):
                line = record.partition(";")[2].partition("\n")[0].strip()
    except OSError:  # BlockingIOError: the end of the log
        pass
    finally:
        os.close(descriptor)
    return line
