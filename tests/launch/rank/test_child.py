"""The program of a rank as a child of its supervisor: its pipes, its session, its signals."""

import fcntl
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from dbrdist_launch import linux
from dbrdist_launch.inherited import Inherited
from dbrdist_launch.rank import child
from dbrdist_launch.rank import child as children
from dbrdist_launch.rank.child import Child, stack_signal
from processes import in_child, until

# Python warns of forks beside threads, as those of the test runner; what is forked here calls the kernel alone.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (FileNotFoundError(2, "No such file or directory"), 127, "'x': No such file or directory: 'x'"),
        (FileNotFoundError(2, "No such file or directory", "/gone"), 127, "'x': No such file or directory: '/gone'"),
        (PermissionError(13, "Permission denied", "/y\udcff"), 126, "'x': Permission denied: '/y\\udcff'"),
        (OSError(8, "Exec format error"), 127, "'x': Exec format error: 'x'"),
    ],
)
def test_a_program_that_cannot_start_says_why(monkeypatch, capsys, error, code, said):
    done = []

    def cannot(*args):
        done.append(args)
        raise error

    monkeypatch.setattr(child.os, "execve", cannot)
    monkeypatch.setattr(child, "_is_binary", lambda path: True)
    monkeypatch.setattr(child.os, "chdir", lambda path: done.append(path))
    monkeypatch.setattr(child.os, "_exit", lambda status: done.append(status))
    for directory in (None, "/d"):
        done.clear()
        child._run(["x", "y"], {"A": "1"}, directory, SimpleNamespace(hand_on=lambda: None))
        assert done == [*([directory] if directory else []), ("x", ["x", "y"], {"A": "1"}), code]
        assert capsys.readouterr().err == f"cannot run {said}\n"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"#!/no/such/sh\r\necho\n", "/no/such/sh\\r"), (b"#! /no/such/sh -e\n", "/no/such/sh"), (b"#!/no", "/no"),
        (b"echo\n", None), (b"", None),
    ],
)  # fmt: skip
def test_an_interpreter_that_is_not_there_is_named(monkeypatch, tmp_path, capsys, content, named):
    def cannot(*args):
        raise FileNotFoundError(2, "No such file or directory", args[0])

    monkeypatch.setattr(child.os, "execve", cannot)
    monkeypatch.setattr(child.os, "_exit", lambda status: None)
    path = tmp_path / "script"
    path.write_bytes(content)
    child._run([str(path)], {}, None, SimpleNamespace(hand_on=lambda: None))
    assert capsys.readouterr().err == f"cannot run '{path}': No such file or directory: '{named or path}'\n"


def test_a_zero_among_the_first_kibibyte_makes_a_binary(tmp_path):
    for content, is_binary in (
        (b"x" * 1023 + b"\0", True), (b"x" * 1024 + b"\0", False), (b"\0", True), (b"echo hi\n", False), (b"", False)
    ):  # fmt: skip
        (tmp_path / "file").write_bytes(content)
        assert child._is_binary(str(tmp_path / "file")) is is_binary


def test_the_signal_for_stacks_is_one_of_those_that_nobody_uses():
    assert signal.SIGRTMIN < stack_signal() < signal.SIGRTMAX


SCRIPT = """
echo "$A" "$PWD"
echo "$DBRDIST_HEARTBEAT" "$DBRDIST_LAUNCH_EVENTS"
cut -d' ' -f6 /proc/$$/stat
echo $$
echo events > /proc/$$/fd/"${DBRDIST_LAUNCH_EVENTS%,*}"
readlink /proc/$$/fd/"${DBRDIST_HEARTBEAT#*,}"
echo error >&2
exec grep -E '^Sig(Ign|Blk):' /proc/self/status
"""  # the shell itself blocks signals now and then


def all_of(descriptor):
    """What comes out of a pipe until nobody can write to it any more."""
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


@pytest.fixture
def page():
    made = os.memfd_create("dbrdist-heartbeat")
    yield made
    os.close(made)


