"""The runner of the suites: what fails once is repeated and counted, what fails twice fails, and nothing is hidden."""

import os
import subprocess
import sys

import pytest

from tests import suites
from tests.suites import Step, Work

CASES = """
import pathlib, pytest
TRIED = pathlib.Path(__file__).with_name("tried")

def test_good(): pass

def test_once():
    first = not TRIED.exists()
    TRIED.touch()
    assert not first

@pytest.mark.parametrize("what", ["a - b", "c::d", "e f"])
def test_odd(what):
    assert what != BAD
"""
CRASH = "import os\ndef test_crash(): os._exit(3)\n"
MANY = "import pytest\n@pytest.mark.parametrize('n', range(30))\ndef test_bad(n): assert False\n"
BROKEN = "import nowhere_to_be_found\n"
RANKS = """
import os, pathlib, sys
import pytest
TRIED = pathlib.Path(__file__).with_name("tried")

def end(name):
    os.write(1, f"FAILED {name} (call)\\n".encode())
    os._exit(1)

def test_one():
    if not TRIED.exists():
        TRIED.touch()
        end("tests/mpi/test_b.py::test_one")

def test_two():
    if BAD:
        end("tests/mpi/test_b.py::test_two")
"""


@pytest.fixture
def step(tmp_path):
    """A step whose suites are in a folder of their own."""
    made = Step("mine", 1, lambda step: None, Work(tmp_path / "work", {}))
    made.work.folder.mkdir()
    made.work.console.begin(made)
    return made


def suite(step, tmp_path, text, *arguments):
    (tmp_path / "test_cases.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    step.suite(sys.executable, "test_cases.py", "-p", "no:xdist", *arguments, cwd=tmp_path)


@pytest.mark.programs
def test_a_test_that_passes_the_second_time_is_counted(step, tmp_path):
    suite(step, tmp_path, "BAD = None\n" + CASES)
    assert (step.failed, step.repeated) == ([], ["test_cases.py::test_once"])
    assert [line.rpartition(" in ")[0] for line in step.closing] == ["1 failed, 4 passed", "1 passed, 4 deselected"]


@pytest.mark.programs
@pytest.mark.parametrize("bad", ["a - b", "c::d", "e f"])
def test_a_test_that_fails_twice_fails(step, tmp_path, bad):
    suite(step, tmp_path, f"BAD = {bad!r}\n" + CASES)
    assert (step.failed, step.repeated) == ([f"test_cases.py::test_odd[{bad}]"], ["test_cases.py::test_once"])


@pytest.mark.programs
@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (CRASH, (), "ended with exit code 3"), (BROKEN, (), "ended with exit code 2"),
        (CASES, ("-k", "nothing"), "ended with exit code 5"), (CASES, ("--no-such",), "ended with exit code 4"),
    ],
    ids=["crash", "import", "nothing collected", "usage"],
)  # fmt: skip
def test_a_pytest_that_does_not_come_to_its_end_fails(step, tmp_path, text, arguments, said):
    suite(step, tmp_path, text, *arguments)
    assert len(step.failed) == 1 and said in step.failed[0] and not step.repeated


@pytest.mark.programs
def test_many_failures_are_no_accident(step, tmp_path):
    suite(step, tmp_path, MANY)
    assert len(step.failed) == suites.MOST_REPEATED + 1 and step.failed[-1] == "... and 10 more"
    assert len(step.closing) == 1


@pytest.mark.programs
@pytest.mark.parametrize("bad", [False, True])
def test_a_rank_that_fails_is_repeated_alone_and_the_rest_follows(step, tmp_path, bad):
    folder = tmp_path / "tests" / "mpi"
    folder.mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -s\n")
    (folder / "test_a.py").write_text("def test_a(): pass\n")
    (folder / "test_b.py").write_text(f"BAD = {bad}\n" + RANKS)
    (folder / "test_c.py").write_text("def test_c(): pass\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "bin" / "mpiexec").write_text('#!/bin/sh\nshift 2; shift; exec "$REAL" "$@"\n')
    (tmp_path / "bin" / "mpiexec").chmod(0o755)
    step.ranks(str(tmp_path / "bin" / "python"), "3", cwd=tmp_path, REAL=sys.executable)
    assert step.repeated == ["tests/mpi/test_b.py::test_one (3 ranks)"]
    assert step.failed == (["tests/mpi/test_b.py::test_two (3 ranks)"] if bad else [])
    assert step.closing[-1].startswith("1 passed" if bad else "2 passed")  # to the end


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("[1 vm] FAILED tests/mpi/test_x.py::test_y[a b] (call)", "tests/mpi/test_x.py::test_y[a b]"),
        ("FAILED to collect tests/mpi/test_x.py", "tests/mpi/test_x.py"),
        ('  File "/a/tests/mpi/test_x.py", line 3 in test_y', "tests/mpi/test_x.py::test_y"),
        ("FAILED to do something", None),
    ],
)
def test_which_rank_failed(line, name):
    assert suites._failing_rank(["before", line, "after"]) == name


@pytest.mark.slow
def test_a_command_that_hangs_is_stopped(step):
    code = step.call(sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(600)", seconds=1.0)
    assert code != 0 and step.lines == ["begun"]


@pytest.mark.programs
def test_a_daemon_that_keeps_the_output_open_holds_nothing_up(step, monkeypatch):
    monkeypatch.setattr(suites, "READ_SECONDS", 0.1)
    read, write = os.pipe()
    program = f"import os\nif os.fork() == 0:\n os.setsid()\n os.read({read}, 1)\nelse:\n print('done')"
    os.set_inheritable(read, True)
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **options: real(*words, **options, pass_fds=(read,)))
    assert step.call(sys.executable, "-c", program) == 0 and "done" in step.lines
    os.close(read)
    os.close(write)


def test_a_step_that_raises_fails_and_the_others_go_on(tmp_path, capfd):
    work = Work(tmp_path, {})

    def bad(step):
        raise ValueError("odd")

    steps = [Step("one", 1, bad, work), Step("two", 2, lambda step: step.say("two's words"), work)]
    suites.perform(steps, 2)
    assert suites.report(steps, 1.0) == 1
    out = capfd.readouterr().out
    assert "FAILED one" in out and "passed two" in out and "two's words" in out
    assert out.rstrip().endswith("1 failures\n  one: one: ValueError('odd')")


def test_output_of_steps_that_run_together_is_not_mixed(tmp_path, capfd):
    import threading

    work, turn = Work(tmp_path, {}), [threading.Event(), threading.Event()]

    def first(step):
        step.say("first 1")
        turn[0].set()
        assert turn[1].wait(20)
        step.say("first 2")

    def second(step):
        assert turn[0].wait(20)
        step.say("second")
        turn[1].set()

    suites.perform([Step("first", 1, first, work), Step("second", 1, second, work)], 2)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith(("first", "second"))]
    assert lines == ["first 1", "first 2", "second"]


def test_steps_have_names():
    assert [name for name, _, _ in suites.chosen(["mpi", "style"])] == ["style", "mpi-1", "mpi-2", "mpi-3", "mpi-4"]
    assert suites.chosen([]) == list(suites.STEPS)
    with pytest.raises(SystemExit, match="there is no step nonsense"):
        suites.chosen(["nonsense"])
