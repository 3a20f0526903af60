"""The repository's text: nothing of one machine, no promises left in comments."""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The command after `--` takes every word that follows.
COMMAND_LAST = {"benchmarks/two_hosts.py"}
BINARY = {".npz", ".npy", ".png", ".jpg", ".jpeg", ".gz", ".whl", ".so"}

RULES = {
    "an absolute path of a machine": re.compile(
        r"(?<![\w.])/(?:work|root|home/(?!me\b|mpiuser\b)\w+|Users/\w+|scratch)/"
    ),
    "a package index other than the public one": re.compile(r"(?i)(?:index-url|--index|pip\.conf|artifactory|nexus)\b"),
    "an unfinished place": re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX)\b"),
    "an address of a private host": re.compile(r"https?://(?!localhost|127\.0\.0\.1)[\w-]+(?::\d+)(?:/|\b)"),
}


@functools.cache
def text_files():
    """Tracked files and new ones that git does not ignore; the tree itself where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
        files = [ROOT / line for line in listing.splitlines()]
    except (OSError, subprocess.CalledProcessError):
        rooms = ("dbrdist", "launch", "tests", "examples", "benchmarks", "docs")
        files = [p for room in rooms for p in (ROOT / room).rglob("*") if p.is_file()]
        files += [p for p in ROOT.iterdir() if p.is_file()]
    return [f for f in files if f.is_file() and f.suffix not in BINARY and "__pycache__" not in f.parts]


@functools.cache
def texts():
    """What the rules are for: the text of each file but this one."""
    found = {}
    for path in text_files():
        with contextlib.suppress(UnicodeDecodeError):
            found[path] = path.read_text(encoding="utf-8")
    del found[Path(__file__)]
    return found


def test_the_list_of_files_is_not_empty():
    assert {ROOT / "pyproject.toml", ROOT / "dbrdist" / "__init__.py"} <= set(text_files())


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_text_files_hold_no(rule):
    found = []
    for path, text in texts().items():
        for match in RULES[rule].finditer(text):
            number = text.count("\n", 0, match.start()) + 1
            found.append(f"{path.relative_to(ROOT)}:{number}: {text.splitlines()[number - 1].strip()[:100]}")
    assert found == [], f"{rule}:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("an absolute path of a machine", "see /ro" + "ot/x"),
        ("an absolute path of a machine", "open('/wo" + "rk/data')"),
        ("a package index other than the public one", "pip install --index-" + "url=x"),
        ("an unfinished place", "# TO" + "DO later"),
        ("an address of a private host", "http://mirror:8080/simple"),
    ],
)
def test_the_rules_find_what_they_are_for(rule, line):
    assert RULES[rule].search(line)


@pytest.mark.parametrize(
    "line",
    ["localhost:8080", "https://arxiv.org/abs/1708.03888", "a/root/b", "/home/me/.venv/bin", "homework/", "/workers"],
)
def test_the_rules_leave_ordinary_text_alone(line):
    assert not any(rule.search(line) for rule in RULES.values())


def test_files_are_small_enough_to_read():
    for path in text_files():
        if path.suffix == ".py" and ROOT / "dbrdist" in path.parents:
            length = len(path.read_text().splitlines())
            assert length <= 700, f"{path.relative_to(ROOT)} has {length} lines: cut it by topic"


def words_without_number(tree):
    """The parsers' arguments without dashes that take any number of words."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            name = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else "-"
            counts = [ast.unparse(word.value) for word in node.keywords if word.arg == "nargs"]
            if not name.startswith("-") and counts in (["'*'"], ["'+'"]):
                yield name


@pytest.mark.slow
def test_words_may_stand_after_options():
    """`parse_args` gives such an argument the words before the first option, and refuses those after the next."""
    found = {}
    for path, text in texts().items():
        if path.suffix == ".py" and (names := list(words_without_number(ast.parse(text)))):
            found[path.relative_to(ROOT).as_posix()] = names
    assert {"examples/imagenet/twin/twin.py", "tests/suites.py"} <= set(found)
    wrong = [path for path in found if ".parse_args(" in (ROOT / path).read_text()]
    assert set(wrong) == COMMAND_LAST, "parse_intermixed_args takes words between options"
