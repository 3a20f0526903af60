"""Tests of dbrdist.comm.communicators.world."""

from types import SimpleNamespace

import pytest

from dbrdist.comm.communicators import world
from dbrdist.comm.communicators.world import ThreadJob, World
from dbrdist.comm.transport.call_log import Call, CallLog
from dbrdist.errors import CommunicatorError
from tests.each import each


class Changed:
    """A condition that counts who is woken; a wait does ``then`` and is as long as given."""

    def __init__(self, then=lambda: None, was_woken=True):
        self.woken, self.waits, self.then, self.was_woken = 0, [], then, was_woken

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    def notify_all(self):
        self.woken += 1

    def wait(self, seconds):
        self.waits.append(seconds)
        self.then()
        return self.was_woken


def call_of(record=None):
    return Call(record or CallLog(), "recv", "threads", (0, 1))


def test_what_wakes_the_threads_that_wait():
    job = ThreadJob(2)
    changed = job.changed = Changed()
    both = World(job, "threads", (0, 1))
    both.show(1, 1, "b")
    assert changed.woken == 0 and not both.is_complete(1)
    both.show(1, 0, "a")
    assert changed.woken == 1 and both.is_complete(1)
    assert both.see(call_of(), 1) == ["a", "b"] and both.is_complete(1)
    assert both.see(call_of(), 1) == ["a", "b"]
    assert both._meetings == both._readers == {}
    both.put(call_of(), (0, 1, 7), "first", False)
    both.put(call_of(), (0, 1, 7), "second", False)
    assert changed.woken == 3
    assert [both.take(call_of(), (0, 1, 7)) for _ in range(2)] == ["first", "second"]
    assert changed.woken == 5 and both._mail == {}
    job.leave(1)
    assert job.left == {1} and changed.woken == 6
    job.fail("first reason")
    job.fail("second")
    assert job.failure == "first reason" and changed.woken == 8 and changed.waits == []
    for verb in (lambda: both.put(call_of(), (0, 1, 7), 1, False), lambda: both.take(call_of(), (0, 1, 8))):
        with pytest.raises(CommunicatorError, match="this rank cannot continue: first reason"):
            verb()


def test_a_long_message_waits_until_it_is_taken():
    job, call = ThreadJob(2), call_of()
    both = World(job, "threads", (0, 1))
    seen = []

    def take():
        seen.append(call.is_waiting)
        if len(seen) == 2:
            both.take(call_of(), (0, 1, 3))

    changed = job.changed = Changed(take)
    both.put(call, (0, 1, 3), "long", True)
    assert seen == [True, True] and not call.is_waiting and changed.waits == [world._LOOK_SECONDS] * 2


@each(**{"since, was_woken, looks": [(10.0, False, True), (9.0, False, False), (8.99, False, True),
                                     (10.0, True, False)]})  # fmt: skip
def test_a_rank_that_has_waited_for_long_looks_for_the_others(monkeypatch, since, was_woken, looks):
    """Since second 10 - since; it looks once it was not woken, and the patience of one second is over."""
    job, call, seen = ThreadJob(2), call_of(), []
    call.since = 10.0 - since if since == 10.0 else since
    monkeypatch.setattr(world, "time", SimpleNamespace(monotonic=lambda: 10.0))
    monkeypatch.setattr(job, "_look", lambda: seen.append(1))
    ends = iter([False, True])
    job.changed = Changed(was_woken=was_woken)
    job.wait(call, lambda: next(ends))
    assert seen == [1] * looks


def test_stuck_threads_are_woken_and_told(monkeypatch):
    job = ThreadJob(2)
    changed = job.changed = Changed()
    monkeypatch.setattr(world.deadlock, "stuck", lambda states: {})
    job._look()
    assert (job.failure, changed.woken) == ("", 0)
    monkeypatch.setattr(world.deadlock, "stuck", lambda states: {0: {1}})
    monkeypatch.setattr(world.deadlock, "describe", lambda states, waiting: f"{sorted(states)} {waiting}")
    job._look()
    assert (job.failure, changed.woken) == ("[0, 1] {0: {1}}", 1)
