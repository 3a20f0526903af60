"""The benchmark of elementwise functions times every one, or says why not."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import dbrdist.functions as F
from dbrdist.core.tape import elementwise_table

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import elementwise  # noqa: E402

sys.path.pop(0)

FILES = [
    "activation",
    "array",
    "class_loss",
    "classification",
    "cumulative",
    "embedding_loss",
    "example_normalization",
    "likelihood",
    "linalg",
    "loss",
    "math",
    "noise",
    "normalization",
    "padding",
    "picking",
    "products",
    "rectifier",
    "shapes",
    "special",
]
WITHOUT_GRADIENT = {"top_k_accuracy", "matrix_rank"}


def functions() -> set[str]:
    """The public functions of these files and of the tables of rows."""
    found = set(elementwise_table.PUBLIC)
    for file in FILES:
        tree = ast.parse((ROOT / "dbrdist" / "functions" / f"{file}.py").read_text())
        found |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
    return {name for name in found if callable(getattr(F, name, None))} - WITHOUT_GRADIENT


@pytest.mark.slow
def test_every_function_has_a_case_or_a_reason():
    timed = {name for case in elementwise.CASES.values() for name in re.findall(r"F\.(\w+)", case[2])}
    left_out = [name for names in elementwise.LEFT_OUT.values() for name in names.split()]
    assert len(set(left_out)) == len(left_out)
    assert not set(left_out) & timed
    assert set(left_out) <= set(dir(F))
    assert functions() - timed - set(left_out) == set()


@pytest.mark.slow
def test_a_function_without_a_case_is_found(monkeypatch):
    monkeypatch.delitem(elementwise.CASES, "cumprod")
    monkeypatch.delitem(elementwise.CASES, "cumprod_columns")
    try:
        test_every_function_has_a_case_or_a_reason()
    except AssertionError as e:
        assert "cumprod" in str(e)
    else:
        raise AssertionError("cumprod was not missed")


@pytest.mark.parametrize("option", ["--compiled", "--compile-only"])
def test_torch_compile_needs_pytorchs_interpreter(option, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["elementwise.py", option, "--only", "sum"])
    with pytest.raises(SystemExit):
        elementwise.main()
    assert "need --torch-python" in capsys.readouterr().err
