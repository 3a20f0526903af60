"""A first look at many mutations: each one is made in a fork of a process that has collected all tests. Not part of CI.

    python tests/rules/forked_mutants.py --rooms core functions --count 500 --seed 3 --state look.jsonl
    python tests/rules/forked_mutants.py --files dbrdist/core/model/flat.py --count 0   # all of a file

`mutants.py`, which begins with this, judges a mutation by every test there is and takes a minute; this one puts the
changed code into the functions that live in a fork and runs the tests that call them, the shortest first, for some
seconds. A test that notices one must pass in a fork without it. What nothing notices is printed: a candidate, which
tests of programs, of several ranks, or on the stand-in for CuPy may still notice. What is computed at import, class
bodies above all, is left to `mutants.py`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from _pytest.warnings import catch_warnings_for_item

sys.path.insert(0, str(Path(__file__).parent))

import mutants
from reached import tests_of

GRACE_SECONDS = 30.0  # a test that runs for so long hangs
PATIENCE = 4  # times the seconds of computing that a fork may take


# ---- to put a mutation into living functions ------------------------------------------------------------------------


class CannotBeForkedError(Exception):
    """The mutation concerns what is computed once, when a module is imported."""


def codes(code: types.CodeType) -> list[types.CodeType]:
    """What is defined directly within."""
    return [c for c in code.co_consts if isinstance(c, types.CodeType)]


def changed(old: types.CodeType, new: types.CodeType) -> list[tuple[types.CodeType, types.CodeType]]:
    """Functions that differ, outer ones first, with what becomes of them; not their like that moved by some lines."""
    inner_old, inner_new = codes(old), codes(new)
    if len(inner_old) != len(inner_new):
        return [(old, new)]
    pairs = [pair for both in zip(inner_old, inner_new, strict=True) for pair in changed(*both)]
    own = old.co_code != new.co_code or old.co_names != new.co_names or plain(old) != plain(new)
    return [(old, new), *pairs] if pairs or own else []


def plain(code: types.CodeType) -> list[str]:
    """Constants with their types: 1, 1.0 and True are equal."""
    return [repr(c) for c in code.co_consts if not isinstance(c, types.CodeType)]


class Patch:
    """Changes the functions of one process for good."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.functions: dict[tuple[str, str, int], list[Any]] = {}
        gc.unfreeze()  # what pytest or a test's module froze is not listed
        for found in gc.get_objects():
            if isinstance(found, types.FunctionType) and found.__code__.co_filename.startswith(str(root)):
                code = found.__code__
                key = (code.co_filename, code.co_qualname, code.co_firstlineno)
                self.functions.setdefault(key, []).append(found)

    def apply(self, mutation: mutants.Mutation) -> None:
        path = self.root / mutation.file
        source = path.read_bytes()
        mutated = source[: mutation.start] + mutation.new.encode() + source[mutation.end :]
        if self._default(mutation, source, mutated) or self._global(mutation, source, mutated):
            return
        old, new = (compile(s, str(path), "exec", dont_inherit=True) for s in (source, mutated))
        pairs = changed(old, new)[1:]  # without the module itself
        pairs = [(o, n) for o, n in pairs if not is_class_body(o)]
        if not pairs or old.co_code != new.co_code or plain(old) != plain(new):
            raise CannotBeForkedError
        done = 0
        for before, after in pairs:
            for function in self.functions.get((str(path), before.co_qualname, before.co_firstlineno), []):
                if function.__code__.co_freevars != after.co_freevars:
                    raise CannotBeForkedError
                function.__code__ = after
                done += 1
        if not done:
            raise CannotBeForkedError

    def _default(self, mutation: mutants.Mutation, source: bytes, mutated: bytes) -> bool:
        """Defaults of parameters."""
        for before, after in zip(definitions(source), definitions(mutated), strict=False):
            values = [*before.args.defaults, *(d for d in before.args.kw_defaults if d)]
            if any(v.lineno <= mutation.line <= (v.end_lineno or 0) for v in values) and (
                ast.unparse(before.args) != ast.unparse(after.args)
            ):
                key = (str(self.root / mutation.file), mutants_line(before))
                found = [
                    f for k, fs in self.functions.items() if (k[0], k[2]) == key and k[1].endswith(before.name)
                    for f in fs
                ]  # fmt: skip
                if not found:
                    raise CannotBeForkedError
                for function in found:
                    names = function.__globals__
                    function.__defaults__ = tuple(evaluate(d, names) for d in after.args.defaults) or None
                    given = zip(after.args.kwonlyargs, after.args.kw_defaults, strict=True)
                    function.__kwdefaults__ = {a.arg: evaluate(d, names) for a, d in given if d is not None} or None
                return True
        return False

    def _global(self, mutation: mutants.Mutation, source: bytes, mutated: bytes) -> bool:
        """A constant of the module, wherever it was imported to."""
        tree, other = ast.parse(source), ast.parse(mutated)
        for before, after in zip(tree.body, other.body, strict=False):
            if (
                isinstance(before, ast.Assign)
                and isinstance(after, ast.Assign)
                and before.lineno <= mutation.line <= (before.end_lineno or 0)
                and isinstance(before.targets[0], ast.Name)
            ):
                name = before.targets[0].id
                module = next(m for m in list(sys.modules.values()) if file_of(m) == str(self.root / mutation.file))
                value, was = evaluate(after.value, vars(module)), vars(module)[name]
                if not isinstance(value, (bool, int, float, str, tuple, frozenset, type(None))):
                    raise CannotBeForkedError
                for one in list(sys.modules.values()):
                    if getattr(one, "__dict__", {}).get(name) is was:
                        setattr(one, name, value)
                return True
        return False


