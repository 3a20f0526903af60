"""Ranks whose beats have stopped: which one holds the others up, by the stacks of all."""

from __future__ import annotations

import linecache
import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from ... import codes, limits
from ...rank.stacks import IN_LOOP
from .ranks import Rank
from .report import Failure, innermost

# Patterns are compiled at their first use, which most jobs never see: all of them take 4 % of a launcher's start.
# Calls that wait for other ranks: of MPI, by mpi4py's two spellings, and of the libraries above it.
_VERBS = (
    "I?all_?reduce I?reduce(_scatter(_block|_tensor|_base)?)? I?bcast(_data|_obj)? broadcast(_object_list)? I?barrier "
    "monitored_barrier I?(all_?)?gather(v|_obj|_object|_into_tensor|_base)? I?scatter(v|_dataset|_object_list)? "
    "I?all_?to_?all(v|w|_single)? I?exscan I?[sbr]?send(_obj)? I?m?recv(_obj)? sendrecv(_replace)? I?m?probe "
    "finali[sz]e wait(all|any|some)? synchronize fence multi_node_mean(_grad)? all_?reduce_(grad|coalesced) "
    "Neighbor_(all_?gather|all_?to_?all)[vw]?"
)
_CALL = r"(?i)(?<!\w)(?P<owner>[\w\])]+\.)?(?P<verb>" + "|".join(_VERBS.split()) + r")\s*\("
_ANY_CALL = r"(?<!\w)(?P<owner>[\w\])]+\.)?(?P<verb>\w+)\s*\("
_HARMLESS = ("sleep", "open", "read", "write", "print", "range", "len", "while", "if")
_EXACT = r"\.(I?Scan|Spawn(_multiple)?|Disconnect|Accept|Connect|Complete)\("
# Of other things than ranks: processes, threads, sockets, arrays.
_OTHERS = (
    r"(?i)sock|conn|queue|proc|popen|thread|pipe|child|client|server|future|executor|pool|http|redis|zmq|asyncio"
    r"|^(os|s|q|signal|select|functools|operator|np|numpy|xp|cp|cupy|torch|tf)\.$"
)
_BARE = r"(?i)^(wait|send|recv|reduce|gather|scatter|probe|broadcast|finali[sz]e)$"
_FUNCTIONS = r"(?i)^(all_?reduce|all_?gather|all_?to_?all|bcast|broadcast|barrier|reduce_scatter)\w*$"
_PACKAGES = r"[/\\](mpi4py|horovod|chainermn|deepspeed[/\\]comm|torch[/\\]distributed|dbrdist[/\\]comm)[/\\]"
_STDLIB = (
    r"[/\\]lib(64)?[/\\]python\d[\d.]*t?[/\\](?!site-packages|dist-packages)|^<frozen"
    r"|^(threading|queue|_base|thread|selectors|socket|ssl|subprocess|connection|synchronize|queues|popen_\w+)\.py$"
)
_WAITS_FOR_A_THREAD = r"[/\\]?(threading|queue|_base|thread|connection|selectors|synchronize|queues)\.py$"
_FRAME = (
    r'(?m)^ *(File "(?P<file>.+)", line (?P<line>\d+),? in (?P<name>.+)|'
    r"(?P<spied>\S.*) \((?P<short>[^()]+):(?P<at>\d+)\))$"
)
_THREAD = r"(?m)^(Current thread|Thread) .*$"
_DEBUGGER = r'(?m)^  File ".*[/\\](pdb|bdb|pudb|ipdb|debugpy|pydevd)\b.*", line'


class Frame(NamedTuple):
    """One call of a stack."""

    file: str
    line: str
    name: str


def late_ranks(ranks: list[Rank], now: float, heartbeat_seconds: float) -> list[int]:
    """The running ranks that had begun to beat and whose next beat is overdue; none while one is in a debugger.

    A supervisor that is silent itself (stopped with its rank, on a host that is) cannot tell of a beat.
    """
    if any(rank.running and rank.traced for rank in ranks):
        return []
    return [
        r.rank
        for r in ranks
        if r.running and r.beat_at is not None and not r.paused and now - r.beat_at > heartbeat_seconds
        and now - r.heard_at < limits.DOUBT_SECONDS
    ]  # fmt: skip


