"""Tests of dbrdist.comm.failure.exit_status."""

from __future__ import annotations

import _thread
import ctypes
import gc
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from dbrdist.comm.failure import abort, exit_status
from tests.comm import jobs
from tests.each import each


@pytest.mark.mpiexec
def test_the_watch_on_exits_changes_nothing_that_programs_see():
    program = """
import sys
from dbrdist.comm import exit_status
seen = []
assert exit_status.watch(lambda code: (print('left with', code, flush=True), code)[1])
for code in (0, 3, None, 'text', (1, 2)):
    try:
        sys.exit(code)
    except SystemExit as e:
        args = () if code is None else code if isinstance(code, tuple) else (code,)
        assert e.code == code and e.args == args, e.args
e = SystemExit(1, 2); assert e.code == (1, 2)
e.code = 7; assert e.code == 7
class Mine(SystemExit): pass
try:
    raise Mine(8)
except SystemExit as e:
    assert e.code == 8
raise Mine(9)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=jobs.ROOT, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (9, "left with 9\n", "")
    assert exit_status._watcher is None


@each(
    case=[
        (None, (0, "")), (0, (0, "")), (3, (3, "")), (256, (1, "")), (259, (3, "")), (-1, (255, "")), (True, (1, "")),
        ("words", (1, "words")), (2.5, (1, "2.5")),
    ]
)  # fmt: skip
def test_what_the_interpreter_makes_of_an_exit(case):
    assert abort._status(case[0]) == case[1]


@each(status=[None, 3, "words", (), (4,), SystemExit(5), 0])
def test_exits_as_those_of_python(status):
    with pytest.raises(SystemExit) as caught:
        exit_status._exit(status)
    expected = {None: (), (): (), (4,): (4,)}.get(status, (status,)) if not isinstance(status, SystemExit) else (5,)
    assert caught.value.args == expected
    assert not isinstance(status, SystemExit) or caught.value is status


@pytest.fixture
def exits(monkeypatch):
    """The attribute of SystemExit as it is without the watch, before and after."""
    attributes = gc.get_referents(SystemExit.__dict__)[0]
    original, leave = attributes["code"], sys.exit
    assert type(original).__name__ == "member_descriptor", "another test left its watch"
    monkeypatch.setattr(exit_status, "_watcher", None)
    yield
    attributes["code"], sys.exit = original, leave
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))


def test_the_code_of_an_exit_is_watched_where_the_interpreter_reads_it(exits):
    seen, came = [], threading.Event()

    def watcher(code):
        seen.append(code)
        came.set()
        return code

    assert exit_status.watch(watcher) and exit_status.watch(watcher)
    error = SystemExit(3)
    assert error.code == 3 and seen == []  # read by a program
    error.code = 4
    assert error.code == 4 and SystemExit((1, 2)).code == (1, 2) and SystemExit().code is None
    with pytest.raises(SystemExit, match="7"):
        sys.exit(7)
    assert seen == []
    _thread.start_new_thread(getattr, (error, "code"))  # a thread without a Python frame
    assert came.wait(20) and seen == [4]


def test_an_interpreter_that_is_not_cpython_is_not_watched(exits, monkeypatch):
    monkeypatch.setattr(sys, "implementation", SimpleNamespace(name="pypy"))
    assert exit_status.watch(print) is False and exit_status._watcher is None
