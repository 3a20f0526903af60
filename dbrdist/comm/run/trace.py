"""One trace of all ranks with one clock, and what it says: compute, communication, waiting for a late rank, data.

Each rank notes spans by its own clock. At the start and at the end rank 0 asks every rank for its time; the answer with
the shortest way there and back tells how far the clocks are apart (Cristian 1989), and what is between is drawn by a
straight line. All ranks come to the same meetings (``core/array/spans.py``): the last to arrive is the late one, and
what the others wait before that is waiting for it, not communication.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.protocol import agree
from dbrdist.core.array import spans
from dbrdist.core.array.spans import Meeting, Recorder, Span
from dbrdist.core.files.serializer import write_atomically

if TYPE_CHECKING:
    from collections.abc import Hashable

    from dbrdist.core.array.types import JSON

_NUM_QUESTIONS = 20
_TAG = 7301
COMPUTE = ("forward", "backward", "update")
DATA = "data wait"
EXPOSED = "exposed wait"
_CAUSES = (DATA, *COMPUTE)
Noted = TypeVar("Noted", Span, Meeting)


class Clock(NamedTuple):
    """How far rank 0's clock is ahead of this rank's: at two times of this rank's clock."""

    first: tuple[float, float]
    last: tuple[float, float]

    def __call__(self, seconds: float) -> float:
        """The time of rank 0 at a time of this rank."""
        (t0, a), (t1, b) = self.first, self.last
        share = 0.0 if t1 <= t0 else (seconds - t0) / (t1 - t0)
        return seconds + a + (b - a) * share


def ask(comm: CommunicatorBase) -> tuple[float, float]:
    """(this rank's time, how far rank 0 is ahead of it). Collective."""
    result = time.perf_counter(), 0.0
    for rank in range(1, comm.size):
        if comm.rank == rank:
            best = None
            for _ in range(_NUM_QUESTIONS):
                sent = time.perf_counter()
                comm.send_obj(None, 0, _TAG)
                answer = comm.recv_obj(0, _TAG)
                took = time.perf_counter() - sent
                if best is None or took < best[0]:
                    best = took, sent + took / 2, answer
            assert best is not None
            result = best[1], best[2] - best[1]
        elif comm.rank == 0:
            for _ in range(_NUM_QUESTIONS):
                comm.recv_obj(rank, _TAG)
                comm.send_obj(time.perf_counter(), rank, _TAG)
    return result


class Trace:
    """Records this process from :meth:`start` to :meth:`finish`. Both are collective.

    Args:
        comm: the ranks, which are processes.
    """

    def __init__(self, comm: CommunicatorBase) -> None:
        self._comm = comm
        self._recorder = Recorder()
        self._first: tuple[float, float]  # what the clocks said at the start

    def start(self) -> None:
        """Begin.

        Raises:
            RuntimeError: on every rank, where a trace records already on one.
        """
        with agree.together(self._comm):
            if spans.recording() is not None:
                raise RuntimeError("Trace.start expected no other trace to be recording: finish or stop that one first")
        self._recorder = Recorder()
        self._first = ask(self._comm)
        spans.record(self._recorder)

    def stop(self) -> None:
        """End on this rank alone, where a run has failed: nothing comes of it."""
        spans.record(None)

    def finish(self) -> list[Recording] | None:
        """End; on rank 0 what all ranks noted, by rank 0's clock, None on the others.

        Of a long run these are the last steps that are whole: ``spans.MAX_KEPT`` spans, and as many meetings.

        Raises:
            RuntimeError: on every rank, where it does not record on one.
        """
        with agree.together(self._comm):
            if spans.recording() is not self._recorder:
                raise RuntimeError("Trace.finish expected a trace that is recording: start it first, finish it once")
        self.stop()
        clock = Clock(self._first, ask(self._comm))
        main, first = threading.get_ident(), self._recorder.first_whole_step
        mine = Recording(
            [_moved(s, clock, main) for s in self._recorder.spans if s.step >= first],
            [_moved(m, clock, main) for m in self._recorder.meetings if m.step >= first],
        )
        found: list[Recording] | None = self._comm.gather_obj(mine)
        return found


class Recording(NamedTuple):
    """What one rank did, by rank 0's clock; thread 0 is the main one, 1 the one that reduces beside it."""

    spans: list[Span]
    meetings: list[Meeting]


def _moved(noted: Noted, clock: Clock, main: int) -> Noted:
    return noted._replace(thread=int(noted.thread != main), began=clock(noted.began), ended=clock(noted.ended))


