"""Breaks the package at random places, one at a time, and lists what no test notices. Not part of CI.

    make mutants                                        # 100 mutations drawn with seed 0, two workers
    python tests/rules/mutants.py --count 30 --seed 7 --rooms core functions --state sample.jsonl
    python tests/rules/mutants.py --aimed               # where tests tend to have holes
    python tests/rules/mutants.py --record              # and a dated record in benchmarks/records

It compiles the loops in Cython, for which it needs Cython, hatchling and a compiler; without them, code that calls
these loops is never reached, and changes there survive.

First the tests, but for those of programs, run once without a mutation and note which functions each of them calls
(``reached.py``). What these tests notice in a fork is settled at once (``forked_mutants.py``). Each mutation that is
left is made in a copy of the tree: tests that call its function run first, the shortest ahead, then all tests of its
room, those of programs too, those under mpiexec and on what stands for a GPU where the room has some, and then all but
those of programs, of which those are left out that never come near where that is known. The first failure kills it,
also that of a test which hangs. Where a whole stage runs out of time, as on a busy machine, nothing is known. Results
go line by line into the state file, and a second start with the same file goes on where the first one ended. Survivors
that change nothing one could see are marked by hand in ``equivalent_mutants.txt``.

The aimed sample is drawn from conditions of branches and loops with the numbers in them, defaults of parameters,
constants in capitals (thresholds, limits), and errors that are not raised; the other one from all places but errors.
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import datetime
import functools
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from reached import first_of, tests_of

ROOT = Path(__file__).parents[2]
sys.path.insert(1, str(ROOT))
suites = importlib.import_module("tests.suites")
SOURCES = ("dbrdist", "launch/dbrdist_launch")
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")
# All but those of programs, divided so that none of these commands comes near the limit.
ALL = [["tests", "-m", "not slow"], *(["tests", "-m", "slow and not programs", "--part", f"{k}/2"] for k in (1, 2))]
PAGES = "tests/rules/test_api_pages.py"  # defaults of public names
SIGNATURES = (PAGES, "tests/compat/test_defaults_of_chainer.py")  # read by these without a call
GPU = ["tests/gpu", "--on", "stand-in"]
AIMED = "conditions, defaults of parameters, constants in capitals and errors of all rooms"
# As .ci/run has them: kernels compiled for the host; and complete steps, also as CUDA graphs.
HOST_CUDA = [*(f"tests/gpu/test_{name}.py" for name in suites.ON_HOST), "--on", "host-cuda"]
WHOLE = [*(f"tests/gpu/test_{name}.py" for name in suites.ON_WHOLE), "--on", "whole"]
MPI = ["mpiexec", "-n", "3"]
# The tests of each room, run before those of others; further suites between them.
FIRST = {
    "core": [
        "tests/contracts/functions/test_references.py",
        "tests/core",
        "tests/contracts/functions",
        "tests/functions",
    ],
    "kernels": ["tests/kernels", "tests/contracts/kernels", "tests/contracts/functions"],
    "functions": ["tests/contracts/functions/test_references.py", "tests/functions", "tests/contracts/functions"],
    "optimizers": ["tests/optimizers", "tests/core/update", "tests/core/model/test_flat.py"],
    "links": ["tests/links", "tests/models"],
    "models": ["tests/models"],
    "datasets": ["tests/datasets"],
    "training": ["tests/training"],
    "comm": ["tests/comm", "tests/contracts/comm"],
    "cli": ["tests/cli"],
    "launch": ["tests/launch"],
}
ON_GPU = {"core", "kernels", "functions", "optimizers", "links", "comm"}
UNDER_MPI = {"comm", "cli"}
IN_STEPS = ON_GPU | {"training", "cli"}

# ---- what can be changed --------------------------------------------------------------------------------------------

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}  # fmt: skip
# Calls whose arguments are words for people, or that only describe.
WORDS = {"expected", "warn", "print", "one_of", "TypeVar", "getLogger", "echo", "Field"}
# Calls whose first two arguments may be exchanged, or whose exchange every test would notice.
SYMMETRIC = {
    "add",
    "mul",
    "multiply",
    "maximum",
    "minimum",
    "max",
    "min",
    "isinstance",
    "getattr",
    "setattr",
    "hasattr",
    "require",
    "result_type",
    "suppress",
}


@dataclass(frozen=True)
class Mutation:
    """One change of one file: the bytes from ``start`` to ``end`` become ``new``."""

    file: str
    line: int
    kind: str
    old: str
    new: str
    start: int
    end: int

    @property
    def key(self) -> str:
        """The same in each run on the same sources."""
        return f"{self.file}:{self.line}:{self.start}:{self.kind}:{self.new}"

    @property
    def room(self) -> str:
        parts = self.file.split("/")
        return "launch" if parts[0] == "launch" else parts[1].removesuffix(".py")

    @property
    def is_for_gpus(self) -> bool:
        """Whether it runs where there is a GPU alone."""
        return "/gpu/" in self.file or self.file.endswith("/device_dispatch.py")

    def apply(self, root: Path) -> None:
        """Change the file under ``root``."""
        path = root / self.file
        source = path.read_bytes()
        write(path, source[: self.start] + self.new.encode() + source[self.end :])


def write(path: Path, source: bytes) -> None:
    """Write a source at a second of its own: bytecode counts as that of a source of the same second and size."""
    second = int(path.stat().st_mtime) + 2
    path.write_bytes(source)
    os.utime(path, (second, second))


def other_constant(value: object) -> object:
    """A constant of the same type, None where there is none to be had."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return (value * 1.25 or 1.0) if isinstance(value, float) else None


