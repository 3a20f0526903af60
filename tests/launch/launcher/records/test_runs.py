"""Folders of jobs: their names, their status, and what cannot be written."""

import fcntl
import json
import os
import re
import threading

import pytest
from dbrdist_launch.errors import LaunchError
from dbrdist_launch.launcher.judgement.report import Failure
from dbrdist_launch.launcher.records import runs
from dbrdist_launch.launcher.records.runs import LaunchFolder
from dbrdist_launch.launcher.running.plan import Outcome


@pytest.mark.parametrize("name", ["", "a/b", ".a", "a\n", "latest"])
def test_names_of_jobs_are_plain_words(name):
    with pytest.raises(LaunchError, match="expected a name that a folder can have"):
        LaunchFolder(name, [], None, None)


def test_runs_have_folders_of_their_own(tmp_path):
    runs = [LaunchFolder("late", [], str(tmp_path / "logs"), None) for _ in range(3)]
    assert [run.name for run in runs] == ["late", "late-2", "late-3"]
    assert os.readlink(tmp_path / "logs" / "latest") == "late-3"
    assert LaunchFolder("x", [], None, None).folder is None
    assert LaunchFolder("x", [], None, str(tmp_path / "r.json")).paths == [str(tmp_path / "r.json")]
    with pytest.raises(LaunchError, match=r"--record .*: the folder .* does not exist"):
        LaunchFolder("x", [], None, str(tmp_path / "nowhere" / "r.json"))
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"--log-dir .* cannot be written"):
        LaunchFolder("x", [], str(tmp_path / "file" / "logs"), None)


@pytest.mark.parametrize(("is_there", "may_write"), [(True, True), (True, False), (False, True)])
def test_a_record_needs_a_folder_to_write_to(tmp_path, monkeypatch, is_there, may_write):
    monkeypatch.setattr(os, "access", lambda path, mode: may_write and mode == os.W_OK)
    path = str((tmp_path if is_there else tmp_path / "none") / "record.json")
    if is_there and may_write:
        LaunchFolder._check_record(None, path)
        LaunchFolder._check_record(None, "record.json")
    else:
        with pytest.raises(LaunchError, match="does not exist or is not writable"):
            LaunchFolder._check_record(None, path)


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
