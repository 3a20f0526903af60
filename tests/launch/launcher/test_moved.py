"""Old import paths of the launcher's modules."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from dbrdist_launch.launcher import moved

from tests.each import each


@each(old=sorted(moved.MOVED))
def test_an_old_path_names_the_module_that_has_moved(old):
    module = importlib.import_module(moved.MOVED[old])
    assert importlib.import_module(old) is module
    assert module.__spec__.name == moved.MOVED[old]


@pytest.mark.programs
def test_an_old_path_may_come_first():
    code = (
        "from dbrdist_launch.launcher.report import Failure; import dbrdist_launch.launcher.output as output\n"
        "from dbrdist_launch.launcher import pool; from dbrdist_launch.launcher.judgement import report\n"
        "assert Failure is report.Failure and pool.HostPool and output.Output.__module__.endswith('streams.output')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_module_that_is_not_in_the_folder_has_its_old_path():
    assert len(moved.MOVED) == 28