def in_debugger(ranks: list[Rank]) -> list[int]:
    """The ranks whose stacks say that somebody looks at them."""
    return [rank.rank for rank in ranks if rank.running and rank.stacks and re.search(_DEBUGGER, rank.stacks)]


def threads(stacks: str | None) -> list[list[Frame]]:
    """The frames of each thread, the innermost first; the main thread first, which both tools write last or mark."""
    text = stacks or ""
    starts = [match.start() for match in re.finditer(_THREAD, text)]
    found: list[list[Frame]] = []
    marked: list[list[Frame]] = []
    for begin, end in zip(starts, [*starts[1:], len(text)]):
        part = text[begin:end]
        head, _, body = part.partition("\n")
        frames = [
            Frame(m["file"] or m["short"], m["line"] or m["at"], m["name"] or m["spied"])
            for m in re.finditer(_FRAME, body)
        ]
        if frames:
            is_main = head.startswith("Current thread") or "MainThread" in head
            (marked if is_main else found).append(frames)
    return [*marked, *reversed(found)]


def waits(rank: Rank) -> bool | None:
    """Whether a rank waits for others, by the stacks of its threads; None where these are not known.

    A main thread that waits for another thread of its process (a lock, a queue) waits for what that one waits for.
    """
    stacks = threads(rank.stacks)
    if not stacks:
        return None
    main, *others = stacks
    if _communicates(main, rank.sources):
        return True
    if not re.search(_WAITS_FOR_A_THREAD, main[0].file):
        return False
    if any(_communicates(frames, rank.sources) for frames in others):
        return True
    return None if any(_runs_without_frames(frames) for frames in others) else False


def _runs_without_frames(frames: list[Frame]) -> bool:
    """Whether a thread runs a function that is not written in Python, and that no frame shows: `Thread(target=f)`."""
    file, _, name = frames[0]
    return name == "run" and bool(re.search(r"(^|[/\\])(threading|thread)\.py$", file))


def _communicates(frames: list[Frame], sources: Mapping[str, str]) -> bool:
    """Whether a thread stands in a call that waits for other ranks: its own, or below a package of such calls."""
    own = next((frame for frame in frames if not re.search(_STDLIB, frame.file)), None)
    if own is None:
        return False
    if re.search(_PACKAGES, own.file.replace("\\", "/")) or any(re.search(_PACKAGES, f.file) for f in frames[:6]):
        return True
    if own is not frames[0]:
        return False  # it has called something of Python's own library: a lock, a queue, a socket, a sleep
    line, _, asked = _line(own, sources).partition(IN_LOOP)
    if asked:
        return not re.search(_OTHERS, asked)
    if re.match(_FUNCTIONS, own.name) and (
        not line or any(_may_be_of_ranks(match) for match in re.finditer(_ANY_CALL, line))
    ):
        return True
    return bool(re.search(_EXACT, line)) or any(_is_of_ranks(match) for match in re.finditer(_CALL, line))


def _line(frame: Frame, sources: Mapping[str, str]) -> str:
    """The source line of a frame: as its rank has read it, else as it stands here."""
    return sources.get(f"{frame.file}:{frame.line}") or linecache.getline(frame.file, int(frame.line))


def _may_be_of_ranks(call: re.Match[str]) -> bool:
    """Of a call in a function like `allreduce_flat`: one of a library that is not known, but not a sleep or a file."""
    return call["verb"] not in _HARMLESS and not (call["owner"] and re.search(_OTHERS, call["owner"]))


def _is_of_ranks(call: re.Match[str]) -> bool:
    owner, verb = call["owner"], call["verb"]
    if owner is None:
        return not re.match(_BARE, verb)
    return not re.search(_OTHERS, owner)


