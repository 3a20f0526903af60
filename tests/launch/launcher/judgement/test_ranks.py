"""What the launcher knows of each rank."""

import re

import pytest
from dbrdist_launch.launcher.judgement import ranks
from dbrdist_launch.launcher.judgement.ranks import Rank
from dbrdist_launch.messages import Beat, Exit


def beat(**change):
    return Beat(
        **{"state": "S", "traced": False, "beats": 1, "paused": False, "step": 3, "fields": {}, "age": None} | change
    )


def test_a_rank_is_stopped_from_the_first_beat_that_says_so():
    rank = Rank(0, "a", None)
    for now, state, traced, since in (
        (1.0, "S", False, None), (2.0, "T", False, 2.0), (3.0, "T", False, 2.0), (4.0, "T", True, None),
        (5.0, "R", False, None), (6.0, "t", True, None),
    ):  # fmt: skip
        rank.take_beat(beat(state=state, traced=traced), now)
        assert rank.stopped_since == since
    rank.take_beat(beat(fields={"loss": 1}, age=0.5), 9.0)
    rank.take_beat(beat(), 10.0)
    assert (rank.fields, rank.beat_at, rank.step) == ({"loss": 1}, 8.5, 3)


def test_how_ranks_are_described():
    rank = Rank(0, "a", None)
    assert rank.activity(10.0).endswith(", no heartbeats")
    rank.take_beat(beat(age=0.0), 9.0)
    assert rank.activity(10.5).endswith(", step 3, last heartbeat 1.5 s ago")
    rank.take_beat(beat(step=-1), 9.0)
    assert "step" not in rank.activity(10.5)


def test_the_last_32_kib_of_a_ranks_output_are_kept_for_the_report():
    rank = Rank(0, "a", None)
    for number in range(3):
        rank.take_output("err", b"%d" % number * 20000)
    assert rank.tails["err"] == b"1" * 12768 + b"2" * 20000
    for length in (32767, 32768, 32769):
        rank.tails["err"] = b"old"
        rank.take_output("err", b"x" * length)
        assert rank.tails["err"] == (b"d" if length == 32767 else b"") + b"x" * min(length, 32768)


def test_the_last_line_is_that_of_the_stream_that_spoke_last():
    rank = Rank(0, "a", None)
    assert rank.last_line() == ""
    rank.take_output("out", b"first\nepoch 1\repoch 2 \r\n \n")
    assert rank.last_line() == "epoch 2"
    rank.take_output("err", b"z" + b"x" * 999)
    assert rank.last_line() == "z" + "x" * 999
    rank.take_output("err", b"y\xff")
    assert rank.last_line() == "x" * 998 + "y\ufffd"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "running, no heartbeats"), ({"count": 1}, "running"), ({"count": 1, "step": 0}, "running, step 0"),
        ({"count": 2, "step": 7, "beat_at": 98.5}, "running, step 7, last heartbeat 1.5 s ago"),
        ({"leaving": True}, "leaving, no heartbeats"), ({"state": "T"}, "stopped, no heartbeats"),
        ({"state": "T", "traced": True}, "in a debugger, no heartbeats"),
        ({"connected": False, "traced": True}, "lost"),
        ({"exit": Exit(code=137, signal=9), "connected": False}, "ended with SIGKILL"),
        ({"exit": Exit(code=3, signal=0), "count": 1, "step": 2}, "ended with exit code 3, step 2"),
    ],
)  # fmt: skip
def test_what_a_rank_is_doing(changes, words):
    one = Rank(0, "a", None)
    for name, value in changes.items():
        setattr(one, name, value)
    assert one.activity(100.0) == words


def test_nobody_was_silent_while_the_launcher_slept():
    one = Rank(0, "a", None, heard_at=10.0)
    one.forgive(2.5)
    assert (one.heard_at, one.beat_at, one.stopped_since) == (12.5, None, None)
    one.beat_at, one.stopped_since = 9.0, 0.0
    one.forgive(4.0)
    assert (one.heard_at, one.beat_at, one.stopped_since) == (16.5, 13.0, 4.0)


@pytest.mark.parametrize("gap", [0, 1])
def test_an_abort_that_mpich_delays_is_seen_across_pieces_of_output(monkeypatch, gap):
    """Of what came before, the last hundred bytes are looked at with the new ones."""
    words = b"Abort(7) on node 1 (rank 1 in comm 0): application called MPI_Abort"
    one = Rank(1, "a", None)
    monkeypatch.setattr(ranks.time, "monotonic", lambda: 5.0)
    monkeypatch.setattr(ranks, "_ABORT_DELAYED", re.escape(words))
    one.take_output("err", words[:10] + b"x" * gap)
    one.take_output("err", words[10:])
    assert one.aborting_at == (None if gap else 5.0) and one.written == len(words) + gap
    far = Rank(1, "a", None)
    monkeypatch.setattr(ranks, "_ABORT_DELAYED", b"^y{%d}x$" % (99 + gap))
    far.take_output("err", b"z" * 10 + b"y" * (99 + gap))
    far.take_output("out", b"x")
    assert far.aborting_at is None
    far.take_output("err", b"x")
    assert far.aborting_at == (None if not gap else 5.0)


def test_what_a_rank_has_told_last_of_a_kind():
    one = Rank(1, "a", None)
    assert one.told("world") is None and not one.left_without_finalize
    one.events = [{"event": "world", "size": 1}, {"event": "world", "size": 2}, {"event": "thread"}]
    assert one.told("world") == {"event": "world", "size": 2} and one.told("leaving") is None
    for end, left in (
        (None, False), (Exit(code=0, signal=0), True), (Exit(code=3, signal=0), False),
        (Exit(code=0, signal=0, ours=True), False),
    ):  # fmt: skip
        one.exit = end
        assert one.left_without_finalize is left
    one.exit, one.events = Exit(code=0, signal=0), [{"event": "world"}, {"event": "leaving"}]
    assert not one.left_without_finalize
    one.events = [{"event": "leaving"}]
    assert not one.left_without_finalize
