"""The code on the page of frequent questions runs."""

from __future__ import annotations

import re

import pytest

from tests.comm.jobs import ROOT

BLOCKS = re.findall(
    r"^## (.*?)\n(?:(?!^## ).)*?^```python\n(.*?)^```$", (ROOT / "docs/answers.md").read_text(), re.M | re.S
)


@pytest.mark.parametrize("heading, block", BLOCKS, ids=[heading for heading, _ in BLOCKS])
def test_a_block_runs(heading, block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "answers.md", "exec"), {})


def test_most_questions_have_code():
    assert len(BLOCKS) >= 5
