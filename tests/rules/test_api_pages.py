"""docs/api is that of today, and every public name says what it is."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import api_pages
import pytest

SCRIPT = Path(__file__).with_name("api_pages.py")
PAGES = {path.name: path.read_text() for path in (Path(__file__).parents[2] / "docs" / "api").iterdir()}


@pytest.mark.programs
def test_the_pages_are_those_of_today():
    """In a process of its own: what other tests have imported is seen in no room."""
    made = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=60, check=True).stdout
    made = json.loads(made)
    old, new = ({(f, line) for f, t in pages.items() for line in t.splitlines()} for pages in (PAGES, made))
    message = "names, arguments or docstrings changed since: run `python tests/rules/api_pages.py --write`"
    assert made == PAGES, f"{message}\n-{old - new}\n+{new - old}"


@pytest.mark.parametrize("module", api_pages.AREAS)
def test_arguments_and_defaults_are_those_on_the_page(module):
    names = api_pages.public(importlib.import_module(module))
    shown = re.findall(r"^\| `(\w+)(.*?)` \| ", PAGES[f"{module.removeprefix('dbrdist.')}.md"], re.M)
    now = {name: api_pages.call(name, names[name]) for name, _ in shown}
    assert now == {name: name + arguments for name, arguments in shown}


def test_every_name_says_what_it_is():
    rows = re.findall(r"^\| `(\w+)(?:\(.*?\))?` \| (.*) \|$", "\n".join(PAGES.values()), re.M)
    assert len(rows) > 500
    assert [name for name, text in rows if not text.strip()] == []


# Made by another function, or of several ranks, whose arguments are looked at together.
UNEXPLAINED = {
    "DaliIterator",
    "CommunicatorBase",
    "MultiNodeChainList",
    "RecalibrateStatistics",
    "Reduction",
    "VirtualUpdater",
}


def test_constructors_explain_errors_of_their_arguments():
    """Each module asks for it at its end, once for all of its classes."""
    unexplained, num_seen = set(), 0
    for module in api_pages.AREAS:
        for name, found in api_pages.public(importlib.import_module(module)).items():
            where = getattr(getattr(found, "__init__", None), "__module__", None) or ""
            if isinstance(found, type) and where.startswith("dbrdist.") and not where.startswith("dbrdist.core."):
                num_seen += 1
                unexplained |= set() if hasattr(found.__init__, "__wrapped__") else {name}
    assert unexplained == UNEXPLAINED and num_seen > 200