def file_of(module: Any) -> str | None:
    return getattr(module, "__file__", None)


def is_default(source: bytes, line: int) -> bool:
    """Whether the default of a parameter stands there: tests that do not call the function read its signature."""
    defaults = [d for f in definitions(source) for d in (*f.args.defaults, *f.args.kw_defaults) if d]
    return any(d.lineno <= line <= (d.end_lineno or 0) for d in defaults)


def definitions(source: bytes) -> list[Any]:
    return [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]


def mutants_line(function: ast.FunctionDef) -> int:
    return min([function.lineno, *(d.lineno for d in function.decorator_list)])


def evaluate(node: ast.expr, names: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(node), "<default>", "eval"), names)


def is_class_body(code: types.CodeType) -> bool:
    return "__module__" in code.co_names and "__qualname__" in code.co_names and code.co_argcount == 0


# ---- the loop -------------------------------------------------------------------------------------------------------


def in_turns(names: list[str], seconds: dict[str, float]) -> list[str]:
    """Tests in an order that gives each file as much time as any other: those of one file notice much the same."""
    spent: dict[str, float] = {}
    ends = {}
    for name in names:
        file = name.partition("::")[0]
        ends[name] = spent[file] = spent.get(file, 0.0) + seconds[name]
    return sorted(names, key=ends.__getitem__)


class Look:
    """A fork at work."""

    def __init__(self, mutation: Any, names: list[str], reader: int, pid: int) -> None:
        self.mutation, self.names, self.reader, self.pid = mutation, names, reader, pid
        self.began = time.monotonic()

    def is_late(self, seconds: float) -> bool:
        return time.monotonic() - self.began > PATIENCE * seconds + GRACE_SECONDS

    def end(self) -> str:
        """What it said, waited for no longer than a test may take; then it and all that it started is gone."""
        ready, _, _ = select.select([self.reader], [], [], 0 if self.is_late(0) else GRACE_SECONDS)
        said = os.read(self.reader, 4000).decode() if ready else ""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.reader)
        return said or "killed: hangs"


