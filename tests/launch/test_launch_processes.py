"""What /proc and the kernel tell of processes, and what the environment of a rank's program is made of."""

import contextlib
import io
import os
import select
import signal
import subprocess
import sys
import threading
import time

import pytest
from dbrdist_launch import limits, linux
from dbrdist_launch.identity import Identity
from dbrdist_launch.messages import Welcome
from dbrdist_launch.rank import deaths, gpus, spy, workers
from dbrdist_launch.rank import surroundings as surroundings_module
from dbrdist_launch.rank.surroundings import surroundings

# Python warns of forks beside threads, as those of the test runner; what is forked here calls the kernel alone.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
GONE = 1 << 22  # above the greatest process id


def until(condition, seconds=60.0):
    """Wait for what another process is about to do."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def fork():
    """Makes children that end when the test does; a child waits after `act` unless that ends it."""
    made = []

    def start(act=lambda: None):
        pid = os.fork()
        if not pid:
            try:
                act()
                signal.pause()
            finally:
                os._exit(0)
        made.append(pid)
        return pid

    yield start
    for pid in made:
        linux.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def in_child(act):
    """What `act` returns in a process of its own, as an exit code."""
    pid = os.fork()
    if not pid:
        code = 99
        try:
            code = act()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# ---- /proc ----------------------------------------------------------------------------------------------------------


def test_states_of_processes(fork):
    sleeper, ended = fork(), fork(lambda: os._exit(5))
    until(lambda: linux.state(ended) == "Z" and linux.state(sleeper) == "S")
    assert (linux.state(os.getpid()), linux.state_and_tracer(os.getpid())) == ("R", ("R", False))
    assert linux.stat(ended)[-1] == str(5 << 8) and linux.stat(sleeper)[1] == str(os.getpid())
    assert (linux.state(GONE), linux.stat(GONE), linux.state_and_tracer(GONE)) == ("", None, ("", False))
    os.kill(sleeper, signal.SIGSTOP)
    until(lambda: linux.state_and_tracer(sleeper) == ("T", False))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Name:\tx\nState:\tS (sleeping)\nTracerPid:\t0\nSigCgt:\t0\n", ("S", False)),
        ("State:\tt (tracing stop)\nTracerPid:\t17\nState:\tZ\n", ("t", True)),
        ("State:\n", ("", False)),
        ("TracerPid:\t3\n", ("", True)),
    ],
)
def test_a_tracer_is_seen(monkeypatch, text, found):
    monkeypatch.setattr(linux, "open", lambda path, **more: io.StringIO(text), raising=False)
    assert linux.state_and_tracer(7) == found


def test_signals_that_have_a_handler(fork):
    def catch():
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # whatever this process does with it
        signal.signal(signal.SIGUSR2, lambda *_: None)

    pid = fork(catch)
    until(lambda: linux.catches(pid, signal.SIGUSR2))
    assert not linux.catches(pid, signal.SIGUSR1) and not linux.catches(pid, signal.SIGPIPE)
    assert not linux.catches(GONE, signal.SIGUSR2)


def test_signals_of_which_a_process_does_not_die(fork):
    def begin():
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.signal(signal.SIGXCPU, signal.SIG_IGN)
        signal.signal(signal.SIGUSR2, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPWR])

    pid = fork(begin)
    until(lambda: linux.expects(pid, signal.SIGPWR))
    expected = [number for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU) if linux.expects(pid, number)]
    assert expected == [signal.SIGUSR2, signal.SIGXCPU] and linux.ignores(pid, signal.SIGXCPU)
    assert not linux.ignores(pid, signal.SIGUSR2) and not linux.expects(GONE, signal.SIGUSR2)
    waiting = fork(lambda: signal.sigwait([signal.SIGPWR]))
    until(lambda: linux.expects(waiting, signal.SIGPWR))


def _beside_a_child(then):
    """A parent without a handler that does `then`, beside a child that has one."""
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    (read, _write), parent = os.pipe(), os.getpid()
    child = os.fork()
    if child == 0:
        linux.die_with_parent(parent)
        signal.signal(signal.SIGUSR2, lambda *_: None)
        signal.pause()
    then(child, read)


def _spin(child, read):
    while True:
        pass


@pytest.mark.parametrize(
    ("then", "heard"),
    [
        (lambda child, read: os.waitpid(child, 0), True),  # as a shell does
        (lambda child, read: os.read(read, 1), True),  # x=$(program)
        (lambda child, read: select.select([read], [], []), True),
        (lambda child, read: time.sleep(60), False),
        (lambda child, read: threading.Event().wait(), False),
        (_spin, False),
    ],
)
def test_a_signal_that_only_a_helper_expects(fork, then, heard):
    pid = fork(lambda: _beside_a_child(then))
    until(lambda: any(linux.expects(child, signal.SIGUSR2) for child in linux.children(pid)), 20)
    until(lambda: linux.hears(pid, signal.SIGUSR2) == heard, 20)  # it comes there in a moment
    assert not linux.expects(pid, signal.SIGUSR2) and linux.hears(linux.children(pid)[0], signal.SIGUSR2)


def test_children_and_what_is_below_them(fork, tmp_path):
    def grow():
        below = os.fork()
        if below:
            (tmp_path / "below").write_text(str(below))
            os.rename(tmp_path / "below", tmp_path / "told")
        signal.pause()

    pid, other = fork(grow), fork()
    until((tmp_path / "told").exists)
    below = int((tmp_path / "told").read_text())
    assert {pid, other} <= set(linux.children(os.getpid())) and below not in linux.children(os.getpid())
    found = linux.descendants(os.getpid())
    assert found.index(pid) < found.index(below) and other in found and found.count(below) == 1
    assert linux.descendants(pid) == [below] == linux.children(pid)
    assert linux.children(GONE) == [] == linux.descendants(below)
    linux.kill(below, signal.SIGKILL)


def test_signals_to_those_who_are_gone_or_have_no_group(fork):
    pid = fork()
    assert linux.kill(pid, 0) and not linux.kill(GONE, signal.SIGTERM)
    linux.kill_group(GONE, signal.SIGTERM)
    linux.kill_group(pid, signal.SIGKILL)  # no group of its own: itself
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def test_a_group_is_signalled_as_a_whole(fork, tmp_path):
    def lead():
        os.setsid()
        if os.fork():
            (tmp_path / "made").touch()

    pid = fork(lead)
    until((tmp_path / "made").exists)
    (below,) = linux.children(pid)
    linux.kill_group(pid, signal.SIGTERM)
    assert os.waitpid(pid, 0)[1] == signal.SIGTERM
    until(lambda: linux.state(below) in ("", "Z"))


def test_mapped_files_are_those_with_a_prefix(monkeypatch):
    text = (
        "7f00-7f01 r--p 00000000 08:01 11 /dev/shm/mpich_shm_a b\n7f02-7f03 rw-p 0 00:00 0 \n"
        "7f04-7f05 r--p 0 08:01 12 /usr/lib/x.so\n7f06-7f07 r--p 0 08:01 11 /dev/shm/mpich_shm_c\n"
    )
    monkeypatch.setattr(linux, "open", lambda path, **more: io.StringIO(text), raising=False)
    assert linux.mapped_files(7, "/dev/shm/mpich_shm_") == {"/dev/shm/mpich_shm_a b", "/dev/shm/mpich_shm_c"}
    monkeypatch.undo()
    assert linux.mapped_files(GONE, "/") == set() != linux.mapped_files(os.getpid(), "/")


def test_who_loses_its_parent_is_ended_or_adopted(tmp_path):
    """The kernel's signal for the death of a parent; one that died before is noticed too."""

    def adopt():
        linux.adopt_orphans()
        middle = os.fork()
        if not middle:
            parent = os.getpid()
            if not os.fork():
                linux.die_with_parent(parent, signal.SIGTERM)
                (tmp_path / "ready").touch()
                time.sleep(60)
            until((tmp_path / "ready").exists)
            os._exit(0)
        os.waitpid(middle, 0)
        return os.waitstatus_to_exitcode(os.waitpid(-1, 0)[1]) + 100  # an orphan is ours

    assert in_child(adopt) == 100 - signal.SIGTERM
    us = os.getpid()
    assert in_child(lambda: linux.die_with_parent(us, signal.SIGUSR1) or 7) == 7
    assert in_child(lambda: linux.die_with_parent(us + 1, signal.SIGUSR1) or 7) == -signal.SIGUSR1
    assert in_child(lambda: linux.die_with_parent(us + 1) or 7) == -signal.SIGKILL


