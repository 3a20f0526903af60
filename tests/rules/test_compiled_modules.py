"""What an installation compiles is there: pyproject.toml names modules, and C types lie beside them."""

import ast
import importlib
import shutil
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
HOOK = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]


def test_each_module_that_is_compiled_is_there():
    modules = HOOK["custom"]["modules"]
    assert len(modules) == len(set(modules)) > 5
    assert [path for path in modules if not (ROOT / path).is_file()] == []


def test_types_lie_beside_modules_that_are_compiled():
    types = [path.relative_to(ROOT).with_suffix(".py").as_posix() for path in (ROOT / "dbrdist").rglob("*.pxd")]
    assert set(types) <= set(HOOK["custom"]["modules"])


def test_each_module_in_cython_is_compiled():
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "dbrdist").rglob("*.pyx")}
    assert found == {path for path in HOOK["custom"]["modules"] if not path.endswith(".py")} != set()


def choices_between_tuples(source):
    """Lines with a choice between tuples of different lengths, which Cython refuses as C types that differ."""
    choices = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.IfExp)]
    return [
        choice.lineno
        for choice in choices
        if isinstance(choice.body, ast.Tuple)
        and isinstance(choice.orelse, ast.Tuple)
        and 0 < len(choice.body.elts) != len(choice.orelse.elts) > 0
        and all(isinstance(v, ast.Constant) for v in (*choice.body.elts, *choice.orelse.elts))
    ]


def test_choices_between_tuples_are_found():
    assert choices_between_tuples("a = 1\nb = (0, 2) if a else (0,)\nc = (1,) if a else ()") == [2]


@pytest.mark.slow
def test_no_compiled_module_chooses_between_tuples_of_different_lengths():
    found = {
        path: choices_between_tuples((ROOT / path).read_text())
        for path in HOOK["custom"]["modules"]
        if path.endswith(".py")
    }
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.fixture
def hook(monkeypatch):
    interface = SimpleNamespace(BuildHookInterface=object)  # hatchling's, which pip alone installs
    monkeypatch.setitem(sys.modules, "hatchling.builders.hooks.plugin.interface", interface)
    monkeypatch.delitem(sys.modules, "hatch_build", raising=False)
    found = importlib.import_module("hatch_build")
    monkeypatch.delitem(sys.modules, "hatch_build")
    return found


def test_long_modules_without_c_types_are_compiled_in_less_time(tmp_path, hook):
    short, long = tmp_path / "short.py", tmp_path / "long.py"
    short.write_text("\n" * (hook.LONG_LINES - 1))
    long.write_text("\n" * hook.LONG_LINES)
    assert (hook.flags(short), hook.flags(long)) == (hook.FLAGS, hook.LONG_FLAGS)
    long.with_suffix(".pxd").touch()
    assert hook.flags(long) == hook.FLAGS
    assert hook.flags(tmp_path / "vector_loops.pyx") == hook.LOOP_FLAGS
    assert hook.flags(tmp_path / "small_loops.pyx") == hook.SMALL_LOOP_FLAGS
    for flags in (hook.LOOP_FLAGS, hook.SMALL_LOOP_FLAGS):
        assert "-ffp-contract=off" in flags and not [f for f in flags if "fast" in f]


# Ends as Clang does where there is a flag that it does not know, and writes down how it was called.
COMPILER = """#!/bin/sh
echo "$@" >> {log}
case " $* " in *" {refused} "*) exit 1;; esac
exec cc "$@"
"""


@pytest.mark.programs
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.filterwarnings("ignore")  # of setuptools, where others have imported distutils before
@pytest.mark.parametrize("refused", ["-ftree-sra", "-fno-thread-jumps", "-nothing"])
def test_a_compiler_that_refuses_flags_of_gcc_compiles_without_them(tmp_path, monkeypatch, hook, refused):
    pytest.importorskip("setuptools")
    monkeypatch.setitem(sys.modules, "Cython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "Cython.Build", SimpleNamespace(cythonize=lambda found, **options: found))
    source, compiler, log = tmp_path / "long.c", tmp_path / "compiler", tmp_path / "log"
    source.write_text("int number;\n" + "\n" * hook.LONG_LINES)
    compiler.write_text(COMPILER.format(log=log, refused=refused))
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    (made,) = hook.compiled(str(tmp_path), ["long.c"], tmp_path / "made").values()
    assert made.startswith("long.")
    (line,) = [line for line in log.read_text().splitlines() if "-c long.c" in line]
    expected = [flag for flag in hook.LONG_FLAGS if refused == "-nothing" or flag in ("-Og", "-g0", "-w")]
    assert line.split()[-len(expected) :] == expected
