"""Ranks whose beats have stopped: which one holds the others up."""

from __future__ import annotations

import re
from collections import Counter

from .. import codes
from .ranks import Rank
from .report import Failure, innermost

# A frame that waits for other ranks: names of MPI calls and of the verbs of common libraries.
_WAITING = (
    r"(?i)(all)?reduce|bcast|broadcast|barrier|gather|scatter|alltoall|recv|\bsend|wait|probe|finali[sz]e"
    r"|synchroni[sz]e"
)
_DEBUGGER = r'(?m)^  File ".*[/\\](pdb|bdb|pudb|ipdb|debugpy|pydevd)\b.*", line'


def late_ranks(ranks: list[Rank], now: float, heartbeat_seconds: float) -> list[int]:
    """The running ranks that had begun to beat and whose next beat is overdue; none while one is in a debugger."""
    if any(rank.running and rank.traced for rank in ranks):
        return []
    return [
        r.rank
        for r in ranks
        if r.running and r.beat_at is not None and not r.paused and now - r.beat_at > heartbeat_seconds
    ]


def in_debugger(ranks: list[Rank]) -> list[int]:
    """The ranks whose stacks say that somebody looks at them."""
    return [rank.rank for rank in ranks if rank.running and rank.stacks and re.search(_DEBUGGER, rank.stacks)]


def blame(ranks: list[Rank], late: list[int], now: float) -> Failure:
    """Choose among the late ranks the one that the others wait for, and say by which sign."""
    by_number = {rank.rank: rank for rank in ranks}
    number, why = _choose(by_number, late)
    rank = by_number[number]
    stopped = rank.state == "T" and rank.running
    frame = innermost(rank.stacks)
    if stopped:
        what = "the process is stopped (SIGSTOP)"
    elif rank.exit is not None:
        what = f"ended with exit code {rank.exit['code']} while the others are still running"
    else:
        what = f"no heartbeat for {now - rank.beat_at:.1f} s" if rank.beat_at is not None else "no heartbeat"
    if frame and not stopped:
        what += f"; in {frame[2]} at {frame[0]}:{frame[1]}"
    for kind in ("exception", "thread", "worker"):
        event = rank.told(kind)
        if event is not None:
            why += f"; before that it reported: {event['message']}"
    failure = Failure("stopped" if stopped else "stalled", number, rank.host, codes.STALLED, f"{what}; {why}")
    failure.signal = "SIGSTOP" if stopped else None
    return failure


def _choose(ranks: dict[int, Rank], late: list[int]) -> tuple[int, str]:
    stopped = [number for number in sorted(ranks) if ranks[number].state == "T" and ranks[number].running]
    if stopped:
        return stopped[0], "a stopped process makes no progress"
    steps = {number: ranks[number].step for number in late}
    early = [r.rank for r in ranks.values() if r.exit is not None or r.leaving]
    if early:
        return min(early), "the others wait for a rank that has left"
    if len(late) == 1:
        return late[0], "no other rank's heartbeat is overdue"
    # A rank whose stack could not be read is unknown: it counts neither as one that waits nor as one that works.
    found = {number: innermost(ranks[number].stacks) for number in late}
    frames = {number: frame for number, frame in found.items() if frame}
    unread = [number for number in late if number not in frames]
    busy = [number for number in frames if not waits(frames[number])]
    others = "the others whose stacks could be read" if unread else "the others"
    if busy and len(busy) < len(frames):
        return min(busy), f"{others} wait in a communication call, this rank does not"
    if len(set(steps.values())) > 1:
        lowest = min(late, key=lambda number: (steps[number], number))
        return lowest, "it is the furthest behind"
    if frames and unread and not busy:
        why = "its stack could not be read, and the other stacks show ranks that wait in a communication call"
        return _oldest(ranks, unread), why
    counts = Counter(frames.values())
    if len(counts) > 1:
        rarest = min(counts.values())
        odd = [number for number, frame in frames.items() if counts[frame] == rarest]
        if rarest * 2 < len(frames):
            return min(odd), f"it is in a different place from {others}"
    clue = "the stacks give no further clue" if frames else "no stack could be read"
    return _oldest(ranks, late), f"its last heartbeat is the oldest; {clue}"


def _oldest(ranks: dict[int, Rank], among: list[int]) -> int:
    """The rank whose last beat is the longest ago."""
    return min(among, key=lambda number: (ranks[number].beat_at or 0.0, number))


def waits(frame: tuple[str, str, str] | None) -> bool:
    """Whether a frame stands in a call that waits for other ranks, by its function's name or its source line."""
    if frame is None:
        return False
    import linecache

    return bool(re.search(_WAITING, frame[2]) or re.search(_WAITING, linecache.getline(frame[0], int(frame[1]))))