def chrome(ranks: Sequence[Recording]) -> dict[str, JSON]:
    """The trace in Chrome's format, for chrome://tracing or ui.perfetto.dev: a process for each rank, microseconds."""
    start = min((s.began for r in ranks for s in r.spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, recording in enumerate(ranks):
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        for thread, name in enumerate(("training", "reduction")):
            events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}})
        drawn = [(s.name, s.step, s.thread, s.began, s.ended) for s in recording.spans]
        drawn += [("wait for ranks", m.step, m.thread, m.began, m.ended) for m in recording.meetings]
        for name, step, thread, began, ended in sorted(drawn, key=lambda d: (d[3], -d[4])):
            times = {"ts": round((began - start) * 1e6, 1), "dur": round((ended - began) * 1e6, 1)}
            events.append({"name": name, "ph": "X", "pid": rank, "tid": thread, **times, "args": {"step": step}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write(path: str, ranks: Sequence[Recording]) -> None:
    """Write the trace to a file, as a whole or not at all."""
    text = json.dumps(chrome(ranks)).encode()
    write_atomically(path, lambda file: file.write(text))


class Summary(NamedTuple):
    """Where the time of a mean step went, in seconds, means over ranks; and which rank was late."""

    num_steps: int
    step: float
    compute: float
    data_stall: float
    exposed: float  # exposed communication, without the waiting for late ranks
    late: float  # waiting for late ranks
    late_rank: int | None  # the one for which the others waited longest
    late_share: float  # its share of that waiting
    late_cause: str  # what it did longer than the others: data wait, forward, backward, update or communication

    def lines(self) -> list[str]:
        """The summary in words."""
        parts = [
            ("compute", self.compute),
            ("waiting for data", self.data_stall),
            ("exposed communication", self.exposed),
            ("waiting for a late rank", self.late),
        ]
        whole = max(self.step, 1e-9)
        lines = [f"trace: {self.num_steps} steps of {1e3 * self.step:.2f} ms"]
        lines += [f"  {name}: {1e3 * seconds:.2f} ms, {100 * seconds / whole:.0f} %" for name, seconds in parts]
        if self.late_rank is not None and self.late > 0:
            lines.append(
                f"  the others waited for rank {self.late_rank} in {100 * self.late_share:.0f} % of that time; it took "
                f"longer than they did in: {self.late_cause}"
            )
        return lines


def summarize(ranks: Sequence[Recording]) -> Summary:
    """Where the time went, over the steps that all ranks have whole; the first is left out, which sets up memory."""
    steps = set.intersection(*({s.step for s in r.spans if s.name == "step"} for r in ranks))
    steps -= {min(steps)} if len(steps) > 1 else set()
    kept = [
        Recording([s for s in r.spans if s.step in steps], [m for m in r.meetings if m.step in steps]) for r in ranks
    ]
    num = max(len(steps), 1)

    def mean(*names: str) -> float:
        return sum(s.ended - s.began for r in kept for s in r.spans if s.name in names) / num / len(kept)

    blame = _waits(kept)
    late = sum(sum(row.values()) for row in blame) / num / len(kept)
    by_rank: dict[int, float] = defaultdict(float)
    for row in blame:
        for rank, seconds in row.items():
            by_rank[rank] += seconds
    late_rank = max(by_rank, key=by_rank.__getitem__, default=None)
    share = by_rank[late_rank] / (sum(by_rank.values()) or 1.0) if late_rank is not None else 0.0
    cause = "" if late_rank is None else _cause(kept, late_rank, num)
    waited = max(mean(EXPOSED) - late, 0.0)
    return Summary(len(steps), mean("step"), mean(*COMPUTE), mean(DATA), waited, late, late_rank, share, cause)


def _waits(ranks: Sequence[Recording]) -> list[dict[int, float]]:
    """For each rank how long it waited, after backward, for each rank that others waited for."""
    waits = _meetings(ranks)
    exposed: list[dict[int, list[Span]]] = [defaultdict(list) for _ in ranks]  # of each step
    for windows, recording in zip(exposed, ranks):
        for s in recording.spans:
            if s.name == EXPOSED:
                windows[s.step].append(s)
    blame: list[dict[int, float]] = [defaultdict(float) for _ in ranks]
    for rank, mine in enumerate(waits):
        for wait in mine:
            for window in exposed[rank][wait.step]:
                begin, end = max(wait.begin, window.began), min(wait.end, window.ended)
                _blame(waits, blame[rank], wait.last, begin, end, len(ranks))
    return blame


class _Wait(NamedTuple):
    """For whom a rank waits, and until when: until that one comes."""

    step: int
    begin: float
    end: float
    last: int


def _meetings(ranks: Sequence[Recording]) -> list[list[_Wait]]:
    """What each rank waited for at the meetings of all, in order."""
    by_key: dict[Hashable, dict[int, Meeting]] = defaultdict(dict)
    for rank, recording in enumerate(ranks):
        for m in recording.meetings:
            by_key[m.key][rank] = m
    waits: list[list[_Wait]] = [[] for _ in ranks]
    for found in by_key.values():
        last = max(found, key=lambda rank: found[rank].began)
        for rank, m in found.items():
            end = min(found[last].began, m.ended)
            if len(found) == len(ranks) and rank != last and end > m.began:
                waits[rank].append(_Wait(m.step, m.began, end, last))
    return [sorted(mine, key=lambda wait: wait.begin) for mine in waits]


def _blame(
    waits: Sequence[Sequence[_Wait]], mine: dict[int, float], last: int, begin: float, end: float, depth: int
) -> None:
    """Count the time from ``begin`` to ``end`` for the rank that was late, or for the ones that it waited for then."""
    for wait in waits[last] if depth else ():
        inner, outer = max(wait.begin, begin), min(wait.end, end)
        if outer > inner:
            mine[last] += inner - begin
            _blame(waits, mine, wait.last, inner, outer, depth - 1)
            begin = outer
    if end > begin:
        mine[last] += end - begin


def _cause(ranks: Sequence[Recording], late: int, num_steps: int) -> str:
    """What the late rank did longer than the others, in the median of these; communication where it is none of it."""

    def spent(recording: Recording, name: str) -> float:
        return sum(s.ended - s.began for s in recording.spans if s.name == name) / num_steps

    others = [r for k, r in enumerate(ranks) if k != late]
    extra = {name: spent(ranks[late], name) - statistics.median(spent(r, name) for r in others) for name in _CAUSES}
    extra["communication"] = _working(ranks[late], num_steps) - statistics.median(
        _working(r, num_steps) for r in others
    )
    return max(extra, key=extra.__getitem__)


def _working(recording: Recording, num_steps: int) -> float:
    """Seconds a step in reductions, without the waiting for other ranks."""
    inside = sum(s.ended - s.began for s in recording.spans if s.name.startswith("reduce"))
    waits = sum(m.ended - m.began for m in recording.meetings if m.key[-1] == "reduce")
    return (inside - waits) / num_steps
