"""Options by file, -n auto and -m, what --print says of binding, stacks without hooks, reports without repeats."""

import ast
import json
import os
import stat
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from dbrdist_launch import cores
from dbrdist_launch.backends import hosts
from dbrdist_launch.backends.hydra import Hydra
from dbrdist_launch.backends.job import Host, Job
from dbrdist_launch.backends.slurm import Srun
from dbrdist_launch.errors import LaunchError
from dbrdist_launch.inherited import Inherited
from dbrdist_launch.launcher.judgement import report
from dbrdist_launch.launcher.judgement.judge import Judge
from dbrdist_launch.launcher.judgement.ranks import Rank
from dbrdist_launch.launcher.preparation import binding
from dbrdist_launch.launcher.records import jobs
from dbrdist_launch.launcher.records.jobs import JobFolder
from dbrdist_launch.launcher.session import Session
from dbrdist_launch.rank import supervisor
from support import ROOT, assert_nothing_left, launch, popen, run_subcommand

# --- a file of options


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


def test_a_missing_file_of_options_is_refused(tmp_path):
    result = run_subcommand("--config", str(tmp_path / "none"), "-n", "1", "true")
    assert (result.returncode, "cannot be read" in result.stderr) == (2, True)


# --- ranks and modules


@pytest.mark.mpiexec
def test_as_many_ranks_as_there_is_room_for_and_modules(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "tool.py").write_text("import sys; print('tool', *sys.argv[1:])")
    result = launch("-n", "auto", "-m", "package.tool", "a", "-b", cwd=tmp_path)
    assert result.stdout.count("tool a -b") == cores.available_cores(), result.stderr


# --- binding


def machine(tmp_path):
    """Two NUMA nodes of two cores of two processors each, as /sys shows them."""
    for node, numbers in (("0", "0-1,4-5"), ("1", "2-3,6-7")):
        (tmp_path / "node" / f"node{node}").mkdir(parents=True)
        (tmp_path / "node" / f"node{node}" / "cpulist").write_text(numbers + "\n")
    for number in range(8):
        folder = tmp_path / "cpu" / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    return str(tmp_path)


def test_cores_and_nodes_are_read_as_the_system_shows_them(tmp_path):
    root = machine(tmp_path)
    assert binding.nodes(root) == [("0", [0, 1, 4, 5]), ("1", [2, 3, 6, 7])]
    assert binding.cores(root) == [("0", [0, 4]), ("0", [1, 5]), ("1", [2, 6]), ("1", [3, 7])]
    assert binding.nodes(str(tmp_path / "none")) == binding.cores(str(tmp_path / "none")) == []


def test_print_says_where_each_rank_will_be(tmp_path, monkeypatch):
    root = machine(tmp_path)
    found = {name: getattr(binding, name)(root) for name in ("cores", "nodes")}
    for name in found:
        monkeypatch.setattr(binding, name, lambda name=name: found[name])
    monkeypatch.setattr(binding, "is_local", lambda name: name != "far")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    here, hydra = os.uname().nodename, Hydra(SimpleNamespace(label="mpich 5"))
    assert binding.lines(Job(("x",), 3, bind="core"), hydra, True) == [
        f"# rank 0 on {here}: core 0,4 (NUMA node 0), GPU 2",
        f"# rank 1 on {here}: core 1,5 (NUMA node 0), GPU 3",
        f"# rank 2 on {here}: core 2,6 (NUMA node 1), GPU 2",
    ]
    placed = (Host("near", 1), Host("far", 2))
    assert binding.lines(Job(("x",), 3, placed, bind="numa"), hydra, True) == [
        "# rank 0 on near: processors 0,1,4,5 (NUMA node 0), GPU 2",
        "# rank 1 on far: NUMA node 0 of far, modulo their number, GPU 0 of far, modulo their number",
        "# rank 2 on far: NUMA node 1 of far, modulo their number, GPU 1 of far, modulo their number",
    ]
    assert binding.lines(Job(("x",), 3), hydra, False) == []
    assert "places the ranks" in binding.lines(Job(("x",), 3, bind="core"), Srun("pmi2"), False)[0]
    assert (
        "a core that srun --mpi=pmi2 chooses" in binding.lines(Job(("x",), 3, placed, bind="core"), Srun("pmi2"), 0)[0]
    )
    assert binding.lines(Job(("x",), 99, bind="core"), hydra, False)[-1] == "# and 35 more"


@pytest.mark.mpiexec
def test_ranks_are_bound_as_print_says():
    words = ["-n", 2, "--bind", "core"]
    said = run_subcommand(*map(str, words), "--print", "true").stderr.splitlines()
    result = launch(*words, "python", "-c", "import os; print('has', *sorted(os.sched_getaffinity(0)))")
    expected = {line.split(": core ")[1].split(" ")[0].replace(",", " ") for line in said if ": core " in line}
    if expected:  # no binding where there are fewer cores than ranks
        assert {line.split("has ")[1] for line in result.stdout.splitlines()} == expected
    assert "# not bound: " in run_subcommand("-n", "9999", "--bind", "core", "--print", "true").stderr


# --- stacks without hooks


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


def test_the_innermost_frame_of_each_form_of_stacks():
    trace = '  File "a.py", line 1, in f\n    g()\n  File "b.py", line 2, in g\nKeyError'
    assert report.innermost("Traceback (most recent call last):\n" + trace) == ("b.py", "2", "g")
    stacks = 'Current thread 2:\n  File "c.py", line 3 in h\n  File "d.py", line 4 in i'
    assert report.innermost('Thread 1:\n  File "x.py", line 9 in x\n\n' + stacks) == ("c.py", "3", "h")
    spied = 'Process 1: python\n\nThread 7 (idle): "MainThread"\n    work (sl.py:3)\n    <module> (sl.py:4)\n'
    assert report.innermost(spied) == ("sl.py", "3", "work")
    assert report.innermost("no frames") is report.innermost("") is report.innermost(None) is None


