"""Tests of dbrdist.cli.output.provenance."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from dbrdist.cli.output import provenance
from dbrdist.comm import create_communicator


def test_the_commit_is_told_with_its_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@b")

    def git(*words):
        return subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True, text=True).stdout

    assert provenance.commit(str(tmp_path)) is None
    git("init", "-q")
    assert provenance.commit(str(tmp_path)) is None
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-qm", "first")
    head = git("rev-parse", "HEAD").strip()
    assert len(head) == 40 and provenance.commit(str(tmp_path)) == head
    (tmp_path / "file").write_text("bc")
    assert provenance.commit(str(tmp_path)) == f"{head}+changes"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.commit(str(tmp_path)) is None


@pytest.mark.slow
def test_the_facts_of_a_start(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["/bin/dbrdist-train", "a b.yaml", "seed=1"])
    monkeypatch.setattr(provenance.socket, "gethostname", lambda: "here")
    monkeypatch.chdir(tmp_path)
    found = provenance.facts(create_communicator("naive"))
    assert found.pop("versions") == {"python": ".".join(map(str, sys.version_info[:3])), "numpy": np.__version__}
    assert found.pop("version") and found.pop("commit") == provenance.commit(str(tmp_path))
    assert found == {
        "command": "dbrdist-train 'a b.yaml' seed=1", "directory": str(tmp_path), "pid": os.getpid(),
        "hosts": {"here": 1}, "communicator": "naive", "num_ranks": 1,
    }  # fmt: skip


def test_a_removed_directory_has_no_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    found = provenance.facts(create_communicator("single"))
    assert found["directory"] is None and found["commit"] is None
