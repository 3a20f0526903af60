"""The script that makes formulas wrong: it reaches every operation, and leaves no file changed."""

from __future__ import annotations

import ast
import random
import subprocess
import sys

import pytest
import wrong_formulas

import dbrdist.functions as F
from dbrdist.core.tape.elementwise_table import ROWS


def test_wrong_versions_of_an_expression():
    text = "a * 2.0 - div(a, b)"
    versions = wrong_formulas.wrong(ast.parse(text, mode="eval").body, ["a", "b"])
    assert {(what, ast.unparse(new)) for what, new in versions} == {
        ("factor", "(a * 2.0 - div(a, b)) * 1.25"), ("sign", "-(a * 2.0 - div(a, b))"),
        ("left alone", "a * 2.0"), ("right alone", "div(a, b)"),
        ("left alone", "a - div(a, b)"), ("right alone", "2.0 - div(a, b)"),
        ("left alone", "a * 2.0 - a"), ("right alone", "a * 2.0 - b"),
        ("number", "a * 2.5 - div(a, b)"), ("parameter", "b * 2.0 - div(a, b)"),
        ("parameter", "a * 2.0 - div(b, b)"), ("parameter", "a * 2.0 - div(a, a)"),
    }  # fmt: skip


@pytest.mark.slow
def test_every_operation_is_made_wrong():
    changes = [c for file in wrong_formulas.FILES for c in wrong_formulas.changes_of(file)]
    assert set(ROWS) <= {c.operation for c in changes if c.what == "formula: factor"}
    functions = {n for n in F.__all__ if not hasattr(getattr(F, n), "row")}
    assert functions <= {c.operation for c in changes}
    for change in random.Random(0).sample(changes, 10):
        before = (wrong_formulas.ROOT / change.file).read_text()
        assert ast.dump(ast.parse(change.source)) != ast.dump(ast.parse(before))


@pytest.mark.programs
def test_a_wrong_formula_is_noticed():
    code = (
        "import sys; sys.path[:0] = ['tests/rules', '.']; import wrong_formulas as w\n"
        "changes = w.changes_of('dbrdist/functions/math.py')\n"
        "print(w.noticed([c for c in changes if c.operation == 'square' and c.what == 'derivative 1: sign'][0]))\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=wrong_formulas.ROOT, capture_output=True, text=True, timeout=100
    )
    assert "[square]" in answer.stdout, answer.stderr
