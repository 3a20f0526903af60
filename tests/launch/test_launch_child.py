"""The program of a rank as a child of its supervisor: its pipes, its session, its signals, and what it is told."""

import fcntl
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from dbrdist_launch import limits, linux
from dbrdist_launch import main as mains
from dbrdist_launch.launcher.process import StarterProcess
from dbrdist_launch.rank import child as children
from dbrdist_launch.rank import main as rank_main
from dbrdist_launch.rank.child import Child, stack_signal
from test_launch_processes import in_child, until

# Python warns of forks beside threads, as those of the test runner; what is forked here calls the kernel alone.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
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
    one = Child(["sh", "-c", SCRIPT], told, str(tmp_path), page, ignored)
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
    one = Child(["/nowhere/program"], {}, None, page, set())
    assert os.waitstatus_to_exitcode(os.waitpid(one.pid, 0)[1]) == 127
    assert all_of(one.out) == all_of(one.err) == all_of(one.events) == b""


def test_the_pipe_of_the_output_is_as_large_as_it_may_be(page):
    one = Child(["true"], {"PATH": os.environ["PATH"]}, None, page, set())
    read, write = os.pipe()
    try:
        largest = fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 18)
    except OSError:  # more than this user may have
        largest = fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)
    assert fcntl.fcntl(one.out, fcntl.F_GETPIPE_SZ) == largest
    os.waitpid(one.pid, 0)
    for descriptor in (read, write, one.out, one.err, one.events):
        os.close(descriptor)


def test_a_program_dies_with_its_supervisor(page, tmp_path):
    def supervise():
        one = Child(["sleep", "60"], {"PATH": os.environ["PATH"]}, None, page, set())
        (tmp_path / "part").write_text(str(one.pid))
        os.rename(tmp_path / "part", tmp_path / "pid")
        until(lambda: Path(f"/proc/{one.pid}/cmdline").read_text().startswith("sleep"))
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


# ---- the starter's words --------------------------------------------------------------------------------------------


def test_the_starter_is_heard_line_by_line(monkeypatch):
    monkeypatch.setattr(limits, "LINE_BYTES", 8)
    read, write = os.pipe()
    loop, said = (
        SimpleNamespace(watch=lambda pipe, call: calls.append((pipe, call)), forget=lambda n: gone.append(n)),
        [],
    )
    calls, gone = [], []
    StarterProcess.watch(None, loop, read, said.append)
    ((pipe, call),) = calls
    assert pipe == read
    for data, lines in (
        (b"one\ntwo \r\n\n  \nth", ["one", "two"]), (b"ree\n", ["three"]), (b"12345678", []), (b"\n", ["12345678"]),
        (b"123456789", ["123456789"]), (b"0\n\xff\n", ["0", "\udcff"]), (b"rest", []),
    ):  # fmt: skip
        os.write(write, data)
        call()
        assert said == lines and gone == []
        said.clear()
    os.close(write)
    call()
    assert said == ["rest"] and gone == [read]
    os.close(read)


# ---- entry points ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["hydra"]])
def test_a_rank_without_a_command_says_how_it_is_called(capsys, arguments):
    assert rank_main.main(arguments) == 2
    assert capsys.readouterr().err == "usage: python .../dbrdist_launch/rank/main.py BACKEND command ...\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (None, 5, ""), (KeyboardInterrupt(), 130, ""),
        (ValueError("odd"), 71, "dbrdist-launch: internal error: ValueError('odd')"),
    ],
)  # fmt: skip
def test_the_launcher_ends_with_the_code_of_its_job(monkeypatch, capsys, error, code, said):
    from dbrdist_launch.launcher import cli

    def run(arguments):
        assert arguments == ["a", "b"]
        if error is not None:
            raise error
        return 5

    monkeypatch.setattr(cli, "run", run)
    for given in (["a", "b"], None):
        monkeypatch.setattr(sys, "argv", ["dbrdist-launch", "a", "b"])
        with pytest.raises(SystemExit) as caught:
            mains.main(given)
        assert caught.value.code == code
        assert capsys.readouterr().err.partition(" at ")[0] == said


def test_a_reader_that_has_gone_does_not_change_the_code(monkeypatch):
    def fail():
        raise BrokenPipeError

    left = []
    monkeypatch.setattr(mains.sys, "stdout", SimpleNamespace(flush=fail))
    monkeypatch.setattr(mains.os, "_exit", left.append)
    with pytest.raises(SystemExit):
        mains._leave(3)
    monkeypatch.undo()
    assert left == [3]


def test_closed_standard_files_are_opened_again():
    def act():
        for number in (0, 1, 2):
            os.close(number)
        sys.stdout = sys.stderr = None
        mains._open_standard_files()
        null = os.stat(os.devnull)
        are_open = all(os.path.samestat(os.fstat(number), null) for number in (0, 1, 2))
        return 7 if are_open and (sys.stdout.fileno(), sys.stderr.fileno()) == (1, 2) else 8

    assert in_child(act) == 7
