"""How many public names document every argument: ``python tests/rules/documented.py [--missing]``.

Counted are the functions and classes in ``__all__`` of functions, links, optimizers and training. A name is documented
if each of its parameters, apart from ``self``, is described under ``Args:`` in its docstring or that of ``__init__``.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODULES = ("functions", "links", "optimizers", "training", "training.extensions", "training.triggers")


def public() -> dict[str, Any]:
    """The public functions and classes by dotted name; each object once."""
    found, seen = {}, set()
    for name in MODULES:
        module = importlib.import_module(f"dbrdist.{name}")
        for entry in sorted(getattr(module, "__all__", [n for n in vars(module) if not n.startswith("_")])):
            value = getattr(module, entry)
            if (
                callable(value)
                and getattr(value, "__module__", "dbrdist").startswith("dbrdist")
                and id(value) not in seen
            ):
                seen.add(id(value))
                found[f"{name}.{entry}"] = value
    return found


def described(doc: str) -> set[str]:
    """The names under ``Args:``."""
    section = re.search(r"^ *Args:\n(.*?)(?=^ *(?:Returns|Raises|Example|Examples|Yields|Note)\b|\Z)", doc, re.M | re.S)
    if section is None:
        return set()
    names = re.findall(r"^ +((?:\*{0,2}\w+(?:, )?)+):", section[1], re.M)
    return {n.lstrip("*") for entry in names for n in entry.split(", ")}


def missing(value: Any) -> list[str]:
    """The parameters of a public name that are not described."""
    try:
        signature = inspect.signature(value)
    except (ValueError, TypeError):
        return []
    own = {"self", "cls", *(["kwargs"] if "kwargs" in signature.parameters else [])}
    init = value.__dict__.get("__init__") if inspect.isclass(value) else None
    doc = (inspect.getdoc(value) or "") + "\n\n" + (inspect.getdoc(init) or "" if init is not None else "")
    known = described(inspect.cleandoc(inspect.getdoc(value) or "")) | described(doc)
    return [name for name in signature.parameters if name not in own and name not in known]


def main() -> None:
    names = public()
    lacking = {name: found for name, value in names.items() if (found := missing(value))}
    if "--missing" in sys.argv:
        for name, found in lacking.items():
            print(f"{name}: {', '.join(found)}")
    print(f"{len(names) - len(lacking)} of {len(names)} public names document every argument")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "launch")]
    main()