def test_all_descendants_are_ended_and_fetched(tmp_path):
    def act():
        linux.adopt_orphans()
        if not os.fork():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.fork()
            os.setsid()
            (tmp_path / str(os.getpid())).touch()
            time.sleep(60)
        until(lambda: len(os.listdir(tmp_path)) == 2)
        linux.end_descendants()
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return len(linux.descendants(os.getpid()))
        return 50

    assert in_child(act) == 0


@pytest.mark.parametrize("rounds", [100, 1 << 60])
def test_descendants_that_the_kernel_ends_late_are_waited_for_and_no_longer_than_asked(rounds, monkeypatch):
    asked, kill = [], linux.kill

    def late(pid, number):
        asked.append(pid)
        return kill(pid, number if len(asked) > rounds else 0)

    def act():
        linux.adopt_orphans()
        if not os.fork():
            time.sleep(60)
        monkeypatch.setattr(linux, "kill", late)
        linux.end_descendants(20.0 if rounds == 100 else 0.02)
        left = linux.descendants(os.getpid())
        for pid in left:
            kill(pid, signal.SIGKILL)
        return len(left)

    assert in_child(act) == (rounds != 100)


# ---- workers --------------------------------------------------------------------------------------------------------


class Family:
    """Children of a rank, as /proc would show them."""

    def __init__(self, monkeypatch):
        self.now, self.states, self.programs, self.statuses = 100.0, {}, {1: "/python"}, {}
        monkeypatch.setattr(workers.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(linux, "children", lambda pid: list(self.states) if pid == 1 else [])
        monkeypatch.setattr(linux, "state", self.states.get)
        monkeypatch.setattr(linux, "stat", lambda pid: ["Z", "1", str(self.statuses.get(pid, 0))])
        monkeypatch.setattr(workers.os, "readlink", self._program)
        self.watch = workers.WorkerWatch(1)

    def _program(self, path):
        found = self.programs.get(int(path.split("/")[2]))
        if found is None:
            raise OSError
        return found


@pytest.mark.parametrize(
    ("status", "how"),
    [
        (9, "killed by SIGKILL"),
        (3 << 8, "ended with exit code 3"),
        (0, None),
        (signal.SIGTERM, None),
        (signal.SIGINT, None),
        (signal.SIGHUP, None),
        (143 << 8, "ended with exit code 143"),
    ],
)
def test_a_worker_that_died_is_told_once_after_a_time(monkeypatch, status, how):
    family = Family(monkeypatch)
    family.states.update({5: "S", 6: "S", 7: "S"})
    family.programs.update({5: "/python", 6: "/bin/sh"})
    assert family.watch.look() is None
    family.states.update(dict.fromkeys((5, 6, 7, 8), "Z"))  # 8 came and went between two looks
    family.programs.clear()
    family.statuses = dict.fromkeys((5, 6, 7, 8), status)
    assert family.watch.look() is None
    family.now += limits.WORKER_SECONDS - 2.0**-10
    assert family.watch.look() is None
    family.now = 100.0 + limits.WORKER_SECONDS
    assert family.watch.look() == ((5, how) if how else None)
    assert family.watch.look() is None


def test_odd_stats_are_no_bad_end(monkeypatch):
    for fields, how in ((None, None), ([], None), (["Z", "x"], None), (["Z", "256"], "ended with exit code 1")):
        monkeypatch.setattr(linux, "stat", lambda pid, fields=fields: fields)
        assert workers._bad_end(5) == how


# ---- memory ---------------------------------------------------------------------------------------------------------


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


# ---- py-spy and GPUs ------------------------------------------------------------------------------------------------


def test_py_spy_is_asked_about_the_first_python(fork, tmp_path, monkeypatch):
    asked = tmp_path / "py-spy"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    shell = subprocess.Popen(["/bin/sleep", "60"])
    assert spy.by_py_spy([shell.pid, os.getpid()]) == "" == spy.by_py_spy([]) == spy.by_py_spy([GONE, shell.pid])
    for text, said in (
        ("echo $*", f"dump --pid {os.getpid()}\n"),
        ("echo no right >&2", "py-spy: no right"),
        (f"printf '%{limits.TAIL_BYTES + 2}s' x", f"{'x':>{limits.TAIL_BYTES}}"),
    ):
        asked.write_text(f"#!/bin/sh\n{text}\n")
        asked.chmod(0o755)
        assert spy.by_py_spy([shell.pid, os.getpid()]) == said
    asked.chmod(0o644)
    assert spy.by_py_spy([os.getpid()]).startswith("py-spy: ")
    shell.kill()
    shell.wait()


@pytest.mark.parametrize(
    ("local_rank", "given", "found"),
    [(1, "4,5,", "5"), (2, "4,5", "4"), (3, "GPU-a,GPU-b,GPU-c", "GPU-a"), (0, "", None), (4, None, "1")],
)
def test_each_local_rank_has_a_gpu(monkeypatch, local_rank, given, found):
    monkeypatch.setattr(gpus.os, "listdir", lambda path: ["a", "b", "c"])
    environment = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    assert gpus.for_local_rank(local_rank, environment) == ({} if found is None else {"CUDA_VISIBLE_DEVICES": found})
    assert gpus.count() == 3

    def nothing(path):
        raise FileNotFoundError

    monkeypatch.setattr(gpus.os, "listdir", nothing)
    assert gpus.count() == 0 and gpus.for_local_rank(0, {}) == {}


# ---- the program's environment --------------------------------------------------------------------------------------

WHO = Identity(5, 8, 2, 4, "a")
INJECT = os.path.join(os.path.dirname(surroundings_module.__file__), "inject")


def made(inherited=(), who=WHO, **terms):
    welcome = {
        "command": [], "environment": {}, "directory": None, "host_timeout": 6.0, "window": 9, "threads": "keep",
        "gpus": "all", "inject": False, "master": "", "port": 0, "files": [], "local_sizes": {}, **terms,
    }  # fmt: skip
    return surroundings(dict(inherited), Welcome(**welcome), who)


def test_the_names_that_other_frameworks_read():
    found = made(
        {"RANK": "9", "MASTER_ADDR": "m", "A": "1", "DBRDIST_LAUNCH_TOKEN": "t", "DBRDIST_LAUNCH_CHANNEL": "c"}
    )
    assert found == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "m", "A": "1",
        "DBRDIST_LAUNCH": "1",
    }  # fmt: skip
    assert made(master="n0")["MASTER_ADDR"] == "n0" and made(master=None)["MASTER_ADDR"] == "127.0.0.1"
    assert made()["MASTER_ADDR"] == "127.0.0.1"
    assert made({"A": "1", "B": "2"}, environment={"A": "3", "RANK": "7"})["A"] == "3"
    assert made(environment={"RANK": "7"})["RANK"] == "5"


