"""What a program leaves behind: whom the supervisor sees, how long it waits for them, and what it says of them."""

import os
import subprocess
from types import SimpleNamespace

import pytest
from dbrdist_launch import linux
from dbrdist_launch.rank import leftovers
from dbrdist_launch.rank.leftovers import Leftovers
from processes import GONE, until

OURS = os.getpid()


@pytest.fixture
def machine(monkeypatch):
    """Processes as the test says: what each has open, and its state."""
    made = SimpleNamespace(targets={}, states={}, looks=0)

    def descendants(pid):
        assert pid == OURS
        made.looks += 1
        return list(made.states)

    monkeypatch.setattr(leftovers, "_target", lambda pid, number: made.targets.get((pid, number), ""))
    monkeypatch.setattr(linux, "descendants", descendants)
    monkeypatch.setattr(linux, "state", lambda pid: made.states[pid])
    return made


def test_who_writes_and_who_reads_is_seen_by_what_they_have_open(machine):
    machine.targets = {
        (OURS, 0): "pipe:[1]", (OURS, 7): "pipe:[2]", (OURS, 8): "pipe:[3]", (OURS, 9): "pipe:[4]",
        (11, 0): "pipe:[1]", (11, 1): "pipe:[3]", (11, 2): "/dev/null",
        (12, 0): "pipe:[2]", (12, 1): "/dev/null", (12, 2): "pipe:[4]",
        (13, 0): "pipe:[5]", (13, 1): "/log", (13, 2): "/log",
        (14, 0): "pipe:[5]", (14, 1): "pipe:[3]", (14, 2): "pipe:[3]",
        (15, 0): "/file", (15, 1): "/log", (15, 2): "/log",
        (16, 0): "pipe:[5]", (16, 1): "pipe:[3]", (16, 2): "pipe:[3]",
    }  # fmt: skip
    machine.states = {11: "S", 12: "R", 13: "S", 14: "Z", 15: "T", 16: ""}
    left = Leftovers((8, 9), 7)
    left.look(100.0)
    assert (left.alive, left.filters, left.writers) == ([11, 12, 13, 15], [13], [11, 12])
    machine.states = {}
    left.look(100.0625)
    assert left.alive == [11, 12, 13, 15] and machine.looks == 1  # /proc is slow
    left.look(100.125)
    assert (left.alive, left.filters, left.writers, machine.looks) == ([], [], [], 2)
    left.look(100.1875)
    assert machine.looks == 2


def test_what_is_open_is_read_from_the_kernel():
    read, write = os.pipe()
    try:
        assert leftovers._target(OURS, read) == leftovers._target(OURS, write) == os.readlink(f"/proc/self/fd/{read}")
        assert leftovers._target(OURS, 1 << 20) == leftovers._target(GONE, 0) == ""
        with subprocess.Popen(["sleep", "60"], stdin=read, stdout=write, stderr=subprocess.DEVNULL) as child:
            until(lambda: leftovers._name(child.pid) == f"{child.pid} (sleep 60)")
            left = Leftovers((write,))
            left.look(1.0)
            assert child.pid in left.alive and child.pid in left.filters and child.pid in left.writers
            shared = Leftovers((), read)
            shared.look(1.0)
            assert child.pid in shared.alive and child.pid not in shared.filters + shared.writers
            child.kill()
    finally:
        os.close(read)
        os.close(write)


@pytest.mark.parametrize(
    ("alive", "filters", "writers", "waits"),  # seconds: open and well, open and failed, closed and well, closed
    [
        ([], [], [], (0.3, 0.3, 0.0, 0.0)),
        ([1], [], [], (0.3, 0.3, 0.3, 0.0)),
        ([1], [], [1], (5.0, 0.3, 0.3, 0.0)),
        ([1], [1], [1], (60.0, 10.0, 60.0, 10.0)),
        ([1], [1], [], (60.0, 10.0, 60.0, 10.0)),
    ],
)
def test_those_who_write_or_read_get_time(machine, alive, filters, writers, waits):
    left = Leftovers(())
    left.alive, left.filters, left.writers = alive, filters, writers
    cases = [(True, True), (True, False), (False, True), (False, False)]
    assert tuple(left.patience(is_open, well) for is_open, well in cases) == waits


def test_what_is_ended_is_named(monkeypatch):
    left = Leftovers(())
    assert left.words(False) == ""
    assert left.words(True) == "its output was still open after its end, and is cut here"
    left.alive = [GONE]
    begin = "its program has ended and left processes, which are ended now: "
    assert left.words(False) == f"{begin}{GONE} (?)"
    assert left.words(True) == f"{begin}{GONE} (?); they held its output open, which may be cut short"
    monkeypatch.setattr(leftovers, "_name", lambda pid: f"p{pid}")
    left.alive = [1, 2, 3, 4]
    assert left.words(False) == f"{begin}p1, p2, p3, p4"
    left.alive = [1, 2, 3, 4, 5, 6]
    assert left.words(False) == f"{begin}p1, p2, p3, p4 and 2 more"


def test_a_long_command_is_cut_and_nothing_reaches_the_terminal():
    words = ["sh", "-c", "read x; : \033[31m" + "x" * 80]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as child:
        until(lambda: leftovers._name(child.pid).startswith(f"{child.pid} (sh"))
        assert leftovers._name(child.pid) == f"{child.pid} (sh -c read x; :  [31m{'x' * 39})"
        child.stdin.close()
