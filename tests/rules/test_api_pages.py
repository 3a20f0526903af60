"""docs/api.md is that of today, and every public name says what it is."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("api_pages.py")
PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


@pytest.mark.slow
def test_the_page_is_that_of_today():
    """In a process of its own: what other tests have imported is seen in no room."""
    made = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=60, check=True).stdout
    gone, new = (set(a.splitlines()) - set(b.splitlines()) for a, b in ((PAGE, made), (made, PAGE)))
    message = "names or docstrings changed since: run `python tests/rules/api_pages.py --write`"
    assert made.rstrip() == PAGE.rstrip(), f"{message}\n-{gone}\n+{new}"


def test_every_name_says_what_it_is():
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.M)
    assert len(rows) > 500
    assert [name for name, text in rows if not text.strip()] == []
