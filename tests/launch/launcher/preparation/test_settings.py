"""Options with their defaults and bounds, files of options, and what the command line makes of errors."""

import os
import re

import click
import pytest
from dbrdist_launch import codes, limits
from dbrdist_launch.backends import mpi
from dbrdist_launch.backends.job import Host
from dbrdist_launch.backends.mpi import Library, Starter
from dbrdist_launch.errors import LaunchError
from dbrdist_launch.launcher import cli
from dbrdist_launch.launcher.preparation.settings import GROUPS, LaunchSettings
from dbrdist_launch.launcher.restarting import pool
from dbrdist_launch.launcher.restarting.pool import HostPool
from support import ROOT

# name | place of its group | flags | default | text, a flag, a choice, or the least and the greatest number
TABLE = """
ranks             | 0 | -n -np --ranks       | None   | 1..
module            | 0 | -m --module          | None   | text
hosts             | 0 | --hosts              | None   | text
hostfile          | 0 | --hostfile           | None   | text
per_host          | 0 | --per-host           | None   | 1..
host_discovery    | 0 | --host-discovery     | None   | text
bind              | 0 | --bind               | 'none' | none core numa
gpus              | 0 | --gpus               | 'all'  | all rank
env               | 1 | --env                | ()     | text
only_env          | 1 | --only-env           | False  | flag
threads           | 1 | --threads            | 'auto' | auto keep
inject            | 1 | --inject --no-inject | True   | flag
quiet             | 2 | --quiet              | False  | flag
show              | 2 | --show-ranks         | None   | text
timestamps        | 2 | --timestamps         | False  | flag
verbose           | 2 | --verbose            | False  | flag
view              | 2 | --view --no-view     | None   | flag
tee               | 2 | --tee                | None   | text
log_dir           | 2 | --log-dir            | None   | text
log_size          | 2 | --log-size           | None   | text
log_keep          | 2 | --log-keep           | 3      | 0..
events            | 2 | --events             | None   | text
metrics           | 2 | --metrics            | None   | text
name              | 2 | --name               | None   | text
record            | 2 | --record             | None   | text
stacks            | 2 | --stacks             | False  | flag
timeout           | 3 | --timeout            | None   | 0..
start_timeout     | 3 | --start-timeout      | None   | 0..
heartbeat_timeout | 3 | --heartbeat-timeout  | 60.0   | 0..
host_timeout      | 3 | --host-timeout       | 6.0    | 0..
exit_timeout      | 3 | --exit-timeout       | None   | 0..
grace             | 3 | --grace              | 30.0   | 0..
end_on            | 3 | --end-on             | ()     | thread worker
max_restarts      | 4 | --max-restarts       | 0      | 0..
min_hosts         | 4 | --min-hosts          | 1      | 1..
cooldown          | 4 | --cooldown           | 30.0   | 0..
max_host_failures | 4 | --max-host-failures  | None   | 1..
backoff           | 4 | --backoff            | 0.0    | 0..
max_backoff       | 4 | --max-backoff        | 300.0  | 0..
start_retries     | 4 | --start-retries      | 2      | 0..
requeue           | 4 | --requeue            | False  | flag
backend           | 5 | --backend            | 'auto' | text
mpiexec           | 5 | --mpiexec            | None   | text
mpi_option        | 5 | --mpi-option         | ()     | text
ssh               | 5 | --ssh                | None   | text
ssh_option        | 5 | --ssh-option         | ()     | text
interface         | 5 | --interface          | None   | text
port              | 5 | --port               | 0      | 0..65535
print             | 5 | --print              | False  | flag
config            | 5 | --config             | None   | text
bare              | 5 | --bare               | False  | flag
"""
OPTIONS = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()]


def test_each_option_has_its_names_default_and_bounds():
    found = {one.name: one for one in cli.launch.params if one.name != "command"}
    untouched = LaunchSettings(("x",))
    assert list(found) == [name for name, *_ in OPTIONS]
    for name, _, flags, default, kind in OPTIONS:
        one = found[name]
        assert " ".join([*one.opts, *one.secondary_opts]) == flags and repr(getattr(untouched, name)) == default, name
        if isinstance(one.type, (click.IntRange, click.FloatRange)):
            assert kind == f"{one.type.min}..{'' if one.type.max is None else one.type.max}" and not one.is_flag, name
        elif isinstance(one.type, click.Choice):
            assert kind == " ".join(one.type.choices), name
        else:
            assert kind == ("flag" if one.is_flag else "text"), name


