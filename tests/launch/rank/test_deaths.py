"""Kills for memory: what counters, the kernel and the machine say."""

import io

import pytest
from dbrdist_launch.rank import deaths


class Files:
    """Files that `open` and `os.open` find in the place of the system's."""

    def __init__(self, monkeypatch):
        self.texts = {}
        monkeypatch.setattr(deaths, "open", self._open, raising=False)

    def _open(self, path):
        if path not in self.texts:
            raise FileNotFoundError(path)
        return io.StringIO(self.texts[path])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0::/a\n", ["/sys/fs/cgroup/a/memory.events", "/sys/fs/cgroup/unified/a/memory.events"]),
        ("3:cpu,memory:/b:c\n2:cpu:/d\n", ["/sys/fs/cgroup/memory/b:c/memory.oom_control"]),
        ("1:memory2:/b\n", []),
        ("x\n", []),
    ],
)
def test_files_of_control_groups(monkeypatch, text, found):
    Files(monkeypatch).texts["/proc/7/cgroup"] = text
    assert deaths._cgroup_files(7) == found and deaths._cgroup_files(8) == []


def test_counters_are_read_by_their_names(monkeypatch):
    Files(monkeypatch).texts.update({"/f": "oom 1\noom_kill 5 6\nx_oom_kill 4\noom_kill 3\n", "/g": "oom_kill x\n"})
    assert [deaths._counter("/f", name) for name in ("oom_kill", "oom", "none")] == [3, 1, None]
    assert deaths._counter("/g", "oom_kill") is None is deaths._counter("/none", "oom_kill")


@pytest.mark.parametrize("in_log", [None, "Killed process 7"])
def test_a_kill_for_memory_is_what_the_counters_gained(monkeypatch, in_log):
    files = Files(monkeypatch)
    group, machine = "/sys/fs/cgroup/a/memory.events", "/proc/vmstat"
    files.texts.update({"/proc/7/cgroup": "0::/a\n", group: "oom_kill 2\n", machine: "oom_kill 4\n"})
    can_read = [False]
    monkeypatch.setattr(deaths, "_in_kernel_log", lambda pid: in_log)
    monkeypatch.setattr(deaths.os, "access", lambda path, mode: can_read[0])
    watch = deaths.OomWatch()
    watch.look(7)
    assert watch.counted(7) is None and watch.verdict(7) == in_log
    files.texts[machine] = "oom_kill 5\n"
    assert watch.counted(7) == "the machine's count of out-of-memory kills rose while the process ran"
    can_read[0] = True
    assert watch.counted(7) == in_log
    files.texts[group] = "oom_kill 3\n"
    watch.look(7)  # the count from before stays
    assert watch.counted(7) == f"out-of-memory kill counted in {group}"
    assert watch.verdict(7) == (in_log or f"out-of-memory kill counted in {group}")
    del files.texts[group], files.texts[machine]
    assert watch.counted(7) is None and deaths.OomWatch().counted(7) is None
    files.texts.update({group: "oom_kill 0\n", machine: "oom_kill 0\n"})
    watch = deaths.OomWatch()
    watch.look(7)
    del files.texts[group], files.texts[machine]
    assert watch.counted(7) is None


def test_the_kernels_own_line(monkeypatch):
    records = [
        b"4,1,2,-;usb 1\n SUBSYSTEM=x\n",
        b"3,1,2,-;Out of memory: Killed process 71 (a)\n",
        BrokenPipeError,
        b"3,1,2,-;Memory cgroup out of memory: Killed process 7 (python) total-vm:1;kB\n KEY=1\n",
        b"3,1,2,-;Out of memory: Killed process 8 (b)\n",
        BlockingIOError,
    ]
    closed = []

    def read(descriptor, count, left):
        record = left.pop(0)
        if isinstance(record, type):
            raise record
        return record

    for pid, line in ((7, "Memory cgroup out of memory: Killed process 7 (python) total-vm:1;kB"), (9, None)):
        left = list(records)
        monkeypatch.setattr(deaths.os, "open", lambda path, flags: 1234)
        monkeypatch.setattr(deaths.os, "read", lambda descriptor, count, left=left: read(descriptor, count, left))
        monkeypatch.setattr(deaths.os, "close", closed.append)
        found = deaths._in_kernel_log(pid)
        monkeypatch.undo()
        assert found == line and closed.pop() == 1234
    monkeypatch.setattr(deaths, "_KERNEL_LOG", "/proc/nowhere")
    assert deaths._in_kernel_log(7) is None


@pytest.mark.parametrize("can_read_the_log", [True, False])
def test_a_machine_that_ran_out_of_memory_elsewhere_is_no_evidence_where_the_kernel_says_more(
    monkeypatch, tmp_path, can_read_the_log
):
    """Another job's process was killed for memory while a rank of ours died by an ordinary SIGKILL."""
    kills = iter([5, 6])
    monkeypatch.setattr(deaths, "_cgroup_files", lambda pid: [])
    monkeypatch.setattr(deaths, "_counter", lambda path, name: next(kills))
    log = tmp_path / "kmsg"
    if can_read_the_log:
        log.write_bytes(b"6,1,2,-;Memory cgroup out of memory: Killed process 4243 (python)\n")
    monkeypatch.setattr(deaths, "_KERNEL_LOG", str(log))
    monkeypatch.setattr(deaths, "_in_kernel_log", lambda pid: None)
    watch = deaths.OomWatch()
    watch.look(4242)
    said = watch.counted(4242)
    assert said is None if can_read_the_log else "rose while the process ran" in said