class Finder(ast.NodeVisitor):
    """Collects the places of a file, without docstrings, messages and annotations."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file = file
        self.source = source
        self.found: list[Mutation] = []
        self.aimed: list[Mutation] = []
        self.is_aiming = False
        self.in_reshape = False  # where NumPy takes any number below zero as it takes -1
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    @contextlib.contextmanager
    def aim(self) -> Iterator[None]:
        """What is found within belongs to the aimed sample, too."""
        outer, self.is_aiming = self.is_aiming, True
        before = len(self.found)
        yield
        self.is_aiming = outer
        if not outer:
            self.aimed += self.found[before:]

    def add(self, node: ast.AST, kind: str, new: str | ast.expr) -> None:
        """A change of the text of ``node``."""
        start = self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        text = new if isinstance(new, str) else f"({ast.unparse(new)})"
        old = self.source[start:end].decode()
        self.found.append(Mutation(self.file, node.lineno, kind, old, text, start, end))  # type: ignore[attr-defined]

    def visit_Constant(self, node: ast.Constant) -> None:
        other = other_constant(node.value)
        if other is not None:
            self.add(node, "constant", repr(other))

    def visit_Compare(self, node: ast.Compare) -> None:
        other = COMPARISONS[type(node.ops[0])]()
        self.add(node, "comparison", ast.Compare(node.left, [other, *node.ops[1:]], node.comparators))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = ARITHMETIC.get(type(node.op))
        if other is not None and not isinstance(node.left, (ast.JoinedStr, ast.Constant)):
            self.add(node, "arithmetic", ast.BinOp(node.left, other(), node.right))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        other = ARITHMETIC.get(type(node.op))
        if other is not None:
            self.add(node, "arithmetic", ast.unparse(ast.AugAssign(node.target, other(), node.value)))
        self.add(node, "drop", "pass")
        self.visit(node.value)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.add(node, "condition", ast.BoolOp(other, node.values))
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.branch(node.test, node.body, node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.branch(node.test, [node.body], [node.orelse])

    def visit_While(self, node: ast.While) -> None:
        self.branch(node.test, node.body, node.orelse)

    def branch(self, test: ast.expr, body: Sequence[ast.AST], orelse: Sequence[ast.AST]) -> None:
        with self.aim():
            self.negate(test)
            self.visit(test)
        for node in (*body, *orelse):
            self.visit(node)

    def negate(self, test: ast.expr) -> None:
        """The condition reversed, where changing a comparison in it does not amount to that."""
        if not isinstance(test, (ast.Constant, ast.Compare)):
            self.add(test, "condition", test.operand if is_negated(test) else ast.UnaryOp(ast.Not(), test))

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            if name_of(node.value) not in WORDS:
                self.add(node, "drop", "pass")
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        name = node.targets[0].id if isinstance(node.targets[0], ast.Name) else ""
        if name.startswith("__") or name == "name":
            return
        if not name and not isinstance(node.targets[0], ast.Tuple):  # a local that is missing is always noticed
            self.add(node, "drop", "pass")
        self.value_of(name, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.value_of(ast.unparse(node.target), node.value)

    def value_of(self, name: str, value: ast.expr) -> None:
        with self.aim() if name.isupper() else contextlib.nullcontext():
            self.visit(value)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if ast.unparse(node) != "-1" or not self.in_reshape:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if name_of(node) in WORDS:
            return
        outer, self.in_reshape = self.in_reshape, name_of(node) == "reshape"
        self.within_call(node)
        self.in_reshape = outer

    def within_call(self, node: ast.Call) -> None:
        if (
            len(node.args) > 1
            and name_of(node) not in SYMMETRIC
            and not any(isinstance(a, ast.Starred) for a in node.args[:2])
        ):
            first, second = map(ast.unparse, node.args[:2])
            if first != second:
                args = [node.args[1], node.args[0], *node.args[2:]]
                self.add(node, "arguments", ast.Call(node.func, args, node.keywords))
        for child in ast.iter_child_nodes(node):
            if name_of(node) != "astype" or not isinstance(child, ast.keyword) or child.arg != "copy":
                self.visit(child)  # else one copy more, of the same values

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        with self.aim():
            for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)):
                self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_Raise(self, node: ast.Raise) -> None:
        """For the aimed sample alone."""
        self.add(node, "error", "pass")
        self.aimed.append(self.found.pop())

    def visit_Assert(self, node: ast.Assert) -> None: ...

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...


def is_negated(test: ast.expr) -> bool:
    """True for ``not ...``."""
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


def name_of(call: ast.Call) -> str:
    """The last part of what is called."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


