"""Which of Chainer's names dbrdist has, as docs/chainer.md states it.

python tests/rules/chainer_page.py --write    # after new names were exported: bring the page up to date
"""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "chainer.md"
NAMES = ROOT / "dbrdist" / "core" / "names" / "chainer-names.txt"
LEFT_OUT = re.compile("chx|chainerx|intel64")  # methods for arrays of ChainerX and iDeep
BEGIN, END = "<!-- made by tests/rules/chainer_page.py: begin -->\n", "<!-- end -->\n"


def chainer_names() -> dict[str, dict[str, list[str]]]:
    """Module -> name -> methods."""
    modules: dict[str, dict[str, list[str]]] = {}
    for line in NAMES.read_text().splitlines():
        if line.startswith("["):
            names = modules.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            name, _, methods = line.partition(": ")
            names[name] = methods.split()
    return modules


def our_module(module: str) -> str:
    """Where the names of one of Chainer's modules are here."""
    if module.removeprefix("chainermn.") in ("functions", "links", "extensions", "iterators", "datasets"):
        return module.replace("chainermn", "dbrdist.comm", 1)
    return "dbrdist.comm" if module.startswith("chainermn") else module.replace("chainer", "dbrdist", 1)


def our_object(module: str) -> Any:
    """The module or object of ours, or None."""
    found = importlib.import_module("dbrdist")
    for part in our_module(module).split(".")[1:]:
        try:
            found = getattr(found, part)
        except AttributeError:
            return None
    return found


def lists() -> str:
    """The part of the page that is made from the names."""
    table = ["| module | here | names here | of |", "|---|---|---|---|"]
    missing, methods = [], []
    num_here = num_all = 0
    for module, names in chainer_names().items():
        ours = our_object(module)
        here = [name for name in names if hasattr(ours, name)]
        num_here, num_all = num_here + len(here), num_all + len(names)
        place = f"`{our_module(module)}`" if here else "-"
        table.append(f"| `{module}` | {place} | {len(here)} | {len(names)} |")
        absent = [name for name in names if name not in here]
        if absent and here:
            missing.append(_listed(f"**`{module}`**: ", absent))
        elif absent:
            missing.append(_listed(f"**`{module}`**, all of it: ", absent))
        for name in here:
            less = [m for m in names[name] if not hasattr(getattr(ours, name), m) and not LEFT_OUT.search(m)]
            if less:
                methods.append(_listed(f"`{name}`: ", less))
    table.append(f"| together | | {num_here} | {num_all} |")
    missing += [] if missing else ["None."]
    methods += [] if methods else ["None."]
    words = "Methods for ChainerX and iDeep arrays are not listed: `to_chx`, `from_chx`, `to_intel64` and the like."
    parts = [*table, "", "### Missing names", "", *missing, "", "### Missing methods", "", *methods, "", words, ""]
    return "\n".join(parts)


def _listed(head: str, names: list[str]) -> str:
    return "\n".join(textwrap.wrap(f"- {head}{', '.join(names)}", 120, subsequent_indent="  "))


def with_lists(text: str) -> str:
    """The page's text with its made part brought up to date."""
    return re.sub(f"(?<={re.escape(BEGIN)}).*(?={re.escape(END)})", lambda _: f"\n{lists()}\n", text, flags=re.S)


if __name__ == "__main__":
    text = with_lists(PAGE.read_text())
    if "--write" in sys.argv:
        PAGE.write_text(text)
    else:
        print(lists())
