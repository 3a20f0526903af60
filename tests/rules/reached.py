"""Which tests call which functions: a plugin for pytest that `mutants.py` runs once, and what it reads from the result.

    REACHED=FILE python -m pytest -p tests.rules.reached tests -m "not programs"

A function is known by its file and the line where it begins, decorators included. Only calls within the process of the
test are seen, and in what it forks, those of threads too. Tests that fail count as calling nothing, and are listed.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIRST_SECONDS = 8.0
FIRST_TESTS = 40


class Reached:
    """Notes the functions of the package that each test calls."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pid = os.getpid()
        self.told = os.memfd_create("calls")  # what forks of this process have called
        self.called: set[Any] = set()
        self.tests: dict[str, float] = {}
        self.failed: set[str] = set()
        self.by_place: dict[str, list[int]] = {}

    def trace(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if code not in self.called:
            self.called.add(code)
            if os.getpid() != self.pid:
                with contextlib.suppress(OSError):  # a fork that has closed all files
                    os.write(self.told, f"{place_of(code)}\n".encode())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        self.called.clear()
        os.lseek(self.told, 0, os.SEEK_SET)
        os.ftruncate(self.told, 0)
        start = time.process_time()
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            self.tests[item.nodeid] = round(time.process_time() - start, 4)
            told = os.pread(self.told, os.fstat(self.told).st_size, 0)
            places = set(told.decode().split("\n")[:-1])
            places.update(map(place_of, list(self.called)))  # a copy, since threads that tests left may still add to it
            for place in places:
                self.by_place.setdefault(place, []).append(len(self.tests) - 1)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_unconfigure(self) -> None:
        sound = {number for number, test in enumerate(self.tests) if test not in self.failed}
        functions = {
            place.removeprefix(f"{ROOT}/"): [n for n in tests if n in sound]
            for place, tests in self.by_place.items()
            if place.startswith((f"{ROOT}/dbrdist/", f"{ROOT}/launch/"))
        }
        found = {"tests": self.tests, "functions": functions, "failed": sorted(self.failed)}
        self.path.write_text(json.dumps(found))


def place_of(code: Any) -> str:
    """The file and the first line of a function."""
    return f"{os.path.normpath(code.co_filename)}:{code.co_firstlineno}"  # tests/gpu leads to it over ".."


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Reached(Path(os.environ["REACHED"])))


# ---- what is read from it -------------------------------------------------------------------------------------------


def functions_at(source: bytes, line: int) -> list[int]:
    """First lines of the functions that a change in this line concerns: the one around it, or those that use its name.

    Empty where that cannot be said, as for a class or for what is computed when the module is imported.
    """
    tree = ast.parse(source)
    around = [f for f in ast.walk(tree) if isinstance(f, _FUNCTIONS) and _begins(f) <= line <= (f.end_lineno or 0)]
    if around:
        return [_begins(max(around, key=_begins))]
    for statement in tree.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.lineno <= line <= (
            statement.end_lineno or 0
        ):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = {t.id for t in targets if isinstance(t, ast.Name)}
            return [_begins(f) for f in ast.walk(tree) if isinstance(f, _FUNCTIONS) and names & _names(f)]
    return []


_FUNCTIONS = (ast.FunctionDef, ast.Lambda)


def _begins(function: Any) -> int:
    """The line of its first decorator, or else its own."""
    return min([function.lineno, *(d.lineno for d in getattr(function, "decorator_list", []))])


def _names(function: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}


def tests_of(reached: dict[str, Any], file: str, source: bytes, line: int) -> list[str] | None:
    """The tests that call what this line concerns, the shortest first; None where that cannot be said."""
    places = [f"{file}:{begin}" for begin in functions_at(source, line)]
    if not places:
        return None
    numbers = {number for place in places for number in reached["functions"].get(place, [])}
    names = list(reached["tests"])
    return sorted((names[number] for number in numbers), key=lambda test: (reached["tests"][test], test))


def first_of(reached: dict[str, Any], tests: list[str]) -> list[str]:
    """A part of them that takes seconds: of each file the shortest and the longest that fit, then the shortest."""
    by_file: dict[str, list[str]] = {}
    for test in tests:
        by_file.setdefault(test.partition("::")[0], []).append(test)
    ahead = [test for group in by_file.values() for test in (group[0], group[-1])]
    chosen: list[str] = []
    seconds = 0.0
    for test in dict.fromkeys([*sorted(ahead, key=lambda t: reached["tests"][t]), *tests]):
        if len(chosen) < FIRST_TESTS and seconds + reached["tests"][test] < FIRST_SECONDS:
            chosen.append(test)
            seconds += reached["tests"][test]
    return chosen
