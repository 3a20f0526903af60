"""The file of measured networks."""

import json

import pytest
from dbrdist_launch.doctor import record
from dbrdist_launch.launcher.records.runs import LaunchFolder


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
