"""A test file lies where the source file lies whose name it bears: ``tests/functions/test_loss.py`` for
``dbrdist/functions/loss.py``, ``tests/core/array/test_array.py`` for what the package ``core/array`` does as a whole.
"""

from __future__ import annotations

from pathlib import Path, PurePath

import pytest

ROOT = Path(__file__).parents[2]
TESTS, PACKAGE = ROOT / "tests", ROOT / "dbrdist"
ROOTS = {PACKAGE: PurePath(), ROOT / "launch" / "dbrdist_launch": PurePath("launch")}  # with their folders of tests
SHARE = 0.9  # of the files below folders that mirror; the others are about a matter that several source files share

# Folders of tests that mirror nothing, and why.
EXEMPT = {
    "mpi": "started by mpiexec as a whole, on real ranks",
    "gpu": "started with an option, on a device or on what stands in for one; each file begins with what it stands on",
    "contracts": "one demand on many functions, kernels or communicators at once",
    "rules": "about the sources, the pages and the tests themselves",
    "examples": "about the programs in examples/",
    "compat": "about programs that were written for another library",
    "launch/jobs": "about dbrdist-launch from its command line: nearly all of its files serve each run",
    "fuzz": "draws programs at random and compares them in every way there is",
    "golden": "about files and numbers of earlier versions",
    "faults": "programs of users that an earlier version got wrong, whatever files they go through",
}


def sources() -> set[PurePath]:
    """What a test file may be named after, without suffix: the files of the package, and its folders in themselves."""
    known: set[PurePath] = set()
    for root, below in ROOTS.items():
        files = [p for p in root.rglob("*") if p.suffix in {".py", ".pyx"} and p.stem != "__init__"]
        folders = [p.parent for p in root.rglob("__init__.py") if p.parent != root]
        known |= {below / p.relative_to(root).with_name(p.stem.strip("_")) for p in files}
        known |= {below / p.relative_to(root) / p.name for p in folders}
        # packages without code of their own, too: what their files do together
        known |= {below / p.parent.relative_to(root) / p.parent.name for p in files if p.parent != root}
    return known


def mirrored() -> list[PurePath]:
    """The test files below folders that mirror, relative to the tests."""
    found = sorted(p.relative_to(TESTS) for p in TESTS.rglob("test_*.py") if "programs" not in p.parts)
    return [p for p in found if not any(p.is_relative_to(name) for name in EXEMPT)]


def strays(files: list[PurePath]) -> list[PurePath]:
    """Those that are named after nothing."""
    known = sources()
    return [p for p in files if p.with_name(p.stem.removeprefix("test_").strip("_")) not in known]


@pytest.mark.slow
def test_test_files_bear_the_names_of_source_files():
    files = mirrored()
    others = strays(files)
    assert len(files) > 200
    share = 1 - len(others) / len(files)
    assert share >= SHARE, f"{share:.1%}; named after no source file or package: {', '.join(map(str, others))}"


@pytest.mark.slow
def test_test_folders_are_those_of_the_package():
    known = {p.parent for p in sources()}
    assert {str(p.parent) for p in mirrored() if p.parent not in known} == set()


def test_exempt_folders_hold_tests_and_are_none_of_the_package():
    for name in EXEMPT:
        assert list((TESTS / name).rglob("test_*.py")), f"{name}: no test file: take it off the list"
        assert not (PACKAGE / name).is_dir() or name == "compat", f"{name}: the package has such a folder"


def test_strays_are_noticed():
    good = ["functions/test_loss.py", "functions/test_functions.py", "kernels/reference/test_numpy_.py"]
    bad = ["functions/test_parts_of_functions.py", "core/test_variable.py", "test_loss.py"]
    assert strays([PurePath(p) for p in good + bad]) == [PurePath(p) for p in bad]
