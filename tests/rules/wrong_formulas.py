"""Makes every formula and every derivative of the package wrong, one at a time, and says which test notices.

Not part of CI; a tenth of a second for each of some 1,300 formulas that a test notices, half a minute for the others::

    python tests/rules/wrong_formulas.py                      # all of them
    python tests/rules/wrong_formulas.py --only softplus elu  # those of these operations
    python tests/rules/wrong_formulas.py --state FILE         # go on from what FILE holds
    python tests/rules/wrong_formulas.py --record             # and a dated record in benchmarks/records
    python tests/rules/wrong_formulas.py --state FILE --known # count what is in FILE, and end

Rows of operations lose a factor, a sign, each term and each factor, take each other argument for one, and change each
number. What nodes and public functions return is multiplied by a factor, each output by itself. What is changed lives
in a child process that imports the changed source; the files stay as they are. Changes that change nothing one could
see are marked by hand in ``equivalent_formulas.txt``.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import copy
import datetime
import functools
import importlib
import importlib.abc
import importlib.util
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  imported here once, for all children
import numpy as np
import pytest
import scipy.special  # noqa: F401

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent_formulas.txt")
FILES = [
    "dbrdist/core/tape/ops.py",
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "dbrdist/functions").glob("*.py")),
]
TESTS = [
    "tests/core/tape", "tests/distributions", "tests/links/test_convolution.py", "tests/kernels",
    "tests/contracts/kernels", "tests/contracts/functions", "tests/functions",
]  # fmt: skip
LIMIT_SECONDS = 900
SIGNS = {"add", "sub", "mul", "div"}

# Appended to a changed file: a wrong output, or several of them.
FALSIFIED = """


def _falsified(v, number=None):
    if isinstance(v, (tuple, list)):
        return type(v)([_falsified(one) if number in (None, i) else one for i, one in enumerate(v)])
    if v is None or isinstance(v, (bool, str)):
        return not v if isinstance(v, bool) else v
    return ~v if getattr(v, "dtype", None) == bool else v * 1.25