def suspected(ranks: list[Rank], late: list[int], now: float, heartbeat_seconds: float) -> list[Rank]:
    """Ranks that are not late, and that all late ones wait for: whether they are stuck shows when they are late too."""
    if any(r.exit is not None or r.leaving or r.state == "T" for r in ranks):
        return []
    others = [r for r in ranks if r.running and r.rank not in late and r.beat_at is not None and not r.paused]
    if any(waits(rank) is not True for rank in ranks if rank.rank in late):
        return []
    return [rank for rank in others if waits(rank) is False]


def blame(ranks: list[Rank], late: list[int], now: float) -> Failure:
    """Choose the rank that the others wait for, and say by which sign."""
    by_number = {rank.rank: rank for rank in ranks}
    number, why = _choose(by_number, late)
    rank = by_number[number]
    stopped = rank.state == "T" and rank.running
    frame = innermost(rank.stacks)
    if stopped:
        what = "the process is stopped (SIGSTOP)"
    elif rank.exit is not None:
        what = f"ended with exit code {rank.exit.code} while the others are still running"
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
    early = [r.rank for r in ranks.values() if r.exit is not None or r.leaving]
    # A rank whose stack could not be read is unknown: it counts neither as one that waits nor as one that works.
    running = [number for number in ranks if ranks[number].running and not ranks[number].leaving]
    found = {number: waits(ranks[number]) for number in running}
    busy = [number for number in running if found[number] is False]
    waiting = [number for number in running if found[number]]
    unread = [number for number in running if found[number] is None]
    others = "the others whose stacks could be read" if unread else "the others"
    if waiting:
        for group in ([number for number in busy if number in late], [] if early else busy):
            if group:
                return _furthest(ranks, group), f"{others} wait in a communication call, this rank does not"
    if early:
        return min(early), "the others wait for a rank that has left"
    is_shown = all(threads(ranks[number].stacks) for number in unread)  # one that could not be read may be anywhere
    if unread and is_shown and not waiting and any(number in late for number in busy):
        why = "the stacks of the others do not show what they wait for"
        return _furthest(ranks, [number for number in busy if number in late]), why
    if len(late) == 1 and (len(running) == 1 or not waiting):  # one that works while others wait is known by now
        return late[0], "no other rank's heartbeat is overdue"
    if len({ranks[number].step for number in late}) > 1:
        return min(late, key=lambda number: (ranks[number].step, number)), "it is the furthest behind"
    if waiting and unread:
        oldest = _oldest(ranks, unread)
        lack = "does not show what it waits for" if threads(ranks[oldest].stacks) else "could not be read"
        return oldest, f"its stack {lack}, and the other stacks show ranks that wait in a communication call"
    return _odd_one(ranks, late, running, others)


def _odd_one(ranks: dict[int, Rank], late: list[int], running: list[int], others: str) -> tuple[int, str]:
    """All wait, or all work: the one that stands elsewhere, or the one that is silent for the longest time."""
    places = {number: frame for number in running if (frame := innermost(ranks[number].stacks))}
    counts = Counter(places.values())
    if len(counts) > 1:
        rarest = min(counts.values())
        odd = [number for number, frame in places.items() if counts[frame] == rarest]
        if rarest * 2 < len(places):
            return min(odd), f"it is in a different place from {others}"
    clue = "the stacks give no further clue" if places else "no stack could be read"
    return _oldest(ranks, late), f"its last heartbeat is the oldest; {clue}"


def _furthest(ranks: dict[int, Rank], among: list[int]) -> int:
    """The rank of the lowest step; of several, the one whose last beat is the longest ago."""
    return min(among, key=lambda number: (ranks[number].step, ranks[number].beat_at or 0.0, number))


def _oldest(ranks: dict[int, Rank], among: list[int]) -> int:
    """The rank whose last beat is the longest ago."""
    return min(among, key=lambda number: (ranks[number].beat_at or 0.0, number))
