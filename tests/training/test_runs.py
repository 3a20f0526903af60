"""Tests of dbrdist.training.runs."""

from __future__ import annotations

import pytest

from dbrdist.errors import CheckpointError
from dbrdist.training import runs


def test_the_folder_of_a_run_or_of_a_snapshot_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for name in ("snapshot", "run/snapshot"):
        (tmp_path / name).write_bytes(b"")
    for given, folder in (("snapshot", "."), ("run/snapshot", "run"), ("run", "run"), ("absent", "absent")):
        assert runs.folder_of(given) == folder
    assert runs.folder_of(tmp_path / "run" / "snapshot") == str(tmp_path / "run")


def test_why_the_folder_of_a_run_cannot_be_read_is_said(tmp_path):
    words = "expected the folder of a run of dbrdist-train, with a model.json in it: "
    with pytest.raises(CheckpointError) as caught:
        runs.read_recipe(str(tmp_path))
    assert str(caught.value) == f"{tmp_path}: {words}No such file or directory"
    (tmp_path / "model.json").write_text("{no JSON")
    with pytest.raises(CheckpointError, match=f"{words}Expecting property name"):
        runs.read_recipe(str(tmp_path))
