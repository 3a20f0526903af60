"""What the judge of a channel keeps of the ranks' words, whom it asks for what, and when it looks again."""

from __future__ import annotations

import math

import pytest

from dbrdist.comm.failure import judge as judges
from dbrdist.comm.failure.deadlock import Wait, WaitState
from dbrdist.comm.failure.judge import DeadlockJudge
from tests.each import each


class Channel:
    """Keeps what is told."""

    judge = 0

    def __init__(self, num=4):
        self.members, self.told = tuple(range(num)), []

    def tell(self, rank, words):
        self.told.append((rank, words))

    def tell_each(self, ranks, words):
        self.told.append((tuple(ranks), words))


def recv(other, wait_id=1, tag=0):
    return Wait(wait_id, "c", "recv", 1, "recv", [other], tag, "here", 3.0)


def row(*members, number=5, wait_id=1):
    return Wait(wait_id, "c", "barrier", number, "row", list(members), -1, "here", 3.0)


def waits(rank, *found, counts=None):
    return WaitState(rank, False, waits=list(found), counts=dict(counts or {}))


LEFT = WaitState(3, False, True, counts={("c",): 4})


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(judges.time, "monotonic", lambda: now[0])
    return now


def made(*states):
    judge = DeadlockJudge(Channel())
    for state in states:
        judge.hear(state, is_answer=False)
    return judge


@each(has_left=[False, True])
def test_a_rank_that_has_left_says_nothing_new(has_left):
    first = LEFT if has_left else waits(3, recv(0))
    judge, again = made(first), waits(3, recv(1))
    judge._has_news = False
    judge.hear(again, is_answer=False)
    assert judge._states[3] is (first if has_left else again) and judge._has_news is not has_left
    judge._has_news = False
    judge.hear_that_it_goes_on(3)
    assert (3 in judge._states) is has_left and judge._has_news is not has_left
    judge._has_news = False
    judge.hear_that_it_goes_on(2)  # of whom nothing is known
    assert not judge._has_news


def test_an_answer_counts_where_somebody_asked_and_adds_its_counts():
    judge = made(waits(0, recv(1), counts={("c",): 1}), waits(1, recv(0)))
    answer = waits(0, recv(1), counts={("c", "recv", 1, 0): 7})
    judge.hear(answer, is_answer=True)
    assert judge._answers == {} and judge._states[0].counts == {("c",): 1}
    judge.look()
    judge.hear(answer, is_answer=True)
    judge.hear(waits(2, counts={("c",): 9}), is_answer=True)  # of whom nothing was known
    assert judge._answers[0] is answer and set(judge._answers) == {0, 2} and 2 not in judge._states
    assert judge._states[0].counts == {("c",): 1, ("c", "recv", 1, 0): 7}


def test_all_who_are_there_are_asked_and_for_messages_with_what_they_count(clock):
    """Of those that have left the ones whose messages are waited for: they listen until all have come to the exit."""
    judge = made(waits(0, recv(3), row(0, 1, wait_id=2)), waits(1, recv(0, tag=4)), LEFT)
    assert judge.look() is None
    assert judge.channel.told == [
        ((1, 2), {"what": "ask"}), (0, {"what": "ask", "keys": [("c", "send", 1, 4)]}),
        (3, {"what": "ask", "keys": [("c", "send", 0, 0)]}),
    ]  # fmt: skip
    assert judge._asked == {0: {1, 2}, 1: {1}, 3: set()} and judge._num_asked == 4 and judge._asked_at == 100.0
    assert judge.look() is None and len(judge.channel.told) == 3  # nobody is asked again meanwhile
    quiet = made(waits(0, recv(1)))
    assert quiet.look() is None and quiet.channel.told == [] and quiet._asked == {}


def test_a_verdict_needs_all_answers_or_a_second(clock):
    states = [waits(0, recv(1)), waits(1, recv(0))]
    for others, wait in (((2, 3), 0.0), ((), 1.0)):
        judge = made(*states)
        assert judge.look() is None
        for state in (*states, *(WaitState(rank, True) for rank in others)):
            assert judge.look() is None
            judge.hear(state, is_answer=True)
        began = clock[0]
        clock[0] = began + wait - 2.0**-10
        assert (judge.look() is None) == bool(wait)
        if wait:
            clock[0] = began + wait
            text, whom = judge.look()
            assert whom == {0: {1}, 1: {1}} and text.startswith("the ranks wait for each other, and none can continue")
            assert judge._states == {} and judge._has_news


def test_a_rank_that_went_on_is_forgotten(clock):
    judge = made(waits(0, recv(1)), waits(1, recv(0)))
    judge.look()
    for state in (waits(0, recv(1, wait_id=9)), waits(1, recv(0)), WaitState(2, True), WaitState(3, True)):
        judge.hear(state, is_answer=True)
    judge._has_news = False
    assert judge.look() is None and set(judge._states) == {1} and judge._asked == {} and judge._has_news


def test_pauses_between_looks_at_ranks_that_were_not_stuck_double_up_to_a_minute(clock):
    judge = made(waits(0, recv(1)), waits(1, recv(0)))
    pauses = []
    for _ in range(8):
        assert judge.look() is None and set(judge._asked) == {0, 1}
        for rank in range(4):  # a thread of theirs is busy just then
            judge.hear(WaitState(rank, True, waits=[recv(1 - rank)] if rank < 2 else []), is_answer=True)
        assert judge.look() is None and judge._asked == {}
        pauses.append(judge._looks_again_at - clock[0])
        clock[0] = judge._looks_again_at
        asked = len(judge.channel.told)
        assert judge.look() is None and len(judge.channel.told) == asked
        clock[0] += 2.0**-10
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    judge.hear(WaitState(2, True), is_answer=False)  # news: it begins with a second again
    judge.look()
    assert judge._pause_seconds == 1.0 and judge._looks_again_at == math.inf and not judge._has_news


def test_waits_of_other_threads_are_judged_by_themselves(clock):
    lost, alive = row(0, 3), recv(2, wait_id=2)
    counts = {("c",): 5}
    judge = made(waits(0, lost, alive, counts=counts), LEFT)
    assert judge.look() is None and judge._asked == {0: {1}}
    for state in (waits(0, lost, alive, counts=counts), WaitState(1, True), WaitState(2, True)):
        judge.hear(state, is_answer=True)
    clock[0] += 1.0
    text, whom = judge.look()
    assert text.startswith("rank 3 has left, but rank 0 has waited 3 s for rank 3 in barrier (here)") and whom == {
        0: {1}
    }
    assert judge._states[0].waits == [alive]
    late = waits(1, row(0, 1, 3), counts=counts)
    assert judge._verdict_on({1: late, 3: LEFT}, {1: {3}}) == text  # of the same meeting
    other = waits(1, row(0, 1, 3, number=6), counts=counts)
    assert judge._verdict_on({1: other, 3: LEFT}, {1: {3}}) != text