"""


@dataclass(frozen=True)
class Change:
    """A wrong formula: the whole source of a file with one expression exchanged."""

    file: str
    line: int
    operation: str
    what: str
    old: str
    new: str
    source: str

    @property
    def words(self) -> str:
        return f"{self.operation}: {self.what}: {self.old} -> {self.new}"


# ---- what is changed ------------------------------------------------------------------------------------------------


def wrong(expression: ast.expr, others: list[str]) -> Iterator[tuple[str, ast.expr]]:
    """Wrong versions of an expression, each with one change; ``others`` are names that could stand for one another."""
    yield "factor", ast.BinOp(expression, ast.Mult(), ast.Constant(1.25))
    yield "sign", ast.UnaryOp(ast.USub(), expression)
    for node in ast.walk(expression):
        for what, new in at(node, others):
            yield what, exchanged(expression, node, new)


def at(node: ast.AST, others: list[str]) -> Iterator[tuple[str, ast.expr]]:
    """What could stand wrongly in the place of a node."""
    if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Pow):
        yield "left alone", node.left
        yield "right alone", node.right
    elif isinstance(node, ast.Call) and len(node.args) == 2 and last_name(node.func) in SIGNS:
        yield "left alone", node.args[0]
        yield "right alone", node.args[1]
    elif isinstance(node, ast.Name) and node.id in others:
        for other in others:
            if other != node.id:
                yield "parameter", ast.Name(other, ast.Load())
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        yield "number", ast.Constant(node.value * 1.25 if node.value else 0.25)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "sign", node.operand


def last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def exchanged(expression: ast.expr, old: ast.AST, new: ast.expr) -> ast.expr:
    """A copy of the expression with ``new`` in the place of ``old``."""

    class Exchange(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return copy.deepcopy(new) if node is old else self.generic_visit(shallow(node))

    return Exchange().visit(expression)


def shallow(node: ast.AST) -> ast.AST:
    """The node with lists of its own, so that a transformer leaves the first tree alone."""
    twin = copy.copy(node)
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            setattr(twin, name, list(value))
    return twin


def changes_of(file: str) -> list[Change]:
    """All wrong versions of a file."""
    raw = (ROOT / file).read_bytes()
    tree = ast.parse(raw)
    starts = [0, *itertools.accumulate(map(len, raw.splitlines(keepends=True)))]
    found: list[Change] = []

    def add(operation: str, what: str, node: ast.expr, new: str, tail: str = "") -> None:
        first, last = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        source = raw[:first].decode() + new + raw[last:].decode() + tail
        found.append(Change(file, node.lineno, operation, what, one_line(ast.unparse(node)), one_line(new), source))

    for statement in tree.body:
        for call in ast.walk(statement):
            if isinstance(call, ast.Call) and last_name(call.func) in ("row", "function") and len(call.args) > 2:
                of_row(call, add)
        if isinstance(statement, ast.ClassDef):
            for method in statement.body:
                if isinstance(method, ast.FunctionDef) and method.name in ("forward", "derive"):
                    of_returns(f"{statement.name}.{method.name}", method, add)
        elif isinstance(statement, ast.FunctionDef):
            of_returns(statement.name, statement, add)
    return found


def of_row(call: ast.Call, add: Callable[..., None]) -> None:
    """Wrong versions of the formula and of each derivative of a row."""
    if not isinstance(call.args[0], ast.Constant):
        return
    operation = str(call.args[0].value)
    for number, argument in enumerate(call.args[1:-1]):
        which = "formula" if number == 0 else f"derivative {number}"
        if isinstance(argument, ast.Lambda):
            names = [a.arg for a in argument.args.args]
            for what, new in wrong(argument.body, names):
                add(operation, f"{which}: {what}", argument.body, f"({ast.unparse(ast.fix_missing_locations(new))})")
        elif number == 0:
            add(operation, f"{which}: factor", argument, f"(lambda *v: ({ast.unparse(argument)})(*v) * 1.25)")
        elif not (isinstance(argument, ast.Constant) and argument.value is None):
            for what, new in (("factor", f"1.25 * ({ast.unparse(argument)})"), ("sign", f"-({ast.unparse(argument)})")):
                if not isinstance(argument, (ast.Name, ast.Call)):
                    add(operation, f"{which}: {what}", argument, new)


def of_returns(operation: str, function: ast.FunctionDef, add: Callable[..., None]) -> None:
    """Every value that a function gives back, outputs one by one, made wrong."""
    inner = {id(n) for f in ast.walk(function) if isinstance(f, (ast.FunctionDef, ast.Lambda)) and f is not function
             for n in ast.walk(f)}  # fmt: skip
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None and id(node) not in inner:
            parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            for part in parts:
                is_error = isinstance(part, ast.Call) and last_name(part.func) == "expected"
                if not is_error and not isinstance(part, (ast.Constant, ast.Starred)):
                    add(operation, "result", part, f"_falsified({ast.unparse(part)})", FALSIFIED)


def one_line(text: str) -> str:
    return " ".join(text.split())


# ---- whether it is noticed ------------------------------------------------------------------------------------------


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a source that is not its file's."""

    def __init__(self, file: str, source: str) -> None:
        self.name = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        self.path = str(ROOT / file)
        self.source = source

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.name:
            return None
        is_package = self.path.endswith("__init__.py")
        spec = importlib.util.spec_from_loader(name, self, origin=self.path, is_package=is_package)
        if spec is not None and is_package:
            spec.submodule_search_locations = [str(Path(self.path).parent)]
        return spec

    def exec_module(self, module: Any) -> None:
        module.__file__ = self.path
        exec(compile(self.source, self.path, "exec"), module.__dict__)


class First:
    """Remembers the first test that failed."""

    def __init__(self) -> None:
        self.failed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = f"collection of {report.nodeid}"


def noticed(change: Change | None) -> str:
    """The first test that fails under the change, "" if none does; in a child, which alone imports the package."""
    with tempfile.TemporaryFile("w+") as answer:
        pid = os.fork()
        if not pid:
            answer.write(in_child(change))
            answer.flush()
            os._exit(0)
        end = time.monotonic() + LIMIT_SECONDS
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return "out of time"
            time.sleep(0.02)
        answer.seek(0)
        return answer.read() or "the tests end early"


def in_child(change: Change | None) -> str:
    """What :func:`noticed` gives; "-" where nothing failed."""
    if change is not None:
        sys.meta_path.insert(0, Changed(change.file, change.source))
    name = ""
    try:
        for name, test in near(change.operation.split(".")[0] if change is not None else ""):  # noqa: B007
            with warnings.catch_warnings(), contextlib.suppress(pytest.skip.Exception):
                warnings.simplefilter("error")
                test()
    except BaseException as e:
        return f"{name} ({type(e).__name__})"
    if change is not None:
        for module in [n for n in sys.modules if n.startswith(("test_", "cases", "points", "references", "tests."))]:
            del sys.modules[module]
    first = First()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not programs", *TESTS], plugins=[first])
    return first.failed or ("-" if code == 0 else f"exit {int(code)}")


