"""How many public names and methods document every argument: ``python tests/rules/documented.py [--missing]``.

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


@functools.cache
def methods() -> dict[str, tuple[type, str, Any]]:
    """The public methods of public classes with parameters, by dotted name: the class that has it, its name, and it."""
    found: dict[str, tuple[type, str, Any]] = {}
    seen: set[int] = set()
    for cls in public().values():
        if not inspect.isclass(cls) or is_exception(cls):
            continue
        for name in dir(cls):
            owner = next((c for c in cls.__mro__ if name in c.__dict__), None)
            raw = None if owner is None or name.startswith("_") else owner.__dict__[name]
            function = getattr(raw, "__func__", raw)
            if not is_method(function) or id(function) in seen:
                continue
            seen.add(id(function))
            if parameters_of(raw):
                found[f"{function.__module__}:{owner.__name__}.{name}"] = (cls, name, raw)
    return found


def is_method(value: Any) -> bool:
    """A method that the library defines, whether compiled or not."""
    is_function = inspect.isfunction(value) or type(value).__name__ == "cython_function_or_method"
    return is_function and value.__module__.startswith("dbrdist") and value.__name__ != "<lambda>"


def parameters_of(raw: Any) -> list[str]:
    """The parameters of a method but the object, without those that it does not look at (``*_``)."""
    names = list(inspect.signature(getattr(raw, "__func__", raw)).parameters)
    return [name for name in (names if isinstance(raw, staticmethod) else names[1:]) if not name.startswith("_")]


def missing_of_method(cls: type, name: str, raw: Any) -> list[str]:
    """The parameters of a method that neither its docstring nor that of a method that it overrides describes.

    A parameter is described under ``Args:``, or named in double backticks in a sentence.
    """
    docs = [inspect.cleandoc(c.__dict__[name].__doc__ or "") for c in cls.__mro__ if name in c.__dict__]
    return [p for p in parameters_of(raw) if not any(p in described(doc) or is_named(p, doc) for doc in docs)]


def is_named(parameter: str, doc: str) -> bool:
    """Whether a sentence has the name in double backticks, beside words of its own."""
    named = re.search(rf"``[^`]*\b{re.escape(parameter)}\b[^`]*``", doc)
    return named is not None and len(re.sub(r"``[^`]*``|\W", " ", doc).split()) >= 2


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
    undescribed = {name: found for name, entry in methods().items() if (found := missing_of_method(*entry))}
    if "--missing" in sys.argv:
        for name, found in undescribed.items():
            print(f"{name}: {', '.join(found)}")
    print(f"{len(methods()) - len(undescribed)} of {len(methods())} public methods document every argument")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "launch")]
    main()
