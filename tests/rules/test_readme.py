"""What the README says runs, and what it links to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dbrdist.core.array.random as random

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md"), *(ROOT / "examples").glob("*/README.md")]


@pytest.mark.slow
def test_the_ten_lines_train(tmp_path, monkeypatch, capsys):
    (block,) = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
    assert len([line for line in block.splitlines() if line and not line.startswith(("import", "from"))]) <= 10
    state = random.get_state()
    random.set_seed(0)
    monkeypatch.chdir(tmp_path)
    try:
        exec(compile(block, "README.md", "exec"), {})
    finally:
        random.set_state(state)
    head, *_, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["epoch", "main/loss", "validation/main/accuracy"]
    assert float(last.split()[-1]) > 0.95


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), f"{page.name}: {target}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", found.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in heads}, (
                f"{page.name}: {target}"
            )


def test_the_readme_has_each_target_of_the_makefile():
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M)
    for target in targets:
        if target != "help":
            assert f"make {target}`" in README or f"make {target} " in README, target
