"""What mpiexec writes itself, beside what spawned processes write."""

import os

import pytest
from dbrdist_launch import limits
from dbrdist_launch.launcher.streams.pieces import SPAWNED
from dbrdist_launch.launcher.streams.starter_output import StarterOutput, StarterOutputs
from dbrdist_launch.loop import Loop

RULE = "=" * 83 + "\n"


@pytest.mark.parametrize(
    ("text", "own", "shown"),
    [
        ("hello\n\nyou\n", [], "hello\n\nyou\n"),
        ("no end", [], "no end"),
        ("\n" + RULE + "=   BAD TERMINATION\n=   EXIT CODE: 9\n" + RULE, 4, ""),
        (RULE + "a table\n" + RULE + "x\n", [], RULE + "a table\n" + RULE + "x\n"),
        ("[mpiexec@vm] words\n[proxy:0@vm] more\nsrun: error: x\n", 3, ""),
        ("YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed\nbeyond\n", 1, "beyond\n"),
        ("-" * 74 + "\nprterun has exited\n" + "-" * 74 + "\nx\n", 3, "x\n"),
        ("\udcff\0binary\n", [], "\udcff\0binary\n"),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 100000])
def test_what_spawned_processes_write_is_told_from_mpiexecs_own_words(text, own, shown, step):
    said, found = [], []
    one = StarterOutput(said.append, found.append)
    data = text.encode("utf-8", "surrogateescape")
    for at in range(0, len(data), step):
        one.feed(data[at : at + step])
    one.end()
    assert b"".join(found) == shown.encode("utf-8", "surrogateescape")
    assert len(said) == (own if isinstance(own, int) else len(own))


@pytest.mark.parametrize(("length", "shown"), [(4096, 0), (4097, 4097)])
def test_a_line_without_an_end_that_is_longer_than_any_message_is_shown(length, shown):
    found = []
    one = StarterOutput(lambda text: None, found.append)
    one.feed(b"x" * length)
    assert sum(map(len, found)) == shown
    one.feed(b"y")
    one.end()
    assert b"".join(found) == b"x" * length + b"y"


def test_a_line_of_another_kind_ends_a_box_that_is_none():
    said, found = [], []
    one = StarterOutput(said.append, found.append)
    one.feed(b"-" * 74 + b"\nwords\n" + b"=" * 83 + b"\nmore\n")
    one.end()
    assert (said, b"".join(found)) == ([], b"-" * 74 + b"\nwords\n" + b"=" * 83 + b"\nmore\n")


class Both:
    """Both streams of a starter, whose other ends the test has."""

    def __init__(self):
        pairs = [os.pipe() for _ in range(2)]
        self.reads, self.writes = zip(*pairs, strict=True)
        self.loop, self.said, self.pieces = Loop(), [], []
        self.outputs = StarterOutputs(self.loop, self.reads, self.said.append, self.pieces.append)

    def write(self, data, stream=0, turns=1):
        os.write(self.writes[stream], data)
        for _ in range(turns):
            self.loop.turn(0.0)

    def close(self):
        for descriptor in (*self.reads, *self.writes):
            os.close(descriptor)
        self.loop.close()


@pytest.fixture
def both():
    made = Both()
    yield made
    made.close()


def test_words_before_all_ranks_have_started_are_said_and_later_ones_shown_as_output(both):
    both.write(b"Warning: host key  \n\n  two\nthree\n")
    both.write(b"[mpiexec@vm] own\n", 1)
    assert (both.said, both.pieces) == (["Warning: host key", "  two", "three", "[mpiexec@vm] own"], [])
    both.outputs.all_started = True
    both.write(b"spawned\n", 1)
    both.write(b"other\n")
    node = os.uname().nodename
    rows = [(one.rank, one.host, one.stream, one.data, one.urgent, one.left) for one in both.pieces]
    assert rows == [(SPAWNED, node, "err", b"spawned\n", True, 0), (SPAWNED, node, "out", b"other\n", True, 0)]
    assert len(both.said) == 4


def test_no_more_is_read_than_has_been_written(both, monkeypatch):
    """Each piece counts 512 bytes beyond its own."""
    monkeypatch.setattr(limits, "LOCAL_WINDOW_BYTES", 1100)
    both.outputs.all_started = True
    both.write(b"x" * 75 + b"\n")  # 588
    both.write(b"y\n", 1)  # 1102: beyond the window
    both.write(b"late\n", turns=3)
    both.write(b"late\n", 1, turns=3)
    assert [piece.data for piece in both.pieces] == [b"x" * 75 + b"\n", b"y\n"]
    both.outputs.give_credit(552)  # 550 are left: no less than half of the window
    both.loop.turn(0.0)
    assert len(both.pieces) == 2
    both.outputs.give_credit(1)
    both.loop.turn(0.0)
    assert sorted((piece.stream, piece.data) for piece in both.pieces[2:]) == [("err", b"late\n"), ("out", b"late\n")]
    both.write(b"not yet\n", turns=3)  # 549 and twice 517 are more than the window
    assert len(both.pieces) == 4
    both.outputs.give_credit(549 + 517)
    both.loop.turn(0.0)
    assert both.pieces[4].data == b"not yet\n"


def test_a_window_that_is_just_full_is_no_reason_to_wait(both, monkeypatch):
    monkeypatch.setattr(limits, "LOCAL_WINDOW_BYTES", 512 + 4)
    both.outputs.all_started = True
    both.write(b"abc\n")
    both.write(b"def\n")
    assert [piece.data for piece in both.pieces] == [b"abc\n", b"def\n"]


def test_a_stream_that_has_ended_is_read_no_more_and_the_other_one_is(both):
    both.outputs.all_started = True
    both.write(b"no end")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, both.writes[0])
    os.close(null)
    for _ in range(3):
        both.loop.turn(0.0)
    assert [(piece.stream, piece.data) for piece in both.pieces] == [("out", b"no end")]
    assert both.outputs.pipes == [both.reads[1]]
    both.write(b"goes on\n", 1)
    assert both.pieces[-1].data == b"goes on\n"


def test_what_is_left_when_the_starter_ends_is_shown_and_nothing_is_read_after(both):
    both.outputs.all_started = True
    both.outputs.finish([b"one\nhalf", b"[mpiexec@vm] last"])
    assert [(piece.stream, piece.data) for piece in both.pieces] == [("out", b"one\n"), ("out", b"half")]
    assert both.said == ["[mpiexec@vm] last"]
    both.write(b"late\n", turns=3)
    assert not any(b"late" in piece.data for piece in both.pieces)
