"""Tests of dbrdist.training.runs."""

from __future__ import annotations

from dbrdist.training import runs


def test_the_folder_of_a_run_or_of_a_snapshot_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for name in ("snapshot", "run/snapshot"):
        (tmp_path / name).write_bytes(b"")
    for given, folder in (("snapshot", "."), ("run/snapshot", "run"), ("run", "run"), ("absent", "absent")):
        assert runs.folder_of(given) == folder
    assert runs.folder_of(tmp_path / "run" / "snapshot") == str(tmp_path / "run")
