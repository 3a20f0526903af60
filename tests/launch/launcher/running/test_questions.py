"""Who asks for stacks or for what ranks do, and when the answer comes."""

from types import SimpleNamespace

import pytest
from clocks import STEP, Clock
from clocks import Channel as Kept
from dbrdist_launch import limits
from dbrdist_launch.launcher.judgement.ranks import Rank
from dbrdist_launch.launcher.running import questions
from dbrdist_launch.launcher.running.questions import Questions
from dbrdist_launch.messages import Exit


class Asker(Kept):
    """The channel of who asks."""

    def __init__(self):
        super().__init__()
        self.set = []
        self.socket = SimpleNamespace(setblocking=self.set.append, settimeout=self.set.append)


@pytest.fixture
def asked(monkeypatch):
    clock = Clock(monkeypatch)
    ranks = {number: Rank(number, "ab"[number % 2], Kept(), number % 2) for number in (2, 0, 1)}
    ranks[1].exit = Exit(code=3, signal=0, ours=False)
    said, stops = [], []
    one = Questions(ranks, said.append, lambda: stops.append(1))
    one.clock, one.said, one.stops = clock, said, stops
    return one


def test_stacks_are_sent_to_those_who_asked_once_all_have_come(asked):
    first, second = Asker(), Asker()
    asked.ranks[0].stacks = "old"
    asked.hear(first, "stacks", 1.0)
    asked.hear(second, "stacks", 1.0)
    assert [asked.ranks[k].channel.kinds() for k in range(3)] == [["ask-stacks"] * 2, [], ["ask-stacks"] * 2]
    assert asked.ranks[0].stacks is None and asked.shown_at == asked.clock.now + limits.STACKS_SECONDS
    asked.ranks[0].stacks = " File x\n\n"
    assert not asked.have_stacks()
    asked.look(asked.shown_at - STEP)
    assert first.sent == [] and asked.shown_at is not None
    asked.ranks[2].stacks = ""
    asked.look(asked.clock.now)
    text = (
        f"rank 0 on a, running, no heartbeats:\n File x\nrank 1 on b, ended with exit code 3:\n{questions._NONE}\n"
        f"rank 2 on a, running, no heartbeats:\n{questions._NONE}"
    )
    assert first.sent == [("answer", {"data": text.encode()})] == second.sent and first.set == [True, 1.0]
    assert first.is_closed and second.is_closed and asked.curious == [] and asked.said == []
    assert asked.shown_at is None and asked.ranks[0].stacks is None
    asked.look(asked.clock.now + 99.0)
    assert asked.said == []


def test_stacks_are_printed_where_nobody_asked_or_when_their_time_is_over(asked):
    asked.show_stacks()
    until = asked.shown_at
    asked.look(until - STEP)
    assert asked.said == []
    asked.look(until)
    (text,) = asked.said
    assert text.count(questions._NONE) == 3 and text.startswith("rank 0 on a, ")


def test_what_ranks_do_is_answered_at_once_and_a_stop_is_passed_on(asked):
    first, second = Asker(), Asker()
    asked.hear(first, "stop", 1.0)
    assert first.sent == [("answer", {"data": b"asked to save and stop"})] and first.is_closed and asked.stops == [1]
    asked.ranks[0].tails["out"] = b"x" * 300
    asked.hear(second, "state", 12.4)
    ((kind, fields),) = second.sent
    lines = fields["data"].decode().splitlines()
    assert kind == "answer" and lines[0] == "--- 3 ranks, 12 s" and len(lines) == 5 and second.is_closed
    assert max(map(len, lines)) == 199 and asked.stops == [1] and asked.curious == []
    third = Asker()
    questions._answer(third, "é" * limits.MESSAGE_BYTES)
    assert third.sent == [("answer", {"data": "é".encode() * (limits.MESSAGE_BYTES // 2)})]
