"""The one report of a failed job: first cause, and what everybody was doing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ... import codes, limits
from ...codes import describe_end
from ...messages import Exit
from .ranks import Rank, Told

_ABORT_MPICH = r"Abort\((?P<code>-?\d+)\) on node (?P<rank>\d+) "
_ABORT_OPENMPI = r"(?s)MPI_ABORT was invoked on rank (?P<rank>\d+) in communicator.*?with errorcode (?P<code>-?\d+)"
_STARTS = ("Traceback (most recent call last):", "Exception Group Traceback (most recent call last):")
_FATAL = "Fatal Python error:"
_AFTER = 5  # lines of other origin after a traceback that still is the program's last word
_FRAME = r'(?m)^[\s|+]*File "(?P<file>.+)", line (?P<line>\d+)(?P<comma>,?) in (?P<name>.+)$'
_SPIED = r"(?m)^Thread .*\n +(?P<name>\S.*) \((?P<file>.+):(?P<line>\d+)\)$"  # py-spy's form
_LAST_WORDS = 6
_OURS = "dbrdist-launch: rank "  # what a supervisor that cannot start says to mpiexec
_MOST_OTHERS = 32
_WIDTH = 80  # of a narrow terminal
_OUR_WORDS = ("exit", "stalled", "stopped", "host_lost", "start", "deadline")  # where the message is ours


@dataclass(eq=False, repr=False)
class Failure:
    """The first cause. `rank` is None where no single rank is to blame (mpiexec itself, a start that failed)."""

    kind: str  # exception, exit, signal, oom, thread, stalled, stopped, host_lost, start or deadline
    rank: int | None
    host: str | None
    code: int  # that the launcher returns
    message: str
    signal: str | None = None
    step: int | None = None
    seconds: float = 0.0  # from the start of the attempt
    traceback: str | None = None
    last_words: list[str] = field(default_factory=list)  # of the rank's error output, where there is no traceback
    last_beat_seconds: float | None = None
    ranks_lost: list[int] = field(default_factory=list)  # host_lost: all that ran there
    others: list[dict[str, Any]] = field(default_factory=list)
    may_retry: bool = False  # a start that hung, or failed by chance
    host_trouble: bool = False  # a start that failed since a host is not reachable


class Traceback(NamedTuple):
    """A Python traceback, or faulthandler's stacks, among the last lines of an error output."""

    text: str
    message: str
    fatal: bool  # the interpreter itself died
    last: bool  # nothing of weight was written after it


def last_traceback(lines: list[str]) -> Traceback | None:
    """The last one, wherever on its line it begins (a progress bar may stand there); None without one.

    Lines of other origin between those of the traceback cannot be told apart and stay in the text.
    """
    for at in range(len(lines) - 1, -1, -1):
        if _FATAL in lines[at]:
            line = lines[at][lines[at].index(_FATAL) :]
            return Traceback("\n".join([line, *lines[at + 1 :]]).rstrip(), line.strip(), True, True)
        start = next((start for start in _STARTS if start in lines[at]), None)
        if start is not None:
            begin = lines[at].index(start)
            text = [lines[at][begin:], *(line.removeprefix(" " * begin) for line in lines[at + 1 :])]
            end = _message_at(text)
            after = [line for line in text[end + 1 :] if line.strip() and not re.search(_ABORT_MPICH, line)]
            return Traceback("\n".join(text[: end + 1]), text[end].strip(), False, len(after) <= _AFTER)
    return None


def _message_at(lines: list[str]) -> int:
    """Index of the line `ValueError: text` that closes the traceback beginning at the first line."""
    for at in range(1, len(lines)):
        line = lines[at]
        if line and not line[0].isspace() and not line.startswith(("|", "+")):
            return at
    return len(lines) - 1