@functools.cache
def finders(root: Path) -> list[Finder]:
    """What can be changed in each file, in the order of files."""
    found = []
    for source in SOURCES:
        for path in sorted((root / source).rglob("*.py")):
            text = path.read_bytes()
            finder = Finder(path.relative_to(root).as_posix(), text)
            finder.visit(ast.parse(text))
            found.append(finder)
    return found


def mutations(rooms: list[str] | None = None, is_aimed: bool = False) -> list[Mutation]:
    """All that can be changed, in the order of files and places; or those of them where tests tend to have holes."""
    found = [m for finder in finders(ROOT) for m in (finder.aimed if is_aimed else finder.found)]
    return [m for m in found if m.room in FIRST and (rooms is None or m.room in rooms)]


# ---- whether it is noticed ------------------------------------------------------------------------------------------


def stages(
    room: str,
    options: argparse.Namespace,
    near: Sequence[str] | None = None,
    first: Sequence[str] = (),
    is_for_gpus: bool = False,
) -> Iterator[list[str]]:
    """Commands that test a tree, those that notice most first; ``near`` are the tests known to call what changed.

    Where that is none, only processes that tests start may call it: the tests of programs come first. Before both come
    those on what stands for a GPU where nothing else runs the code.
    """
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", str(options.timeout)]
    own = [t for t in FIRST[room] if (ROOT / t).exists()]
    pages = [t for t in SIGNATURES if (ROOT / t).exists()]
    if first:
        yield [*pytest, *first]
    in_process = [*pytest, *near, *pages] if near else [*pytest, *own, *pages, "-m", "not programs"]
    by_kind = [in_process] if options.room_only else [in_process, [*pytest, *pages, *own, "-m", "programs"]]
    suites_for_gpus = [GPU] * (room in ON_GPU) + [HOST_CUDA] * (room == "kernels") + [WHOLE] * (room in IN_STEPS)
    on_gpu = [] if options.room_only else [[*pytest, *suite] for suite in suites_for_gpus]
    if is_for_gpus:
        yield from on_gpu
    yield from by_kind if near is None or near else reversed(by_kind)
    if options.room_only:
        return
    if room in UNDER_MPI:
        yield [*MPI, *pytest, "tests/mpi"]
    if not is_for_gpus:
        yield from on_gpu
    if near is None:
        yield from ([*pytest, *some] for some in ALL)


def note_reached(tree: Path, path: Path, limit_seconds: float) -> None:
    """Run the tests once, but for those of programs, and write down which of them call which function.

    A program is not seen through. Tests that fail, as they may where each call is traced, are left out and named; they
    would seem to notice whatever is changed. The file is there only once it is whole.
    """
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.rules.reached"]
    noted = path.with_name(f"{path.name}.part")
    command = [sys.executable, "-m", "pytest", *options, "tests", "-m", "not programs"]
    status, words = run(command, tree, limit_seconds, REACHED=str(noted))
    if status not in (0, 1) or not noted.exists():  # 1: some tests failed; else not all of them ran
        noted.unlink(missing_ok=True)
        sys.exit(f"the tests do not run to their end: {words or status}")
    for test in json.loads(noted.read_text())["failed"]:
        print(f"fails without a mutation: {test}", flush=True)
    noted.replace(path)