def test_how_many_ranks_share_a_host_is_the_starters_word_or_the_plans():
    unknown = WHO._replace(local_size=0)
    assert made(who=unknown, local_sizes={"a": 3, "b": 2})["LOCAL_WORLD_SIZE"] == "3"
    assert made(who=unknown, local_sizes={"b": 2})["LOCAL_WORLD_SIZE"] == "1" == made(who=unknown)["LOCAL_WORLD_SIZE"]
    assert made(local_sizes={"a": 3})["LOCAL_WORLD_SIZE"] == "4"


def test_what_was_set_about_buffers_and_threads_is_kept(monkeypatch):
    for value in ("x", "", "0"):
        assert made({"PYTHONUNBUFFERED": value})["PYTHONUNBUFFERED"] == value
    assert "PYTHONUNBUFFERED" not in made()
    for cores, local_size, threads in ((14, 4, "3"), (2, 4, "1"), (7, 0, "7")):
        monkeypatch.setattr(surroundings_module, "available_cores", lambda cores=cores: cores)
        who = WHO._replace(local_size=local_size)
        assert made(threads="auto", who=who)["OMP_NUM_THREADS"] == threads
        assert made({"OMP_NUM_THREADS": "9"}, threads="auto", who=who)["OMP_NUM_THREADS"] == "9"
    monkeypatch.setattr(surroundings_module, "available_cores", lambda: 8)
    for each, step, threads in (("4", "0", "4"), ("16", "0", "8"), ("4", None, "2")):  # what Slurm counts for a task
        inherited = {"SLURM_CPUS_PER_TASK": each} | ({"SLURM_STEP_ID": step} if step else {})
        assert made(inherited, threads="auto")["OMP_NUM_THREADS"] == threads
    assert "OMP_NUM_THREADS" not in made(threads="keep") and "OMP_NUM_THREADS" not in made()


def test_gpus_are_shared_out_where_that_was_asked():
    four = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert made(four, gpus="rank")["CUDA_VISIBLE_DEVICES"] == "6"
    assert made(four, gpus="all")["CUDA_VISIBLE_DEVICES"] == "4,5,6,7" == made(four)["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize(("before", "after"), [(None, INJECT), ("", INJECT), ("/a:/b", f"{INJECT}:/a:/b")])
def test_hooks_come_before_the_users_own_path(before, after):
    inherited = {} if before is None else {"PYTHONPATH": before}
    found = made(inherited, inject=True)
    was = {None: "unset", "": "empty"}.get(before, "set")
    assert (found["PYTHONPATH"], found["DBRDIST_LAUNCH_INJECTED"]) == (after, was)
    assert made(inherited, inject=True)["PYTHONPATH"] == after
    assert made(inherited).get("PYTHONPATH") == before
    assert os.path.exists(os.path.join(INJECT, "sitecustomize.py"))
