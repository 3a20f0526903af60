"""The one report of a failed job: first cause, and what everybody was doing."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field

from .. import codes
from .ranks import Rank, describe_end
from .tracebacks import last_traceback

_ABORT_MPICH = re.compile(r"Abort\((?P<code>-?\d+)\) on node (?P<rank>\d+) ")
_ABORT_OPENMPI = re.compile(
    r"MPI_ABORT was invoked on rank (?P<rank>\d+) in communicator.*?with errorcode (?P<code>-?\d+)", re.S
)
KINDS = ("exception", "exit", "signal", "oom", "thread", "stalled", "stopped", "host_lost", "start")


@dataclass
class Failure:
    """The first cause. `rank` is None where no single rank is to blame (mpiexec itself, a start that failed)."""

    kind: str
    rank: int | None
    host: str | None
    code: int  # that the launcher returns
    message: str
    signal: str | None = None
    step: int | None = None
    seconds: float = 0.0  # from the start of the attempt
    traceback: str | None = None
    last_beat_seconds: float | None = None
    ranks_lost: list[int] = field(default_factory=list)  # host_lost: all that ran there
    others: list[dict] = field(default_factory=list)
    may_retry: bool = False  # a start that hung
    host_trouble: bool = False  # a start that failed since a host is not reachable


def from_exit(rank: Rank, message: dict | None = None) -> Failure:
    """Read the kind of a failure from a rank's end."""
    end = {"code": 1, "signal": 0, "oom": None, **(rank.end or {})}
    code, number = end["code"], end["signal"]
    found = last_traceback(list(rank.errors))
    failure = Failure("exit", rank.rank, rank.host, code or 1, describe_end(code, number), traceback=found and found[0])
    if number:
        failure.kind, failure.signal = "signal", codes.signal_name(number)
    if end["oom"]:
        failure.kind, failure.message = "oom", str(end["oom"])
    elif found is not None and not found[1].startswith("Fatal Python error") and number in (0, 6, 15):
        # MPI_Abort after an uncaught exception ends the rank by its own code or by SIGABRT.
        failure.kind, failure.message = "exception", found[1]
    elif found is not None and number:
        failure.message = f"{describe_end(code, number)}: {found[1]}"
    elif code in (codes.COMMAND_NOT_FOUND, codes.COMMAND_NOT_RUNNABLE) and rank.errors:
        failure.message = rank.errors[-1]
    return failure


def from_event(rank: Rank, event: dict) -> Failure:
    """A failure that the program told of, while its process still lives or has just ended."""
    code = rank.exit["code"] if rank.exit and rank.exit["code"] else 1
    found = last_traceback(list(rank.errors))
    failure = Failure("exception", rank.rank, rank.host, code, event.get("message", ""), traceback=found and found[0])
    if event["event"] == "thread":
        failure.kind, failure.message = "thread", f"thread {event.get('name', '?')}: {failure.message}"
    elif event["event"] == "worker":
        failure.kind = "oom" if "out-of-memory" in failure.message or "Out of memory" in failure.message else "thread"
        failure.traceback = None
    elif event["event"] == "leaving":
        failure.kind, failure.code = "exit", int(event["code"]) & 0xFF or 1
        failure.message = f"exit code {failure.code}; the process then waited for the others in MPI_Finalize"
    return failure


def from_starter(
    name: str, code: int, signal_number: int, size: int, ranks: dict[int, Rank], lines: list[str]
) -> Failure:
    """mpiexec ended before its ranks reported: a rank aborted the job, or mpiexec itself failed."""
    aborted = find_abort(ranks, lines, code)
    if aborted is not None and aborted[0] in ranks:
        rank = ranks[aborted[0]]
        found = last_traceback(list(rank.errors))
        failure = Failure("exit", rank.rank, rank.host, aborted[1] & 0xFF or 1, f"MPI_Abort({aborted[1]})")
        if found is not None:
            failure.kind, failure.message, failure.traceback = "exception", found[1], found[0]
        return failure
    ended = describe_end(code, signal_number)
    said = "\n".join(lines[-20:]) or None
    if len(ranks) < size:
        text = f"{name} ended with {ended} before all ranks had appeared ({len(ranks)} of {size})"
        return Failure("start", None, None, codes.NOT_STARTED, text, traceback=said)
    failure = Failure("exit", None, None, code or 1, f"{name} ended with {ended} before its ranks did", traceback=said)
    if signal_number:
        failure.kind, failure.signal = "signal", codes.signal_name(signal_number)
    return failure