def run(command: list[str], tree: Path, limit_seconds: float, **environ: str) -> tuple[int | None, str]:
    """Exit status, None where the time ran out, and the line that names the first failure."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'launch'}",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "",
        **environ,
    }
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            status = None
            for pid in reversed(descendants(process.pid)):  # programs that tests started have sessions of their own
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        failures = [line.strip() for line in output if line.startswith(("FAILED", "ERROR", "E  "))]
    return status, failures[-1][:200] if failures else ""


def descendants(pid: int) -> list[int]:
    """The process and all that it started, directly or not."""
    children: dict[int, list[int]] = collections.defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            children[parent].append(int(entry.parent.name))
    found = [pid]
    for one in found:
        found += children[one]
    return found


def verdict(mutation: Mutation, tree: Path, options: argparse.Namespace) -> dict[str, object]:
    """How the tests take it."""
    began = time.monotonic()
    whole = (tree / mutation.file).read_bytes()
    outcome, by = "survived", ""
    try:
        mutation.apply(tree)
        near = tests_of(options.known, mutation.file, whole, mutation.line) if options.known else None
        first = first_of(options.known, near) if near else []
        for number, command in enumerate(stages(mutation.room, options, near, first, mutation.is_for_gpus)):
            status, words = run(command, tree, options.limit)
            if status not in (0, 5):  # 5: there is no such test
                outcome, by = ("out of time" if status is None else "killed"), f"stage {number}: {words}"
                break
    finally:
        write(tree / mutation.file, whole)
    text = whole.decode().splitlines()[mutation.line - 1].strip()
    return {
        **asdict(mutation),
        "text": text,
        "outcome": outcome,
        "by": by,
        "seconds": round(time.monotonic() - began, 1),
    }


@contextlib.contextmanager
def trees(count: int) -> Iterator[list[Path]]:
    """Copies of the tree, one for each worker."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        made = [Path(folder, str(i)) for i in range(count)]
        loops = compiled_loops(Path(folder, "loops"))
        for tree in made:
            for source, name in [*((str(ROOT / name), name) for name in tracked()), *loops.items()]:
                path = tree / name
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, path)
        yield made


def compiled_loops(folder: Path) -> dict[str, str]:
    """Each module in Cython, compiled, and its place in a tree; none, which is said, where that cannot be done.

    Modules in Python stay as they are: a compiled one would hide what is changed.
    """
    sys.path.append(str(ROOT))
    try:
        compile_all = importlib.import_module("hatch_build").compiled
        made: dict[str, str] = compile_all(str(ROOT), [n for n in tracked() if n.endswith(".pyx")], folder)
    except ImportError as error:
        print(f"without compiled loops, so that nothing notices changes around them: {error}", flush=True)
        return {}
    return made


def check(rooms: set[str], tree: Path, options: argparse.Namespace) -> None:
    """Without a mutation every stage must pass."""
    done: set[tuple[str, ...]] = set()
    for room in sorted(rooms):
        for command in stages(room, options):
            if tuple(command) not in done:
                done.add(tuple(command))
                status, words = run(command, tree, 3 * options.limit)
                if status not in (0, 5):
                    sys.exit(f"the tests fail without a mutation: {' '.join(command)}: {words or status}")


def judge(drawn: list[Mutation], options: argparse.Namespace) -> list[dict[str, object]]:
    """Verdicts of all that were drawn, those of an earlier start included."""
    known: dict[str, dict[str, object]] = {}
    if options.state.exists():
        for row in map(json.loads, options.state.read_text().splitlines()):
            known[key_of(row)] = row
    left = [m for m in drawn if m.key not in known]
    print(f"{len(drawn)} mutations, {len(drawn) - len(left)} of them known; {options.state}", flush=True)
    lock = threading.Lock()
    with trees(options.workers) as free, concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        options.known = {}
        if left and options.reached:
            if not options.reached.exists():
                note_reached(free[0], options.reached, 6 * options.limit)
            options.known = json.loads(options.reached.read_text())
        if left and not options.trust:
            check({m.room for m in left}, free[0], options)
        if options.known:
            known |= first_look(left, free[0], options)
            left = [m for m in left if m.key not in known]

        def one(mutation: Mutation) -> None:
            with lock:
                tree = free.pop()
            row = verdict(mutation, tree, options)
            with lock:
                free.append(tree)
                known[mutation.key] = row
                with open(options.state, "a") as file:
                    file.write(json.dumps(row) + "\n")
                print(describe(row), flush=True)

        list(pool.map(one, left))
    return [known[m.key] for m in drawn]