class Loop:
    """A plugin for pytest that judges mutations instead of running the tests."""

    def __init__(self, drawn: list[mutants.Mutation], known: dict[str, Any], options: argparse.Namespace) -> None:
        self.drawn, self.known, self.options = drawn, known, options
        self.patch: Any = None
        self.items: dict[str, Any] = {}
        self.counts: dict[str, int] = {}
        self.sound: set[str] = set()  # tests that killed a mutation, and pass without it
        self.unsound: set[str] = set()  # those that fail in a fork without any

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.patch = Patch(mutants.ROOT)
        gc.freeze()
        waiting, running = list(reversed(self.drawn)), {}
        while waiting or running:
            while waiting and len(running) < self.options.workers:
                mutation = waiting.pop()
                look = self._fork(mutation, self._near(mutation))
                running[look.reader] = look
            ready, _, _ = select.select(list(running), [], [], 0.5)
            for reader, look in list(running.items()):
                if reader in ready or look.is_late(self.options.seconds):
                    del running[reader]
                    self._settle(look, look.end(), waiting)
        print(f"\n{self.counts}", file=sys.__stderr__, flush=True)
        for name in sorted(self.unsound):
            print(f"fails in a fork without a mutation: {name}", file=sys.__stderr__, flush=True)
        return True

    def _near(self, mutation: mutants.Mutation) -> list[str]:
        """Names of the tests to run, in order."""
        source = (mutants.ROOT / mutation.file).read_bytes()
        near = tests_of(self.known, mutation.file, source, mutation.line) or []
        wanted = [*(self.options.also or []), *(mutants.SIGNATURES if is_default(source, mutation.line) else ())]
        also = [name for name in self.items if name.startswith(tuple(wanted))]
        names = dict.fromkeys([*also, *in_turns(near, self.known["tests"])])
        return [name for name in names if name in self.items and name not in self.unsound]

    def _settle(self, look: Look, said: str, waiting: list[mutants.Mutation]) -> None:
        """Note the verdict; what killed a mutation must pass without it, in a fork after the same tests."""
        outcome, _, by = said.partition(": ")
        if by in self.items and by not in self.sound:
            again = self._fork(None, look.names[: look.names.index(by) + 1])
            failed, _, first = again.end().partition(": ")
            if failed == "killed":  # by that test or by one before it, which only the mutation lets pass
                self.unsound.add(first if first in look.names else by)
                waiting.append(look.mutation)
                return
            self.sound.add(by)
        self.counts[outcome] = self.counts.get(outcome, 0) + 1
        row = {**vars(look.mutation), "text": text_of(look.mutation), "outcome": outcome, "by": by}
        with open(self.options.state, "a") as file:
            file.write(json.dumps(row) + "\n")
        if outcome != "killed":
            print(mutants.describe(row), f"[{by}]", file=sys.__stderr__, flush=True)

    def _fork(self, mutation: mutants.Mutation | None, names: list[str]) -> Look:
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reader)
            self._child(mutation, [self.items[name] for name in names], writer)
        os.close(writer)
        return Look(mutation, names, reader, pid)

    def _child(self, mutation: mutants.Mutation | None, items: list[Any], writer: int) -> None:
        os.setsid()
        quiet = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(quiet, number)
        outcome = "killed: the process ended"
        take_onednn_back()
        try:
            outcome = self._judge(mutation, items)
        except BaseException as error:
            outcome = f"killed: {type(error).__name__} {error}"[:300]
        finally:
            with contextlib.suppress(OSError):  # nobody waits any more
                os.write(writer, outcome.encode())
            os._exit(0)

    def _judge(self, mutation: mutants.Mutation | None, items: list[Any]) -> str:
        try:
            if mutation:
                self.patch.apply(mutation)
        except CannotBeForkedError:
            return "elsewhere: computed at import"
        except SyntaxError:
            return "killed: no Python"
        if not items:
            return "survived: no test calls it"
        until = time.process_time() + self.options.seconds
        for count, item in enumerate(items):
            following = items[count + 1] if count + 1 < len(items) else None
            with catch_warnings_for_item(item.config, item.ihook, "runtest", item):  # they are errors, as elsewhere
                reports = runtestprotocol(item, log=False, nextitem=following)
            if any(report.failed for report in reports):
                return f"killed: {item.nodeid}"
            if time.process_time() > until:
                return f"survived: {count + 1} of {len(items)} tests in time"
        return f"survived: all {len(items)} tests"


