"""The programs of tests/faults import public modules alone, so that they run on earlier versions too."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The modules that the pages of the API describe, and one more for users.
PUBLIC = {"dbrdist", "dbrdist.dataset", *(f"dbrdist.{path.stem}" for path in (ROOT / "docs" / "api").glob("*.md"))}


def strangers(tree: ast.Module) -> list[str]:
    """The modules of the package, or of its tests, that a program imports and that are not public."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append("." * node.level + (node.module or ""))
    ours = ("dbrdist", "tests", ".")
    return [name for name in found if name.startswith(ours) and name not in PUBLIC]


def test_programs_of_users_import_public_modules():
    files = sorted((ROOT / "tests" / "faults").glob("*.py"))
    assert len(files) > 5
    assert {path.name: names for path in files if (names := strangers(ast.parse(path.read_text())))} == {}


def test_other_imports_are_noticed():
    good = "import dbrdist, os\nimport dbrdist.functions as F\nfrom dbrdist.training import triggers\n"
    bad = "import dbrdist.core.names\nfrom tests.each import each\nfrom dbrdist.core import call\nfrom . import x\n"
    assert strangers(ast.parse(good)) == []
    assert strangers(ast.parse(bad)) == ["dbrdist.core.names", "tests.each", "dbrdist.core", "."]
