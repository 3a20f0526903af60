"""That changed code reaches the functions that live in a process, and what cannot be changed there is said."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import forked_mutants
import mutants
import pytest

from dbrdist.kernels.cpu import onednn

pytestmark = pytest.mark.slow  # loads a module of its own for each test

SOURCE = '''"""A module."""
LIMIT = 3


class Counter:
    step = 1

    def __init__(self, start=0):
        self.value = start

    def up(self, by=2, *, often=1):
        return self.value + by * often


def outer(n):
    def inner(k):
        return n - k
    return inner


def limited(a):
    return a > LIMIT


early = outer(10)
'''


@pytest.fixture(autouse=True, scope="module")
def frozen_again():
    """A patch thaws what was frozen after collection, and later tests would wait for the garbage collector."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def module(tmp_path):
    folder = tmp_path / "dbrdist" / "core"
    folder.mkdir(parents=True)
    path = folder / "forked_subject.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("forked_subject", path)
    made = importlib.util.module_from_spec(spec)
    sys.modules["forked_subject"] = made
    spec.loader.exec_module(made)
    yield made, tmp_path
    del sys.modules["forked_subject"]


def put(root, old, new, nth=0):
    """Changes the n-th place that reads ``old`` to ``new``."""
    finder = mutants.Finder("dbrdist/core/forked_subject.py", SOURCE.encode())
    finder.visit(forked_mutants.ast.parse(SOURCE))
    found = [m for m in finder.found if (m.old, m.new) == (old, new)]
    forked_mutants.Patch(root).apply(found[nth])


def test_methods_functions_and_living_closures_change(module):
    made, root = module
    counter = made.Counter(5)
    put(root, "self.value + by * often", "(self.value - by * often)")
    assert counter.up() == 3 and made.early(3) == 7
    put(root, "n - k", "(n + k)")
    assert made.early(3) == 13 and made.outer(1)(1) == 2
    put(root, "a > LIMIT", "(a >= LIMIT)")
    assert made.limited(3) and counter.up() == 3


def test_defaults_and_constants_change(module):
    made, root = module
    put(root, "2", "3")
    assert made.Counter(0).up() == 3 and made.Counter(0).up(1, often=5) == 5
    put(root, "1", "2", nth=1)
    assert made.Counter(0).up(1) == 2
    put(root, "3", "4")
    assert made.LIMIT == 4 and not made.limited(4)


def test_lines_with_defaults_are_known():
    lines = [n for n in range(1, 30) if forked_mutants.is_default(SOURCE.encode(), n)]
    assert [SOURCE.splitlines()[n - 1].strip().partition("(")[0] for n in lines] == ["def __init__", "def up"]


def test_what_is_computed_at_import_is_left(module):
    _, root = module
    for old, new, nth in (("1", "2", 0), ("10", "11", 0)):
        with pytest.raises(forked_mutants.CannotBeForkedError):
            put(root, old, new, nth)


def test_onednn_serves_in_a_fork_too():
    if not onednn.is_available():
        pytest.skip("oneDNN is not installed")
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        forked_mutants.take_onednn_back()
        os.write(writer, b"there" if onednn.is_available() else b"missing")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 10) == b"there"
    os.close(reader)
    os.close(writer)


def test_files_take_turns():
    seconds = {"a::1": 1.0, "a::2": 1.0, "b::1": 1.5, "b::2": 1.5, "a::3": 2.0}
    assert forked_mutants.in_turns(list(seconds), seconds) == ["a::1", "b::1", "a::2", "b::2", "a::3"]


HERE_ALONE = """
import os
import warnings
from dbrdist.core.x import f
from dbrdist.kernels.cpu import onednn

PID = os.getpid()
onednn._reason = "used before the fork"

def test_f():
    assert f(1) in (3, -1) and onednn._reason is None

def test_warning():
    if f(1) < 0:
        warnings.warn("an error here")

def test_this_process():
    assert f(0) and os.getpid() == PID
"""


@pytest.mark.programs
def test_a_first_look_kills_by_tests_that_pass_in_a_fork(tmp_path):
    root = tmp_path / "house"
    for folder in ("dbrdist/core", "dbrdist/kernels/cpu", "tests/core", "tests/rules", "launch"):
        (root / folder).mkdir(parents=True)
    for name in ("mutants.py", "forked_mutants.py", "reached.py"):
        shutil.copy(Path(mutants.__file__).with_name(name), root / "tests" / "rules")
    for package in ("dbrdist", "dbrdist/core", "dbrdist/kernels", "dbrdist/kernels/cpu"):
        (root / package / "__init__.py").touch()
    (root / "dbrdist" / "core" / "x.py").write_text("def f(a):\n    unused = 1\n    return a + 2\n")
    (root / "dbrdist" / "kernels" / "cpu" / "onednn.py").touch()
    (root / "tests" / "core" / "test_x.py").write_text(HERE_ALONE)
    (root / "pytest.ini").write_text("[pytest]\npythonpath = .\nfilterwarnings = error\n")
    names = [f"tests/core/test_x.py::{name}" for name in ("test_this_process", "test_f", "test_warning")]
    known = {"tests": dict.fromkeys(names, 0.1), "functions": {"dbrdist/core/x.py:1": [0, 1, 2]}}
    (tmp_path / "reached.json").write_text(json.dumps(known))
    source = (root / "dbrdist" / "core" / "x.py").read_bytes()
    finder = mutants.Finder("dbrdist/core/x.py", source)
    finder.visit(forked_mutants.ast.parse(source))
    options = argparse.Namespace(state=tmp_path / "state", reached=tmp_path / "reached.json", workers=2)
    killed = mutants.first_look(finder.found, root, options)
    assert sorted((row["old"], row["by"]) for row in killed.values()) == [("2", names[1]), ("a + 2", names[2])]
    noted = [json.loads(line) for line in options.state.read_text().splitlines()]
    assert [mutants.key_of(row) for row in noted] == list(killed)
