"""Tests that start Python say so by a mark, so that the inner loop leaves them out: a rule that reads no clock."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conftest import STARTING

TESTS = Path(__file__).parents[1]
MARKS = ("mark.programs", "mark.mpiexec", "mark.launch_system", "mark.slow")
CALLS = {f"subprocess.{name}" for name in ("run", "Popen", "call", "check_call", "check_output")}


def starters(tree: ast.Module) -> list[str]:
    """The tests without a mark that start ``sys.executable``, by themselves or by functions of their file."""
    if any("pytestmark =" in ast.unparse(x) and any(m in ast.unparse(x) for m in MARKS) for x in tree.body):
        return []
    functions = {x.name: x for x in tree.body if isinstance(x, ast.FunctionDef)}
    names = {name: {ast.unparse(x) for x in ast.walk(f) if isinstance(x, ast.Attribute | ast.Name)} |
             {a.arg for a in f.args.args} for name, f in functions.items()}  # fmt: skip
    found: set[str] = set()
    more = {name for name in functions if "sys.executable" in names[name] and names[name] & CALLS}
    while more - found:
        found |= more
        more = {name for name in functions if names[name] & found}
    return sorted(
        name
        for name in found
        if name.startswith("test_")
        and not names[name] & STARTING
        and not any(m in ast.unparse(d) for d in functions[name].decorator_list for m in MARKS)
    )


@pytest.mark.slow
def test_what_starts_python_is_marked():
    paths = [p for p in TESTS.rglob("test_*.py") if p.relative_to(TESTS).parts[0] not in ("mpi", "gpu")]
    found = {str(p.relative_to(TESTS)): starters(ast.parse(p.read_text())) for p in paths}
    assert {path: names for path, names in found.items() if names} == {}, "mark them pytest.mark.programs"


def test_starters_are_found():
    program = (
        "def start(): subprocess.run([sys.executable])\n"
        "def test_a(): subprocess.Popen([sys.executable, '-c', ''])\n"
        "def test_b(): helper()\n"
        "def helper(): return start()\n"
        "def test_c(): subprocess.run(['true'])\n"
        "@pytest.mark.programs\n"
        "def test_d(): start()\n"
        "def test_e(started): start()\n"
    )
    assert starters(ast.parse(program)) == ["test_a", "test_b"]
    assert starters(ast.parse("pytestmark = pytest.mark.slow\n" + program)) == []
