"""docs/api, made from docstrings: every public name by area, how it is called, and the first sentence about it.

python tests/rules/api_pages.py --write    # after names or docstrings changed
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "api"
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
HEAD = """# Names

Every public name, how it is called, and the first sentence of its docstring. `help(name)` shows the rest: each
argument with its shape, unit and default, the errors, and an example. Examples assume

```python
import numpy as np
import dbrdist
import dbrdist.distributions as D
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import datasets, initializers, iterators, models, optimizers, serializers, training
from dbrdist.training import extensions, triggers
```

| area | what is in it | names |
|---|---|---|
"""


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


def call(name: str, thing: Any) -> str:
    """How a name is called: arguments and defaults, without types."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return name
    shown = [p.replace(annotation=p.empty, default=Shown.of(p.default)) for p in signature.parameters.values()]
    return name + str(signature.replace(parameters=shown, return_annotation=signature.empty)).replace("|", "\\|")


class Shown(str):
    """A default as a page shows it: functions and classes by their names, which hold no address."""

    __repr__ = str.__str__

    @classmethod
    def of(cls, value: Any) -> Any:
        """What stands for a default value."""
        if value is inspect.Parameter.empty:
            return value
        text = getattr(value, "__name__", repr(value))
        return cls(type(value).__name__ if " at 0x" in text else text)


def pages() -> dict[str, str]:
    """The text of each page, by the name of its file."""
    made, head = {}, [HEAD.rstrip()]
    for module, what in AREAS.items():
        names = public(importlib.import_module(module))
        rows = [f"| `{call(n, thing)}` | {sentence(thing)} |" for n, thing in names.items()]
        file = f"{module.removeprefix('dbrdist.')}.md"
        made[file] = "\n".join([f"# `{module}`: {what}\n", "| name | what it is |", "|---|---|", *rows]) + "\n"
        head.append(f"| [`{module}`]({file}) | {what} | {len(names)} |")
    return {"README.md": "\n".join(head) + "\n", **made}


if __name__ == "__main__":
    if "--write" in sys.argv:
        FOLDER.mkdir(exist_ok=True)
        for old in FOLDER.iterdir():
            old.unlink()
        for file, text in pages().items():
            (FOLDER / file).write_text(text)
    else:
        print(json.dumps(pages()))
