"""Tests of dbrdist.cli.output.lock."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dbrdist.cli.output import lock as locks
from dbrdist.cli.output.folder import state_seen
from dbrdist.cli.output.lock import Lock, holder_of
from dbrdist.errors import ConfigError
from tests.cli.cli_helpers import ROOT
from tests.descriptors import open_files

HOLD = """
import sys, time
from dbrdist.cli.output.folder import RunFolder
from dbrdist.errors import ConfigError
folder = RunFolder(sys.argv[1])
try:
    folder.open("resume")
except ConfigError as error:
    print(error, flush=True)
    sys.exit(2)
print("has it", flush=True)
sys.stdin.read()
folder.close()
"""


def start_holder(folder):
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.fixture
def holder(tmp_path):
    process = start_holder(tmp_path / "held")
    assert process.stdout.readline() == "has it\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.programs
def test_two_runs_in_one_folder(run, holder):
    code, _, err = run("run.yaml", "out=held")
    assert code == 2
    expected = f"held: a run is writing to this folder (process {holder.pid} on {socket.gethostname()}, since "
    assert expected in err
    assert os.listdir("held") == ["run.lock"]


@pytest.mark.programs
def test_the_lock_of_a_killed_process_is_free(run, holder):
    holder.kill()
    holder.wait()
    assert Path("held/run.lock").exists()
    assert run("run.yaml", "out=held")[0] == 0
    assert not Path("held/run.lock").exists()


class Clock:
    """Time that passes while somebody sleeps, and then alone; who else lives does so meanwhile."""

    def __init__(self):
        self.now, self.meanwhile, self.naps = 100.0, lambda: None, []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.naps.append(seconds)
        self.meanwhile()

    strftime = staticmethod(time.strftime)


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(locks, "time", Clock())
    return locks.time


def test_a_holder_on_another_host_is_looked_for(tmp_path, clock, capfd):
    path = tmp_path / "run.lock"
    path.write_text(json.dumps({"host": "elsewhere", "pid": 7, "started": 1, "since": "noon"}))
    lock = Lock(str(path))
    lock.acquire()  # nobody touched it
    assert "names process 7 on elsewhere" in capfd.readouterr().out
    assert clock.naps == [1.0] * 35
    lock.release()
    path.write_text(json.dumps({"host": "elsewhere", "pid": 7, "started": 1, "since": "noon"}))
    begun = clock.now
    clock.meanwhile = lambda: clock.now >= begun + 10 and os.utime(path, (clock.now, clock.now))  # as a holder does
    with pytest.raises(ConfigError, match=r"process 7 on elsewhere, since noon"):
        Lock(str(path)).acquire()
    assert clock.now < begun + 12
    assert path.exists()


def test_a_lock_whose_descriptor_the_program_closed_is_given_back(tmp_path):
    """As code does that makes a daemon of itself: `os.closerange(3, 256)`."""
    path = str(tmp_path / "run.lock")
    lock = Lock(path)
    lock.acquire()
    (own,) = (number for number, name in open_files() if name == path)
    os.close(own)
    lock.release()
    lock.release()


def test_a_file_system_without_locks(tmp_path, clock, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(locks.fcntl, "flock", unsupported)
    first, path = Lock(str(tmp_path / "run.lock")), tmp_path / "run.lock"
    first.acquire()
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
        Lock(str(path)).acquire()
    first.release()
    dead = subprocess.Popen(["true"])
    dead.wait()
    path.write_text(json.dumps({"host": socket.gethostname(), "pid": dead.pid, "started": 1, "since": "noon"}))
    second = Lock(str(path))
    second.acquire()
    second.release()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 5}', "\0" * 40, '{"host": 1, "pid": [], "started": {}}'])
def test_a_damaged_lock_is_taken(tmp_path, clock, text):
    path = tmp_path / "run.lock"
    path.write_text(text)
    lock = Lock(str(path))
    lock.acquire()
    assert json.loads(path.read_text())["pid"] == os.getpid()
    lock.release()


def test_a_look_at_a_lock_leaves_nothing_behind(tmp_path):
    path = tmp_path / "run.lock"
    assert holder_of(str(path)) is None
    for text, found in (
        ("{}", None), ("", None), ('{"host": "elsewhere", "pid": 7}', {"host": "elsewhere", "pid": 7}),
        (json.dumps({"host": socket.gethostname(), "pid": 7}), None),
    ):  # fmt: skip
        path.write_text(text)
        before = open_files()
        assert holder_of(str(path)) == found
        assert not open_files() - before
    lock = Lock(str(path))
    before = open_files()
    lock.acquire()
    (held,) = open_files() - before
    assert holder_of(str(path))["pid"] == os.getpid() and open_files() - before == {held}
    path.write_text("")
    assert holder_of(str(path)) == {}
    lock.release()
    lock.release()
    assert not path.exists() and not open_files() - before


def test_a_lock_names_its_holder_alone(tmp_path):
    path = tmp_path / "run.lock"
    path.write_text(json.dumps({"host": socket.gethostname(), "pid": "gone", "since": "x" * 1000}))
    lock = Lock(str(path))
    lock.acquire()
    found = json.loads(path.read_text())
    assert (found["pid"], found["host"]) == (os.getpid(), socket.gethostname())
    lock.release()


@pytest.mark.programs
def test_a_copy_of_a_folder_is_not_held_by_the_run_in_the_folder_itself(tmp_path, holder):
    """Its lock names a process that lives, and that writes elsewhere; a folder that was moved goes with its run."""
    held = tmp_path / "held"
    shutil.copytree(held, tmp_path / "copy")
    assert locks.seems_held(held / "run.lock") and not locks.seems_held(tmp_path / "copy" / "run.lock")
    assert state_seen(str(tmp_path / "copy"), {"status": "running"}) == "failed"
    held.rename(tmp_path / "moved")
    assert locks.seems_held(tmp_path / "moved" / "run.lock")
    assert state_seen(str(tmp_path / "moved"), {"status": "running"}) == "running"
    copy = start_holder(tmp_path / "copy")  # its own run may begin
    assert copy.stdout.readline() == "has it\n"
    assert locks.seems_held(tmp_path / "copy" / "run.lock")
    copy.communicate("")
    assert copy.returncode == 0


def test_a_process_whose_files_nobody_may_see_counts(tmp_path):
    (tmp_path / "file").touch()
    assert locks._may_have_open("nobody", (tmp_path / "file").stat())
    assert not locks._may_have_open(os.getpid(), (tmp_path / "file").stat())


def test_whether_a_folder_seems_held(tmp_path):
    """On this host by the process and the file that it has open; on another by when the file was touched."""
    path, here = tmp_path / "run.lock", socket.gethostname()
    me = {"host": here, "pid": os.getpid(), "started": locks._start_of(os.getpid())}

    def seems(entry, age_seconds=0.0):
        path.write_text(json.dumps(entry))
        os.utime(path, (0, time.time() - age_seconds))
        return locks.seems_held(str(path))

    assert not locks.seems_held(str(path)) and not seems(me)  # which has it open no more
    with open(path, "rb"):
        assert seems(me, 1e6)
        assert not seems({**me, "started": me["started"] + 1}) and not seems({**me, "pid": 2**22 + 1})
        assert seems({**me, "started": None}) and not seems({**me, "started": None}, 1e6)
    there = {**me, "host": "another"}
    assert [seems(there, age) for age in (0, 65, 75)] == [True, True, False]
    assert not seems({}) and not seems([])


def test_without_locks_of_the_kernel_the_last_to_write_has_it(tmp_path, clock, monkeypatch):
    """Another process may have come to the same point: both look again after a moment."""
    path, ours = tmp_path / "run.lock", Lock(str(tmp_path / "run.lock"))
    monkeypatch.setattr(locks.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(95, "Operation not supported")))
    ours.acquire()
    assert clock.naps == [0.3]
    ours.release()
    other = {"host": "elsewhere", "pid": 7, "started": 1, "since": "noon"}
    clock.meanwhile = lambda: path.write_text(json.dumps(other))
    with pytest.raises(ConfigError, match="process 7 on elsewhere, since noon"):
        ours.acquire()
    assert clock.naps == [0.3, 0.3] and ours._descriptor == -1


def test_a_lock_of_the_kernel_needs_no_second_look(tmp_path, clock):
    one = Lock(str(tmp_path / "run.lock"))
    one.acquire()
    one.release()
    one.release()
    assert clock.naps == [] and not (tmp_path / "run.lock").exists()


def test_a_lock_is_touched_until_it_is_given_back(tmp_path, monkeypatch):
    """Once a period, whether or not its file is there."""
    lock = Lock(str(tmp_path))
    waits, touched = [], []

    class Ended:
        def wait(self, seconds):
            waits.append(seconds)
            return len(waits) == 4

    def touch(path):
        touched.append(path)
        if len(touched) == 2:
            raise FileNotFoundError

    monkeypatch.setattr(lock, "_ended", Ended())
    monkeypatch.setattr(locks.os, "utime", touch)
    lock._touch()
    assert waits == [locks.TOUCH_SECONDS] * 4 and touched == [lock.path] * 3
