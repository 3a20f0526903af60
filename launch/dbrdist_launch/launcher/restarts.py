"""Whether a failed job starts again, and the record of its attempts."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field

from .. import codes
from .attempt import Outcome
from .report import write_json_file

_QUICK_SECONDS = 60.0
_SAME_FAILURES = 3  # in a row, without a step made in between: it would fail for ever


@dataclass
class Policy:
    """Counts the attempts of a job and decides after each."""

    max_restarts: int = 0
    start_retries: int = 2
    min_hosts: int = 1
    restarts: int = 0
    retries: int = 0
    history: list[Outcome] = field(default_factory=list)

    def after(self, outcome: Outcome) -> tuple[bool, str]:
        """(whether to start again, why or why not); the reason is '' where there is nothing to say."""
        self.history.append(outcome)
        failure = outcome.failure
        if failure is None or outcome.asked:
            return False, ""
        if failure.may_retry and self.retries < self.start_retries:
            self.retries += 1
            return True, f"the start hung; trying again ({self.retries} of {self.start_retries})"
        if self.max_restarts == 0:
            return False, ""
        if failure.kind == "start" and not failure.may_retry and not failure.host_trouble:
            return False, "not started again: a start that was refused would be refused again"
        if outcome.code in (codes.COMMAND_NOT_FOUND, codes.COMMAND_NOT_RUNNABLE):
            return False, "not started again: the command cannot be run"
        if self.loops():
            return (
                False,
                f"not started again: the same failure {_SAME_FAILURES} times in a row without a step in between",
            )
        if self.restarts >= self.max_restarts:
            return False, f"not started again: all {self.max_restarts} restarts are used up"
        self.restarts += 1
        return True, f"restart {self.restarts} of {self.max_restarts}"

    def loops(self) -> bool:
        """Whether the last attempts failed alike and none came further than the one before."""
        last = self.history[-_SAME_FAILURES:]
        if len(last) < _SAME_FAILURES:
            return False
        failures = [outcome.failure for outcome in last]
        alike = len({(f.kind, f.rank, f.message) if f is not None else None for f in failures}) == 1
        if all(outcome.steps < 0 for outcome in last):  # a program that does not beat: only quick failures count
            return alike and all(outcome.seconds < _QUICK_SECONDS for outcome in last)
        return alike and last[-1].steps <= last[0].steps


class Record:
    """attempts.json: what was tried, on which hosts, and how it ended; written anew after each attempt."""

    def __init__(self, path: str | None, command: list[str]) -> None:
        self.path = path
        self.content: dict = {"command": command, "attempts": []}
        self._ended_at: float | None = None

    def add(self, hosts: list[str], ranks: int, restart: int, outcome: Outcome, decision: str) -> None:
        since_end = None
        if self._ended_at is not None and outcome.first_rank_seconds is not None:
            since_end = round(outcome.started_at + outcome.first_rank_seconds - self._ended_at, 3)
        self._ended_at = outcome.started_at + outcome.seconds
        self.content["attempts"].append(
            {
                "restart": restart,
                "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "hosts": hosts,
                "ranks": ranks,
                "code": outcome.code,
                "seconds": round(outcome.seconds, 3),
                "seconds_to_first_rank": outcome.first_rank_seconds and round(outcome.first_rank_seconds, 3),
                "seconds_from_last_end_to_first_rank": since_end,
                "last_step": outcome.steps if outcome.steps >= 0 else None,
                "failure": outcome.failure and asdict(outcome.failure),
                "decision": decision,
            }
        )
        if self.path is not None:
            write_json_file(self.path, self.content)
