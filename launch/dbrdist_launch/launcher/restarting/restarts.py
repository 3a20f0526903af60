"""Whether a failed job starts again."""

from __future__ import annotations

from dataclasses import dataclass, field

from ... import codes, limits
from ..running.plan import Outcome


@dataclass(eq=False, repr=False)
class Policy:
    """Counts the attempts of a job and decides after each."""

    max_restarts: int = 0
    start_retries: int = 2
    backoff_seconds: float = 0.0  # before the first restart; twice as long before each further one
    most_backoff_seconds: float = 300.0
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
            return True, f"trying the start again ({self.retries} of {self.start_retries})"
        if self.max_restarts == 0:
            return False, ""
        why = self._refusal(outcome)
        if why:
            return False, f"not restarted: {why}"
        self.restarts += 1
        return True, f"restart {self.restarts} of {self.max_restarts}"

    def wait_seconds(self) -> float:
        """How long to wait before the restart that was decided last."""
        doubled = self.backoff_seconds * 2 ** min(self.restarts - 1, 60) if self.restarts else 0.0
        return float(min(doubled, self.most_backoff_seconds))

    def _refusal(self, outcome: Outcome) -> str:
        failure = outcome.failure
        assert failure is not None
        if failure.kind == "start" and not failure.may_retry and not failure.host_trouble:
            return "a start that was refused would be refused again"
        if failure.kind == "deadline":
            return "its time is up"
        if outcome.code in (codes.COMMAND_NOT_FOUND, codes.COMMAND_NOT_RUNNABLE):
            return "the command cannot be run"
        if self.loops():
            return f"the same failure {limits.SAME_FAILURES} times in a row without a step in between"
        return f"all {self.max_restarts} restarts are used up" if self.restarts >= self.max_restarts else ""

    def loops(self) -> bool:
        """Whether the last attempts failed alike and none came further than the one before."""
        last = self.history[-limits.SAME_FAILURES :]
        if len(last) < limits.SAME_FAILURES:
            return False
        failures = [outcome.failure for outcome in last]
        alike = len({(f.kind, f.rank, f.message) if f is not None else None for f in failures}) == 1
        if all(outcome.steps < 0 for outcome in last):  # a program that does not beat: only quick failures count
            return alike and all(outcome.seconds < limits.QUICK_SECONDS for outcome in last)
        return alike and last[-1].steps <= last[0].steps
