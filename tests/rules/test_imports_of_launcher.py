"""The launcher's packages, from its ground up: a file imports its own package and packages below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.each import each
from tests.rules.test_imports import ROOT

LAUNCHER = ROOT / "launch" / "dbrdist_launch"
FILES = sorted(LAUNCHER.rglob("*.py"))
GROUND = "dbrdist_launch"  # the files in the folder itself, apart from those that start the launcher
STARTS = {"api", "main", "__main__"}

pytestmark = pytest.mark.slow  # parses all of the launcher's sources

# What each package may import besides itself, in the order in which a job goes through them.
WITHIN: dict[str, set[str]] = {
    GROUND: set(),
    "rank": {GROUND},
    "backends": {GROUND},
    "launcher.judgement": {GROUND, "rank"},
    "launcher.preparation": {GROUND, "backends", "rank"},
    "launcher.streams": {GROUND, "launcher.judgement"},
}
WITHIN["launcher.running"] = {*WITHIN, *WITHIN["launcher.preparation"]}
WITHIN["launcher.restarting"] = {GROUND, "backends", "launcher.running"}
WITHIN["launcher.records"] = {GROUND, "launcher.judgement", "launcher.running"}
WITHIN["launcher"] = set(WITHIN)
WITHIN["doctor"] = set(WITHIN)
# Inside a function, for those who ask for it.
AT_FIRST_USE = {("launcher/cli.py", "doctor")}


def package_of(path: Path) -> str:
    """The package in which a file lies."""
    return ".".join(path.relative_to(LAUNCHER).parent.parts) or GROUND


def target(path: Path, level: int, name: str) -> str | None:
    """The package that an import leads to, of the launcher's; None for other libraries."""
    if level:
        folder = path.parents[level - 1]
    elif name.split(".")[0] == GROUND:
        folder, name = LAUNCHER, name.removeprefix(GROUND)
    else:
        return None
    for part in filter(None, name.split(".")):
        if not (folder / part).is_dir():
            break
        folder /= part
    return package_of(folder / "file")


def targets(path: Path) -> Iterator[tuple[str, bool]]:
    """The packages that a file imports from, and whether it does so inside a function."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {inner for node in functions for inner in ast.walk(node)}
    for node in ast.walk(tree):
        names = [(0, alias.name) for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [(node.level, f"{node.module or ''}.{alias.name}") for alias in node.names]
        for level, name in names:
            to = target(path, level, name)
            if to is not None:
                yield to, node in inside


@each(path=[f for f in FILES if f.stem not in STARTS])
def test_a_file_imports_its_own_package_and_packages_below(path):
    package = package_of(path)
    if package == "rank.inject":
        return  # a file alone in a folder, which Python imports at the start of every rank
    assert package in WITHIN, f"a new package {package!r}: say in this test what it may import"
    for to, is_inside in targets(path):
        if not (is_inside and (str(path.relative_to(LAUNCHER)), to) in AT_FIRST_USE):
            assert to in {package, *WITHIN[package]}, f"{path.relative_to(ROOT)}: {package} may not import {to}"


def test_where_imports_lead():
    session = LAUNCHER / "launcher" / "session.py"
    assert target(session, 1, "running.plan.LaunchPlan") == "launcher.running"
    assert target(session, 1, ".running") == "launcher.running"
    assert target(session, 1, "moved.serve") == "launcher"
    assert target(session, 2, ".codes") == target(session, 2, "errors.LaunchError") == GROUND
    assert target(session, 0, "os.path") is None
    assert target(LAUNCHER / "doctor" / "cli.py", 0, "dbrdist_launch.rank.gpus") == "rank"
