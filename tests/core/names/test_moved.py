"""Tests of dbrdist.core.names.moved."""

from __future__ import annotations

import importlib

import pytest

from dbrdist.core.names import moved


class _DeadlockError(RuntimeError):
    """As Python's own, which has no public name."""


def test_an_import_that_would_wait_for_another_thread_is_tried_again(monkeypatch):
    tries = []

    def load(path):
        tries.append(path)
        if path == "within":
            raise _DeadlockError
        if len(tries) == 1:
            with pytest.raises(_DeadlockError):  # of an import within an import, whose locks others wait for, at once
                moved.loaded("within")
            raise _DeadlockError
        if path == "broken":
            raise RuntimeError("of the module")
        return path

    monkeypatch.setattr(moved.time, "sleep", tries.append)
    monkeypatch.setattr(importlib, "import_module", load)
    assert moved.loaded("rooms") == "rooms" and tries == ["rooms", "within", 0.01, "rooms"]
    with pytest.raises(RuntimeError, match="of the module"):
        moved.loaded("broken")