def find_abort(ranks: dict[int, Rank], starter_lines: list[str], starter_code: int) -> tuple[int, int] | None:
    """(rank, error code) of the first call of MPI_Abort on the world, as MPICH, Intel MPI or Open MPI print it."""
    lines = [*starter_lines, *(line for rank in ranks.values() for line in rank.errors)]
    for line in lines:
        match = _ABORT_MPICH.search(line) or _ABORT_OPENMPI.search(line)
        if match:
            return int(match["rank"]), int(match["code"])
    text = " ".join(lines)  # Open MPI spreads the sentence over two lines
    match = _ABORT_OPENMPI.search(text)
    if match:
        return int(match["rank"]), int(match["code"])
    # Under srun Open MPI prints this alone, also where it aborts since a peer is lost.
    delayed = [(rank.aborting_at, rank.rank) for rank in ranks.values() if rank.aborting_at is not None]
    return (min(delayed)[1], starter_code) if delayed and starter_code not in (0, codes.LOST_PEER) else None


def complete(failure: Failure, ranks: list[Rank], now: float, started_at: float, with_stacks: bool) -> None:
    """Fill in times, steps and the others."""
    failure.seconds = round(now - started_at, 3)
    for rank in ranks:
        if rank.rank == failure.rank:
            failure.step = rank.step if rank.step >= 0 else None
            failure.last_beat_seconds = round(now - rank.beat_at, 3) if rank.beat_at is not None else None
            if failure.traceback is None and rank.stacks:
                failure.traceback = rank.stacks.rstrip()
        else:
            other = {"rank": rank.rank, "host": rank.host, "step": rank.step if rank.step >= 0 else None}
            other["last_beat_seconds"] = round(now - rank.beat_at, 3) if rank.beat_at is not None else None
            other["doing"] = rank.activity(now)
            if with_stacks and rank.stacks:
                other["stacks"] = rank.stacks.rstrip()
            failure.others.append(other)


def as_text(failure: Failure) -> str:
    """The report for people."""
    where = f"rank {failure.rank} on {failure.host}" if failure.rank is not None else (failure.host or "the job")
    lines = [f"dbrdist-launch: {where} failed first ({failure.kind}): {failure.message}"]
    facts = [f"{failure.seconds:.1f} s after the start", f"exit code {failure.code}"]
    if failure.step is not None:
        facts.append(f"step {failure.step}")
    if failure.last_beat_seconds is not None:
        facts.append(f"last beat {failure.last_beat_seconds:.1f} s before")
    lines.append("  " + ", ".join(facts))
    if len(failure.ranks_lost) > 1:
        lines.append("  ranks lost with it: " + " ".join(map(str, failure.ranks_lost)))
    if failure.traceback:
        lines += ["    " + line for line in failure.traceback.splitlines()]
    if failure.others:
        lines.append("  the other ranks at that time:")
        for other in failure.others[:32]:
            lines.append(f"    rank {other['rank']} on {other['host']}: {other['doing']}")
            lines += ["      " + line for line in other.get("stacks", "").splitlines()]
        if len(failure.others) > 32:
            lines.append(f"    and {len(failure.others) - 32} more (see failure.json)")
    return "\n".join(lines)


def write_json(failure: Failure, directory: str) -> None:
    """Leave failure.json in the log directory, whole or not at all."""
    write_json_file(os.path.join(directory, "failure.json"), asdict(failure))


def remove_json(directory: str) -> None:
    """Take away the failure.json of an earlier job."""
    try:
        os.unlink(os.path.join(directory, "failure.json"))
    except OSError:
        pass


def write_json_file(path: str, content: object) -> None:
    """Write beside the target and rename."""
    with open(path + ".tmp", "w") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
    os.replace(path + ".tmp", path)