def take_onednn_back() -> None:
    """A fork leaves oneDNN to its parent, which here has loaded it and done nothing with it."""
    onednn: Any = sys.modules.get("dbrdist.kernels.cpu.onednn")
    if onednn is not None:
        onednn._reason = None


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="how many mutations to draw; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15.0, help="of computing for the tests of one mutation")
    parser.add_argument("--aimed", action="store_true", help=f"draw from {mutants.AIMED}")
    parser.add_argument("--rooms", nargs="+", choices=sorted(mutants.FIRST))
    parser.add_argument("--files", nargs="+", help="only these")
    parser.add_argument("--drawn", type=Path, help="a file with the mutations to judge, as `mutants.py` writes it")
    parser.add_argument("--also", nargs="+", help="tests newer than the list of what calls what: these run first")
    parser.add_argument("--state", type=Path, help="results so far, which are not judged again")
    parser.add_argument("--on", choices=["stand-in", "host-cuda"], help="only tests/gpu, on what takes CuPy's place")
    parser.add_argument("--again", action="store_true", help="judge again what survived in the state file")
    parser.add_argument("--reached", type=Path, required=True, help="what `reached.py` wrote; made where it is missing")
    options = parser.parse_args()
    options.state = options.state or Path(tempfile.gettempdir(), f"forked-{options.seed}.jsonl")
    if not options.reached.exists() and not options.on:
        mutants.note_reached(mutants.ROOT, options.reached, 3600.0)
    known = json.loads(options.reached.read_text())
    places = mutants.mutations(options.rooms, options.aimed)
    places = [m for m in places if not options.files or m.file in options.files]
    rows = [json.loads(line) for line in options.state.read_text().splitlines()] if options.state.exists() else []
    keys = {mutants.key_of(row): row["outcome"] for row in rows}
    if options.drawn:
        drawn = [mutants.Mutation(**fields) for fields in json.loads(options.drawn.read_text())]
    elif options.count:
        drawn = random.Random(options.seed).sample(places, min(options.count, len(places)))
    else:
        drawn = places
    marked = {(c[0], c[1], c[2], c[3]) for c in mutants.equivalents()}
    drawn = [m for m in drawn if (keys.get(m.key) == "survived" if options.again else m.key not in keys)]
    drawn = [m for m in drawn if change_of(m) not in marked]
    print(f"{len(drawn)} of {len(places)} mutations; {options.state}", file=sys.stderr)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.chdir(mutants.ROOT)
    suite = {"stand-in": mutants.GPU, "host-cuda": mutants.HOST_CUDA}.get(options.on, ["tests", "-m", "not programs"])
    sys.path.insert(0, str(mutants.ROOT))
    importlib.import_module("dbrdist")  # by its plain path, before tests/gpu leads to it over ".."
    pytest.main(
        [*suite, "-q", "-p", "no:cacheprovider", "-p", "no:faulthandler"], plugins=[Loop(drawn, known, options)]
    )


def change_of(mutation: mutants.Mutation) -> tuple[str, ...]:
    return tuple(" ".join(s.split()) for s in (mutation.file, text_of(mutation), mutation.old, mutation.new))


def text_of(mutation: mutants.Mutation) -> str:
    """The line as it stands."""
    return (mutants.ROOT / mutation.file).read_text().splitlines()[mutation.line - 1].strip()


if __name__ == "__main__":
    main()
