"""Tests of dbrdist.core.names.moved."""

from __future__ import annotations

import importlib
import importlib.util

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


def test_a_question_whether_there_is_a_module_of_pytorch_is_answered_with_no():
    assert importlib.util.find_spec("dbrdist.nn") is None
    assert importlib.util.find_spec("dbrdist.optim") is None
    assert importlib.util.find_spec("dbrdist.variable") is not None  # a path that has moved
    with pytest.raises(ModuleNotFoundError, match=r"write dbrdist\.links"):
        importlib.import_module("dbrdist.nn")
    with pytest.raises(ModuleNotFoundError, match=r"write dbrdist\.optimizers"):
        import dbrdist.optim  # noqa: F401
