"""py-spy, which shows stacks where there are no hooks."""

import os
import subprocess
import sys

import pytest
from dbrdist_launch import limits
from dbrdist_launch.rank import spy
from processes import GONE

# Python warns of forks beside threads, as those of the test runner; what is forked here calls the kernel alone.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def test_py_spy_is_asked_about_the_first_python(fork, tmp_path, monkeypatch):
    asked = tmp_path / "py-spy"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    shell = subprocess.Popen(["/bin/sleep", "60"])
    assert spy.by_py_spy([shell.pid, os.getpid()]) == "" == spy.by_py_spy([]) == spy.by_py_spy([GONE, shell.pid])
    for text, said in (
        ("echo $*", f"dump --pid {os.getpid()}\n"),
        ("echo no right >&2", "py-spy: no right"),
        (f"printf '%{limits.TAIL_BYTES + 2}s' x", f"{'x':>{limits.TAIL_BYTES}}"),
    ):
        asked.write_text(f"#!/bin/sh\n{text}\n")
        asked.chmod(0o755)
        assert spy.by_py_spy([shell.pid, os.getpid()]) == said
    asked.chmod(0o644)
    assert spy.by_py_spy([os.getpid()]).startswith("py-spy: ")
    shell.kill()
    shell.wait()