def first_look(left: list[Mutation], tree: Path, options: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Those that tests in a fork notice within seconds (`forked_mutants.py`); the others are judged one by one."""
    with tempfile.TemporaryDirectory() as folder:
        drawn, state = Path(folder, "drawn.json"), Path(folder, "state.jsonl")
        drawn.write_text(json.dumps([asdict(m) for m in left]))
        command = [sys.executable, "tests/rules/forked_mutants.py", "--drawn", str(drawn), "--state", str(state)]
        run([*command, "--reached", str(options.reached), "--workers", str(options.workers)], tree, 30.0 * len(left))
        rows = [json.loads(line) for line in state.read_text().splitlines()] if state.exists() else []
    killed = [row for row in rows if row["outcome"] == "killed"]
    with open(options.state, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in killed)
    print(f"{len(killed)} of {len(left)} killed at a first look", flush=True)
    return {key_of(row): row for row in killed}


def key_of(row: dict[str, object]) -> str:
    """That of the mutation in a row of results."""
    return f"{row['file']}:{row['line']}:{row['start']}:{row['kind']}:{row['new']}"


def describe(row: dict[str, object]) -> str:
    """One line for people."""
    old, new = (" ".join(str(row[k]).split())[:70] for k in ("old", "new"))
    return f"{row['outcome']:11} {row['file']}:{row['line']} {row['kind']}: {old} -> {new}"


def equivalents() -> set[tuple[str, ...]]:
    """What was marked by hand: file, line as it stands, old text, new text, then the reason, divided by ' | '."""
    lines = EQUIVALENT.read_text().splitlines() if EQUIVALENT.exists() else []
    return {tuple(line.split(" | ")[:4]) for line in lines if line and not line.startswith("#")}


def summary(rows: list[dict[str, object]], options: argparse.Namespace) -> dict[str, object]:
    """What goes into a record."""
    marked = equivalents()
    rooms: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    survivors = []
    for row in rows:
        outcome = str(row["outcome"])
        if outcome == "survived":
            change = tuple(" ".join(str(row[k]).split()) for k in ("file", "text", "old", "new"))
            outcome = "equivalent" if change in marked else outcome
            if outcome == "survived":
                survivors.append(describe(row))
        rooms[Mutation(**{k: row[k] for k in Mutation.__dataclass_fields__}).room][outcome] += 1  # type: ignore[arg-type]
    total = sum(rooms.values(), collections.Counter())
    judged = total["killed"] + total["survived"]
    return {
        "what": f"mutations drawn at random from {AIMED if options.aimed else 'all rooms'}; how many the tests notice",
        "date": datetime.date.today().isoformat(), "commit": commit(), "seed": options.seed, "mutations": len(rows),
        "killed": total["killed"], "survived": total["survived"], "equivalent": total["equivalent"],
        "out_of_time": total["out of time"],
        "killed_fraction": round(total["killed"] / judged, 3) if judged else None,
        "rooms": {room: dict(counts) for room, counts in sorted(rooms.items())},
        "survivors": survivors,
    }  # fmt: skip


def tracked() -> list[str]:
    """All files of the project, so that no test misses one in a copy."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return listed.splitlines()


def commit() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="how many mutations to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each stage of a mutation")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for each test")
    parser.add_argument("--aimed", action="store_true", help=f"draw from {AIMED}")
    parser.add_argument("--rooms", nargs="+", choices=sorted(FIRST), help="only these")
    parser.add_argument("--state", type=Path, help="results so far; default mutants-SEED.jsonl in the temporary folder")
    parser.add_argument(
        "--reached", type=Path, help="which tests call which function; default REACHED-COMMIT.json there"
    )
    parser.add_argument("--room-only", action="store_true", help="a first look: only the tests of the room")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a mutation first")
    parser.add_argument(
        "--record", action="store_true", help="write benchmarks/records/mutants[-aimed][-seedN]-DATE.json"
    )
    options = parser.parse_args()
    # A shell starts what runs in the background with interrupts ignored, and tests of interrupts would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kind = "mutants-aimed" if options.aimed else "mutants"
    options.state = options.state or Path(tempfile.gettempdir(), f"{kind}-{options.seed}.jsonl")
    options.reached = options.reached or Path(tempfile.gettempdir(), f"reached-{commit()[:12]}.json")
    places = mutations(options.rooms, options.aimed)
    drawn = random.Random(options.seed).sample(places, min(options.count, len(places)))
    result = summary(judge(drawn, options), options)
    print(json.dumps(result, indent=1))
    if options.record:
        seed = f"-seed{options.seed}" if options.seed else ""
        path = ROOT / "benchmarks" / "records" / f"{kind}{seed}-{result['date']}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {path}")


if __name__ == "__main__":
    main()
