"""Options by file, binding, stacks without hooks, and what hooks tell of exceptions."""

import ast
import json
import os
import stat
import subprocess
import sys

import pytest
from inject import INJECT
from support import ROOT, assert_nothing_left, launch, popen, run_subcommand


def printed(tmp_path, text, *arguments, env=None):
    """What --print makes of a file of options."""
    path = tmp_path / "options.toml"
    path.write_text(text)
    return run_subcommand("--config", str(path), "--print", "--bare", *arguments, "true", env=env)


@pytest.mark.mpiexec
def test_options_come_from_a_file_after_the_environment_and_the_command_line(tmp_path):
    text = 'ranks = 3\nmpi_option = ["-l"]\nbind = "none"\nheartbeat-timeout = 2.5\nrequeue = false\n'
    assert "mpiexec -n 3 -l " in printed(tmp_path, text).stdout
    assert "-n 4 -l " in printed(tmp_path, text, env={"DBRDIST_LAUNCH_RANKS": "4"}).stdout
    assert "-n 5 -l " in printed(tmp_path, text, "-n", "5", env={"DBRDIST_LAUNCH_RANKS": "4"}).stdout
    by_variable = {"DBRDIST_LAUNCH_CONFIG": str(tmp_path / "options.toml")}
    assert "-n 3 -l " in run_subcommand("--print", "--bare", "true", env=by_variable).stdout


@pytest.mark.programs
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-restart = 2", "unknown option 'max-restart'; did you mean 'max-restarts'?"),
        ("zzz = 2", "unknown option 'zzz'; `dbrdist-launch --help` lists the options"),
        ("n = true", "n = True: expected a string or a number"),
        ("quiet = 1", "quiet = 1: expected true or false"),
        ("env = 3", "env = 3: expected a list of strings"),
        ("log_dir = [1]", "log_dir = [1]: expected a string or a number"),
        ("n = 2.5", "'2.5' is not a valid number of ranks, or auto"),
        ("n = 0", "'0'"),
        ("config = 'a'", "unknown option 'config'"),
        ("command = 'a'", "unknown option 'command'"),
        ("x = [", "cannot be read"),
        ("\xff", "cannot be read"),
        ("[table]\nn = 2", "unknown option 'table'"),
    ],
)
def test_odd_files_of_options_are_refused_in_words(tmp_path, text, said):
    path = tmp_path / "options.toml"
    path.write_bytes(text.encode("latin-1"))
    result = run_subcommand("--config", str(path), "-n", "1", "true") if "n =" not in text else printed(tmp_path, text)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert said in result.stderr or (text == "n = 0" and "0 is not in the range" in result.stderr)


@pytest.mark.slow
def test_a_missing_file_of_options_is_refused(tmp_path):
    result = run_subcommand("--config", str(tmp_path / "none"), "-n", "1", "true")
    assert (result.returncode, "cannot be read" in result.stderr) == (2, True)


@pytest.mark.mpiexec
def test_ranks_are_bound_as_print_says():
    words = ["-n", 2, "--bind", "core"]
    said = run_subcommand(*map(str, words), "--print", "true").stderr.splitlines()
    result = launch(*words, "python", "-c", "import os; print('has', *sorted(os.sched_getaffinity(0)))")
    expected = {line.split(": core ")[1].split(" ")[0].replace(",", " ") for line in said if ": core " in line}
    if expected:  # no binding where there are fewer cores than ranks
        assert {line.split("has ")[1] for line in result.stdout.splitlines()} == expected
    assert "# not bound: " in run_subcommand("-n", "9999", "--bind", "core", "--print", "true").stderr


@pytest.mark.mpiexec
@pytest.mark.slow
def test_py_spy_shows_stacks_where_there_are_no_hooks_and_a_shell_hides_none(tmp_path):
    spy = tmp_path / "py-spy"
    spy.write_text('#!/bin/sh\necho "$@ of $(readlink /proc/$3/exe)"\n')
    spy.chmod(spy.stat().st_mode | stat.S_IXUSR)
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "XDG_RUNTIME_DIR": str(tmp_path)}
    (tmp_path / "wait.py").write_text("import time\nprint('there', flush=True)\ntime.sleep(60)\n")
    script = f"if [ $RANK = 0 ]; then {sys.executable} -I wait.py; else {sys.executable} wait.py; fi; true"
    process = popen("-n", 2, "--name", "spied", "sh", "-c", script, mark="spied", env=env, cwd=tmp_path)
    assert all("there" in process.stdout.readline() for _ in range(2))
    found = run_subcommand("stacks", "spied", env=env).stdout
    assert "dump --pid" in found and os.path.basename(os.path.realpath(sys.executable)) in found  # rank 0
    assert 'wait.py", line 3' in found  # rank 1, by its hooks
    process.terminate()
    process.communicate(timeout=40)
    assert_nothing_left("spied")


