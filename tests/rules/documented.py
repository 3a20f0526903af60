"""How many public names document every argument: ``python tests/rules/documented.py [--missing]``.

Counted are the functions and classes that users find in the modules below. A name is documented if each of its
parameters, apart from ``self``, is described under ``Args:`` in its docstring or that of ``__init__``, in words that
say more than its name and its default. Its examples are the lines after ``>>>``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODULES = (
    "dbrdist", "functions", "links", "initializers", "optimizers", "distributions", "distribution", "datasets",
    "dataset", "iterators", "training", "training.extensions", "training.triggers", "serializers", "models", "comm",
    "comm.functions", "comm.links", "function_hooks", "link_hooks", "gradient_check", "onnx", "utils", "testing",
)  # fmt: skip
# Names of a module without ``__all__`` that are its own, since it imports others.
OWN = {"gradient_check": {"assert_allclose", "check_backward", "check_backward_with_params", "check_double_backward",
                          "check_jvp", "numerical_grad"}}  # fmt: skip
# What the docstrings' examples may use without importing it.
PRELUDE = """
import numpy as np
import dbrdist
import dbrdist.distributions as D
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import datasets, initializers, iterators, models, optimizers, serializers, training
from dbrdist.training import extensions, triggers
"""
SECTIONS = "Returns|Raises|Example|Examples|Yields|Note|Attributes"


@functools.cache
def public() -> dict[str, Any]:
    """The public functions and classes by dotted name; each object once."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name in MODULES:
        module = importlib.import_module("dbrdist" if name == "dbrdist" else f"dbrdist.{name}")
        names = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
        for entry in sorted(set(names) & OWN.get(name, set(names))):
            value = getattr(module, entry)
            if is_ours(value) and id(value) not in seen:
                seen.add(id(value))
                found[f"{name}.{entry}"] = value
    return found


def is_ours(value: Any) -> bool:
    """A function or class of the library; nodes of the graph are found through the functions that make them."""
    is_node = inspect.isclass(value) and value.__name__ in NODES and value.__module__.startswith("dbrdist.comm.")
    ours = str(getattr(value, "__module__", "")).startswith("dbrdist")
    return callable(value) and ours and not inspect.ismodule(value) and not is_node


NODES = {"AllGather", "AllReduce", "AllToAll", "Bcast", "Gather", "PseudoConnect", "Recv", "ReduceScatter", "Scatter",
         "Send"}  # fmt: skip


def descriptions(doc: str) -> dict[str, str]:
    """The words about each name under ``Args:``."""
    section = re.search(rf"^ *Args:\n(.*?)(?=^ *(?:{SECTIONS})\b|\Z)", doc, re.M | re.S)
    if section is None:
        return {}
    found: dict[str, str] = {}
    for entry in re.finditer(r"^( +)((?:\*{0,2}\w+(?:,\s+)?)+):((?:.*\n)(?:^\1 +.*\n)*)", section[1] + "\n", re.M):
        for name in re.split(r",\s+", entry[2]):
            found[name.lstrip("*")] = " ".join(entry[3].split())
    return found


def described(doc: str) -> set[str]:
    """The names under ``Args:`` with words that say more than a default."""
    return {name for name, words in descriptions(doc).items() if says_something(name, words)}


def says_something(name: str, words: str) -> bool:
    """Not only the name again, or a default."""
    rest = re.sub(r"\bdefault\S*( is)? \S+|see above|an? (argument|array|number|value)\b|the|\W", " ", words.lower())
    return len(rest.replace(name.lower(), "").split()) > 0 or "array" in words or "number" in words


def missing(value: Any) -> list[str]:
    """The parameters of a public name that are not described."""
    if isinstance(value, importlib.import_module("dbrdist.dataset").Converter):
        value = value.function
    try:
        signature = inspect.signature(value)
    except (ValueError, TypeError):
        return []
    if inspect.isclass(value) and ("__init__" not in vars(value)) and is_exception(value):
        return []
    init = value.__dict__.get("__init__") if inspect.isclass(value) else None
    doc = (inspect.getdoc(value) or "") + "\n\n" + (inspect.getdoc(init) or "" if init is not None else "")
    known = described(inspect.cleandoc(inspect.getdoc(value) or "")) | described(doc)
    return [name for name in signature.parameters if name not in known]


def is_exception(value: type) -> bool:
    return issubclass(value, BaseException)


def has_example(value: Any) -> bool:
    return ">>>" in (inspect.getdoc(value) or "")


def main() -> None:
    names = public()
    lacking = {name: found for name, value in names.items() if (found := missing(value))}
    without = [name for name, value in names.items() if not has_example(value)]
    if "--missing" in sys.argv:
        for name, found in lacking.items():
            print(f"{name}: {', '.join(found)}")
        print("without an example:", ", ".join(without))
    print(f"{len(names) - len(lacking)} of {len(names)} public names document every argument")
    print(f"{len(names) - len(without)} have an example")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "launch")]
    main()
