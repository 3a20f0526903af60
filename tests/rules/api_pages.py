"""docs/api.md, made from docstrings: every public name of the rooms that users import, and the first sentence about it.

python tests/rules/api_pages.py --write    # after names or docstrings changed
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
AREAS = {
    "dbrdist": "variables, links, configuration",
    "dbrdist.functions": "functions",
    "dbrdist.links": "links",
    "dbrdist.initializers": "initializers",
    "dbrdist.optimizers": "optimizers and their hooks",
    "dbrdist.distributions": "distributions",
    "dbrdist.datasets": "datasets",
    "dbrdist.iterators": "iterators",
    "dbrdist.training": "trainer and updaters",
    "dbrdist.training.extensions": "extensions",
    "dbrdist.training.triggers": "triggers",
    "dbrdist.serializers": "files of models",
    "dbrdist.models": "models",
    "dbrdist.comm": "several ranks",
}
HEAD = (
    "# Names\n\nEvery public name of each area with the first sentence of its docstring; `help(name)` shows the rest.\n"
)


def public(module: Any) -> dict[str, Any]:
    """The classes and functions that a module exports, by name."""
    listed = getattr(module, "__all__", None) or [n for n in dir(module) if not n.startswith("_")]
    found = {name: getattr(module, name) for name in listed if hasattr(module, name)}
    ours = {n: a for n, a in found.items() if (inspect.isclass(a) or callable(a)) and not inspect.ismodule(a)}
    return {n: a for n, a in sorted(ours.items()) if str(getattr(a, "__module__", "")).startswith("dbrdist")}


def sentence(thing: Any) -> str:
    """The first sentence of the docstring, fit for a table."""
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    text = re.split(r"(?<=[^.A-Z].)\. (?=[A-Z`])", text + " ")[0].strip().rstrip(":.")
    text = re.sub(r":[a-z]+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    return text.replace("|", "\\|")


def page() -> str:
    """The page as it should be."""
    parts = [HEAD]
    for name, what in AREAS.items():
        names = public(importlib.import_module(name))
        rows = [f"| `{n}` | {sentence(thing)} |" for n, thing in names.items()]
        parts += [f"\n## `{name}`: {what}\n", "| name | what it is |", "|---|---|", *rows]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(page())