def from_exit(rank: Rank) -> Failure:
    """Read the kind of a failure from a rank's end, and its cause from what it told before."""
    end = rank.end or Exit(1, 0)
    code, number = end.code, end.signal
    failure = Failure("exit", rank.rank, rank.host, code or 1, describe_end(code, number))
    if number:
        failure.kind, failure.signal = "signal", codes.signal_name(number)
    found = last_traceback(rank.errors)
    message = _exception(rank, found) if number in (0, 6, 15) else None
    told = rank.told("thread") or rank.told("worker")
    if end.oom:
        failure.kind, failure.message = "oom", end.oom
    elif message is not None:  # MPI_Abort after it ends the rank by its own code or by SIGABRT
        failure.kind, failure.message = "exception", message
        failure.traceback = found.text if found is not None and not found.fatal else None
    elif told is not None:
        return from_event(rank, told)
    elif found is not None and found.fatal:
        failure.traceback = found.text
        failure.message = f"{describe_end(code, number)}: {found.message}"
    return _with_last_words(failure, rank)


def _with_last_words(failure: Failure, rank: Rank) -> Failure:
    """Where there is no traceback: what it said last."""
    if failure.traceback is None:
        failure.last_words = _last_words(rank.errors)
    return failure


def _last_words(lines: list[str]) -> list[str]:
    return [line for line in lines if line.strip()][-_LAST_WORDS:]


def _exception(rank: Rank, found: Traceback | None) -> str | None:
    """The exception that ended the rank's program: as it told itself, else as its last words say."""
    told = rank.told("exception")
    if told is not None and (told.get("own") or (found is not None and found.last)):
        return str(told["message"])
    if found is None or found.fatal or not found.last:
        return None
    hooks = rank.told("hooks")
    aborted = any(re.search(_ABORT_MPICH, line) or "MPI_ABORT" in line for line in rank.errors)
    certain = hooks is None or not hooks.get("own") or aborted
    return found.message if certain else None  # with hooks in place it would have told


def from_event(rank: Rank, event: Told) -> Failure:
    """A failure that the program told of, while its process still lives or has just ended."""
    code = rank.exit.code if rank.exit and rank.exit.code else int(event.get("code") or 1)
    failure = Failure("exception", rank.rank, rank.host, code, event.get("message", ""))
    found = last_traceback(rank.errors)
    if event["event"] == "thread":
        failure.kind, failure.message = "thread", f"thread {event.get('name', '?')}: {failure.message}"
    elif event["event"] == "worker":
        failure.kind = "oom" if event.get("oom") else "thread"
        return failure
    elif event["event"] == "finalizing":
        message = _exception(rank, found)
        if message is not None:
            failure.message = message
        else:
            failure.kind = "exit"
            failure.message = f"exit code {code}; the process then waited for the others in MPI_Finalize"
            return _with_last_words(failure, rank)
    failure.traceback = found.text if found is not None else None
    return failure


def from_leaving(rank: Rank, event: Told) -> Failure:
    """A rank that told with what code it ends, and was killed before that was reported."""
    code, found = int(event["code"]), last_traceback(rank.errors)
    failure = Failure("exit", rank.rank, rank.host, code & 0xFF or 1, describe_end(code & 0xFF or 1, 0))
    message = _exception(rank, found)
    if message is not None:
        failure.kind, failure.message = "exception", message
        failure.traceback = found.text if found is not None and not found.fatal else None
    return _with_last_words(failure, rank)


def from_abort(rank: Rank, code: int) -> Failure:
    """A rank called MPI_Abort, perhaps for an exception that it has printed."""
    failure = Failure("exit", rank.rank, rank.host, code & 0xFF or 1, f"MPI_Abort({code})")
    told, found = rank.told("exception"), last_traceback(rank.errors)
    if found is not None and found.last:
        failure.kind, failure.message, failure.traceback = "exception", found.message, found.text
    if told is not None and told.get("own"):
        failure.kind, failure.message = "exception", str(told["message"])
    if failure.traceback is None:  # what MPICH says from the call on is no news, or of its own end
        calls = (at for at, line in enumerate(rank.errors) if re.search(_ABORT_MPICH, line))
        failure.last_words = _last_words(rank.errors[: next(calls, None)])
    return failure


