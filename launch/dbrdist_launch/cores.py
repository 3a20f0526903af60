"""How many cores a process may really use."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Cores by affinity, bounded by the quota of the control groups that this process is in."""
    try:
        cores = float(len(os.sched_getaffinity(0)))
    except AttributeError:
        cores = float(os.cpu_count() or 1)
    quota = _quota()
    return max(1, int(min(cores, quota) if quota else cores))


def _quota() -> float | None:
    """The smallest CPU quota on the way from our control group to the root, in cores."""
    smallest: float | None = None
    try:
        with open("/proc/self/cgroup") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return None
    for _, controllers, path in groups:
        if controllers and "cpu" not in controllers.split(","):
            continue
        while True:
            limit = _read_v1(path) if controllers else _read_v2(path)
            if limit and (smallest is None or limit < smallest):
                smallest = limit
            if path in ("", "/"):
                break
            path = os.path.dirname(path)
    return smallest


def _read_v2(path: str) -> float | None:
    try:
        with open(f"/sys/fs/cgroup{path}/cpu.max") as file:
            quota, period = file.read().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _read_v1(path: str) -> float | None:
    try:
        with (
            open(f"/sys/fs/cgroup/cpu{path}/cpu.cfs_quota_us") as quota,
            open(f"/sys/fs/cgroup/cpu{path}/cpu.cfs_period_us") as period,
        ):
            value = int(quota.read())
            return value / int(period.read()) if value > 0 else None
    except (OSError, ValueError):
        return None
