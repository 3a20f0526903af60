"""docs/architecture.md is current, and every file says in its first line what it is for."""

from __future__ import annotations

import ast
import re

import pytest

from tests.rules import architecture_page, test_imports_of_launcher
from tests.rules.test_imports import FILES, PACKAGE, WITHIN

pytestmark = pytest.mark.slow  # parses all of the sources


def test_the_page_is_current():
    assert architecture_page.PAGE.read_text(encoding="utf-8") == architecture_page.page(), (
        "run: python tests/rules/architecture_page.py --write"
    )


def test_every_file_says_what_it_is_for():
    assert [str(f.relative_to(PACKAGE)) for f in FILES if not ast.get_docstring(ast.parse(f.read_text()))] == []


def test_files_on_the_ways_through_the_code_are_there():
    ways = re.findall(r"`([\w/]+\.py)`", architecture_page.ADDING)
    roots = {"launch": PACKAGE.parent / "launch" / "dbrdist_launch", "tests": PACKAGE.parent / "tests"}
    assert len(ways) > 20
    for name in ways:
        first, _, rest = name.partition("/")
        assert (roots[first] / rest if first in roots else PACKAGE / name).is_file(), name


def test_levels_count_from_the_lowest():
    below = {"a": set(), "b": {"a"}, "c": {"a", "b"}, "d": {"elsewhere"}}
    assert architecture_page.levels(below) == {"a": 0, "b": 1, "c": 2, "d": 0}


def test_no_flat_folder_is_large():
    """`functions` is exempt: one file per topic of the public vocabulary."""
    for folder in {path.parent for path in (*FILES, *test_imports_of_launcher.FILES)}:
        number = len(list(folder.glob("*.py")))
        assert number <= 20 or folder.name == "functions", f"{folder} has {number} files"


def test_packages_are_few_levels_deep():
    for room in ("core", "kernels", "datasets", "comm", "cli"):
        below = {name: names for name, names in WITHIN.items() if name.startswith(room + ".")}
        assert max(architecture_page.levels(below).values()) < 7, room
