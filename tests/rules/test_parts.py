"""The inner loop runs in parts: each test file in one of them, by a plan that all processes make alike."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests import conftest, parts
from tests.each import each


@pytest.mark.slow
@each(num_parts=[1, 2, 3, 7], markexpr=["", "not slow"])
def test_each_file_is_in_one_part(num_parts, markexpr):
    found = [parts.files_of(f"{k + 1}/{num_parts}", markexpr) for k in range(num_parts)]
    assert sorted(name for part in found for name in part) == sorted(map(str, parts.HERE.rglob("test_*.py")))


def test_parts_are_about_as_large():
    assert parts.divided([("a", 7), ("b", 1), ("c", 5), ("d", 3)], 2) == [{"a", "b"}, {"c", "d"}]


def test_only_files_whose_tests_run_count_in_a_part():
    names = "mpi/test_mpi_bytes.py", "fuzz/test_launcher.py", "rules/test_parts.py"
    apart, programs, usual = (parts.HERE / name for name in names)
    for markexpr, counts in (("", True), ("not slow", False), ("not programs", False)):
        assert parts.size(apart, markexpr) == 0
        assert parts.size(programs, markexpr) == (programs.stat().st_size if counts else 0)
        assert parts.size(usual, markexpr) == usual.stat().st_size


@each(words=["0/2", "3/2", "2", "x/2", "-1/2", ""])
def test_there_is_no_such_part(words):
    with pytest.raises(argparse.ArgumentTypeError, match="K from 1 to N"):
        parts.part(words)


def test_a_part_that_was_killed_is_a_failure(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\ncase "$*" in *" 2/2") kill -KILL $$;; esac\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert parts.main(["1"]) == 0
    assert parts.main(["2"]) == 128 + signal.SIGKILL


@each(part=["1/2", "2/2"], name=["conftest.py", "rules/test_parts.py", "each.py"])
def test_files_of_other_parts_are_not_imported(part, name):
    config = SimpleNamespace(option=SimpleNamespace(part=part, markexpr=""), args=["tests"])
    path = parts.HERE / name
    is_elsewhere = "test_" in name and str(path) not in parts.files_of(part)
    assert bool(conftest.pytest_ignore_collect(path, config)) == is_elsewhere
    config.args = [f"tests/{name}::test_it"]  # what is named by itself is in every part
    assert not conftest.pytest_ignore_collect(path, config)


@pytest.mark.programs
@each(**{"option, expected": [("--quiet", (0, 2)), ("--nonsense", (4, 0)), ("--deselect=tests", (parts.NO_TESTS, 0))]})
def test_the_parts_run_and_the_largest_exit_code_counts(option, expected):
    test = "tests/rules/test_parts.py::test_parts_are_about_as_large"
    command = [sys.executable, "tests/parts.py", "2", test, option, "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=parts.HERE.parent, capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stdout.count("1 passed")) == expected
