"""Puts a Slurm job back into its queue, where another start can come further than this one."""

from __future__ import annotations

import os
import re
import subprocess

from ... import codes
from ..running.plan import Outcome

_BACK = "Slurm job {} is back in the queue"
_SECONDS = (86400, 3600, 60, 1)


def requeue(outcome: Outcome) -> str:
    """Ask Slurm to run this job again later, if that makes sense; what came of it, in a sentence, or ''.

    A job that fails by itself, such as one with a wrong configuration, would fail again, and would be requeued forever.
    What takes the job away from outside, a stop request or a dead host, may not be there at the next start.
    """
    if outcome.failure is None and outcome.code != codes.PREEMPTED:
        return ""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return "--requeue has no effect outside a Slurm job"
    if outcome.failure is not None and outcome.failure.kind != "host_lost":
        return f"Slurm job {job} is not requeued: the program itself failed"
    try:
        known = _known(job)
        if _is_back(known):
            return _BACK.format(job)
        if _was_cancelled(known):
            return f"Slurm job {job} is not requeued: it was cancelled"
        child = _scontrol("requeue", job)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"Slurm job {job} could not be requeued: {error}"
    if child.returncode:
        return f"Slurm job {job} could not be requeued: {child.stderr.strip()}"
    return _BACK.format(job)


def _known(job: str) -> dict[str, str]:
    """What Slurm says of the job; {} where it says nothing."""
    # The first job of an array goes by the number of the array: there are lines of the others too.
    for line in _scontrol("show", "job", "--oneliner", job).stdout.splitlines():
        if line.startswith(f"JobId={job} "):
            return dict(word.split("=", 1) for word in line.split() if "=" in word)
    return {}


def _is_back(known: dict[str, str]) -> bool:
    """Whether Slurm has counted a restart beyond this one: it puts the job back itself."""
    return int(known.get("Restarts", 0)) > int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def _was_cancelled(known: dict[str, str]) -> bool:
    """Whether somebody said scancel, whose signal is the same as that before the end of the time.

    While processes of a job still run, Slurm calls a cancelled job COMPLETING, and likewise one whose time is over.
    """
    if known.get("JobState") != "COMPLETING":
        return known.get("JobState") == "CANCELLED"
    ran, limit = _seconds(known.get("RunTime", "")), _seconds(known.get("TimeLimit", ""))
    return ran is not None and (limit is None or ran < limit)


def _seconds(text: str) -> int | None:
    """1-02:03:04 in seconds; None for UNLIMITED."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    return sum(int(part or 0) * unit for part, unit in zip(match.groups(), _SECONDS)) if match else None


def _scontrol(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["scontrol", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
