"""The script that breaks the code: what it changes, what it leaves, and that nothing is left behind."""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import random
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import mutants
import pytest
from _pytest.mark.expression import Expression

from tests.each import each

SOURCE = b'''"""A docstring with 1 number."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import x

LIMIT: int = 3


def f(a: tuple[int, 2], b=True, *, c=0.5):
    """Another 2."""
    if not a and b:
        raise ValueError(f"expected {1 + 1}, got {a - 1}")
    assert a < 7, "words"
    a.x = g(a, b)
    a += 1
    note(b, c)
    warn("7 words", 7)
    return a[0] - b if a is None else "text".reshape(-1, 5, b=[-1]).astype(a, copy=False)
'''


def found(source=SOURCE):
    finder = mutants.Finder("dbrdist/core/x.py", source)
    finder.visit(ast.parse(source))
    return finder.found


def test_what_is_changed_and_what_is_left():
    changes = sorted((m.line, m.kind, m.old, m.new) for m in found())
    assert changes == sorted([
        (6, "constant", "3", "4"),
        (9, "constant", "True", "False"), (9, "constant", "0.5", "0.625"),
        (11, "condition", "not a and b", "(not (not a and b))"), (11, "condition", "not a and b", "(not a or b)"),
        (14, "drop", "a.x = g(a, b)", "pass"), (14, "arguments", "g(a, b)", "(g(b, a))"),
        (15, "arithmetic", "a += 1", "a -= 1"), (15, "drop", "a += 1", "pass"), (15, "constant", "1", "2"),
        (16, "drop", "note(b, c)", "pass"), (16, "arguments", "note(b, c)", "(note(c, b))"),
        (18, "arithmetic", "a[0] - b", "(a[0] + b)"), (18, "constant", "0", "1"),
        (18, "comparison", "a is None", "(a is not None)"),
        (18, "arguments", '"text".reshape(-1, 5, b=[-1])', "('text'.reshape(5, -1, b=[-1]))"),
        (18, "constant", "5", "6"),
    ])  # fmt: skip


def test_what_the_aimed_sample_is_drawn_from():
    finder = mutants.Finder("dbrdist/core/x.py", SOURCE)
    finder.visit(ast.parse(SOURCE))
    assert sorted((m.line, m.kind, m.old) for m in finder.aimed) == [
        (6, "constant", "3"),
        (9, "constant", "0.5"), (9, "constant", "True"),
        (11, "condition", "not a and b"), (11, "condition", "not a and b"),
        (12, "error", 'raise ValueError(f"expected {1 + 1}, got {a - 1}")'),
        (18, "comparison", "a is None"),
    ]  # fmt: skip


@pytest.mark.slow
def test_each_change_of_the_package_is_code_again():
    places, aimed = mutants.mutations(), mutants.mutations(is_aimed=True)
    assert len(places) > 5000 and 1000 < len(aimed) < len(places)
    assert {m.room for m in places} == {m.room for m in aimed} == set(mutants.FIRST)
    for m in random.Random(0).sample(places, 20) + random.Random(0).sample(aimed, 10):
        source = (mutants.ROOT / m.file).read_bytes()
        broken = source[: m.start] + m.new.encode() + source[m.end :]
        compile(broken, m.file, "exec", ast.PyCF_ONLY_AST)
        old = f"({m.old})" if m.kind in ("arithmetic", "comparison", "condition") and "\n" in m.old else m.old
        assert ast.dump(ast.parse(m.new.strip())) != ast.dump(ast.parse(old.strip())), m


@pytest.mark.slow  # looks at the sources a third time
def test_each_change_that_was_marked_is_one_that_may_be_drawn():
    lines = {file: (mutants.ROOT / file).read_text().splitlines() for file, *_ in mutants.equivalents()}
    drawn = {
        tuple(" ".join(text.split()) for text in (m.file, lines[m.file][m.line - 1], m.old, m.new))
        for is_aimed in (False, True)
        for m in mutants.mutations(is_aimed=is_aimed)
        if m.file in lines
    }
    assert sorted(mutants.equivalents() - drawn) == []
    marked = [line.split(" | ")[:4] for line in mutants.EQUIVALENT.read_text().splitlines()]
    assert len(marked) == len(mutants.equivalents()) + 1, "a line stands twice"


def options(tmp_path, **changes):
    given = {
        "workers": 2,
        "limit": 20.0,
        "timeout": 10.0,
        "state": tmp_path / "state.jsonl",
        "trust": False,
        "room_only": True,
        "reached": None,
        "seed": 0,
        "aimed": False,
    }
    return argparse.Namespace(**{**given, **changes})