def test_the_help_shows_each_option_in_its_group():
    context = click.Context(cli.launch, terminal_width=200, max_content_width=200)
    text = cli.launch.get_help(context)
    parts = re.split(rf"^({'|'.join(GROUPS)}):$", text, flags=re.M)
    by_group = dict(zip(parts[1::2], parts[2::2]))
    assert list(by_group) == list(GROUPS)
    for _, group, flags, *_ in OPTIONS:
        assert re.search(rf"(?m)^  .*{flags.split()[-1]}\b", by_group[GROUPS[int(group)]]), flags
    shown = re.findall(r"\[default: ([^;\]]+)", text)
    assert sorted(shown) == sorted(
        ["none", "all", "auto", "60.0", "6.0", "30.0", "30.0", "2", "auto", "3", "0.0", "300.0"]
    )


def test_times_that_no_option_sets_are_those_of_the_page_and_fit_each_other():
    page = (ROOT / "docs" / "launch.md").read_text()
    assert f"ranks that have not appeared after {limits.WAITING_SECONDS:g} s" in page
    assert f"its lines are collected for up to {limits.GATHER_SECONDS:g} s" in page
    # what takes longer includes what takes less
    assert limits.STACKS_SECONDS > limits.STACK_SECONDS + limits.SPY_SECONDS
    assert limits.FAREWELL_SECONDS > limits.STACKS_SECONDS + limits.KILL_SECONDS + limits.STARTER_SECONDS
    assert limits.DOUBT_SECONDS > limits.PING_SECONDS + limits.ASLEEP_SECONDS - limits.TICK_SECONDS
    assert limits.SAME_MOMENT_SECONDS < limits.LOST_SECONDS < limits.REQUEST_SECONDS


def test_a_module_is_run_by_python():
    assert LaunchSettings(("a", "b")).words == ("a", "b")
    assert LaunchSettings(("a", "b"), module="m.n").words == ("python", "-m", "m.n", "a", "b")


def options(tmp_path, text):
    path = tmp_path / "options.toml"
    path.write_bytes(text.encode("latin-1"))
    return cli._read_options(str(path))


def test_files_of_options_name_them_as_the_command_line_does(tmp_path):
    text = 'n = 3\nmpi-option = ["-l", 2]\nssh_option = "a=b"\nheartbeat-timeout = 2.5\nrequeue = false\nview = true\n'
    assert options(tmp_path, text + "show-ranks = '0'\ninject = false\nm = 'x'\n") == {
        "ranks": "3", "mpi_option": ["-l", "2"], "ssh_option": ["a=b"], "heartbeat_timeout": "2.5", "requeue": False,
        "view": True, "show": "0", "inject": False, "module": "x",
    }  # fmt: skip
    context = click.Context(cli.launch)
    cli.launch.parse_args(context, ["--config", str(tmp_path / "options.toml"), "-n", "5", "x"])
    assert context.params["ranks"] == 5 and context.params["mpi_option"] == ("-l", "2")
    assert context.params["requeue"] is False and context.params["heartbeat_timeout"] == 2.5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-restart = 2", ": unknown option 'max-restart'; did you mean 'max-restarts'?"),
        ("zzz = 2", ": unknown option 'zzz'; `dbrdist-launch --help` lists the options"),
        ("config = 'a'", ": unknown option 'config'; "), ("command = 'a'", ": unknown option 'command'; "),
        ("n = true", ": n = True: expected a string or a number"),
        ("n = [1]", ": n = [1]: expected a string or a number"),
        ("quiet = 1", ": quiet = 1: expected true or false"), ("view = 'a'", ": view = 'a': expected true or false"),
        ("env = 3", ": env = 3: expected a list of strings"),
        ("env = true", ": env = True: expected a list of strings"),
        ("x = [", " cannot be read: "), ("\xff", " cannot be read: "), (None, " cannot be read: [Errno 2]"),
    ],
)  # fmt: skip
def test_odd_files_of_options_are_refused(tmp_path, text, said):
    with pytest.raises(LaunchError) as caught:
        cli._read_options(str(tmp_path / "options.toml")) if text is None else options(tmp_path, text)
    assert str(caught.value).startswith(f"--config '{tmp_path}/options.toml'{said}")


def test_as_many_ranks_as_gpus_or_else_cores(monkeypatch):
    monkeypatch.setattr(cli.cores, "available_cores", lambda: 6)
    kind = cli._Ranks(1)
    for number in (0, 4):
        monkeypatch.setattr(cli.gpus, "count", lambda number=number: number)
        assert kind.convert("auto", None, None) == (number or 6)
    assert kind.convert("3", None, None) == 3
    for wrong in ("0", "x"):
        with pytest.raises(click.BadParameter):
            kind.convert(wrong, None, None)


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        (7, 7, ""), (LaunchError("no way"), codes.USAGE, "dbrdist-launch: no way"),
        (LaunchError("no way", 71), 71, "dbrdist-launch: no way"), (KeyboardInterrupt(), 130, ""),
        (click.UsageError("odd"), codes.USAGE, "Error: odd"),
    ],
)  # fmt: skip
def test_how_a_launch_ends(monkeypatch, capsys, outcome, code, said):
    class Session:
        def __init__(self, settings):
            assert (settings.command, settings.ranks, settings.quiet) == (("python", "-n", "x"), 2, True)

        def run(self):
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

    monkeypatch.setattr(cli, "Session", Session)
    assert cli.run(["-n", "2", "--quiet", "python", "-n", "x"]) == code
    assert capsys.readouterr().err.strip().rpartition("\n")[2] == said


