"""Which failure came first: weighs what the ranks, their silence and mpiexec itself say."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .. import codes
from . import report
from .ranks import Rank
from .report import Failure
from .stalls import blame, find_stall

LAST_WORDS_SECONDS = 1.0  # for the ranks' reports to arrive after mpiexec has ended
STARTER_SECONDS = 2.0  # for mpiexec to end after its ranks
_DOUBT_SECONDS = 2.0  # a supervisor speaks twice a second
_SAME_MOMENT_SECONDS = 0.005
_LOST_SECONDS = 0.3  # from a broken connection to a verdict: the other ranks of a dead host break in this time
# From what a program tells of itself to a verdict, in which it may end by itself with its own code.
_TOLD_SECONDS = {"exception": 1.0, "thread": 0.5, "worker": 0.0, "leaving": 1.5}


class Starter(Protocol):
    """What the judge asks mpiexec's process."""

    name: str

    def result(self) -> tuple[int, int]: ...


@dataclass
class Judge:
    """Looks at the ranks of an attempt, several times a second, for the first cause of a failure."""

    size: int
    start_seconds: float
    heartbeat_seconds: float
    silence_seconds: float
    ranks: dict[int, Rank] = field(default_factory=dict)
    progress_at: float = field(default_factory=time.monotonic)  # when the last rank appeared
    starter: Starter | None = None
    starter_ended_at: float | None = None
    starter_lines: list[str] = field(default_factory=list)
    stop_asked: bool = False
    pending: list[tuple[float, int, dict]] = field(default_factory=list)  # (when it counts, rank, event)
    stall: tuple[str, list[int]] | None = None
    stacks_until: float | None = None  # set by the attempt once it has asked for stacks

    # --- what is told

    def take_event(self, rank: Rank, event: dict, now: float) -> None:
        """A program told of an exception, a dead thread or worker, or that it is leaving."""
        kind = event["event"]
        if kind == "cut":
            rank.cut = True
        elif kind == "leaving":
            rank.leaving = True
            if event["code"] not in (codes.DONE, codes.PREEMPTED):
                self.pending.append((now + _TOLD_SECONDS[kind], rank.rank, event))
        else:
            self.pending.append((now + _TOLD_SECONDS[kind], rank.rank, event))

    def take_bad_exit(self, rank: Rank, now: float) -> Failure | None:
        """A rank ended badly by itself: the failure, if it can already count as the first."""
        wait = self._seconds_of_doubt(rank, now)
        if wait:
            self.pending.append((now + wait, rank.rank, {"event": "exit"}))
            return None
        return self._of_exit(rank)

    def undecided(self) -> bool:
        """Whether a failure is certain and only its cause is not."""
        return any(event["event"] == "exit" for _, _, event in self.pending) or (
            not self.stop_asked and any(rank.exit and rank.exit["ours"] for rank in self.ranks.values())
        )

    def _seconds_of_doubt(self, rank: Rank, now: float) -> float:
        """How long this end must wait to count as the first cause: others may have gone and taken it with them."""
        others = [other for other in self.ranks.values() if other is not rank and other.exit is None]
        if any(other.running and now - other.heard_at > _DOUBT_SECONDS for other in others):
            return self.silence_seconds
        if any(other.lost_at or (other.ended and (rank.ended is None or other.ended < rank.ended)) for other in others):
            return 2 * _LOST_SECONDS
        # An MPI that loses a peer ends the program with a plain exit code, perhaps before we hear of the loss.
        several_hosts = len({other.host for other in self.ranks.values()}) > 1
        return 0.2 if several_hosts and report.from_exit(rank).kind == "exit" else 0.0

    def _of_exit(self, rank: Rank) -> Failure:
        told = [event for _, number, event in self.pending if number == rank.rank]
        named = [event for event in told if event["event"] in ("thread", "worker")]
        return report.from_event(rank, named[0]) if named else report.from_exit(rank)

    # --- what is seen

    def verdict(self, now: float) -> Failure | None:
        """The first cause, once it is clear."""
        for look in (self._start, self._connections, self._ended_starter, self._told, self._stall):
            failure = look(now)
            if failure is not None:
                return failure
        return None

    def _start(self, now: float) -> Failure | None:
        missing = [number for number in range(self.size) if number not in self.ranks]
        if not missing or self.starter_ended_at is not None or now - self.progress_at <= self.start_seconds:
            return None
        text = (
            f"{len(missing)} of {self.size} ranks did not appear within {self.start_seconds:g} s "
            f"(missing: {_some(missing)}); {self._name()} hangs"
        )
        return Failure("start", None, None, codes.NOT_STARTED, text, traceback=self._said(), may_retry=True)

    def _connections(self, now: float) -> Failure | None:
        """Supervisors that are silent, or whose connection broke without a report."""
        silent = {r.rank for r in self.ranks.values() if r.running and now - r.heard_at > self.silence_seconds}
        lost = {r.rank for r in self.ranks.values() if r.exit is None and r.lost_at and now - r.lost_at > _LOST_SECONDS}
        gone = silent | lost
        if not gone:
            return None
        if lost and self._starter_may_have_killed():
            return self._of_killed_step(now)
        host = min((self.ranks[number].host for number in gone), key=lambda name: min(self._on_host(name)))
        there = {number for number in self._on_host(host) if self.ranks[number].exit is None}
        first = min(gone & there)
        if host != os.uname().nodename and there <= gone:
            return self._host_lost(
                host, "its connections broke" if first in lost else f"silent for {self.silence_seconds:g} s"
            )
        if first in lost:
            return Failure("signal", first, host, codes.from_signal(9), "its supervisor was killed", "SIGKILL")
        return Failure("stopped", first, host, codes.STALLED, "its supervisor does not answer")

    def _starter_may_have_killed(self) -> bool:
        """Whether srun may have killed the whole step with its supervisors: no rank is left, and not on one host alone.

        It does so at an MPI_Abort, when a node is gone and, with PMIx, when any rank ends badly. Under mpiexec the
        supervisors outlive their ranks and report.
        """
        if self._name() != "srun" or any(rank.running for rank in self.ranks.values()):
            return False
        hosts = {rank.host for rank in self.ranks.values() if rank.exit is None and rank.lost_at}
        return len(hosts) > 1 or any(rank.ended for rank in self.ranks.values()) or self._aborted(1)

    def _of_killed_step(self, now: float) -> Failure | None:
        broken: dict[str, float] = {}  # host -> when its first connection broke
        for rank in self.ranks.values():
            if rank.exit is None and rank.lost_at is not None:
                broken[rank.host] = min(rank.lost_at, broken.get(rank.host, rank.lost_at))
        earliest, *later = sorted(broken.values())
        if self.starter_ended_at is None and now - earliest < STARTER_SECONDS:
            return None  # what srun says of it comes in a moment
        # srun tells of the tasks on the nodes that it still hears from.
        mute = [host for host in broken if not any(f"{host}: task" in line for line in self.starter_lines)]
        ended = [(rank.ended, rank.rank) for rank in self.ranks.values() if rank.ended]
        in_order = not ended and bool(later) and later[0] - earliest > _SAME_MOMENT_SECONDS
        aborted = self._aborted(self._result()[0] if self.starter_ended_at is not None else codes.LOST_PEER)
        if mute and not aborted and (len(mute) < len(broken) or in_order):
            return self._host_lost(min(mute, key=broken.__getitem__), "its connections broke first")
        if ended and not aborted:
            return self._of_exit(self._first_of_exits(self.ranks[min(ended)[1]]))
        return self._of_starter()

    def _ended_starter(self, now: float) -> Failure | None:
        """mpiexec has ended, or has killed its ranks, and no rank reported a failure: MPI_Abort, or its own trouble."""
        if self.starter_ended_at is None or self.stop_asked:
            return None
        ends = [self.ranks[number].exit if number in self.ranks else None for number in range(self.size)]
        if all(end is not None and not end["ours"] for end in ends):
            return None
        if None in ends and now - self.starter_ended_at < LAST_WORDS_SECONDS:
            return None
        return self._of_starter()

    def _told(self, now: float) -> Failure | None:
        for due, number, event in self.pending:
            rank = self.ranks[number]
            if now < due:
                continue
            if event["event"] == "exit":
                if not any(other.lost_at and other.exit is None for other in self.ranks.values()):
                    return self._of_exit(self._first_of_exits(rank))  # else `_connections` weighs it
            elif rank.exit is None or event["event"] != "leaving":
                return report.from_event(rank, event)
        return None

    def _first_of_exits(self, rank: Rank) -> Rank:
        """Another rank, where this one only lost it: both ends come from different hosts, in any order."""
        if rank.end is None or rank.end["code"] != codes.LOST_PEER:
            return rank
        ends = [(other.ended or other.heard_at, other.rank) for other in self.ranks.values() if _is_cause(other)]
        return self.ranks[min(ends)[1]] if ends else rank

    def _stall(self, now: float) -> Failure | None:
        if self.stop_asked:
            return None  # who saves need not beat; the grace period bounds it
        if any(rank.running and now - rank.heard_at > _DOUBT_SECONDS for rank in self.ranks.values()):
            return None  # a host or its cable may be gone, and the others wait for it: that cause comes first
        ranks = list(self.ranks.values())
        if self.stacks_until is None or self.stall is None:
            self.stall = find_stall(ranks, now, self.heartbeat_seconds)  # the attempt then asks for stacks
            return None
        if now >= self.stacks_until or all(rank.stacks is not None for rank in ranks if rank.running):
            return blame(ranks, self.stall, now, self.heartbeat_seconds)
        return None

    # --- words

    def _result(self) -> tuple[int, int]:
        """mpiexec's exit code and signal; (1, 0) while it runs."""
        return self.starter.result() if self.starter and self.starter_ended_at is not None else (1, 0)

    def _of_starter(self) -> Failure:
        code, number = self._result()
        return report.from_starter(self._name(), code, number, self.size, self.ranks, self.starter_lines)

    def _host_lost(self, host: str, how: str) -> Failure:
        there = [number for number in self._on_host(host) if self.ranks[number].exit is None]
        failure = Failure("host_lost", min(there), host, codes.HOST_LOST, f"host {host} is lost: {how}")
        failure.ranks_lost = there
        return failure

    def _on_host(self, host: str) -> list[int]:
        return sorted(rank.rank for rank in self.ranks.values() if rank.host == host)

    def _aborted(self, starter_code: int) -> bool:
        return report.find_abort(self.ranks, [], starter_code) is not None

    def _name(self) -> str:
        return self.starter.name if self.starter is not None else "the starter"

    def _said(self) -> str | None:
        return "\n".join(self.starter_lines[-20:]) or None


def _is_cause(rank: Rank) -> bool:
    """Whether a rank ended badly by itself, and not for the loss of a peer."""
    end = rank.end
    good = (codes.DONE, codes.PREEMPTED, codes.LOST_PEER)
    return end is not None and not end["ours"] and (bool(end["signal"]) or end["code"] not in good)


def _some(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers[:16])) + (" ..." if len(numbers) > 16 else "")
