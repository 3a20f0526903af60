"""What the tests of the ONNX export and its page try: each function with inputs, and which operators come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import dbrdist.functions as F
from dbrdist.onnx import OperatorError, export
from tests.functions.cases import CASES

# Functions without a derivative, which the table of operations lacks.
FURTHER = {
    "accuracy": None,
    "argmax": lambda x: F.argmax(x, axis=1),
    "argmin": lambda x: F.argmin(x),
    "ceil": lambda x: F.ceil(x * 3),
    "fix": lambda x: F.fix(x * 3),
    "floor": lambda x: F.floor(x * 3),
    "sign": lambda x: F.sign(x),
}


def function_of(case: str) -> str | None:
    """The public function that a case tries: the longest name with which the case's begins."""
    found = [f for f in F.__all__ if case == f or case.startswith(f + "_")]
    return max(found, key=len, default=None)


def small_inputs(case: Any) -> list[list[Any]]:
    """float32 inputs of a case, for each of its shapes that has elements."""
    drawn = [case.inputs(shapes, np.float32) for shapes in case.shapes]
    return [xs for xs in drawn if all(x.size for x in xs)]


def tried(folder: Path) -> dict[str, list[str] | str]:
    """For each public function the operators of its first case that has any, or why it has none."""
    found: dict[str, Any] = {}

    def attempt(name: str, function: Any, xs: Any) -> None:
        try:
            kinds = [k for k in export(function, tuple(xs), folder / "f.onnx") if k != "Identity"]
            if not isinstance(found.get(name), list) or len(kinds) > len(found[name]):
                found[name] = kinds
        except OperatorError as error:
            found.setdefault(name, str(error).split(": ", 1)[1])

    for case in CASES:
        name = function_of(case.name)
        if name is not None:
            for xs in small_inputs(case)[:1]:
                attempt(name, case.function, xs)
    for name, function in FURTHER.items():
        if function is not None:
            attempt(name, function, [np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)])
    return found
