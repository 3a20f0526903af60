"""Tests of dbrdist.cli.configuration.resolve."""

import sys

import pytest

from dbrdist.cli.configuration import resolve
from dbrdist.cli.configuration.load import check
from dbrdist.errors import ConfigError

MODULE = """\
import os
limit = 3

class Net:
    def __init__(self, width, depth=2):
        if width > limit:
            raise ValueError(f"too wide: {width}")
        self.width = width

def leave():
    raise SystemExit(4)

def anything(**kwargs):
    return kwargs

def loss(y, t, scale=1):
    return scale

broken = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "userside.py").write_text(MODULE)
    (tmp_path / "syntaxside.py").write_text("def f(:\n")
    (tmp_path / "raiseside.py").write_text("x = 1\nraise RuntimeError('no licence')\n")
    yield tmp_path
    for name in ("userside", "syntaxside", "raiseside"):
        sys.modules.pop(name, None)


def config(model):
    return check(f"data: digits\nbatch: 4\nepochs: 3\nmodel: {model}\n".encode(), "run.yaml")


def problem(model):
    with pytest.raises(ConfigError) as caught:
        resolve.check_callables(*config(model))
    return str(caught.value)


def test_a_callable_is_found_in_the_working_directory_and_called(here):
    read, origin = config("{name: 'userside:Net', args: {width: 2}}")
    resolve.check_callables(read, origin)
    assert resolve.call(read.model, ("model",), origin).width == 2


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nowhere:Net", "importing 'nowhere' failed: ModuleNotFoundError: No module named 'nowhere'"),
        ("userside:Nett", "userside.py has no 'Nett', did you mean 'Net'?"),
        ("userside:broken", "'userside:broken' is of type int, not callable"),
        ("userside:Net", "missing a required argument: 'width'"),
        ("raiseside:f", "importing 'raiseside' failed: RuntimeError: no licence ("),
        ("syntaxside:f", "importing 'syntaxside' failed: SyntaxError: "),
    ],
)
def test_what_does_not_import_is_said_with_the_line(here, model, words):
    message = problem(model)
    assert message.startswith("run.yaml:4:8: model: ")
    assert words in message
    assert "\n" not in message


def test_the_place_in_the_users_file_is_named(here):
    assert problem("raiseside:f").endswith("raiseside.py:2)")


def test_the_line_is_named_that_is_no_python(here):
    assert problem("syntaxside:f").endswith("syntaxside.py:1)")
    assert resolve.last_line(SyntaxError("no file")) == "SyntaxError: no file"


def test_no_line_of_what_an_exception_says_is_lost():
    error = ValueError("expected two numbers:\n  got one\n")
    error.add_note("in the third row")
    assert resolve.last_line(error) == "ValueError: expected two numbers: got one in the third row"


def test_an_unknown_argument_is_pointed_at(here):
    message = problem("{name: 'userside:Net', args: {width: 1, dept: 3}}")
    assert message == "run.yaml:4:48: model.args.dept: 'userside:Net' takes no 'dept', did you mean 'depth'?"


def test_keyword_arguments_are_passed_on(here):
    read, origin = config("{name: 'userside:anything', args: {x: 1e-3}}")
    resolve.check_callables(read, origin)
    assert resolve.call(read.model, ("model",), origin) == {"x": 0.001}


def test_a_callable_that_raises_is_said_with_line_and_reason(here):
    read, origin = config("{name: 'userside:Net', args: {width: 9}}")
    with pytest.raises(
        ConfigError, match=r"run.yaml:4:15: model: .* ValueError: too wide: 9 \(.*userside.py:7\)"
    ) as caught:
        resolve.call(read.model, ("model",), origin)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_callable_that_exits_does_not_end_the_run_silently(here):
    read, origin = config("userside:leave")
    with pytest.raises(ConfigError, match="SystemExit: 4"):
        resolve.call(read.model, ("model",), origin)


def test_a_loss_gets_outputs_and_labels_before_its_arguments(here):
    text = b"data: digits\nbatch: 4\nepochs: 3\nmodel: mlp\nloss: {name: 'userside:loss', args: {scale: 2}}\n"
    read, origin = check(text, "run.yaml")
    resolve.check_callables(read, origin)
    assert resolve.call(read.loss, ("loss",), origin, None, None) == 2


def test_all_callables_are_checked_at_once(here):
    text = b"data: 'a1:f'\nbatch: 4\nepochs: 3\nmodel: 'b1:f'\ntransforms: {train: ['c1:f']}\n"
    with pytest.raises(ConfigError) as caught:
        resolve.check_callables(*check(text, "run.yaml"))
    assert len(str(caught.value).splitlines()) == 3