def from_starter(
    name: str, code: int, signal_number: int, size: int, ranks: dict[int, Rank], lines: list[str]
) -> Failure:
    """mpiexec ended before its ranks reported: a rank aborted the job, or mpiexec itself failed."""
    aborted = find_abort(ranks, lines, code)
    if aborted is not None and aborted[0] in ranks:
        return from_abort(ranks[aborted[0]], aborted[1])
    gone = _first_to_go(ranks, size)
    if gone is not None:
        how = " but without MPI_Finalize" if gone.left_without_finalize else " while the others were still running"
        text = f"ended with exit code 0{how}; {name} then ended the others"
        return _with_last_words(Failure("exit", gone.rank, gone.host, code or 1, text), gone)
    killed = (
        _first_cut(ranks) if codes.from_signal(9) in (code, codes.from_signal(code)) and not signal_number else None
    )
    if killed is not None:
        text = f"its supervisor was killed; {name} then ended the others"
        return Failure("signal", killed.rank, killed.host, codes.from_signal(9), text, "SIGKILL")
    ended = describe_end(code, signal_number)
    said = "\n".join(lines[-20:]) or None
    if len(ranks) < size:
        text = f"{name} ended with {ended} before all ranks had appeared ({len(ranks)} of {size})"
        cause = next((line for line in lines if line.startswith(_OURS)), None)
        if cause is not None:
            text += f"; {cause.removeprefix(_OURS)}"
        # A folder that a dead process left has its id, and the next start another one.
        is_chance = not ranks and code == codes.DAEMON_FAILED
        return Failure("start", None, None, codes.NOT_STARTED, text, traceback=said, may_retry=is_chance)
    failure = Failure("exit", None, None, code or 1, f"{name} ended with {ended} before its ranks did", traceback=said)
    if signal_number:
        failure.kind, failure.signal = "signal", codes.signal_name(signal_number)
    return failure


def _first_to_go(ranks: dict[int, Rank], size: int) -> Rank | None:
    """The rank whose good end made mpiexec end the others: the last that ended by itself, without MPI_Finalize."""
    ends = {rank.rank: rank.exit for rank in ranks.values() if rank.exit is not None and not rank.exit.ours}
    if len(ends) == size:
        return None
    good = [ranks[number] for number, end in ends.items() if not end.code and not end.signal]
    left = [rank for rank in good if rank.left_without_finalize]
    unknown = [rank for rank in good if rank.told("hooks") is None]
    return max(left or unknown, key=lambda rank: rank.left_at or 0.0, default=None)


def _first_cut(ranks: dict[int, Rank]) -> Rank | None:
    """The rank whose outer process ended well before mpiexec killed those of the others."""
    cuts = sorted((rank.cut_at, rank.rank) for rank in ranks.values() if rank.cut_at is not None)
    if not cuts or (len(cuts) > 1 and cuts[1][0] - cuts[0][0] < limits.CUT_SECONDS):
        return None
    return ranks[cuts[0][1]]


def find_abort(ranks: dict[int, Rank], starter_lines: list[str], starter_code: int) -> tuple[int, int] | None:
    """(rank, error code) of the first call of MPI_Abort on the world, as MPICH, Intel MPI or Open MPI print it."""
    lines = [*starter_lines, *(line for rank in ranks.values() for line in rank.errors)]
    found = [match for line in lines if (match := re.search(_ABORT_MPICH, line) or re.search(_ABORT_OPENMPI, line))]
    if found:  # MPICH's own errors, at the loss of a peer say, look alike: what the program called comes first
        match = next((match for match in found if "application called" in match.string), found[0])
        return int(match["rank"]), int(match["code"])
    text = " ".join(lines)  # Open MPI spreads the sentence over two lines
    match = re.search(_ABORT_OPENMPI, text)
    if match:
        return int(match["rank"]), int(match["code"])
    # Under srun Open MPI prints this alone, also where it aborts since a peer is lost.
    delayed = [(rank.aborting_at, rank.rank) for rank in ranks.values() if rank.aborting_at is not None]
    return (min(delayed)[1], starter_code) if delayed and starter_code not in (0, codes.LOST_PEER) else None