def near(operation: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """The tests that are likely to notice, called without pytest, which costs more than they do."""
    name = "import"
    yield name, lambda: importlib.import_module("dbrdist.functions")
    cases, references, gradients, forward_mode = map(
        importlib.import_module,
        (
            "tests.functions.cases",
            "tests.contracts.functions.test_references",
            "tests.contracts.functions.test_gradients",
            "tests.core.tape.test_differentiate",
        ),
    )
    tests = {
        "test_rows": of_one(references.test_rows),
        "test_first_order": functools.partial(of_one(gradients.test_first_order), xp=np),
        "test_second_order": functools.partial(of_one(gradients.test_second_order), xp=np),
        "test_one_rule": of_one(gradients.test_one_rule_gives_the_same_bits_on_arrays_and_on_variables),
        "test_tangents": functools.partial(of_one(forward_mode.test_tangents_agree_with_differences), xp=np),
    }
    word = operation.lower().strip("_")
    own = sorted(cases.CASES, key=lambda c: (not word.startswith(c.name.split("_")[0]), word not in c.name))
    points = sorted({p.name for p in references.POINTS}, key=lambda n: word not in n)
    if "exp_difference" in word:  # no row of `cases.py` is theirs
        yield "test_differences_of_exponents", gradients.test_differences_of_exponents_have_every_derivative
    for case in own[:12]:
        for name, test in tests.items():
            if case.order > 1 or name != "test_second_order":
                yield f"{name}[{case.name}]", functools.partial(test, case=case)
    for point in points:
        yield f"test_points[{point}]", functools.partial(of_one(references.test_points), name=point)
    for kink in importlib.import_module("tests.functions.points").KINKS:
        yield f"kink[{kink[0]}]", functools.partial(of_one(references.test_gradients_where_the_derivative_jumps), *kink)
    for case in own[12:]:
        for name, test in tests.items():
            if case.order > 1 or name != "test_second_order":
                yield f"{name}[{case.name}]", functools.partial(test, case=case)


def of_one(test: Callable[..., None]) -> Callable[..., None]:
    """The test of one case, from that of a whole section."""
    return test.__wrapped__  # type: ignore[attr-defined,no-any-return]


def equivalents() -> set[tuple[str, ...]]:
    """What was marked by hand: file, operation, old text, new text, then the reason, divided by ' | '."""
    lines = EQUIVALENT.read_text().splitlines() if EQUIVALENT.exists() else []
    return {tuple(line.split(" | ")[:4]) for line in lines if line and not line.startswith("#")}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="operations, or files by a part of their name")
    parser.add_argument("--list", action="store_true", help="show what would be changed")
    parser.add_argument("--state", type=Path, help="results so far, to go on from")
    parser.add_argument("--known", action="store_true", help="count what the state holds, and judge nothing more")
    parser.add_argument("--record", action="store_true", help="write benchmarks/records/wrong-formulas-DATE.json")
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT)]
    changes = [c for file in FILES for c in changes_of(file)]
    if options.only:
        changes = [c for c in changes if c.operation.split(".")[0] in options.only or
                   any(o in c.file for o in options.only)]  # fmt: skip
    if options.list:
        for change in changes:
            print(f"{change.file}:{change.line} {change.words}")
        print(len(changes))
        return
    known: dict[str, str] = {}
    if options.state and options.state.exists():
        known = dict(json.loads(line) for line in options.state.read_text().splitlines())
    if not known and (found := noticed(None)) != "-":
        sys.exit(f"the tests fail without a change: {found}")
    marked, survivors = equivalents(), []
    counts: collections.Counter[str] = collections.Counter()
    for change in changes:
        key = f"{change.file} {change.words}"
        if key not in known and options.known:
            counts["not judged"] += 1
            continue
        if key not in known:
            known[key] = noticed(change)
            if options.state:
                with open(options.state, "a") as file:
                    file.write(json.dumps([key, known[key]]) + "\n")
        found = known[key]
        outcome = "noticed" if found != "-" else "survived"
        if outcome == "survived" and (change.file, change.operation, change.old, change.new) in marked:
            outcome = "equivalent"
        counts[outcome] += 1
        if outcome == "survived":
            survivors.append(f"{change.file}:{change.line} {change.words}")
        print(f"{outcome:10} {change.file}:{change.line} {change.words[:110]}  [{found[:90]}]", flush=True)
    operations = {c.operation for c in changes}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    result = {
        "what": "every formula and derivative made wrong, one at a time, and how many of them the tests notice",
        "date": datetime.date.today().isoformat(), "commit": commit, "operations": len(operations),
        "changes": len(changes), **{k: counts[k] for k in ("noticed", "survived", "equivalent", "not judged")},
        "survivors": survivors,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.record:
        path = ROOT / "benchmarks" / "records" / f"wrong-formulas-{result['date']}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {path}")


if __name__ == "__main__":
    main()
