"""Tutorials as programs: their blocks in order, and notebooks made of them.

A block whose first line is ``# NAME``, or the second after ``#!/bin/bash``, is a file; a block of ``console`` holds
commands after ``$``.
``python tests/rules/tutorials.py --write`` writes the notebooks of the first two pages.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "tutorials"
PAGES = sorted(p for p in FOLDER.glob("*.md") if p.name != "README.md")
NOTEBOOKS = ("own-images", "slurm")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    """One fenced block."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name of the file that the block is, from its first line."""
        found = re.match(r"(?:#!/bin/bash\n)?# ([\w.-]+\.\w+)\n", self.text)
        return found[1] if found and self.language in ("python", "yaml", "bash") else None

    @property
    def commands(self) -> list[str]:
        """The commands of a console block."""
        return re.findall(r"^\$ (.*)$", self.text, re.M) if self.language == "console" else []


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in order."""
    return [Block(*found) for found in _BLOCK.findall(page.read_text())]


def notebook(page: Path) -> str:
    """A page as a notebook: files are written by cells, commands run in the shell."""
    cells, rest = [], page.read_text()

    def cell(kind: str, text: str) -> None:
        lines = text.strip("\n").splitlines(keepends=True)
        if lines:
            more = {"execution_count": None, "outputs": []} if kind == "code" else {}
            cells.append({"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, "source": lines, **more})

    while found := _BLOCK.search(rest):
        block = Block(*found.groups())
        if block.file:
            cell("markdown", rest[: found.start()])
            cell("code", f"%%writefile {block.file}\n{block.text}")
        elif block.commands:
            cell("markdown", rest[: found.start()])
            cell("code", "\n".join(f"!{command}" for command in block.commands))
        else:
            cell("markdown", rest[: found.end()])
        rest = rest[found.end() :]
    cell("markdown", rest)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    contents = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(contents, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name in NOTEBOOKS:
        text = notebook(FOLDER / f"{name}.md")
        if "--write" in sys.argv:
            (FOLDER / f"{name}.ipynb").write_text(text)
        else:
            print(text)
