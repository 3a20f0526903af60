"""The judge of a channel: collects where ranks wait, asks them once more, and reports a deadlock."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from dbrdist.comm.failure import deadlock
from dbrdist.comm.failure.channel import FailureChannel
from dbrdist.comm.failure.deadlock import WaitState

if TYPE_CHECKING:
    from collections.abc import Hashable

# For the answers of ranks without which the verdict stands, too. They hear it with the others if they answer, and on a
# busy machine a second may pass until then; only a rank that is deep in a call that holds the GIL does not.
_PATIENCE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0  # until ranks that seemed to be stuck, and were not, are asked again


class DeadlockJudge:
    """What the lowest rank of a channel knows of the others."""

    def __init__(self, channel: FailureChannel) -> None:
        self.channel = channel
        self._states: dict[int, WaitState] = {}
        self._asked: dict[int, set[int]] = {}  # rank -> the waits that it is to confirm
        self._answers: dict[int, WaitState] = {}
        self._asked_at = 0.0
        self._num_asked = 0
        self._has_news = False  # since the last look: without any, a look costs nothing
        self._looks_again_at, self._pause_seconds = math.inf, _PATIENCE_SECONDS
        self._said: dict[tuple[str, int], str] = {}  # (communicator, number of the meeting) -> the verdict on it

    def hear(self, state: WaitState, is_answer: bool) -> None:
        """Take what a rank says of itself."""
        known = self._states.get(state.rank)
        if not is_answer and (known is None or not known.has_left):
            self._states[state.rank] = state
            self._has_news = True
        if is_answer and self._asked:
            self._answers[state.rank] = state
            if known is not None:
                known.counts.update(state.counts)  # which it had not been asked for before

    def hear_that_it_goes_on(self, rank: int) -> None:
        """The waits that a rank has told of are over."""
        known = self._states.get(rank)
        if known is not None and not known.has_left:
            del self._states[rank]
            self._has_news = True

    def look(self) -> tuple[str, dict[int, set[int]]] | None:
        """(the verdict in words, whom it is for), if there is one."""
        if not self._asked:
            if self._has_news or time.monotonic() > self._looks_again_at:
                self._pause_seconds = _PATIENCE_SECONDS if self._has_news else 2 * self._pause_seconds
                self._has_news, self._looks_again_at = False, math.inf
                states = deadlock.without_hope(self._states)
                self._ask({rank: states[rank].wait_ids() for rank in deadlock.stuck(states)})
            return None
        is_early = time.monotonic() - self._asked_at < _PATIENCE_SECONDS and len(self._answers) < self._num_asked
        if is_early or not self._asked.keys() <= self._answers.keys():
            return None
        asked, self._asked = self._asked, {}
        gone_on = [rank for rank, ids in asked.items() if not ids <= self._answers[rank].wait_ids()]
        if gone_on:
            self._forget(gone_on)
            self._has_news = True
            return None
        whole = {**self._answers, **{rank: state for rank, state in self._states.items() if state.has_left}}
        states = deadlock.without_hope(whole)
        asked = {rank: ids for rank, ids in asked.items() if not states[rank].has_left}
        core = deadlock.stuck({rank: state for rank, state in states.items() if rank in asked or state.has_left})
        if not core:  # a thread of theirs may have been busy just then
            self._looks_again_at = time.monotonic() + min(self._pause_seconds, _LONGEST_PAUSE_SECONDS)
            return None
        self._has_news = True  # there may be others
        waiting = deadlock.grow(states, core)
        self._forget(waiting)  # judged once
        for rank in waiting:  # but for what other threads wait for
            others = [wait for wait in whole[rank].waits if wait not in states[rank].waits]
            if others:
                self._states[rank] = replace(whole[rank], waits=others)
        text = self._verdict_on(states, waiting)
        return text, {rank: states[rank].wait_ids() for rank in waiting}

    def _verdict_on(self, states: Mapping[int, WaitState], waiting: Mapping[int, set[int]]) -> str:
        """The words; a rank that comes late to a meeting hears those that the others have heard there."""
        waits = [wait for rank in waiting for wait in states[rank].waits if wait.kind in ("row", "bytes")]
        meetings = [(wait.comm_name, wait.number) for wait in waits]
        known = (self._said[meeting] for meeting in meetings if meeting in self._said)
        text = next(known, None) or deadlock.describe(states, waiting)
        self._said |= dict.fromkeys(meetings, text)
        return text

    def _ask(self, waiting: dict[int, set[int]]) -> None:
        """Ask all ranks, so that others who wait for the same ones hear the same verdict.

        ``waiting`` are those that seem to be stuck, and in which waits.
        """
        self._asked = waiting
        self._answers, self._asked_at = {}, time.monotonic()
        if not self._asked:
            return
        left = {rank for rank, state in self._states.items() if state.has_left}
        there = [rank for rank in self.channel.members if rank not in left]
        keys = self._keys_of_messages()
        self._asked |= {rank: set() for rank in left & keys.keys()}  # they listen until all have come to the exit
        self._num_asked = len(there) + len(left & keys.keys())
        self.channel.tell_each([rank for rank in there if rank not in keys], {"what": "ask"})
        for rank in [*(rank for rank in there if rank in keys), *sorted(left & keys.keys())]:
            self.channel.tell(rank, {"what": "ask", "keys": keys[rank]})

    def _keys_of_messages(self) -> dict[int, list[tuple[Hashable, ...]]]:
        """By rank, the counts of messages on which it depends whether the asked ones wait in vain."""
        found: dict[int, list[tuple[Hashable, ...]]] = {}
        for rank in self._asked:
            for wait in self._states[rank].waits:
                if not wait.is_meeting():
                    for other, keys in wait.keys(rank).items():
                        found.setdefault(other, []).extend(keys)
        return found

    def _forget(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._states.pop(rank, None)
