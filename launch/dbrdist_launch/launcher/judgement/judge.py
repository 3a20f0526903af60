"""Which failure came first: weighs what the ranks, their silence and mpiexec itself say."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ... import codes, limits
from . import report
from .ranks import Rank, Told
from .report import Failure
from .stalls import blame, in_debugger, late_ranks, suspected


class MpiexecProcess(Protocol):
    """What the judge asks mpiexec's process."""

    name: str
    kills_step: bool

    def result(self) -> tuple[int, int]: ...


@dataclass(eq=False, repr=False)
class Judge:
    """Looks at the ranks of an attempt, several times a second, for the first cause of a failure.

    A verdict needs a fact: a rank or mpiexec has ended, a host is gone, Python has ended with a bad code and waits in
    MPI_Finalize, a beat that had begun has stopped, a deadline that the user set is over. All else is a warning.
    """

    size: int
    start_seconds: float | None  # None: the start may wait in a queue
    heartbeat_seconds: float
    host_seconds: float  # within which the kernel notices that a host is gone
    end_on: Collection[str] = ()  # "thread", "worker": what the user wants to end the job
    ranks: dict[int, Rank] = field(default_factory=dict)
    started_at: float = field(default_factory=lambda: time.monotonic())
    progress_at: float = field(default_factory=lambda: time.monotonic())  # when the last rank appeared
    starter: MpiexecProcess | None = None
    starter_ended_at: float | None = None
    starter_lines: list[str] = field(default_factory=list)
    stop_asked: bool = False
    answers: tuple[int, ...] = (codes.PREEMPTED,)  # exit codes by which a rank says that it has saved
    pending: list[tuple[float, int, Told]] = field(default_factory=list)  # (when it counts, rank, event)
    late: list[int] = field(default_factory=list)  # ranks whose beat is overdue
    stacks_until: float | None = None  # set by the attempt once it has asked for stacks
    late_since: float | None = None  # when the first beat was overdue
    look_again_at: float | None = None  # when the rank that the late ones wait for is late too
    warnings: list[str] = field(default_factory=list)  # to be said
    waiting_said: bool = False

    # --- what is told

    def take_event(self, rank: Rank, event: Told, now: float) -> None:
        """A program told of itself. That explains an end that comes; by itself it ends nothing."""
        kind = event["event"]
        if kind == "cut":
            rank.cut, rank.cut_at = True, float(event.get("at") or now)
            return
        if kind == "orphaned":
            rank.orphaned = rank.orphaned or now
            return
        if kind in ("left", "unseen"):
            self._warn(rank, kind, str(event["message"]))
            return
        if kind == "fault":
            self._warn(rank, kind, f"internal error, the job continues: {event['message']}")
            return
        if len(rank.events) < 200:
            rank.events.append({"at": now, **event})
        if kind == "leaving":
            rank.leaving = rank.leaving or bool(event.get("own"))
        elif kind == "finalizing":
            if event.get("code") not in self.answers:  # it has saved and waits for those that save more slowly
                self.pending.append((now, rank.rank, event))
        elif kind in ("thread", "worker"):
            if kind in self.end_on:
                self.pending.append((now + (limits.TOLD_SECONDS if kind == "thread" else 0.0), rank.rank, event))
            else:
                died = f"thread {event.get('name', '?')} died of " if kind == "thread" else ""
                what = died + str(event["message"])
                self._warn(rank, kind, f"{what}; the job continues (--end-on {kind} would end it)")

    def forgive(self, seconds: float) -> None:
        """The launcher itself was stopped for so long."""
        self.progress_at += seconds
        self.pending = [(due + seconds, number, event) for due, number, event in self.pending]
        for name in ("stacks_until", "starter_ended_at", "late_since", "look_again_at"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name) + seconds)
        for rank in self.ranks.values():
            rank.forgive(seconds)

    def _warn(self, rank: Rank, about: str, text: str) -> None:
        """Say something of a rank, once."""
        if about not in rank.warned:
            rank.warned.add(about)
            self.warnings.append(f"warning: rank {rank.rank} on {rank.host}: {text}")

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
            not self.stop_asked and any(rank.exit and rank.exit.ours for rank in self.ranks.values())
        )

    def _seconds_of_doubt(self, rank: Rank, now: float) -> float:
        """How long this end must wait to count as the first cause: others may have gone and taken it with them."""
        if len(self.ranks) < self.size:
            return limits.STARTER_SECONDS  # mpiexec may have given up the start, and the ranks that it had started
        if any(other.cut or other.orphaned for other in self.ranks.values()):
            return limits.STARTER_SECONDS  # mpiexec ends the ranks: why, it says at its own end
        others = [other for other in self.ranks.values() if other is not rank and other.exit is None]
        elsewhere = [other for other in others if other.host != rank.host and other.running]
        if any(now - other.heard_at > limits.DOUBT_SECONDS for other in elsewhere):
            return self.host_seconds
        if any(other.lost_at or (other.ended and (rank.ended is None or other.ended < rank.ended)) for other in others):
            return 2 * limits.LOST_SECONDS
        # An MPI that loses a peer ends the program with a plain exit code, perhaps before we hear of the loss.
        several_hosts = len({other.host for other in self.ranks.values()}) > 1
        return 0.2 if several_hosts and report.from_exit(rank).kind == "exit" else 0.0

    # --- what is seen

    def verdict(self, now: float) -> Failure | None:
        """The first cause, once it is clear."""
        self._look_around(now)
        for look in (
            self._start,
            self._orphans,
            self._connections,
            self._ended_starter,
            self._told,
            self._worlds,
            self._stall,
        ):
            failure = look(now)
            if failure is not None:
                return failure
        return None

    def _start(self, now: float) -> Failure | None:
        missing = [number for number in range(self.size) if number not in self.ranks]
        waited = now - self.progress_at
        if not missing or self.starter_ended_at is not None:
            return None
        if waited > limits.WAITING_SECONDS and not self.waiting_said:
            self.waiting_said = True
            said = f"; its last output: {self.starter_lines[-1]}" if self.starter_lines else ""
            self.warnings.append(f"waiting for {self._name()} to start ranks {_some(missing)} of {self.size}{said}")
        if self.start_seconds is None or waited <= self.start_seconds:
            return None
        text = (
            f"{len(missing)} of {self.size} ranks did not appear within {self.start_seconds:g} s "
            f"(missing: {_some(missing)}); {self._name()} hangs"
        )
        return Failure("start", None, None, codes.NOT_STARTED, text, traceback=self._said(), may_retry=True)

    def _worlds(self, now: float) -> Failure | None:
        """Every rank's MPI has a world of its own: each would compute alone, and all would return 0."""
        alone = [rank for rank in self.ranks.values() if any(_is_alone(event) for event in rank.events)]
        if self.size == 1 or not alone:
            return None
        if len(alone) == self.size:
            return self._of_worlds()
        self._warn(alone[0], "world", f"its MPI world has size 1, but the job has {self.size} ranks")
        return None

    def at_end(self) -> Failure | None:
        """The same where the ranks are scripts, of which some parts may well be alone: when nothing else came."""
        sizes = [{event["size"] for event in rank.events if event.get("size")} for rank in self.ranks.values()]
        return self._of_worlds() if self.size > 1 and sizes and all(found == {1} for found in sizes) else None

    def _of_worlds(self) -> Failure:
        text = (
            f"{self._name()} started {self.size} ranks, but each has an MPI world of size 1: it does not match the "
            "program's MPI library; see `dbrdist-launch doctor`, or give the right mpiexec with --mpiexec"
        )
        return Failure("start", None, None, codes.NOT_STARTED, text)

    def _look_around(self, now: float) -> None:
        """What is odd and harms nothing for sure."""
        for rank in self.ranks.values():
            if rank.stopped_since and rank.beat_at is None and now - rank.stopped_since > self.heartbeat_seconds:
                self._warn(rank, "stopped", f"its process has been stopped (SIGSTOP) for {self.heartbeat_seconds:g} s")
            if rank.running and now - rank.heard_at > limits.SILENT_SECONDS:
                self._warn(rank, "silent", "its supervisor does not answer, although its host does")
            if rank.traced and rank.running and rank.beat_at is not None:
                self._warn(rank, "traced", "a debugger is attached; meanwhile no rank needs to send heartbeats")
            told = rank.told("exception")
            if told and told.get("own") and rank.running and not rank.ended and now - told["at"] > limits.EARLY_SECONDS:
                self._warn(rank, "exception", f"it ended with {told['message']}, but its process does not exit")
            early = rank.left_without_finalize and now - (rank.left_at or now) > limits.EARLY_SECONDS
            if early and any(other.running for other in self.ranks.values()):
                self._warn(rank, "early", "it ended with code 0 but without MPI_Finalize; the others may wait for it")

    def _orphans(self, now: float) -> Failure | None:
        """A process of mpiexec's own, which had started the ranks of a host, has gone before them."""
        orphans = [rank for rank in self.ranks.values() if rank.orphaned is not None]
        if not orphans or self.stop_asked:
            return None
        first = min(orphans, key=lambda rank: rank.orphaned or now)
        if now - (first.orphaned or now) < limits.LOST_SECONDS:
            return None
        if self.starter_ended_at is not None and self._result()[1]:
            return self._of_starter()  # it was mpiexec itself
        cause = self._cause_in_step()  # a step's daemon can die of an MPI_Abort that comes before MPI_Init
        if cause is not None:
            return cause
        text = f"the process of {self._name()} that had started the ranks on {first.host} was killed or has crashed"
        return Failure("signal", None, first.host, codes.from_signal(9), text, "SIGKILL", traceback=self._said())

    def _connections(self, now: float) -> Failure | None:
        """Supervisors whose connection broke without a report: they were killed, or the kernel gave their host up."""
        lost = {
            r.rank
            for r in self.ranks.values()
            if r.exit is None and r.lost_at and now - r.lost_at > limits.LOST_SECONDS
        }
        if not lost:
            return None
        broken = [self.ranks[number] for number in sorted(lost) if self.ranks[number].broken is not None]
        if broken:
            text = f"its supervisor failed: {broken[0].broken}"
            kind = "exit" if broken[0].pid else "start"
            return Failure(kind, broken[0].rank, broken[0].host, codes.NOT_STARTED, text)
        if self._starter_may_have_killed():
            return self._of_killed_step(now)
        host = min((self.ranks[number].host for number in lost), key=lambda name: min(self._on_host(name)))
        there = {number for number in self._on_host(host) if self.ranks[number].exit is None}
        if host != os.uname().nodename and there <= lost:
            return self._host_lost(host, f"its connections broke, or it was silent for {self.host_seconds:g} s")
        return Failure("signal", min(lost & there), host, codes.from_signal(9), "its supervisor was killed", "SIGKILL")

    def _starter_may_have_killed(self) -> bool:
        """Whether srun may have killed the whole step with its supervisors: no rank is left, and not on one host alone.

        It does so at an MPI_Abort, when a node is gone and, with PMIx, when any rank ends badly. Under mpiexec the
        supervisors outlive their ranks and report.
        """
        if self.starter is None or not self.starter.kills_step or any(rank.running for rank in self.ranks.values()):
            return False
        hosts = {rank.host for rank in self.ranks.values() if rank.exit is None and rank.lost_at}
        has_cause = any(rank.ended for rank in self.ranks.values()) or self._cause_in_step() is not None
        return len(hosts) > 1 or has_cause or self._aborted(1)

    def _of_killed_step(self, now: float) -> Failure | None:
        broken: dict[str, float] = {}  # host -> when its first connection broke
        for rank in self.ranks.values():
            if rank.exit is None and rank.lost_at is not None:
                broken[rank.host] = min(rank.lost_at, broken.get(rank.host, rank.lost_at))
        earliest, *later = sorted(broken.values())
        if self.starter_ended_at is None and now - earliest < limits.STARTER_SECONDS:
            return None  # what srun says of it comes in a moment
        # srun tells of the tasks on the nodes that it still hears from.
        mute = [host for host in broken if not any(f"{host}: task" in line for line in self.starter_lines)]
        ended = [(rank.ended, rank.rank) for rank in self.ranks.values() if rank.ended]
        in_order = not ended and bool(later) and later[0] - earliest > limits.SAME_MOMENT_SECONDS
        aborted = self._aborted(self._result()[0] if self.starter_ended_at is not None else codes.LOST_PEER)
        if mute and not aborted and (len(mute) < len(broken) or in_order):
            return self._host_lost(min(mute, key=broken.__getitem__), "its connections broke first")
        if ended and not aborted:
            return report.from_exit(self._first_of_exits(self.ranks[min(ended)[1]]))
        return self._of_starter()

    def _ended_starter(self, now: float) -> Failure | None:
        """mpiexec has ended, or has killed its ranks, and no rank reported a failure: MPI_Abort, or its own trouble."""
        if self.starter_ended_at is None or self.stop_asked:
            return None
        ends = [self.ranks[number].exit if number in self.ranks else None for number in range(self.size)]
        if all(end is not None and not end.ours for end in ends):
            return None
        if None in ends and now - self.starter_ended_at < limits.LAST_WORDS_SECONDS:
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
            elif rank.exit is None or event["event"] != "finalizing":
                return report.from_event(rank, event)
        return None

    def _of_exit(self, rank: Rank) -> Failure:
        """This rank's end, or the MPI_Abort by which mpiexec had begun to end all of them."""
        aborted = report.find_abort(self.ranks, self.starter_lines, codes.LOST_PEER)
        cut = any(other.cut for other in self.ranks.values())
        if self.starter is not None and self.starter.kills_step and rank.end is not None and not rank.end.oom:
            # srun does it at an abort. What MPI itself says at the loss of a peer may come of this very kill.
            is_called = report.has_called_abort(self.ranks, self.starter_lines)
            cut = cut or (rank.end.signal == signal.SIGKILL and is_called)
        if cut and aborted is not None and aborted[0] in self.ranks:
            return report.from_abort(self.ranks[aborted[0]], aborted[1])
        return report.from_exit(rank)

    def _first_of_exits(self, rank: Rank) -> Rank:
        """Another rank, where this one only lost it: both ends come from different hosts, in any order."""
        if rank.end is None or rank.end.code != codes.LOST_PEER:
            return rank
        ends = [(other.ended or other.heard_at, other.rank) for other in self.ranks.values() if _is_cause(other)]
        return self.ranks[min(ends)[1]] if ends else rank

    def _stall(self, now: float) -> Failure | None:
        if self.stop_asked:
            return None  # who saves need not beat; the grace period bounds it
        ranks = list(self.ranks.values())
        hosts = {rank.host for rank in ranks}
        if len(hosts) > 1 and any(rank.running and now - rank.heard_at > limits.DOUBT_SECONDS for rank in ranks):
            return None  # a host or its cable may be gone, and the others wait for it: that cause comes first
        if any(rank.lost_at and rank.exit is None for rank in ranks):
            return None  # `_connections` weighs it
        if self.stacks_until is None or not self.late:
            late = late_ranks(ranks, now, self.heartbeat_seconds)
            self.late_since = (self.late_since or now) if late else None
            if not late or self.look_again_at is None or now >= self.look_again_at:
                self.late, self.look_again_at = late, None  # the attempt then asks for stacks
            return None
        if now < self.stacks_until and any(rank.stacks is None for rank in ranks if rank.running):
            return None
        watched, late = in_debugger(ranks), late_ranks(ranks, now, self.heartbeat_seconds)
        if watched:
            self._warn(self.ranks[watched[0]], "debugger", "in a debugger; meanwhile no rank needs to send heartbeats")
        if watched or not late:
            self.late, self.stacks_until = [], None
            for rank in ranks:
                rank.stacks = None
                rank.beat_at = now if watched and rank.beat_at is not None else rank.beat_at
            return None
        last_look = (self.late_since or now) + self.heartbeat_seconds
        suspects = suspected(ranks, late, now, self.heartbeat_seconds)
        if suspects and now < last_look:  # it has beaten since: does it still?
            beats = [rank.beat_at for rank in suspects if rank.beat_at is not None]
            self.look_again_at = min(
                [beat + self.heartbeat_seconds + limits.TICK_SECONDS for beat in beats] + [last_look]
            )
            self.late, self.stacks_until = [], None
            return None
        return blame(ranks, late, now)

    # --- words

    def _result(self) -> tuple[int, int]:
        """mpiexec's exit code and signal; (1, 0) while it runs."""
        return self.starter.result() if self.starter and self.starter_ended_at is not None else (1, 0)

    def _of_starter(self) -> Failure:
        code, number = self._result()
        cause = None if self._aborted(code) else self._cause_in_step(number != 0)
        return cause or report.from_starter(self._name(), code, number, self.size, self.ranks, self.starter_lines)

    def _cause_in_step(self, is_killed: bool = False) -> Failure | None:
        """The rank that ended badly before srun killed the step, as it was reported or as the program told.

        With ``is_killed``, srun itself was killed: a signal that ended a rank came with that.
        """
        if self.starter is None or not self.starter.kills_step:
            return None
        bad = [rank for rank in self.ranks.values() if _is_cause(rank)]
        ended = [
            (rank.ended or rank.heard_at, rank.rank)
            for rank in bad
            if rank.end is not None and not (is_killed and rank.end.signal)
        ]
        if ended:
            return report.from_exit(self.ranks[min(ended)[1]])
        good = (codes.DONE, codes.PREEMPTED, codes.LOST_PEER, *self.answers)
        told = [
            (event["at"], rank.rank, event)
            for rank in self.ranks.values()
            if rank.end is None and (event := rank.told("leaving")) and event.get("own") and event["code"] not in good
        ]
        return report.from_leaving(self.ranks[min(told)[1]], min(told)[2]) if told else None

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


def _is_alone(event: Told) -> bool:
    return bool(event["event"] in ("world", "leaving") and event.get("size") == 1 and event.get("own"))


def _is_cause(rank: Rank) -> bool:
    """Whether a rank ended badly by itself, and not for the loss of a peer."""
    end = rank.end
    good = (codes.DONE, codes.PREEMPTED, codes.LOST_PEER)
    return end is not None and not end.ours and (bool(end.signal) or end.code not in good)


def _some(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers[:16])) + (" ..." if len(numbers) > 16 else "")