def chosen(command, path, *marks):
    """Whether a command of pytest runs a test at this path with these marks, in one of its parts."""
    words = command[3:]
    expression = words[words.index("-m") + 1] if "-m" in words else "not slow or slow"
    is_below = any(path == word or path.startswith(f"{word}/") for word in words)
    return is_below and Expression.compile(expression).evaluate(lambda name, **_: name in marks)


@each(room=["core", "cli"], marks=[(), ("slow",), ("slow", "programs")], near=[None, [], ["tests/x/test_x.py::test_y"]])
def test_all_that_may_notice_a_change_runs(tmp_path, room, marks, near):
    commands = list(mutants.stages(room, options(tmp_path, room_only=False), near))
    own, other = mutants.FIRST[room][-1] + "/test_z.py", "tests/examples/test_z.py"
    is_reached = [chosen(command, own, *marks) for command in commands]
    assert any(is_reached) == (not near or "programs" in marks)
    assert any(chosen(command, other, *marks) for command in commands) == (near is None and "programs" not in marks)
    if near == []:
        assert is_reached[0] == ("programs" in marks)
    first_look = list(mutants.stages(room, options(tmp_path), near))
    assert len(first_look) == 1 and chosen(first_look[0], own, *marks) == (not near and "programs" not in marks)


@each(is_for_gpus=[False, True])
def test_what_runs_on_a_gpu_alone_is_first_tried_on_what_stands_for_one(tmp_path, is_for_gpus):
    stages = list(mutants.stages("kernels", options(tmp_path, room_only=False), None, ["tests/a.py"], is_for_gpus))
    assert stages[0][-1] == "tests/a.py"
    suites = [k for k, command in enumerate(stages) if "--on" in command]
    assert len(suites) == 3 and (suites == [1, 2, 3]) == is_for_gpus
    others = list(mutants.stages("kernels", options(tmp_path, room_only=False)))
    assert sorted(stages) == sorted([stages[0], *others])
    places = "dbrdist/kernels/gpu/cudnn.py", "dbrdist/kernels/device_dispatch.py", "dbrdist/core/tape/walk.py"
    drawn = [mutants.Mutation(file, 1, "drop", "a", "pass", 0, 1) for file in places]
    assert [m.is_for_gpus for m in drawn] == [True, True, False]


def test_bytecode_of_a_mutation_is_not_taken_for_that_of_the_source(tmp_path):
    (tmp_path / "changed.py").write_text("a = 1\n")
    command = [sys.executable, "-c", "import changed; print('E ', changed.a); assert False"]
    mutation = mutants.Mutation("changed.py", 1, "constant", "1", "2", 4, 5)
    found = [mutants.run(command, tmp_path, 60.0)[1]]
    mutation.apply(tmp_path)
    found.append(mutants.run(command, tmp_path, 60.0)[1])
    mutants.write(tmp_path / "changed.py", b"a = 1\n")
    found.append(mutants.run(command, tmp_path, 60.0)[1])
    assert found == ["E  1", "E  2", "E  1"]


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A package of one file with tests that notice some of its changes."""
    root = tmp_path / "house"
    (root / "dbrdist" / "core").mkdir(parents=True)
    (root / "tests" / "core").mkdir(parents=True)
    (root / "launch").mkdir()
    (root / "dbrdist" / "__init__.py").write_text("")
    (root / "dbrdist" / "core" / "__init__.py").write_text("")
    (root / "dbrdist" / "core" / "x.py").write_text("def f(a):\n    unused = 1\n    return a + 2\n")
    (root / "tests" / "core" / "test_x.py").write_text(
        "from dbrdist.core.x import f\n\ndef test_f():\n    assert f(1) == 3\n"
    )
    (root / "pytest.ini").write_text("[pytest]\npythonpath = .\nmarkers = slow\ntimeout = 10\n")
    monkeypatch.setattr(mutants, "ROOT", root)
    monkeypatch.setattr(mutants, "SOURCES", ("dbrdist",))
    files = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    monkeypatch.setattr(mutants, "tracked", lambda: files)
    return root


@pytest.mark.programs
def test_survivors_are_found_and_a_second_start_goes_on(house, tmp_path, monkeypatch):
    places = mutants.mutations()
    assert sorted(m.old for m in places) == ["1", "2", "a + 2"]
    rows = mutants.judge(places[:2], options(tmp_path))
    first = (tmp_path / "state.jsonl").read_text()
    rows = mutants.judge(places, options(tmp_path))
    assert {r["old"]: r["outcome"] for r in rows} == {"1": "survived", "2": "killed", "a + 2": "killed"}
    text = (tmp_path / "state.jsonl").read_text()
    assert text.startswith(first) and len(text.splitlines()) == 3
    result = mutants.summary(rows, options(tmp_path))
    assert (result["killed"], result["survived"], result["killed_fraction"]) == (2, 1, 0.667)
    (tmp_path / "marked.txt").write_text("# reasons\ndbrdist/core/x.py | unused = 1 | 1 | 2 | nobody reads it\n")
    monkeypatch.setattr(mutants, "EQUIVALENT", tmp_path / "marked.txt")
    result = mutants.summary(rows, options(tmp_path))
    assert (result["equivalent"], result["survivors"], result["killed_fraction"]) == (1, [], 1.0)
    json.dumps(result)
    assert (house / "dbrdist" / "core" / "x.py").read_text().endswith("return a + 2\n")


@pytest.mark.programs
def test_tests_that_fail_without_a_mutation_end_it(house, tmp_path):
    (house / "tests" / "core" / "test_x.py").write_text("def test_f():\n    assert False\n")
    with pytest.raises(SystemExit, match="the tests fail without a mutation"):
        mutants.judge(mutants.mutations(), options(tmp_path))


CALLS = """
import os
import pytest
from dbrdist.core.x import f