@pytest.mark.parametrize("ignored", [set(), {signal.SIGHUP, signal.SIGUSR1}])
def test_a_program_has_a_session_and_pipes_of_its_own(tmp_path, page, ignored):
    mask, told = signal.pthread_sigmask(signal.SIG_BLOCK, []), {"A": "b c", "PATH": os.environ["PATH"]}
    one = Child(["/bin/sh", "-c", SCRIPT], told, str(tmp_path), page, ignored, Inherited())
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    first, names, session, pid, held, *masks = all_of(one.out).decode().splitlines()
    assert first == f"b c {tmp_path}" and int(session) == int(pid) == one.pid
    words, _, events = names.partition(" ")
    assert words.startswith(f"/proc/{os.getpid()}/fd/{page},") and int(words.partition(",")[2]) >= 300
    assert events.endswith(f",{stack_signal()}") and int(events.partition(",")[0]) >= 300
    assert held.startswith("/memfd:dbrdist-heartbeat")
    bits = {line[:6]: int(line.split()[1], 16) for line in masks}
    ours = (*children._CAUGHT, signal.SIGPIPE, signal.SIGCHLD)
    assert {number for number in ours if bits["SigIgn"] >> (number - 1) & 1} == ignored
    assert not any(bits["SigBlk"] >> (number - 1) & 1 for number in ours)
    assert (all_of(one.err), all_of(one.events)) == (b"error\n", b"events\n")
    assert os.waitstatus_to_exitcode(os.waitpid(one.pid, 0)[1]) == 0


def test_a_program_that_is_not_there_ends_with_127(page):
    one = Child(["/nowhere/program"], {}, None, page, set(), Inherited())
    assert os.waitstatus_to_exitcode(os.waitpid(one.pid, 0)[1]) == 127
    assert all_of(one.out) == all_of(one.err) == all_of(one.events) == b""


@pytest.mark.parametrize("has_input", [True, False])
def test_a_program_reads_what_it_is_given(page, has_input):
    """Without an input of its own it has ours."""
    script = ["/bin/sh", "-c", "readlink /proc/self/fd/0"]
    one = Child(script, {"PATH": os.environ["PATH"]}, None, page, set(), Inherited(), has_input=has_input)
    place = f"pipe:[{os.fstat(one.input).st_ino}]" if has_input else os.readlink("/proc/self/fd/0")
    assert all_of(one.out).decode().strip() == place
    os.waitpid(one.pid, 0)
    for descriptor in (one.err, one.events, *([one.input] if has_input else [])):
        os.close(descriptor)
    assert has_input or one.input == -1


def test_the_pipe_of_the_output_is_as_large_as_it_may_be(page):
    one = Child(["/bin/true"], {}, None, page, set(), Inherited())
    read, write = os.pipe()
    try:
        largest = fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 18)
    except OSError:  # more than this user may have
        largest = fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)
    assert fcntl.fcntl(one.out, fcntl.F_GETPIPE_SZ) == largest
    os.waitpid(one.pid, 0)
    for descriptor in (read, write, one.out, one.err, one.events):
        os.close(descriptor)


@pytest.mark.slow
def test_a_program_dies_with_its_supervisor(page, tmp_path):
    def supervise():
        one = Child(["/bin/sleep", "60"], {}, None, page, set(), Inherited())
        (tmp_path / "part").write_text(str(one.pid))
        os.rename(tmp_path / "part", tmp_path / "pid")
        until(lambda: Path(f"/proc/{one.pid}/cmdline").read_text().startswith("/bin/sleep"))
        return 0

    assert in_child(supervise) == 0
    pid = int((tmp_path / "pid").read_text())
    until(lambda: linux.state(pid) in ("", "Z"))


def test_descriptors_are_copied_high_or_anywhere(monkeypatch):
    copy = children._inherited(0)
    assert copy >= 300 and os.get_inheritable(copy)
    os.close(copy)

    def refuse(*_):
        raise OSError

    monkeypatch.setattr(children.fcntl, "fcntl", refuse)
    copy = children._inherited(0)
    assert 0 < copy < 300 and os.get_inheritable(copy)
    os.close(copy)