@pytest.mark.mpiexec
@pytest.mark.parametrize("shown", [True, False])
def test_the_whole_traceback_is_said_once(tmp_path, shown):
    arguments = ["--log-dir", tmp_path] if shown else ["--log-dir", tmp_path, "--show-ranks", "none"]
    result = launch("-n", 1, *arguments, "python", "-c", "raise ValueError('bad sample')")
    assert (result.returncode, result.stderr.count("Traceback (most recent")) == (1, 1), result.stderr
    status = json.loads((tmp_path / "latest" / "status.json").read_text())
    assert status["failure"]["traceback"].startswith("Traceback")


def test_old_pythons_can_read_the_hooks():
    """A rank may run any Python; one that cannot read them would print "Error in sitecustomize"."""
    path = ROOT / "launch" / "dbrdist_launch" / "rank" / "inject" / "sitecustomize.py"
    tree = ast.parse(path.read_text(), feature_version=(3, 4))
    assert not any(isinstance(node, ast.JoinedStr) for node in ast.walk(tree))  # not in 3.5, nor in Python 2


def told_by(program):
    """What the hooks tell the supervisor of a Python program, as JSON."""
    read, write = os.pipe()
    env = {"PYTHONPATH": INJECT, "DBRDIST_LAUNCH_EVENTS": f"{write},0"}
    subprocess.run([sys.executable, "-S", "-c", f"import sitecustomize\n{program}"], env=env, pass_fds=(write,),
                   stderr=subprocess.DEVNULL, timeout=60)  # fmt: skip
    os.close(write)
    with open(read, "rb") as pipe:
        return [json.loads(line.removeprefix(b"\x1e")) for line in pipe.read().splitlines()]


@pytest.mark.programs
def test_events_are_json_whatever_the_exception_says():
    """The hooks write it by hand: what `json` imports would cost each rank's start 7 ms."""
    for text in ("plain", 'quotes " and \\ and \n\t\x00\x7f', "é ß 中 🎉", "\ud800 alone", "x" * 3000):
        kinds = {event["event"]: event for event in told_by(f"raise ValueError({text!r})")}
        assert kinds["exception"]["message"] == f"ValueError: {text}".strip()[:2000]
        assert kinds["leaving"]["code"] == 1 and kinds["leaving"]["finalizes"] is False
    kinds = {event["event"]: event for event in told_by("import sys; sys.exit(True)")}
    assert kinds["leaving"]["code"] == 1
    named = "import threading; t = threading.Thread(target=lambda: 1 / 0, name='\"q\"'); t.start(); t.join()"
    kinds = {event["event"]: event for event in told_by(named)}
    assert (kinds["thread"]["name"], kinds["thread"]["message"]) == ('"q"', "ZeroDivisionError: division by zero")


@pytest.mark.programs
def test_an_exception_is_told_also_where_traceback_cannot_be_imported():
    """No descriptor is left, or a module of the user has its name."""
    for setup in ("sys.modules['traceback'] = None", "sys.modules['traceback'] = sys", "sys.path[:] = []"):
        events = told_by(f"import sys; {setup}; raise KeyError('x')")
        assert "KeyError: 'x'" in [event["message"] for event in events if event["event"] == "exception"]


@pytest.mark.mpiexec
def test_each_print_is_one_write(tmp_path):
    """Unbuffered, Python writes each word of a print by itself, and the lines of a rank's workers tear each other."""
    program = """
import os, sys
print("one", 2, "three")
sys.stdout.write("begun")
print(os.environ.get("PYTHONUNBUFFERED"), sys.stdout.line_buffering, sys.stdout.write_through)
os.write(1, b"raw")
os._exit(0)
"""
    env = {"PYTHONUNBUFFERED": ""}
    result = launch("-n", 1, "python", "-c", program, env=env)
    lines = [line.split("] ")[1] for line in result.stdout.splitlines()]
    assert lines == ["one 2 three", "begun True False", "raw"], result.stderr
    result = launch(
        "-n", 1, "python", "-c", "import sys; print(sys.stdout.write_through)", env={"PYTHONUNBUFFERED": "1"}
    )
    assert "True" in result.stdout  # by the user's wish