def test_commands_about_running_jobs(monkeypatch, capsys):
    monkeypatch.setattr(cli.jobs, "running", lambda: ["a", "b"])
    monkeypatch.setattr(cli.jobs, "describe", lambda job: f"job {job}")
    monkeypatch.setattr(cli.jobs, "find", lambda name: {"name": name})
    monkeypatch.setattr(cli.jobs, "ask", lambda job, what: f"{what} of {job['name']}")
    for words, said in ((["ps"], "job a\njob b\n"), (["stacks", "x"], "stacks of x\n"), (["stop", "x"], "stop of x\n")):
        assert cli.run(words) == codes.DONE and capsys.readouterr().out == said
    assert cli.run(["stacks"]) == codes.USAGE and "Usage: dbrdist-launch stacks" in capsys.readouterr().err


def test_the_environment_sets_options_too(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(cli, "Session", lambda settings: seen.append(settings) or click.exceptions.Exit)
    monkeypatch.setenv("DBRDIST_LAUNCH_MAX_RESTARTS", "3")
    with pytest.raises(AttributeError):
        cli.run(["x"])
    assert seen[0].max_restarts == 3


# ---- hosts and starters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "version", "library", "fits"),
    [
        ("mpich", "5.0", Library("mpich", "4.2"), True), ("mpich", "5.0", Library("intel", "2021"), True),
        ("intel", "2021", Library("mpich", "4.2"), True), ("mpich", "5.0", Library("openmpi", "5.0.1"), False),
        ("openmpi", "5.0", Library("mpich", "5.0"), False), ("openmpi", "5.0.7", Library("openmpi", "5.1"), True),
        ("openmpi", "4.1", Library("openmpi", "5.1"), False), ("openmpi", "4.1", Library("openmpi", ""), True),
        ("openmpi", "5.0", Library("intel", "5.0"), False), ("intel", "5.0", Library("openmpi", ""), False),
    ],
)  # fmt: skip
def test_which_starter_fits_which_library(family, version, library, fits):
    one = Starter(family, version, "/m")
    assert one.fits(library) is fits and one.label == f"{family} {version} (/m)"


def test_hosts_are_discovered_by_a_program(tmp_path):
    script = tmp_path / "hosts"

    def discover(text):
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        one.discover()
        return one.hosts

    one = HostPool((Host("old", 1),), lambda names: {}, 1.0)
    one.discover()
    assert one.hosts == (Host("old", 1),)
    one.discovery = str(script)
    assert discover("cat; echo a:2; echo; echo ' b '") == (Host("a", 2), Host("b", 1))
    assert discover("true") == (Host("a", 2), Host("b", 1))
    with pytest.raises(LaunchError, match=f"^--host-discovery '{script}' ended with exit code 3: no$"):
        discover("echo ' no' >&2; exit 3")
    script.unlink()
    with pytest.raises(LaunchError, match=f"^--host-discovery '{script}' cannot be run: .*No such file"):
        one.discover()


def test_a_program_that_discovers_hosts_has_a_minute(monkeypatch):
    def run(words, **more):
        raise pool.subprocess.TimeoutExpired(words, more["timeout"])

    monkeypatch.setattr(pool.subprocess, "run", run)
    with pytest.raises(LaunchError, match=r"cannot be run: Command '.'x'.' timed out after 60 seconds"):
        HostPool((), lambda names: {}, 1.0, "x").discover()


def test_libraries_are_found_beside_wheels_where_they_do_not_load(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    interpreter, asked = str(tmp_path / "bin" / "python"), []
    probed = {"family": "openmpi", "version": "5.0", "path": "/x.so", "mpi4py": "4"}
    answers = [None, None, probed, {"family": "", "version": "", "path": "", "mpi4py": "4"}]
    monkeypatch.setattr(mpi, "_probe", lambda name: asked.append(name) or answers[len(asked) - 1])
    assert mpi.library_of(interpreter) is None
    wheel = tmp_path / "lib" / "python3.11" / "site-packages" / "mpich-4.2.dist-info"
    wheel.mkdir(parents=True)
    assert mpi.library_of(interpreter) == Library("mpich", "")
    found = [mpi.library_of(interpreter) for _ in range(2)]
    assert found == [Library("openmpi", "5.0", "/x.so")] * 2 and asked == [interpreter] * 3  # asked once for good
    os.utime(wheel.parent, ns=(1, 1))  # something was installed
    assert mpi.library_of(interpreter) is None and len(asked) == 4