def test_that_fails():
    assert f(1) == 4

def test_f():
    assert f(1) == 3

@pytest.mark.slow
def test_slowly():
    assert f(2) == 4

def test_in_a_fork():
    pid = os.fork()
    if pid == 0:
        os._exit(f(1))
    assert os.waitpid(pid, 0)[1] == 3 << 8

def test_of_nothing():
    pass

@pytest.mark.programs
def test_of_a_program():
    assert f(1) == 3
"""


@pytest.mark.programs
def test_the_map_of_calls_is_whole_where_a_test_fails_and_leaves_that_one_out(house, tmp_path, capsys):
    (house / "tests" / "rules").mkdir()
    shutil.copy(Path(mutants.__file__).with_name("reached.py"), house / "tests" / "rules")
    (house / "tests" / "core" / "test_x.py").write_text(CALLS)
    (house / "pytest.ini").write_text("[pytest]\npythonpath = .\nmarkers =\n    slow\n    programs\n")
    mutants.note_reached(house, tmp_path / "reached.json", 100.0)
    known = json.loads((tmp_path / "reached.json").read_text())
    names = [f"tests/core/test_x.py::test_{name}" for name in ("that_fails", "f", "slowly", "in_a_fork", "of_nothing")]
    assert list(known["tests"]) == names and known["failed"] == names[:1]
    assert known["functions"] == {"dbrdist/core/x.py:1": [1, 2, 3]}
    assert capsys.readouterr().out == f"fails without a mutation: {names[0]}\n"
    (house / "tests" / "core" / "test_x.py").write_text("import os\n\ndef test_that_ends_all():\n    os._exit(0)\n")
    with pytest.raises(SystemExit):
        mutants.note_reached(house, tmp_path / "other.json", 100.0)
    assert not list(tmp_path.glob("other*"))


@pytest.mark.slow
def test_what_runs_out_of_time_leaves_no_process(tmp_path):
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import os, time; open(\"pid\", \"w\")" \
        ".write(str(os.getpid())); time.sleep(1000)'], start_new_session=True)"  # fmt: skip
    for seconds in (1.0, 4.0, 16.0, 64.0):  # as many as a busy machine needs to begin
        status, _ = mutants.run([sys.executable, "-c", code], tmp_path, seconds)
        assert status is None
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            break
    pid = int((tmp_path / "pid").read_text())
    with contextlib.suppress(OSError):  # once it is gone, also while its file is read
        for _ in range(300):
            if "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]:
                return
            time.sleep(0.1)
        pytest.fail("it is still there")


def test_loops_in_cython_are_compiled_or_it_is_said_that_they_are_not(monkeypatch, tmp_path, capsys):
    asked = []

    def compiled(root, paths, folder):
        asked.append((root, paths, folder))
        return {"made.so": "dbrdist/kernels/cpu/made.so"}

    names = ["dbrdist/kernels/table.py", "dbrdist/kernels/cpu/vector_loops.pyx"]
    monkeypatch.setattr(mutants, "tracked", lambda: names)  # a copy of the tree in which mutants are judged has no git
    monkeypatch.setattr(mutants.sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "hatch_build", SimpleNamespace(compiled=compiled))
    assert mutants.compiled_loops(tmp_path) == {"made.so": "dbrdist/kernels/cpu/made.so"}
    ((root, paths, folder),) = asked
    assert (root, paths, folder) == (str(mutants.ROOT), ["dbrdist/kernels/cpu/vector_loops.pyx"], tmp_path)
    monkeypatch.setitem(sys.modules, "hatch_build", None)  # an ImportError
    assert mutants.compiled_loops(tmp_path) == {}
    assert capsys.readouterr().out.startswith("without compiled loops, so that nothing notices changes around them: ")