# --- reports


def test_a_traceback_that_was_shown_is_not_repeated():
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nKeyError: 1'
    failure = report.Failure("exception", 1, "a", 1, "KeyError: 1", traceback=trace)
    assert "    in f at a.py:1; see the traceback above" in report.as_text(failure, seen=True).splitlines()
    assert "Traceback" not in report.as_text(failure, seen=True)
    assert trace.replace("\n", "\n    ") in report.as_text(failure)
    failure.traceback = 'Current thread 2:\n  File "c.py", line 3 in h'  # stacks, which nobody has seen
    assert 'File "c.py", line 3 in h' in report.as_text(failure, seen=True)


@pytest.mark.mpiexec
@pytest.mark.parametrize("shown", [True, False])
def test_the_whole_traceback_is_said_once(tmp_path, shown):
    arguments = ["--log-dir", tmp_path] if shown else ["--log-dir", tmp_path, "--show-ranks", "none"]
    result = launch("-n", 1, *arguments, "python", "-c", "raise ValueError('bad sample')")
    assert (result.returncode, result.stderr.count("Traceback (most recent")) == (1, 1), result.stderr
    status = json.loads((tmp_path / "latest" / "status.json").read_text())
    assert status["failure"]["traceback"].startswith("Traceback")


# --- faults of ours


def test_a_fault_in_a_supervisor_is_told_and_costs_nothing(monkeypatch):
    one, told = supervisor.Supervisor(0, "hydra", "-", Inherited()), []
    one.channel = SimpleNamespace(send=told.append)
    monkeypatch.setattr(one, "_seconds_to_wait", lambda: 1 // 0)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    one._turn()
    one.loop.close()
    (event,) = told
    assert event.event == "fault" and "ZeroDivisionError" in event.fields["message"]
    judge = Judge(1, 10.0, 60.0, 6.0)
    judge.take_event(Rank(0, "a", channel=None), {"event": "fault", **event.fields}, 0.0)
    assert judge.warnings[0].startswith("warning: rank 0 on a: internal error, the job continues: ZeroDivisionError")


def test_old_pythons_can_read_the_hooks():
    """A rank may run any Python; one that cannot read them would print "Error in sitecustomize"."""
    path = ROOT / "launch" / "dbrdist_launch" / "rank" / "inject" / "sitecustomize.py"
    tree = ast.parse(path.read_text(), feature_version=(3, 4))
    assert not any(isinstance(node, ast.JoinedStr) for node in ast.walk(tree))  # not in 3.5, nor in Python 2


INJECT = str(ROOT / "launch" / "dbrdist_launch" / "rank" / "inject")


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


def test_an_exception_is_told_also_where_traceback_cannot_be_imported():
    """No descriptor is left, or a module of the user has its name."""
    for setup in ("sys.modules['traceback'] = None", "sys.modules['traceback'] = sys", "sys.path[:] = []"):
        events = told_by(f"import sys; {setup}; raise KeyError('x')")
        assert "KeyError: 'x'" in [event["message"] for event in events if event["event"] == "exception"]


def test_ranks_start_without_what_takes_long_to_import():
    """Each is paid for by all ranks of a host at the same moment, before their first line."""
    heavy = {"json", "re", "enum", "signal", "traceback", "dataclasses", "typing", "socket", "subprocess", "shutil"}
    supervisor = "dbrdist_launch.rank.main, dbrdist_launch.rank.supervisor"
    started = {INJECT: "sitecustomize", str(ROOT / "launch"): supervisor}
    found = []
    for folder, modules in started.items():
        program = f"import sys; sys.path.insert(0, {folder!r}); import {modules}"
        program += f"; print(*sorted({heavy!r} & set(sys.modules)))"
        words = [sys.executable, "-I", "-S", "-c", program]
        found.append(subprocess.run(words, capture_output=True, text=True, timeout=60).stdout.split())
    assert found == [[], []]


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


@pytest.mark.parametrize("has_folder", [True, False])
@pytest.mark.parametrize("option", ["Port=22", "ProxyCommand=nc %h %p"])
def test_options_of_ssh_with_spaces_go_into_a_script(tmp_path, monkeypatch, option, has_folder):
    monkeypatch.setattr(jobs, "base", lambda: str(tmp_path / "jobs"))
    folder = JobFolder("a", ["b"], "c") if has_folder else None
    here = SimpleNamespace(settings=SimpleNamespace(ssh="/bin/echo", ssh_option=(option,)), folder=folder)
    here._has_spaces = lambda: Session._has_spaces(here)
    agent, options = Session._ssh(here)
    if has_folder and " " in option:
        assert options == ()
        said = subprocess.run([agent, "node1", "true"], capture_output=True, text=True, check=True).stdout
        assert said == f"-o {option} node1 true\n"
    else:
        assert (agent, options) == ("/bin/echo", ("-o", option))
    if has_folder:
        folder.close()


def test_own_addresses_are_those_of_all_interfaces_that_have_one_loopback_last(monkeypatch):
    known = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "ib0": "192.168.1.7"}

    def address_of_interface(name):
        if name not in known:
            raise LaunchError(f"{name} has no address")
        return known[name]

    monkeypatch.setattr(hosts, "address_of_interface", address_of_interface)
    monkeypatch.setattr(hosts.socket, "if_nameindex", lambda: list(enumerate(["lo", "eth0", "tun0", "ib0"])))
    assert hosts.own_addresses() == ("10.0.0.7", "192.168.1.7", "127.0.0.1")
