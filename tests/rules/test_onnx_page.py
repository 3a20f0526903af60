"""The pages about exports: the table of operators is current, and the code runs."""

from __future__ import annotations

import re

import onnx_page
import pytest


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_table_of_operators_is_current():
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    assert onnx_page.PAGE.read_text() == onnx_page.text(), "run python tests/rules/onnx_page.py --write"


def test_the_code_of_the_export_page_runs(tmp_path, monkeypatch):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    text = (onnx_page.ROOT / "docs" / "export.md").read_text()
    scope = {}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S):
        exec(compile(block, "export.md", "exec"), scope)
    assert scope["scores"].shape == (2, 10)