def has_called_abort(ranks: dict[int, Rank], starter_lines: list[str]) -> bool:
    """Whether a program is said to have called MPI_Abort itself."""
    lines = [*starter_lines, *(line for rank in ranks.values() for line in rank.errors)]
    return any("application called MPI_Abort" in line or "MPI_ABORT was invoked" in line for line in lines)


def complete(failure: Failure, ranks: list[Rank], now: float, started_at: float, with_stacks: bool) -> None:
    """Fill in times, steps and the others."""
    failure.seconds = round(now - started_at, 3)
    for rank in ranks:
        step = rank.step if rank.step >= 0 else None
        beat = round(max(0.0, now - rank.beat_at), 3) if rank.beat_at is not None else None
        stacks = rank.stacks.rstrip() if rank.stacks else None
        if rank.rank == failure.rank:
            failure.step, failure.last_beat_seconds = step, beat
            if failure.traceback is None:
                failure.traceback = stacks
        else:
            other = {"rank": rank.rank, "host": rank.host, "step": step, "last_beat_seconds": beat}
            other["doing"] = rank.activity(now)
            if with_stacks and stacks:
                other["stacks"] = stacks
            failure.others.append(other)


def innermost(text: str | None) -> tuple[str, str, str] | None:
    """(file, line, function) of the innermost frame: of a traceback, or of the main thread of faulthandler's stacks."""
    frames = list(re.finditer(_FRAME, (text or "").partition("Current thread")[2] or text or ""))
    spied = re.search(_SPIED, text or "")
    if frames:
        found = frames[-1] if frames[-1]["comma"] else frames[0]  # faulthandler, which writes no comma, begins with it
    elif spied is not None:
        found = spied
    else:
        return None
    return found["file"], found["line"], found["name"]


def as_text(failure: Failure, seen: bool = False) -> str:
    """The report for people; where `seen`, what the failed rank wrote is above and is not repeated."""
    where = f"rank {failure.rank} on {failure.host}" if failure.rank is not None else (failure.host or "the job")
    ours = failure.kind in _OUR_WORDS  # one thought a line, for narrow terminals
    message = (failure.message.replace("; ", ";\n") if ours else failure.message).splitlines() or [""]
    trace, frame = failure.traceback or "", innermost(failure.traceback)
    if seen and frame and trace.startswith((*_STARTS, _FATAL)):
        trace = "in {2} at {0}:{1}; see the traceback above".format(*frame)
    lines = [f"dbrdist-launch: {where} failed first ({failure.kind}): {message[0]}"]
    if len(lines[0]) > _WIDTH:
        lines = [lines[0].removesuffix(" " + message[0]), "    " + message[0]]
    if ours or trace.count("\n") < len(message):
        lines += ["    " + line for line in message[1:]]
    lines.append("  " + ", ".join(_facts(failure)))
    if len(failure.ranks_lost) > 1:
        lines.append("  ranks lost with it: " + " ".join(map(str, failure.ranks_lost)))
    lines += ["    " + line for line in trace.splitlines()]
    if failure.last_words:
        lines += ["  its last lines on stderr:", *("    " + line for line in failure.last_words)]
    return "\n".join([*lines, *_others(failure.others)])


def _facts(failure: Failure) -> list[str]:
    """When it was, and how far it had come."""
    facts = [f"{failure.seconds:.1f} s after the start", f"exit code {failure.code}"]
    if failure.step is not None:
        facts.append(f"step {failure.step}")
    if failure.last_beat_seconds is not None:
        facts.append(f"last heartbeat {failure.last_beat_seconds:.1f} s before")
    return facts


def _others(others: list[dict[str, Any]]) -> list[str]:
    """What the other ranks were doing."""
    lines = ["  the other ranks at that time:"] if others else []
    for other in others[:_MOST_OTHERS]:
        lines.append(f"    rank {other['rank']} on {other['host']}: {other['doing']}")
        lines += ["      " + line for line in other.get("stacks", "").splitlines()]
    if len(others) > _MOST_OTHERS:
        lines.append(f"    and {len(others) - _MOST_OTHERS} more (see status.json)")
    return lines
