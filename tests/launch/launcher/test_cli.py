"""What options take, and what the help says."""

import click
import pytest
from dbrdist_launch.launcher import cli


def option(name):
    return next(parameter for parameter in cli.launch.params if parameter.name == name)


def test_what_options_take():
    for name in ("end_on", "mpi_option", "ssh_option"):
        assert option(name).multiple, name
    assert not any(option(name).multiple for name in ("backend", "port", "quiet", "tee"))
    for name in ("quiet", "timestamps", "verbose", "stacks", "requeue", "print", "inject", "view"):
        assert option(name).is_flag, name
    assert option("inject").secondary_opts == ["--no-inject"] and option("quiet").secondary_opts == []
    assert option("config").is_eager and not option("tee").is_eager
    assert option("port").type.max == 65535 and option("port").type.min == 0
    context = click.Context(cli.launch)
    assert context.command.parse_args(context, ["--ssh-option", "a=b", "--ssh-option", "c=d", "-n", "2", "x"]) == []
    assert context.params["ssh_option"] == ("a=b", "c=d") and context.params["quiet"] is False


@pytest.mark.parametrize(
    ("words", "module", "command", "is_quiet"),
    [
        (["-m", "pkg", "--quiet", "x"], "pkg", ("--quiet", "x"), False),
        (["--quiet", "-m", "pkg", "-n", "3"], "pkg", ("-n", "3"), True),
        (["-n", "2", "-mpkg", "--quiet"], "pkg", ("--quiet",), False),
        (["--ranks=2", "--module=pkg", "-q"], "pkg", ("-q",), False),
        (["-n2", "--", "-m", "pkg"], None, ("-m", "pkg"), False),
    ],
)  # fmt: skip
def test_what_follows_a_module_belongs_to_it(words, module, command, is_quiet):
    context = click.Context(cli.launch)
    cli.launch.parse_args(context, words)
    found = context.params
    assert (found["module"], tuple(found["command"]), found["quiet"]) == (module, command, is_quiet)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_seconds_are_finite(value):
    """No clock can be compared with NaN."""
    with pytest.raises(click.BadParameter, match=f"{value!r} is not a finite number"):
        option("backoff").type.convert(value, None, None)
    assert option("backoff").type.convert("1.5", None, None) == 1.5


def test_the_help_shows_options_in_groups_with_defaults():
    context = click.Context(cli.launch, terminal_width=200, max_content_width=200)
    text = " ".join(cli.launch.get_help(context).split())
    for words in (
        "--start-retries N Try again after a start that hangs or, with Open MPI, ends with 213, up to N times.",
        "[default: 2; x>=0]", "--no-inject",
        "--port PORT TCP port of the side channel", "--ssh-option K=V An option for ssh -o; repeatable.",
        "--quiet Show only rank 0's output and failures.",
    ):  # fmt: skip
        assert words in text, words
    assert text.count("[default:") < 15 and "default: ()" not in text and "[default: None" not in text
    assert text.index("--timestamps") < text.index("--heartbeat-timeout") < text.index("--max-restarts")


@pytest.mark.parametrize("name", ["doctor", "ps", "stacks", "stop"])
def test_the_help_of_a_command_names_it(capsys, name):
    assert cli.run([name, "-h"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: dbrdist-launch {name} ")


def test_options_that_other_launchers_have_are_named():
    context = click.Context(cli.launch)
    word, meant = next(iter(cli._NEIGHBOURS.items()))
    with pytest.raises(click.UsageError, match=f"No such option '{word}'. Did you mean '{meant}'"):
        cli.launch.parse_args(context, [word, "3", "x"])
    with pytest.raises(click.NoSuchOption):
        cli.launch.parse_args(click.Context(cli.launch), ["--no-such-option", "x"])
