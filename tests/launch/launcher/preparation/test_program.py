"""The user's command, and the interpreter that it means."""

import os
import sys

import pytest
from dbrdist_launch import codes
from dbrdist_launch.errors import LaunchError
from dbrdist_launch.launcher.preparation import program


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder on PATH, and what makes a file in it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def make(name, text="", mode=0o755):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
        return str(tmp_path / name)

    return make


def test_commands_become_absolute(tools, monkeypatch):
    tool = tools("tool", "#!/bin/sh\n")
    for word in ("tool", "./tool", tool):
        assert program.resolve((word, "-x")) == ((tool, "-x"), None)
    os.mkdir("below")
    os.rename("tool", "below/tool")
    for folder, path in ((".", "below"), ("below", "/none:"), ("below", ".")):  # also folders given from this one
        monkeypatch.chdir(os.path.join(os.path.dirname(tool), folder))
        monkeypatch.setenv("PATH", path)
        assert program.resolve(("tool", "-x")).command == (os.path.join(os.path.dirname(tool), "below", "tool"), "-x")
    os.rename("tool", tool)
    monkeypatch.delenv("PATH")
    monkeypatch.setattr(program.os, "defpath", os.path.dirname(tool))
    assert program.resolve(("tool",)).command == (tool,)
    beside = os.path.join(os.path.dirname(sys.executable), "python")
    assert program.resolve(("python", "t.py")) == ((beside, "t.py"), beside)
    assert program.resolve(("python2.99",)) == ((sys.executable,), sys.executable)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"\x7fELF..\0libmpi.so.40\0", "openmpi"), (b"\x7fELF..\0libmpi.so.12\0", "mpich"),
        (b"\x7fELF..\0libmpich.so.12\0", "mpich"), (b"\x7fELF..\0libmpi.so.41\0libmpi.so.120\0", None),
        (b"#!/bin/sh\n\0libmpi.so.40\0", None), (b"", None),
        (b"\x7fELF" + bytes((1 << 24) - 18) + b"libmpi.so.40\0", "openmpi"),
        (b"\x7fELF" + bytes((1 << 24) - 16) + b"libmpi.so.40\0", None),
    ],
)  # fmt: skip
def test_the_mpi_of_a_binary_is_that_of_the_library_it_names(tmp_path, content, found):
    """In its first 16 MiB."""
    (tmp_path / "solver").write_bytes(content)
    assert program.mpi_of_binary(str(tmp_path / "solver")) == found
    assert program.mpi_of_binary(str(tmp_path / "nowhere")) is None


def test_the_interpreter_of_a_script_is_in_its_first_line(tools):
    python = tools("python3.11")
    for text, found in (
        (f"#!{python}\n", python), (f"#! {python} -u\n", python), ("#!/usr/bin/env python3.11\n", python),
        ("#!/usr/bin/env -S x python3.11\n", python), ("#!/usr/bin/env python3.99\n", None), ("#!/bin/sh\n", None),
        (f"{python}\n", None), (f"x #!{python}\n", None), ("#!\n", None), ("", None), (f"#!{python}w\n", None),
    ):  # fmt: skip
        assert program.resolve((tools("script", text),)).interpreter == found, text
    assert program._interpreter_of("/no/such/file") is None


def test_commands_that_cannot_run_are_refused(tools):
    hint = r"; for a Python script: dbrdist-launch -n 4 python"
    with pytest.raises(LaunchError, match="expected a command"):
        program.resolve(())
    tools("plain", mode=0o644)
    tools("plain.py", mode=0o644)
    os.mkdir("folder")
    for word, code, words in (
        ("./none", codes.COMMAND_NOT_FOUND, "the command './none' was not found$"),
        ("none", codes.COMMAND_NOT_FOUND, "the command 'none' was not found$"),
        ("none.py", codes.COMMAND_NOT_FOUND, f"the command 'none.py' was not found{hint} none.py$"),
        ("./folder", codes.COMMAND_NOT_RUNNABLE, r"the command './folder' \(.*/folder\) is not executable$"),
        ("./plain", codes.COMMAND_NOT_RUNNABLE, r"the command './plain' \(.*/plain\) is not executable$"),
        ("./plain.py", codes.COMMAND_NOT_RUNNABLE, rf"\(.*/plain.py\) is not executable{hint} ./plain.py$"),
    ):
        with pytest.raises(LaunchError, match=words) as caught:
            program.resolve((word,))
        assert caught.value.code == code
