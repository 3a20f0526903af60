"""Files and functions stay short enough to be read at once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [p for room in ("dbrdist", "launch/dbrdist_launch") for p in sorted((ROOT / room).rglob("*.py"))]
MOST_LINES = 500  # of a file, without arguments, errors and examples in docstrings
MOST_LINES_OF_A_FUNCTION = 60  # without its docstring and the functions within it

# What is longer, with its own limit and the reason.
LONGER: dict[str, tuple[int, str]] = {}

pytestmark = pytest.mark.slow  # parses all of the sources


def lines_of(function: ast.AST) -> int:
    """Without the docstring, and without functions and classes within it."""
    inner = [n for n in ast.walk(function) if n is not function and isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    own = set(range(function.lineno, function.end_lineno + 1))
    for node in inner:
        own -= set(range(node.lineno, node.end_lineno + 1))
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        own -= set(range(first.lineno, first.end_lineno + 1))
    return len(own)


def lines_of_file(text: str) -> int:
    """Without the sections of docstrings, which tell nothing about the code's size."""
    return len(re.sub(r'\n\n *(Args|Returns|Raises|Example):\n(?:(?! *""").*\n)+', "\n", text).splitlines())


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{path.relative_to(ROOT)}: {node.name}", lines_of(node)


def test_files_are_short():
    found = {str(p.relative_to(ROOT)): lines_of_file(p.read_text()) for p in FILES}
    assert len(found) > 400
    longer = {name: n for name, n in found.items() if n > LONGER.get(name, (MOST_LINES, ""))[0]}
    assert longer == {}, f"more than {MOST_LINES} lines: divide the file where its subject changes"
    assert [name for name in LONGER if found.get(name, 0) <= MOST_LINES] == [], "short enough: take it off the list"


def test_functions_are_short():
    longer = {name: n for path in FILES for name, n in functions(path) if n > MOST_LINES_OF_A_FUNCTION}
    assert longer == {}, f"more than {MOST_LINES_OF_A_FUNCTION} lines: give its steps names"


def test_what_counts_as_lines_of_a_file():
    assert lines_of_file('def f():\n    """x\n\n    Example:\n        >>> f()\n    """\n    return 1\n') == 4


def test_what_counts_as_lines_of_a_function():
    text = "def f(a,\n      b):\n    '''x\n\n    y'''\n    def g():\n        return 1\n    return g\n"
    outer = ast.parse(text).body[0]
    assert lines_of(outer) == 3 and lines_of(outer.body[1]) == 2
