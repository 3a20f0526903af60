"""How many cores there are for a job."""

import builtins
import io
import os

import pytest
from dbrdist_launch import cores
from support import launch


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/b/cpu.max": "200000 100000"}, 2.0),
        ({"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None),
        (
            {
                "/proc/self/cgroup": "0::/a/b\n",
                "/sys/fs/cgroup/a/b/cpu.max": "300000 100000",
                "/sys/fs/cgroup/a/cpu.max": "150000 100000",
                "/sys/fs/cgroup/cpu.max": "400000 100000",
            },
            1.5,
        ),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        ({"/proc/self/cgroup": "0::/a\n", "/sys/fs/cgroup/a/cpu.max": "x"}, None),
        ({"/proc/self/cgroup": "0::/a\n", "/sys/fs/cgroup/a/cpu.max": "0 100000"}, None),
        (
            {
                "/proc/self/cgroup": "3:memory:/m\n2:cpu,cpuacct:/a\n",
                "/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "100000",
                "/sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "50000",
                "/sys/fs/cgroup/cpu/m/cpu.cfs_quota_us": "1",
                "/sys/fs/cgroup/cpu/m/cpu.cfs_period_us": "50000",
            },
            2.0,
        ),
        (
            {
                "/proc/self/cgroup": "2:cpu:/a\n",
                "/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1",
                "/sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "50000",
            },
            None,
        ),
        ({}, None),
    ],
)
def test_quotas_of_control_groups(monkeypatch, files, quota):
    def open_(path, *args, **kwargs):
        if str(path).startswith(("/proc/self/cgroup", "/sys/fs/cgroup")):
            if os.path.normpath(path) not in files:
                raise FileNotFoundError(path)
            return io.StringIO(files[os.path.normpath(path)])
        return real(path, *args, **kwargs)

    real = builtins.open
    monkeypatch.setattr(builtins, "open", open_)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    assert cores._quota() == quota
    assert cores.available_cores() == (4 if quota is None else max(1, int(quota)))


def test_cores_count_affinity():
    assert 1 <= cores.available_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("counted", "cores_there"), [(5, 5), (1, 1), (None, 1)])
def test_where_there_is_no_affinity_all_cores_count(monkeypatch, counted, cores_there):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: counted)
    monkeypatch.setattr(cores, "_quota", lambda: None)
    assert cores.available_cores() == cores_there


@pytest.mark.mpiexec
def test_as_many_ranks_as_there_is_room_for_and_modules(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "tool.py").write_text("import sys; print('tool', *sys.argv[1:])")
    result = launch("-n", "auto", "-m", "package.tool", "a", "-b", cwd=tmp_path)
    assert result.stdout.count("tool a -b") == cores.available_cores(), result.stderr
